"""Rotary position embedding (Su et al., 2021), NeoX layout, and the tables of angles of today's models.

    angle(p, e) = p * frequency(e)                                  0 <= e < E/2
    out[e]       = x[e] cos - x[e + E/2] sin
    out[e + E/2] = x[e + E/2] cos + x[e] sin                         backward: the same with -sin

x and out (N, H, E) in float32, float16 or bfloat16; tables (P, E/2) float32; arithmetic float32. The
frequencies are theta^(-2e/E), changed by the scaling rule of the model's config.json; tables agree with
Hugging Face transformers' modeling_rope_utils, whose every step is float32 as here.
"""

import math
from dataclasses import dataclass

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.check import F32, FLOATS, I32, check
from rlnumba.kernels.instructions import narrow, widen
from rlnumba.kernels.launch import launch

# A warp owns a head, a block WARPS heads of a token at a time.
WARPS = 4

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class RopeScaling:
    """How a model stretches its rotary embedding: `rope_scaling` of config.json, its names and meaning.

    rope_type: "linear" (Chen et al. 2023), "llama3" (Llama 3.1) or "yarn" (Peng et al. 2023). "dynamic"
    depends on the length of the running sequence, so that cached keys would not match new queries; it
    and all others raise ValueError, as does a field that the type needs and that is None.
    """

    rope_type: str
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self):
        if self.rope_type not in _NEEDED:
            raise ValueError(f"rope_scaling: rope_type must be one of {', '.join(_NEEDED)}, got {self.rope_type!r}")
        for field in _NEEDED[self.rope_type]:
            if getattr(self, field) is None:
                raise ValueError(f"rope_scaling: rope_type {self.rope_type!r} needs {field}")


@cuda.jit
def rope_kernel(x, cos, sin, position_ids, sign, out):
    """A block owns a token, a warp every WARPS-th head, a lane every 32nd pair (e, e + E/2)."""
    row = cuda.blockIdx.x
    position = position_ids[row]
    half = x.shape[2] // 2
    for head in range(cuda.threadIdx.y, x.shape[1], WARPS):
        for e in range(cuda.threadIdx.x, half, 32):
            c = cos[position, e]
            s = sin[position, e] * sign
            first = widen(x[row, head, e])
            second = widen(x[row, head, e + half])
            out[row, head, e] = narrow(first * c - second * s, out)
            out[row, head, e + half] = narrow(second * c + first * s, out)


def rope(x, cos, sin, position_ids, out, inverse=False):
    """Rotate each head of each token by the angles of its position; inverse=True is the backward.

    x (N, H, E) of a floating dtype, E even; cos, sin (P, E/2) float32 from rope_table; position_ids (N,)
    int32 in [0, P), which is not checked on the GPU; out (N, H, E) of x's dtype is written and may be x.
    Raises ValueError for other shapes, dtypes or layouts. Source: Su et al. 2021, eq. 34, NeoX layout.
    """
    rows, heads, width = check("rope", "x", x, (None, None, None), FLOATS)
    check_tables("rope", width, cos, sin)
    check("rope", "position_ids", position_ids, (rows,), I32)
    check("rope", "out", out, (rows, heads, width), (x.dtype,))
    if device.name() == "numpy":
        out[...] = rope_ref(x, cos, sin, position_ids, inverse)
        return
    launch(rope_kernel, rows, (32, WARPS), x, cos, sin, position_ids, -1.0 if inverse else 1.0, out)


def check_tables(op, head_dim, cos, sin):
    """Raise ValueError unless head_dim is even and both tables are (P, head_dim / 2) float32."""
    if head_dim % 2:
        raise ValueError(f"{op}: head_dim must be even, got {head_dim}")
    positions, _ = check(op, "cos", cos, (None, head_dim // 2), F32)
    check(op, "sin", sin, (positions, head_dim // 2), F32)


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
    frequencies = np.float32(1.0) / periods
    amplitude = np.float32(1.0)
    if scaling is not None and scaling.rope_type == "linear":
        frequencies = frequencies / np.float32(scaling.factor)
    elif scaling is not None and scaling.rope_type == "llama3":
        frequencies = _llama3_frequencies(frequencies, scaling)
    elif scaling is not None:
        frequencies, amplitude = _yarn_frequencies(periods, head_dim, theta, scaling)
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles) * amplitude, np.sin(angles) * amplitude


def _llama3_frequencies(frequencies, scaling):
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    context = scaling.original_max_position_embeddings
    low, high, factor = (
        np.float32(value) for value in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor)
    )
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

    first = max(math.floor(pair_with_rotations(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with_rotations(scaling.beta_slow)), head_dim - 1)
    steps = np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)
    kept = 1 - np.clip(steps / np.float32(last - first or 0.001), 0, 1)
    one, factor = np.float32(1.0), np.float32(scaling.factor)
    frequencies = one / (factor * periods) * (1 - kept) + one / periods * kept
    amplitude = scaling.attention_factor
    if amplitude is None:
        amplitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies, np.float32(amplitude)


def rope_ref(x, cos, sin, position_ids, inverse=False):
    """out of rope, in x's precision."""
    c = cos[position_ids][:, None, :]
    s = sin[position_ids][:, None, :] * x.dtype.type(-1 if inverse else 1)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
