"""Rotary position embedding (Su et al., 2021), NeoX layout, and the tables of angles of today's models.

    angle(p, e) = p * frequency(e)                                  0 <= e < E/2
    out[e]       = x[e] cos - x[e + E/2] sin
    out[e + E/2] = x[e + E/2] cos + x[e] sin                         backward: the same with -sin

With tables of R/2 < E/2 columns (partial_rotary_factor) the first R elements turn as a head of R, the others stay.

x and out (N, H, E) in float32, float16 or bfloat16; tables (P, E/2) float32; arithmetic float32. The frequencies are
theta^(-2e/E), changed by the scaling rule of the model's config.json; tables agree with Hugging Face transformers'
modeling_rope_utils, whose every step is float32 as here.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, check
from rlnumba.kernels.ptx.warp import access_length, device_function, narrow, vector_access, widen
from rlnumba.runtime.device import cuda

i32 = np.int32

# With this width a half of a head of float32 has as many vectors as a warp has lanes.
MAX_HEAD_DIM = 256
# Heads that a group of lanes owns at most, all loaded before the first is used: 128 bytes a lane.
MAX_HEADS = 4

_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_TYPES = tuple(_NEEDED)


@dataclass(frozen=True)
class RopeScaling:
    """The stretching of a model's rotary embedding: `rope_scaling` of config.json, its names and meaning.

    rope_type: "linear" (Chen et al. 2023), "llama3" (Llama 3.1), "yarn" (Peng et al. 2023) or "dynamic", which changes
    nothing up to the model's max_position_embeddings: beyond, it depends on the length of the running sequence, so that
    cached keys would not match new queries. All others raise ValueError, such as "longrope", which depends on that
    length, too, and so does a field that the type needs and that is None.
    """

    rope_type: str
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.rope_type not in _NEEDED:
            raise ValueError(f"rope_scaling: rope_type must be one of {', '.join(_NEEDED)}, got {self.rope_type!r}")
        for field in _NEEDED[self.rope_type]:
            if getattr(self, field) is None:
                raise ValueError(f"rope_scaling: rope_type {self.rope_type!r} needs {field}")

    def num_positions(self, max_position_embeddings):
        """The longest sequence of a model with this key in its config.json, in tokens: int.

        The number is that of model cards and of vLLM: "linear" and "yarn" stretch what the model was trained with,
        which for "yarn" is original_max_position_embeddings, whether or not max_position_embeddings was raised, too.
        """
        if self.rope_type == "linear":
            return int(max_position_embeddings * max(self.factor, 1.0))
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return max_position_embeddings


class HeadShape(NamedTuple):
    """A head's layout over a group of lanes: lane t has elements t * vector .. (t + 1) * vector - 1 of either half.

    So the two elements of a rotation are in one lane. width: E; vector: elements of 16 bytes; access, table_access:
    elements that one access to heads, or to the tables, moves. rotary: R where a head rotates in part, else 0; the
    halves are then of the head in another order, elements e and e + R/2 first. unit_offset: a norm of heads multiplies
    by 1 + weight.
    """

    width: int
    vector: int
    access: int
    table_access: int
    rotary: int = 0
    unit_offset: bool = False

    @property
    def half(self):
        return self.width // 2

    @property
    def lanes(self):
        """Lanes of a group, a power of two."""
        return 1 << (-(-self.half // self.vector) - 1).bit_length()

    @property
    def groups(self):
        """Groups of a warp, which are as many heads."""
        return 32 // self.lanes

    @property
    def bounded(self):
        """Whether the last lanes have elements beyond the end of a half."""
        return self.half != self.lanes * self.vector

    def blocks_of_sm(self, most):
        """Blocks that an SM shall have at a time. Narrow accesses need more registers for addresses: 1."""
        return most if self.access == self.vector and not self.bounded else 1

    def share(self, heads, most=MAX_HEADS):
        """(heads of a group, warps of a token): at most `most` heads a group, and few groups without a head."""
        warps = -(-heads // (self.groups * most))
        return -(-heads // (self.groups * warps)), warps


def head_shape(width, cos, sin, *arrays):
    """The HeadShape of heads of `width` elements, of tables (P, R/2), and of arrays of one dtype, weights among them.

    A rotation of a part moves single elements unless whole vectors rotate, and others do not.
    """
    half, turned, vector = width // 2, cos.shape[1], 16 // arrays[0].itemsize
    access, rotary = access_length(half, *arrays), 0
    if turned < half:
        rotary = 2 * turned
        access = access if access == vector and half % vector == turned % vector == 0 else 1
    return HeadShape(width, vector, access, access_length(turned, cos, sin), rotary)


def in_halves(array, half):
    """An array of heads side by side, viewed as (2 * heads, half)."""
    return array.reshape(-1, half)


@functools.cache
def head_access(shape):
    """(load_head, store_head, load_angles), by which lanes read and write their part of a head; e: its first element.

    load_head(array, head, e, values, at): values[at : at + 2 * vector] = this lane's part of the first and of the
    second half. head: its number in all of the array. store_head(array, head, e, values, at): the reverse.
    load_angles(cos, sin, position, e, c, s): c[:vector], s[:vector] = its part of the tables.
    """
    if shape.rotary:
        return _partly_rotated_access(shape)
    vector = shape.vector
    load, store = vector_access(vector, shape.access, shape.bounded)
    load_table, _ = vector_access(vector, shape.table_access, shape.bounded)

    @device_function
    def load_head(array, head, e, values, at):
        # Unsigned: Numba checks a signed index for being negative.
        half = np.uint64(2 * head)
        load(array[half], e, values, at)
        load(array[half + np.uint64(1)], e, values, at + vector)

    @device_function
    def store_head(array, head, e, values, at):
        half = np.uint64(2 * head)
        store(array[half], e, values, at)
        store(array[half + np.uint64(1)], e, values, at + vector)

    @device_function
    def load_angles(cos, sin, position, e, c, s):
        row = np.uint64(position)
        load_table(cos[row], e, c, 0)
        load_table(sin[row], e, s, 0)

    return load_head, store_head, load_angles


def _partly_rotated_access(shape):
    """head_access of a head that rotates in part: element e of the first half is at e, that of the second at e + R/2,
    for e < R/2; the others follow in their order."""
    vector, half, turned = shape.vector, shape.half, shape.rotary // 2
    load, store = vector_access(vector, vector)
    # Vectors that are one access, or single elements.
    count, length = (1, vector) if shape.access == vector else (vector, 1)

    @device_function
    def place(head, e, is_second):
        """(row, column) in an array of halves of element e of either half of a head."""
        if is_second:
            at = i32(e + i32(turned)) if e < turned else i32(e + i32(half))
        else:
            at = i32(e) if e < turned else i32(e + i32(turned))
        if at >= half:
            return np.uint64(2 * head + 1), i32(at - i32(half))
        return np.uint64(2 * head), at

    @device_function
    def load_head(array, head, e, values, at):
        for i in range(2 * count):
            first, into = e + i % count * length, at + i // count * vector + i % count * length
            row, column = place(head, min(first, half - 1), i >= count)
            if length == 1:
                values[into] = widen(array[row][np.uint64(column)]) if first < half else np.float32(0.0)
            elif first < half:
                load(array[row], column, values, into)
            else:
                for j in range(length):
                    values[into + j] = np.float32(0.0)

    @device_function
    def store_head(array, head, e, values, at):
        for i in range(2 * count):
            first, source = e + i % count * length, at + i // count * vector + i % count * length
            if first < half:
                row, column = place(head, first, i >= count)
                if length == 1:
                    array[row][np.uint64(column)] = narrow(values[source], array)
                else:
                    store(array[row], column, values, source)

    @device_function
    def load_angles(cos, sin, position, e, c, s):
        row = np.uint64(position)
        for i in range(vector):
            inside = e + i < turned
            c[i] = cos[row, np.uint64(e + i)] if inside else np.float32(1.0)
            s[i] = sin[row, np.uint64(e + i)] if inside else np.float32(0.0)

    return load_head, store_head, load_angles


@device_function
def rotate(values, at, count, c, s):
    """Turn the pairs (values[at + i], values[at + count + i]) by angles of cosine c[i] and sine s[i], i < count.

    Each result is one product, rounded, and one fused multiplication and addition: no compiler has a choice.
    """
    for i in range(count):
        x, y = values[at + i], values[at + count + i]
        values[at + i] = cuda.fma(x, c[i], -(y * s[i]))
        values[at + count + i] = cuda.fma(y, c[i], x * s[i])


def check_tables(op, head_dim, cos, sin):
    """Refuse an odd head_dim or one above MAX_HEAD_DIM, and tables that are not (P, head_dim / 2) float32."""
    if head_dim % 2:
        raise ValueError(f"{op}: head_dim must be even, got {head_dim}")
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{op}: head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
    positions, columns = check(op, "cos", cos, (None, None), F32)
    if not 0 < columns <= head_dim // 2:
        raise ValueError(f"{op}: cos must have 1 to {head_dim // 2} columns, half of head_dim, got {columns}")
    check(op, "sin", sin, (positions, columns), F32)


def rope_table(max_positions, head_dim, theta, scaling=None):
    """(cos, sin) of every position and frequency: NumPy float32 arrays (max_positions, head_dim / 2).

    theta: rope_theta of config.json. scaling: a RopeScaling or None. Raises ValueError for an odd head_dim.
    Source: modeling_rope_utils of transformers. Its powers are single precision, good to one unit in the
    last place; ours are rounded once, so one frequency in some 250 differs by that unit.
    """
    if head_dim % 2:
        raise ValueError(f"rope_table: head_dim must be even, got {head_dim}")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies, amplitude = np.float32(1.0) / periods, np.float32(1.0)
    rope_type = scaling and scaling.rope_type
    if rope_type == "linear":
        frequencies = frequencies / np.float32(scaling.factor)
    elif rope_type == "llama3":
        frequencies = _llama3_frequencies(frequencies, scaling)
    elif rope_type == "yarn":
        frequencies, amplitude = _yarn_frequencies(periods, head_dim, theta, scaling)
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles) * amplitude, np.sin(angles) * amplitude


def _llama3_frequencies(frequencies, scaling):
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    context, factor = scaling.original_max_position_embeddings, np.float32(scaling.factor)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(context) / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    stretched = np.where(wavelengths > np.float32(context / low), frequencies / factor, between)
    return np.where(wavelengths < np.float32(context / high), frequencies, stretched)


def _yarn_frequencies(periods, head_dim, theta, scaling):
    """(frequencies, amplitude): a ramp over e between stretched and kept frequencies (Peng et al., eq. 23)."""

    def pair_with_rotations(rotations):
        wavelength = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)
    kept = 1 - np.clip(steps / np.float32(last - first or 0.001), 0, 1)
    one, factor = np.float32(1.0), np.float32(scaling.factor)
    frequencies = one / (factor * periods) * (1 - kept) + one / periods * kept
    return frequencies, np.float32(_yarn_amplitude(scaling))


def _yarn_amplitude(scaling):
    """The factor of the tables."""

    def attention_scale(mscale):
        return 0.1 * mscale * math.log(max(scaling.factor, 1)) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return attention_scale(scaling.mscale) / attention_scale(scaling.mscale_all_dim)
    return attention_scale(1.0)


def rope_ref(x, cos, sin, position_ids, inverse=False):
    """x (N, H, E) rotated by the angles of its positions, in x's precision; inverse=True is the gradient."""
    c = cos[position_ids][:, None, :]
    s = sin[position_ids][:, None, :] * x.dtype.type(-1 if inverse else 1)
    turned = cos.shape[1]
    first, second, rest = np.split(x, [turned, 2 * turned], axis=-1)
    return np.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1)
