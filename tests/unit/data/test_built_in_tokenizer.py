from __future__ import annotations

from pathlib import Path

import pytest

from coremill.data import built_in_tokenizer as module
from coremill.data.built_in_tokenizer import END_TOKEN, built_in_tokenizer, train_into
from coremill.data.packed import Progress
from coremill.data.sources import TextSource
from coremill.data.tokenizer_files import load_tokenizer
from coremill.errors import InputError


@pytest.fixture
def small_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of a few lines in place of the standard library."""
    path = tmp_path / "corpus.py"
    path.write_text("".join(f"def function_{index}(value):\n    return value + {index}\n\n\n" for index in range(300)))

    def resolve(*arguments: object, **options: object) -> TextSource:
        return TextSource(name="built-in", setting="data.source", kind="built-in", column="text", files=(str(path),))

    monkeypatch.setattr(module, "resolve_source", resolve)
    return path


def test_a_hugging_face_folder_made_once(small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    told: list[Progress] = []
    folder = built_in_tokenizer(tmp_path / "cache", vocabulary=320, progress=told.append)
    assert folder.parent == tmp_path / "cache" / "tokenizers" and told[-1].stage == "train tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    text = "def function_7(value):\n    return 'ünïcödé' + 7\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_TOKEN and len(tokenizer) == 320
    assert load_tokenizer(folder).eos_id == tokenizer.eos_token_id
    assert tokenizer(text)["input_ids"] == list(load_tokenizer(folder).encode([text])[0])

    again = tmp_path / "again"
    again.mkdir()
    train_into(again, 320, [str(small_corpus)], lambda progress: None)
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()

    monkeypatch.setattr(module, "run_in_child", None)
    assert built_in_tokenizer(tmp_path / "cache", vocabulary=320) == folder


def test_key_and_repair(small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: dict[str, object], progress: object) -> None:
        train_into(Path(str(job["destination"])), int(str(job["vocabulary"])), job["files"], lambda progress: None)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run_in_child", run)
    first = built_in_tokenizer(tmp_path, vocabulary=300)
    assert built_in_tokenizer(tmp_path, vocabulary=301) != first
    whole = (first / "tokenizer.json").read_bytes()
    (first / "tokenizer.json").write_bytes(whole[:1000])
    assert built_in_tokenizer(tmp_path, vocabulary=300) == first
    assert (first / "tokenizer.json").read_bytes() == whole
    small_corpus.write_text("other text\n")
    assert built_in_tokenizer(tmp_path, vocabulary=300) != first


def test_too_small_a_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot have 200 tokens"):
        built_in_tokenizer(tmp_path, vocabulary=200)
