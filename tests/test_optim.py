import gc
from dataclasses import dataclass

import numpy as np
import pytest

from rlnumba.config import TrainConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.optim.adamw import adamw_ref, adamw_scalars
from rlnumba.optim import AdamWConfig, Optimizer, learning_rate_at
from rlnumba.runtime import device, memory
from tests.close import assert_close, assert_same_bits


@dataclass
class Weights:
    flat: object
    decay_end: int


@dataclass
class Gradients:
    flat: object


def problem(dtype="float32", **options):
    """Ten parameters, six of which decay; the numbers that torch was given for TORCH_WEIGHTS."""
    start = np.cos(np.arange(10) * 0.9).astype(device.dtype(dtype))
    weights = Weights(device.asarray(start), 6)
    grads = Gradients(device.xp().zeros(10, np.float32))
    options = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-6, "weight_decay": 0.1} | options
    return weights, grads, Optimizer(weights, grads, AdamWConfig(**options))


def gradient(step):
    return (np.sin(np.arange(10) * 1.7 + step) * (0.2 if step % 2 else 3.0)).astype(np.float32)


def run(weights, grads, optimizer, steps):
    norms = []
    for step in steps:
        grads.flat[...] = device.asarray(gradient(step))
        norms.append(float(optimizer.step(0.05 * step)))
    return norms


# torch 2.13, float64: AdamW(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1 or 0), clip_grad_norm_(1.0), lr 0.05 t.
TORCH_NORMS = [0.4476737777, 6.9948191186, 0.4301860767, 6.623462034843, 0.4681014643]
TORCH_WEIGHTS = [0.6750769997, 0.9616102476, -0.0175127122, -1.2398996498, -0.9599198692]
TORCH_WEIGHTS += [0.2669889142, 0.6933995528, 0.5767776694, 0.6660014593, 0.1178056031]


def test_five_steps_of_torch():
    weights, grads, optimizer = problem()
    norms = run(weights, grads, optimizer, range(1, 6))
    assert_close(np.array(norms, np.float32), TORCH_NORMS, terms=10)
    assert_close(weights.flat, TORCH_WEIGHTS, terms=10)
    assert (optimizer.steps, optimizer.skipped_steps) == (5, 0)
    assert_same_bits(grads.flat, gradient(5), "gradients after a step")


def test_defaults_are_torchs_and_trls():
    weights, grads, _ = problem()
    optimizer = Optimizer(weights, grads)
    config = optimizer.config
    assert (config.beta1, config.beta2, config.epsilon) == (0.9, 0.999, 1e-8)
    assert (config.weight_decay, config.max_grad_norm) == (0.01, 1.0)
    assert (optimizer.steps, optimizer.skipped_steps) == (0, 0)


def test_clipping_divides_by_a_little_more_than_the_norm():
    """torch's clip_grad_norm_: by norm + 1e-6, which a norm of that size shows; and never makes a gradient larger."""
    _, grads, optimizer = problem(max_grad_norm=1e-6)
    grads.flat[:] = 0
    grads.flat[4] = 3e-6
    norm = float(optimizer.step(0.1))
    assert_close(np.float32(norm), 3e-6, terms=10)
    assert_close(device.to_host(optimizer.state["m"])[4:5], [(1 - 0.9) * 3e-6 / 4], terms=4)
    _, grads, optimizer = problem(max_grad_norm=1.0)
    grads.flat[:] = 0
    grads.flat[4] = 0.5
    optimizer.step(0.1)
    assert_close(device.to_host(optimizer.state["m"])[4:5], [(1 - 0.9) * 0.5], terms=4)


@pytest.mark.parametrize("dtype, arrays", [("float32", 2), ("bfloat16", 3)])
def test_moments_are_counted_as_long_as_they_are_held(dtype, arrays):
    def held():
        memory.reset_peaks()
        return memory.report().get("moments", 0)

    gc.collect()
    before = held()
    kept = problem(dtype)
    assert held() == before + arrays * 10 * 4
    del kept
    gc.collect()
    assert held() == before


