"""The divergence over top-k tokens against TRL's losses, finite differences and the reference."""

import itertools
import pathlib
import tracemalloc

import numpy as np
import pytest

from rlnumba.kernels.logprob.divergence import DivergenceForm, divergence_of_logits, divergence_ref, kind_of
from rlnumba.kernels.logprob.top_k_divergence import top_k_divergence_kernel, top_k_divergence_ref
from rlnumba.kernels.nn.row_sum import ROW_THREADS
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits

GOLDEN = np.load(pathlib.Path(__file__).parent.parent / "golden" / "top_k_divergence.npz")
# beta, add_tail, of_teacher.
FORMS = list(itertools.product([0.0, 0.3, 1.0], [True, False], [True, False]))
# N, V, top_k: one; all; below and above the threads of a row; none.
SMALL = [(1, 1, 1), (2, 7, 7), (3, 63, 5), (2, ROW_THREADS + 1, 40), (0, 5, 2)]


def test_the_reference_is_trls_loss():
    for index, (beta, temperature, top_k, add_tail) in enumerate(GOLDEN["cases"].tolist()):
        form = temperature, beta, int(top_k), bool(add_tail), beta == 0
        loss, dlogits = top_k_divergence_ref(GOLDEN["student"], GOLDEN["teacher"], *form)
        np.testing.assert_allclose(loss, GOLDEN[f"loss{index}"], rtol=1e-9, atol=1e-12, err_msg=str(form))
        expected = GOLDEN[f"dlogits{index}"]
        dlogits = dlogits * GOLDEN["dloss"][:, None]
        np.testing.assert_allclose(dlogits, expected, rtol=1e-8, atol=1e-12, err_msg=str(form))


@pytest.mark.parametrize("beta, add_tail, of_teacher", FORMS)
def test_gradient_of_reference(beta, add_tail, of_teacher):
    rng = np.random.default_rng(1)
    student, teacher, dloss = rng.standard_normal((3, 7)), rng.standard_normal((3, 7)), rng.standard_normal(3)
    # The tail of the student's first row is below its smallest value, and has no gradient.
    student[0, :3] += 15
    teacher[0, :3] += 4
    form = 0.8, beta, 3, add_tail, of_teacher
    slopes = top_k_divergence_ref(student, teacher, *form)[1] * dloss[:, None]

    def loss():
        return float(np.dot(top_k_divergence_ref(student, teacher, *form)[0], dloss))

    assert_gradient(loss, slopes, student, "dlogits")


@pytest.mark.parametrize("beta, add_tail, of_teacher", FORMS)
def test_memory_of_the_reference_grows_with_the_tokens_alone(beta, add_tail, of_teacher):
    """A derivative of each token by each one would be terabytes at a vocabulary of 32,000."""
    logits = np.random.default_rng(6).standard_normal((2, 2, 4000))
    tracemalloc.start()
    try:
        top_k_divergence_ref(*logits, 0.8, beta, 20, add_tail, of_teacher)
        assert tracemalloc.get_traced_memory()[1] < 30 * logits[0].nbytes
    finally:
        tracemalloc.stop()


def run_logits(rng, shape, dtype, form, temperature=0.9):
    """divergence_of_logits against the reference; dtype: of dlogits; form: of FORMS."""
    beta, add_tail, of_teacher = form
    rows, vocabulary, top_k = shape
    student, teacher = (4 * rng.standard_normal((rows, vocabulary), np.float32) for _ in range(2))
    dloss = rng.standard_normal(rows, np.float32)
    xp, form = device.xp(), DivergenceForm(temperature, beta, top_k, add_tail, of_teacher)
    loss, dlogits = xp.full(rows, np.nan, np.float32), xp.zeros((rows, vocabulary), device.dtype(dtype))
    arrays = [device.asarray(array) for array in (student, teacher)]
    divergence_of_logits(*arrays, form, device.asarray(dloss), loss, dlogits)
    wide = (array.astype(np.float64) for array in (student, teacher))
    expected, slopes = top_k_divergence_ref(*wide, *form)
    # A tail of float32 probabilities, near 1e-7, has the error of its sum in its log.
    size = 2 * (max(np.max(np.abs(student), initial=0.0), np.max(np.abs(teacher), initial=0.0)) + np.log(vocabulary))
    assert_close(loss, expected, "float32", terms=400, scale=2 * size / temperature, what="loss")
    largest = np.max(np.abs(dloss), initial=0.0) / temperature
    assert_close(dlogits, slopes * dloss[:, None], dtype, terms=400, scale=2 * largest * size / temperature)
    if dtype == "float32":
        again = xp.full_like(loss, np.nan)
        divergence_of_logits(*arrays, form, device.asarray(dloss), again, arrays[0])
        assert_same_bits(again, loss)
        assert_same_bits(arrays[0], dlogits)
    return student, teacher, device.to_host(loss)


