"""PPO against runs of TRL's own trainer, its invariants, and runs of a few seconds."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

import rlnumba
from rlnumba import cli
from rlnumba.config import AsyncConfig, CriticConfig, DataConfig, LoraConfig, PPOConfig, PPORun, RewardsConfig, load_run
from rlnumba.data import Prompt
from rlnumba.engine.sequence import Completion
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.rl.gae import gae_ref
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.model.sequence_score import score_sequences
from rlnumba.model.transformer import load_model, save_model
from rlnumba.runs import prompt_loop
from rlnumba.runs.policy import Policy
from rlnumba.runs.run_folder import RunFolder
from rlnumba.runtime import device
from rlnumba.sampling.generations import Generations
from rlnumba.sampling.samples import Generation, Sample
from rlnumba.trainers import grpo, ppo
from rlnumba.trainers.rollout import Rollouts
from tests.close import assert_close, assert_same_bits
from tests.trainers.runs import GOLDEN, MODEL, SMALL_PPO, golden, metrics_of, metrics_until, ppo_run
from tests.trainers.test_grpo import golden_samples
from tests.trainers.test_resume import check_killed_run, hash_of, rows_without_times

CURVES = golden("ppo_curves.json")


def critic_folder(path, head=None):
    """A folder of MODEL with a score head of these weights, random ones by default."""
    model = load_model(MODEL, heads=SCORE_HEAD)
    head = np.random.default_rng(0).normal(0, 0.1, model.score.shape) if head is None else np.array([head])
    model.score[...] = device.asarray(head.astype(np.float32))
    save_model(model, path)
    return str(path)


def recorded(case):
    """A Generations.take that gives the recorded prompts and completions, step by step, with log-probs of 0."""
    steps = zip(case["prompt_ids"], case["completion_ids"], strict=True)

    def take(generations, trainer_state, clock):
        clock.seconds["time/generate"] += 1.0
        groups = []
        for prompt, ids in zip(*next(steps), strict=True):
            completion = Completion(ids, [0.0] * len(ids), "stop" if 1 in ids else "length", "")
            score = 2.0 * sum(3 <= i < 13 for i in ids) / len(ids)
            groups.append([Sample(Prompt("", prompt, {}, ""), completion, np.array([score]), score, {})])
        return generations.order.take(len(groups)), Generation(groups)

    return take


@pytest.mark.parametrize("case", CURVES["cases"])
def test_golden_run_of_trl(tmp_path, monkeypatch, case):
    recording = CURVES["cases"][case]
    # The completions are another sampler's: old log-probs come from a forward, as in TRL.
    monkeypatch.setattr(ppo, "sampler_is_exact", lambda train: False)
    monkeypatch.setattr(Generations, "take", recorded(recording))
    monkeypatch.setattr(prompt_loop, "sample_report", lambda *arguments: "")
    permutations = iter(recording["permutations"])
    monkeypatch.setattr(ppo, "epoch_order", lambda *arguments: np.array(next(permutations)))
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a"}\n' * 8)
    steps = len(recording["curve"])
    run = PPORun(
        model=str(MODEL),
        output_dir=str(tmp_path / "run"),
        data=DataConfig(train=str(rows)),
        rewards=RewardsConfig(funcs=["think_format_reward"]),
        # TRL's PPO does not clip the gradient.
        train=PPOConfig(**recording["options"], max_steps=steps, max_completion_length=8, max_grad_norm=0.0),
        critic=CriticConfig(model=critic_folder(tmp_path / "critic", recording["head"])),
    )
    ended = []
    folder_save = ppo.ActorCritic.state_dict
    monkeypatch.setattr(ppo.ActorCritic, "state_dict", lambda self: ended.append(self) or folder_save(self))
    ppo.run_ppo(run)
    for step, (got, want) in enumerate(zip(metrics_of(run), recording["curve"], strict=True)):
        got["lr"] = got["learning_rate"]
        for name, value in want.items():
            # Means of terms of size 1 that may cancel; ratios of which some are at their bound.
            absolute = 1e-5 if name.startswith(("loss", "objective", "policy", "val")) else 1e-9
            assert got[name] == pytest.approx(value, rel=1e-4, abs=absolute), (step, name)
    if case == "default":
        assert steps == 50
        wanted = np.load(GOLDEN / "ppo_weights.npz")
        first = dict(load_model(MODEL).weights.tensors())
        last = {"policy": ended[-1].model, "critic": ended[-1].critic.model}
        last = {owner: dict(model.weights.tensors()) for owner, model in last.items()}
        for name in wanted.files:
            owner, _, tensor = name.partition(".")
            after = device.to_host(last[owner][tensor]).astype(np.float64)
            before = np.array(recording["head"]) if tensor == "score.weight" else device.to_host(first[tensor])
            moved = np.linalg.norm(wanted[name] - before)
            assert moved > 0 and np.linalg.norm(after - wanted[name]) < 2e-3 * moved, name


# --- the parts of a step ----------------------------------------------------------------------------------------------


def small_actor(tmp_path, shared=False, reference=False, head=None, **options):
    """An ActorCritic of MODEL whose score head is not zeros."""
    train = PPOConfig(**SMALL_PPO | {"max_grad_norm": 0.0, "max_completion_length": 16} | options)
    folder = critic_folder(tmp_path / "head", head)
    score = load_model(folder, heads=SCORE_HEAD).score
    model = load_model(MODEL, heads=LM_HEAD + SCORE_HEAD if shared else LM_HEAD)
    if shared:
        model.score[...] = score
    policy = Policy(model, train, load_model(MODEL) if reference else None, train.temperature)
    critic = None
    if not shared:
        critic = Policy(load_model(folder, heads=SCORE_HEAD), train)
        critic.arena = policy.arena
    return ppo.ActorCritic(policy, critic, SimpleNamespace(train=train, critic=CriticConfig()))


def begin(actor, seed=3):
    """Fill the buffer from the golden completions and random scores."""
    rollouts = Rollouts.of(golden_samples(), False)
    actor.experience = ppo.Experience(rollouts, seed, 1e-3, ppo.RunningMoments())
    ppo.evaluate_tokens(actor, rollouts)
    scores = np.random.default_rng(1).standard_normal(len(rollouts.completion_lengths))
    ppo.estimate_advantages(actor.buffer, rollouts, scores, actor.train)
    return rollouts, scores


def gradients(actor, part):
    """The gradients of a micro-batch by checkpoint name, of policy and critic: two dicts of float64 arrays."""
    tokens = int(actor.experience.rollouts.completion_lengths[part].sum())
    partials = device.xp().empty((ppo.ppo_loss_blocks(tokens), ppo.SUMS), np.float32)
    actor.zero_grad()
    ppo.forward_backward(actor, part, 1.0 / tokens, partials)
    return [
        {name: device.to_host(array).astype(np.float64) for name, array in each.grads.tensors()}
        for each in (actor.policy, actor.critic)
        if each is not None
    ]


def test_a_shared_trunk_gets_the_gradients_of_both_heads(tmp_path):
    """The sum of those that two models with its weights get."""
    part, found = np.array([5, 0, 3]), {}
    for shared in (True, False):
        actor = small_actor(tmp_path, shared, entropy_coef=0.1, vf_coef=0.5)
        begin(actor)
        # As after some steps: ratios and values that are not the old ones.
        actor.buffer.old_logprobs[...] += 0.1
        actor.buffer.values[...] += 0.05
        found[shared] = gradients(actor, part)
    (both,), (policy, critic) = found[True], found[False]
    assert both.keys() == policy.keys() | critic.keys()
    for name, gradient in both.items():
        expected = policy.get(name, 0.0) + critic.get(name, 0.0)
        scale = max(np.abs(each.get(name, np.zeros(1))).max() for each in (policy, critic))
        assert scale > 0 and np.abs(gradient - expected).max() < 1e-5 * scale, name


def test_the_entropy_bonus_is_the_gradient_of_the_mean_entropy(tmp_path):
    """By finite differences along the gradient's own direction."""
    part = np.arange(8)
    bonus = []
    for coef in (0.0, 0.5):
        actor = small_actor(tmp_path, shared=True, entropy_coef=coef)
        begin(actor)
        gradients(actor, part)
        bonus.append(device.to_host(actor.policy.grads.flat).astype(np.float64))
    direction = bonus[1] - bonus[0]
    direction /= np.linalg.norm(direction)
    weights = actor.policy.model.weights.flat
    before, entropies = device.to_host(weights).copy(), []
    batch, rows = ppo.micro_batch(actor.experience.rollouts, part)
    for sign in (1, -1):
        weights[...] = device.asarray((before + sign * 1e-2 * direction).astype(np.float32))
        logprobs, entropy = (device.xp().empty(len(rows), np.float32) for _ in range(2))
        actor.policy.logprobs(batch, logprobs, entropy)
        entropies.append(float(device.to_host(entropy).mean(dtype=np.float64)))
    slope = -0.5 * (entropies[0] - entropies[1]) / 2e-2
    assert slope == pytest.approx(np.dot(bonus[1] - bonus[0], direction), rel=1e-2)


