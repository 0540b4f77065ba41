"""A real browser for tests and pictures: Chromium without a window, spoken to over its debugging protocol.

Debian: `make browser-setup`. Pages are loaded, looked at and photographed; what they write to the console is kept.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coremill.child import wrapped

PATIENCE_SECONDS = 60.0  # only a hang takes that long
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHY_NOT = None if CHROMIUM else "no Chromium here (Debian: make browser-setup)"


class Page:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.problems: list[str] = []  # errors and warnings of its console, exceptions, what the policy forbade
        self._events: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, told = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(told["args"])[:500])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{told['entry'].get('url', '')} {told['entry']['text']}")

    def open(self, address: str) -> None:
        """Load a page whole."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        self.until(lambda: "Page.loadEventFired" in self._events or None, "the page to load")

    def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """The window's width, and which colours its user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, test: str | Callable[[], Any], what: str) -> Any:
        """Wait until an expression is true; gives its value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            value = self.ask(test) if isinstance(test, str) else (self.ask("0"), test())[1]
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"waited in vain for {what}")

    def point_at(self, selector: str, share: float) -> None:
        """Move the pointer over an element, so far from its left edge."""
        self.ask(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
        left, top, width, height = self.ask(box + " return [b.left, b.top, b.width, b.height] })()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + share * width, y=top + height / 2)

    def picture(self, file: Path, *, height: int | None = None, scale: float = 1, beyond: bool = True) -> None:
        """A PNG of the page, whole or so much of it from its top; what lies `beyond` the window is laid out for it."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": scale}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=beyond)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser with one empty tab, ended with the block."""
    from websockets.sync.client import connect

    assert CHROMIUM, WHY_NOT
    with tempfile.TemporaryDirectory(prefix="browser-") as home:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += [
            "--no-first-run",
            "--disable-extensions",
            "--disable-lcd-text",
            "--disable-background-networking",
            "--force-color-profile=srgb",
        ]
        options += [f"--user-data-dir={home}", "--remote-debugging-port=0", "about:blank"]
        command = wrapped([CHROMIUM, *options], launcher_pid=os.getpid(), cpus=None)
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, start_new_session=True, **quiet)
        try:
            address = _address(Path(home) / "DevToolsActivePort", process)
            with connect(address, max_size=None, open_timeout=PATIENCE_SECONDS, ping_interval=None) as socket:
                yield Page(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # its own session: renderers and helpers go with it
            process.wait()


def _address(told: Path, process: subprocess.Popen[Any]) -> str:
    """Where the first tab listens: the browser leaves its port in a file."""
    import urllib.request

    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            port = int(told.read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError(f"{CHROMIUM} does not answer; exit code {process.poll()}")


if __name__ == "__main__":  # python tests/browser.py ADDRESS FILE.png [WIDTH] [dark]
    with browser() as tab:
        tab.look(int((sys.argv[3:] or ["1300"])[0]), dark="dark" in sys.argv)
        tab.open(sys.argv[1])
        tab.picture(Path(sys.argv[2]))
        print("\n".join(tab.problems))
