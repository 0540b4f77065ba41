"""How many ranks `train --hostfile` starts on a host: by the option, by the run file, by slots, in this order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coremill.config.first_try import Named
from coremill.errors import InputError
from coremill.launch.request import Request
from coremill.run import on_hosts


@pytest.mark.parametrize(
    ("line", "option", "in_run_file", "ranks"),
    [
        ("localhost", None, 3, 3),
        ("localhost slots=4", None, 3, 3),
        ("localhost slots=4", None, "auto", 4),
        ("localhost slots=4", 2, 3, 2),
        ("localhost slots=2", None, 3, "2 slots in HOSTS, parallel.ranks_per_node: 3 asks for more"),
        ("localhost slots=2", 3, "auto", "2 slots in HOSTS, --ppn 3 asks for more"),
    ],
)
def test_who_says_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    option: int | None,
    in_run_file: int | str,
    ranks: int | str,
) -> None:
    hostfile, started = tmp_path / "hosts", []
    hostfile.write_text(f"{line}\n")
    monkeypatch.setattr(on_hosts, "run_as_launcher", lambda loaded, *_: started.append(loaded.config) or 0)
    request = Request(script="coremill", is_module=True, hostfile=hostfile, ppn=option)
    nothing: Any = None  # is handed on

    def start() -> int:
        settings = [f"parallel.ranks_per_node={in_run_file}"]
        return on_hosts.train_on_hosts(None, settings, Named(), nothing, request, {})

    if isinstance(ranks, str):
        with pytest.raises(InputError, match=ranks.replace("HOSTS", str(hostfile))):
            start()
    else:
        assert start() == 0 and started[0].parallel.ranks_per_node == ranks
