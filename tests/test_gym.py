"""Problems of reasoning-gym as data: arguments, held-out seeds, scores, and errors of one line."""

import dataclasses
import json
import sys

import pytest

from rlnumba.config import DataConfig, GRPORun, RewardsConfig
from rlnumba.data.files import read_dataset
from rlnumba.data.gym import arguments_of
from rlnumba.errors import ConfigError, UserError
from rlnumba.rewards.calling import Rewards
from rlnumba.rewards.gym import gym
from rlnumba.runs.eval import run_eval
from rlnumba.runtime import device
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.ppo import run_ppo
from tests.trainers.runs import grpo_run, metrics_of, ppo_run

SUMS = {"max_terms": 2, "max_digits": 1, "size": 4, "seed": 7}


@pytest.fixture
def reasoning_gym():
    return pytest.importorskip("reasoning_gym", reason="pip install 'rlnumba[gym]'")


def sums(**keys):
    return DataConfig(train="gym:chain_sum", eval="gym:chain_sum", gym=SUMS, **keys)


def test_eval_problems_begin_where_training_ends():
    assert arguments_of("gym:chain_sum", sums(), for_eval=False) == SUMS
    assert arguments_of("gym:chain_sum", sums(), for_eval=True) == {**SUMS, "seed": 11}
    harder = {"max_terms": 3, "seed": 7}
    assert arguments_of("gym:chain_sum", sums(eval_gym=harder), True) == SUMS | harder
    assert arguments_of("gym:gcd", sums(eval_gym={"size": 2}), True) == {"size": 2, "seed": 0}
    for seed in (4, 10):
        with pytest.raises(ConfigError, match=f"data.eval_gym.seed: problems {seed} to {seed + 3} .* 11 or more"):
            arguments_of("gym:chain_sum", sums(eval_gym={"seed": seed}), True)
    for seed in (3, 11):
        assert arguments_of("gym:chain_sum", sums(eval_gym={"seed": seed}), True)["seed"] == seed


@pytest.mark.parametrize("key, value", [("size", 0), ("size", 2.5), ("seed", -1), ("seed", True), ("seed", "a")])
def test_size_and_seed_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"data.gym.{key} must be an integer of at least {int(key == 'size')}, got"):
        arguments_of("gym:chain_sum", DataConfig(train="gym:chain_sum", gym={key: value}), False)


def test_the_reward_is_the_scorer_unless_another_is_named():
    run = {"model": "m", "output_dir": "o", "data": DataConfig(train="gym:chain_sum")}
    assert GRPORun(**run, rewards=RewardsConfig()).rewards.funcs == ["gym"]
    assert GRPORun(**run, rewards=RewardsConfig(funcs=["a.py:b"])).rewards.funcs == ["a.py:b"]


def test_problems_and_their_scores(reasoning_gym):
    rows = read_dataset("gym:chain_sum", sums())
    made = list(reasoning_gym.create_dataset("chain_sum", **SUMS))
    assert [{key: row[key] for key in ("question", "answer", "metadata")} for row, _ in rows] == made
    assert rows[2][1] == "gym:chain_sum: problem 2"
    for_eval = [row["question"] for row, _ in read_dataset("gym:chain_sum", sums(), for_eval=True)]
    assert len(for_eval) == 4 and not set(for_eval) & {row["question"] for row, _ in rows}
    answer = rows[0][0]["answer"]
    texts = [f"<answer>{answer}</answer>", f"<answer>1</answer> no: <answer> {answer} </answer>", answer]
    # An answer inside a longer one has its share of the length; text around the tags does not count.
    texts += [f"<answer>it is {answer}</answer>", ""]
    columns = {name: [value] * 5 for name, value in rows[0][0].items()}
    scores = Rewards([gym]).score(["p"] * 5, texts, [[1]] * 5, columns)
    assert scores.values[:, 0].tolist() == [1.0, 1.0, 0.0, len(answer) / len(f"it is {answer}"), 0.0]
    assert scores.metrics == {"gym/scorer_errors": 0.0}


