"""Makes src/coremill/hardware/instances.json anew from its public sources.

    python scripts/refresh_instances.py                                    types from moto; price and allocatable kept
    python scripts/refresh_instances.py --karpenter ../karpenter-provider-aws
    python scripts/refresh_instances.py --karpenter https://raw.githubusercontent.com/aws/karpenter-provider-aws/main

Sources:
- types (vCPUs, cores, memory, network, EFA, NVMe): what EC2's describe-instance-types answers, as packaged by moto
  (Apache-2.0) in ec2/resources/instance_types.json.gz; `pip install moto`.
- allocatable CPU and memory in Kubernetes: Karpenter's table website/content/en/docs/reference/instance-types.md.
- Linux on-demand price in us-east-1: Karpenter's generated pkg/providers/pricing/zz_generated.pricing_aws.go.
  Both (Apache-2.0) from a checkout or a base address given with --karpenter; left out, the table's own values stay.

Only Intel types of the generations 7i and 8i are kept: they have AMX.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from coremill.hardware.instances import Instance, Table, instance_of_description, table

INTEL_WITH_AMX = re.compile(r"^[a-z]+[78]i[a-z]*(-[a-z0-9]+)?\.")
ALLOCATABLE_PAGE = "website/content/en/docs/reference/instance-types.md"
PRICE_FILE = "pkg/providers/pricing/zz_generated.pricing_aws.go"
DEFAULT_OUTPUT = Path(__file__).parents[1] / "src/coremill/hardware/instances.json"


def main() -> None:
    """Read the sources, write the table, say what changed."""
    parser = argparse.ArgumentParser(description="refresh the instance table from its public sources")
    parser.add_argument("--karpenter", help="a checkout of aws/karpenter-provider-aws, or a base address of its files")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    arguments = parser.parse_args()

    known = table()
    by_name = {one.name: one for one in known.instances}
    fresh = [instance_of_description(row, by_name.get(row["InstanceType"])) for row in packaged_descriptions()]
    sources = {
        **known.sources,
        "types": types_source(),
    }
    price_date = known.price_date
    if arguments.karpenter:
        allocatable = dict(read_allocatable(fetch(arguments.karpenter, ALLOCATABLE_PAGE)))
        price_text = fetch(arguments.karpenter, PRICE_FILE)
        prices = dict(read_prices(price_text, known.region))
        price_date = read_price_date(price_text) or price_date
        fresh = [with_karpenter(one, allocatable, prices) for one in fresh]
        sources["allocatable"] = f"aws/karpenter-provider-aws (Apache-2.0), {ALLOCATABLE_PAGE}"
        sources["price"] = (
            f"aws/karpenter-provider-aws (Apache-2.0), {PRICE_FILE} of {price_date}:"
            f" Linux, on demand, {known.region}, USD per hour"
        )
    fresh.sort(key=lambda one: one.name)
    text = table_document(fresh, sources=sources, region=known.region, price_date=price_date)
    arguments.output.write_text(text, encoding="utf-8")
    print(changes(known, fresh))


def table_document(instances: Iterable[Instance], *, sources: dict[str, str], region: str, price_date: str) -> str:
    """The table as instances.json holds it: one row a line, columns named once."""
    columns = list(Instance.__dataclass_fields__)
    head = json.dumps({"sources": sources, "region": region, "price_date": price_date, "columns": columns}, indent=1)
    rows = [json.dumps([getattr(one, column) for column in columns], separators=(",", ":")) for one in instances]
    return head[:-2] + ',\n "instances": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def types_source() -> str:
    """Which moto the types come from."""
    version = metadata.version("moto")
    return f"moto {version} (Apache-2.0), ec2/resources/instance_types.json.gz: what describe-instance-types answers"


def packaged_descriptions() -> Iterator[dict[str, Any]]:
    """The entries of moto's table that we keep."""
    packed = resources.files("moto").joinpath("ec2/resources/instance_types.json.gz").read_bytes()
    for name, row in json.loads(gzip.decompress(packed)).items():
        if INTEL_WITH_AMX.match(name):
            yield {"InstanceType": name, **row}


def fetch(base: str, path: str) -> str:
    """A file of a checkout or below an address."""
    if base.startswith(("http://", "https://")):
        with urllib.request.urlopen(f"{base.rstrip('/')}/{path}", timeout=60) as answer:
            text: str = answer.read().decode("utf-8")
            return text
    return (Path(base) / path).read_text(encoding="utf-8")


def read_allocatable(page: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Type, allocatable milli-CPU and MiB, from Karpenter's page: a heading per type, then tables."""
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        name = section.split("\n", 1)[0].strip().strip("`")
        cpu = re.search(r"^\s*\|cpu\|(\d+)m\|", section, re.MULTILINE)
        memory = re.search(r"^\s*\|memory\|(\d+)Mi\|", section, re.MULTILINE)
        if cpu and memory:
            yield name, (int(cpu.group(1)), int(memory.group(1)))


def read_prices(text: str, region: str) -> Iterator[tuple[str, float]]:
    """Type and price of one region, from Karpenter's generated Go map."""
    section = re.search(rf'"{re.escape(region)}":\s*{{(.*?)^\t}}', text, re.DOTALL | re.MULTILINE)
    for name, price in re.findall(r'"([a-z0-9-]+\.[a-z0-9-]+)":\s*([\d.]+)', section.group(1) if section else ""):
        yield name, float(price)


def read_price_date(text: str) -> str | None:
    """When Karpenter's table was generated."""
    match = re.search(r"generated at (\d{4}-\d{2}-\d{2})", text)
    return match.group(1) if match else None


def with_karpenter(one: Instance, allocatable: dict[str, tuple[int, int]], prices: dict[str, float]) -> Instance:
    """The type with what Karpenter knows about it; what it does not know stays as it was."""
    cpu, memory = allocatable.get(one.name, (one.allocatable_cpu_milli, one.allocatable_memory_mib))
    price = prices.get(one.name, one.usd_per_hour)
    return replace(one, allocatable_cpu_milli=cpu, allocatable_memory_mib=memory, usd_per_hour=price)


def changes(known: Table, fresh: list[Instance]) -> str:
    """One line on what is different now."""
    before = {one.name: one for one in known.instances}
    after = {one.name: one for one in fresh}
    changed = sum(before[name] != after[name] for name in before.keys() & after.keys())
    added, gone = len(after.keys() - before.keys()), len(before.keys() - after.keys())
    return f"{len(after)} types: {added} new, {gone} gone, {changed} changed"


if __name__ == "__main__":
    main()
