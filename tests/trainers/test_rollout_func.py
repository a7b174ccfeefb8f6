"""Runs whose completions a function draws: rollout.func."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba import GRPOConfig, GRPOTrainer
from rlnumba.config import AsyncConfig, EvalConfig, RewardsConfig, RolloutConfig, ToolsConfig, load_run
from rlnumba.data import load_prompts
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError, UserError
from rlnumba.reporting import stderr
from rlnumba.rewards import TrainingProgress
from rlnumba.runs.eval import run_eval
from rlnumba.runs.prompt_run import sampling_params
from rlnumba.sampling import rollout_func
from rlnumba.sampling.rollout_func import FunctionSampler, RolloutFunction, RolloutTrainer
from rlnumba.sampling.samples import distinct_params
from tests.parallel import in_threads
from tests.trainers import rollouts
from tests.trainers.runs import metrics_of, on_two_ranks
from tests.trainers.test_agents import CONFIG, SETTINGS, TOOLS, agent_run, completions_of, train
from tests.trainers.test_resume import hash_of

ROLLOUTS = "tests.trainers.rollouts"


def plain_run(folder, kind="grpo", **settings):
    run = agent_run(folder, kind, tools=False, **{"per_device_train_batch_size": 8, "max_steps": 1} | settings)
    return replace(run, rewards=RewardsConfig(funcs=[f"{ROLLOUTS}:brevity"]))


def function_run(folder, name="single", kind="grpo", **settings):
    run = plain_run(folder, kind, **settings)
    return replace(run, rollout=RolloutConfig(func=f"{ROLLOUTS}:{name}"))


@pytest.mark.parametrize("kind, settings", [("grpo", {"max_steps": 2, "num_iterations": 2}), ("ppo", {})])
def test_a_function_that_draws_as_the_run_does(kind, settings, tmp_path):
    """The same seeds and the same tokens: it ends with the same weights as the run without it."""
    plain, run = (
        plain_run(tmp_path / "plain", kind, **settings),
        function_run(tmp_path / "run", "single", kind, **settings),
    )
    train(plain)
    train(run)
    assert hash_of(plain) == hash_of(run)
    for before, line in zip(completions_of(plain), completions_of(run), strict=True):
        assert line["completion"] == [{"role": "assistant", "content": before["completion"]}]
        assert before["reward"] == line["reward"] and before["finish_reason"] == line["finish_reason"] == line["ended"]


def test_turns_with_a_mask(tmp_path):
    run = replace(function_run(tmp_path / "run", "two_turns"), rewards=RewardsConfig(funcs=[f"{ROLLOUTS}:shortness"]))
    train(run)
    row = metrics_of(run)[0]
    for i, line in enumerate(completions_of(run)):
        mask, logprobs = np.array(line["mask"]), np.array(line["logprobs"])
        first = int(np.argmin(mask))
        assert line["index"] == i % 4 and line["turns"] == 2 and line["environment"] is None
        assert line["tool_calls"] == line["tool_failures"] == 0 and line["reward"] == line["shortness"] == -first
        assert (logprobs[mask == 0] == 0).all() and (logprobs[mask == 1] < 0).any() and mask[-1] == 1
        assert line["prompt"][0]["role"] == "user" and len(line["prompt_token_ids"]) > 3
    # The log-probs of the training forward are those of the turns.
    assert row["sampling/sampling_logp_difference/max"] == 0
    assert row["completions/env_tokens_mean"] == np.mean([line["mask"].count(0) for line in completions_of(run)])
    assert row["rollout/turns_mean"] == 2 and "tools/call_frequency" not in row


def test_other_log_probs_are_not_those_of_the_weights(tmp_path, monkeypatch):
    """They are trained on by the forward's, and the difference is in the metrics."""
    # The second step is not on-policy: it reads the log-probs before the first.
    keys = {"vllm_importance_sampling_correction": False, "num_iterations": 2, "max_steps": 2}

    def other(found):
        return found | {"logprobs": [[[-1.0]] * len(ids) for ids in found["completion_ids"]]}

    monkeypatch.setitem(rollouts.CHANGE, "of", other)
    run = function_run(tmp_path / "run", "spoiled", **keys)
    train(run)
    monkeypatch.setitem(rollouts.CHANGE, "of", rollouts.same)
    exact = function_run(tmp_path / "exact", "spoiled", **keys)
    train(exact)
    assert metrics_of(run)[0]["sampling/sampling_logp_difference/max"] > 0.01
    assert hash_of(run) == hash_of(exact)


