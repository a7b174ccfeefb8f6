import re

import numpy as np
import pytest

from rlnumba import device
from rlnumba.config import EngineConfig
from rlnumba.engine import check
from rlnumba.errors import ConfigError
from rlnumba.kernels import attention, attention_backward, choice, gemm, launch, logprob, paged_attention
from rlnumba.kernels.attention import attention_ref
from rlnumba.kernels.attention_backward import attention_backward_ref
from rlnumba.kernels.gemm import Measured, linear_backward_ref, linear_ref, linear_swiglu_ref
from rlnumba.kernels.logprob import linear_logp_ref
from rlnumba.kernels.swiglu import swiglu
from rlnumba.model.config import ModelConfig
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from tests.close import assert_close, assert_same_bits


@pytest.fixture(autouse=True)
def unforced(monkeypatch):
    """Nothing is forced, whatever RLNUMBA_KERNELS says; launches are not noted: other tests have kernels compiled."""
    monkeypatch.setattr(launch, "observers", [])
    with choice.forced("auto"):
        yield


@pytest.fixture
def gpu(monkeypatch):
    """A function that pretends to run on a GPU of a compute capability; nothing may be launched there."""
    monkeypatch.setattr(device, "name", lambda: "cuda")

    def pretend(*capability):
        monkeypatch.setattr(choice, "architecture", lambda: capability)

    pretend(9, 0)
    return pretend


def test_rows_of_the_table_are_possible():
    for row in choice.TABLE:
        since, until = choice.RUNS_ON[row.family]
        assert row.family in choice.OFFERED[row.operator] and row.why
        assert since <= row.since <= row.until <= until


def test_table(gpu):
    tensor_cores = {
        (7, 5): "simple",
        (8, 0): "tensor_core",
        (8, 6): "tensor_core",
        (9, 0): "hopper",
        (12, 0): "tensor_core",
    }
    families = {
        "product": tensor_cores,
        "attention": tensor_cores,
        "logprob": {(8, 6): "simple", (9, 0): "hopper", (12, 0): "simple"},
    }
    for operator in choice.OFFERED:
        for capability, expected in families[operator].items():
            gpu(*capability)
            assert choice.family(operator) == expected, (operator, capability)
            assert choice.describe(operator).startswith(expected)


def test_forcing(gpu):
    with choice.forced("tensor_core"):
        assert [choice.family(operator) for operator in choice.OFFERED] == ["tensor_core", "tensor_core", "simple"]
        assert choice.describe("attention") == "tensor_core (forced)"
        with choice.forced("attention=simple, logprob=hopper"):
            assert [choice.family(operator) for operator in choice.OFFERED] == ["hopper", "simple", "hopper"]
            assert choice.is_forced("attention") and not choice.is_forced("product")
        assert choice.family("attention") == "tensor_core"
    assert choice.family("attention") == "hopper"


def test_the_environment_forces(gpu, monkeypatch):
    monkeypatch.setattr(choice, "_forced", None)
    monkeypatch.setenv("RLNUMBA_KERNELS", "attention=simple")
    assert choice.family("attention") == "simple" and choice.family("logprob") == "hopper"
    monkeypatch.setattr(choice, "_forced", None)
    monkeypatch.setenv("RLNUMBA_KERNELS", "cutlass")
    with pytest.raises(
        ConfigError, match="RLNUMBA_KERNELS: must be auto, .* hopper, tensor_core, simple, got 'cutlass'"
    ):
        choice.family("attention")


@pytest.mark.parametrize(
    "names, message",
    [
        ("wgmma", "kernels: must be auto, operator=family or one of hopper, tensor_core, simple, got 'wgmma'"),
        ("attention=fast", "kernels: attention must be one of hopper, tensor_core, simple, got 'fast'"),
        ("logprob=tensor_core", "kernels: logprob must be one of hopper, simple, got 'tensor_core'"),
        ("gemm=hopper", "kernels: operator must be one of product, attention, logprob, got 'gemm'"),
        ("hopper", "kernels: this GPU, of compute capability 8.0, does not run hopper kernels"),
    ],
)
def test_wrong_names_are_refused(gpu, names, message):
    gpu(8, 0)
    with pytest.raises(ConfigError, match=message):
        choice.force(names)


