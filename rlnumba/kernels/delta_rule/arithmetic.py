"""The arithmetic of the gated delta rule, one for training, prefill and decode: its constants, and its arrays.

A value head keeps a state S (K, V), here with the key's axis first. With a_t = exp(log_decay_t):

    S_t = a_t S_(t-1) + k_t w_t^T      w_t = beta_t (v_t - a_t S_(t-1)^T k_t)      o_t = S_t^T q_t

Blocks of BLOCK tokens begin at multiples of BLOCK, counted from the sequence's own first token. Inside a block S is the
state at its begin, G_t the sum of log_decay from the block's first token to t, E_t = exp(G_t), D_tj = exp(G_t - G_j):

    r_t = v_t - E_t S^T k_t - sum over j < t of M_tj w_j                M_tj = D_tj (k_t . k_j)      w_t = beta_t r_t
    o_t = E_t S^T q_t + sum over j <= t of P_tj w_j                     P_tj = D_tj (q_t . k_j)
    the next block's S = E_last S + sum over j of k_j (F_j w_j)^T       F_j = exp(G_last - G_j)

Row t reads rows j <= t alone, so a token computed on its own, in a chunk or in a whole sequence has the same bits, if
each sum has one order, and if the state and the rows w survive between calls as they were used. Hence:

1. x = S^T k_t and y = S^T q_t are chains over the key's axis, from the high plane of S.
2. r = fma(-E_t, x, v_t) + 0; then fma(-M_tj, w_j, r) for j ascending, M rounded to an operand for the sub-blocks of
   SUB_BLOCK tokens before the token's own; w_t = beta_t r, rounded to an operand, and only that is used from then on.
3. o = E_t y + 0; then fma(P_tj, w_j, o) for j ascending, P rounded to an operand.
4. The fold: E_last S + 0, then the block's products of k_j and F_j w_j, rounded to an operand, for j ascending; then S
   is rounded to the two planes of a page, in training, too.
5. G is added up token by token from the block's begin. D is exp of a difference, never a quotient of exponentials.

`+ 0` turns -0 into +0, as a product with an operand that is zero may have either sign.

On tensor cores (tensor_products.py) the chains of 1, 3 and 4, that of q . k and k . k, and that of 2 but for the
token's own sub-block add up 16 products at a time, as mma.sync and wgmma of one GPU do alike; -M is what is rounded.
There the row of a token does not depend on what the zeros behind it are multiplied by. Families differ in bits.

Operands (q, k, S, w, M, P, F w) are float32 in a float32 model. In one of 16 bits they are float16, whatever its dtype:
every one of them is bounded (keys have length 1) or scaled, so bfloat16's range is of no use, and float16 has eight
times its precision. v, w and S are kept times VALUE_SCALE, exactly, so that they overflow at 2^20; an operand
saturates, so that no later token makes 0 * inf in an earlier row.

Packed sequences may have a prefix in the rows of others (PackedPrefixes), which ends at a multiple of BLOCK tokens, so
that no block has tokens of two. A sequence then begins with the state behind its parent's last block, as a page has it,
and its convolution with the parent's last rows. Kernels that need a parent's state are launched once for each level of
the trees: sequences without a parent, their children, and so on. The gradient of a state is the sum of its children's,
in ascending order, in a launch after theirs.
"""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, check_all, check_bounds
from rlnumba.kernels.ptx.warp import device_function

i32 = np.int32

BLOCK, SUB_BLOCK = 64, 16
# Of v, w and S where operands are float16.
VALUE_SCALE = np.float32(2.0**-4)
# The low plane of a state is what float16 leaves of it, times this.
LOW_SCALE = np.float32(2.0**11)
# The largest float16.
LARGEST_OPERAND = np.float32(65504)
# A token forgets at most this: e^-30 is 1e-13. A larger decay would cost the differences of G their precision.
LEAST_LOG_DECAY = np.float32(-30)
LOG2_E = np.float32(math.log2(math.e))


def operand_dtype(dtype):
    """The dtype of operands in a model of a dtype: float32 or float16."""
    return np.dtype(np.float32 if dtype == np.float32 else np.float16)


def planes_of(dtype):
    """Planes of a state page whose operands have a dtype: a float32 state is one plane, else high and low."""
    return 1 if dtype == np.float32 else 2


def scale_of(dtype):
    """The factor of v, w and S where operands have a dtype: float32."""
    return np.float32(1.0) if dtype == np.float32 else VALUE_SCALE


