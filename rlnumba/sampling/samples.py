"""Samples: completions with their rewards, in the groups of their prompts.

generate       prompts -> engine -> completions -> rewards: a Generation, groups of `Sample`
submit_group   one group's rewards begin to be computed
as_generation  completions and Scores -> Generation
"""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rlnumba.data import Prompt
from rlnumba.data.values import as_json
from rlnumba.engine.sequence import Completion
from rlnumba.environments.transcript import ITERATIONS, OVERFLOW, Transcript
from rlnumba.rewards.calling import EpisodeParts


def derived_seed(seed, *counters):
    """A seed from the run's seed and counters (step, micro-step, ...): int in [0, 2^32)."""
    # With their number, because SeedSequence takes (1, 0) for (1,).
    return int(np.random.SeedSequence((len(counters), seed, *counters)).generate_state(1)[0])


@dataclass
class Sample:
    """One completion with its rewards.

    values (K,) float64: of each reward function, NaN for None; reward: their weighted sum, NaN if all are None; extra:
    columns that rewards logged; advantage: 0 unless set_advantages writes it. pad_token_id: the tokenizer's, which ends
    a completion as EOS does, as in TRL. teacher: index of the run's teacher of this prompt; teacher_prompt: token ids
    that it sees instead, or None. baseline: the Sample of the greedy completion that its reward is compared with, or
    None. steps: the StepAdvantages of an episode's turns, which are added to its advantage, or None.
    """

    prompt: Prompt
    completion: Completion
    values: np.ndarray
    reward: float
    extra: dict
    advantage: float = 0.0
    pad_token_id: int | None = None
    teacher: int = 0
    teacher_prompt: list[int] | None = None
    baseline: "Sample | None" = None
    steps: object = None

    @property
    def prompt_token_ids(self):
        """The prompt's, or the first context of an episode."""
        episode = self.completion.episode
        return self.prompt.prompt_token_ids if episode is None else episode.prompt_token_ids

    @property
    def is_given(self):
        """Whether another than the model has made the completion: bool."""
        return self.completion.finish_reason in OF_OTHERS

    @property
    def truncated(self):
        completion = self.completion
        return completion.finish_reason == "length" and completion.array("token_ids")[-1] != self.pad_token_id


# The finish_reasons of a completion that is its row's, and of one that a teacher draws.
GIVEN, TEACHER = "given", "teacher"
OF_OTHERS = GIVEN, TEACHER


def given_completion_of(prompt, version):
    """The Completion that the row of a Prompt has, as if the weights of `version` had drawn it, with log-probs 0.

    Where no completions are read it stands for the teacher's, with a token that is none of it.
    """
    if prompt.given is None:
        return completion_of_another(np.zeros(1, np.int32), TEACHER, "", version)
    return completion_of_another(prompt.given.token_ids, GIVEN, prompt.given.text, version)


def completion_of_another(token_ids, finish_reason, text, version):
    """A Completion that the model has not drawn; finish_reason: one of OF_OTHERS."""
    versions = np.full(len(token_ids), version, np.int32)
    return Completion(token_ids, np.zeros(len(token_ids), np.float32), finish_reason, text, versions)


# Columns of completions.jsonl that every run has.
RUN_COLUMNS = ("step", "prompt", "completion", "finish_reason", "reward", "advantage")


@dataclass
class Generation:
    """The result of one call of the engine: a group of Samples for each prompt, and what the rewards logged.

    num_unused: tokens of further completions, which were not needed; how many depends on how fast the rewards were.
    tool_names: those of the run's tools, for the metrics.
    """

    groups: list[list[Sample]] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_unused: int = 0
    tool_names: list[str] = field(default_factory=list)

    @property
    def samples(self):
        return [sample for group in self.groups for sample in group]

    def set_baselines(self):
        """Let the last sample of each group, whose completion is greedy, be the baseline of the others alone."""
        greedy = [group.pop() for group in self.groups]
        for group, baseline in zip(self.groups, greedy, strict=True):
            for sample in group:
                sample.baseline = baseline
        self.num_unused += sum(sample.completion.num_drawn for sample in greedy)
        self.metrics["reward_baseline"] = known_mean(np.array([sample.reward for sample in greedy]))

    @property
    def num_tokens(self):
        """Tokens of prompts and drawn ones, a prompt counted with each of its completions: int."""
        return sum(len(s.prompt_token_ids) + s.completion.num_drawn for s in self.samples)

    @property
    def num_generated(self):
        """Tokens that were drawn: int."""
        return sum(sample.completion.num_drawn for sample in self.samples if not sample.is_given)

    def rows(self, names, has_tokens=True):
        """The lines of completions.jsonl: list of dict. names: of the reward functions; has_tokens: whether those of
        episodes have their token ids, mask and log-probs."""
        lines = []
        for sample in self.samples:
            completion = sample.completion
            own = {"prompt": sample.prompt.prompt, "completion": completion.text}
            own["finish_reason"] = completion.finish_reason
            if (transcript := transcript_of(completion)) is not None:
                own |= episode_columns(completion, transcript, has_tokens)
            if sample.steps is not None:
                own["step_advantages"] = sample.steps.values.tolist()
            taken = {*RUN_COLUMNS, *own}
            for name, value in zip(names, sample.values.tolist(), strict=True):
                own[f"rewards/{name}" if name in taken else name] = value
            own |= {"reward": sample.reward, "advantage": sample.advantage}
            lines.append(own | sample.extra | own)
        return lines


