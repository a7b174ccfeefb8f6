"""On-policy distillation: teachers score the tokens that the policy has drawn, and each score is a token's advantage.

    g_t = log teacher(token t) - log policy(token t)     the policy before the update
    A_t = adv_tau A_t + teacher_tau g_t

g is minus the one-sample estimate k1 of the reverse KL, KL(policy | teacher), at token t: its mean over what the policy
draws has this KL as its value, and the policy gradient with advantage g is the KL's. Each token has its own advantage,
where a reward has one for a whole completion. Both log-probs are at train.temperature. RLOO, to which a completion is
one action, has the sum of g over it in its reward (rloo.py).

A teacher is loaded beside the policy, or a server has it, on GPUs of its own, and scores for the run
(served_teacher.py).

Sources: Lu et al. 2025 (Thinking Machines, On-Policy Distillation); Agarwal et al. 2024 (GKD, arXiv 2306.13649);
prime-rl, whose names are teacher_tau and adv_tau.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rlnumba.config.sections.teacher import TeacherConfig
from rlnumba.data.files import check_prompt
from rlnumba.data.prompts import as_prompt, encode_prompt
from rlnumba.engine.llm import LLM
from rlnumba.errors import ConfigError, UserError, shown
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.lora import is_adapter
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runs.loading import weights_of
from rlnumba.sampling.samples import TEACHER, completion_of_another, distinct_params
from rlnumba.trainers.scoring import forward_parts, host_logprobs
from rlnumba.trainers.served_teacher import ServedTeacher, UnaskedTeacher


class Teachers(NamedTuple):
    """The section [teacher] of a run, and a Transformer or ServedTeacher of each of its folders, in their order."""

    config: TeacherConfig
    models: list


def check_teachers(run):
    """Raise UserError for a teacher whose tokenizer or vocabulary is not that of the run's model, and for a divergence
    over more tokens than it has; ConfigError for a teacher that draws where its engine would have no memory. Reads no
    weights."""
    if not (run.teacher.folders or run.compares_heads):
        return
    if run.teacher_draws and run.generates_beside and not run.deploy.num_infer_gpus:
        raise ConfigError(
            "train.seq_kd: with [async] the model's own engine keeps its memory, and the teacher's has none: set "
            "deploy.num_infer_gpus"
        )
    student = find_model(run.model, weights=False)
    wanted = read_config(student).vocab_size
    if run.compares_heads and run.train.loss_top_k > wanted:
        raise ConfigError(f"train.loss_top_k ({run.train.loss_top_k}) is more than the {wanted} tokens of {run.model}")
    for name, path in run.teacher.folders.items():
        key = _key_of(name)
        folder = find_model(path, weights=False)
        if is_adapter(folder):
            raise UserError(f"{key}: {path} is an adapter folder, not a model's; merge it (rlnumba merge)")
        config = read_config(folder)
        if "lm" not in config.heads:
            raise UserError(f"{key}: {path} is {config.architecture}, which has no language-model head")
        problem = _other_token(_vocabulary(folder), _vocabulary(student))
        if problem is not None:
            raise UserError(f"{key}: {path} has another tokenizer than {run.model}: {problem}")
        if config.vocab_size < wanted:
            raise UserError(f"{key}: {path} has {config.vocab_size} tokens, and {run.model} has {wanted}")


def _key_of(name):
    return "teacher.model" if name is None else f"teacher.models.{name}"


def _vocabulary(folder):
    """{token: id} of the tokenizer of a folder."""
    return Tokenizer.from_folder(folder).backend.get_vocab(with_added_tokens=True)


def _other_token(found, wanted):
    """A token that two vocabularies {token: id} do not have alike, and how: str, or None."""
    for token in sorted({*found, *wanted}, key=lambda each: wanted.get(each, found.get(each))):
        own, other = (ids.get(token, "no id") for ids in (found, wanted))
        if own != other:
            return f"{shown(token)} is {own} there, and {other} here"
    return None


def teacher_configs(run):
    """The ModelConfig of each teacher that a run loads: tuple."""
    return tuple(read_config(find_model(path, weights=False)) for path in run.teacher.loaded.values())


def load_teachers(run, policy, communicator):
    """Load the teachers of a run, frozen and in the policy's dtype, into policy.teachers, or find their servers."""
    config = run.teacher
    if config.folders:
        served = {name: ServedTeacher(url, config.timeout_s) for name, url in config.served.items()}
        top_k = run.train.loss_top_k if run.compares_heads else 0
        for teacher in served.values():
            teacher.start(policy.model.config.vocab_size, top_k)
        kind, paths = weights_of(run, communicator, is_trained=False), config.loaded
        paths = {name: find_model(path) for name, path in paths.items()}
        loaded = {name: load_model(path, policy.model.dtype.name, make_weights=kind) for name, path in paths.items()}
        policy.teachers = Teachers(config, [(served | loaded)[name] for name in config.folders])