class Tokens(NamedTuple):
    """The inputs of N packed tokens, of HK key heads and HV value heads, HV a multiple of HK.

    q, k (N, HK, K): operands of length 1, q times K^-0.5; v (N, HV, V) of the model's dtype; beta (N, HV), from 0 to 1,
    and log_decay (N, HV), from LEAST_LOG_DECAY to 0, float32. Value head h reads key head h // (HV / HK).
    """

    q: object
    k: object
    v: object
    beta: object
    log_decay: object


class StateSequences(NamedTuple):
    """The places of B sequences in the cache, int32 arrays.

    cu_seqlens (B + 1,) of the new tokens; context_lens (B,): all tokens of a sequence, the new ones included, 0 for a
    row without a sequence, whose outputs are 0; tokens behind the last of cu_seqlens have none. state_tables (B, T):
    [b, i] is the page of the state after (i + 1) BLOCK tokens, -1 where it is not to be kept; a page that is read and
    one that is written may be the same, and one that several boundaries have is that of the last. slots (B,): row slot
    of each sequence. resumed_at (B,): the position at which a sequence began with a page, of whose tokens nothing else
    is known, -1 if it did not; that page stays in its table.

    A block is folded by the call that computes the token after it, so that a page holds no token that a rejected draft
    might take back: the state that is read ends with the last boundary before the token ahead of the new ones, and the
    rows of the tokens between are in the slot. Where the new tokens begin at resumed_at it ends there.
    """

    cu_seqlens: object
    context_lens: object
    state_tables: object
    slots: object
    resumed_at: object


class PlainSequences(NamedTuple):
    """Packed sequences that have all of their rows: cu_seqlens (B + 1,)."""

    cu_seqlens: object


class PrefixSequences(NamedTuple):
    """Packed sequences with prefixes: cu_seqlens (B + 1,), parents (B,) of PackedPrefixes; level: of those to compute,
    the number of their ancestors."""

    cu_seqlens: object
    parents: object
    level: int = i32(0)


class StateCache(NamedTuple):
    """Memory of linear attention in one layer.

    states (pages, HV, planes, K, V) of operands; of the tokens of each sequence's open block key_rows (slots, BLOCK,
    HK, K) and value_rows (slots, BLOCK, HV, V), the rows k and w, operands, and decay_sums (slots, BLOCK, HV), G.
    """

    states: object
    key_rows: object
    value_rows: object
    decay_sums: object


def check_parents(op, cu_seqlens, prefixes):
    """ValueError unless PackedPrefixes, if there are any, have a parent for each of the sequences."""
    if prefixes is not None:
        check(op, "prefixes.parents", prefixes.parents, (len(cu_seqlens) - 1,), I32)


def check_places(op, sequences, count):
    """Raise ValueError unless context_lens, slots and resumed_at of StateSequences have `count` sequences."""
    places = {"context_lens": sequences.context_lens, "slots": sequences.slots, "resumed_at": sequences.resumed_at}
    check_all(op, (count,), I32, **places)


def check_state(op, sequences, cache, dims, operand):
    """B, the number of StateSequences, or ValueError where they or the StateCache have other shapes or dtypes.

    dims: (HK, HV, K, V); operand: the operands' dtype.
    """
    (key_heads, heads, key_dim, value_dim), dtypes = dims, (operand,)
    count = check_bounds(op, "cu_seqlens", sequences.cu_seqlens)
    check_places(op, sequences, count)
    check(op, "state_tables", sequences.state_tables, (count, None), I32)
    check(op, "states", cache.states, (None, heads, planes_of(operand), key_dim, value_dim), dtypes)
    slots, *_ = check(op, "key_rows", cache.key_rows, (None, BLOCK, key_heads, key_dim), dtypes)
    check(op, "value_rows", cache.value_rows, (slots, BLOCK, heads, value_dim), dtypes)
    check(op, "decay_sums", cache.decay_sums, (slots, BLOCK, heads), F32)
    return count


@device_function
def level_of(parents, b):
    """The number of ancestors of sequence b."""
    level, parent = i32(0), parents[b]
    while parent >= 0:
        level, parent = i32(level + i32(1)), parents[parent]
    return level


@device_function
def has_children(parents, b):
    """Whether sequences begin where b ends: the first of its descendants would be the next sequence."""
    following = i32(b + i32(1))
    return following < parents.shape[0] and parents[following] == b


@device_function
def next_child(parents, b, child):
    """The first child of sequence b from sequence `child` on, or -1: its descendants have parents from b on."""
    while child < parents.shape[0] and parents[child] > b:
        child = i32(child + i32(1))
    return child if child < parents.shape[0] and parents[child] == b else i32(-1)
