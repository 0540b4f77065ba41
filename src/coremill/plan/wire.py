"""In what form gradients travel between ranks, and how many bytes that takes: engines send by it, the plan counts."""

from __future__ import annotations

from typing import Literal

GradientForm = Literal["fp32", "bf16", "roots"]

# Gradients that share one scale when they travel as roots (engines/wire/codec.py).
ROOTS_BLOCK = 1024
_SCALE_BYTES = 4


def gradient_form(wire_dtype: str, dtype: str) -> GradientForm:
    """Exact, bf16, or roots: also 16 bits, but finer, for arithmetic that is itself finer than bf16."""
    if wire_dtype == "fp32":
        return "fp32"
    return "roots" if wire_dtype == "auto" and dtype == "fp32" else "bf16"


def sent_bytes(form: GradientForm, gradients: int) -> int:
    """Of so many gradients on the wire."""
    if form == "fp32":
        return 4 * gradients
    scales = -(-gradients // ROOTS_BLOCK) if form == "roots" else 0
    return 2 * gradients + _SCALE_BYTES * scales
