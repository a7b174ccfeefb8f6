"""A batch of dynamic sampling depends on prompts, weights and seed, not on how fast engine and rewards are."""

import hashlib
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import DeployConfig, EngineConfig
from rlnumba.data import Prompt, PromptData
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.rewards import RewardError, Rewards, TrainingProgress
from rlnumba.rewards.calling import Pending, Scores
from rlnumba.runs.prompt_order import PromptOrder
from rlnumba.runs.prompt_run import prompt_order
from rlnumba.runs.run_folder import Clock
from rlnumba.sampling.generations import Generations
from rlnumba.sampling.pipeline import Course, Pipeline, PromptSource
from rlnumba.sampling.samples import draw_samples
from rlnumba.trainers import grpo
from tests.trainers.runs import MODEL, grpo_config, grpo_run, metrics_of

PARAMS = SamplingParams(n=2, max_tokens=12, seed=5)
# Whether the groups of the prompts have rewards that differ: the fourth such one is that of prompt 8.
DIFFER = [True, False, False, True, False, True, False, False, True, True, True, False]


class SlowRewards(Rewards):
    """Rewards in worker processes as they look from here: those of a prompt are ready after so many looks."""

    def __init__(self, looks, in_workers, fail=()):
        super().__init__([lambda **_: None])
        self.looks, self.in_workers, self.fail = looks, in_workers, fail

    @property
    def all_in_workers(self):
        return self.in_workers

    def submit(self, prompts, texts, completion_ids, columns, trainer_state=None, where=""):
        return Pending({"number": columns["number"][0]}, len(texts), {})

    def ready(self, pending):
        for group in pending:
            self.looks[group.keywords["number"]] -= 1
        return [self.looks[group.keywords["number"]] < 0 for group in pending]

    def collect(self, pending):
        numbers = [group.keywords["number"] for group in pending]
        if failed := set(numbers) & set(self.fail):
            raise RewardError(f"reward of {sorted(failed)}")
        values = [[float(i) if DIFFER[number] else 0.5] for number in numbers for i in range(PARAMS.n)]
        return Scores(np.array(values).reshape(-1, 1))


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL), Tokenizer.from_folder(MODEL)


@pytest.fixture(scope="module")
def prompts(model):
    texts = [f"what is the number {i % 5}? " * (1 + i % 3) for i in range(len(DIFFER))]
    return PromptData([Prompt(t, model[1].encode(t), {"number": i}, "") for i, t in enumerate(texts)])


def generated(model, prompts, rewards, window, max_num_seqs=64):
    """The first Generation of a run without [async], of 4 groups."""
    llm = LLM(*model, EngineConfig(max_num_seqs=max_num_seqs))
    sizes = {"num_generations": PARAMS.n, "per_device_train_batch_size": PARAMS.n, "gradient_accumulation_steps": 4}
    options = {"dynamic_sampling": True, "over_sampling_batch_size": window, "max_gen_batches": 3}
    run = SimpleNamespace(
        train=grpo_config(**sizes | options),
        generates_beside=False,
        draws_on_ranks=False,
        deploy=DeployConfig(),
        seed=0,
    )
    source = PromptSource(prompts, PromptOrder(len(DIFFER), False, 0), rewards)
    generations = Generations(run, None, llm, source, None)
    generations.begin(Course([(0, 0)], lambda step: TrainingProgress(0, 1, 0.0), lambda *place: PARAMS), 0, [], None)
    generations.start()
    generations.status = lambda text: None
    indices, found = generations.take(TrainingProgress(0, 1, 0.0), Clock())
    assert indices == list(range(len(indices))) and source.order.position == len(indices)
    assert not llm.engine.has_unfinished and llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
    return found


def tokens_of(generation):
    return [
        (s.prompt.columns["number"], s.completion.token_ids, s.completion.logprobs, s.reward)
        for s in generation.samples
    ]


