"""Rewards in worker processes: what one completion does costs no other, and generation does not wait."""

import dataclasses
import datetime
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rlnumba.config import EngineConfig, RewardsConfig
from rlnumba.rewards import RewardError, Rewards, load_rewards, workers
from rlnumba.rewards.workers import Answer, pack_answers, unpack_answers
from rlnumba.runtime import device
from rlnumba.sampling.pipeline import Pipeline
from rlnumba.trainers.grpo import run_grpo
from tests.trainers.runs import grpo_run, metrics_of
from tests.trainers.test_resume import start

REWARDS = """
import asyncio, os, re, signal, time

calls = 0

class Unprintable:
    def __str__(self):
        raise ZeroDivisionError("not\\ntoday")

def pid(completions, **columns):
    return [float(os.getpid())] * len(completions)

def length(completions, **columns):
    return [len(text) for text in completions]

def does_it(completions, log_extra, log_metric, **columns):
    log_extra("size", [len(completions)] * len(completions))
    log_metric("calls", len(completions))
    for text in completions:
        if text == "hang":
            time.sleep(60)
        elif text == "hang in C":
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif text == "exit":
            os._exit(7)
        elif text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif text == "nap":
            time.sleep(0.5)
        elif text == "raise":
            raise ValueError(text)
        elif text == "unprintable":
            log_extra("odd", [Unprintable()] * len(completions))
    return length(completions)

async def judge(completions, **columns):
    async def ask(text):
        await asyncio.sleep(60 if text == "hang" else 0.5)
        if text == "exit":
            os._exit(7)
        if text == "block":
            time.sleep(60)
        if text == "leave":
            raise SystemExit(3)
        if text == "cancel":
            raise asyncio.CancelledError
        return float(len(text))
    return await asyncio.gather(*map(ask, completions))

async def pid_of_async(completions, **columns):
    return pid(completions)

def slow(completions, **columns):
    time.sleep(0.3 * len(completions))
    return length(completions)

async def slow_judge(completions, **columns):
    await asyncio.sleep(0.3 * len(completions))
    return length(completions)

def counts(completions, **columns):
    global calls
    calls += 1
    return [float(calls)] * len(completions)
"""


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    made = []

    def rewards(*names, **settings):
        funcs = [f"{tmp_path / 'mine.py'}:{name}" for name in names]
        made.append(load_rewards(RewardsConfig(funcs=funcs, **{"timeout": 1.0} | settings)))
        return made[-1]

    yield rewards
    for each in made:
        each._workers.close()


def submit(rewards, texts):
    return rewards.submit(["p"] * len(texts), texts, [[1]] * len(texts), {})


def test_functions_run_in_processes_that_are_kept(rewards):
    made = rewards("pid", "counts")
    first = made.collect([submit(made, ["a"])]).values
    second = made.collect([submit(made, ["a", "b"])]).values
    assert first[0, 0] != os.getpid() and second[1, 0] == second[0, 0]
    alive = subprocess.run(["ps", "-o", "ppid=", "-p", str(int(first[0, 0]))], capture_output=True, text=True)
    assert int(alive.stdout) == os.getpid()
    # A module's state belongs to a process, of which there may be several.
    assert second[0, 1] in (1, 2)
    pids = {int(values[0, 0]) for values in (first, second)}
    made._workers.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}/cwd") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}/cwd") for pid in pids)


def test_calls_do_not_wait_for_a_process_that_starts(rewards, monkeypatch):
    made = rewards("length")
    made.start()
    started, begin = made._workers._start, time.monotonic()
    while not made._workers._processes and time.monotonic() < begin + 30:
        time.sleep(0.01)

    def slowly():
        time.sleep(20)
        return started()

    monkeypatch.setattr(made._workers, "_start", slowly)
    begin = time.monotonic()
    groups = [submit(made, ["a" * size]) for size in range(1, 5)]
    assert made.collect(groups).values[:, 0].tolist() == [1, 2, 3, 4]
    assert time.monotonic() - begin < 10


