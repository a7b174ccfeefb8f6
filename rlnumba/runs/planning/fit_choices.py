"""Keys of a run file with which it fits a GPU, the fastest first: `rlnumba plan --fit`.

Each choice is the run with a mode of its activations, micro-batches of a part of the rows, the optimizer's state on the
GPU or in host memory, and one of VARIANTS. The plan decides what fits. This rule decides what is the fastest: seconds
of an optimizer step of T tokens and M micro-batches on a GPU, for P parameters:

    6 P T r / 4.0e14     arithmetic, at the rate of an H200; r: what recomputation costs, see RECOMPUTED
    14 P M / 4.2e12      each micro-batch reads the weights three times and adds to float32 gradients
    2 S / 4.2e12         S bytes of the optimizer's state are read and written,
    2 S / 5.0e10         or travel to the GPU and back from host memory
    G (w - 1)            a generation, G = twice the arithmetic, whose sequences need w times the room of the KV cache

The rates are measured (bench/results/h200.md), the rule's times are to compare choices by: a run is as fast as its GPU.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from rlnumba.config.lora import LoraConfig
from rlnumba.config.writing import toml_value
from rlnumba.errors import ConfigError, DeviceError
from rlnumba.runs.planning.fit import activation_modes, has_headroom
from rlnumba.runs.planning.plan import GIB, Plan, amount
from rlnumba.runs.planning.savings import halved_batch, shown, with_changes
from rlnumba.runtime import device

# Seconds relative to those with nothing recomputed: 147.7 ms; 148.4, 149.7 and 184.0 of 8 x 2,048 tokens of
# Qwen3-0.6B's shape on an H200. Each layer that is recomputed as a whole adds its part of the last.
RECOMPUTED = {"full": 1.0, "cheapest": 1.005, "selective": 1.014, "minimal": 1.246}
# Rates of the same H200: arithmetic operations, bytes of its memory and bytes of host memory a second.
OPERATIONS, MEMORY_BYTES, HOST_BYTES = 4.0e14, 4.2e12, 5.0e10
# Bytes of a parameter that a micro-batch reads and writes, beside what follows from its tokens.
MICRO_BATCH_BYTES = 14
# Seconds of a generation whose sequences all have room, relative to the arithmetic of training on them.
GENERATION = 2.0
# Effects of a choice on the weights that the run ends with.
SAME, ROUNDED, OTHER = "same bits", "rounding", "other result"
ORDER = (SAME, ROUNDED, OTHER)
# Parts of the layers that are recomputed as a whole.
PARTS = (1 / 4, 1 / 2, 3 / 4)


class Choice(NamedTuple):
    """Keys that fit: changes {section: {key: value}, or "lora": LoraConfig}; seconds by the rule; result in ORDER."""

    changes: dict
    plan: Plan
    seconds: float
    result: str


class StepChoice(NamedTuple):
    """A way to compute a step: keys of [train], what recomputation costs, how many micro-batches there are for one of
    the file, whether the state is in host memory."""

    keys: dict
    recomputed: float
    pieces: int
    offloads: bool


def fastest_choices(planner, run, available):
    """The fastest Choice of each variant of `run`, the Planner's as its file has it, that fits so many available bytes.

    A list: those that change no bit first, then by their seconds, each faster or smaller than all before it. Raises
    DeviceError, naming the least, if none fits.
    """
    search, found = Search(planner, run, available), []
    for changes, result in variants(planner, run):
        # Micro-batches as in the file, and any.
        for most_pieces in (1, math.inf) if result != OTHER else (math.inf,):
            choice = search.fastest(changes, result, most_pieces)
            found += [choice] if choice is not None and choice not in found else []
    if not found:
        least = min(search.choices.values(), key=lambda choice: choice.plan.needed)
        raise DeviceError(
            f"no keys that rlnumba plan knows fit {amount(available)}: {amount(least.plan.needed)} are needed with "
            f"{text_of(least.changes)}"
        )
    listed = []
    for choice in sorted(found, key=lambda choice: (ORDER.index(choice.result), choice.seconds)):
        if all(choice.seconds < each.seconds or choice.plan.needed < each.plan.needed for each in listed):
            listed.append(choice)
    return listed


class Search:
    """The search for choices: what was planned for it. choices: {changes and StepChoice as text: Choice}."""

    def __init__(self, planner, run, available):
        self.planner, self.run, self.available = planner, run, available
        self.choices, self.plan = {}, planner.plan()

    def fastest(self, changes, result, most_pieces):
        """The fastest Choice that fits of a variant, or None. most_pieces: those of the file's micro-batch."""
        run = with_changes(self.run, changes)
        schedules = [each for each in schedules_of(run.train, self.planner) if each.pieces <= most_pieces]
        rate = arithmetic_seconds(self.planner, self.plan, run)
        # Whether so many micro-batches, with the state on the GPU or not, fit in the most frugal mode, their last.
        last, may_fit = {(each.pieces, each.offloads): each for each in schedules}, {}
        for schedule in sorted(schedules, key=lambda each: known_seconds(each, *rate)):
            group = schedule.pieces, schedule.offloads
            if not may_fit.get(group, True):
                continue
            choice = self._choice(changes, result, schedule, rate)
            if has_headroom(choice.plan, self.available):
                return choice
            if group not in may_fit:
                may_fit[group] = has_headroom(self._choice(changes, result, last[group], rate).plan, self.available)
        return None

    def _choice(self, changes, result, schedule, rate):
        """The Choice of a variant and a StepChoice, whether it fits or not."""
        key = repr((changes, schedule))
        if key not in self.choices:
            train = with_changes(self.run, changes).train
            changes = changes | {"train": changes.get("train", {}) | schedule.keys}
            changed = with_changes(self.run, changes).resolved()
            plan = self.planner.plan(replace(changed, deploy=self.planner.run.deploy))
            seconds = known_seconds(schedule, *rate) + state_seconds(plan)
            seconds += generation_seconds(self.run, plan, rate, self.available)
            result = max(result, result_of_pieces(train, schedule.pieces), key=ORDER.index)
            self.choices[key] = Choice(changes, plan, seconds, result)
        return self.choices[key]


