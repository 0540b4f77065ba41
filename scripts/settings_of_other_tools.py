# ruff: noqa: E501 (the text of the page)
"""What settings of other tools become, from the table and from what tutorials show: docs/settings-of-other-tools.md.

python scripts/settings_of_other_tools.py > docs/settings-of-other-tools.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from coremill.config.foreign import foreign_keys
from coremill.config.imports.fates import Fate
from coremill.config.imports.imported import Imported, import_words, quoted
from coremill.config.other_tools import launchers, variables
from coremill.config.show import scalar_text

BROUGHT = Path(__file__).parent.parent / "tests" / "golden" / "brought"

HEAD = """\
# Settings of other tools

What each becomes here, or why it is gone: first commands and files of tutorials, then every setting, option and variable
that `coremill config import`, refusals in a run file and the notes of `coremill launch` know.
[Coming from another tool](guide/coming-from.md) tells how to use it. *Dropped*, or nothing in the column *here*: not
needed. *Retired*: gone where it came from, too. `N` stands for the value you had.

This page is made by `python scripts/settings_of_other_tools.py > docs/settings-of-other-tools.md` from the table
(`config/other_tools.toml`) and from what is in `tests/golden/brought`.
"""
FILES = {
    "one_machine.yaml": "accelerate's file for one machine, as tutorials print it",
    "four_machines.yaml": "accelerate's file for four machines",
    "cpu-ds.json": "DeepSpeed's JSON for CPUs",
    "axolotl-lora.yml": "Axolotl's file for LoRA",
}
COMMANDS = {
    "python.sh": "A plain script",
    "torchrun_one.sh": "torchrun, one process",
    "torchrun_four.sh": "torchrun, four processes",
    "accelerate.sh": "accelerate launch",
    "mpirun_accelerate.sh": "accelerate launch under mpirun, four hosts",
    "mpirun_qa_one.sh": "Question answering under mpirun, one host",
    "mpirun_qa_two.sh": "Question answering under mpirun, two hosts",
    "ipex_launcher.sh": "The launcher of IPEX, four hosts",
    "srun.sh": "srun in a batch script of Slurm, four hosts",
}
TOOLS = {
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "trainer": "TrainingArguments",
    "examples": "example scripts of transformers",
    "transformers": "from_pretrained and tokenizers",
    "peft": "peft",
    "axolotl": "Axolotl",
    "llama-factory": "LLaMA-Factory",
    "trl": "TRL",
    "torchrun": "torchrun",
    "ipexrun": "ipexrun",
    "others": "Names of several tools",
}


def render_page() -> str:
    """The text of docs/settings-of-other-tools.md."""
    return "\n".join([HEAD, *_commands(), *_files(), *_everything()])


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    for name, title in COMMANDS.items():
        found = _imported(name)
        train = " ".join(map(quoted, found.train))
        yield f"### {title}\n\n```text\n{(BROUGHT / name).read_text(encoding='utf-8').rstrip()}\n```\n"
        yield f"becomes\n\n```text\n{' '.join(map(quoted, found.launch))}\n```\n"
        if not found.composed.questions:
            yield f"or, done by coremill itself with the run file of the import, `{train}`.\n"
        if found.composed.fates:
            yield _table(found.composed.fates)


def _files() -> Iterator[str]:
    yield "## Files\n"
    for name, title in FILES.items():
        yield f"### {title}\n"
        yield _table(_imported(name).composed.fates)


def _everything() -> Iterator[str]:
    yield "## Every setting that is known\n"
    rows = dict.fromkeys(foreign_keys().values())
    for tool, title in TOOLS.items():
        yield f"### {title}\n\n| setting | here | why |\n|---|---|---|"
        for row in rows:
            if row.tools[0] == tool:
                becomes = ", ".join(f"`{key}`" for key in row.targets) or ("retired" if row.retired else "")
                yield f"| {' '.join(f'`{name}`' for name in row.names)} | {becomes} | {_cell(row.why)} |"
        yield ""
    yield "### Launchers\n\n| option | of | `coremill launch` | why |\n|---|---|---|---|"
    for word in launchers():
        names, tools = " ".join(f"`{name}`" for name in word.names), ", ".join(word.tools)
        yield f"| {names} | {tools} | {_code(word.becomes)} | {_cell(word.why)} |"
    yield "\n### Variables\n\n| variable | `coremill launch` | why |\n|---|---|---|"
    for word in variables():
        yield f"| {' '.join(f'`{name}`' for name in word.names)} | {_code(word.becomes)} | {_cell(word.why)} |"
    yield ""


def _table(fates: Sequence[Fate]) -> str:
    lines = ["| there | here | why |", "|---|---|---|"]
    lines += [f"| `{_cell(fate.brought.text)}` | {_here(fate)} | {_cell(fate.why)} |" for fate in fates]
    return "\n".join(lines) + "\n"


def _here(fate: Fate) -> str:
    parts = [f"`{fate.command}`"] if fate.command else []
    parts += [f"`{key}: {scalar_text(value)}`" for key, value in fate.settings.items()]
    return " and ".join(parts) or fate.kind


def _code(text: str) -> str:
    return f"`{text.replace('{}', 'N')}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _imported(name: str) -> Imported:
    return import_words([str(BROUGHT / name)], is_command=False, environ={"HOME": "/nowhere"})


if __name__ == "__main__":
    print(render_page(), end="")
