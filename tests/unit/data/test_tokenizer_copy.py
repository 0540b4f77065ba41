"""What of a tokenizer's folder is copied into an export: an export may be pushed, and folders hold other things too."""

from __future__ import annotations

import json
from pathlib import Path

from coremill.data.tokenizer_files import files_of_tokenizer


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