def test_micro_batches_are_the_chosen_completions(tmp_path):
    rollouts = Rollouts.of(golden_samples(), False)
    whole = rollouts.to_device().targets
    batch, rows = ppo.micro_batch(rollouts, np.arange(8))
    for name in ("input_ids", "position_ids", "cu_seqlens", "rows", "target_ids"):
        assert_same_bits(getattr(batch, name), getattr(whole, name), name)
    assert rows.tolist() == list(range(len(rollouts.loss_mask))) and batch.max_seqlen == whole.max_seqlen
    chosen = [6, 1]
    batch, rows = ppo.micro_batch(rollouts, np.array(chosen))
    samples = [golden_samples()[i] for i in chosen]
    ids = [token for s in samples for token in s.prompt.prompt_token_ids + s.completion.token_ids]
    assert device.to_host(batch.input_ids).tolist() == ids
    assert device.to_host(batch.target_ids).tolist() == [t for s in samples for t in s.completion.token_ids]
    ends = np.cumsum(rollouts.completion_lengths)
    expected = [n for i in chosen for n in range(ends[i] - rollouts.completion_lengths[i], ends[i])]
    assert rows.tolist() == expected and rows.dtype == np.int32


def test_advantages_of_a_batch(tmp_path):
    """Against the formulas in float64; the values are those of the positions that predict the tokens."""
    actor = small_actor(tmp_path, reference=True, kl_coef=0.3, gamma=0.97, lam=0.9)
    actor.policy.reference.weights.flat[...] *= np.float32(0.98)
    rollouts, scores = begin(actor)
    buffer, cu_seqlens = actor.buffer, np.cumsum([0, *rollouts.completion_lengths])
    values, kl = (device.to_host(array).astype(np.float64) for array in (buffer.values, buffer.kl))
    assert_same_bits(buffer.old_logprobs, rollouts.rollout_logprobs, "the sampler's log-probs")
    reference = grpo.host_logprobs(actor.policy, actor.policy.reference, rollouts.parts(8))
    assert_close(kl.astype(np.float32), rollouts.rollout_logprobs.astype(np.float64) - reference, terms=4)
    rewards = -0.3 * kl
    rewards[cu_seqlens[1:] - 1] += scores
    advantages, returns = gae_ref(rewards, values, cu_seqlens, 0.97, 0.9)
    assert_close(buffer.returns, returns, terms=64, what="returns")
    whitened = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    assert_close(buffer.advantages, whitened, terms=256, what="advantages")
    batch, rows = ppo.micro_batch(rollouts, np.arange(8))
    again = device.xp().empty(len(rows), np.float32)
    actor.values(batch, again)
    assert_same_bits(again, buffer.values, "values do not depend on the micro-batch")
    metrics = ppo.objective_metrics(buffer, scores, actor.train)
    assert metrics["objective/kl"] == pytest.approx(kl.sum() / 8)
    assert metrics["objective/rlhf_reward"] == pytest.approx(scores.mean() - 0.3 * kl.sum() / 8)
    assert metrics["objective/entropy"] == pytest.approx(-rollouts.rollout_logprobs.sum() / 8, rel=1e-5)


