"""The command line: `rlnumba [--device auto|cuda|sim|cpu] [--gemm auto|native|cublas] [--debug] COMMAND ...`.

Exit codes: 0 success; 1 a failure; 2 a wrong option, key or value; 128 + n for signal n, as in a shell (130 Ctrl-C,
143 SIGTERM); a trainer first writes a checkpoint of its last complete step, and a second signal ends it at once. A
failure is one line on stderr, `rlnumba: ...`, without a traceback unless --debug is given. Results go to the files
named, progress to stderr. All input of a command is validated before the model's weights are read. Slow imports are
inside the commands, so that --help and a wrong option are answered at once.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import click

from rlnumba.config.runs import RUNS
from rlnumba.errors import ConfigError, UserError
from rlnumba.runtime import device, folders, signals
from rlnumba.runtime.compile import ahead_of_time, cache

POSITIVE = click.IntRange(min=1)
ABOVE_0 = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(min=0, min_open=True, max=1)
PENALTY = click.FloatRange(min=-2, max=2)
DEVICE = click.Choice([*device.DEVICES, *device.ALIASES])
# Options of several commands.
MODEL = click.option("--model", required=True, help="Hugging Face folder or hub id, of a model or a PEFT adapter.")
BASE = click.option("--base", help="Of an adapter; default: its base_model_name_or_path.")
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
    help="GPUs, or processes of the cpu device, that share the work, a whole model each; the result is that of one.",
)

PROMPT_COLUMN = click.option("--prompt-column", default="prompt", help="Column of the prompt: a text or messages.")
CONFIG = click.option("--config", multiple=True, help="A run file; of several, later ones win. Default: options alone.")
TRAINER = click.option("--trainer", help="Whose file it is. Default: the first that reads it and its data.")

# Share of a GPU's memory for the weights of a model that scores.
SCORING_SHARE = 0.9

# The exception that a signal raised.
_signal_error = None


def main(arguments=None):
    """Runs the command line and exits the process."""
    if sys.stderr is None:  # closed by the parent process
        sys.stderr = open(os.devnull, "w")
    signals.install()
    code = run(sys.argv[1:] if arguments is None else arguments)
    if signals.received() is not None:
        # Code that the signal interrupted, such as the compiler, may crash while Python is finalized.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments):
    """Runs the command line with a list of arguments and returns the exit code."""
    try:
        # Not cli.main, which turns every KeyboardInterrupt into an Abort and an empty line.
        with cli.make_context("rlnumba", list(arguments)) as context:
            cli.invoke(context)
        return 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return _fail(error, "no command given", error.exit_code, arguments)
    except (click.ClickException, UserError) as error:
        message = str(error) if isinstance(error, UserError) else error.format_message()
        return _fail(error, message, error.exit_code, arguments)
    except KeyboardInterrupt as error:
        return _fail(error, "interrupted", 128 + signal.SIGINT, arguments)
    except BrokenPipeError:
        # The reader of stdout, such as head, has closed it.
        sys.stdout = None
        return 1
    except OSError as error:
        _drop_unwritten_output()
        file = "" if error.filename is None else f"{error.filename}: "
        return _fail(error, f"{file}{error.strerror or error}", 1, arguments)
    except MemoryError as error:
        return _fail(error, f"out of memory {error}".strip(), 1, arguments)
    except Exception as error:  # a bug, too, ends in one line
        return _fail(error, f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1, arguments)


def _drop_unwritten_output():
    """Forget what stdout cannot be written; at its end Python would try again, and exit with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except AttributeError:
        pass  # closed by the parent process


