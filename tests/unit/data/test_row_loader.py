from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data.loader import FILLER, RowLoader, StepBatches
from coremill.data.packed import FORMAT_VERSION, PackedData, PackedManifest
from coremill.data.packed_batches import IGNORED, evaluation_batches
from coremill.data.packed_batches import make_loader as make_packed_loader
from coremill.errors import InputError, StorageError

EOS = 0
LENGTH = 6


def write_packing(folder: Path, tokens: np.ndarray) -> None:
    rows, length = tokens.shape
    folder.mkdir(parents=True, exist_ok=True)
    tokens.astype(np.uint16).tofile(folder / "tokens.bin")
    (tokens[:, :-1] == EOS).sum(axis=1).astype(np.uint32).tofile(folder / "boundaries.bin")
    PackedManifest(
        version=FORMAT_VERSION,
        key="k",
        source="x",
        tokenizer="t",
        eos_id=EOS,
        dtype="uint16",
        sequence_length=length,
        rows=rows,
        tokens=tokens.size,
        dropped_tokens=0,
        documents=1,
        empty_documents=0,
        highest_id=int(tokens.max()),
        highest_token="x",
    ).write(folder)


def make_data(folder: Path, rows: int, *, evaluation_rows: int = 0) -> PackedData:
    """Row r holds r in its first place, and some end tokens."""
    random = np.random.default_rng(rows)
    tokens = random.integers(0, 4, (rows, LENGTH))
    tokens[:, 0] = np.arange(rows) + 100
    write_packing(folder / "train", tokens)
    if evaluation_rows:
        write_packing(folder / "evaluation", tokens[:evaluation_rows] + 1)
    return PackedData(
        folder=folder / "train",
        evaluation_folder=folder / "evaluation" if evaluation_rows else None,
        key="key",
        train_rows=rows,
        evaluation_rows=evaluation_rows,
        sequence_length=LENGTH,
        tokens=tokens.size,
        dropped_tokens=0,
        documents=1,
        eos_id=EOS,
        from_cache=False,
        seconds=0.0,
    )


