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
from rlnumba.engine.sequence import Completion
from rlnumba.kernels.rl.advantage import group_advantages
from rlnumba.runtime import device
from rlnumba.trainers.core import TargetBatch, epoch_order
from rlnumba.trainers.estimators import advantages_of, penalised

# Pools of difficulty, by the mean reward of a prompt's last group: up to these bounds, as in prime-rl, easy above.
POOLS = ("easy", "normal", "hard")
HARD_UP_TO, NORMAL_UP_TO = 0.25, 0.75


def pool_of(mean_reward):
    """The index in POOLS of a prompt with this mean reward."""
    return 2 if mean_reward <= HARD_UP_TO else 1 if mean_reward <= NORMAL_UP_TO else 0


class PromptOrder:
    """The order in which prompts are taken: epochs, each shuffled from (seed, epoch) or in the file's order.

    difficulty_weights: None, or of the POOLS: then each generation draws its prompts at random, without replacement and
    from (seed, number of the draw), with the weight of each prompt's pool; one that was not sampled yet is normal, and
    those of weight 0 are taken where there are too few others.
    """

    def __init__(self, num_prompts, shuffle, seed, epoch=0, position=0, difficulty_weights=None):
        self.num_prompts, self.shuffle, self.seed = num_prompts, shuffle, seed
        self.epoch, self.position, self.difficulty_weights = epoch, position, difficulty_weights
        # What else carries over from generation to generation: JSON values, part of the checkpoint.
        self.memory = {}

    def take(self, count):
        """The next `count` (at most num_prompts) prompt indices; what is left of an epoch and too few is dropped."""
        if self.difficulty_weights is not None:
            return self._draw(count)
        if self.position + count > self.num_prompts:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += count
        order = epoch_order(self.num_prompts, self.shuffle, self.seed, self.epoch)
        return order[self.position - count : self.position].tolist()

    def _draw(self, count):
        draws = self.memory["draws"] = self.memory.get("draws", 0) + 1
        weights = np.asarray(self.difficulty_weights, np.float64)[self._pools()]
        # The largest of log weight + Gumbel noise are a draw without replacement (Vieira 2014).
        noise = np.random.default_rng((self.seed, draws)).gumbel(size=self.num_prompts)
        scores = np.where(weights > 0, np.log(np.where(weights > 0, weights, 1.0)), -1e9) + noise
        return np.argsort(-scores, kind="stable")[:count].tolist()

    def _pools(self):
        """The pool of every prompt, (num_prompts,) int64."""
        pools = np.ones(self.num_prompts, np.int64)
        for index, mean_reward in self.memory.get("mean_rewards", {}).items():
            if int(index) < self.num_prompts:
                pools[int(index)] = pool_of(mean_reward)
        return pools

    def record(self, indices, groups):
        """Note the mean reward of each prompt's group, by which its pool is chosen; nothing without weights."""
        if self.difficulty_weights is None:
            return
        means = self.memory.setdefault("mean_rewards", {})
        for index, group in zip(indices, groups, strict=True):
            rewards = np.array([sample.reward for sample in group])
            if not np.isnan(rewards).all():
                # Strings, as JSON has them.
                means[str(index)] = float(np.nanmean(rewards))

    def pool_shares(self):
        """The share of the prompts that each pool has: dict of metrics, empty without weights."""
        if self.difficulty_weights is None:
            return {}
        shares = np.bincount(self._pools(), minlength=len(POOLS)) / self.num_prompts
        return {f"difficulty/{name}": share for name, share in zip(POOLS, shares.tolist(), strict=True)}


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
        return completion.finish_reason == "length" and completion.token_ids[-1] != self.pad_token_id


# Columns of completions.jsonl that every run has.
RUN_COLUMNS = ("step", "prompt", "completion", "finish_reason", "reward", "advantage")


