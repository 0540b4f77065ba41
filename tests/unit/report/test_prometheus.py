"""`run.metrics_port`: what Prometheus scrapes is what the report says, each node serves its share, and nothing of it
can reach the run."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from typer.testing import CliRunner

from coremill.cli import app
from coremill.config.load import load_config
from coremill.config.metrics_rules import MEETING_PORT
from coremill.errors import ConfigError, InputError
from coremill.report.http_service import bound
from coremill.report.readers.prometheus import LIBRARY, listen_for_scrapes, server
from coremill.report.readers.prometheus.dashboard import WIDTH, dashboard
from coremill.report.readers.prometheus.reader import MetricsReader
from coremill.report.readers.prometheus.server import MetricsServer, RunMetrics
from coremill.report.summary import summarise
from coremill.run.opening import listen_for_metrics
from coremill.world.identity import DEFAULT_PORT
from unit.report.fake_run import CONFIG, START, make_fake_run, write_line

PAGE = Path(__file__).parents[3] / "docs" / "k8s-reference.md"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

# As `coremill k8s render` writes it: nodes have a price.
IN_A_CLUSTER = CONFIG + "fleet: {nodes: 4, instance: c7i.8xlarge}\nkubernetes: {image: a:1}\nrun: {folder: /fsx/a/b}\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which everything happened that is counted."""
    run = make_fake_run(tmp_path_factory.mktemp("runs") / "llama", steps=100, total_steps=300, ending="running")
    (run / "config.yaml").write_text(IN_A_CLUSTER)
    after = START + 1000
    write_line(run, 0, "data", START + 2, train_rows=1600, evaluation_rows=64)
    found = {"loss": 3.1, "perplexity": 22.2, "best_step": 50}
    write_line(run, 0, "evaluation", after - 1, step=100, **found, tokens=32768, seconds=6.0)
    for rank in range(4):
        numbers = {"step": 100, "saved": True, "bytes": 10, "seconds": 3.0 + rank, "blocked_seconds": 0.1 * rank}
        write_line(run, rank, "save", after, **numbers, folder="step-00000100")
    write_line(run, 0, "save", after + 1, step=101, saved=False, reason="the disk is full")
    write_line(run, 2, "fault", after + 2, cause="killed", text="rank 2 was ended", action="restart", step=101)
    write_line(run, 3, "fault", after + 2, cause="killed", text="rank 3 was ended", action="restart", step=101)
    for rank in range(4):
        began = {"world_size": 4, "local_rank": 0, "hostname": f"node-{rank}", "attempt": after + 3, "pid": 1}
        write_line(run, rank, "start", after + 3, **began)
    write_line(run, 2, "restart", after + 9, attempt=1, cause="killed", from_step=98, steps_lost=3, resumed_seconds=6.0)
    return run


def scraped(metrics: RunMetrics) -> Series:
    return series_of(text_string_to_metric_families(generate_latest(metrics).decode()))


def series_of(families: Iterator[Metric]) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value for each in families for sample in each.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    (found,) = (
        number for (each, tags), number in series.items() if each == f"coremill_{name}" and labels.items() <= set(tags)
    )
    return found


