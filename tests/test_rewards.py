"""Reward functions: built-in values against hand-computed ones, calls that fail, names that lead nowhere."""

import asyncio
import contextlib
import math
import numbers
import os
import re
import signal
import sys
import tempfile
import threading
import time
from abc import ABCMeta
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from rlnumba.config import RewardsConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.rewards import RewardError, Rewards, calling, functions, load_rewards, resolve
from rlnumba.rewards.loading import numbered

PROMPTS = ["a", "b", "c"]
TEXTS = ["one", "two words", "three more words"]
IDS = [[1], [1, 2], [1, 2, 3]]


def score(*functions, timeout_s=5.0, errors="raise", prompts=PROMPTS, columns=None, **kwargs):
    return Rewards(functions, timeout_s=timeout_s, errors=errors).score(prompts, TEXTS, IDS, columns or {}, **kwargs)


def length(completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


async def meet(folder, count):
    """Return once this was called so many times, in any processes."""
    descriptor, _ = tempfile.mkstemp(dir=folder)
    os.close(descriptor)
    while len(os.listdir(folder)) < count:
        await asyncio.sleep(0.01)


async def tenfold_length(completion_ids, folder=None, **columns):
    if folder is not None:
        await meet(folder[0], 3)
    return [10 * len(ids) for ids in completion_ids]


def test_functions_get_trl_keywords_and_give_a_column_each():
    seen = {}

    def spy(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, state=trainer_state)
        log_extra("copy", answer)
        log_metric("half", 1.0)
        log_metric("half", 0.0)
        return [None, True, np.float32(0.5)]

    scores = score(spy, length, columns={"answer": [7, 8, 9], "unused": [0, 0, 0]}, trainer_state={"step": 3})
    np.testing.assert_array_equal(scores.values, [[np.nan, 1], [1, 2], [0.5, 3]])
    assert seen == {
        "prompts": PROMPTS,
        "completions": TEXTS,
        "ids": IDS,
        "answer": [7, 8, 9],
        "state": {"step": 3},
    }
    assert scores.extra == {"copy": [7, 8, 9]}
    assert scores.metrics == {"half": 0.5}


def test_what_a_function_does_to_its_arguments_stays_there():
    def clears(prompts, completions, completion_ids, answer):
        prompts[0].append("more")
        for values in (prompts, completions, completion_ids, answer):
            values.clear()
        return [0.0] * 3

    prompts = [[{"role": "user", "content": "a"}]] * 3
    assert score(clears, length, prompts=prompts, columns={"answer": [7, 8, 9]}).values[:, 1].tolist() == [1, 2, 3]
    assert prompts == [[{"role": "user", "content": "a"}]] * 3

    def still_there(completions, answer):
        return [10.0 * len(completions) + len(answer)] * len(completions)

    # Both are called in this process, with the same lists.
    columns = {"answer": [7, 8, 9]}
    assert score(clears, still_there, prompts=prompts, columns=columns).values[:, 1].tolist() == [33.0] * 3
    assert columns == {"answer": [7, 8, 9]}

    def rewrites(completions, answer):
        completions[0][0]["content"] = ""
        answer[0]["cases"].pop()
        return [float(len(each["cases"])) for each in answer]

    def reads(completions, answer):
        return [
            len(own[0]["content"]) + 10.0 * len(each["cases"]) for own, each in zip(completions, answer, strict=True)
        ]

    # One row of several completions, whose values have lists of their own.
    columns = {"answer": [{"cases": [1, 2]}] * 3}
    assert score(rewrites, reads, prompts=prompts, columns=columns).values.tolist() == [[1, 23], [2, 29], [2, 36]]
    assert columns == {"answer": [{"cases": [1, 2]}] * 3}


def test_metrics_are_means_over_all_groups():
    def counts(completions, log_metric):
        log_metric("size", len(completions))
        return [0.0] * len(completions)

    rewards = Rewards([counts])
    groups = [rewards.submit(["p"] * size, ["t"] * size, [[1]] * size, {}) for size in (1, 3)]
    assert rewards.collect(groups).metrics == {"size": 2.0}


def test_completions_of_message_prompts_are_messages():
    def role(completions, **columns):
        return [1.0 if isinstance(c, list) and c[0]["role"] == "assistant" else 0.0 for c in completions]

    prompts = [[{"role": "user", "content": "a"}], "b", [{"role": "user", "content": "c"}]]
    assert score(role, prompts=prompts).values[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_async_functions_wait_together(tmp_path):
    """Each of three waits until all have begun, in this process and in another one."""

    async def other(completions, **columns):
        await meet(tmp_path, 3)
        return [0.0] * len(completions)

    functions = tenfold_length, other, tenfold_length, length
    values = score(*functions, columns={"folder": [str(tmp_path)] * 3}, timeout_s=30.0).values
    assert values.tolist() == [[10, 0, 10, 1], [20, 0, 20, 2], [30, 0, 30, 3]]


def test_async_functions_have_one_loop_for_the_whole_run():
    """What is bound to a loop, such as a client's connections, lives on; a loop that was blocked is replaced."""
    loops = []

    async def remembers(completions, **columns):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    rewards = Rewards([remembers], timeout_s=0.2)
    for _ in range(2):
        rewards.score(PROMPTS, TEXTS, IDS, {})
    assert loops[0] is loops[1] and not loops[0].is_closed()

    async def blocks_for_ever(completions, **columns):
        await remembers(completions)
        swallows(completions)

    rewards = Rewards([blocks_for_ever, remembers], timeout_s=0.2, errors="skip")
    for _ in range(2):
        # The other one fails with it, and has its values in the loop that takes the place of the first.
        assert rewards.score(PROMPTS, TEXTS, IDS, {}).errors == {"blocks_for_ever": 3}


def test_an_async_function_that_cannot_be_called_fails_alone():
    """And the next batch is scored."""

    async def needs_answer(completions, answer):
        return [float(a) for a in answer]

    rewards = Rewards([needs_answer, length, tenfold_length], errors="skip")
    scores = rewards.score(PROMPTS, TEXTS, IDS, {})
    assert scores.errors == {"needs_answer": 3}
    np.testing.assert_array_equal(scores.values, [[np.nan, n, 10 * n] for n in (1, 2, 3)])
    assert rewards.score(PROMPTS, TEXTS, IDS, {"answer": [7, 8, 9]}).values.tolist() == [
        [7, 1, 10],
        [8, 2, 20],
        [9, 3, 30],
    ]
    with pytest.raises(RewardError, match="reward needs_answer raised TypeError: .* 'answer'"):
        Rewards([needs_answer]).score(PROMPTS, TEXTS, IDS, {})


def test_the_time_of_async_functions_is_that_of_all_completions_too():
    async def slow(completions, **columns):
        await asyncio.sleep(1.2)
        return [1.0] * len(completions)

    rewards = Rewards([slow], timeout_s=0.05)
    assert rewards.score(["p"] * 60, ["a"] * 60, [[1]] * 60, {}).values.sum() == 60


def test_async_functions_in_a_notebook():
    """Where a loop runs already, theirs runs beside it, and is the same from call to call."""
    loops = []

    async def remembers(completions, **columns):
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def cell():
        rewards = Rewards([remembers, length])
        return [rewards.score(PROMPTS, TEXTS, IDS, {}).values.sum() for _ in range(2)]

    assert asyncio.run(cell()) == [9.0, 9.0]
    assert loops[0] is loops[1]


def test_a_loop_that_is_blocked_in_a_notebook_is_replaced(monkeypatch):
    """The thread that is left has the old one."""
    call, goes_on = calling.call_with_timeout, threading.Event()

    async def may_block(completions, **columns):
        if "block" in completions:
            goes_on.wait(10)
        return [1.0] * len(completions)

    async def notebook():
        rewards = Rewards([may_block])
        with monkeypatch.context() as patch, pytest.raises(RewardError, match="may_block did not return within"):
            patch.setattr(calling, "call_with_timeout", lambda work, seconds, **keys: call(work, 0.02, **keys))
            rewards.score(["p"], ["block"], [[1]], {})
        return rewards.score(["p"], ["a"], [[1]], {}).values.tolist()

    try:
        assert asyncio.run(notebook()) == [[1.0]]
    finally:
        goes_on.set()


def test_an_array_is_as_good_as_a_list_and_a_tuple():
    def array(completions, **columns):
        return np.array([1, 2, 3], np.int32)

    def pair(completions, **columns):
        return 1, np.bool_(True), 0.5

    assert score(array, pair).values.tolist() == [[1.0, 1.0], [2.0, 1.0], [3.0, 0.5]]

    def table(completions, **columns):
        return np.zeros((3, 1))

    with pytest.raises(
        RewardError, match=r"reward table must return finite numbers or None, got \[0.0\] for completion 0"
    ):
        score(table)


def test_defaults_are_those_of_the_configuration():
    made = Rewards([length, raises])
    assert (made.timeout_s, made.errors, made.names) == (30.0, "raise", ["length", "raises"])
    assert made.weights.tolist() == [1.0, 1.0] and made.weights.dtype == np.float64
    loaded = load_rewards(RewardsConfig(funcs=["gsm8k_reward"], weights=[2.0], timeout=3.0, reward_errors="skip"))
    assert (loaded.timeout_s, loaded.errors, loaded.weights.tolist()) == (3.0, "skip", [2.0])
    assert loaded.functions == [functions.gsm8k_reward]


def test_nan_is_none():
    def nan(completions, **columns):
        return [float("nan"), np.float32("nan"), 1]

    np.testing.assert_array_equal(score(nan).values[:, 0], [np.nan, np.nan, 1])


def raises(completions, **columns):
    return {}["answer"]


def exits(completions, **columns):
    raise SystemExit(0)


def wrong_count(completions, **columns):
    return [1.0]


def not_a_list(completions, **columns):
    return 1.0


def not_a_number(completions, **columns):
    return ["1", 1, 1]


def infinite(completions, **columns):
    return [0.0, float("inf"), 0.0]


def sleeps(completions, **columns):
    time.sleep(60)


def spins(completions, **columns):
    while True:
        try:
            time.sleep(0)
        except Exception:
            pass


def swallows(completions, **columns):
    try:
        time.sleep(60)
    except BaseException:  # noqa: B036
        time.sleep(60)


def backtracks(completions, **columns):
    re.match(r"(a+)+$", "a" * 60 + "b")


def needs_more(completions, answer, **columns):
    return [0.0] * len(completions)


def logs_a_word(completions, log_metric, **columns):
    log_metric("x", "word")
    return [0.0] * len(completions)


def logs_too_little(completions, log_extra, **columns):
    log_extra("half", [1])
    return [0.0] * len(completions)


async def awaits(completions, **columns):
    await asyncio.sleep(60)


async def blocks(completions, **columns):
    time.sleep(60)


def cancels(completions, **columns):
    raise asyncio.CancelledError


async def cancels_later(completions, **columns):
    raise asyncio.CancelledError


async def exits_later(completions, **columns):
    raise SystemExit(3)


class NoFloat(numbers.Real, metaclass=type("Unchecked", (ABCMeta,), {"__call__": lambda cls: object.__new__(cls)})):
    """A number of a user that cannot be converted, nor printed."""


NoFloat.__abstractmethods__ = frozenset()
NoFloat.__repr__ = NoFloat.__float__ = lambda self: 1 / 0
RANGE = r"must return numbers from -1e\+18 to 1e\+18 or None, got"
# What a function may return for a completion, and what is said of it: None where it is right.
VALUES = [
    ("None", None),
    ("float('nan')", None),
    ("True", None),
    ("np.float16(0.5)", None),
    ("fractions.Fraction(1, 3)", None),
    ("-10**18", None),
    ("10**400", f"{RANGE} 10{{56}}[.]{{3}} for completion 1"),
    ("-10**5000", f"{RANGE} int that cannot be printed for completion 1"),
    ("fractions.Fraction(10**400, 3)", rf"{RANGE} Fraction\(10{{47}}[.]{{3}} for completion 1"),
    ("1e30", rf"{RANGE} 1e\+30 for completion 1"),
    ("np.float32('-inf')", r"must return finite numbers or None, got np.float32\(-inf\) for completion 1"),
    ("float('1e999')", "must return finite numbers or None, got inf for completion 1"),
    ("decimal.Decimal(1)", r"must return finite numbers or None, got Decimal\('1'\) for completion 1"),
    ("{'score': 1.0}", r"must return finite numbers or None, got {'score': 1.0} for completion 1"),
    ("1j", "must return finite numbers or None, got 1j for completion 1"),
    ("'x\\ny' * 99", r"must return finite numbers or None, got 'x\\nyx.*[.]{3} for completion 1"),
]
VALUE_FUNCTIONS = """
import decimal, fractions
import numpy as np

def plain(completions, **columns):
    return [0.0, *map(eval, completions[1:])]

async def awaited(completions, **columns):
    return plain(completions)
"""


@pytest.mark.parametrize("value, said", VALUES, ids=[value for value, _ in VALUES])
def test_values_that_are_no_numbers_are_named(value, said):
    """Whether a function is plain, a lambda or `async def`, and with errors that are skipped."""
    found = {}
    exec(VALUE_FUNCTIONS, found)
    plain, awaited = found["plain"], found["awaited"]

    async def here(completions, **columns):
        return await awaited(completions)

    texts = [["", value, "1.0"]]
    forms = [lambda completions, **columns: plain(completions), here]
    expected = eval(value, found)
    if said is None:
        values = Rewards(forms).score(PROMPTS, *texts, IDS, {}).values
        expected = np.nan if expected is None else float(expected)
        np.testing.assert_array_equal(values, np.array([[0.0, expected, 1.0]] * 2).T)
        return
    for form in forms:
        with pytest.raises(RewardError, match=f"^reward {re.escape(form.__name__)} {said}$") as caught:
            Rewards([form]).score(PROMPTS, *texts, IDS, {})
        assert "\n" not in str(caught.value)
        scores = Rewards([form], errors="skip").score(PROMPTS, *texts, IDS, {})
        assert np.isnan(scores.values).all() and scores.errors == {form.__name__: 3}


def test_worker_processes_name_values_that_are_no_numbers(tmp_path):
    """At once, and with the row of the prompt."""
    (tmp_path / "values.py").write_text(VALUE_FUNCTIONS)
    specs = [f"{tmp_path}/values.py:{name}" for name in ("plain", "awaited")]
    skipping = load_rewards(RewardsConfig(funcs=specs, timeout=300.0, reward_errors="skip"))
    pending = [skipping.submit(PROMPTS, ["", value, "1"], IDS, {}) for value, said in VALUES if said]
    for (_, said), group in zip([each for each in VALUES if each[1]], pending, strict=True):
        errors = [group.calls[k].result(timeout=60).error for k in range(2)]
        for name, error in zip(("plain", "awaited"), errors, strict=True):
            assert re.fullmatch(f"reward {name} {said}", error)
    scores = skipping.collect(pending)
    assert np.isnan(scores.values).all() and scores.errors == {name: 3 * len(pending) for name in ("plain", "awaited")}
    skipping.errors = "raise"
    with pytest.raises(RewardError, match="^rows.jsonl:7: reward plain must return numbers from"):
        skipping.collect([skipping.submit(PROMPTS, ["", "10**400", "1"], IDS, {}, where="rows.jsonl:7")])


@pytest.mark.parametrize("result", [NoFloat(), {}, None, "abc", (x for x in "abc"), np.zeros((3, 3)), [NoFloat()] * 3])
def test_results_that_are_no_list_of_numbers_are_one_line(result):
    with pytest.raises(RewardError, match="^reward <lambda> (must return|raised ZeroDivisionError)") as caught:
        score(lambda completions: result)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e30])
