"""Micro-batches of a bucket's shape: padding changes no bit of a log-prob, and graphs no bit of a run."""

import contextlib
import dataclasses
import functools
import gc
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import EngineConfig, LoraConfig, SFTConfig
from rlnumba.data import TokenSequence
from rlnumba.engine import LLM, SamplingParams
from rlnumba.model.lora import Adapter
from rlnumba.model.transformer import load_model
from rlnumba.runs import graphs
from rlnumba.runs.micro_batch import (
    TILE,
    MicroBatch,
    bucket_of,
    bucket_step,
    seqlen_bucket_of,
    target_bucket_of,
)
from rlnumba.runs.planning.plan import operator_bytes
from rlnumba.runs.planning.planned import BatchSizes
from rlnumba.runs.policy import LateMetrics, Policy
from rlnumba.runtime import device, memory
from rlnumba.runtime.mapped_memory import PIECE_BYTES
from rlnumba.trainers import grpo, rloo, sft
from rlnumba.trainers.rollout import Rollouts
from tests.close import assert_same_bits
from tests.trainers.runs import GOLDEN, MODEL, grpo_config
from tests.trainers.test_grpo import golden_policy, golden_rollouts
from tests.trainers.test_rloo import small_policy


def test_buckets_are_an_eighth_of_an_octave_apart_at_most():
    assert [bucket_of(n) for n in (0, 1, 128, 129, 1024, 1025, 2048, 2049, 4097, 8192)] == [
        *(128, 128, 128, 256, 1024, 1152, 2048, 2304, 4608, 8192),
    ]
    assert [bucket_of(n, 8) for n in (0, 1, 8, 9, 128, 129, 300)] == [8, 8, 8, 16, 128, 144, 320]
    for count in range(1, 5000):
        bucket = bucket_of(count)
        assert count <= bucket and bucket - count < max(TILE, count / 8) and bucket_of(bucket) == bucket
        assert bucket_step(count) == bucket_step(bucket)
    assert [target_bucket_of(n) for n in (0, 1, 129, 1024, 1025, 2049, 3400)] == [128, 128, 256, 1024, 1280, 2560, 3584]
    assert [seqlen_bucket_of(n) for n in (1, 128, 129, 1000, 1024)] == [128, 128, 256, 1024, 1024]


@pytest.mark.parametrize("lengths", [[1], [5, 9], [128], [64] * 16, [1] * 40, [1000, 29], [513, 512, 1024], [4097]])
def test_padding_comes_last(rng, lengths):
    tokens = sum(lengths)
    ids = rng.integers(1, 9, tokens).astype(np.int32)
    starts = np.cumsum([0, *lengths[:-1]])
    targets = np.setdiff1d(np.arange(tokens), starts)
    plain = MicroBatch.of(ids, lengths, targets, np.ones(len(targets), np.float32))
    bounds = np.arange(len(lengths) + 1, dtype=np.int32)
    plain = plain.with_arrays(sequences={"completion_bounds": bounds, "advantages": np.ones(len(lengths), np.float32)})
    recorded = rng.integers(0, 4, (2, tokens, 3)).astype(np.int32)
    padded = plain.with_arrays(others={"routed_experts": recorded}).padded()
    for name, array in plain.arrays.items():
        assert_same_bits(padded.arrays[name][: len(array)], array, name)
        assert padded.arrays[name].dtype == array.dtype
    cu_seqlens, arrays = padded.sequences["cu_seqlens"], padded.arrays
    num_tokens, of_sequences = bucket_of(tokens), np.diff(cu_seqlens)
    assert len(arrays["input_ids"]) == len(arrays["position_ids"]) == num_tokens == cu_seqlens[-1]
    added = of_sequences[len(lengths) :]
    assert (added >= 0).all() and (added <= TILE).all() and of_sequences.max() <= padded.max_seqlen
    assert not arrays["input_ids"][tokens:].any() and not arrays["position_ids"][tokens:].any()
    assert len(arrays["rows"]) == len(arrays["target_ids"]) == target_bucket_of(len(targets))
    # The last token of the last sequence predicts none.
    assert (arrays["rows"][len(targets) :] == tokens - 1).all() and tokens - 1 not in plain.targets["rows"]
    assert (arrays["thresholds"][len(targets) :] == -np.inf).all()
    assert (arrays["completion_bounds"][len(lengths) :] == len(lengths)).all()
    assert len(arrays["completion_bounds"]) == len(arrays["advantages"]) + 1 == len(cu_seqlens)
    assert padded.num_targets == len(targets) and padded.is_padded
    experts = arrays["routed_experts"]
    assert experts.shape == (2, num_tokens, 3)
    assert (experts[:, :tokens] == recorded).all() and (experts[:, tokens:] == -1).all()
    assert padded.padded().num_tokens == num_tokens


