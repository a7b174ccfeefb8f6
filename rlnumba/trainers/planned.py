"""A run's largest optimizer steps, taken without memory by its plan (plan.py) and by its kernel list (kernel_list.py).

Both make the policy of the run, and let the trainer's own code take the steps of a Step on arrays without memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlnumba.engine.core import longest_sequence
from rlnumba.errors import UserError
from rlnumba.model.config import LM_HEAD, ModelConfig
from rlnumba.trainers import rollout


class Models(NamedTuple):
    """Heads of the policy's model, whether it has a reference, and the config of a critic's own model, or None."""

    heads: tuple = LM_HEAD
    has_reference: bool = False
    critic: ModelConfig | None = None


class Step(NamedTuple):
    """The largest micro-batch of a run: each of calls(policy, critic) is a function that takes an optimizer step on it,
    or what goes before one.

    tokens: of the micro-batch. sequences: the most of any micro-batch. models: of the run. prompts: lengths of the
    longest prompts of one generation, or []. rehearse(policy, critic, rollouts, every_form): such functions for other
    Rollouts; None over rows.
    """

    calls: Callable
    tokens: int
    sequences: int
    models: Models = Models()
    prompts: tuple | list = ()
    rehearse: Callable | None = None


def longest_completions(planner, run):
    """(lengths of the longest prompts of a generation, tokens of the longest prompt and of the longest sequence)."""
    train = run.train
    lengths, _ = planner.prompts(run.data.max_prompt_length)
    prompts = sorted(lengths, reverse=True)[: train.prompts_per_rollout]
    if not prompts:
        raise UserError(f"{run.data.train}: no prompt is left")
    limit = longest_sequence(planner.config, run.engine)
    length = min(prompts[0] + train.max_completion_length, limit)
    return prompts, min(prompts[0], length - 1), length


def invented_rollouts(train, prompt_lengths, completion_length, rows):
    """Rollouts of so many rows: completions of one length, of prompts of these lengths in turn."""
    prompts = np.resize(np.array(prompt_lengths, np.int32), rows)
    completions = np.full(rows, completion_length, np.int32)
    tokens, none = rows * completion_length, np.empty(0, np.float32)
    zeros = np.zeros(tokens, np.float32)
    return rollout.Rollouts(
        token_ids=np.zeros(int(prompts.sum()) + tokens, np.int32),
        prompt_lengths=prompts,
        completion_lengths=completions,
        loss_mask=zeros + 1,
        rollout_logprobs=zeros - 1,
        advantages=np.ones(rows, np.float32),
        old_logprobs=none,
        ref_logprobs=none,
        thresholds=zeros if train.sampling_mask_replay else none,
    )
