"""The command line itself: the options before a command, errors as one line on stderr, exit codes."""

import contextlib
import os
import signal
import sys
import traceback

import click

from rlnumba.cli.options import DEVICE
from rlnumba.errors import UserError
from rlnumba.reporting.stderr import os_problem
from rlnumba.runtime import device, signals

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
        return _fail(error, os_problem(error), 1, arguments)
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


def take_common_options_after_commands():
    """Let every command take --device and --debug, too."""
    for command in cli.commands.values():
        command.params += [
            click.Option(["--device"], type=DEVICE, expose_value=False, hidden=True, callback=_select_device),
            click.Option(["--debug"], is_flag=True, expose_value=False, hidden=True),  # read by _fail
        ]


def _select_device(context, option, name):
    """Choose the device of --device after the command: nothing has been computed yet."""
    if name is not None:
        device.select(name)


def given_options():
    """The names of the options that the command line has, not those with a default: set."""
    context = click.get_current_context()
    return {name for name in context.params if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT}
