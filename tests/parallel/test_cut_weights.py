"""A rank's rows of weights that all ranks train, for their common rollout; the runs are in test_trainers.py."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import AsyncConfig, DeployConfig, EngineConfig, QuantizationConfig
from rlnumba.engine import LLM, SamplingParams
from rlnumba.engine.runner import Runner
from rlnumba.errors import CommunicationError, ConfigError, DeviceError, RankError, UserError
from rlnumba.kernels.quantized.formats import FORMATS, unpack_codes, unpack_scales
from rlnumba.kernels.quantized.ops import QuantizedWeight
from rlnumba.model.quantized import rows
from rlnumba.model.quantized.weights import weights_in
from rlnumba.model.shard import Range, Shard
from rlnumba.model.transformer import load_model, save_model
from rlnumba.parallel import launch
from rlnumba.parallel.cut_weights import CutWeights
from rlnumba.parallel.tensor_parallel import TensorParallel
from rlnumba.runs import policy as policy_module
from rlnumba.runs import ranks
from rlnumba.runs.prompt_loop import with_ranks
from rlnumba.sampling.ranks import LedLLM
from tests.close import assert_same_bits
from tests.engine.test_llm import make_model
from tests.model.test_lora import random_adapter
from tests.parallel import in_threads
from tests.parallel.ranks import set_fault
from tests.parallel.test_faults import fault_of
from tests.parallel.test_inference_group import OF_WIDE, WIDE
from tests.parallel.test_trainers import LEARNS, LORA, run_of, train_all, train_each
from tests.trainers.runs import GOLDEN

pytestmark = pytest.mark.usefixtures("quick_starts")
# In the second generation of a start of the runs below.
KILLED_CALL = 150

MODELS = {
    "tied": (lambda: make_model(**WIDE), (), 2),
    "untied": (lambda: make_model(**WIDE, tie_word_embeddings=False), (), 3),
    "adapter": (lambda: make_model(**WIDE), OF_WIDE, 3),
    # Rows of o and down that are whole tiles of a base in few bits.
    "tiles": (lambda: make_model(**WIDE | {"hidden_size": 128}), (), 2),
    "hybrid": (lambda: load_model(GOLDEN / "qwen3_5"), ("all-linear",), 2),
    "mixture": (lambda: load_model(GOLDEN / "qwen3_moe"), (), 2),
    "fused mixture": (lambda: load_model(GOLDEN / "qwen3_5_moe"), (), 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_its_rows(tmp_path, name):
    """What it reads is what a shard reads from the model's folder, also after the weights have changed."""
    make, modules, count = MODELS[name]
    model, rng = make(), np.random.default_rng(0)
    if modules:
        model = random_adapter(model, r=3, target_modules=modules)
    cuts = [CutWeights(model.weights, Shard(rank, count), model.adapter) for rank in range(count)]
    for step in range(2):
        folder = base = tmp_path / f"model-{step}"
        save_model(model.without_adapter(), base)
        if modules:
            model.adapter.base, folder = str(base), tmp_path / f"adapter-{step}"
            save_model(model, folder)
        for rank, cut in enumerate(cuts):
            expected = load_model(folder, shard=Shard(rank, count))
            cut.refresh()
            for p in expected.weights.parameters:
                assert_same_bits(cut.views[p.name], expected.weights[p.name])
            assert_same_bits(cut.lm_head, expected.lm_head)
            if modules:
                assert_same_bits(cut.own_adapter.flat, expected.adapter.flat)
        # What is zero is in no tensor of an adapter's file.
        model.trained.flat *= rng.random(model.trained.flat.shape, np.float32)
    for cut in cuts:
        copied = {whole.name.rpartition(".")[2] for whole, _, _ in cut.copied}
        assert {"qkv", "gate_up"} <= copied and not copied & {"o", "input_norm", "embed_tokens", "lm_head"}
        of_adapter = cut.own_adapter.nbytes if modules else 0
        assert 0 < cut.own_bytes - of_adapter < 0.5 * model.weights.nbytes
        assert cut.nbytes == sum(view.nbytes for view in cut.views.values())


