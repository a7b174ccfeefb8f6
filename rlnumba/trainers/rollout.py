"""From prompts to a training batch: what the first five steps of a token's way hand to the last four.

A `Rollouts` is one generation batch on the host: B sequences (prompt + completion) one after another, and one value
for each of the T completion tokens. Token ids are those that went into the engine and came out of it: no text is
tokenised again. `device_batch` packs a slice of it for one forward and backward pass; only the rows that predict a
completion token reach the language-model head, so every per-token array there has T entries, not N.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from rlnumba import device
from rlnumba.model.transformer import Batch, pack


class PromptOrder:
    """The order in which an epoch visits the prompts: shuffled from (seed, epoch), or the file's."""

    def __init__(self, num_prompts, shuffle, seed, epoch=0, position=0):
        self.num_prompts, self.shuffle, self.seed = num_prompts, shuffle, seed
        self.epoch, self.position = epoch, position

    def take(self, count):
        """The next `count` prompt indices; a remainder of the epoch that is too short is dropped."""
        if self.position + count > self.num_prompts:
            self.epoch, self.position = self.epoch + 1, 0
        order = epoch_order(self.num_prompts, self.shuffle, self.seed, self.epoch)
        self.position += count
        return order[self.position - count : self.position]


def epoch_order(count, shuffle, seed, epoch):
    """(count,) int64: the rows of an epoch in the order in which they are visited."""
    return np.random.default_rng((seed, epoch)).permutation(count) if shuffle else np.arange(count)


def rollout_seed(seed, *where):
    """The engine's seed of one generation, drawn from the run's seed and the place (step, ...) it belongs to."""
    return int(np.random.SeedSequence((seed, *where)).generate_state(1)[0])


@dataclass
class Rollouts:
    """One generation batch on the host, in the order in which it is trained on.

    token_ids (sum of S,) i32, prompt and completion of each sequence; prompt_lengths, completion_lengths (B,) i32;
    loss_mask (T,) f32 of {0, 1}; rollout_logprobs (T,) f32, the sampler's; advantages (B,) f32; old_logprobs and
    ref_logprobs (T,) f32, or of length 0 where the loss does not need them; step: the optimizer step whose weights
    drew it.
    """

    token_ids: np.ndarray
    prompt_lengths: np.ndarray
    completion_lengths: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    step: int

    @staticmethod
    def build(prompt_ids, completion_ids, rollout_logprobs, advantages, truncated, step):
        """From one list a sequence. A truncated sequence (True in `truncated`) gets a loss mask of zeros."""
        lengths = np.array([len(ids) for ids in completion_ids], np.int32)
        rows = [ids for pair in zip(prompt_ids, completion_ids, strict=True) for ids in pair]
        empty = np.empty(0, np.float32)
        return Rollouts(
            token_ids=np.concatenate([np.asarray(row, np.int32) for row in rows]),
            prompt_lengths=np.array([len(ids) for ids in prompt_ids], np.int32),
            completion_lengths=lengths,
            loss_mask=np.repeat(1.0 - np.asarray(truncated, np.float32), lengths).astype(np.float32),
            rollout_logprobs=np.concatenate([np.asarray(row, np.float32) for row in rollout_logprobs]),
            advantages=np.asarray(advantages, np.float32),
            old_logprobs=empty,
            ref_logprobs=empty,
            step=step,
        )

    def part(self, first, count):
        """Sequences [first, first + count), sharing memory."""
        ends = np.cumsum(self.prompt_lengths + self.completion_lengths)
        completion_ends = np.cumsum(self.completion_lengths)
        rows = slice(first, first + count)

        def cut(values, ends):
            return values[ends[first - 1] if first else 0 : ends[min(first + count, len(ends)) - 1]]

        return replace(
            self,
            token_ids=cut(self.token_ids, ends),
            prompt_lengths=self.prompt_lengths[rows],
            completion_lengths=self.completion_lengths[rows],
            loss_mask=cut(self.loss_mask, completion_ends),
            rollout_logprobs=cut(self.rollout_logprobs, completion_ends),
            advantages=self.advantages[rows],
            old_logprobs=cut(self.old_logprobs, completion_ends),
            ref_logprobs=cut(self.ref_logprobs, completion_ends),
        )

    def state(self):
        """What a checkpoint keeps of them: Rollouts(**state) brings them back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass
class DeviceBatch:
    """A slice of `Rollouts` on the device: `packed` for the transformer, the rest for head and loss.

    rows (T,) i32: the packed positions that predict the completion tokens target_ids (T,) i32.
    completion_cu_seqlens (B+1,) i32 cuts every (T,) array into completions.
    """

    packed: Batch
    rows: object
    target_ids: object
    completion_cu_seqlens: object
    loss_mask: object
    rollout_logprobs: object
    old_logprobs: object
    ref_logprobs: object
    advantages: object
    num_sequences: int
    num_targets: int
    num_active: int
    step: int


def device_batch(rollouts):
    """`rollouts` (all of it) packed and copied to the device as one `DeviceBatch`."""
    lengths = rollouts.prompt_lengths + rollouts.completion_lengths
    ends = np.cumsum(lengths)
    starts = ends - lengths
    completion_cu_seqlens = np.concatenate([[0], np.cumsum(rollouts.completion_lengths)]).astype(np.int32)
    total = int(completion_cu_seqlens[-1])
    first_rows = starts + rollouts.prompt_lengths - 1 - completion_cu_seqlens[:-1]
    rows = (np.arange(total) + np.repeat(first_rows, rollouts.completion_lengths)).astype(np.int32)
    return DeviceBatch(
        packed=pack([rollouts.token_ids[a:b] for a, b in zip(starts, ends, strict=True)]),
        rows=device.asarray(rows),
        target_ids=device.asarray(rollouts.token_ids[rows + 1]),
        completion_cu_seqlens=device.asarray(completion_cu_seqlens),
        loss_mask=device.asarray(rollouts.loss_mask),
        rollout_logprobs=device.asarray(rollouts.rollout_logprobs),
        old_logprobs=device.asarray(rollouts.old_logprobs) if len(rollouts.old_logprobs) else None,
        ref_logprobs=device.asarray(rollouts.ref_logprobs) if len(rollouts.ref_logprobs) else None,
        advantages=device.asarray(rollouts.advantages),
        num_sequences=len(lengths),
        num_targets=total,
        num_active=int(rollouts.loss_mask.sum()),
        step=rollouts.step,
    )
