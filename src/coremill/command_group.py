"""A group of commands for the command line: words of other tools are answered with ours before it is read.

What cannot be read at all ends with 78, as all bad input does; a script that is launched may end with any code of its
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import typer.core

from coremill.errors import InputError

# By its name: typer has click inside, or beside it, and both have this class.
_USAGE_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


class Commands(typer.core.TyperGroup):
    """A group of commands that answers options and commands of other tools with ours."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _as_bad_input():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _as_bad_input():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # a shell asks how the line may go on
            return super().resolve_command(ctx, args)
        if args[0] not in self.commands:
            from coremill.config.foreign_options import refuse_command_of_another_tool

            refuse_command_of_another_tool(args[0], self.commands)
        name, command, words = super().resolve_command(ctx, args)
        if command is not None and not hasattr(command, "commands"):
            options = {
                option: not getattr(parameter, "is_flag", False)
                for parameter in command.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
            if any(word.startswith("-") and word not in options for word in words) or any(
                "=" in word for word in words
            ):
                from coremill.config.foreign_options import refuse_words_of_other_tools

                path = f"coremill {name}" if ctx.parent is None else f"coremill {ctx.info_name} {name}"
                # What comes after a script is the script's own: --use_cpu, --mixed_precision bf16.
                mixed = command.allow_interspersed_args and command.context_settings.get(
                    "allow_interspersed_args", True
                )
                to_script = not mixed
                refuse_words_of_other_tools(path, words, options, to_script=to_script)
        return name, command, words


@contextlib.contextmanager
def _as_bad_input() -> Iterator[None]:
    """An unknown option, a missing argument, a value of the wrong kind: never worth a retry."""
    try:
        yield
    except _USAGE_ERROR as error:
        error.exit_code = InputError.exit_code  # type: ignore[attr-defined]
        raise
