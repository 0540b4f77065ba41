"""Everything coremill raises on purpose, each with the exit code the process ends with.

    KnownEnding
    |- CoremillError           1   any other failure
    |  |- InputError          78   bad config or input: never worth a retry
    |  |  `- ConfigError      78   one or more problems in the run file, all at once
    |  |- PeerLost            69   another rank died or stopped answering
    |  |- NonFinite           70   the loss or a gradient is not a number
    |  |- Drifted             70   ranks that should hold the same weights do not
    |  `- StorageError        74   disk full, not writable, gone
    |- Stopped                75   ended on request
    `- Interrupted           130   ended at once by a second Ctrl-C

A message is a small help page: what is wrong, where it was set, why it cannot work, what to do. A request to stop comes
as a signal, between any two instructions, and is no error: like KeyboardInterrupt it passes through `except Exception`,
for what is tried there has not failed.
"""

from __future__ import annotations

from collections.abc import Sequence


class KnownEnding(BaseException):
    """What happened, and where, why and what to do about it where that is known."""

    exit_code = 1
    silent = False  # True: another rank already says it; end with the exit code, print nothing

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.do = do

    def __str__(self) -> str:
        details = (("where", self.where), ("why", self.why), ("do", self.do))
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in details if text)])


class CoremillError(KnownEnding, Exception):
    """What went wrong."""


class InputError(CoremillError):
    """Bad config or input: the same command will fail the same way."""

    exit_code = 78


class ConfigError(InputError):
    """All problems found in one run file, or elsewhere in what the user gave."""

    def __init__(self, problems: Sequence[InputError], place: str = "in the config") -> None:
        count = len(problems)
        super().__init__(f"1 problem {place}" if count == 1 else f"{count} problems {place}")
        self.problems = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join([self.what, *(f"- {problem}" for problem in self.problems)])


class PeerLost(CoremillError):
    """Another rank died or stopped answering."""

    exit_code = 69


class NonFinite(CoremillError):
    """The loss or a gradient is not a number."""

    exit_code = 70


class Drifted(CoremillError):
    """Ranks that should hold the same weights do not."""

    exit_code = 70


class StorageError(CoremillError):
    """Disk full, not writable, gone."""

    exit_code = 74


class Stopped(KnownEnding):
    """Ended on request."""

    exit_code = 75


class Interrupted(KnownEnding):
    """Ended at once."""

    exit_code = 130
