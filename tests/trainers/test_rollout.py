"""From prompts to packed batches: order, groups, metrics, and the alignment of every per-token array."""

import json

import numpy as np
import pytest

from rlnumba.data import Prompt, PromptData
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import Completion, EpisodeRecord, SamplingParams
from rlnumba.environments.transcript import CallRecord, Transcript
from rlnumba.errors import ConfigError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.rewards import Rewards
from rlnumba.runs.policy import Policy, epoch_order
from rlnumba.runs.prompt_order import PromptOrder
from rlnumba.runs.run_folder import Clock
from rlnumba.runtime import device
from rlnumba.sampling.samples import (
    Generation,
    Sample,
    derived_seed,
    distinct_params,
    draw_samples,
    generation_metrics,
    is_uniform,
    tool_metrics,
)
from rlnumba.trainers import grpo
from rlnumba.trainers.rollout import Rollouts, frac_reward_zero_std, set_advantages
from tests.close import assert_same_bits
from tests.trainers.runs import MODEL, grpo_config, grpo_run, metrics_of


def sample(reward=0.0, prompt=(3, 4), completion=(5, 1), reason="stop", values=None, logprobs=None):
    logprobs = [-0.5] * len(completion) if logprobs is None else logprobs
    values = np.array([reward] if values is None else values, float)
    prompt = Prompt("p", list(prompt), {}, "x:1")
    return Sample(prompt, Completion(list(completion), logprobs, reason, "text"), values, reward, {})


def test_order_takes_epochs_and_drops_what_is_too_few():
    order = PromptOrder(7, False, 0)
    assert [order.take(3) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert (order.epoch, order.position) == (1, 3)
    assert order.take(2) == [3, 4]


def test_order_goes_on_where_it_stood():
    order = PromptOrder(10, True, 3)
    first = [order.take(4) for _ in range(3)]
    assert len(set(first[0] + first[1])) == 8
    again = PromptOrder(10, True, 3, order.epoch, order.position)
    assert again.take(4) == order.take(4)
    assert PromptOrder(10, True, 4).take(4) != first[0]


def test_seeds_depend_on_every_part_of_the_place():
    places = [(1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0), (1,)]
    assert len({derived_seed(*place) for place in places}) == len(places)
    assert derived_seed(1, 2, 3) == derived_seed(1, 2, 3) < 2**32


def test_orders_and_seeds_are_those_of_numpys_generators():
    """Frozen: another order or seed would make another run of the same configuration."""
    assert derived_seed(42, 3, 1) == int(np.random.SeedSequence((2, 42, 3, 1)).generate_state(1)[0])
    assert derived_seed(42) == int(np.random.SeedSequence((0, 42)).generate_state(1)[0])
    permutation = np.random.default_rng((5, 2)).permutation(9)
    assert epoch_order(9, True, 5, 2).tolist() == permutation.tolist()
    assert epoch_order(4, False, 5, 2).tolist() == [0, 1, 2, 3]
    order = PromptOrder(9, True, 5, 2, 3)
    assert order.take(4) == permutation[3:7].tolist() and (order.epoch, order.position) == (2, 7)
    # All that is left of an epoch is taken where it is enough.
    assert order.take(2) == permutation[7:].tolist() and (order.epoch, order.position) == (2, 9)
    assert order.take(1) == [np.random.default_rng((5, 3)).permutation(9)[0]]


def test_advantages_of_samples():
    groups = [[sample(r) for r in (1.0, 0.0, 0.0, 1.0)], [sample(r) for r in (1.0, 0.0, np.nan, 1.0)]]
    set_advantages(groups, [1.0], "group")
    half = 0.8658754
    expected = [half, -half, -half, half, 0.5772503, -1.1545006, 0.0, 0.5772503]
    assert [s.advantage for group in groups for s in group] == pytest.approx(expected, rel=1e-6)


def test_uniform_groups():
    train, decoupled = grpo_config(), grpo_config(multi_objective_aggregation="normalize_then_sum")
    assert is_uniform([sample(0.1)] * 8, train)
    assert not is_uniform([sample(0.1), sample(0.2)], train)
    assert is_uniform([sample(np.nan), sample(0.2)], train)
    assert is_uniform([sample(np.nan), sample(np.nan)], train)
    # Sums that are equal, of functions that are not: GDPO learns from them.
    opposed = [sample(1.0, values=[1, 0]), sample(1.0, values=[0, 1])]
    assert is_uniform(opposed, train) and not is_uniform(opposed, decoupled)
    assert is_uniform([sample(1.0, values=[1, np.nan])] * 2, decoupled)
    # Rewards that are equal, of completions that are not as long.
    penalised = grpo_config(length_penalty=0.5, max_completion_length=4)
    short, long = sample(1.0, completion=(5, 1)), sample(1.0, completion=(5, 6, 1))
    assert is_uniform([short, long], train) and not is_uniform([short, long], penalised)
    assert is_uniform([short, short], penalised) and is_uniform([short, sample(np.nan, completion=(5,))], penalised)


def test_frac_reward_zero_std():
    """TRL's: of the standard deviation that scales; that of fewer than two rewards is NaN, which is not 0."""
    groups = [[sample(r) for r in pair] for pair in ((0.1, 0.1), (1.0, 2.0), (np.nan, 1.0), (0.5, 0.5))]
    assert frac_reward_zero_std(groups, grpo_config()) == 0.5
    assert frac_reward_zero_std(groups, grpo_config(scale_rewards="none")) == 0.5
    assert frac_reward_zero_std(groups, grpo_config(scale_rewards="batch")) == 0.0
    assert frac_reward_zero_std(groups[::3], grpo_config(scale_rewards="batch")) == 0.0
    assert frac_reward_zero_std(groups[:1], grpo_config(scale_rewards="batch")) == 1.0
    decoupled = grpo_config(multi_objective_aggregation="normalize_then_sum")
    assert frac_reward_zero_std(groups, decoupled) == 1.0
    groups[1][0].advantage = 0.5
    assert frac_reward_zero_std(groups, decoupled) == 0.0


def test_normalize_then_sum():
    """GDPO, by TRL's formula: z within the group for each function, their weighted sum, scaled over the batch."""
    rewards = np.array([[1, 5], [0, 7], [0, np.nan], [1, 6], [3, 0], [3, 0], [np.nan, np.nan], [3, 9]], float)
    weights = np.array([1.0, 0.5])
    samples = [sample(0.0, values=row) for row in rewards]
    set_advantages([samples[:4], samples[4:]], weights, "group", "normalize_then_sum")
    grouped = rewards.reshape(2, 4, 2)
    z = (grouped - np.nanmean(grouped, 1, keepdims=True)) / (np.nanstd(grouped, 1, ddof=1, keepdims=True) + 1e-4)
    total = np.nansum(z.reshape(8, 2) * weights, 1)
    total[6] = np.nan
    expected = np.nan_to_num((total - np.nanmean(total)) / (np.nanstd(total, ddof=1) + 1e-4))
    assert [s.advantage for s in samples] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)


