"""The schema as a page for people: `docs/config.md`.

python -m coremill.config.reference > docs/config.md
"""

from __future__ import annotations

from collections.abc import Iterator

from coremill.config.continuing import may_change
from coremill.config.keys import TOP, Key, keys, sections
from coremill.config.rules import RULES
from coremill.config.show import scalar_text

_HEAD = """\
# The run file

One YAML file describes a run: `coremill train run.yaml`. Every key has a default, save that a file says how long to
train (`train.steps` or `train.epochs`), so a file holds only what differs. Without a file the built-in example runs,
or, where `--set` names a model or data, the defaults with what is set.
This page is made from the schema: `python -m coremill.config.reference > docs/config.md`.

- **Precedence:** default, then the file, then `--set`. `coremill config show run.yaml --set train.steps=5` prints the
  resolved config, each value with its origin; the output is itself a run file.
- **`--set key=value`** takes the dotted name and a YAML value: `--set train.steps=50`, `--set train.clip_norm=null`,
  `--set 'data={source: data/*.txt, sequence_length: 256}'`. Text needs no quotes. The last one wins.
- **Relative paths** (`model`, `tokenizer`, `data.source`, `data.evaluation_source`) are looked for in the current
  folder, then beside the run file; a `note:` says where one was taken that is not where you are. A run that goes on
  takes them from where it began. `run.folder` and `checkpoint.folder` start at the current folder.
- **Mistakes** come all at once, each with its line, the reason and what to do. An unknown key is an error. Names and
  values of other tools (`num_train_epochs`, `bf16: true`, `optim: adamw_torch`) are answered with ours, on the command
  line too (`--per_device_train_batch_size 4`).
- **Editors:** after `coremill config schema > coremill.schema.json`, the first line
  `# yaml-language-server: $schema=coremill.schema.json` gives completion and checks while typing.
- **Going on:** the same command continues a run from its newest checkpoint. Keys with a yes under *may change* may have
  another value then, which is shown with the old one; a change to any other is refused, with the value it had.
- `model: some/id` is short for `model: {name: some/id}`.
"""


def render_reference() -> str:
    """The text of docs/config.md."""
    return "\n".join([_HEAD, *_tables(), *_rules()])


def _tables() -> Iterator[str]:
    for section, description in sections().items():
        title, intro = ("Top level", "Beside the sections below:") if section == TOP else (f"`{section}`", description)
        own = [key for key in keys().values() if key.section == section]
        yield f"## {title}\n\n{intro}\n\n| key | takes | default | may change | meaning |\n|---|---|---|---|---|"
        yield "\n".join(_row(each) for key in own for each in (key, *key.inside)) + "\n"


def _row(key: Key) -> str:
    default = "left out" if key.default is None else f"`{scalar_text(key.default)}`"
    default = "required" if key.is_required else default
    takes = key.takes.removeprefix("one of ").removesuffix(" or null") if key.default is None else key.takes
    cells = (f"`{key.dotted}`", takes, default, "yes" if may_change(key.dotted) else "no", key.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _rules() -> Iterator[str]:
    yield "## Between keys\n"
    yield "\n".join(f"- {rule.summary}" for rule in RULES) + "\n"


if __name__ == "__main__":
    print(render_reference(), end="")