def sequences(count, seed=0, vocab=48):
    """TokenSequences of several lengths, some of whose tokens are trained."""
    rng, found = np.random.default_rng(seed), []
    for length in rng.integers(2, 40, count):
        mask = rng.random(length) < 0.7
        mask[-1] = True
        found.append(TokenSequence(rng.integers(0, vocab, length).astype(np.int32), mask))
    return found


def sft_policy(**options):
    dtype, lora = options.pop("dtype", None), options.pop("lora", False)
    model = load_model(options.pop("model", MODEL), dtype)
    if lora:
        model.adapter = Adapter.new(model.config, LoraConfig(r=4), model.dtype.name, "", 0)
    train = SFTConfig(**{"per_device_train_batch_size": 4, "gradient_checkpointing": False} | options)
    return Policy(model, train)


@pytest.fixture
def results_of(monkeypatch):
    """A list of what every micro-batch has written for the host."""
    found, run = [], graphs.MicroBatchGraphs.run

    def kept(*arguments, **options):
        read = run(*arguments, **options)
        found.append(read())
        return read

    monkeypatch.setattr(graphs.MicroBatchGraphs, "run", kept)
    return found


def compare_with_padding(make_policy, train_step, parts, results, exact=("logprobs", "entropy", "top1")):
    """Train once with padding and once without: the same bits of tokens, the same numbers otherwise."""
    found = []
    for pads in (False, True):
        policy = make_policy()
        policy.graphs.pads = pads
        results.clear()
        metrics = dict(train_step(policy, parts(), 1e-3))
        of_tokens = [{name: each[name] for name in exact if name in each} for each in results]
        assert not pads or policy.graphs.buckets
        found.append((metrics, of_tokens, device.to_host(policy.grads.flat).copy()))
    (metrics, of_tokens, grads), (padded_metrics, padded_of_tokens, padded_grads) = found
    for plain, padded in zip(of_tokens, padded_of_tokens, strict=True):
        for name, array in plain.items():
            assert_same_bits(padded[name], array, name)
    assert metrics == pytest.approx(padded_metrics, rel=1e-6, abs=1e-7, nan_ok=True)
    # The sums over tokens of a weight's gradient are in another order.
    np.testing.assert_allclose(padded_grads, grads, atol=2e-6 * np.abs(grads).max())
    assert np.abs(grads).max() > 0
    return metrics


# A loss of the routers beside which the other's is small.
MIXTURE = {"model": GOLDEN / "qwen3_moe", "router_aux_loss_coef": 10.0}


@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "dft"}, {"gradient_checkpointing": True}, {"lora": True}, MIXTURE], ids=str
)
def test_padding_changes_nothing_in_sft(results_of, options):
    rows = [[each] for each in sequences(11)]
    compare_with_padding(lambda: sft_policy(**options), sft.train_step, lambda: rows, results_of)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo", "beta": 0.1},
        {"importance_sampling_level": "sequence", "rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
        {"max_tokens_per_micro_batch": 60},
    ],
    ids=str,
)
@pytest.mark.parametrize("on_policy", [True, False])
def test_padding_changes_nothing_in_grpo(results_of, options, on_policy):
    def parts():
        rollouts = golden_rollouts()
        rollouts.old_logprobs = rollouts.rollout_logprobs + np.float32(0.01)
        rollouts.loss_mask[3:6] = 0
        return rollouts.parts(4, on_policy)

    compare_with_padding(lambda: golden_policy(**options), grpo.train_step, parts, results_of)


def test_padding_keeps_logits_above_the_thresholds(results_of):
    def parts():
        rollouts = golden_rollouts()
        rollouts.thresholds = np.full(len(rollouts.loss_mask), -3.0, np.float32)
        return rollouts.parts(8, on_policy=True)

    compare_with_padding(golden_policy, grpo.train_step, parts, results_of)


def test_padding_changes_nothing_in_rloo(results_of):
    compare_with_padding(small_policy, rloo.train_step, lambda: golden_rollouts().parts(4), results_of)


def test_evaluation_is_padded_likewise():
    policy, rows = sft_policy(), [[each] for each in sequences(9)]
    plain = sft.evaluate(policy, rows)
    policy.graphs.pads = True
    assert sft.evaluate(policy, rows) == plain and len(policy.graphs.buckets) > 0


