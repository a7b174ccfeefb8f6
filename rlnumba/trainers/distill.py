"""Distillation: the student learns a teacher's whole next-token distribution at each token of its own completions.

    generation       completions of the student from the engine, with train.seq_kd some of the teacher; no rewards are
                     needed
    optimizer step   teacher and student run forward on the same completions; the loss is the mean over all tokens of
                     the generalised Jensen-Shannon divergence of their predictions (kernels/logprob/divergence.py)

The loss reads no advantage and no old log-probs, so nothing is computed between generation and step. A teacher that a
server has lists its likeliest tokens for the completions of a step, before it begins (served_teacher.py). The loop,
the geometry of generations and steps, and [async] are GRPO's. Without teacher.model the teacher is the run's own model
as it was before training, or its moving average (train.sync_ref_model), which sees teacher.prompt_column in place of
the prompt: a demonstration (SDFT) or feedback (SDPO).

Sources: Agarwal et al. 2024 (GKD, arXiv 2306.13649); TRL 1.16's DistillationTrainer, whose names and defaults these
are; Shenfeld et al. 2026 (SDFT, arXiv 2601.19897); Huebotter et al. 2026 (SDPO, arXiv 2601.20802).
"""

from functools import partial

import numpy as np

from rlnumba.config.distill import DistillRun
from rlnumba.errors import UserError
from rlnumba.kernels.logprob.divergence import DivergenceForm, HeadInput
from rlnumba.kernels.logprob.listed import ListedLogits
from rlnumba.model.heads import DivergenceHead
from rlnumba.model.transformer import Transformer
from rlnumba.parallel.gradient_fold import gather_layers
from rlnumba.runs.loading import load_policy
from rlnumba.runs.micro_batch import TargetBatch
from rlnumba.runs.planning.planned import Models
from rlnumba.runs.policy import LateMetrics
from rlnumba.runs.prompt_loop import TrainerOnPrompts
from rlnumba.runs.prompt_run import generation_params
from rlnumba.sampling.samples import derived_seed
from rlnumba.trainers.grpo import completions_at_once, in_order_of_step
from rlnumba.trainers.rollout import Rollouts
from rlnumba.trainers.teacher import (
    TeacherEngines,
    assign_teachers,
    load_teachers,
    rehearsed_teachers,
    set_teacher_prompts,
    teacher_configs,
)


def run_distill(run, resume=False, reward_funcs=(), communicator=None):
    """Train a DistillRun, and return its TrainerState; the arguments are TrainerOnPrompts.train's."""
    return TRAINER.train(run, resume, reward_funcs, communicator)


def load(run, folder):
    """(Policy, Tokenizer) of a run, with its teachers, without which the policy's reference is one."""
    policy, tokenizer = load_policy(run, folder, not run.teacher.folders, run.train.temperature)
    load_teachers(run, policy, folder.communicator)
    if run.teacher_draws:
        policy.teacher_engines = TeacherEngines(run.engine, policy, tokenizer)
    return policy, tokenizer


def generate(policy, generations, trainer_state, index, on_policy, clock):
    """One generation: see TrainerOnPrompts."""
    run, order = generations.run, generations.order
    chosen, generation = generations.take(trainer_state, clock)
    order.record(chosen, generation.groups)
    samples = generation.samples
    assign_teachers(run.teacher, samples)
    set_teacher_prompts(run, samples, generations.llm.tokenizer)
    step = trainer_state.global_step
    if policy.teacher_engines is not None:
        params = generation_params(run.train, derived_seed(run.seed, step, index, 4))
        policy.teacher_engines.draw(generation.groups, params, step, generations.llm.max_model_len)
    # In another order, so that groups spread over the micro-batches.
    shuffled = np.random.default_rng(derived_seed(run.seed, step, index)).permutation(len(samples))
    rollouts = Rollouts.of([samples[i] for i in shuffled], run.train.mask_truncated_completions)
    return rollouts, generation, order.shares() | generations.metrics


def teacher_of(policy, part):
    """The Transformer or ServedTeacher that Rollouts of one teacher learn from."""
    return policy.reference if policy.teachers is None else policy.teachers.models[part.teachers[0]]


def gathered_teachers(policy, of_round):
    """The teachers whose layers ranks gather together in a round, of [(index, Rollouts)] that they compute at the same
    time: a tuple of Transformers, in the order in which each rank gathers them; empty where layers are not in parts."""
    teachers = [teacher_of(policy, part) for _, part in of_round] if policy.shards_layers else []
    return tuple(dict.fromkeys(each for each in teachers if isinstance(each, Transformer)))


def parts_of_one_teacher(part):
    """Rollouts cut by their teachers, each in the order of its sequences: list of Rollouts."""
    found = np.unique(part.teachers)
    if len(found) < 2:
        return [part]
    return [part.ordered(np.flatnonzero(part.teachers == index).tolist()) for index in found]