def rehearsed_teachers(config, models):
    """The Teachers of a step that is planned. models: those that are loaded, list of Transformer."""
    loaded = iter(models)
    return Teachers(config, [UnaskedTeacher() if n in config.served else next(loaded) for n in config.folders])


def teacher_index(config, prompt):
    """The index of a Prompt's teacher among those of a TeacherConfig: int. Raises UserError for a row without one."""
    if not config.models:
        return 0
    names, name = list(config.models), prompt.columns.get(config.column)
    if name not in names:
        raise UserError(
            f"{prompt.where}: the column {config.column!r} must name one of teacher.models "
            f"({', '.join(names)}), got {shown(name)}"
        )
    return names.index(name)


def assign_teachers(config, samples):
    """Write to each of the Samples the index of its teacher."""
    for sample in samples:
        sample.teacher = teacher_index(config, sample.prompt)


def teacher_prompt(run, prompt, tokenizer):
    """The token ids that a run's teacher sees instead of a Prompt: list, or None where it sees the same.

    Raises UserError for a row without them, or with so many that no completion is left.
    """
    column = run.teacher.prompt_column
    if column is None:
        return None
    value = prompt.columns.get(column)
    if value is None:
        raise UserError(f"{prompt.where}: the row has no {column!r}, which teacher.prompt_column names")
    check_prompt(value, f"{prompt.where}: {column!r}")
    try:
        return list(encode_prompt(tokenizer, as_prompt(value, run.data), **run.data.chat_template_kwargs))
    except UserError as error:
        raise UserError(f"{prompt.where}: {column!r}: {error}") from error


def longest_of_teachers(config):
    """The most tokens of a sequence of each of a TeacherConfig's folders, in their order: list."""
    positions = {n: read_config(find_model(path, weights=False)).num_positions for n, path in config.folders.items()}
    # A server is asked for a token more.
    return [count - (name in config.served) for name, count in positions.items()]


def check_rows(run, prompts, tokenizer, limit):
    """Raise UserError for one of a run's Prompts without a teacher, without what it sees, or with more tokens than the
    teacher has positions. limit: the longest sequence's tokens."""
    most, names = longest_of_teachers(run.teacher), list(run.teacher.folders)
    wanted = f"train.max_completion_length ({run.train.max_completion_length})"
    for prompt in prompts:
        index, own = teacher_index(run.teacher, prompt), len(prompt.prompt_token_ids)
        ids = teacher_prompt(run, prompt, tokenizer)
        if ids is not None and len(ids) + run.train.max_completion_length > limit:
            raise UserError(
                f"{prompt.where}: {run.teacher.prompt_column!r} has {len(ids)} tokens, which with {wanted} are more "
                f"than the model's {limit}"
            )
        longest = min(own + run.train.max_completion_length, limit) - own + (own if ids is None else len(ids))
        if most and longest > most[index]:
            raise UserError(
                f"{prompt.where}: prompt and completion may have {longest} tokens, and {_key_of(names[index])} takes "
                f"{most[index]}: {wanted} or engine.max_model_len must be lower, or data.max_prompt_length"
            )


def set_teacher_prompts(run, samples, tokenizer):
    """Write to each of the Samples what the teacher sees instead of its prompt."""
    for sample in samples:
        sample.teacher_prompt = teacher_prompt(run, sample.prompt, tokenizer)


