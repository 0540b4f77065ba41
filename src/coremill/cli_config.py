"""The commands `coremill config ...`, and the arguments that they share with those that take a run file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coremill.cli_import import FileOrCommand, config_import
from coremill.command_group import Commands

config_app = typer.Typer(
    cls=Commands,
    help="Run files: by a few questions or from other tools' settings; what one resolves to; what may stand in it.",
    no_args_is_help=True,
)

ConfigPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="run file (YAML); left out: the built-in example, or what --set names",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="override one key, e.g. train.steps=10; repeat as needed", show_default=False
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="M", help="hub id or folder; a first try needs no run file", show_default=False),
]
DataSource = Annotated[
    str | None,
    typer.Option("--data", metavar="D", help="text to learn from: files or hf://owner/name", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else")]


@config_app.command("show")
def config_show(
    config: ConfigPath = None,
    model: ModelName = None,
    data: DataSource = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """The resolved config, each line with where its value came from."""
    from coremill import api
    from coremill.config.show import show
    from coremill.model.source import require_named_code

    loaded = api.load_config(config, settings or [], model=model, data=data)
    with loaded.placing():
        require_named_code(loaded.located.model)
    if as_json:
        print(json.dumps(loaded.config.model_dump(mode="json"), indent=2))
    else:
        print(*(f"# {note}" for note in (*loaded.open_questions, *loaded.places.notes)), show(loaded), sep="\n")


@config_app.command("init")
def config_init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="to write; refused where it is there already")] = Path(
        "run.yaml"
    ),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="ask nothing: take every suggestion")] = False,
    answer: Annotated[
        list[str] | None,
        typer.Option(
            "--answer",
            metavar="KEY=VALUE",
            help="answer a question, or set any other key of the run file; repeat as needed",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a run file: looks at this machine and folder, asks what is left, plans, and says what to type next.

    Each question is a key of the run file, with a suggestion and its reason: Enter takes it, ? tells more. Models and
    data are looked at as they are typed. Ctrl-C leaves nothing. In a script: --yes, and --answer for what you know.
    """
    from coremill.run.init.command import init_run_file

    init_run_file(file, answer or [], yes=yes, is_terminal=sys.stdin.isatty(), console=Console())


config_app.command("import", cls=FileOrCommand)(config_import)


@config_app.command("schema")
def config_schema() -> None:
    """JSON Schema of the run file, for editors."""
    from coremill.config.show import json_schema

    print(json.dumps(json_schema(), indent=2))