@pytest.mark.parametrize("in_workers", [True, False])
def test_the_batch_does_not_depend_on_timing(model, prompts, in_workers):
    """Nor on the window; its completions are those of a generation of these prompts alone."""
    plain = draw_samples(
        LLM(*model), SlowRewards([0] * 12, False), prompts, range(9), PARAMS, TrainingProgress(0, 1, 0.0), Clock()
    )
    unused = []
    for trial, window in enumerate((4, 6, 12)):
        looks = [random.Random(trial).randrange(40) for _ in DIFFER]
        found = generated(model, prompts, SlowRewards(looks, in_workers), window, max_num_seqs=(3, 64)[trial % 2])
        assert tokens_of(found) == tokens_of(plain)
        unused.append(found.num_unused)
    # With a window as large as the batch nothing is completed in vain.
    assert unused[0] == 0 < unused[2]


def test_prompts_enter_as_groups_turn_out_uniform(model, prompts, monkeypatch):
    sizes, next_needed = [], Pipeline._next_needed

    def looking(pipeline):
        groups = next_needed(pipeline)
        drawn = pipeline._all_draws()
        open_groups = sum(each.differs is not False for each in drawn)
        sizes.append((open_groups, len(drawn), len(pipeline._needed(drawn))))
        return groups

    monkeypatch.setattr(Pipeline, "_next_needed", looking)
    generated(model, prompts, SlowRewards([0] * 12, True), 5)
    assert len(sizes) > 5 and all(size == 5 or admitted >= end for size, admitted, end in sizes)
    # All prompts where there are too few groups that differ.
    monkeypatch.setitem(globals(), "DIFFER", [True] * 3 + [False] * 9)
    assert len(generated(model, prompts, SlowRewards([0] * 12, True), 8).groups) == 12


def test_only_rewards_that_are_needed_may_fail(model, prompts):
    for in_workers in (True, False):
        assert len(generated(model, prompts, SlowRewards([0] * 12, in_workers, {9, 11}), 12).groups) == 9
        with pytest.raises(RewardError, match=r"reward of \[7\]"):
            generated(model, prompts, SlowRewards([0] * 12, in_workers, {7, 11}), 12)


def hash_of(run):
    return hashlib.sha256(Path(run.output_dir, "final", "model.safetensors").read_bytes()).hexdigest()


def rows_of(run):
    timed = ("time/", "perf/", "memory/", "step_time")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in metrics_of(run)]


def test_over_sampling_changes_nothing_but_speed(tmp_path):
    """In a run, and in one that goes on from a checkpoint."""
    options = {"dynamic_sampling": True, "max_steps": 4, "save_steps": 1}
    runs = [
        grpo_run(tmp_path / name, "one_for_even", **options, over_sampling_batch_size=window)
        for name, window in (("a", None), ("b", 9))
    ]
    for run in runs:
        grpo.run_grpo(run)
    assert hash_of(runs[0]) == hash_of(runs[1]) and rows_of(runs[0]) == rows_of(runs[1])
    texts = [Path(run.output_dir, "completions.jsonl").read_text() for run in runs]
    assert texts[0] == texts[1]
    assert {row["perf/over_sampled_tokens"] for row in metrics_of(runs[0])} == {0}
    # The prompts of step 2 are those after the last one that step 1 took.
    lines = [json.loads(line) for line in texts[0].splitlines()]
    taken = [list(dict.fromkeys(line["prompt"] for line in lines if line["step"] == step)) for step in (1, 2)]
    order = prompt_order(PromptData([None] * 16), runs[0]).upcoming(4, sum(map(len, taken)))
    assert sum(taken, []) == [f"what is the number {i}? " for i in order]
    expected = hash_of(runs[1]), rows_of(runs[1])
    grpo.run_grpo(runs[1], resume=2)
    assert (hash_of(runs[1]), rows_of(runs[1])) == expected


def test_wrong_windows_are_named():
    with pytest.raises(ConfigError, match="train.over_sampling_batch_size needs train.dynamic_sampling"):
        grpo_config(over_sampling_batch_size=9)
    with pytest.raises(ConfigError, match=r"over_sampling_batch_size \(3\) must be at least the 4 prompts of a gen"):
        grpo_config(over_sampling_batch_size=3, dynamic_sampling=True)
