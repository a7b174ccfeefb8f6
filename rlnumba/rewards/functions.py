"""Reward functions: plain Python with TRL's signature, called one by one under a timeout.

A reward function gets the whole batch by keyword and returns a value for each completion, None where it has none:

    def brevity(completions, completion_ids, **columns) -> list[float | None]

Keywords: `prompts`, `completions`, `completion_ids`, every left-over column of the dataset, `trainer_state`,
`log_extra(column, values)` and `log_metric(name, value)`; a function may leave out those it does not need.
Completions are strings, or [{"role": "assistant", "content": text}] where the prompt is a message list. `async def`
functions are awaited together, in one event loop for the whole run, so that their connections stay open.
"""

import ast
import asyncio
import contextlib
import copy
import difflib
import importlib
import importlib.util
import inspect
import logging
import math
import numbers
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlnumba.errors import ConfigError, UserError


class RewardError(UserError):
    """A reward function that raised, hung or returned something else than a number or None for each completion."""


@dataclass
class Scores:
    """What one batch of B completions got from K functions.

    values: (B, K) float64, NaN where a function gave None. errors: completions without a value because the function
    failed, by function name. extra: further columns for the completions table. metrics: averages to log.
    """

    values: np.ndarray
    errors: dict[str, int] = field(default_factory=dict)
    extra: dict[str, list] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Rewards:
    """The reward functions of a run.

    functions: callables with TRL's signature. weights: one float each, or None for 1.0. timeout_s: seconds that one
    call may take. errors: "raise" or "skip", see RewardsConfig.reward_errors. names: for metrics, or None for the
    functions' own.
    """

    def __init__(self, functions, weights=None, timeout_s=30.0, errors="raise", names=None):
        self.functions = list(functions)
        self.names = names or [function.__name__ for function in self.functions]
        self.weights = np.array(weights if weights is not None else [1.0] * len(self.functions), np.float64)
        self.timeout_s = timeout_s
        self.errors = errors
        self._runner = asyncio.Runner()

    def score(self, prompts, texts, completion_ids, columns, trainer_state=None):
        """Calls every function on a batch of B completions and returns Scores.

        prompts: B strings or message lists. texts: B strings. completion_ids: B lists of int. columns: {name: B
        values}. Raises RewardError naming the function, unless errors are skipped.
        """
        completions = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        scores = Scores(np.full((len(texts), len(self.functions)), np.nan))
        metrics = {}
        keywords = {
            **columns,
            # Those of the data are used again; what a function does to its own is its own affair.
            "prompts": [copy.deepcopy(prompt) for prompt in prompts],
            "completions": completions,
            "completion_ids": completion_ids,
            "trainer_state": trainer_state,
            "log_extra": lambda column, values: scores.extra.update({column: _extra(column, values, len(texts))}),
            "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
        }
        results = self._call_all(keywords)
        for k, (name, result) in enumerate(zip(self.names, results, strict=True)):
            try:
                if isinstance(result, BaseException):
                    raise _described(name, result, self.timeout_s) from result
                scores.values[:, k] = _checked(name, result, len(texts))
            except RewardError:
                if self.errors == "raise":
                    raise
                scores.errors[name] = len(texts)
        scores.metrics = {name: float(np.mean(values)) for name, values in metrics.items()}
        return scores

    def _call_all(self, keywords):
        """The functions' results in order, an exception in place of a result where one was raised."""
        results = [None] * len(self.functions)
        waiting = []
        for k, function in enumerate(self.functions):
            if _is_async(function):
                waiting.append(k)
            else:
                results[k] = _caught(lambda f=function: f(**_accepted(f, keywords)), self.timeout_s)
        if waiting:

            async def gather():
                calls = [
                    asyncio.wait_for(self.functions[k](**_accepted(self.functions[k], keywords)), self.timeout_s)
                    for k in waiting
                ]
                return await asyncio.gather(*calls, return_exceptions=True)

            def run():
                with contextlib.ExitStack() as failing:
                    failing.callback(self._runner.close)
                    found = self._runner.run(gather())
                    failing.pop_all()
                return found

            # The loop's own timeouts come first; the outer limit is for a coroutine that blocks the loop.
            together = _caught(run, self.timeout_s + 1, in_thread=_in_a_loop())
            failed = isinstance(together, BaseException)
            if failed:
                self._runner = asyncio.Runner()
            for i, k in enumerate(waiting):
                results[k] = together if failed else together[i]
        return results


