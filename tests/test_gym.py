"""Problems of reasoning-gym as data: arguments, held-out seeds, scores, and errors of one line."""

import dataclasses
import json
import pathlib
import shutil
import sys

import numpy as np
import pytest

from rlnumba.config import DataConfig, GRPOConfig, GRPORun, RewardsConfig, ToolsConfig
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


def test_several_datasets_have_arguments_of_their_own():
    gym = {"seed": 5, "chain_sum": {"max_terms": 2, "size": 3}, "gcd": {"max_numbers": 2, "seed": 6}}
    eval_gym = {"size": 2, "gcd": {"size": 4}, "lcm": {"seed": 9}}
    data = DataConfig(train="gym:chain_sum, gym:gcd", eval="gym:gcd,gym:lcm", gym=gym, eval_gym=eval_gym)
    assert arguments_of("gym:chain_sum", data, False) == {"size": 3, "seed": 5, "max_terms": 2}
    assert arguments_of("gym:gcd", data, False) == {"size": 500, "seed": 6, "max_numbers": 2}
    assert arguments_of("gym:gcd", data, True) == {"size": 4, "seed": 506, "max_numbers": 2}
    assert arguments_of("gym:lcm", data, True) == {"size": 2, "seed": 9}
    for value, error in (({"seed": -1}, "data.gym.gcd.seed must be"), (3, "data.gym.gcd must be a table .* got 3")):
        with pytest.raises(ConfigError, match=error):
            arguments_of("gym:gcd", dataclasses.replace(data, gym=gym | {"gcd": value}), False)


@pytest.mark.parametrize("key, value", [("size", 0), ("size", 2.5), ("seed", -1), ("seed", True), ("seed", "a")])
def test_size_and_seed_are_checked(key, value):
    with pytest.raises(ConfigError, match=f"data.gym.{key} must be an integer of at least {int(key == 'size')}, got"):
        arguments_of("gym:chain_sum", DataConfig(train="gym:chain_sum", gym={key: value}), False)


def test_the_reward_is_the_scorer_unless_another_is_named():
    run = {"model": "m", "output_dir": "o", "data": DataConfig(train="gym:chain_sum")}
    assert GRPORun(**run, rewards=RewardsConfig()).rewards.funcs == ["gym"]
    assert GRPORun(**run, rewards=RewardsConfig(funcs=["a.py:b"])).rewards.funcs == ["a.py:b"]
    assert GRPORun(**run | {"data": DataConfig(train="gym:a,gym:b")}, rewards=RewardsConfig()).rewards.funcs == ["gym"]
    # Rows of a file have no scorer.
    with pytest.raises(ConfigError, match="rewards.funcs must name"):
        GRPORun(**run | {"data": DataConfig(train="gym:a,rows.jsonl")}, rewards=RewardsConfig())


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
    assert scores.metrics == {"gym/scorer_errors": 0.0, "gym/chain_sum": np.mean(scores.values)}


def test_a_mixture_has_its_shares_and_a_metric_each(reasoning_gym):
    data = DataConfig(
        train="gym:chain_sum,gym:gcd",
        train_weights=[1.5, 0.5],
        gym={"size": 4, "seed": 7, "chain_sum": {"max_terms": 2, "max_digits": 1}},
    )
    rows = [row for row, _ in read_dataset(data.train, data)]
    assert [row["gym_dataset"]["name"] for row in rows] == ["chain_sum"] * 6 + ["gcd"] * 2
    assert [row["question"] for row in rows[:6:3]] == [
        row["question"] for row, _ in read_dataset("gym:chain_sum", sums())
    ][::2]
    chosen = [rows[0], rows[0], rows[6], rows[7]]
    texts = [
        f"<answer>{answer}</answer>" for answer in (rows[0]["answer"], "-99", rows[6]["answer"], rows[7]["answer"])
    ]
    scores = Rewards([gym]).score(
        ["p"] * 4, texts, [[1]] * 4, {name: [row[name] for row in chosen] for name in rows[0]}
    )
    assert scores.values[:, 0].tolist() == [1.0, scores.values[1, 0], 1.0, 1.0] and scores.values[1, 0] < 0.1
    own = {"gym/chain_sum": np.mean(scores.values[:2]), "gym/gcd": 1.0}
    assert scores.metrics == {"gym/scorer_errors": 0.0} | own
    harder = dataclasses.replace(data, gym=data.gym | {"max_terms": 2})
    with pytest.raises(ConfigError, match=r"data.gym: gym:gcd has no argument 'max_terms'.* are in \[data.gym.NAME\]$"):
        read_dataset(data.train, harder)