def test_resumption_evaluation_and_ranks(tmp_path, monkeypatch):
    # Ranks in threads: the second one silences the whole process.
    monkeypatch.setattr(stderr, "_is_silent", False)
    keys = {"max_steps": 2, "per_device_train_batch_size": 4, "global_batch_size": 8}
    run = function_run(tmp_path / "whole", "two_turns", **keys)
    train(run)
    both = on_two_ranks(run, tmp_path / "both")
    train(replace(both, deploy=run.deploy, train=replace(run.train, max_steps=1)))
    in_threads.run(lambda communicator: train(both, True, communicator), 2)
    assert hash_of(run) == hash_of(both)
    (tmp_path / "eval.jsonl").write_text("".join(open(TOOLS / "train.jsonl").readlines()[:3]))
    evaluated = replace(
        run, data=replace(run.data, eval=str(tmp_path / "eval.jsonl")), eval=EvalConfig(num_generations=2)
    )
    assert "eval_rollout/turns_mean" in run_eval(evaluated, output=tmp_path / "out")
    rows = [json.loads(line) for line in open(tmp_path / "out" / "completions.jsonl")]
    assert [row["index"] for row in rows] == [0, 1] * 3 and rows[0]["token_ids"] != rows[1]["token_ids"]


def test_what_was_drawn_is_counted_by_generation():
    """Calls of one seed go on with its counts, which the noise of equal prompts follows from; another begins anew."""
    counts = []
    function = SimpleNamespace(draw=lambda *arguments: counts.append(arguments[-1]))
    drawn = SimpleNamespace(prompt=0, step=0)
    owner = SimpleNamespace(drawn_of=lambda request: drawn, trainer_state_of=lambda step: None)
    sampler = FunctionSampler(None, function, SimpleNamespace(prompts=["p"]))
    for number, seed in enumerate((1, 1, 2)):
        sampler.submit(SimpleNamespace(number=number, params=SimpleNamespace(seed=seed)), owner)
        sampler.poll()
    assert counts[0] is counts[1] and counts[2] is not counts[1]


def test_what_a_function_draws_begins_with_the_noise_of_its_first_completion():
    params = SamplingParams(n=2, first_index=6, temperature=0.5)
    trainer = RolloutTrainer(None, SimpleNamespace(tokenizer=None), params, None, {}, {})
    assert trainer.sampling_params(max_tokens=3) == SamplingParams(temperature=0.5, max_tokens=3)
    assert trainer.num_generations == 2


def test_log_probs_may_be_above_0_by_rounding():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9, eos_token_ids=[1]))
    llm = SimpleNamespace(model=model, max_model_len=8, tokenizer=SimpleNamespace(eos_token_id=1, pad_token_id=0))
    checks = rollout_func._Limits(3, llm)
    assert checks.completion(5, [3, 4, 5], [1e-4, -1.0, 0])[1].tolist() == np.float32([1e-4, -1.0, 0]).tolist()
    with pytest.raises(ValueError, match="numbers up to 0 for drawn tokens, got 0.00"):
        checks.completion(5, [3, 4, 5], [2e-3, -1.0, 0])


