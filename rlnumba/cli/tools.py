"""Commands on models, runs and the machine: check, merge, plot, env."""

from pathlib import Path

import click

from rlnumba.cli.command_line import cli
from rlnumba.cli.options import ABOVE_0, BASE, DTYPE, GROUP_SIZE, MODEL, POSITIVE, QUANTIZATION, SEED, TENSOR_PARALLEL
from rlnumba.cli.progress import CommandProgress, log_device, prepare_compiling
from rlnumba.cli.rows import open_model
from rlnumba.errors import UserError
from rlnumba.runtime import device


@cli.command()
@MODEL
@BASE
@DTYPE
@click.option("--temperature", type=ABOVE_0, default=1.0, help="Divides the logits.")
@click.option("--max-tokens", type=POSITIVE, default=48, help="Most tokens of a completion.")
@SEED
@QUANTIZATION
@TENSOR_PARALLEL
def check(model, base, dtype, temperature, max_tokens, seed, quantization, tensor_parallel_size):
    """Compare rollout log-probs with training log-probs of a model, and name the first operator that differs.

    The exit code is 1 if they differ where they must be equal bit for bit: everywhere except with --gemm cublas.
    """
    prepare_compiling(tensor_parallel_size)
    log_device()
    from rlnumba.config import EngineConfig
    from rlnumba.engine.parallel_size import choose_ranks
    from rlnumba.kernels.gemm import ops as gemm
    from rlnumba.model.transformer import Checkpoint

    folder, base, config, _ = open_model(model, base)
    checkpoint = Checkpoint(folder, base, dtype, quantization=quantization)
    share = EngineConfig().gpu_memory_utilization
    tensor_parallel_size = choose_ranks(tensor_parallel_size, config, dtype, share, quantization)
    if tensor_parallel_size > 1:
        from rlnumba.parallel import agreement

        element = device.dtype(dtype or ("float32" if device.name() == "cpu" else config.dtype))
        progress = CommandProgress()
        options = max_tokens, temperature, seed, progress.generated
        found = agreement.check_agreement(tensor_parallel_size, checkpoint, *options)
    else:
        from rlnumba.engine.check import check_agreement

        transformer = checkpoint.load()
        element, progress = transformer.dtype, CommandProgress()
        found = check_agreement(transformer, None, max_tokens, temperature, seed, progress.generated)
    progress.end(f"checked in {progress.seconds:.1f} s")
    click.echo(f"tokens compared            {found.tokens}")
    click.echo(f"equal bit for bit          {found.equal} ({100 * found.equal / found.tokens:.2f} %)")
    click.echo(f"largest difference         {found.largest:.3g} nats")
    click.echo(f"first differing operator   {found.operator or 'none'}")
    click.echo(f"GEMM backend               {gemm.describe(element)}")
    if found.operator and gemm.backend() != "cublas":
        raise UserError(f"rollout and training differ by up to {found.largest:.3g} nats, first in {found.operator}")


@cli.command()
@click.option("--model", required=True, help="Hugging Face folder or hub id of the base.")
@click.option("--adapter", required=True, help="PEFT adapter folder or hub id.")
@click.option("--output", required=True, help="Folder of the merged model, written.")
@click.option("--dtype", type=click.Choice([*device.DTYPES]), help="Dtype of the merged model. Default: the base's.")
@QUANTIZATION
def merge(model, adapter, output, dtype, quantization):
    """Add an adapter to the weights of its base, in float32, and write the result as a model of its own.

    With --quantization the base has the values of that format, as in the adapter's training.
    """
    from rlnumba.reporting.files import check_output, new_folder

    check_output(output, {})
    log_device()
    from rlnumba.model.hub import find_model
    from rlnumba.model.lora import check_other_kind, is_adapter
    from rlnumba.model.lora import merge as merge_weights
    from rlnumba.model.quantized.weights import set_values, weights_in
    from rlnumba.model.transformer import load_model, save_model

    folder, adapter_folder = find_model(model), find_model(adapter)
    if is_adapter(folder):
        raise UserError(f"--model: {folder} is an adapter folder; it must be the base's")
    if not is_adapter(adapter_folder):
        raise UserError(f"--adapter: {adapter_folder} has no adapter_config.json, or is a model")
    if Path(output).resolve() in (folder.resolve(), adapter_folder.resolve()):
        raise UserError(f"--output: {output} is the folder of the {'adapter' if is_adapter(output) else 'base'}")
    check_other_kind(output, saves_adapter=False)
    with new_folder(output):
        _, _, config, tokenizer = open_model(adapter, model)
        transformer = load_model(adapter_folder, "float32", config.heads, base=folder)
        if quantization is not None:
            quantized = load_model(folder, heads=config.heads, make_weights=weights_in(quantization))
            set_values(transformer.weights, quantized.weights)
        merge_weights(transformer.weights, transformer.adapter)
        save_model(transformer.without_adapter(), output, tokenizer, dtype or config.dtype)
    click.echo(f"{adapter_folder} merged into {folder} -> {output}", err=True)
    if quantization is not None:
        values = f"values of the base in {quantization.format_name} with the update, rounded to {dtype or config.dtype}"
        click.echo(f"its matrices are {values}: the log-probs are not quite those of base and adapter", err=True)


@cli.command()
@click.option("--model", required=True, help="Hugging Face folder or hub id.")
@click.option("--output", required=True, help="Folder of the quantised model, written.")
@click.option("--type", "name", type=click.Choice(["nf4", "int4", "int8"]), default="nf4", help="Format. Default: nf4.")
@GROUP_SIZE
def quantize(model, output, name, group_size):
    """Write a model whose linear layers have 4 or 8 bits a weight, which vLLM and transformers open."""
    from rlnumba.reporting.files import check_output, new_folder

    check_output(output, {})
    from rlnumba.model.hub import find_model
    from rlnumba.model.quantized.convert import quantize_checkpoint

    folder = find_model(model)
    if Path(output).resolve() == folder.resolve():
        raise UserError(f"--output: {output} is the folder of the model")
    with new_folder(output):
        has_experts = quantize_checkpoint(folder, output, name, group_size)
    if has_experts and name == "nf4":
        click.echo("rlnumba: transformers does not open experts in nf4; it opens those in int4 and int8", err=True)
    click.echo(f"{folder} in {name} -> {output}", err=True)


@cli.command()
@click.argument("run_dirs", nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--output", required=True, help="The PNG to write.")
def plot(run_dirs, output):
    """Draw the metrics of one or several runs as curves."""
    from rlnumba.reporting import plots
    from rlnumba.reporting.files import check_output

    check_output(output, {f"RUN_DIR {run_dir}": Path(run_dir) / "metrics.jsonl" for run_dir in run_dirs})
    plots.plot(list(run_dirs), Path(output))


@cli.command()
def env():
    """Show versions, device, GEMM backend, kernel families and memory."""
    device.name()  # the error for a missing device comes before slow imports
    from rlnumba.kernels.gemm import ops as gemm
    from rlnumba.runtime import dispatch
    from rlnumba.runtime.environment import environment

    free, total = device.memory_info()
    facts = environment() | {"gemm": gemm.describe()}
    facts |= {operator: dispatch.describe(operator) for operator in ("attention", "logprob")}
    facts["memory"] = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    for name, value in facts.items():
        click.echo(f"{name:<14} {value or 'unknown'}")