def episode_columns(completion, transcript, has_tokens):
    """The columns of an episode in completions.jsonl besides those that every completion has: dict."""
    found = {"completion": transcript.completion, "ended": transcript.ended, "environment": transcript.environment}
    found |= {"index": completion.index, "turns": transcript.turns}
    found |= {"tool_calls": len(transcript.calls), "tool_failures": transcript.failures}
    if not has_tokens:
        return found
    mask = [1] * completion.num_tokens if completion.mask is None else completion.mask.astype(int).tolist()
    found |= {"prompt_token_ids": list(completion.episode.prompt_token_ids), "token_ids": list(completion.token_ids)}
    return found | {"mask": mask, "logprobs": completion.array("logprobs").tolist()}


def distinct_params(prompts, params, seen=None):
    """SamplingParams for each of the prompts (lists of token ids): completions of equal prompts have different noise.

    The k-th occurrence of a prompt, from 0 on, has the completions k n, k n + 1, ... of its noise. seen: {prompt: how
    often it was there} so far, which grows; None: not at all.
    """
    seen, found = {} if seen is None else seen, []
    for ids in map(tuple, prompts):
        k = seen.get(ids, 0)
        seen[ids] = k + 1
        found.append(replace(params, first_index=k * params.n) if k else params)
    return found


def _ignore(*_):
    """No one follows the progress."""


def draw(llm, prompts, indices, params, trainer_state, progress=_ignore, finished=_ignore):
    """The completions of chosen prompts, single turns or episodes as the run has them: list of RequestOutput.

    prompts: PromptData; indices: of the prompts; params: SamplingParams of each. progress, finished: LLM.generate's.
    """
    chosen = [prompts.prompts[i] for i in indices]
    if prompts.agents is None:
        return llm.generate([prompt.prompt_token_ids for prompt in chosen], params, progress, finished)
    return prompts.agents.draw(llm, chosen, indices, params, trainer_state, progress, finished)


def draw_samples(llm, rewards, prompts, indices, params, trainer_state, clock, status=None):
    """The completions of chosen prompts and their rewards: Generation.

    prompts: PromptData; indices: of the prompts; params: SamplingParams, its n completions make a group; trainer_state:
    passed to the rewards; clock: the wait for them is its phase "reward"; status: called with a line on the progress.
    Raises RewardError.
    """

    def progress(finished, total, num_generated):
        if status is not None:
            status(f"{finished} of {total} completions, {num_generated} tokens")

    agents, pending, columns = prompts.agents, [None] * len(indices), columns_of(prompts, indices, params.n)

    def submit(position, output):
        """Rewards of a group are computed in other processes while the engine goes on with the rest."""
        group = prompts, indices[position], output.completions
        pending[position] = submit_group(rewards, *group, columns, trainer_state)

    chosen = [prompts.prompts[i] for i in indices]
    params = distinct_params([prompt.prompt_token_ids for prompt in chosen], params)
    outputs = draw(llm, prompts, indices, params, trainer_state, progress, submit)
    with clock.phase("reward"):
        scores = rewards.collect(pending)
        completions = [output.completions for output in outputs]
        generation = as_generation(chosen, completions, scores, rewards.weights, llm.tokenizer)
    generation.tool_names = [] if agents is None else agents.tool_names
    return generation


def columns_of(prompts, indices, n):
    """{name: n times None} of all columns that the chosen prompts have: what rewards get where a row has none."""
    return dict.fromkeys(prompts.columns(indices), [None] * n)


def submit_group(rewards, prompts, index, completions, columns, trainer_state):
    """Begin to score the Completions of prompt `index`: Pending. columns: columns_of the generation."""
    prompt = prompts.prompts[index]
    columns = columns | prompts.columns([index] * len(completions))
    transcripts = [transcript_of(each) for each in completions]
    if None in transcripts:
        texts, ids = texts_and_ids(completions)
        asked = [prompt.prompt] * len(completions)
        return rewards.submit(asked, texts, ids, columns, trainer_state, prompt.where)
    returned = [each.columns or {} for each in transcripts]
    columns |= {name: [own[name] for own in returned] for name in returned[0]}
    pending = submit_episodes(rewards, completions, columns, trainer_state, prompt.where)
    pending.answered = partial(prompts.agents.release, transcripts)
    return pending


