"""Every public operator refuses a wrong array by name, before it launches anything."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import PolicyLossConfig
from rlnumba.kernels import decode_state
from rlnumba.kernels.attention import ops as attention
from rlnumba.kernels.attention import paged as paged_attention
from rlnumba.kernels.attention.sequences import PackedSequences, PagedSequences
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.logprob import ops as logprob
from rlnumba.kernels.logprob.terms import LogprobOutputs, LossGradients
from rlnumba.kernels.nn import elementwise, embedding, norm_to_residual, qkv, reduce, rmsnorm, swiglu
from rlnumba.kernels.optim.adamw import adamw, adamw_scalars
from rlnumba.kernels.optim.adamw_8bit import Moments, adamw_8bit
from rlnumba.kernels.peer import checksum
from rlnumba.kernels.rl import advantage, gae, policy_loss
from rlnumba.kernels.rl.policy_loss import METRICS
from rlnumba.kernels.rl.policy_loss_config import LossBatch, LossOutputs
from rlnumba.kernels.sampling import ops as sampling
from rlnumba.kernels.sampling.draw import Counters
from rlnumba.kernels.sampling.scan import SamplingLimits
from rlnumba.runtime import device, dispatch, launch

# Tokens, hidden, vocabulary; sequences; query heads, key heads, head_dim; ffn.
N, D, V, B, H, HK, E, F = 6, 8, 10, 2, 4, 2, 8, 12
STARTS = np.array([0, 2, 6], np.int32)


def f32(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def ids(*shape, below=4):
    return np.random.default_rng(1).integers(0, below, shape).astype(np.int32)


def tables(rows=8):
    return {"cos": f32(rows, E // 2), "sin": f32(rows, E // 2), "position_ids": ids(N)}


def qkv_arrays():
    return {
        "qkv": f32(N, (H + 2 * HK) * E), "q_weight": f32(E), "k_weight": f32(E), "eps": 1e-6, **tables(),
        "q": f32(N, H, E), "k": f32(N, HK, E), "v": f32(N, HK, E), "rstd": f32(N, H + HK),
    }  # fmt: skip


def cached_qkv_arrays():
    arrays = {key: value for key, value in qkv_arrays().items() if key not in ("q", "k", "v", "rstd")}
    caches = {"k_cache": f32(3, 4, HK, E), "v_cache": f32(3, 4, HK, E)}
    return {**arrays, "slot_mapping": np.arange(N, dtype=np.int32), "q": f32(N, H, E), **caches}


def qkv_gradients():
    arrays = {key: value for key, value in qkv_arrays().items() if key not in ("q", "k", "v")}
    return {
        "dq": f32(N, H, E), "dk": f32(N, HK, E), "dv": f32(N, HK, E), **arrays,
        "dqkv": f32(N, (H + 2 * HK) * E), "dq_weight": f32(E), "dk_weight": f32(E),
    }  # fmt: skip


def state():
    """A DecodeState of B rows with blocks of 4 tokens, one each."""
    rows = {name: np.ones(B, np.int32) for name in decode_state.DecodeState._fields}
    wide = {"block_tables": ids(B, 2), "stop_ids": ids(B, 1), "history": ids(B, 8), "banned": ids(B, 1)}
    return decode_state.DecodeState(**rows | wide | {"num_steps": np.zeros(1, np.int32)})


def heads():
    return {"q": f32(N, H, E), "k": f32(N, HK, E), "v": f32(N, HK, E)}


def packed():
    return {"cu_seqlens": STARTS, "max_seqlen": 4, "scale": 0.3}


HEADS, HEAD_GRADIENTS, CACHES = ("q", "k", "v"), ("dq", "dk", "dv"), ("k_cache", "v_cache")
PROJECTION = {"norm": qkv.HeadNorm, "rotation": qkv.Rotation}
# operator: {its argument: the NamedTuple, or the names of the tuple's elements, that it takes}.
TUPLES = {
    qkv.qkv_split: PROJECTION,
    qkv.qkv_split_to_cache: PROJECTION | {"caches": CACHES},
    qkv.qkv_split_backward: PROJECTION | {"gradients": HEAD_GRADIENTS},
    attention.attention: {"sequences": PackedSequences},
    attention.attention_backward: {
        "sequences": PackedSequences, "inputs": HEADS, "gradients": HEAD_GRADIENTS,
    },
    paged_attention.paged_attention: {"sequences": PagedSequences, "caches": CACHES},
    sampling.sample: {"limits": SamplingLimits, "counters": Counters},
    adamw: {"moments": ("m", "v")},
    adamw_8bit: {"moments": Moments},
    policy_loss.policy_loss: {
        "logprobs": ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"),
        "batch": LossBatch, "outputs": LossOutputs,
    },
}  # fmt: skip


def call(operator, **arguments):
    """Call an operator with arguments that are not yet in the tuples that it takes."""
    for argument, fields in TUPLES.get(operator, {}).items():
        names = [name for name in getattr(fields, "_fields", fields) if name in arguments]
        values = {name: arguments.pop(name) for name in names}
        arguments[argument] = tuple(values.values()) if isinstance(fields, tuple) else fields(**values)
    operator(**arguments)


def sampled():
    filters = {"temperature": f32(B) ** 2 + 1, "top_k": ids(B), "top_p": np.full(B, 0.9, np.float32)}
    noise = {"keys": np.ones((B, 2), np.uint32), "sample_index": ids(B), "position": ids(B)}
    drawn = {"token_ids": ids(B), "logprobs": f32(B)}
    return {"logits": f32(B, V), **filters, "min_p": np.zeros(B, np.float32), **noise, **drawn}


def head():
    return {"hidden": f32(N, D), "weight": f32(V, D), "ids": ids(N), "temperature": 0.8}


# operator: valid arguments, by name. Outputs are among them.
OPERATORS = {
    checksum.checksum: lambda: {"x": np.ones(8, np.int64), "partials": np.zeros(checksum.BLOCKS, np.int64)},
    embedding.embedding: lambda: {"input_ids": ids(N), "weight": f32(V, D), "out": f32(N, D)},
    embedding.embedding_backward: lambda: {"input_ids": ids(N), "dout": f32(N, D), "dweight": f32(V, D)},
    rmsnorm.rmsnorm: lambda: {"x": f32(N, D), "weight": f32(D), "eps": 1e-6, "out": f32(N, D), "rstd": f32(N)},
    norm_to_residual.norm_to_residual: lambda: {
        "x": f32(N, D), "weight": f32(D), "eps": 1e-6, "residual": f32(N, D), "out": f32(N, D), "rstd": f32(N),
    },
    rmsnorm.rmsnorm_backward: lambda: {
        "dout": f32(N, D), "x": f32(N, D), "weight": f32(D), "rstd": f32(N), "dx": f32(N, D), "dweight": f32(D),
    },
    qkv.qkv_split: qkv_arrays,
    qkv.qkv_split_to_cache: cached_qkv_arrays,
    qkv.qkv_split_backward: qkv_gradients,
    swiglu.swiglu: lambda: {"gate_up": f32(N, 2 * F), "out": f32(N, F)},
    swiglu.swiglu_backward: lambda: {"dout": f32(N, F), "gate_up": f32(N, 2 * F), "dgate_up": f32(N, 2 * F)},
    gemm.linear: lambda: {
        "x": f32(N, D), "weight": f32(F, D), "out": f32(N, F), "bias": f32(F), "residual": f32(N, F),
    },
    gemm.linear_swiglu: lambda: {
        "x": f32(N, D), "weight": f32(2 * F, D), "gate_up": f32(N, 2 * F), "out": f32(N, F),
    },
    gemm.linear_backward_input: lambda: {"dout": f32(N, F), "weight": f32(F, D), "dx": f32(N, D)},
    gemm.linear_backward_weight: lambda: {"dout": f32(N, F), "x": f32(N, D), "dweight": f32(F, D)},
    gemm.bias_backward: lambda: {"dout": f32(N, F), "dbias": f32(F)},
    attention.attention: lambda: {**heads(), **packed(), "out": f32(N, H, E), "lse": f32(H, N)},
    attention.attention_backward: lambda: {
        "dout": f32(N, H, E), **heads(), "out": f32(N, H, E), "lse": f32(H, N), **packed(),
        "dq": f32(N, H, E), "dk": f32(N, HK, E), "dv": f32(N, HK, E),
    },
    paged_attention.paged_attention: lambda: {
        "q": f32(N, H, E), "k_cache": f32(3, 4, HK, E), "v_cache": f32(3, 4, HK, E), "block_tables": ids(B, 2, below=3),
        "cu_seqlens": STARTS, "context_lens": np.array([2, 5], np.int32), "max_seqlen_q": 4, "max_context_len": 8,
        "scale": 0.3, "out": f32(N, H, E),
    },
    logprob.linear_logp: lambda: {
        **head(), "outputs": LogprobOutputs(f32(N), f32(N), f32(N), ids(N)),
    },
    logprob.linear_logp_backward: lambda: {
        **head(), "lse": f32(N), "gradients": LossGradients(f32(N), f32(N, D), f32(V, D)),
    },
    logprob.linear_logp_with_gradient: lambda: {
        **head(), "outputs": LogprobOutputs(f32(N), f32(N), f32(N), ids(N)),
        "gradients": LossGradients(f32(N), f32(N, D), f32(V, D)),
    },
    sampling.sample: sampled,
    sampling.apply_repetition_penalty: lambda: {
        "logits": f32(B, V), "penalty": np.ones(B, np.float32), "history": ids(B, 3),
    },
    decode_state.advance_decode_state: lambda: {
        "token_ids": ids(B), "logprobs": ids(B), "thresholds": ids(B), "block_size": 4, "state": state(),
        "results": np.zeros((2, 3, B), np.int32),
    },
    decode_state.advance_window_slots: lambda: {
        "state": state(), "tables": ids(B, 2), "block_size": 4, "slots": ids(B),
    },
    decode_state.edit_decode_state: lambda: {"edits": ids(2, 3, below=1), "count": 1, "state": state()},
    policy_loss.policy_loss: lambda: {
        "logprobs": -(f32(N) ** 2), "old_logprobs": -(f32(N) ** 2), "ref_logprobs": -(f32(N) ** 2),
        "rollout_logprobs": -(f32(N) ** 2), "advantages": f32(N), "loss_mask": np.ones(N, np.float32),
        "cu_seqlens": STARTS, "config": PolicyLossConfig(vllm_importance_sampling_correction=False), "scale": f32(1),
        "loss": f32(1), "dlogprobs": f32(N),
        "sequence_stats": f32(B, METRICS), "metrics": f32(METRICS),
    },
    advantage.group_advantages: lambda: {
        "rewards_per_func": f32(4, 3), "weights": f32(3), "num_generations": 2, "advantages": f32(4),
    },
    advantage.rloo_advantages: lambda: {"rewards": f32(4), "num_generations": 2, "advantages": f32(4)},
    gae.gae: lambda: {
        "rewards": f32(N), "values": f32(N), "cu_seqlens": STARTS, "gamma": 1.0, "lam": 0.9, "advantages": f32(N),
        "returns": f32(N),
    },
    reduce.segment_sums_of_squares: lambda: {"x": f32(N), "out": f32(1)},
    reduce.sum_in_order: lambda: {"x": f32(N), "out": f32(1)},
    reduce.sum_of_squares: lambda: {"x": f32(N), "out": f32(1)},
    reduce.masked_whiten: lambda: {"x": f32(N), "mask": np.ones(N, np.uint8), "out": f32(N)},
    reduce.group_mean_std: lambda: {"x": f32(2, 3), "mean": f32(2), "std": f32(2)},
    adamw: lambda: {
        "weights": f32(N), "master": f32(N), "grads": f32(N), "m": f32(N), "v": f32(N) ** 2,
        "scalars": adamw_scalars(1e-3, 0.9, 0.999, 1e-8, 0.0, 1), "decay_end": 2,
    },
    adamw_8bit: lambda: {
        "weights": f32(8), "master": f32(8), "grads": f32(8), "m": np.zeros(8, np.uint8), "v": np.zeros(8, np.uint8),
        "m_absmax": f32(1), "v_absmax": f32(1), "scalars": adamw_scalars(1e-3, 0.9, 0.999, 1e-8, 0.0, 1),
        "decay_end": 2,
    },
    elementwise.add: lambda: {"x": f32(N), "y": f32(N), "out": f32(N)},
    elementwise.fold_two: lambda: {"x": f32(N), "y": f32(N), "out": f32(N), "is_first": True},
    elementwise.scale: lambda: {"x": f32(N), "factor": 2.0, "out": f32(N)},
    elementwise.cast: lambda: {"x": f32(N), "out": f32(N)},
    elementwise.fill: lambda: {"value": 1.0, "out": f32(N)},
    elementwise.gather_rows: lambda: {"x": f32(N, D), "rows": ids(3), "out": f32(3, D)},
    elementwise.scatter_rows: lambda: {"x": f32(3, D), "rows": np.arange(3, dtype=np.int32), "out": f32(N, D)},
}  # fmt: skip

# (operator, argument, axis) that may be longer than the other arguments say; of any length at all.
FREE = {
    ("checksum", "x", 0),
    ("advance_decode_state", "results", 0),
    ("advance_decode_state", "results", 2),
    ("edit_decode_state", "edits", 0),
    ("embedding", "weight", 0),
    ("embedding_backward", "dweight", 0),
    ("bias_backward", "dout", 0),
    ("linear_logp", "weight", 0),
    ("attention", "cu_seqlens", 0),
    ("attention_backward", "cu_seqlens", 0),
    ("gae", "cu_seqlens", 0),
    ("paged_attention", "block_tables", 1),
    ("sample", "logits", 1),
    ("apply_repetition_penalty", "logits", 1),
    ("apply_repetition_penalty", "history", 1),
    ("group_mean_std", "x", 1),
    ("sum_of_squares", "x", 0),
    ("segment_sums_of_squares", "x", 0),
    ("sum_in_order", "x", 0),
    ("fill", "out", 0),
    ("gather_rows", "x", 0),
    ("scatter_rows", "out", 0),
}
# Elementwise operators take any number of dimensions.
ANY_SHAPE = {"add", "fold_two", "scale", "cast", "fill"}
ARRAYS = [
    pytest.param(operator, name, id=f"{operator.__name__}-{name}")
    for operator, make in OPERATORS.items()
    for name, value in make().items()
    if isinstance(value, np.ndarray)
]


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch):
    """Whatever is refused is refused before."""
    if device.name() == "cpu":
        return

    def refuse(*arguments, **options):
        raise AssertionError("launched")

    monkeypatch.setattr(launch, "launch", refuse)
    for operator in OPERATORS:
        module = inspect.getmodule(operator)
        if "launch" in vars(module):
            monkeypatch.setattr(module, "launch", refuse)


def arguments(operator):
    return {name: device.asarray(x) if isinstance(x, np.ndarray) else x for name, x in OPERATORS[operator]().items()}


def refused(operator, name, value):
    """The message of the ValueError that a valid call with one argument exchanged raises."""
    with pytest.raises(ValueError) as raised:
        call(operator, **arguments(operator) | {name: value})
    message = str(raised.value)
    assert message.startswith(f"{operator.__name__}: ") and "\n" not in message, message
    return message


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_the_arguments_are_valid(operator):
    if device.name() != "cpu":
        pytest.skip("the other tests of an operator launch it")
    call(operator, **arguments(operator))


@pytest.mark.parametrize("operator, name", ARRAYS)
def test_dtype(operator, name):
    array = arguments(operator)[name]
    of_integers = np.int32 if array.dtype == np.int64 else np.int64
    wrong = array.astype(np.float64 if array.dtype.kind == "f" else of_integers)
    message = refused(operator, name, wrong)
    assert f"{name} must be" in message and f"got {tuple(wrong.shape)} {wrong.dtype}" in message


@pytest.mark.parametrize("operator, name", ARRAYS)
def test_layout(operator, name):
    array = arguments(operator)[name]
    apart = device.xp().repeat(array, 2, axis=-1)[..., ::2]
    if apart.flags.c_contiguous:
        pytest.skip("one element has one layout")
    message = refused(operator, name, apart)
    assert f"{name} must be" in message and message.endswith(", not C-contiguous")


@pytest.mark.parametrize("operator, name", ARRAYS)
def test_shape(operator, name):
    array = arguments(operator)[name]
    if operator.__name__ not in ANY_SHAPE:
        assert f"{name} must be" in refused(operator, name, array[None])
    for axis in range(array.ndim):
        if (operator.__name__, name, axis) not in FREE:
            longer = device.xp().concatenate([array, array.take(device.asarray([0]), axis=axis)], axis=axis)
            refused(operator, name, longer)


@pytest.mark.parametrize("operator, name", ARRAYS)
def test_device(operator, name):
    """A NumPy array where the GPU's are wanted; without a GPU, something that has an array's attributes."""
    array = arguments(operator)[name]
    if device.name() == "cuda":
        other = device.to_host(array)
    else:
        other = SimpleNamespace(shape=array.shape, dtype=array.dtype, flags=array.flags, itemsize=array.itemsize)
    message = refused(operator, name, other)
    assert f"{name} must be an array of device {device.name()}, " in message


@pytest.mark.parametrize("head_dim", [7, 258, 0])
@pytest.mark.parametrize("operator", [attention.attention, attention.attention_backward])
def test_head_dim_of_packed_attention(operator, head_dim):
    wrong = {
        name: device.xp().zeros((*x.shape[:2], head_dim), np.float32)
        for name, x in arguments(operator).items()
        if isinstance(x, device.xp().ndarray) and x.ndim == 3
    }
    with pytest.raises(ValueError, match=f"{operator.__name__}: head_dim must be even and at most 256, got {head_dim}"):
        call(operator, **arguments(operator) | wrong)


def test_head_dim_of_paged_attention():
    xp, operator = device.xp(), paged_attention.paged_attention
    q, cache = xp.zeros((N, H, 9), np.float32), xp.zeros((3, 4, HK, 9), np.float32)
    with pytest.raises(ValueError, match="paged_attention: head_dim must be even and at most 256, got 9"):
        call(operator, **arguments(operator) | {"q": q, "k_cache": cache, "v_cache": cache, "out": q})


@pytest.mark.parametrize(
    "operator",
    [attention.attention, attention.attention_backward, paged_attention.paged_attention],
)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scale_of_attention(operator, scale):
    assert "scale must be > 0, got" in refused(operator, "scale", scale)


@pytest.mark.parametrize("operator", [attention.attention, attention.attention_backward, gae.gae])
def test_sequences_have_a_start(operator):
    empty = device.xp().zeros(0, np.int32)
    assert "cu_seqlens must have at least one element" in refused(operator, "cu_seqlens", empty)


@pytest.mark.sim
@pytest.mark.parametrize("family, block_size", [("sm90", 8), ("sm90", 48), ("sm80", 24)])
def test_block_size(family, block_size):
    """The kernels for tensor cores do not take every block size; they say so instead of leaving it to others."""
    runs(family)
    xp, bf16, operator = device.xp(), device.dtype("bfloat16"), paged_attention.paged_attention
    q, cache = xp.zeros((N, H, 16), bf16), xp.zeros((3, block_size, HK, 16), bf16)
    wrong = {"q": q, "k_cache": cache, "v_cache": cache, "out": q}
    with (
        dispatch.forced(family),
        pytest.raises(ValueError, match=f"paged_attention: block_size must .*, got {block_size}"),
    ):
        call(operator, **arguments(operator) | wrong)


@pytest.mark.sim
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_address(family, name):
    """TMA and cp.async need arrays that begin at multiples of 16 bytes."""
    runs(family)
    xp, bf16 = device.xp(), device.dtype("bfloat16")
    shapes = {"q": (N, H, 16), "k": (N, HK, 16), "v": (N, HK, 16), "out": (N, H, 16)}
    arrays = {key: xp.zeros(shape, bf16) for key, shape in shapes.items()}
    count = int(np.prod(shapes[name]))
    arrays[name] = xp.zeros(count + 1, bf16)[1:].reshape(shapes[name])
    with (
        dispatch.forced(family),
        pytest.raises(ValueError, match=f"attention: {name} must begin at a multiple of 16 bytes"),
    ):
        call(attention.attention, **arguments(attention.attention) | arrays)


def runs(family):
    """Skip where a family cannot be forced."""
    if device.name() == "cpu":
        pytest.skip("families are of kernels")
    if (
        device.name() == "cuda"
        and not dispatch.RUNS_ON[family][0] <= dispatch.architecture() <= dispatch.RUNS_ON[family][1]
    ):
        pytest.skip(f"this GPU does not run {family} kernels")


def test_no_operator_is_left_out():
    """Every function of the kernels' modules whose name has a reference beside it, or that writes its arguments."""
    import ast
    import pathlib

    import rlnumba.kernels

    left_out = []
    known = {(operator.__module__, operator.__name__) for operator in OPERATORS}
    for path in sorted(pathlib.Path(rlnumba.kernels.__path__[0]).glob("*.py")):
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        for name in functions:
            if f"{name}_ref" in functions and (f"rlnumba.kernels.{path.stem}", name) not in known:
                left_out.append(f"{path.stem}.{name}")
    # Device functions and host functions that share their names with references.
    assert set(left_out) <= {"philox.philox"}, left_out
