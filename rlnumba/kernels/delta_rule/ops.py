"""The gated delta rule over packed sequences and over the cache, and its gradient: checks, and choice of kernels.

Forward: arithmetic.py has the equations. Backward, of a block, with dS the gradient of the state after it:

    z_t = sum over s >= t of P_st do_s + F_t dS^T k_t - sum over s > t of M_st dr_s           dr_t = beta_t z_t
    dv = dr      dbeta_t = z_t . r_t      dP_tj = do_t . w_j (j <= t)      dM_tj = -dr_t . w_j (j < t)
    dq_t = E_t S do_t + sum over j of D_tj dP_tj k_j
    dk_t = -E_t S dr_t + sum over j of (D_tj dM_tj k_j + D_jt dM_jt k_j + D_jt dP_jt q_j) + F_t dS w_t
    the block before's dS = E_last dS + sum over t of E_t (q_t do_t^T - k_t dr_t^T)
    dlog_decay_s = E_last <S, dS> + sum over t >= s of E_t (q_t . S do_t - k_t . S dr_t)
                   + sum over j < s of F_j k_j . dS w_j + sum over t >= s > j of (dP_tj P_tj + dM_tj M_tj)

dlog_decay adds up what crosses token s, and not differences of large sums, which would leave their rounding errors.
The sums run in a fixed order: blocks, and rows of the substitution, from the last to the first; value heads of a key
head in ascending order. Source: Yang et al. 2024, Gated Delta Networks, sections 3.2 and 3.3.
"""

from rlnumba.kernels.checks import F32, FLOATS, check, check_all, check_bounds, check_chunks
from rlnumba.kernels.cpu import delta_rule as cpu
from rlnumba.kernels.delta_rule import simt, simt_backward, tensor
from rlnumba.kernels.delta_rule.arithmetic import BLOCK, check_parents, check_state, operand_dtype
from rlnumba.runtime import device, dispatch

MAX_HEAD_DIM = 256
IS_SUPPORTED = {"sm90": tensor.is_supported, "sm80": tensor.is_supported}


def delta_rule_family(element, key_dim, value_dim):
    """The family of kernels of all operators here; element: the dtype's name of v. It does not follow from rows."""
    return dispatch.select("delta_rule", IS_SUPPORTED, element, key_dim, value_dim)


def _family(tokens):
    """The family of Tokens; on the cpu device there is none."""
    return delta_rule_family(tokens.v.dtype.name, tokens.k.shape[2], tokens.v.shape[2])


def _check_tokens(op, tokens):
    """(N, HK, HV, K, V) of Tokens, or ValueError."""
    rows, heads, value_dim = check(op, "v", tokens.v, (None, None, None), FLOATS)
    operands = (operand_dtype(tokens.v.dtype),)
    _, key_heads, key_dim = check(op, "k", tokens.k, (rows, None, None), operands)
    check(op, "q", tokens.q, tokens.k.shape, operands)
    check_all(op, (rows, heads), F32, beta=tokens.beta, log_decay=tokens.log_decay)
    if not key_heads or heads % key_heads:
        raise ValueError(f"{op}: the number of value heads must be a multiple of {key_heads} key heads, got {heads}")
    for name, dim in (("key", key_dim), ("value", value_dim)):
        if not 0 < dim <= MAX_HEAD_DIM:
            raise ValueError(f"{op}: the {name} head_dim must be at most {MAX_HEAD_DIM}, got {dim}")
    return rows, key_heads, heads, key_dim, value_dim


def prefix_multiple(element, key_dim, value_dim):
    """The tokens of which the length of a prefix (PackedPrefixes) is a multiple in training; None: it has none.

    The arguments are delta_rule_family's. A sequence begins with the state behind its parent's last block, and the
    gradient of that state is the sum of its children's.
    """
    return BLOCK if takes_prefixes(element, key_dim, value_dim) else None


def takes_prefixes(element, key_dim, value_dim):
    """Whether operators here take PackedPrefixes, on the cpu device or by the kernels of a GPU: bool."""
    if is_cpu_device():
        return True
    is_tensor = delta_rule_family(element, key_dim, value_dim) != "simt"
    return is_tensor and tensor.is_gradient_supported(element)


def is_cpu_device():
    """Whether the cpu device computes; arrays without memory stand for its arrays where they stand for no GPU's."""
    return device.name() == "cpu" or (device.name() == "shapes" and dispatch.architecture() is None)