def test_the_numpy_device_has_no_kernels(monkeypatch):
    monkeypatch.setattr(device, "name", lambda: "numpy")
    with pytest.raises(ConfigError, match="kernels: hopper needs a GPU or the simulator, not device numpy"):
        choice.force("hopper")


@pytest.mark.parametrize(
    "rows, expected",
    [
        ((), "cublas: ours was not measured on compute capability 9.0"),
        ((Measured("linear", 8, 0.96, 0.89),), r"cublas: ours has 0.89 of its speed at worst \(0.96 on average\) in"),
        ((Measured("linear", 1, 1.2, 1.1), Measured("linear", 8, 0.96, 0.87)), "cublas: ours has 0.87 .* 8 rows, and"),
        (
            (Measured("linear", 8, 0.96, 0.9),),
            r"numba: at least 0.9 of cuBLAS's speed wherever measured; hopper \(0.9\d to 1\.\d\d of",
        ),
    ],
)
def test_auto_is_ours_where_it_is_fast_enough(gpu, monkeypatch, rows, expected):
    monkeypatch.setattr(gemm, "_backend", "auto")
    monkeypatch.setattr(gemm, "MEASURED", {(9, 0): rows} if rows else {})
    gemm._measured_choice.cache_clear()
    try:
        assert gemm.backend() == expected.split(":")[0]
        assert re.match(expected, gemm.describe())
        assert gemm.backend(np.dtype(np.float32)) == "cublas"
        with choice.forced("tensor_core"):
            assert gemm.describe() == "numba: kernels are forced; tensor_core (forced)"
            monkeypatch.setattr(gemm, "_backend", "cublas")
            assert gemm.describe() == "cublas: asked for"
    finally:
        gemm._measured_choice.cache_clear()


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Sequences:
    """Packed sequences, and the same keys in blocks of a cache: what all forms of attention get."""

    def __init__(self, rng, lengths, heads, kv_heads, head_dim, dtype="bfloat16", block_size=16):
        tokens, kind = sum(lengths), device.dtype(dtype)
        self.lengths, self.scale = lengths, head_dim**-0.5
        shapes = [(tokens, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
        self.q, self.k, self.v, self.dout = (rng.standard_normal(shape).astype(kind) for shape in shapes)
        width = -(-max(lengths) // block_size)
        self.tables = rng.permutation(len(lengths) * width).astype(np.int32).reshape(-1, width)
        shape = (self.tables.size, block_size, kv_heads, head_dim)
        self.caches = [np.full(shape, np.nan, kind) for _ in range(2)]
        for b, (start, end) in enumerate(zip(bounds(lengths)[:-1], bounds(lengths)[1:], strict=True)):
            at = np.arange(end - start)
            for cache, x in zip(self.caches, (self.k, self.v), strict=True):
                cache[self.tables[b][at // block_size], at % block_size] = x[start:end]

    def forward(self):
        """(out, lse) of attention, on the device."""
        xp = device.xp()
        out, lse = xp.full(self.q.shape, np.nan, self.q.dtype), xp.full(self.q.shape[1::-1], np.nan, np.float32)
        arrays = [device.asarray(x) for x in (self.q, self.k, self.v, bounds(self.lengths))]
        attention.attention(*arrays, max(self.lengths), self.scale, out, lse)
        return out, lse

    def paged(self, tokens):
        """(out, rows) of paged_attention for the last `tokens` of each sequence; rows: where they are packed."""
        lengths = [min(tokens, length) for length in self.lengths]
        spans = zip(bounds(self.lengths)[1:], lengths, strict=True)
        rows = np.concatenate([np.arange(end - length, end) for end, length in spans])
        arrays = (self.q[rows], *self.caches, self.tables, bounds(lengths), np.array(self.lengths, np.int32))
        q, *others = [device.asarray(x) for x in arrays]
        out = device.xp().full(q.shape, np.nan, q.dtype)
        paged_attention.paged_attention(q, *others, max(lengths), max(self.lengths), self.scale, out)
        return device.to_host(out), rows

    def gradient(self, out, lse):
        """[dq, dk, dv] of attention_backward."""
        gradients = [device.xp().full(x.shape, np.nan, x.dtype) for x in (self.q, self.k, self.v)]
        dout, q, k, v, starts = (device.asarray(x) for x in (self.dout, self.q, self.k, self.v, bounds(self.lengths)))
        attention_backward.attention_backward(
            dout, q, k, v, out, lse, starts, max(self.lengths), self.scale, *gradients
        )
        return gradients


def run_attention(rng, family, lengths, heads, kv_heads, head_dim, dtype, chunks):
    """All forms by one family: right, and rollout and training with the same bits."""
    with choice.forced(family):
        case = Sequences(rng, lengths, heads, kv_heads, head_dim, dtype)
        out, lse = case.forward()
        packed = device.to_host(out)
        expected, expected_lse = attention_ref(case.q, case.k, case.v, bounds(lengths), case.scale)
        longest = max(lengths)
        assert_close(packed, expected, terms=longest, scale=2 * float(np.abs(expected).max()), what="out")
        assert_close(lse, expected_lse, terms=head_dim, scale=2 * float(np.abs(expected_lse).max()), what="lse")
        for tokens in chunks:
            some, rows = case.paged(tokens)
            assert_same_bits(some, packed[rows], f"the last {tokens} tokens against the cache")
        expected = attention_backward_ref(case.dout, case.q, case.k, case.v, bounds(lengths), case.scale)
        for actual, wanted, what in zip(case.gradient(out, lse), expected, ("dq", "dk", "dv"), strict=True):
            # Of probabilities and their gradients rounded to 16 bits.
            size = 4 * float(np.abs(wanted).max()) + 1
            assert_close(actual, wanted, terms=head_dim + longest, scale=size, what=what)


@pytest.mark.sim
@pytest.mark.parametrize("family", choice.FAMILIES)
def test_rollout_and_training_agree_in_the_simulator(rng, family):
    if device.name() == "cuda":
        pytest.skip("test_gpu_rollout_and_training_agree has this")
    run_attention(rng, family, [70, 3], 2, 1, 16, "bfloat16", [1, 40])


@pytest.mark.gpu
@pytest.mark.parametrize("family", choice.FAMILIES)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(16, 8, 128), (6, 6, 48), (8, 2, 80), (9, 3, 64), (4, 1, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_rollout_and_training_agree(rng, family, heads, kv_heads, head_dim, dtype):
    skip_unless_runs(family)
    run_attention(rng, family, [1100, 70, 1, 64, 129], heads, kv_heads, head_dim, dtype, [1, 2, 65, 1100])


def skip_unless_runs(family):
    since, until = choice.RUNS_ON[family]
    if not since <= choice.architecture() <= until:
        pytest.skip(f"this GPU does not run {family} kernels")


# dtype, H, HK, E: those of models, and ones that one family takes and another does not.
HEADS = [
    ("bfloat16", 4, 2, 16),
    ("float16", 4, 4, 8),
    ("bfloat16", 2, 1, 18),
    ("float32", 4, 2, 16),
    ("bfloat16", 33, 1, 16),
    ("float16", 32, 1, 256),
]


@pytest.mark.sim
@pytest.mark.parametrize("dtype, heads, kv_heads, head_dim", HEADS)
def test_forms_of_attention_are_of_one_family(rng, monkeypatch, dtype, heads, kv_heads, head_dim):
    """Whatever is forced, and whether the family takes such heads: all forms are computed by its kernels, or none."""
    if device.name() == "numpy":
        pytest.skip("numpy has one form")
    called = []

    def note(module, name, family):
        monkeypatch.setattr(module, name, lambda *arguments, **options: called.append(family))

    note(attention.attention_hopper, "attention_hopper", "hopper")
    note(paged_attention.hopper, "paged_attention_hopper", "hopper")
    note(attention_backward, "hopper_attention_backward", "hopper")
    note(attention.attention_tensor_core, "attend", "tensor_core")
    note(attention.attention_tensor_core, "paged_attend", "tensor_core")
    note(attention_backward, "attend_backward", "tensor_core")
    for module in (attention, paged_attention, attention_backward):
        note(module, "launch", "simple")
    monkeypatch.setattr(attention_backward, "attention_delta", lambda dout, out: None)
    case = Sequences(rng, [3, 1], heads, kv_heads, head_dim, dtype)
    taken = {}
    for family in choice.FAMILIES:
        if (
            device.name() == "cuda"
            and not choice.RUNS_ON[family][0] <= choice.architecture() <= choice.RUNS_ON[family][1]
        ):
            continue
        called.clear()
        with choice.forced(family):
            out, lse = case.forward()
            case.paged(1)
            case.paged(3)
            case.gradient(out, lse)
            taken[family] = attention.family_of(case.q, case.k)
        assert set(called) == {taken[family]} and len(called) >= 4, (family, called)
    assert taken["simple"] == "simple"
    if dtype == "float32" or head_dim % 8:
        assert set(taken.values()) == {"simple"}


def run_products(rng, family, m, n, k, dtype):
    """linear with all its options and its gradients, by one family."""
    kind = device.dtype(dtype)
    shapes = ((m, k), (n, k), (m, n), n, (m, n))
    x, w, dout, bias, residual = (rng.standard_normal(shape).astype(kind) for shape in shapes)
    xd, wd, dd, bd, rd = (device.asarray(a) for a in (x, w, dout, bias, residual))
    x, w, dout, bias, residual = (a.astype(np.float64) for a in (x, w, dout, bias, residual))
    xp = device.xp()
    size = 8 + 8 * np.sqrt(max(m, n, k))
    with choice.forced(family):
        assert gemm.backend(kind) == "numba"
        out, logits = xp.full((m, n), np.nan, kind), xp.full((m, n), np.nan, np.float32)
        gemm.linear(xd, wd, out, bias=bd, residual=rd)
        gemm.linear(xd, wd, logits)
        gated = None
        if n % 2 == 0:
            gate_up, gated = xp.full((m, n), np.nan, kind), xp.full((m, n // 2), np.nan, kind)
            gemm.linear_swiglu(xd, wd, gate_up, gated)
        dx, dweight = xp.full((m, k), np.nan, kind), xp.ones((n, k), np.float32)
        gemm.linear_backward_input(dd, wd, dx)
        gemm.linear_backward_weight(dd, xd, dweight)
    assert_close(out, linear_ref(x, w, bias, residual), terms=k, scale=size, what="out")
    assert_close(logits, linear_ref(x, w), terms=k, scale=size, what="float32 out")
    if gated is not None:
        expected, _ = linear_swiglu_ref(x, w)
        assert_close(gate_up, expected, terms=k, scale=size, what="gate_up")
        plain = xp.full((m, n // 2), np.nan, kind)
        swiglu(gate_up, plain)
        # Of the gate as it was rounded, so the error is that of the last step.
        assert_close(gated, device.to_host(plain).astype(np.float64), what="swiglu")
    expected_dx, expected_dweight, _ = linear_backward_ref(dout, x, w)
    assert_close(dx, expected_dx, terms=n, scale=size, what="dx")
    assert_close(dweight, expected_dweight + 1, terms=m, scale=size, what="dweight")


# Shapes that fast kernels take, that they do not, and products without rows or steps.
PRODUCTS = [(9, 24, 40), (1, 8, 8), (3, 20, 9), (0, 8, 8), (2, 8, 0)]


@pytest.mark.sim
@pytest.mark.parametrize("family", choice.FAMILIES)
@pytest.mark.parametrize("m, n, k", PRODUCTS)
def test_products(rng, family, m, n, k):
    if device.name() == "cuda":
        skip_unless_runs(family)
    run_products(rng, family, m, n, k, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("family", choice.FAMILIES)
@pytest.mark.parametrize("m, n, k", [(1000, 1024, 2048), (64, 4096, 1024), (1, 6144, 1024), (37, 1001, 768)])
def test_gpu_products(rng, family, m, n, k):
    skip_unless_runs(family)
    run_products(rng, family, m, n, k, "bfloat16")


@pytest.mark.sim
def test_families_compute_products_where_they_can(rng, monkeypatch):
    if device.name() == "numpy":
        pytest.skip("numpy has one product")
    called = []
    for family in gemm.FAMILIES:
        monkeypatch.setitem(gemm.FAMILIES, family, lambda *arguments, family=family, **options: called.append(family))
    for family in gemm.FAMILIES:
        if device.name() == "cuda":
            skip_unless_runs(family)
        for m, n, k, dtype, taken in [
            (3, 16, 8, "float16", True),
            (3, 12, 8, "float16", False),
            (3, 16, 12, "bfloat16", False),
            (3, 16, 0, "bfloat16", False),
            (3, 16, 8, "float32", False),
        ]:
            called.clear()
            x, w, out = (device.asarray(np.zeros(shape, device.dtype(dtype))) for shape in ((m, k), (n, k), (m, n)))
            with choice.forced(family):
                gemm.linear(x, w, out)
            assert called == [family] * taken, (family, m, n, k, dtype)


@pytest.mark.sim
@pytest.mark.parametrize("family", choice.OFFERED["logprob"])
def test_logprob(rng, family):
    """Both ways to a log-prob have the same bits, where the products are Hopper's."""
    if device.name() == "numpy":
        pytest.skip("numpy has one way")
    if device.name() == "cuda":
        skip_unless_runs("hopper")
    kind = device.dtype("bfloat16")
    hidden, weight = rng.standard_normal((5, 72)).astype(kind), rng.standard_normal((40, 72)).astype(kind)
    ids = rng.integers(0, 40, 5).astype(np.int32)
    arrays = [device.asarray(x) for x in (hidden, weight, ids)]
    out = [device.xp().full(5, np.nan, np.float32) for _ in range(2)]
    with choice.forced(f"product=hopper,logprob={family}"):
        assert logprob._fused(*arrays[:2], None) == (family == "hopper")
        logprob.linear_logp(*arrays, 0.7, *out)
        plain = [device.xp().full(5, np.nan, np.float32) for _ in range(2)]
        logits = device.xp().empty((5, 40), np.float32)
        gemm.linear(*arrays[:2], logits)
        logprob._logp_of_rows(logits, None, arrays[2], 0.7, *plain, None, None)
    expected = linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids, 0.7)
    for actual, same, wanted, what in zip(out, plain, expected, ("logp", "lse"), strict=False):
        assert_close(actual, wanted, terms=72, scale=50.0, what=what)
        assert_same_bits(actual, same, what)
    with choice.forced("logprob=hopper,product=tensor_core"):
        assert not logprob._fused(*arrays[:2], None)


def check_model(family, monkeypatch, lengths, max_tokens, **shape):
    """A model's engine and its training forward, all operators by one family: the same bits for each drawn token."""
    monkeypatch.setattr(check, "PROMPT_LENGTHS", lengths)
    shape |= {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True}
    config = ModelConfig.from_dict(shape)
    with choice.forced(family):
        model = Transformer(config, Weights.random(config, "bfloat16"))
        options = EngineConfig(max_num_batched_tokens=48, max_num_seqs=16, num_gpu_blocks_override=256)
        found = check.check_agreement(model, options, max_tokens, temperature=0.8)
    assert found.tokens == 2 * len(lengths) * max_tokens
    assert found.equal == found.tokens, found


@pytest.mark.sim
@pytest.mark.parametrize("family", choice.FAMILIES)
def test_a_model_agrees_in_the_simulator(family, monkeypatch):
    if device.name() == "cuda":
        pytest.skip("test_gpu_model_agrees has this")
    check_model(
        family, monkeypatch, (18,), 2, vocab_size=24, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*choice.FAMILIES, "product=hopper,logprob=hopper,attention=tensor_core"])
def test_gpu_model_agrees(family, monkeypatch):
    for each in choice.FAMILIES:
        if each in family:
            skip_unless_runs(each)
    check_model(
        family, monkeypatch, (1, 17, 130, 700), 40, vocab_size=32_000, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=1024,
    )  # fmt: skip
