"""Common parts of runs on prompts, beside their loop: prompts, how completions are drawn, what is shown of them.

The trainers are grpo.py, rloo.py and ppo.py; prompt_loop.py is their loop.
"""

import json
from itertools import takewhile

from rlnumba import data
from rlnumba.config.rollout import SAMPLING_KEYS
from rlnumba.engine.requests.stops import check_stops
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.runs import evaluation, kept_data
from rlnumba.runs.prompt_order import PromptOrder, curriculum_values
from rlnumba.runs.run_folder import log
from rlnumba.sampling.samples import derived_seed
from rlnumba.trainers.replay_buffer import ReplayBuffer


def load_prompts(path, run, llm, for_eval=False, agents=None):
    """The prompts of a file as token ids; logs how many were too long. for_eval: whether it is data.eval. agents: the
    run's Agents, or None."""
    vocab_size, tools = llm.model.config.vocab_size, agents and agents.prompt_tools
    prompts = None if for_eval else kept_data.taken(kept_data.prompts_key(run, llm.max_model_len))
    if prompts is None:
        prompts = data.load_prompts(path, run.data, llm.tokenizer, llm.max_model_len, vocab_size, for_eval, tools)
    prompts.agents = agents
    if prompts.dropped_prompts:
        log(f"{path}: {prompts.dropped_prompts} prompts are longer than data.max_prompt_length and are left out")
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


def sampling_params(train, seed, n):
    """The SamplingParams of a [train] section."""
    settings = {name: getattr(train, name) for name in SAMPLING_KEYS} | train.generation_kwargs
    replay = train.generation.replays_mask
    params = SamplingParams(**settings, max_tokens=train.max_completion_length, seed=seed, n=n, logit_thresholds=replay)
    if replay and (params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty):
        raise ConfigError(
            "train.sampling_mask_replay replays top_p, top_k and min_p, but no penalties: set one of the two"
        )
    return params


def check_sampling(run):
    """Raise ConfigError for parameters of sampling that are wrong, or cannot act on the run's model."""
    params = sampling_params(run.train, 0, 1)
    if params.stop or params.stop_token_ids:
        check_stops_of(params, find_model(run.model, weights=False))


def check_stops_of(params, folder):
    """check_stops for the model of a folder, whose weights are not read."""
    check_stops(params, Tokenizer.from_folder(folder), read_config(folder).vocab_size)


def evaluate(llm, rewards, prompts, run, trainer_state):
    """Metrics of completions of every held-out prompt, the same noise each time: {"eval_reward": ..., ...}."""
    generation = evaluation.generate(llm, rewards, prompts, eval_params(run), trainer_state)
    return evaluation.metrics_of(generation, rewards.names, run)


def eval_params(run):
    """The SamplingParams of a run's evaluation."""
    return evaluation.eval_params(run, sampling_params(run.train, derived_seed(run.seed), 1))


def sample_report(llm, prompts, run, path, count=4, width=200):
    """Prompts of the first generation, `count` at most: their completions of the first step and of the same noise now.

    `width` characters of each: str, empty where the first step has none of these prompts. path: the run's, for its
    completions.jsonl.
    """
    train = run.train
    with open(path / "completions.jsonl", encoding="utf-8") as file:
        # In the order of the steps: the first are not followed by others.
        rows = list(takewhile(lambda row: row["step"] == 1, map(json.loads, file)))
    # By their prompts: groups may be trained on in another order than that of the prompts, or give their places to
    # others.
    first = {}
    for row in rows:
        first.setdefault(json.dumps(row["prompt"]), row)
    pairs = []
    for i in prompt_order(prompts, run).take(train.generation.num_prompts):
        row = first.pop(json.dumps(prompts.prompts[i].prompt), None)
        if row is not None:
            pairs.append((prompts.prompts[i], row))
    pairs = pairs[:count]
    if not pairs:
        return ""
    params = sampling_params(train, derived_seed(run.seed, 0, 0, 0), 1)
    llm.wake()
    outputs = llm.generate([prompt.prompt_token_ids for prompt, _ in pairs], params)
    llm.sleep()

    def shown(text):
        text = text if isinstance(text, str) else str(text[-1].get("content"))
        return repr(text if len(text) <= width else text[:width] + " ...")

    lines = [f"The first {len(pairs)} prompts before training and after it, drawn with the same noise:"]
    for (_, row), output in zip(pairs, outputs, strict=True):
        lines += [
            f"  {shown(row['prompt'])}",
            f"    before  {shown(row['completion'])}",
            f"    after   {shown(output.completions[0].text)}",
        ]
    return "\n".join(lines)
