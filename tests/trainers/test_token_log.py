"""tokens.jsonl: the values of tokens that an optimizer step has, on the lines of their completions."""

import json
import re

import numpy as np
import pytest

from rlnumba.config import load_run
from rlnumba.data import Prompt
from rlnumba.engine.sequence import Completion
from rlnumba.errors import ConfigError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.runs.token_log import TokenLog, token_texts
from rlnumba.sampling.samples import Generation, Sample
from rlnumba.trainers import grpo, rloo
from rlnumba.trainers.rollout import Rollouts
from tests.trainers.runs import MODEL, grpo_run, metrics_of, rloo_run


def lines(run, name):
    with open(f"{run.output_dir}/{name}") as file:
        return [json.loads(line) for line in file]


def final_weights(run):
    with open(f"{run.output_dir}/final/model.safetensors", "rb") as file:
        return file.read()


def check_rows(run, found, drawn):
    """Each row of tokens.jsonl has the text and the advantage of its line of completions.jsonl."""
    for row in found:
        line = [each for each in drawn if each["step"] == row["completion_step"]][row["index"]]
        # Special tokens are no part of the completion.
        assert re.sub(r"<\w+>", "", "".join(row["tokens"])) == line["completion"]
        assert row["advantage"] == pytest.approx([line["advantage"]] * len(row["tokens"]), abs=1e-6)
        lists = [row[name] for name in ("token_ids", "mask", "logprobs", "sampling_logprobs", "ratio", "entropy")]
        assert {len(each) for each in lists} == {len(row["tokens"])} and set(row["mask"]) == {1}


def test_values_of_grpo(tmp_path):
    """Two generations, each trained on twice in two parts, whose sequences are shuffled."""
    options = {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 5}
    options |= {"learning_rate": 1e-2}
    run = grpo_run(tmp_path / "run", log_token_values=-1, **options)
    grpo.run_grpo(run)
    found, drawn, metrics = lines(run, "tokens.jsonl"), lines(run, "completions.jsonl"), metrics_of(run)
    check_rows(run, found, drawn)
    by_step = {step: [row for row in found if row["step"] == step] for step in range(1, 6)}
    assert [len(rows) for rows in by_step.values()] == [8] * 5
    assert [{row["completion_step"] for row in rows} for rows in by_step.values()] == [{1}, {1}, {1}, {1}, {5}]
    # Each completion of a generation once in two steps.
    for first in (1, 3):
        assert sorted(row["index"] for s in (first, first + 1) for row in by_step[s]) == list(range(16))
    for step, rows in by_step.items():
        entropies, logprobs, sampled, ratios = (
            np.concatenate([row[name] for row in rows])
            for name in ("entropy", "logprobs", "sampling_logprobs", "ratio")
        )
        assert entropies.mean() == pytest.approx(metrics[step - 1]["entropy"], abs=1e-5)
        assert ratios == pytest.approx(np.exp(logprobs - sampled), abs=1e-4)
        # The first step changes the weights that drew the completions; before, token by token, all is equal.
        assert (np.abs(logprobs - sampled).max() == 0) == (step in (1, 5))
    plain = grpo_run(tmp_path / "plain", **options)
    grpo.run_grpo(plain)
    assert final_weights(plain) == final_weights(run) and not (tmp_path / "plain" / "tokens.jsonl").exists()


def test_some_completions_and_a_resumption(tmp_path):
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 2, "save_steps": 1}
    run = rloo_run(tmp_path / "run", log_token_values=3, **options)
    rloo.run_rloo(run)
    found = lines(run, "tokens.jsonl")
    check_rows(run, found, lines(run, "completions.jsonl"))
    assert sorted(row["index"] for row in found) == [0, 1, 2]
    # In the middle of a generation: its lines are not known any more.
    rloo.run_rloo(run, resume=1)
    again = lines(run, "tokens.jsonl")
    assert [row for row in again if row["step"] == 1] == [row for row in found if row["step"] == 1]
    rest = [row for row in again if row["step"] == 2]
    assert [(row["completion_step"], row["index"]) for row in rest] == [(None, None)] * 3
    before = lines(run, "earlier-1/tokens.jsonl")
    assert before == found


