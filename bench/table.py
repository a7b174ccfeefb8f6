"""The table: what a GRPO step of a small model costs, by phase, beside its physical floor, in pieces.

    python bench/table.py FOLDER --list                    all cells, what they need of a GPU and take, about
    python bench/table.py FOLDER --budget 540              the cells that end within so many seconds, the shortest first
    python bench/table.py FOLDER --cells '*_64x*_1gpu'     those of these names
    python bench/table.py FOLDER --anywhere                those that no kind of GPU has
    python bench/table.py FOLDER --peer transformers       the same steps in torch (table_peer.py), on one GPU
    python bench/table.py FOLDER OTHER ... --page          bench/results/table.md and its picture; needs no GPU

A cell is a shape of a model, all parameters or an adapter of rank 16, completions of a step in groups of 8, the tokens
of each and of a prompt, and GPUs. It is a run of `grpo` with random weights and random prompts, all completions at
their full length, in a process of its own; a model of the cell's shape is written before. Before a cell runs, its plan
chooses the keys of [train] (table_cell.py:OPTIMIZERS), and a line says how long it takes, about. A cell that fits with
none is recorded with the GiB that it needs, and does not run.

FOLDER/results.jsonl gets a line a cell. Cells of this kind of GPU that it or one of the OTHER folders has are skipped,
but for --again. So the table grows by as many calls, on as many machines, as are needed. One that fails is tried again
by the next call.
"""

import argparse
import datetime
import fnmatch
import itertools
import json
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import table_page
from all import ROOT, Run
from asynchronous import QUICKSTART, write_prompts
from shapes import SHAPES, in_own_process, write_model
from table_cell import CEILINGS, Cell, add_options, plan_cell
from table_floor import Rates, generation_s, training_s

from rlnumba.runtime import device

TABLE_SHAPES = "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3.5-0.8b", "qwen3.5-4b"
RESULTS = "results.jsonl"
# Measured before all others.
MAIN = Cell("qwen3-0.6b", "all", 64, 128, 512, 1)
# For estimates alone: seconds of a process before its first step, where kernels are compiled and where they have been;
# bytes of weights written or read a second; shares of their floors that generation and training reach; seconds of a
# step beside these.
COLD_START_S, START_S, BYTES_PER_S = 60, 10, 1e9
GENERATION_SHARE, TRAINING_SHARE, OTHERS_S = 0.45, 0.4, 0.1
# Of a peer, which imports torch and reads no weights. A decode step of transformers' generate launches kernel by
# kernel: seconds of a layer, and its share in training.
PEER_START_S, PEER_LAYER_S, PEER_SHARE = 25, 1.1e-3, 0.2
# A cell that takes longer than its estimate by this is ended.
PATIENCE = 2.5
# A cell whose step takes longer warms up with completions of so many tokens: what a first step compiles, captures and
# allocates besides is then a small part of the next.
LONG_STEP_S, WARMUP_TOKENS = 10, 64


def cells_of(options):
    """All Cells that the arguments ask for, one GPU before two, small before large."""
    sizes = itertools.product(
        options.gpus, options.completions, options.lengths, options.prompts, options.tuned, options.shapes
    )
    cells = [
        Cell(shape, tuned, completions, prompt, length, gpus)
        for gpus, completions, length, prompt, tuned, shape in sizes
    ]
    return [cell for cell in cells if any(fnmatch.fnmatch(cell.name, pattern) for pattern in options.cells)]


def step_s(cell, rates):
    """Seconds of a step of a cell, about."""
    return generation_s(cell, rates) / GENERATION_SHARE + training_s(cell, rates) / TRAINING_SHARE + OTHERS_S


def warmup_tokens_of(cell, rates):
    """Tokens of a completion in a cell's steps that are not counted: int, None for as many as in the others."""
    return WARMUP_TOKENS if step_s(cell, rates) > LONG_STEP_S else None