def test_columns_of_the_run_are_not_overwritten():
    logged = sample(3.0, values=[1.0, 2.0])
    logged.extra = {"step": 9, "prompt": "other", "mine": 4}
    (line,) = Generation([[logged]]).rows(["reward", "brevity"])
    assert line["reward"] == 3.0 and line["rewards/reward"] == 1.0 and line["brevity"] == 2.0
    assert line["prompt"] == "p" and line["mine"] == 4
    # Each of them, by a reward's name and by what a reward logs.
    names = ["step", "prompt", "completion", "finish_reason", "reward", "advantage"]
    logged.values, logged.advantage = np.arange(6.0), -1.5
    logged.extra = dict.fromkeys(names, "logged")
    (line,) = Generation([[logged]]).rows(names)
    own = {"prompt": "p", "completion": "text", "finish_reason": "stop", "reward": 3.0, "advantage": -1.5}
    assert line == own | {"step": "logged"} | {f"rewards/{name}": float(i) for i, name in enumerate(names)}
    logged.values = np.array([1.0, 2.0])
    metrics = generation_metrics(Generation([[logged]], metrics={"reward": 7.0, "mine": 1.0}), ["reward", "brevity"])
    assert metrics["reward"] == 3.0 and metrics["mine"] == 1.0


def test_metrics_of_a_generation():
    groups = [
        [sample(1.0, completion=range(4)), sample(0.0, completion=range(8), reason="length")],
        [sample(0.5, values=[0.5], completion=range(2)), sample(np.nan, values=[np.nan], completion=range(2))],
    ]
    found = generation_metrics(Generation(groups, {"f": 1}, {"custom": 2.0}), ["f"])
    assert found == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": 0.5,
            "rewards/f/mean": 0.5,
            "rewards/f/std": 0.5,
            "completions/mean_length": 4.0,
            "completions/min_length": 2.0,
            "completions/max_length": 8.0,
            "completions/mean_terminated_length": 8 / 3,
            "completions/min_terminated_length": 2.0,
            "completions/max_terminated_length": 4.0,
            "completions/clipped_ratio": 0.25,
            "custom": 2.0,
            "reward_errors/f": 1,
        }
    )
    all_cut = generation_metrics(Generation([[sample(reason="length"), sample(reason="length")]]), ["f"])
    assert all_cut["completions/mean_terminated_length"] == 0.0


