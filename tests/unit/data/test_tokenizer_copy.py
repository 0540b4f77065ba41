"""What of a tokenizer's folder is copied into an export: an export may be pushed, and folders hold other things too."""

from __future__ import annotations

import json
from pathlib import Path

from coremill.data.tokenizer_files import files_of_tokenizer, with_chat_template


def test_only_files_of_the_tokenizer_are_copied(tmp_path: Path) -> None:
    tokenizer = ["chat_template.jinja", "merges.txt", "named.vocabulary", "qwen.tiktoken", "spiece.model"]
    others = ["config.json", "credentials.json", "notes.txt", "other.model", "trainer_state.json", "model.safetensors"]
    for name in (*tokenizer, *others):
        (tmp_path / name).write_text("{}")
    named = {"vocab_file": "named.vocabulary", "name_or_path": "notes.txt", "spm_file": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "vocab.json").mkdir()
    expected = sorted([*tokenizer, "tokenizer_config.json"])
    assert [path.name for path in files_of_tokenizer(tmp_path)] == expected
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert [path.name for path in files_of_tokenizer(tmp_path)] == [each for each in expected if each[:5] != "named"]


def test_a_copy_with_another_template_is_named_by_all_it_holds(tmp_path: Path) -> None:
    folder, template = tmp_path / "tokenizer", tmp_path / "chat.jinja"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    template.write_text("{{ messages }}")
    found = {with_chat_template(folder, str(template), tmp_path / "cache")}
    # The last is the model's, which says of what class a tokenizer is whose own files do not.
    for name in ("tokenizer_config.json", "named.vocabulary", "qwen.tiktoken", "spm.model", "config.json"):
        (folder / name).write_text(json.dumps({"vocab_file": "named.vocabulary"}))
        copy = with_chat_template(folder, str(template), tmp_path / "cache")
        assert (copy / name).read_bytes() == (folder / name).read_bytes() and copy not in found
        found.add(copy)
    (folder / "model.safetensors").write_text("not the tokenizer's")
    assert with_chat_template(folder, str(template), tmp_path / "cache") in found
