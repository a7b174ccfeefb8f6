"""`rlnumba plan` and `rlnumba compile`: the memory and the kernels of a run that has not begun."""

import click

from rlnumba.cli.command_line import cli
from rlnumba.cli.options import ABOVE_0, CONFIG, OF_A_RUN_FILE, OVERRIDES, TRAINER
from rlnumba.cli.progress import CommandProgress
from rlnumba.cli.run_files import first_readable, parse_overrides, runs_of_any_trainer
from rlnumba.errors import ConfigError, UserError
from rlnumba.runtime import device, folders
from rlnumba.runtime.compile import cache


@cli.command(**OF_A_RUN_FILE)
@CONFIG
@TRAINER
@click.option("--gpu-memory", type=ABOVE_0, metavar="GIB", help="Plan for a GPU of this size. Default: this machine's.")
@click.option("--fit", is_flag=True, help="Print the keys with which the run fits the GPU, the fastest first.")
@OVERRIDES
def plan(config, trainer, gpu_memory, fit, overrides):
    """Print the memory that a run will take, by region, and which switch would save how much.

    Reads config.json, the tokenizer and the data, and loads no weights; every key of the file is also an option. With
    --fit it prints the keys with which the run fits a GPU, and the TOML of the fastest (docs/memory.md).
    """
    from rlnumba.runs.planning.fit import available_bytes, planned_choice
    from rlnumba.runs.planning.plan import Planner
    from rlnumba.runs.planning.text import describe

    runs = runs_of_any_trainer(config, trainer, parse_overrides(overrides))
    on_gpu = gpu_memory is not None or device.name() == "cuda"
    free, total = device.memory_info() if gpu_memory is None else 2 * (round(gpu_memory * 2**30),)
    if fit:
        if not on_gpu:
            raise ConfigError("plan: this machine has no GPU; --fit needs --gpu-memory GIB")
        _print_choices(runs, free, total)
        return

    def planned(run):
        planner = Planner(run, on_gpu, total)
        return planner, *planned_choice(planner, available_bytes(free, total, planner.num_sharing))

    (planner, found, choice), others = first_readable(runs, planned)
    where = "a GPU" if on_gpu else "the cpu device"
    ranks = f", each of {planner.run.num_ranks} ranks" if planner.run.num_ranks > 1 else ""
    click.echo(f"{planner.run.trainer} of {planner.run.model} on {where}{ranks}{others}")
    click.echo("\n".join(describe(planner, found)))
    if choice is not None:
        click.echo(f"\n{choice}")


def _print_choices(runs, free, total):
    """Print the keys with which the first of `runs` that can be read fits a GPU."""
    from rlnumba.runs.planning.fit import available_bytes
    from rlnumba.runs.planning.fit_choices import describe_choices, fastest_choices
    from rlnumba.runs.planning.plan import Planner, amount, step_of

    def readable(run):
        planner = Planner(run, True, total)
        step_of(planner, planner.run)
        return run, planner

    (run, planner), others = first_readable(runs, readable)
    available = available_bytes(free, total, planner.num_sharing)
    choices = fastest_choices(planner, run, available)
    click.echo(f"{run.trainer} of {run.model} on a GPU with {amount(available)}{others}\n")
    click.echo("\n".join(describe_choices(choices)))


@cli.command("compile", **OF_A_RUN_FILE)
@CONFIG
@TRAINER
@click.option("--gpu", type=click.Choice([*device.GPUS]), help="Compile for this GPU. Default: this machine's.")
@OVERRIDES
def compile_kernels(config, trainer, gpu, overrides):
    """Compile the kernels that a run will launch, on all cores, into the cache of machine code.

    A run does this itself, once a kernel is missing. --gpu needs no GPU, as when an image is built, but the extra
    cuda12 or cuda13 of this package, which has the compiler. It reads the model's config.json and tokenizer and the
    rows of the data, and no weights. RLNUMBA_CACHE_DIR names the cache's folder (default ~/.cache/rlnumba).
    """
    from rlnumba.runtime.compile.machine_code import check_compiler

    check_compiler()
    runs = runs_of_any_trainer(config, trainer, parse_overrides(overrides))
    properties = device.properties() if gpu is None else device.GPUS[gpu]
    if properties.capability is None:
        raise UserError("compile: this machine has no GPU; name the one to compile for by --gpu")
    progress = CommandProgress()
    from rlnumba.runs.planning.kernel_list import list_signatures
    from rlnumba.runs.run_folder import KERNEL_LIST, kernel_request
    from rlnumba.runtime.compile import pool

    def listed(run):
        run = run.resolved()
        return run, list_signatures(kernel_request(run), properties)

    (run, stages), others = first_readable(runs, listed)
    missing = pool.missing_of(stages, properties.capability)
    if missing and not folders.can_be_written(cache.folder()):
        raise UserError(f"compile: {cache.folder()} cannot be written; RLNUMBA_CACHE_DIR names another folder")
    if missing:
        pool.warm_up()
    for done, _ in enumerate(pool.compile_all(missing, properties.capability), start=1):
        progress(f"{done}/{len(missing)} kernels")
    cache.note_list_compiled(cache.list_path(KERNEL_LIST, kernel_request(run), properties))
    seconds = progress.seconds
    found = len({signature for stage in stages for signature in stage}) - len(missing)
    compiled = f"{run.trainer}: {len(missing)} kernels compiled in {seconds:.1f} s, {found} were in the cache"
    progress.end(compiled + others)