def test_results_are_in_the_order_of_the_groups(rewards):
    made = rewards("slow", "does_it", "judge")
    groups = [["aaaa"] * 3, ["b"], ["cc", "ccc"], ["d" * 9]]
    scores = made.collect([submit(made, texts) for texts in groups])
    expected = [len(text) for texts in groups for text in texts]
    np.testing.assert_array_equal(scores.values, np.array([expected] * 3).T)
    assert scores.extra == {"size": [3, 3, 3, 1, 2, 2, 1]} and scores.metrics == {"calls": np.mean([3, 1, 2, 1])}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("hang", r"reward does_it did not return within 0.5 s a completion \(rewards.timeout\)"),
        ("hang in C", r"reward does_it did not return within 0.5 s a completion \(rewards.timeout\)"),
        ("exit", "reward does_it: its worker process ended with exit code 7"),
        ("kill", "reward does_it: its worker process was ended by SIGKILL"),
        ("raise", r"reward does_it raised ValueError: raise \(.*mine.py:\d+\)"),
        ("unprintable", "reward does_it: what it logs cannot be written: ZeroDivisionError: not today$"),
    ],
)
def test_what_one_completion_causes_costs_no_other(rewards, bad, said):
    made = rewards("does_it", "length", reward_errors="skip", timeout=0.5)
    groups = [["aa", "aaa"], ["b", bad, "bb"], ["c"]]
    scores = made.collect([submit(made, texts) for texts in groups])
    failed = [False, False, False, True, False, False]
    if bad == "unprintable":
        failed = [False, False, True, True, True, False]  # the call has ended, and its answer is wrong as a whole
    lengths = np.array([2, 3, 1, len(bad), 2, 1], float)
    np.testing.assert_array_equal(scores.values[:, 1], lengths)
    np.testing.assert_array_equal(scores.values[:, 0], np.where(failed, np.nan, lengths))
    assert scores.errors == {"does_it": sum(failed)}
    with pytest.raises(RewardError, match=said):
        strict = rewards("does_it", timeout=0.5)
        strict.collect([submit(strict, [bad])])
    # The worker was replaced.
    assert made.collect([submit(made, ["again"])]).values.tolist() == [[5, 5]]


def test_there_is_a_worker_a_core_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert workers.num_workers() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert workers.num_workers() == workers.MOST_WORKERS
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers.num_workers() == 1


@pytest.mark.parametrize(("bad", "sizes"), [("raise", [1, 5]), ("exit", [1, 5, 1, 1, 1, 1, 1])])
def test_short_calls_are_sent_together(rewards, monkeypatch, bad, sizes):
    monkeypatch.setattr(workers, "num_workers", lambda: 1)
    monkeypatch.setattr(workers, "MESSAGE_S", 1e3)
    made, sent, send = rewards("does_it", reward_errors="skip"), [], workers.WorkerProcess._send

    def counted(process, calls):
        sent.append(len(calls))
        return send(process, calls)

    monkeypatch.setattr(workers.WorkerProcess, "_send", counted)
    # The others arrive while the process makes the first call.
    groups = [submit(made, ["nap"])]
    while not sent:
        time.sleep(0.001)
    groups += [submit(made, texts) for texts in (["a"], ["bb", "cc"], [bad], ["dddd"], ["e"])]
    np.testing.assert_array_equal(made.collect(groups).values[:, 0], [3, 1, 2, 2, np.nan, 4, 1])
    assert sent == sizes


@pytest.mark.parametrize("bad", ["leave", "cancel"])
def test_what_ends_a_task_ends_no_loop(rewards, bad):
    """No call waits for its time limit, nor has the process another one after it."""
    made = rewards("judge", "pid_of_async", timeout=30.0, reward_errors="skip")
    (before,) = made.collect([submit(made, ["a"])]).values[:, 1]
    started = time.monotonic()
    scores = made.collect([submit(made, ["aa", bad]), submit(made, ["b"])])
    np.testing.assert_array_equal(scores.values, [[2, before], [np.nan, before], [1, before]])
    assert time.monotonic() - started < 20 and scores.errors == {"judge": 1}


@pytest.mark.parametrize("bad", ["hang", "exit", "block"])
def test_async_functions(rewards, bad):
    """All groups wait at the same time; a crash of their process, or of its loop, is that of one completion."""
    made = rewards("judge", timeout=1.0, reward_errors="skip")
    made.collect([submit(made, ["a"])])
    started = time.monotonic()
    scores = made.collect([submit(made, ["a" * n] * 2) for n in range(30)])
    assert time.monotonic() - started < 5 and scores.values[:, 0].tolist() == [n for n in range(30) for _ in range(2)]
    scores = made.collect([submit(made, ["aa", bad, "a"]), submit(made, ["b"])])
    assert np.isnan(scores.values[1, 0]) and scores.values[[0, 2], 0].tolist() == [2, 1]
    assert made.collect([submit(made, ["abc"])]).values.tolist() == [[3]]


