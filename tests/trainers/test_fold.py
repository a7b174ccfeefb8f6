"""The gradients of a step of several micro-batches: those of each, computed alone, added in their order by NumPy."""

import numpy as np
import pytest

from rlnumba.config import LoraConfig, SFTConfig
from rlnumba.data import TokenSequence
from rlnumba.kernels.logprob import chunked
from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.ptx.warp import flushed
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.model.heads import BothHeads, ValueHead
from rlnumba.model.lora import Adapter
from rlnumba.model.transformer import load_model
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device, dispatch, memory
from rlnumba.trainers import sft
from rlnumba.trainers.sft import target_batch
from tests.close import assert_same_bits
from tests.trainers.runs import GOLDEN

MICRO_BATCHES = 4
MODELS = GOLDEN / "models"
DTYPES = ["float32", "bfloat16"]


def policy_of(name, dtype="float32", heads=LM_HEAD, lora=False, **train):
    model = load_model(MODELS / name, dtype, heads)
    if "score" in heads:
        model.weights.init_score("normal", 3)
    if lora:
        options = model.config, LoraConfig(r=4)
        model.adapter, exact = (
            Adapter.new(*options, kind, "", 0, model.weights.score) for kind in (model.dtype.name, "float32")
        )
        # B, which begins as zero, has to pass on a gradient.
        exact.flat += np.float32(0.01)
        exact.zero_outside_blocks()
        cast(exact.flat, model.adapter.flat)
    options = {"gradient_accumulation_steps": MICRO_BATCHES, "gradient_checkpointing": False} | train
    return Policy(model, SFTConfig(**options))


def batches_of(policy, most=40):
    """TargetBatches of several sequences; some ids are in all of them, and repeated."""
    rng, vocabulary = np.random.default_rng(5), policy.model.config.vocab_size
    found = []
    for index in range(MICRO_BATCHES):
        lengths = rng.integers(2, most, 3 + index)
        ids = [np.minimum(rng.geometric(0.1, n), vocabulary - 1).astype(np.int32) for n in lengths]
        found.append(target_batch([TokenSequence(each, np.ones(len(each), bool)) for each in ids]))
    return found


def at_once(policy, batch, weights):
    logprobs = device.xp().empty(len(weights), np.float32)
    policy.forward_backward(batch, weights, logprobs)


def in_two_calls(policy, batch, weights):
    logprobs, entropy = (device.xp().empty(len(weights), np.float32) for _ in range(2))
    forward = policy.forward(batch, logprobs, entropy)
    policy.backward(forward, weights, weights[::-1].copy())


def of_values(policy, batch, weights):
    values = device.xp().empty(len(weights), np.float32)
    policy.backward(policy.forward(batch, values, head=ValueHead()), weights)


def with_values(policy, batch, weights):
    logprobs, values = (device.xp().empty(len(weights), np.float32) for _ in range(2))
    forward = policy.forward(batch, logprobs, values, head=BothHeads())
    policy.backward(forward, weights, weights[::-1].copy())


def gradients(policy, backward, batches):
    """The gradients of a step of these micro-batches: (n,) on the host."""
    policy.zero_grad()
    for batch in batches:
        count = len(batch.rows)
        weights = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        with policy.scope():
            backward(policy, batch, device.asarray(weights))
    return device.to_host(policy.grads.flat).copy()


def added(total, gradient):
    """One addition an element; a GPU's takes subnormal numbers for 0."""
    return total + gradient if device.name() == "cpu" else flushed(flushed(total) + flushed(gradient))


def check_fold(policy, backward, most=40):
    batches = batches_of(policy, most)
    alone = [gradients(policy, backward, [batch]) for batch in batches]
    total = alone[0]
    for gradient in alone[1:]:
        total = added(total, gradient)
    together = gradients(policy, backward, batches)
    assert np.abs(total).max() > 0
    for p in policy.grads.parameters if policy.model.adapter is None else ():
        part = slice(p.offset, p.offset + p.size)
        assert_same_bits(together[part], total[part], p.name)
    assert_same_bits(together, total, "gradients")


