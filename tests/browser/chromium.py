# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Drive a headless Chromium over the pipes of its DevTools protocol, with the standard library alone."""

import base64
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

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0
"""Seconds to wait for an answer; the first one includes the start of the browser."""

KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40, "Home": 36, "End": 35, " ": 32, "Tab": 9}


class Page:
    """One tab. Messages are JSON objects that end with a zero byte."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        self.pending = b""
        self.num_sent = 0
        self.session: str | None = None
        self.console: list[str] = []
        """What the page logged, uncaught errors and refused loads included."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requested: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return what it answers."""
        self.num_sent += 1
        message: dict[str, Any] = {"id": self.num_sent, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self.num_sent:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.pending:
            ready, _, _ = select.select([self.reading], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium was silent for {PATIENCE} s"
            received = os.read(self.reading, 1 << 16)
            assert received, "Chromium ended"
            self.pending += received
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(str(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str([argument.get("value") for argument in found["args"]]))
        elif method == "Log.entryAdded":
            self.console.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(found["request"]["url"])

    def open(self, path: Path, *, fragment: str = "") -> None:
        """Open a file and wait until its script has run."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        deadline = time.monotonic() + PATIENCE
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, f"{path} did not load"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, as a keyboard does."""
        stroke = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        stroke |= {"modifiers": 8 if shift else 0}
        down = {"type": "keyDown", "text": " "} if key == " " else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **stroke, **down)
        self.call("Input.dispatchKeyEvent", **stroke, type="keyUp")

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        query = json.dumps(selector)
        box = self.value(
            f"(() => {{ const one = document.querySelector({query}); one.scrollIntoView({{block: 'center'}});"
            " const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **button)

    def resize(self, width: int, height: int, *, is_dark: bool = False, scale: float = 1.0) -> None:
        """Set the size of the window and the colours that the reader prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def program() -> str | None:
    """Where Chromium is, if it is installed."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps its profile in a folder and ends with the context."""
    found = program()
    assert found is not None, "Chromium is not installed: apt-get install chromium"
    ours_read, theirs_write = os.pipe()
    theirs_read, ours_write = os.pipe()
    options = [
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-sandbox",  # tests run as root in containers, where the sandbox cannot start
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={folder / 'profile'}",
    ]
    # the protocol's pipes are descriptors 3 and 4, which bash moves them to
    script = f'exec "$@" 3<&{theirs_read} 4>&{theirs_write}'
    environment = {**os.environ, "HOME": str(folder)}
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", found, *options],
            pass_fds=(theirs_read, theirs_write),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        page = Page(ours_read, ours_write)
        yield page
        page.session = None
        page.call("Browser.close")
        process.wait(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours_read)
        os.close(ours_write)
