"""A headless Chromium for tests, driven through its DevTools pipe, for which no package is needed.

RLNUMBA_BROWSER names the program; else one of PATH. Without any, tests are skipped.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

import pytest

PROGRAMS = (
    *("chromium", "chromium-browser", "chromium-headless-shell", "chrome-headless-shell"),
    *("google-chrome", "google-chrome-stable", "chrome"),
)


def browser_program():
    """The path of a Chromium; skips the test that asks where there is none."""
    given = os.environ.get("RLNUMBA_BROWSER")
    found = given or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip(f"no Chromium: RLNUMBA_BROWSER is not set, and PATH has none of {', '.join(PROGRAMS)}")
    return found


class Browser:
    """A page of a browser of its own; a context manager. errors: what its console and its scripts reported."""

    def __init__(self, folder, width=1200, height=900):
        self.errors, self._number, self._buffer = [], 0, b""
        read_by_browser, self._out = os.pipe()
        self._in, written_by_browser = os.pipe()

        def place_pipes():
            # Above both numbers first, so that neither replaces the other's.
            ends = os.dup(read_by_browser), os.dup(written_by_browser)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        # The pipe's numbers are the browser's: it runs in a process of its own, which has them at 3 and 4.
        flags = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
            *("--hide-scrollbars", "--disable-dev-shm-usage", f"--user-data-dir={folder}"),
            f"--window-size={width},{height}",
        )
        self._process = subprocess.Popen(
            [browser_program(), *flags], preexec_fn=place_pipes, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_by_browser)
        os.close(written_by_browser)
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        with contextlib.suppress(BrokenPipeError):
            os.write(self._out, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def send(self, method, **params):
        """The result of a DevTools method: dict."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive(60)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]

    def _receive(self, seconds):
        """The next message; what it reports as an error is kept."""
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            block = os.read(self._in, 1 << 20)
            assert block, "the browser has ended"
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(line)
        params = found.get("params", {})
        if found.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        if found.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        if found.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        return found

    def resize(self, width, height):
        """The size of the page, in pixels."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **sizes)

    def dark(self, is_dark):
        """What the system prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url):
        """Go to a page."""
        self.send("Page.navigate", url=url)

    def value(self, script):
        """The value of an expression of JavaScript, awaited."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script, seconds=20):
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (found := self.value(script)):
            assert time.monotonic() < end, f"not true after {seconds} s: {script}; {self.errors}"
            time.sleep(0.02)
        return found

    def move(self, x, y):
        """The pointer moves to a place."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path):
        """Write the page as a PNG."""
        found = self.send("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(found["data"]))
