from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import hub_stand_in
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import FAMILIES, make_chat_tokenizer

from coremill import hub
from coremill.config.schema import RunConfig
from coremill.data.counting import count_rows
from coremill.data.hub_datasets import bytes_on_card, parse_name, resolve_dataset
from coremill.data.packed import PackedData, Progress
from coremill.data.tokenise import prepare_data
from coremill.errors import InputError

CARD = b"""---
configs:
- config_name: small
  data_files:
  - {split: train, path: small/train.parquet}
  - {split: test, path: small/test.parquet}
- config_name: other
  data_files:
  - {split: train, path: small/test.parquet}
---
"""
SECRET = "hf_SecretSecretSecret"


def table(rows: int) -> bytes:
    sink = io.BytesIO()
    columns = {"text": [f"row {index} of the text" for index in range(rows)], "number": list(range(rows))}
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def chat_table() -> bytes:
    sink = io.BytesIO()
    turns = [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "a mill"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"conversations": turns}] * 20), sink)
    return sink.getvalue()


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub_stand_in.Hub]:
    files = {"README.md": CARD, "small/train.parquet": table(60), "small/test.parquet": table(20)}
    card = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: small/train.parquet}\n---\n"
    chats = {"README.md": card, "small/train.parquet": chat_table()}
    served = hub_stand_in.Hub({"some/set": files, "some/closed": files, "some/chats": chats}, gated={"some/closed"})
    home = tmp_path_factory.mktemp("hf")
    with hub_stand_in.serve(served), pytest.MonkeyPatch.context() as patch:
        point_at(served.address, home, patch)
        yield served


def point_at(address: str, home: Path, patch: pytest.MonkeyPatch) -> None:
    """The hub this process and its children will talk to."""
    patch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setenv("HF_ENDPOINT", address)
    patch.setenv("HF_HOME", str(home))
    patch.setenv("HF_TOKEN", SECRET)


def problem(name: str, split: str = "train") -> str:
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        resolve_dataset(name, split=split, setting="data.source")
    assert time.monotonic() - started < 30, "the contract: a bad input is found within 30 s"
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_names() -> None:
    assert parse_name("hf://wikitext:wikitext-2-raw-v1", "data.source") == ("wikitext", "wikitext-2-raw-v1", None)
    assert parse_name("hf://a/b:c@refs/convert/parquet", "data.source") == ("a/b", "c", "refs/convert/parquet")
    assert parse_name("hf://a/b@main", "data.source") == ("a/b", None, "main")
    for wrong in ("hf://", "hf:///", "hf://a/b/c", "hf://:config"):
        with pytest.raises(InputError, match="not the name of a dataset"):
            parse_name(wrong, "data.source")


def test_the_commit_identifies_the_text(stand_in: hub_stand_in.Hub) -> None:
    dataset = resolve_dataset("hf://some/set:small", split="train", setting="data.source")
    assert dataset.commit == hub_stand_in.COMMIT and not dataset.offline
    other = resolve_dataset("hf://some/set:small@main", split="test", setting="data.source")
    assert other.identity != dataset.identity


def test_the_size_of_a_split_is_read_off_the_card(
    stand_in: hub_stand_in.Hub, run_config: Callable[..., RunConfig], tokenizer_folder: Path, tmp_path: Path
) -> None:
    """So that epochs of a dataset that was never fetched have a price; nothing but its card is asked for."""
    options: dict[str, Any] = {"vocabulary_rows": 300, "cache": tmp_path / "empty"}
    config = run_config("hf://some/set:small", sequence_length=10)
    known = resolve_dataset("hf://some/set:small", split="train", setting="data.source")
    assert bytes_on_card(known) is None
    found = count_rows(config, tokenizer_folder=tokenizer_folder, progress=lambda _: None, **options)
    assert found.rows is None and "its card has no size" in found.words
    stand_in.cards["some/set"] = {
        "dataset_info": [
            {"config_name": "large", "splits": [{"name": "train", "num_bytes": 9}]},
            {
                "config_name": "small",
                "splits": [{"name": "test", "num_bytes": 5}, {"name": "train", "num_bytes": 4000}],
            },
        ]
    }
    assert bytes_on_card(known) == 4000
    found = count_rows(config, tokenizer_folder=tokenizer_folder, progress=lambda _: None, **options)
    assert found.rows == 4000 / 4 / 10 and found.is_estimate and "by the dataset's card" in found.words


def test_what_the_hub_says_in_our_words(stand_in: hub_stand_in.Hub) -> None:
    message = problem("hf://some/closed")
    assert "some/closed is gated" in message and "hf auth login" in message
    message = problem("hf://some/missing")
    assert "the hub has no dataset some/missing" in message and "check the spelling" in message
    message = problem("hf://some/set@v9")
    assert "has no revision 'v9'" in message
    assert "cannot be the name of a dataset" in problem("hf://some/--set")


def prepared(config: RunConfig, folder: Path, cache: Path, told: list[Progress]) -> PackedData:
    return prepare_data(
        config, tokenizer_folder=folder, vocabulary_rows=300, max_positions=None, cache=cache, progress=told.append
    )