def _extra(column, values, count):
    values = list(values)
    if len(values) != count:
        raise UserError(f"log_extra({column!r}) needs {count} values, one a completion, got {len(values)}")
    return values


def _is_async(function):
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepted(function, keywords):
    """Those of the keywords that the function takes, in lists of its own: dict."""
    keywords = {name: list(value) if isinstance(value, list) else value for name, value in keywords.items()}
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return keywords
    return {p.name: keywords[p.name] for p in parameters if p.name in keywords}


class _TimeUp(BaseException):
    """The time limit of a reward; not an Exception, so that a reward's own `except Exception` lets it pass."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raises _TimeUp in the block after `seconds`; limits nest. Main thread only: it uses SIGALRM.

    A signal also ends what a helper thread could not: a regular expression that backtracks for ever holds the
    interpreter lock, but looks for signals.
    """
    running = True

    def ring(signal_number, frame):
        if running:
            raise _TimeUp

    started = time.monotonic()
    outer_handler = signal.signal(signal.SIGALRM, ring)
    # The interval rings again for a block that swallowed the first exception.
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


def _in_main_thread():
    return threading.current_thread() is threading.main_thread()


def _in_a_loop():
    """Whether this thread runs an event loop, as that of a notebook does; it cannot run another one inside."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _caught(call, seconds, in_thread=False):
    """The result of call(), or the exception it raised; a TimeoutError after `seconds`.

    in_thread: make the call in a thread of its own, which goes on behind the scenes if it never returns.
    """
    if _in_main_thread() and not in_thread:
        try:
            with time_limit(seconds):
                return call()
        except _TimeUp:
            return TimeoutError()
        except (Exception, SystemExit) as error:  # a user's code: whatever it raises is reported under its name
            return error
    results = []

    def work():
        try:
            results.append(call())
        except (Exception, SystemExit) as error:  # as above
            results.append(error)

    # A daemon: a thread that never returns does not keep the process alive.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else TimeoutError()


def _described(name, error, timeout_s):
    """The RewardError of what a function raised."""
    if isinstance(error, UserError):
        return RewardError(f"reward {name}: {error}")
    if isinstance(error, _TimeUp) or (isinstance(error, TimeoutError) and not error.args):
        return RewardError(f"reward {name} did not return within {timeout_s:g} s (rewards.timeout)")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return RewardError(f"reward {name} raised {type(error).__name__}: {text}{where}")


def _checked(name, result, count):
    """A function's result as (count,) float64, NaN for None and NaN. Raises RewardError if it is anything else."""
    if isinstance(result, np.ndarray):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"reward {name} must return a list of {count} values, got {type(result).__name__}")
    if len(result) != count:
        raise RewardError(f"reward {name} must return {count} values, one a completion, got {len(result)}")
    values = np.full(count, np.nan)
    for i, value in enumerate(result):
        if value is None:
            continue
        if not isinstance(value, numbers.Real | np.bool_) or math.isinf(value):
            raise RewardError(f"reward {name} must return finite numbers or None, got {value!r} for completion {i}")
        values[i] = float(value)
    return values


