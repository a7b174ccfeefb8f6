import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine import check
from rlnumba.errors import ConfigError
from rlnumba.kernels.attention import ops as attention
from rlnumba.kernels.attention import paged as paged_attention
from rlnumba.kernels.attention.reference import attention_backward_ref, attention_ref
from rlnumba.kernels.attention.sequences import PackedSequences, PagedSequences
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.ops import linear_backward_ref, linear_ref, linear_swiglu_ref
from rlnumba.kernels.logprob import chunked
from rlnumba.kernels.logprob import ops as logprob
from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.kernels.logprob.chunked import logp_of_logits
from rlnumba.kernels.logprob.ops import linear_logp_ref
from rlnumba.kernels.logprob.terms import LogprobOutputs
from rlnumba.kernels.nn.swiglu import swiglu
from rlnumba.model.config import ModelConfig
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.runtime import device, dispatch, launch
from tests.close import assert_close, assert_same_bits


@pytest.fixture(autouse=True)
def unforced(monkeypatch):
    """Nothing is forced, whatever RLNUMBA_KERNELS says; launches are not noted: other tests have kernels compiled."""
    monkeypatch.setattr(launch, "observers", [])
    with dispatch.forced("auto"):
        yield


@pytest.fixture
def gpu(monkeypatch):
    """A function that pretends to run on a GPU of a compute capability; nothing may be launched there."""
    monkeypatch.setattr(device, "name", lambda: "cuda")

    def pretend(*capability):
        monkeypatch.setattr(dispatch, "architecture", lambda: capability)

    pretend(9, 0)
    return pretend


def test_table(gpu):
    sm80s = {
        (7, 5): "simt",
        (8, 0): "sm80",
        (8, 6): "sm80",
        (9, 0): "sm90",
        (12, 0): "sm80",
    }
    families = {
        "gemm": sm80s,
        "attention": sm80s,
        "delta_rule": sm80s,
        "logprob": {(8, 6): "simt", (9, 0): "sm90", (12, 0): "simt"},
    }
    for operator in dispatch.TABLE:
        for capability, expected in families[operator].items():
            gpu(*capability)
            assert dispatch.family(operator) == expected, (operator, capability)
            assert dispatch.describe(operator).startswith(expected)


def test_forcing(gpu):
    with dispatch.forced("sm80"):
        assert [dispatch.family(operator) for operator in dispatch.TABLE] == ["sm80", "sm80", "sm80", "simt"]
        assert dispatch.describe("attention") == "sm80 (forced)"
        with dispatch.forced("attention=simt, logprob=sm90"):
            assert [dispatch.family(operator) for operator in dispatch.TABLE] == ["sm90", "simt", "sm90", "sm90"]
            assert dispatch.describe("attention") == "simt (forced)" and "forced" not in dispatch.describe("gemm")
        assert dispatch.family("attention") == "sm80"
    assert dispatch.family("attention") == "sm90"


def test_the_environment_forces(gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "_forced", None)
    monkeypatch.setenv("RLNUMBA_KERNELS", "attention=simt")
    assert dispatch.family("attention") == "simt" and dispatch.family("logprob") == "sm90"
    monkeypatch.setattr(dispatch, "_forced", None)
    monkeypatch.setenv("RLNUMBA_KERNELS", "cutlass")
    with pytest.raises(ConfigError, match="RLNUMBA_KERNELS: must be auto, .* sm90, sm80, simt, got 'cutlass'"):
        dispatch.family("attention")


@pytest.mark.parametrize(
    "former, families",
    [
        ("hopper", ["sm90"] * 4),
        ("tensor_core", ["sm80", "sm80", "sm80", "simt"]),
        ("simple", ["simt"] * 4),
        ("product=simple,attention=tensor_core", ["simt", "sm80", "sm90", "sm90"]),
    ],
)
def test_former_names_are_accepted(gpu, former, families):
    with dispatch.forced(former):
        assert [dispatch.family(operator) for operator in dispatch.TABLE] == families


@pytest.mark.parametrize(
    "names, message",
    [
        ("wgmma", "kernels: must be auto, operator=family or one of sm90, sm80, simt, got 'wgmma'"),
        ("attention=fast", "kernels: attention must be one of sm90, sm80, simt, got 'fast'"),
        ("logprob=sm80", "kernels: logprob must be one of sm90, simt, got 'sm80'"),
        ("matmul=sm90", "kernels: operator must be one of gemm, attention, delta_rule, logprob, got 'matmul'"),
        ("sm90", "kernels: this GPU, of compute capability 8.0, does not run sm90 kernels"),
    ],
)
def test_wrong_names_are_refused(gpu, names, message):
    gpu(8, 0)
    with pytest.raises(ConfigError, match=message):
        dispatch.force(names)


