import numpy as np
import pytest

from rlnumba.kernels.sampling.penalties import (
    apply_output_penalties,
    apply_output_penalties_ref,
    ban_tokens,
    ban_tokens_kernel,
    output_penalties_kernel,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits


def penalised(logits, *arguments):
    on_device = device.asarray(logits.copy())
    apply_output_penalties(on_device, *map(device.asarray, arguments))
    return device.to_host(on_device)


def case(rng, rows, columns, length):
    """Random ids and padding; the completions begin after a third, one has no token."""
    history = rng.integers(-1, columns, (rows, length)).astype(np.int32)
    history[:, 1::3] = history[:, :1]
    starts = np.full(rows, length // 3, np.int32)
    starts[-1] = length
    penalties = (rng.uniform(-2, 2, rows).astype(np.float32) for _ in range(2))
    return rng.standard_normal((rows, columns)).astype(np.float32), *penalties, history, starts


def test_by_hand():
    """Tokens of the prompt are left alone, those of the completion pay once and for each occurrence."""
    logits = np.float32([[1.0, 1.0, 1.0, 1.0]])
    history = np.int32([[0, 0, 2, 1, 2, -1]])
    out = penalised(logits, np.float32([0.5]), np.float32([0.25]), history, np.int32([2]))
    assert out.tolist() == [[1.0, 0.25, 0.0, 1.0]]
    banned = device.asarray(logits)
    ban_tokens(banned, device.asarray(np.int32([[3, -1, 1]])))
    assert device.to_host(banned).tolist() == [[1.0, -np.inf, 1.0, -np.inf]]


@pytest.mark.sim
def test_in_kernels(rng):
    test_by_hand()
    arguments = case(rng, 3, 70, 150)
    assert_same_bits(penalised(*arguments), apply_output_penalties_ref(*arguments))
    logits = device.xp().zeros((2, 5), np.float32)
    ban_tokens(logits, device.asarray(np.full((2, 0), -1, np.int32)))
    ban_tokens(logits, device.asarray(np.int32([[4], [-1]])))
    assert logits.tolist() == [[0, 0, 0, 0, -np.inf], [0] * 5]


def test_counts(rng):
    logits, presence, frequency, history, starts = arguments = case(rng, 3, 70, 150)
    expected = logits.astype(np.float64)
    for row in range(3):
        ids = history[row, starts[row] :]
        counts = np.bincount(ids[ids >= 0], minlength=70)
        expected[row] -= frequency[row] * counts + presence[row] * (counts > 0)
    assert_close(penalised(*arguments), expected, "float32", terms=150, scale=400.0)


@pytest.mark.gpu
def test_gpu(rng):
    arguments = case(rng, 64, 151_936, 4097)
    assert_same_bits(penalised(*arguments), apply_output_penalties_ref(*arguments))


def test_machine_code(compile_offline):
    matrix, ids = "float32[:,::1]", "int32[:,::1]"
    types = (matrix, "float32[::1]", "float32[::1]", ids, "int32[::1]")
    assert not compile_offline(output_penalties_kernel, types, (9, 0))
    assert not compile_offline(ban_tokens_kernel, (matrix, ids), (9, 0))


def test_wrong_arguments_are_named():
    logits, row, ids = np.zeros((2, 5), np.float32), np.zeros(2, np.float32), np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"apply_output_penalties: starts must be \(2\) int32, got \(2,\) int64"):
        apply_output_penalties(*map(device.asarray, (logits, row, row, ids, np.zeros(2, np.int64))))
    with pytest.raises(ValueError, match=r"ban_tokens: banned must be \(2, any\) int32"):
        ban_tokens(device.asarray(logits), device.asarray(ids[:1]))