class PerSample:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)` as a reward function."""

    def __init__(self, function):
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, completions, **columns):
        gold = reference_answers(columns)
        sources = columns.get("data_source", [None] * len(gold))
        extras = columns.get("extra_info", [None] * len(gold))
        results = [
            self.function(data_source=source, solution_str=text, ground_truth=answer, extra_info=extra)
            for source, text, answer, extra in zip(sources, texts_of(completions), gold, extras, strict=True)
        ]
        return [result["score"] if isinstance(result, dict) else result for result in results]


def load_rewards(config, functions=()):
    """The functions that a RewardsConfig names, or those given in their place: Rewards.

    Raises ConfigError for a name that leads nowhere, UserError for a missing file or package, RewardError for a file
    that fails on import.
    """
    functions = list(functions) or [resolve(spec) for spec in config.funcs]
    names = [getattr(function, "__name__", spec) for spec, function in zip(config.funcs, functions, strict=True)]
    names = [spec if names.count(name) > 1 else name for spec, name in zip(config.funcs, names, strict=True)]
    return Rewards(functions, config.weights, config.timeout, config.reward_errors, names)


def resolve(spec):
    """The function behind "name", "file.py:name" or "package.module:name", each optionally with (key=value, ...)."""
    match = re.fullmatch(r"\s*([^()]+?)\s*(\(.*\))?\s*", spec, re.DOTALL)
    if match is None:
        raise ConfigError(f"rewards.funcs: {spec!r} is not a name, file.py:function or package.module:function")
    path, call = match.groups()
    short = path.removeprefix("get_")
    if short in FACTORIES:
        function = _made(spec, FACTORIES[short], call or "()")
    else:
        function = _find(path)
        if call:
            function = _made(spec, function, call)
    if not callable(function):
        raise ConfigError(f"rewards.funcs: {spec} is a {type(function).__name__}, not a function")
    if function is accuracy_reward:
        _math_verify()
    if "solution_str" in inspect.signature(function).parameters:
        function = PerSample(function)
    return function


def _made(spec, factory, call):
    """factory(key=value, ...), the arguments being Python literals."""
    try:
        tree = ast.parse(f"f{call}", mode="eval").body
        keywords = {k.arg: ast.literal_eval(k.value) for k in tree.keywords}
        positional = [ast.literal_eval(value) for value in tree.args]
    except (SyntaxError, ValueError, AttributeError) as error:
        raise ConfigError(f"rewards.funcs: the arguments of {spec} must be key=value with plain values") from error
    try:
        return factory(*positional, **keywords)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rewards.funcs: {spec}: {error}") from error


def _find(path):
    if path in BUILT_IN:
        return BUILT_IN[path]
    if ":" in path:
        source, _, name = path.rpartition(":")
    elif "." in path:
        source, _, name = path.rpartition(".")
    else:
        near = difflib.get_close_matches(path, [*BUILT_IN, *FACTORIES], n=1, cutoff=0)[0]
        raise ConfigError(
            f"rewards.funcs: no built-in reward is called {path!r}; did you mean {near}? Your own are written "
            "file.py:function or package.module:function"
        )
    module = _module_of_file(source) if source.endswith(".py") else _module_of_name(source)
    if name not in vars(module):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1, cutoff=0)
        raise ConfigError(f"rewards.funcs: {source} has no {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return vars(module)[name]


def _module_of_file(source):
    path = Path(source).resolve()
    if not path.is_file():
        raise UserError(f"rewards.funcs: no such file: {source}")
    module_name = f"rlnumba_reward_{path.stem}_{abs(hash(str(path)))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    # As for a script, neighbouring files can be imported.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as above
        del sys.modules[module_name]
        raise _import_failed(source, error) from error
    return module


def _module_of_name(source):
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is not None and source.startswith(error.name):
            raise ConfigError(f"rewards.funcs: there is no module {source}") from error
        raise _import_failed(source, error) from error
    except (Exception, SystemExit) as error:  # as above
        raise _import_failed(source, error) from error


def _import_failed(source, error):
    line = getattr(error, "lineno", None) or traceback.extract_tb(error.__traceback__)[-1].lineno
    text = " ".join(str(error).split())
    return RewardError(f"rewards.funcs: {source} cannot be imported: {type(error).__name__}: {text} (line {line})")


def texts_of(completions):
    """The completions' texts, whether they are strings or message lists: list of str."""
    return [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]


ANSWER_COLUMNS = ("solution", "answer", "ground_truth", "final_answer")
KEYWORDS = ("prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")


def reference_answers(columns):
    """The first answer column: list. Raises UserError naming the columns if there is none."""
    for name in ANSWER_COLUMNS:
        if name in columns:
            return columns[name]
    seen = ", ".join(name for name in columns if name not in KEYWORDS) or "none"
    raise UserError(f"needs a column {', '.join(ANSWER_COLUMNS[:-1])} or {ANSWER_COLUMNS[-1]}; the data has: {seen}")


def _math_verify():
    try:
        import math_verify
    except ImportError as error:
        raise UserError("accuracy_reward needs math-verify; pip install 'rlnumba[math]'") from error
    # Each comparison would warn that it has no timeout of its own.
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    return math_verify


SECONDS_PER_ANSWER = 2.0  # a hundred times what a plain answer takes; 9^{9^{9^9}} would take for ever


def accuracy_reward(completions, **columns):
    r"""1.0 where math-verify finds the completion's answer equal to the reference, else 0.0; None if the reference
    cannot be parsed. An answer that takes longer than SECONDS_PER_ANSWER to compare gets 0.0.

    The reference is the first of the columns solution, answer, ground_truth, final_answer (after `####` where there is
    one). The completion's answer must be LaTeX, \boxed{} first. As in TRL.
    """
    math_verify = _math_verify()
    from latex2sympy2_extended import NormalizationConfig

    extraction = math_verify.LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    def verdict(text, gold):
        # Without their own timeouts: those use SIGALRM too and would cancel the limit around this reward.
        gold_parsed = math_verify.parse(gold, parsing_timeout=None)
        if not gold_parsed:
            return None
        answer = math_verify.parse(text, [extraction], extraction_mode="first_match", parsing_timeout=None)
        return float(math_verify.verify(gold_parsed, answer, timeout_seconds=None))

    values = []
    for text, gold in zip(texts_of(completions), reference_answers(columns), strict=True):
        gold = str(gold).rpartition("####")[2].strip()
        if not _in_main_thread():
            values.append(verdict(text, gold))
            continue
        try:
            with time_limit(SECONDS_PER_ANSWER):
                values.append(verdict(text, gold))
        except _TimeUp:
            values.append(0.0)
    return values


def think_format_reward(completions, **columns):
    """1.0 where the completion is <think>...</think> and then anything, with one opening tag; else 0.0. As in TRL."""
    pattern = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)
    return [1.0 if pattern.match(text) else 0.0 for text in texts_of(completions)]


GSM8K_ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")


def gsm8k_answer(text):
    """The number after the first `#### `, commas and a final full stop removed: str, or None. GSM8K's own rule."""
    match = GSM8K_ANSWER.search(text)
    return match.group(1).replace(",", "").rstrip(".") if match else None