def check_rule_prefixes(op, tokens, cu_seqlens, prefixes):
    """ValueError unless PackedPrefixes, if there are any, are some that operators here take.

    That lengths are multiples of BLOCK is checked where this does not synchronize with a GPU.
    """
    if prefixes is None:
        return
    if not takes_prefixes(tokens.v.dtype.name, tokens.k.shape[2], tokens.v.shape[2]):
        raise ValueError(f"{op}: prefixes need the cpu device, or heads that its tensor-core kernels take, in bfloat16")
    check_parents(op, cu_seqlens, prefixes)
    if device.name() in ("cpu", "sim") and (prefixes.lengths % BLOCK).any():
        raise ValueError(f"{op}: lengths of prefixes must be multiples of {BLOCK}")


def delta_rule(tokens, cu_seqlens, out, prefixes=None):
    """The outputs of packed sequences, each of which begins with a state of zeros, or where its prefix ends.

    tokens: Tokens of N tokens; cu_seqlens (B + 1,) int32, from 0 to N; out (N, HV, V) of q's dtype is written;
    prefixes: PackedPrefixes, or None. Raises ValueError for other shapes, dtypes or layouts. Source: Yang et al. 2024,
    eq. 10.
    """
    _check_tokens("delta_rule", tokens)
    check_bounds("delta_rule", "cu_seqlens", cu_seqlens)
    check_rule_prefixes("delta_rule", tokens, cu_seqlens, prefixes)
    check("delta_rule", "out", out, tokens.v.shape, (tokens.q.dtype,))
    if device.name() == "cpu":
        cpu.delta_rule(tokens, cu_seqlens, out, prefixes)
    elif (family := _family(tokens)) == "simt":
        simt.delta_rule(tokens, cu_seqlens, out)
    else:
        check_chunks("delta_rule", q=tokens.q, k=tokens.k, v=tokens.v, out=out)
        tensor.delta_rule(family, tokens, cu_seqlens, out, prefixes)


def paged_delta_rule(tokens, sequences, cache, out):
    """The outputs of new tokens of sequences whose states are in the cache, the bits that delta_rule gives them.

    tokens: Tokens of N new tokens; sequences: StateSequences; cache: StateCache, which is read and written; out
    (N, HV, V) of q's dtype is written. Raises ValueError for other shapes, dtypes or layouts.
    """
    op = "paged_delta_rule"
    _, *dims = _check_tokens(op, tokens)
    check_state(op, sequences, cache, dims, tokens.q.dtype)
    check(op, "out", out, tokens.v.shape, (tokens.q.dtype,))
    if device.name() == "cpu":
        cpu.paged_delta_rule(tokens, sequences, cache, out)
    elif (family := _family(tokens)) == "simt":
        simt.paged_delta_rule(tokens, sequences, cache, out)
    else:
        rows = {"key_rows": cache.key_rows, "value_rows": cache.value_rows}
        check_chunks(op, q=tokens.q, k=tokens.k, v=tokens.v, out=out, **rows)
        tensor.paged_delta_rule(family, tokens, sequences, cache, out)


def delta_rule_backward(dout, tokens, cu_seqlens, gradients, prefixes=None):
    """The gradient of delta_rule; the same bits for the same arguments.

    dout (N, HV, V) of v's dtype; tokens, cu_seqlens and prefixes as there; gradients: Tokens, of which q, k
    (N, HK, K) and v have v's dtype, beta and log_decay float32; all are written. The forward of the layer runs again,
    for the states. Raises ValueError for other shapes, dtypes or layouts.
    """
    op = "delta_rule_backward"
    rows, _, heads, _, _ = _check_tokens(op, tokens)
    check_bounds(op, "cu_seqlens", cu_seqlens)
    check_rule_prefixes(op, tokens, cu_seqlens, prefixes)
    check_all(op, tokens.v.shape, (tokens.v.dtype,), dout=dout, dv=gradients.v)
    check_all(op, tokens.k.shape, (tokens.v.dtype,), dq=gradients.q, dk=gradients.k)
    check_all(op, (rows, heads), F32, dbeta=gradients.beta, dlog_decay=gradients.log_decay)
    if device.name() == "cpu":
        cpu.delta_rule_backward(dout, tokens, cu_seqlens, gradients, prefixes)
    elif _family(tokens) == "simt" or not tensor.is_gradient_supported(tokens.v.dtype.name):
        simt_backward.delta_rule_backward(dout, tokens, cu_seqlens, gradients)
    else:
        check_chunks(op, dout=dout, q=tokens.q, k=tokens.k, v=tokens.v, dv=gradients.v)
        tensor.delta_rule_backward(dout, tokens, cu_seqlens, gradients, prefixes)
