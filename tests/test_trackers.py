"""TensorBoard, Weights & Biases and trackio, by their documented calls; and W&B itself where it is installed."""

import importlib.util
import json
import shutil
import sys
import time
import types
from dataclasses import replace

import pytest

from rlnumba.config import SFTConfig, load_run
from rlnumba.errors import ConfigError, UserError
from rlnumba.reporting import trackers
from rlnumba.reporting.metrics import MetricsWriter
from rlnumba.trainers.sft import run_sft
from tests.trainers.runs import metrics_of, sft_run


class Run:
    def __init__(self, package, arguments):
        self.calls = [("init", package, arguments)]

    def log(self, metrics, step):
        self.calls.append(("log", step, metrics))

    def finish(self, exit_code=None):
        self.calls.append(("finish", exit_code))


@pytest.fixture
def runs(monkeypatch):
    """Packages that record the calls of wandb.init, Run.log and Run.finish, whose signatures trackio shares."""
    runs = []

    def init(package):
        def init(project, name, config, resume, **more):
            runs.append(Run(package, {"project": project, "name": name, "config": config, "resume": resume} | more))
            return runs[-1]

        return init

    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.init, module.__spec__ = init(name), importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return runs


def test_tensorboard_has_every_metric_of_every_step(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    (tracker,) = trackers.open_trackers(["tensorboard"], tmp_path, 0)
    for step in (1, 2):
        tracker.log(step, {"loss": 0.5 / step, "memory/engine activations": 3.0})
    tracker.close(False)
    found = {}
    for path in (tmp_path / "tensorboard").iterdir():
        # Of each record: the length of its content, a checksum of that, the content, its checksum.
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            event, content = Event.FromString(content[12 : 12 + length]), content[16 + length :]
            found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    assert found == {
        (step, name): value
        for step in (1, 2)
        for name, value in (("loss", 0.5 / step), ("memory/engine_activations", 3.0))
    }


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start_step, scale in ((0, 1.0), (3, 10.0)):
        tracker = trackers._TensorBoard(tmp_path, start_step)
        for step in range(start_step + 1, start_step + 6):
            tracker.log(step, {"loss": scale * step, "memory/engine activations": 3.0})
        tracker.close(False)
        # Files are read in the order of their names, which begin with the second.
        time.sleep(1.1)
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [
        *((1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0), (8, 80.0))
    ]


def test_a_run_and_its_resumption(tmp_path, runs, monkeypatch):
    run_sft(sft_run(tmp_path / "run", max_steps=2, report_to=["wandb", "trackio"]))
    for recorded, package in zip(runs, ("wandb", "trackio"), strict=True):
        (init, named, arguments), *logs, end = recorded.calls
        assert (init, named, arguments["project"], arguments["name"]) == ("init", package, "rlnumba", "run")
        assert arguments["config"]["train"]["max_steps"] == 2 and json.dumps(arguments["config"])
        rows = metrics_of(sft_run(tmp_path / "run"))
        assert [(step, metrics["loss"]) for _, step, metrics in logs] == [(row["step"], row["loss"]) for row in rows]
        assert all(type(value) is float for _, _, metrics in logs for value in metrics.values())
        assert end[0] == "finish"
    assert runs[0].calls[-1] == ("finish", 0) and runs[1].calls[0][2]["resume"] == "never"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = sft_run(tmp_path / "run", max_steps=3, report_to="all", run_name="again")
    if importlib.util.find_spec("tensorboardX") or importlib.util.find_spec("tensorboard"):
        run_sft(run, resume=True)
    else:
        run_sft(sft_run(tmp_path / "run", max_steps=3, report_to=["wandb", "trackio"], run_name="again"), resume=True)
    first, again = (recorded.calls[0][2] for recorded in (runs[0], runs[2]))
    assert (again["id"], again["resume"]) == (first["id"], "allow") and again["dir"] == str(tmp_path / "run")
    assert (again["project"], again["name"]) == ("mine", "again") and runs[3].calls[0][2]["resume"] == "allow"
    assert [call[1] for call in runs[2].calls if call[0] == "log"] == [3]


def test_steps_that_are_taken_anew_are_another_run_of_wandb(tmp_path, runs):
    """W&B drops what is logged for a step below its last one."""
    run = sft_run(tmp_path / "run", max_steps=3, save_steps=1, report_to=["wandb"])
    run_sft(run)
    # Nothing came after this step.
    run_sft(run, resume=3)
    run_sft(run, resume=1)
    first, same, other = (recorded.calls[0][2]["id"] for recorded in runs)
    assert first == same != other
    assert [call[1] for call in runs[2].calls if call[0] == "log"] == [2, 3]
    assert (tmp_path / "run" / "earlier-1" / "wandb_id").read_text() == first


def test_steps_that_are_repeated_are_another_run_of_trackio(tmp_path, runs):
    """It keeps all that is logged for a step: after a kill, and where --resume.step sets later steps aside."""
    run = sft_run(tmp_path / "run", max_steps=5, save_steps=2, report_to=["trackio"])
    run_sft(run)
    longer = replace(run, train=replace(run.train, max_steps=6))
    run_sft(longer, resume=True)
    # A kill behind the checkpoint of step 4.
    for name in ("step-5", "step-6"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / name)
    run_sft(longer, resume=True)
    run_sft(longer, resume=2)
    names = [recorded.calls[0][2]["name"] for recorded in runs]
    assert names == ["run", "run", "run-2", "run-3"]
    assert [recorded.calls[0][2]["resume"] for recorded in runs] == ["never", "allow", "allow", "allow"]
    steps = [[call[1] for call in recorded.calls if call[0] == "log"] for recorded in runs]
    assert steps == [[1, 2, 3, 4, 5], [6], [5, 6], [3, 4, 5, 6]]
    # A run that starts afresh has the name again.
    run_sft(run)
    assert (runs[4].calls[0][2]["name"], runs[4].calls[0][2]["resume"]) == ("run", "never")
    assert (tmp_path / "run" / "earlier-2" / "trackio_number").read_text() == "3"


def test_a_server_that_refuses_leaves_the_lines_that_say_what_is_repeated(tmp_path, runs, monkeypatch):
    with MetricsWriter(tmp_path, 4, report_to=["trackio"], run_name="run") as writer:
        for step in (1, 2, 3):
            writer.log(step, {"loss": step})

    def refuse(**arguments):
        raise RuntimeError("no key")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="wandb: no key"):
        patch.setattr(sys.modules["wandb"], "init", refuse)
        MetricsWriter(tmp_path, 4, 2, report_to=["wandb", "trackio"], run_name="run")
    MetricsWriter(tmp_path, 4, 2, report_to=["trackio"], run_name="run").close()
    assert [recorded.calls[0][2]["name"] for recorded in runs] == ["run", "run-2"]