def test_what_is_scraped_is_what_the_report_says(whole: Path) -> None:
    found, report = scraped(RunMetrics(whole, None)), summarise(whole)
    for name, key in {
        "steps_done": "steps",
        "steps_planned": "steps_planned",
        "tokens_total": "tokens",
        "goodput_ratio": "goodput",
        "loss": "loss_last",
    }.items():
        assert value(found, name) == report[key], name
    cost, evaluation = report["cost"], report["evaluations"][-1]
    assert value(found, "cost_usd_total") == cost["usd"] > 0
    assert value(found, "cost_planned_usd") == cost["planned_usd"]
    assert value(found, "cost_usd_per_hour") == cost["usd_per_hour"]
    assert value(found, "restarts_total") == cost["restarts"]
    assert value(found, "evaluation_score", metric="perplexity") == evaluation["perplexity"]
    assert value(found, "evaluation_score", metric="loss") == evaluation["loss"]
    assert value(found, "evaluation_step") == 100 and value(found, "best_step") == 50
    assert value(found, "epochs_done") == report["epochs"] == 1
    for rank, peak in enumerate(report["peak_rss_bytes_per_rank"]):
        assert value(found, "rank_memory_peak_bytes", rank=str(rank)) == peak
    assert value(found, "rank_memory_limit_bytes") == report["plan"]["memory_limit_bytes_per_rank"]
    # The most recent steps, as on the screen; the report counts all.
    assert value(found, "tokens_per_second") == pytest.approx(report["tokens_per_second"], rel=0.1)
    assert value(found, "utilization_ratio") == pytest.approx(report["utilization"], rel=0.1)
    # Of the newest save the slowest rank; steps that were lost; causes.
    assert value(found, "last_save_seconds") == 6.0 and value(found, "last_save_blocked_seconds") == pytest.approx(0.3)
    assert value(found, "last_save_step") == 100
    assert value(found, "saves_total", outcome="saved") == value(found, "saves_total", outcome="failed") == 1
    assert value(found, "faults_total", cause="killed") == 2 and value(found, "repeated_steps_total") == 3
    assert value(found, "run_info", model="built-in", engine="shard", run="llama") == 1
    assert value(found, "rank_sent_bytes_total", rank="3") == 100 * 141_000_000
    assert 0 < value(found, "rank_step_seconds_total", rank="0", part="compute") < report["seconds"]


def test_each_node_serves_its_ranks_and_the_first_one_the_run(whole: Path) -> None:
    everything = scraped(RunMetrics(whole, None))
    nodes = [scraped(RunMetrics(whole, range(2 * node, 2 * node + 2))) for node in range(2)]
    assert not nodes[0].keys() & nodes[1].keys()  # sums over nodes are right
    assert nodes[0] | nodes[1] == everything
    assert {dict(labels)["rank"] for _, labels in nodes[1]} == {"2", "3"}


def test_a_node_without_the_first_one_s_files_serves_its_own(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "alone" / "events").mkdir(parents=True)
    metrics = RunMetrics(tmp_path / "alone", range(1, 2))
    assert scraped(RunMetrics(tmp_path / "nowhere", range(1, 2))) == {} == scraped(metrics)
    shutil.copy(whole / "events" / "rank-00001.jsonl", tmp_path / "alone" / "events")
    metrics = RunMetrics(tmp_path / "alone", range(1, 2))
    assert value(scraped(metrics), "rank_step", rank="1") == 100


def test_names_follow_the_rules_and_are_documented(whole: Path) -> None:
    families = list(text_string_to_metric_families(generate_latest(RunMetrics(whole, None)).decode()))
    page = PAGE.read_text()
    for each in families:
        names = {sample.name for sample in each.samples}
        assert all(re.fullmatch(r"coremill_[a-z]+(_[a-z]+)*", name) for name in names)
        assert (each.type == "counter") == all(name.endswith("_total") for name in names), names
        assert not any(re.search(r"_(ms|minutes|hours|mb|gb|kb|percent|gauge|count)\b", name) for name in names), names
        assert each.documentation.endswith(".")
        assert all(sample.labels["run"] == "llama" for sample in each.samples)
        assert all(f"`{name.removeprefix('coremill_')}`" in page for name in names), names


def test_a_run_that_goes_on_and_one_that_begins_anew(tmp_path: Path) -> None:
    clock = iter(range(0, 1000, 10))
    run = make_fake_run(tmp_path / "run", world_size=1, steps=3, ending="running")
    metrics = RunMetrics(run, range(1), clock=lambda: float(next(clock)))
    assert value(scraped(metrics), "steps_done") == 3
    shutil.rmtree(run)
    assert value(scraped(metrics), "steps_done") == 3  # what was known
    make_fake_run(run, world_size=1, steps=2, ending="running")
    assert value(scraped(metrics), "steps_done") == 2