def estimate_s(cell, options, rates, peer=None, measured_s=None):
    """Seconds that a cell takes, about, where its model is written and its kernels are compiled.

    measured_s: of a step of the cell, where it has been measured; not a peer's.
    """
    if peer:
        layers = SHAPES[cell.shape]["num_hidden_layers"]
        generate = max(generation_s(cell, rates) / GENERATION_SHARE, cell.length * layers * PEER_LAYER_S)
        return PEER_START_S + 1.2 * (generate + training_s(cell, rates) / PEER_SHARE)
    tokens = warmup_tokens_of(cell, rates)
    warmup = options.warmup if tokens is None else options.warmup * tokens / cell.length
    return START_S + (warmup + options.steps) * (measured_s or step_s(cell, rates))


def model_s(cell):
    """Seconds to write a model of a cell's shape and to read it once, about."""
    keys = SHAPES[cell.shape]
    layer = keys["hidden_size"] * (3 * keys["intermediate_size"] + 4 * keys["hidden_size"])
    return 10 + 4 * (keys["num_hidden_layers"] * layer + 2 * keys["vocab_size"] * keys["hidden_size"]) / BYTES_PER_S


class Machine:
    """The GPUs of this machine: name, count, bytes of one (None on the cpu device), as nvidia-smi or the arguments say.

    The table's own process takes no memory of a GPU.
    """

    def __init__(self, options):
        self.name, self.count, self.nbytes = "cpu", 2, None
        if options.gpu_memory is not None:
            self.name, self.nbytes = options.gpu_name, round(options.gpu_memory * 2**30)
        elif options.device != "cpu" and shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
            self.name, mebibytes = lines[0].rsplit(", ", 1)
            self.count, self.nbytes = len(lines), int(mebibytes) << 20


def read_results(folders):
    """The lines of all folders' results: list of dict, the oldest first. One that several folders have counts once."""
    paths = [folder / RESULTS for folder in folders if (folder / RESULTS).exists()]
    lines = dict.fromkeys(line for path in paths for line in path.read_text().splitlines())
    return sorted(map(json.loads, lines), key=lambda each: each["date"])


def commit_of(options):
    """The commit of this checkout, as the argument says where there is no git."""
    if options.commit:
        return options.commit
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


