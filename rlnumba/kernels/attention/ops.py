"""Causal attention over packed sequences with grouped query heads, and its gradient: checks, and choice of kernels.

    s[i, j] = scale * q[i] . k[j]  for i - window < j <= i      lse[i] = log sum_j exp(s[i, j])
    out[i] = sum_j exp(s[i, j] - lse[i]) * v[j]

    p[i, j] = exp(s[i, j] - lse[i])      delta[i] = dout[i] . out[i]
    ds[i, j] = p[i, j] * (dout[i] . v[j] - delta[i])
    dq[i] = scale * sum_j ds[i, j] * k[j]
    dk[j] = scale * sum_i ds[i, j] * q[i]      dv[j] = sum_i p[i, j] * dout[i]

q, out, dout, dq (N, H, E); k, v, dk, dv (N, HK, E) in float32, float16 or bfloat16; lse, delta (H, N) float32. H is a
multiple of HK: query head h reads KV head h // (H / HK), and the sums over i run over all query heads of a KV head.
Sequence b owns the rows cu_seqlens[b] .. cu_seqlens[b + 1]. window is that of the sequences (sequences.py); 0: a query
sees all keys up to its own.

With prefixes, i and j are positions: the keys of a sequence are the rows of its prefix, which other sequences own, and
then its own. A row of out has the bits that it has where the sequence owns all of its rows. The sums over i of dk and
dv run over the rows of the sequence that owns a key, then over those of its children, in ascending order.
Source of computing a group's prompt once: Prefix Grouper (arXiv 2506.05433).

Three families of kernels compute it: sm90_forward.py and sm90_backward.py, sm80_forward.py and sm80_backward.py,
simt.py. They differ by rounding; attention_family says which one a model gets. In each of them
every sum is taken in a fixed order, so equal inputs give equal bits, and a row's bits depend on that row alone.
Sources: Dao et al. 2022 (FlashAttention), algorithms 1 and 4; Dao 2023; Shah et al. 2024.
"""

from rlnumba.kernels.attention import sm80_tiles, sm90_config
from rlnumba.kernels.attention.simt import attention_backward_simt, attention_simt
from rlnumba.kernels.attention.sm80_backward import attention_backward_sm80
from rlnumba.kernels.attention.sm80_forward import attention_sm80
from rlnumba.kernels.attention.sm90_backward import attention_backward_sm90, backward_nbytes
from rlnumba.kernels.attention.sm90_forward import attention_sm90
from rlnumba.kernels.checks import F32, FLOATS, I32, check, check_bounds, check_chunks
from rlnumba.kernels.cpu import attention as cpu
from rlnumba.runtime import device, dispatch

MAX_HEAD_DIM = 256
# Families that take prefixes, of so many levels (PackedPrefixes) in training: the backward has sums of dq for each; and
# whether those of layers with a window are used in training.
PREFIX_FAMILIES, PREFIX_LEVELS, PREFIX_WINDOWS = ("sm90",), 3, True
# Positions plus a window, times the query heads of a key head, are int32 in kernels.
MAX_WINDOW = 1 << 24

IS_SUPPORTED = {"sm90": sm90_config.is_supported, "sm80": sm80_tiles.is_supported}
FORWARD = {"sm90": attention_sm90, "sm80": attention_sm80, "simt": attention_simt}
BACKWARD = {"sm90": attention_backward_sm90, "sm80": attention_backward_sm80, "simt": attention_backward_simt}


def attention_family(element, head_dim, gqa_ratio):
    """The family of kernels, "sm90", "sm80" or "simt", of packed and paged attention and the gradient.

    element: the dtype's name; gqa_ratio: H / HK. It never follows from the number of rows, so that rollout and training
    compute the same bits.
    """
    return dispatch.select("attention", IS_SUPPORTED, element, head_dim, gqa_ratio)


def check_heads(op, q, k, v, scale):
    """(N, H, HK, E) of q (N, H, E) and of k and v (rows, HK, E), or ValueError."""
    tokens, heads, head_dim = check(op, "q", q, (None, None, None), FLOATS)
    rows, kv_heads, _ = check(op, "k", k, (None, None, head_dim), (q.dtype,))
    check(op, "v", v, (rows, kv_heads, head_dim), (q.dtype,))
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{op}: the number of query heads must be a multiple of {kv_heads} key heads, got {heads}")
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{op}: head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}")
    if not scale > 0:
        raise ValueError(f"{op}: scale must be > 0, got {scale}")
    return tokens, heads, kv_heads, head_dim


def supports_prefixes(element, head_dim, gqa_ratio, has_window=False):
    """Whether training on this device may have sequences with prefixes: bool.

    The arguments but the last are attention_family's.
    """
    if prefix_levels() is None:
        return True
    takes_window = PREFIX_WINDOWS or not has_window
    return takes_window and attention_family(element, head_dim, gqa_ratio) in PREFIX_FAMILIES


