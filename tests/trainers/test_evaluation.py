"""Evaluation with sampling of its own: avg@n, pass@k, greedy, at step 0, and the command that does nothing else."""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from rlnumba import cli
from rlnumba.config import EvalConfig, LoraConfig, to_toml
from rlnumba.errors import ConfigError
from rlnumba.runs import evaluation
from rlnumba.runs.eval import run_eval
from rlnumba.runs.prompt_run import eval_params
from rlnumba.trainers import sft
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.kto import run_kto
from rlnumba.trainers.ppo import run_ppo
from rlnumba.trainers.reward import run_reward
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.sft import run_sft
from tests.trainers import runs
from tests.trainers.runs import grpo_run, metrics_of, sft_run


@pytest.fixture
def run(tmp_path):
    """A run that evaluates two prompts; a completion of an odd number of characters passes."""

    def run(own=None, **train):
        made = grpo_run(tmp_path / "run", data={"eval": str(tmp_path / "eval.jsonl")}, max_steps=3, **train)
        (tmp_path / "eval.jsonl").write_text('{"prompt": "1 + 1 = "}\n{"prompt": "a longer prompt: "}\n')
        file = tmp_path / "rewards_for_tests.py"
        file.write_text("def digits(completions, **columns):\n    return [float(len(t) % 2) for t in completions]\n")
        return dataclasses.replace(made, eval=EvalConfig(**own or {}))

    return run


