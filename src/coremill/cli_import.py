"""The command `coremill config import`: settings and commands of other tools as a run file."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

_COMMAND = "coremill.command"


class FileOrCommand(typer.core.TyperCommand):
    """Words behind -- are a command, whatever they look like; click would not tell."""

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if "--" in args:
            place = args.index("--")
            ctx.meta[_COMMAND] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)


def config_import(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE | -- COMMAND",
            help="a file of accelerate, DeepSpeed, Axolotl or TrainingArguments, a shell script; or a command",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else")] = False,
) -> None:
    """Turn settings or a command line of another tool into a run file, on stdout. Starts nothing.

    coremill config import default_config.yaml > run.yaml

    coremill config import ds_config.json > run.yaml

    coremill config import -- mpirun -f hosts -n 4 -ppn 2 python run_qa.py --model_name_or_path ... > run.yaml

    Each line says which setting it came from; then every setting that is left behind, with the reason. What only you
    know (model, data) stands there as a question. For a command, the head of the file has the coremill command that
    starts the script as it is.
    """
    from coremill.config.imports.imported import import_words
    from coremill.errors import InputError
    from coremill.hardware.probe import environment_snapshot

    command = ctx.meta.get(_COMMAND)
    if command is not None and words:
        do = "give one of them: coremill config import FILE, or coremill config import -- COMMAND ..."
        raise InputError("both a file and a command are named", where="command line", do=do)
    given = words or [] if command is None else command
    imported = import_words(given, is_command=command is not None, environ=environment_snapshot())
    print(imported.as_json if as_json else imported.text, end="\n" if as_json else "")
