"""Common parts of runs on prompts, beside their loop: prompts, how completions are drawn, what is shown of them.

The trainers are grpo.py, rloo.py and ppo.py; prompt_loop.py is their loop.
"""

import json
from dataclasses import replace
from itertools import takewhile

from rlnumba import data
from rlnumba.config.rollout import SAMPLING_KEYS
from rlnumba.engine.requests.grammars import Grammars
from rlnumba.engine.requests.stops import check_stops
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.reporting.console import turns_text
from rlnumba.reporting.stderr import log
from rlnumba.runs import evaluation, kept_data
from rlnumba.runs.prompt_order import PromptOrder, curriculum_values
from rlnumba.sampling.samples import OF_OTHERS, derived_seed, distinct_params, draw, transcript_of
from rlnumba.trainers.replay_buffer import ReplayBuffer
from rlnumba.trainers.teacher import check_rows

# Characters of a text in the report at a run's end.
WIDTH = 200


def load_prompts(path, run, llm, for_eval=False, agents=None):
    """The prompts of a file as token ids; logs how many were too long. for_eval: whether it is data.eval. agents: the
    run's Agents, or None."""
    vocab_size, tools = llm.model.config.vocab_size, agents and agents.prompt_tools
    prompts = None if for_eval else kept_data.taken(kept_data.prompts_key(run, llm.max_model_len))
    if prompts is None:
        arguments = run.data, llm.tokenizer, llm.max_model_len, vocab_size, for_eval, tools
        prompts = data.load_prompts(path, *arguments, None if for_eval else run.given_limit)
    prompts.agents = agents
    if prompts.dropped_prompts:
        log(f"{path}: {prompts.dropped_prompts} prompts are longer than data.max_prompt_length and are left out")
    if num_cut := sum(prompt.given is not None and prompt.given.is_cut for prompt in prompts.prompts):
        log(f"{path}: {num_cut} completions are longer than train.max_completion_length and are cut")
    if not for_eval:
        check_rows(run, prompts.prompts, llm.tokenizer, llm.max_model_len)
    for note in prompts.notes:
        log(note)
    return prompts


def prompt_order(prompts, run):
    """The PromptOrder of a run on PromptData, at its beginning. Raises UserError for a curriculum without numbers."""
    train, plan, column = run.train, run.train.generation, run.data.curriculum_column
    curriculum = None if column is None else curriculum_values(prompts, column)
    options = {"difficulty_weights": plan.difficulty_weights, "solved_at": plan.solved_at}
    order = PromptOrder(len(prompts.prompts), train.shuffle_dataset, run.seed, curriculum=curriculum, **options)
    if plan.replay_buffer_size:
        order.replay_buffer = ReplayBuffer(plan.replay_buffer_size)
    return order


def generation_params(train, seed):
    """The SamplingParams of a prompt in a generation."""
    plan = train.generation
    return replace(sampling_params(train, seed, plan.num_drawn_each), greedy_last=plan.has_greedy)


def sampling_params(train, seed, n):
    """The SamplingParams of a [train] section."""
    settings = {name: getattr(train, name) for name in SAMPLING_KEYS} | train.generation_kwargs
    replay = train.generation.replays_mask
    settings["structured_outputs"] = train.structured_outputs or None
    params = SamplingParams(**settings, max_tokens=train.max_completion_length, seed=seed, n=n, logit_thresholds=replay)
    if replay and (params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty):
        raise ConfigError(
            "train.sampling_mask_replay replays top_p, top_k and min_p, but no penalties: set one of the two"
        )
    return params


def check_sampling(run):
    """Raise ConfigError for parameters of sampling that are wrong, or cannot act on the run's model."""
    params = sampling_params(run.train, 0, 1)
    if params.stop or params.stop_token_ids or params.structured_outputs:
        check_stops_of(params, find_model(run.model, weights=False))