def test_what_others_have_written_is_not_counted_as_drawn():
    drawn, given, teacher = (
        sample(completion=range(count), reason=r) for count, r in ((2, "stop"), (4, "given"), (1, "teacher"))
    )
    generation = Generation([[drawn, given, teacher]])
    assert generation.num_generated == 2 and generation.num_tokens == 7 + 3 * 2


def test_greedy_completions_are_added_to_those_that_were_not_needed():
    groups = [[sample(0.5), sample(1.0, completion=range(4))], [sample(0.0), sample(np.nan, completion=range(3))]]
    generation = Generation(groups, num_unused=5)
    generation.set_baselines()
    assert generation.num_unused == 5 + 4 + 3 and generation.metrics == {"reward_baseline": 1.0}
    assert [len(each.baseline.completion.token_ids) for each in generation.samples] == [4, 3]


def test_calls_of_a_name_that_the_prompt_did_not_have_are_none_of_the_tool():
    """The tools of a prompt may be fewer than those of the run."""
    called = sample()
    calls = [CallRecord("add", False, False, False, 2.0), CallRecord("add", True, False, True, 8.0)]
    called.completion.episode = EpisodeRecord([3, 4], 1, 2, Transcript([], calls=calls))
    found = tool_metrics([[called]], ["add", "other"])
    assert (found["tools/add/call_total"], found["tools/add/failure_total"], found["tools/add/latency_s"]) == (1, 0, 2)
    assert (found["tools/unknown_name_total"], found["tools/failure_frequency"]) == (1, 0.5)
    assert found["tools/latency_s"] == 5 and found["tools/other/call_total"] == 0


def test_parts_share_out_every_array():
    samples = [sample(i, range(3, 3 + p), range(10, 10 + c)) for i, (p, c) in enumerate(((1, 1), (4, 3), (2, 5)))]
    for i, each in enumerate(samples):
        each.advantage = float(i)
    rollouts = Rollouts.of(samples, False)
    rollouts.ref_logprobs = np.arange(9, dtype=np.float32)
    parts = rollouts.parts(2, on_policy=True)
    assert [part.num_sequences for part in parts] == [2, 1]
    for name in ("token_ids", "completion_lengths", "loss_mask", "rollout_logprobs", "advantages", "ref_logprobs"):
        whole = np.concatenate([getattr(part, name) for part in parts])
        assert_same_bits(whole, getattr(rollouts, name), name)
    kinds = {"token_ids": np.int32, "prompt_lengths": np.int32, "completion_lengths": np.int32}
    for name in ("token_ids", "prompt_lengths", "completion_lengths", "loss_mask", "rollout_logprobs", "advantages"):
        assert getattr(rollouts, name).dtype == kinds.get(name, np.float32), name
    assert rollouts.old_logprobs.dtype == np.float32 and rollouts.old_logprobs.shape == (0,)
    assert [part.prompt_lengths.tolist() for part in parts] == [[1, 4], [2]]
    assert parts[1].token_ids.base is rollouts.token_ids, "parts share memory"
    assert parts[1].token_ids.tolist() == [3, 4, 10, 11, 12, 13, 14]
    assert parts[1].ref_logprobs.tolist() == [4, 5, 6, 7, 8]
    assert len(parts[1].old_logprobs) == 0 and parts[1].on_policy and not rollouts.on_policy
    # An older checkpoint has one advantage a completion.
    for advantages in (rollouts.advantages, np.arange(3, dtype=np.float32)):
        again = Rollouts.restored(rollouts.state() | {"advantages": advantages})
        assert_same_bits(again.token_ids, rollouts.token_ids)
        assert again.advantages.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2]


def test_truncated_completions_leave_the_loss():
    samples = [sample(completion=(5, 6), reason="length"), sample(completion=(5, 1))]
    assert Rollouts.of(samples, True).loss_mask.tolist() == [0, 0, 1, 1]
    assert Rollouts.of(samples, False).loss_mask.tolist() == [1, 1, 1, 1]
    assert Rollouts.of(samples, True).num_active == 2
    # A padding token at the limit ends a completion.
    samples[0].pad_token_id = 6
    assert Rollouts.of(samples, True).loss_mask.tolist() == [1, 1, 1, 1]