def test_an_aborted_request_is_not_drawn():
    seen = []
    function = SimpleNamespace(draw=lambda llm, prompts, indices, *others: seen.append(indices))
    owner = SimpleNamespace(
        drawn_of=lambda request: SimpleNamespace(prompt=request.number, step=0), trainer_state_of=lambda step: None
    )
    sampler = FunctionSampler(None, function, SimpleNamespace(prompts=["p", "q", "r"]))
    for number in range(3):
        sampler.submit(SimpleNamespace(number=number, params=SimpleNamespace(seed=0)), owner)
    sampler.abort(1)
    sampler.abort(7)
    assert sampler.poll() and seen == [[0, 2]] and sampler.is_idle


@pytest.fixture(scope="module")
def drawing():
    """A function that draws 8 completions of a prompt by a rollout function."""
    run, llm = function_run("unused", max_completion_length=96), LLM(TOOLS / "model")
    data = load_prompts(run.data.train, run.data, llm.tokenizer, llm.max_model_len, llm.model.config.vocab_size)
    params = distinct_params([data.prompts[0].prompt_token_ids], sampling_params(run.train, 1, 8))
    arguments = llm, data.prompts[:1], [0], params, TrainingProgress(0, 1, 0.0), lambda *_: None, lambda *_: None
    return lambda function: RolloutFunction(run, llm.tokenizer, function).draw(*arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda found: [found], r"a dict of prompt_ids, completion_ids, logprobs is needed, got \["),
        (lambda found: {"prompt_ids": found["prompt_ids"]}, "no completion_ids and no logprobs; a dict of prompt_ids"),
        (lambda found: found | {"logprobs": found["logprobs"][:-1]}, "logprobs has 7 values for 8 prompts, which come"),
        (lambda found: found | {"score": [1.0]}, "score has 1 values for 8 prompts, which come repeated"),
        (lambda found: found | {"prompt_ids": 3}, "prompt_ids must be a list, got 3"),
        (
            lambda found: found | {"completion_ids": [[]] * 8},
            r"train.jsonl:\d+: completion_ids must be a list of token",
        ),
        (
            lambda found: found | {"completion_ids": [[0.5]] * 8},
            r"completion_ids must be a list of token ids, got \[0.5\]",
        ),
        (lambda found: found | {"completion_ids": [[9999]] * 8}, "token id 9999 is outside of the vocabulary of 107"),
        (lambda found: found | {"completion_ids": [[3] * 97] * 8}, "97 tokens, and train.max_completion_length is 96"),
        (
            lambda found: found | {"prompt_ids": [[3] * 127] * 8},
            r"127 prompt_ids and \d+ completion_ids, and a sequence has",
        ),
        (
            lambda found: found | {"logprobs": [[-1.0]] * 8},
            r"logprobs must have a value for each of \d+ completion_ids, got 1",
        ),
        (
            lambda found: found | {"logprobs": [[None] * len(x) for x in found["logprobs"]]},
            "logprobs must be numbers up to",
        ),
        (
            lambda found: found | {"logprobs": [["a"] * len(x) for x in found["logprobs"]]},
            "logprobs must be a list of num",
        ),
        (lambda found: found | {"env_mask": [[0] * len(x) for x in found["logprobs"]]}, "env_mask is 0 for all tokens"),
        (
            lambda found: found | {"env_mask": [[2] * len(x) for x in found["logprobs"]]},
            "env_mask must be a list of 0 and",
        ),
        (lambda found: 1 / 0, "rollout.func: spoiled raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_function_returns_is_checked(change, message, drawing, monkeypatch):
    monkeypatch.setitem(rollouts.CHANGE, "of", change)
    with pytest.raises(UserError, match=message) as caught:
        drawing(rollouts.spoiled)
    assert str(caught.value).startswith("rollout.func: spoiled ") and "\n" not in str(caught.value)


def test_log_probs_of_an_environment_may_be_missing(drawing, monkeypatch):
    """Those of its tokens are 0, whatever the function returned; vLLM has None for them."""

    def with_environment(found):
        count = len(found["prompt_ids"])
        ids, logprobs = [[3, 4, 5, 6]] * count, [[-0.5, None, 2.0, -0.25]] * count
        return found | {"completion_ids": ids, "logprobs": logprobs, "env_mask": [[1, 0, 0, 1]] * count}

    monkeypatch.setitem(rollouts.CHANGE, "of", with_environment)
    (output,) = drawing(rollouts.spoiled)
    for completion in output.completions:
        assert completion.array("logprobs").tolist() == [-0.5, 0.0, 0.0, -0.25]
        assert completion.mask.tolist() == [True, False, False, True] and completion.num_drawn == 2


def test_errors_of_the_keys(tmp_path):
    run = function_run(tmp_path)
    with pytest.raises(ConfigError, match="rollout.func draws the completions: it takes the place of tools.funcs"):
        replace(run, tools=ToolsConfig(funcs=["a.py:f"]))
    with pytest.raises(ConfigError, match=r"rollout.func is called between two optimizer steps: .* with \[async\]"):
        replace(run, asynchronous=AsyncConfig())
    with pytest.raises(ConfigError, match="train.sampling_mask_replay replays the filters"):
        replace(run, train=replace(run.train, sampling_mask_replay=True))
    with pytest.raises(ConfigError, match=r"rollout.func: .* is a dict, which cannot be called"):
        train(replace(run, rollout=RolloutConfig(func=f"{ROLLOUTS}:CHANGE")))
    with pytest.raises(ConfigError, match=r"rollout.func: returned is called with \(prompts, trainer\): too many"):
        train(replace(run, rollout=RolloutConfig(func=f"{ROLLOUTS}:returned")))
    (tmp_path / "run.toml").write_text(
        CONFIG.replace("[tools]", "[rollout]").replace('funcs = ["', 'func = "', 1).replace('multiply"]', 'multiply"')
    )
    assert load_run("grpo", tmp_path / "run.toml").rollout.func.endswith("calculator.py:multiply")


def test_python(tmp_path):
    seen = []

    def rollout(prompts, trainer):
        seen.append((len(prompts), trainer.num_generations, trainer.args.max_completion_length))
        prompts[0].append("a change of the copy")
        return rollouts.single(prompts[1:2] + prompts[1:], trainer)

    with open(TOOLS / "train.jsonl") as file:
        rows = [json.loads(line) for line in file][:4]
    keys = SETTINGS | {"num_generations": 4, "max_steps": 1, "per_device_train_batch_size": 4}
    args = GRPOConfig(output_dir=str(tmp_path / "run"), **keys)
    rewards = f"{TOOLS / 'calculator.py'}:product"
    trainer = GRPOTrainer(TOOLS / "model", rewards, args, rows, rollout_func=rollout)
    trainer.train()
    assert seen[0] == (4, 4, 48) and len(completions_of(trainer.run)[0]["prompt"]) == 1
    with pytest.raises(TypeError, match="rollout_func must be a function or its name, got int"):
        GRPOTrainer(TOOLS / "model", rewards, args, rows, rollout_func=3)


def test_the_function_of_the_documentation(drawing):
    """It asks twice, and only the drawn tokens are trained on."""
    page = (TOOLS.parents[1] / "docs" / "agents.md").read_text()
    names = {}
    exec(page[page.index("from rlnumba.environments.turns import suffix_ids") :].partition("```")[0], names)
    (output,) = drawing(names["rollout"])
    for completion in output.completions:
        drawn = [int(i) for i, is_drawn in zip(completion.token_ids, completion.mask, strict=True) if is_drawn]
        assert completion.mask[0] and completion.mask[-1] and completion.episode.num_turns == 2 and len(drawn) > 2
        assert "Are you sure? Answer again." in completion.text
        assert completion.episode.value.columns.keys() == {"first_answer"}