def test_the_timeout_is_for_one_completion(rewards, monkeypatch):
    """Four completions of 0.3 seconds in one call take longer than the limit of one, and are no error."""
    monkeypatch.setattr(workers, "GRACE_S", 0.1)
    made = rewards("slow", "slow_judge", timeout=0.5)
    assert made.collect([submit(made, ["a"] * 4)]).values.tolist() == [[1, 1]] * 4


def test_a_worker_that_was_killed_while_idle_is_replaced(rewards):
    made = rewards("pid")
    pid = int(made.collect([submit(made, ["a"])]).values[0, 0])
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert made.collect([submit(made, ["a"])]).values[0, 0] not in (pid, os.getpid())


@pytest.mark.parametrize("what", ["pipe", "process", "thread", "reader"])
def test_a_worker_that_cannot_be_started_is_an_error_of_its_calls(rewards, monkeypatch, what):
    """Not a wait without end; when one can be started again, it is."""
    reason = "Too many open files" if what in ("pipe", "process") else "can't start new thread"
    error = OSError(errno.EMFILE, reason) if what in ("pipe", "process") else RuntimeError(reason)
    started = threading.Thread.start

    def fails(*arguments, **keywords):
        raise error

    def starts(thread):
        is_reader = getattr(thread._target, "__name__", "") == "_read"
        return fails() if is_reader == (what == "reader") else started(thread)

    monkeypatch.setattr(workers, "num_workers", lambda: 1)
    made = rewards("length", "judge", reward_errors="skip")
    with monkeypatch.context() as patch:
        if what == "pipe":
            patch.setattr(workers, "Pipe", fails)
        elif what == "process":
            patch.setattr(workers.subprocess, "Popen", fails)
        else:
            patch.setattr(threading.Thread, "start", starts)
        made.start()
        pending = submit(made, ["a", "b"])
        answers = [pending.calls[k].result(timeout=60).error for k in range(2)]
        said = [f"reward {name}: its worker process cannot be started: {reason}" for name in ("length", "judge")]
        assert answers == said
        scores = made.collect([pending])
        assert np.isnan(scores.values).all() and scores.errors == {"length": 2, "judge": 2}
    if what == "process":
        assert made.collect([submit(made, ["aa"])]).values.tolist() == [[2, 2]]


def test_calls_go_to_the_processes_that_could_be_started(rewards, monkeypatch):
    made, popen, first = rewards("slow"), subprocess.Popen, threading.Semaphore(1)

    def once(*arguments, **keywords):
        if not first.acquire(blocking=False):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return popen(*arguments, **keywords)

    monkeypatch.setattr(workers, "num_workers", lambda: 3)
    monkeypatch.setattr(workers.subprocess, "Popen", once)
    assert made.collect([submit(made, ["a"]) for _ in range(4)]).values.tolist() == [[1]] * 4
    assert made._workers._threads == 1


FORGED = """
import glob, os, pickle, socket
from multiprocessing.connection import Connection

class Code:
    def __reduce__(self):
        return os.mkdir, ({folder!r},)

def forges(completions, **columns):
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{{name}}") and os.readlink(f"/proc/self/fd/{{name}}").startswith("socket:"):
            Connection(os.dup(int(name))).send_bytes(eval(completions[0]))
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    "message", ["pickle.dumps(Code())", "b'[1, [[[1e5, 2.0], null, false, {}, {}]]]'", "b'[' * 10**5"]
)
def test_what_a_worker_sends_is_no_more_than_an_answer(rewards, tmp_path, message):
    """Code that a reward runs may write to its process's connection; the trainer neither runs nor takes it."""
    (tmp_path / "forged.py").write_text(FORGED.format(folder=str(tmp_path / "made")))
    made = load_rewards(RewardsConfig(funcs=[f"{tmp_path}/forged.py:forges"], timeout=5.0))
    with pytest.raises(RewardError, match="^reward forges: its worker process sent something else than an answer$"):
        made.collect([submit(made, [message])])
    assert not (tmp_path / "made").exists()
    made._workers.close()


def test_answers_are_sent_as_json():
    logged = {"odd": [np.float32(0.5), {"a": (1, float("inf"))}, None], "when": [datetime.date(2024, 1, 1)] * 3}
    answers = [
        Answer(np.array([0.1, np.nan, -1e-300]), None, False, logged, {"m": [1.0, float("nan")]}),
        Answer(None, "why", True),
    ]
    number, (first, second) = unpack_answers(pack_answers(7, answers), {7: [3, 1]})
    assert number == 7 and second == Answer(None, "why", True)
    np.testing.assert_array_equal(first.values, answers[0].values)
    assert first.extra == {"odd": [0.5, {"a": [1, None]}, None], "when": ["2024-01-01"] * 3}
    assert first.metrics["m"][0] == 1.0 and np.isnan(first.metrics["m"][1])


