"""A group of commands for the command line: words of other tools are answered with ours before it is read."""

from __future__ import annotations

from typing import Any

import typer.core


class Commands(typer.core.TyperGroup):
    """A group of commands that answers options and commands of other tools with ours."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
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
                refuse_words_of_other_tools(path, words, options, to_script=not command.allow_interspersed_args)
        return name, command, words
