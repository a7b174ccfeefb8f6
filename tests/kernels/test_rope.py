import numpy as np
import pytest

from rlnumba.kernels.nn.rope import RopeScaling, check_tables, rope_ref, rope_table
from rlnumba.runtime import device
from tests.close import assert_gradient


def test_inverse_is_the_gradient(rng):
    x, dout = rng.standard_normal((3, 2, 6)), rng.standard_normal((3, 2, 6))
    cos, sin = (table.astype(np.float64) for table in rope_table(8, 6, 100.0))
    positions = np.array([0, 7, 3], np.int32)
    dx = rope_ref(dout, cos, sin, positions, inverse=True)
    assert_gradient(lambda: float(np.sum(rope_ref(x, cos, sin, positions) * dout)), dx, x, "dx")


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# transformers 5.23, Qwen3RotaryEmbedding: cos and sin of the last position at columns 1, E/8, E/4 and E/2 - 1.
TABLES = [
    (
        4096,
        128,
        1e6,
        None,
        [0.3138588, -0.7712548, -0.5789079, 0.9999871, 0.9494697, -0.6365266, -0.8153929, 0.0050816],
    ),
    (1024, 48, 1e4, None, [0.890762, -0.1969459, -0.6929515, 0.9887478, -0.45447, 0.9804144, -0.7209842, 0.1495923]),
    (
        *(4096, 128, 1e4, RopeScaling("linear", factor=4.0)),
        [0.824274, -0.2698514, -0.6875242, 0.9930201, 0.5661911, 0.9629019, -0.7261615, 0.1179456],
    ),
    (
        *(8192, 64, 5e5, RopeScaling("llama3", factor=32.0, **LLAMA3)),
        [0.823743, 0.988023, -0.9298077, 0.9999997, 0.5669634, 0.1543068, -0.3680456, 0.0007715],
    ),
    (
        *(8192, 128, 5e5, RopeScaling("llama3", factor=8.0, **LLAMA3)),
        [0.9773988, 0.988023, -0.4017027, 0.9999968, -0.2114039, 0.1543068, -0.9157702, 0.0025138],
    ),
    (
        *(8192, 128, 1e6, RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32768)),
        [-1.1226667, 0.1805137, 0.2554806, 1.1386257, -0.1899909, 1.1242294, -1.1095976, 0.0028934],
    ),
    (
        *(8192, 64, 1e4, RopeScaling("yarn", 16.0, None, None, 4096, 1.25, beta_fast=20.0, beta_slow=2.0)),
        [-1.0526035, -0.8196637, -0.9898275, 1.2470883, -0.6741854, 0.9437433, -0.7633751, 0.0852687],
    ),
    (
        *(100, 8, 1e4, RopeScaling("yarn", factor=2.0, original_max_position_embeddings=16)),
        [0.2516972, 0.2516972, 0.9409635, 1.068005, -1.0392702, -1.0392702, 0.5079584, 0.0529095],
    ),
]


@pytest.mark.parametrize("positions,head_dim,theta,scaling,expected", TABLES)
def test_tables_of_transformers(positions, head_dim, theta, scaling, expected):
    cos, sin = rope_table(positions, head_dim, theta, scaling)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (positions, head_dim // 2)
    columns = [1, head_dim // 8, head_dim // 4, head_dim // 2 - 1]
    np.testing.assert_allclose(np.concatenate([cos[-1, columns], sin[-1, columns]]), expected, atol=1e-6)
    assert np.all(sin[0] == 0) and np.all(cos[0] == cos[0, 0])


def test_wrong_arguments_are_named():
    xp = device.xp()
    table, long = xp.zeros((4, 32), np.float32), xp.zeros((4, 129), np.float32)
    with pytest.raises(ValueError, match="rope: head_dim must be even, got 63"):
        check_tables("rope", 63, table, table)
    with pytest.raises(ValueError, match="rope: head_dim must be at most 256, got 258"):
        check_tables("rope", 258, long, long)
    with pytest.raises(ValueError, match="rope_table: head_dim must be even, got 63"):
        rope_table(4, 63, 10000.0)
    with pytest.raises(ValueError, match="rope_type must be one of linear, dynamic, llama3, yarn, got 'longrope'"):
        RopeScaling("longrope", factor=2.0)
    with pytest.raises(ValueError, match="rope_scaling: rope_type 'llama3' needs low_freq_factor"):
        RopeScaling("llama3", factor=2.0, original_max_position_embeddings=64)
