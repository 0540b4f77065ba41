"""Which of the user's variables go to other hosts, and how they may be shown.

All of them go, except what belongs to this host, this login or another launcher: a script that ran here finds over
there what it found here. Values travel on a connection, never on a command line, where every user of a host reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from coremill.redaction import BLOT, SECRET_NAME, SECRET_VALUE

# This login and this host. MASTER_ADDR and the rank variables are the launcher's to set.
_OF_THIS_HOST = frozenset({
    "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "HOST", "HOSTTYPE", "MACHTYPE",
    "OSTYPE", "MAIL", "TERM", "TERMINFO", "COLORTERM", "LINES", "COLUMNS", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY",
    "WINDOWID", "EDITOR", "VISUAL", "PAGER", "TMUX", "TMUX_PANE", "STY", "TMPDIR", "TEMP", "TMP", "LS_COLORS",
    "GPG_TTY", "GPG_AGENT_INFO", "PS1", "PROMPT_COMMAND", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "COREMILL_LAUNCHER_PID", "COREMILL_STORE_FD",
    "COREMILL_RANKS_OF",
})  # fmt: skip
_PREFIXES_OF_THIS_HOST = (
    "SSH_", "XDG_RUNTIME", "XDG_SESSION", "XDG_SEAT", "XDG_VTNR", "DBUS_", "SUDO_", "BASH_FUNC_", "LESS", "DEBIAN_",
    "SYSTEMD_", "INVOCATION_ID", "JOURNAL_",
    # Other launchers tell a process who it is with these: it must not be told twice.
    "OMPI_", "PMIX_", "PRTE_", "ORTE_", "PMI_", "HYDRA_", "HYDI_", "MPI_LOCAL", "SLURM_", "PBS_", "LSB_", "PET_",
    "TORCHELASTIC_", "KUBERNETES_",
)  # fmt: skip


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks on other hosts inherit."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name not in _OF_THIS_HOST and not name.startswith(_PREFIXES_OF_THIS_HOST) and re.fullmatch(r"\w+", name)
    }


def shown(name: str, value: str) -> str:
    """The value, or a blot where it looks like a secret."""
    return BLOT if value and (SECRET_NAME.search(name) or SECRET_VALUE.search(value)) else value


def shown_arguments(argv: list[str]) -> list[str]:
    """A command line with what looks like a secret blotted out."""
    shown_words: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and value and SECRET_NAME.search(name):
            word = f"{name}={BLOT}"
        elif shown_words and shown_words[-1].startswith("--") and SECRET_NAME.search(shown_words[-1]) and not equals:
            word = BLOT if not word.startswith("-") else word
        shown_words.append(SECRET_VALUE.sub(BLOT, word))
    return shown_words
