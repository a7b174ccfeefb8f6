"""Reward functions applied to groups of completions, in worker processes while generation goes on.

A reward function has TRL's signature. It gets a group of completions by keyword and returns a value for each of them,
or None where it has none:

    def brevity(completions, completion_ids, **columns) -> list[float | None]

Keywords: `prompts`, `completions`, `completion_ids`, every other column of the dataset, `trainer_state`,
`log_extra(column, values)` and `log_metric(name, value)`; a function may leave out those it does not need.
Completions are strings, or [{"role": "assistant", "content": text}] where the prompt is a message list. `async def`
functions are awaited together, in one event loop for the whole run, so that their connections stay open.

    rewards.submit(group)      calls begin in worker processes (workers.py), for functions that these can import
    rewards.collect(pending)   the other functions are called here; then the Scores, in the order of the groups
"""

import asyncio
import contextlib
import inspect
import math
import numbers
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from rlnumba.data.files import LARGEST
from rlnumba.data.values import own_copy
from rlnumba.errors import UserError, shown
from rlnumba.rewards.workers import Answer, Workers


class RewardError(UserError):
    """A reward function that raised, timed out or returned something else than a number or None per completion."""


class TrainingProgress(NamedTuple):
    """The run's state that reward functions get as `trainer_state`; the names are transformers'."""

    global_step: int
    max_steps: int
    epoch: float


@dataclass
class Scores:
    """values: (B, K) float64 of K functions for B completions, NaN where a function returned None. errors: completions
    without a value because the function failed, by function name. extra: further columns for the completions table.
    metrics: averages to log."""

    values: np.ndarray
    errors: dict[str, int] = field(default_factory=dict)
    extra: dict[str, list] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Pending:
    """A group that was submitted: its keywords, its size, and the workers' calls under way by function index.

    here: keywords that only functions of this process get. answers: the Answer of each function, None until `collect`
    had them; answered: called then. where: file and line of the prompt, or "". known: Answers that another process has
    given, by function index.
    """

    keywords: dict
    size: int
    calls: dict
    answers: list | None = None
    where: str = ""
    here: dict = field(default_factory=dict)
    answered: Callable = lambda: None
    known: dict = field(default_factory=dict)


class EpisodeParts(NamedTuple):
    """The completions of a group that are episodes. completions: messages of each; environments: the objects, or None
    each; rewards: (name of the class, value of get_reward, its error or None) of each; answers: {function index:
    Answer} of the functions that the process with the environments has called."""

    completions: list
    environments: list
    rewards: list
    answers: dict = MappingProxyType({})


class EnvironmentReward:
    """The values of get_reward of one class of environments as a reward; None for episodes in others."""

    def __init__(self, class_name):
        self.__name__ = class_name

    def __call__(self, environment_rewards):
        """environment_rewards: EpisodeParts.rewards. Raises UserError where get_reward has failed."""
        own = [(value, error) if name == self.__name__ else (None, None) for name, value, error in environment_rewards]
        for _, error in own:
            if error is not None:
                raise UserError(error)
        return [value for value, _ in own]


class ModelReward:
    """A model as a reward, called in the process that has the device and without a timeout.

    name: for metrics. score(prompts, completions, columns): the values of B completions, a list of float; a failure
    that a user can cause is a UserError. folder: the model's.
    """

    def __init__(self, name, score, folder):
        self.__name__, self.score, self.folder = name, score, folder