def test_a_run_that_fails_says_so(tmp_path, runs):
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path, 3, report_to=["wandb"]) as writer:
        writer.log(1, {"loss": 1})
        raise ZeroDivisionError
    assert runs[0].calls[-2:] == [("log", 1, {"loss": 1.0}), ("finish", 1)]


def test_a_server_that_refuses_is_one_line(tmp_path, runs, monkeypatch):
    def refuse(**arguments):
        raise RuntimeError("no\nkey")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(UserError, match="^train.report_to: wandb: no key$"):
        MetricsWriter(tmp_path, 3, report_to=["wandb"])


def test_spellings(tmp_path):
    for given, names in (
        *(("none", []), ("all", ["tensorboard", "wandb", "trackio"]), ("wandb", ["wandb"]), (["none"], [])),
        (["wandb", "trackio"], ["wandb", "trackio"]),
    ):
        assert SFTConfig(report_to=given).report_to == names
        config = tmp_path / "run.toml"
        body = f'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t"\n[train]\nreport_to = {json.dumps(given)}\n'
        config.write_text(body)
        assert load_run("sft", config).train.report_to == names
        text = ",".join(given) if isinstance(given, list) else given
        assert load_run("sft", config, [("train.report_to", text)]).train.report_to == names
    with pytest.raises(ConfigError, match="train.report_to must be of tensorboard, .*, got 'x'"):
        SFTConfig(report_to="x")


def test_a_missing_package_ends_the_run_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^train.report_to: wandb is not installed; pip install wandb$"):
        run_sft(sft_run(tmp_path / "run", report_to="wandb"))
    assert not (tmp_path / "run").exists()


def test_wandb_itself_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_sft(sft_run(tmp_path / "run", max_steps=2, report_to="wandb"))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
