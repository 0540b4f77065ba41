"""A launcher sleeps until a process ends, and never past that."""

import os
import subprocess
import sys

import pytest

from coremill.supervise.waiting import wait_for_end

FAR_TOO_LONG_SECONDS = 3600  # the suite's own time limit would end such a test


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel tells of ends on Linux only")
def test_the_first_end_wakes_it_and_one_that_was_missed_does_too():
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as lasting,
        subprocess.Popen([sys.executable, "-c", ""]) as short,
    ):
        for _ in range(2):  # nobody has waited for it: it still counts as ended
            assert wait_for_end([lasting.pid, short.pid], FAR_TOO_LONG_SECONDS)
            assert has_ended(short)
        assert not has_ended(lasting)
        assert not wait_for_end([lasting.pid], 0.01)
        lasting.communicate(b"\n")


def test_without_the_kernels_help_it_looks_again_soon(monkeypatch):
    def refused(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    assert not wait_for_end([os.getpid()], FAR_TOO_LONG_SECONDS)