class Rewards:
    """The reward functions of a run.

    functions: callables with TRL's signature, or ModelRewards. weights: one float each, or None for 1.0. timeout_s:
    seconds that a call may take for each of its completions. errors: "raise" or "skip", as in RewardsConfig. names:
    for metrics, or None for the functions' own. specs: by which name a worker process finds each function, None
    for one that only this process has; by default, module:function where that is so.
    """

    def __init__(self, functions, weights=None, timeout_s=30.0, errors="raise", names=None, specs=None):
        self.functions = list(functions)
        self.names = names or [function.__name__ for function in self.functions]
        self.weights = np.array(weights if weights is not None else [1.0] * len(self.functions), np.float64)
        self.timeout_s, self.errors, self._runner = timeout_s, errors, asyncio.Runner()
        self.specs = specs or [importable_name(function) for function in self.functions]
        self._workers = Workers(self.specs, self.names)
        weakref.finalize(self, self._workers.close)

    def start(self):
        """Begin to start what `submit` needs: a worker process, if there are ordinary functions for one."""
        if any(spec and not is_async(function) for spec, function in zip(self.specs, self.functions, strict=True)):
            self._workers.start()

    def score(self, prompts, texts, completion_ids, columns, trainer_state=None):
        """submit and collect of one group of B completions: Scores."""
        return self.collect([self.submit(prompts, texts, completion_ids, columns, trainer_state)])

    @property
    def read_environments(self):
        """Whether a function takes `environments`: bool."""
        return any(takes_environments(function) for function in self.functions)

    def submit(self, prompts, texts, completion_ids, columns, trainer_state=None, where="", episodes=None):
        """Begin to call the functions on a group of B completions: Pending, which `collect` takes.

        prompts: B strings or message lists. texts: B strings. completion_ids: B lists of int, or arrays. columns:
        {name: B values}. where: file and line of the prompt, for messages. episodes: EpisodeParts, where completions
        are episodes.
        """
        keywords = {
            **columns,
            "prompts": list(prompts),
            "completions": [
                [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
        }
        pending = Pending(keywords, len(texts), {}, where=where)
        if episodes is not None:
            keywords["completions"] = episodes.completions
            pending.here = {"environments": episodes.environments, "environment_rewards": episodes.rewards}
            pending.known = dict(episodes.answers)
        for k, spec in enumerate(self.specs):
            if spec is not None:
                pending.calls[k] = self._begin(k, keywords, len(texts))
        return pending

    def _begin(self, k, keywords, size):
        return self._workers.call(k, is_async(self.functions[k]), keywords, size, self.timeout_s)

    def collect(self, pending):
        """The Scores of a list of Pending, their completions in its order; a group may be asked for again.

        With errors "skip", a group for which a function raised, hung or crashed is called again one completion at a
        time, so that only those fail that cause it; a judge that compares them is called again with all. Raises
        RewardError naming the function, unless errors are skipped.
        """
        pending = list(pending)
        return self._scores(pending, self.answers(pending))

    def answers(self, pending):
        """The Answers of all functions for each of a list of Pending: list of lists."""
        if new := [group for group in pending if group.answers is None]:
            self._answer(new)
        return [group.answers for group in pending]

    @property
    def all_in_workers(self):
        """Whether workers call all functions, so that `ready` says when `collect` would not wait."""
        return None not in self.specs

    def ready(self, pending):
        """Whether the workers have all values, or know that there are none, for each of a list of Pending: list."""
        return [group.answers is not None or all(call.done() for call in group.calls.values()) for group in pending]

    def _answer(self, pending):
        """Give each of a list of Pending the Answers of all functions."""
        answers = [[None] * len(self.functions) for _ in pending]
        self._call_here(pending, answers)
        # At once, so that this thread wakes up once and not for each of them.
        futures.wait([call for group in pending for call in group.calls.values()])
        for group, found in zip(pending, answers, strict=True):
            for k, call in group.calls.items():
                found[k] = call.result()
            for k, answer in group.known.items():
                found[k] = answer
        if self.errors == "skip":
            again = [(g, k) for g, found in enumerate(answers) for k, each in enumerate(found) if each.failed_call]
            # Groups of one that failed for themselves fail again; async functions and models were called with others.
            shared = [is_async(function) or isinstance(function, ModelReward) for function in self.functions]
            alone = [(g, k) for g, k in again if pending[g].size > 1 or shared[k]]
            submitted = [(g, k, self._submit_again(pending[g], k)) for g, k in alone]
            for g, k, parts in submitted:
                found = [self._collect_one(k, part) for part in parts]
                answers[g][k] = found[0] if _compares(self.functions[k]) else _joined(found)
        for group, found in zip(pending, answers, strict=True):
            group.answers = found
            group.answered()

    def _submit_again(self, group, k):
        """A Pending of each completion, or one of all where they are compared with each other."""
        if _compares(self.functions[k]):
            parts = [Pending(group.keywords, group.size, {}, here=group.here)]
        else:
            parts = [
                Pending(_part(group.keywords, i, group.size), 1, {}, here=_part(group.here, i, group.size))
                for i in range(group.size)
            ]
        for part in parts:
            if self.specs[k] is not None:
                part.calls[k] = self._begin(k, part.keywords, part.size)
        return parts

    def _collect_one(self, k, part):
        if k in part.calls:
            answer = part.calls[k].result()
            if answer.process_ended and is_async(self.functions[k]):
                # Another one may have ended the process that they share.
                answer = self._begin(k, part.keywords, part.size).result()
            return answer
        found = [[None] * len(self.functions)]
        self._call_here([part], found, [k])
        return found[0][k]

    def _scores(self, pending, answers):
        sizes = [group.size for group in pending]
        scores = Scores(np.full((sum(sizes), len(self.functions)), np.nan))
        metrics, begin = {}, 0
        for size, group, found in zip(sizes, pending, answers, strict=True):
            for k, (name, answer) in enumerate(zip(self.names, found, strict=True)):
                if answer.error is not None and self.errors == "raise":
                    raise RewardError(f"{group.where}: {answer.error}" if group.where else answer.error)
                if answer.values is None:
                    scores.errors[name] = scores.errors.get(name, 0) + size
                    continue
                failed = np.isposinf(answer.values)
                if failed.any():
                    scores.errors[name] = scores.errors.get(name, 0) + int(failed.sum())
                scores.values[begin : begin + size, k] = np.where(failed, np.nan, answer.values)
                for column, values in answer.extra.items():
                    scores.extra.setdefault(column, [None] * sum(sizes))[begin : begin + size] = values
                for metric, values in answer.metrics.items():
                    metrics.setdefault(metric, []).extend(values)
            begin += size
        scores.metrics = {name: float(np.mean(values)) for name, values in metrics.items()}
        return scores

    def _call_here(self, pending, answers, of=None):
        """Call the functions that no worker can import, in this process; `of`: these function indices alone."""
        here = [k for k, spec in enumerate(self.specs) if spec is None and (of is None or k in of)]
        models = [k for k in here if isinstance(self.functions[k], ModelReward)]
        for k in models:
            for g, answer in enumerate(self._call_model(k, pending)):
                answers[g][k] = answer
        awaited = []
        for g, group in enumerate(pending):
            for k in set(here) - set(models) - set(group.known):
                call = Call(self.functions[k], self.names[k], group.keywords | group.here, group.size)
                if is_async(self.functions[k]):
                    awaited.append((g, k, call))
                else:
                    result = call_with_timeout(call, self.timeout_s * group.size)
                    answers[g][k] = call.answer(result, self.timeout_s)
        results = self._await_all([call for _, _, call in awaited]) if awaited else ()
        for (g, k, call), result in zip(awaited, results, strict=True):
            answers[g][k] = call.answer(result, self.timeout_s)

    def _call_model(self, k, pending):
        """The Answers of a ModelReward for all groups, which it scores together."""
        names = dict.fromkeys(name for group in pending for name in group.keywords if name != "trainer_state")
        keywords = {name: [] for name in names}
        for group in pending:
            for name in names:
                keywords[name] += group.keywords.get(name, [None] * group.size)
        try:
            values = self.functions[k].score(keywords["prompts"], keywords["completions"], keywords)
        except UserError as error:
            return [Answer(None, f"reward {self.names[k]}: {error}", failed_call=True) for _ in pending]
        ends = np.cumsum([group.size for group in pending])
        parts = np.split(np.asarray(values, np.float64), ends[:-1])
        return [self._model_answer(k, part) for part in parts]

    def _model_answer(self, k, values):
        # NaN is not None, as a function's is: a model has a value for every text.
        if (wrong := np.flatnonzero(~(np.abs(values) <= LARGEST))).size:
            wanted = f"numbers from {-LARGEST:g} to {LARGEST:g}"
            error = f"reward {self.names[k]} must return {wanted}, got {values[wrong[0]]:g} for completion {wrong[0]}"
            return Answer(None, error, failed_call=True)
        return Answer(values)

    def _await_all(self, calls):
        """The results of calls of coroutine functions that are awaited together, or exceptions: list."""

        async def gather():
            waiting = [asyncio.wait_for(call.awaited(), self.timeout_s * call.size) for call in calls]
            return await asyncio.gather(*waiting, return_exceptions=True)

        def run():
            try:
                return self._runner.run(gather())
            except BaseException:
                self._runner.close()
                raise

        # The timeouts in the loop expire first; the outer one is for a coroutine that blocks the loop.
        limit = self.timeout_s * max(call.size for call in calls) + 1
        results = call_with_timeout(run, limit, in_thread=_in_event_loop())
        if isinstance(results, BaseException):
            self._runner = asyncio.Runner()
            return [results] * len(calls)
        return results


class Call:
    """A function and the keywords of one group of `size` completions; called, it returns the function's result."""

    def __init__(self, function, name, keywords, size):
        self.function, self.name, self.size = function, name, size
        self.extra, self.metrics = {}, {}
        # A copy for each: rows are used again, one by several completions, completions by the next function and the
        # log, and a function may modify its arguments.
        self.keywords = {name: own_copy(value) for name, value in keywords.items() if name != "completion_ids"}
        self.keywords |= {"log_extra": self._log_extra, "log_metric": self._log_metric}
        ids = keywords.get("completion_ids", ())
        self.keywords["completion_ids"] = [
            each.tolist() if isinstance(each, np.ndarray) else list(each) for each in ids
        ]

    def _log_extra(self, column, values):
        values = list(values)
        if len(values) != self.size:
            raise UserError(f"log_extra({column!r}) needs {self.size} values, one a completion, got {len(values)}")
        self.extra[column] = values

    def _log_metric(self, name, value):
        self.metrics.setdefault(name, []).append(float(value))

    def __call__(self):
        return self.function(**_accepted_keywords(self.function, self.keywords))

    async def awaited(self):
        """The result of a coroutine function, or the SystemExit that it raised, which would end the event loop."""
        try:
            return await self()
        except SystemExit as error:
            return error

    def answer(self, result, timeout_s):
        """The Answer of what the call returned, or of the exception that it raised."""
        try:
            if isinstance(result, BaseException):
                raise _as_reward_error(self.name, result, timeout_s) from result
            return Answer(_as_values(self.name, result, self.size), None, False, self.extra, self.metrics)
        except RewardError as error:
            return Answer(None, str(error), isinstance(result, BaseException))
        except Exception as error:  # of a user's object that takes the place of a number or a list
            return Answer(None, str(_as_reward_error(self.name, error, timeout_s)))


def importable_name(function):
    """module:function by which another process imports a function of a module: str, or None if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    # Importing the main module again would run it again.
    if module in (None, "__main__") or getattr(sys.modules.get(module), name, None) is not function:
        return None
    return f"{module}:{name}"


def _part(keywords, index, size):
    """The keywords of one completion of a group; lists of the group's size have an entry for each."""
    names = {name for name, value in keywords.items() if isinstance(value, list) and len(value) == size}
    return {name: [value[index]] if name in names else value for name, value in keywords.items()}


def _joined(answers):
    """The Answer of a group from those of its completions; infinity stands for one that failed."""
    answers = list(answers)
    values = np.concatenate([[np.inf] if each.values is None else each.values for each in answers])
    extra, metrics = {}, {}
    for i, each in enumerate(answers):
        for column, logged in each.extra.items():
            extra.setdefault(column, [None] * len(answers))[i] = logged[0]
        for name, logged in each.metrics.items():
            metrics.setdefault(name, []).extend(logged)
    return Answer(values, None, False, extra, metrics)


def takes_environments(function):
    """Whether a reward function has a parameter `environments`, objects of the process that draws: bool."""
    return not isinstance(function, ModelReward) and "environments" in inspect.signature(function).parameters


def _compares(function):
    """Whether a value depends on the other completions of the group, as a judge's may: bool."""
    return getattr(function, "compares_group", False)


def is_async(function):
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepted_keywords(function, keywords):
    """The keywords that the function accepts, in lists of its own: dict."""
    keywords = {name: list(value) if isinstance(value, list) else value for name, value in keywords.items()}
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return keywords
    return {p.name: keywords[p.name] for p in parameters if p.name in keywords}


# What a user's code may raise. A CancelledError is one of a task of its own: no task is around a call in a thread.
USERS_ERRORS = (Exception, SystemExit, asyncio.CancelledError)


class TimeUp(BaseException):
    """A reward's timeout; not an Exception, so that a reward's own `except Exception` does not catch it."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TimeUp in the block after `seconds`; limits nest. Main thread only: it uses SIGALRM.

    A signal also interrupts what a watchdog thread could not: a regular expression that backtracks without end holds
    the interpreter lock, but checks for signals.
    """
    running = True

    def on_alarm(signal_number, frame):
        if running:
            raise TimeUp

    started = time.monotonic()
    outer_handler = signal.signal(signal.SIGALRM, on_alarm)
    # The timer fires again every second, for a block that swallowed the first exception.
    outer_left, outer_interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            running = False
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer_handler or signal.SIG_DFL)
        if outer_left:
            left = outer_left - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001), outer_interval)


