"""From samples to a training batch.

    set_advantages        rewards -> the advantage of every Sample
    Rollouts              one generation on the host, packed end to end: B sequences, T drawn tokens in all
    Rollouts.to_device    a part of it on the device, for one forward and backward

Token ids are those that went into the engine and came out of it: no text is tokenised again. Only the hidden states
that predict a drawn token reach the language-model head, so arrays of the loss have T entries, not N: neither prompts
nor what an environment has put between the turns of an episode.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise

import numpy as np

from rlnumba.kernels.rl.advantage import group_advantages
from rlnumba.runs.micro_batch import MicroBatch
from rlnumba.runtime import device
from rlnumba.sampling.samples import known_std, lengths_and_rewards
from rlnumba.trainers.estimators import OF_TURNS, advantages_of, anchors_of, turns_of


def frac_reward_zero_std(groups, train):
    """The share of samples for which the standard deviation that scales their advantages is 0: float, as in TRL.

    It is that of their group; of all where scale_rewards is "batch", or multi_objective_aggregation scales all.
    """
    over_all = train.multi_objective_aggregation == "normalize_then_sum"
    values = np.array(
        [[s.advantage for s in group] if over_all else lengths_and_rewards(group, train)[1] for group in groups]
    )
    if over_all or train.scale_rewards == "batch":
        values = values.reshape(1, -1)
    return frac_zero_std(values)


def frac_zero_std(rows):
    """The share of rows (groups, members) whose standard deviation, NaN left out, is 0: float, as in TRL."""
    return float(np.mean(np.isclose([known_std(row) for row in rows], 0.0)))


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
    lengths, rewards = lengths_and_rewards(samples, train)
    if train.advantage_estimator == "grpo":
        column = device.asarray(rewards[:, None].astype(np.float32))
        found = device.xp().empty(len(samples), np.float32)
        weight = device.asarray(np.ones(1, np.float32))
        group_advantages(column, weight, len(groups[0]), found, train.scale_rewards)
        advantages = device.to_host(found)
    elif train.advantage_estimator in OF_TURNS:
        advantages = _set_step_advantages(groups, rewards, train)
    else:
        masked = np.array([train.mask_truncated_completions and sample.truncated for sample in samples])
        active = np.where(masked, 0, lengths)
        baselines = None
        if train.advantage_estimator == "remax":
            _, baselines = lengths_and_rewards([sample.baseline for sample in samples], train)
        advantages = advantages_of(train.advantage_estimator, rewards, len(groups[0]), active, state, baselines)
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage


def _set_step_advantages(groups, rewards, train):
    """Write the steps of all Samples by their rewards (B,), and return the advantages of the episodes, (B,) float64."""
    advantages = []
    for group, values in zip(groups, np.split(rewards, len(groups)), strict=True):
        completions = [(s.prompt_token_ids, s.completion.array("token_ids"), _drawn_mask(s.completion)) for s in group]
        found, steps = OF_TURNS[train.advantage_estimator](values, [anchors_of(*each) for each in completions], train)
        advantages.append(found)
        for sample, own in zip(group, steps, strict=True):
            sample.steps = own
    return np.concatenate(advantages)


def step_group_metrics(groups):
    """The mean size of step groups, and the share of turns alone in theirs, of episodes with a reward: dict."""
    sizes = [s.steps.group_sizes for group in groups for s in group if not np.isnan(s.reward)]
    sizes = np.concatenate([np.empty(0, int), *sizes])
    if not len(sizes):
        return {"step_groups/size_mean": 0.0, "step_groups/alone_frac": 0.0}
    # A group of n turns is counted by each of them as 1 / n.
    return {
        "step_groups/size_mean": float(len(sizes) / np.sum(1 / sizes)),
        "step_groups/alone_frac": float(np.mean(sizes == 1)),
    }


def _token_advantages(samples, target_lengths, observes):
    """The advantage of each target, (T,) f32: its completion's and, with steps, what its turn adds.

    observes: whether the environment's tokens are targets, too; they have their completion's.
    """
    found = np.repeat(np.array([s.advantage for s in samples], np.float32), target_lengths)
    if all(sample.steps is None for sample in samples):
        return found
    for sample, end in zip(samples, np.cumsum(target_lengths).tolist(), strict=True):
        mask = _drawn_mask(sample.completion)
        lengths = [after - first for first, after in turns_of(mask)]
        own = found[end - (len(mask) if observes else sample.completion.num_drawn) : end]
        own[mask if observes else slice(None)] += np.repeat(sample.steps.values.astype(np.float32), lengths)
    return found


def ranges_of_tokens(lengths, limit, shared=0):
    """[(first, end)] of the sequences of these lengths (B,): as many as have at most `limit` tokens, at least one.

    shared (B,): tokens of each that are the one's before it, if that is in the same range; 0: none.
    """
    firsts, tokens = [], limit + 1
    for i, (length, own) in enumerate(zip(lengths.tolist(), (lengths - shared).tolist(), strict=True)):
        if tokens + own > limit:
            firsts.append(i)
            tokens = length
        else:
            tokens += own
    return list(zip(firsts, [*firsts[1:], len(lengths)], strict=True))


def ranges_of_groups(lengths, limit, shared):
    """ranges_of_tokens, with all sequences that share with each other in one range where that takes no more ranges."""
    ranges, firsts = ranges_of_tokens(lengths, limit, shared), np.flatnonzero(shared == 0)
    tokens = np.add.reduceat(lengths - shared, firsts) if len(firsts) else lengths
    whole, ends = ranges_of_tokens(tokens, limit), [*firsts.tolist(), len(lengths)]
    if len(whole) > len(ranges) or (tokens > limit).any():
        return ranges
    return [(ends[first], ends[end]) for first, end in whole]


def _joined_experts(recorded, lengths):
    """The experts of sequences of these lengths, end to end: (sum of lengths, L, k) int16, -1 where there are none.

    recorded: (tokens, L, k) int16 of the first tokens of each, or None; of length 0 if they all are.
    """
    sizes = next((known.shape[1:] for known in recorded if known is not None and len(known)), None)
    if sizes is None:
        return np.empty((0, 0, 0), np.int16)
    joined, ends = np.full((int(np.sum(lengths)), *sizes), -1, np.int16), np.cumsum(lengths)
    for known, begin in zip(recorded, ends - lengths, strict=True):
        if known is not None and len(known):
            joined[begin : begin + len(known)] = known
    return joined


def _drawn_mask(completion):
    """A Completion's mask, (T,) bool, also where all tokens were drawn."""
    return np.ones(completion.num_tokens, bool) if completion.mask is None else completion.mask


