"""Starting ranks, and ending them: by failures, by signals, and with the process that started them."""

import contextlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from rlnumba.errors import RankError
from rlnumba.parallel import launch, ray_launch
from rlnumba.parallel.launch import launch_groups, stop_requested
from rlnumba.runtime import signals
from tests.parallel import ranks

ROOT = pathlib.Path(__file__).parents[2]


def ended(pid):
    """Whether a process has ended, also one whose parent has not asked for its exit code yet."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children_of(parent):
    """The processes that a process has started: list of ids."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    ("kind", "message", "code"),
    [
        ("user", "rank 1: train.seed: must be an integer", 2),
        ("shared", "reward bad raised KeyError: 'missing'", 1),
        ("no file", "rank 1: /no/such/file: No such file or directory", 1),
        ("bug", "rank 1: internal error: KeyError: 'missing'", 1),
        ("exit", "rank 1: ended with exit code 7 (rank 0: barrier 0: rank 1 has ended)", 1),
        ("system exit", "rank 1: internal error: SystemExit: 3", 1),
    ],
)
def test_the_first_failure_is_raised(kind, message, code):
    with pytest.raises(RankError) as error:
        launch(ranks.fail, 3, 1, kind)
    assert str(error.value).replace("rank 2: barrier", "rank 0: barrier") == message and error.value.exit_code == code
    notes = "".join(getattr(error.value, "__notes__", []))
    assert ("raise KeyError" in notes) == (kind == "bug")
    # As an actor of Ray sends it to the node of the command.
    again = pickle.loads(pickle.dumps(ray_launch.Lost.of(error.value))).error()
    assert str(again) == str(error.value) and type(again) is type(error.value)


@pytest.mark.usefixtures("quick_starts")
def test_groups_of_ranks_have_communicators_of_their_own():
    expected = [("first", [0, 1]), ("second", [0, 1]), ("third", [0, 1])]
    assert launch_groups(ranks.members_of_group, 2, [(name, None) for name, _ in expected]) == expected


@pytest.mark.usefixtures("quick_starts")
def test_a_failure_in_one_group_ends_all():
    """The first group would never end by itself."""
    with pytest.raises(RankError, match="rank 1: train.seed: must be an integer") as error:
        launch_groups(ranks.members_of_group, 2, [("first", "stall"), ("second", "fail")])
    assert error.value.exit_code == 2


def test_a_function_that_cannot_be_found_is_a_failure(tmp_path, monkeypatch):
    (tmp_path / "vanishing.py").write_text("def function(communicator): pass")
    monkeypatch.syspath_prepend(tmp_path)
    import vanishing

    (tmp_path / "vanishing.py").unlink()
    with pytest.raises(RankError, match="rank [01]: internal error: ModuleNotFoundError"):
        launch(vanishing.function, 2)


def test_output_has_the_rank(capfd):
    assert launch(ranks.shout, 3) == [0, 1, 2]
    lines = capfd.readouterr().out.splitlines()
    for rank in (1, 2):
        expected = [f"[{rank}] line of {rank}"] * 2 + [f"[{rank}] end of {rank}"]
        assert [line for line in lines if line.startswith(f"[{rank}]")] == expected
    assert lines.count("line of 0") == 2


START = """
import pathlib, sys
import rlnumba.parallel.launch
from rlnumba.parallel import launch as start
from tests.parallel import ranks
launch = sys.modules["rlnumba.parallel.launch"]
{changes}
if __name__ == "__main__":
    start(getattr(ranks, sys.argv[1]), 3, pathlib.Path(sys.argv[2]))
    print("returned")
"""


def start(function, folder, changes=""):
    """(process that has started 3 ranks, their process ids). changes: Python, of the module rlnumba.parallel.launch."""
    (folder / "run.py").write_text(START.format(changes=changes))
    command = [sys.executable, str(folder / "run.py"), function, str(folder)]
    # A shell's background jobs, and so the tests in one, ignore SIGINT.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    files = [folder / f"{rank}.pid" for rank in range(3)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return process, [int(file.read_text()) for file in files]


def test_ranks_end_with_a_killed_parent(tmp_path):
    process, pids = start("wait_for_signal", tmp_path)
    process.kill()
    process.wait()
    wait_until(lambda: all(map(ended, pids)))
    process.stdout.close(), process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_ranks(tmp_path, number):
    process, pids = start("wait_for_signal", tmp_path)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == -number
    assert all(map(ended, pids))


def test_ranks_that_hang_after_a_signal_are_ended(tmp_path):
    """So many seconds after the first of them has ended, here a half; by the signal, though a rank has failed, too."""
    process, pids = start("one_obeys_signals", tmp_path, "launch.ENDING_S = 0.5")
    assert all(os.getsid(pid) == pid for pid in pids), "a terminal's signals reach the first process alone"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    wait_until(lambda: all(map(ended, pids)))


def test_ranks_that_hold_signals_stop_after_the_same_step(tmp_path):
    process, pids = start("stop_together", tmp_path)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM, errors.decode()
    assert len({(tmp_path / f"{rank}.steps").read_text() for rank in range(3)}) == 1
    assert all(map(ended, pids))


def test_a_signal_of_any_rank_stops_all():
    for received in ([True, False], [False, True], [False, False]):
        communicator = SimpleNamespace(objects=lambda own, received=received: received)
        assert stop_requested(communicator) is any(received)


def test_a_second_signal_ends_all(tmp_path):
    """The ranks hold signals and never look at them."""
    process, pids = start("ignore_signals", tmp_path)
    process.send_signal(signal.SIGTERM)
    # A second one that arrives before the first is handled is none.
    wait_until(lambda: all((tmp_path / f"{rank}.signal").exists() for rank in range(3)))
    # For so long it counts as the same one.
    time.sleep(2 * signals.REPEAT_S)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: all(map(ended, pids)))


def test_ranks_of_a_node_that_has_ended_are_lost(monkeypatch):
    def call(actor, name, *arguments, timeout_s):
        raise ray_launch.ActorEnded("killed", True)

    monkeypatch.setattr(ray_launch, "call", call)
    node = ray_launch.OtherNode(None, [SimpleNamespace(rank=2), SimpleNamespace(rank=3)])
    assert node.wait(60)
    with pytest.raises(RankError, match="^rank 2: the node of ranks 2 to 3 has ended$") as error:
        node.check()
    assert error.value.is_lost and error.value.exit_code == 1