def test_a_model_that_gives_no_number(wrong):
    """A model's NaN is no None: it has a value for every text."""

    def values(prompts, completions, columns):
        return [wrong if text == TEXTS[1] else 1.0 for text in completions]

    judge = calling.ModelReward("judge", values, "judge")
    with pytest.raises(RewardError, match="^reward judge must return .*, got (nan|inf|1e.30) for completion 1$"):
        score(judge)
    scores = score(judge, length, errors="skip")
    np.testing.assert_array_equal(scores.values, [[1, 1], [np.nan, 2], [1, 3]])
    assert scores.errors == {"judge": 1}


def test_what_a_group_of_one_pays_for_others_is_asked_again():
    """A model scores all groups at once: one that cannot be scored fails alone, with errors "skip"."""

    def values(prompts, completions, columns):
        if "bad" in completions:
            raise UserError("cannot be scored")
        return [1.0] * len(completions)

    rewards = Rewards([calling.ModelReward("judge", values, "judge")], errors="skip")
    scores = rewards.collect([rewards.submit(["p"], [text], [[1]], {}) for text in ("good", "bad")])
    np.testing.assert_array_equal(scores.values, [[1.0], [np.nan]])
    assert scores.errors == {"judge": 1}
    # Those of all groups are counted.
    texts = [["good", "bad"], ["bad", "bad"], ["good", "good"]]
    scores = rewards.collect([rewards.submit(["p"] * 2, each, [[1]] * 2, {}) for each in texts])
    np.testing.assert_array_equal(scores.values[:, 0], [1.0, np.nan, np.nan, np.nan, 1.0, 1.0])
    assert scores.errors == {"judge": 3}


