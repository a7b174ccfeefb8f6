"""Asynchronous GRPO: the synchronous result without staleness, and the same result however the engines are run."""

import dataclasses
import hashlib
import json
import os
import pathlib
import signal

import pytest

from rlnumba.config import AsyncConfig, DeployConfig
from rlnumba.trainers.callbacks import TrainerCallback, given
from rlnumba.trainers.grpo import run_grpo
from tests.trainers.runs import grpo_run, metrics_of


def run_of(folder, num_infer_gpus=0, lora=None, train=None, **options):
    """A GRPORun of four steps, with [async] if there are options."""
    run = grpo_run(folder, **{"max_steps": 4, "save_steps": 2, "report_to": []} | (train or {}))
    deploy = DeployConfig(num_infer_gpus=num_infer_gpus, update_weights_bucket_megabytes=1)
    return dataclasses.replace(run, deploy=deploy, lora=lora, asynchronous=AsyncConfig(**options) if options else None)


def final_of(run, name="model.safetensors"):
    """The hash of a run's final weights."""
    return hashlib.sha256((pathlib.Path(run.output_dir) / "final" / name).read_bytes()).hexdigest()


def prompts_of(run):
    """The prompts of all groups that were trained on, in their order."""
    lines = (pathlib.Path(run.output_dir) / "completions.jsonl").read_text().splitlines()
    return [row["prompt"] for row in map(json.loads, lines)][:: run.train.num_generations]


def train(run, resume=False):
    run_grpo(run, resume)
    return final_of(run), metrics_of(run)


def inference_processes():
    """The inference processes that this one has started: list of ids."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"inference_worker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass  # it has ended
    return sorted(found)


class KillOnce(TrainerCallback):
    """Kills the first inference process after the second step, when it has the prompts of the third."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(inference_processes()[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    run = run_of(tmp_path_factory.mktemp("synchronous") / "run")
    return *train(run), prompts_of(run)


@pytest.mark.parametrize("num_infer_gpus", [0, 2])
def test_without_staleness_the_result_is_the_synchronous_one(tmp_path, synchronous, num_infer_gpus):
    """Also if an inference process is killed while it generates."""
    run = run_of(tmp_path / "run", num_infer_gpus, max_staleness=0)
    with given([KillOnce()] if num_infer_gpus else []):
        final, metrics = train(run)
    assert (final, prompts_of(run)) == (synchronous[0], synchronous[2])
    assert [row["loss"] for row in metrics] == [row["loss"] for row in synchronous[1]]
    assert [row["off_policy/max"] for row in metrics] == [0, 0, 0, 0]
    assert not inference_processes()