def check_stops_of(params, folder):
    """check_stops for the model of a folder, whose weights are not read."""
    tokenizer, config = Tokenizer.from_folder(folder), read_config(folder)
    check_stops(params, tokenizer, config.vocab_size)
    eos_token_ids = config.ending_at(tokenizer and tokenizer.eos_token_id).eos_token_ids
    Grammars(tokenizer, config.vocab_size, eos_token_ids).check(params)


def evaluate(llm, rewards, prompts, run, trainer_state):
    """Metrics of completions of every held-out prompt, the same noise each time: {"eval_reward": ..., ...}."""
    generation = evaluation.generate(llm, rewards, prompts, eval_params(run), trainer_state)
    return evaluation.metrics_of(generation, rewards.names, run)


def eval_params(run):
    """The SamplingParams of a run's evaluation."""
    return evaluation.eval_params(run, sampling_params(run.train, derived_seed(run.seed), 1))


def sample_report(llm, prompts, run, path, trainer_state=None, count=4):
    """Prompts of the first generation, `count` at most: their completions of the first step and of the same noise now.

    WIDTH characters of each: str, empty where the first step has none of these prompts. path: the run's, for its
    completions.jsonl. trainer_state: the TrainingProgress of the end.
    """
    train = run.train
    with open(path / "completions.jsonl", encoding="utf-8") as file:
        # In the order of the steps: the first are not followed by others.
        rows = list(takewhile(lambda row: row["step"] == 1, map(json.loads, file)))
    rows = [row for row in rows if row.get("finish_reason") not in OF_OTHERS]
    # By their prompts: groups may be trained on in another order than that of the prompts, or give their places to
    # others. Episodes have the index in their group.
    left, seen = [], set()
    for row in rows:
        key = json.dumps(row["prompt"])
        if row["index"] == 0 if "index" in row else key not in seen:
            left.append(row)
        seen.add(key)
    order, pairs = prompt_order(prompts, run).take(train.generation.num_prompts), []
    for place, index in enumerate(order):
        row = _row_of(prompts.prompts[index].prompt, left)
        if row is not None:
            left.remove(row)
            pairs.append((place, row))
        if len(pairs) == count:
            break
    if not pairs:
        return ""
    # Numbered as in the generation: noise depends on it.
    params = generation_params(train, derived_seed(run.seed, 0, 0, 0))
    params = distinct_params([prompts.prompts[index].prompt_token_ids for index in order], params)
    places = [place for place, _ in pairs]
    llm.wake()
    indices = [order[place] for place in places]
    one_each = [replace(params[place], n=1, greedy_last=False) for place in places]
    outputs = draw(llm, prompts, indices, one_each, trainer_state)
    llm.sleep()

    def shown(text):
        return repr(text if len(text) <= WIDTH else text[:WIDTH] + " ...")

    lines = [f"The first {len(pairs)} prompts before training and after it, drawn with the same noise:"]
    for (_, row), output in zip(pairs, outputs, strict=True):
        prompt, transcript = row["prompt"], transcript_of(output.completions[0])
        after = output.completions[0].text if transcript is None else transcript.completion
        lines += [
            f"  {shown(prompt if isinstance(prompt, str) else str(prompt[-1].get('content')))}",
            f"    before  {shown(turns_text(row['completion']))}",
            f"    after   {shown(turns_text(after))}",
        ]
    return "\n".join(lines)


def _row_of(prompt, rows):
    """The first of the lines of completions.jsonl whose prompt is this one, or else begins with it: an environment's
    `reset` may have added to its last message; or None."""
    same = next((row for row in rows if row["prompt"] == prompt), None)
    return same or next((row for row in rows if _begins_with(row["prompt"], prompt)), None)


def _begins_with(messages, prompt):
    if not isinstance(prompt, list) or not isinstance(messages, list) or messages[:-1] != prompt[:-1]:
        return False
    content, begin = messages[-1].get("content"), prompt[-1].get("content") or ""
    if isinstance(content, list) and isinstance(begin, str):
        begin = [{"type": "text", "text": begin}]
    return isinstance(content, type(begin)) and content[: len(begin)] == begin
