"""A headless Chromium, driven through its pipe: no package and no port are needed."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0  # seconds for one answer


class Browser:
    """One page. `problems`: what its console and its scripts complained of, and what it asked the network for."""

    def __init__(self, writing: int, reading: int) -> None:
        self._writing, self._reading = writing, reading
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session = ""
        self.problems: list[str] = []
        self._loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path, width: int = 1200, dark: bool = False) -> float:
        """Loads a file; the seconds until its script has run."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=scheme)
        self._loaded, started = False, time.perf_counter()
        self._ask("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._take()
        return time.perf_counter() - started

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self._ask("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, to: Path) -> None:
        """A PNG of the whole page."""
        found = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(found["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            found = self._take()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def _take(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], _PATIENCE)
            assert ready, "the browser does not answer"
            self._rest += os.read(self._reading, 1 << 20)
        line, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(line)
        self._hear(found.get("method", ""), found.get("params", {}))
        return found

    def _hear(self, event: str, what: dict[str, Any]) -> None:
        self._loaded |= event == "Page.loadEventFired"
        if event == "Runtime.exceptionThrown":
            self.problems.append(what["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif event == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.problems.append(what["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.problems.append(str(what["args"]))
        elif event == "Network.requestWillBeSent" and not what["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"asked for {what['request']['url']}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Skips the test where no Chromium is installed (CHROMIUM names one that is not on PATH)."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("needs a Chromium on PATH, or CHROMIUM")
    (to_read, writing), (reading, to_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [path, *_FLAGS, f"--user-data-dir={folder}"]
        # The browser reads its descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        running = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Browser(writing, reading)
        finally:
            running.kill()
            running.wait()
            os.close(writing)
            os.close(reading)