def variants(planner, run):
    """[(changes, what they do to the result)] of the optimizer, the dtype, and of what is trained."""
    train, dtype, found = run.train, planner.dtype_of(run), [({}, SAME)]

    def add(result, **keys):
        changes = {"train": keys}
        try:
            with_changes(run, changes)
        except ConfigError:
            return
        found.append((changes, result))

    in_backward = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
    if not train.optimizer_in_backward and run.lora is None and planner.trainer.trains_lm_head:
        # Gradients are of the model's dtype, and not clipped.
        result = OTHER if train.max_grad_norm else SAME if dtype == "float32" else ROUNDED
        add(result, **in_backward)
    if train.optim != "adamw_8bit":
        add(OTHER, optim="adamw_8bit")
        add(OTHER, optim="adamw_8bit", **in_backward)
    if dtype == "bfloat16" and train.master_weights:
        add(OTHER, optim="adamw_8bit", master_weights=False, **in_backward)
    if dtype == "float32":
        add(OTHER, dtype="bfloat16")
    if run.lora is None and planner.trainer.trains_lm_head:
        found.append(({"lora": LoraConfig()}, OTHER))
    if run.generates and not run.deploy.num_infer_gpus:
        if run.generates_beside:
            # Generation and training share the GPU at every moment.
            for divisor in (2, 4):
                share = round(run.engine.gpu_memory_utilization / divisor, 3)
                found.append(({"engine": {"gpu_memory_utilization": share}}, SAME))
        elif run.engine.enable_sleep_mode is False:
            found.append(({"engine": {"enable_sleep_mode": True}}, SAME))
    return found


