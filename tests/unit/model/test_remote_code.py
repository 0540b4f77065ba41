"""Code that comes with a model is run only where it is asked for and pinned, and then exactly what was pinned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coremill.config.load import load_config
from coremill.config.schema import ModelSection, RunConfig
from coremill.errors import InputError
from coremill.model.build import build_on_meta
from coremill.model.source import resolve_model
from coremill.remote_code import checked_copy, code_sha256, read_code
from coremill.tasks.causal_lm import CausalLm
from own_code import AUTO_MAP, add_own_code
from tiny_models import make_config_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "0" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return add_own_code(make_config_folder(tmp_path / "own", "llama"))


def trusting(folder: Path, sha256: str | None, **others: object) -> ModelSection:
    values = {"name": str(folder), "weights": "random", "trust_remote_code": True, "code_sha256": sha256, **others}
    return ModelSection.model_validate(values)


def refusal(section: ModelSection, cache: Path) -> str:
    with pytest.raises(InputError) as caught:
        resolve_model(section, CausalLm(RunConfig()), cache=cache)
    assert caught.value.exit_code == 78 and caught.value.where and caught.value.do
    return str(caught.value)


def refused_config(tmp_path: Path, model: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(f"train: {{steps: 5}}\nmodel: {model}\n")
    with pytest.raises(InputError) as caught:
        load_config(path)
    return str(caught.value)


def test_the_hash_is_that_of_sha256sum(folder: Path) -> None:
    printed = subprocess.run(
        "LC_ALL=C sha256sum *.py | sha256sum", shell=True, cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    files = read_code(folder)
    assert printed.split()[0] == code_sha256(files)
    name, content = next(iter(files.items()))
    changes = [{name: content + b"#"}, {"new.py": b""}]
    changed = [{**files, **change} for change in changes] + [{**files, f"x{name}": files[name]}]
    assert len({code_sha256(each) for each in [files, *changed]}) == 4


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12], COMMIT.upper()])
def test_a_hub_model_needs_a_full_commit(tmp_path: Path, revision: str | None) -> None:
    pin = "" if revision is None else f", revision: '{revision}'"
    message = refused_config(tmp_path, f"{{name: some/model, trust_remote_code: true{pin}}}")
    assert f"model.revision is {revision or 'left out'}, not a full commit" in message
    assert "can be moved" in message and "run.yaml:2 (model.trust_remote_code)" in message


def test_a_full_commit_serves(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"train: {{steps: 5}}\nmodel: {{name: a/b, trust_remote_code: true, revision: '{COMMIT}'}}\n")
    assert load_config(path).config.model.trust_remote_code
    assert not load_config(None).config.model.trust_remote_code


def test_a_folder_needs_a_hash_and_is_told_it(tmp_path: Path, folder: Path) -> None:
    expected = f"set model.code_sha256: {code_sha256(read_code(folder))}"
    message = refused_config(tmp_path, f"{{name: {folder}, trust_remote_code: true}}")
    assert expected in message and "configuration_own.py, modeling_own.py" in message
    assert expected in refusal(trusting(folder, None), tmp_path)


def test_other_code_is_refused_by_both_hashes(tmp_path: Path, folder: Path) -> None:
    message = refusal(trusting(folder, OTHER), tmp_path)
    assert OTHER in message and code_sha256(read_code(folder)) in message


def test_nothing_to_trust(tmp_path: Path) -> None:
    plain = make_config_folder(tmp_path / "plain", "llama")
    assert "holds no code" in refusal(trusting(plain, OTHER), tmp_path)
    (plain / "stray.py").write_text("")
    assert "no code of its own" in refusal(trusting(plain, code_sha256(read_code(plain))), tmp_path)
    assert "no model with code of its own is named" in refused_config(tmp_path, "{trust_remote_code: true}")
    assert "must be 64 hexadecimal digits" in refused_config(tmp_path, "{name: a/b, code_sha256: abc}")


def test_a_model_that_needs_its_code_says_what_to_do(tmp_path: Path, folder: Path) -> None:
    message = refusal(ModelSection(name=str(folder), weights="random"), tmp_path)
    assert "its own code would have to be run" in message and "model.trust_remote_code: true" in message


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("other/repo--modeling_own.OwnForCausalLM", "lies in another repository: other/repo--modeling_own"),
        ("absent.OwnForCausalLM", "auto_map names absent.OwnForCausalLM, and there is no such code file"),
        ("/tmp/modeling_own.OwnForCausalLM", "there is no such code file"),
        ("modeling_own", "there is no such code file"),
    ],
)
def test_classes_from_elsewhere_are_refused(tmp_path: Path, folder: Path, reference: str, message: str) -> None:
    add_own_code(folder, auto_map={**AUTO_MAP, "AutoModelForCausalLM": reference})
    assert message in refusal(trusting(folder, code_sha256(read_code(folder))), tmp_path)
    add_own_code(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": [None, reference]}}))
    assert message in refusal(trusting(folder, code_sha256(read_code(folder))), tmp_path)


def test_pinned_code_is_built_from_a_copy_of_its_own(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("COREMILL_CACHE", str(cache))
    source = resolve_model(trusting(folder, code_sha256(read_code(folder))), CausalLm(RunConfig()), cache=cache)
    model = build_on_meta(source)
    assert type(model).__name__ == "OwnForCausalLM"
    assert all(parameter.is_meta for parameter in model.parameters())
    file = Path(sys.modules[type(model).__module__].__file__ or "")
    assert (cache / "code").stat().st_mode & 0o077 == 0
    assert source.code_sha256 in str(file) and "code" in file.parts
    assert file.read_bytes() == (folder / "modeling_own.py").read_bytes()


def test_code_that_changed_after_the_check_is_not_run(tmp_path: Path, folder: Path) -> None:
    sha256 = code_sha256(read_code(folder))
    canary = tmp_path / "canary"
    with (folder / "modeling_own.py").open("a") as stream:
        stream.write(f"open({str(canary)!r}, 'w').close()\n")
    with pytest.raises(InputError, match="not the code that model.code_sha256 names"):
        checked_copy(folder, sha256, tmp_path / "cache")
    assert not canary.exists()


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path, folder: Path) -> None:
    cache = tmp_path / "open"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(InputError, match="is not safe to run code from(?s:.)*mode 0777"):
        checked_copy(folder, code_sha256(read_code(folder)), cache)
