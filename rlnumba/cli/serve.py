"""`rlnumba serve`: a model over HTTP."""

import dataclasses
import os

import click

from rlnumba.cli.command_line import cli
from rlnumba.cli.options import BASE, DTYPE, MODEL, POSITIVE, QUANTIZATION, SHARE, TENSOR_PARALLEL
from rlnumba.cli.progress import log_device, prepare_compiling
from rlnumba.cli.rows import open_model
from rlnumba.config.lora import MAX_LORAS, LoraConfig
from rlnumba.config.sections.agents import CALL_FORMATS
from rlnumba.errors import ConfigError, MissingModel, UserError

CALLS = click.Choice(["auto", *CALL_FORMATS, "none"])
LOGPROBS = click.Choice(["processed_logprobs", "raw_logprobs"])
THINKING = click.Choice(["auto", "qwen3", "gemma4", "none"])


@cli.command()
@MODEL
@BASE
@click.option("--served-model-name", multiple=True, help="Id of the model; may be repeated. Default: --model.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; others than this machine's need a key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free port.")
@click.option("--api-key", envvar="RLNUMBA_API_KEY", help="Key of clients. Default: RLNUMBA_API_KEY.")
@DTYPE
@click.option("--max-model-len", type=click.IntRange(min=2), help="Default: the model's longest sequence.")
@click.option("--max-num-seqs", type=POSITIVE, default=256, help="Most sequences in a step.")
@click.option("--max-num-batched-tokens", type=POSITIVE, default=8192, help="Most tokens in a step.")
@click.option("--gpu-memory-utilization", type=SHARE, default=0.9, help="Share of the GPU's memory for the engine.")
@click.option("--enforce-eager", is_flag=True, help="Do not capture CUDA graphs.")
@click.option("--chat-template", help="A Jinja file, instead of the tokenizer's own.")
@click.option("--tool-call-parser", type=CALLS, default="auto", help="auto: the format that the template renders.")
@click.option("--reasoning-parser", type=THINKING, default="auto", help="auto: the tags that the template has.")
@click.option("--max-logprobs", type=click.IntRange(min=-1), default=20, help="Most alternatives; -1: all.")
@click.option("--max-num-queued-reqs", type=click.IntRange(min=0), default=1024, help="Sequences that may wait.")
@click.option("--max-num-queued-tokens", type=POSITIVE, help="Tokens of prompts that may. Default: no limit.")
@click.option("--max-body-bytes", type=POSITIVE, default=32 << 20, help="Most bytes of a request.")
@click.option("--overload-status", type=click.Choice(["429", "503"]), default="429", help="Status when more come.")
@click.option("--drain-timeout", type=click.FloatRange(min=0), default=30.0, help="Seconds after SIGTERM or SIGINT.")
@click.option("--allowed-origins", multiple=True, help="A web page's origin that may read answers; may be repeated.")
@click.option("--logprobs-mode", type=LOGPROBS, default=LOGPROBS.choices[0], help="raw: of the model's own logits.")
@click.option("--return-sampling-mask", is_flag=True, help="Answers on token ids have the tokens that filters kept.")
@click.option("--lora-modules", multiple=True, help="NAME=FOLDER of an adapter; may be repeated.")
@click.option("--allow-runtime-lora", is_flag=True, help="Let clients load adapters, and unload them.")
@click.option("--lora-root", help="The folder below which these are.")
@click.option("--max-loras", type=POSITIVE, default=MAX_LORAS, help="Most adapters at a time.")
@click.option("--dev-endpoints", is_flag=True, help="Let a trainer pause the engine and give it new weights.")
@click.option("--log-requests", is_flag=True, help="A line on stderr for each request.")
@QUANTIZATION
@TENSOR_PARALLEL
def serve(model, base, dtype, served_model_name, chat_template, tool_call_parser, reasoning_parser, **options):
    """Serve a model over HTTP, with the routes of OpenAI's API.

    When requests are accepted, one line on stdout is the base URL. SIGTERM and SIGINT let the requests that have begun
    end, then the exit code is 0; a second one ends the process at once.
    """
    try:
        from rlnumba.serve.process import ServerProcess, announce
        from rlnumba.serve.watch.listen import bind
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "rlnumba":
            raise
        raise ConfigError(f"serve needs {error.name}: pip install 'rlnumba[serve]'") from None
    from rlnumba.config import EngineConfig
    from rlnumba.engine.core import longest_sequence
    from rlnumba.serve.service import Parsers
    from rlnumba.serve.settings import ServerSettings

    # That of the weights, not of copies of them.
    quantization, tensor_parallel_size = options.pop("quantization"), options.pop("tensor_parallel_size")
    if tensor_parallel_size != 1:
        check_parted(options)
    names = {field.name for field in dataclasses.fields(EngineConfig)} & set(options)
    # The server bounds what a request may list; what it lists for a sampling mask has a bound of its own. One that
    # sleeps leaves its memory to other processes.
    own = {"max_logprobs": -1, "enable_sleep_mode": options["dev_endpoints"] or None}
    engine_config = EngineConfig(**{name: options[name] for name in names} | own)
    options = {name: value for name, value in options.items() if name == "max_logprobs" or name not in names}
    options["overload_status"] = int(options["overload_status"])
    options["allowed_origins"] = tuple(options["allowed_origins"])
    allows_adapters, modules = options.pop("allow_runtime_lora"), options.pop("lora_modules")
    settings = ServerSettings(names=served_model_name or (model,), root=model, **options)
    adapters = [read_module(each, settings) for each in modules]
    check_lora_root(allows_adapters, settings.lora_root)
    prepare_compiling(tensor_parallel_size)
    log_device()
    try:
        folder, base, config, tokenizer = open_model(model, base)
    except MissingModel as error:
        # With exit code 2 what starts servers knows that another start would not help.
        raise ConfigError(str(error)) from None
    settings = dataclasses.replace(settings, folder=str(folder))
    longest_sequence(config, engine_config)
    if base is not None and (adapters or allows_adapters):
        raise ConfigError(f"--model {model} is an adapter; --lora-modules and --allow-runtime-lora need a model")
    if chat_template is not None:
        set_template(tokenizer, chat_template)
    parsers = Parsers(tokenizer, tool_call_parser, reasoning_parser)

    from rlnumba.engine.adapters import for_adapters
    from rlnumba.engine.core import Engine
    from rlnumba.engine.llm import TEXT_TOKENS, compile_ahead
    from rlnumba.engine.parallel_size import choose_ranks
    from rlnumba.engine.sequence import SamplingParams
    from rlnumba.model.transformer import Checkpoint
    from rlnumba.sampling.offline import Shards

    share = engine_config.gpu_memory_utilization
    size = choose_ranks(tensor_parallel_size, config, dtype, share, quantization)
    bound = bind(settings.host, settings.port) if size == 1 else None
    work = engine_config, [TEXT_TOKENS], [SamplingParams()], (), quantization
    if base is None and size > 1:
        Shards(size).compile_ahead(config, dtype or config.dtype, *work)
    elif base is None:
        # The kernels of adapters are the same whatever their ranks and target modules.
        lora = (LoraConfig(),) if adapters or allows_adapters else None
        compile_ahead(config, dtype or config.dtype, lora, *work)
    checkpoint = Checkpoint(folder, base, dtype, quantization=quantization)
    if size > 1:
        from rlnumba.serve.parts import PartedServer, serve_parts

        server = PartedServer(settings, engine_config, tokenizer, (tool_call_parser, reasoning_parser))
        serve_parts(size, checkpoint, server)
        return
    loaded = checkpoint.load()
    if adapters or allows_adapters:
        loaded = for_adapters(loaded)
    engine = Engine(loaded, tokenizer, engine_config)
    process = ServerProcess(settings, engine, parsers, bound, adapters)
    process.run(lambda: announce(process.url))