def _fail(error, message, code, arguments):
    global _signal_error
    number = signals.received()
    if number is not None:
        # Keeps the frames of the traceback alive: freeing the compiler's objects may crash.
        _signal_error = error
        message = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        code = 128 + number
    if "--debug" in arguments:
        traceback.print_exception(error)
    clear = "\r\033[K" if sys.stderr.isatty() else ""  # erases a progress line
    print(f"{clear}rlnumba: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _with_dashes(name):
    """An option's name in its one spelling: keys of run files have underscores, and so may options."""
    return name.replace("_", "-")


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(context_settings=SETTINGS | {"token_normalize_func": _with_dashes})
@click.version_option(package_name="rlnumba", message="rlnumba %(version)s")
@click.option(
    "--device",
    "device_name",
    type=DEVICE,
    metavar=f"[{'|'.join(device.DEVICES)}]",
    help="Device to compute on: auto (cuda if there is a GPU, else cpu), cuda, sim (the CUDA simulator, for debugging "
    "kernels), cpu. Default: the environment variable RLNUMBA_DEVICE, else auto. Also after the command.",
)
@click.option(
    "--gemm",
    "gemm_backend",
    type=click.Choice(["auto", "native", "cublas", "numba"]),
    metavar="[auto|native|cublas]",
    help="GEMM backend on a GPU: native, the kernels of this package, whose rows do not depend on the batch; cublas, "
    "with which rollout and training log-probs differ in their last bits; auto, which is native. "
    "Trainers read the key gemm of their configuration instead.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(device_name, gemm_backend, debug):
    """Reinforcement learning of language models with kernels written in Python."""
    if device_name is not None:
        device.select(device_name)
    if gemm_backend is not None:
        from rlnumba.kernels.gemm import ops as gemm

        gemm.set_backend(gemm_backend)


def _log_device():
    """Chooses the device, if none is chosen yet, and logs it."""
    name = device.name()
    click.echo(f"device {device.describe()}", err=True)
    compiled = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent).glob("**/*.nbi")
    if name == "cpu" and next(compiled, None) is None:
        click.echo("the first run compiles the functions of the cpu device, about half a minute once", err=True)


class _Progress:
    """Progress of a command on stderr: one line that is rewritten, on a terminal only; elsewhere the last line."""

    def __init__(self):
        self.live = sys.stderr.isatty()
        self.started = self.last = time.monotonic()

    def __call__(self, text):
        if self.live and time.monotonic() - self.last > 0.1:
            self.last = time.monotonic()
            click.echo(f"\r\033[K{text}", nl=False, err=True)

    def generated(self, finished, total, tokens):
        rate = tokens / max(time.monotonic() - self.started, 1e-9)
        self(f"{finished}/{total} completions, {tokens} tokens, {rate:.0f} tokens/s")

    def end(self, text):
        click.echo(f"\r\033[K{text}" if self.live else text, err=True)


def _given_options():
    """The names of the options that the command line has, not those with a default: set."""
    context = click.get_current_context()
    return {name for name in context.params if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT}


def _open(model, base):
    """(folder, base folder, ModelConfig, Tokenizer or None) of a folder or hub id: all but the weights, read last.

    base: of an adapter, and None of a model, as load_model takes it.
    """
    from rlnumba.model.tokenizer import Tokenizer
    from rlnumba.model.transformer import find_base, read_config

    folder, adapter = find_base(model, base)
    config = read_config(folder, adapter)
    if adapter is None:
        return folder, None, config, Tokenizer.from_folder(folder)
    return adapter, folder, config, Tokenizer.from_folder(adapter) or Tokenizer.from_folder(folder)


def _folders(*models):
    """Those of models that are local folders: list of Path."""
    paths = [Path(model).expanduser() for model in models if model is not None]
    return [path for path in paths if path.is_dir()]


def _read_rows(path, column, prompt_column, completion=False):
    """The Rows of a file, each with token ids in `column`, or with a prompt and, if asked for, a completion or a text.

    The ids count if a row has both, such as a line that `generate` or `score` wrote.
    """
    from rlnumba.data import check_messages, check_prompt, read_rows
    from rlnumba.data.formats import chat_cell, json_cell

    rows = read_rows(path, cells={column: json_cell, "prompt": chat_cell, "completion": chat_cell})
    for row, where in rows:
        has_text = prompt_column in row and (not completion or "completion" in row)
        if column not in row and not has_text and not (completion and "text" in row):
            text = f"{prompt_column!r} and 'completion', or 'text'" if completion else repr(prompt_column)
            remedy = f"its columns are {', '.join(row) or 'none'}; --prompt-column names that of the prompt"
            raise UserError(f"{where}: needs either {column!r} or {text}; {remedy}")
        if column in row:
            ids = row[column]
            if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise UserError(f"{where}: {column!r} must be a list of integers")
            if not ids:
                raise UserError(f"{where}: {column!r} is empty")
            continue
        if not has_text:
            if not isinstance(row["text"], str):
                raise UserError(f"{where}: 'text' must be a string")
            continue
        check_prompt(row[prompt_column], f"{where}: {prompt_column!r}")
        if completion and isinstance(row.get("completion"), list):
            check_messages(row["completion"], f"{where}: 'completion'")
        elif completion and not isinstance(row.get("completion"), str):
            raise UserError(f"{where}: 'completion' must be a string or a list of messages")
    return rows


def _token_ids(rows, column, encode, tokenizer, vocab_size, limit):
    """The token ids of every row, a list each: those in `column`, or encode(row, **template), with the variables of
    the chat template that the row has. UserErrors name the line."""
    from rlnumba.data import check_ids, template_variables

    sequences, in_vain = [], []
    for row, where in rows:
        ids = row.get(column)
        if ids is None:
            if tokenizer is None:
                raise UserError(f"{where}: text needs a tokenizer, and the model has no tokenizer.json; give {column}")
            template = template_variables(row, where)
            if template and not any(isinstance(value, list) for name, value in row.items() if name not in template):
                in_vain.append(f"{where}: {', '.join(template)} has no effect: no chat template is applied to a text")
            try:
                ids = encode(row, **template)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        if not ids:
            raise UserError(f"{where}: the text has no tokens")
        check_ids(ids, vocab_size, where)
        if len(ids) > limit:
            raise UserError(f"{where}: {len(ids)} tokens are more than the limit of {limit}")
        sequences.append(ids)
    for line in in_vain[:1]:
        click.echo(line, err=True)
    return sequences


@cli.command()
@MODEL
@BASE
@click.option(
    "--prompts",
    required=True,
    help='Rows, such as JSONL: {"prompt": text or messages} or {"prompt_token_ids": [...]}.',
)
@PROMPT_COLUMN
@click.option("--output", required=True, help="JSONL, a line for each prompt in the same order.")
@click.option("--max-tokens", type=POSITIVE, default=128, help="Most tokens of a completion.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=-1), default=0, help="0 and -1 are off.")
@click.option("--top-p", type=SHARE, default=1.0, help="1 is off.")
@click.option("--min-p", type=click.FloatRange(min=0, max=1), default=0.0, help="0 is off.")
@click.option("--repetition-penalty", type=ABOVE_0, default=1.0, help="Above 1: tokens seen become less likely.")
@click.option("--presence-penalty", type=PENALTY, default=0.0, help="Subtracted from logits of drawn tokens.")
@click.option("--frequency-penalty", type=PENALTY, default=0.0, help="The same for each time that a token occurred.")
@click.option("--min-tokens", type=click.IntRange(min=0), default=0, help="No stop before so many tokens.")
@click.option("--stop", multiple=True, help="A string that ends a completion, cut from its text; may be repeated.")
@click.option("--stop-token-ids", type=int, multiple=True, help="A token id that does; may be repeated.")
@SEED
@click.option("--n", type=POSITIVE, default=1, help="Completions of each prompt.")
@DTYPE
@click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-sequence token.")
@click.option("--max-num-seqs", type=POSITIVE, default=256, help="Most sequences in a step.")
@click.option("--max-num-batched-tokens", type=POSITIVE, default=8192, help="Most tokens in a step.")
@click.option("--max-model-len", type=click.IntRange(min=2), help="Default: the model's longest sequence.")
@click.option("--gpu-memory-utilization", type=SHARE, default=0.9, help="Share of the GPU's memory for the engine.")
@click.option("--enforce-eager", is_flag=True, help="Do not capture CUDA graphs.")
@TENSOR_PARALLEL
@NUM_GPUS
def generate(model, base, prompts, prompt_column, output, dtype, tensor_parallel_size, num_gpus, **options):
    """Complete prompts. Writes the columns of each row and {"prompt_token_ids", "completions": [{"text", "token_ids",
    "logprobs", "finish_reason"}]}, a line for each prompt.

    A prompt for which the model gives no number has no completions and an "error"; on one GPU the others are written
    all the same, and the exit code is 1.

    A token depends only on the seed, the prompt, the completion's index and the position. Sampling parameters that no
    option gives are those of the model's generation_config.json, which are then printed.
    """
    from rlnumba.config import EngineConfig
    from rlnumba.data import encode_prompt
    from rlnumba.engine.sequence import SamplingParams
    from rlnumba.reporting.files import check_output, replacing, to_line

    check_output(output, {"--prompts": prompts}, _folders(model, base))
    _prepare_compiling(tensor_parallel_size)
    _log_device()
    names = {f.name for f in dataclasses.fields(EngineConfig)} & set(options)
    engine = EngineConfig(**{name: options.pop(name) for name in names})
    params = SamplingParams(**options)
    # {index of a row: its PromptError}.
    failed = {}
    _check_one_kind(tensor_parallel_size, num_gpus)
    with replacing(output) as file:
        rows = _read_rows(prompts, "prompt_token_ids", prompt_column)
        from rlnumba.engine.core import PromptError, check_stops, longest_sequence
        from rlnumba.engine.generation_config import with_generation_config
        from rlnumba.engine.llm import LLM, compile_ahead
        from rlnumba.model.transformer import load_model

        folder, base, config, tokenizer = _open(model, base)
        share = engine.gpu_memory_utilization
        tensor_parallel_size = _choose_ranks(tensor_parallel_size, config, dtype, share)
        limit = longest_sequence(config, engine)
        params, lines = with_generation_config(params, base or folder, _given_options())
        for line in lines:
            click.echo(line, err=True)
        check_stops(params, tokenizer, config.vocab_size)

        def encode(row, **template):
            return encode_prompt(tokenizer, row[prompt_column], **template)

        ids = _token_ids(rows, "prompt_token_ids", encode, tokenizer, config.vocab_size, limit)
        model_and_dtype, lengths = (config, dtype or config.dtype), list(map(len, ids))
        if base is None and tensor_parallel_size == 1:
            compile_ahead(*model_and_dtype, None, engine, lengths, [params])
        if tensor_parallel_size > 1:
            from rlnumba.model.config import LM_HEAD
            from rlnumba.parallel import tensor_parallel

            if base is None:
                tensor_parallel.compile_parts_ahead(tensor_parallel_size, *model_and_dtype, engine, lengths, [params])
            progress = _Progress()
            shards = tensor_parallel_size, folder, base, dtype, LM_HEAD
            arguments = None if tokenizer is None else folder, engine, ids, params, progress.generated
            outputs = tensor_parallel.on_ranks(tensor_parallel.generate, *shards, *arguments)
        elif num_gpus > 1:
            from rlnumba.sampling import replicas

            progress, folders = _Progress(), [each for each in (folder, base) if each is not None]
            of_model = folder, base, dtype, folders, engine
            arguments = *of_model, ids, params, [where for _, where in rows], progress.generated
            outputs = replicas.launch_replicas(replicas.generate, num_gpus, "--num-gpus", *arguments)
        else:
            llm = LLM(load_model(folder, dtype, base=base), tokenizer, engine)
            progress = _Progress()
            try:
                outputs = llm.generate(ids, params, progress.generated, failed=failed.__setitem__)
            except PromptError as error:
                raise UserError(f"{rows[error.request_id][1]}: {error.reason}") from error
        if len(failed) == len(rows) > 0:
            raise _failure(rows, failed)
        for index, ((row, _), result) in enumerate(zip(rows, outputs, strict=True)):
            if index in failed:
                found = {"prompt_token_ids": result.prompt_token_ids, "completions": [], "error": failed[index].reason}
                file.write(to_line(row | found))
                continue
            names = ("text", "token_ids", "logprobs", "finish_reason")
            completions = [{name: getattr(c, name) for name in names} for c in result.completions]
            found = {"prompt_token_ids": result.prompt_token_ids, "completions": completions}
            file.write(to_line(row | found))
    drawn = [c for index, each in enumerate(outputs) if index not in failed for c in each.completions]
    tokens, seconds = sum(c.num_tokens for c in drawn), time.monotonic() - progress.started
    progress.end(f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s) -> {output}")
    if failed:
        raise _failure(rows, failed, f"; {output} has the others")


def _failure(rows, failed, end=""):
    """The UserError of `generate` for {index of a row: PromptError}. rows: (row, where it stands)."""
    first = min(failed)
    more = f", and {len(failed) - 1} more of {len(rows)} prompts" if len(failed) > 1 else ""
    return UserError(f"{rows[first][1]}: {failed[first].reason}{more}{end}")


@cli.command()
@MODEL
@BASE
@click.option(
    "--input",
    "source",
    required=True,
    help='Rows, such as JSONL: {"token_ids": [...]}, {"prompt", "completion"} or {"text"}.',
)
@PROMPT_COLUMN
@click.option("--output", required=True, help="JSONL, a line for each input line in the same order.")
@DTYPE
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, help="Divides the logits; 0: as 1.")
@TENSOR_PARALLEL
@NUM_GPUS
def score(model, base, source, prompt_column, output, dtype, temperature, tensor_parallel_size, num_gpus):
    """Compute the log-prob of every token given those before it, with the training forward; or a reward model's score.

    Writes the columns of each row and {"token_ids", "logprobs"}, a line for each input line; the first log-prob is
    null. With a model that `rlnumba reward` trained, or another for sequence classification, it is {"token_ids",
    "score"}; EOS is then appended to a text that lacks it, as in training.
    """
    from rlnumba.config import EngineConfig
    from rlnumba.data import encode_pair, encode_scored
    from rlnumba.engine.sequence import SamplingParams
    from rlnumba.reporting.files import check_output, replacing, to_line

    check_output(output, {"--input": source}, _folders(model, base))
    _prepare_compiling(tensor_parallel_size)
    _log_device()
    SamplingParams(temperature=temperature)  # refuses what `generate` refuses
    _check_one_kind(tensor_parallel_size, num_gpus)
    with replacing(output) as file:
        rows = _read_rows(source, "token_ids", prompt_column, completion=True)
        from rlnumba.engine.llm import compile_ahead
        from rlnumba.model.config import LM_HEAD, SCORE_HEAD
        from rlnumba.model.transformer import load_model

        folder, base, config, tokenizer = _open(model, base)
        tensor_parallel_size = _choose_ranks(tensor_parallel_size, config, dtype, SCORING_SHARE)
        classifies = config.heads == SCORE_HEAD
        if classifies and temperature != 1.0:
            raise ConfigError(f"--temperature does not apply to {config.architecture}, which has no logits")

        def encode(row, **template):
            # A text alone is all completion, of the empty prompt.
            is_pair = prompt_column in row and "completion" in row
            pair = (row[prompt_column], row["completion"]) if is_pair else ("", row["text"])
            if classifies:
                return encode_scored(tokenizer, *pair, config.eos_token_ids, **template)
            return encode_pair(tokenizer, *pair, **template)[0]

        limit = config.num_positions
        sequences = _token_ids(rows, "token_ids", encode, tokenizer, config.vocab_size, limit)
        model_and_dtype, lengths = (config, dtype or config.dtype), list(map(len, sequences))
        if base is None and tensor_parallel_size == 1:
            compile_ahead(*model_and_dtype, None, EngineConfig(), (), (), lengths)
        heads = SCORE_HEAD if classifies else LM_HEAD
        if tensor_parallel_size > 1:
            from rlnumba.parallel.tensor_parallel import compile_parts_ahead, on_ranks

            if base is None:
                compile_parts_ahead(tensor_parallel_size, *model_and_dtype, EngineConfig(), (), (), lengths)
            progress = _Progress()
            arguments = folder, base, dtype, heads, sequences, temperature or 1.0, progress
            scored = on_ranks(_score_all, tensor_parallel_size, *arguments)
        elif num_gpus > 1:
            from rlnumba.sampling import replicas

            progress = _Progress()
            arguments = _score_all, folder, base, dtype, heads, sequences, temperature or 1.0, None
            scored = replicas.launch_replicas(replicas.score, num_gpus, "--num-gpus", *arguments)
        else:
            transformer = load_model(folder, dtype, heads, base=base)
            progress = _Progress()
            scored = _score_all(transformer, sequences, temperature or 1.0, progress)
        for (row, _), ids, values in zip(rows, sequences, scored, strict=True):
            found = {"score": float(values)} if classifies else {"logprobs": [None, *values[1:].tolist()]}
            file.write(to_line(row | {"token_ids": ids} | found))
    tokens = sum(map(len, sequences))
    progress.end(f"{tokens} tokens in {time.monotonic() - progress.started:.1f} s -> {output}")


def _prepare_compiling(tensor_parallel_size):
    """Import the compiler meanwhile, with the list of an engine's kernels or of those of a model in parts."""
    ahead_of_time.prepare(f"rlnumba.{'engine' if tensor_parallel_size == 1 else 'parallel'}.kernel_list")


def _check_one_kind(tensor_parallel_size, num_gpus):
    """Raise ConfigError for processes that have a part of the model and such that have all of it at once."""
    if tensor_parallel_size != 1 and num_gpus > 1:
        raise ConfigError(
            f"--tp ({tensor_parallel_size or 'auto'}) cuts one model, --num-gpus ({num_gpus}) makes copies of it: set "
            "one of them"
        )


def _choose_ranks(count, config, dtype, share):
    """The number of ranks that compute a model: `count`, or for 0 as few as it fits in: int.

    share: of a GPU's memory, for weights and what is computed. Raises ConfigError if the model cannot be cut so.
    """
    from rlnumba.engine.parallel_size import choose_size, warn_if_slow
    from rlnumba.kernels.gemm import ops as gemm

    if count == 1:
        return 1
    if gemm.backend() == "cublas":
        if not count:
            return 1
        raise ConfigError(
            f"tensor_parallel_size {count} needs --gemm native: a product by cublas depends on its columns"
        )
    on_gpu = device.name() == "cuda"
    dtype = dtype or (config.dtype if on_gpu else "float32")
    count = choose_size(count, config, dtype, share * device.memory_info()[1], on_gpu)
    warn_if_slow(count, config, dtype)
    return count


def _score_all(model, sequences, temperature, progress):
    """The log-probs of each sequence, (S,) float32 each, or of a model with a score head its score.

    progress: None on ranks other than 0, and where each has a part of the sequences.
    """
    import numpy as np

    from rlnumba.model import transformer

    if model.lm_head is None:
        from rlnumba.model.sequence_score import score_sequences

        return score_sequences(model, sequences)
    results, max_tokens = [], 32768
    for part in transformer.whole_sequences(list(map(len, sequences)), max_tokens):
        batch = transformer.pack(sequences[part])
        logprobs = device.to_host(transformer.score(model, batch, temperature).logprobs)
        transformer.check_finite(logprobs)
        results += np.split(logprobs, np.cumsum(batch.lengths)[:-1])
        if progress is not None:
            progress(f"{part.stop}/{len(sequences)} sequences")
    return results


def _trainer(kind, purpose, files):
    """Adds the command of a trainer, which writes `files`: a TOML file, and any of its keys as an option."""
    doc = f"""{purpose}

    Every key of the file is also an option, and a file is not needed: --model DIR --data.train FILE
    --train.learning_rate 1e-5. docs/configuration.md lists them.
    Writes output_dir: {files}, config.toml, checkpoints/, final/, curves.png.
    """
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}

    @cli.command(kind, help=doc, context_settings=settings, options_metavar="[--config RUN.toml] [OPTIONS]")
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
    @click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
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
        _log_device()
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
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
def evaluate(config, trainer, model, output, dtype, overrides):
    """Evaluate a model on a run's data.eval: of prompts the rewards, avg@k and pass@k, with the sampling of [eval]; of
    a file of rows the loss and the trainer's other metrics.

    Prints a line for each metric.
    """
    runs = runs_of_any_trainer(config, trainer, parse_overrides(overrides))
    if output is not None:
        from rlnumba.reporting.files import check_output

        check_output(output, {})
        inputs = {f"--config {path}": path for path in config} | {"data.eval": runs[0].data.eval}
        for name in ("metrics.json", "completions.jsonl"):
            check_output(Path(output) / name, inputs)
    _log_device()
    from rlnumba.runs.eval import describe_model, run_eval
    from rlnumba.runs.row_loop import RowError

    progress = _Progress()

    def evaluated(run):
        return run, run_eval(run, model, output, dtype, progress)

    (run, found), others = first_readable(runs, evaluated, RowError)
    name = describe_model(run, model)
    progress.end(f"evaluated {name} as {run.trainer} does in {time.monotonic() - progress.started:.1f} s{others}")
    for name, value in found.items():
        click.echo(f"{name:<40} {value:.6g}")
    if not any(value for name, value in found.items() if "avg@" in name or "pass@" in name) and run.generates:
        click.echo(f"no value reached eval.pass_threshold {run.eval.pass_threshold:g}", err=True)