def test_scores_are_scaled_clipped_and_penalised():
    truncated = np.array([False, True, False, True])
    rewards = [[4.0, 1.0, 2.0, 5.0], [0.0, 8.0, 1.0, 1.0]]
    moments = ppo.RunningMoments()
    train = PPOConfig(missing_eos_penalty=0.25)
    np.testing.assert_allclose(ppo.completion_scores(rewards[0], truncated, moments, train), [4.0, 0.75, 2.0, 4.75])
    assert moments.count == 0
    train = PPOConfig(use_score_scaling=True, use_score_norm=True, score_clip=1.5, missing_eos_penalty=0.25)
    seen = []
    for step in rewards:
        seen += step
        expected = np.clip((np.array(step) - np.mean(seen)) / np.std(seen, ddof=1), -1.5, 1.5) - 0.25 * truncated
        np.testing.assert_allclose(ppo.completion_scores(step, truncated, moments, train), expected)
    without_mean = PPOConfig(use_score_scaling=True)
    scaled = ppo.completion_scores([1.0, 3.0], truncated[:1], ppo.RunningMoments(), without_mean)
    np.testing.assert_allclose(scaled, np.array([1.0, 3.0]) / np.sqrt(2))
    # Equal scores have no standard deviation to divide by.
    assert ppo.completion_scores([2.0, 2.0], truncated[:1], ppo.RunningMoments(), without_mean).tolist() == [2.0, 2.0]