def check_parted(options):
    """Raise ConfigError for options, by name, that a model which several processes have a part of does not go with."""
    whole = "lora_modules", "allow_runtime_lora", "dev_endpoints"
    found = next((name for name in whole if options[name]), None)
    if found is not None:
        raise ConfigError(f"--{found.replace('_', '-')} needs a model that one process has whole, without --tp")


def read_module(text, settings):
    """The ServedAdapter that NAME=FOLDER stands for. Raises ConfigError."""
    from rlnumba.serve.routes.adapters import ServedAdapter

    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(f"--lora-modules must be NAME=FOLDER, got {text!r}")
    if name in settings.names:
        raise ConfigError(f"--lora-modules {text}: {name} is a name of the model")
    return ServedAdapter(name, folder)


def check_lora_root(is_allowed, root):
    """Raise ConfigError if adapters at run time have no folder, or a folder no use."""
    if is_allowed and root is None:
        raise ConfigError("--allow-runtime-lora needs --lora-root, the folder below which adapters may be loaded")
    if root is not None and not is_allowed:
        raise ConfigError("--lora-root needs --allow-runtime-lora")
    if root is not None and not os.path.isdir(root):
        raise ConfigError(f"--lora-root {root}: no such folder")


def set_template(tokenizer, path):
    """Give a tokenizer the chat template of a file. Raises ConfigError naming it."""
    if tokenizer is None:
        raise ConfigError(f"--chat-template {path}: the model has no tokenizer")
    try:
        with open(path, encoding="utf-8") as file:
            tokenizer.templates = {"default": file.read()}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}") from None
    try:
        tokenizer.template_variables  # noqa: B018, reads the whole of it
    except UserError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{tokenizer.folder}: ')}") from None