def test_rows_on_the_device_are_those_that_predict():
    samples = [sample(0, (7,), (8, 9)), sample(0, (4, 5, 6), (3,))]
    batch = Rollouts.of(samples, False).to_device()
    assert batch.targets.input_ids.tolist() == [7, 8, 9, 4, 5, 6, 3]
    assert batch.targets.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.targets.cu_seqlens.tolist() == [0, 3, 7] and batch.targets.max_seqlen == 4
    assert batch.targets.rows.tolist() == [0, 1, 5]
    assert batch.targets.target_ids.tolist() == [8, 9, 3]
    bounds, arrays = batch.arrays["completion_bounds"], batch.arrays
    assert bounds.tolist() == [0, 2, 3] and not {"ref_logprobs", "old_logprobs"} & set(arrays)
    assert {batch.targets.rows.dtype, batch.targets.target_ids.dtype, bounds.dtype} == {np.dtype(np.int32)}
    assert arrays["loss_mask"].tolist() == [1, 1, 1] and arrays["rollout_logprobs"].tolist() == [-0.5] * 3
    rollouts = Rollouts.of(samples, False)
    rollouts.advantages[:] = 2, 3, 4
    rollouts.old_logprobs, rollouts.ref_logprobs = np.float32([1, 2, 3]), np.float32([4, 5, 6])
    arrays = rollouts.to_device().arrays
    assert arrays["old_logprobs"].tolist() == [1, 2, 3] and arrays["ref_logprobs"].tolist() == [4, 5, 6]
    assert arrays["advantages"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_rollout_logprobs_are_those_of_the_training_forward(temperature):
    model, tokenizer = load_model(MODEL), Tokenizer.from_folder(MODEL)
    llm = LLM(model, tokenizer)
    texts = ["what is 1+1? ", "abc", "what is 123+456? "]
    prompts = PromptData([Prompt(t, tokenizer.encode(t), {"answer": t}, "") for t in texts])
    rewards = Rewards([lambda completions, **_: [len(text) for text in completions]], names=["length"])
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=5, n=3)
    generation = draw_samples(llm, rewards, prompts, [2, 0, 1], params, None, Clock())
    assert [[s.prompt.prompt for s in group] for group in generation.groups] == [[texts[i]] * 3 for i in (2, 0, 1)]
    assert [s.reward for s in generation.samples] == [len(s.completion.text) for s in generation.samples]
    order = np.random.default_rng(0).permutation(9)
    rollouts = Rollouts.of([generation.samples[i] for i in order], False)
    policy = Policy(model, grpo_config(), temperature=temperature)
    for part in rollouts.parts(4):
        logprobs = device.xp().empty(len(part.loss_mask), np.float32)
        policy.logprobs(part.to_device().targets, logprobs)
        assert_same_bits(logprobs, part.rollout_logprobs)


def test_groups_get_their_own_columns():
    seen = {"prompts": [], "answer": [], "ids": [], "others": []}

    def reward(prompts, completions, completion_ids, answer, **columns):
        new = {"prompts": prompts, "answer": answer, "ids": completion_ids, "others": sorted(columns)}
        for name, values in new.items():
            seen[name] += values
        return [float(a) for a in answer]

    model, tokenizer = load_model(MODEL), Tokenizer.from_folder(MODEL)
    prompts = PromptData([Prompt(f"{i}", tokenizer.encode(f"{i}"), {"answer": i}, "") for i in range(3)])
    params = SamplingParams(max_tokens=2, n=2)
    generation = draw_samples(LLM(model, tokenizer), Rewards([reward]), prompts, [2, 0], params, "state", Clock())
    assert seen["prompts"] == ["2", "2", "0", "0"] and seen["answer"] == [2, 2, 0, 0]
    assert [s.reward for s in generation.samples] == [2.0, 2.0, 0.0, 0.0]
    assert seen["ids"] == [s.completion.token_ids for s in generation.samples]
    # A token a character.
    assert (
        generation.num_generated == sum(len(ids) for ids in seen["ids"])
        and generation.num_tokens == generation.num_generated + 4
    )
    assert seen["others"] == ["log_extra", "log_metric", "trainer_state"] * 2
    rows = generation.rows(["reward"])
    assert rows[0].keys() == {"prompt", "completion", "finish_reason", "reward", "advantage", "rewards/reward"}


