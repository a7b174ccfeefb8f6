"""The command line: results, exit codes and one-line messages, mostly inside this process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlnumba import cli
from rlnumba.engine.core import Engine, PromptError
from rlnumba.model import transformer
from rlnumba.model.sequence_score import score_sequences
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.runtime import device

MODEL = str(Path(__file__).parent / "golden" / "tiny-qwen3")
ROWS = [{"prompt": "what is 3+4? "}, {"prompt_token_ids": [5, 6, 7]}, {"prompt": "a"}]

pytestmark = pytest.mark.skipif(device.name() == "sim", reason="whole models take too long in the simulator")


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def fails(capsys):
    def fails(code, message, *arguments):
        """The command ends with this code and one line on stderr that holds the message."""
        capsys.readouterr()
        assert cli.run([str(a) for a in arguments]) == code
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("device ")]
        assert len(lines) == 1 and lines[0].startswith("rlnumba: "), lines
        assert message in lines[0]

    return fails


def generate(tmp_path, rows, *options, model=MODEL, name="out.jsonl"):
    output = tmp_path / name
    arguments = ["generate", "--model", model, "--prompts", write(tmp_path / "in.jsonl", rows), "--output", output]
    assert cli.run([str(a) for a in [*arguments, "--max-tokens", "12", *options]]) == 0
    return read(output)


def score(tmp_path, rows, *options, model=MODEL):
    output = tmp_path / "scored.jsonl"
    arguments = ["score", "--model", model, "--input", write(tmp_path / "in.jsonl", rows), "--output", output]
    assert cli.run([str(a) for a in [*arguments, *options]]) == 0
    return read(output)


def test_generate(tmp_path):
    results = generate(tmp_path, ROWS, "--n", 2, "--seed", 3)
    assert [len(r["completions"]) for r in results] == [2, 2, 2]
    assert results[1]["prompt_token_ids"] == [5, 6, 7]
    for result in results:
        for completion in result["completions"]:
            assert set(completion) == {"text", "token_ids", "logprobs", "finish_reason"}
            assert len(completion["logprobs"]) == len(completion["token_ids"]) <= 12
            stopped = completion["finish_reason"] == "stop"
            assert (completion["token_ids"][-1] == 1) == stopped and "<eos>" not in completion["text"]
            # A character is a token; ids 3 to 45 have one.
            assert len(completion["text"]) == sum(2 < i < 46 for i in completion["token_ids"])
    # A token depends on seed, prompt, index and position: not on the line, the others, n or max_tokens.
    assert (
        generate(tmp_path, ROWS[::-1], "--n", 4, "--seed", 3, "--max-num-seqs", 2)[2]["completions"][:2]
        == (results[0]["completions"])
    )
    short = generate(tmp_path, ROWS, "--seed", 3, "--max-tokens", 5)[0]["completions"][0]
    assert short["token_ids"] == results[0]["completions"][0]["token_ids"][:5]
    assert generate(tmp_path, ROWS, "--seed", 4) != generate(tmp_path, ROWS, "--seed", 3)


def test_generate_keeps_the_columns_of_its_rows(tmp_path):
    rows = [
        {"prompt": "what is 3+4? ", "answer": 7, "completions": "replaced"},
        {"prompt_token_ids": [5, 6], "id": "b"},
    ]
    results = generate(tmp_path, rows)
    for row, result in zip(rows, results, strict=True):
        assert [*result] == [*dict.fromkeys([*row, "prompt_token_ids", "completions"])]
        assert {name: result[name] for name in row} == row | {
            name: result[name] for name in row if name == "completions"
        }
    assert results[0]["prompt"] == "what is 3+4? " and results[0]["answer"] == 7
    renamed = [{"q": "what is 3+4? ", "prompt": "not this"}]
    (found,) = generate(tmp_path, renamed, "--prompt-column", "q")
    assert found == renamed[0] | {name: results[0][name] for name in ("prompt_token_ids", "completions")}
    # What it wrote may be its input.
    assert generate(tmp_path, results) == results
    scored = score(tmp_path, [{"q": "1+", "completion": "1=2."}], "--prompt-column", "q")
    assert scored[0]["q"] == "1+" and scored[0]["token_ids"] == score(tmp_path, [{"text": "1+1=2."}])[0]["token_ids"]


def test_options_have_two_spellings_and_the_device_two_places(tmp_path, capsys):
    dashes = generate(tmp_path, ROWS, "--max-tokens", 3, "--top-k", 5)
    assert generate(tmp_path, ROWS, "--max_tokens", 3, "--top_k", 5, "--device", device.name()) == dashes
    assert cli.run(["env", "--device", device.name()]) == 0
    assert cli.run(["plot", "--debug", "/nowhere", "--output", "x.png"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_run_without_a_file(tmp_path, capsys):
    prompts = write(tmp_path / "in.jsonl", [{"prompt": f"what is {i}? "} for i in range(8)])
    keys = ["--model", MODEL, "--data.train", prompts, "--rewards.funcs", "think_format_reward", "--train.max-steps", 3]
    arguments = ["grpo", *map(str, keys), "--device", device.name(), "--dry-run"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    assert 'output_dir = "trainer_output"' in shown and "max_steps = 3" in shown
    assert cli.run(["plan", *map(str, keys), "--train.per_device_train_batch_size", "8"]) == 0
    assert capsys.readouterr().out.startswith(f"grpo of {MODEL} on ")
    # As `trl sft` has it.
    trl = [
        "--model_name_or_path",
        MODEL,
        "--dataset_name",
        prompts,
        "--dataset_train_split",
        "all",
        "--output_dir",
        "o",
    ]
    assert cli.run(["sft", *trl, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f'train = "{prompts}"' in shown and 'split = "all"' in shown and 'output_dir = "o"' in shown


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.0])
def test_score_gives_the_log_probs_of_generate(tmp_path, temperature):
    results = generate(tmp_path, ROWS, "--temperature", temperature, "--n", 2, "--ignore-eos")
    pairs = [(r["prompt_token_ids"], c) for r in results for c in r["completions"]]
    scored = score(
        tmp_path, [{"token_ids": prompt + c["token_ids"]} for prompt, c in pairs], "--temperature", temperature
    )
    for (prompt, c), line in zip(pairs, scored, strict=True):
        assert line["token_ids"] == prompt + c["token_ids"] and line["logprobs"][0] is None
        if device.name() == "cpu":
            assert line["logprobs"][len(prompt) :] == c["logprobs"]
        else:
            np.testing.assert_allclose(line["logprobs"][len(prompt) :], c["logprobs"], atol=1e-3)


def test_bad_rows_end_before_the_weights_are_read(tmp_path, fails):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).symlink_to(Path(MODEL) / name)
    rest = ["--output", tmp_path / "out.jsonl", "--model", bare]
    for row, message in (
        ({"prompt_token_ids": [48]}, "in.jsonl:1: token id 48 is outside"),
        ({"prompt": "a" * 257}, "in.jsonl:1: 257 tokens are more than the limit of 256"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "in.jsonl:1: "),
    ):
        fails(1, message, "generate", "--prompts", write(tmp_path / "in.jsonl", [row]), *rest)
    prompts = write(tmp_path / "in.jsonl", ROWS)
    fails(2, "max_model_len 257", "generate", "--prompts", prompts, *rest, "--max-model-len", 257)
    fails(1, "no model.safetensors", "generate", "--prompts", prompts, *rest)
    for row in ({"token_ids": [48]}, {"prompt": "a" * 200, "completion": "b" * 200}):
        fails(1, "in.jsonl:1: ", "score", "--input", write(tmp_path / "in.jsonl", [row]), *rest)


def test_a_model_of_nan_is_an_error(tmp_path, fails):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").symlink_to(Path(MODEL) / "config.json")
    tensors = load_file(Path(MODEL) / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, broken / "model.safetensors")
    source = write(tmp_path / "in.jsonl", [{"prompt_token_ids": [5, 6], "token_ids": [5, 6]}])
    output = tmp_path / "out.jsonl"
    for command in (["generate", "--prompts", source], ["score", "--input", source]):
        fails(1, "log-probs are not finite", *command, "--model", broken, "--output", output)


def test_rows_beside_one_that_fails_are_written(tmp_path, monkeypatch, capsys):
    step, failing = Engine.step, {1}

    def step_or_fail(engine):
        if hit := failing & engine.requests.keys():
            raise PromptError(min(hit), "no numbers")
        return step(engine)

    expected = generate(tmp_path, ROWS)
    monkeypatch.setattr(Engine, "step", step_or_fail)
    output = tmp_path / "others.jsonl"
    arguments = ["generate", "--model", MODEL, "--prompts", tmp_path / "in.jsonl", "--output", output]
    capsys.readouterr()
    assert cli.run([str(a) for a in [*arguments, "--max-tokens", 12]]) == 1
    assert f"rlnumba: {tmp_path}/in.jsonl:2: no numbers; {output} has the others\n" in capsys.readouterr().err
    failed = {"prompt_token_ids": [5, 6, 7], "completions": [], "error": "no numbers"}
    assert read(output) == [expected[0], failed, expected[2]]
    # Of none there is no output.
    failing |= {0, 2}
    output.unlink()
    assert cli.run([str(a) for a in [*arguments, "--max-tokens", 12]]) == 1
    assert "in.jsonl:1: no numbers, and 2 more of 3 prompts\n" in capsys.readouterr().err and not output.exists()


def test_score_of_text_does_not_append_eos(tmp_path):
    row = {"prompt": "1+", "completion": "1=2."}
    (pair, ids) = score(tmp_path, [row, {"token_ids": [4]}])
    (again,) = score(tmp_path, [{"token_ids": pair["token_ids"]}])
    assert len(pair["token_ids"]) == 6 and pair["token_ids"][-1] != 1 and row | again == pair
    # A text alone is the same tokens; a line that was written may be read again.
    (text, same) = score(tmp_path, [{"text": "1+1=2.", "id": 7}, pair])
    assert text == {"text": "1+1=2.", "id": 7} | again and same == pair
    assert ids == {"token_ids": [4], "logprobs": [None]}


def test_tools_and_variables_of_a_row_reach_the_template(tmp_path, capsys):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{{ tools[0].name }}{{ mood }}: {% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    row = {"prompt": [{"role": "user", "content": "ask"}], "completion": "answer", "tools": [{"name": "find"}]}
    row["chat_template_kwargs"] = {"mood": "sad"}
    tokenizer = Tokenizer(folder)
    (found,) = generate(tmp_path, [row], "--max-tokens", 1, model=str(folder))
    assert tokenizer.decode(found["prompt_token_ids"]) == tokenizer.decode(tokenizer.encode("findsad: ask "))
    (found,) = score(tmp_path, [row], model=str(folder))
    assert tokenizer.decode(found["token_ids"]) == tokenizer.decode(tokenizer.encode("findsad: ask answer "))
    capsys.readouterr()
    generate(tmp_path, [{"prompt": "ask", "tools": [{"name": "find"}]}], "--max-tokens", 1, model=str(folder))
    assert "in.jsonl:1: tools has no effect: no chat template is applied to a text" in capsys.readouterr().err


def test_score_of_a_sequence_classification_model(tmp_path, fails):
    """One number a line; EOS is appended to text, as in training, and --temperature means nothing."""
    folder = tmp_path / "judge"
    model = transformer.load_model(MODEL, None, ("score",), "normal")
    transformer.save_model(model, folder, Tokenizer.from_folder(MODEL))
    rows = [{"prompt": "1+", "completion": "1=2."}, {"token_ids": [4, 7]}, {"prompt": "1+", "completion": "1=2.<eos>"}]
    rows.append({"text": "1+1=2."})
    text, ids, ended, alone = (
        {name: line[name] for name in ("token_ids", "score")} for line in score(tmp_path, rows, model=folder)
    )
    assert len(text["token_ids"]) == 7 and text["token_ids"][-1] == 1 and ended == alone == text
    assert ids["token_ids"] == [4, 7]
    expected = score_sequences(model, [text["token_ids"], ids["token_ids"]]).tolist()
    assert [text, ids] == [
        {"token_ids": each["token_ids"], "score": s} for each, s in zip([text, ids], expected, strict=True)
    ]
    files = ["--input", write(tmp_path / "in.jsonl", rows), "--output", tmp_path / "out.jsonl"]
    message = "--temperature does not apply to Qwen3ForSequenceClassification"
    fails(2, message, "score", "--model", folder, *files, "--temperature", "0.5")
    prompts = ["--prompts", write(tmp_path / "prompts.jsonl", ROWS), "--output", tmp_path / "out.jsonl"]
    for command, options in (("generate", prompts), ("check", [])):
        fails(
            1, "judge: Qwen3ForSequenceClassification has no language-model head", command, "--model", folder, *options
        )
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"id2label": {"0": "no", "1": "yes"}}))
    fails(1, "Qwen3ForSequenceClassification with 2 labels is not supported", "score", "--model", folder, *files)


def test_score_takes_whole_sequences_of_at_most_32768_tokens_together(tmp_path, monkeypatch):
    """Its batches, and the forwards that compute them, of 8192 tokens at most, so that memory does not grow."""
    batches, forwards = [], []

    def counted(model, batch, *arguments, **options):
        batches.append(list(batch.lengths))
        return score_batch(model, batch, *arguments, **options)

    def forward(self, input_ids, *arguments, **options):
        forwards.append(len(input_ids))
        return device.xp().zeros((len(input_ids), self.config.hidden_size), self.dtype)

    score_batch = transformer.score
    monkeypatch.setattr(transformer, "score", counted)
    monkeypatch.setattr(transformer.Transformer, "forward", forward)
    lengths = [256] * 126 + [255, 256, 2, 256]
    scored = score(tmp_path, [{"token_ids": [5 + i % 7] * length} for i, length in enumerate(lengths)])
    assert batches == [lengths[:128], lengths[128:]] and sum(lengths[:128]) == 32767
    assert forwards == [8192, 8192, 8192, 8191, 258]
    assert [len(row["logprobs"]) for row in scored] == lengths
    # Without a hidden state every token is as likely as any other.
    assert {value for row in scored for value in row["logprobs"][1:]} == {scored[0]["logprobs"][1]}


def test_token_ids_need_no_tokenizer(tmp_path, fails):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(Path(MODEL) / name)
    (result,) = generate(tmp_path, [{"prompt_token_ids": [5, 6]}], model=str(bare))
    assert result["completions"][0]["text"] == "" and result["completions"][0]["token_ids"]
    assert len(score(tmp_path, [{"token_ids": [5, 6]}], model=str(bare))[0]["logprobs"]) == 2
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    fails(
        1,
        "in.jsonl:1: text needs a tokenizer",
        "generate",
        "--model",
        bare,
        "--prompts",
        source,
        "--output",
        "/dev/null",
    )


BAD_PROMPTS = [
    ([], "in.jsonl: holds no rows"),
    ([{"prompt": "a"}, "{oops\n"], "in.jsonl:2: not JSON"),
    (
        [{"prompt": "a"}, {"text": "a"}],
        "in.jsonl:2: needs either 'prompt_token_ids' or 'prompt'; its columns are text; --prompt-column names that",
    ),
    ([{"prompt": ""}], "in.jsonl:1: 'prompt' is empty"),
    ([{"prompt": []}], "in.jsonl:1: 'prompt' must be a non-empty list of messages"),
    ([{"prompt": 3}], "in.jsonl:1: 'prompt' must be a string or a list of messages, got int 3"),
    ([{"prompt": "a"}, {"prompt_token_ids": []}], "in.jsonl:2: 'prompt_token_ids' is empty"),
    ([{"prompt_token_ids": [1.5]}], "in.jsonl:1: 'prompt_token_ids' must be a list of integers"),
    (
        [{"prompt": "a"}, {"prompt_token_ids": [48]}],
        "in.jsonl:2: token id 48 is outside of the model's vocabulary of 48",
    ),
    ([{"prompt_token_ids": [2**70]}], "in.jsonl:1: token id 1180591620717411303424 is outside"),
    ([{"prompt_token_ids": [-1]}], "in.jsonl:1: token id -1 is outside"),
    ([{"prompt": "a"}, {"prompt": "a" * 257}], "in.jsonl:2: 257 tokens are more than the limit of 256"),
    ([{"prompt": [{"role": "user", "content": "a"}]}], "in.jsonl:1: "),
]


@pytest.mark.parametrize("rows, message", BAD_PROMPTS)
def test_bad_prompts_end_before_the_start(tmp_path, fails, rows, message):
    output = tmp_path / "out.jsonl"
    output.write_text("kept")
    fails(1, message, "generate", "--model", MODEL, "--prompts", write(tmp_path / "in.jsonl", rows), "--output", output)
    assert output.read_text() == "kept" and len(list(tmp_path.iterdir())) == 2


BAD_SCORES = [
    ([{"token_ids": [5]}, {"token_ids": []}], "in.jsonl:2: 'token_ids' is empty"),
    ([{"token_ids": [5, 99]}], "in.jsonl:1: token id 99 is outside of the model's vocabulary of 48"),
    ([{"token_ids": [5] * 257}], "in.jsonl:1: 257 tokens are more than the limit of 256"),
    (
        [{"prompt": "a", "chosen": "b"}],
        "in.jsonl:1: needs either 'token_ids' or 'prompt' and 'completion', or 'text'; its columns are prompt, chosen",
    ),
    ([{"text": 3}], "in.jsonl:1: 'text' must be a string"),
    ([{"text": ""}], "in.jsonl:1: the text has no tokens"),
    ([{"prompt": "a", "completion": 3}], "in.jsonl:1: 'completion' must be a string or a list of messages"),
    ([{"prompt": "", "completion": "b"}], "in.jsonl:1: 'prompt' is empty"),
    ([{"completion": "b"}], "in.jsonl:1: needs either 'token_ids' or 'prompt' and 'completion'"),
    ([{}], "its columns are none"),
]


@pytest.mark.parametrize("rows, message", BAD_SCORES)
def test_bad_rows_of_score(tmp_path, fails, rows, message):
    fails(
        1, message, "score", "--model", MODEL, "--input", write(tmp_path / "in.jsonl", rows),
        "--output", tmp_path / "out.jsonl",
    )  # fmt: skip
    assert not (tmp_path / "out.jsonl").exists()


def test_generate_stops_at_ids_and_strings(tmp_path):
    free = generate(tmp_path, ROWS, "--seed", 3, "--ignore-eos", "--max-tokens", 30)[0]["completions"][0]
    options = ("--seed", 3, "--ignore-eos", "--max-tokens", 30)
    token, stop = free["token_ids"][4], free["text"][3:5]
    by_id, by_text, late = (
        generate(tmp_path, ROWS, *options, *more)[0]["completions"][0]
        for more in (("--stop-token-ids", token), ("--stop", "no such", "--stop", stop), ("--min-tokens", 30))
    )
    assert by_id["token_ids"] == free["token_ids"][: free["token_ids"].index(token) + 1]
    assert by_text["text"] == free["text"][: free["text"].index(stop)] and by_text["finish_reason"] == "stop"
    assert by_text["token_ids"] == free["token_ids"][: len(by_text["token_ids"])]
    assert late["token_ids"] == free["token_ids"]
    penalised = generate(tmp_path, ROWS, *options, "--presence-penalty", 2, "--frequency-penalty", 2)
    assert len(set(penalised[0]["completions"][0]["token_ids"])) > len(set(free["token_ids"]))


def test_generate_samples_as_the_models_card_says(tmp_path, fails, capsys):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    asked = ("--temperature", 0.5, "--top-k", 3, "--repetition-penalty", 1.5, "--max-tokens", 6, "--seed", 4)
    expected = generate(tmp_path, ROWS, *asked)
    card = {"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5, "num_beams": 2}
    (folder / "generation_config.json").write_text(json.dumps(card | {"max_new_tokens": 40}))
    capsys.readouterr()
    assert generate(tmp_path, ROWS, "--max-tokens", 6, "--seed", 4, model=str(folder)) == expected
    printed = capsys.readouterr().err
    assert "generation_config.json: repetition_penalty 1.5, temperature 0.5, top_k 3; options of" in printed
    assert "generation_config.json: num_beams is not computed here" in printed
    options = ("--temperature", 0.9, "--top-k", 0, "--seed", 4)
    (folder / "generation_config.json").write_text(json.dumps(card | {"repetition_penalty": 1.0}))
    assert generate(tmp_path, ROWS, *options, model=str(folder)) == generate(tmp_path, ROWS, *options)
    # Without do_sample, temperature and filters mean nothing in transformers.
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    assert generate(tmp_path, ROWS, "--seed", 4, model=str(folder)) == generate(tmp_path, ROWS, "--seed", 4)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 1.5}')
    arguments = ("--model", folder, "--prompts", write(tmp_path / "in.jsonl", ROWS), "--output", tmp_path / "out.jsonl")
    fails(2, "generation_config.json: top_p must be in (0, 1], got 1.5", "generate", *arguments)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--temperature", "-1"), ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "x"),
        ("--top-p", "0"), ("--top-p", "1.5"), ("--top-k", "-2"), ("--min-p", "-0.1"), ("--max-tokens", "0"),
        ("--n", "0"), ("--seed", "-1"), ("--dtype", "int8"), ("--max-model-len", "1"), ("--presence-penalty", "3"),
        ("--frequency-penalty", "-2.1"), ("--min-tokens", "-1"), ("--min-tokens", "129"), ("--stop-token-ids", "-3"),
        ("--temperature", "1e999"), ("--temperature", "1e300"), ("--top-p", "nan"), ("--top-p", "1e-300"),
        ("--min-p", "nan"), ("--repetition-penalty", "1e300"), ("--repetition-penalty", "1e-300"),
        ("--presence-penalty", "nan"), ("--max-num-seqs", "1" + "0" * 30), ("--gpu-memory-utilization", "nan"),
        ("--max-tokens", "1e999"), ("--seed", "1" + "0" * 30), ("--stop-token-ids", "1" + "0" * 30),
        ("--n", "1" + "0" * 30), ("--seed", "7" * 5000),
    ],
)  # fmt: skip
def test_bad_options_are_usage_errors(tmp_path, fails, option, value):
    source = write(tmp_path / "in.jsonl", ROWS)
    arguments = ["generate", "--model", MODEL, "--prompts", source, "--output", tmp_path / "out.jsonl", option, value]
    fails(2, option.removeprefix("--").split("-")[-1], *arguments)


def test_scores_want_a_usable_temperature(tmp_path, fails):
    source = write(tmp_path / "in.jsonl", [{"token_ids": [5]}])
    for value in ("-1", "nan", "inf", "1e-30", "1e300", "1e999"):
        output = tmp_path / "out.jsonl"
        fails(
            2, "temperature", "score", "--model", MODEL, "--input", source, "--output", output, "--temperature", value
        )


def test_usage_errors(fails, tmp_path):
    fails(2, "No such command 'generat'", "generat")
    fails(2, "Missing option '--model'", "generate")
    fails(2, "No such option '--foo'", "env", "--foo")
    fails(2, "--device", "--device", "tpu", "env")
    fails(2, "Missing argument", "plot", "--output", "x.png")
    fails(2, "command line: missing key model; give --model VALUE, or a run file by --config", "grpo")
    fails(2, "command line: missing key data.train; give --data.train VALUE", "plan", "--model", MODEL)
    fails(2, "rewards.funcs must name at least one", "grpo", "--model", MODEL, "--data.train", "t.jsonl")
    fails(1, "asked for, but this process already runs on", "env", "--device", "sim")
    fails(2, "'tpu' is not one of", "env", "--device", "tpu")


def test_missing_and_damaged_models(tmp_path, fails):
    source = write(tmp_path / "in.jsonl", ROWS[1:2])
    rest = ["--prompts", source, "--output", tmp_path / "out.jsonl"]
    fails(1, "no such model folder", "generate", "--model", tmp_path / "missing", *rest)
    broken = tmp_path / "broken"
    broken.mkdir()
    fails(1, "config.json", "generate", "--model", broken, *rest)
    config = json.loads((Path(MODEL) / "config.json").read_text())
    del config["num_hidden_layers"]
    (broken / "config.json").write_text(json.dumps(config))
    fails(1, "num_hidden_layers", "generate", "--model", broken, *rest)
    (broken / "config.json").write_text((Path(MODEL) / "config.json").read_text())
    weights = (Path(MODEL) / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    fails(1, "model.safetensors", "generate", "--model", broken, *rest)
    if device.name() == "cpu":
        fails(2, "bfloat16", "generate", "--model", MODEL, *rest, "--dtype", "bfloat16")


def test_outputs_that_cannot_be_written(tmp_path, fails):
    source = write(tmp_path / "in.jsonl", ROWS)
    missing, long = tmp_path / "no" / "out.jsonl", "o" * 300
    fails(1, "ooo: File name too long", "generate", "--model", MODEL, "--prompts", source, "--output", long)
    fails(1, "no/out.jsonl: cannot be written", "generate", "--model", MODEL, "--prompts", source, "--output", missing)
    fails(1, "cannot be written: Is a directory", "score", "--model", MODEL, "--input", source, "--output", tmp_path)
    run = write(tmp_path / "run.toml", [f'model = "{MODEL}"\noutput_dir = "{source}/x"\n[data]\ntrain = "t.jsonl"\n'])
    fails(1, "in.jsonl/x: cannot be written", "sft", "--config", run)


def test_an_output_is_never_an_input_or_a_file_of_a_run(tmp_path, fails):
    """Exit code 2 and one line, before anything is read: each file has the content that it had."""
    rows, run = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}]), tmp_path / "run"
    (tmp_path / "link.jsonl").symlink_to(rows)
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "completions").mkdir()
    for name in ("config.toml", "metrics.jsonl", "completions.jsonl", "completions/1.parquet", "curves.png"):
        (run / name).write_text("mine")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("mine")
    config = tmp_path / "run.toml"
    config.write_text(f'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t"\neval = "{tmp_path}/e/completions.jsonl"\n')
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "completions.jsonl").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    generate, score = ["generate", "--model", model, "--prompts", rows], ["score", "--model", model, "--input", rows]
    evaluate, merge = ["eval", "--config", config, "--trainer", "sft"], ["merge", "--model", model, "--adapter", model]
    for command, output, message in (
        (generate, rows, "rows.jsonl is what --prompts reads"),
        (generate, tmp_path / "link.jsonl", "link.jsonl is what --prompts reads"),
        (score, rows, "rows.jsonl is what --input reads"),
        (score, model / "config.json", "config.json is a file of the model"),
        (score, run / "completions.jsonl", f"belongs to the run in {run}"),
        (generate, run / "completions" / "1.parquet", f"belongs to the run in {run}"),
        (evaluate, run, f"{run} is the folder of a run; choose one in it, as {run / 'eval'}"),
        (evaluate, tmp_path / "e", "completions.jsonl is what data.eval reads"),
        (evaluate, run / "checkpoints" / "step-1", f"belongs to the run in {run}"),
        (merge, run, "is the folder of a run"),
        (["plot", run], run / "curves.png", f"belongs to the run in {run}"),
        (["plot", run], run / "metrics.jsonl", "is what RUN_DIR"),
    ):
        fails(2, f"--output: {tmp_path}", *command, "--output", output)
        fails(2, message, *command, "--output", output)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_output_that_is_a_link_stays_one(tmp_path):
    source, target, link = (
        write(tmp_path / "in.jsonl", [{"token_ids": [5]}]),
        tmp_path / "t.jsonl",
        tmp_path / "l.jsonl",
    )
    target.write_text("old")
    link.symlink_to("t.jsonl")
    assert cli.run(["score", "--model", MODEL, "--input", source, "--output", str(link)]) == 0
    assert link.is_symlink() and read(target) == [{"token_ids": [5], "logprobs": [None]}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "l.jsonl", "t.jsonl"]


def test_dev_null_is_written_to_and_stays(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"token_ids": [5]}])
    assert cli.run(["score", "--model", MODEL, "--input", source, "--output", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


def test_check(capsys):
    assert cli.run(["check", "--model", MODEL, "--max-tokens", "8"]) == 0
    shown = dict(line.split("   ", 1) for line in capsys.readouterr().out.splitlines())
    assert shown["tokens compared"].split() == ["96"]
    if device.name() == "cpu":
        assert shown["equal bit for bit"].split()[0] == "96" and shown["first differing operator"].split() == ["none"]


@pytest.mark.skipif(device.name() != "cpu", reason="equal bits are promised on the cpu device only")
def test_check_names_the_operator_at_fault(monkeypatch, capsys):
    from rlnumba.engine.steps import attention

    original = attention.paged_attention

    def wrong(*arguments):
        original(*arguments)
        # out, of one sequence in the batch only, and of the tokens it draws.
        arguments[-1][-1, 0, 0] += np.float32(1e-3)

    monkeypatch.setattr(attention, "paged_attention", wrong)
    assert cli.run(["check", "--model", MODEL, "--max-tokens", "4"]) == 1
    captured = capsys.readouterr()
    assert "first differing operator   layer 0 attention, at position" in captured.out
    assert captured.err.splitlines()[-1].startswith("rlnumba: rollout and training differ by up to ")


def test_env(capsys):
    assert cli.run(["env"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"rlnumba", "git", "device", "python", "numpy", "numba", "gemm", "memory"} <= set(names)


@pytest.mark.skipif(device.name() != "cpu", reason="the former name of the cpu device")
def test_former_names_are_accepted(capsys):
    assert cli.run(["--device", "numpy", "--gemm", "auto", "env"]) == 0
    assert "gemm           cpu\n" in capsys.readouterr().out
    assert cli.run(["--gemm", "numba", "env"]) == cli.run(["--gemm", "native", "env"]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert line == "rlnumba: gemm must be auto or cpu on device cpu, got 'native'"


def test_plot(tmp_path, fails):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
    assert cli.run(["plot", str(tmp_path), "--output", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 5000
    fails(1, "missing/metrics.jsonl: no such file", "plot", tmp_path / "missing", "--output", tmp_path / "x.png")


TRAIN = [{"prompt": f"what is {i}+1? ", "completion": f"{i}+1={i + 1}."} for i in range(8)]


@pytest.fixture
def run_file(tmp_path):
    def run_file(kind, **train):
        data = write(tmp_path / "train.jsonl", TRAIN)
        rewards = '[rewards]\nfuncs = ["repetition_penalty_reward"]\n' if kind == "grpo" else ""
        keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in train.items())
        text = (
            f'model = "{MODEL}"\noutput_dir = "{tmp_path}/{kind}"\n[data]\ntrain = "{data}"\n{rewards}[train]\n{keys}'
        )
        return write(tmp_path / f"{kind}.toml", [text])

    return run_file


def test_reward_writes_its_files(tmp_path, run_file, fails, capsys):
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in TRAIN]
    data = write(tmp_path / "pairs.jsonl", rows)
    config = run_file("reward", max_steps=2, per_device_train_batch_size=4, logging_steps=1)
    options = ["--config", config, "--data.train", data, "--train.head-init", "normal"]
    assert cli.run(["reward", *options]) == 0
    folder = tmp_path / "reward"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-2"]
    last = read(folder / "metrics.jsonl")[-1]
    assert {"loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens"} <= last.keys()
    assert len(score(tmp_path, [{"prompt": "a", "completion": "b"}], model=folder / "final")) == 1
    assert cli.run(["reward", *options, "--resume"]) == 0
    write(tmp_path / "pairs.jsonl", [rows[0], {"prompt": "a"}])
    fails(1, "pairs.jsonl:2: ", "reward", *options)


def test_sft_writes_its_files(tmp_path, run_file, capsys):
    config = run_file("sft", max_steps=2, per_device_train_batch_size=4, logging_steps=1)
    assert cli.run(["sft", "--config", config, "--train.learning-rate", "1e-3", "--seed=7"]) == 0
    folder = tmp_path / "sft"
    steps = read(folder / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2] and {"loss", "grad_norm", "num_tokens"} <= set(steps[0])
    assert "learning_rate = 0.001\n" in (folder / "config.toml").read_text()
    assert "seed = 7\n" in (folder / "config.toml").read_text()
    assert (folder / "final" / "config.json").exists() and (folder / "curves.png").exists()
    assert (folder / "checkpoints" / "step-2").is_dir()
    assert "step 2/2" in capsys.readouterr().err
    # What was written can be run again.
    assert cli.run(["sft", "--config", str(folder / "config.toml"), "--dry-run"]) == 0


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_preference_trainers_write_their_files(tmp_path, run_file, fails, kind):
    rows = [{"prompt": f"what is {i}+1? ", "chosen": f"{i + 1}.", "rejected": "no."} for i in range(8)]
    config, data = run_file(kind, max_steps=2, per_device_train_batch_size=4), write(tmp_path / "pairs.jsonl", rows)
    folder, start = tmp_path / kind, [kind, "--config", config, "--data.train"]
    assert cli.run([*start, str(data), "--data.eval", str(data)]) == 0
    steps = read(folder / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    names = {"loss", "grad_norm", "num_tokens", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"}
    assert names | {"logits/chosen", "entropy", "learning_rate", "epoch", "step_time"} <= set(steps[0])
    assert "eval_loss" in steps[1] and ("kl" if kind == "kto" else "rewards/accuracies") in steps[0]
    assert (folder / "final" / "config.json").exists() and (folder / "curves.png").exists()
    assert cli.run([*start, str(data), "--resume"]) == 0
    del rows[2]["rejected"]
    bad = write(tmp_path / "bad.jsonl", rows)
    fails(1, "bad.jsonl:3: no 'rejected'; its columns are prompt, chosen", *start, bad)
    fails(2, "train.loss_type must be one of", *start, data, "--train.loss_type", "none")


def test_dry_run_prints_the_resolved_run_and_does_nothing(tmp_path, run_file, capsys):
    config = run_file("grpo", max_steps=5)
    assert cli.run(["grpo", "--config", config, "--dry-run", "--train.epsilon_high", "0.28"]) == 0
    printed = capsys.readouterr().out
    assert "epsilon_high = 0.28\n" in printed and "max_steps = 5\n" in printed
    assert not (tmp_path / "grpo").exists()


def test_bad_runs(tmp_path, run_file, fails):
    run = ["grpo", "--config", run_file("grpo", max_steps=1)]
    fails(2, "unknown key train.learning_rat; did you mean train.learning_rate?", *run, "--train.learning_rat", "1")
    fails(2, "unexpected argument 'x'", *run, "x")
    fails(2, "missing.toml: no such config file", "sft", "--config", tmp_path / "missing.toml")
    fails(2, "must be divisible by train.num_generations (3)", *run, "--train.num_generations", "3")
    fails(2, "train.top_p must be above 0 and at most 1, got 0.0", *run, "--train.top_p", "0")
    sft = run_file("sft", max_steps=1)
    fails(1, "none.jsonl: no such file", "sft", "--config", sft, "--data.train", tmp_path / "none.jsonl")
    empty = write(tmp_path / "empty.jsonl", [])
    fails(1, "empty.jsonl: holds no rows", "sft", "--config", sft, "--data.train", empty)
    bad = write(tmp_path / "bad.jsonl", [TRAIN[0], "[1\n"])
    fails(1, "bad.jsonl:2: not JSON", "sft", "--config", sft, "--data.train", bad)


@pytest.mark.parametrize(
    "arguments, pairs",
    [
        ([], []),
        (["--a.b", "1", "--c=2=3", "--d"], [("a.b", "1"), ("c", "2=3"), ("d", None)]),
        (["--d", "--a.b", "-1"], [("d", None), ("a.b", "-1")]),
        (["--a=", "--b", ""], [("a", ""), ("b", "")]),
    ],
)
def test_parse_overrides(arguments, pairs):
    assert cli.parse_overrides(arguments) == pairs


def test_debug_shows_the_traceback(capsys):
    assert cli.run(["--debug", "plot", "/nowhere", "--output", "x.png"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "rlnumba: /nowhere/metrics.jsonl: no such file"


def test_help_is_quick():
    """Counted in calls of functions, of which a busy machine makes no more, and in packages that are imported."""
    probe = """