def gsm8k_reward(completions, **columns):
    """1.0 where the number after `#### ` in the completion equals the reference answer's, else 0.0.

    The reference is the first of the columns solution, answer, ground_truth, final_answer; `#### ` in it is optional.
    """
    values = []
    for text, gold in zip(texts_of(completions), reference_answers(columns), strict=True):
        gold = gsm8k_answer(str(gold)) or str(gold).strip().replace(",", "")
        values.append(1.0 if _same_number(gsm8k_answer(text), gold) else 0.0)
    return values


def _same_number(answer, gold):
    if answer is None:
        return False
    try:
        return float(answer) == float(gold)
    except ValueError:
        return answer == gold


def get_cosine_scaled_reward(
    max_len, min_value_wrong=-1.0, max_value_wrong=-0.5, min_value_correct=0.5, max_value_correct=1.0
):
    """accuracy_reward scaled by length: short right answers get most, short wrong ones least.

    max_len: completion tokens at which the cosine ends. Source: arXiv 2502.03373, appendix C.1; TRL.
    """
    _math_verify()

    def cosine_scaled_reward(completions, completion_ids, **columns):
        values = []
        for correct, ids in zip(accuracy_reward(completions, **columns), completion_ids, strict=True):
            if correct is None:
                values.append(None)
                continue
            cosine = math.cos(min(len(ids) / max_len, 1.0) * math.pi)
            at_end, at_start = (min_value_correct, max_value_correct) if correct else (max_value_wrong, min_value_wrong)
            values.append(at_end + 0.5 * (at_start - at_end) * (1.0 + cosine))
        return values

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0):
    """max_penalty times the share of token n-grams that repeat an earlier one; 0.0 for shorter completions.

    Source: arXiv 2502.03373, appendix C.2; TRL.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty must be at most 0, got {max_penalty}")

    def repetition_penalty_reward(completion_ids, **columns):
        values = []
        for ids in completion_ids:
            ngrams = [tuple(ids[i : i + ngram_size]) for i in range(len(ids) - ngram_size + 1)]
            values.append(max_penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0)
        return values

    return repetition_penalty_reward


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    """0.0 up to max_completion_len - soft_punish_cache tokens, then falling linearly to -1.0 at max_completion_len.

    Source: DAPO, arXiv 2503.14476, equation 13; TRL.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache must be above 0 and at most max_completion_len {max_completion_len}, "
            f"got {soft_punish_cache}"
        )

    def soft_overlong_punishment_reward(completion_ids, **columns):
        free = max_completion_len - soft_punish_cache
        return [-min(max(len(ids) - free, 0) / soft_punish_cache, 1.0) for ids in completion_ids]

    return soft_overlong_punishment_reward


# What a run file may name without a module.
BUILT_IN = {
    "accuracy_reward": accuracy_reward,
    "think_format_reward": think_format_reward,
    "gsm8k_reward": gsm8k_reward,
}
# Named with arguments, which may be left out where all have defaults.
FACTORIES = {
    "cosine_scaled_reward": get_cosine_scaled_reward,
    "repetition_penalty_reward": get_repetition_penalty_reward,
    "soft_overlong_punishment": get_soft_overlong_punishment,
}