def test_columns_that_one_group_lacks_have_none_for_a_model():
    seen = []

    def values(prompts, completions, columns):
        seen.append(columns["level"])
        return [1.0] * len(completions)

    rewards = Rewards([calling.ModelReward("judge", values, "judge")])
    groups = [({}, ["a", "b"]), ({"level": [3, 4]}, ["c", "d"])]
    rewards.collect([rewards.submit(["p"] * 2, texts, [[1]] * 2, columns) for columns, texts in groups])
    assert seen == [[None, None, 3, 4]]


def test_what_completions_log_that_are_tried_one_by_one():
    """It stays with its completion; that of a call which has failed is dropped."""

    def logs(completions, log_extra, log_metric, **columns):
        log_extra("seen", completions)
        log_metric("size", len(completions[0]))
        if "bad" in completions:
            raise ValueError
        return [1.0] * len(completions)

    scores = Rewards([logs], errors="skip").score(["p"] * 3, ["a", "bad", "cc"], [[1]] * 3, {})
    assert scores.extra == {"seen": ["a", None, "cc"]} and scores.metrics == {"size": 1.5}


def test_a_group_is_ready_once_all_its_calls_are():
    calls = {0: Future(), 1: Future()}
    pending, rewards = calling.Pending({}, 1, calls), Rewards([length, tenfold_length])
    for call, is_ready in ((calls[0], False), (calls[1], True)):
        call.set_result(None)
        assert rewards.ready([pending]) == [is_ready]