@pytest.mark.parametrize("name, form", [("tiles", "nf4"), ("hybrid", "int8"), ("mixture", "int4"), ("untied", "fp8")])
def test_a_rank_reads_its_rows_of_a_base_in_few_bits(tmp_path, name, form):
    """Those that a shard has quantised itself: whole tiles where they lie, others copied, whatever was there before."""
    make, _, count = MODELS[name]
    save_model(make(), tmp_path)
    options = {"make_weights": weights_in(QuantizationConfig(type=form, group_size=8))}
    model, places = load_model(tmp_path, **options), set()
    for rank in range(count):
        shard = Shard(rank, count)
        cut, expected = CutWeights(model.weights, shard), load_model(tmp_path, shard=shard, **options).weights
        for _ in range(2):
            cut.refresh()
            assert cut.views.keys() == {p.name for p in (*expected.parameters, *expected.quantized.values())}
            for own, wanted in ((cut.views[key], expected[key]) for key in cut.views):
                if isinstance(wanted, QuantizedWeight):
                    assert own.shape == wanted.shape and own.group_size == wanted.group_size
                    assert_same_bits(own.packed, wanted.packed)
                    assert_same_bits(own.scales, wanted.scales)
                else:
                    assert_same_bits(own, wanted)
            assert_same_bits(cut.lm_head, expected.lm_head)
            for own in (cut.views[each.name] for each, _, _ in cut.copied):
                for array in (own.packed, own.scales) if isinstance(own, QuantizedWeight) else (own,):
                    array.fill(7)
        assert cut.nbytes == sum(view.nbytes for view in cut.views.values())
        copied = {whole.name for whole, _, _ in cut.copied}
        places |= {each in copied for each in model.weights.quantized}
    assert places == ({True, False} if name == "tiles" else {True})


@pytest.mark.parametrize(
    "ranges, expected",
    [
        ([Range(0, 0, 64)], [(0, 0, 64)]),
        ([Range(0, 32, 70)], [(0, 32, 64), (64, 96, 6)]),
        # The source's tile ends first, then that of the copy.
        ([Range(0, 30, 40)], [(0, 30, 2), (2, 32, 30), (32, 62, 2), (34, 64, 6)]),
        ([Range(5, 69, 60)], [(5, 69, 27), (32, 96, 32), (64, 128, 1)]),
    ],
)
def test_pieces_of_rows_are_whole_tiles_or_within_one(monkeypatch, ranges, expected):
    rng, form = np.random.default_rng(0), FORMATS["int8"]
    source, target = (QuantizedWeight.empty(form, (count, 64), 8, "float32") for count in (192, 96))
    source.packed[...] = rng.integers(-(2**31), 2**31, source.packed.shape)
    source.scales[...] = rng.random(source.scales.shape)
    found, within_tiles = [], rows._within_tiles
    monkeypatch.setattr(rows, "_within_tiles", lambda *each: found.extend(own := list(within_tiles(*each))) or own)
    rows.copy_rows(source, target, ranges)
    assert found == expected
    (first, at, count), codes = ranges[0], [unpack_codes(each.packed, len(each), 64, form) for each in (source, target)]
    scales = [unpack_scales(each.scales, len(each)) for each in (source, target)]
    for whole, own in (codes, scales):
        assert_same_bits(own[first : first + count], whole[at : at + count])
        assert not own[:first].any() and not own[first + count :].any()


def calls_of_ranks(communicator, max_tokens):
    """(completions, shapes of qkv that were read, steps) of a rank, of which all have the whole model."""
    model = with_ranks(make_model(**WIDE), communicator, communicator.world_size)
    llm = LLM(model, None, EngineConfig(max_num_seqs=8))
    runner, steps = llm.engine.runner, []
    compute = runner.compute

    def counted(arrays, *arguments):
        steps.append(len(arrays["input_ids"]))
        compute(arrays, *arguments)

    runner.compute = counted
    ranks = LedLLM(llm, communicator)
    params = [SamplingParams(n=2, max_tokens=max_tokens, seed=seed) for seed in range(3)]
    found = ranks.led(lambda: texts_of(ranks.llm.generate([[1, 2, 3], [4, 5], [6]], params)))
    qkv = runner.model.weights.layers[0][0].qkv.shape
    return found, qkv, steps, llm.engine.is_asleep


