"""Trackers that get the metrics besides metrics.jsonl: TensorBoard, Weights & Biases, trackio, as train.report_to says.

Each tracker has log(step, metrics) for numbers by name, and close(failed). wandb and trackio are imported here alone,
and configured by their own environment variables (WANDB_MODE, WANDB_PROJECT, TRACKIO_DIR, ...).
"""

import contextlib
import importlib.util
import os
import time
import uuid
from pathlib import Path

from rlnumba.errors import UserError
from rlnumba.reporting.files import reaches_beyond, replacing

PACKAGES = {"tensorboard": ("tensorboardX", "tensorboard"), "wandb": ("wandb",), "trackio": ("trackio",)}
PROJECT = "rlnumba"


def check_installed(names):
    """Raise UserError for a tracker whose package is missing. names: those of train.report_to."""
    for name in names:
        packages = PACKAGES.get(name, ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            raise UserError(f"train.report_to: {name} is not installed; pip install {packages[0]}")


def open_trackers(names, folder, start_step, run_name=None, project=None, config=None):
    """The trackers of a run in `folder`. names: those of train.report_to; "auto" is TensorBoard where it is installed.

    start_step: steps done, of a resumed run. run_name: by default the folder's. config: dict, shown beside the curves.
    """
    folder, opened = Path(folder), []
    run_name = run_name or folder.resolve().name
    for name in names:
        if name in ("auto", "tensorboard"):
            opened += _tensorboard(folder / "tensorboard", start_step)
        elif name == "wandb":
            opened.append(_Wandb(folder, run_name, project, config))
        elif name == "trackio":
            opened.append(_Trackio(folder, start_step, run_name, project, config))
    return opened


def _tensorboard(folder, start_step):
    """A tracker by tensorboardX, or by tensorboard itself; none where neither is installed: list."""
    with contextlib.suppress(ImportError):
        from tensorboardX import SummaryWriter

        # TensorBoard hides the former values of steps that a resumed run repeats.
        return [_TensorBoardX(SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None))]
    with contextlib.suppress(ImportError):
        return [_TensorBoard(folder, start_step)]
    return []


class _TensorBoard:
    """By tensorboard itself, as torch writes it: the Writer that it offers cannot hide steps that are repeated."""

    def __init__(self, folder, start_step):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer, self.event, self.summary = EventFileWriter(str(folder)), Event, Summary
        if start_step:
            self._add(start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step, **content):
        self.writer.add_event(self.event(wall_time=time.time(), step=step, **content))

    def log(self, step, metrics):
        values = [self.summary.Value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._add(step, summary=self.summary(value=values))

    def close(self, failed):
        self.writer.close()


class _TensorBoardX:
    """All metrics of a step are one event: an event each, as of add_scalar, takes the interpreter ten times as long."""

    def __init__(self, writer):
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        self.writer, self.summary, self.scalar = writer, Summary, scalar

    def log(self, step, metrics):
        values = [value for name, number in metrics.items() for value in self.scalar(name, number).value]
        self.writer.file_writer.add_summary(self.summary(value=values), step)

    def close(self, failed):
        self.writer.close()


class _Wandb:
    """One W&B run for a run and all its resumptions: its id is kept in output_dir/wandb_id."""

    def __init__(self, folder, run_name, project, config):
        import wandb

        path = folder / "wandb_id"
        if not path.exists():
            with replacing(path) as file:
                file.write(uuid.uuid4().hex[:8])
        project = project or os.environ.get("WANDB_PROJECT", PROJECT)
        settings = {"name": run_name, "dir": str(folder), "id": path.read_text(), "resume": "allow"}
        try:
            self.run = wandb.init(project=project, config=config, **settings)
        # Errors of the server, the account and the network, which have no class in common.
        except Exception as error:
            raise UserError(f"train.report_to: wandb: {' '.join(str(error).split())}") from error

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def close(self, failed):
        self.run.finish(exit_code=int(failed))


class _Trackio:
    """One run of trackio for a run and its resumptions, as long as they repeat no step, which trackio would have twice.

    The run that repeats steps is another one there, with a number behind its name, kept in output_dir/trackio_number.
    """

    def __init__(self, folder, start_step, run_name, project, config):
        import trackio

        resume, number = ("allow" if start_step else "never"), self._number_of(folder, start_step)
        name = run_name if number == 1 else f"{run_name}-{number}"
        try:
            self.run = trackio.init(project=project or PROJECT, name=name, config=config, resume=resume)
        # Errors of the server, the account and the network, which have no class in common.
        except Exception as error:
            raise UserError(f"train.report_to: trackio: {' '.join(str(error).split())}") from error

    def _number_of(self, folder, start_step):
        """The number of the run there: int, one more where lines of metrics.jsonl come after start_step."""
        path = folder / "trackio_number"
        number = int(path.read_text()) if start_step and path.exists() else 1
        if start_step and reaches_beyond(folder / "metrics.jsonl", start_step):
            number += 1
        with replacing(path) as file:
            file.write(str(number))
        return number

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def close(self, failed):
        self.run.finish()
