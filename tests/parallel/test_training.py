"""Training on several ranks: the files of one rank's run, whatever their number."""

import dataclasses
import hashlib
import pathlib
import signal
import time

import numpy as np
import pytest

from rlnumba import checkpoint, cli
from rlnumba.config import DeployConfig, SFTConfig, load_run, to_toml
from rlnumba.errors import ConfigError, RankError
from rlnumba.model.blocks.attention import Attention
from rlnumba.model.blocks.mlp import Mlp
from rlnumba.runs.micro_batch import MicroBatch, costliest_first
from rlnumba.runs.ranks import train_on_ranks
from rlnumba.trainers.sft import run_sft
from tests import processes
from tests.parallel.test_launch import children_of, ended, wait_until
from tests.trainers.runs import metrics_of, sft_run

# Micro-batches of a step: five, so that no number of ranks divides them.
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "global_batch_size": 10}


def run_of(folder, num_ranks=1, model=None, lora=None, zero_stage=2, quantization=None, **options):
    """An SFTRun of a few steps with checkpoints."""
    data = options.pop("data", None)
    run = sft_run(folder, data, **{"max_steps": 4, "save_steps": 2, **BATCH, **options})
    deploy = DeployConfig(num_train_gpus=num_ranks, zero_stage=zero_stage)
    run = dataclasses.replace(run, deploy=deploy, lora=lora, quantization=quantization)
    return run if model is None else dataclasses.replace(run, model=str(model))


def train(run, resume=False):
    if run.num_ranks == 1:
        run_sft(run, resume)
    else:
        train_on_ranks(run, resume)
    return files_of(run)


def files_of(run):
    """{file of weights or state: sha256}, and the metrics without times."""
    root = pathlib.Path(run.output_dir)
    hashes = {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*.safetensors"))
    }
    return hashes, [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/", "step_time"))}
        for row in metrics_of(run)
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_is_resumed_on_one_rank(tmp_path, number):
    """SIGTERM lets all ranks save the same step; after SIGKILL the last checkpoint is there."""
    options = {"max_steps": 40, "save_steps": 5}
    expected = train(run_of(tmp_path / "whole", **options))
    run = run_of(tmp_path / "ended", 2, **options)
    (tmp_path / "run.toml").write_text(to_toml(run))
    process = processes.start(["--device", "cpu", "sft", "--config", tmp_path / "run.toml"])
    deadline = time.monotonic() + 300
    while not list((tmp_path / "ended" / "checkpoints").glob("step-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.05)
    ranks = children_of(process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    if number == signal.SIGTERM:
        assert "--resume goes on from there" in errors and process.returncode == 128 + number
    else:
        # Ranks end when the process that started them has gone.
        wait_until(lambda: all(map(ended, ranks)))
    found = train(run_of(tmp_path / "ended", 1, **options), resume=True)
    assert found[0]["final/model.safetensors"] == expected[0]["final/model.safetensors"]


def test_batches_are_numbered_by_their_cost():
    def batch(*lengths):
        return MicroBatch.of(np.zeros(sum(lengths), np.int32), list(lengths), np.arange(1, lengths[0]))

    class Config:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim = 8, 16, 4, 2, 4
        attn_output_gate = False
        blocks = ((Attention(0), Mlp(0)),)

        @staticmethod
        def window_of(layer):
            return 0

    # As many tokens: the longer sequence is the costlier one; equal ones keep their order.
    batches = [batch(5, 5), batch(10), batch(3), batch(4, 6), batch(10)]
    ordered = costliest_first(batches, Config)
    assert [next(i for i, each in enumerate(batches) if each is batch) for batch in ordered] == [1, 4, 3, 0, 2]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"gradient_accumulation_steps": 2},
            r"global_batch_size \(10\) takes the place of train.gradient_accumulation",
        ),
        ({"per_device_train_batch_size": 3}, r"\(10\) must be a multiple of train.per_device_train_batch_size \(3\)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SFTConfig(**BATCH | options)


def test_one_gpu_is_needed_for_the_optimizer_in_the_backward(tmp_path):
    with pytest.raises(ConfigError, match="optimizer_in_backward is for one GPU, and deploy.num_train_gpus is 2"):
        options = {"global_batch_size": None, "optimizer_in_backward": True, "max_grad_norm": 0.0}
        run_of(tmp_path, 2, **options)


@pytest.mark.usefixtures("quick_starts")
def test_layers_in_parts_are_saved_without_a_checkpoint(tmp_path):
    """Each rank writes its part into final/, as no checkpoint is there to be copied."""
    options = {"save_strategy": "no", "learning_rate": 1e-3}
    one, two = (run_of(tmp_path / str(count), count, zero_stage=3, **options) for count in (1, 2))
    expected, found = train(one), train(two)
    assert [*expected[0]] == ["final/model.safetensors"] and found == expected
    assert sorted(path.name for path in (tmp_path / "2" / "final").iterdir()) == sorted(
        path.name for path in (tmp_path / "1" / "final").iterdir()
    )


@pytest.mark.usefixtures("quick_starts")
def test_a_rank_that_fails_ends_the_run_with_one_line(tmp_path, capsys, monkeypatch):
    """A fault in the second fold of rank 1."""
    monkeypatch.setenv("RLNUMBA_FAULT", "fold:1:kill")
    run = run_of(tmp_path / "run", 2)
    (tmp_path / "run.toml").write_text(to_toml(run))
    assert load_run("sft", tmp_path / "run.toml", []).num_ranks == 2
    assert cli.run(["--device", "cpu", "sft", "--config", str(tmp_path / "run.toml")]) == 1
    *others, line = [line for line in capsys.readouterr().err.splitlines() if "rank 1" in line]
    assert line.startswith("rlnumba: rank 1: was ended by SIGKILL")
    assert others == ["rlnumba: rank 1 has taken its part of the last step with it: no checkpoint is complete yet"]


@pytest.mark.usefixtures("quick_starts")
def test_an_error_of_rank_0_alone_keeps_the_last_complete_step(tmp_path):
    """The other rank, which would wait for it, saves its part; with save_steps the step would have been lost."""
    (tmp_path / "callback.py").write_text(
        "class Fails:\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        assert state.global_step < 2, 'after the second step'\n"
    )
    run = run_of(tmp_path / "run", 2, save_steps=100, callbacks=[f"{tmp_path}/callback.py:Fails"])
    with pytest.raises(RankError, match="callback Fails.on_step_end raised AssertionError: after the second step"):
        train(run)
    (folder,) = checkpoint.existing(tmp_path / "run")
    checkpoint.verify(folder)
    assert folder.name == "step-2"