def texts_of(outputs):
    return [(each.token_ids, list(each.logprobs)) for output in outputs for each in output.completions]


def test_all_ranks_compute_the_steps_of_the_first():
    """With a third of the heads each, and the completions of an engine with all."""
    params = [SamplingParams(n=2, max_tokens=9, seed=seed) for seed in range(3)]
    expected = texts_of(LLM(make_model(**WIDE)).generate([[1, 2, 3], [4, 5], [6]], params))
    found = in_threads.run(calls_of_ranks, 3, 9)
    rows = make_model(**WIDE).weights.layers[0][0].qkv.shape[0]
    assert len(found[0][2]) >= 9
    for completions, shape, steps, _ in found:
        assert completions == expected and shape[0] == rows // 3 and steps == found[0][2]


def test_an_engine_that_does_not_sleep_reads_the_adapter_of_each_step(tmp_path):
    engine = EngineConfig(enable_sleep_mode=False)
    one, two = (
        dataclasses.replace(
            run_of("grpo", tmp_path / str(count), count, lora=LORA, tensor_parallel_size=count, **LEARNS), engine=engine
        )
        for count in (1, 2)
    )
    assert train_all([("grpo", two)], 2) == train_all([("grpo", one)], 1)


def test_a_rank_that_is_killed_while_it_replays_steps(tmp_path):
    """All end with one line, and two ranks that go on have the weights of a run of one."""
    options = {"max_steps": 4, "save_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    ((expected, *_),) = train_all([("grpo", run_of("grpo", tmp_path / "whole", **options))], 1)
    run = run_of("grpo", tmp_path / "run", 2, tensor_parallel_size=2, **options)
    for rank, call in ((1, KILLED_CALL), (0, KILLED_CALL)):
        line = fault_of([("grpo", run)], 2, f"gather:{call}:kill:{rank}", resume=rank == 0)
        wanted = rf"rank {rank}: was ended by SIGKILL \(rank {1 - rank}: gather \d+ of .*: rank {rank} has ended\)"
        assert re.fullmatch(wanted, line), line
    ((found, *_),) = train_all([("grpo", run)], 2, resume=True)
    assert found["final/model.safetensors"] == expected["final/model.safetensors"]


def train_with_killed_group(communicator, *arguments):
    """train_each, where the last rank is killed in a gather of its group."""
    if communicator.rank == communicator.world_size - 1:
        set_fault(communicator.group, f"gather:{KILLED_CALL}:kill")
    train_each(communicator, *arguments)


def test_a_rank_of_a_group_that_is_killed(tmp_path):
    run = run_of("grpo", tmp_path / "run", 4, tensor_parallel_size=2, max_steps=8, save_steps=1)
    with pytest.raises(RankError) as raised:
        launch(train_with_killed_group, 4, [("grpo", run)], timeout_s=120.0, group_size=2)
    # Whichever rank finds it first: that of its group, or one that waits for all.
    where = (
        r"rank 2: ranks 2 to 3, here 0 to 1: gather \d+ of .*: rank 1 has ended|rank \d: objects \d+: rank 3 has ended"
    )
    assert re.fullmatch(rf"rank 3: was ended by SIGKILL \(({where})\)", str(raised.value)), raised.value


def test_errors_of_a_group_have_the_numbers_of_the_run():
    failed = []
    communicator = SimpleNamespace(rank=0, world_size=2, fail=lambda: failed.append(True))
    error = CommunicationError("gather 5: rank 1 has ended", 1)
    for first, message, rank, fails in (
        (None, "gather 5: rank 1 has ended", 1, []),
        (4, "ranks 4 to 5, here 0 to 1: gather 5: rank 1 has ended", 5, [True]),
    ):
        with pytest.raises(CommunicationError) as raised, TensorParallel(communicator, 64, first).failing():
            raise error
        assert (str(raised.value), raised.value.rank, failed) == (message, rank, fails)


def train_with_failing_step(communicator, rank, error, *arguments):
    """train_each, where a step of the engine of a rank fails in the second generation."""
    compute = Runner.compute

    def fail(runner, *rest):
        if communicator.rank == rank and policy_steps[0] == 1:
            raise error("40 GiB")
        return compute(runner, *rest)

    step, policy_steps = policy_module.Policy.step, [0]

    def counted(policy, *rest):
        policy_steps[0] += 1
        return step(policy, *rest)

    Runner.compute, policy_module.Policy.step = fail, counted
    train_each(communicator, *arguments)


@pytest.mark.parametrize(
    "count, rank, error",
    [(2, 0, MemoryError), (2, 0, DeviceError), (2, 1, MemoryError), (4, 2, MemoryError), (4, 3, DeviceError)],
)
def test_an_error_in_a_step_leaves_a_checkpoint_of_the_last_one(tmp_path, count, rank, error):
    run = run_of("grpo", tmp_path / "run", count, tensor_parallel_size=2, max_steps=4, save_steps=100)
    internal = "internal error: MemoryError: " if error is MemoryError else ""
    with pytest.raises(RankError, match=f"rank {rank}: {internal}40 GiB"):
        launch(train_with_failing_step, count, rank, error, [("grpo", run)], timeout_s=120.0, group_size=2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]


REFUSED = [
    ({"tensor_parallel_size": 2}, {}, r"tensor_parallel_size \(2\) without .* deploy.num_train_gpus \(1\)"),
    ({"tensor_parallel_size": 2, "num_train_gpus": 3}, {}, r"must divide their number, deploy.num_train_gpus \(3\)"),
    ({"tensor_parallel_size": "auto", "num_train_gpus": 2}, {}, r"tensor_parallel_size \(auto\) without"),
    (
        {"tensor_parallel_size": 2, "num_train_gpus": 2, "num_train_nodes": 2, "launcher": "ray"},
        {},
        "is for GPUs of one host, and deploy.num_train_nodes is 2",
    ),
    (TWO := {"tensor_parallel_size": 2, "num_train_gpus": 2}, {"asynchronous": AsyncConfig()}, r"\[async\] with"),
    (TWO, {"gemm": "cublas"}, r"tensor_parallel_size \(2\) needs gemm = native"),
    (TWO, {"engine": EngineConfig(quantization="int8")}, "not with engine.quantization, which makes copies"),
]


@pytest.mark.parametrize("deploy, options, message", REFUSED)
def test_what_does_not_go_together(tmp_path, deploy, options, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(run_of("grpo", tmp_path), deploy=DeployConfig(**deploy), **options)


BEFORE_RANKS = [
    ({"tensor_parallel_size": 4}, "tensor_parallel_size 4 must divide the model's num_key_"),
    ({"generation_kwargs": {"stop_token_ids": [10**6]}}, "stop_token_ids 1000000 is outside"),
    ({"model": "/no/model"}, "^/no/model: no such model folder"),
    ({"data": {"eval": "no.jsonl"}}, "^no.jsonl: no such file"),
    ({"data": {"train": "no.jsonl"}}, "^no.jsonl: no such file"),
]


@pytest.mark.parametrize("options, message", BEFORE_RANKS)
def test_what_all_ranks_would_refuse_is_refused_before_kernels_are_compiled(tmp_path, monkeypatch, options, message):
    def begins(*arguments, **keys):
        raise AssertionError("the run has begun")

    monkeypatch.setattr(ranks, "start_compiling", begins)
    monkeypatch.setattr(ranks, "launch", begins)
    run = run_of("grpo", tmp_path, 4, **{name: each for name, each in options.items() if name != "data"})
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, **options.get("data", {})))
    with pytest.raises(UserError, match=message):
        ranks.train_on_ranks(run, False)
