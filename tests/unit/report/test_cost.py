"""Dollars of a run in a cluster: nodes by the hour, restarts and waiting included, beside the plan's."""

from __future__ import annotations

import io
import json

import pytest
from fake_run import CONFIG, START, fake_plan, make_fake_run, write_line
from rich.console import Console

from coremill.hardware.instances import instance_named
from coremill.report.cost import EMPTY_NODE_SECONDS, node_price, paid_seconds
from coremill.report.page.run_page import render_page
from coremill.report.summary import summarise
from coremill.report.summary_screen import render_summary

OF_PODS = f"""{CONFIG}run:
  folder: /fsx/coremill/demo
fleet:
  nodes: 4
  instance: c7i.8xlarge
kubernetes:
  image: example.com/coremill:0.1
  capacity: spot
"""
PRICE = instance_named("c7i.8xlarge", where="fleet.instance").usd_per_hour


def test_the_price_is_that_of_the_nodes():
    price = node_price(OF_PODS)
    assert price is not None and (price.instance, price.nodes) == ("c7i.8xlarge", 4)
    assert price.usd_per_hour == pytest.approx(4 * PRICE)
    assert "upper bound" in price.price_words


def test_of_several_types_the_dearest_counts():
    price = node_price(OF_PODS + "  instances: [c7i.8xlarge, m7i.8xlarge]\n")
    assert price is not None and price.instance == "c7i.8xlarge or m7i.8xlarge"
    assert price.usd_per_hour > 4 * PRICE


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        CONFIG,
        OF_PODS.replace("/fsx/coremill/demo", "runs/demo"),  # on a laptop, with the same section
        OF_PODS.replace("  instance: c7i.8xlarge\n", ""),
        OF_PODS.replace("c7i.8xlarge", "c99i.8xlarge"),
        OF_PODS.replace("capacity: spot", "capacity: stolen"),
    ],
)
def test_where_no_hour_has_a_price_nothing_is_said(text):
    assert node_price(text) is None


def test_a_pause_costs_what_empty_nodes_stay():
    assert paid_seconds(3600, []) == 3600
    assert paid_seconds(3600, [(0, 60)]) == 3660
    assert paid_seconds(3600, [(0, 60), (100, 90_000)]) == 3660 + EMPTY_NODE_SECONDS


def test_the_report_has_dollars_beside_the_plans(tmp_path):
    folder = make_fake_run(tmp_path / "run")
    assert summarise(folder)["cost"] is None
    (folder / "config.yaml").write_text(OF_PODS)
    summary = summarise(folder)
    cost = summary["cost"]
    assert cost["usd"] == pytest.approx(4 * PRICE * summary["seconds"] / 3600)
    assert cost["planned_usd"] == pytest.approx(4 * PRICE * summary["plan"]["hours"])
    assert cost["restarts"] == 0
    screen = Console(file=io.StringIO(), width=200)
    render_summary(summary, screen)
    text = screen.file.getvalue()
    assert f"${cost['usd']:.2f}" in text and f"${cost['planned_usd']:.2f}" in text
    assert "4 x c7i.8xlarge for" in text and "0 restarts included" in text
    assert "Dollars" in render_page(summary)


def test_a_continuation_is_a_restart_that_was_paid(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(fake_plan(2).to_json()))
    (tmp_path / "config.yaml").write_text(OF_PODS)
    for began in (START, START + 50_000):
        for rank in range(2):
            write_line(tmp_path, rank, "start", began, world_size=2, hostname=f"node-{rank}", attempt=began)
            write_line(tmp_path, rank, "phase", began + 1800, name="load", seconds=1.0)
    cost = summarise(tmp_path)["cost"]
    assert cost["restarts"] == 1
    assert cost["hours"] == pytest.approx((3600 + EMPTY_NODE_SECONDS) / 3600)
    assert cost["usd"] == pytest.approx(cost["hours"] * 4 * PRICE)