def test_buckets_of_the_longest_disuse_go_first(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_BUCKETS", 2)
    policy = sft_policy()
    policy.graphs.pads = True

    def step(count):
        rows = [[TokenSequence(np.ones(100, np.int32), np.ones(100, bool))]] * count
        sft.evaluate(policy, rows)
        return [dict(key[2][0])["input_ids"][0][0] for key in policy.graphs.buckets]

    assert step(1) == [128]
    assert step(2) == [128, 256]
    assert step(1) == [256, 128]
    assert step(3) == [128, 384]


def test_large_micro_batches_are_not_padded(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_TOKENS", 128)
    policy = sft_policy()
    policy.graphs.pads = True
    for length, count in ((129, 0), (128, 1)):
        sft.evaluate(policy, [[TokenSequence(np.ones(length, np.int32), np.ones(length, bool))]])
        assert len(policy.graphs.buckets) == count
    assert not sft_policy(optimizer_in_backward=True, max_grad_norm=0.0).graphs.pads


def test_the_larger_the_model_the_fewer_tokens_a_graph_has():
    parameters = 134_515_008, 596_049_920, 8_190_735_360
    assert [graphs.max_tokens(count) for count in parameters] == [32768, 8246, 600]


def test_metrics_are_read_once_and_late():
    calls = []

    def read():
        calls.append(1)
        return {"loss": 2.0, "entropy": 1.0}

    metrics = LateMetrics(read)
    assert not calls
    assert metrics["loss"] == 2.0 and dict(metrics) == {"loss": 2.0, "entropy": 1.0} and len(metrics) == 2
    assert metrics | {"loss": 3.0} == {"loss": 3.0, "entropy": 1.0} and {"loss": 3.0} | metrics == dict(metrics)
    assert calls == [1]


def random_rollouts(seed, count, vocab=48):
    """Rollouts of several lengths with any log-probs."""
    rng = np.random.default_rng(seed)
    prompts, completions = (rng.integers(1, 30, count).astype(np.int32) for _ in range(2))
    tokens, none = int(completions.sum()), np.empty(0, np.float32)
    return Rollouts(
        token_ids=rng.integers(0, vocab, int(prompts.sum()) + tokens).astype(np.int32),
        prompt_lengths=prompts,
        completion_lengths=completions,
        loss_mask=(rng.random(tokens) < 0.9).astype(np.float32),
        rollout_logprobs=-rng.exponential(3.0, tokens).astype(np.float32),
        advantages=rng.standard_normal(tokens).astype(np.float32),
        old_logprobs=none,
        ref_logprobs=none,
    )


class Recorded:
    """In place of a CUDA graph: launch() calls the function of the first micro-batch again, on what was sent last."""

    def __init__(self, policy, bucket, compute):
        self.launch, bucket.graph, bucket.context = compute, self, policy.context
        # As a capture does, which runs the function's Python code.
        policy.gradients.are_zero = False


def sft_steps(policy, kind):
    return sft.train_step(policy, [[each] for each in sequences(12 + 4 * (kind % 2), kind)], 1e-3)


def grpo_steps(on_policy):
    def train_step(policy, kind):
        rollouts = random_rollouts(kind, 16 + 8 * (kind % 2))
        if policy.train.beta:
            rollouts.ref_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(8))
        return grpo.train_step(policy, rollouts.parts(8, on_policy), 1e-3)

    return train_step


def grpo_policy(dtype=None, **options):
    train = grpo_config(**{"max_completion_length": 32, "per_device_train_batch_size": 8} | options)
    return Policy(load_model(MODEL, dtype), train, None, train.temperature)


@pytest.mark.parametrize(
    ("make_policy", "train_step"),
    [
        (sft_policy, sft_steps),
        (lambda: sft_policy(loss_type="dft", gradient_checkpointing=True), sft_steps),
        (lambda: sft_policy(lora=True), sft_steps),
        (lambda: sft_policy(**MIXTURE), sft_steps),
        (lambda: sft_policy(**MIXTURE, gradient_accumulation_steps=3), sft_steps),
        (grpo_policy, grpo_steps(True)),
        (lambda: grpo_policy(loss_type="bnpo", beta=0.1), grpo_steps(False)),
        (lambda: grpo_policy(use_adaptive_entropy=True, entropy_target=9.0), grpo_steps(True)),
        (lambda: grpo_policy(top_entropy_quantile=0.5), grpo_steps(True)),
        (lambda: grpo_policy(max_tokens_per_micro_batch=100), grpo_steps(True)),
    ],
)
def test_what_is_replayed_reads_only_what_is_sent(monkeypatch, make_policy, train_step):
    """A step must not depend on anything that its first micro-batch of a bucket left in the function that is kept."""
    monkeypatch.setattr(graphs.MicroBatchGraphs, "_capture", lambda self, *arguments: Recorded(*arguments) and None)
    found = []
    for captures in (False, True):
        policy = make_policy()
        policy.graphs.pads, policy.graphs.captures = True, captures
        metrics = [dict(train_step(policy, step)) for step in range(6)]
        found.append((metrics, device.to_host(policy.model.trained.flat).copy()))
        counts = policy.graphs.counts
        assert (counts["captured"] > 0) == (counts["replayed"] > 0) == captures, counts
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


def test_a_capture_knows_what_its_operators_had_for_themselves(monkeypatch):
    """Which was measured where the bucket ran without a graph."""
    known = []

    def capture(self, policy, bucket, compute):
        known.append(bucket.operator_bytes)
        Recorded(policy, bucket, compute)

    monkeypatch.setattr(graphs.MicroBatchGraphs, "_capture", capture)
    monkeypatch.setattr(graphs, "pool_bytes_of", lambda compute: compute() or 12345)
    policy = sft_policy()
    policy.graphs.pads = policy.graphs.captures = True
    for _ in range(3):
        sft_steps(policy, 0)
    assert set(known) == {12345} and policy.graphs.counts["eager"] == len(known) > 0


def test_what_has_no_room_in_the_pool_is_not_captured(monkeypatch):
    """An attempt would take lent memory in vain, each time."""
    captured = []
    monkeypatch.setattr(graphs.MicroBatchGraphs, "_capture", lambda self, *arguments: captured.append(arguments))
    for nbytes in (graphs.POOL_BYTES, graphs.POOL_BYTES + 1):
        captured.clear()
        monkeypatch.setattr(graphs, "pool_bytes_of", lambda compute, nbytes=nbytes: compute() or nbytes)
        policy = sft_policy()
        policy.graphs.pads = policy.graphs.captures = True
        for _ in range(3):
            sft_steps(policy, 0)
        assert bool(captured) == (nbytes == graphs.POOL_BYTES) and policy.graphs.counts["captured"] == 0


@pytest.mark.gpu
def test_what_operators_have_for_themselves_is_planned():
    """It is what the graphs' pool has, but for pieces between arrays, and no more than a plan says, but for sums."""
    policy, rows = sft_policy(), [[each] for each in sequences(8)]
    with policy.context.use():
        # The first step makes arrays that the context keeps, too.
        dict(sft.train_step(policy, rows, 1e-3))
        policy.graphs.buckets.clear()
        for _ in range(4):
            dict(sft.train_step(policy, rows, 1e-3))
    found, small = max(bucket.operator_bytes for bucket in policy.graphs.buckets.values()), 1 << 20
    tokens = bucket_of(sum(len(each) for (each,) in rows))
    assert policy.graphs.counts["captured"] > 0 and 0 < found <= policy.graphs.pool.total_bytes() <= 2 * found + small
    sizes = BatchSizes(tokens, len(rows) + 8, tokens, tokens)
    assert found <= operator_bytes(sizes, policy.model.config, policy.model.dtype.name) + small


def trained(make_policy, train_step, cuda_graphs, steps=20):
    """(weights, metrics) after steps of micro-batches of several buckets, each of which comes more than once."""
    policy = make_policy(cuda_graphs=cuda_graphs)
    metrics, pool = [], device.xp().get_default_memory_pool()
    with policy.context.use():
        for step in range(steps):
            metrics.append(dict(train_step(policy, step % 4)))
            if step == steps - 5:
                taken = pool.total_bytes()
        weights = device.host_copy(policy.model.trained.flat)
    assert pool.total_bytes() == taken, "memory is taken in the last steps"
    counts = policy.graphs.counts
    assert (counts["replayed"] > 0) == cuda_graphs, counts
    return weights, metrics


def assert_graphs_change_nothing(make_policy, train_step):
    (weights, metrics), (eager_weights, eager_metrics) = (
        trained(make_policy, train_step, cuda_graphs) for cuda_graphs in (True, False)
    )
    assert_same_bits(weights, eager_weights)
    for step, (found, expected) in enumerate(zip(metrics, eager_metrics, strict=True)):
        for name, value in expected.items():
            assert found[name] == value or np.isnan(value), (step, name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "dft"},
        {"gradient_checkpointing": True},
        {"lora": True},
        {"gradient_accumulation_steps": 2},
        MIXTURE,
        {**MIXTURE, "gradient_accumulation_steps": 2},
        {"optim": "adamw_8bit"},
        {"offload_optimizer": True},
    ],
    ids=str,
)
def test_graphs_have_the_bits_of_their_kernels_in_sft(dtype, options):
    def train_step(policy, kind):
        count = 4 * policy.train.gradient_accumulation_steps
        return sft.train_step(policy, [[each] for each in sequences(2 * count * (kind + 1), kind)], 1e-3)

    assert_graphs_change_nothing(lambda **keys: sft_policy(dtype=dtype, **options, **keys), train_step)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("on_policy", "options"),
    [
        (True, {}),
        (False, {}),
        (False, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        (False, {"top_entropy_quantile": 0.5, "entropy_coef": 0.1}),
        (True, {"max_tokens_per_micro_batch": 100}),
    ],
    ids=str,
)
def test_graphs_have_the_bits_of_their_kernels_in_grpo(dtype, on_policy, options):
    make_policy = functools.partial(grpo_policy, dtype=dtype, **options)
    assert_graphs_change_nothing(make_policy, grpo_steps(on_policy))


