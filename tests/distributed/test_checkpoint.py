"""Real ranks save, die, stop and go on: with the same bits on the same ranks, with the same numbers on any others."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import ranks
from coremill.checkpoint.manifest import survey
from saved_training import train_saved
from tiers import long_test
from tiny_models import make_model
from training import make_packed

STEPS, ROWS = 16, 128  # one epoch, 8 rows a step
NEAR = long_test("near relations of the others of this test")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("saved")
    for family in ("llama", "llama-tied", "gpt2"):
        make_model(folder / family, family)
    data = make_packed(folder / "data", rows=ROWS, length=16, vocabulary=90)
    return {"folder": folder, "data": data.to_json(), "references": {}}


def run(inputs: dict[str, Any], world_size: int, folder: Path, family: str = "llama", **settings: Any) -> list[Any]:
    source = str(inputs["folder"] / family)
    return ranks.run_ranks(
        train_saved, world_size, folder=str(folder), model_folder=source, data=inputs["data"], **settings
    )


def uninterrupted(inputs: dict[str, Any], world_size: int, family: str = "llama", **settings: Any) -> list[Any]:
    key = (world_size, family, *sorted(settings.items()))
    if key not in inputs["references"]:
        folder = inputs["folder"] / f"reference-{len(inputs['references'])}"
        inputs["references"][key] = run(inputs, world_size, folder, family, **settings)
    return inputs["references"][key]


def of_kind(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in result["events"] if event["kind"] == kind]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"engine": "replicate"}),
        pytest.param(1, {"engine": "shard"}, marks=NEAR),
        pytest.param(2, {"engine": "replicate"}, marks=NEAR),
        (2, {"engine": "shard"}),
        pytest.param(3, {"engine": "replicate"}, marks=NEAR),
        (3, {"engine": "shard", "wire_dtype": "auto"}),
        (2, {"engine": "replicate", "dtype": "bf16", "wire_dtype": "auto"}),
        pytest.param(2, {"engine": "shard", "family": "llama-tied"}, marks=NEAR),
        (2, {"engine": "replicate", "family": "gpt2", "wire_dtype": "auto"}),  # dropout: random numbers go on too
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_killed_after_a_checkpoint_the_run_goes_on_with_the_same_bits(inputs, tmp_path, world_size, settings):
    """Writes are slow here: a save is still under way while later steps change the weights it must not see."""
    reference = uninterrupted(inputs, world_size, **settings)
    with pytest.raises(ranks.RankError) as caught:
        run(inputs, world_size, tmp_path, kill_at=11, slow_writes=True, **settings)
    assert caught.value.kind == "died"
    again = run(inputs, world_size, tmp_path, **settings)
    for rank, (result, expected) in enumerate(zip(again, reference, strict=True)):
        assert result["first_step"] in (5, 9), rank
        assert result["losses"] == {step: expected["losses"][step] for step in range(result["first_step"], STEPS + 1)}
        assert result["digest"] == expected["digest"]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_other_numbers_of_ranks_and_the_other_engine_go_on_with_the_same_numbers(inputs, tmp_path):
    """2 -> 1 -> 4 -> 3 ranks, shard and replicate in turn: each row once, losses as if nothing had happened."""
    reference = uninterrupted(inputs, 1, engine="replicate")[0]
    losses: dict[int, float] = {}
    rows: dict[int, tuple[int, ...]] = {}
    legs = [(2, "shard", 4), (1, "replicate", 7), (4, "shard", 10), (3, "replicate", 13), (3, "shard", None)]
    for world_size, engine, stop_at in legs:
        results = run(inputs, world_size, tmp_path, engine=engine, stop_at=stop_at)
        assert {result["first_step"] for result in results} == {len(losses) + 1}
        for result in results:
            assert result["losses"] == results[0]["losses"]
            assert ("stopped on request after step" in result["ended"]) == (stop_at is not None)
        losses |= results[0]["losses"]
        rows |= results[0]["rows"]
        if stop_at is not None:  # the same step on all ranks, and none lost
            assert max(losses) == stop_at
            assert survey(tmp_path / "checkpoints").sound[0].step == stop_at
    assert losses == pytest.approx(reference["losses"], rel=1e-5)
    assert sorted(chain.from_iterable(rows.values())) == list(range(ROWS))
    assert rows == reference["rows"]


def test_frozen_parameters_stay_as_they_are_on_any_number_of_ranks(inputs, tmp_path):
    """Saved without moments, by other engines on other ranks gone on with, exported as they came."""
    from safetensors.numpy import load_file

    frozen = ("model.embed_tokens", "model.layers.0", "model.norm")
    reference = uninterrupted(inputs, 1, frozen=frozen)[0]
    losses: dict[int, float] = {}
    legs: list[tuple[int, dict[str, Any]]] = [
        (2, {"engine": "shard", "wire_dtype": "auto", "stop_at": 4}),
        (1, {"engine": "replicate", "stop_at": 7}),
        (4, {"engine": "shard", "stop_at": 10}),
        (2, {"engine": "replicate", "export_to": str(tmp_path / "export")}),
    ]
    for world_size, settings in legs:
        losses |= run(inputs, world_size, tmp_path, frozen=frozen, **settings)[0]["losses"]
    assert losses == pytest.approx(reference["losses"], rel=1e-4)  # two ranks' gradients were rounded on their way
    saved = [load_file(path) for path in survey(tmp_path / "checkpoints").sound[0].folder.glob("rank-*")]
    moved = {name.removeprefix("exp_avg/") for tensors in saved for name in tensors if name.startswith("exp_avg/")}
    before, after = (
        load_file(inputs["folder"] / "llama" / "model.safetensors"),
        load_file(tmp_path / "export" / "model.safetensors"),
    )
    assert moved == {name for name in before if not name.startswith(frozen)}
    assert {name for name in before if (before[name] != after[name]).any()} == moved


def test_each_rank_reads_its_own_share_of_a_checkpoint(inputs, tmp_path):
    run(inputs, 1, tmp_path, stop_at=4)
    for result in run(inputs, 4, tmp_path, engine="shard", stop_at=6):
        (load,) = of_kind(result, "load")
        assert load["bytes_read"] < 0.3 * load["tensor_bytes"]


def test_where_a_copy_does_not_fit_the_save_is_streamed(inputs, tmp_path):
    results = run(inputs, 2, tmp_path, engine="shard", memory_limit_bytes=1000, stop_at=9)
    for result in results:
        (choice,) = of_kind(result, "choice")
        assert choice["value"] == "streamed" and "does not fit" in choice["reason"]
        assert [event["step"] for event in of_kind(result, "save")] == [4, 8, 9]
        assert all(event["blocked_seconds"] == event["seconds"] for event in of_kind(result, "save"))
    again = run(inputs, 2, tmp_path, engine="shard")
    assert [result["digest"] for result in again] == [
        result["digest"] for result in uninterrupted(inputs, 2, engine="shard")
    ]


def test_a_failed_save_is_told_on_every_rank_and_training_goes_on(inputs, tmp_path):
    results = run(inputs, 2, tmp_path, engine="replicate", full_at=8)
    for result in results:
        saves = {event["step"]: event for event in of_kind(result, "save")}
        assert {step: event["saved"] for step, event in saves.items()} == {4: True, 8: False, 12: True, 16: True}
        assert "rank 1: No space left on device" in saves[8]["reason"]
        assert result["losses"] == uninterrupted(inputs, 2, engine="replicate")[0]["losses"]
    assert [each.step for each in survey(tmp_path / "checkpoints").sound] == [16, 12]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_storage_that_hangs_is_told_and_training_goes_on(inputs, tmp_path):
    """Once it is waited for, then not again; the last step is saved whatever it takes."""
    for result in run(inputs, 2, tmp_path, engine="replicate", stall_at=4):
        saves = {event["step"]: event for event in of_kind(result, "save")}
        assert {step: event["saved"] for step, event in saves.items()} == {4: True, 8: False, 12: False, 16: True}
        assert all("storage is slow or hangs" in saves[step]["reason"] for step in (8, 12))
        assert result["losses"] == uninterrupted(inputs, 2, engine="replicate")[0]["losses"]
    assert [each.step for each in survey(tmp_path / "checkpoints").sound] == [16, 4]


def test_a_bad_newest_checkpoint_is_passed_over_on_all_ranks_for_the_one_before(inputs, tmp_path):
    run(inputs, 2, tmp_path, engine="shard", stop_at=10)
    path = next((tmp_path / "checkpoints" / "step-00000010").glob("rank-00001*"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    (tmp_path / "checkpoints" / "step-00000099").mkdir()
    for result in run(inputs, 2, tmp_path, engine="shard"):
        texts = [event["text"] for event in of_kind(result, "passed_over")]
        assert texts[0].startswith("checkpoint step-00000099 passed over: manifest.json is missing")
        assert texts[1].startswith("checkpoint step-00000010 passed over: rank-00001-of-00002.safetensors was altered")
        assert result["first_step"] == 9
    final = run(inputs, 2, tmp_path, engine="shard")
    assert final[0]["first_step"] == STEPS + 1
    assert final[0]["digest"] == uninterrupted(inputs, 2, engine="shard")[0]["digest"]


def test_numbers_that_are_none_stop_all_ranks_and_the_last_good_checkpoint_stays(inputs, tmp_path):
    for result in run(inputs, 2, tmp_path, engine="shard", poison_at=6, slow_writes=True):
        assert "step 6" in result["ended"] and "nan" in result["ended"]
    (only,) = survey(tmp_path / "checkpoints").sound
    only.verify()
    assert only.step == 4