def test_completions_without_a_reward_are_left_out(tmp_path, monkeypatch):
    run = ppo_run(tmp_path / "run", "some", max_steps=2)
    some = "def some(completion_ids, **k): return [1.0 if ids[0] % 3 else None for ids in completion_ids]\n"
    (tmp_path / "rewards_for_tests.py").write_text(some)
    ppo.run_ppo(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 32
    assert all((line["advantage"] == 0.0) == (line["reward"] is None) for line in lines)
    run = ppo_run(tmp_path / "other" / "run", "none", max_steps=2)
    none = "def none(completions, **k): return [None] * len(completions)\n"
    (tmp_path / "other" / "rewards_for_tests.py").write_text(none)
    with pytest.raises(UserError, match="no completion of step 1 has a reward: every reward function gave None"):
        ppo.run_ppo(run)


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1, "in_flight_weight_updates": False}], ids=["", "async"])
def test_a_batch_without_rewards_is_left_out_where_errors_are_skipped(tmp_path, options):
    """The weights stay, the run goes on, and a run that resumes behind it ends alike."""
    run = ppo_run(tmp_path / "run", "fails_at_step_2", max_steps=5, save_steps=1, use_score_scaling=True)
    run = dataclasses.replace(run, rewards=dataclasses.replace(run.rewards, reward_errors="skip"))
    run = dataclasses.replace(run, asynchronous=AsyncConfig(**options) if options else None)
    ppo.run_ppo(run)
    rows, expected = rows_without_times(run), hash_of(run)
    weights = [
        (tmp_path / "run" / "checkpoints" / f"step-{step}" / "model.safetensors").read_bytes() for step in range(1, 6)
    ]
    assert [before == after for before, after in itertools.pairwise(weights)] == [False, True, False, False]
    failed = "reward_errors/fails_at_step_2"
    assert [(failed in row, "loss" in row, np.isnan(row["reward"] or np.nan)) for row in rows] == [
        (number == 2, number != 2, number == 2) for number in range(5)
    ]
    for step in (2, 3):
        ppo.run_ppo(run, resume=step)
        # Of an asynchronous run some rows are of how long it waited.
        assert hash_of(run) == expected and (options or rows_without_times(run) == rows), step


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared trunk"])
def test_learns_a_small_task(tmp_path, shared):
    settings = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "kl_coef": 0.01, "max_steps": 25}
    run = ppo_run(tmp_path / "run", num_prompts=64, critic={"shared": shared}, **settings)
    rows = metrics_until(0.85, ppo.run_ppo, run)
    reward = [row["reward"] for row in rows]
    assert reward[0] < 0.3
    assert np.mean(reward[-5:]) > 0.85
    # The critic learns, too: it explains what the returns are.
    assert rows[-1]["loss/value_avg"] < 0.3 * rows[0]["loss/value_avg"]
    assert ("critic/grad_norm" in rows[0]) == (not shared)
    # The exported model is a causal language model alone.
    assert load_model(tmp_path / "run" / "final").config.heads == LM_HEAD
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and "heads" not in config


