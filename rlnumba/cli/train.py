"""A command for each trainer, and `rlnumba eval`."""

from pathlib import Path

import click

from rlnumba.cli.command_line import cli
from rlnumba.cli.options import CONFIG, DTYPE, OF_A_RUN_FILE, OVERRIDES, POSITIVE, TENSOR_PARALLEL, TRAINER
from rlnumba.cli.progress import CommandProgress, log_device
from rlnumba.cli.run_files import first_readable, parse_overrides, runs_of_any_trainer
from rlnumba.config.runs import RUNS
from rlnumba.runtime import device
from rlnumba.runtime.compile import ahead_of_time


def _trainer(kind, purpose, files):
    """Adds the command of a trainer, which writes `files`: a TOML file, and any of its keys as an option."""
    doc = f"""{purpose}

    Every key of the file is also an option, and a file is not needed: --model DIR --data.train FILE
    --train.learning_rate 1e-5. docs/configuration.md lists them.
    Writes output_dir: {files}, config.toml, checkpoints/, final/, curves.png.
    """

    @cli.command(kind, help=doc, **OF_A_RUN_FILE)
    @CONFIG
    @click.option("--resume", is_flag=True, help="Resume from the newest readable checkpoint in output_dir.")
    @click.option(
        "--resume.step",
        "resume_step",
        type=POSITIVE,
        help="Resume from checkpoints/step-N in output_dir; newer ones are moved to earlier-M.",
        metavar="N",
    )
    @click.option("--dry-run", is_flag=True, help="Print the resolved configuration and what its ranks do, and stop.")
    @OVERRIDES
    def command(config, resume, resume_step, dry_run, overrides):
        """Read and check the run, then train it, or print it."""
        from rlnumba.config import load_run, to_toml

        def has_16_bits():
            return dry_run or device.name() != "cpu"

        run = load_run(kind, config, parse_overrides(overrides), has_16_bits)
        if dry_run:
            click.echo(to_toml(run), nl=False)
            if run.num_ranks > 1 or run.deploy.num_infer_gpus:
                _print_ranks(run)
            return
        if run.gemm != "cublas":
            ahead_of_time.prepare("rlnumba.runs.planning.kernel_list")
        log_device()
        from rlnumba.runs.planning.fit import fit_to_device
        from rlnumba.runs.planning.savings import advise
        from rlnumba.runs.run_folder import owner_of
        from rlnumba.runs.run_inputs import located
        from rlnumba.trainers.every import TRAINERS

        with owner_of(run):
            if run.num_ranks == 1:
                run = fit_to_device(located(run))
            with advise(run):
                if run.num_ranks == 1:
                    TRAINERS[kind].train(run, resume_step or resume)
                else:
                    from rlnumba.runs.ranks import train_on_ranks

                    train_on_ranks(run, resume_step or resume)


def _print_ranks(run):
    """Print, as comments of TOML, what each rank of a run does and the memory that it takes."""
    from rlnumba.runs.planning.plan import Planner
    from rlnumba.runs.planning.text import describe_ranks

    planner = Planner(run, device.name() == "cuda", device.memory_info()[1])
    click.echo("\n# GiB by region, planned:")
    for line in describe_ranks(planner):
        click.echo(f"# {line}")


for _run_class in RUNS.values():
    _files = "metrics.jsonl, completions.jsonl" if _run_class.generates else "metrics.jsonl"
    _trainer(_run_class.trainer, _run_class.purpose, _files)


@cli.command("eval", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@CONFIG
@TRAINER
@click.option("--model", help="Folder of a model or adapter, or hub id. Default: the run's model.")
@click.option("--output", help="Folder for metrics.json and completions.jsonl. Default: none is written.")
@DTYPE
@TENSOR_PARALLEL
@OVERRIDES
def evaluate(config, trainer, model, output, dtype, tensor_parallel_size, overrides):
    """Evaluate a model on a run's data.eval: rewards, avg@k and pass@k of prompts, with the sampling of [eval]; loss
    and the trainer's other metrics of a file of rows.

    Prints a line for each metric.
    """
    runs = runs_of_any_trainer(config, trainer, parse_overrides(overrides))
    if output is not None:
        from rlnumba.reporting.files import check_output

        check_output(output, {})
        inputs = {f"--config {path}": path for path in config} | {"data.eval": runs[0].data.eval}
        for name in ("metrics.json", "completions.jsonl"):
            check_output(Path(output) / name, inputs)
    log_device()
    from rlnumba.runs.eval import describe_model, run_eval
    from rlnumba.runs.row_loop import RowError

    progress = CommandProgress()

    def evaluated(run):
        return run, run_eval(run, model, output, dtype, progress, tensor_parallel_size=tensor_parallel_size)

    (run, found), others = first_readable(runs, evaluated, RowError)
    name = describe_model(run, model)
    progress.end(f"evaluated {name} as {run.trainer} does in {progress.seconds:.1f} s{others}")
    for name, value in found.items():
        click.echo(f"{name:<40} {value:.6g}")
    if not any(value for name, value in found.items() if "avg@" in name or "pass@" in name) and run.generates:
        click.echo(f"no value reached eval.pass_threshold {run.eval.pass_threshold:g}", err=True)