@pytest.mark.gpu
def test_a_resumed_policy_has_the_same_bits():
    """A policy that goes on from a checkpoint in the middle captures again, and ends with the same weights."""
    batches = [[[each] for each in sequences(8, seed % 3)] for seed in range(20)]

    def train(policy, steps):
        with policy.context.use():
            for step in steps:
                sft.train_step(policy, batches[step], 1e-3)
            return device.host_copy(policy.model.weights.flat), policy.state_dict()

    straight, _ = train(sft_policy(), range(20))
    weights, state = train(sft_policy(), range(9))
    resumed = sft_policy()
    resumed.model.weights.flat[...] = device.asarray(weights)
    resumed.load_state_dict(state)
    assert_same_bits(train(resumed, range(9, 20))[0], straight)


@pytest.mark.gpu
def test_a_skipped_step_changes_nothing_in_graphs():
    policy, rows = sft_policy(), [[each] for each in sequences(8)]
    with policy.context.use():
        for _ in range(3):
            sft.train_step(policy, rows, 1e-3)
        before = device.host_copy(policy.model.weights.flat)
        policy.model.weights.norm.fill(np.nan)
        broken = device.host_copy(policy.model.weights.flat)
        metrics = [sft.train_step(policy, rows, 1e-3) for _ in range(2)]
        assert [each["skipped_steps"] for each in metrics] == [1, 2]
        assert_same_bits(policy.model.weights.flat, broken)
        policy.model.weights.flat[...] = device.asarray(before)
        assert sft.train_step(policy, rows, 1e-3)["skipped_steps"] == 2
        assert policy.optimizer.steps == 4