def test_metrics(tmp_path):
    """One optimizer step a batch is on-policy: its ratio is exactly 1, because the sampler's log-probs are the old."""
    one_step = {"num_ppo_epochs": 1, "num_mini_batches": 1}
    one_step |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    run = ppo_run(
        tmp_path / "run", **one_step, max_steps=2, eval_steps=1, data={"eval": str(tmp_path / "prompts.jsonl")}
    )
    ppo.run_ppo(run)
    wanted = """objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
        policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg
        val/ratio val/ratio_var val/num_eos_tokens grad_norm learning_rate num_tokens epoch step_time loss reward
        critic/grad_norm critic/learning_rate completions/mean_length time/generate time/logprob time/train
        eval_reward memory/rollout_buffer""".split()
    for row in metrics_of(run):
        assert set(wanted) <= row.keys(), set(wanted) - row.keys()
        assert row["policy/approxkl_avg"] == 0.0 == row["policy/clipfrac_avg"] and row["val/ratio"] == 1.0
        # 32 prompts make two batches.
        assert row["epoch"] == row["step"] / 2
        # Advantages of mean 0.
        assert row["loss/policy_avg"] == pytest.approx(0.0, abs=1e-5)
        # Seven float32 arrays for 16 completions of 8 tokens.
        assert row["memory/rollout_buffer"] >= 7 * 16 * 8 * 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    ended = sum(line["finish_reason"] == "stop" for line in lines[:16])
    assert metrics_of(run)[0]["val/num_eos_tokens"] == ended
    assert metrics_of(run)[0]["objective/scores"] == pytest.approx(np.mean([line["reward"] for line in lines[:16]]))


def test_without_a_kl_there_is_no_reference(tmp_path):
    run = ppo_run(tmp_path / "run", kl_coef=0.0, max_steps=1)
    ppo.run_ppo(run)
    (row,) = metrics_of(run)
    assert "objective/kl" not in row and row["objective/rlhf_reward"] == row["objective/scores"]


def test_the_critics_learning_rate(tmp_path):
    run = ppo_run(tmp_path / "run", critic={"learning_rate": 1e-4}, learning_rate=0.0, max_steps=2)
    ppo.run_ppo(run)
    for row in metrics_of(run):
        assert (row["learning_rate"], row["critic/learning_rate"]) == (0.0, 1e-4)
        assert row["policy/approxkl_avg"] == 0.0
    # The policy stands still, and the critic learns what it is worth.
    assert_same_bits(load_model(tmp_path / "run" / "final").weights.flat, load_model(MODEL).weights.flat)
    assert metrics_of(run)[1]["loss/value_avg"] < metrics_of(run)[0]["loss/value_avg"]


def test_the_order_of_the_mini_batches_changes_with_epoch_and_seed(tmp_path, monkeypatch):
    orders = []
    monkeypatch.setattr(ppo, "forward_backward", lambda actor, part, scale, partials: orders.append(part.tolist()))
    for seed in (1, 1, 2):
        actor = small_actor(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        begin(actor, seed)
        ppo.train_step(actor, None, 0.0)
    first, again, other = orders[:4], orders[4:8], orders[8:]
    assert first == again != other and first[:2] != first[2:]
    for epoch in (first[:2], first[2:]):
        assert sorted(sum(epoch, [])) == list(range(8)) and [len(part) for part in epoch] == [4, 4]


def test_micro_batches_by_tokens_give_the_same_steps(tmp_path, monkeypatch):
    found, sizes, of_chosen = [], [], ppo.micro_batch
    monkeypatch.setattr(
        ppo,
        "micro_batch",
        lambda rollouts, rows, *how: sizes.append(len(rows)) or of_chosen(rollouts, rows, *how),
    )
    for limit in (None, 60, 1):
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 1}
        actor = small_actor(tmp_path, True, max_tokens_per_micro_batch=limit, **options)
        sizes.clear()
        begin(actor)
        metrics = ppo.train_step(actor, None, 1e-3)
        # One evaluation and two epochs.
        assert sum(sizes) == 8 * 3 and {None: len(sizes) == 6, 60: 6 < len(sizes) < 24, 1: len(sizes) == 24}[limit]
        found.append((metrics, device.to_host(actor.model.weights.flat).copy()))
    moved = np.abs(found[0][1] - device.to_host(small_actor(tmp_path, True).model.weights.flat)).max()
    for metrics, weights in found[1:]:
        for name, value in metrics.items():
            assert value == pytest.approx(found[0][0][name], rel=1e-3, abs=1e-5), name
        assert np.abs(weights - found[0][1]).mean() < 2e-3 * moved


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_mini_batches": 3}, r"train.num_mini_batches \(3\) must divide the batch of 16 completions"),
        (
            {"gradient_accumulation_steps": 3},
            r"train.per_device_train_batch_size \(8\) must divide the mini-batch of 12 completions",
        ),
        ({"kl_estimator": "k2"}, "train.kl_estimator must be one of k1, k3, got 'k2'"),
        ({"use_score_norm": True}, "train.use_score_norm needs train.use_score_scaling"),
        ({"lam": 1.5}, "train.lam must be at least 0 and at most 1, got 1.5"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**SMALL_PPO | options)


