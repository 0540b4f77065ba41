"""A large head leaves in pieces, a replicated model in buckets: the same sums to the last bit, however they are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks
from coremill.engines.replicate import cost as replicate_cost
from coremill.engines.replicate import engine as replicate
from coremill.engines.wire import collectives
from tiers import some_long
from tiny_models import make_config_folder
from training import make_packed, train_here

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 2048, "num_hidden_layers": 2}


def losses_whole_and_in_pieces(world: Any, cases: list[dict[str, Any]]) -> list[list[list[float]]]:
    """Losses of each case, first as it is, then with a head that counts as large; which it must be beside a layer."""
    found = []
    for case in cases:
        whole = train_here(world, **case)["losses"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "WHOLE_UP_TO_NUMEL", 0)
            patch.setattr(collectives, "PIECE_NUMEL", 10_001)
            found.append([whole, train_here(world, **case)["losses"]])
    return found


@pytest.mark.parametrize("world_size", some_long([2, 3], [3], "one of two numbers of ranks"))
def test_sums_in_pieces_are_the_same_sums(world_size: int, tmp_path: Path) -> None:
    data = make_packed(tmp_path / "data", rows=24, length=16, vocabulary=500).to_json()
    cases = []
    for family in ("llama", "llama-tied"):
        make_config_folder(tmp_path / family, family, **SHAPE)
        common = {"model_folder": str(tmp_path / family), "data": data, "weights": "random", "steps": 3}
        for wire_dtype in ("fp32", "bf16"):  # sqrt16 has other blocks in pieces
            cases.append({**common, "engine": "shard", "wire_dtype": wire_dtype, "rows_per_step": 6})
            cases[-1]["through_memory"] = False
    for of_rank in ranks.run_ranks(losses_whole_and_in_pieces, world_size, cases=cases):
        for whole, in_pieces in of_rank:
            assert whole == in_pieces and len(whole) == 3


def test_a_large_head_is_cut_and_a_layer_is_not() -> None:
    assert collectives.columns_at_once(2**27, 4, 2**20) == 2**22
    assert collectives.columns_at_once(2**27, 4, 2**27) == 2**25


def losses_in_one_bucket_and_in_many(world: Any, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Losses and norms of each case, and how many exchanges were under way at once at most; with many, of a table only
    rows that tokens named."""
    found = []
    for case in cases:
        counts = []
        for mib in (64, 1):
            most = 0
            send_next = replicate.ReplicateEngine._send_next

            def count(engine: Any, send_next: Any = send_next) -> None:
                nonlocal most
                send_next(engine)
                most = max(most, len(engine._under_way))

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(replicate, "bucket_mib", lambda _, mib=mib: mib)
                if mib == 64:
                    patch.setattr(replicate, "LEAST_BUCKET_BYTES", 2**26)
                    patch.setattr(replicate, "lookups_of", lambda _: ())
                patch.setattr(replicate.ReplicateEngine, "_send_next", count)
                result = train_here(world, **case)
            counts.append([most, result["losses"], result["norms"]])
        found.append(counts)
    return found


@pytest.mark.parametrize("world_size", some_long([2, 3], [3], "one of two numbers of ranks"))
def test_sums_in_buckets_are_the_same_sums(world_size: int, tmp_path: Path) -> None:
    data = make_packed(tmp_path / "data", rows=24, length=16, vocabulary=500).to_json()
    make_config_folder(tmp_path / "llama", "llama", **{**SHAPE, "vocab_size": 8192, "hidden_size": 128})
    common = {"model_folder": str(tmp_path / "llama"), "data": data, "weights": "random", "steps": 3}
    cases = [
        {**common, "engine": "replicate", "wire_dtype": wire_dtype, "rows_per_step": 6}
        for wire_dtype in ("fp32", "bf16")
    ]
    for of_rank in ranks.run_ranks(losses_in_one_bucket_and_in_many, world_size, cases=cases):
        for (one, *whole), (many, *in_buckets) in of_rank:
            assert one == 1 < many
            assert whole == in_buckets and len(whole[0]) == 3


def test_a_bucket_is_an_eighth_of_the_model() -> None:
    assert [replicate_cost.bucket_mib(mib * 2**20) for mib in (0, 1, 16, 51, 256, 10_000)] == [1, 1, 2, 6, 32, 32]
