"""Sources in shares: the order, by property; and the whole way from a run file to batches, with small packings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.config.schema import RunConfig
from coremill.data import tokenise as prepare
from coremill.data.mixing import Mix, shares_of
from coremill.data.packed import PackedData
from coremill.data.packed_rows import PackedRows, order_of
from coremill.data.row_orders import MixedOrder
from coremill.data.tokenise import check_sources, prepare_data
from coremill.data.tokenise_child import Speaker, do_job
from coremill.errors import InputError

WEIGHTS = st.lists(st.floats(0.001, 1), min_size=1, max_size=6)


def mix_of(weights: list[float]) -> Mix:
    return Mix(shares_of(weights, [1] * len(weights)))


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, rows=st.integers(0, 3000), stretch=st.integers(1, 200))
def test_every_stretch_of_a_run_has_the_shares(weights: list[float], rows: int, stretch: int) -> None:
    mix = mix_of(weights)
    before, after = mix.taken(rows), mix.taken(rows + stretch)
    assert sum(before) == rows and sum(after) == rows + stretch
    off = (len(weights) + 1) / 2  # rows, by which a source may be early or late
    for source, share in enumerate(mix.shares):
        assert abs(before[source] - share * rows) <= off
        assert abs(after[source] - before[source] - share * stretch) <= 2 * off


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, first=st.integers(0, 500), count=st.integers(0, 100))
def test_a_stretch_is_the_same_whoever_asks_from_wherever(weights: list[float], first: int, count: int) -> None:
    mix = mix_of(weights)
    whole = list(mix.draws(0, first + count))
    assert list(mix.draws(first, count)) == whole[first:]
    counted = Counter(source for source, _ in whole)
    assert mix.taken(first + count) == tuple(counted[source] for source in range(len(weights)))
    for source in counted:  # each source's rows come one after the other, none left out
        assert [index for drawn, index in whole if drawn == source] == list(range(counted[source]))


@settings(max_examples=60, deadline=None)
@given(
    weights=WEIGHTS, sizes=st.lists(st.integers(1, 40), min_size=6, max_size=6), seed=st.integers(0, 99), data=st.data()
)
def test_every_row_is_used_as_often_as_said(
    weights: list[float], sizes: list[int], seed: int, data: st.DataObject
) -> None:
    rows = tuple(sizes[: len(weights)])
    order = MixedOrder(mix_of(weights), rows, seed)
    total = 3 * sum(rows)
    ids = order.rows(0, total)
    cut = data.draw(st.integers(0, total))
    assert order.rows(0, cut).tolist() + order.rows(cut, total - cut).tolist() == ids.tolist()
    used = np.bincount(ids, minlength=sum(rows))
    taken, start = order.mix.taken(total), 0
    for count, size in zip(taken, rows, strict=True):
        often = used[start : start + size]
        assert often.sum() == count and often.min() == count // size and often.max() == -(-count // size)
        start += size


def test_without_shares_an_epoch_has_every_row_once() -> None:
    rows = (700, 1, 299)
    order = MixedOrder(Mix(shares_of([None] * 3, rows)), rows, 7)
    for epoch in range(3):
        assert sorted(order.rows(epoch * 1000, 1000).tolist()) == list(range(1000))
    assert order.rows(0, 1000).tolist() != order.rows(1000, 1000).tolist()


# --- the whole way ---


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: dict[str, Any], on_progress: object = None) -> dict[str, Any]:
        with Path("/dev/null").open("wb") as nowhere:
            return do_job(job, Speaker(nowhere))

    monkeypatch.setattr(prepare, "run_in_child", run)


@pytest.fixture
def make(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., PackedData]:
    """The data stage over large.jsonl (400 documents), small.csv (40) and what a test writes beside them."""
    words = [f"document {index} about the mill and the store" for index in range(440)]
    (tmp_path / "large.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words[:400]))
    (tmp_path / "small.csv").write_text("body\n" + "".join(f"{text.upper()}\n" for text in words[400:]))

    def prepared(*sources: dict[str, Any], seed: int = 7, **data: Any) -> PackedData:
        entries = [{**entry, "source": str(tmp_path / entry["source"])} for entry in sources]
        section = {"sources": entries, "sequence_length": 8, **data}
        config = RunConfig.model_validate({"data": section, "train": {"seed": seed, "steps": 1}})
        check_sources(config.data, max_positions=None)
        return prepare_data(
            config, tokenizer_folder=tokenizer_folder, vocabulary_rows=300, max_positions=None, cache=tmp_path / "cache"
        )

    return prepared


LARGE, SMALL = {"source": "large.jsonl"}, {"source": "small.csv", "column": "body"}


def test_shares_hold_over_an_epoch_and_each_source_is_counted(make: Callable[..., PackedData]) -> None:
    data = make({**LARGE, "share": 0.7}, {**SMALL, "share": 0.3})
    large, small = data.sources
    assert (large.documents, small.documents, data.documents) == (400, 40, 440)
    assert data.train_rows == large.rows + small.rows and data.tokens == large.tokens + small.tokens
    ids = order_of(data, 7).rows(0, data.train_rows)
    from_large = np.count_nonzero(ids < large.rows) / len(ids)
    assert abs(from_large - 0.7) < 0.01
    counts = data.counts()["sources"]
    assert [one["share"] for one in counts] == [0.7, 0.3] == [one["share_asked"] for one in counts]
    assert counts[1]["passes_per_epoch"] == pytest.approx(0.3 * data.train_rows / small.rows) and small.rows > 20
    assert PackedData.from_json(json.loads(json.dumps(data.to_json()))) == data


def test_rows_are_read_from_the_packing_they_belong_to(make: Callable[..., PackedData]) -> None:
    data = make(LARGE, SMALL)
    rows = PackedRows(data, "train")
    ids = order_of(data, 7).rows(0, 50)
    whole = [np.fromfile(source.folder / "tokens.bin", np.uint16) for source in data.sources]
    stacked = np.concatenate(
        [tokens[: source.tokens].reshape(-1, 8) for tokens, source in zip(whole, data.sources, strict=True)]
    )
    assert rows.tokens(ids).tolist() == stacked[ids].tolist()
    lost = (stacked[ids][:, :-1] == data.eos_id).sum()
    assert rows.lost_targets(ids) == lost > 0
    assert [rows.part_of(row) for row in (0, data.sources[0].rows - 1, data.sources[0].rows)] == [0, 0, 1]


def test_other_shares_are_other_data_but_nothing_is_tokenised_again(make: Callable[..., PackedData]) -> None:
    first = make({**LARGE, "share": 0.7}, {**SMALL, "share": 0.3})
    again = make({**LARGE, "share": 0.7}, {**SMALL, "share": 0.3})
    other = make({**LARGE, "share": 0.5}, {**SMALL, "share": 0.5})
    assert again.key == first.key != other.key and other.from_cache
    assert make(LARGE, SMALL).key not in (first.key, other.key)
    assert make(SMALL, LARGE).key != make(LARGE, SMALL).key  # rows are numbered in the order of the list


def test_a_share_of_each_source_is_held_out(make: Callable[..., PackedData]) -> None:
    data = make({**LARGE, "share": 0.5}, {**SMALL, "share": 0.5}, evaluation_fraction=0.1)
    held = PackedRows(data, "evaluation")
    assert held.count == data.evaluation_rows == sum(source.evaluation_rows for source in data.sources)
    assert all(source.evaluation_rows and source.evaluation_documents for source in data.sources)
    assert len(held.tokens(np.arange(held.count))) == held.count
    assert data.evaluation_words.count("held out") == 2 and "small.csv: held out" in data.evaluation_words
    assert data.documents == 440 and len(data.files()) == 8


def test_one_text_for_evaluation_beside_several_for_training(make: Callable[..., PackedData], tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("words that are held out, and enough of them for some rows of eight tokens")
    data = make(LARGE, SMALL, evaluation_source=str(tmp_path / "held.txt"))
    assert data.evaluation_rows and PackedRows(data, "evaluation").count == data.evaluation_rows
    assert data.evaluation_documents == 1 and data.documents == 441 and len(data.files()) == 6


def test_a_file_in_two_sources(make: Callable[..., PackedData]) -> None:
    with pytest.raises(InputError, match="the same text is in two of the sources") as caught:
        make(LARGE, {"source": "*.jsonl"})
    assert "large.jsonl belongs to" in str(caught.value.why) and "data.sources[1].source" in str(caught.value.where)


def test_a_source_that_is_not_there(make: Callable[..., PackedData]) -> None:
    with pytest.raises(InputError, match="no such file") as caught:
        make(LARGE, {"source": "missing.csv"})
    assert "data.sources[1].source: " in str(caught.value.where)
