"""The image, by its text: no CUDA, no compiler, no root, and a lock with a hash for everything that is installed."""

from __future__ import annotations

import re
import tomllib

import pytest
from house import ROOT

CONTAINERFILE = (ROOT / "containers/Containerfile").read_text()
LOCK = (ROOT / "containers/requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# As scripts/lock_image.py has them.
EXTRAS = set(PROJECT["optional-dependencies"]) - {"k8s", "dev", "docs", "peers"}


def instructions() -> list[tuple[str, str]]:
    """Keyword and the rest, comments left out and lines joined."""
    text = "\n".join(line for line in CONTAINERFILE.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package that Python 3.11 on Linux takes."""
    found = {}
    for block in re.split(r"\n(?=\S)", LOCK):
        match = re.match(r"([\w.-]+)==([\w.]+)( ; .*?)?( \\|$)", block)
        if match is not None and not re.search(r">= '3.1[2-9]|== '(win32|emscripten)'$", match[3] or ""):
            found[match[1]] = (match[2], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)))
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_line_of_the_lock_is_a_version_with_hashes() -> None:
    assert len(locked()) > 50
    without = [name for name, (_, hashes) in locked().items() if hashes == 0]
    assert without == []
    for line in LOCK.splitlines():
        assert re.match(r"#|[\w.-]+==[\w.]+( ; .*)? \\$|    --hash=sha256:[0-9a-f]{64}( \\)?$", line), line


def test_the_lock_has_what_the_project_requires_in_the_versions_of_its_constraints() -> None:
    needed = [*PROJECT["dependencies"], *(one for extra in EXTRAS for one in PROJECT["optional-dependencies"][extra])]
    names = {canonical(re.split(r"[<>=!~\[; ]", one)[0]) for one in needed} - {"torch"}
    assert names - set(locked()) == set(), "make lock"
    constraints = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    wrong = {
        name: (version, locked()[canonical(name)][0])
        for name, version in constraints
        if canonical(name) in locked() and locked()[canonical(name)][0] != version
    }
    assert wrong == {}, "make lock"


def test_the_lock_has_neither_torch_nor_cuda() -> None:
    assert [name for name in locked() if re.match(r"torch$|nvidia|cuda|triton", name)] == []


def test_packages_are_wheels_by_hash_and_no_stage_has_a_compiler() -> None:
    steps = [rest for word, rest in instructions() if word == "RUN"]
    installs = [re.search(r"pip install (.*)", step)[1] for step in steps if "pip install" in step]  # type: ignore[index]
    assert len(installs) == 3 and all("--no-deps" in one for one in installs)
    of_torch, of_lock, of_coremill = installs
    assert "TORCH_INDEX" in of_torch and "--require-hashes" in of_lock and "--no-index" in of_coremill
    assert "PIP_ONLY_BINARY=:all:" in CONTAINERFILE
    packages = " ".join(re.findall(r"apt-get install ([^&]*)", " ".join(steps))).split()
    assert not re.findall(r"\b(g?cc|g\+\+|clang|build-essential|make|cuda\S*|nvidia\S*)\b", " ".join(packages)), (
        packages
    )


def test_its_arguments_have_defaults_and_its_version_is_the_projects() -> None:
    given = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    assert given == {
        "BASE": "docker.io/library/debian:bookworm-slim",
        "TORCH_INDEX": "https://download.pytorch.org/whl/cpu",
        "VERSION": PROJECT["version"],
    }
    assert all(rest.startswith(("${BASE}", "scratch")) for word, rest in instructions() if word == "FROM")
    assert 'org.opencontainers.image.version="${VERSION}"' in CONTAINERFILE


@pytest.mark.parametrize("word", ["USER", "ENTRYPOINT"])
def test_it_runs_coremill_and_not_as_root(word: str) -> None:
    last = CONTAINERFILE[CONTAINERFILE.rindex("\nFROM") :]
    (value,) = [rest for one, rest in instructions() if one == word]
    assert word in last and value == {"USER": "10001:10001", "ENTRYPOINT": '["coremill"]'}[word]