@pytest.mark.parametrize("max_grad_norm", [None, 0, 100.0])
def test_no_clipping(max_grad_norm):
    weights, grads, optimizer = problem(max_grad_norm=max_grad_norm)
    start = device.to_host(weights.flat).astype(np.float64)
    run(weights, grads, optimizer, [2])
    scalars = adamw_scalars(0.1, 0.9, 0.95, 1e-6, 0.1, step=1).astype(np.float64)
    zeros = np.zeros(10)
    expected, _, _ = adamw_ref(start, gradient(2).astype(np.float64), zeros, zeros, scalars, np.arange(10) < 6)
    assert_close(weights.flat, expected, terms=4)


def test_non_finite_gradient_changes_nothing():
    weights, grads, optimizer = problem()
    run(weights, grads, optimizer, [1, 2])
    before = optimizer.state_dict(), device.to_host(weights.flat).copy()
    for bad in (np.nan, np.inf, 3e38):
        grads.flat[3] = bad
        assert not optimizer.step(0.1).is_finite
    after = optimizer.state_dict()
    for name in ("m", "v"):
        assert_same_bits(after[name], before[0][name], name)
    assert_same_bits(weights.flat, before[1], "weights")
    assert (optimizer.steps, optimizer.skipped_steps) == (2, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_steps_have_the_same_bits(dtype):
    straight = problem(dtype)
    run(*straight, range(1, 6))
    first, second = problem(dtype), problem(dtype)
    run(*first, range(1, 3))
    state = first[2].state_dict()
    run(*first, [9])
    if dtype == "float32":
        # A float32 model is its own master: its weights come from the checkpoint's model files.
        halfway = problem(dtype)
        run(*halfway, range(1, 3))
        second[0].flat[...] = halfway[0].flat
    second[2].load_state_dict(state)
    run(*second, range(3, 6))
    assert_same_bits(second[0].flat, straight[0].flat, "weights")
    for name, value in straight[2].state_dict().items():
        assert np.array_equal(second[2].state_dict()[name], value), name


def test_master_weights_of_a_16_bit_model():
    weights, grads, optimizer = problem("bfloat16", weight_decay=0.0)
    for _ in range(20):
        grads.flat[...] = device.asarray(np.ones(10, np.float32))
        optimizer.step(1e-4)
    # Twenty steps of 1e-4 are lost one by one in bfloat16, whose spacing near 1 is 4e-3 to 8e-3.
    start = np.cos(np.arange(10) * 0.9).astype(device.dtype("bfloat16")).astype(np.float64)
    assert_close(optimizer.state["master"], start - 20e-4, terms=20)
    master = device.to_host(optimizer.state["master"])
    assert_same_bits(weights.flat, master.astype(device.dtype("bfloat16")), "rounded weights")


def test_wrong_state_is_named():
    _, _, optimizer = problem()
    state = optimizer.state_dict()
    with pytest.raises(UserError, match=r"optimizer state: m must be \(10,\), got \(9,\)"):
        optimizer.load_state_dict(state | {"m": np.zeros(9, np.float32)})
    with pytest.raises(UserError) as caught:
        optimizer.load_state_dict(state | {"master": np.zeros(10, np.float32)})
    assert str(caught.value) == (
        "optimizer state: expected m, skipped_steps, steps, v, got m, master, skipped_steps, steps, v; "
        "was it saved with another train.dtype or train.master_weights?"
    )
    # Nothing of a state that does not fit is taken over.
    with pytest.raises(UserError, match="v must be"):
        optimizer.load_state_dict(state | {"m": np.ones(10, np.float32), "v": np.zeros(9, np.float32), "steps": 7})
    assert not device.to_host(optimizer.state["m"]).any() and optimizer.steps == 0


def test_a_state_is_a_copy_with_its_counters():
    weights, grads, optimizer = problem()
    run(weights, grads, optimizer, [1, 2])
    grads.flat[0] = np.nan
    optimizer.step(0.1)
    state = optimizer.state_dict()
    m = state["m"].copy()
    run(weights, grads, optimizer, [3])
    assert_same_bits(state["m"], m)
    assert (state["steps"], state["skipped_steps"]) == (2, 1)
    _, _, other = problem()
    other.load_state_dict(state)
    assert (other.steps, other.skipped_steps) == (2, 1)


KINDS = ["adamw_torch", "adamw_bf16", "adamw_8bit"]


def large_problem(dtype="bfloat16", size=1280, **options):
    """More parameters than one chunk, whose gradients differ from step to step."""
    start = np.cos(np.arange(size) * 0.9).astype(device.dtype(dtype))
    weights = Weights(device.asarray(start), size * 3 // 5)
    grads = Gradients(device.xp().zeros(size, np.float32))
    return weights, grads, Optimizer(weights, grads, AdamWConfig(weight_decay=0.1, **options))


def run_large(problem, steps):
    weights, grads, optimizer = problem
    for step in steps:
        gradient = np.sin(np.arange(len(weights.flat)) * 1.7 + step) * 0.01
        grads.flat[...] = device.asarray(gradient.astype(np.float32))
        optimizer.step(0.01)


def state_of(problem):
    return {**problem[2].state_dict(), "weights": device.to_host(problem[0].flat).copy()}


def assert_same_state(first, second):
    for name, value in state_of(first).items():
        other = state_of(second)[name]
        assert_same_bits(value, other, name) if isinstance(value, np.ndarray) else None
        assert isinstance(value, np.ndarray) or value == other, name


@pytest.mark.parametrize("master_weights", [True, False])
@pytest.mark.parametrize("optim", KINDS)
def test_every_kind_of_state_resumes_exactly(optim, master_weights):
    options = {"optim": optim, "master_weights": master_weights, "seed": 3}
    straight, first, second = (large_problem(**options) for _ in range(3))
    run_large(straight, range(1, 6))
    run_large(first, range(1, 3))
    second[0].flat[...] = first[0].flat
    second[2].load_state_dict(first[2].state_dict())
    run_large(second, range(3, 6))
    assert_same_state(second, straight)
    if optim == "adamw_bf16" or not master_weights:
        other = large_problem(**options | {"seed": 4})
        run_large(other, range(1, 6))
        assert not np.array_equal(state_of(other)["weights"], state_of(straight)["weights"])


@pytest.mark.parametrize("master_weights", [True, False])
@pytest.mark.parametrize("optim", KINDS)
def test_streamed_state_gives_the_same_bits(monkeypatch, optim, master_weights):
    """On the host, in chunks of which the last is shorter, among them one with the end of what decays."""
    options = {"optim": optim, "master_weights": master_weights}
    straight = large_problem(**options)
    monkeypatch.setattr("rlnumba.optim.CHUNK", 512)
    streamed, resumed = large_problem(**options, offload=True), large_problem(**options, offload=True)
    run_large(straight, range(1, 3))
    run_large(streamed, range(1, 3))
    assert all(isinstance(array, np.ndarray) for array in streamed[2].state.values())
    resumed[0].flat[...] = streamed[0].flat
    resumed[2].load_state_dict(streamed[2].state_dict())
    for problem in (straight, streamed, resumed):
        run_large(problem, range(3, 5))
    assert_same_state(streamed, straight)
    assert_same_state(resumed, straight)


@pytest.mark.parametrize("optim, tolerance", [("adamw_bf16", 0.01), ("adamw_8bit", 0.02)])
def test_short_moments_follow_float32_ones(optim, tolerance):
    """On a quadratic bowl of directions whose curvatures differ, the path stays close to that of float32 moments."""

    def path(optim):
        size = 512
        weights = Weights(device.asarray(np.linspace(-1, 1, size).astype(np.float32)), 0)
        grads = Gradients(device.xp().zeros(size, np.float32))
        optimizer = Optimizer(weights, grads, AdamWConfig(optim=optim, max_grad_norm=0))
        curvature, noise = np.geomspace(0.1, 10, size), np.random.default_rng(0)
        for _ in range(150):
            x = device.to_host(weights.flat)
            gradient = curvature * (x + 0.1 * noise.standard_normal(size))
            grads.flat[...] = device.asarray(gradient.astype(np.float32))
            optimizer.step(0.01)
        return device.to_host(weights.flat).astype(np.float64)

    expected = path("adamw_torch")
    assert np.sqrt(np.mean(expected**2)) < 0.25
    assert np.sqrt(np.mean((path(optim) - expected) ** 2)) < tolerance


def test_weights_without_a_master_take_small_steps_on_average():
    """Steps of 1/40 of bfloat16's spacing: rounding to nearest would never move, stochastic rounding does."""
    size = 4096
    weights = Weights(device.asarray(np.ones(size, device.dtype("bfloat16"))), 0)
    grads = Gradients(device.asarray(np.ones(size, np.float32)))
    optimizer = Optimizer(weights, grads, AdamWConfig(master_weights=False, max_grad_norm=0))
    for _ in range(20):
        optimizer.step(1e-4)
    moved = 1 - device.to_host(weights.flat).astype(np.float64)
    # Below 1 the spacing is 2^-8: a step of 1e-4 is taken with a probability of 0.0256.
    assert abs(moved.mean() - 20e-4) < 4 * np.sqrt(20 * 0.0256) * 2.0**-8 / np.sqrt(size)


def test_state_of_another_kind_is_refused():
    state = large_problem(optim="adamw_8bit")[2].state_dict()
    with pytest.raises(UserError) as caught:
        large_problem()[2].load_state_dict(state)
    assert str(caught.value) == (
        "optimizer state: saved with train.optim = 'adamw_8bit', and this run has 'adamw_torch'"
    )
    with pytest.raises(UserError, match="expected m, skipped_steps, steps, v, got m, master, .* train.master_weights"):
        large_problem(master_weights=False)[2].load_state_dict(large_problem()[2].state_dict())


def test_a_float16_model_needs_a_master():
    with pytest.raises(
        ConfigError, match="train.master_weights = false needs bfloat16 or float32 weights, got float16"
    ):
        large_problem("float16", master_weights=False)
    with pytest.raises(ConfigError, match="train.master_weights = false needs"):
        TrainConfig(dtype="float16", master_weights=False)


@pytest.mark.parametrize("optim, offload, expected", [("adamw_bf16", False, 8), ("adamw_8bit", False, 6 + 2 / 64)])
def test_state_is_as_small_as_the_table_says(optim, offload, expected):
    optimizer = large_problem(optim=optim, offload=offload)[2]
    assert sum(array.nbytes for array in optimizer.state.values()) == expected * 1280


# transformers 5.23, get_scheduler(name, lr=2): steps 0 to total_steps.
WARM = [0.0, 0.666666666667, 1.333333333333, 2.0]
SCHEDULES = {
    ("constant_with_warmup", 3, 6): [*WARM, 2.0, 2.0, 2.0],
    ("constant", 3, 6): [*WARM, 2.0, 2.0, 2.0],
    ("constant", 0, 2): [2.0, 2.0, 2.0],
    ("linear", 0, 4): [2.0, 1.5, 1.0, 0.5, 0.0],
    ("linear", 4, 4): [0.0, 0.5, 1.0, 1.5, 0.0],
    ("linear", 3, 10): [*WARM, 1.714285714286, 1.428571428571, 1.142857142857, 0.857142857143, 0.571428571429]
    + [0.285714285714, 0.0],
    ("cosine", 0, 4): [2.0, 1.707106781187, 1.0, 0.292893218813, 0.0],
    ("cosine", 4, 4): [0.0, 0.5, 1.0, 1.5, 2.0],
    ("cosine", 3, 10): [*WARM, 1.900968867902, 1.623489801859, 1.222520933956, 0.777479066044, 0.376510198141]
    + [0.099031132098, 0.0],
}


@pytest.mark.parametrize("key", SCHEDULES, ids=str)
def test_schedules_of_transformers(key):
    schedule, warmup_steps, total_steps = key
    train = TrainConfig(learning_rate=2.0, lr_scheduler_type=schedule, warmup_steps=warmup_steps)
    rates = [learning_rate_at(train, step, total_steps) for step in range(total_steps + 1)]
    np.testing.assert_allclose(rates, SCHEDULES[key], atol=1e-12)


def test_the_linear_rate_stays_0_after_the_last_step():
    train = TrainConfig(learning_rate=2.0, lr_scheduler_type="linear", warmup_steps=0)
    rates = [learning_rate_at(train, n, 4) for n in (3, 4, 5, 9)]
    assert rates == [0.5, 0.0, 0.0, 0.0]


def test_unknown_schedule():
    with pytest.raises(ConfigError, match="train.lr_scheduler_type must be one of constant, .* got 'polynomial'"):
        TrainConfig(lr_scheduler_type="polynomial")