def listings_of_step(policy, parts):
    """The likeliest tokens that served teachers list for those of a step's micro-batches, Rollouts of one teacher, that
    this rank computes: {index: {name: (T, k) array} of the targets}."""
    of_teachers = {}
    for index, part in policy.own(list(enumerate(parts))):
        teacher = teacher_of(policy, part)
        if not isinstance(teacher, Transformer):
            of_teachers.setdefault(id(teacher), (teacher, []))[1].append((index, part))
    found, vocabulary = {}, policy.model.config.vocab_size
    for teacher, chosen in of_teachers.values():
        shown = [part.with_teacher_prompts() if len(part.teacher_ids) else part for _, part in chosen]
        listed = iter(teacher.listings([one for part in shown for one in part.parts(1)], policy.train.loss_top_k))
        for index, part in chosen:
            tokens = np.concatenate([next(listed) for _ in range(part.num_sequences)])
            try:
                places, values = ListedLogits.of(tokens["token_id"], tokens["logprob"], vocabulary)
            except ValueError as error:
                raise UserError(f"teacher {teacher.url}: {error}") from error
            found[index] = {"listed_places": places, "listed_logits": values}
    return found


# Results of a micro-batch, on the device.
OUTPUTS = {"divergence": (None, np.float32)}


def train_step(policy, micro_batches, learning_rate):
    """One optimizer step on a list of Rollouts: LateMetrics. Writes gradients, weights and optimizer state."""
    micro_batches, _ = in_order_of_step(policy, micro_batches)
    micro_batches = [piece for part in micro_batches for piece in parts_of_one_teacher(part)]
    num_tokens = max(sum(part.num_active for part in micro_batches), 1)
    readings, listings = [], listings_of_step(policy, micro_batches)
    policy.zero_grad(learning_rate)
    numbered = list(enumerate(micro_batches))
    for index, part in policy.each_micro_batch(numbered, models_before=partial(gathered_teachers, policy)):
        teacher, gathered = teacher_of(policy, part), gathered_teachers(policy, policy.round_of(numbered, index))
        dloss = part.loss_mask / np.float32(num_tokens)
        batch = part.micro_batch().with_arrays(targets={"dloss": dloss} | listings.get(index, {}))
        if index in listings:
            readings.append(policy.run_training(divergence_step, batch, OUTPUTS, gathered))
        elif len(part.teacher_ids):
            own = part.with_teacher_prompts()
            seen = TargetBatch.of(own.token_ids, own.row_lengths, own.targets)
            readings.append(policy.run_training(divergence_step, batch, OUTPUTS, gathered, teacher, seen, pads=False))
        else:
            readings.append(policy.run_training(divergence_step, batch, OUTPUTS, gathered, teacher))
    info = policy.step(learning_rate)

    def read():
        results = policy.of_all_micro_batches([reading() for reading in readings])
        parts = zip(micro_batches, results, strict=True)
        total = sum(np.dot(part.loss_mask.astype(np.float64), found["divergence"]) for part, found in parts)
        metrics = {"loss": float(total) / num_tokens, **info}
        policy.router.added(metrics)
        return metrics

    return LateMetrics(read)


def divergence_step(policy, batch, results, gathered, teacher=None, seen=None):
    """Forward, loss and backward of a DeviceBatch. gathered: gathered_teachers of its round. teacher: None where its
    likeliest tokens are among the arrays; seen: the TargetBatch of the teacher, where it is another."""
    at = gathered.index(teacher) if teacher in gathered else len(gathered)
    for model in gathered[:at]:
        gather_layers(model.weights)
    if teacher is None:
        predictions = ListedLogits(batch.arrays["listed_places"], batch.arrays["listed_logits"])
    else:
        hidden = policy.hidden_rows(teacher, batch.targets if seen is None else seen)
        predictions = HeadInput(hidden, teacher.lm_head)
    for model in gathered[at + 1 :]:
        gather_layers(model.weights)
    head = DivergenceHead(predictions, DivergenceForm(policy.temperature, *policy.train.divergence_form))
    policy.forward_backward(batch.targets, batch.arrays["dloss"], results["divergence"], head=head)


def models_of(run):
    """The Models of a run."""
    return Models(has_reference=not run.teacher.folders, teachers=teacher_configs(run), compares_heads=True)


def rehearse(run, policy, critic, rollouts, every_form):
    """See TrainerOnPrompts. A teacher's own prompts are taken to have twice the tokens."""
    if run.teacher.prompt_column is not None:
        rollouts.teacher_lengths = 2 * rollouts.prompt_lengths
        rollouts.teacher_ids = np.zeros(int(rollouts.teacher_lengths.sum()), np.int32)
    if run.teacher.served:
        policy.teachers = rehearsed_teachers(run.teacher, policy.teachers.models if run.teacher.loaded else [])
    for index in range(max(len(run.teacher.folders), 1)):
        rollouts.teachers = np.full(rollouts.num_sequences, index, np.int32)
        yield partial(train_step, policy, rollouts.parts(rollouts.num_sequences), 0.0)


TRAINER = TrainerOnPrompts(
    DistillRun, load, generate, train_step, models_of, completions_at_once, rehearse, has_graphs=True
)
