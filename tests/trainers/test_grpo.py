"""GRPO against TRL's own loss, its invariants, and runs of a few seconds."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlnumba.config import AsyncConfig, DataConfig, PPOConfig, TeacherConfig, ToolsConfig
from rlnumba.data import Prompt, PromptData
from rlnumba.engine.sequence import Completion, SamplingParams
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.heads import LogprobHead
from rlnumba.model.transformer import load_model
from rlnumba.rewards import RewardError, TrainingProgress
from rlnumba.runs import prompt_loop, prompt_run, prompt_schedule
from rlnumba.runs.eval import run_eval
from rlnumba.runs.planning.plan import Planner
from rlnumba.runs.policy import Policy
from rlnumba.runs.prompt_order import PromptOrder
from rlnumba.runs.run_folder import Clock
from rlnumba.runtime import device
from rlnumba.sampling.samples import Generation, Sample, derived_seed
from rlnumba.trainers import grpo
from rlnumba.trainers.rollout import Rollouts
from tests.close import assert_close, assert_same_bits
from tests.trainers.runs import MODEL, golden, grpo_config, grpo_run, metrics_of, metrics_until

GOLDEN = golden("grpo_curves.json")


def golden_samples():
    batch = GOLDEN["batch"]
    columns = (batch[name] for name in ("prompt_ids", "completion_ids", "rollout_logprobs", "advantages"))
    return [
        Sample(Prompt("", prompt, {}, ""), Completion(ids, logprobs, "stop", ""), np.zeros(1), 0.0, {}, advantage)
        for prompt, ids, logprobs, advantage in zip(*columns, strict=True)
    ]


def golden_rollouts():
    batch, rollouts = GOLDEN["batch"], Rollouts.of(golden_samples(), False)
    rollouts.ref_logprobs = np.concatenate([np.array(row, np.float32) for row in batch["ref_logprobs"]])
    return rollouts


@pytest.fixture
def other_sampler(monkeypatch):
    """The completions are another sampler's, whose log-probs differ from the policy's."""
    monkeypatch.setattr(grpo, "sampler_is_exact", lambda train: False)


def golden_policy(**options):
    train = grpo_config(
        **{"max_completion_length": 16, "num_iterations": 6, "per_device_train_batch_size": 4} | options
    )
    return Policy(load_model(MODEL), train, None, train.temperature)


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_golden_curve_of_several_steps_on_one_generation(other_sampler, case):
    options, curve = GOLDEN["cases"][case]["options"], GOLDEN["cases"][case]["curve"]
    policy = golden_policy(**options)
    rollouts = golden_rollouts()
    # TRL takes the old log-probs from a forward of the first policy.
    rollouts.old_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(4))
    for step, want in enumerate(curve):
        got = grpo.train_step(policy, rollouts.parts(4, on_policy=step == 0), GOLDEN["config"]["learning_rate"])
        for name, value in want.items():
            # The loss of a first step may be 0 by cancellation of terms of size 1.
            assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "cispo", "luspo"])
def test_gradient_does_not_depend_on_the_micro_batch_split(other_sampler, loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    gradients = []
    for size in (8, 4, 2, 1):
        policy = golden_policy(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
        metrics = grpo.train_step(policy, golden_rollouts().parts(size, on_policy=True), 0.0)
        gradients.append((metrics["loss"], device.to_host(policy.grads.flat).copy()))
    scale = np.abs(gradients[0][1]).max()
    for loss, gradient in gradients[1:]:
        assert loss == pytest.approx(gradients[0][0], rel=1e-5, abs=1e-6)
        # Sums over about a hundred tokens in another order.
        np.testing.assert_allclose(gradient, gradients[0][1], atol=1e-5 * scale)


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": name} for name in ("dapo", "grpo", "bnpo", "dr_grpo", "vespo", "gmpo", "dro")),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"entropy_coef": 0.1, "top_entropy_quantile": 0.5, "beta": 0.1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_micro_batches_by_tokens_give_the_same_loss(other_sampler, options):
    gradients, most = [], golden_rollouts().prompt_lengths + golden_rollouts().completion_lengths
    for limit in (None, 1000, 60, 1):
        policy = golden_policy(max_tokens_per_micro_batch=limit, **options)
        parts = golden_rollouts().parts(4, on_policy=True)
        pieces, _ = grpo.cut_by_tokens(policy.train, parts)
        sizes = [len(piece.token_ids) for piece in pieces]
        assert sum(sizes) == most.sum() and (limit is None or max(sizes) <= max(limit, most.max()))
        assert len(pieces) == {None: 2, 1000: 2 if policy.train.loss_type == "bnpo" else 1, 1: 8}.get(
            limit, len(pieces)
        )
        metrics = grpo.train_step(policy, parts, 0.0)
        gradients.append((metrics, device.to_host(policy.grads.flat).copy()))
    scale = np.abs(gradients[0][1]).max()
    for metrics, gradient in gradients[1:]:
        for name, value in metrics.items():
            assert value == pytest.approx(gradients[0][0][name], rel=1e-5, abs=1e-6), name
        # Sums over about a hundred tokens in another order.
        np.testing.assert_allclose(gradient, gradients[0][1], atol=1e-5 * scale)


def test_parts_of_tokens():
    rollouts = golden_rollouts()
    lengths = (rollouts.prompt_lengths + rollouts.completion_lengths).tolist()
    for limit in (1, lengths[0], lengths[0] + lengths[1], sum(lengths)):
        parts = rollouts.parts_of_tokens(limit)
        taken = [(part.prompt_lengths + part.completion_lengths).tolist() for part in parts]
        assert sum(taken, []) == lengths
        for these, those in zip(taken, taken[1:] + [[limit + 1]], strict=True):
            # As many as there is room for.
            assert len(these) == 1 or sum(these) <= limit < sum(these) + those[0]
        whole = Rollouts.joined(parts)
        for name, value in rollouts.state().items():
            np.testing.assert_array_equal(getattr(whole, name), value)


def test_micro_batches_by_tokens_in_a_run(tmp_path):
    """Off-policy steps and a reference, too: the same rewards, and the sampler stays exact."""
    rows = []
    for limit in (None, 70):
        options = {"beta": 0.01, "num_iterations": 2, "max_steps": 2, "gradient_accumulation_steps": 1}
        run = grpo_run(tmp_path / str(limit), max_tokens_per_micro_batch=limit, learning_rate=1e-4, **options)
        grpo.run_grpo(run)
        rows.append(metrics_of(run))
    for row, other in zip(*rows, strict=True):
        assert row["reward"] == other["reward"] and other["sampling/sampling_logp_difference/max"] == 0.0
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
        assert other["kl"] == pytest.approx(row["kl"], rel=1e-3, abs=1e-7)


def test_checkpointing_gives_the_same_bits(other_sampler):
    weights = []
    for checkpointing in (False, True):
        policy = golden_policy(gradient_checkpointing=checkpointing)
        grpo.train_step(policy, golden_rollouts().parts(4, on_policy=True), 1e-3)
        weights.append(policy.model.weights.flat)
    assert_same_bits(*weights)


def test_masked_sequences_do_not_move_the_weights(other_sampler):
    rollouts = golden_rollouts()
    rollouts.loss_mask[:] = 0
    policy = golden_policy()
    before = device.to_host(policy.model.weights.flat).copy()
    metrics = grpo.train_step(policy, rollouts.parts(4, on_policy=True), 1e-2)
    assert metrics["grad_norm"] == 0.0 and metrics["loss"] == 0.0
    assert_same_bits(policy.model.weights.flat, before)


@pytest.mark.parametrize(
    ("loss_type", "share"), [("dapo", 1), ("cispo", 1), ("grpo", 5 / 8), ("dr_grpo", 5 / 8), ("luspo", 5 / 8)]
)
def test_masked_tokens_are_in_no_denominator_and_masked_sequences_in_that_of_sequences(other_sampler, loss_type, share):
    """A batch with truncated completions against the one without them, which is 5 of its 8 sequences.

    A mean over tokens does not see those that are masked; a mean over sequences counts theirs as zeros.
    """
    level = "sequence" if loss_type == "luspo" else "token"
    samples = golden_samples()
    for i in (1, 2, 6):
        samples[i].completion.finish_reason = "length"
    found = []
    for chosen in (samples, [sample for sample in samples if not sample.truncated]):
        policy = golden_policy(loss_type=loss_type, importance_sampling_level=level, max_grad_norm=0.0)
        metrics = grpo.train_step(policy, Rollouts.of(chosen, True).parts(4, on_policy=True), 0.0)
        found.append((metrics, device.to_host(policy.grads.flat).astype(np.float64)))
    (masked, masked_gradient), (alone, gradient) = found
    num_tokens = sum(len(sample.completion.token_ids) for sample in samples)
    assert_close(np.float32(masked["loss"]), share * alone["loss"], terms=num_tokens, scale=1.0, what="loss")
    assert_close(masked_gradient, share * gradient, "float32", terms=num_tokens, what="gradient")
    assert_close(np.float32(masked["entropy"]), alone["entropy"], terms=num_tokens, what="entropy")


def test_old_logprobs_are_recomputed_only_where_needed():
    for options, on_policy, recomputed in (
        ({}, True, False),
        ({}, False, False),
        ({"top_p": 0.9}, True, False),
        ({"top_p": 0.9}, False, True),
        ({"top_k": 5}, False, True),
        ({"min_p": 0.1}, False, True),
        ({"repetition_penalty": 1.1}, False, True),
    ):
        rollouts = golden_rollouts()
        grpo.add_logprobs(golden_policy(**options), rollouts, on_policy)
        assert len(rollouts.old_logprobs) == (len(rollouts.loss_mask) if recomputed else 0), (options, on_policy)


@pytest.fixture
def combined_calls(monkeypatch):
    """A list that gets, for every forward and backward of the head at once, the array of its gradient."""
    called, forward_backward = [], LogprobHead.forward_backward

    def counted(head, model, hidden, of_batch, gradients, *others):
        called.append(gradients.lm_head)
        return forward_backward(head, model, hidden, of_batch, gradients, *others)

    monkeypatch.setattr(LogprobHead, "forward_backward", counted)
    return called


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": name} for name in ("dapo", "grpo", "bnpo", "dr_grpo", "sapo", "vespo", "gmpo", "dro")),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"beta": 0.1, "use_bias_correction_kl": True, "temperature": 0.7},
        {"delta": 1.5, "off_policy_mask_threshold": 0.5, "vllm_importance_sampling_mode": "token_truncate"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_gradient_at_the_samplers_logprobs_is_the_forwards(monkeypatch, combined_calls, options):
    """On-policy, known beforehand or not, it has the same bits; so have all metrics."""
    found = []
    for exact in (True, False):
        monkeypatch.setattr(grpo, "sampler_is_exact", lambda train, exact=exact: exact)
        policy, rollouts = golden_policy(**options), golden_rollouts()
        rollouts.loss_mask[3:5] = 0
        rollouts.advantages[slice(*np.cumsum(rollouts.completion_lengths)[:2])] = 0
        rollouts.rollout_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(4))
        metrics = grpo.train_step(policy, rollouts.parts(4, on_policy=True), 1e-3)
        if exact:
            # That of the second micro-batch is completed alone, and added then.
            first, second = combined_calls
            assert first is policy.grads.lm_head and second is not first
        assert len(combined_calls) == 2
        assert metrics["sampling/sampling_logp_difference/max"] == 0.0 and metrics["grad_norm"] > 0
        found.append((metrics, policy.model.weights.flat))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


def test_the_gradient_is_known_beforehand_only_on_policy(combined_calls):
    policy, rollouts = golden_policy(), golden_rollouts()
    rollouts.rollout_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(4))
    for on_policy in (True, False):
        grpo.train_step(policy, rollouts.parts(4, on_policy), 1e-3)
    assert len(combined_calls) == 2
    grpo.train_step(golden_policy(top_k=5), golden_rollouts().parts(4, on_policy=True), 1e-3)
    assert len(combined_calls) == 2


def test_metrics_show_a_sampler_that_is_not_exact():
    metrics = grpo.train_step(golden_policy(), golden_rollouts().parts(4, on_policy=True), 0.0)
    assert metrics["sampling/sampling_logp_difference/max"] > 1e-3


def test_cublas_is_not_exact(monkeypatch):
    assert grpo.sampling_is_exact(grpo_config())
    monkeypatch.setattr(grpo.gemm, "backend", lambda: "cublas")
    assert not grpo.sampling_is_exact(grpo_config())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(other_sampler):
    policy = golden_policy()
    before = device.to_host(policy.model.weights.flat).copy()
    rollouts = golden_rollouts()
    rollouts.advantages[2] = np.nan
    for count in (1, 2):
        metrics = grpo.train_step(policy, rollouts.parts(4, on_policy=True), 1e-2)
        assert metrics["skipped_steps"] == count and np.isnan(metrics["grad_norm"])
    assert_same_bits(policy.model.weights.flat, before)
    # Of a run, not of a step.
    parts = golden_rollouts().parts(4, on_policy=True)
    assert grpo.train_step(policy, parts, 1e-2)["skipped_steps"] == 2
    assert "skipped_steps" not in grpo.train_step(golden_policy(), parts, 1e-2)


def test_the_reference_is_saved_where_it_moves():
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25}
    train = grpo_config(**options, max_completion_length=16, num_iterations=6, per_device_train_batch_size=4)
    policy, other = (Policy(load_model(MODEL), train, load_model(MODEL)) for _ in range(2))
    initial = device.to_host(policy.reference.weights.flat).astype(np.float64)
    grpo.train_step(policy, golden_rollouts().parts(4), 1e-2)
    assert_same_bits(policy.reference.weights.flat, other.reference.weights.flat, "before it is moved")
    policy.move_reference(0.25)
    weights = device.to_host(policy.model.weights.flat).astype(np.float64)
    assert_close(policy.reference.weights.flat, 0.25 * weights + 0.75 * initial, terms=2, what="reference")
    state = policy.state_dict()
    kept = state["reference"].copy()
    policy.move_reference(1.0)
    assert_same_bits(policy.reference.weights.flat, policy.model.weights.flat)
    assert_same_bits(state["reference"], kept, "the state is a copy")
    other.load_state_dict(state)
    assert_same_bits(other.reference.weights.flat, kept)
    assert other.optimizer.steps == 1
    assert_same_bits(other.optimizer.state["m"], state["optimizer"]["m"])
    # Where it stands still it is the model that the run began with, and is not saved.
    still = Policy(load_model(MODEL), grpo_config(beta=0.1), load_model(MODEL))
    assert still.state_dict()["reference"] is None
    still.load_state_dict(still.state_dict())
    assert_same_bits(still.reference.weights.flat, load_model(MODEL).weights.flat)


def test_metrics_of_micro_batches_are_averaged():
    parts = [{"a": 1.0, "b": np.nan, "c": np.nan}, {"a": 4.0, "b": 3.0, "c": np.nan}, {"b": 5.0, "d": 7.0}]
    found = prompt_loop.mean_metrics(parts)
    assert list(found) == ["a", "b", "c", "d"] and np.isnan(found.pop("c"))
    assert found == {"a": 2.5, "b": 4.0, "d": 7.0}


def test_every_key_of_sampling_reaches_it():
    keys = {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.05, "repetition_penalty": 1.2}
    params = grpo.sampling_params(grpo_config(**keys, max_completion_length=11), 77, 5)
    assert params == SamplingParams(**keys, max_tokens=11, seed=77, n=5)


def test_generation_kwargs_reach_sampling_and_take_precedence():
    kwargs = {"min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["."], "top_p": 0.5}
    train = grpo_config(generation_kwargs=kwargs, top_p=0.9)
    params = grpo.sampling_params(train, 0, 1)
    assert (params.min_tokens, params.presence_penalty, params.frequency_penalty) == (2, 0.5, -0.5)
    assert params.stop == (".",) and params.top_p == 0.5
    # A stop string changes no probability; what the others change is not the distribution that is trained.
    assert grpo.sampling_is_exact(grpo_config(generation_kwargs={"stop": "x", "stop_token_ids": [3]}))
    for name, value in kwargs.items():
        if name != "stop":
            assert not grpo.sampling_is_exact(grpo_config(generation_kwargs={name: value})), name


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": 0.5}, "generation_kwargs has no key temperature: set train.temperature"),
        ({"presense_penalty": 0.5}, "has no key presense_penalty: did you mean presence_penalty?"),
        ({"n": 3}, "has no key n: set train.num_generations"),
        ({"min_tokens": 9}, r"sampling: min_tokens must be an integer in \[0, max_tokens\], which is 8, got 9"),
        ({"stop": 5}, "sampling: stop must be a list, got 5"),
        ({"presence_penalty": "x"}, r"sampling: presence_penalty must be in \[-2, 2\], got 'x'"),
        (
            {"stop": ["it", "a<eos>"]},
            "sampling: stop 'a<eos>' cannot occur, .* special token <eos>; stop at '<eos>' alone",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "sampling: structured_outputs.regex: .*unclosed group"),
        ({"structured_outputs": {"pattern": "a"}}, "sampling: structured_outputs has no key 'pattern'"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object: no token of the model begins"),
        ({"structured_outputs": "a"}, "sampling: structured_outputs must be StructuredOutputsParams"),
        ({"stop_token_ids": [3, 48]}, "sampling: stop_token_ids 48 is outside of the model's vocabulary of 48"),
    ],
)
def test_wrong_generation_kwargs_are_named_before_anything_is_loaded(tmp_path, monkeypatch, kwargs, message):
    monkeypatch.delattr("rlnumba.model.transformer.load_weights")

    def made():
        run = grpo_run(tmp_path / "run", generation_kwargs=kwargs)
        return replace(run, data=replace(run.data, eval=run.data.train))

    for start in (grpo.run_grpo, run_eval, lambda run: Planner(run, False, 1 << 30)):
        with pytest.raises(ConfigError, match=message):
            start(made())
    assert not (tmp_path / "run").exists()


def test_a_run_with_min_tokens_and_stop_ids(tmp_path):
    kwargs = {"min_tokens": 3, "stop_token_ids": list(range(20, 40)), "presence_penalty": 0.5}
    run = grpo_run(tmp_path / "run", generation_kwargs=kwargs, max_steps=2)
    grpo.run_grpo(run)
    for row in metrics_of(run):
        # The token after the third may be one that stops.
        assert row["completions/min_length"] == 4
        assert row["sampling/sampling_logp_difference/max"] > 0.0


# --- a generation -----------------------------------------------------------------------------------------------------


def made_group(prompt, rewards):
    """A group whose completions are [10 prompt, ...] and whose rewards are given."""
    prompt = Prompt(f"prompt {prompt}", [3, 4], {}, "")
    completions = (Completion([10 * int(prompt.prompt[7:]) + i + 5, 1], [-0.5, -0.5], "stop") for i in range(9))
    return [Sample(prompt, c, np.array([r]), r, {}) for c, r in zip(completions, rewards, strict=False)]


def pretended_generation(rewards_of, **train):
    """GRPO's generation of the prompts 0, 1, ... whose completions get rewards_of(prompt): (rollouts, generation).

    With dynamic sampling all that may be drawn were drawn.
    """
    config = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_generations": 2} | train
    run = SimpleNamespace(train=grpo_config(**config), seed=42, teacher=TeacherConfig(), is_stale=False)
    most = run.train.max_gen_batches if run.train.dynamic_sampling else 1
    indices = list(range(most * run.train.prompts_per_rollout))
    generation = Generation([made_group(prompt, rewards_of(prompt)) for prompt in indices])
    generations = SimpleNamespace(
        run=run, order=PromptOrder(100, False, 0), weights=[1.0], metrics={}, take=lambda *_: (indices, generation)
    )
    alone = {"model": None, "prefix_sharing": lambda *models: None}
    policy = SimpleNamespace(train=run.train, reference=None, teachers=None, **alone)
    rollouts, _, _ = grpo.generate(policy, generations, TrainingProgress(7, 9, 0.5), 3, True, Clock())
    return rollouts, generation


def test_a_generation_is_shuffled_by_its_place():
    rollouts, generation = pretended_generation(lambda prompt: (0.0, float(prompt)))
    order = np.random.default_rng(derived_seed(42, 7, 3)).permutation(8)
    samples = generation.samples
    assert rollouts.token_ids.reshape(8, 4)[:, 2].tolist() == [samples[i].completion.token_ids[0] for i in order]
    np.testing.assert_array_equal(rollouts.advantages[::2], np.float32([samples[i].advantage for i in order]))
    assert rollouts.num_active == 16
    # Half of r away from the mean, by the standard deviation of 0 and r.
    expected = [sign * r / 2 / (r * 0.5**0.5 + 1e-4) for r in range(4) for sign in (-1, 1)]
    assert_close(np.float32([s.advantage for s in samples]), expected, terms=4)


def test_uniform_groups_fill_a_batch_that_is_short_of_others():
    def rewards_of(prompt):
        return (1.0, 0.0) if prompt in (1, 5, 6) else (0.5, 0.5)

    options = {"dynamic_sampling": True, "max_gen_batches": 3, "mask_truncated_completions": True}
    rollouts, generation = pretended_generation(rewards_of, **options)
    assert len(generation.samples) == 24
    # Of the uniform groups the last one fills up what is missing.
    first_ids = sorted(set(rollouts.token_ids.reshape(8, 4)[:, 2].tolist()))
    assert first_ids == [10 * prompt + 5 + i for prompt in (1, 5, 6, 11) for i in range(2)]
    assert sorted(rollouts.advantages[::2].tolist())[3:5] == [0.0, 0.0]
    # Without dynamic sampling there is one generation, whatever it gives.
    rollouts, _ = pretended_generation(lambda _: (0.5, 0.5), max_gen_batches=3)
    assert rollouts.num_sequences == 8 and not rollouts.advantages.any()


def test_the_state_of_the_data_is_kept_between_steps():
    groups = [made_group(prompt, rewards) for prompt, rewards in ((0, (1.0, 0.0)), (1, (0.5, 0.5)), (2, (2.0, 1.0)))]
    state = prompt_schedule.DataState(PromptOrder(9, True, 1))
    assert state.state_dict(True) == {"prompts": [0, 0], "num_tokens": 0, "rollouts": None, "metrics": {}}
    state.order.take(3)
    rollouts = Rollouts.of([sample for group in (groups[0], groups[2]) for sample in group], False)
    state.begin(rollouts, Generation(groups), ["f"], {"further": 0.5})
    # Six sequences of four tokens; two of six completions are not trained on.
    assert state.num_tokens == 24 and state.metrics["further"] == 0.5
    assert state.metrics["dynamic_sampling/dropped"] == pytest.approx(1 / 3)
    assert state.metrics["reward"] == pytest.approx(5 / 6)
    kept = state.state_dict(True)
    assert kept["prompts"] == [0, 3] and kept["num_tokens"] == 24 and kept["metrics"] == state.metrics
    assert state.state_dict(False) == kept | {"rollouts": None, "metrics": {}}
    state.begin(rollouts, Generation(groups[:2]), ["f"], {})
    assert state.num_tokens == 40 and "dynamic_sampling/dropped" not in state.metrics

    def restored(kept, **changes):
        again = prompt_schedule.DataState(PromptOrder(9, True, 1))
        again.load_state_dict(kept, grpo_config(**{"per_device_train_batch_size": 2, "num_generations": 2} | changes))
        assert (again.order.epoch, again.order.position, again.num_tokens) == (0, 3, 24)
        return again

    again = restored(kept, steps_per_generation=2)
    assert_same_bits(again.rollouts.token_ids, rollouts.token_ids)
    assert again.metrics == kept["metrics"]
    for changes in ({"steps_per_generation": 1}, {"steps_per_generation": 2, "beta": 0.1}):
        assert restored(kept, **changes).rollouts is None and restored(kept, **changes).metrics == {}
    kept["rollouts"]["ref_logprobs"] = np.zeros(8, np.float32)
    assert restored(kept, steps_per_generation=2, beta=0.1).rollouts.ref_logprobs.shape == (8,)
    assert restored(kept, steps_per_generation=2).rollouts is not None
    assert restored(kept | {"rollouts": None}, steps_per_generation=2).rollouts is None


@pytest.mark.parametrize("order", ["start", "completion", "replaced"])
def test_sample_report_at_start_and_end(tmp_path, order):
    """Four prompts of the first step at most, of each its first completion; long texts are cut, chats shown by their
    last message. A prompt is paired with itself, in whatever order the first step has them, and if it has it."""
    train = grpo_config(per_device_train_batch_size=12, steps_per_generation=1, num_generations=2)
    chat = [{"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    prompts = [
        "short",
        "x" * 200,
        "y" * 201,
        chat,
    ]
    prompts += ["fifth", "sixth"]
    chosen = PromptOrder(8, True, 3).take(6)
    data = [Prompt("of another step", [i], {}, "") for i in range(8)]
    for i, prompt in zip(chosen, prompts, strict=True):
        data[i] = Prompt(prompt, [i], {}, "")
    trained = {"start": prompts, "completion": prompts[::-1], "replaced": ["of another step", *prompts[1:]]}[order]
    rows = [
        {"step": step, "prompt": prompt, "completion": f"{prompt[:3]} {step} {i}"}
        if isinstance(prompt, str)
        else {"step": step, "prompt": prompt, "completion": f"chat {step} {i}"}
        for step in (1, 2)
        for prompt in trained
        for i in range(2)
    ]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []

    def generate(ids, params, *_):
        asked.append((ids, params))
        completions = [Completion([5], [0.0], "stop", f"after {prompt[0]}") for prompt in ids]
        return [SimpleNamespace(completions=[completion]) for completion in completions]

    llm = SimpleNamespace(generate=generate, wake=lambda: asked.append("wake"), sleep=lambda: asked.append("sleep"))
    run = SimpleNamespace(train=train, seed=3, data=DataConfig(train="rows.jsonl"))
    text = prompt_run.sample_report(llm, PromptData(data), run, tmp_path)
    chosen = chosen[1:5] if order == "replaced" else chosen[:4]
    assert asked[0] == "wake" and asked[2] == "sleep" and asked[1][0] == [[i] for i in chosen]
    assert asked[1][1] == [grpo.sampling_params(train, derived_seed(3, 0, 0, 0), 1)] * 4
    shown = ["'short'", repr("x" * 200), repr("y" * 200 + " ..."), "'c'", "'fifth'"]
    before = ["'sho 1 0'", "'xxx 1 0'", "'yyy 1 0'", "'chat 1 0'", "'fif 1 0'"]
    if order == "replaced":
        shown, before = shown[1:], before[1:]
    lines = ["The first 4 prompts before training and after it, drawn with the same noise:"]
    for prompt, old, index in zip(shown[:4], before[:4], chosen, strict=True):
        lines += [f"  {prompt}", f"    before  {old}", f"    after   'after {index}'"]
    assert text == "\n".join(lines)


# --- geometry ---------------------------------------------------------------------------------------------------------


def test_generations_and_optimizer_steps():
    # 16 completions a generation = 4 prompts x 4, in two micro-batches that are trained on twice each.
    train = grpo_config(steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=1, max_steps=-1)
    schedule = prompt_schedule.MicroBatchSchedule(train, "rows", 18)
    assert schedule.micro_steps_per_generation == 4
    assert (schedule.micro_steps_per_epoch, schedule.steps_per_epoch) == (16, 16)
    assert schedule.total_steps == 48 and not schedule.on_policy
    assert [schedule.within_generation(step) for step in range(5)] == [False, True, True, True, False]
    assert [[micro.index for micro in schedule.micro_steps(step)] for step in (0, 15, 16)] == [[0], [15], [0]]
    micro_steps = [micro for step in range(5) for micro in schedule.micro_steps(step)]
    assert [micro.first for micro in micro_steps] == [0, 8, 0, 8, 0]
    assert [micro.begins_generation for micro in micro_steps] == [True, False, False, False, True]
    assert [micro.on_policy for micro in micro_steps] == [True, False, False, False, True]


def test_a_generation_is_on_policy_until_the_next_update():
    train = grpo_config(steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2)
    schedule = prompt_schedule.MicroBatchSchedule(train, "rows", 16)
    on_policy = [[micro.on_policy for micro in schedule.micro_steps(step)] for step in range(5)]
    assert on_policy == [[True, True], [False, False], [False, False], [False, False], [True, True]]
    train = grpo_config(steps_per_generation=2, gradient_accumulation_steps=3, num_iterations=1)
    schedule = prompt_schedule.MicroBatchSchedule(train, "rows", 16)
    on_policy = [[micro.on_policy for micro in schedule.micro_steps(step)] for step in range(3)]
    assert on_policy == [[True, True, True], [False, True, True], [True, True]]


def test_an_epoch_ends_with_a_shorter_step():
    train = grpo_config(steps_per_generation=1, gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=1)
    schedule = prompt_schedule.MicroBatchSchedule(train, "rows", 8)
    indices = [[micro.index for micro in schedule.micro_steps(step)] for step in range(schedule.total_steps)]
    assert indices == [[0, 1, 2], [3]]
    assert [schedule.epochs_done(step) for step in range(4)] == [0, 0.75, 1, 1.75]
    assert schedule.on_policy


def test_too_few_prompts_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match="3 prompts are fewer than the 4 of one generation"):
        grpo.run_grpo(grpo_run(tmp_path / "run", num_prompts=3))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_learns_a_small_task(tmp_path):
    run = grpo_run(
        tmp_path / "run", max_steps=40, per_device_train_batch_size=32, num_generations=8, learning_rate=4e-3
    )
    reward = [row["reward"] for row in metrics_until(0.9, grpo.run_grpo, run)]
    assert reward[0] < 0.3
    assert np.mean(reward[-5:]) > 0.9


def test_metrics_and_completions(tmp_path):
    run = grpo_run(tmp_path / "run", "digits length", rewards={"weights": [1.0, 0.0]}, max_steps=3, beta=0.1)
    grpo.run_grpo(run)
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    wanted = """loss grad_norm learning_rate epoch step_time num_tokens reward reward_std rewards/digits/mean
        rewards/digits/std rewards/length/mean rewards/length/std frac_reward_zero_std kl entropy
        completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length
        completions/min_terminated_length completions/max_terminated_length completions/clipped_ratio
        clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max clip_ratio/region_mean
        sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
        sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean
        sampling/importance_sampling_ratio/max time/generate time/reward time/logprob time/train perf/throughput
        perf/generation_tokens_per_s perf/peak_memory memory/weights memory/grads memory/activations""".split()
    for row in rows:
        assert set(wanted) <= row.keys(), set(wanted) - row.keys()
        # 16 of 16 prompts make an epoch of four generations.
        assert row["epoch"] == row["step"] / 4
        # Tokens of the step's sequences, and drawn ones, each by its own time.
        drawn = 16 * row["completions/mean_length"]
        assert row["perf/generation_tokens_per_s"] == pytest.approx(drawn / row["time/generate"])
        of_prompts = row["perf/throughput"] * row["step_time"] - drawn
        assert of_prompts == pytest.approx(round(of_prompts)) and 16 * 20 < of_prompts < 16 * 30
        peaks = {name: value for name, value in row.items() if name.startswith("memory/") and name != "memory/host"}
        assert max(peaks.values()) < row["perf/peak_memory"] <= sum(peaks.values())
        assert row["sampling/sampling_logp_difference/max"] == 0.0
        assert row["sampling/importance_sampling_ratio/min"] == 1.0
        assert row["reward"] == pytest.approx(row["rewards/digits/mean"])
        assert row["completions/mean_length"] == pytest.approx(row["rewards/length/mean"])
    assert rows[0]["kl"] == 0.0 and rows[2]["kl"] > 0.0
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 16
    first = [line for line in lines if line["step"] == 1]
    assert {"prompt", "completion", "finish_reason", "digits", "length", "reward", "advantage"} <= first[0].keys()
    assert [line["prompt"] for line in first[:4]] == [first[0]["prompt"]] * 4
    assert len({line["prompt"] for line in first}) == 4
    group = np.array([line["reward"] for line in first[:4]])
    expected = (group - group.mean()) / (group.std(ddof=1) + 1e-4)
    np.testing.assert_allclose([line["advantage"] for line in first[:4]], expected, rtol=1e-4, atol=1e-6)
    assert np.mean([line["reward"] for line in first]) == pytest.approx(rows[0]["reward"])
    # A token a character of the prompts, each counted with its four completions.
    num_tokens = sum(len(line["prompt"]) for line in first) + 16 * rows[0]["completions/mean_length"]
    assert rows[0]["num_tokens"] == num_tokens < rows[1]["num_tokens"]


def test_cached_prefixes_are_those_of_the_current_weights(tmp_path, monkeypatch):
    # The same four prompts at every step, long enough for a block of a cache that does not sleep in between.
    monkeypatch.setattr(prompt_loop.LLM, "sleep", lambda self: None)
    run = grpo_run(tmp_path / "run", num_prompts=4, max_steps=3, learning_rate=1e-2)
    grpo.run_grpo(run)
    assert [row["sampling/sampling_logp_difference/max"] for row in metrics_of(run)] == [0.0] * 3


def test_each_step_draws_other_completions(tmp_path):
    run = grpo_run(tmp_path / "run", num_prompts=4, max_steps=2, learning_rate=0.0, shuffle_dataset=False)
    grpo.run_grpo(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines[:16]] == [line["prompt"] for line in lines[16:]]
    assert [line["completion"] for line in lines[:16]] != [line["completion"] for line in lines[16:]]


@pytest.mark.parametrize("rate", [0.0, 1e-2])
def test_ends_with_the_sample_report(tmp_path, capsys, rate):
    grpo.run_grpo(grpo_run(tmp_path / "run", learning_rate=rate))
    shown = capsys.readouterr().err.split("drawn with the same noise:\n")[1].splitlines()
    texts = [line.split(maxsplit=1)[1] for line in shown[:12] if line.startswith("    ")]
    assert len(texts) == 8
    # The same noise makes the same text of the same weights.
    assert (texts[::2] == texts[1::2]) == (rate == 0.0)
    assert shown[0].startswith("  'what is the number ")


def test_several_steps_on_one_generation(tmp_path):
    run = grpo_run(
        tmp_path / "run", steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=1, max_steps=6
    )
    grpo.run_grpo(run)
    rows = metrics_of(run)
    assert [("perf/generation_tokens_per_s" in row) for row in rows] == [True, False, False, False, True, False]
    assert len({row["reward"] for row in rows[:4]}) == 1 != len({row["reward"] for row in rows[3:5]})
    assert [row["num_tokens"] for row in rows[:4]] == [rows[0]["num_tokens"]] * 4
    # Weights that differ from those that drew the completions make ratios that differ from 1.
    assert rows[0]["clip_ratio/region_mean"] == 0.0
    assert len((tmp_path / "run" / "completions.jsonl").read_text().splitlines()) == 2 * 16


def test_exact_old_logprobs_equal_recomputed_ones(tmp_path, monkeypatch):
    hashes = []
    for exact in (True, False):
        monkeypatch.setattr(grpo, "sampler_is_exact", lambda train, exact=exact: exact)
        run = grpo_run(tmp_path / str(exact), num_iterations=2, gradient_accumulation_steps=1, temperature=0.7)
        grpo.run_grpo(run)
        hashes.append((tmp_path / str(exact) / "final" / "model.safetensors").read_bytes())
    assert hashes[0] == hashes[1]


def test_filters_are_corrected_for(tmp_path):
    run = grpo_run(tmp_path / "run", top_k=4, vllm_importance_sampling_mode="token_truncate")
    grpo.run_grpo(run)
    # Sampled from four tokens of 48, so each was likelier to the sampler than to the policy.
    for row in metrics_of(run):
        assert row["sampling/importance_sampling_ratio/max"] < 1.0
        assert row["sampling/sampling_logp_difference/mean"] > 0.0


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.3, "temperature": 0.7}, {"generation_kwargs": {"top_p": 0.5}}]
)
def test_replayed_filters_are_exact(tmp_path, filters):
    """The sampled distribution is trained: no difference of a bit, and the gradient is known before the forward."""
    run = grpo_run(tmp_path / "run", sampling_mask_replay=True, **filters)
    assert grpo.sampling_is_exact(run.train)
    grpo.run_grpo(run)
    rows = metrics_of(run)
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] == 0.0
        assert row["sampling/importance_sampling_ratio/min"] == row["sampling/importance_sampling_ratio/max"] == 1.0
    assert rows[0]["grad_norm"] > 0
    plain = grpo_run(tmp_path / "plain", **filters)
    grpo.run_grpo(plain)
    # Sampled alike, but this entropy is that of the tokens which are kept.
    assert rows[0]["reward"] == metrics_of(plain)[0]["reward"] and rows[0]["entropy"] < metrics_of(plain)[0]["entropy"]


GRAMMAR = {"structured_outputs": {"regex": "[0-9]{1,4}[ab+]?"}}


@pytest.mark.parametrize(
    "options",
    [
        {"vllm_structured_outputs_regex": "[0-9]{1,4}[ab+]?"},
        {"generation_kwargs": GRAMMAR, "num_iterations": 2, "beta": 0.1, "steps_per_generation": 4},
        {"generation_kwargs": GRAMMAR | {"top_p": 0.8}, "sampling_mask_replay": True, "temperature": 0.8},
        {"generation_kwargs": GRAMMAR, "max_tokens_per_micro_batch": 60, "entropy_coef": 0.01, "cuda_graphs": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_completions_of_a_grammar_are_trained_on_exactly(tmp_path, options):
    """Training follows the grammar: no difference of a bit where the weights are those that drew."""
    pytest.importorskip("llguidance")
    run = grpo_run(tmp_path / "run", **options)
    assert grpo.sampling_is_exact(run.train)
    grpo.run_grpo(run)
    rows = metrics_of(run)
    for row in rows if run.train.num_iterations == 1 else rows[:1]:
        assert row["sampling/sampling_logp_difference/max"] == 0.0
    assert rows[0]["grad_norm"] > 0
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    texts = [json.loads(line)["completion"] for line in lines]
    assert texts and all(re.fullmatch("[0-9]{1,4}[ab+]?", text) for text in texts)


def test_a_grammar_is_not_of_several_turns(tmp_path):
    with pytest.raises(ConfigError, match="generation_kwargs.structured_outputs is the grammar of a whole completion"):
        replace(grpo_run(tmp_path / "run", generation_kwargs=GRAMMAR), tools=ToolsConfig(funcs=["a.py:f"]))
    with pytest.raises(ConfigError, match="vllm_structured_outputs_regex and .* cannot both be set"):
        grpo_run(tmp_path / "run", generation_kwargs=GRAMMAR, vllm_structured_outputs_regex="a")
    with pytest.raises(ConfigError, match="has no key structured_outputs: it is a key of grpo and rloo"):
        PPOConfig(generation_kwargs=GRAMMAR)


def test_replay_of_filters_needs_generations_of_one_step_and_no_penalties():
    for options in ({"num_iterations": 2}, {"steps_per_generation": 4}):
        with pytest.raises(ConfigError, match="train.sampling_mask_replay needs generations that one optimizer step"):
            grpo_config(sampling_mask_replay=True, **options)
    train = grpo_config(sampling_mask_replay=True, repetition_penalty=1.1)
    with pytest.raises(ConfigError, match="sampling_mask_replay replays top_p, top_k and min_p, but no penalties"):
        grpo.sampling_params(train, 0, 1)


def test_dynamic_sampling(tmp_path):
    run = grpo_run(tmp_path / "run", "one_for_even", dynamic_sampling=True, max_steps=2)
    grpo.run_grpo(run)
    rows = metrics_of(run)
    assert all(row["dynamic_sampling/dropped"] > 0.2 for row in rows)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["step"] == 1]
    trained = {line["prompt"] for line in first if line["advantage"] != 0}
    assert len(trained) == 4 and len(first) > 16
    assert np.mean([line["reward"] for line in first]) == pytest.approx(rows[0]["reward"])


def test_dynamic_sampling_ends_with_what_there_is(tmp_path):
    run = grpo_run(tmp_path / "run", "wrong", dynamic_sampling=True, max_gen_batches=3, max_steps=1)
    (tmp_path / "rewards_for_tests.py").write_text("def wrong(completions, **k): return [0.5] * len(completions)\n")
    grpo.run_grpo(run)
    (row,) = metrics_of(run)
    assert row["dynamic_sampling/dropped"] == pytest.approx(2 / 3)
    assert row["grad_norm"] == 0.0 and row["frac_reward_zero_std"] == 1.0


def test_aggregation_reaches_the_advantages(tmp_path):
    run = grpo_run(tmp_path / "run", "digits length", max_steps=1, multi_objective_aggregation="normalize_then_sum")
    grpo.run_grpo(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    advantages = np.array([line["advantage"] for line in lines])
    # Scaled over the batch, not within each group.
    assert advantages.mean() == pytest.approx(0, abs=1e-6) and advantages.std(ddof=1) == pytest.approx(1, rel=1e-3)
    assert np.abs(advantages.reshape(4, 4).std(axis=1, ddof=1) - 1).max() > 0.01


def test_prompts_that_are_dropped_are_logged(tmp_path):
    run = grpo_run(tmp_path / "run", max_steps=1, data={"max_prompt_length": 22})
    grpo.run_grpo(run)
    assert metrics_of(run)[0]["dropped_prompts"] == 6


def test_reference_moves_when_asked(tmp_path):
    kls = []
    for sync in (False, True):
        run = grpo_run(
            tmp_path / str(sync),
            beta=0.01,
            sync_ref_model=sync,
            ref_model_sync_steps=2,
            ref_model_mixup_alpha=1.0,
            max_steps=3,
        )
        grpo.run_grpo(run)
        kls.append([row["kl"] for row in metrics_of(run)])
    assert kls[0][:2] == kls[1][:2]
    assert kls[0][2] > 0.0 == kls[1][2]


def test_evaluation_on_eval_data(tmp_path):
    rows = tmp_path / "eval.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"what is {i}? ", "answer": "1"}) + "\n" for i in range(5)))
    run = grpo_run(tmp_path / "run", data={"eval": str(rows)}, eval_steps=2, learning_rate=0.0, max_steps=5)
    grpo.run_grpo(run)
    found = [row for row in metrics_of(run) if "eval_reward" in row]
    assert [row["step"] for row in found] == [2, 4, 5]
    # One completion of each, and with the same weights the same ones every time.
    assert (
        len({row["eval_reward"] for row in found}) == len({row["eval_completions/mean_length"] for row in found}) == 1
    )
    assert found[0]["eval_completions/mean_length"] * 5 == round(found[0]["eval_completions/mean_length"] * 5)
    assert {"eval_rewards/digits/mean", "eval_completions/clipped_ratio", "time/eval"} <= found[0].keys()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("fails_at_step_2", "reward fails_at_step_2 raised ZeroDivisionError: nothing left to divide"),
        ("hangs_at_step_2", "reward hangs_at_step_2 did not return within 0.5 s"),
    ],
)
def test_a_reward_that_fails_leaves_a_checkpoint(tmp_path, reward, message):
    run = grpo_run(tmp_path / "run", reward, rewards={"timeout": 0.5}, max_steps=4)
    with pytest.raises(RewardError, match=message):
        grpo.run_grpo(run)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    assert len(metrics_of(run)) == 2
    # Repaired, the run ends where it would have ended.
    file = tmp_path / "rewards_for_tests.py"
    file.write_text(file.read_text().replace("== 2", "== -2"))
    repaired = tmp_path / "repaired.py"
    repaired.write_text(file.read_text())
    run = type(run)(**vars(run) | {"rewards": type(run.rewards)(funcs=[f"{repaired}:{reward}"])})
    grpo.run_grpo(run, resume=True)
    whole = type(run)(**vars(run) | {"output_dir": str(tmp_path / "whole")})
    grpo.run_grpo(whole)
    files = [tmp_path / name / "final" / "model.safetensors" for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_skipped_rewards_are_counted(tmp_path):
    run = grpo_run(tmp_path / "run", "digits wrong_count", rewards={"reward_errors": "skip"}, max_steps=1)
    grpo.run_grpo(run)
    (row,) = metrics_of(run)
    assert row["reward_errors/wrong_count"] == 16
    assert row["rewards/wrong_count/mean"] is None and row["reward"] == row["rewards/digits/mean"]


def test_a_reward_that_fails_on_eval_rows_leaves_a_checkpoint(tmp_path):
    rows = tmp_path / "eval.jsonl"
    rows.write_text(json.dumps({"prompt": "what is 1? ", "answer": "no number"}) + "\n")
    run = grpo_run(tmp_path / "run", "one_for_even", data={"eval": str(rows)}, eval_steps=2)
    with pytest.raises(RewardError, match="reward one_for_even raised ValueError"):
        grpo.run_grpo(run)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    assert len(metrics_of(run)) == 2


def test_wrong_count_ends_the_run(tmp_path):
    with pytest.raises(UserError, match="reward wrong_count must return 4 values, one a completion, got 1"):
        grpo.run_grpo(grpo_run(tmp_path / "run", "wrong_count"))
    assert (tmp_path / "run" / "checkpoints" / "step-0").is_dir()


@pytest.mark.parametrize("options", [None, AsyncConfig(max_staleness=0)], ids=["synchronous", "asynchronous"])
def test_a_prompt_without_log_probs_is_named_by_its_line(tmp_path, options):
    """A group has a number of its own, which is none of a row."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in MODEL.iterdir():
        (broken / path.name).symlink_to(path)
    tensors = load_file(MODEL / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    (broken / "model.safetensors").unlink()
    save_file(tensors, broken / "model.safetensors")
    run = replace(grpo_run(tmp_path / "run", num_prompts=4), model=str(broken), asynchronous=options)
    with pytest.raises(UserError, match=r"^.*prompts\.jsonl:[1-4]: the model's log-probs are not finite"):
        grpo.run_grpo(run)


def test_the_same_seed_gives_the_same_run(tmp_path):
    runs = [grpo_run(tmp_path / str(i), seed=seed, max_steps=2) for i, seed in enumerate((1, 1, 2))]
    for run in runs:
        grpo.run_grpo(run)
    texts = [(tmp_path / str(i) / "completions.jsonl").read_text() for i in range(3)]
    assert texts[0] == texts[1] != texts[2]
