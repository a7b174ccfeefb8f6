"""Steps as graphs: padded prefill, mixed steps and decode have the bits of eager ones, whatever was captured before."""

import dataclasses

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine import Engine, SamplingParams, run_ahead, runner
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.steps.shapes import row_bucket_of
from rlnumba.runtime import device, memory
from tests.engine.test_core import TINY, check_idle, run
from tests.engine.test_llm import TwoCharacterTokens, make_model
from tests.engine.test_run_ahead import (
    CONFIGS,
    VOCABULARY,
    engine_of,
    random_requests,
    results,
    run_all,
    run_with_events,
    texts_of_steps_that_wait,
)


class FixedUpload:
    """As on a GPU, arrays of the same names and shapes are sent to the same memory."""

    def __init__(self):
        self.generation, self.memory = 0, {}

    def send(self, arrays):
        key = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        sent = self.memory.setdefault(key, {name: array.copy() for name, array in arrays.items()})
        for name, array in arrays.items():
            sent[name][...] = array
        return sent


class FakeGraph:
    """Computes what was captured, from the arrays that it was captured with."""

    def __init__(self, compute):
        self.compute = compute

    def launch(self, stream):
        self.compute()


def with_fake_graphs(engine):
    """An engine on the CPU that pads its steps, and computes those that would be replayed from what was captured."""
    runner = engine.runner
    runner.eager, runner.upload = False, FixedUpload()

    def capture(step_graph, arrays, shape, part):
        assert len(arrays["input_ids"]) == shape.tokens and len(arrays["context_lens"]) == shape.rows
        assert np.diff(arrays["cu_seqlens"]).max() <= shape.max_seqlen_q
        assert len(arrays.get("temperature", ())) == shape.sampled
        step_graph.graph = FakeGraph(lambda: runner.compute(arrays, shape, part))

    runner._capture = capture
    return engine


def shapes(engine):
    """Of captured graphs: (those of prefill, those of decode)."""
    captured = [key.shape for key, graph in engine.runner.graphs.items() if graph.graph is not None]
    return [s for s in captured if s.max_seqlen_q > 1], [s for s in captured if s.max_seqlen_q == 1]


@pytest.fixture(scope="module")
def model():
    return make_model(**TINY)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ",".join(config) or "default")
def test_padded_steps_have_the_bits_of_steps_without(model, config, seed, monkeypatch):
    if device.name() != "cpu":
        pytest.skip("computes the arrays of graphs without them")
    if seed == 0:
        monkeypatch.setattr(run_ahead, "REPACK_BYTES", 0)
    rng = np.random.default_rng(seed)
    requests = random_requests(rng)
    expected = texts_of_steps_that_wait(model, seed)
    engine = with_fake_graphs(engine_of(model, **config))
    # Tokens behind the last sequence go through the model with whatever memory holds.
    with np.errstate(all="ignore"):
        for _ in range(2):
            assert run_all(engine, requests) == expected
        outputs, _ = run_with_events(engine, requests, rng)
    assert results(outputs) == {key: expected[key] for key in outputs}
    check_idle(engine)
    prefill, decode = shapes(engine)
    assert len(prefill) > 1 and len(decode) > 1 - seed, (prefill, decode)


def test_a_shape_runs_is_captured_and_is_replayed(model):
    if device.name() != "cpu":
        pytest.skip("counts graphs without a GPU")
    engine = with_fake_graphs(engine_of(model, enable_prefix_caching=False))
    counts = engine.runner.counts
    for expected in ({"eager": 1}, {"captured": 1}, {"replayed": 1}, {"replayed": 2}):
        before = dict(counts)
        # A step of 5 to 8 tokens, and none of decode.
        for number in range(3):
            engine.add_request(number, [1, 2, 3 + sum(before.values())][: number + 1], SamplingParams(max_tokens=1))
        run(engine)
        assert sum(counts.values()) == sum(before.values()) + 1
        assert {name: count for name, count in counts.items() if count} == expected | {
            name: count for name, count in before.items() if count and name not in expected
        }