class Table:
    """Cells that are measured one after the other, each for options.folders[0]/results.jsonl."""

    def __init__(self, options, machine):
        self.options, self.machine = options, machine
        self.folder = options.folders[0]
        self.results = read_results(options.folders)
        self.deadline = time.monotonic() + options.budget
        self.scratch, self.written = pathlib.Path(tempfile.mkdtemp()), None
        # Of which shapes and tuned parameters there are kernels.
        self.compiled = set()
        self.kind = options.peer or "rlnumba"

    @property
    def rates(self):
        """The Rates that this kind of GPU was measured to have, or those of an H200."""
        found = [each for each in self.results if each["cell"] == CEILINGS and each["gpu"] == self.machine.name]
        return Rates(found[-1]["bytes_per_s"], found[-1]["flop_per_s"]) if found else Rates()

    def results_of(self, name, kind, anywhere=False):
        """A cell's results that did not fail, on this kind of GPU, or on any: list of dict."""
        of_cell = (each for each in self.results if each["cell"] == name and each["kind"] == kind)
        good = (each for each in of_cell if "failed" not in each)
        return [each for each in good if anywhere or each["gpu"] == self.machine.name]

    def estimate_s(self, cell):
        """estimate_s of a cell, by its last result on this kind of GPU if there is one."""
        found = [each["seconds"]["step_time"] for each in self.results_of(cell.name, "rlnumba") if "seconds" in each]
        measured_s = statistics.median(found[-1]) if found else None
        return estimate_s(cell, self.options, self.rates, self.options.peer, measured_s)

    def record(self, name, kind, found):
        """Add a line to the results."""
        about = {"cell": name, "kind": kind, "gpu": self.machine.name, "commit": commit_of(self.options)}
        about |= {"date": datetime.datetime.now().isoformat(timespec="seconds"), **found}
        about["command"] = shlex.join(["python", *sys.argv])
        self.results.append(about)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / RESULTS, "a") as file:
            file.write(json.dumps(about) + "\n")

    def plan(self, cell):
        """The Planned of a cell, from a config without weights."""
        folder = self.scratch / "planned"
        write_config(folder, cell.shape)
        # Prompts of one length.
        write_prompts(folder / "prompts.jsonl", 2 * cell.groups, cell.prompt)
        return plan_cell(cell, folder, self.options, self.machine.nbytes)

    def before_start_s(self, cell):
        """Seconds for what a cell needs that those before have not made, its model and its kernels, about."""
        if self.options.peer:
            return 0
        writes = model_s(cell) if self.written != cell.shape else 0
        return writes + (0 if (cell.shape, cell.tuned) in self.compiled else COLD_START_S - START_S)

    def write_inputs(self, cell):
        """The folder of a cell's model and prompts, in place of those of the cell before."""
        folder = self.scratch / "inputs"
        if self.written != cell.shape:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            in_own_process(write_model, folder / "model", cell.shape, self.options.device)
            for path in QUICKSTART.glob("tokenizer*"):
                shutil.copy(path, folder / "model")
            self.written = cell.shape
        shutil.rmtree(folder / "run", ignore_errors=True)
        steps = self.options.warmup + self.options.steps
        write_prompts(folder / "prompts.jsonl", cell.groups * steps, cell.prompt)
        return folder

    def measured(self, name, folder, seconds, *arguments):
        """What a process of its own measures of a cell: dict, {"failed": why} after a failure or too many seconds.

        arguments: further ones of table_cell.py, str.
        """
        output, options = self.scratch / "output.json", self.options
        output.unlink(missing_ok=True)
        command = [sys.executable, "bench/table_cell.py", name, str(folder), str(output), *arguments]
        for each in ("device", "dtype", "warmup", "steps", "gpu_memory_utilization"):
            command += [f"--{each.replace('_', '-')}", str(getattr(options, each))]
        run = Run(name, command, self.scratch / "log.txt", seconds)
        try:
            while not run.has_ended():
                time.sleep(0.1)
        except BaseException:
            run.stop()
            raise
        if run.failure is None:
            return json.loads(output.read_text())
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        shutil.copy(run.log, logs / f"{name}_{self.kind}.txt")
        return {"failed": run.failure}

    def take(self, cell, planned):
        """Measure a cell that fits, and record it; False if the budget has not the seconds that it takes, about."""
        estimate = self.estimate_s(cell)
        before = self.before_start_s(cell)
        left = self.deadline - time.monotonic()
        if estimate + before > left:
            return False
        print(f"{cell.name}: about {estimate + before:.0f} s of {left:.0f}; {planned.keys}", flush=True)
        started = time.monotonic()
        folder = self.scratch / "planned" if self.options.peer else self.write_inputs(cell)
        tokens = warmup_tokens_of(cell, self.rates)
        arguments = ["--peer", self.options.peer] if self.options.peer else ["--keys", json.dumps(planned.keys)]
        if tokens is not None and not self.options.peer:
            arguments += ["--warmup-tokens", str(tokens)]
        found = self.measured(cell.name, folder, min(PATIENCE * (estimate + before), left), *arguments)
        self.compiled.add((cell.shape, cell.tuned))
        found |= {"wall_s": time.monotonic() - started}
        if not self.options.peer:
            found |= {"keys": planned.keys, "activations": planned.line, "planned_gib": planned.needed / 2**30}
            found |= {} if tokens is None else {"warmup_tokens": tokens}
        self.record(cell.name, self.kind, found)
        said = found.get("failed") or f"{statistics.median(found['seconds']['step_time']):.3f} s a step"
        print(f"{cell.name}: {said}, after {found['wall_s']:.0f} s", flush=True)
        return True

    def run(self, cells):
        """All cells that are not done, fit and have the time: how many are left for want of time."""
        try:
            if self.machine.nbytes is not None and not self.results_of(CEILINGS, "gpu"):
                self.record(CEILINGS, "gpu", self.measured(CEILINGS, self.scratch, 120))
            anywhere = self.options.anywhere
            todo = [cell for cell in cells if self.options.again or not self.results_of(cell.name, self.kind, anywhere)]
            todo.sort(key=self.order)
            left = 0
            for cell in todo:
                planned = self.plan(cell)
                if not planned.fits:
                    if not self.options.peer:
                        found = {"does_not_fit": planned.needed / 2**30, "gpu_gib": self.machine.nbytes / 2**30}
                        self.record(cell.name, self.kind, found)
                    print(f"{cell.name}: does not fit: {planned.needed / 2**30:.1f} GiB", flush=True)
                elif not self.take(cell, planned):
                    left += 1
            return left
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def order(self, cell):
        """A sort key: one shape after the other, because its model is written once, the shortest cells first."""
        return cell != MAIN, cell.gpus, model_s(cell), cell.shape, estimate_s(cell, self.options, Rates())

    def list(self, cells):
        """Print each cell with what it needs and takes, about."""
        total = 0.0
        for cell in cells:
            planned, estimate = self.plan(cell), self.estimate_s(cell)
            done = ", done" if self.results_of(cell.name, self.kind, self.options.anywhere) else ""
            takes = f"{estimate:6.0f} s" if planned.fits else "does not fit"
            total += estimate if planned.fits and not done else 0.0
            print(f"{cell.name:40} {planned.needed / 2**30:7.1f} GiB {takes}{done}  {planned.keys}", flush=True)
        print(f"{len(cells)} cells, about {total:.0f} s for those that are left, and their models")
        shutil.rmtree(self.scratch, ignore_errors=True)


