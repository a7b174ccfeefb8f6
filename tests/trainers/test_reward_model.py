"""Sequence-classification folders as rewards: tokenised as in training, batched, and refused in one line."""

import json

import numpy as np
import pytest

from rlnumba import rewards
from rlnumba.config import DataConfig, RewardsConfig
from rlnumba.data import encode_scored
from rlnumba.data.pairs import parse_pair
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.config import SCORE_HEAD
from rlnumba.model.sequence_score import score_sequences
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model, save_model
from rlnumba.model.weights import write_json
from rlnumba.rewards import RewardError
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.reward_model import RewardModel, load_rewards
from rlnumba.trainers.trainer import GRPOConfig, GRPOTrainer
from tests.trainers.runs import MODEL, grpo_config, grpo_run, metrics_of

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ end or '.' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A reward model with a random head and a chat template."""
    path = tmp_path / "judge"
    save_model(load_model(MODEL, "float32", SCORE_HEAD, "normal"), path, Tokenizer.from_folder(MODEL))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    write_json(path / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    return path


def with_rewards(run, *funcs, **settings):
    return type(run)(**vars(run) | {"rewards": RewardsConfig(funcs=[str(f) for f in funcs], **settings)})


def scores_of(folder, texts):
    """Scores of texts, an EOS after each."""
    tokenizer = Tokenizer.from_folder(folder)
    return score_sequences(load_model(folder, "float32", SCORE_HEAD), [tokenizer.encode(text) + [1] for text in texts])


def test_text_is_tokenised_as_in_training(folder):
    tokenizer = Tokenizer.from_folder(folder)
    rows = [
        {"prompt": "what? ", "chosen": "a", "rejected": "b"},
        {
            "prompt": [{"role": "user", "content": "what? "}],
            "chosen": [{"role": "assistant", "content": "a"}],
            "rejected": [{"role": "assistant", "content": "b"}],
        },
        {"prompt": [{"role": "user", "content": "hi"}], "chosen": "a", "rejected": "b", "tools": [{"name": "add"}]},
    ]
    variables = {"end": "="}
    model = RewardModel(folder, variables)
    for row in rows:
        pair = parse_pair(row, "row", True, DataConfig(train="x", chat_template_kwargs=variables), tokenizer, (1,))
        ids = pair.prompt_ids + pair.chosen_ids
        columns = {"tools": [row.get("tools")], "answer": ["none"]}
        (score,) = model.score([row["prompt"]], [row["chosen"]], columns)
        assert score == score_sequences(model.model, [ids])[0]
        assert encode_scored(tokenizer, row["prompt"], row["chosen"], (1,), **variables, tools=row.get("tools")) == ids


def test_scores_do_not_depend_on_the_batch(folder):
    model = RewardModel(folder, {})
    prompts, completions = ["a", "what is 1+1? ", "b"] * 30, ["", "2.", "a longer completion than the others"] * 30
    together = model.score(prompts, completions, {})
    assert together == [model.score([p], [c], {})[0] for p, c in zip(prompts[:3], completions[:3], strict=True)] * 30
    assert len(set(together)) == 3


def test_a_run_with_a_model_and_a_function(tmp_path, folder):
    """Its values are those of the texts in completions.jsonl, and its metrics have the folder's name."""
    run = grpo_run(tmp_path / "run", max_steps=2, num_prompts=4)
    run_grpo(with_rewards(run, folder, *run.rewards.funcs, weights=[0.5, 2.0]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    expected = scores_of(folder, [row["prompt"] + row["completion"] for row in rows])
    ended = [text["completion"] for text in rows]
    assert [row["judge"] for row in rows] == expected.tolist() and len(set(ended)) > 8
    assert rows[0]["reward"] == pytest.approx(0.5 * rows[0]["judge"] + 2 * rows[0]["digits"])
    for step, metrics in enumerate(metrics_of(run), 1):
        values = [row["judge"] for row in rows if row["step"] == step]
        assert metrics["rewards/judge/mean"] == pytest.approx(np.mean(values), rel=1e-6)


def test_a_policy_learns_what_a_reward_model_likes(tmp_path, folder):
    run = grpo_run(tmp_path / "run", max_steps=30, num_prompts=4, learning_rate=5e-3)
    run_grpo(with_rewards(run, folder))
    values = [metrics["rewards/judge/mean"] for metrics in metrics_of(run)]
    spread = metrics_of(run)[0]["rewards/judge/std"]
    assert np.mean(values[-5:]) > np.mean(values[:5]) + spread


def test_in_python(tmp_path, folder):
    args = {field: getattr(grpo_config(max_steps=1), field) for field in ("max_steps", "num_generations")}
    args = GRPOConfig(output_dir=str(tmp_path / "run"), max_completion_length=4, per_device_train_batch_size=4, **args)
    trainer = GRPOTrainer(MODEL, str(folder), args, [{"prompt": "what? "}])
    trainer.train()
    assert trainer.run.rewards.funcs == [str(folder)]
    assert "rewards/judge/mean" in metrics_of(trainer.run)[0]


def test_two_models_have_their_paths_as_names(tmp_path, folder):
    other = tmp_path / "other" / "judge"
    save_model(load_model(folder, "float32", SCORE_HEAD), other, Tokenizer.from_folder(folder))
    run = with_rewards(grpo_run(tmp_path / "run"), folder, other)
    assert load_rewards(run).names == [str(folder), str(other)]


def test_a_failure_is_a_reward_s(tmp_path, folder):
    """A text that is longer than the model ends the run, or is skipped, as of a function; so do weights with NaN."""
    run = grpo_run(tmp_path / "run")
    for errors in ("raise", "skip"):
        loaded = load_rewards(with_rewards(run, folder, reward_errors=errors))
        arguments = ["a"], ["b" * 256], [[3]], {}
        if errors == "raise":
            message = "reward judge: a sequence of 258 tokens cannot be scored: the model has 256 positions"
            with pytest.raises(RewardError, match=message):
                loaded.score(*arguments)
        else:
            scores = loaded.score(*arguments)
            assert np.isnan(scores.values).all() and scores.errors == {"judge": 1}
            # Groups are scored together; only the completion that is too long has no value.
            groups = [(["a", "a"], ["b", "b" * 256], [[3], [3]], {}), (["a"], ["b"], [[3]], {})]
            scores = loaded.collect([loaded.submit(*group) for group in groups])
            assert np.isnan(scores.values[:, 0]).tolist() == [False, True, False] and scores.errors == {"judge": 1}
            assert scores.values[0, 0] == scores.values[2, 0]


def test_a_model_has_no_timeout(tmp_path, folder, monkeypatch):
    """Compiling its kernels may take longer than a function may."""
    run = with_rewards(grpo_run(tmp_path / "run"), folder, timeout=1e-6)
    assert np.isfinite(load_rewards(run).score(["a"], ["b"], [[3]], {}).values).all()


def test_folders_that_are_refused(tmp_path, folder):
    run = grpo_run(tmp_path / "run")
    raw = json.loads((folder / "config.json").read_text())

    def refused(spec, message):
        with pytest.raises(UserError, match=message) as caught:
            load_rewards(with_rewards(run, spec))
        assert "\n" not in str(caught.value)

    refused("runs/no/such", "rewards.funcs: no such folder: runs/no/such")
    refused(tmp_path, "config.json: no such file")
    refused(MODEL, "tiny-qwen3 is Qwen3ForCausalLM, not a sequence-classification model")
    write_json(folder / "config.json", raw | {"id2label": {"0": "no", "1": "yes"}})
    refused(folder, "judge/config.json: Qwen3ForSequenceClassification with 2 labels is not supported")
    write_json(folder / "config.json", raw)
    (folder / "tokenizer.json").unlink()
    refused(folder, "judge has no tokenizer.json")
    with pytest.raises(ConfigError, match="judge is a folder, and models are no rewards here"):
        rewards.load_rewards(RewardsConfig(funcs=[str(folder)]))
