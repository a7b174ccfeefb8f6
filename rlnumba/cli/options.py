"""Options of several commands, and types of their values."""

import functools

import click

from rlnumba.config.lora import BITS, QuantizationConfig
from rlnumba.errors import ConfigError
from rlnumba.runtime import device

POSITIVE = click.IntRange(min=1)
ABOVE_0 = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(min=0, min_open=True, max=1)
PENALTY = click.FloatRange(min=-2, max=2)
DEVICE = click.Choice([*device.DEVICES, *device.ALIASES])
# Options of several commands.
MODEL = click.option("--model", required=True, help="Hugging Face folder or hub id, of a model or a PEFT adapter.")
BASE = click.option("--base", help="The base of an adapter. Default: its base_model_name_or_path.")
DTYPE = click.option("--dtype", type=click.Choice([*device.DTYPES]), help="Default: the checkpoint's; cpu: float32.")
SEED = click.option("--seed", type=click.IntRange(min=0), default=0)
TENSOR_PARALLEL = click.option(
    *("--tp", "--deploy.tensor_parallel_size", "tensor_parallel_size"),
    type=click.Choice(["1", "2", "4", "8", "auto"]),
    default="1",
    callback=lambda context, option, value: 0 if value == "auto" else int(value),
    help="GPUs, or processes of the cpu device, that have a part of the model each; the result is that of one. auto: "
    "as few as it fits in.",
)

NUM_GPUS = click.option(
    *("--num-gpus", "--deploy.num_infer_gpus", "num_gpus"),
    type=POSITIVE,
    default=1,
    help="GPUs, or processes of the cpu device, that share the work, a whole model each, or with --tp so many of them; "
    "the result is that of one.",
)

PROMPT_COLUMN = click.option("--prompt-column", default="prompt", help="Column of the prompt: a text or messages.")
CONFIG = click.option("--config", multiple=True, help="A run file; of several, later ones win. Default: options alone.")
TRAINER = click.option("--trainer", help="The trainer of the file. Default: the first that reads it and its data.")
# A command that takes every key of a run file as an option.
OF_A_RUN_FILE = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    "options_metavar": "[--config RUN.toml] [OPTIONS]",
}
OVERRIDES = click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")


def _whole_words(context, option, value):
    """The value of --group-size, checked: kernels read the codes of 8 weights at once."""
    if value is not None and value % 8:
        raise click.BadParameter(f"{value} is not a multiple of 8")
    return value


GROUP_SIZE = click.option(
    "--group-size",
    type=POSITIVE,
    callback=_whole_words,
    help="Weights of a row that share a scale, a multiple of 8. Default: 64 of nf4, else 128.",
)


def QUANTIZATION(command):
    """--quantization and --group-size of a command, which gets a QuantizationConfig or None as `quantization`."""

    @functools.wraps(command)
    def with_quantization(quantization, group_size, **options):
        if quantization is None and group_size is not None:
            raise ConfigError("--group-size needs --quantization, whose groups it counts")
        found = None if quantization is None else QuantizationConfig(type=quantization, group_size=group_size)
        return command(quantization=found, **options)

    kind = click.option(
        "--quantization",
        type=click.Choice([*BITS]),
        help="Linear layers in this format, in memory; as [quantization] of a run.",
    )
    return kind(GROUP_SIZE(with_quantization))


def RANKS(command):
    """--tp and --num-gpus of a command, which gets both as `ranks`, (tensor_parallel_size, num_gpus)."""

    @functools.wraps(command)
    def with_ranks(tensor_parallel_size, num_gpus, **options):
        if tensor_parallel_size:
            from rlnumba.parallel.placement import check_groups

            check_groups(tensor_parallel_size, num_gpus)
        return command(ranks=(tensor_parallel_size, num_gpus), **options)

    return TENSOR_PARALLEL(NUM_GPUS(with_ranks))
