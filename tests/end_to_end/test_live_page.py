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
import time
from pathlib import Path

import psutil
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from coremill.report.page.server import listen
from coremill.report.readers.live_page import LivePage
from coremill.report.readers.prometheus.dashboard import ROWS
from coremill.report.readers.prometheus.server import RunMetrics
from end_to_end.scene import Scene, left_behind
from unit.report.fake_run import START, make_fake_run, write_line

STEPS = 300
PANELS = [panel for panels in ROWS.values() for panel in panels]


def ask(port: int, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    return connection.getresponse()


def test_a_run_with_page_and_metrics_that_are_killed_and_visitors_that_take_nothing(scene: Scene) -> None:
    words = ["train", "run.yaml", "--page", "--set", "run.folder=paged", "--set", "run.metrics_port=0"]
    words += ["--set", f"train.steps={STEPS}"]  # so many that it still trains when all visitors have been there
    running = scene.start([sys.executable, "-m", "coremill", *words])
    try:
        out = running.process.stdout
        assert out is not None
        said = ""
        while not (found := re.search(r"live page: http://127.0.0.1:(\d+)/[^$]*metrics: \S+:(\d+)/metrics", said)):
            line = out.readline()
            assert line, said
            said += line
        port, metrics_port = int(found.group(1)), int(found.group(2))
        while not (events := scene.path("paged/events/rank-00000.jsonl")).exists() or not events.stat().st_size:
            assert running.process.poll() is None, said
            time.sleep(0.05)
        launcher = running.process.pid
        os.kill(launcher, signal.SIGSTOP)  # the servers go after all others: they may need longer than the run
        served = {each.name: each.samples for each in scraped(metrics_port)}
        assert served["coremill_steps_planned"][0].value == STEPS
        assert served["coremill_run_info"][0].labels["run"] == "paged"
        with socket.create_connection(("127.0.0.1", port)) as sleeper:  # takes nothing
            sleeper.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            page = ask(port, "/").read().decode()
            assert "paged" in page and f"coremill {' '.join(words)}" in page
            with socket.create_connection(("127.0.0.1", metrics_port)):
                servers = servers_of(running.marker)
                assert len(servers) == 2
                for process in servers:
                    process.kill()
                for process in servers:
                    while process.status() != psutil.STATUS_ZOMBIE:  # its parent stands still
                        time.sleep(0.02)
            os.kill(launcher, signal.SIGCONT)
            done = running.end()
    except BaseException:
        running.kill()
        raise
    assert done.code == 0, str(done)
    assert not done.left
    report = json.loads(scene.path("paged/report.json").read_text())
    assert report["state"] == "finished" and report["steps"] == STEPS
    assert report["subject"]["command"] == f"coremill {' '.join(words)}" and report["subject"]["parameters"] > 1000
    assert scene.path("paged/logs/live-page.log").read_text() == ""
    assert scene.path("paged/logs/metrics.log").read_text() == ""
    assert "the metrics endpoint has ended" in done.out and "the live page has ended" in done.out
    # The panels ask for what is served by a run that was never in a cluster and had no fault, and for little else.
    names = {sample.name for each in RunMetrics(scene.path("paged"), range(1)).collect() for sample in each.samples}
    asked = set(re.findall(r"coremill_\w+", " ".join(query for panel in PANELS for query, _ in panel.queries)))
    others = ("cost_usd_total", "cost_planned_usd", "faults_total")
    assert asked - names == {f"coremill_{name}" for name in others}


def servers_of(marker: str) -> list[psutil.Process]:
    """Of the page and of the metrics."""
    names = ("page.server", "prometheus.server")
    lines = [line for line in left_behind(marker, 0) if any(name in line for name in names)]
    return [psutil.Process(int(line.split()[0])) for line in lines]


def scraped(port: int) -> list[Metric]:
    """Its first numbers: the server may have been asked before the run had said a word."""
    while not (found := list(text_string_to_metric_families(ask(port, "/metrics").read().decode()))):
        time.sleep(0.1)
    return found


def test_a_port_in_use_is_refused_before_anything_is_started(scene: Scene) -> None:
    with listen(0) as taken:
        port = str(taken.getsockname()[1])
        done = scene.coremill("train", "run.yaml", "--page", "--port", port, "--set", "run.folder=refused")
    assert done.code == 78 and f"port {port} on 127.0.0.1" in done.err and "--port" in done.err, str(done)
    assert not scene.path("refused").exists() and not done.left


def test_a_port_of_metrics_in_use_is_refused_before_anything_is_started(scene: Scene) -> None:
    with listen(0) as taken:
        port = f"run.metrics_port={taken.getsockname()[1]}"
        done = scene.coremill("train", "run.yaml", "--set", port, "--set", "run.folder=refused")
    assert done.code == 78 and "another program listens there" in done.err and f"--set {port}" in done.err, str(done)
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
        while "finished" not in read_event(stream).get("heading", ""):
            pass  # it may look between two of the lines
        assert b"event: end" in stream.read()
    assert process.returncode == 0


def read_event(stream: http.client.HTTPResponse) -> dict[str, str]:
    """The next `parts` of a stream."""
    for line in iter(stream.readline, b""):
        if line.startswith(b"data: "):
            parts: dict[str, str] = json.loads(line.removeprefix(b"data: "))
            return parts
    raise AssertionError("the stream ended")