@pytest.mark.gpu
def test_reclaimed_graphs_are_captured_again():
    policy, rows = sft_policy(), [[each] for each in sequences(8)]
    other = sft_policy(cuda_graphs=False)
    for step in range(6):
        for each in (policy, other):
            with each.context.use():
                sft.train_step(each, rows, 1e-3)
        if step == 3:
            policy.graphs.reclaim(1)
            assert policy.graphs.pool.total_bytes() == 0
    assert policy.graphs.counts["captured"] >= 2
    assert_same_bits(policy.model.weights.flat, other.model.weights.flat)


@pytest.mark.gpu
def test_graphs_survive_that_activations_grow_and_are_lent():
    policy, other = sft_policy(), sft_policy(cuda_graphs=False)
    rows, address, captured = [[each] for each in sequences(8)], None, 0
    for step in range(8):
        for each in (policy, other):
            with each.context.use():
                if step == 4:
                    with each.scope():
                        each.arena.empty((64 << 20,), np.uint8)
                sft.train_step(each, rows, 1e-3)
        address, captured = address or policy.arena.address, captured or policy.graphs.counts["captured"]
        assert policy.arena.address == address and policy.arena.nbytes >= policy.arena.peak
        if step > 4:
            # Another step finds other memory there.
            for piece in memory.take_lent(math.inf):
                piece.release()
            assert policy.arena.nbytes == 0
    assert policy.graphs.counts["captured"] == captured and policy.graphs.counts["replayed"] > 0
    assert_same_bits(policy.model.weights.flat, other.model.weights.flat)


