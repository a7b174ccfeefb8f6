"""A teacher's listed tokens as logits: the divergence and gradient of all of its logits, and what is refused."""

import numpy as np
import pytest

from rlnumba.kernels.logprob import chunked
from rlnumba.kernels.logprob.divergence import DivergenceForm, HeadInput, linear_divergence
from rlnumba.kernels.logprob.listed import NOWHERE, ListedLogits
from rlnumba.kernels.logprob.top_k_divergence import top_k_divergence_ref
from rlnumba.runtime import device
from tests.close import assert_close

# beta, add_tail.
FORMS = [(0.0, True), (0.0, False), (0.4, True), (1.0, True), (1.0, False)]


def listed_of(logits, top_k):
    """(token ids, log-probs) (N, top_k) of rows of logits (N, V)."""
    logs = logits.astype(np.float64)
    logs -= np.logaddexp.reduce(logs, axis=1, keepdims=True)
    ids = np.argsort(-logs, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    return ids, np.take_along_axis(logs, ids, axis=1).astype(np.float32)


def run_listed(rng, shape, form):
    """linear_divergence from listed tokens against the reference that reads all logits of the teacher."""
    (rows, vocabulary, top_k), (beta, add_tail), width = shape, form, 8
    hidden, weight = (
        rng.standard_normal((rows, width), np.float32),
        rng.standard_normal((vocabulary, width), np.float32),
    )
    teacher, dloss = 3 * rng.standard_normal((rows, vocabulary)), rng.standard_normal(rows, np.float32)
    listed = ListedLogits(*map(device.asarray, ListedLogits.of(*listed_of(teacher, top_k), vocabulary)))
    xp, arrays = device.xp(), [device.asarray(each) for each in (hidden, weight, dloss)]
    loss, dhidden, dweight = (xp.full(size, np.nan, np.float32) for size in (rows, hidden.shape, weight.shape))
    student = HeadInput(arrays[0], arrays[1])
    form = DivergenceForm(1.0, beta, top_k, add_tail, True)
    linear_divergence(student, listed, form, arrays[2], loss, dhidden, dweight)
    wide = hidden.astype(np.float64), weight.astype(np.float64)
    expected, slopes = top_k_divergence_ref(wide[0] @ wide[1].T, teacher, 1.0, beta, top_k, add_tail, True)
    slopes *= dloss[:, None]
    # Terms of a sum, each of logs of up to some tens.
    assert_close(loss, expected, "float32", terms=400, scale=40, what="loss")
    assert_close(dhidden, slopes @ wide[1], "float32", terms=400, scale=40, what="dhidden")
    assert_close(dweight, slopes.T @ wide[0], "float32", terms=400, scale=40, what="dweight")


@pytest.mark.parametrize("form", FORMS)
def test_numpy_device(form, monkeypatch):
    rng = np.random.default_rng(0)
    for shape in [(1, 1, 1), (3, 7, 7), (5, 63, 4), (9, 300, 20)]:
        run_listed(rng, shape, form)
    # Two rows of logits at a time.
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 126)
    run_listed(rng, (5, 63, 4), form)


@pytest.mark.sim
@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[4]])
def test_simulator(form, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 126)
    run_listed(np.random.default_rng(1), (3, 63, 4), form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_gpu(form):
    run_listed(np.random.default_rng(2), (700, 151936, 20), form)


def test_softmax_of_the_logits_has_the_listed_probabilities():
    """And the others have the rest, also where it is next to nothing, and where all are alike."""
    for logs in (np.log([[0.5, 0.3], [0.9, 0.0999999999]]), np.log(np.full((2, 2), 0.1)), np.log([[0.2, 0.1]])):
        ids = np.tile(np.int32([4, 1]), (len(logs), 1))
        places, values = ListedLogits.of(ids, logs.astype(np.float32), 10)
        assert places.tolist() == [[10 * row + 4, 10 * row + 1] for row in range(len(logs))]
        logits = np.zeros((len(logs), 10))
        np.put(logits, places, values)
        found = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(np.take_along_axis(found, ids, axis=1), np.exp(logs), rtol=2e-5)
        # The listed ones are the likeliest.
        assert (np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :2]) == [1, 4]).all()


def test_what_is_refused():
    ids, logs = np.int32([[1, 5]]), np.float32([[-1.0, -2.0]])
    with pytest.raises(ValueError, match=r"ListedLogits: a token outside of \[0, 5\)"):
        ListedLogits.of(ids, logs, 5)
    with pytest.raises(ValueError, match="ListedLogits: a token is listed twice in a row"):
        ListedLogits.of(np.int32([[3, 3]]), logs, 5)
    x, weight = np.ones((1, 4), np.float32), np.ones((6, 4), np.float32)
    others = np.ones(1, np.float32), np.empty(1, np.float32), np.empty_like(x), None
    listed = ListedLogits.of(ids, logs, 6)
    for form in (DivergenceForm(top_k=2), DivergenceForm(of_teacher=True)):
        with pytest.raises(ValueError, match="linear_divergence: a teacher's listed tokens are for a form over them"):
            linear_divergence(HeadInput(x, weight), listed, form, *others)
    with pytest.raises(ValueError, match="linear_divergence: values"):
        wrong = ListedLogits(listed.places, listed.values[:, :1])
        linear_divergence(HeadInput(x, weight), wrong, DivergenceForm(top_k=2, of_teacher=True), *others)
    assert NOWHERE < 0