def in_main_thread():
    return threading.current_thread() is threading.main_thread()


def _in_event_loop():
    """Whether this thread runs an event loop, as in a notebook; it cannot run another one inside."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_until_stopped(loop):
    """Run an event loop up to its `stop`, also beyond a SystemExit of a task, which asyncio raises here as well."""
    while True:
        try:
            loop.run_forever()
            return
        except (SystemExit, KeyboardInterrupt, TimeUp):
            pass


def call_with_timeout(call, seconds, in_thread=False):
    """The result of call(), or the exception it raised; a TimeoutError after `seconds`. in_thread: in a new thread."""
    results = []

    def work():
        try:
            results.append(call())
        except USERS_ERRORS as error:  # any error is reported under the function's name
            results.append(error)

    if in_main_thread() and not in_thread:
        with contextlib.suppress(TimeUp), time_limit(seconds):
            work()
    else:
        # A daemon thread does not keep the process alive if it never returns.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
    return results[0] if results else TimeoutError()


def _as_reward_error(name, error, timeout_s):
    """The RewardError for an exception that a function raised."""
    if isinstance(error, UserError):
        return RewardError(f"reward {name}: {error}")
    if isinstance(error, TimeUp) or (isinstance(error, TimeoutError) and not error.args):
        return RewardError(f"reward {name} did not return within {timeout_s:g} s a completion (rewards.timeout)")
    package = Path(__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != package]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return RewardError(f"reward {name} raised {type(error).__name__}: {text}{where}")


def _as_values(name, result, count):
    """A function's result as (count,) float64, NaN for None and NaN. Raises RewardError if it is anything else."""
    if isinstance(result, np.ndarray):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"reward {name} must return a list of {count} values, got {type(result).__name__}")
    if len(result) != count:
        raise RewardError(f"reward {name} must return {count} values, one a completion, got {len(result)}")
    return np.array([np.nan if value is None else _as_value(name, value, i) for i, value in enumerate(result)])


def _as_value(name, value, index):
    """A number that a function returned for completion `index` as float. Raises RewardError."""
    number, wanted = math.inf, "finite numbers"
    if isinstance(value, numbers.Real | np.bool_):
        try:
            number = float(value)
        except OverflowError:  # an integer or a fraction beyond float64
            number = LARGEST * 10
    if math.isnan(number) or abs(number) <= LARGEST:
        return number
    if math.isfinite(number):
        wanted = f"numbers from {-LARGEST:g} to {LARGEST:g}"
    raise RewardError(f"reward {name} must return {wanted} or None, got {shown(value)} for completion {index}")
