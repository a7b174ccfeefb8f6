"""Whether a run fits its GPU, and which activations it keeps: decided by its plan, before anything is compiled.

    run = fit_to_device(run)          train.activation_memory is no "auto" any more, or DeviceError

The mode that recomputes least and fits is taken. The gradients have the same bits in each, so that a run
may be resumed on another GPU with another mode. Besides a plan 5 % of it are left free, as far as it may be wrong.
"""

from dataclasses import replace

from rlnumba.errors import DeviceError
from rlnumba.reporting.stderr import log
from rlnumba.runs.planning.plan import CONTEXT_BYTES, OF_PHASES, Planner, amount
from rlnumba.runs.planning.savings import savings
from rlnumba.runtime import device, memory

# Share of a plan that is left free where there is a choice: it is as accurate as that.
HEADROOM = 0.05
# Recomputed at almost no cost, measured on an H200 (docs/memory.md): "rope" is dearer.
CHEAPEST = ("norm", "swiglu")
# Keys of [train] that are chosen.
CHOSEN_KEYS = ("activation_memory", "recompute_modules", "recompute_num_layers")
# Switches that an error names; `rlnumba plan` lists all.
NAMED_SWITCHES = 3


def fit_to_device(run, communicator=None):
    """The Run with the activations that it keeps on this process's GPU; on the cpu device as it is, which keeps all.

    An engine of the run, which begins next, leaves room for the graphs of its micro-batches.

    communicator: that of the ranks that train together, which all call this and get the same; the
    least free memory of theirs decides. Prints what was chosen and why. Raises DeviceError for a run that does not fit
    the GPU, and what Planner raises.
    """
    if device.name() != "cuda":
        return run
    # Memory that was freed, or is lent by engines that sleep, is there for the run.
    memory.reclaim()
    device.xp().get_default_memory_pool().free_all_blocks()
    planner = Planner(run, True, device.memory_info()[1], keeps_data=True)
    available = available_bytes(*device.memory_info(), planner.num_sharing)
    is_first = True
    if communicator is not None:
        available, is_first = min(communicator.objects(available)), communicator.rank == 0
    fitted, plan, line = fit(planner, run, available)
    memory.expect("graphs", plan.extra.get("graphs", 0))
    if line is not None and is_first:
        log(line)
    return fitted


def available_bytes(free, total, num_sharing=1):
    """Bytes that a process may have of a GPU, its CUDA context included, which exists already.

    free, total: the GPU's bytes, by the driver. num_sharing: processes that share it alike.
    """
    return (free + min(total - free, num_sharing * CONTEXT_BYTES)) // num_sharing


def fit(planner, run, available):
    """(the Run with the activations that it keeps, its Plan, a line that says so or None) for so many available bytes.

    Raises DeviceError if no mode that the run allows fits.
    """
    plan, line = planned_choice(planner, available)
    if plan.needed > available:
        raise DeviceError(does_not_fit(planner, plan, available))
    return with_train(run, **{name: getattr(planner.run.train, name) for name in CHOSEN_KEYS}), plan, line


def planned_choice(planner, available):
    """(Plan of a run whose activations are chosen for so many available bytes of a GPU, the line that says so or None).

    planner.run has what is chosen, where it is the planner's to choose.
    """
    if not planner.on_gpu or not planner.run.train.chooses_activations:
        return planner.plan(), None
    keys, plan, full = choose_activations(planner, available)
    planner.run = with_train(planner.run, **keys)
    return plan, describe_choice(keys, plan, full, available)


def with_train(run, **keys):
    """A Run with these keys of [train]."""
    return replace(run, train=replace(run.train, **keys))


def has_headroom(plan, available):
    """Whether a Plan fits, training with what it may be wrong by and what is left to the driver: bool."""
    training = plan.phases["training"]
    spare = HEADROOM * (training - plan.extra.get("CUDA context", 0)) + memory.MARGIN_BYTES
    return max(plan.needed, training + spare) <= available


def activation_modes(train):
    """Keys of [train] for what the backward finds, dicts, the fastest first, before recompute_num_layers is above 0.

    train.recompute_modules: what may be recomputed alone.
    """
    modules = list(train.recompute_modules)
    cheapest = [name for name in modules if name in CHEAPEST]
    found = [{"activation_memory": "full"}]
    for part in (cheapest, modules):
        keys = {"activation_memory": "selective", "recompute_modules": part}
        if part and keys not in found:
            found.append(keys)
    return found


def choose_activations(planner, available):
    """(keys of [train], Plan, Plan with nothing recomputed) of the fastest mode that fits so many available bytes; if
    none does, of the most frugal one."""

    def planned(keys):
        return planner.plan(with_train(planner.run, **keys))

    full = None
    for keys in activation_modes(planner.run.train):
        plan = planned(keys)
        full = full or plan
        if has_headroom(plan, available):
            return keys, plan, full
    # Between the last of these and layers' inputs alone: the fewest layers, each of which saves as much.
    minimal = {"activation_memory": "minimal"}, planned({"activation_memory": "minimal"})
    if not has_headroom(minimal[1], available):
        return *min(minimal, (keys, plan), key=lambda pair: pair[1].needed), full
    chosen, fewest, most = minimal, 1, planner.config.num_hidden_layers - 1
    of_layers = {"activation_memory": "selective", "recompute_modules": list(planner.run.train.recompute_modules)}
    while fewest <= most:
        count = (fewest + most) // 2
        keys = of_layers | {"recompute_num_layers": count}
        plan = planned(keys)
        if has_headroom(plan, available):
            chosen, most = (keys, plan), count - 1
        else:
            fewest = count + 1
    return *chosen, full


def describe_choice(keys, plan, full, available):
    """The choice of activations and its reason, one line."""
    free = f"{amount(plan.needed)} needed, {amount(available)} there"
    if keys["activation_memory"] == "full":
        return f"activations: all are kept: {free}"
    if keys["activation_memory"] == "minimal":
        what = "layers are recomputed"
    else:
        what = f"{', '.join(keys['recompute_modules'])} recomputed"
        if keys.get("recompute_num_layers"):
            what += f", and all of {keys['recompute_num_layers']} layers"
    return f"activations: {what}: {free}, and {amount(full.needed)} without"


def does_not_fit(planner, plan, available):
    """The line of the error of a run that does not fit."""
    # Graphs are made of what is left.
    regions = {name: size for name, size in (plan.regions | plan.extra).items() if name != "graphs"}
    if plan.takes_turns:
        phase = "training" if plan.phases["training"] - plan.extra.get("graphs", 0) == plan.needed else "generation"
        regions["kv"] = plan.least_kv
        others = [name for of_phase, names in OF_PHASES.items() if of_phase != phase for name in names]
        regions = {name: size for name, size in regions.items() if name not in others}
    largest = sorted(regions.items(), key=lambda pair: -pair[1])
    text = f"the run needs {amount(plan.needed)} of GPU memory, and {amount(available)} are there: "
    text += ", ".join(f"{name} {amount(size)}" for name, size in largest)
    found = savings(planner, plan)[:NAMED_SWITCHES]
    if found:
        text += "; what saves most: " + ", ".join(f"{switch} {amount(saved)}" for switch, saved in found)
    return text + " (rlnumba plan --fit has keys that fit)"