def schedules_of(train, planner):
    """The StepChoices of a [train] section: list."""
    modes, layers = activation_modes(train), planner.config.num_hidden_layers
    costs = [RECOMPUTED["full"], *([RECOMPUTED["cheapest"]] if len(modes) == 3 else []), RECOMPUTED["selective"]]
    of_modes = list(zip(modes, costs, strict=False))
    for count in sorted({math.ceil(part * layers) for part in PARTS}):
        cost = RECOMPUTED["selective"] + (RECOMPUTED["minimal"] - RECOMPUTED["selective"]) * count / layers
        keys = {"activation_memory": "selective", "recompute_modules": list(train.recompute_modules)}
        of_modes.append((keys | {"recompute_num_layers": count}, cost))
    of_modes.append(({"activation_memory": "minimal"}, RECOMPUTED["minimal"]))
    # A key of the file must not contradict the mode.
    unset = {"recompute_num_layers": 0} if train.recompute_num_layers else {}
    found, batch, pieces = [], {}, 1
    while True:
        for offloads in {train.offload_optimizer, True}:
            offload = {"offload_optimizer": True} if offloads and not train.offload_optimizer else {}
            found += [StepChoice(unset | keys | batch | offload, cost, pieces, offloads) for keys, cost in of_modes]
        halved = halved_batch(train)
        if not halved or (train.optimizer_in_backward and train.global_batch_size is None):
            return found
        try:
            train = replace(train, **halved)
        except ConfigError:
            return found
        batch, pieces = batch | halved, 2 * pieces


def result_of_pieces(train, pieces):
    """The effect of micro-batches of so many parts on the result: sums round otherwise, and bnpo's are other means."""
    if pieces == 1:
        return SAME
    return OTHER if getattr(train, "loss_type", None) == "bnpo" else ROUNDED


def arithmetic_seconds(planner, plan, run):
    """(seconds of a step's arithmetic, of one of its micro-batches' bytes, micro-batches), with nothing recomputed.

    plan: that of the planner's run. run: the run as its file has it, or a variant.
    """
    parameters = plan.regions["weights"] / device.dtype(planner.dtype_of(planner.run)).itemsize
    # Those of all ranks together are shared.
    shares = 1 if run.train.global_batch_size is None else run.num_ranks
    batches = max(run.train.micro_batches_per_step / shares, 1)
    # With an adapter no gradients of the weights are computed.
    operations = 6 if run.lora is None else 4
    return operations * parameters * plan.tokens * batches / OPERATIONS, MICRO_BATCH_BYTES * parameters, batches


def known_seconds(schedule, arithmetic, micro_batch_bytes, batches):
    """Seconds of a step, as far as a StepChoice says without a plan; the state's transfers are taken for those of 12
    bytes a parameter."""
    transfers = 2 * 12 / MICRO_BATCH_BYTES * micro_batch_bytes / HOST_BYTES if schedule.offloads else 0.0
    return arithmetic * schedule.recomputed + batches * schedule.pieces * micro_batch_bytes / MEMORY_BYTES + transfers


def state_seconds(plan):
    """Seconds in which the optimizer's state is read and written on the GPU."""
    return 0.0 if plan.host else 2 * plan.regions.get("moments", 0) / MEMORY_BYTES


def generation_seconds(run, plan, rate, available):
    """Seconds of a generation beyond those that it takes where the KV cache has room for all of its sequences."""
    if not plan.least_kv:
        return 0.0
    sequences = min(run.train.generation.num_completions / run.num_ranks, run.engine.max_num_seqs)
    room = plan.regions.get("kv", 0)
    if plan.takes_turns:
        room = min(room, available - plan.phases["generation"] + room)
    needed = plan.least_kv * max(sequences, 1)
    return GENERATION * rate[0] * max(needed / max(room, plan.least_kv) - 1, 0.0)


def text_of(changes):
    """Changes as one would write them as options: str."""
    parts = []
    for section, keys in changes.items():
        if section == "lora":
            parts.append(f"[lora] with r = {keys.r}")
        else:
            parts += [f"{section}.{name} = {shown(value)}" for name, value in keys.items()]
    return ", ".join(parts)


def toml_of(changes):
    """The lines of TOML of changes: list of str."""
    lines = []
    for section, keys in changes.items():
        keys = {"r": keys.r} if section == "lora" else keys
        lines += [f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in keys.items())]
    return lines


def describe_choices(choices):
    """The lines that `rlnumba plan --fit` prints: a table, its times relative to the first, and the TOML of that."""
    lines = [f"{'time':>6}{'GiB':>9}   {'result':<14}keys"]
    for choice in choices:
        size = choice.plan.needed / GIB
        lines.append(
            f"{choice.seconds / choices[0].seconds:6.2f}{size:9.2f}   {choice.result:<14}{text_of(choice.changes)}"
        )
    return [*lines, "", "# the first of these, for the run file:", *toml_of(choices[0].changes)]