def test_a_shared_critic_has_neither_model_nor_learning_rate():
    for name, value in (("model", "x"), ("learning_rate", 1e-3)):
        with pytest.raises(ConfigError, match=f"critic.{name} cannot be set with critic.shared"):
            CriticConfig(shared=True, **{name: value})


def test_a_critic_that_cannot_read_the_tokens_is_refused(tmp_path):
    folder = tmp_path / "critic"
    critic_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(ConfigError, match="has 64 positions, but sequences may have 256 tokens"):
        ppo.run_ppo(ppo_run(tmp_path / "run", critic={"model": str(folder)}))
    other = next(path for path in sorted((GOLDEN / "models").iterdir()) if path.is_dir())
    with pytest.raises(ConfigError, match="they must have one vocabulary"):
        ppo.run_ppo(ppo_run(tmp_path / "run", critic={"model": str(other)}))
    with pytest.raises(UserError, match="missing: no such model folder"):
        ppo.run_ppo(ppo_run(tmp_path / "run", critic={"model": str(tmp_path / "missing")}))


@pytest.mark.parametrize(("shared", "lora"), [(False, None), (True, LoraConfig(r=4))], ids=["own critic", "adapter"])
def test_a_later_run_goes_on_with_the_critic(tmp_path, shared, lora):
    """final/critic is a model that scores sequences; as critic.model it is trained from there, and resumed."""
    first = ppo_run(tmp_path / "first", critic={"shared": shared}, max_steps=1)
    ppo.run_ppo(dataclasses.replace(first, lora=lora))
    folder = tmp_path / "first" / "final" / "critic"
    critic, head = load_model(folder, heads=SCORE_HEAD), load_model(folder, heads=SCORE_HEAD).trained.score
    assert critic.config.heads == SCORE_HEAD and device.to_host(head).any()
    policy = load_model(tmp_path / "first" / "final")
    # The first of the embedding, or of the adapter.
    assert (critic.trained.flat[:1000] == policy.trained.flat[:1000]).all() == shared
    (tmp_path / "rows.jsonl").write_text('{"token_ids": [5, 6, 7]}\n')
    output = tmp_path / "scores.jsonl"
    rows = ["--input", str(tmp_path / "rows.jsonl"), "--output", str(output)]
    assert cli.run(["score", "--model", str(folder), *rows]) == 0
    expected = score_sequences(critic, [[5, 6, 7]])[0]
    assert json.loads(output.read_text()) == {"token_ids": [5, 6, 7], "score": pytest.approx(float(expected), rel=1e-6)}
    second = ppo_run(tmp_path / "second", critic={"model": str(folder)}, max_steps=2, save_steps=1)
    actor, _ = ppo.load(second, RunFolder(second, False))
    assert_same_bits(actor.critic.model.trained.flat, critic.trained.flat)
    ppo.run_ppo(second)
    ended = load_model(tmp_path / "second" / "final" / "critic", heads=SCORE_HEAD).trained.flat
    ppo.run_ppo(second, resume=1)
    again = load_model(tmp_path / "second" / "final" / "critic", heads=SCORE_HEAD).trained.flat
    assert_same_bits(again, ended)
    assert not np.array_equal(device.to_host(ended), device.to_host(critic.trained.flat))


def test_too_few_prompts_are_an_error(tmp_path):
    message = r"3 prompts are fewer than the 16 of one generation \(train.per_device_train_batch_size x gradient"
    with pytest.raises(ConfigError, match=message):
        ppo.run_ppo(ppo_run(tmp_path / "run", num_prompts=3))


