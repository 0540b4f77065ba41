from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts.refresh_instances import table_document

from coremill.errors import InputError
from coremill.hardware.facts import Calibration
from coremill.hardware.hostfile import read_hostfile
from coremill.hardware.instances import (
    all_instances,
    find_instances,
    fleet_of,
    fleet_of_hostfile,
    instance_named,
    live_instances,
    table,
    this_machine,
)

ROOT = Path(__file__).parents[3]

# What `aws ec2 describe-instance-types` answered for *7i* with EFA: type, vCPUs, cores, GiB.
EFA_ROWS = """
u7i-6tb.112xlarge 448 224 6144
r7iz.32xlarge 128 64 1024
r7i.metal-48xl 192 96 1536
i7ie.metal-48xl 192 96 1536
m7i.48xlarge 192 96 768
i7ie.48xlarge 192 96 1536
c7i.metal-48xl 192 96 384
i7i.metal-48xl 192 96 1536
r7iz.metal-32xl 128 64 1024
r7i.48xlarge 192 96 1536
i7i.48xlarge 192 96 1536
i7i.24xlarge 96 48 768
c7i.48xlarge 192 96 384
m7i.metal-48xl 192 96 768
"""


def test_the_fourteen_efa_rows_are_there() -> None:
    found = {one.name: one for one in find_instances(family="7i", efa=True)}
    for row in EFA_ROWS.strip().splitlines():
        name, vcpus, cores, gib = row.split()
        one = found[name]
        assert (one.vcpus, one.cores, one.memory_mib) == (int(vcpus), int(cores), int(gib) * 1024), name


def test_families() -> None:
    assert {one.family for one in find_instances(family="c7i")} == {"c7i"}
    assert {"c7i", "c8i", "m7i", "m8i", "r7i", "r8i", "x8i"} <= {one.family for one in all_instances()}
    assert not any(one.efa for one in find_instances(family="c7i", efa=False))
    with pytest.raises(InputError, match="p5"):
        find_instances(family="p5")


def test_the_seeds_instance() -> None:
    one = instance_named("c7i.8xlarge")
    assert (one.vcpus, one.cores, one.memory_mib, one.network_baseline_gbps) == (32, 16, 65536, 12.5)
    assert (one.allocatable_cpu_milli, one.allocatable_memory_mib) == (31850, 57691)
    assert one.usd_per_hour == 1.428 and not one.efa
    assert table().price_date and table().region == "us-east-1" and "Apache-2.0" in table().sources["types"]


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        fleet_of("4xc7i.8xlrage")
    assert "c7i.8xlarge" in str(caught.value)


@pytest.mark.parametrize("text", ["", "4x", "0xc7i.8xlarge", "four c7i.8xlarge", "c7i"])
def test_what_is_no_fleet(text: str) -> None:
    with pytest.raises(InputError):
        fleet_of(text)


def test_a_fleet_is_assumed_never_measured() -> None:
    four = fleet_of("4 x c7i.8xlarge")
    assert (four.nodes, four.name) == (4, "4 x c7i.8xlarge")
    assert four.calibration.source == "assumed" and four.node.has_bf16_units
    assert four.usd_per_hour == pytest.approx(5.712)
    assert (four.link_bits_per_second, four.link_flow_bits_per_second) == (12.5e9, 5e9)
    assert four.limit_bytes_per_node == 57691 * 2**20
    assert len(four.node.cores) == 16 and four.node.cores[0].cpus == (0, 16)
    assert fleet_of("c7i.8xlarge").link_bits_per_second == 12.5e9


@pytest.mark.parametrize(
    ("name", "sockets"),
    [("c7i.24xlarge", 1), ("c7i.48xlarge", 2), ("c8i.48xlarge", 1), ("c8i.96xlarge", 2), ("r7iz.32xlarge", 2)],
)
def test_sockets_are_numa_nodes(name: str, sockets: int) -> None:
    assert len(fleet_of(name).node.numa_nodes) == sockets


def test_every_type_makes_a_fleet() -> None:
    for one in all_instances():
        made = fleet_of(f"2x{one.name}")
        assert made.calibration.copy_bytes_per_second > 0 and made.limit_bytes_per_node > 0


def measured() -> Calibration:
    return Calibration(
        source="measured",
        origin="made up",
        threads=2,
        fp32_matmul_flops_per_second=70e9,
        bf16_matmul_flops_per_second=None,
        copy_bytes_per_second=2e10,
        base_rss_bytes=440_000_000,
        torch_version="2.13.0",
    )