def test_functions_of_the_main_module_are_not_imported(monkeypatch):
    """Another process would run the script again."""

    def own(completions, **columns):
        return [1.0] * len(completions)

    own.__module__, own.__qualname__ = "__main__", "own"
    monkeypatch.setattr(sys.modules["__main__"], "own", own, raising=False)
    assert calling.importable_name(own) is None
    assert calling.importable_name(functions.gsm8k_reward) == "rlnumba.rewards.functions:gsm8k_reward"


def test_columns_that_one_group_logs_have_a_value_for_all():
    def logs(completions, log_extra, **columns):
        if "a" in completions:
            log_extra("half", [0.5] * len(completions))
        return [1.0] * len(completions)

    rewards = Rewards([logs])
    groups = [rewards.submit(["p"] * len(texts), texts, [[1]] * len(texts), {}) for texts in (["a", "b"], ["c"])]
    assert rewards.collect(groups).extra == {"half": [0.5, 0.5, None]}
    assert rewards.collect(groups[::-1]).extra == {"half": [None, 0.5, 0.5]}


FAILURES = [
    (raises, r"reward raises raised KeyError: 'answer' \(.*test_rewards.py:\d+\)"),
    (exits, "reward exits raised SystemExit: 0"),
    (wrong_count, "reward wrong_count must return 3 values, one a completion, got 1"),
    (not_a_list, "reward not_a_list must return a list of 3 values, got float"),
    (not_a_number, "reward not_a_number must return finite numbers or None, got '1' for completion 0"),
    (infinite, "reward infinite must return finite numbers or None, got inf for completion 1"),
    (logs_too_little, r"reward logs_too_little: log_extra\('half'\) needs 3 values, one a completion, got 1"),
    (logs_a_word, r"reward logs_a_word raised ValueError: .*'word' \(.*test_rewards.py:\d+\)"),
    (needs_more, r"reward needs_more raised TypeError: .*missing 1 required positional argument: 'answer'$"),
    (sleeps, "reward sleeps did not return within 0.2 s"),
    (spins, "reward spins did not return within 0.2 s"),
    (swallows, "reward swallows did not return within 0.2 s"),
    (backtracks, "reward backtracks did not return within 0.2 s"),
    (awaits, "reward awaits did not return within 0.2 s"),
    (blocks, "reward blocks did not return within 0.2 s"),
    (cancels, "reward cancels raised CancelledError"),
    (cancels_later, "reward cancels_later raised CancelledError"),
    (exits_later, "reward exits_later raised SystemExit: 3"),
]