def parse_overrides(arguments):
    """["--a.b", "1", "--c=2", "--flag"] -> [("a.b", "1"), ("c", "2"), ("flag", None)]: list of pairs.

    Raises ConfigError for an argument that belongs to no option.
    """
    pairs, pending = [], None  # pending: an option whose value may be the next argument
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            if pending is not None:
                pairs.append((pending, None))
            name, has_value, value = argument[2:].partition("=")
            pending = None if has_value else name
            if has_value:
                pairs.append((name, value))
        elif pending is not None:
            pairs.append((pending, argument))
            pending = None
        else:
            raise ConfigError(f"unexpected argument {argument!r}; options are written --section.key value")
    return pairs if pending is None else [*pairs, (pending, None)]


@cli.command()
@MODEL
@BASE
@DTYPE
@click.option("--temperature", type=ABOVE_0, default=1.0, help="Divides the logits.")
@click.option("--max-tokens", type=POSITIVE, default=48, help="Most tokens of a completion.")
@SEED
@TENSOR_PARALLEL
def check(model, base, dtype, temperature, max_tokens, seed, tensor_parallel_size):
    """Compare rollout log-probs with training log-probs of a model, and name the first operator that differs.

    The exit code is 1 if they differ where they must be equal bit for bit: everywhere except with --gemm cublas.
    """
    _prepare_compiling(tensor_parallel_size)
    _log_device()
    from rlnumba.kernels.gemm import ops as gemm

    if tensor_parallel_size != 1:
        from rlnumba.config import EngineConfig

        folder, base, config, _ = _open(model, base)
        share = EngineConfig().gpu_memory_utilization
        tensor_parallel_size = _choose_ranks(tensor_parallel_size, config, dtype, share)
    if tensor_parallel_size > 1:
        from rlnumba.parallel import tensor_parallel

        element, progress = device.dtype(dtype or ("float32" if device.name() == "cpu" else config.dtype)), _Progress()
        options = dtype, max_tokens, temperature, seed, progress.generated
        found = tensor_parallel.check_agreement(tensor_parallel_size, folder, base, *options)
    else:
        from rlnumba.engine.check import check_agreement
        from rlnumba.model.transformer import load_model

        transformer = load_model(model, dtype, base=base)
        element, progress = transformer.dtype, _Progress()
        found = check_agreement(transformer, None, max_tokens, temperature, seed, progress.generated)
    progress.end(f"checked in {time.monotonic() - progress.started:.1f} s")
    click.echo(f"tokens compared            {found.tokens}")
    click.echo(f"equal bit for bit          {found.equal} ({100 * found.equal / found.tokens:.2f} %)")
    click.echo(f"largest difference         {found.largest:.3g} nats")
    click.echo(f"first differing operator   {found.operator or 'none'}")
    click.echo(f"GEMM backend               {gemm.describe(element)}")
    if found.operator and gemm.backend() != "cublas":
        raise UserError(f"rollout and training differ by up to {found.largest:.3g} nats, first in {found.operator}")