def test_the_answer_of_an_episode_is_in_its_last_turn(reasoning_gym):
    """The message before has the call of a tool, and the tool's has the result."""
    ((row, _),) = read_dataset("gym:chain_sum", DataConfig(train="", gym=SUMS | {"size": 1}), for_eval=False)
    right = f"<answer>{row['answer']}</answer>"
    call = {"role": "assistant", "content": "<answer>?</answer>", "tool_calls": []}
    result = {"role": "tool", "name": "calc", "content": right}
    completions = [[call, result, {"role": "assistant", "content": right}], [call, result]]
    columns = {name: [value] * 2 for name, value in row.items()}
    assert gym(completions, **columns, log_metric=lambda name, value: None) == [1.0, 0.0]


def test_a_scorer_that_raises_gives_0_and_is_counted(reasoning_gym):
    ((row, _),) = read_dataset("gym:prime_factorization", DataConfig(train="", gym={"size": 1}), for_eval=False)
    texts = [f"<answer>{text}</answer>" for text in (row["answer"], "two times five")]
    scores = Rewards([gym]).score(["p"] * 2, texts, [[1]] * 2, {name: [value] * 2 for name, value in row.items()})
    assert scores.values[:, 0].tolist() == [1.0, 0.0]
    assert scores.metrics == {"gym/scorer_errors": 0.5, "gym/prime_factorization": 0.5}


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


TOOLS = pathlib.Path(__file__).parent.parent / "examples" / "tools"
ADD = '''
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def result(completions, answer, **columns):
    """1 where the last turn is the answer."""
    return [float(messages[-1]["content"] == right) for messages, right in zip(completions, answer)]
'''


@pytest.mark.skipif(device.name() != "cpu", reason="small runs of the cpu device")
def test_a_tool_beside_the_problems(reasoning_gym, tmp_path):
    """The scorer has the last turn of each episode, whose calls were executed."""
    (tmp_path / "add.py").write_text(ADD)
    # The model of the tools example, whose tool is `add` now, reads "34*57" of a question "... problem: 34 + 57 =".
    shutil.copytree(TOOLS / "model", tmp_path / "model")
    short = "(message.content or '').split(': ') | last | replace(' + ', '*') | replace(' =', '')"
    for name, old, new in (
        ("tokenizer.json", "multiply", "add"),
        ("tokenizer_config.json", "message.content", short),
    ):
        file = tmp_path / "model" / name
        file.write_text(file.read_text().replace(old, new))
    run = GRPORun(
        model=str(tmp_path / "model"),
        output_dir=str(tmp_path / "run"),
        data=DataConfig(
            train="gym:chain_sum",
            prompt_template="{question}",
            gym={"size": 8, "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        ),
        tools=ToolsConfig(funcs=[f"{tmp_path}/add.py:add"]),
        rewards=RewardsConfig(funcs=["gym", f"{tmp_path}/add.py:result"]),
        train=GRPOConfig(
            num_generations=8,
            per_device_train_batch_size=64,
            max_completion_length=48,
            max_steps=1,
            gradient_checkpointing=False,
        ),
    )
    run_grpo(run)
    (row,) = metrics_of(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    called = [line for line in lines if line["tool_calls"]]
    # It writes no tags, so the scorer has nothing; `result` reads what the scorer would.
    assert {line["gym"] for line in lines} == {0.0} and row["gym/chain_sum"] == 0 and row["gym/scorer_errors"] == 0
    assert len(called) > 10 and np.mean([line["result"] for line in called]) > 0.3
    assert row["tools/add/call_total"] == len(called)
    assert row["sampling/sampling_logp_difference/max"] == 0
