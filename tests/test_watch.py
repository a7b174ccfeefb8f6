"""`rlnumba watch`: what it reads of run folders, its routes, its command, and the page in a browser."""

import base64
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest

from rlnumba import cli
from rlnumba.errors import ConfigError
from rlnumba.reporting.files import UNFINISHED, cut_back, note_unfinished
from rlnumba.serve.watch.metrics import MetricColumns
from rlnumba.serve.watch.run_view import Runs, RunView, find_runs, named
from rlnumba.serve.watch.step_lines import Span, StepLines
from tests.browser import Browser

HOSTILE = "<script>window.wasRun = 1</script><img src=x onerror='window.wasRun = 1'>"


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def run(tmp_path):
    """A run's folder with three steps of metrics, two with completions, and the tokens of one completion."""
    folder = tmp_path / "run"
    folder.mkdir()
    metrics = [{"step": s, "loss": 1.0 / s, "reward": s / 4, "kl": None, "memory/kv": 1 << 30} for s in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text(lines_of(metrics) + '{"step": 4, "lo')
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "add", "content": "two " + HOSTILE},
        {"role": "assistant", "content": "It is 2."},
    ]
    completions = [
        {"step": 1, "prompt": "a: ", "completion": HOSTILE, "finish_reason": "stop", "reward": 1.0, "advantage": 0.5},
        {"step": 1, "prompt": "a: ", "completion": "c", "finish_reason": "length", "reward": None, "advantage": -0.5},
        {"step": 3, "prompt": [{"role": "user", "content": "q"}], "completion": turns, "reward": 1.0, "advantage": 0.0},
    ]
    (folder / "completions.jsonl").write_text(lines_of(completions) + '{"step": 3, "prom')
    of_tokens = {"logprobs": [-0.5, -2.0], "entropy": [0.1, 1.0], "ratio": [1.0, 1.2], "advantage": [-0.5, -0.5]}
    token_row = {"step": 2, "completion_step": 1, "index": 1, "tokens": ["<b>", "c"], "mask": [1, 1], **of_tokens}
    (folder / "tokens.jsonl").write_text(lines_of([token_row]))
    (folder / "config.toml").write_text('# rlnumba 0.1.0\n# trainer grpo\n\nmodel = "m"\n')
    return folder


# The lines of steps.


def random_file(path, rng):
    """Write lines of steps that do not decrease, with blank and broken ones, and half a last one: rows by step."""
    rows, text, step = {}, [], 0
    for _ in range(rng.randrange(40)):
        step += rng.choice([0, 0, 0, 1, 1, 5])
        row = {"step": step, "text": "ü" * rng.choice([0, 3, 40, 0, 3, 40, 40, 70_000])}
        if rng.random() < 0.2:
            row = {"before": [1], **row}
        rows.setdefault(step, []).append(row)
        text.append(json.dumps(row, ensure_ascii=rng.random() < 0.5))
        text += rng.choices(["", "broken {", '{"no": "step"}', "[1]"], k=rng.random() < 0.2)
    ending = rng.choice(["", '{"step": 99999, "text"', "\n"])
    path.write_text("\n".join(text) + ("\n" if text else "") + ending, encoding="utf-8")
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_steps_are_found_in_any_file(tmp_path, seed):
    rng, path = random.Random(seed), tmp_path / "lines.jsonl"
    rows = random_file(path, rng)
    last = max(rows, default=0)
    with StepLines(path) as lines:
        for step in range(-1, last + 2):
            span = lines.of_steps(step, step)
            assert lines.rows(span) == rows.get(step, [])
            assert lines.rows(lines.of_steps(step, last)) == [row for s in rows if s >= step for row in rows[s]]
            assert lines.step_before(span.begin) == max((s for s in rows if s < step), default=None)
            assert lines.step_at(span.end) == min((s for s in rows if s > step), default=None)