def test_pass_at_k():
    """1 - C(n - c, k) / C(n, k), and by counting all draws of k from n."""
    from itertools import combinations

    for n in (1, 2, 5, 8):
        for c in range(n + 1):
            passes = [i < c for i in range(n)]
            for k in range(1, n + 1):
                expected = np.mean([any(draw) for draw in combinations(passes, k)])
                assert evaluation.pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)
                assert expected == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))
    assert evaluation.pass_at_k(10_000, 1, 5000) == pytest.approx(0.5)
    assert [evaluation.ks(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_sampling_parameters(run):
    """Those of [eval] win; the others are training's."""
    train = {"top_p": 0.9, "min_p": 0.1, "temperature": 0.8}
    params = eval_params(run(**train))
    assert (params.n, params.temperature, params.top_p, params.min_p, params.max_tokens) == (1, 0.8, 0.9, 0.1, 8)
    own = {"num_generations": 4, "temperature": 0.5, "top_p": 1.0, "top_k": 5, "max_completion_length": 3}
    params = eval_params(run(own, **train))
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (4, 0.5, 1, 5, 3)
    assert params.min_p == 0.1


def test_metrics_of_a_run_and_of_the_command(run, tmp_path, capsys):
    made = run({"num_generations": 6, "max_completion_length": 5}, eval_on_start=True, eval_steps=2)
    run_grpo(made)
    rows = metrics_of(made)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["eval_reward" in row for row in rows] == [True, False, True, True]
    assert [name for name in rows[0] if "@" in name] == [
        *("eval_avg@6", "eval_pass@1", "eval_pass@2", "eval_pass@4", "eval_pass@6")
    ]
    config = tmp_path / "run.toml"
    config.write_text(to_toml(made))
    for model, row in ((made.model, rows[0]), (f"{made.output_dir}/final", rows[3])):
        out = tmp_path / "out"
        capsys.readouterr()
        assert cli.run(["eval", "--config", str(config), "--model", model, "--output", str(out)]) == 0
        printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
        written = json.loads((out / "metrics.json").read_text())
        assert written == {name: value for name, value in row.items() if name.startswith("eval_")}
        assert printed.keys() == written.keys()
        lines = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
        passed = np.array([line["reward"] for line in lines]).reshape(2, 6)
        assert [line["reward"] for line in lines] == [len(line["completion"]) % 2 for line in lines]
        counts = passed.sum(axis=1)
        assert written["eval_avg@6"] == pytest.approx(passed.mean())
        for k in (1, 2, 4, 6):
            expected = np.mean([1 - math.comb(6 - int(c), k) / math.comb(6, k) for c in counts])
            assert written[f"eval_pass@{k}"] == pytest.approx(expected)
            assert float(printed[f"eval_pass@{k}"]) == pytest.approx(expected, rel=1e-5)


def trained_run(kind, folder):
    """A run of one step of a trainer, evaluated before and after it."""
    own = {"max_steps": 1, "eval_on_start": True}
    if kind in ("rloo", "ppo"):
        made = getattr(runs, f"{kind}_run")(folder, data={"eval": str(folder.parent / "prompts.jsonl")}, **own)
        made = dataclasses.replace(made, eval=EvalConfig(num_generations=3, max_completion_length=5))
        {"rloo": run_rloo, "ppo": run_ppo}[kind](made)
        return made
    rows = {"sft": runs.SFT_ROWS, "reward": runs.PAIR_ROWS, **runs.PREFERENCE_ROWS}[kind]
    make = {"sft": sft_run, "reward": runs.reward_run}.get(kind) or functools.partial(runs.preference_run, kind)
    made = make(folder, {"eval": str(rows)}, **own)
    if kind == "dpo":
        made = dataclasses.replace(made, lora=LoraConfig(r=2))
    {"sft": run_sft, "dpo": run_dpo, "kto": run_kto, "reward": run_reward}[kind](made)
    return made


@pytest.mark.parametrize("kind", ["rloo", "ppo", "sft", "dpo", "kto", "reward"])
def test_the_command_gives_every_trainers_metrics(tmp_path, kind, capsys):
    """Those of its run before training, of the run's model, and after it, of final/, which may be an adapter."""
    made = trained_run(kind, tmp_path / "run")
    config = tmp_path / "run.toml"
    config.write_text(to_toml(made))
    rows = metrics_of(made)
    # The head that a run gives a causal model is zeros here and there.
    for options, row in (([], rows[0]), (["--model", f"{made.output_dir}/final"], rows[-1])):
        assert cli.run(["eval", "--config", str(config), "--output", str(tmp_path / "out"), *options]) == 0
        expected = {name: value for name, value in row.items() if name.startswith("eval_")}
        written = json.loads((tmp_path / "out" / "metrics.json").read_text())
        assert written == expected and len(expected) > 2
        name = f"model {made.model}" if not options else f"model {options[1]}"
        if options and made.lora:
            name = f"adapter {options[1]} on base {made.model}"
        shown = capsys.readouterr().err
        assert f"evaluated {name} as {kind} does in " in shown
        # Rewards of these few tokens are below 1.
        assert ("no value reached eval.pass_threshold 1" in shown) == (kind in ("rloo", "ppo"))
    assert (tmp_path / "out" / "completions.jsonl").exists() == (kind in ("rloo", "ppo"))


def test_greedy_and_each_function(run, tmp_path):
    made = run({"temperature": 0.0, "pass_threshold": 0.5})
    funcs = [*made.rewards.funcs, "think_format_reward"]
    made = dataclasses.replace(made, rewards=dataclasses.replace(made.rewards, funcs=funcs))
    first, again = (run_eval(dataclasses.replace(made, seed=seed), output=tmp_path / str(seed)) for seed in (1, 2))
    assert (
        first == again
        and (tmp_path / "1" / "completions.jsonl").read_bytes() == (tmp_path / "2" / "completions.jsonl").read_bytes()
    )
    assert first["eval_rewards/digits/pass@1"] == first["eval_rewards/digits/mean"]
    assert first["eval_rewards/think_format_reward/avg@1"] == 0


def test_evaluation_before_supervised_training(tmp_path):
    rows = tmp_path / "eval.jsonl"
    rows.write_text('{"prompt": "what is 1?", "completion": " it is 1"}\n')
    made = sft_run(tmp_path / "run", {"eval": str(rows)}, max_steps=4, eval_on_start=True)
    run_sft(made)
    before, *_, after = metrics_of(made)
    assert (before["step"], after["step"]) == (0, 4) and before["eval_loss"] > after["eval_loss"]


def test_an_evaluation_before_the_first_step_is_written_once(tmp_path, monkeypatch):
    """Also by a run that goes on from there."""
    rows = tmp_path / "eval.jsonl"
    rows.write_text('{"prompt": "what is 1?", "completion": " it is 1"}\n')
    made = sft_run(tmp_path / "run", {"eval": str(rows)}, max_steps=1, eval_on_start=True)

    def fails(*arguments):
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(sft, "TRAINER", sft.TRAINER._replace(train_step=fails))
        run_sft(made)
    assert [row["step"] for row in metrics_of(made)] == [0]
    run_sft(made, resume=True)
    assert [row["step"] for row in metrics_of(made)] == [0, 1]


def test_wrong_use(run, tmp_path):
    made = run()
    with pytest.raises(ConfigError, match=r"eval.num_generations \(2\) completions at temperature 0 are all the same"):
        EvalConfig(temperature=0.0, num_generations=2)
    with pytest.raises(ConfigError, match="data.eval is not set; give --data.eval FILE"):
        run_eval(dataclasses.replace(made, data=dataclasses.replace(made.data, eval=None)))
    config = tmp_path / "run.toml"
    config.write_text(to_toml(run()))
    arguments = ["eval", "--config", str(config), "--eval.num_generations", "0"]
    ended = subprocess.run([sys.executable, "-m", "rlnumba", *arguments], capture_output=True, text=True)
    assert ended.returncode == 2 and "eval.num_generations must be at least 1" in ended.stderr
