"""From prompts to a training batch.

    generate              prompts -> engine -> completions -> rewards: groups of `Sample`
    Rollouts              one generation on the host, packed end to end: B sequences, T completion tokens in all
    Rollouts.to_device    a part of it on the device, for one forward and backward

Token ids are those that went into the engine and came out of it: no text is tokenised again. Only the hidden states
that predict a completion token reach the language-model head, so arrays of the loss have T entries, not N.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from rlnumba.data import Prompt
from rlnumba.data.values import as_json
from rlnumba.engine.sequence import Completion
from rlnumba.kernels.rl.advantage import group_advantages
from rlnumba.runs.micro_batch import MicroBatch
from rlnumba.runtime import device
from rlnumba.trainers.estimators import advantages_of, penalised


def derived_seed(seed, *counters):
    """A seed from the run's seed and counters (step, micro-step, ...): int in [0, 2^32)."""
    # With their number, because SeedSequence takes (1, 0) for (1,).
    return int(np.random.SeedSequence((len(counters), seed, *counters)).generate_state(1)[0])


@dataclass
class Sample:
    """One completion with its rewards.

    values (K,) float64: of each reward function, NaN for None; reward: their weighted sum, NaN if all are None; extra:
    columns that rewards logged; advantage: 0 unless set_advantages writes it. pad_token_id: the tokenizer's, which ends
    a completion as EOS does, as in TRL.
    """

    prompt: Prompt
    completion: Completion
    values: np.ndarray
    reward: float
    extra: dict
    advantage: float = 0.0
    pad_token_id: int | None = None

    @property
    def truncated(self):
        completion = self.completion
        return completion.finish_reason == "length" and completion.array("token_ids")[-1] != self.pad_token_id


# Columns of completions.jsonl that every run has.
RUN_COLUMNS = ("step", "prompt", "completion", "finish_reason", "reward", "advantage")


@dataclass
class Generation:
    """The result of one call of the engine: a group of Samples for each prompt, and what the rewards logged.

    num_unused: tokens of further completions, which were not needed; how many depends on how fast the rewards were.
    """

    groups: list[list[Sample]] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_unused: int = 0

    @property
    def samples(self):
        return [sample for group in self.groups for sample in group]

    @property
    def num_tokens(self):
        """Tokens of prompts and completions, a prompt counted with each of its completions: int."""
        return sum(len(s.prompt.prompt_token_ids) + s.completion.num_tokens for s in self.samples)

    @property
    def num_generated(self):
        """Tokens of completions: int."""
        return sum(sample.completion.num_tokens for sample in self.samples)

    def rows(self, names):
        """The lines of completions.jsonl: list of dict. names: of the reward functions."""
        lines = []
        for sample in self.samples:
            completion = sample.completion
            own = {"prompt": sample.prompt.prompt, "completion": completion.text}
            own["finish_reason"] = completion.finish_reason
            for name, value in zip(names, sample.values.tolist(), strict=True):
                own[f"rewards/{name}" if name in RUN_COLUMNS else name] = value
            own |= {"reward": sample.reward, "advantage": sample.advantage}
            lines.append(own | sample.extra | own)
        return lines


def distinct_params(prompts, params):
    """SamplingParams for each of the prompts (lists of token ids): completions of equal prompts have different noise.

    The k-th occurrence of a prompt, from 0 on, has the completions k n, k n + 1, ... of its noise.
    """
    seen, found = {}, []
    for ids in map(tuple, prompts):
        k = seen[ids] = seen.get(ids, -1) + 1
        found.append(replace(params, first_index=k * params.n) if k else params)
    return found


def generate(llm, rewards, prompts, indices, params, trainer_state, clock, status=None):
    """The completions of chosen prompts and their rewards: Generation.

    prompts: PromptData; indices: of the prompts; params: SamplingParams, its n completions make a group; trainer_state:
    passed to the rewards; clock: the wait for them is its phase "reward"; status: called with a line on the progress.
    Raises RewardError.
    """

    def progress(finished, total, num_generated):
        if status is not None:
            status(f"{finished} of {total} completions, {num_generated} tokens")

    pending, columns = [None] * len(indices), columns_of(prompts, indices, params.n)

    def submit(position, output):
        """Rewards of a group are computed in other processes while the engine goes on with the rest."""
        group = prompts, indices[position], output.completions
        pending[position] = submit_group(rewards, *group, columns, trainer_state)

    token_ids = [prompts.prompts[i].prompt_token_ids for i in indices]
    outputs = llm.generate(token_ids, distinct_params(token_ids, params), progress, submit)
    with clock.phase("reward"):
        scores = rewards.collect(pending)
        chosen = [prompts.prompts[i] for i in indices]
        completions = [output.completions for output in outputs]
        return as_generation(chosen, completions, scores, rewards.weights, llm.tokenizer)


