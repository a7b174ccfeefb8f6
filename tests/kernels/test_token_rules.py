import numpy as np
import pytest

from rlnumba.kernels.sampling.token_rules import (
    add_bias,
    add_bias_kernel,
    add_bias_ref,
    ban_words,
    ban_words_kernel,
    ban_words_ref,
    keep_allowed,
    keep_allowed_kernel,
    keep_allowed_ref,
)
from rlnumba.runtime import device
from tests.close import assert_same_bits

INF = np.inf


def changed(operator, logits, *arguments):
    on_device = device.asarray(logits.copy())
    operator(on_device, *map(device.asarray, arguments))
    return device.to_host(on_device)


def cases(rng, rows, columns):
    """(operator, reference, arguments) of each, random."""
    logits = rng.standard_normal((rows, columns)).astype(np.float32)
    ids = np.stack([rng.permutation(columns)[:9] for _ in range(rows)]).astype(np.int32)
    ids[:, -2:] = -1, columns + 3
    allowed = rng.integers(-(2**31), 2**31, (rows, -(-columns // 32))).astype(np.int32)
    allowed[0] = -1
    history = rng.integers(0, 3, (rows, 40)).astype(np.int32)
    starts, position = (rng.integers(0, 41, rows).astype(np.int32) for _ in range(2))
    words = rng.integers(0, 3, (rows, 12, 4)).astype(np.int32)
    for word in range(12):
        words[:, word, : word % 5] = -1
    return [
        (add_bias, add_bias_ref, (logits, ids, rng.uniform(-100, 100, ids.shape).astype(np.float32))),
        (keep_allowed, keep_allowed_ref, (logits, allowed)),
        (ban_words, ban_words_ref, (logits, history, starts, position, words)),
    ]


@pytest.mark.sim
def test_by_hand():
    logits = np.float32([[1, 2, 3, 4]])
    assert changed(add_bias, logits, np.int32([[3, -1, 0]]), np.float32([[-2, 9, 0.5]])).tolist() == [[1.5, 2, 3, 2]]
    assert changed(keep_allowed, logits, np.int32([[0b1010]])).tolist() == [[-INF, 2, -INF, 4]]
    # The completion is 1, 2: "2 0" and "1 2 1" and "3" are completed, "1 0" is not, "5 1 2 1" begins in the prompt.
    words = np.int32([[[-1, -1, 2, 0], [-1, 1, 2, 1], [-1, -1, -1, 3], [-1, -1, 1, 2], [5, 1, 2, 2], [-1, -1, -1, -1]]])
    history = np.int32([[5, 1, 2, -1]])
    out = changed(ban_words, logits, history, np.int32([1]), np.int32([3]), words)
    assert out.tolist() == [[-INF, -INF, 3, -INF]]


@pytest.mark.sim
def test_against_the_references(rng):
    for operator, reference, arguments in cases(rng, 5, 70):
        found = changed(operator, *arguments)
        assert (found != arguments[0]).any()
        assert_same_bits(found, reference(*arguments))
    # Some of the columns, from token 32 on.
    logits, allowed = rng.standard_normal((5, 41)).astype(np.float32), cases(rng, 5, 99)[1][2][1]
    part = device.asarray(logits.copy())
    keep_allowed(part, device.asarray(allowed), 32)
    assert_same_bits(part, keep_allowed_ref(logits, allowed[:, 1:]))
    for first in (16, 96):
        with pytest.raises(ValueError, match="allowed must be of tokens up to"):
            keep_allowed(part, device.asarray(allowed), first)
    for none in (np.zeros((2, 0), np.int32), np.full((2, 1), -1, np.int32)):
        logits = np.ones((2, 40), np.float32)
        assert_same_bits(changed(add_bias, logits, none, none.astype(np.float32)), logits)


@pytest.mark.gpu
def test_gpu(rng):
    for operator, reference, arguments in cases(rng, 64, 151_936):
        assert_same_bits(changed(operator, *arguments), reference(*arguments))


def test_machine_code(compile_offline):
    matrix, ids, row = "float32[:,::1]", "int32[:,::1]", "int32[::1]"
    assert not compile_offline(add_bias_kernel, (matrix, ids, matrix), (9, 0))
    assert not compile_offline(keep_allowed_kernel, (matrix, ids, "int32"), (9, 0))
    assert not compile_offline(ban_words_kernel, (matrix, ids, row, row, "int32[:,:,::1]"), (9, 0))


def test_wrong_arguments_are_named():
    logits, ids = np.zeros((2, 5), np.float32), np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"add_bias: bias must be \(2, 3\) float32"):
        add_bias(*map(device.asarray, (logits, ids, logits)))
    with pytest.raises(ValueError, match="keep_allowed: allowed must be of tokens up to 5, got 0 words"):
        keep_allowed(*map(device.asarray, (logits, ids[:, :0])))
    with pytest.raises(ValueError, match=r"keep_allowed: allowed must be \(2, any\) int32"):
        keep_allowed(*map(device.asarray, (logits, logits)))
    with pytest.raises(ValueError, match=r"ban_words: words must be \(2, any, any\) int32"):
        ban_words(*map(device.asarray, (logits, ids, ids[:, 0].copy(), ids[:, 0].copy(), ids)))