@pytest.mark.parametrize("function, message", FAILURES, ids=[f.__name__ for f, _ in FAILURES])
def test_a_failing_function_is_named(function, message):
    with pytest.raises(RewardError, match=message) as caught:
        score(function, timeout_s=0.2)
    assert "\n" not in str(caught.value)


def test_the_line_that_is_named_is_the_one_that_raised():
    def calls_another(completions, **columns):
        return raises(completions)

    with pytest.raises(RewardError) as caught:
        score(calls_another)
    assert str(caught.value).endswith(f"test_rewards.py:{raises.__code__.co_firstlineno + 1})")


@pytest.mark.parametrize("function", [raises, wrong_count, sleeps])
def test_failures_can_be_skipped_and_are_counted(function):
    scores = score(length, function, timeout_s=0.2, errors="skip")
    np.testing.assert_array_equal(scores.values, [[1, np.nan], [2, np.nan], [3, np.nan]])
    assert scores.errors == {function.__name__: 3}


def test_a_hanging_function_outside_the_main_thread():
    caught = []

    def work():
        with pytest.raises(RewardError, match="did not return within 0.2 s") as error:
            score(sleeps, timeout_s=0.2)
        caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)
    assert caught


def test_a_function_outside_the_main_thread():
    """Its result, what it raises, and answers that are compared without a signal."""
    pytest.importorskip("math_verify")
    found = []

    def work():
        found.append(score(length).values[:, 0].tolist())
        for function, message in ((raises, "reward raises raised KeyError: 'answer'"), (exits, "raised SystemExit: 0")):
            with pytest.raises(RewardError, match=message) as error:
                score(function)
            found.append(type(error.value))
        gold = {"solution": ["1", "2", ""]}
        found.append(functions.accuracy_reward([r"\boxed{1}", r"\boxed{3}", r"\boxed{3}"], **gold))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert found == [[1, 2, 3], RewardError, RewardError, [1.0, 0.0, None]]


def test_time_limits_nest():
    reached = []
    with pytest.raises(calling.TimeUp), calling.time_limit(0.3):
        with pytest.raises(calling.TimeUp), calling.time_limit(0.1):
            time.sleep(5)
        # What the inner block took is not given back to the outer one.
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        reached.append("between")
        time.sleep(5)
    assert reached == ["between"]


def test_an_outer_limit_that_has_passed_meanwhile_ends_its_block():
    with pytest.raises(calling.TimeUp):
        with calling.time_limit(0.02):
            with calling.time_limit(60):
                time.sleep(0.05)
            time.sleep(60)