@pytest.mark.parametrize("form", FORMS)
def test_numpy_device(form):
    rng = np.random.default_rng(2)
    for shape in [*SMALL, (5, 3000, 64)]:
        run_logits(rng, shape, "float32", form)


@pytest.mark.sim
@pytest.mark.parametrize("form", FORMS)
def test_simulator(form):
    rng = np.random.default_rng(3)
    run_logits(rng, (2, 63, 5), "float32", form)
    run_logits(rng, (1, 40, 40), "bfloat16", form)
    if form == (1.0, True, False):
        run_logits(rng, SMALL[3], "float32", form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_gpu(form):
    rng = np.random.default_rng(4)
    run_logits(rng, (300, 32000, 100), "float32", form)
    run_logits(rng, (64, 151936, 20), "bfloat16", form)


def test_all_tokens_are_the_whole_divergence():
    """And with few of them and a tail, it is below that: lumping tokens together loses information."""
    rng = np.random.default_rng(5)
    student, teacher = 4 * rng.standard_normal((2, 6, 50))
    for beta in (0.0, 0.3, 1.0):
        whole, slopes = divergence_ref(student, teacher, 0.9, beta)
        found, dlogits = top_k_divergence_ref(student, teacher, 0.9, beta, 50, False, False)
        np.testing.assert_allclose(found, whole, rtol=1e-12)
        np.testing.assert_allclose(dlogits, slopes, rtol=1e-9, atol=1e-14)
        few = [top_k_divergence_ref(student, teacher, 0.9, beta, k, True, beta == 0)[0] for k in (1, 5, 20)]
        assert (few[0] < few[1]).all() and (few[1] < few[2]).all() and (few[2] < whole).all()


def test_equal_logits_at_the_boundary_are_all_kept():
    student, teacher = np.float32([[3, 2, 2, 1, 0]]), np.float32([[0, 1, 2, 3, 4]])
    loss, dlogits = np.empty(1, np.float32), np.empty((1, 5), np.float32)
    for top_k in (2, 3):
        divergence_of_logits(
            student, teacher, DivergenceForm(1.0, 1.0, top_k, False), np.ones(1, np.float32), loss, dlogits
        )
        assert (dlogits[0, :3] != 0).all() and (dlogits[0, 3:] == 0).all()
        p, q = (
            np.exp(x[0, :3].astype(np.float64)) / np.exp(x[0, :3].astype(np.float64)).sum() for x in (student, teacher)
        )
        np.testing.assert_allclose(loss[0], np.sum(p * np.log(p / q)), rtol=1e-6)


@pytest.mark.parametrize("beta, of_teacher", [(0.0, True), (0.5, False), (0.5, True), (1.0, False), (1.0, True)])
def test_the_kernel_compiles_for_a_gpu(compile_offline, beta, of_teacher):
    arguments = [*["float32[:,::1]"] * 2, *["float32"] * 4, "int32", *["float32[::1]"] * 2, "uint16[:,::1]"]
    troubles = compile_offline(top_k_divergence_kernel(kind_of(beta), True, of_teacher), arguments, (9, 0))
    assert not troubles, "\n".join(troubles)