def test_defaults_are_trls():
    train = PPOConfig()
    assert (train.num_ppo_epochs, train.num_mini_batches, train.learning_rate) == (4, 1, 3e-6)
    assert (train.kl_coef, train.kl_estimator, train.vf_coef, train.gamma, train.lam) == (0.05, "k1", 0.1, 1.0, 0.95)
    assert (train.cliprange, train.cliprange_value, train.whiten_rewards) == (0.2, 0.2, False)
    assert (train.missing_eos_penalty, train.temperature, train.max_completion_length) == (None, 0.7, 53)


# --- resumption, command line, Python ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared trunk"])
def test_every_checkpoint_leads_to_the_same_end(tmp_path, shared):
    run = ppo_run(
        tmp_path / "run", critic={"shared": shared}, max_steps=5, save_steps=1, use_score_scaling=True, kl_coef=0.1
    )
    ppo.run_ppo(run)
    expected, rows = hash_of(run), rows_without_times(run)
    for step in (1, 3):
        ppo.run_ppo(run, resume=step)
        assert hash_of(run) == expected and rows_without_times(run) == rows, step
    changed = ppo_run(tmp_path / "run", critic={"shared": not shared}, max_steps=6)
    with pytest.raises(UserError):
        ppo.run_ppo(changed, resume=True)


@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared trunk"])
def test_an_adapter_is_trained_and_resumed(tmp_path, shared):
    """The reference is the model without it; the critic's state is in the checkpoint, too."""
    one_step = {"num_ppo_epochs": 1, "num_mini_batches": 1}
    run = ppo_run(tmp_path / "run", critic={"shared": shared}, **one_step, max_steps=3, save_steps=2)
    run = dataclasses.replace(run, lora=LoraConfig(r=4))
    ppo.run_ppo(run)
    rows, file = rows_without_times(run), tmp_path / "run" / "final" / "adapter_model.safetensors"
    expected = file.read_bytes()
    assert rows[0]["objective/kl"] == 0.0 < abs(rows[2]["objective/kl"])
    assert all(row["policy/approxkl_avg"] == 0.0 for row in rows)
    ppo.run_ppo(run, resume=2)
    assert file.read_bytes() == expected and rows_without_times(run) == rows


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="times its kills for the cpu device")
@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared trunk"])
def test_killed_runs_end_with_the_same_weights(tmp_path, shared):
    settings = {"max_steps": 18, "save_steps": 2, "use_score_scaling": True}
    run = ppo_run(tmp_path / "killed", critic={"shared": shared}, **settings)
    check_killed_run("ppo", ppo.run_ppo, run, (7,))


def test_the_python_trainer_runs_what_the_command_line_runs(tmp_path):
    settings = SMALL_PPO | {"max_steps": 2, "per_device_train_batch_size": 4}
    args = rlnumba.PPOConfig(output_dir=str(tmp_path / "python"), seed=7, **settings)
    rows = [{"prompt": f"what is the number {i}? "} for i in range(16)]
    text = "def digits(completions, **columns):\n    return [sum(c in '0123456789' for c in t) for t in completions]\n"
    (tmp_path / "reward.py").write_text(text)
    reward = f"{tmp_path}/reward.py:digits"
    rlnumba.PPOTrainer(MODEL, reward, args, rows, critic={"shared": True}).train()
    config = str(tmp_path / "python" / "config.toml")
    assert cli.run(["ppo", "--config", config, "--output_dir", str(tmp_path / "file")]) == 0
    written = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("python", "file")]
    assert written[0] == written[1]


def test_a_wrong_configuration_is_one_line_with_its_exit_code(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t"\n[rewards]\nfuncs = ["f"]\n'
        "[train]\nper_device_train_batch_size = 10\nnum_mini_batches = 4\n"
    )
    assert cli.run(["ppo", "--config", str(file)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"rlnumba: {file}: train.num_mini_batches (4) must divide the batch of 10 completions "
        "(per_device_train_batch_size x gradient_accumulation_steps)"
    ]


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="the example is for machines without a GPU")
def test_example(tmp_path, monkeypatch):
    monkeypatch.chdir(GOLDEN.parents[1])
    run = load_run("ppo", "examples/ppo.toml", [("output_dir", str(tmp_path / "run"))])
    reward = [row["reward"] for row in metrics_until(0.9, ppo.run_ppo, run)]
    assert np.mean(reward[:5]) < 0.5 and np.mean(reward[-5:]) > 0.9