def test_files_and_modules(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("BONUS = 2\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour import BONUS\n"
        "def brevity(completion_ids, **columns):\n    return [BONUS - len(i) for i in completion_ids]\n"
        "def made(slope):\n    def line(completion_ids):\n        return [slope * len(i) for i in completion_ids]\n"
        "    return line\n"
        "CONSTANT = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RewardsConfig(funcs=["mine.py:brevity", "mine:brevity", "mine.brevity", "mine.py:made(slope=-2)"])
    loaded = load_rewards(config)
    assert loaded.names == ["mine.py:brevity", "mine:brevity", "mine.brevity", "line"]
    values = loaded.score(PROMPTS, TEXTS, IDS, {}).values
    assert values.tolist() == [[1, 1, 1, -2], [0, 0, 0, -4], [-1, -1, -1, -6]]

    (tmp_path / "broken.py").write_text("import json\n\n1 / 0\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    for spec, kind, message in [
        ("mine.py:brevety", ConfigError, "mine.py has no 'brevety'; did you mean brevity"),
        ("mine.py:CONSTANT", ConfigError, "mine.py:CONSTANT is a int, not a function"),
        ("missing.py:f", UserError, "no such file: missing.py"),
        ("no_such_module:f", ConfigError, "there is no module no_such_module"),
        ("acuracy_reward", ConfigError, "did you mean accuracy_reward"),
        ("broken.py:f", RewardError, r"broken.py cannot be imported: ZeroDivisionError: division by zero \(line 3\)"),
        ("syntax.py:f", RewardError, r"syntax.py cannot be imported: SyntaxError: .*\(line 1\)"),
        ("mine.py:made(slope=print)", ConfigError, "must be key=value with plain values"),
        ("soft_overlong_punishment", ConfigError, "soft_overlong_punishment: .*missing 2 required"),
        ("repetition_penalty_reward(max_penalty=1)", ConfigError, "max_penalty must be at most 0"),
    ]:
        with pytest.raises(kind, match=message) as caught:
            resolve(spec)
        assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_modules_of_the_working_directory(tmp_path, monkeypatch):
    """Found though a console script's sys.path lacks it; what fails while one is imported is said with its line."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    package = tmp_path / "of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text("def f(completions):\n    return [2.0] * len(completions)\n")
    (package / "lacks.py").write_text("\nimport no_such_package\n")
    (package / "fails.py").write_text("import json\n\n\nraise SystemExit('not\\ntoday')\n")
    monkeypatch.chdir(tmp_path)
    for spec in ("of_mine.good:f", "of_mine.good.f"):
        assert score(resolve(spec)).values[:, 0].tolist() == [2.0] * 3
    assert sys.path.count(str(tmp_path)) == 1
    for spec, kind, message in (
        ("of_mine.other:f", ConfigError, "there is no module of_mine.other"),
        (
            "of_mine.lacks:f",
            RewardError,
            "of_mine.lacks cannot be imported: ModuleNotFoundError: No module named 'no_such_package' (line 2)",
        ),
        ("of_mine.fails:f", RewardError, "of_mine.fails cannot be imported: SystemExit: not today (line 4)"),
    ):
        with pytest.raises(kind) as caught:
            resolve(spec)
        assert str(caught.value) == f"rewards.funcs: {message}" and type(caught.value) is kind


@pytest.mark.parametrize(
    "name", ["rw (1).py", "copy (2)/rw.py", "my.rewards.v2.py", "a b/c, d.py", "x.py.py", "(.py", "[1]/é-ü.py"]
)
def test_files_of_any_name(tmp_path, monkeypatch, name):
    """Relative, absolute and from the home folder, with arguments and without; also in a worker process."""
    file = tmp_path / "in (here)" / name
    file.parent.mkdir(parents=True)
    file.write_text(
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass Kept:\n    n: int\n"
        "def f(completions, **columns):\n    return [pickle.loads(pickle.dumps(Kept(7))).n] * len(completions)\n"
        "def made(text):\n    return lambda completions, **columns: [float(len(text))] * len(completions)\n"
    )
    monkeypatch.chdir(file.parents[name.count("/")])
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (name, str(file), f"~/in (here)/{name}"):
        assert resolve(f"{path}:f")(TEXTS) == [7] * 3
        assert resolve(f" {path}: made(text='a.py:b(c)') ")(TEXTS) == [9.0] * 3
    if name == "rw (1).py":
        loaded = load_rewards(RewardsConfig(funcs=[f"{name}:f"]))
        assert loaded.specs == [f"{name}:f"] and loaded.score(PROMPTS, TEXTS, IDS, {}).values.tolist() == [[7]] * 3


def test_a_file_is_read_once(tmp_path, monkeypatch):
    """Functions of one file share its state; one that failed is read again once it is repaired."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "shared.py"
    path.write_text("1 / 0\n")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        resolve(f"{path}:f")
    path.write_text("made = []\ndef f(completions):\n    return made\ndef g(completions):\n    return made\n")
    assert resolve(f"{path}:f")([]) is resolve(f"{path}:g")([])
    assert sys.path.count(str(tmp_path)) == 1
    other = tmp_path / "other" / "shared.py"
    other.parent.mkdir()
    other.write_text("def f(completions):\n    return 'the other'\n")
    assert resolve(f"{other}:f")([]) == "the other"


@pytest.mark.parametrize(
    "spec, message",
    [
        ("f(", "rewards.funcs: 'f(' is not a name, file.py:function or package.module:function"),
        ("", "rewards.funcs: '' is not a name, file.py:function or package.module:function"),
        (
            "gsm8k",
            "rewards.funcs: no built-in reward is called 'gsm8k'; did you mean gsm8k_reward? Your own are written "
            "file.py:function or package.module:function",
        ),
        ("json:no_such", "rewards.funcs: json has no 'no_such'; did you mean loads?"),
        (
            "repetition_penalty_reward(3, print)",
            "rewards.funcs: the arguments of repetition_penalty_reward(3, print) must be key=value with plain values",
        ),
        (
            "repetition_penalty_reward(max_penalty=0.5)",
            "rewards.funcs: repetition_penalty_reward(max_penalty=0.5): max_penalty must be at most 0, got 0.5",
        ),
        (
            "soft_overlong_punishment(10, 0)",
            "rewards.funcs: soft_overlong_punishment(10, 0): soft_punish_cache must be above 0 and at most "
            "max_completion_len 10, got 0",
        ),
        (
            "soft_overlong_punishment(10, 11)",
            "rewards.funcs: soft_overlong_punishment(10, 11): soft_punish_cache must be above 0 and at most "
            "max_completion_len 10, got 11",
        ),
    ],
)
def test_what_is_wrong_with_a_name_is_said_in_full(spec, message):
    with pytest.raises(ConfigError) as caught:
        resolve(spec)
    assert str(caught.value) == message


def test_a_module_without_functions_has_nothing_to_suggest(tmp_path):
    path = tmp_path / "constants.py"
    path.write_text("ONE = 1\ndef _hidden():\n    pass\n")
    with pytest.raises(ConfigError) as caught:
        resolve(f"{path}:one")
    assert str(caught.value) == f"rewards.funcs: {path} has no 'one'"


@pytest.mark.parametrize("spec", ["accuracy_reward", "cosine_scaled_reward(max_len=3)"])
def test_a_reward_without_its_package_says_what_to_install(spec, monkeypatch):
    """When the run begins, not at the first completion."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError) as caught:
        resolve(spec)
    assert str(caught.value) == "accuracy_reward needs math-verify; pip install 'rlnumba[math]'"


def test_verl_compute_score(tmp_path):
    path = tmp_path / "verl_score.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth and data_source == 'x')}\n"
    )
    function = resolve(f"{path}:compute_score")
    columns = {"ground_truth": ["one", "two", "three more words"], "data_source": ["x", "x", "x"]}
    assert score(function, columns=columns).values[:, 0].tolist() == [1.0, 0.0, 1.0]
    path.write_text(
        "def score_with_extra(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return None if extra_info is None else extra_info['factor'] * (2 if data_source is None else 1)\n"
    )
    path = path.rename(tmp_path / "verl_extra.py")
    function = resolve(f"{path}:score_with_extra")
    columns = {"answer": ["", "", ""]}
    assert np.isnan(score(function, columns=columns).values).all()
    columns["extra_info"] = [{"factor": 2}, {"factor": 3}, {"factor": 0.5}]
    rewards = Rewards([function])
    assert rewards.names == ["score_with_extra"]
    assert rewards.score(PROMPTS, TEXTS, IDS, columns).values[:, 0].tolist() == [4.0, 6.0, 1.0]


def test_environments_come_after_the_functions_and_their_weights():
    rewards = load_rewards(RewardsConfig(funcs=["gsm8k_reward"], weights=[0.5]), environment_classes=("Maze", "Shop"))
    assert rewards.names == ["gsm8k_reward", "Maze", "Shop"] and rewards.weights.tolist() == [0.5, 1.0, 1.0]


def test_functions_of_one_name_are_numbered():
    functions = [lambda completions, n=n, **columns: [n] * len(completions) for n in range(5)]
    rewards = load_rewards(RewardsConfig(funcs=["f", "g", "f", "g", "f"]), functions)
    assert rewards.names == ["f", "g", "f_2", "g_2", "f_3"]
    assert numbered(["f", "f_2", "f", "f"]) == ["f", "f_2", "f_3", "f_4"]
    assert numbered(["f", "f", "f_2"]) == ["f", "f_3", "f_2"]


def test_rows_of_several_files_have_their_own_answer_column():
    """A row has None in the columns that only others of its generation have."""
    columns = {"solution": [None, "4", None], "answer": ["3", None, None]}
    assert functions.gsm8k_reward(["#### 3", "#### 4", "#### 5"], **columns) == [1.0, 1.0, 0.0]
    assert functions.reference_answers(columns) == ["3", "4", None]


def test_a_missing_answer_names_the_columns_of_the_data():
    columns = {"log_metric": print, "topic": ["x"], "prompts": ["p"], "difficulty": [1], "trainer_state": None}
    with pytest.raises(UserError, match=r"^needs a column .*; the data has: topic, difficulty$"):
        functions.reference_answers(columns)
    with pytest.raises(UserError, match="; the data has: none$"):
        functions.reference_answers({"completion_ids": [[1]], "log_extra": print})
    assert functions.reference_answers({"answer": ["1"], "solution": ["2"]}) == ["2"]
    assert functions.reference_answers({"final_answer": ["4"], "ground_truth": ["3"], "answer": ["1"]}) == ["1"]
    assert functions.reference_answers({"final_answer": ["4"], "ground_truth": ["3"]}) == ["3"]


def test_accuracy_reward():
    pytest.importorskip("math_verify")
    texts = [r"so \boxed{\frac{1}{3}}", [{"role": "assistant", "content": r"\boxed{0.5}"}], "no answer", "$x$"]
    gold = [r"\frac{1}{3}", "1/3", "18", ""]
    assert functions.accuracy_reward(texts, solution=gold) == [1.0, 0.0, 0.0, None]
    assert functions.accuracy_reward([r"\boxed{72}"], answer=["48+24=72\n#### 72"]) == [1.0]
    # A box before another answer, units left out, no answer without an anchor; of several the last, readable or not.
    texts = [r"\boxed{1}, so the final answer is $2$", r"\boxed{3 \text{ cm}}", "$2$", "the final answer is $2$"]
    assert functions.accuracy_reward(texts, solution=["1", "3", "2", "2"]) == [1.0, 1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        functions.accuracy_reward(texts, solution=["1", "3", "2"])
    with pytest.raises(ValueError, match="shorter"):
        functions.gsm8k_reward(texts, solution=["1", "3", "2"])
    changed = r"the final answer is $2$. No: the final answer is $\frac$"
    assert functions.accuracy_reward([changed], solution=["2"]) == [0.0]
    with pytest.raises(RewardError, match="reward accuracy_reward: needs a column solution, .*; the data has: topic"):
        score(functions.accuracy_reward, columns={"topic": ["", "", ""]})


def test_accuracy_reward_gives_each_answer_two_seconds(monkeypatch):
    pytest.importorskip("math_verify")
    limits = []
    monkeypatch.setattr(functions, "time_limit", lambda seconds: limits.append(seconds) or contextlib.nullcontext())
    assert functions.accuracy_reward([r"\boxed{1}", r"\boxed{2}"], solution=["1", "1"]) == [1.0, 0.0]
    assert limits == [2.0, 2.0]


def test_accuracy_reward_survives_an_expression_that_takes_for_ever(monkeypatch):
    math_verify = pytest.importorskip("math_verify")
    monkeypatch.setattr(functions, "SECONDS_PER_ANSWER", 0.2)
    monkeypatch.setattr(math_verify, "verify", lambda *args, **kwargs: time.sleep(60))
    assert score(functions.accuracy_reward, columns={"solution": ["1", "2", "3"]}).values[:, 0].tolist() == [0, 0, 0]


def test_format_and_gsm8k():
    texts = ["<think>a\nb</think> c", "x<think>a</think>", "<think>a<think>b</think>", "<think>a", "<think></think>"]
    assert functions.think_format_reward(texts) == [1.0, 0.0, 0.0, 0.0, 1.0]
    texts = ["work\n#### 1,234", "#### 1234.0 done", "1234", "#### -3", "#### 1234."]
    gold = ["so\n#### 1234", "1,234", "#### 1234", "#### 3", "#### 1,234"]
    assert functions.gsm8k_reward(texts, answer=gold) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert functions.gsm8k_reward(["#### -3", "#### 3"], answer=["#### -3", "-3"]) == [1.0, 0.0]
    # What is no number is compared as text.
    assert functions.gsm8k_reward(["#### 1.2.3", "#### 1.2.3", "#### 5"], answer=["1.2.3", "1.2", "five"]) == [
        1.0,
        0.0,
        0.0,
    ]


def test_a_full_stop_after_gsm8ks_number_is_no_part_of_it():
    answers = ["#### 1.5.", "#### 1,000.", "#### 7.5"]
    assert functions.gsm8k_reward(answers, answer=["#### 1.5", "1000", "#### 7.5."]) == [1.0, 1.0, 1.0]


def test_length_rewards():
    overlong = resolve("get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)")
    assert overlong([[1] * n for n in (80, 90, 100, 101)]) == [0.0, -0.5, -1.0, -1.0]
    assert overlong.__name__ == "soft_overlong_punishment_reward"
    # All of the length may be punished.
    assert resolve("soft_overlong_punishment(100, 100)")([[1] * n for n in (0, 50, 100)]) == [0.0, -0.5, -1.0]
    repetition = resolve("repetition_penalty_reward(ngram_size=2)")
    assert repetition([[1, 2, 3, 4], [5, 5, 5, 5, 5], [1]]) == [0.0, -0.75, 0.0]
    assert resolve("repetition_penalty_reward")([[1, 1, 1, 1]]) == [-0.5]
    assert resolve("repetition_penalty_reward(max_penalty=0)")([[1, 1, 1, 1]]) == [0.0]


def test_cosine_scaled_reward():
    pytest.importorskip("math_verify")
    cosine = resolve("cosine_scaled_reward(max_len=100)")
    texts = [r"\boxed{1}", r"\boxed{2}", r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"]
    lengths = [50, 50, 0, 0, 300]
    values = cosine(texts, [[1] * n for n in lengths], solution=["1"] * 5)
    np.testing.assert_allclose(values, [0.75, -0.75, 1.0, -1.0, 0.5], rtol=0, atol=1e-12)
    # A reference that cannot be parsed has no value.
    assert cosine([r"\boxed{1}"] * 2, [[1], [1] * 100], solution=["", "1"]) == [None, 0.5]


def test_texts_of_episodes_are_those_of_the_last_turn():
    """The first turn of an episode has the call of a tool, and no answer."""
    ask = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    result, answer = {"role": "tool", "name": "f", "content": "7"}, {"role": "assistant", "content": "#### 7"}
    completions = ["#### 7", [answer], [ask, result, answer], [answer, result, ask | {"content": None}], []]
    assert functions.texts_of(completions) == ["#### 7", "#### 7", "#### 7", "", ""]
    values = functions.gsm8k_reward(completions, answer=["7"] * 5)
    assert values[:3] == [1.0] * 3 and values[3:] == [0.0] * 2
