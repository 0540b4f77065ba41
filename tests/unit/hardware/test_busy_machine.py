"""A busy machine is said by train and plan in the words of doctor."""

from dataclasses import replace

from coremill.hardware.calibrate import BUSY_FRACTION
from coremill.hardware.load import busy_with_others
from unit.plan.shapes import fleet


def test_what_others_take_is_said_from_some_share_on() -> None:
    node = fleet().node
    assert busy_with_others(node) is None
    assert busy_with_others(replace(node, busy_fraction=BUSY_FRACTION)) is None
    busy = busy_with_others(replace(node, busy_fraction=0.6))
    assert busy is not None and "60 % of the usable cores" in busy.message
    assert busy.message in str(busy) and busy.do in str(busy) and "planned times will not hold" in str(busy)
