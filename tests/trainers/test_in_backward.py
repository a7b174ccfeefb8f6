"""The optimizer step inside the backward: the same step, from gradients of which one layer's exist at a time."""

import dataclasses
import math

import numpy as np
import pytest

from rlnumba.config import SFTConfig
from rlnumba.config.lora import LoraConfig
from rlnumba.config.ppo import PPOConfig
from rlnumba.data import TokenSequence
from rlnumba.errors import ConfigError
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.model.lora import Adapter
from rlnumba.model.transformer import load_model
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.trainers import sft
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.sft import run_sft
from tests.close import assert_close, assert_same_bits
from tests.trainers.runs import GOLDEN, MODEL, grpo_run, metrics_of, sft_run

MODELS = sorted(path.parent for path in GOLDEN.glob("models/*/config.json"))
TRAIN = SFTConfig(max_grad_norm=0.0, weight_decay=0.1, adam_beta2=0.95, per_device_train_batch_size=4)


def rows(seed, count=3):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 14, count)
    return [TokenSequence(generator.integers(3, 40, n, dtype=np.int32), np.ones(n, bool)) for n in lengths]


def steps(folder, train, count=3, heads=LM_HEAD, **options):
    """(weights and state of the optimizer by name, [grad_norm]) after some steps of SFT."""
    model = load_model(folder, "float32", heads=heads)
    policy = Policy(model, dataclasses.replace(train, **options))
    norms = [sft.train_step(policy, [rows(step)], 1e-2)["grad_norm"] for step in range(count)]
    assert policy.optimizer.steps == count
    return {"weights": model.weights.flat} | policy.optimizer.state, norms


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_same_bits_as_a_step_after_the_backward(folder):
    expected, norms = steps(folder, TRAIN)
    found, found_norms = steps(folder, TRAIN, optimizer_in_backward=True)
    for name, array in expected.items():
        assert_same_bits(found[name], device.to_host(array), name)
    assert_close(np.array(found_norms), norms, "float32", terms=100)


@pytest.mark.parametrize("optim, offload", [("adamw_8bit", False), ("adamw_8bit", True), ("adamw_torch", True)])
def test_same_bits_with_other_states_and_heads(monkeypatch, optim, offload):
    # Chunks that are shorter than a layer.
    monkeypatch.setattr("rlnumba.optim.CHUNK", 1024)
    options = {"optim": optim, "offload_optimizer": offload, "activation_memory": "selective"}
    both = LM_HEAD + SCORE_HEAD
    expected, _ = steps(MODEL, TRAIN, heads=both, **options)
    found, _ = steps(MODEL, TRAIN, heads=both, optimizer_in_backward=True, **options)
    for name, array in expected.items():
        assert_same_bits(found[name], device.to_host(array), name)


def test_gradients_are_those_of_a_layer():
    model = load_model(MODEL, "float32")
    layer = sum(array.size for w in model.weights.layers[0] for array in w if array is not None)
    small = Policy(model, dataclasses.replace(TRAIN, optimizer_in_backward=True)).grads.nbytes
    outside = sum(p.size for p in model.weights.parameters if not p.name.startswith("model.layers."))
    count = len(model.weights.layers)
    assert outside + layer <= small / 4 < outside + 1.1 * layer + 1024 * count < model.weights.flat.size


def test_parts_after_a_gradient_that_is_not_finite_stay_as_they_are():
    model = load_model(MODEL, "float32")
    policy = Policy(model, dataclasses.replace(TRAIN, optimizer_in_backward=True))
    sft.train_step(policy, [rows(0)], 1e-2)
    middle = len(model.weights.layers) // 2
    model.weights.layers[middle][0].q_norm[0] = np.inf
    before = device.to_host(model.weights.flat).copy()
    metrics = sft.train_step(policy, [rows(1)], 1e-2)
    assert not math.isfinite(metrics["grad_norm"]) and metrics["skipped_steps"] == 1
    assert policy.optimizer.steps == 1
    assert_same_bits(model.weights.flat, before, "a loss that is not finite: all parts")


def test_parts_before_it_are_updated():
    model = load_model(MODEL, "float32")
    policy = Policy(model, dataclasses.replace(TRAIN, optimizer_in_backward=True))
    optimizer, flat = policy.optimizer, model.weights.flat
    before, size = device.to_host(flat).copy(), 512
    optimizer.begin(1e-2)
    for start, value in ((2 * size, 1.0), (size, np.inf), (0, 1.0)):
        optimizer.update(start, device.asarray(np.full(size, value, np.float32)))
    assert float(optimizer.finish()) == np.inf and (optimizer.steps, optimizer.skipped_steps) == (0, 1)
    after = device.to_host(flat)
    assert_same_bits(after[: 2 * size], before[: 2 * size])
    assert (after[2 * size : 3 * size] != before[2 * size : 3 * size]).all()


def test_a_second_backward_in_a_step_is_refused():
    policy = Policy(load_model(MODEL, "float32"), dataclasses.replace(TRAIN, optimizer_in_backward=True))
    with pytest.raises(ValueError, match="optimizer_in_backward: a second backward in a step"):
        sft.train_step(policy, [rows(seed, 1) for seed in range(5)], 1e-2)


def test_resumes_exactly(tmp_path):
    options = {"max_grad_norm": 0.0, "optimizer_in_backward": True, "optim": "adamw_8bit"}
    options["gradient_accumulation_steps"] = 1
    run = sft_run(tmp_path / "run", max_steps=4, save_steps=2, **options)
    run_sft(run)
    final = tmp_path / "run" / "final" / "model.safetensors"
    expected = final.read_bytes()
    run_sft(run, resume=2)
    assert final.read_bytes() == expected


def test_grpo_learns_as_without(tmp_path):
    options = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "max_steps": 3}
    losses = []
    for in_backward in (False, True):
        run = grpo_run(tmp_path / str(in_backward), **options, optimizer_in_backward=in_backward)
        run_grpo(run)
        losses.append([row["loss"] for row in metrics_of(run)])
    assert losses[0] == losses[1] and any(losses[0])


def test_what_it_needs_is_named():
    for options in ({}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}):
        with pytest.raises(ConfigError, match=r"optimizer_in_backward needs train.max_grad_norm = 0.*gradient_accumul"):
            SFTConfig(optimizer_in_backward=True, **options)
    ppo = {"optimizer_in_backward": True, "max_grad_norm": 0.0, "per_device_train_batch_size": 8}
    PPOConfig(**ppo, gradient_accumulation_steps=4, num_mini_batches=4)
    with pytest.raises(ConfigError, match=r"optimizer_in_backward needs .* got 2"):
        PPOConfig(**ppo, gradient_accumulation_steps=4, num_mini_batches=2)
    model = load_model(MODEL, "float32")
    model.adapter = Adapter.new(model.config, LoraConfig(r=2), "float32", "base", 0)
    with pytest.raises(ConfigError, match="optimizer_in_backward is for the model's weights"):
        Policy(model, dataclasses.replace(TRAIN, optimizer_in_backward=True))
