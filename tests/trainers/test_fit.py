"""Which activations a run keeps follows from its plan and the free memory, and a run that does not fit is refused."""

import dataclasses
import shutil
import tomllib
from types import SimpleNamespace

import pytest

from rlnumba import cli, data
from rlnumba.config import GRPOConfig, load_run, to_toml
from rlnumba.errors import DeviceError
from rlnumba.model.config import ModelConfig
from rlnumba.model.weights import write_json
from rlnumba.runs import kept_data
from rlnumba.runs.planning import fit, fit_choices
from rlnumba.runs.planning.fit import activation_modes, available_bytes, fit_to_device, has_headroom
from rlnumba.runs.planning.plan import CONTEXT_BYTES, Plan, Planner
from rlnumba.runs.planning.savings import savings
from rlnumba.runtime import device, memory
from rlnumba.trainers import sft
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.sft import num_tokens, run_sft
from tests.trainers.runs import MODEL, grpo_run, sft_run

pytestmark = pytest.mark.skipif(device.name() != "cpu", reason="the memory of the GPU is made up")
GIB = 1 << 30
LAYERS = 6
ALL = ["norm", "rope", "swiglu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of six layers, of which there is no weight."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 256}
    config = dataclasses.replace(ModelConfig.from_folder(MODEL), **sizes, intermediate_size=1024)
    write_json(folder / "config.json", config.to_dict())
    return str(folder)


@pytest.fixture(scope="module")
def plans():
    """{what a Plan follows from: Plan}, so that each is made once."""
    return {}


class KnownPlanner(Planner):
    """A Planner that makes no plan twice."""

    def plan(self, run=None, rank=0):
        run = run or self.run
        key = repr((run.model, run.train, run.lora, rank))
        if key not in self.known:
            self.known[key] = super().plan(run, rank)
        return self.known[key]


@pytest.fixture
def planner_of(folder, plans, tmp_path):
    def make(**train):
        options = {"gradient_checkpointing": None, "max_steps": 1, "per_device_train_batch_size": 8}
        run = dataclasses.replace(sft_run(tmp_path / "run", **options | train), model=folder)
        planner = KnownPlanner(run, True, 80 * GIB)
        planner.known = plans
        return planner

    return make


def just_enough(plan):
    """The fewest bytes for which a Plan is chosen."""
    needed = plan.phases["training"]
    return int(needed + fit.HEADROOM * (needed - plan.extra["CUDA context"])) + memory.MARGIN_BYTES + 1


def test_the_mode_that_recomputes_least_and_fits(planner_of):
    planner = planner_of()
    run = planner.run
    assert activation_modes(run.train) == [
        {"activation_memory": "full"},
        {"activation_memory": "selective", "recompute_modules": ["norm", "swiglu"]},
        {"activation_memory": "selective", "recompute_modules": ALL},
    ]
    modes = activation_modes(run.train)
    modes += [modes[-1] | {"recompute_num_layers": count} for count in (2, 3, LAYERS - 1)]
    modes.append({"activation_memory": "minimal"})
    plans = [planner.plan(fit.with_train(run, **keys)) for keys in modes]
    sizes = [plan.total for plan in plans]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    lines = []
    for keys, plan in zip(modes, plans, strict=True):
        planner.run = run
        fitted, _, line = fit.fit(planner, run, just_enough(plan))
        assert {name: getattr(fitted.train, name) for name in keys} == keys
        assert fit.with_train(fitted, activation_memory="auto", recompute_modules=ALL, recompute_num_layers=0) == run
        lines.append(line)
        # A byte less is the next mode's, the number of layers between these included.
        planner.run = run
        keys_of_less, found, _ = fit.choose_activations(planner, just_enough(plan) - 2)
        assert keys_of_less != keys and found.total < plan.total or keys == modes[-1]
    assert lines[0].startswith("activations: all are kept: 0.") and lines[0].endswith(" GiB there")
    assert lines[1].startswith("activations: norm, swiglu recomputed: ") and lines[1].endswith(" GiB without")
    assert "norm, rope, swiglu recomputed, and all of 3 layers: " in lines[4]
    assert lines[6].startswith("activations: layers are recomputed: ")


