"""In what form gradients travel between ranks, and how many bytes that takes: engines send by it, the plan counts."""

from __future__ import annotations

from typing import Literal

GradientForm = Literal["fp32", "bf16", "sqrt16"]

# Gradients that share one scale when they travel as sqrt16 (engines/wire/codec.py).
SCALE_BLOCK = 1024
_SCALE_BYTES = 4


def gradient_form(wire_dtype: str, dtype: str) -> GradientForm:
    """Exact, bf16, or sqrt16: also 16 bits, but finer, for arithmetic that is itself finer than bf16."""
    if wire_dtype == "fp32":
        return "fp32"
    return "sqrt16" if wire_dtype == "auto" and dtype == "fp32" else "bf16"


def sent_bytes(form: GradientForm, gradients: int) -> int:
    if form == "fp32":
        return 4 * gradients
    scales = -(-gradients // SCALE_BLOCK) if form == "sqrt16" else 0
    return 2 * gradients + _SCALE_BYTES * scales
