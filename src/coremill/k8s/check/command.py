"""`coremill k8s check`: one finding a line, or JSON; the exit code is that of bad input where there is an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from coremill.errors import InputError
from coremill.k8s.packages import require_packages

_NEEDED = ("yaml", "cel_expr_python", "kubernetes_validate")


def check_files(
    files: Sequence[str], schemas: str | None, releases: list[str], settings: Sequence[str] = (), *, as_json: bool
) -> int:
    """Prints what was found and returns the exit code: 78 with errors, else 0."""
    require_packages("coremill k8s check", _NEEDED)
    from coremill.k8s.check.checking import check
    from coremill.k8s.check.crds import find_schemas, parse_releases
    from coremill.k8s.check.manifests import read_manifests

    found, wanted = find_schemas(schemas), parse_releases(releases)
    found.require(wanted)
    outcome = check(read_manifests(files, settings), found, wanted)
    if as_json:
        print(json.dumps(outcome.to_json(), indent=2))
        return InputError.exit_code if outcome.errors else 0
    for finding in outcome.findings:
        print(finding)
    for reason in outcome.unchecked:
        print(f"not checked: {reason}")
    print(f"{outcome.summary()}", file=sys.stderr)
    return InputError.exit_code if outcome.errors else 0