def prefix_levels():
    """The most levels of prefixes (PackedPrefixes) that memory is planned for on this device; None: any number."""
    # Arrays without memory stand for those of the cpu device where they stand for no GPU's.
    is_cpu = device.name() == "cpu" or (device.name() == "shapes" and dispatch.architecture() is None)
    return None if is_cpu else PREFIX_LEVELS


def check_prefixes(op, sequences, q, k):
    """ValueError unless the prefixes of PackedSequences are arrays of theirs that this device's operators take."""
    if sequences.prefixes is None:
        return
    if not supports_prefixes(q.dtype.name, q.shape[2], q.shape[1] // k.shape[1]):
        raise ValueError(f"{op}: prefixes need the cpu device, or the sm90 kernels")
    count = len(sequences.cu_seqlens) - 1
    for name, length in (("parents", count), ("lengths", count), ("query_bounds", count + 1), ("order", count)):
        check(op, f"prefixes.{name}", getattr(sequences.prefixes, name), (length,), I32)


def check_window(op, window):
    """ValueError unless a window is 0 or a number of keys that kernels can count with."""
    if not 0 <= window <= MAX_WINDOW:
        raise ValueError(f"{op}: window must be 0 to {MAX_WINDOW}, got {window}")


def attention(q, k, v, sequences, scale, out, lse):
    """Causal attention of packed sequences with grouped query heads.

    q (N, H, E), k and v (N, HK, E) of one floating dtype, H a multiple of HK, E even and at most 256; scale > 0;
    sequences: PackedSequences with cu_seqlens from 0 to N; queries beyond max_seqlen are not computed. out (N, H, E) of
    q's dtype and lse (H, N) float32, the log-sum-exp of a row's scaled scores, are written. Raises ValueError for other
    shapes, dtypes or layouts.
    """
    op = "attention"
    tokens, heads, kv_heads, head_dim = check_heads(op, q, k, v, scale)
    check_window(op, sequences.window)
    check(op, "k", k, (tokens, kv_heads, head_dim), (q.dtype,))
    check_bounds(op, "cu_seqlens", sequences.cu_seqlens)
    check_prefixes(op, sequences, q, k)
    check(op, "out", out, q.shape, (q.dtype,))
    check(op, "lse", lse, (heads, tokens), F32)
    if device.name() == "cpu":
        cpu.attention(q, k, v, sequences, scale, out, lse)
        return
    family = attention_family(q.dtype.name, head_dim, heads // kv_heads)
    if family != "simt":
        check_chunks(op, q=q, k=k, v=v, out=out)
    FORWARD[family](q, k, v, sequences, scale, out, lse)


def attention_backward(dout, inputs, out, lse, sequences, scale, gradients):
    """The gradient of `attention` with respect to its inputs; the same bits for the same arguments.

    inputs: (q, k, v); gradients: (dq, dk, dv), which are written. dout, q, out, dq (N, H, E) and k, v, dk, dv
    (N, HK, E) of one floating dtype; lse (H, N) float32 and out as attention wrote them; sequences as there. Raises
    ValueError for other shapes, dtypes or layouts.
    """
    op, (q, k, v), (dq, dk, dv) = "attention_backward", inputs, gradients
    tokens, heads, kv_heads, head_dim = check_heads(op, q, k, v, scale)
    check_window(op, sequences.window)
    for name, array in (("dout", dout), ("out", out), ("dq", dq)):
        check(op, name, array, q.shape, (q.dtype,))
    for name, array in (("k", k), ("dk", dk), ("dv", dv)):
        check(op, name, array, (tokens, kv_heads, head_dim), (q.dtype,))
    check(op, "lse", lse, (heads, tokens), F32)
    check_bounds(op, "cu_seqlens", sequences.cu_seqlens)
    check_prefixes(op, sequences, q, k)
    if device.name() == "cpu":
        cpu.attention_backward(dout, inputs, out, lse, sequences, scale, gradients)
        return
    family = attention_family(q.dtype.name, head_dim, heads // kv_heads)
    if family != "simt":
        check_chunks(op, dout=dout, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv)
    BACKWARD[family](dout, inputs, out, lse, sequences, scale, gradients)


def attention_backward_nbytes(
    element, tokens, sequences, heads, kv_heads, head_dim, has_prefixes=False, has_window=False
):
    """Bytes of the arrays that attention_backward allocates for itself, for so many tokens of so many sequences: int.

    element: the dtype's name. has_prefixes: whether sequences may have them in the rows of others, which are sequences.
    """
    if attention_family(element, head_dim, heads // kv_heads) == "sm90":
        # A row is a query of its own sequence's keys, and of its ancestors'.
        levels = (prefix_levels() or 2) if has_prefixes else 1
        return backward_nbytes(levels * tokens, sequences, heads, head_dim, has_prefixes and has_window)
    # delta.
    return 4 * heads * tokens