def columns_of(prompts, indices, n):
    """{name: n times None} of all columns that the chosen prompts have: what rewards get where a row has none."""
    return dict.fromkeys(prompts.columns(indices), [None] * n)


def submit_group(rewards, prompts, index, completions, columns, trainer_state):
    """Begin to score the Completions of prompt `index`: Pending. columns: columns_of the generation."""
    prompt, n = prompts.prompts[index], len(completions)
    texts, ids = [c.text for c in completions], [c.array("token_ids") for c in completions]
    columns = columns | prompts.columns([index] * n)
    return rewards.submit([prompt.prompt] * n, texts, ids, columns, trainer_state, prompt.where)


def as_generation(chosen, completions, scores, weights, tokenizer):
    """The Generation of Prompts with a list of Completions each, all of one length, and the Scores of these all."""
    n = len(completions[0])
    weighted = np.where(np.isnan(scores.values).all(axis=1), np.nan, np.nansum(scores.values * weights, axis=1))
    pad_token_id = tokenizer.pad_token_id if tokenizer else None
    samples = []
    for i, (prompt, completion) in enumerate(
        (p, c) for p, group in zip(chosen, completions, strict=True) for c in group
    ):
        # A copy of the present values: the lines are written later, and the user's objects may change until then.
        extra = {column: as_json(values[i]) for column, values in scores.extra.items()}
        reward = float(weighted[i])
        samples.append(Sample(prompt, completion, scores.values[i], reward, extra, pad_token_id=pad_token_id))
    groups = [samples[first : first + n] for first in range(0, len(samples), n)]
    return Generation(groups, scores.errors, scores.metrics)


def is_uniform(group, aggregation="sum_then_normalize"):
    """Whether a group's rewards are all equal, so that its advantages are 0: also True with fewer than two rewards.

    aggregation: with "normalize_then_sum" the rewards of every function are compared, not their sums.
    """
    by_function = aggregation == "normalize_then_sum"
    values = np.array([sample.values if by_function else [sample.reward] for sample in group])
    known = [column[~np.isnan(column)] for column in values.T]
    return all(len(column) < 2 or column.min() == column.max() for column in known)


def frac_reward_zero_std(groups, train):
    """The share of samples for which the standard deviation that scales their advantages is 0: float, as in TRL.

    It is that of their group; of all where scale_rewards is "batch", or multi_objective_aggregation scales all.
    """
    over_all = train.multi_objective_aggregation == "normalize_then_sum"
    values = np.array([[s.advantage if over_all else s.reward for s in group] for group in groups])
    if over_all or train.scale_rewards == "batch":
        values = values.reshape(1, -1)
    return frac_zero_std(values)


def frac_zero_std(rows):
    """The share of rows (groups, members) whose standard deviation, NaN left out, is 0: float, as in TRL."""
    return float(np.mean(np.isclose([_std(row) for row in rows], 0.0)))


def set_advantages(groups, weights, scale_rewards, aggregation="sum_then_normalize"):
    """Write the advantage of every sample of the groups (all of one size). weights (K,): of the reward functions."""
    samples = [sample for group in groups for sample in group]
    rewards = device.asarray(np.array([sample.values for sample in samples], np.float32))
    weights = device.asarray(np.asarray(weights, np.float32))
    advantages = device.xp().empty(len(samples), np.float32)
    group_advantages(rewards, weights, len(groups[0]), advantages, scale_rewards, aggregation)
    for sample, advantage in zip(samples, device.to_host(advantages).tolist(), strict=True):
        sample.advantage = advantage


