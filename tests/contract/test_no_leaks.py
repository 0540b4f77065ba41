"""What is in the repository is the project's own: no machine's paths, no strangers' hosts, no secrets, no pickles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from house import ROOT, file_of, sources, text_files

# Every address in the project's files belongs to one of these; a new one is a decision.
HOSTS = {
    "127.0.0.1": "tests serve on loopback",
    "169.254.169.254": "the metadata service of an EC2 instance, by definition that instance's own",
    "git-lfs": "how pointer files of git-lfs begin",
    "git-lfs.github.com": "how pointer files of git-lfs begin",
    "localhost": "tests serve on loopback",
    "download.pytorch.org": "where users get the CPU build of torch",
    "github.com": "links",
    "huggingface.co": "the hub's default address",
    "json-schema.org": "names the dialect of our JSON Schema",
    "keepachangelog.com": "the form of CHANGELOG.md",
    "raw.githubusercontent.com": "scripts/refresh_instances.py reads a public table there",
    "semver.org": "the meaning of version numbers",
    "www.apache.org": "LICENSE",
    "www.w3.org": "names the SVG and XML dialects in pictures",
    "x": "a test's made-up address",
    "user": "a test's made-up address with a password in it",
}
THIS_FILE = Path(__file__).relative_to(ROOT).as_posix()
URL = re.compile(r"\bhttps?://([A-Za-z0-9._-]+)")

# Absolute paths of somebody's machine.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:work|root|workspace|Users)\b|(?<![\w.}])/home/(?!me\b)\w+")

SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9-]{20,}"
    r"|\bxox[abp]-\w{10,}|\bnpm_\w{20,}|-----BEGIN [A-Z ]*PRIVATE KEY|\beyJ[A-Za-z0-9_-]{20,}\.eyJ"
)
MADE_UP = re.compile("secret", re.IGNORECASE)  # the tests' own tokens say so

ABOUT_ITS_MAKING = re.compile(r"\bthis session\b|\bsub-?agents?\b|\bas an AI\b", re.IGNORECASE)


def findings(pattern: re.Pattern[str]) -> list[str]:
    """Where a pattern occurs in the project's files, this one aside."""
    return [
        f"{path}:{number}: {line.strip()[:120]}"
        for path, text in text_files().items()
        if path != THIS_FILE
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_addresses_are_known_ones():
    hosts = {host: path for path, text in text_files().items() for host in URL.findall(text)}
    assert {host: path for host, path in hosts.items() if host not in HOSTS} == {}


def test_no_paths_of_a_machine():
    assert findings(MACHINE_PATH) == []


def test_no_secrets():
    assert [found for found in findings(SECRETS) if not MADE_UP.search(found)] == []


def test_no_words_about_its_making():
    assert findings(ABOUT_ITS_MAKING) == []


def test_the_package_reads_nothing_beside_the_repository():
    beside = re.compile(r"\.\./shared|\bshared/(?:seeds|facts|data)")
    assert [found for found in findings(beside) if found.startswith(("src/", "benchmarks/", "scripts/"))] == []


LOADS = {
    ("pickle", "load"),
    ("pickle", "loads"),
    ("pickle", "Unpickler"),
    ("torch", "load"),
    ("joblib", "load"),
    ("shelve", "open"),
    ("dill", "load"),
    ("dill", "loads"),
    ("marshal", "load"),
    ("marshal", "loads"),
}
MODULES = {module for module, _ in LOADS} - {"torch"}
# gloo's object collectives pickle what they send: ranks exchange JSON instead.
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def test_no_pickle_is_ever_loaded():
    wrong = []
    for module, tree in sources().items():
        for node in ast.walk(tree):
            imported = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            loads = isinstance(node, ast.Attribute) and (getattr(node.value, "id", None), node.attr) in LOADS
            sends = isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES
            if loads or sends or MODULES & set(imported):
                wrong.append(f"{file_of(module)}:{getattr(node, 'lineno', 0)}")
    assert not wrong


def test_whether_code_of_a_model_is_run_is_always_said_and_never_a_plain_yes():
    wrong = []
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "from_config"):
                said = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
                if not said or getattr(said[0], "value", None) is True:
                    wrong.append(f"{file_of(module)}:{node.lineno}")
    assert not wrong


def test_nothing_large_is_kept():
    large = {path: len(text) for path, text in text_files().items() if len(text) > 300_000}
    assert large == {}
    pictures = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".png", ".svg", ".gif")]
    assert all(path.stat().st_size < 300_000 for path in pictures)