def test_a_scrape_does_not_wait_for_a_long_look(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOKING_SECONDS", 0.05)
    metrics = RunMetrics(whole, None)
    before = scraped(metrics)
    metrics._looked_at = float("-inf")
    with metrics._looking:
        assert scraped(metrics) == before


@contextmanager
def served(run: Path, host: str = "127.0.0.1") -> Iterator[int]:
    listener = bound(host, 0)
    with MetricsServer(listener, RunMetrics(run, None)) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield listener.getsockname()[1]
        made.shutdown()


def ask(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    with connection.getresponse() as answer:
        return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()


def test_over_http(whole: Path) -> None:
    with served(whole) as port:
        status, kind, text = ask(port)
        assert status == 200 and kind.startswith("text/plain; version=0.0.4")
        status, kind, modern = ask(port, Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
        assert status == 200 and kind.startswith("application/openmetrics-text") and modern.endswith("# EOF\n")
        assert series_of(openmetrics.text_string_to_metric_families(modern)) == series_of(
            text_string_to_metric_families(text)
        )
        assert ask(port, "/")[0] == 404 and "/metrics" in ask(port, "/")[2]
        assert ask(port, method="POST")[0] == 405
        assert ask(port, Host="elsewhere.example")[0] == 403
        assert ask(port, Host=f"localhost:{port}")[0] == 200
    with served(whole, "::") as port:  # as in a pod: whatever name it is scraped by, IPv4 and 6
        assert ask(port, Host="10.0.3.7:9400")[0] == 200


def queries() -> list[str]:
    """Of the panels, of the choices above them, and of the alerts that the page proposes."""
    page = dashboard()
    found = [target["expr"] for panel in page["panels"] for target in panel.get("targets", ())]
    labels = [each["query"]["query"] for each in page["templating"]["list"] if each["type"] == "query"]
    found += re.findall(r"^  expr: (.+)$", PAGE.read_text(), flags=re.MULTILINE)  # alerts
    found += [match.group(1) for each in labels if (match := re.fullmatch(r"label_values\((.+), \w+\)", each))]
    assert len(found) == sum(len(panel.get("targets", ())) for panel in page["panels"]) + len(labels) + 4 > 30
    return found


def selectors(query: str) -> list[Any]:
    """What a query selects: metric and labels, by a parser of Prometheus' language."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    parsed = promql_parser.parse(query.replace("$__rate_interval", "1m"))
    promql_parser.walk(parsed, pre_visit=visit)
    assert found, query
    return found


ADDED_BY_PROMETHEUS = {"namespace"}


def test_every_panel_asks_for_what_is_served(whole: Path) -> None:
    found = scraped(RunMetrics(whole, None))
    labels = {name: {label for label, _ in tags} for name, tags in found}
    asked = set()
    for query in queries():
        for selector in selectors(query):
            assert selector.name in labels, query
            asked.add(selector.name)
            for matcher in selector.matchers.matchers:
                assert matcher.name in labels[selector.name] | ADDED_BY_PROMETHEUS, query
        for text in re.findall(r"by \(([^)]*)\)", query):
            every = set.union(*(labels[selector.name] for selector in selectors(query)))
            assert {label.strip() for label in text.split(",")} <= every | ADDED_BY_PROMETHEUS, query
    unasked = {name.removeprefix("coremill_") for name in labels} - {name.removeprefix("coremill_") for name in asked}
    assert unasked == {
        *("best_step", "epochs_done", "evaluation_step", "tokens_total", "cost_usd_per_hour"),
        *("last_save_timestamp_seconds", "rank_step", "rank_memory_peak_bytes"),
    }


def test_the_dashboard_has_a_form_that_grafana_imports() -> None:
    done = CliRunner().invoke(app, ["k8s", "dashboard"])
    assert done.exit_code == 0
    page = json.loads(done.stdout)
    assert page == dashboard() and page["schemaVersion"] >= 36 and page["uid"] and page["title"]
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < WIDTH, panel["title"]
        taken |= cells
        ids = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(ids)) == len(ids) and (ids or panel["type"] == "row")
    known = {each["name"] for each in page["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used - {"__all"} <= known


def test_a_port_is_taken_or_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    with bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        file.write_text(f"train: {{steps: 3}}\nrun:\n  metrics_port: {port}\n")
        loaded = load_config(file)
        with pytest.raises(InputError) as refused, listen_for_metrics(loaded):
            pass
    assert refused.value.exit_code == 78
    for words in (f"port {port} on 127.0.0.1", "Address already in use", "another program", "run.yaml:3"):
        assert words in str(refused.value), str(refused.value)
    with listen_for_metrics(loaded) as listener, listen_for_metrics(loaded, wanted=False) as none:
        assert listener is not None and listener.getsockname() == ("127.0.0.1", port) and none is None
    assert listener.fileno() == -1
    with pytest.raises(InputError, match="no interface of this machine has that address") as refused:
        listen_for_scrapes(load_config(file, {"run.metrics_host": "192.0.2.1"}))
    assert "run.metrics_host" in str(refused.value)
    with pytest.raises(InputError, match=r"run\.metrics_host"):
        listen_for_scrapes(load_config(file, {"run.metrics_host": "1.2.3.4.5"}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == LIBRARY else object())
    with pytest.raises(InputError, match=re.escape("pip install 'coremill[metrics]'")):
        listen_for_scrapes(loaded)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run.metrics_port": 70000}, "run.metrics_port"),
        ({"run.metrics_port": 9400, "run.metrics_host": "eth0"}, "the address of an interface"),
        ({"run.metrics_host": "0.0.0.0"}, "without run.metrics_port"),
        ({"kubernetes.pod_monitor": True}, "without run.metrics_port"),
        ({"kubernetes.metrics_namespace": "monitoring"}, "without run.metrics_port"),
        ({"run.metrics_port": 9400, "kubernetes.pod_monitor_labels": {"a": "b"}}, "no PodMonitor"),
        ({"run.metrics_port": 0}, "known to nobody outside"),
        ({"run.metrics_port": 80}, "do not run as root"),
        ({"run.metrics_port": DEFAULT_PORT}, "ranks meet at that port"),
    ],
)
def test_keys_that_do_not_fit_each_other(settings: dict[str, Any], words: str) -> None:
    section = {"kubernetes.image": "a:1", "kubernetes.karpenter": "none", "train.steps": 3}
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(None, section | settings)
    assert MEETING_PORT == DEFAULT_PORT


def test_the_process_of_its_own(tmp_path: Path) -> None:
    run, screen = make_fake_run(tmp_path / "run", world_size=2, steps=4, ending="running"), io.StringIO()
    listener = bound("127.0.0.1", 0)
    port = listener.getsockname()[1]
    reader = MetricsReader(run, listener, Console(file=screen), range(2))
    reader.begin()
    process = reader._process
    assert process is not None and f"metrics: http://127.0.0.1:{port}/metrics" in screen.getvalue()
    assert "coremill_steps_done" in ask(port)[2]
    reader.take([])
    reader.end({})
    assert process.returncode == 0 and (run / "logs" / "metrics.log").read_text() == ""
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass
    second = MetricsReader(run, bound("127.0.0.1", 0), Console(file=screen), range(2, 4))
    second.begin()
    process = second._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    while second._process is not None:
        second.take([])  # says it once, and raises nothing
        time.sleep(0.01)
    second.take([])
    second.close(0)
    assert screen.getvalue().count("has ended") == 1 and "metrics-rank-00002.log" in screen.getvalue()
