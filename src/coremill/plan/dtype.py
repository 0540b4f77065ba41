"""bf16 or fp32, in arithmetic and on the wire: decided by what the CPU has and what was measured, not by a tutorial."""

from __future__ import annotations

from typing import Literal

from coremill.hardware.facts import Calibration, NodeFacts
from coremill.plan.traffic import gradient_form
from coremill.plan.types import Choice
from coremill.plan.words import rate

Dtype = Literal["fp32", "bf16"]
WireDtype = Literal["auto", "fp32", "bf16"]

# bf16 products without bf16 units, against fp32: 0.09 and 30 GFLOP/s on one Neoverse-N1 core.
EMULATED_SLOWDOWN = 300.0


def choose_dtype(asked: str, node: NodeFacts, calibration: Calibration) -> Choice[Dtype]:
    """bf16 only where the CPU has units for it and the measured product beats fp32."""
    if asked == "fp32":
        return Choice("fp32", "set by you")
    slower = _times_slower_in_bf16(calibration)
    verb = "measured" if calibration.source == "measured" else "assumed"
    if asked == "bf16":
        if node.has_bf16_units:
            return Choice("bf16", "set by you")
        return Choice(
            "bf16",
            f"set by you; this CPU has no bf16 units, and bf16 products run {slower:.0f} times slower than fp32 here",
        )
    if not node.has_bf16_units:
        measured = "measured" if calibration.bf16_emulated_flops_per_second else "as on others of its kind"
        return Choice(
            "fp32", f"this CPU has no bf16 units: bf16 products run {slower:.0f} times slower than fp32 ({measured})"
        )
    bf16 = calibration.bf16_matmul_flops_per_second
    if bf16 is None:
        return Choice("fp32", "the CPU has bf16 units, but bf16 was not measured")
    factor = bf16 / calibration.fp32_matmul_flops_per_second
    speeds = f"{rate(bf16)} against {rate(calibration.fp32_matmul_flops_per_second)}"
    if factor > 1:
        return Choice("bf16", f"bf16 products are {factor:.1f} times faster than fp32 ({verb}: {speeds})")
    return Choice("fp32", f"bf16 products are not faster than fp32 on this CPU, factor {factor:.2f} ({verb}: {speeds})")


def words_of_emulated_bf16(dtype: Choice[Dtype], node: NodeFacts, calibration: Calibration) -> str | None:
    """A warning where bf16 was asked for, in a run file brought from GPUs perhaps, and this CPU only imitates it."""
    slower = _times_slower_in_bf16(calibration)
    if dtype.value != "bf16" or node.has_bf16_units or slower < 1:
        return None
    return (
        f"warning: parallel.dtype bf16 makes products {slower:.0f} times slower than fp32: this CPU has no bf16 units;"
        " leave parallel.dtype out, and it is what is quickest here"
    )


def _times_slower_in_bf16(calibration: Calibration) -> float:
    return calibration.fp32_matmul_flops_per_second / bf16_flops_per_second(calibration)


def bf16_flops_per_second(calibration: Calibration) -> float:
    """The rate bf16 products reach, with units or without."""
    known = calibration.bf16_matmul_flops_per_second or calibration.bf16_emulated_flops_per_second
    return known or calibration.fp32_matmul_flops_per_second / EMULATED_SLOWDOWN


def matmul_flops_per_second(calibration: Calibration, dtype: Dtype) -> float:
    """The rate of one dtype, for planning: a dtype the user insists on has a rate even where it is emulated."""
    return calibration.fp32_matmul_flops_per_second if dtype == "fp32" else bf16_flops_per_second(calibration)


def choose_wire_dtype(asked: WireDtype, dtype: Dtype, *, nodes: int, world_size: int) -> Choice[WireDtype]:
    """Exact where ranks share a machine; between machines gradients travel in 16 bits and are summed in fp32."""
    if asked != "auto":
        return Choice(asked, "set by you")
    if world_size == 1:
        return Choice("fp32", "one rank: nothing travels")
    if nodes == 1:
        return Choice("fp32", "ranks share a machine: rounding would save no time, and losses stay those of one rank")
    form = "square roots in 16 bits" if gradient_form(asked, dtype) == "sqrt16" else "bf16"
    return Choice("auto", f"gradients as {form}, summed in fp32: half the bytes between machines; weights in {dtype}")
