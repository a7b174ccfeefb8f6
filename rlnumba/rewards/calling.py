"""Reward functions applied to a batch of completions, each under a timeout.

A reward function has TRL's signature. It gets the whole batch by keyword and returns a value for each completion, or
None where it has none:

    def brevity(completions, completion_ids, **columns) -> list[float | None]

Keywords: `prompts`, `completions`, `completion_ids`, every other column of the dataset, `trainer_state`,
`log_extra(column, values)` and `log_metric(name, value)`; a function may leave out those it does not need.
Completions are strings, or [{"role": "assistant", "content": text}] where the prompt is a message list. `async def`
functions are awaited together, in one event loop for the whole run, so that their connections stay open.
"""

import asyncio
import contextlib
import copy
import inspect
import math
import numbers
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlnumba.errors import UserError


class RewardError(UserError):
    """A reward function that raised, timed out or returned something else than a number or None per completion."""


@dataclass
class Scores:
    """values: (B, K) float64 of K functions for B completions, NaN where a function returned None. errors: completions
    without a value because the function failed, by function name. extra: further columns for the completions table.
    metrics: averages to log."""

    values: np.ndarray
    errors: dict[str, int] = field(default_factory=dict)
    extra: dict[str, list] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class ModelReward:
    """A model as a reward, called in the process that has the device and without a timeout.

    name: for metrics. score(prompts, completions, columns): the values of B completions, a list of float; a failure
    that a user can cause is a UserError.
    """

    def __init__(self, name, score):
        self.__name__, self.score = name, score


class Rewards:
    """The reward functions of a run.

    functions: callables with TRL's signature, or ModelRewards. weights: one float each, or None for 1.0. timeout_s:
    seconds that one call may take. errors: "raise" or "skip", see RewardsConfig.reward_errors. names: for metrics, or
    None for the functions' own.
    """

    def __init__(self, functions, weights=None, timeout_s=30.0, errors="raise", names=None):
        self.functions = list(functions)
        self.names = names or [function.__name__ for function in self.functions]
        self.weights = np.array(weights if weights is not None else [1.0] * len(self.functions), np.float64)
        self.timeout_s, self.errors, self._runner = timeout_s, errors, asyncio.Runner()

    def score(self, prompts, texts, completion_ids, columns, trainer_state=None):
        """Calls every function on a batch of B completions and returns Scores.

        prompts: B strings or message lists. texts: B strings. completion_ids: B lists of int. columns: {name: B
        values}. Raises RewardError naming the function, unless errors are skipped.
        """
        scores, metrics = Scores(np.full((len(texts), len(self.functions)), np.nan)), {}

        def log_extra(column, values):
            values = list(values)
            if len(values) != len(texts):
                raise UserError(f"log_extra({column!r}) needs {len(texts)} values, one a completion, got {len(values)}")
            scores.extra[column] = values

        keywords = {
            **columns,
            # A copy: the dataset's prompts are used again, and a function may modify its arguments.
            "prompts": [copy.deepcopy(prompt) for prompt in prompts],
            "completions": [
                [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
            "log_extra": log_extra,
            "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
        }
        results = self._call_all(keywords)
        for k, (name, result) in enumerate(zip(self.names, results, strict=True)):
            try:
                if isinstance(result, BaseException):
                    raise _as_reward_error(name, result, self.timeout_s) from result
                scores.values[:, k] = _as_values(name, result, len(texts))
            except RewardError:
                if self.errors == "raise":
                    raise
                scores.errors[name] = len(texts)
        scores.metrics = {name: float(np.mean(values)) for name, values in metrics.items()}
        return scores

    def _call_all(self, keywords):
        """The functions' results in order, an exception in place of a result where one was raised."""
        results = {}
        coroutines = [function for function in self.functions if _is_async(function)]
        for k, function in enumerate(self.functions):
            if isinstance(function, ModelReward):
                try:
                    results[k] = function.score(keywords["prompts"], keywords["completions"], keywords)
                except UserError as error:
                    results[k] = error
            elif function not in coroutines:
                results[k] = _call_with_timeout(lambda f=function: f(**_accepted_keywords(f, keywords)), self.timeout_s)
        awaited = iter(self._await_all(coroutines, keywords) if coroutines else ())
        return [results[k] if k in results else next(awaited) for k in range(len(self.functions))]

    def _await_all(self, functions, keywords):
        """The results of coroutine functions that are awaited together, or exceptions: list."""

        async def gather():
            calls = [asyncio.wait_for(f(**_accepted_keywords(f, keywords)), self.timeout_s) for f in functions]
            return await asyncio.gather(*calls, return_exceptions=True)

        def run():
            try:
                return self._runner.run(gather())
            except BaseException:
                self._runner.close()
                raise

        # The timeouts in the loop expire first; the outer one is for a coroutine that blocks the loop.
        results = _call_with_timeout(run, self.timeout_s + 1, in_thread=_in_event_loop())
        if isinstance(results, BaseException):
            self._runner = asyncio.Runner()
            return [results] * len(functions)
        return results


def _is_async(function):
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepted_keywords(function, keywords):
    """Those of the keywords that the function accepts, in lists of its own: dict."""
    keywords = {name: list(value) if isinstance(value, list) else value for name, value in keywords.items()}
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return keywords
    return {p.name: keywords[p.name] for p in parameters if p.name in keywords}


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


def _call_with_timeout(call, seconds, in_thread=False):
    """The result of call(), or the exception it raised; a TimeoutError after `seconds`. in_thread: in a new thread."""
    results = []

    def work():
        try:
            results.append(call())
        except (Exception, SystemExit) as error:  # a user's code: any error is reported under the function's name
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
        return RewardError(f"reward {name} did not return within {timeout_s:g} s (rewards.timeout)")
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
    for i, value in enumerate(result):
        if value is not None and (not isinstance(value, numbers.Real | np.bool_) or math.isinf(value)):
            raise RewardError(f"reward {name} must return finite numbers or None, got {value!r} for completion {i}")
    return np.array([np.nan if value is None else float(value) for value in result])