@pytest.mark.gpu
@pytest.mark.fills_gpu
def test_generation_and_training_that_do_not_fit_together_take_turns():
    """Each has more than half of the GPU; graphs of both give the same before and after, and what is short moves."""
    gc.collect()
    pool = device.xp().get_default_memory_pool()
    pool.free_all_blocks()
    policy, params = sft_policy(), SamplingParams(max_tokens=40, n=3, ignore_eos=True)
    model, rows = policy.model, [[each] for each in sequences(8)]
    size, used = int(0.55 * device.memory_info()[0]), []
    num_blocks = size // LLM(model).engine.runner.block_bytes
    llm = LLM(model, None, EngineConfig(num_gpu_blocks_override=num_blocks))
    texts, addresses, losses = [], set(), []
    for step in range(5):
        llm.wake()
        cache = llm.engine.runner.cache
        assert cache.memory.mapped_bytes >= cache.nbytes
        (output,) = llm.generate([[1, 2, 3]], params)
        texts.append([completion.token_ids for completion in output.completions])
        llm.sleep()
        with policy.context.use():
            if step == 0:
                with policy.scope():
                    policy.arena.empty((size,), np.uint8)
            losses.append(sft.train_step(policy, rows, 0.0)["loss"])
        assert policy.arena.nbytes >= policy.arena.peak >= size
        assert 0 < cache.memory.mapped_bytes < cache.nbytes and cache.arrays is None
        addresses.add((policy.arena.address, cache.memory.address, llm.engine.runner.arena.address))
        used.append(device.memory_info()[0])
    assert all(text == texts[0] for text in texts) and len(set(losses)) == 1 and len(addresses) == 1
    assert policy.graphs.counts["replayed"] > policy.graphs.counts["captured"]
    assert llm.engine.runner.counts["replayed"] > 0
    # Nothing of the driver's in steps that are like others.
    assert max(used[2:]) - min(used[2:]) <= PIECE_BYTES


def test_graphs_for_which_there_is_no_memory_are_said_to_be_missing(monkeypatch, capsys):
    """Once, and not while what others have lent may do."""
    there, lent = [True, False, False], []
    monkeypatch.setattr(memory, "reclaim", lambda nbytes: lent.append(nbytes) or there.pop(0))
    of_run, error = graphs.MicroBatchGraphs(SFTConfig(), False, 1), MemoryError("out of\nmemory")
    buckets = [graphs.ShapeBucket({}, {}) for _ in range(3)]
    for bucket in buckets:
        of_run._make_room(bucket, error)
    assert [of_run.memory.has_room(bucket.lacked_bytes) for bucket in buckets] == [True, False, False]
    line = "rlnumba: some micro-batches run slower, without CUDA graphs: MemoryError: out of memory\n"
    assert capsys.readouterr().err == line and lent == [graphs.POOL_BYTES] * 3


def test_a_graph_is_captured_once_there_is_memory_for_it(monkeypatch):
    """A micro-batch that had too little runs without one until more is free, and so again after another failure."""
    free, attempts = [1 << 30], []
    monkeypatch.setattr(memory, "reclaim", lambda nbytes: False)
    monkeypatch.setattr(device, "memory_info", lambda: (free[0], 80 << 30))
    of_run = graphs.MicroBatchGraphs(SFTConfig(), False, 1)
    policy = SimpleNamespace(gradients=SimpleNamespace(are_zero=None), scope=contextlib.nullcontext)
    bucket = graphs.ShapeBucket({}, {})
    bucket.has_run = True

    def capture(policy, bucket, compute):
        attempts.append(free[0])
        if free[0] < 4 << 30:
            of_run._make_room(bucket, MemoryError("out of memory"))
        else:
            bucket.graph = SimpleNamespace(launch=lambda: None)

    monkeypatch.setattr(of_run, "_capture", capture)
    for gib, is_replayed in ((1, False), (1, False), (2, False), (2, False), (1, False), (5, True), (1, True)):
        free[0] = gib << 30
        assert of_run._replay(policy, bucket, None) == is_replayed
    assert attempts == [gib << 30 for gib in (1, 2, 5)]


def test_options_that_read_the_host_are_not_padded():
    train = dataclasses.replace(SFTConfig(), optimizer_in_backward=True, max_grad_norm=0.0)
    assert not graphs.MicroBatchGraphs(train, False, 1).pads and not graphs.MicroBatchGraphs(SFTConfig(), True, 1).pads
