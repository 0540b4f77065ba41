"""The page of a run, its live page and the comparison, in a real browser: what people see, wide and narrow, by day and
by night. Runs are made up; the events of a live one are written while the browser looks."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import WHY_NOT, Page, browser
from coremill.report.page.comparison_page import render_comparison_page
from coremill.report.summary import summarise
from unit.report.fake_run import START, make_fake_run, write_line, write_report

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
LOOKS = [(1300, False), (1300, True), (500, False), (500, True)]
FITS = "document.documentElement.scrollWidth <= window.innerWidth"
READOUT = "document.querySelector('[data-group=steps] .readout')?.innerText"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(autouse=True)
def no_problems(tab: Page) -> Iterator[None]:
    tab.problems.clear()
    yield
    tab.ask("0")  # what is still on its way
    assert tab.problems == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_fake_run(tmp_path_factory.mktemp("page") / "demo", steps=120, total_steps=120)
    document = {"parameters": 52_000_000, "command": "coremill train demo.yaml --set model=<b>bold</b>"}
    (run / "orders.json").write_text(json.dumps(document))
    write_line(run, 0, "save", START + 300, step=60, saved=True, bytes=1, seconds=1.0)
    write_line(run, 0, "resume", START + 310, step=60, text="continuing")
    write_report(run)
    return run


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_page_at_any_width_by_day_and_by_night(tab: Page, finished: Path, width: int, dark: bool) -> None:
    tab.look(width, dark=dark)
    tab.open((finished / "report.html").as_uri())
    assert tab.ask(FITS)
    background = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert (max(int(part) for part in re.findall(r"\d+", background)) < 100) is dark
    heading = tab.ask("document.querySelector('header').innerText")
    for words in ("demo", "finished", "built-in", "52.0 M parameters", "--set 'model=<b>bold</b>'".replace("'", "")):
        assert words in heading
    assert tab.ask("document.querySelectorAll('.plot').length") == 4


def test_the_value_under_the_pointer(tab: Page, finished: Path) -> None:
    tab.look(1300)
    tab.open((finished / "report.html").as_uri())
    summary = summarise(finished)
    tab.point_at(".plot", 0.999)
    last = tab.until(READOUT, "a value under the pointer")
    assert last.splitlines()[0] == "step 120" and f"{summary['loss_last']:.4f}" in last
    shown = tab.ask("[...document.querySelectorAll('.readout .at')].map(node => node.innerText)")
    assert shown == ["step 120"] * 4  # all charts are read at the same step
    rate = summary["series"]["learning_rate"][-1]
    assert rate == 3e-4 and "3e-4" in tab.ask("document.querySelectorAll('.readout')[1].innerText")
    tab.point_at(".plot", (60 - 1) / 119)
    words = tab.until(f"({READOUT}).includes('step 60') && {READOUT}", "the marks at step 60")
    assert "step 60: saved" in words and "step 60: continued from here" in words
    assert "saved" not in tab.ask("document.querySelectorAll('.readout')[1].innerText")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    tab.until("!document.querySelector('.readout')", "the value to go away")
    tab.ask("document.querySelector('.plot').focus()")
    for _ in range(2):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert tab.until(READOUT, "a value by keys").startswith("step 2")


class Served:
    """`coremill report RUN --serve`."""

    def __init__(self, run: Path, *options: str) -> None:
        command = [sys.executable, "-m", "coremill", "report", str(run), "--serve", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, **pipes)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127.0.0.1:(\d+)/", line)
        assert found, line + self.process.stdout.read()
        self.address, self.port = found.group(), int(found.group(1))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=60) == 0


def test_a_live_page_follows_its_run_to_the_end_and_beyond(tab: Page, tmp_path: Path) -> None:
    run = make_fake_run(tmp_path / "going", world_size=1, steps=20, total_steps=40, ending="running")
    tab.look(1300)
    with Served(run) as served:
        tab.open(served.address)
        tab.until("document.getElementById('live').innerText == 'live'", "the stream")
        assert "running" in tab.ask("document.querySelector('h1').innerText")
        tab.point_at(".plot", 0.999)
        tab.until(f"({READOUT} ?? '').startsWith('step 20')", "the last step under the pointer")
        numbers = {"learning_rate": 1e-3, "gradient_norm": 1.5, "tokens": 8176, "seconds": 4.0}
        write_line(run, 0, "step", START + 200, step=21, loss=1.2345, **numbers)
        tab.until("document.querySelector('.tiles').innerText.includes('1.2345')", "the new step")
        # The pointer has not moved: it shows the newest step now.
        tab.until(f"({READOUT} ?? '').startsWith('step 21') && {READOUT}.includes('1.2345')", "it under the pointer")
        assert tab.ask("document.title").startswith("52 %")
        write_line(run, 0, "end", START + 210, seconds=210.0)
        tab.until("document.querySelector('h1').innerText.includes('finished')", "the end of the run")
        # The same command again, with more steps to do.
        write_line(run, 0, "start", START + 300, world_size=1, pid=os.getpid(), hostname="node-0", attempt=START + 300)
        write_line(run, 0, "resume", START + 301, step=21, text="continuing")
        write_line(run, 0, "step", START + 310, step=22, loss=1.1111, **numbers)
        tab.until("document.querySelector('.tiles').innerText.includes('1.1111')", "the run that goes on")
        assert tab.ask("document.querySelector('.marks').innerText.includes('continuation')")
        for width, dark in LOOKS:
            tab.look(width, dark=dark)
            tab.until(FITS, f"the page to fit into {width} px, and what is under the pointer with it")
    tab.until("document.getElementById('live').innerText == 'no longer live'", "the page to be told of its end")


def test_a_live_page_is_for_this_machine_alone(finished: Path) -> None:
    with Served(finished) as served:

        def ask(method: str, path: str, host: str | None = None) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
            connection.request(method, path, headers={"Host": host or f"127.0.0.1:{served.port}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        assert ask("GET", "/")[0] == 200 and "demo" in ask("GET", "/")[1]
        assert ask("GET", "/", f"localhost:{served.port + 1}")[0] == 200  # through ssh -L
        for stranger in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example", "192.168.0.1"):
            assert ask("GET", "/", stranger)[0] == 403
            assert ask("GET", "/events", stranger)[0] == 403
        for path in ("/report.json", "/../config.yaml", "/events/", "/config.yaml", "//etc/passwd"):
            assert ask("GET", path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert ask(method, "/")[0] == 405, method
        refused = subprocess.run(
            [sys.executable, "-m", "coremill", "report", str(finished), "--serve", "--port", str(served.port)],
            capture_output=True,
            text=True,
        )
        assert refused.returncode == 78 and f"port {served.port} on 127.0.0.1" in refused.stderr


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_runs_compared(tab: Page, tmp_path: Path, finished: Path, width: int, dark: bool) -> None:
    other = make_fake_run(tmp_path / "other", world_size=1, steps=70, total_steps=120, ending="stopped", seed=8)
    (other / "config.yaml").write_text((finished / "config.yaml").read_text().replace("steps: 300", "steps: 120"))
    file = tmp_path / "comparison.html"
    file.write_text(render_comparison_page([summarise(finished), summarise(other)]))
    tab.look(width, dark=dark)
    tab.open(file.as_uri())
    assert tab.ask(FITS)
    text = tab.ask("document.body.innerText")
    for words in ("demo", "other", "train.steps", "300", "120", "Which plan was right", "off by"):
        assert words in text
    visible = "[...document.querySelectorAll('[data-panel]')].filter(one => !one.hidden).map(one => one.dataset.panel)"
    assert tab.ask(visible) == ["step"]
    tab.point_at("[data-panel=step] .plot", (60 - 1) / 119)
    both = tab.until("document.querySelector('[data-panel=step] .readout')?.innerText", "values of both runs")
    assert both.startswith("step 60") and "demo" in both and "other" in both
    for share in (0.01, 0.3, 0.6, 0.99):  # what is shown stays inside the window, in every chart
        tab.point_at("[data-panel=step] .plot", share)
        assert tab.ask(FITS)
        assert tab.ask("[...document.querySelectorAll('.readout')].every(one => one.getBoundingClientRect().left >= 0)")
    tab.ask("document.querySelector('input[value=elapsed_seconds]').click()")
    assert tab.ask(visible) == ["elapsed_seconds"]
    tab.point_at("[data-panel=elapsed_seconds] .plot", 0.99)
    late = tab.until("document.querySelector('[data-panel=elapsed_seconds] .readout')?.innerText", "the longer run")
    assert "demo" in late and "other" not in late