class TeacherEngines:
    """Engines of a run's teachers, or of the policy's reference where it has none, on each rank: they draw completions.

    An engine is made for the first completions that its teacher draws, and lends its memory after each generation. Of a
    teacher in parts every rank gathers all layers for that time (parallel/gathered_weights.py).
    """

    def __init__(self, config, policy, tokenizer):
        # Copies in 8 bits and a number of blocks are the model's own.
        self.config = replace(config, quantization=None, num_gpu_blocks_override=None)
        self.policy, self.tokenizer, self.llms = policy, tokenizer, {}

    def draw(self, groups, params, version, max_model_len):
        """Give the Samples of those groups whose completions teachers draw these; every rank calls this together.

        params: SamplingParams of a group. version: of the weights, which a teacher that moves has. max_model_len: the
        longest sequence of the policy. Which rank draws a completion is no part of it.
        """
        groups = [group for group in groups if group[0].completion.finish_reason == TEACHER]
        prompts = [group[0].teacher_prompt or group[0].prompt_token_ids for group in groups]
        lengths = [min(params.max_tokens, max_model_len - len(group[0].prompt_token_ids)) for group in groups]
        params = [
            replace(own, max_tokens=length)
            for own, length in zip(distinct_params(prompts, params), lengths, strict=True)
        ]
        communicator, drawn = self.policy.communicator, {}
        rank, size = (0, 1) if communicator is None else (communicator.rank, communicator.world_size)
        own = range(rank, len(groups), size)
        # Layers in parts are gathered by all ranks, those without a completion of the teacher, too.
        of_teachers = range(len(groups)) if self.policy.shards_layers else own
        for teacher in sorted({groups[i][0].teacher for i in of_teachers}):
            chosen = [i for i in own if groups[i][0].teacher == teacher]
            outputs = self._generate(teacher, [prompts[i] for i in chosen], [params[i] for i in chosen], version)
            drawn |= dict(zip(chosen, outputs, strict=True))
        for of_rank in [drawn] if size == 1 else communicator.objects(drawn):
            for i, completions in of_rank.items():
                for sample, (token_ids, text) in zip(groups[i], completions, strict=True):
                    sample.completion = completion_of_another(token_ids, TEACHER, text, version)

    def _generate(self, teacher, prompts, params, version):
        """[[(token ids, text) of each completion]] of prompts, by the teacher of this index."""
        if teacher not in self.llms:
            teachers = self.policy.teachers
            model = self.policy.reference if teachers is None else teachers.models[teacher]
            config = self.config
            if config.max_model_len is not None:
                config = replace(config, max_model_len=min(config.max_model_len, model.config.num_positions))
            self.llms[teacher] = LLM(model, self.tokenizer, config)
        llm, own_vocab = self.llms[teacher], self.policy.model.config.vocab_size
        if llm.model.config.vocab_size > own_vocab:
            # Rows of its head beyond the tokens that there are.
            params = [replace(each, allowed_token_ids=tuple(range(own_vocab))) for each in params]
        # What moves the reference may be under way on the device.
        llm.update_weights(version)
        llm.wake()
        outputs = llm.generate(prompts, params)
        llm.sleep()
        return [[(each.array("token_ids"), each.text) for each in output.completions] for output in outputs]


def teacher_logprobs(policy, rollouts):
    """(T,) float32 on the host: of each completion token, the log-prob by the teacher of its sequence."""
    models = policy.teachers.models
    if len(models) == 1:
        return logprobs_by(models[0], policy, rollouts)
    found = np.empty(len(rollouts.loss_mask), np.float32)
    owners = np.repeat(rollouts.teachers, rollouts.target_lengths)
    for index, model in enumerate(models):
        sequences = np.flatnonzero(rollouts.teachers == index).tolist()
        if sequences:
            found[owners == index] = logprobs_by(model, policy, rollouts.ordered(sequences))
    return found


def logprobs_by(teacher, policy, rollouts):
    """(T,) float32 on the host: of each completion token of Rollouts, the log-prob by one teacher."""
    if not isinstance(teacher, ServedTeacher):
        return host_logprobs(policy, teacher, forward_parts(rollouts, policy.train))
    parts = rollouts.parts(1)
    return np.concatenate(policy.of_all_micro_batches(teacher.logprobs(policy.own(parts)), len(parts)))


def teacher_gains(policy, rollouts):
    """g of each completion token, (T,) float32; writes minus its mean over the trained ones, teacher_kl.

    The log-probs of the policy are old_logprobs where these are written, else the sampler's.
    """
    own = rollouts.old_logprobs if len(rollouts.old_logprobs) else rollouts.rollout_logprobs
    gain = teacher_logprobs(policy, rollouts) - own
    total = np.dot(rollouts.loss_mask.astype(np.float64), gain)
    rollouts.teacher_kl = -float(total) / max(rollouts.num_active, 1)
    return gain


def gains_of_completions(policy, rollouts):
    """The sum of g over the trained tokens of each completion: (B,) float64, 0 without teachers."""
    if policy.teachers is None:
        return np.zeros(rollouts.num_sequences)
    owner = np.repeat(np.arange(rollouts.num_sequences), rollouts.target_lengths)
    gain = rollouts.loss_mask.astype(np.float64) * teacher_gains(policy, rollouts)
    return np.bincount(owner, gain, minlength=rollouts.num_sequences)


def add_teacher_advantages(policy, rollouts):
    """Write the advantages of Rollouts with their teachers' term, and teacher_kl."""
    config, gain = policy.teachers.config, teacher_gains(policy, rollouts)
    advantages = np.float32(config.teacher_tau) * gain
    if config.adv_tau:
        advantages += np.float32(config.adv_tau) * rollouts.advantages
    rollouts.advantages = advantages