def test_a_step_is_found_without_reading_the_file(tmp_path):
    path = tmp_path / "completions.jsonl"
    with open(path, "w") as file:
        for step in range(1, 5001):
            file.write(f'{{"step": {step}, "completion": "{"x" * 150}"}}\n' * 8)
    with StepLines(path) as lines:
        read, of_file = [], lines.file

        class Counting:
            """The file, with the number of bytes that are read."""

            def seek(self, *where):
                return of_file.seek(*where)

            def read(self, count):
                read.append(count)
                return of_file.read(count)

            def readline(self):
                line = of_file.readline()
                read.append(len(line))
                return line

        lines.file = Counting()
        span = lines.of_steps(3210, 3210)
        assert lines.count(span) == 8 and [row["step"] for row in lines.rows(span, 6, 32)] == [3210, 3210]
        assert lines.step_before(span.begin) == 3209 and lines.step_at(span.end) == 3211
        lines.file = of_file
    assert sum(read) < path.stat().st_size / 30


def test_lines_of_a_missing_file_and_a_growing_one(tmp_path):
    path = tmp_path / "lines.jsonl"
    with StepLines(path) as lines:
        assert lines.rows(lines.of_steps(0, 9)) == [] and lines.step_before(lines.end) is None
    path.write_text('{"step": 1}\n{"step": 2')
    with StepLines(path) as lines, open(path, "a") as file:
        file.write("}\n")
        file.flush()
        assert lines.of_steps(0, 9) == Span(0, 12)
    with StepLines(path) as lines:
        assert lines.rows(lines.of_steps(0, 9)) == [{"step": 1}, {"step": 2}]
        # A run that is resumed replaces its files: the answer stays one file's.
        cut_back(path, 1)
        assert lines.rows(lines.of_steps(0, 9)) == [{"step": 1}, {"step": 2}]


def test_metrics_of_a_running_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    columns = MetricColumns(path)
    columns.refresh()
    versions = [columns.version]
    assert columns.names() == [] and columns.curve("loss", 10) == {"steps": [], "values": [], "per_point": 1}

    def after(text, how="a"):
        with open(path, how) as file:
            file.write(text)
        columns.refresh()
        versions.append(columns.version)
        found = columns.curve("loss", 10)
        return found["steps"], found["values"]

    assert after('{"step": 1, "loss": 2.0}\n{"step": 2, "lo') == ([1], [2.0])
    assert after('ss": null}\n') == ([1, 2], [2.0, None])
    assert after('broken\n{"step": 3, "loss": 0.5, "name": "x", "is": true}\n') == ([1, 2, 3], [2.0, None, 0.5])
    assert columns.names() == ["loss"] and columns.last_step == 3 and columns.latest == {"loss": 0.5}
    cut_back(path, 1)
    assert after('{"step": 2, "loss": 7.0}\n') == ([1, 2], [2.0, 7.0]) and columns.last_step == 2
    # Another run in its place, of the same inode.
    assert after('{"step": 1, "loss": 9.5}\n{"step": 2, "loss": 1}\n{"step": 3, "loss": 2}\n', "w")[1] == [9.5, 1, 2]
    path.unlink()
    columns.refresh()
    assert columns.names() == [] and len({*versions, columns.version}) == len(versions) + 1
    unchanged = columns.version
    columns.refresh()
    assert columns.version == unchanged


def test_long_curves_are_means(tmp_path):
    values = [1.0, None, 3.0, 5.0, None, None, 8.0]
    (tmp_path / "metrics.jsonl").write_text(lines_of({"step": i + 1, "loss": v} for i, v in enumerate(values)))
    columns = MetricColumns(tmp_path / "metrics.jsonl")
    columns.refresh()
    assert columns.curve("loss", 4) == {"steps": [2, 4, 6, 7], "values": [1.0, 4.0, None, 8.0], "per_point": 2}