@cli.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[--config RUN.toml] [OPTIONS]",
)
@CONFIG
@TRAINER
@click.option("--gpu-memory", type=ABOVE_0, metavar="GIB", help="Plan for a GPU of this size. Default: this machine's.")
@click.option("--fit", is_flag=True, help="Print the keys with which the run fits the GPU, the fastest first.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
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


@cli.command(
    "compile",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[--config RUN.toml] [OPTIONS]",
)
@CONFIG
@TRAINER
@click.option("--gpu", type=click.Choice([*device.GPUS]), help="Compile for this GPU. Default: this machine's.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
def compile_kernels(config, trainer, gpu, overrides):
    """Compile the kernels that a run will launch, on all cores, into the cache of machine code.

    A run does this itself, once a kernel is missing. --gpu needs no GPU, as when an image is built, but the extra
    cuda12 or cuda13 of this package, which has the compiler. Of the model config.json and the tokenizer are read, and
    of the data the rows; no weights. RLNUMBA_CACHE_DIR names the cache's folder (default ~/.cache/rlnumba).
    """
    from rlnumba.runtime.compile.machine_code import check_compiler

    check_compiler()
    runs = runs_of_any_trainer(config, trainer, parse_overrides(overrides))
    properties = device.properties() if gpu is None else device.GPUS[gpu]
    if properties.capability is None:
        raise UserError("compile: this machine has no GPU; name the one to compile for by --gpu")
    progress = _Progress()
    from rlnumba.runs.planning.kernel_list import list_signatures
    from rlnumba.runs.run_folder import KERNEL_LIST, kernel_request
    from rlnumba.runtime.compile import pool

    def listed(run):
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
    seconds = time.monotonic() - progress.started
    found = len({signature for stage in stages for signature in stage}) - len(missing)
    compiled = f"{run.trainer}: {len(missing)} kernels compiled in {seconds:.1f} s, {found} were in the cache"
    progress.end(compiled + others)


def first_readable(runs, work, unreadable=UserError):
    """(work(run), a note that names the other trainers) of the first of `runs` that can be read.

    runs: of runs_of_any_trainer. The rows of the first may be those of another trainer that reads the file: an
    `unreadable` error of its work is raised only if the others fail, too.
    """
    problems = []
    for index, run in enumerate(runs):
        try:
            found = work(run)
        except unreadable as error:
            problems.append(error)
            continue
        others = [each.trainer for each in runs[index + 1 :]]
        also = " or ".join(f"--trainer {name}" for name in others)
        return found, f"; read as a file of {run.trainer}, which {also} changes" if others else ""
    raise problems[0]


def runs_of_any_trainer(config, trainer, overrides):
    """[Run] of the trainer named, or of all that read the files.

    Raises the ConfigError of the one that knows most of their keys if none does.
    """
    from rlnumba.config import likeliest_trainer, load_run

    if trainer is not None and trainer not in RUNS:
        raise ConfigError(f"--trainer: must be one of {', '.join(RUNS)}, got {trainer!r}")
    found, problems = [], {}
    for kind in RUNS if trainer is None else (trainer,):
        try:
            found.append(load_run(kind, config, overrides))
        except ConfigError as error:
            problems[kind] = error
    if not found:
        raise problems[trainer or likeliest_trainer(config, overrides)]
    return found


@cli.command()
@click.option("--model", required=True, help="Hugging Face folder or hub id of the base.")
@click.option("--adapter", required=True, help="PEFT adapter folder or hub id.")
@click.option("--output", required=True, help="Folder of the merged model, written.")
@click.option("--dtype", type=click.Choice([*device.DTYPES]), help="Of the merged model; default: the base's.")
def merge(model, adapter, output, dtype):
    """Add an adapter to the weights of its base, in float32, and write the result as a model of its own."""
    from rlnumba.reporting.files import check_output, make_folder

    check_output(output, {})
    _log_device()
    from rlnumba.model.lora import is_adapter
    from rlnumba.model.lora import merge as merge_weights
    from rlnumba.model.transformer import find_model, load_model, save_model

    folder, adapter_folder = find_model(model), find_model(adapter)
    if is_adapter(folder):
        raise UserError(f"--model: {folder} is an adapter folder; it must be the base's")
    if not is_adapter(adapter_folder):
        raise UserError(f"--adapter: {adapter_folder} has no adapter_config.json, or is a model")
    if Path(output).resolve() in (folder.resolve(), adapter_folder.resolve()):
        raise UserError(f"--output: {output} is the folder of the {'adapter' if is_adapter(output) else 'base'}")
    make_folder(output)
    _, _, config, tokenizer = _open(adapter, model)
    transformer = load_model(adapter_folder, "float32", config.heads, base=folder)
    merge_weights(transformer.weights, transformer.adapter)
    save_model(transformer.without_adapter(), output, tokenizer, dtype or config.dtype)
    click.echo(f"{adapter_folder} merged into {folder} -> {output}", err=True)


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


def _select_device(context, option, name):
    """--device after the command: nothing has been computed yet."""
    if name is not None:
        device.select(name)


for _command in cli.commands.values():
    _command.params += [
        click.Option(["--device"], type=DEVICE, expose_value=False, hidden=True, callback=_select_device),
        click.Option(["--debug"], is_flag=True, expose_value=False, hidden=True),  # read by _fail
    ]