def test_hostfiles_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=2\nnode2:4\n\nnode3  # spare\nnode1\n")
    assert read_hostfile(path) == {"node1": 3, "node2": 4, "node3": None}
    path.write_text("alice@10.0.0.1 slots = 2 max_slots=4\n[fd00::1]:3\nfd00::2\nnode-4.example.org\n")
    assert read_hostfile(path) == {"alice@10.0.0.1": 2, "fd00::1": 3, "fd00::2": None, "node-4.example.org": None}
    path.write_text("node1\nnode2\nnode3\n")
    node = fleet_of("c7i.8xlarge").node
    made = fleet_of_hostfile(path, node, measured())
    assert made.nodes == 3 and made.calibration.source == "measured"
    path.write_text("# nothing\n")
    with pytest.raises(InputError):
        fleet_of_hostfile(path, node, measured())
    with pytest.raises(InputError):
        fleet_of_hostfile(tmp_path / "absent", node, measured())


@pytest.mark.parametrize(
    "line", ["node1 slots=two", "node1:0", "node1, node2", "-n 4", "node1 node2", "slots=2", "node1:"]
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"node0\n{line}\n")
    with pytest.raises(InputError) as caught:
        read_hostfile(path)
    assert "line 2" in str(caught.value)


def test_this_machine_has_no_link_and_no_price() -> None:
    made = this_machine(fleet_of("c7i.8xlarge").node, measured())
    assert (made.nodes, made.usd_per_hour, made.link_bits_per_second, made.name) == (1, None, None, "this machine")


def test_live_answers_come_from_ec2_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    moto = pytest.importorskip("moto")
    for name, value in (("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(name, value)
    with moto.mock_aws():
        found = live_instances(region="us-east-1", pattern="*7i*", efa=True)
    names = {one.name for one in found}
    assert {row.split()[0] for row in EFA_ROWS.strip().splitlines()} <= names
    assert all(one.efa for one in found)
    shipped = {one.name: one for one in find_instances(family="7i", efa=True)}
    assert {one.name: one for one in found if one.name in shipped} == shipped


def test_a_pages_worth_is_followed_by_the_next() -> None:
    pytest.importorskip("boto3")
    rows = [
        {"InstanceType": name, "VCpuInfo": {"DefaultVCpus": 8}, "MemoryInfo": {"SizeInMiB": 1024}}
        for name in ("a.b", "c.d")
    ]

    class Client:
        def get_paginator(self, name: str) -> Any:
            assert name == "describe_instance_types"
            return self

        def paginate(self, Filters: list[dict[str, Any]]) -> Any:
            assert Filters == [{"Name": "network-info.efa-supported", "Values": ["true"]}]
            return [{"InstanceTypes": [row]} for row in rows]

    assert [one.name for one in live_instances(efa=True, client=Client())] == ["a.b", "c.d"]


def test_no_credentials_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(InputError, match="EC2"):
        live_instances(region="us-east-1")


def test_the_shipped_file_is_what_the_script_would_write(tmp_path: Path) -> None:
    pytest.importorskip("moto")
    shipped = ROOT / "src/coremill/hardware/instances.json"
    known = table()
    text = table_document(known.instances, sources=known.sources, region=known.region, price_date=known.price_date)
    assert text == shipped.read_text()
    copy = tmp_path / "instances.json"
    copy.write_text(text)
    script = ROOT / "scripts" / "refresh_instances.py"
    subprocess.run([sys.executable, str(script), "--output", str(copy)], check=True, capture_output=True, timeout=120)
    assert copy.read_text().split('"instances"')[1] == text.split('"instances"')[1]


def test_prices_and_allocatable_come_from_a_karpenter_checkout(tmp_path: Path) -> None:
    pytest.importorskip("moto")
    page = tmp_path / "website/content/en/docs/reference/instance-types.md"
    prices = tmp_path / "pkg/providers/pricing/zz_generated.pricing_aws.go"
    for path in (page, prices):
        path.parent.mkdir(parents=True)
    page.write_text(
        "## c7i Family\n### `c7i.8xlarge`\n#### Labels\n |karpenter.k8s.aws/instance-cpu|32|\n"
        "#### Resources\n |cpu|31000m|\n |memory|50000Mi|\n |pods|20|\n"
    )
    prices.write_text(
        "// generated at 2027-01-02T03:04:05Z for us-east-1\n"
        'var Prices = {\n\t"us-east-1": {\n\t\t"c7i.8xlarge": 9.500000, "c7i.large": 0.5,\n\t},\n'
        '\t"us-west-2": {\n\t\t"c7i.8xlarge": 7.000000,\n\t},\n}\n'
    )
    output = tmp_path / "instances.json"
    script = ROOT / "scripts" / "refresh_instances.py"
    command = [sys.executable, str(script), "--karpenter", str(tmp_path), "--output", str(output)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "0 new, 0 gone, 2 changed" in done.stdout
    document = json.loads(output.read_text())
    row = next(row for row in document["instances"] if row[0] == "c7i.8xlarge")
    assert row[-3:] == [31000, 50000, 9.5] and document["price_date"] == "2027-01-02"
