"""A run's largest optimizer steps, taken without memory by its plan (plan.py) and by its kernel list (kernel_list.py).

Both make the policy of the run, and let the trainer's own code take the steps of a Step on arrays without memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from rlnumba.engine.core import longest_sequence
from rlnumba.errors import UserError
from rlnumba.model.config import LM_HEAD, ModelConfig
from rlnumba.model.lora import Adapter, lora_of_run
from rlnumba.model.transformer import Transformer
from rlnumba.runs.loading import weights_of, weights_of_critic
from rlnumba.runs.policy import Policy
from rlnumba.runtime import signals
from rlnumba.trainers import rollout
from rlnumba.trainers.teacher import Teachers


class Models(NamedTuple):
    """Heads of the policy's model, whether it has a reference, the config of a critic's own model, or None, those of
    teachers, and whether a teacher's head is compared with the policy's."""

    heads: tuple = LM_HEAD
    has_reference: bool = False
    critic: ModelConfig | None = None
    teachers: tuple = ()
    compares_heads: bool = False


class Step(NamedTuple):
    """The largest micro-batch of a run: each of calls(policy, critic) is a function that takes an optimizer step on it,
    or what goes before one.

    tokens: the micro-batch's, where all sequences have their own rows. sequences: the most of any micro-batch. models:
    the run's. prompts: lengths of the longest prompts of one generation, or []. fewest: tokens of the second smallest
    micro-batch, or fewer. rehearse(policy, critic, rollouts, every_form): such functions for other Rollouts; None over
    rows.
    """

    calls: Callable
    tokens: int
    sequences: int
    models: Models = Models()
    prompts: tuple | list = ()
    fewest: int = 0
    rehearse: Callable | None = None


def longest_completions(planner, run):
    """(lengths of the longest prompts of a generation, tokens of the longest prompt and of the longest sequence)."""
    train = run.train
    lengths, _ = planner.prompts(run.data.max_prompt_length)
    prompts = sorted(lengths, reverse=True)[: train.generation.num_prompts]
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
        advantages=zeros + 1,
        old_logprobs=none,
        ref_logprobs=none,
        thresholds=zeros if train.generation.replays_mask else none,
    )


def lengths_with_most_rows(lengths, train, limit, rows, sharing):
    """The lengths of the prompts of `rows` completions that have the most rows in a micro-batch: (rows,), those of a
    group one after the other. They need not be the longest.

    What a group shares ends at a multiple of the rule's tokens, and what is left of the prompt each completion has for
    itself. lengths: those of all prompts; limit: tokens of the longest sequence; sharing: PrefixRule.
    """
    lengths, size = np.minimum(np.sort(lengths)[::-1], limit - 1), train.generation.num_completions_each
    completions = np.minimum(train.max_completion_length, limit - lengths)
    of_groups = size * (lengths + completions) - (size - 1) * sharing.limits(lengths)
    most = np.argsort(-of_groups, kind="stable")[: -(-rows // size)]
    return np.resize(np.repeat(lengths[most], size), rows)


class EveryToken:
    """A GrammarReplay in which all tokens are allowed."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def allowed(self, token_ids, lengths):
        return np.full((len(token_ids), -(-self.vocab_size // 32)), -1, np.int32)


class BatchSizes(NamedTuple):
    """Numbers that the operators' own arrays follow from: a micro-batch's rows, those that sequences share once, its
    sequences, those that are prefixes of others included, rows of logits, and those whose gradient is computed with
    their log-probs; padding counts. is_filtered: whether some logits count as -inf."""

    rows: int = 0
    sequences: int = 0
    logits: int = 0
    at_once: int = 0
    is_filtered: bool = False

    def most(self, other):
        """The larger of each number: BatchSizes."""
        return BatchSizes(*map(max, self, other))


class MeasuredPolicy(Policy):
    """A Policy that keeps the largest BatchSizes of what its models have computed: `largest`."""

    largest = BatchSizes()

    def _hidden(self, model, batch, tape=None):
        logits = 0 if batch.target_ids is None else len(batch.rows)
        is_filtered = batch.thresholds is not None or batch.allowed is not None
        sizes = BatchSizes(len(batch.input_ids), len(batch.cu_seqlens) - 1, logits, is_filtered=is_filtered)
        self.largest = self.largest.most(sizes)
        return super()._hidden(model, batch, tape)

    def forward_backward(self, batch, derivative, *outputs, head=None):
        if head is None:
            self.largest = self.largest.most(BatchSizes(at_once=len(batch.rows)))
        super().forward_backward(batch, derivative, *outputs, head=head)


class Taken(NamedTuple):
    """Findings of take_step. trained: how many parameters this rank updates, of the policy and of a critic, a list.
    checkpoint: the bytes of these, of their state, and of a reference that moves, which are copied to the host; final:
    the bytes of what is trained alone; model: those of the policy with all its heads. num_parts: by what these
    three are multiplied for all ranks, of a small model less than their number. folds_layers: Policy's. shares: whether
    micro-batches may share prefixes. largest: BatchSizes. graph_tokens: the most of a micro-batch that may become a
    graph.
    """

    trained: list
    checkpoint: int
    final: int
    model: int
    num_parts: float
    folds_layers: bool
    shares: bool
    largest: BatchSizes
    graph_tokens: int


class _EndOfStep(Exception):
    """Ends a train_step before the weights are updated and the metrics are computed, of which there is nothing."""


def _end_of_step(learning_rate):
    raise _EndOfStep


def take_step(config, dtype, run, step, communicator=None):
    """Make the policy of a run, and a critic, and take the Step: Taken.

    The arguments are make_policies'. To be called within shapes_only.
    """
    policy, critic = make_policies(config, dtype, run, step, communicator)
    policy.step = _end_of_step
    if communicator is not None:
        # The step has one micro-batch, which is that of rank 0.
        communicator.rank = 0
    with signals.held():
        for call in step.calls(policy, critic):
            with suppress(_EndOfStep):
                call()
    policies = [policy] if critic is None else [policy, critic]
    optimizers = [each.optimizer for each in policies]
    nbytes = sum(array.nbytes for each in optimizers for array in (each.weights.flat, *each.state.values()))
    trained = [each.weights.flat.shape[0] for each in optimizers]
    shares = policy.prefix_sharing(policy.model, critic and critic.model) is not None
    largest = functools.reduce(BatchSizes.most, (each.largest for each in policies))
    # PPO writes its critic, too; one on the policy's trunk is the trunk once more.
    final = sum(each.weights.flat.nbytes for each in optimizers) * len(policy.model.config.heads)
    if policy.reference is not None and run.train.reference_move is not None:
        weights = policy.reference.weights
        nbytes += weights.size * weights.flat.dtype.itemsize // run.num_ranks
    model = policy.optimizer.weights.flat.nbytes
    num_parts = sum(each.model.trained.size for each in policies) / max(sum(trained), 1)
    return Taken(
        trained, nbytes, final, model, num_parts, policy.folds_layers, shares, largest, policy.graphs.max_tokens
    )


def make_policies(config, dtype, run, step, communicator=None):
    """(Policy, the critic's Policy or None) of a run, with weights that nothing was read into, for a Step.

    run: has train, lora and deploy. communicator: Policy's.
    """
    config = dataclasses.replace(config, heads=step.models.heads)
    model = Transformer(config, weights_of(run, communicator)(config, dtype))
    model.adapter = adapter_of(run, config, dtype, "adapter")
    reference = None
    if step.models.has_reference:
        # With an adapter, the reference is the model without it.
        reference = model.without_adapter()
        if run.lora is None:
            kind = weights_of(run, communicator, is_trained=run.train.reference_move is not None)
            reference = Transformer(config, kind(config, dtype, region="reference"))
    policy, critic = MeasuredPolicy(model, run.train, reference, communicator=communicator), None
    if step.models.teachers:
        kind = weights_of(run, communicator, is_trained=False)
        models = [Transformer(each, kind(each, dtype, region="teacher")) for each in step.models.teachers]
        policy.teachers = Teachers(run.teacher, models)
    policy.rollout_is_quantized = run.rollout_is_quantized
    if run.train.structured_outputs:
        policy.grammar = EveryToken(config.vocab_size)
    if step.models.critic is not None:
        kind = weights_of_critic(run, communicator)
        model = Transformer(step.models.critic, kind(step.models.critic, dtype))
        critic = MeasuredPolicy(model, run.train, communicator=communicator)
        critic.arena = policy.arena
    return policy, critic


def adapter_of(run, config, dtype, region):
    """The Adapter of a run with [lora], else None."""
    if run.lora is None:
        return None
    return Adapter(config, lora_of_run(run.lora, config), dtype, region=region)