def set_estimated_advantages(groups, train, state):
    """set_advantages by trainers/estimators.py: with an advantage_estimator or a length_penalty. Writes state."""
    samples = [sample for group in groups for sample in group]
    lengths = np.array([sample.completion.num_tokens for sample in samples])
    limit = train.max_completion_length
    rewards = penalised(np.array([sample.reward for sample in samples]), lengths, train.length_penalty, limit)
    if train.advantage_estimator == "grpo":
        column = device.asarray(rewards[:, None].astype(np.float32))
        found = device.xp().empty(len(samples), np.float32)
        weight = device.asarray(np.ones(1, np.float32))
        group_advantages(column, weight, len(groups[0]), found, train.scale_rewards)
        advantages = device.to_host(found)
    else:
        masked = np.array([train.mask_truncated_completions and sample.truncated for sample in samples])
        active = np.where(masked, 0, lengths)
        advantages = advantages_of(train.advantage_estimator, rewards, len(groups[0]), active, state)
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage


def generation_metrics(generations, names):
    """TRL's metrics of a list of Generations, a dict of floats. names: of the reward functions."""
    samples = [sample for each in generations for sample in each.samples]
    values = np.array([sample.values for sample in samples])
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.completion.num_tokens for sample in samples])
    truncated = np.array([sample.truncated for sample in samples])
    ended = lengths[~truncated] if not truncated.all() else np.zeros(1)
    found = {"reward": _mean(rewards), "reward_std": _std(rewards)}
    for name, column in zip(names, values.T, strict=True):
        found |= {f"rewards/{name}/mean": _mean(column), f"rewards/{name}/std": _std(column)}
    for which, of in (("length", lengths), ("terminated_length", ended)):
        for name in ("mean", "min", "max"):
            found[f"completions/{name}_{which}"] = float(getattr(of, name)())
    found["completions/clipped_ratio"] = float(truncated.mean())
    for each in generations:
        found = found | each.metrics | found
        for name, count in each.errors.items():
            found[f"reward_errors/{name}"] = found.get(f"reward_errors/{name}", 0) + count
    return found


def _mean(values):
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _std(values):
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else float("nan")


def ranges_of_tokens(lengths, limit):
    """[(first, end)] of the sequences of these lengths (B,): as many as have at most `limit` tokens, at least one."""
    firsts, tokens = [], limit + 1
    for i, length in enumerate(lengths.tolist()):
        if tokens + length > limit:
            firsts.append(i)
            tokens = 0
        tokens += length
    return list(zip(firsts, [*firsts[1:], len(lengths)], strict=True))