def submit_episodes(rewards, completions, columns, trainer_state, where):
    """Begin to score the Completions of a group of episodes, whose values are Transcripts: Pending. columns: {name: a
    value of each}; where: file and line of the prompt."""
    transcripts = [transcript_of(each) for each in completions]
    episodes = EpisodeParts(
        [each.completion for each in transcripts],
        [each.instance and each.instance.environment for each in transcripts],
        [(each.class_name, each.reward, each.reward_error) for each in transcripts],
        transcripts[0].answers,
    )
    texts, ids = texts_and_ids(completions)
    return rewards.submit([each.prompt for each in transcripts], texts, ids, columns, trainer_state, where, episodes)


def texts_and_ids(completions):
    """The texts of Completions, and their token ids, each an array: two lists."""
    return [each.text for each in completions], [each.array("token_ids") for each in completions]


def transcript_of(completion):
    """The Transcript of a Completion that is an episode with tools or in an environment, or a function's, or None."""
    value = None if completion.episode is None else completion.episode.value
    return value if isinstance(value, Transcript) else None


def as_generation(chosen, completions, scores, weights, tokenizer):
    """The Generation of Prompts with a list of Completions each, all of one length, and the Scores of these all."""
    n = len(completions[0])
    transcripts = [transcript_of(completion) for group in completions for completion in group]
    scores.values[[each is not None and each.is_lost for each in transcripts]] = np.nan
    # Rewards measure the model, whose completions these are not.
    scores.values[[each.finish_reason in OF_OTHERS for group in completions for each in group]] = np.nan
    weighted = np.where(np.isnan(scores.values).all(axis=1), np.nan, np.nansum(scores.values * weights, axis=1))
    pad_token_id = tokenizer.pad_token_id if tokenizer else None
    samples = []
    for i, (prompt, completion) in enumerate(
        (p, c) for p, group in zip(chosen, completions, strict=True) for c in group
    ):
        # A copy of the present values: the lines are written later, and the user's objects may change until then.
        extra = {column: as_json(values[i]) for column, values in scores.extra.items()}
        reward = float(weighted[i])
        if (transcript := transcript_of(completion)) is not None:
            # With what `reset` has added to it.
            prompt = replace(prompt, prompt=transcript.prompt)
        samples.append(Sample(prompt, completion, scores.values[i], reward, extra, pad_token_id=pad_token_id))
    groups = [samples[first : first + n] for first in range(0, len(samples), n)]
    return Generation(groups, scores.errors, scores.metrics)


def penalised(rewards, num_tokens, length_penalty, max_completion_length):
    """rewards (B,) less length_penalty times each completion's share of max_completion_length; num_tokens (B,)."""
    return rewards - length_penalty * np.asarray(num_tokens) / max_completion_length


def lengths_and_rewards(samples, train):
    """(drawn tokens, rewards less the length penalty) of Samples, (B,) each. train: [train] of GRPO."""
    lengths, rewards = np.array([(sample.completion.num_drawn, sample.reward) for sample in samples]).T
    return lengths.astype(int), penalised(rewards, lengths, train.length_penalty, train.max_completion_length)


def is_uniform(group, train):
    """Whether the rewards that the advantages of a group compare are all equal, so that these are 0: also True with
    fewer than two rewards.

    train: [train] of GRPO. With multi_objective_aggregation normalize_then_sum the rewards of every function are
    compared, not their sums, and with length_penalty what it leaves of them.
    """
    if train.multi_objective_aggregation == "normalize_then_sum":
        values = np.array([sample.values for sample in group])
    else:
        values = lengths_and_rewards(group, train)[1][:, None]
    known = [column[~np.isnan(column)] for column in values.T]
    return all(len(column) < 2 or column.min() == column.max() for column in known)