def test_the_cpu_device_has_no_kernels(monkeypatch):
    monkeypatch.setattr(device, "name", lambda: "cpu")
    with pytest.raises(ConfigError, match="kernels: sm90 needs a GPU or the simulator, not device cpu"):
        dispatch.force("sm90")


def test_auto_is_the_native_backend(gpu, monkeypatch):
    monkeypatch.setattr(gemm, "_backend", "auto")
    assert gemm.backend() == "native"
    assert gemm.describe().startswith("native; sm90 (")
    assert gemm.describe(np.dtype(np.float32)) == "native; simt"
    gpu(7, 5)
    assert gemm.describe() == "native; simt"
    with dispatch.forced("simt"):
        assert gemm.describe() == "native; simt (forced)"
    gemm.set_backend("cublas")
    assert gemm.describe() == "cublas"
    gemm.set_backend("numba")
    assert gemm.backend() == "native"


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Sequences:
    """Packed sequences, and the same keys in blocks of a cache: what all forms of attention get.

    A block of NaN follows those of the sequences.
    """

    def __init__(self, rng, lengths, heads, kv_heads, head_dim, dtype="bfloat16", block_size=16, window=0):
        tokens, kind = sum(lengths), device.dtype(dtype)
        self.lengths, self.scale, self.window = lengths, head_dim**-0.5, window
        shapes = [(tokens, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
        self.q, self.k, self.v, self.dout = (rng.standard_normal(shape).astype(kind) for shape in shapes)
        width = -(-max(lengths) // block_size)
        self.tables = rng.permutation(len(lengths) * width).astype(np.int32).reshape(-1, width)
        shape = (self.tables.size + 1, block_size, kv_heads, head_dim)
        self.caches = [np.full(shape, np.nan, kind) for _ in range(2)]
        for b, (start, end) in enumerate(zip(bounds(lengths)[:-1], bounds(lengths)[1:], strict=True)):
            at = np.arange(end - start)
            for cache, x in zip(self.caches, (self.k, self.v), strict=True):
                cache[self.tables[b][at // block_size], at % block_size] = x[start:end]

    def packed(self):
        """The PackedSequences, on the device."""
        return PackedSequences(device.asarray(bounds(self.lengths)), max(self.lengths), self.window)

    def forward(self):
        """(out, lse) of attention, on the device."""
        xp = device.xp()
        out, lse = xp.full(self.q.shape, np.nan, self.q.dtype), xp.full(self.q.shape[1::-1], np.nan, np.float32)
        arrays = [device.asarray(x) for x in (self.q, self.k, self.v)]
        attention.attention(*arrays, self.packed(), self.scale, out, lse)
        return out, lse

    def paged(self, tokens):
        """(out, rows) of paged_attention for the last `tokens` of each sequence; rows: where they are packed."""
        lengths = [min(tokens, length) for length in self.lengths]
        return self.chunks([length - n for length, n in zip(self.lengths, lengths, strict=True)], self.lengths)

    def chunks(self, begins, ends, lost=0):
        """(out, rows) of paged_attention for positions begins[b] .. ends[b] of each sequence b.

        lost: so many columns of the block tables are those of a block of NaN, from the first on.
        """
        lengths = np.subtract(ends, begins).tolist()
        spans = zip(bounds(self.lengths)[:-1], begins, ends, strict=True)
        rows = np.concatenate([np.arange(start + begin, start + end) for start, begin, end in spans])
        q, *caches = (device.asarray(x) for x in (self.q[rows], *self.caches))
        tables = self.tables.copy()
        tables[:, :lost] = tables.size
        arrays = bounds(lengths), np.array(ends, np.int32), tables
        sequences = PagedSequences(*map(device.asarray, arrays), max(lengths), max(ends), window=self.window)
        out = device.xp().full(q.shape, np.nan, q.dtype)
        paged_attention.paged_attention(q, caches, sequences, self.scale, out)
        return device.to_host(out), rows

    def gradient(self, out, lse):
        """[dq, dk, dv] of attention_backward."""
        gradients = [device.xp().full(x.shape, np.nan, x.dtype) for x in (self.q, self.k, self.v)]
        dout, *inputs = (device.asarray(x) for x in (self.dout, self.q, self.k, self.v))
        attention.attention_backward(dout, inputs, out, lse, self.packed(), self.scale, gradients)
        return gradients


def run_attention(rng, family, lengths, heads, kv_heads, head_dim, dtype, chunks, window=0):
    """All forms by one family: right, and rollout and training with the same bits."""
    with dispatch.forced(family):
        case = Sequences(rng, lengths, heads, kv_heads, head_dim, dtype, window=window)
        out, lse = case.forward()
        packed = device.to_host(out)
        expected, expected_lse = attention_ref(case.q, case.k, case.v, bounds(lengths), case.scale, window)
        longest = max(lengths)
        assert_close(packed, expected, terms=longest, scale=2 * float(np.abs(expected).max()), what="out")
        assert_close(lse, expected_lse, terms=head_dim, scale=2 * float(np.abs(expected_lse).max()), what="lse")
        for tokens in chunks:
            some, rows = case.paged(tokens)
            assert_same_bits(some, packed[rows], f"the last {tokens} tokens against the cache")
        expected = attention_backward_ref(case.dout, case.q, case.k, case.v, bounds(lengths), case.scale, window)
        for actual, wanted, what in zip(case.gradient(out, lse), expected, ("dq", "dk", "dv"), strict=True):
            # Of probabilities and their gradients rounded to 16 bits.
            size = 4 * float(np.abs(wanted).max()) + 1
            assert_close(actual, wanted, terms=head_dim + longest, scale=size, what=what)


@pytest.mark.sim
@pytest.mark.parametrize("family", dispatch.FAMILIES)
def test_rollout_and_training_agree_in_the_simulator(rng, family):
    if device.name() == "cuda":
        pytest.skip("test_gpu_rollout_and_training_agree has this")
    run_attention(rng, family, [70, 3], 2, 1, 16, "bfloat16", [1, 40])


@pytest.mark.gpu
@pytest.mark.parametrize("family", dispatch.FAMILIES)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(16, 8, 128), (6, 6, 48), (8, 2, 80), (9, 3, 64), (4, 1, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_rollout_and_training_agree(rng, family, heads, kv_heads, head_dim, dtype):
    skip_unless_runs(family)
    run_attention(rng, family, [1100, 70, 1, 64, 129], heads, kv_heads, head_dim, dtype, [1, 2, 65, 1100])


def skip_unless_runs(family):
    since, until = dispatch.RUNS_ON[family]
    if not since <= dispatch.architecture() <= until:
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
    if device.name() == "cpu":
        pytest.skip("numpy has one form")
    called = []

    def note(module, name, family):
        monkeypatch.setattr(module, name, lambda *arguments, **options: called.append(family))

    for implementations in (attention.FORWARD, attention.BACKWARD):
        for family in implementations:
            monkeypatch.setitem(implementations, family, lambda *arguments, family=family: called.append(family))
    note(paged_attention.sm90_paged, "paged_attention_sm90", "sm90")
    note(paged_attention.sm80_decode, "paged_attention_sm80", "sm80")
    note(paged_attention, "paged_attention_simt", "simt")
    case = Sequences(rng, [3, 1], heads, kv_heads, head_dim, dtype)
    taken = {}
    for family in dispatch.FAMILIES:
        if (
            device.name() == "cuda"
            and not dispatch.RUNS_ON[family][0] <= dispatch.architecture() <= dispatch.RUNS_ON[family][1]
        ):
            continue
        called.clear()
        with dispatch.forced(family):
            out, lse = case.forward()
            case.paged(1)
            case.paged(3)
            case.gradient(out, lse)
            taken[family] = attention.attention_family(dtype, head_dim, heads // kv_heads)
        assert set(called) == {taken[family]} and len(called) >= 4, (family, called)
    assert taken["simt"] == "simt"
    if dtype == "float32" or head_dim % 8:
        assert set(taken.values()) == {"simt"}


def run_gemm(rng, family, m, n, k, dtype):
    """linear with all its options and its gradients, by one family."""
    kind = device.dtype(dtype)
    shapes = ((m, k), (n, k), (m, n), n, (m, n))
    x, w, dout, bias, residual = (rng.standard_normal(shape).astype(kind) for shape in shapes)
    xd, wd, dd, bd, rd = (device.asarray(a) for a in (x, w, dout, bias, residual))
    x, w, dout, bias, residual = (a.astype(np.float64) for a in (x, w, dout, bias, residual))
    xp = device.xp()
    size = 8 + 8 * np.sqrt(max(m, n, k))
    with dispatch.forced(family):
        assert gemm.backend() == "native"
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


# Shapes that fast kernels take, that they do not, and GEMMs without rows or with an empty K.
GEMM_SHAPES = [(9, 24, 40), (1, 8, 8), (3, 20, 9), (0, 8, 8), (2, 8, 0)]


@pytest.mark.sim
@pytest.mark.parametrize("family", dispatch.FAMILIES)
@pytest.mark.parametrize("m, n, k", GEMM_SHAPES)
def test_gemm(rng, family, m, n, k):
    if device.name() == "cuda":
        skip_unless_runs(family)
    run_gemm(rng, family, m, n, k, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("family", dispatch.FAMILIES)
@pytest.mark.parametrize("m, n, k", [(1000, 1024, 2048), (64, 4096, 1024), (1, 6144, 1024), (37, 1001, 768)])
def test_gpu_gemm(rng, family, m, n, k):
    skip_unless_runs(family)
    run_gemm(rng, family, m, n, k, "bfloat16")


@pytest.mark.sim
def test_families_compute_gemms_where_they_can(rng, monkeypatch):
    if device.name() == "cpu":
        pytest.skip("the cpu device has one product")
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
            with dispatch.forced(family):
                gemm.linear(x, w, out)
            assert called == [family] * taken, (family, m, n, k, dtype)


@pytest.mark.sim
@pytest.mark.parametrize("family", dispatch.TABLE["logprob"])
def test_logprob(rng, family):
    """Both ways to a log-prob have the same bits, with the sm90 GEMM."""
    if device.name() == "cpu":
        pytest.skip("the cpu device has one way")
    if device.name() == "cuda":
        skip_unless_runs("sm90")
    kind = device.dtype("bfloat16")
    hidden, weight = rng.standard_normal((5, 72)).astype(kind), rng.standard_normal((40, 72)).astype(kind)
    ids = rng.integers(0, 40, 5).astype(np.int32)
    arrays = [device.asarray(x) for x in (hidden, weight, ids)]
    out = [device.xp().full(5, np.nan, np.float32) for _ in range(2)]
    with dispatch.forced(f"gemm=sm90,logprob={family}"):
        assert (logprob._implementation(*arrays[:2]) is logprob_sm90) == (family == "sm90")
        logprob.linear_logp(*arrays, 0.7, LogprobOutputs(*out))
        plain = [device.xp().full(5, np.nan, np.float32) for _ in range(2)]
        logits = device.xp().empty((5, 40), np.float32)
        gemm.linear(*arrays[:2], logits)
        logp_of_logits(logits, arrays[2], 0.7, *plain)
    expected = linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids, 0.7)
    for actual, same, wanted, what in zip(out, plain, expected, ("logp", "lse"), strict=False):
        assert_close(actual, wanted, terms=72, scale=50.0, what=what)
        assert_same_bits(actual, same, what)
    with dispatch.forced("logprob=sm90,gemm=sm80"):
        assert logprob._implementation(*arrays[:2]) is chunked


def check_model(family, monkeypatch, lengths, max_tokens, **shape):
    """A model's engine and its training forward, all operators by one family: the same bits for each drawn token."""
    monkeypatch.setattr(check, "PROMPT_LENGTHS", lengths)
    shape |= {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True}
    config = ModelConfig.from_dict(shape)
    with dispatch.forced(family):
        model = Transformer(config, Weights.random(config, "bfloat16"))
        options = EngineConfig(max_num_batched_tokens=48, max_num_seqs=16, num_gpu_blocks_override=256)
        found = check.check_agreement(model, options, max_tokens, temperature=0.8)
    assert found.tokens == 2 * len(lengths) * max_tokens
    assert found.equal == found.tokens, found


@pytest.mark.sim
@pytest.mark.parametrize("family", dispatch.FAMILIES)
def test_a_model_agrees_in_the_simulator(family, monkeypatch):
    if device.name() == "cuda":
        pytest.skip("test_gpu_model_agrees has this")
    check_model(
        family, monkeypatch, (18,), 2, vocab_size=24, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*dispatch.FAMILIES, "gemm=sm90,logprob=sm90,attention=sm80"])
def test_gpu_model_agrees(family, monkeypatch):
    for each in dispatch.FAMILIES:
        if each in family:
            skip_unless_runs(each)
    check_model(
        family, monkeypatch, (1, 17, 130, 700), 40, vocab_size=32_000, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=1024,
    )  # fmt: skip
