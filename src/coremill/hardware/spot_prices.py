"""What spot machines cost now, asked of EC2 by boto3 (the extra aws)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from coremill.errors import InputError
from coremill.hardware.instances import Instance
from coremill.hardware.pods import SpotPrices


def live_spot_prices(
    instances: Sequence[Instance], *, region: str | None = None, zone: str | None = None, client: Any = None
) -> SpotPrices:
    """The newest price of each type in a zone; without one, in the cheapest zone of the region."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            "asking EC2 for spot prices needs boto3",
            where="--live",
            do="install it with `pip install 'coremill[aws]'`, or leave --live out",
        ) from error
    now = datetime.now(UTC)
    question: dict[str, Any] = {
        "InstanceTypes": [one.name for one in instances],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": now,  # the price that holds now
    }
    if zone is not None:
        question["AvailabilityZone"] = zone
    try:
        ec2 = client or boto3.client("ec2", region_name=region)
        pages = ec2.get_paginator("describe_spot_price_history").paginate(**question)
        rows = [row for page in pages for row in page["SpotPriceHistory"]]
        asked = ec2.meta.region_name
    except (BotoCoreError, ClientError) as error:
        raise InputError(
            "EC2 did not answer", where="--live", why=str(error), do="check credentials and region, or leave --live out"
        ) from error
    cheapest: dict[str, float] = {}
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    for row in rows:
        place = (row["InstanceType"], row["AvailabilityZone"])
        found = (row["Timestamp"], float(row["SpotPrice"]))
        newest[place] = max(newest.get(place, found), found)
    for (name, _), (_, price) in newest.items():
        cheapest[name] = min(price, cheapest.get(name, price))
    missing = [one.name for one in instances if one.name not in cheapest]
    if missing:
        raise InputError(
            f"EC2 has no spot price for {', '.join(missing)}",
            where="--live",
            why=f"it is not offered as spot in {zone or asked}",
            do="name another type or zone, or leave --live out",
        )
    where = zone or f"the cheapest zone of {asked}"
    return SpotPrices(usd_per_hour=cheapest, words=f"spot price in {where}, {now:%Y-%m-%d %H:%M} UTC")
