"""Secrets stay out of everything that is written: logs, events, error messages, reports, command lines shown.

Two ways to know one: by its form (tokens of the hub and of clouds, a password inside an address), and by its value,
where a variable of the environment is named like a secret. `guard_output` makes both hold for whatever this process
prints, tracebacks and the words of libraries included.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BLOT = "***"
SECRET_NAME = re.compile(
    r"TOKEN(?!IZER|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|(API|ACCESS)[_-]?KEY|AUTH(?!OR)|(^|[_-])(KEY|PAT|DSN)$",
    re.IGNORECASE,
)
# hf://name:config@revision is a dataset, not a user with a password.
SECRET_VALUE = re.compile(
    # Not the end of a word (task-classification-bert, highs_and_lows), nor the word that is as long as a token.
    r"hf_(?!transformers\b|transformers_)[A-Za-z0-9]{12,}|(?<![aeiou])(?:sk-[\w-]{16,}|gh[pousr]_\w{16,})"
    r"|github_pat_\w{16,}|AKIA[A-Z0-9]{12,}"
    r"|(?<=://)(?<!hf://)[^/\s:@]+:[^/\s@]+(?=@)|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
)
# Shorter values are words (AUTH_MODE=disabled): blotting them out everywhere would garble what is printed.
LEAST_LENGTH = 12

_known: set[str] = set()


def know(environ: Mapping[str, str]) -> None:
    """Remember the values of variables that are named like secrets; a path is none."""
    for name, value in environ.items():
        if SECRET_NAME.search(name) and len(value) >= LEAST_LENGTH and not value.startswith(("/", "~", ".")):
            _known.add(value)


def redact(text: str) -> str:
    """The text with everything that is known or looks like a secret blotted out."""
    for value in _known:
        text = text.replace(value, BLOT)
    return SECRET_VALUE.sub(BLOT, text)


class RedactingStream:
    """A text stream that blots secrets out of what goes through it; all else is the stream's own.

    With `outlives_reader` a closed pipe (`| head`) is no error: what comes later goes nowhere.
    """

    def __init__(self, stream: Any, *, outlives_reader: bool = False) -> None:
        self._stream, self._outlives_reader = stream, outlives_reader

    def write(self, text: str) -> int:
        """As the stream would, but redacted; the length that was asked for is what was written.

        A log on a full disk loses words, it does not end the run.
        """
        self._attempt(self._stream.write, redact(text))
        return len(text)

    def flush(self) -> None:
        """As the stream would."""
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        try:
            action(*arguments)
        except BrokenPipeError:
            if not self._outlives_reader:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def writelines(self, lines: Iterable[str]) -> None:
        """One after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


def guard_output(environ: Mapping[str, str]) -> None:
    """From here on this process prints no secret of its environment, nor anything that looks like one.

    Nor does it end because nobody reads on: a training whose screen was `| head` is a training all the same.
    """
    know(environ)
    if not isinstance(sys.stdout, RedactingStream):
        # A terminal that is not UTF-8 gets escapes for what it has no letter for, not an error after hours of work.
        if getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape") and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = RedactingStream(sys.stdout, outlives_reader=True)
        sys.stderr = RedactingStream(sys.stderr, outlives_reader=True)


def print_for_programs(text: str) -> None:
    """JSON and YAML, which are UTF-8 whatever the terminal is."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    print(text)