def test_a_scorer_that_raises_gives_0_and_is_counted(reasoning_gym):
    ((row, _),) = read_dataset("gym:prime_factorization", DataConfig(train="", gym={"size": 1}), for_eval=False)
    texts = [f"<answer>{text}</answer>" for text in (row["answer"], "two times five")]
    scores = Rewards([gym]).score(["p"] * 2, texts, [[1]] * 2, {name: [value] * 2 for name, value in row.items()})
    assert scores.values[:, 0].tolist() == [1.0, 0.0] and scores.metrics == {"gym/scorer_errors": 0.5}


def test_scorers_have_the_arguments_of_their_problems(reasoning_gym):
    """decimal_arithmetic's scorer allows an error in its config's last decimal; rows of other data have no value."""
    keys = {"size": 1, "min_num_decimal_places": 1, "max_num_decimal_places": 1}
    ((row, _),) = read_dataset("gym:decimal_arithmetic", DataConfig(train="", gym=keys), for_eval=False)
    nearly = str(float(row["answer"]) + 0.05)
    assert reasoning_gym.get_score_answer_fn("decimal_arithmetic")(nearly, row) == 0.0
    columns = {name: [value, None] for name, value in row.items()}
    values = Rewards([gym]).score(["p"] * 2, [f"<answer>{nearly}</answer>"] * 2, [[1]] * 2, columns).values[:, 0]
    assert values[0] == 1.0 and values[1] != values[1]


def test_errors_name_the_dataset_and_the_key(reasoning_gym, monkeypatch):
    def rows(path="gym:chain_sum", for_eval=False, **keys):
        return read_dataset(path, DataConfig(train="gym:chain_sum", **keys), for_eval)

    with pytest.raises(ConfigError, match="gym:chain_sums: .* no dataset 'chain_sums'; did you mean gym:chain_sum"):
        rows("gym:chain_sums")
    with pytest.raises(ConfigError, match="data.gym: gym:chain_sum has no argument 'max_term'; did you mean max_terms"):
        rows(gym={"max_term": 2})
    with pytest.raises(ConfigError, match="data.eval_gym: gym:chain_sum: max_terms must be >= min_terms"):
        rows(for_eval=True, eval_gym={"max_terms": 1})
    with pytest.raises(UserError, match='reward gym: needs problems of reasoning-gym, data.train = "gym:NAME"'):
        Rewards([gym]).score(["p"], ["a"], [[1]], {})
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"gym:chain_sum needs reasoning-gym; pip install 'rlnumba\[gym\]'"):
        rows()


@pytest.mark.skipif(device.name() != "cpu", reason="small runs of the cpu device")
@pytest.mark.parametrize("make, train", [(grpo_run, run_grpo), (ppo_run, run_ppo)])
def test_a_run_trains_on_its_problems_and_evaluates_on_others(reasoning_gym, tmp_path, make, train):
    data = DataConfig(
        train="gym:chain_sum",
        eval="gym:chain_sum",
        gym={"max_terms": 2, "min_digits": 4, "size": 16},
        eval_gym={"size": 3},
        apply_chat_template=False,
        prompt_template="{question} ",
    )
    made = make(tmp_path / "run", max_steps=1, save_steps=9)
    run = dataclasses.replace(made, data=data, rewards=RewardsConfig())
    train(run)
    row = metrics_of(run)[-1]
    # A random model writes no tags.
    assert row["rewards/gym/mean"] == row["eval_rewards/gym/mean"] == row["gym/scorer_errors"] == 0.0
    questions = [row["question"] + " " for row, _ in read_dataset(data.train, data, for_eval=False)]
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert prompts and set(prompts) <= set(questions)
    run_eval(run, output=tmp_path / "eval")
    prompts = [
        json.loads(line)["prompt"] for line in (tmp_path / "eval" / "completions.jsonl").read_text().splitlines()
    ]
    assert prompts == [row["question"] + " " for row, _ in read_dataset(data.eval, data, for_eval=True)]
    assert len(prompts) == 3 and not set(prompts) & set(questions)
