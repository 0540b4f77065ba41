"""The live page: a server on loopback that gives one page and its stream of changes, and nothing else.

    GET /          the page as it is now
    GET /events    server-sent events: `parts`, the parts of the page that changed; `end`, when there will be no more

It only reads the run folder. Whoever looks is given what changed since the version he has; who is slow skips versions,
and who takes nothing for seconds is let go. Without anybody looking nothing is read. A page takes at most a twentieth
of a core, however long its run. Requests must name this machine in their Host header: a page of another site whose name
was made to point here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coremill.errors import CoremillError, InputError
from coremill.report.http_service import LOOPBACK, SLOW_SECONDS, WHY_NO_PORT, BoundedServer, ReadOnlyHandler, bound
from coremill.report.page.live_run import LiveRun
from coremill.report.page.run_page import render_page, render_parts

LOOK_EVERY_SECONDS = 0.5
POLL_SECONDS = 0.1
SHARE_OF_TIME = 20  # a look that took a second is followed by so many without one,
MOST_PAUSE_SECONDS = 30.0  # but not by more than this
STATE_EVERY_SECONDS = 5.0  # a run that was killed says nothing: its processes are looked for
KEEP_ALIVE_SECONDS = 15.0
FOLLOWS_WITHIN_SECONDS = 3.0  # a browser that was given the page asks for its stream, and asks again after 2 s


def listen(port: int) -> socket.socket:
    """A listening socket on loopback; 0: any free port. One that is taken is refused."""
    try:
        return bound(LOOPBACK, port)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"port {port} on {LOOPBACK} cannot be used for the page: {getattr(error, 'strerror', None) or error}",
            where=f"--port {port}",
            why=WHY_NO_PORT.get(error.errno or 0) if isinstance(error, OSError) else None,
            do="name another port, or leave --port out: a free one is taken and printed",
        ) from error


def address_of(listener: socket.socket) -> str:
    """What to open in a browser of this machine."""
    return f"http://{LOOPBACK}:{listener.getsockname()[1]}/"


class Changes:
    """The page in its newest version, and which version each part changed in; one look at the run at a time."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._boot = uuid.uuid4().hex[:8]  # versions of another server, or of this one before it was started anew
        self._changed = threading.Condition()
        self._looking = threading.Lock()
        self._parts: dict[str, tuple[int, str]] = {}
        self._version = 0
        self._summary: dict[str, Any] = {}
        self._looked_at = self._summed_at = float("-inf")
        self._took_seconds = 0.0
        self._is_behind = False  # events were read that the page does not show yet
        self.has_ended = False

    def page(self) -> str:
        """The whole page."""
        self.look()
        with self._changed:
            return render_page(self._summary, live=f"{self._boot}-{self._version}")

    def look(self, *, at_once: bool = False) -> None:
        """Bring the page up to date, unless that was done a moment ago."""
        with self._looking:
            pause = min(MOST_PAUSE_SECONDS, max(LOOK_EVERY_SECONDS, SHARE_OF_TIME * self._took_seconds))
            began = time.monotonic()
            if not at_once and began - self._looked_at < pause:
                return
            self._is_behind = self._run.look() or self._is_behind
            stale = self._summary.get("state") == "running" and began - self._summed_at > STATE_EVERY_SECONDS
            if self._is_behind or stale or at_once or not self._summary:
                self._take(self._run.summary())
                self._summed_at, self._is_behind = began, False
            is_first, self._looked_at = self._looked_at == float("-inf"), time.monotonic()
            self._took_seconds = 0.0 if is_first else self._looked_at - began  # the first one reads all there is

    def _take(self, summary: dict[str, Any]) -> None:
        parts = render_parts(summary)
        with self._changed:
            fresh = {name: text for name, text in parts.items() if self._parts.get(name, (0, ""))[1] != text}
            self._summary = summary
            if fresh:
                self._version += 1
                self._parts |= {name: (self._version, text) for name, text in fresh.items()}
                self._changed.notify_all()

    def since(self, seen: str, *, seconds: float) -> tuple[str, dict[str, str], bool]:
        """The newest version, what changed up to it since that one, and whether it is the last; waits so long for
        anything."""
        boot, _, number = seen.partition("-")
        known = int(number) if boot == self._boot and number.isdigit() else -1
        with self._changed:
            self._changed.wait_for(lambda: self._version > known or self.has_ended, timeout=seconds)
            parts = {name: text for name, (version, text) in self._parts.items() if version > known}
            return f"{self._boot}-{self._version}", parts, self.has_ended

    def end(self) -> None:
        """Nothing will change any more: visitors are told."""
        with self._looking:  # the first look at a long run may be under way
            is_watched = self._version > 0
        if is_watched:  # else nobody waits for the last state
            with contextlib.suppress(Exception):  # the run folder may be gone
                self.look(at_once=True)
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()


