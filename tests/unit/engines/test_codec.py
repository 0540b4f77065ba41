"""Gradients as sqrt16: how close they come back, that they repeat whatever surrounds them, and what is no number."""

from __future__ import annotations

import math

import pytest
import torch

from coremill.engines.wire.codec import Codec, Plain, Sqrt16, codec_of, shares_of
from coremill.plan.traffic import SCALE_BLOCK, sent_bytes

RUNS = [1, 2, SCALE_BLOCK - 1, SCALE_BLOCK, SCALE_BLOCK + 1, 200_001]
CODECS = [Sqrt16(), Plain(torch.bfloat16), Plain(torch.float32)]


def values_of(numel: int, seed: int = 1) -> torch.Tensor:
    """Of many magnitudes and both signs, zeros among them, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) ** 5 * 1e-6
    values[::7] = 0
    return values


def there_and_back(codec: Codec, values: torch.Tensor, runs: list[int]) -> torch.Tensor:
    wire = torch.full((codec.length(runs) + 4,), 77, dtype=codec.dtype)  # longer than need be
    codec.encode(values, runs, wire)
    assert (wire[codec.length(runs) :] == 77).all()
    back = torch.full_like(values, math.nan)
    codec.decode(wire, runs, back)
    return back


@pytest.mark.parametrize("numel", RUNS)
def test_sqrt16_is_as_close_as_it_says(numel: int) -> None:
    values = values_of(numel)
    back = there_and_back(Sqrt16(), values, [numel])
    largest = torch.cat([block.abs().max().expand(block.numel()) for block in values.split(SCALE_BLOCK)])
    # Half a step of the root, squared; fp32 itself takes a hundredth of that.
    bound = (values.abs() * largest).sqrt() / 32767 + largest / 32767**2
    assert ((back - values).abs() <= bound * 1.02).all()
    assert (back[values == 0] == 0).all() and (back * values >= 0).all()


def test_sqrt16_is_closer_than_bf16_for_the_same_bytes() -> None:
    values = values_of(50_000)
    errors = [(there_and_back(codec, values, [50_000]) - values).norm() for codec in CODECS]
    assert errors[0] < errors[1] / 20 and errors[2] == 0
    assert Sqrt16().length([50_000]) * 2 == sent_bytes("sqrt16", 50_000) < 1.003 * sent_bytes("bf16", 50_000)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 3e38])
def test_sqrt16_of_any_magnitude_stays_a_number(scale: float) -> None:
    values = values_of(3000) / values_of(3000).abs().max() * scale
    back = there_and_back(Sqrt16(), values, [3000])
    assert back.isfinite().all()
    assert (back - values).abs().max() <= max(1e-4 * scale, 1e-38)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.dtype))
def test_what_is_no_number_arrives_as_none(codec: Codec, bad: float) -> None:
    values = values_of(2500)
    values[2100] = bad
    runs = [1500, 1000]
    wires = torch.empty(3, codec.length(runs), dtype=codec.dtype)
    for wire, given in zip(wires, (values_of(2500, 2), values, values_of(2500, 3)), strict=True):
        codec.encode(given, runs, wire)
    total = values_of(2500, 4)
    codec.add(wires[:1], wires[1:], runs, total)
    assert not total[2100].isfinite() and total[:1500].isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec.dtype))
def test_sums_are_those_of_what_was_sent_in_rank_order(codec: Codec) -> None:
    ranks = range(4)
    wires = torch.empty(len(ranks), codec.length(RUNS), dtype=codec.dtype)
    sent = torch.empty(len(ranks), sum(RUNS))
    for rank, wire in enumerate(wires):
        codec.encode(values_of(sum(RUNS), rank), RUNS, wire)
        codec.decode(wire, RUNS, sent[rank])
    for mine in ranks:
        total = values_of(sum(RUNS), mine)  # never rounded: it does not travel
        expected = torch.zeros(sum(RUNS))
        for rank in ranks:
            expected += total if rank == mine else sent[rank]
        codec.add(wires[:mine], wires[mine + 1 :], RUNS, total)
        assert torch.equal(total, expected)
    codec.sum(list(wires), RUNS, total)
    assert torch.equal(total, sum(sent, torch.zeros(sum(RUNS))))


def test_bits_do_not_depend_on_neighbours_shares_or_threads() -> None:
    parameters = [values_of(run, run) for run in RUNS]
    threads = torch.get_num_threads()
    found = []
    try:
        for order, ranks, now in ((range(6), 1, 1), ([3, 5, 0, 4, 1, 2], 3, 2), ([5, 4, 3, 2, 1, 0], 7, 3)):
            torch.set_num_threads(now)
            shares = shares_of([parameters[index] for index in order], ranks)
            back = torch.cat([there_and_back(Sqrt16(), piece, [len(piece)]) for share in shares for piece in share])
            parts = back.split([RUNS[index] for index in order])
            found.append([part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, found[0], strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 50])
@pytest.mark.parametrize("runs", [[5], RUNS, [10 * SCALE_BLOCK] * 3])
def test_shares_are_nearly_equal_and_leave_nothing_out(runs: list[int], ranks: int) -> None:
    values = torch.arange(sum(runs))
    shares = shares_of(values.split(runs), ranks)
    assert len(shares) == ranks and torch.equal(torch.cat([piece for share in shares for piece in share]), values)
    assert max(sum(map(len, share)) for share in shares) <= sum(runs) / ranks + SCALE_BLOCK + 1


def test_forms_have_codecs() -> None:
    assert isinstance(codec_of("sqrt16"), Sqrt16)
    assert codec_of("bf16").dtype == torch.bfloat16
    assert codec_of("fp32").dtype == torch.float32
