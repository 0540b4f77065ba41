"""`data.sources`: entries keep their lines, all mistakes come at once, and what is shown loads again."""

from __future__ import annotations

from pathlib import Path

import pytest

from coremill.config.load import load_config
from coremill.config.show import show
from coremill.errors import ConfigError, InputError

HEAD = "train: {steps: 3}\ndata:\n"


def load(path: Path, text: str, *overrides: str):
    path.write_text(text)
    return load_config(path, overrides)


def problems(path: Path, text: str, *overrides: str) -> list[InputError]:
    with pytest.raises(ConfigError) as caught:
        load(path, text, *overrides)
    return list(caught.value.problems)


def test_entries_are_mappings_or_short(tmp_path: Path) -> None:
    text = HEAD + "  sources:\n    - a.txt\n    - source: b.csv\n      column: body\n"
    loaded = load(tmp_path / "run.yaml", text)
    short, whole = loaded.config.data.sources
    assert (short.source, short.share, whole.source, whole.column) == ("a.txt", None, "b.csv", "body")
    assert loaded.where("data.sources[1].column").endswith("run.yaml:6 (data.sources[1].column)")
    again = load(tmp_path / "shown.yaml", show(loaded))
    assert again.config == loaded.config


def test_an_error_found_later_is_placed_at_the_entry(tmp_path: Path) -> None:
    loaded = load(tmp_path / "run.yaml", HEAD + "  sources:\n    - {source: a.txt}\n    - {source: b.txt}\n")
    with pytest.raises(InputError) as caught, loaded.placing():
        raise InputError("gone", where="data.sources[1].source: b.txt")
    assert caught.value.where == f"{tmp_path}/run.yaml:5 (data.sources[1].source): b.txt"


def test_all_mistakes_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = HEAD + "  sources:\n    - {source: a.txt, shar: 0.5}\n    - {source: b.txt, share: -1}\n    - {share: 0.2}\n"
    found = problems(tmp_path / "run.yaml", text)
    assert [problem.what for problem in found] == [
        "unknown key data.sources[0].shar",
        "data.sources[1].share must be a number above 0 and of at most 1 or null, not -1",
        "data.sources[2] has no source",
    ]
    lines = [str(problem.where).partition("run.yaml:")[2].partition(" ")[0] for problem in found]
    assert lines == ["4", "5", "6"] and found[0].do == "did you mean share?"


def test_names_of_other_tools_in_an_entry(tmp_path: Path) -> None:
    text = HEAD + "  sources:\n    - {path: a.txt, weight: 7}\n    - {dataset: b.txt, weight: 3, text_field: body}\n"
    found = problems(tmp_path / "run.yaml", text)
    assert [(str(problem.where).rpartition(".")[2], problem.do) for problem in found] == [
        ("path)", "write source: a.txt"),
        ("weight)", "write share: 0.7"),
        ("dataset)", "write source: b.txt"),
        ("weight)", "write share: 0.3"),
        ("text_field)", "write column: body"),
    ]


@pytest.mark.parametrize(
    ("sources", "what"),
    [
        ("[{source: a, share: 0.5}, {source: b, share: 0.4}]", "add up to 0.9, not to 1"),
        ("[{source: a, share: 0.9}, {source: b, share: 0.9}]", "add up to 1.8, not to 1"),
        ("[{source: a, share: 0.5}, b]", "data.sources[1] (b) has no share"),
        ("[{source: a, share: 0}]", "must be a number above 0"),
        ("[{source: a, share: 70}]", "must be a number above 0 and of at most 1"),
        ("[{source: a, share: most}]", "not the text 'most'"),
        ("[a, b, a]", "data.sources has a twice"),
        ("[{source: a, split: test}]", "has a split, but a is not an hf:// dataset"),
        ("[]", "not an empty list"),
        ("a.txt", "must be a list or null, not the text 'a.txt'"),
        ("[a, [b]]", "data.sources[1] must be a mapping, not a list"),
    ],
)
def test_shares_and_sources_that_are_none(tmp_path: Path, sources: str, what: str) -> None:
    (problem,) = problems(tmp_path / "run.yaml", HEAD + f"  sources: {sources}\n")
    assert what in problem.what and "run.yaml:3 (data.sources" in str(problem.where) and problem.do


def test_thirds_are_meant_and_one_text_may_give_two_columns(tmp_path: Path) -> None:
    thirds = "[{source: a, share: 0.33}, {source: b, share: 0.33}, {source: c, share: 0.33}]"
    load(tmp_path / "run.yaml", HEAD + f"  sources: {thirds}\n")
    load(
        tmp_path / "run.yaml",
        HEAD + "  sources: [{source: a.csv, column: question}, {source: a.csv, column: answer}]\n",
    )


def test_source_and_sources_and_what_goes_with_them(tmp_path: Path) -> None:
    both = problems(tmp_path / "run.yaml", HEAD + "  source: a.txt\n  sources: [b.txt]\n")
    assert both[0].what == "data.sources is given together with data.source (a.txt)"
    assert "run.yaml:4" in str(both[0].where) and "run.yaml:3" in str(both[0].where)
    split = problems(tmp_path / "run.yaml", HEAD + "  sources: ['hf://x', b]\n  evaluation_split: test\n")
    assert "together with data.sources" in split[0].what
    named = "  sources: ['hf://x', b]\n  split: half\n  evaluation_source: 'hf://x'\n  evaluation_split: test\n"
    assert load(tmp_path / "run.yaml", HEAD + named).config.data.split == "half"
    loaded = load_config(None, ["data.sources=[a.txt]", "train.steps=1"])
    assert loaded.without_file is not None and "data.sources by --set" in loaded.without_file


def test_the_last_list_wins_with_its_own_places(tmp_path: Path) -> None:
    text = HEAD + "  sources:\n    - {source: a, share: 0.5}\n    - {source: b, share: 0.5}\n"
    loaded = load(tmp_path / "run.yaml", text, "data.sources=[{source: c}]")
    assert [entry.source for entry in loaded.config.data.sources] == ["c"]
    assert "data.sources[1]" not in loaded.origins and loaded.where("data.sources[0].source").startswith("--set")


@pytest.mark.parametrize("key", ["data.sources.1.share", "data.sources[1].share"])
def test_one_entry_is_not_set_alone(tmp_path: Path, key: str) -> None:
    text = HEAD + "  sources: [{source: a, share: 0.5}, {source: b, share: 0.6}]\n"
    (problem,) = problems(tmp_path / "run.yaml", text, f"{key}=0.5")
    assert problem.what == "one entry of data.sources cannot be set alone" and f"--set {key}=0.5" == problem.where
    cure = str(problem.do).partition("--set '")[2].rstrip("'")
    assert cure == "data.sources=[{source: a, share: 0.5}, {source: b, share: 0.5}]"
    load(tmp_path / "run.yaml", text, cure)
    (problem,) = problems(tmp_path / "run.yaml", HEAD + "  source: a.txt\n", f"{key}=0.5")
    assert "--set 'data.sources=[{source: ..., share: ...}" in str(problem.do)