def test_graphs_of_the_longest_disuse_are_dropped(model, monkeypatch):
    if device.name() != "cpu":
        pytest.skip("counts graphs without a GPU")
    monkeypatch.setattr(runner, "MAX_GRAPHS", 2)
    engine = with_fake_graphs(engine_of(model, enable_prefix_caching=False))

    def prefill(tokens):
        engine.add_request(0, [1] * tokens, SamplingParams(max_tokens=1))
        run(engine)
        return [key.shape.tokens for key in engine.runner.graphs]

    assert [prefill(tokens) for tokens in (16, 32, 16)][-1] == [32, 16]
    assert prefill(48) == [16, 48]
    # What moved is captured anew.
    engine.runner.upload.generation += 1
    assert prefill(16) == [16]


def test_rows_are_put_together_again_when_those_that_ended_have_cost_as_much(model, monkeypatch):
    """Of 32 sequences 8 end after 20 tokens, for which no smaller graph would do, and 12 after 30."""
    if device.name() != "cpu":
        pytest.skip("has fake graphs")
    requests = [
        ([i, 1], SamplingParams(max_tokens=20 + 10 * (i >= 8) + 30 * (i >= 20), ignore_eos=True)) for i in range(32)
    ]
    expected = run_all(engine_of(model, async_scheduling=False), requests)
    # Steps of the 20 that run for 30 tokens more, in rows of 32, until the 12 have 16.
    for repack, lengths in ((0, [2, 32]), (5, [2, 37]), (27, [2, 59]), (30, [2])):
        engine = with_fake_graphs(engine_of(model))
        begun, begin = [], engine.runner.begin
        engine.runner.begin = lambda step, table, begun=begun, begin=begin: (
            begun.append(int(step.starts.max())) or begin(step, table)
        )
        engine.runner.wasted_bytes = lambda left, kept_tokens: 10 * (32 - row_bucket_of(left))
        monkeypatch.setattr(run_ahead, "REPACK_BYTES", repack * 160)
        with np.errstate(all="ignore"):
            assert run_all(engine, requests) == expected
        assert begun == lengths, repack


