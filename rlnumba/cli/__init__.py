"""The command line: `rlnumba [--device auto|cuda|sim|cpu] [--gemm auto|native|cublas] [--debug] COMMAND ...`.

Exit codes: 0 success; 1 a failure; 2 a wrong option, key or value; 128 + n for signal n, as in a shell (130 Ctrl-C,
143 SIGTERM); a trainer first writes a checkpoint of its last complete step, and a second signal ends it at once. A
failure is one line on stderr, `rlnumba: ...`, without a traceback unless --debug is given. Results go to the files
named, progress to stderr. All input of a command is validated before the model's weights are read. Slow imports are
inside the commands, so that --help and a wrong option are answered at once.

command_line.py  the options before a command, errors and exit codes
generate.py      generate
score.py         score
serve.py         serve
train.py         a command for each trainer, and eval
planning.py      plan and compile
tools.py         check, merge, plot, env
watch.py         watch
"""

from rlnumba.cli import generate, planning, score, serve, tools, train, watch  # noqa: F401, their commands
from rlnumba.cli.command_line import cli, main, run, take_common_options_after_commands
from rlnumba.cli.run_files import parse_overrides, runs_of_any_trainer

take_common_options_after_commands()