def test_modules_that_a_run_names_are_those_that_are_recomputed(planner_of):
    for modules, parts in ((["swiglu", "rope"], [["swiglu"], ["swiglu", "rope"]]), (["rope"], [["rope"]]), ([], [])):
        train = planner_of(recompute_modules=modules).run.train
        assert [keys["recompute_modules"] for keys in activation_modes(train)[1:]] == parts


@pytest.mark.parametrize("keys", [{"gradient_checkpointing": False}, {"activation_memory": "minimal"}], ids=str)
def test_an_explicit_choice_is_kept_and_refused_where_it_does_not_fit(planner_of, keys):
    planner = planner_of(**keys)
    plan = planner.plan()
    assert fit.fit(planner, planner.run, plan.needed) == (planner.run, plan, None)
    with pytest.raises(DeviceError) as error:
        fit.fit(planner, planner.run, plan.needed - 1)
    line = str(error.value)
    assert line.startswith("the run needs 0.") and "\n" not in line
    assert " GiB are there: CUDA context 0.59 GiB, " in line
    switches = savings(planner, plan)[: fit.NAMED_SWITCHES]
    found = line.partition("what saves most: ")[2].removesuffix(" (rlnumba plan --fit has keys that fit)")
    assert found == ", ".join(f"{switch} {fit.amount(saved)}" for switch, saved in switches) and len(switches) == 3
    assert ("gradient_checkpointing = true" in line) == (keys == {"gradient_checkpointing": False})


def test_the_most_frugal_mode_runs_without_headroom_and_is_refused_without_room(planner_of):
    planner = planner_of()
    run = planner.run
    minimal = planner.plan(fit.with_train(run, activation_memory="minimal"))
    assert not has_headroom(minimal, minimal.needed)
    assert fit.fit(planner, run, minimal.needed)[0].train.activation_memory == "minimal"
    planner.run = run
    with pytest.raises(DeviceError, match="^the run needs"):
        fit.fit(planner, run, minimal.needed - 1)