def test_what_ended_rows_cost(model):
    """A smaller bucket's rows, and the contexts that members of prefix groups keep."""
    if device.name() != "cpu":
        pytest.skip("has fake graphs")
    engine = with_fake_graphs(engine_of(model))
    for number in range(20):
        engine.add_request(number, [number], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step(), engine.step()
    wasted = engine.runner.wasted_bytes
    assert engine.runner.decode.shape.rows == 32
    assert wasted(20, 0) == wasted(17, 0) == 0 < wasted(16, 0)
    assert wasted(8, 0) == 1.5 * wasted(16, 0) > 24 * 8 * VOCABULARY
    assert wasted(20, BLOCK_SIZE) == engine.runner.block_bytes
    engine.runner.few_rows.decodes = lambda rows, context: rows <= 8
    assert wasted(16, 0) == wasted(12, 0) and wasted(8, 0) > 1e7


def test_steps_without_memory_for_their_graphs_are_computed_without_them(model, monkeypatch, capsys):
    """And captured once lent memory has been freed, or more is free than then."""
    if device.name() != "cpu":
        pytest.skip("has fake graphs")
    engine, free, lent, attempts = engine_of(model, enable_prefix_caching=False), [1 << 30], [True, False, False], []
    engine.runner.eager, engine.runner.upload = False, FixedUpload()

    def captured(stream, compute):
        attempts.append(free[0])
        if free[0] < 4 << 30:
            raise MemoryError("out of\nmemory")
        return FakeGraph(compute)

    monkeypatch.setattr(runner, "captured", captured)
    monkeypatch.setattr(runner, "reserve_tensor_maps", lambda count: None)
    monkeypatch.setattr(memory, "reclaim", lambda nbytes: lent.pop(0))
    monkeypatch.setattr(device, "memory_info", lambda: (free[0], 80 << 30))
    expected = run_all(engine_of(model, enable_prefix_caching=False), [([1, 2, 3], SamplingParams(max_tokens=1))])
    counts = []
    for gib in (1, 1, 1, 1, 2, 5, 1):
        free[0] = gib << 30
        assert run_all(engine, [([1, 2, 3], SamplingParams(max_tokens=1))]) == expected
        counts.append(dict(engine.runner.counts))
    # The first step of all runs without a graph; of these two attempts the lent memory allows another one.
    assert attempts == [gib << 30 for gib in (1, 1, 2, 5)]
    assert [(each["eager"], each["captured"], each["replayed"]) for each in counts[3:]] == [
        (4, 0, 0),
        (5, 0, 0),
        (5, 1, 0),
        (5, 1, 1),
    ]
    line = "rlnumba: some steps of the engine run slower, without CUDA graphs: MemoryError: out of memory\n"
    assert capsys.readouterr().err == line


def random_workload(rng, most=40):
    """(prompt, params) of many requests: groups, prompts up to several hundred tokens, all kinds of parameters."""
    requests = random_requests(rng)
    for _ in range(rng.integers(1, most)):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, rng.choice([20, 100, 600]))).tolist()
        n, max_tokens = int(rng.choice([1, 4, 8])), int(rng.choice([1, 8, 32]))
        filters = {"top_k": 5} if rng.random() < 0.3 else {}
        requests.append((prompt, SamplingParams(max_tokens=max_tokens, n=n, seed=int(rng.integers(9)), **filters)))
    return requests


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 64), (9, 3, 64), (4, 4, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_of_prefill_have_the_bits_of_eager_steps(dtype, heads, kv_heads, head_dim):
    """Random workloads, each three times: run as they are, captured, replayed; and other requests' values between."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model = make_model(dtype, vocab_size=VOCABULARY, **sizes, max_position_embeddings=1024)
    config = {"num_gpu_blocks_override": 4000, "max_num_batched_tokens": 2048}
    eager = Engine(model, TwoCharacterTokens(), EngineConfig(enforce_eager=True, **config))
    engine = Engine(model, TwoCharacterTokens(), EngineConfig(**config))
    workloads = [random_workload(np.random.default_rng(seed)) for seed in range(4)]
    expected = [run_all(eager, requests) for requests in workloads]
    assert eager.runner.counts["captured"] == 0
    for round_ in range(3):
        for requests, wanted in zip(workloads, expected, strict=True):
            assert run_all(engine, requests) == wanted, round_
            # Without what is left in the cache, whose prompts would be computed in smaller steps.
            engine.update_weights(engine.policy_version + 1)
    prefill, decode = shapes(engine)
    assert len(prefill) > 4 and len(decode) > 4 and engine.runner.counts["replayed"] > 100, engine.runner.counts
    check_idle(engine)


@pytest.mark.gpu
def test_prefill_of_a_group_is_replayed():
    """As in GRPO: 16 prompts of some 40 tokens, 8 completions each; from the third time on all steps are graphs."""
    model = make_model("bfloat16", vocab_size=VOCABULARY, head_dim=64)
    engine = engine_of(model, num_gpu_blocks_override=1000)
    eager = engine_of(model, num_gpu_blocks_override=1000, enforce_eager=True)
    rng, pool = np.random.default_rng(0), device.xp().get_default_memory_pool()
    params = SamplingParams(max_tokens=32, n=8, ignore_eos=True)
    for time in range(5):
        # Of as many tokens in all each time, so that the steps are of one shape.
        prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in rng.permutation([36, 38, 41, 45] * 4)]
        requests = [(prompt, dataclasses.replace(params, seed=time)) for prompt in prompts]
        before, used = dict(engine.runner.counts), (pool.used_bytes(), pool.total_bytes())
        assert run_all(engine, requests) == run_all(eager, requests)
        counts = {name: count - before[name] for name, count in engine.runner.counts.items()}
        if time > 2:
            assert counts == {"eager": 0, "captured": 0, "replayed": 32}, counts
            assert (pool.used_bytes(), pool.total_bytes()) == used
