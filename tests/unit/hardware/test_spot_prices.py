"""`coremill plan --live`: EC2's own answers, by botocore's stub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from rich.console import Console

from coremill.config.load import load_config
from coremill.errors import InputError
from coremill.hardware import spot_prices
from coremill.hardware.instances import instance_named
from coremill.hardware.spot_prices import live_spot_prices
from coremill.run import machines
from coremill.run.plan_command import plan_once


@pytest.fixture
def ec2() -> Iterator[Any]:
    client = boto3.client("ec2", region_name="us-west-2", aws_access_key_id="none", aws_secret_access_key="none")
    with Stubber(client) as stub:
        yield client, stub
        stub.assert_no_pending_responses()


def row(name: str, zone: str, price: str, hour: int = 12) -> dict[str, Any]:
    return {
        "InstanceType": name,
        "AvailabilityZone": zone,
        "SpotPrice": price,
        "ProductDescription": "Linux/UNIX",
        "Timestamp": datetime(2026, 7, 1, hour, tzinfo=UTC),
    }


def test_the_newest_price_in_the_cheapest_zone(ec2: Any) -> None:
    client, stub = ec2
    rows = [
        row("c7i.8xlarge", "us-west-2a", "0.70"),
        row("c7i.8xlarge", "us-west-2b", "0.50", hour=3),  # the day before
        row("c7i.8xlarge", "us-west-2b", "0.60"),
        row("m7i.8xlarge", "us-west-2a", "0.74"),
    ]
    asked = {"InstanceTypes": ["c7i.8xlarge", "m7i.8xlarge"], "ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY}
    stub.add_response("describe_spot_price_history", {"SpotPriceHistory": rows[:2], "NextToken": "more"}, asked)
    stub.add_response("describe_spot_price_history", {"SpotPriceHistory": rows[2:]}, {**asked, "NextToken": "more"})
    found = live_spot_prices([instance_named("c7i.8xlarge"), instance_named("m7i.8xlarge")], client=client)
    assert found.usd_per_hour == {"c7i.8xlarge": 0.60, "m7i.8xlarge": 0.74}
    assert "the cheapest zone of us-west-2" in found.words


def test_a_type_without_a_spot_price_is_refused(ec2: Any) -> None:
    client, stub = ec2
    stub.add_response("describe_spot_price_history", {"SpotPriceHistory": []})
    with pytest.raises(InputError, match="no spot price for c7i.8xlarge") as caught:
        live_spot_prices([instance_named("c7i.8xlarge")], zone="us-west-2d", client=client)
    assert "us-west-2d" in (caught.value.why or "")


def test_what_ec2_refuses_is_said(ec2: Any) -> None:
    client, stub = ec2
    stub.add_client_error("describe_spot_price_history", "UnauthorizedOperation", "You are not authorized")
    with pytest.raises(InputError, match="EC2 did not answer") as caught:
        live_spot_prices([instance_named("c7i.8xlarge")], client=client)
    assert "not authorized" in (caught.value.why or "") and caught.value.exit_code == 78


def test_the_plan_of_spot_pods_at_the_price_of_now(
    ec2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, stub = ec2
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "cache"))

    def asked(instances: Any, **place: Any) -> Any:
        assert place == {"region": "us-west-2", "zone": "us-west-2a"}
        return spot_prices.live_spot_prices(instances, client=client, **place)

    monkeypatch.setattr(machines, "live_spot_prices", asked)
    stub.add_response("describe_spot_price_history", {"SpotPriceHistory": [row("c7i.8xlarge", "us-west-2a", "0.58")]})
    section = ["image=a:1", "karpenter=none", "zone=us-west-2a"]
    settings = ["fleet.instance=c7i.8xlarge", "fleet.nodes=4", *(f"kubernetes.{each}" for each in section)]
    loaded = load_config(None, [*settings, "kubernetes.capacity=spot"])
    plan_once(loaded, None, as_json=True, console=Console(), live=True)
    plan = json.loads(capsys.readouterr().out)
    assert plan["usd_per_hour"] == pytest.approx(2.32) and "us-west-2a" in plan["price_words"]
    assert plan["pod"]["value"] == "30 CPUs, 55 GiB" and plan["threads_per_rank"]["value"] == 15
    with pytest.raises(InputError, match="no live price for capacity: on-demand"):
        plan_once(load_config(None, settings), None, as_json=True, console=Console(), live=True)
    with pytest.raises(InputError, match="no instance type to ask the price of"):
        plan_once(load_config(None, []), None, as_json=True, console=Console(), live=True)
