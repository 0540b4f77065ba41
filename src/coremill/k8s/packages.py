"""Packages of the extra k8s: said by name where they are missing, before anything else is done."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from coremill.errors import InputError


def require_packages(command: str, names: Sequence[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"{command} needs more packages",
            why=f"not installed: {', '.join(missing)}",
            do="pip install 'coremill[k8s]'",
        )