class PageServer(BoundedServer):
    """Serves one run until it is closed."""

    def __init__(self, listener: socket.socket, run: Path) -> None:
        super().__init__(listener, _Handler)
        self.changes = Changes(LiveRun(run))
        self._streams = 0
        self._last_page_time = float("-inf")
        self._waiting = threading.Condition()
        threading.Thread(target=self._follow, daemon=True, name="coremill-follow").start()

    @contextlib.contextmanager
    def streaming(self) -> Any:
        """While somebody looks, the run is followed."""
        with self._waiting:
            self._streams += 1
            self._waiting.notify_all()
        try:
            yield
        finally:
            with self._waiting:
                self._streams -= 1
                self._waiting.notify_all()

    def gave_page(self) -> None:
        """Whoever has the page will ask for its stream."""
        self._last_page_time = time.monotonic()

    def finish(self) -> None:
        """Show the last state, and tell visitors that there will be no other."""
        self.changes.end()
        deadline = time.monotonic() + SLOW_SECONDS
        while (now := time.monotonic()) < deadline:
            with self._waiting:
                if not self._streams and now - self._last_page_time > FOLLOWS_WITHIN_SECONDS:
                    return
                self._waiting.wait(POLL_SECONDS)

    def _follow(self) -> None:
        while not self.changes.has_ended:
            with self._waiting:
                self._waiting.wait_for(lambda: self._streams > 0)
            with contextlib.suppress(Exception):  # a file is being replaced, or of another form: look again
                self.changes.look()
            time.sleep(LOOK_EVERY_SECONDS)


class _Handler(ReadOnlyHandler):
    server: PageServer

    def do_GET(self) -> None:
        """The page, its stream, or nothing."""
        if not self.names_this_machine():
            self.refuse(HTTPStatus.FORBIDDEN, "this page is for a browser on its own machine, under the name localhost")
            return
        wanted = urlsplit(self.path)
        if wanted.path == "/":
            self._send_page()
        elif wanted.path == "/events":
            self._stream(self.headers.get("Last-Event-ID") or "".join(parse_qs(wanted.query).get("since", [])))
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "there is only one page here: /")

    def _send_page(self) -> None:
        try:
            page = self.server.changes.page().encode()
        except (CoremillError, OSError) as error:  # the run folder was removed meanwhile
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        self.server.gave_page()
        self.begin(HTTPStatus.OK, "text/html; charset=utf-8", len(page))
        self.wfile.write(page)

    def _stream(self, seen: str) -> None:
        self.begin(HTTPStatus.OK, "text/event-stream; charset=utf-8")
        self.wfile.write(b"retry: 2000\n\n")
        changes = self.server.changes
        with self.server.streaming():
            while True:
                seen, parts, is_last = changes.since(seen, seconds=KEEP_ALIVE_SECONDS)
                data = json.dumps(parts, ensure_ascii=False)
                text = f"id: {seen}\nevent: parts\ndata: {data}\n\n" if parts else ": still here\n\n"
                self.wfile.write(text.encode("utf-8", errors="replace"))
                if is_last:
                    self.wfile.write(b"event: end\ndata:\n\n")
                    return


def serve_until_interrupted(listener: socket.socket, run: Path, on_ready: Callable[[], None]) -> None:
    """Until Ctrl-C; the run may end, go on or begin anew meanwhile."""
    with PageServer(listener, run) as server:
        on_ready()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.finish()


def _main(descriptor: int, run: Path) -> None:
    """For a launcher: until its end of a pipe on standard input is closed, by its own will or with its life."""
    with contextlib.suppress(OSError):
        os.nice(10)  # the run goes first
    with PageServer(socket.socket(fileno=descriptor), run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.buffer.read()
        server.finish()


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
