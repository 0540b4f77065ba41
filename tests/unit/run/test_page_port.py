"""The port of a live page is taken before anything else, or refused in words."""

from __future__ import annotations

import pytest

from coremill.errors import InputError
from coremill.report.page.server import listen
from coremill.run.opening import Options, listen_for_page


def test_no_page_no_port() -> None:
    for options, wanted in ((Options(), True), (Options(page=True, dry_run=True), True), (Options(page=True), False)):
        with listen_for_page(options, wanted=wanted) as listener:
            assert listener is None
    with pytest.raises(InputError, match="--port is for the live page"), listen_for_page(Options(port=8000)):
        pass


def test_a_free_port_on_loopback_or_none() -> None:
    with listen_for_page(Options(page=True)) as listener:
        assert listener is not None
        address, port = listener.getsockname()
        assert address == "127.0.0.1" and port > 0
        with pytest.raises(InputError) as refused:
            listen(port)
        assert refused.value.exit_code == 78 and "another program listens there" in str(refused.value)
    assert listener.fileno() == -1
    for nonsense in (-1, 65536):
        with pytest.raises(InputError, match=f"port {nonsense} on 127.0.0.1 cannot be used"):
            listen(nonsense)