def test_a_dataset_is_packed_and_serves_offline_too(
    stand_in: hub_stand_in.Hub,
    run_config: Callable[..., RunConfig],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "set").mkdir(parents=True)  # a folder of that name must not be taken for the dataset
    told: list[Progress] = []
    source = "hf://some/set:small"
    data = prepared(run_config(source, evaluation_split="test"), tokenizer_folder, tmp_path / "cache", told)
    assert data.documents == 80 and data.evaluation_folder is not None
    assert PackedData.from_json(json.loads(json.dumps(data.to_json()))).commits == {source: hub_stand_in.COMMIT}
    assert [stage for stage, _ in groupby(progress.stage for progress in told)] == ["download", "tokenise"] * 2
    assert [progress.is_done for progress in told if progress.stage == "tokenise"] == [False, True] * 2
    assert told[-1].bytes_done == pytest.approx(told[-1].bytes_total, abs=2)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        again = prepared(run_config(source, evaluation_split="test"), tokenizer_folder, tmp_path / "cache", told)
        assert again.from_cache and again.key == data.key
        offline = prepared(run_config(source, sequence_length=9), tokenizer_folder, tmp_path / "cache", told)
        assert offline.documents == 60 and not offline.from_cache


def test_offline_a_pinned_revision_is_that_revision(
    run_config: Callable[..., RunConfig], tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0 read the newest commit on the machine, and kept its rows under the key of the pinned one."""
    older, absent = "0ddba11" + "0" * 33, "deadbeef" + "0" * 32
    contents = {
        rows: {"README.md": CARD, "small/train.parquet": table(rows), "small/test.parquet": table(3)}
        for rows in (30, 60)
    }
    served = hub_stand_in.Hub({"some/set": contents[60]}, earlier={older: contents[30]})
    cache, told = tmp_path / "cache", list[Progress]()
    with hub_stand_in.serve(served):
        point_at(served.address, tmp_path / "hf", monkeypatch)
        for revision, documents in ((older, 30), (hub_stand_in.COMMIT, 60)):
            data = prepared(run_config(f"hf://some/set:small@{revision}"), tokenizer_folder, cache, told)
            assert data.documents == documents
    point_at("http://127.0.0.1:9", tmp_path / "hf", monkeypatch)

    def offline(revision: str, config: str = "small") -> PackedData:
        return prepared(
            run_config(f"hf://some/set:{config}{revision}", sequence_length=9), tokenizer_folder, cache, told
        )

    assert offline(f"@{older}").documents == 30
    assert offline(f"@{older[:7]}").from_cache
    assert offline(f"@{hub_stand_in.COMMIT}").documents == 60 == offline("").documents
    for revision in (absent, "v1.0"):  # no commit is on record for a tag that nobody asked the hub for
        message = problem(f"hf://some/set:small@{revision}")
        assert revision in message and older in message and "name a whole commit" in message
    with pytest.raises(InputError, match=f"not on this machine at commit {older}") as caught:
        offline(f"@{older}", config="other")
    assert "were prepared here: none" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "data", "parts"),
    [
        ("hf://some/set:tiny", {}, ["has no config 'tiny'", "'small', 'other'", "hf://some/set:CONFIG"]),
        ("hf://some/set:small", {"split": "dev"}, ["has no split 'dev'", "'train', 'test'", "data.split"]),
        ("hf://some/set:small", {"column": "txt"}, ["no column 'txt'; did you mean 'text'?", "text, number"]),
    ],
)
def test_wrong_config_split_and_column(
    source: str,
    data: dict[str, str],
    parts: list[str],
    stand_in: hub_stand_in.Hub,
    run_config: Callable[..., RunConfig],
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError) as caught:
        prepared(run_config(source, **data), tokenizer_folder, tmp_path / "cache", [])
    for part in parts:
        assert part in str(caught.value)


def test_an_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        point_at(f"http://user:{SECRET}@127.0.0.1:{closed.getsockname()[1]}", tmp_path, monkeypatch)
        message = problem("hf://some/set")
    assert "cannot reach the Hugging Face hub for the dataset some/set" in message and "check the network" in message


def test_a_silent_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "REQUEST_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_at(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        assert "cannot reach the Hugging Face hub" in problem("hf://some/set")


def test_a_request_that_never_ends_is_given_up() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        hub.within(0.05, lambda: release.wait(60))
    release.set()


def test_offline_by_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    point_at("http://127.0.0.1:9", tmp_path, monkeypatch)
    message = problem("hf://some/set")
    assert "HF_HUB_OFFLINE is set" in message


def test_secrets_never_reach_a_message() -> None:
    text = hub.plain(RuntimeError(f"GET https://user:pass@host/x with Bearer abc.def and {SECRET}"))
    assert "pass" not in text and "abc.def" not in text and "Secret" not in text and json.dumps(text)


def test_a_dataset_of_conversations_is_known_by_its_columns_and_these_are_remembered(
    stand_in: hub_stand_in.Hub, run_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    tokenizer = make_chat_tokenizer(tmp_path / "chat", FAMILIES["chatml"])
    told: list[Progress] = []

    def prepared() -> PackedData:
        config = run_config("hf://some/chats", sequence_length=128)
        options: dict[str, Any] = {"vocabulary_rows": 400, "max_positions": None, "progress": told.append}
        return prepare_data(config, tokenizer_folder=tokenizer, cache=tmp_path / "cache", **options)

    data = prepared()
    assert data.conversations is not None and data.documents == 20 and data.conversations.learned_tokens
    assert data.notes == ("hf://some/chats holds conversations: the form of ShareGPT, known by column 'conversations'",)
    told.clear()
    again = prepared()
    assert again.from_cache and again.key == data.key and told == []
