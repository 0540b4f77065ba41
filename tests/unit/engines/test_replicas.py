"""The digest of a rank's weights, and the words for ranks that drifted apart."""

from __future__ import annotations

import pytest
import torch

from coremill.engines.replicate.replicas import digest_of_bits, drifted


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 5000])
def test_one_bit_of_any_weight_shows(size: int) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    before = digest_of_bits(weight)
    assert digest_of_bits(weight.clone()) == before == digest_of_bits(torch.nn.Parameter(weight.view(1, size)))
    for place in {0, size // 2, size - 1}:
        for bit in (1, 1 << 30):
            other = weight.clone()
            other.view(torch.int32)[place] ^= bit
            assert digest_of_bits(other) != before


def test_weights_need_not_be_aligned_or_finite() -> None:
    weight = torch.randn(4001)
    assert digest_of_bits(weight[1:]) == digest_of_bits(weight[1:].clone())
    weight[5] = float("nan")
    assert digest_of_bits(weight) == digest_of_bits(weight.clone())
    assert digest_of_bits(torch.zeros(600)) != digest_of_bits(-torch.zeros(600))
    assert digest_of_bits(torch.zeros(())) and digest_of_bits(torch.zeros(0, 3))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("abaa", "rank 1 on h1 holds different weights than the other 3 after step 8"),
        ("abaca", "rank 1 on h1, rank 3 on h3 hold different weights than the other 3 after step 8"),
        ("ab", "rank 0 on h0 and rank 1 on h1 hold different weights after step 8"),
        ("aabb", "rank 0 on h0, rank 1 on h1 and rank 2 on h2, rank 3 on h3 hold different weights after step 8"),
    ],
)
def test_who_drifted_is_named_by_majority(told: str, words: str) -> None:
    hosts = [f"h{rank}" for rank in range(len(told))]
    error = drifted(list(told), hosts, ["first.weight", "second.weight"], "after step 8", ["AVX2"] * len(told))
    assert (error.exit_code, error.what, error.where) == (70, words, "first.weight and 1 more")
    assert "CPUs" not in (error.why or "")
    other = drifted(list(told), hosts, ["first.weight"], "", ["AVX2", "DEFAULT"])
    assert "their CPUs compute differently: AVX2, DEFAULT" in (other.why or "")
