"""Epochs by a curriculum, and prompts that are left out when they are solved."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rlnumba.config import DataConfig
from rlnumba.data import Prompt, PromptData
from rlnumba.engine.sequence import Completion
from rlnumba.errors import ConfigError, UserError
from rlnumba.runs.prompt_order import PromptOrder, curriculum_values
from rlnumba.sampling.samples import Sample
from rlnumba.trainers.rloo import run_rloo
from tests.trainers.runs import grpo_run, metrics_of, rloo_run

LEVELS = np.array([3.0, 1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0])


def groups_of(*rewards):
    """A group of one completion for each reward."""
    return [[Sample(Prompt("", [1], {}, ""), Completion([5], [0.0], "stop"), np.array([r]), r, {})] for r in rewards]


def restored(order, **options):
    again = PromptOrder(order.num_prompts, order.shuffle, order.seed, order.epoch, order.position, **options)
    again.memory = json.loads(json.dumps(order.memory))
    return again


def test_every_epoch_follows_the_curriculum():
    assert PromptOrder(8, False, 0, curriculum=LEVELS).take(8) == [1, 3, 5, 7, 2, 6, 0, 4]
    order = PromptOrder(8, True, 1, curriculum=LEVELS)
    epochs = [order.take(3) + order.take(3) + order.take(2) for _ in range(3)]
    assert all(LEVELS[epoch].tolist() == [1, 1, 1, 1, 2, 2, 3, 3] for epoch in epochs)
    # Among rows of one value each epoch has an order of its own.
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_solved_prompts_are_left_out_until_too_few_are_left():
    order = PromptOrder(8, False, 0, solved_at=0.75)
    first = order.take(4)
    order.record(first, groups_of(0.75, 0.5, 1.0, np.nan))
    assert order.memory["solved"] == [0, 2] and order.shares() == {"difficulty/solved": 0.25}
    assert order.take(4) == [4, 5, 6, 7] and order.take(4) == [1, 3, 4, 5]
    # Two more are left in this epoch, too few for a generation.
    assert restored(order, solved_at=0.75).take(4) == [1, 3, 4, 5] == restored(order).take(4)
    order.record([1, 3, 4], groups_of(1.0, 1.0, 1.0))
    assert len(order.memory["solved"]) == 5 and order.upcoming(3, 5) == [6, 7, 5, 6, 7]
    assert restored(order).take(3) == [5, 6, 7]
    # Four are not left: all come back.
    assert order.take(4) == [0, 1, 2, 3] and order.memory["solved"] == []


def test_a_draw_by_difficulty_leaves_out_what_is_solved():
    weights = {"difficulty_weights": [1.0, 1.0, 1.0], "solved_at": 1.0}
    order = PromptOrder(8, True, 3, **weights)
    order.record([1, 2], groups_of(1.0, 0.0))
    drawn = order.upcoming(2, 100)
    assert sorted(drawn) == [0, 2, 3, 4, 5, 6, 7] and restored(order, **weights).take(5) == drawn[:5]
    order.advance(2)
    assert order.memory["draws"] == 1 and order.upcoming(2, 100) != drawn


@pytest.mark.parametrize("shuffle", [False, True])
def test_prompts_that_are_taken_one_by_one_follow_one_another(shuffle):
    order, again = PromptOrder(7, shuffle, 2), PromptOrder(7, shuffle, 2)
    expected = [index for _ in range(3) for index in again.take(7)]
    assert order.upcoming(2, 21) == expected
    for count, place in ((5, (0, 5)), (2, (0, 7)), (9, (2, 2))):
        order.advance(count)
        expected = expected[count:]
        assert (order.epoch, order.position) == place and order.upcoming(1, 5) == expected[:5]


def test_a_run_with_a_curriculum_and_solved_prompts_goes_on_where_it_stood(tmp_path):
    options = {"no_resampling_pass_rate": 0.25, "max_steps": 4, "save_steps": 1, "max_completion_length": 6}
    run = rloo_run(tmp_path / "run", data={"curriculum_column": "level"}, **options)
    lines = [{"prompt": f"what is the number {i}? ", "level": -i} for i in range(16)]
    Path(run.data.train).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_rloo(run)
    weights, rows = tmp_path / "run" / "final" / "model.safetensors", metrics_of(run)
    expected = weights.read_bytes()
    completions = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    first = list(dict.fromkeys(line["prompt"] for line in completions if line["step"] == 1))
    assert first == [f"what is the number {i}? " for i in range(15, 7, -1)]
    assert rows[-1]["difficulty/solved"] > 0
    run_rloo(run, resume=2)
    assert weights.read_bytes() == expected
    assert [row["difficulty/solved"] for row in metrics_of(run)] == [row["difficulty/solved"] for row in rows]


def test_a_curriculum_needs_numbers(tmp_path):
    def prompts(value):
        return PromptData([Prompt("", [1], {"level": 1}, "a:1"), Prompt("", [1], {"level": value}, "a:2")])

    assert curriculum_values(prompts(2.5), "level").tolist() == [1.0, 2.5]
    for value in ("3", None, True, float("nan")):
        with pytest.raises(UserError, match=r"a:2: 'level' \(data.curriculum_column\) must be a number, got"):
            curriculum_values(prompts(value), "level")
    run = grpo_run(tmp_path / "run", difficulty_weights=[1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match="data.curriculum_column orders the prompts, and train.difficulty_weights"):
        dataclasses.replace(run, data=DataConfig(train=run.data.train, curriculum_column="level"))