@dataclass
class Generation:
    """What one call of the engine generated: a group of Samples for each prompt, and what the rewards logged."""

    groups: list[list[Sample]] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def samples(self):
        return [sample for group in self.groups for sample in group]

    @property
    def num_tokens(self):
        """Tokens of prompts and completions, a prompt counted with each of its completions: int."""
        return sum(len(s.prompt.prompt_token_ids) + len(s.completion.token_ids) for s in self.samples)

    @property
    def num_generated(self):
        """Tokens of completions: int."""
        return sum(len(sample.completion.token_ids) for sample in self.samples)

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
    passed to the rewards; status: called with a line on the progress. Raises RewardError.
    """

    def progress(finished, total, num_generated):
        if status is not None:
            status(f"{finished} of {total} completions, {num_generated} tokens")

    pending = [None] * len(indices)

    def submit(position, output):
        """Rewards of a group are computed in other processes while the engine goes on with the rest."""
        chosen, n = prompts.prompts[indices[position]], len(output.completions)
        texts, ids = ([getattr(c, name) for c in output.completions] for name in ("text", "token_ids"))
        columns = prompts.columns([indices[position]] * n)
        pending[position] = rewards.submit([chosen.prompt] * n, texts, ids, all_columns | columns, trainer_state)

    all_columns = dict.fromkeys(prompts.columns(indices), [None] * params.n)
    with clock.phase("generate"):
        token_ids = [prompts.prompts[i].prompt_token_ids for i in indices]
        outputs = llm.generate(token_ids, distinct_params(token_ids, params), progress, submit)
    with clock.phase("reward"):
        scores = rewards.collect(pending)
    completions = [completion for output in outputs for completion in output.completions]
    chosen = [prompts.prompts[i] for i in indices for _ in range(params.n)]
    weighted = np.where(np.isnan(scores.values).all(axis=1), np.nan, np.nansum(scores.values * rewards.weights, axis=1))
    extras = [{column: values[n] for column, values in scores.extra.items()} for n in range(len(completions))]
    pad_token_id = llm.tokenizer.pad_token_id if llm.tokenizer else None
    of_samples = zip(chosen, completions, scores.values, weighted.tolist(), extras, strict=True)
    samples = [Sample(*fields, pad_token_id=pad_token_id) for fields in of_samples]
    groups = [samples[n : n + params.n] for n in range(0, len(samples), params.n)]
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
    lengths = np.array([len(sample.completion.token_ids) for sample in samples])
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
    lengths = np.array([len(sample.completion.token_ids) for sample in samples])
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


@dataclass
class Rollouts:
    """One generation on the host, in the order in which it is trained on, or a part of it.

    token_ids (sum of S,) i32: prompt and completion of each sequence; prompt_lengths, completion_lengths (B,) i32;
    loss_mask (T,) f32, 0 or 1; rollout_logprobs (T,) f32, the sampler's; advantages (B,) f32; old_logprobs and
    ref_logprobs (T,) f32, or of length 0 where the loss takes them from elsewhere; thresholds (T,) f32: the smallest
    logit that the sampler's filters kept, or of length 0 where all are trained. on_policy: see MicroStep.
    rejected_fraction: share of the tokens whose mask rollout_rs has set to 0.
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
    rejected_fraction: float = 0.0

    @staticmethod
    def of(samples, mask_truncated):
        """From Samples, in their order. mask_truncated: whether a truncated completion's loss mask is 0."""
        ids = [ids for s in samples for ids in (s.prompt.prompt_token_ids, s.completion.token_ids)]
        lengths = np.array([len(part) for part in ids], np.int32).reshape(-1, 2)
        completion_lengths = np.ascontiguousarray(lengths[:, 1])
        logprobs = chain.from_iterable(sample.completion.logprobs for sample in samples)
        thresholds = [s.completion.thresholds for s in samples if s.completion.thresholds is not None]
        masked = np.array([mask_truncated and sample.truncated for sample in samples])
        return Rollouts(
            token_ids=np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())),
            prompt_lengths=np.ascontiguousarray(lengths[:, 0]),
            completion_lengths=completion_lengths,
            loss_mask=np.repeat(np.where(masked, 0, 1).astype(np.float32), completion_lengths),
            rollout_logprobs=np.fromiter(logprobs, np.float32, int(completion_lengths.sum())),
            advantages=np.array([sample.advantage for sample in samples], np.float32),
            old_logprobs=np.empty(0, np.float32),
            ref_logprobs=np.empty(0, np.float32),
            thresholds=np.concatenate([np.empty(0, np.float32), *thresholds]),
        )

    def part(self, first, count, on_policy=False):
        """Sequences [first, first + count), sharing memory with these."""

        def tokens(lengths):
            begin = int(lengths[:first].sum())
            return slice(begin, begin + int(lengths[first : first + count].sum()))

        sequences, targets = slice(first, first + count), tokens(self.completion_lengths)
        parts = {"token_ids": self.token_ids[tokens(self.prompt_lengths + self.completion_lengths)]}
        for name in ("prompt_lengths", "completion_lengths", "advantages"):
            parts[name] = getattr(self, name)[sequences]
        for name in ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "thresholds"):
            parts[name] = getattr(self, name)[targets]
        return Rollouts(**parts, on_policy=on_policy)

    def parts(self, size, on_policy=False):
        """All sequences, `size` at a time: list of Rollouts."""
        return [self.part(first, size, on_policy) for first in range(0, len(self.advantages), size)]

    @staticmethod
    def joined(parts):
        """Several Rollouts, all on-policy or none, one after the other."""
        names = [name for name, value in vars(parts[0]).items() if isinstance(value, np.ndarray)]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return Rollouts(**arrays, on_policy=parts[0].on_policy)

    def parts_of_tokens(self, limit):
        """All sequences in their order, as many at a time as have at most `limit` tokens, but at least one: list."""
        lengths = self.prompt_lengths + self.completion_lengths
        firsts, tokens = [], limit + 1
        for i, length in enumerate(lengths.tolist()):
            if tokens + length > limit:
                firsts.append(i)
                tokens = 0
            tokens += length
        ends = [*firsts[1:], len(lengths)]
        return [self.part(first, end - first, self.on_policy) for first, end in zip(firsts, ends, strict=True)]

    def state(self):
        """The arrays that a checkpoint keeps: dict, the arguments of Rollouts."""
        return {name: value for name, value in vars(self).items() if name != "on_policy"}

    @property
    def num_active(self):
        """Tokens whose loss mask is 1: int."""
        return int(self.loss_mask.sum(dtype=np.float64))

    def to_device(self):
        """All sequences on the device: RolloutBatch."""
        lengths = self.prompt_lengths + self.completion_lengths
        cu_seqlens = np.concatenate([[0], np.cumsum(self.completion_lengths)]).astype(np.int32)
        # The packed index of a completion token: its index among completion tokens, plus all prompts up to its own.
        prompt_tokens = np.repeat(np.cumsum(self.prompt_lengths), self.completion_lengths)
        thresholds = self.thresholds if len(self.thresholds) else None
        targets = TargetBatch.of(self.token_ids, lengths, prompt_tokens + np.arange(cu_seqlens[-1]), thresholds)
        names = ("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
        arrays = {name: getattr(self, name) for name in names}
        arrays = {name: device.asarray(array) if len(array) else None for name, array in arrays.items()}
        return RolloutBatch(targets, device.asarray(cu_seqlens), **arrays)


@dataclass
class RolloutBatch:
    """Rollouts on the device: `targets` for the policy, the rest for the loss.

    cu_seqlens (B + 1,) i32 cuts every (T,) array into completions. old_logprobs, ref_logprobs: None without them.
    """

    targets: TargetBatch
    cu_seqlens: object
    loss_mask: object
    rollout_logprobs: object
    old_logprobs: object
    ref_logprobs: object
    advantages: object