import cProfile, json, runpy, sys
before, profile = set(sys.modules), cProfile.Profile()
sys.argv = ["rlnumba", "grpo", "--help"]
try:
    profile.runcall(runpy.run_module, "rlnumba", run_name="__main__", alter_sys=True)
finally:
    calls = sum(each.callcount for each in profile.getstats())
    imported = {name.partition(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names
    print(json.dumps([calls, sorted(imported)]), file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "--SECTION.KEY VALUE" in ended.stdout and "--resume" in ended.stdout
    calls, imported = json.loads(ended.stderr)
    # It makes 186,000.
    assert calls < 300_000
    assert set(imported) <= {"click", "ml_dtypes", "numpy", "rlnumba"}


@pytest.mark.skipif(device.name() == "cuda", reason="there is a GPU")
def test_a_device_that_is_not_there_is_an_error():
    environment = {k: v for k, v in os.environ.items() if k not in ("RLNUMBA_DEVICE", "NUMBA_ENABLE_CUDASIM")}
    ended = subprocess.run(
        [sys.executable, "-m", "rlnumba", "--device", "cuda", "env"], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 1 and ended.stderr.startswith("rlnumba: device cuda: ")
    environment["RLNUMBA_DEVICE"] = "tpu"
    ended = subprocess.run([sys.executable, "-m", "rlnumba", "env"], capture_output=True, text=True, env=environment)
    assert ended.returncode == 2 and "RLNUMBA_DEVICE: must be one of auto, cuda, sim, cpu, got 'tpu'" in ended.stderr


def test_an_empty_variable_chooses_no_device(monkeypatch):
    monkeypatch.setenv("RLNUMBA_DEVICE", "")
    monkeypatch.setattr(device, "_chosen", None)
    assert device.name() in ("cuda", "cpu", "sim")


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "compiling"])
@pytest.mark.parametrize(
    "number, code, message",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_signals_end_in_one_line_and_leave_nothing(tmp_path, tmp_path_factory, number, code, message, compiled):
    """In the middle of the work, and in the compiler, which calls Python and loses what is raised there."""
    source = write(tmp_path / "in.jsonl", [{"prompt_token_ids": [5]}] * 200)
    arguments = ["generate", "--model", MODEL, "--prompts", source, "--output", str(tmp_path / "out.jsonl")]
    cache = {} if compiled else {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlnumba", *arguments, "--max-tokens", "250", "--n", "50", "--ignore-eos"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | cache,
        # A shell's background jobs, and so the tests in one, ignore SIGINT.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        # The device is named when work begins.
        assert process.stderr.readline().startswith("device ")
        time.sleep(1.0)
        process.send_signal(number)
        _, rest = process.communicate(timeout=300)
    finally:
        process.kill()
    # Without a cache of compiled functions there is a line about compiling them.
    lines = [line for line in rest.splitlines() if not line.startswith("the first run compiles")]
    assert (process.returncode, lines) == (code, [f"rlnumba: {message}"])
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_compile_names_the_extra_that_has_the_compiler(fails, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def not_found(library):
        raise pathfinder.DynamicLibNotFoundError(library)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
    fails(1, "pip install 'rlnumba[cuda12]' or 'rlnumba[cuda13]'", "compile", "--config", "none.toml", "--gpu", "h100")


def test_a_relative_path_is_shown_with_the_folder_it_was_looked_for_in(fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(1, f"./here/model: no such model folder in {tmp_path}", "check", "--model", "./here/model")


def test_streams_that_are_closed_or_full(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"token_ids": [5]}])
    score = f"score --model {MODEL} --input {source} --output {tmp_path}/out.jsonl 2>&-"
    full = "--help > /dev/full"
    for arguments, code, message in ((score, 0, ""), (full, 1, "rlnumba: No space left on device\n")):
        # Python keeps output in a buffer, unless this variable says otherwise.
        environment, command = os.environ | {"PYTHONUNBUFFERED": ""}, f"{sys.executable} -m rlnumba {arguments}"
        ended = subprocess.run(command, shell=True, capture_output=True, env=environment)
        assert (ended.returncode, ended.stdout, ended.stderr.decode()) == (code, b"", message)
    assert (tmp_path / "out.jsonl").exists()


ADAPTER = str(Path(__file__).parent / "golden" / "lora" / "all_linear" / "final")
TEXT = [{"prompt": "what is 3+4? ", "completion": "3+4=7."}]


def test_an_adapter_is_a_model(tmp_path, capsys):
    """generate, score and check take its folder; the base is named by the file or by --base."""
    ids = [{"token_ids": c["token_ids"]} for c in score(tmp_path, TEXT, "--base", MODEL, model=ADAPTER)]
    scored = score(tmp_path, ids, "--base", MODEL, model=ADAPTER)[0]["logprobs"]
    plain = score(tmp_path, ids)[0]["logprobs"]
    assert scored != plain
    rows = generate(tmp_path, [{"prompt": "what is 3+4? "}], "--base", MODEL, "--temperature", "0", model=ADAPTER)
    assert rows[0]["completions"][0]["text"]
    assert cli.run(["check", "--model", ADAPTER, "--base", MODEL, "--max-tokens", "6"]) == 0
    assert "first differing operator   none" in capsys.readouterr().out


def test_merge(tmp_path, fails):
    merged = tmp_path / "merged"
    assert cli.run(["merge", "--model", MODEL, "--adapter", ADAPTER, "--output", str(merged)]) == 0
    assert not (merged / "adapter_config.json").exists()
    (adapted,) = score(tmp_path, TEXT, "--base", MODEL, model=ADAPTER)
    (whole,) = score(tmp_path, TEXT, model=str(merged))
    np.testing.assert_allclose(whole["logprobs"][1:], adapted["logprobs"][1:], atol=2e-5)
    half = tmp_path / "half"
    command = ["merge", "--model", MODEL, "--adapter", ADAPTER, "--output"]
    assert cli.run([*command, str(half), "--dtype", "bfloat16"]) == 0
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"
    fails(1, f"{MODEL} is the folder of the base", *command, MODEL)
    fails(1, f"{ADAPTER} is the folder of the adapter", *command, ADAPTER)
    fails(1, f"{MODEL} has no adapter_config.json", "merge", "--model", MODEL, "--adapter", MODEL, "--output", half)
    fails(1, f"{ADAPTER} is an adapter folder", "merge", "--model", ADAPTER, "--adapter", ADAPTER, "--output", half)
    other = Path(MODEL).parent / "models" / "qwen3_tied"
    command[2] = str(other)
    fails(1, "the adapter does not fit its base", *command, tmp_path / "none")


def test_adapters_that_cannot_be_opened(tmp_path, fails):
    prompts, output = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    command = ["generate", "--prompts", prompts, "--output", output, "--model"]
    fails(1, "not an adapter folder, so it has no base", *command, MODEL, "--base", MODEL)
    fails(1, "no such model folder", *command, ADAPTER, "--base", tmp_path / "gone" / "base")
    lonely = tmp_path / "adapter"
    lonely.mkdir()
    (lonely / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    fails(1, "names no base_model_name_or_path", *command, lonely)
    fails(1, "target_modules must be a string or a list of strings", *command, lonely, "--base", MODEL)
    assert not output.exists()