def test_rewards_are_weighted_sums_without_those_that_have_none():
    """And what rewards log reaches the samples; the console hears how far the engine is."""

    def first(completions, log_extra, log_metric, **columns):
        log_extra("place", list(range(len(completions))))
        log_metric("constant", 2.5)
        return [1.0, None, 3.0, None]

    def second(completions, **columns):
        return [10.0, 20.0, None, None]

    model, tokenizer = load_model(MODEL), Tokenizer.from_folder(MODEL)
    prompts = PromptData([Prompt("1", tokenizer.encode("1"), {}, "")])
    params, said = SamplingParams(max_tokens=3, n=4, ignore_eos=True), []
    clock = Clock()
    generation = draw_samples(
        LLM(model, tokenizer), Rewards([first, second], [2.0, 0.5]), prompts, [0], params, None, clock, said.append
    )
    rewards = [sample.reward for sample in generation.samples]
    assert rewards[:3] == [7.0, 10.0, 6.0] and np.isnan(rewards[3])
    assert [sample.extra for sample in generation.samples] == [{"place": i} for i in range(4)]
    assert generation.metrics == {"constant": 2.5} and generation.errors == {}
    assert said[-1] == "4 of 4 completions, 12 tokens" and said[0] == "0 of 4 completions, 4 tokens"
    assert {sample.pad_token_id for sample in generation.samples} == {tokenizer.pad_token_id}
    assert "time/reward" in clock.read()


def test_equal_prompts_in_a_generation_have_different_noise():
    """The k-th occurrence goes on with the completion index, those that occur once are left alone."""
    params = SamplingParams(n=4, seed=7)
    found = distinct_params([[1, 2], [3], [1, 2], [1], [1, 2], [3]], params)
    assert [p.first_index for p in found] == [0, 0, 4, 0, 8, 4]
    assert found[0] is params and all((p.n, p.seed) == (4, 7) for p in found)


def test_completions_of_equal_rows_differ(tmp_path):
    run = grpo_run(tmp_path / "run", num_prompts=4, max_steps=1, learning_rate=0.0, shuffle_dataset=False)
    rows = [json.dumps({"prompt": "what is the number 7? ", "answer": "7"})] * 4
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    grpo.run_grpo(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len({line["completion"] for line in lines}) > 12


def test_prompts_are_drawn_by_difficulty():
    """Without replacement, in proportion to the weights, the same from the same state."""
    order = PromptOrder(300, True, 5, difficulty_weights=[0.0, 1.0, 4.0])
    assert sorted(order.take(300)) == list(range(300)) and len(set(order.take(40))) == 40
    groups = [[sample(reward) for _ in range(2)] for reward in (1.0,) * 100 + (0.5,) * 100 + (0.25,) * 100]
    order.record(range(300), groups)
    assert order.shares() == pytest.approx({f"difficulty/{n}": 1 / 3 for n in ("easy", "normal", "hard")})
    taken = np.array([order.take(10) for _ in range(400)]) // 100
    assert np.mean(taken == 0) == 0
    # Four times as likely, a little less without replacement: 0.8 of a draw of one.
    assert 0.77 < np.mean(taken == 2) < 0.81
    again = PromptOrder(300, True, 5, difficulty_weights=[0.0, 1.0, 4.0])
    again.memory = json.loads(json.dumps(order.memory))
    assert again.take(10) == order.take(10)
    # Easy ones where there are no others.
    assert len(set(order.take(250))) == 250
    # A group without a reward says nothing.
    order.record([7], [[sample(np.nan)]])
    assert order.memory["mean_rewards"]["7"] == 1.0


def test_pools_are_resumed(tmp_path):
    options = {"difficulty_weights": [0.1, 1.0, 2.0], "save_steps": 2, "learning_rate": 1e-2}
    whole = grpo_run(tmp_path / "whole", **options)
    grpo.run_grpo(whole)
    grpo.run_grpo(grpo_run(tmp_path / "run", max_steps=2, **options))
    resumed = grpo_run(tmp_path / "run", **options)
    grpo.run_grpo(resumed, resume=True)
    rows = [metrics_of(run) for run in (whole, resumed)]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert [row["difficulty/hard"] for row in rows[0]] == [row["difficulty/hard"] for row in rows[1]]
    assert rows[0][0]["difficulty/hard"] > 0
    files = [tmp_path / name / "final" / "model.safetensors" for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("weights", [[1.0, 2.0], [0.0, 0.0, 0.0], [1.0, -1.0, 2.0]])
def test_wrong_difficulty_weights_are_named(weights):
    with pytest.raises(ConfigError, match="train.difficulty_weights must be three weights, not negative and not all 0"):
        grpo_config(difficulty_weights=weights)
