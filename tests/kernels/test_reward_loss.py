import numpy as np
import pytest

from rlnumba.kernels.rl.reward_loss import reward_loss, reward_loss_kernel, reward_loss_ref
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient

NAMES = ("loss", "dchosen", "drejected")


def arrays(rng, pairs):
    return [3.0 * rng.standard_normal(pairs) for _ in range(2)] + [rng.standard_normal(pairs)]


def run(chosen, rejected, margins, centering, scale):
    outputs = [device.xp().full(len(chosen), np.nan, np.float32) for _ in NAMES]
    inputs = [device.asarray(a.astype(np.float32)) for a in (chosen, rejected, margins)]
    reward_loss(*inputs, centering, scale, *outputs)
    return outputs


def check_against_reference(rng, pairs, centering):
    inputs = [a.astype(np.float32) for a in arrays(rng, pairs)]
    actual = run(*inputs, centering, 0.25)
    expected = reward_loss_ref(*(a.astype(np.float64) for a in inputs), centering, 0.25)
    for got, want, name in zip(actual, expected, NAMES, strict=True):
        assert_close(got, want, terms=8, what=name)


@pytest.mark.parametrize("centering", [0.0, 0.3])
def test_reference(rng, centering):
    """Its derivatives are those of its loss, and this is the formula."""
    chosen, rejected, margins = arrays(rng, 7)

    def loss():
        return 0.25 * float(reward_loss_ref(chosen, rejected, margins, centering, 0.25)[0].sum())

    losses, dchosen, drejected = reward_loss_ref(chosen, rejected, margins, centering, 0.25)
    assert_gradient(loss, dchosen, chosen, "dchosen")
    assert_gradient(loss, drejected, rejected, "drejected")
    expected = -np.log(1 / (1 + np.exp(margins + rejected - chosen))) + centering * (chosen + rejected) ** 2
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


@pytest.mark.sim
@pytest.mark.parametrize("centering", [0.0, 0.3])
def test_simulator(rng, centering):
    for pairs in (0, 1, 128, 129):
        check_against_reference(rng, pairs, centering)


@pytest.mark.parametrize("pairs", [0, 1, 300])
def test_numpy_device(rng, pairs):
    if device.name() == "cpu":
        check_against_reference(rng, pairs, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [0, 1, 127, 128, 129, 4097])
def test_gpu(rng, pairs):
    check_against_reference(rng, pairs, 0.1)


@pytest.mark.sim
def test_rewards_far_apart():
    """Neither overflow nor NaN; also on the cpu device, by the line below."""
    far = np.array([1e4, -1e4, 0.0])
    loss, dchosen, drejected = map(device.to_host, run(far, np.zeros(3), np.zeros(3), 0.0, 1.0))
    assert loss.tolist() == [0.0, 1e4, pytest.approx(np.log(2))]
    assert dchosen.tolist() == [0.0, -1.0, -0.5] and drejected.tolist() == [0.0, 1.0, 0.5]


def test_rewards_far_apart_on_the_cpu_device():
    if device.name() == "cpu":
        test_rewards_far_apart()


def test_kernel_compiles_for_gpus(compile_offline):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    f32 = "float32[::1]"
    types = [f32, f32, f32, "float32", "float32", f32, f32, f32]
    troubles = [line for at in ((8, 0), (9, 0)) for line in compile_offline(reward_loss_kernel, types, at)]
    assert not troubles, "\n".join(troubles)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"reward_loss: margins must be \(2\) float32, got \(3,\) float32"):
        run(np.zeros(2), np.zeros(2), np.zeros(3), 0.0, 1.0)
