"""Rows from the tasksets of verifiers (https://github.com/PrimeIntellect-ai/verifiers), 0.4 or newer.

`data.train = "verifiers:NAME"` names a taskset as verifiers does, a module that exports one, and `[data.verifiers]` has
the keys of its environment: `taskset`, `agent` and so on; `select`, which tasks; `client`, how turns are rendered.
"""

import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

from rlnumba.config.data import VERIFIERS
from rlnumba.errors import ConfigError, UserError

# The column that says which task a row is.
TASK = "verifiers_task"
# Keys of [data.verifiers] that are not the environment's.
OWN_KEYS = ("select", "client")


class OpenTaskset(NamedTuple):
    """A taskset with its environment: env, of verifiers; tasks: those that the run uses; client: keys of its client."""

    env: object
    tasks: list
    client: dict

    @property
    def name(self):
        """The name of the taskset's class, which its reward has."""
        return type(self.env.taskset).__name__


def is_taskset(path):
    """Whether a path of data.train or data.eval names a taskset of verifiers."""
    return str(path).startswith(VERIFIERS)


def open_taskset(path, data, for_eval=False):
    """The OpenTaskset of a path "verifiers:NAME", the same one for each call. data: DataConfig.

    Raises UserError without the package or the taskset, ConfigError for keys that are not the environment's.
    """
    options, section = data.verifiers, "data.verifiers"
    if for_eval:
        options, section = options | data.eval_verifiers, "data.eval_verifiers"
    return _open(path, json.dumps(options, sort_keys=True), section)


@functools.lru_cache(maxsize=8)
def _open(path, options, section):
    try:
        from pydantic import ValidationError
        from verifiers.v1.configs.select import SelectConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise UserError(f"{path} needs verifiers 0.4 or newer; pip install 'rlnumba[verifiers]'") from error
    name, options = path.removeprefix(VERIFIERS), json.loads(options)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    own = {key: options.pop(key, {}) for key in OWN_KEYS}
    options["taskset"] = {"id": name} | options.get("taskset", {})
    try:
        for role in _roles(name, options.get("id", "")):
            # Their own default is a sandbox of a cloud.
            options[role] = {"runtime": {"type": "subprocess"}} | options.get(role, {})
        env = load_environment(resolve_env_config(options))
        taskset = env.taskset.select(SelectConfig(**own["select"]))
        if not taskset.bounded:
            raise ConfigError(f"{section}.select: {path} has tasks without end; set limit")
        tasks = list(taskset)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{section}: {'.'.join(map(str, first['loc'])) or name}: {_line(first['msg'])}") from error
    except ConfigError:
        raise
    except Exception as error:  # a user's code, and verifiers'
        raise UserError(f"{path}: {type(error).__name__}: {_line(error)}") from error
    if not tasks:
        raise UserError(f"{path}: no tasks ({section}.select)")
    return OpenTaskset(env, tasks, own["client"])


def _roles(name, env_id):
    """The names of the agents of an environment of verifiers: list."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    fields = env_config_type(name, env_id).model_fields
    return [role for role, field in fields.items() if isinstance(field.default, AgentConfig)]


def task_rows(path, data, for_eval=False):
    """The tasks of a taskset: list of (row, where), as read_rows; the errors are open_taskset's.

    A row has `prompt`, messages, if the task has one, and TASK, from which the task is found.
    """
    rows = []
    for index, task in enumerate(open_taskset(path, data, for_eval).tasks):
        row = {TASK: {"path": path, "index": index, "for_eval": for_eval, "key": task.key}}
        messages = _messages(task.data)
        rows.append((({"prompt": messages} if messages else {}) | row, f"{path}: task {index}"))
    return rows


def _messages(task):
    """The messages that a task begins with, for the log: harnesses may ask in other words."""
    system = [] if task.system_prompt is None else [{"role": "system", "content": task.system_prompt}]
    if isinstance(task.prompt, str):
        return [*system, {"role": "user", "content": task.prompt}]
    return [*system, *(message.model_dump(mode="json", exclude_none=True) for message in task.prompt or ())]


def _line(error):
    return " ".join(str(error).split())
