"""Completion as shells ask for it: the script that `--show-completion` prints, run by a real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ASK_BASH = """\
eval "$(_COREMILL_COMPLETE=source_bash coremill)"
complete -p coremill > /dev/null || exit 1
read -r -a COMP_WORDS <<< "$LINE"
[ "${LINE: -1}" = " " ] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_coremill_completion coremill
echo "${COMPREPLY[@]}"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Where a shell finds `coremill`, as an installation puts it."""
    program = tmp_path / "coremill"
    program.write_text(f"#!{sys.executable}\nfrom coremill.cli import main\n\nmain()\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def answer(environ: dict[str, str], *command: str, **more: str) -> str:
    done = subprocess.run(command, env=environ | more, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("coremill ", "train plan doctor launch stop instances report export config data k8s"),
        ("coremill k8s re", "render rehearse"),
        ("coremill train --d", "--data --dry-run"),
        ("coremill traim --d", ""),  # a slip is silent here; the command itself says what was meant
    ],
)
def test_bash(environ: dict[str, str], line: str, words: str) -> None:
    assert answer(environ, "bash", "-c", ASK_BASH, LINE=line).split() == words.split()


def test_zsh_is_given_words_with_their_meaning(environ: dict[str, str]) -> None:
    text = answer(environ, "coremill", _COREMILL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="coremill pl")
    assert text.startswith("_arguments") and '"plan":"' in text
    assert "#compdef coremill" in answer(environ, "coremill", _COREMILL_COMPLETE="source_zsh")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_reads_the_script(environ: dict[str, str]) -> None:
    ask = 'autoload -U compinit; compinit -u; eval "$(_COREMILL_COMPLETE=source_zsh coremill)"; echo $_comps[coremill]'
    assert answer(environ, "zsh", "-f", "-c", ask).strip() == "_coremill_completion"
