# ruff: noqa: E501 (the text of the page)
"""The page for people who come from another tool, from the table and from what tutorials show: docs/coming-from.md.

python scripts/coming_from.py > docs/coming-from.md
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
# Coming from another tool

What you have leads somewhere: a file that `accelerate config` wrote, a DeepSpeed JSON, TrainingArguments, the command of
a tutorial. Each becomes a run file on stdout, every line with the setting it came from, then every setting that is left
behind with the reason. Nothing is started, no pickle is opened, no torch is imported.

```sh
coremill config import tests/golden/brought/four_machines.yaml
coremill config import tests/golden/brought/cpu-ds.json
coremill config import tests/golden/brought/mpirun_qa_two.sh
coremill config import -- torchrun --nproc_per_node=4 train.py
```

- A command's import begins with the `coremill launch` line that starts the same script as it is. Where the script is one
  of Hugging Face's examples whose work coremill does (`run_qa.py`, `run_glue.py`, `run_clm.py`, `nlp_example.py`), the
  run file is for `coremill train`; files that the command names (`--config_file`, `--deepspeed`) are read where they are.
- Shell scripts are read too: `coremill config import start.sh`; variables that are exported count.
- What only you know stands in the file as a question (`# model: ?`); `coremill config show run.yaml` names what is open.
- `--json` gives the same for scripts. In a run file and on coremill's own command line these names are refused, with the
  same answers.
- `training_args.bin` is a pickle and is not opened: write it out first where you trust it,
  `python -c "import torch; print(torch.load('training_args.bin', weights_only=False).to_json_string())" > args.json`.

This page is made by `python scripts/coming_from.py > docs/coming-from.md` from the table (`config/other_tools.toml`) and
from the files and commands of CPU tutorials in `tests/golden/brought`.
"""
FILES = {
    "one_machine.yaml": "accelerate's file for one machine, as tutorials print it",
    "four_machines.yaml": "accelerate's file for four machines",
    "cpu-ds.json": "DeepSpeed's JSON for CPUs",
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
}
TOOLS = {
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "trainer": "TrainingArguments",
    "examples": "example scripts of transformers",
    "transformers": "from_pretrained and tokenizers",
    "peft": "peft",
}


def render_page() -> str:
    """The text of docs/coming-from.md."""
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
