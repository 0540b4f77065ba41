"""A command line that cannot be read is bad input, whichever command it is for."""

from __future__ import annotations

import pytest
from commands import surface

from coremill import cli

NOBODYS = "--no-such-option-of-anybody"


@pytest.mark.parametrize("command", surface())
def test_usage_errors_of_every_command_end_with_78(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [*command.split(), NOBODYS])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (78, "") and NOBODYS.lstrip("-") in err