def test_folders_of_runs(tmp_path):
    for name in ("a/x", "b/x", "b/y"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    runs = find_runs([tmp_path / "a" / "x", tmp_path / "b", tmp_path / "b" / "y"])
    assert list(named(runs)) == ["a/x", "b/x", "b/y"]
    assert list(named(runs[1:])) == ["x", "y"]
    with pytest.raises(ConfigError, match="has no metrics.jsonl"):
        find_runs([tmp_path])
    # Later runs are found, and one that begins afresh stays, without what it has set aside.
    found = Runs([tmp_path / "b"])
    assert list(found.by_name) == ["x", "y"]
    aside, new = tmp_path / "b" / "x" / "earlier-1", tmp_path / "b" / "a"
    for folder in (aside, new):
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
    before = found.by_name["x"]
    (tmp_path / "b" / "x" / "metrics.jsonl").unlink()
    found.refresh()
    assert list(found.by_name) == ["x", "y", "a"] and found.by_name["x"] is before
    of_one = Runs([tmp_path / "b" / "y"])
    shutil.rmtree(tmp_path / "b" / "y")
    of_one.refresh()
    found.refresh()
    assert list(of_one.by_name) == ["y"] and list(found.by_name) == ["x", "a"]
    with pytest.raises(ConfigError, match="has no metrics.jsonl"):
        find_runs([tmp_path / "b" / "x"])


def test_state_of_a_run(run):
    view = RunView(run)
    assert view.state() == "stopped" and view.trainer() == "grpo"
    (run / "final").mkdir()
    assert view.state() == "finished" and view.described()["finished"] and view.described()["steps"] == 3
    note_unfinished(run)
    assert view.state() == "stopped" and not view.described()["finished"], "it was resumed after that end"
    (run / UNFINISHED).unlink()
    lock = run / "run.lock"
    lock.write_text(f"{os.getpid()}@{socket.gethostname()}\n")
    assert view.state() == "running" and not view.described()["finished"]
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for owner, state in ((f"{ended.stdout.strip()}@{socket.gethostname()}", "finished"), ("7@elsewhere", "running")):
        lock.write_text(owner)
        assert view.state() == state
    (run / "config.toml").write_text('model = "m"\n# trainer ppo\n')
    assert view.trainer() is None


# The server.


@pytest.fixture
def served(request):
    """serve(folders, api_key=None) -> (host, port) of a server in this process."""
    pytest.importorskip("starlette")
    uvicorn = pytest.importorskip("uvicorn")
    from rlnumba.serve.watch.app import create_app
    from rlnumba.serve.watch.listen import listening

    def serve(folders, api_key=None):
        listener = listening("127.0.0.1", 0)
        server = uvicorn.Server(
            uvicorn.Config(create_app(Runs(folders), api_key), log_level="warning", access_log=False)
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()

        def end():
            server.should_exit = True
            thread.join()

        request.addfinalizer(end)
        return listener.getsockname()[:2]

    return serve


def get(address, path, method="GET", **headers):
    """(status, headers, body) of a request; body: JSON's value where it is JSON."""
    connection = http.client.HTTPConnection(*address, timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    is_json = answer.headers.get("content-type") == "application/json"
    return answer.status, answer.headers, json.loads(body) if is_json else body.decode()


def test_answers(served, run):
    address = served([run])

    def ask(path):
        status, _, body = get(address, "/api/" + path)
        assert status == 200, body
        return body

    assert ask("runs") == [{"name": "run", "path": str(run), "trainer": "grpo", "steps": 3, "finished": False}]
    assert [row["step"] for row in ask("metrics?run=run&after=1")["rows"]] == [2, 3]
    assert ask("metrics?run=run")["rows"][0] == {
        "step": 1, "loss": 1.0, "reward": 0.25, "kl": None, "memory/kv": 1 << 30,
    }  # fmt: skip
    found = ask("completions?run=run&step=1")
    assert found["total"] == 2 and [row["completion"] for row in found["rows"]] == [HOSTILE, "c"]
    found = ask("completions?run=run&step=1&offset=1&limit=1")
    assert found["total"] == 2 and [row["completion"] for row in found["rows"]] == ["c"]
    assert ask("completions?run=run&step=2") == {"total": 0, "rows": []}
    around = {"first": 1, "last": 3, "at": 1, "before": None, "after": 3}
    assert ask("steps?run=run&step=2") == ask("steps?run=run&step=1") == ask("steps?run=run&step=0") == around
    assert ask("steps?run=run") == {"first": 1, "last": 3, "at": 3, "before": 1, "after": None}
    # Trained on at step 2, before the completions of step 3.
    assert [row["tokens"] for row in ask("tokens?run=run&step=1")["rows"]] == [["<b>", "c"]]
    assert ask("tokens?run=run&step=3") == {"rows": []}
    curves = ask("curves?run=run&names=loss,none&points=2")
    assert curves["curves"]["loss"] == {"steps": [2, 3], "values": [0.75, 1 / 3], "per_point": 2}
    assert curves["names"] == ["loss", "reward", "kl", "memory/kv"] and curves["latest"]["kl"] is None
    assert ask(f"curves?run=run&names=loss&seen={curves['version']}") == {
        "version": curves["version"], "state": "stopped", "steps": 3,
    }  # fmt: skip


def test_bad_requests(served, run):
    (run.parent / "secret.jsonl").write_text("{}")
    address = served([run])
    for path, status, message in (
        ("/api/metrics?run=no", 404, "run must be one of run"),
        ("/api/metrics", 404, "run must be one of run"),
        ("/api/metrics?run=../run", 404, "run must be one of run"),
        ("/api/completions?run=run", 400, "step must be an integer"),
        ("/api/completions?run=run&step=x", 400, "step must be an integer, got 'x'"),
        ("/api/completions?run=run&step=-1", 400, "step must be from 0 to"),
        ("/api/completions?run=run&step=1&limit=5000", 400, "limit must be from 0 to 1000, got 5000"),
        ("/api/completions?run=run&step=" + "9" * 5000, 400, "step must be an integer"),
        ("/api/nothing", 404, "Not Found"),
        ("/static/..%2Fapp.py", 404, "Not Found"),
        ("/static/../../secret.jsonl", 404, "Not Found"),
    ):
        found, _, body = get(address, path)
        assert found == status and message in body["error"], (path, body)
    assert get(address, "/api/runs", method="POST")[0] == 405
    # A page of another site whose name resolves to this machine.
    assert get(address, "/api/runs", Host="evil.example:80")[0] == 403
    assert get(address, "/", Host="evil.example")[0] == 403
    for host in ("localhost:9", "127.0.0.1", "[::1]:8001"):
        assert get(address, "/api/runs", Host=host)[0] == 200


def test_page_and_headers(served, run):
    address = served([run])
    status, headers, page = get(address, "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert headers["cache-control"] == "no-store" and "access-control-allow-origin" not in headers
    names = [part.split('"')[0] for part in page.split("/static/")[1:]]
    assert names
    for name in [*names, "chart.js", "completions.js", "page.js"]:
        status, headers, text = get(address, "/static/" + name)
        assert status == 200 and headers["x-content-type-options"] == "nosniff"
        # No other host is named, and no text becomes HTML.
        assert "//" not in text.replace("// ", "") and "innerHTML" not in text and "eval(" not in text
    assert "//" not in page


def test_key(served, run):
    address = served([run], "kéy")
    basic = {"Authorization": "Basic " + base64.b64encode("me:kéy".encode()).decode()}
    assert get(address, "/health")[0] == 200
    for path in ("/", "/api/runs", "/static/watch.js", "/api/metrics?run=run", "/nothing"):
        for headers in ({}, {"Authorization": "Bearer key"}, {"Authorization": "Basic ?"}, {"Authorization": "kéy"}):
            headers = {name: value.encode() for name, value in headers.items()}
            status, answered, _ = get(address, path, **headers)
            assert status == 401 and answered["www-authenticate"].startswith("Basic ")
        # With a key any host may be named.
        for headers in (basic, {"Authorization": "Bearer kéy".encode()}):
            assert get(address, path, Host="gpu.example", **headers)[0] == (404 if path == "/nothing" else 200)


# The command.


def test_mistakes_of_the_command(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("uvicorn")

    def fails(code, message, *arguments):
        assert cli.run(["watch", *map(str, arguments)]) == code
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error, error

    monkeypatch.delenv("RLNUMBA_API_KEY", raising=False)
    (tmp_path / "empty").mkdir()
    fails(2, f"{tmp_path / 'empty'} has no metrics.jsonl", tmp_path / "empty")
    fails(2, f"{tmp_path / 'no'}: no such folder", tmp_path / "no")
    fails(2, "has no metrics.jsonl", tmp_path / "empty", "--wait", "0.3")
    fails(2, "--host: 0.0.0.0 can be reached from other machines: set --api-key", run, "--host", "0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fails(1, "cannot listen there: Address already in use", run, "--port", taken.getsockname()[1])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "rlnumba.serve.watch.listen", raising=False)
    fails(2, "watch needs uvicorn: pip install rlnumba[serve]", run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_until_a_signal(run, tmp_path, number):
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "rlnumba", "watch", str(tmp_path / "later"), "--port", "0", "--wait", "30"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests that run as a background job ignore SIGINT, and so would the command.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    run.rename(tmp_path / "later")
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:")
    assert get(("127.0.0.1", int(url.rpartition(":")[2])), "/health")[0] == 200
    process.send_signal(number)
    out, error = process.communicate(timeout=20)
    assert (process.returncode, out, error) == (0, "", "")


# The page.


def test_page_in_a_browser(served, run, tmp_path):
    address = served([run])
    base = f"http://{address[0]}:{address[1]}"
    with Browser(tmp_path / "profile") as browser:
        ready = "document.documentElement?.dataset.ready === '{}'"
        browser.open(base)
        browser.wait_for(ready.format("curves"))
        titles = browser.value("[...document.querySelectorAll('.chart h2')].map((title) => title.textContent)")
        assert titles[:2] == ["reward0.75", "loss0.3333"]
        # A curve is drawn in its colour.
        blue = "[...document.querySelector('canvas').getContext('2d').getImageData(0, 0, 900, 190).data]"
        assert browser.wait_for(f"{blue}.filter((v, i, a) => i % 4 === 2 && v > 150 && a[i - 2] < 60).length > 50")
        # What is written meanwhile appears.
        with open(run / "metrics.jsonl", "a") as file:
            file.write('ss": 9.0}\n')
        browser.wait_for("document.querySelector('#charts').textContent.includes('loss9')")
        browser.open(base + "/#resources")
        browser.wait_for(ready.format("resources"))
        assert "kv1 GiB" in browser.value("document.querySelector('#shares').textContent")
        # Turns with a call and its result; hostile text is text.
        browser.open(base + "/#completions")
        browser.wait_for(ready.format("completions"))
        shown = browser.value("document.querySelector('#list').innerText")
        assert "add(a=1)" in shown and "two " + HOSTILE in shown and "It is 2." in shown
        # The step before, by its button; tokens have colours.
        browser.value("document.querySelector('#before').click()")
        browser.wait_for("document.querySelector('#list').innerText.includes('<script>')")
        browser.wait_for("document.querySelectorAll('.token').length === 2")
        tones = browser.value("[...document.querySelectorAll('.token')].map((token) => token.style.background)")
        assert len(set(tones)) == 2 and all("rgb" in tone for tone in tones)
        for width in (400, 1600):
            browser.resize(width, 900)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert browser.value("window.wasRun === undefined && document.querySelectorAll('#list img').length === 0")
        hosts = browser.value("performance.getEntriesByType('resource').map((each) => new URL(each.name).host)")
        assert set(hosts) == {base.removeprefix("http://")}
        assert not browser.errors


def test_page_with_a_key(served, run, tmp_path):
    host, port = served([run], "secret")
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"http://me:secret@{host}:{port}")
        browser.wait_for("document.querySelector('.chart h2')?.textContent === 'reward0.75'")
        assert not browser.errors


def test_a_million_completions_in_a_browser(served, run, tmp_path):
    with open(run / "completions.jsonl", "w") as file:
        for step in range(1, 5001):
            row = {"step": step, "prompt": "a: ", "completion": "b", "reward": 1.0, "advantage": 0.5}
            file.write(lines_of([row]) * 200)
    address = served([run])
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"http://{address[0]}:{address[1]}/#completions")
        browser.wait_for("document.querySelector('#summary')?.textContent.startsWith('Step 5000: 200 completions')", 2)
        assert browser.value("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 2000
        assert not browser.errors