@dataclass
class Rollouts:
    """One generation on the host, in the order in which it is trained on, or a part of it.

    token_ids (sum of S,) i32: prompt and completion of each sequence; prompt_lengths, completion_lengths (B,) i32;
    loss_mask (T,) f32, 0 or 1; rollout_logprobs (T,) f32, the sampler's; advantages (B,) f32; old_logprobs and
    ref_logprobs (T,) f32, or of length 0 where the loss takes them from elsewhere; thresholds (T,) f32: the smallest
    logit that the sampler's filters kept, or of length 0 where all are trained. on_policy: see MicroStep.
    is_stale: whether some tokens were sampled from older weights than those that are trained on them first.
    rejected_fraction: share of the tokens whose mask rollout_rs has set to 0. correction_mean: what
    rollout_is_batch_normalize has divided the advantages by.
    """

    token_ids: np.ndarray
    prompt_lengths: np.ndarray
    completion_lengths: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    thresholds: np.ndarray = field(default_factory=partial(np.empty, 0, np.float32))
    on_policy: bool = False
    is_stale: bool = False
    rejected_fraction: float = 0.0
    correction_mean: float = 1.0

    @staticmethod
    def of(samples, mask_truncated):
        """From Samples, in their order. mask_truncated: whether a truncated completion's loss mask is 0."""
        # Samples of a group have one list as their prompt.
        prompts = {id(s.prompt.prompt_token_ids): s.prompt.prompt_token_ids for s in samples}
        prompts = {key: np.array(token_ids, np.int32) for key, token_ids in prompts.items()}
        completions = [sample.completion for sample in samples]
        ids = [(prompts[id(s.prompt.prompt_token_ids)], s.completion.array("token_ids")) for s in samples]
        lengths = np.array([[len(part) for part in pair] for pair in ids], np.int32).reshape(-1, 2)
        completion_lengths = np.ascontiguousarray(lengths[:, 1])
        thresholds = [each.thresholds for each in completions if each.thresholds is not None]
        masked = np.array([mask_truncated and sample.truncated for sample in samples])
        no_ids, nothing = np.empty(0, np.int32), np.empty(0, np.float32)
        return Rollouts(
            token_ids=np.concatenate([no_ids, *chain.from_iterable(ids)]),
            prompt_lengths=np.ascontiguousarray(lengths[:, 0]),
            completion_lengths=completion_lengths,
            loss_mask=np.repeat(np.where(masked, 0, 1).astype(np.float32), completion_lengths),
            rollout_logprobs=np.concatenate([nothing, *(each.array("logprobs") for each in completions)]),
            advantages=np.array([sample.advantage for sample in samples], np.float32),
            old_logprobs=nothing,
            ref_logprobs=nothing,
            thresholds=np.concatenate([nothing, *thresholds]),
        )

    def part(self, first, count, on_policy=False):
        """Sequences [first, first + count), sharing memory with these."""

        def tokens(lengths):
            begin = int(lengths[:first].sum())
            return slice(begin, begin + int(lengths[first : first + count].sum()))

        sequences, targets = slice(first, first + count), tokens(self.completion_lengths)
        parts = {"token_ids": self.token_ids[tokens(self.lengths)]}
        for name in ("prompt_lengths", "completion_lengths", "advantages"):
            parts[name] = getattr(self, name)[sequences]
        for name in ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "thresholds"):
            parts[name] = getattr(self, name)[targets]
        return Rollouts(**parts, on_policy=on_policy, is_stale=self.is_stale)

    def ordered(self, order):
        """The sequences `order` (indices), in this order: Rollouts."""
        return Rollouts.joined([self.part(i, 1, self.on_policy) for i in order])

    def parts(self, size, on_policy=False):
        """All sequences, `size` at a time: list of Rollouts."""
        return [self.part(first, size, on_policy) for first in range(0, len(self.advantages), size)]

    @staticmethod
    def joined(parts):
        """Several Rollouts, all on-policy or none, one after the other."""
        names = [name for name, value in vars(parts[0]).items() if isinstance(value, np.ndarray)]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        is_stale = any(part.is_stale for part in parts)
        return Rollouts(**arrays, on_policy=parts[0].on_policy, is_stale=is_stale)

    def parts_of_tokens(self, limit):
        """All sequences in their order, as many at a time as have at most `limit` tokens, but at least one: list."""
        ranges = ranges_of_tokens(self.lengths, limit)
        return [self.part(first, end - first, self.on_policy) for first, end in ranges]

    def state(self):
        """The arrays that a checkpoint keeps: dict, the arguments of Rollouts."""
        return {name: value for name, value in vars(self).items() if name != "on_policy"}

    @property
    def lengths(self):
        """Tokens of each sequence, (B,) i32."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def num_active(self):
        """Tokens whose loss mask is 1: int."""
        return int(self.loss_mask.sum(dtype=np.float64))

    def micro_batch(self):
        """All sequences as a MicroBatch, with what the loss reads.

        The targets have loss_mask, rollout_logprobs, and old_logprobs and ref_logprobs where there are any. The
        sequences have advantages and completion_bounds (B + 1,) i32, which divide the targets into completions.
        """
        bounds = np.zeros(len(self.completion_lengths) + 1, np.int32)
        np.cumsum(self.completion_lengths, out=bounds[1:])
        # The packed index of a completion token: its index among completion tokens, plus all prompts up to its own.
        prompt_tokens = np.repeat(np.cumsum(self.prompt_lengths), self.completion_lengths)
        thresholds = self.thresholds if len(self.thresholds) else None
        batch = MicroBatch.of(self.token_ids, self.lengths, prompt_tokens + np.arange(bounds[-1]), thresholds)
        names = ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs")
        of_targets = {name: getattr(self, name) for name in names if len(getattr(self, name))}
        return batch.with_arrays(of_targets, {"completion_bounds": bounds, "advantages": self.advantages})

    def to_device(self):
        """All sequences on the device: DeviceBatch."""
        return self.micro_batch().to_device()
