"""Keys of TRL's and transformers' scripts: translated, accepted with a warning, or still an error."""

import subprocess
import sys

import pytest

from rlnumba import GRPOConfig, SFTConfig
from rlnumba.config import load_run, to_toml
from rlnumba.config.keys import keys_of, sections_of
from rlnumba.config.other_keys import WITHOUT_EFFECT, translated
from rlnumba.config.runs import RUNS
from rlnumba.errors import ConfigError
from rlnumba.runtime import device
from tests.trainers.runs import metrics_of, sft_run

HEAD = 'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t.jsonl"\n[rewards]\nfuncs = ["gsm8k_reward"]\n'
# As in the scripts of TRL's documentation.
SCRIPT = """
[train]
bf16 = true
use_vllm = true
vllm_mode = "colocate"
report_to = "none"
push_to_hub = false
hub_model_id = "me/model"
warmup_ratio = 0.1
num_generations_eval = 4
logging_strategy = "steps"
logging_dir = "logs"
eval_strategy = "epoch"
dataloader_num_workers = 4
gradient_checkpointing_kwargs = {use_reentrant = false}
"""


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides, **more):
        (tmp_path / "run.toml").write_text(text)
        return load_run("grpo", tmp_path / "run.toml", overrides, **more)

    return load


def test_a_script_of_trl(load, capsys):
    run = load(HEAD.replace("[rewards]", 'eval = "e.jsonl"\n[rewards]') + SCRIPT)
    assert run.train.eval_strategy == "epoch"
    assert (run.train.dtype, run.train.warmup_steps, run.eval.num_generations) == ("bfloat16", 0.1, 4)
    assert run.train.report_to == []
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("rlnumba: warning: train.").split()[0] for line in lines] == [
        *("use_vllm", "vllm_mode", "hub_model_id", "logging_dir", "dataloader_num_workers"),
        "gradient_checkpointing_kwargs",
    ]
    assert lines[0] == ("rlnumba: warning: train.use_vllm has no effect: rlnumba generates with an engine of its own")
    assert load(to_toml(run)) == run and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("fp16 = true", "dtype", "float16"),
        ("bf16 = false", "dtype", None),
        ("bf16_full_eval = true", "dtype", None),
        ("warmup_ratio = 0", "warmup_steps", 0.0),
        ("use_vllm = false", "dtype", None),
        ('deepspeed = "None"', "dtype", None),
    ],
)
def test_translations_without_a_warning(load, capsys, line, name, value):
    assert getattr(load(f"{HEAD}[train]\n{line}\n").train, name) == value
    assert not capsys.readouterr().err


def test_options_and_the_cpu(load, capsys):
    assert load(HEAD, ("train.bf16", "true"), ("train.torch_compile", None)).train.dtype == "bfloat16"
    assert "train.torch_compile has no effect: every kernel is compiled by Numba" in capsys.readouterr().err
    assert load(HEAD + "[train]\nbf16 = true\n", has_16_bits=lambda: False).train.dtype is None
    assert "train.bf16 has no effect: the cpu device computes in float32" in capsys.readouterr().err


def test_an_unknown_key_stays_an_error(load):
    for key in ("use_vlm", "bf17", "neftune_noise_alpha"):
        with pytest.raises(ConfigError, match=f"unknown key train.{key}"):
            load(f"{HEAD}[train]\n{key} = 1\n")
    with pytest.raises(KeyError):
        translated("use_vlm", True, {})
    with pytest.raises(ConfigError, match="unknown key data.use_vllm"):
        load(HEAD.replace("[data]", "[data]\nuse_vllm = true"))


def test_no_key_of_ours_is_said_to_have_no_effect():
    ours = {name for run in RUNS.values() for section in sections_of(run).values() for name in keys_of(section)}
    assert not ours & WITHOUT_EFFECT.keys()


def test_from_python(capsys):
    args = GRPOConfig(output_dir="o", use_vllm=True, push_to_hub=False, warmup_ratio=0.2, report_to="none")
    assert (args.output_dir, args.warmup_steps, args.report_to) == ("o", 0.2, [])
    assert "train.use_vllm has no effect" in capsys.readouterr().err
    args = SFTConfig(bf16=True, dataset_text_field="text")
    assert args.dtype == (None if device.name() == "cpu" else "bfloat16")
    with pytest.raises(TypeError, match="use_vlm"):
        GRPOConfig(use_vlm=True)


@pytest.mark.skipif(device.name() != "cpu", reason="bf16 on the cpu device")
def test_the_command_line_runs_such_a_file(tmp_path):
    run = sft_run(tmp_path / "run", max_steps=2)
    text = to_toml(run).replace("[train]\n", "[train]\nbf16 = true\npush_to_hub = true\ndisable_tqdm = true\n")
    (tmp_path / "run.toml").write_text(text)
    command = [sys.executable, "-m", "rlnumba", "--device", "cpu", "sft", "--config", str(tmp_path / "run.toml")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert len(metrics_of(run)) == 2 and ended.stderr.count("has no effect") == 3