def with_groups_together(order, groups, size):
    """order (B,), indices, with those of a group side by side within each `size` of them: (B,).

    groups (B,): the group of each index. A group is where its first member was.
    """
    parts = []
    for part in np.split(order, range(size, len(order), size)):
        _, firsts, inverse = np.unique(groups[part], return_index=True, return_inverse=True)
        parts.append(part[np.argsort(firsts[inverse], kind="stable")])
    return np.concatenate(parts)


def order_of_training(groups, seed, policy):
    """The order in which the samples of groups, lists of Samples, are trained on: (B,) indices of them end to end.

    It is random, but where the policy shares prefixes and there are prompts that have one to share: completions of a
    group in an optimizer step are then side by side. bnpo's loss is a mean over each micro-batch, which stay random.
    """
    owners, train = np.repeat(np.arange(len(groups)), list(map(len, groups))), policy.train
    order = np.random.default_rng(seed).permutation(len(owners))
    longest = max((len(sample.prompt_token_ids) for group in groups for sample in group), default=0)
    sharing = policy.prefix_sharing(policy.model)
    if sharing is None or longest <= sharing.multiple or train.loss_type == "bnpo":
        return order
    return with_groups_together(order, owners, train.per_device_train_batch_size * train.micro_batches_per_step)


@dataclass
class Rollouts:
    """One generation on the host, in the order in which it is trained on, or a part of it.

    token_ids (sum of S,) i32: prompt and completion of each sequence; prompt_lengths, completion_lengths (B,) i32;
    drawn (sum of completion_lengths,) bool: which tokens of the completions are targets, or of length 0 where all are:
    those that were drawn, and with train.observation_coef the environment's, too, which observed (T,) f32, 0 or 1, has
    then, else of length 0; target_lengths (B,) i32: targets of each; num_rows (B,) i32, row_lengths (sum of num_rows,)
    i32: a completion of several conversations has a row of each, a sequence of its own to the model; by default it is
    one row;
    loss_mask (T,) f32, 0 or 1; rollout_logprobs (T,) f32, the sampler's; advantages (T,) f32; old_logprobs and
    ref_logprobs (T,) f32, or of length 0 where the loss takes them from elsewhere; thresholds (T,) f32: the smallest
    logit that the sampler's filters kept, or of length 0 where all are trained. routed_experts (sum of S, L, k) i16:
    those of the sampler's mixtures, -1 for none, or of length 0 where training has its own. on_policy: see MicroStep.
    is_stale: whether some tokens were sampled from older weights than those that are trained on them first, or their
    log-probs are a rollout function's.
    rejected_fraction: share of the tokens whose mask rollout_rs has set to 0. correction_mean: what
    rollout_is_batch_normalize has divided the advantages by. teachers (B,) i32: index of the teacher of each sequence;
    teacher_kl: mean over trained tokens of log policy - log teacher. teacher_ids (sum of teacher_lengths,) i32: what
    the teacher sees instead of each prompt, teacher_lengths (B,) i32 tokens; 0 where it sees the same.
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
    teacher_kl: float = 0.0
    drawn: np.ndarray = field(default_factory=partial(np.empty, 0, bool))
    observed: np.ndarray = field(default_factory=partial(np.empty, 0, np.float32))
    target_lengths: np.ndarray | None = None
    num_rows: np.ndarray | None = None
    row_lengths: np.ndarray | None = None
    teachers: np.ndarray | None = None
    teacher_ids: np.ndarray = field(default_factory=partial(np.empty, 0, np.int32))
    teacher_lengths: np.ndarray | None = None
    routed_experts: np.ndarray = field(default_factory=partial(np.empty, (0, 0, 0), np.int16))

    def __post_init__(self):
        if self.target_lengths is None:
            self.target_lengths = self.completion_lengths
        if self.teachers is None:
            self.teachers = np.zeros_like(self.completion_lengths)
        if self.teacher_lengths is None:
            self.teacher_lengths = np.zeros_like(self.completion_lengths)
        if self.num_rows is None:
            self.num_rows, self.row_lengths = np.ones_like(self.completion_lengths), self.lengths

    @staticmethod
    def of(samples, mask_truncated, observes=False):
        """From Samples, in their order. mask_truncated: whether a truncated completion's loss mask is 0; observes: make
        targets of the environment's tokens, too."""
        # Samples of a group have one list as their prompt, unless they are of episodes.
        prompts = {id(s.prompt_token_ids): s.prompt_token_ids for s in samples}
        prompts = {key: np.array(token_ids, np.int32) for key, token_ids in prompts.items()}
        completions = [sample.completion for sample in samples]
        ids = [(prompts[id(s.prompt_token_ids)], s.completion.array("token_ids")) for s in samples]
        lengths = np.array([[len(part) for part in pair] for pair in ids], np.int32).reshape(-1, 2)
        target_lengths = np.array([each.num_drawn for each in completions], np.int32)
        masks = [] if all(each.mask is None for each in completions) else list(map(_drawn_mask, completions))
        observed = np.empty(0, np.float32)
        if observes:
            observed = 1 - np.concatenate([np.empty(0, bool), *map(_drawn_mask, completions)]).astype(np.float32)
            target_lengths, masks = lengths[:, 1].copy(), []
        thresholds = [each.drawn("thresholds") for each in completions if each.thresholds is not None]
        masked = np.array([mask_truncated and sample.truncated for sample in samples])
        no_ids, nothing = np.empty(0, np.int32), np.empty(0, np.float32)
        loss_mask = np.repeat(np.where(masked, 0, 1).astype(np.float32), target_lengths)
        loss_mask = loss_mask * (1 - observed) if observes else loss_mask
        logprobs = [each.array("logprobs") if observes else each.drawn("logprobs") for each in completions]
        rows = [
            (each.episode and each.episode.row_lengths) or [length]
            for each, length in zip(completions, lengths.sum(axis=1), strict=True)
        ]
        return Rollouts(
            token_ids=np.concatenate([no_ids, *chain.from_iterable(ids)]),
            prompt_lengths=np.ascontiguousarray(lengths[:, 0]),
            completion_lengths=np.ascontiguousarray(lengths[:, 1]),
            loss_mask=loss_mask,
            rollout_logprobs=np.concatenate([nothing, *logprobs]),
            advantages=_token_advantages(samples, target_lengths, observes),
            old_logprobs=nothing,
            ref_logprobs=nothing,
            thresholds=np.concatenate([nothing, *thresholds]),
            drawn=np.concatenate([np.empty(0, bool), *masks]),
            observed=observed,
            target_lengths=target_lengths,
            num_rows=np.array(list(map(len, rows)), np.int32),
            row_lengths=np.array(list(chain.from_iterable(rows)), np.int32),
            teachers=np.array([s.teacher for s in samples], np.int32),
            teacher_ids=np.array(list(chain.from_iterable(s.teacher_prompt or () for s in samples)), np.int32),
            teacher_lengths=np.array([len(s.teacher_prompt or ()) for s in samples], np.int32),
            routed_experts=_joined_experts([each.routed_experts for each in completions], lengths.sum(axis=1)),
        )

    def part(self, first, count, on_policy=False):
        """Sequences [first, first + count), sharing memory with these."""

        def tokens(lengths):
            begin = int(lengths[:first].sum())
            return slice(begin, begin + int(lengths[first : first + count].sum()))

        sequences, targets = slice(first, first + count), tokens(self.target_lengths)
        parts = {"token_ids": self.token_ids[tokens(self.lengths)], "drawn": self.drawn}
        if len(self.drawn):
            parts["drawn"] = self.drawn[tokens(self.completion_lengths)]
        parts["routed_experts"] = self.routed_experts
        if len(self.routed_experts):
            parts["routed_experts"] = self.routed_experts[tokens(self.lengths)]
        for name in ("prompt_lengths", "completion_lengths", "target_lengths", "num_rows", "teachers"):
            parts[name] = getattr(self, name)[sequences]
        parts["teacher_lengths"] = self.teacher_lengths[sequences]
        parts["teacher_ids"] = self.teacher_ids[tokens(self.teacher_lengths)]
        parts["row_lengths"] = self.row_lengths[tokens(self.num_rows)]
        for name in (
            "loss_mask",
            "advantages",
            "rollout_logprobs",
            "old_logprobs",
            "ref_logprobs",
            "thresholds",
            "observed",
        ):
            parts[name] = getattr(self, name)[targets]
        return Rollouts(**parts, on_policy=on_policy, is_stale=self.is_stale)

    def with_teacher_prompts(self):
        """These completions after the prompts that the teacher sees: Rollouts, each of one row."""
        prompts = np.split(self.teacher_ids, np.cumsum(self.teacher_lengths)[:-1])
        sequences = np.split(self.token_ids, np.cumsum(self.lengths)[:-1])
        own = zip(prompts, sequences, self.prompt_lengths, strict=True)
        joined = np.concatenate([part for prompt, ids, length in own for part in (prompt, ids[length:])])
        lengths = self.teacher_lengths + self.completion_lengths
        return replace(
            self, token_ids=joined, prompt_lengths=self.teacher_lengths, num_rows=np.ones_like(lengths),
            row_lengths=lengths, thresholds=self.thresholds[:0], routed_experts=self.routed_experts[:0],
        )  # fmt: skip

    def ordered(self, order):
        """The sequences `order` (indices), in this order: Rollouts."""
        return Rollouts.joined([self.part(i, 1, self.on_policy) for i in order])

    def parts(self, size, on_policy=False):
        """All sequences, `size` at a time: list of Rollouts."""
        return [self.part(first, size, on_policy) for first in range(0, self.num_sequences, size)]

    @staticmethod
    def joined(parts):
        """Several Rollouts, all on-policy or none, one after the other."""
        names = [name for name, value in vars(parts[0]).items() if isinstance(value, np.ndarray)]
        names.remove("routed_experts")
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        experts, lengths = [part.routed_experts for part in parts], [len(part.token_ids) for part in parts]
        arrays["routed_experts"] = _joined_experts(experts, lengths)
        if len(arrays["drawn"]):
            every = [part.drawn if len(part.drawn) else part.completion_lengths.sum() for part in parts]
            arrays["drawn"] = np.concatenate([each if np.ndim(each) else np.ones(each, bool) for each in every])
        is_stale = any(part.is_stale for part in parts)
        return Rollouts(**arrays, on_policy=parts[0].on_policy, is_stale=is_stale)

    def parts_of_tokens(self, limit, sharing=None):
        """All sequences in their order, as many at a time as have at most `limit` tokens, but at least one: list.

        sharing: a PrefixRule, to count the prompts of neighbours once, and to leave these together where they fit.
        """
        if sharing is None:
            ranges = ranges_of_tokens(self.lengths, limit)
        else:
            ranges = ranges_of_groups(self.lengths, limit, self.shared_lengths(sharing))
        return [self.part(first, end - first, self.on_policy) for first, end in ranges]

    def state(self):
        """The arrays that a checkpoint keeps: dict, the arguments of Rollouts."""
        return {name: value for name, value in vars(self).items() if name != "on_policy"}

    @staticmethod
    def restored(state):
        """The Rollouts of what `state` returned; checkpoints of before had one advantage a completion."""
        lengths, advantages = state["completion_lengths"], state["advantages"]
        # Completions with a drawn token each, beside others, have as many targets as there are completions.
        if len(advantages) != len(state["loss_mask"]):
            advantages = np.repeat(advantages, lengths)
        return Rollouts(**state | {"advantages": advantages})

    @property
    def num_sequences(self):
        """Completions: int."""
        return len(self.completion_lengths)

    @property
    def lengths(self):
        """Tokens of each prompt and completion, (B,) i32."""
        return self.prompt_lengths + self.completion_lengths

    def shared_lengths(self, sharing):
        """Tokens of each prompt that micro_batch computes for the sequence before it, (B,) i32, if both are in it.

        sharing: micro_batch's, not None.
        """
        shared = np.zeros_like(self.prompt_lengths)
        if (self.num_rows > 1).any() or len(self.drawn):
            return shared
        starts, limits = np.cumsum(self.lengths) - self.lengths, sharing.limits(self.prompt_lengths)
        bounds = zip(starts.tolist(), (starts + limits).tolist(), strict=True)
        firsts = [self.token_ids[start:end].tobytes() for start, end in bounds]
        is_shared = np.array([own == before for before, own in pairwise(firsts)], bool)
        shared[1:] = np.where(is_shared, limits[1:], 0)
        return shared

    @property
    def num_active(self):
        """Tokens whose loss mask is 1: int."""
        return int(self.loss_mask.sum(dtype=np.float64))

    @property
    def targets(self):
        """The places of the drawn tokens in token_ids, (T,) int64."""
        # A completion token's: its index among completion tokens, plus all prompts up to its own.
        prompt_tokens = np.repeat(np.cumsum(self.prompt_lengths), self.completion_lengths)
        places = prompt_tokens + np.arange(len(prompt_tokens))
        return places[self.drawn] if len(self.drawn) else places

    def micro_batch(self, grammar=None, sharing=None):
        """All sequences as a MicroBatch, with what the loss reads.

        grammar: the GrammarReplay of completions that were drawn with a grammar, whose allowed tokens the targets then
        have. sharing: a PrefixRule, for what sequences begin with once (MicroBatch.sharing_prefixes), but not where
        experts are replayed. Besides targets have loss_mask, advantages, rollout_logprobs, and old_logprobs and
        ref_logprobs where there are any. The sequences have completion_bounds (B + 1,) i32, which divide the targets
        into completions.
        """
        bounds = np.zeros(len(self.target_lengths) + 1, np.int32)
        np.cumsum(self.target_lengths, out=bounds[1:])
        thresholds = self.thresholds if len(self.thresholds) else None
        batch = MicroBatch.of(self.token_ids, self.row_lengths, self.targets, thresholds)
        names = ("loss_mask", "advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
        of_targets = {name: getattr(self, name) for name in names if len(getattr(self, name))}
        if grammar is not None:
            of_targets["allowed"] = grammar.allowed(self.token_ids[self.targets], self.target_lengths)
        others = {}
        if len(self.routed_experts):
            # A layer's are those of all tokens.
            others["routed_experts"] = np.ascontiguousarray(self.routed_experts.swapaxes(0, 1), np.int32)
        batch = batch.with_arrays(of_targets, {"completion_bounds": bounds}, others)
        return batch if others else batch.sharing_prefixes(sharing)

    def to_device(self):
        """All sequences on the device: DeviceBatch."""
        return self.micro_batch().to_device()