def make_loader(
    data: PackedData,
    rank: int = 0,
    world_size: int = 1,
    rows_per_step: int = 12,
    micro: int = 2,
    across: bool = True,
    seed: int = 5,
) -> RowLoader:
    share = -(-rows_per_step // world_size)
    return make_packed_loader(
        data,
        split="train",
        seed=seed,
        rows_per_step=rows_per_step,
        rank=rank,
        world_size=world_size,
        micro_batch_rows=micro,
        accumulation_steps=-(-share // micro),
        attention_across_documents=across,
    )


def real_rows(step: StepBatches) -> list[int]:
    return [row for batch in step.batches for row in batch.row_ids if row != FILLER]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    world_size=st.integers(1, 5),
    rows_per_step=st.integers(1, 17),
    micro=st.integers(1, 4),
    across=st.booleans(),
)
def test_any_number_of_ranks_sees_the_same_rows_once(
    rows: int, world_size: int, rows_per_step: int, micro: int, across: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = make_data(tmp_path_factory.mktemp("rows"), rows)
    alone = make_loader(data, rows_per_step=rows_per_step, micro=rows_per_step, across=across)
    ranks = [make_loader(data, rank, world_size, rows_per_step, micro, across) for rank in range(world_size)]
    order: list[int] = []
    while len(order) < 2 * rows + rows_per_step:
        expected = alone.next_step()
        steps = [loader.next_step() for loader in ranks]
        order += expected.row_ids
        assert [row for step in steps for row in real_rows(step)] == list(expected.row_ids) == real_rows(expected)
        targets = sum(int((batch.labels[:, 1:] != IGNORED).sum()) for step in steps for batch in step.batches)
        fillers = sum(batch.row_ids.count(FILLER) for step in steps for batch in step.batches)
        for step in steps:
            assert step.row_ids == expected.row_ids and step.epoch == expected.epoch
            assert step.valid_targets == expected.valid_targets == targets
            assert step.tokens == rows_per_step * LENGTH and step.padding_tokens == fillers * LENGTH
            assert len(step.batches) == len(steps[0].batches)
            assert all(batch.input_ids.shape == (micro, LENGTH) for batch in step.batches)
    for epoch in range(len(order) // rows):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_batches_hold_the_rows_they_name(tmp_path: Path) -> None:
    data = make_data(tmp_path, 20)
    stored = np.fromfile(data.folder / "tokens.bin", np.uint16).reshape(20, LENGTH)
    step = make_loader(data, rank=1, world_size=3, rows_per_step=8, micro=2).next_step()
    assert sum(batch.row_ids.count(FILLER) for batch in step.batches) == 1  # ranks have 2, 3 and 3 rows
    for batch in step.batches:
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64 and batch.position_ids is None
        for index, row in enumerate(batch.row_ids):
            if row == FILLER:
                assert (batch.labels[index] == IGNORED).all()
            else:
                assert batch.input_ids[index].tolist() == stored[row].tolist() == batch.labels[index].tolist()


def test_documents_apart(tmp_path: Path) -> None:
    data = make_data(tmp_path, 1)
    write_packing(data.folder, np.array([[7, 8, EOS, 9, EOS, 5]]))
    batch = make_loader(data, rows_per_step=1, micro=2, across=False).next_step().batches[0]
    assert batch.position_ids is not None and batch.position_ids.dtype == torch.int64
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert batch.labels.tolist() == [[7, 8, EOS, IGNORED, EOS, IGNORED], [IGNORED] * 6]
    assert make_loader(data, rows_per_step=1, across=False).next_step().valid_targets == 3
    assert make_loader(data, rows_per_step=1).next_step().valid_targets == 5


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    data = make_data(tmp_path, 30)
    loader = make_loader(data, rows_per_step=30, micro=30)
    first, second = loader.next_step(), loader.next_step()
    state = loader.state()
    assert (first.epoch, second.epoch) == (0, 1) and (state["epoch"], state["position"], state["rows"]) == (2, 0, 30)
    other = make_loader(data, rows_per_step=30, micro=30, seed=6).next_step()
    assert len({first.row_ids, second.row_ids, other.row_ids}) == 3
    assert first.row_ids == make_loader(data, rows_per_step=30, micro=30).next_step().row_ids


@pytest.mark.parametrize(("world_size", "rows_per_step"), [(1, 7), (2, 7), (3, 7), (4, 5)])
def test_restoring_goes_on_where_it_was(tmp_path: Path, world_size: int, rows_per_step: int) -> None:
    data = make_data(tmp_path, 25)
    alone = make_loader(data, rows_per_step=7, micro=7)
    before = [row for _ in range(5) for row in alone.next_step().row_ids]  # into the second epoch
    state = alone.state()
    assert (state["epoch"], state["position"]) == (1, 10)
    after = [row for _ in range(5) for row in alone.next_step().row_ids]
    ranks = [make_loader(data, rank, world_size, rows_per_step) for rank in range(world_size)]
    for loader in ranks:
        loader.restore(state)
        assert loader.state() == state
    resumed: list[int] = []
    while len(resumed) < len(after):
        resumed += [row for loader in ranks for row in real_rows(loader.next_step())]
    assert resumed[: len(after)] == after
    assert sorted((before + after)[:50]) == sorted([*range(25)] * 2)


def test_restoring_other_data_is_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path, 25)
    loader = make_loader(data)
    for changed in ({"key": "other"}, {"seed": 99}, {"rows": 24}):
        with pytest.raises(InputError, match="not the data this run began with"):
            loader.restore({**loader.state(), **changed})


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_takes_each_row_once(tmp_path: Path, world_size: int, across: bool) -> None:
    data = make_data(tmp_path, 30, evaluation_rows=11)
    shares = [
        evaluation_batches(
            data, rank=rank, world_size=world_size, micro_batch_rows=2, max_rows=64, attention_across_documents=across
        )
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert [row for batch in batches for row in batch.row_ids if row != FILLER] == list(range(11))
    targets = sum(int((batch.labels[:, 1:] != IGNORED).sum()) for batch in batches)
    assert {share.valid_targets for share in shares} == {targets}
    assert shares[0].tokens == 11 * LENGTH
    assert [len(list(share)) for share in shares] == [len(share) for share in shares]  # can be walked again


def test_a_small_evaluation_is_spread_over_the_rows(tmp_path: Path) -> None:
    data = make_data(tmp_path, 30, evaluation_rows=20)
    assert evaluation_batches(data, rank=0, world_size=1, micro_batch_rows=2, max_rows=4).row_ids == (0, 5, 10, 15)


def test_no_evaluation_rows_are_no_batches(tmp_path: Path) -> None:
    nothing = evaluation_batches(make_data(tmp_path, 5), rank=0, world_size=2, micro_batch_rows=2, max_rows=4)
    assert list(nothing) == [] and nothing.valid_targets == 0 and nothing.row_ids == ()


def test_a_step_that_does_not_fit_its_micro_batches_is_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path, 5)
    with pytest.raises(ValueError, match="more than 1 micro-batches of 2"):
        make_packed_loader(
            data, seed=1, rows_per_step=6, rank=0, world_size=2, micro_batch_rows=2, accumulation_steps=1
        )
    with pytest.raises(ValueError, match="rank 2 of 2"):
        make_loader(data, rank=2, world_size=2)


def test_packed_data_that_is_gone(tmp_path: Path) -> None:
    data = make_data(tmp_path, 5)
    (data.folder / "tokens.bin").unlink()
    with pytest.raises(StorageError, match="gone or damaged"):
        make_loader(data)


def test_an_end_token_that_begins_the_next_document(tmp_path: Path) -> None:
    """It is asked for at the end of one document, and it is the first position of the next: no target is lost."""
    tokens = np.array([[0, 7, 8, 0, 9, 0], [5, 6, 0, 4, 4, 4]])
    write_packing(tmp_path / "train", tokens)
    np.zeros(2, np.uint32).tofile(tmp_path / "train" / "boundaries.bin")
    data = replace(make_data(tmp_path / "other", 2), folder=tmp_path / "train", begin_ids=(EOS,))
    step = make_loader(data, rows_per_step=2, across=False).next_step()
    (batch,) = step.batches
    order = list(batch.row_ids)
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]][row] for row in order]
    assert batch.labels.tolist() == tokens[order].tolist() and step.valid_targets == 10