@pytest.mark.parametrize(
    "answer",
    [
        [None, None, False, {}, {}],
        [[1.0], "why", False, {}, {}],
        [[], None, False, {}, {}],
        [[1], None, False, {}, {}],
        [[1.0, 2.0], None, False, {}, {}],
        [[None], None, False, {}, {}],
        [1.0, None, False, {}, {}],
        [[1.0], None, 0, {}, {}],
        [[1.0], None, False, [], {}],
        [[1.0], None, False, {"a": [1, 2]}, {}],
        [[1.0], None, False, {"a": "b"}, {}],
        [[1.0], None, False, {}, {"a": ["1"]}],
        [[1.0], None, False, {}, {"a": 1.0}],
        [[1.0], None, False, {}],
        None,
    ],
)
def test_answers_of_other_types_are_refused(answer):
    good = [[1.0], None, False, {}, {}]
    assert unpack_answers(json.dumps([1, [good]]), {1: [1]})[1][0].values.tolist() == [1.0]
    for message in ([1, [answer]], [2, [good]], [[], [good]], [1, [good, good]], [1], good, 1):
        with pytest.raises(ValueError):
            unpack_answers(json.dumps(message), {1: [1]})


def test_functions_that_no_process_can_import_are_called_here(rewards):
    seen = []

    def mine(completions, **columns):
        seen.append((os.getpid(), threading.current_thread() is threading.main_thread()))
        return [1.0] * len(completions)

    made = Rewards([mine, subprocess.run])
    assert made.specs == [None, "subprocess:run"]
    made = Rewards([mine])
    pending = submit(made, ["a"])
    assert not seen
    made.collect([pending])
    assert seen == [(os.getpid(), True)]


@pytest.mark.skipif(device.name() != "cpu", reason="processes of its own")
def test_a_killed_worker_ends_a_run_with_a_checkpoint(tmp_path):
    """Or costs a completion, where errors are skipped; no worker outlives the run."""
    run = grpo_run(tmp_path / "run", max_steps=4, rewards={"timeout": 5.0})
    file = tmp_path / "rewards_for_tests.py"
    crash = "    if trainer_state.global_step == 2 and int(answer[0]) % 2:\n        import os; os._exit(9)\n"
    head = "def digits(completions, answer, trainer_state, **columns):\n" + crash
    file.write_text(head + "    return [len(text) for text in completions]\n")
    process = start("grpo", run)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    said = r"rlnumba: \S+.jsonl:\d+: reward digits: its worker process ended with exit code 9"
    assert re.fullmatch(said, errors.splitlines()[-1])
    assert [row["step"] for row in metrics_of(run)] == [1, 2]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    process = start("grpo", run, "--resume", "--rewards.reward_errors", "skip")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    rows = metrics_of(run)
    # Each completion of the odd prompts was called again alone.
    assert len(rows) == 4 and rows[2]["reward_errors/digits"] % 4 == 0 and rows[2]["reward_errors/digits"] > 0
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in left.replace(sys.executable, "")


@pytest.mark.skipif(device.name() != "cpu", reason="processes of its own")
def test_rewards_are_computed_while_generation_goes_on(tmp_path, monkeypatch):
    """The engine has room for one group at a time, and goes on after the first once that one is scored."""
    run = grpo_run(tmp_path / "run", max_steps=2, max_completion_length=20, rewards={"timeout": 60.0})
    run = dataclasses.replace(run, engine=EngineConfig(max_num_seqs=4))
    seen, ended, finished = tmp_path / "seen", [], Pipeline.finished
    (tmp_path / "rewards_for_tests.py").write_text(
        f"def digits(completions, **columns):\n    with open({str(seen)!r}, 'a') as file:\n"
        "        print('called', file=file)\n    return [len(text) for text in completions]\n"
    )
    seen.touch()

    def held_up(pipeline, request):
        finished(pipeline, request)
        ended.append(request)
        until = time.monotonic() + 60.0
        while len(seen.read_text().splitlines()) < len(ended):
            assert time.monotonic() < until, "a group is not scored before the generation has ended"
            time.sleep(0.01)

    monkeypatch.setattr(Pipeline, "finished", held_up)
    run_grpo(run)
    assert len(ended) == len(seen.read_text().splitlines()) == 2 * 4