def write_config(folder, shape):
    """Write what a plan reads of a model: its config and a tokenizer."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(SHAPES[shape]))
    for path in QUICKSTART.glob("tokenizer*"):
        shutil.copy(path, folder / "model")


def arguments_of(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path, help="the first gets results, the others have some")
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns of names, as a shell has them")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--again", action="store_true", help="measure cells that are done once more")
    parser.add_argument("--anywhere", action="store_true", help="skip cells that another kind of GPU has, too")
    parser.add_argument("--peer", choices=("transformers", "trl"), help="measure this instead")
    parser.add_argument("--list", action="store_true", help="print the cells and do nothing")
    parser.add_argument("--page", action="store_true", help="write the page and its picture from the results")
    parser.add_argument("--page-folder", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--shapes", nargs="+", default=TABLE_SHAPES)
    parser.add_argument("--tuned", nargs="+", choices=("all", "lora"), default=["all", "lora"])
    parser.add_argument("--completions", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 1024], help="tokens of a prompt")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048], help="tokens of a completion")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--gpu-memory", type=float, help="GiB of a GPU to plan for, if not this machine's")
    parser.add_argument("--gpu-name", default="planned", help="its name")
    parser.add_argument("--commit", help="of these sources, where there is no git")
    add_options(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"--shapes must be of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    if options.peer:
        options.gpus = [count for count in options.gpus if count == 1]
    return options


def main(arguments=None):
    options = arguments_of(arguments)
    cells = cells_of(options)
    if not cells:
        raise SystemExit(f"--cells {' '.join(options.cells)}: no cell has such a name")
    if options.page:
        print(table_page.write(cells, read_results(options.folders), options.page_folder))
        return 0
    # Plans read shapes alone: this process leaves the GPUs to others.
    device.select("cpu")
    machine = Machine(options)
    table = Table(options, machine)
    if options.list:
        table.list(cells)
        return 0
    left = table.run([cell for cell in cells if cell.gpus <= machine.count])
    print(f"{left} cells are left for want of time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