# Tied and untied; biases of projections; head_dim 48.
NAMES = ["qwen3_tied", "qwen3_untied", "qwen2", "llama_head48"]
BACKWARDS = {"at_once": at_once, "in_two_calls": in_two_calls}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("name", NAMES)
def test_language_model(name, backward):
    check_fold(policy_of(name), BACKWARDS[backward])


@pytest.mark.parametrize("backward", BACKWARDS)
def test_more_targets_than_the_head_takes_at_a_time(monkeypatch, backward):
    """The head's gradient is the sum over several chunks of rows."""
    monkeypatch.setattr(chunked, "CHUNK_SUMS", 64 * 16)
    check_fold(policy_of("qwen3_tied"), BACKWARDS[backward])


def test_recomputed_activations():
    check_fold(policy_of("qwen3_tied", gradient_checkpointing=True), at_once)


@pytest.mark.parametrize("heads, backward", [(SCORE_HEAD, of_values), (LM_HEAD + SCORE_HEAD, with_values)])
def test_critic(heads, backward):
    check_fold(policy_of("qwen3_tied", heads=heads), backward)


@pytest.mark.parametrize("heads, backward", [(LM_HEAD, at_once), (LM_HEAD + SCORE_HEAD, with_values)])
def test_adapter(heads, backward):
    check_fold(policy_of("qwen3_tied", heads=heads, lora=True), backward)


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_language_model_in_kernels(dtype):
    check_fold(policy_of("qwen3_micro", dtype), at_once, most=4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("name", NAMES)
def test_gpu(name, family):
    """16-bit models on every family of kernels; some hundred tokens a micro-batch."""
    if family == "sm90" and dispatch.architecture() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    with dispatch.forced(family):
        for backward in BACKWARDS.values():
            check_fold(policy_of(name, "bfloat16"), backward)


@pytest.mark.gpu
@pytest.mark.sm90
def test_gpu_of_many_tokens(monkeypatch):
    """TMA loads what is there in some columns of a gradient's tile, L2 adds to the others; the head has many chunks."""
    monkeypatch.setattr(logprob_sm90, "one_pass_shape", lambda width, vocabulary: (128, 2))
    for backward in BACKWARDS.values():
        check_fold(policy_of("qwen3_tied", "bfloat16"), backward, most=256)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, backward", [(SCORE_HEAD, of_values), (LM_HEAD + SCORE_HEAD, with_values)])
def test_gpu_critic_and_adapter(heads, backward):
    for lora in (False, True):
        check_fold(policy_of("qwen3_tied", "bfloat16", heads, lora), backward)


def test_graphs_add_what_the_micro_batches_add_alone():
    """Trainers run micro-batches through graphs; where there are none, padded to a bucket's shape or not."""
    policy = policy_of("qwen3_tied", per_device_train_batch_size=2)
    policy.graphs.pads = True
    rows = [[TokenSequence(np.arange(1, n, dtype=np.int32), np.ones(n - 1, bool))] for n in (9, 5, 30, 12, 7, 20, 3, 8)]
    policy.step = lambda learning_rate: {}
    batches, found = sft.micro_batches(policy, rows), []
    for chosen in [batches, *([batch] for batch in batches)]:
        policy.zero_grad()
        for batch in chosen:
            weighted = batch.with_arrays(targets={"weights": np.full(batch.num_targets, -0.01, np.float32)})
            policy.run(sft.step, weighted, sft.OUTPUTS, False)
        found.append(device.to_host(policy.grads.flat).copy())
    together, total, *others = found
    for gradient in others:
        total = added(total, gradient)
    assert_same_bits(together, total, "gradients")


def test_memory_of_the_head_is_counted_where_a_step_has_several_micro_batches():
    """Of one micro-batch there is none; the plan of a run makes the same Policy."""
    policies, sizes = [], []
    for count in (1, 2):
        before = held_gradients()
        policies.append(policy_of("qwen3_tied", gradient_accumulation_steps=count))
        sizes.append(held_gradients() - before)
    assert sizes[1] - sizes[0] == 144 * 64 * 4


def held_gradients():
    memory.reset_peaks()
    return memory.report().get("grads", 0)