def test_rows_in_any_order():
    """Masked tokens, equal completions, and several generations of a step."""

    class Writer:
        rows = []

        def tokens(self, step, rows):
            self.rows += [{"step": step} | row for row in rows]

    def samples(*ids):
        found = []
        for each in ids:
            completion = Completion(each, [-0.5 * (i + 1) for i in range(len(each))], "stop")
            found.append(Sample(Prompt("", [1, 2], {}, ""), completion, np.zeros(1), 0.0, {}, advantage=each[0] * 1.0))
        return found

    log = TokenLog(Writer(), Tokenizer.from_folder(MODEL), 4)
    first, second = samples([5, 6], [7], [5, 6]), samples([8, 9, 10], [11])
    log.begin(3, Generation([first]))
    log.begin(3, Generation([second]))
    log.step = 3
    parts = [Rollouts.of([second[1], first[2], second[0]], False), Rollouts.of([first[1], first[0]], False)]
    parts[0].loss_mask[:] = [1, 1, 1, 1, 0, 1]
    parts[1].on_policy = True
    results = [
        {"logprobs": np.float32([-0.5, -0.5, -1.0, -0.4, -1.0, -1.6]), "entropy": np.float32([1, 2, 3, 4, 5, 6])},
        {"logprobs": np.float32([-0.7, -0.5, -1.0]), "entropy": np.float32([7, 8, 9])},
    ]
    log.write(parts, results)
    rows = Writer.rows
    assert [(row["step"], row["completion_step"], row["index"]) for row in rows] == [(3, 3, i) for i in range(4)]
    assert [row["token_ids"] for row in rows] == [[5, 6], [7], [5, 6], [8, 9, 10]]
    # The first of equal ones is the first that is trained on.
    assert [row["entropy"] for row in rows] == [[2, 3], [7], [8, 9], [4, 5, 6]]
    assert rows[3]["mask"] == [1, 0, 1] and rows[3]["advantage"] == [8.0] * 3
    assert rows[3]["ratio"] == pytest.approx(np.exp([0.1, 0.0, -0.1]), abs=1e-6) and rows[1]["ratio"] == [1.0]


def test_turns_of_an_environment_have_no_values():
    """The values of drawn tokens stay on their tokens, beside a completion that was drawn as a whole."""
    found = []

    class Writer:
        def tokens(self, step, rows):
            found.extend(rows)

    turns = Completion([5, 6, 7, 8], [-1.0, 0.0, 0.0, -2.0], "stop", mask=np.array([True, False, False, True]))
    whole = Completion([9, 10], [-3.0, -4.0], "stop")
    samples = [Sample(Prompt("", [1], {}, ""), each, np.zeros(1), 0.0, {}, advantage=2.0) for each in (whole, turns)]
    log = TokenLog(Writer(), Tokenizer.from_folder(MODEL), -1)
    log.begin(1, Generation([samples]))
    logprobs, entropy = np.float32([-1.0, -2.0, -3.5, -4.0]), np.float32([1, 2, 3, 4])
    log.write([Rollouts.of(samples[::-1], False)], [{"logprobs": logprobs, "entropy": entropy}])
    drawn_whole, of_turns = found
    assert (of_turns["index"], of_turns["token_ids"], of_turns["mask"]) == (1, [5, 6, 7, 8], [1, 0, 0, 1])
    assert of_turns["logprobs"] == of_turns["sampling_logprobs"] == [-1.0, None, None, -2.0]
    assert of_turns["entropy"] == [1, None, None, 2] and of_turns["ratio"] == [1, None, None, 1]
    assert of_turns["advantage"] == [2, None, None, 2] and len(of_turns["tokens"]) == 4
    assert drawn_whole["entropy"] == [3, 4] and drawn_whole["ratio"] == pytest.approx([np.exp(-0.5), 1], abs=1e-6)


@pytest.mark.parametrize("text", ["a b  c", "日本語 und 🙂🙂", "naïve\n\tx", ""])
def test_texts_of_tokens_join(text):
    """Of bytes as tokens, some of which are parts of a character."""
    ids = list(text.encode())

    def decode(ids):
        return bytes(ids).decode("utf-8", "replace")

    found = token_texts(decode, ids)
    assert len(found) == len(ids) and "".join(found) == text and "\ufffd" not in "".join(found)
    # A last character that is not complete stays a sign of that.
    assert "".join(token_texts(decode, ids + [0xE6, 0x97])) == text + "\ufffd"


def test_texts_of_tokens_of_a_decoder_that_strips():
    """A first token loses its space, as SentencePiece's does."""
    words = ["▁the", "▁ca", "t", "▁", "▁sat"]
    found = token_texts(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" "), range(5))
    assert found == ["the", " ca", "t", " ", " sat"]


def test_ppo_has_no_token_values(tmp_path):
    (tmp_path / "run.toml").write_text('model = "m"\n[data]\ntrain = "t"\n[train]\nlog_token_values = 1\n')
    with pytest.raises(ConfigError, match="log_token_values is a key of grpo, rloo and distill"):
        load_run("ppo", [tmp_path / "run.toml"], [])