def test_the_cache_of_keys_and_values_takes_what_there_is(tmp_path):
    """Where it does not share the GPU with training; and a sequence of it must fit."""
    run = grpo_run(tmp_path / "run", gradient_checkpointing=False)
    plan = Planner(run, True, 80 * GIB).plan()
    # Prompts of up to 24 tokens, and 8: of 2 layers, 2 heads of 16 float32 each, k and v.
    assert plan.takes_turns and plan.least_kv == -(-(24 + 8) // 16) * 16 * 2 * 2 * 2 * 16 * 4
    of_generation = plan.phases["generation"] - plan.regions["kv"] + plan.least_kv + (512 << 20)
    # Without graphs it trains, too.
    assert plan.extra["graphs"] > 0
    assert plan.needed == max(plan.phases["training"], of_generation) - plan.extra["graphs"]
    for keys in ({"enable_sleep_mode": False}, {"num_gpu_blocks_override": 1 << 20}):
        engine = dataclasses.replace(run.engine, **keys)
        plan = Planner(dataclasses.replace(run, engine=engine), True, 80 * GIB).plan()
        assert plan.needed == plan.total - plan.extra["graphs"]


def test_an_engine_leaves_room_for_the_graphs_of_its_run(tmp_path, monkeypatch):
    """Until the run has ended."""
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    gpu = SimpleNamespace(
        name=lambda: "cuda",
        memory_info=lambda: (79 * GIB, 80 * GIB),
        xp=lambda: SimpleNamespace(get_default_memory_pool=lambda: pool),
    )
    with monkeypatch.context() as patch:
        patch.setattr(fit, "device", gpu)
        run = fit.fit_to_device(grpo_run(tmp_path / "run", max_steps=1))
    assert memory.expected_bytes() == Planner(run, True, 80 * GIB).plan().extra["graphs"] > 0
    run_grpo(run)
    assert memory.expected_bytes() == 0


def test_free_memory_of_processes():
    """The context of this process is part of a plan; what others have is taken."""
    assert available_bytes(79 * GIB, 80 * GIB) == 79 * GIB + CONTEXT_BYTES
    assert available_bytes(80 * GIB - 1, 80 * GIB) == 80 * GIB
    assert available_bytes(60 * GIB, 80 * GIB) == 60 * GIB + CONTEXT_BYTES
    assert available_bytes(78 * GIB, 80 * GIB, 2) == 39 * GIB + CONTEXT_BYTES


def test_generation_that_needs_more_than_training_decides():
    sizes = {"weights": GIB, "activations": GIB, "kv": 8 * GIB}
    plan = Plan(sizes, {}, 1, {}, 0, 0, takes_turns=True, least_kv=8 * GIB)
    assert plan.phases == {"training": 2 * GIB, "generation": 9 * GIB}
    assert not has_headroom(plan, 9 * GIB - 1) and has_headroom(plan, 9 * GIB)


def test_where_no_mode_has_headroom_the_one_that_needs_least_is_taken(tmp_path):
    """Of a model of few layers, which keeps more where each is recomputed whole."""

    class Sizes:
        run = sft_run(tmp_path / "run", activation_memory="auto")
        of_modes = {"full": 5 * GIB, "selective": 3 * GIB, "minimal": 4 * GIB}

        def plan(self, run):
            return Plan({"activations": self.of_modes[run.train.activation_memory]}, {}, 1, {}, 0, 0)

    keys, plan, full = fit.choose_activations(Sizes(), 3 * GIB)
    assert keys["activation_memory"] == "selective" and plan.needed == 3 * GIB and full.needed == 5 * GIB
    Sizes.of_modes["minimal"] = 2 * GIB
    assert fit.choose_activations(Sizes(), GIB)[0] == {"activation_memory": "minimal"}


def test_what_is_kept_is_for_its_own_key_once():
    kept_data.keep("rows of a", 1)
    assert [kept_data.taken(key) for key in ("rows of b", "rows of a", "rows of a")] == [None, 1, None]


class OfTwoRanks:
    """A communicator of two ranks whose GPUs have so much free."""

    rank = 0

    def __init__(self, other):
        self.other = other

    def objects(self, value):
        return [value, self.other]


def test_ranks_choose_by_the_least_free_memory(planner_of, monkeypatch, capsys):
    planner = planner_of()
    plans = [planner.plan(fit.with_train(planner.run, **keys)) for keys in activation_modes(planner.run.train)]
    free = just_enough(plans[0]) - CONTEXT_BYTES
    gpu = type("Gpu", (), {"name": lambda: "cuda", "memory_info": lambda: (free, 80 * GIB), "xp": lambda: Pool})
    monkeypatch.setattr(fit, "device", gpu)
    assert fit_to_device(planner.run).train.activation_memory == "full"
    assert capsys.readouterr().err.startswith("rlnumba: activations: all are kept: ")
    ranks = OfTwoRanks(just_enough(plans[2]))
    fitted = fit_to_device(planner.run, ranks).train
    assert (fitted.activation_memory, fitted.recompute_modules, fitted.recompute_num_layers) == ("selective", ALL, 0)
    assert "norm, rope, swiglu recomputed: " in capsys.readouterr().err
    ranks.rank = 1
    fit_to_device(planner.run, ranks)
    assert not capsys.readouterr().err
    # Its rows were kept for the run.
    rows = kept_data.taken(kept_data.rows_key(fit.with_train(planner.run, activation_memory="full")))
    assert list(map(num_tokens, rows)) == list(map(num_tokens, planner.rows(planner.run)))
    assert kept_data.taken(kept_data.rows_key(planner.run)) is None


class Pool:
    """CuPy's module, as far as its memory pool is asked for."""

    get_default_memory_pool = free_all_blocks = classmethod(lambda cls: cls)


def test_a_run_on_the_cpu_device_is_left_as_it_is(planner_of):
    run = planner_of().run
    assert fit_to_device(run) is run and run.train.kept_activations == "full"


def test_the_weights_do_not_depend_on_the_mode(tmp_path):
    weights = []
    for keys in activation_modes(grpo_run(tmp_path / "run").train)[::2] + [{"activation_memory": "minimal"}]:
        folder = tmp_path / keys["activation_memory"]
        run_grpo(grpo_run(folder, max_steps=2, beta=0.1, gradient_checkpointing=None, **keys))
        weights.append((folder / "final" / "model.safetensors").read_bytes())
    assert len(weights) == 3 and weights[0] == weights[1] == weights[2]


ONE_STEP = {"gradient_checkpointing": True, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "dtype": "bfloat16"}


class MadeUpPlanner(Planner):
    """A Planner of a model of a million parameters, whose plans are sums of a few terms."""

    def plan(self, run=None, rank=0):
        train, tokens = (run or self.run).train, (run or self.run).train.per_device_train_batch_size * 500
        of_modules = {"norm": 4, "rope": 6, "swiglu": 2}
        kept = {"full": 20, "minimal": 1, "selective": 20 - sum(map(of_modules.get, train.recompute_modules))}
        layers = [1] * train.recompute_num_layers + [kept[train.kept_activations]] * LAYERS
        state = {"adamw_torch": 12, "adamw_8bit": 6}[train.optim] * 1_000_000
        regions = {"weights": 2_000_000, "grads": (1 if train.optimizer_in_backward else 4) * 1_000_000}
        regions |= {"moments": 0 if train.offload_optimizer else state}
        regions |= {"activations": 100 * tokens * sum(layers[:LAYERS])}
        return Plan(regions, {}, tokens, {"CUDA context": 100_000}, state if train.offload_optimizer else 0, 0)


def test_the_fastest_of_the_keys_that_fit(planner_of, tmp_path):
    """As a search of all schedules finds it; and each choice fits when its lines are in the file."""
    run = planner_of(**ONE_STEP).run
    planner = MadeUpPlanner(run, True, 80 * GIB)
    schedules = fit_choices.schedules_of(run.train, planner)
    assert len(schedules) == 7 * 4 * 2
    rate = fit_choices.arithmetic_seconds(planner, planner.plan(), run)
    plans = [planner.plan(fit.with_train(run, **each.keys)) for each in schedules]
    seconds = [
        fit_choices.known_seconds(each, *rate) + fit_choices.state_seconds(plan)
        for each, plan in zip(schedules, plans, strict=True)
    ]
    seen = set()
    for available in map(just_enough, plans[::6]):
        found = fit_choices.fastest_choices(planner, run, available)
        fitting = [i for i in range(len(plans)) if has_headroom(plans[i], available)]
        of_run = [c for c in found if c.changes.keys() == {"train"} and not c.changes["train"].keys() & OF_VARIANTS]
        for result, most in ((fit_choices.SAME, 1), (fit_choices.ROUNDED, 8)):
            of_result = [choice.seconds for choice in of_run if choice.result == result]
            expected = min((i for i in fitting if schedules[i].pieces <= most), key=seconds.__getitem__, default=None)
            # Parts of micro-batches are listed where they make it faster.
            is_listed = expected is not None and (most == 1 or schedules[expected].pieces > 1)
            before = [c for c in found if c.result != fit_choices.OTHER and c not in of_run]
            if is_listed and not of_result and most > 1:
                # Gradients of a layer at a time take less time and memory.
                assert any(choice.seconds <= seconds[expected] for choice in before)
                continue
            # State on the GPU is read at a rate that the order of the search does not know of.
            assert of_result == ([pytest.approx(seconds[expected], rel=0.02)] if is_listed else [])
        results = [fit_choices.ORDER.index(choice.result) for choice in found]
        assert results == sorted(results)
        sizes = [(choice.seconds, choice.plan.needed) for choice in found]
        for later, (time, size) in enumerate(sizes):
            assert all(time < each[0] or size < each[1] for each in sizes[:later])
        for choice in found:
            (tmp_path / "own.toml").write_text(to_toml(run))
            (tmp_path / "choice.toml").write_text("\n".join(fit_choices.toml_of(choice.changes)))
            changed = load_run("sft", [tmp_path / "own.toml", tmp_path / "choice.toml"])
            assert has_headroom(planner.plan(changed), available)
            assert changed.train.per_device_train_batch_size * changed.train.gradient_accumulation_steps == 8
            seen.add((choice.result, changed.train.kept_activations, changed.train.offload_optimizer))
    assert len(seen) >= 8
    lines = fit_choices.describe_choices(found)
    assert lines[0].split() == ["time", "GiB", "result", "keys"] and lines[1].startswith("  1.00 ")
    for line, choice in zip(lines[1:], found, strict=False):
        assert line.endswith(f"   {choice.result:<14}{fit_choices.text_of(choice.changes)}")
    with pytest.raises(DeviceError, match=r"^no keys that rlnumba plan knows fit 1.91 MiB: .* are needed with train"):
        fit_choices.fastest_choices(planner, run, 2_000_000)


# Keys that a schedule does not have.
OF_VARIANTS = {"optim", "optimizer_in_backward", "dtype", "master_weights"}


def test_what_changes_the_result_is_said(planner_of):
    def results(**train):
        planner = planner_of(**ONE_STEP | train)
        return {fit_choices.text_of(changes): result for changes, result in fit_choices.variants(planner, planner.run)}

    in_backward = "train.optimizer_in_backward = true, train.max_grad_norm = 0.0"
    eight_bits = 'train.optim = "adamw_8bit"'
    everything = {
        "": "same bits", in_backward: "rounding", eight_bits: "other result",
        f"{eight_bits}, {in_backward}": "other result", "[lora] with r = 16": "other result",
        f"{eight_bits}, train.master_weights = false, {in_backward}": "other result",
    }  # fmt: skip
    assert results() == everything
    assert results(dtype="float32")[in_backward] == "same bits"
    assert results(max_grad_norm=1.0)[in_backward] == "other result"
    assert in_backward not in results(gradient_accumulation_steps=2)
    for loss_type, result in (("dapo", "rounding"), ("bnpo", "other result")):
        assert fit_choices.result_of_pieces(GRPOConfig(loss_type=loss_type), 2) == result
        assert fit_choices.result_of_pieces(GRPOConfig(loss_type=loss_type), 1) == "same bits"


def test_what_recomputation_and_transfers_cost():
    """Of 16,384 tokens of a model of 0.6 B parameters: 147.7 ms, and 12 bytes a parameter there and back at 50 GB/s."""
    rate = 16_384 * 6 * 0.6e9 / 4e14, 14 * 0.6e9, 1
    kept = fit_choices.StepChoice({}, 1.0, 1, False)
    assert fit_choices.known_seconds(kept, *rate) == pytest.approx(0.147456 + 0.002)
    assert fit_choices.known_seconds(kept._replace(recomputed=1.246), *rate) == pytest.approx(0.147456 * 1.246 + 0.002)
    assert fit_choices.known_seconds(kept._replace(pieces=4), *rate) == pytest.approx(0.147456 + 0.008)
    assert fit_choices.known_seconds(kept._replace(offloads=True), *rate) == pytest.approx(0.147456 + 0.002 + 0.288)


def test_the_command(planner_of, tmp_path, capfd):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(planner_of(**ONE_STEP).run))
    arguments = ["plan", "--config", str(file), "--trainer", "sft", "--fit"]
    assert cli.run(arguments) == 2
    assert capfd.readouterr().err == "rlnumba: plan: this machine has no GPU; --fit needs --gpu-memory GIB\n"
    assert cli.run([*arguments, "--gpu-memory", "80"]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"sft of {planner_of().run.model} on a GPU with 80.00 GiB\n\n  time ")
    assert tomllib.loads(out.partition("# the first")[2].partition("\n")[2]) == {"train": {"activation_memory": "full"}}


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_run_trains_on_what_its_plan_has_read(tmp_path, monkeypatch, kind):
    run = {"sft": sft_run, "grpo": grpo_run}[kind](tmp_path / "run", max_steps=1)
    Planner(run, True, 80 * GIB, keeps_data=True).plan()

    def read_again(*arguments):
        raise AssertionError("the file is read a second time")

    monkeypatch.setattr(sft, "load_sft", read_again)
    monkeypatch.setattr(data, "load_prompts", read_again)
    train = {"sft": run_sft, "grpo": run_grpo}[kind]
    train(run)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    with pytest.raises(AssertionError, match="a second time"):
        train(run)
