"""A headless Chromium, driven over the pipe of its debugging protocol: no port, no driver."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find():
    """The first one on PATH, or ''."""
    return next(filter(None, map(shutil.which, PROGRAMS)), "")


def _pipe():
    """Two ends that are neither 3 nor 4, which the browser's will be."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high


class Browser:
    """Use as a context manager.  `problems` are console errors, exceptions and policy violations;
    `requests` the addresses that a page asked for."""

    def __init__(self, directory, seconds=60.0):
        self.deadline = time.monotonic() + seconds
        self.problems, self.requests = [], []
        self._number, self._left, self._answers, self._loaded = 0, b"", {}, False
        to_read, self._to = _pipe()
        self._from, to_write = _pipe()
        command = [
            find(),
            "--headless",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-gpu",
            # Nothing leaves this machine: a proxy that does not exist, for every name.
            "--proxy-server=127.0.0.1:9",
            "--proxy-bypass-list=<-loopback>",
            f"--user-data-dir={directory}",
            "--window-size=1400,1000",
        ]
        if os.geteuid() == 0:
            command.append("--no-sandbox")
        actions = [
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, to_read, 3),
            (os.POSIX_SPAWN_DUP2, to_write, 4),
        ]
        # A session of its own: the browser is several processes.
        self._pid = os.posix_spawn(
            command[0], command, os.environ, file_actions=actions, setsid=True
        )
        os.close(to_read)
        os.close(to_write)

    def __enter__(self):
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        os.close(self._to)
        os.close(self._from)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def open(self, path):
        """Until the page has loaded."""
        self._loaded = False
        self.call("Page.navigate", {"url": path.as_uri()})
        while not self._loaded:
            self._hear()

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path, height):
        size = {"width": 1400, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method, values=None):
        return self._call(method, values or {}, self._session)

    def _call(self, method, values, session=None):
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": values}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            self._hear()
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return answer["result"]

    def _hear(self):
        left = self.deadline - time.monotonic()
        assert left > 0 and select.select([self._from], [], [], left)[0], "the browser is silent"
        data = os.read(self._from, 1 << 20)
        assert data, "the browser has ended"
        *messages, self._left = (self._left + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._event(message["method"], message["params"])

    def _event(self, method, values):
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(values["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.problems.append(str(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