def generation_metrics(generation, names):
    """TRL's metrics of a Generation, a dict of floats. names: of the reward functions."""
    everything = generation.samples
    samples = [sample for sample in everything if not sample.is_given] or everything
    values = np.array([sample.values for sample in samples])
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.completion.num_drawn for sample in samples])
    truncated = np.array([sample.truncated for sample in samples])
    ended = lengths[~truncated] if not truncated.all() else np.zeros(1)
    found = {"reward": known_mean(rewards), "reward_std": known_std(rewards)}
    for name, column in zip(names, values.T, strict=True):
        found |= {f"rewards/{name}/mean": known_mean(column), f"rewards/{name}/std": known_std(column)}
    for which, of in (("length", lengths), ("terminated_length", ended)):
        for name in ("mean", "min", "max"):
            found[f"completions/{name}_{which}"] = float(getattr(of, name)())
    found["completions/clipped_ratio"] = float(truncated.mean())
    for reason in OF_OTHERS:
        if count := sum(sample.completion.finish_reason == reason for sample in everything):
            found[f"completions/{reason}_frac"] = count / len(everything)
    found |= episode_metrics([sample.completion for sample in samples])
    found |= tool_metrics(generation.groups, generation.tool_names)
    found = found | generation.metrics | found
    for name, count in generation.errors.items():
        found[f"reward_errors/{name}"] = found.get(f"reward_errors/{name}", 0) + count
    return found


def episode_metrics(completions):
    """Metrics of Completions that are episodes' (rollout/turns_*, tokens of the environment, and the share of the
    contexts that came from the cache): dict, empty where none is."""
    completions = [completion for completion in completions if completion.episode is not None]
    if not completions:
        return {}
    turns = [completion.episode.num_turns for completion in completions]
    contexts = sum(completion.episode.num_context_tokens for completion in completions)
    hits = sum(completion.num_cached_tokens for completion in completions)
    return {
        "rollout/turns_mean": float(np.mean(turns)),
        "rollout/turns_max": int(max(turns)),
        # The contexts of a rollout function are not known.
        **({"rollout/prefix_hit_frac": hits / contexts} if contexts else {}),
        "completions/env_tokens_mean": float(np.mean([each.num_tokens - each.num_drawn for each in completions])),
    }


def differing_prompts(groups):
    """The first Sample of groups that has begun with another prompt than its group, and the group's first: two Samples,
    or None. An environment that draws another task for each member of a group compares what cannot be compared."""
    pairs = ((sample, group[0]) for group in groups for sample in group if _was_reset(sample))
    return next((pair for pair in pairs if pair[0].prompt_token_ids != pair[1].prompt_token_ids), None)


def _was_reset(sample):
    transcript = transcript_of(sample.completion)
    return transcript is not None and transcript.reset_s is not None


def tool_metrics(groups, tool_names):
    """Metrics of the tools and environments of groups of Samples, a dict of floats; {} without any. tool_names: of all.

    The names are those of TRL's GRPOTrainer and AsyncGRPOTrainer, and tools/{timeout,malformed,overflow}_frac.
    """
    transcripts = [transcript_of(sample.completion) for group in groups for sample in group]
    transcripts = [each for each in transcripts if each is not None and each.columns is None]
    if not transcripts:
        return {}
    calls = [call for each in transcripts for call in each.calls]

    def share(is_so):
        return float(np.mean([is_so(each) for each in transcripts]))

    failures = sum(call.failed for call in calls)
    found = {
        "tools/call_frequency": len(calls) / len(transcripts),
        "tools/failure_frequency": failures / max(len(calls), 1),
        "tools/unknown_name_total": float(sum(call.unknown for call in calls)),
        "tools/loop_exhausted_frac": share(lambda each: each.ended == ITERATIONS),
        "tools/timeout_frac": share(lambda each: any(call.timed_out for call in each.calls)),
        "tools/malformed_frac": share(lambda each: each.malformed),
        "tools/overflow_frac": share(lambda each: each.ended == OVERFLOW),
        "tools/parallel_calls_mean": _mean([count for each in transcripts for count in each.calls_of_turns]),
        "tools/latency_s": _mean([call.latency_s for call in calls]),
    }
    for name in tool_names:
        own = [call for call in calls if call.name == name and not call.unknown]
        found[f"tools/{name}/call_total"] = float(len(own))
        found[f"tools/{name}/failure_total"] = float(sum(call.failed for call in own))
        found[f"tools/{name}/latency_s"] = _mean([call.latency_s for call in own])
    for name in ("reset_s", "reward_s"):
        seconds = [value for each in transcripts if (value := getattr(each, name)) is not None]
        found |= {f"env/{name}": _mean(seconds)} if seconds else {}
    if any(each.is_lost for each in transcripts):
        found["env/lost_frac"] = share(lambda each: each.is_lost)
    if "env/reset_s" in found:
        prompts = [[sample.prompt_token_ids for sample in group] for group in groups]
        found["env/group_prompts_differ_frac"] = _mean([ids != group[0] for group in prompts for ids in group])
    return found


def _mean(values):
    """The mean of numbers, 0 without any: float."""
    return float(np.mean(values)) if len(values) else 0.0


def known_mean(values):
    """The mean of values that are not NaN: float, NaN without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def known_std(values):
    """The standard deviation of values that are not NaN: float, NaN with fewer than two."""
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1)) if len(known) > 1 else float("nan")
