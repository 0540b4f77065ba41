"""`coremill train --page`: a page that follows the run, in a process of its own that the run does not depend on."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

from rich.console import Console

from coremill.report.page.server import listen
from coremill.report.readers.live_page import LivePage
from end_to_end.scene import Scene, left_behind
from unit.report.fake_run import START, make_fake_run, write_line


def ask(port: int, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    return connection.getresponse()


def test_a_run_with_a_page_that_is_killed_and_a_visitor_that_takes_nothing(scene: Scene) -> None:
    words = ["train", "run.yaml", "--page", "--set", "run.folder=paged"]
    running = scene.start([sys.executable, "-m", "coremill", *words])
    try:
        out = running.process.stdout
        assert out is not None
        said = ""
        while not (found := re.search(r"live page: http://127.0.0.1:(\d+)/", said)):
            line = out.readline()
            assert line, said
            said += line
        port = int(found.group(1))
        with socket.create_connection(("127.0.0.1", port)) as sleeper:  # takes nothing
            sleeper.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            page = ask(port, "/").read().decode()
            assert "paged" in page and f"coremill {' '.join(words)}" in page
            pids = [line.split()[0] for line in left_behind(running.marker, 0) if "page.server" in line]
            assert len(pids) == 1
            os.kill(int(pids[0]), signal.SIGKILL)
            done = running.end()
    except BaseException:
        running.kill()
        raise
    assert done.code == 0, str(done)
    assert not done.left
    report = json.loads(scene.path("paged/report.json").read_text())
    assert report["state"] == "finished" and report["steps"] == 8
    assert report["subject"]["command"] == f"coremill {' '.join(words)}" and report["subject"]["parameters"] > 1000
    assert scene.path("paged/logs/live-page.log").read_text() == ""


def test_a_port_in_use_is_refused_before_anything_is_started(scene: Scene) -> None:
    with listen(0) as taken:
        port = str(taken.getsockname()[1])
        done = scene.coremill("train", "run.yaml", "--page", "--port", port, "--set", "run.folder=refused")
    assert done.code == 78 and f"port {port} on 127.0.0.1" in done.err and "--port" in done.err, str(done)
    assert not scene.path("refused").exists() and not done.left


def test_the_page_shows_the_last_state_and_ends_with_the_run(tmp_path: Path) -> None:
    run, listener, screen = make_fake_run(tmp_path, steps=5, ending="running"), listen(0), io.StringIO()
    port = listener.getsockname()[1]
    page = LivePage(run, listener, Console(file=screen))
    page.begin()
    process = page._process
    assert process is not None and f"http://127.0.0.1:{port}/" in screen.getvalue()
    with ask(port, "/events") as stream:
        first = read_event(stream)
        assert "running" in first["heading"]
        for rank in range(4):
            write_line(run, rank, "end", START + 100, seconds=100.0)
        page.end({})
        parts = read_event(stream)
        assert "finished" in parts["heading"]
        assert b"event: end" in stream.read()
    assert process.returncode == 0


def read_event(stream: http.client.HTTPResponse) -> dict[str, str]:
    """The next `parts` of a stream."""
    for line in iter(stream.readline, b""):
        if line.startswith(b"data: "):
            parts: dict[str, str] = json.loads(line.removeprefix(b"data: "))
            return parts
    raise AssertionError("the stream ended")
