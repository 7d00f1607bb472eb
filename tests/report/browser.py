"""Drives a real headless browser over its DevTools protocol, for tests of pages."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60.0


def find_browser() -> str | None:
    """The path of a browser; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. ``requested`` has the addresses of everything that it has requested."""

    def __init__(self, sending: int, receiving: int) -> None:
        self._sending, self._receiving = sending, receiving
        self._number = 0
        self._data = b""
        self._seen: list[dict[str, Any]] = []
        self.requested: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = str(attached["sessionId"])
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1200, dark: bool = False) -> None:
        """Load a file, and wait until it is loaded."""
        self.requested.clear()
        self._seen.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        scheme = {
            "name": "prefers-color-scheme",
            "value": "dark" if dark else "light",
        }
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        self._wait("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def complaints(self) -> list[str]:
        """What the browser has put on its console."""
        return [
            str(each["params"])
            for each in self._seen
            if each["method"] == "Log.entryAdded"
        ]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, self._session, **parameters)

    def _call(
        self, method: str, session: str | None = None, **parameters: Any
    ) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._sending, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._hear()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _wait(self, method: str) -> None:
        while not any(each["method"] == method for each in self._seen):
            self._note(self._hear())

    def _note(self, event: dict[str, Any]) -> None:
        self._seen.append(event)
        if event.get("method") == "Network.requestWillBeSent":
            self.requested.append(event["params"]["request"]["url"])

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._data:
            left_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._receiving], [], [], left_s)
            assert ready, "the browser does not answer"
            data = os.read(self._receiving, 1 << 16)
            assert data, "the browser has ended"
            self._data += data
        line, _, self._data = self._data.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(program: str, folder: Path) -> Iterator[Browser]:
    """A browser with its profile in ``folder``; it is ended afterwards."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()

    def arrange() -> None:
        # It reads from descriptor 3 and writes to descriptor 4.
        reading, writing = os.dup(their_in), os.dup(their_out)
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    process = subprocess.Popen(
        [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=arrange,
        close_fds=False,
    )
    try:
        yield Browser(our_out, our_in)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        for descriptor in (their_in, our_out, our_in, their_out):
            os.close(descriptor)
