"""Numbers in words, for reasons and messages."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in decimal units, three digits: 512 MB, 32.1 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def rate(flops_per_second: float) -> str:
    """FLOP/s: 36 GFLOP/s, 4.3 TFLOP/s."""
    if flops_per_second >= 1e12:
        return f"{flops_per_second / 1e12:.1f} TFLOP/s"
    return f"{flops_per_second / 1e9:.3g} GFLOP/s"


def plural(count: int, word: str) -> str:
    """1 row, 2 rows."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
