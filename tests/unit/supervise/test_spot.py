"""Spot notices, against a local stand-in for the metadata service."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from coremill.supervise.spot import ENDPOINT_VARIABLE, Metadata, SpotWatch, is_ec2, spot_notices
from stand_in_metadata import serve_metadata

NOTICE = {"action": "terminate", "time": "2026-01-02T03:04:05Z"}
NOBODY = "http://127.0.0.1:9"
PATIENCE_SECONDS = 60


def test_no_notice_then_one_with_one_token_for_all_questions():
    with serve_metadata() as service:
        metadata = Metadata(service.address)
        assert metadata.spot_action() is None and metadata.spot_action() is None
        service.notice = NOTICE
        assert metadata.spot_action() == "spot notice: EC2 will terminate this machine at 2026-01-02T03:04:05Z"
    assert [line.split()[0] for line in service.asked] == ["PUT", "GET", "GET", "GET"]


def test_a_token_that_is_too_old_is_asked_for_again():
    with serve_metadata() as service:
        metadata = Metadata(service.address)
        metadata._token = "old"
        service.notice = NOTICE
        assert metadata.spot_action() is None
        assert metadata.spot_action() is not None


def test_an_automatic_watch_gives_up_where_nobody_answers():
    watch = SpotWatch(Metadata(NOBODY), lambda text: None, insists=False, poll_seconds=0.01)
    watch.start()
    watch._thread.join(PATIENCE_SECONDS)
    assert not watch._thread.is_alive()


def test_an_automatic_watch_goes_on_where_somebody_has_answered():
    told: list[str] = []
    with serve_metadata() as service:
        watch = SpotWatch(Metadata(service.address), told.append, insists=False, poll_seconds=0.01)
        watch.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for status, is_garbled, questions in ((200, False, 3), (503, False, 8), (200, True, 4)):  # there, then not well
            service.status, service.is_garbled, enough = status, is_garbled, len(service.asked) + questions
            while len(service.asked) < enough and time.monotonic() < deadline:
                time.sleep(0.01)
        service.notice, service.status, service.is_garbled = NOTICE, 200, False
        watch._thread.join(PATIENCE_SECONDS)
    assert len(told) == 1


def test_one_that_insists_goes_on_through_failures_until_there_is_a_notice():
    told: list[str] = []
    with serve_metadata() as service:
        service.status = 503
        watch = SpotWatch(Metadata(service.address), told.append, insists=True, poll_seconds=0.01)
        watch.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(service.asked) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watch._thread.is_alive() and not told
        service.notice, service.status = NOTICE, 200
        watch._thread.join(PATIENCE_SECONDS)
    assert len(told) == 1


def test_a_notice_is_told_and_becomes_a_sigterm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told: list[str] = []
    signalled = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    try:
        with serve_metadata() as service:
            service.notice = NOTICE
            with spot_notices("auto", {ENDPOINT_VARIABLE: service.address}, told.append, dmi=tmp_path):
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not signalled.is_set() and time.monotonic() < deadline:
                    time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signalled.is_set() and len(told) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_notice_that_cannot_be_written_down_is_heeded(tmp_path: Path):
    signalled = threading.Event()

    def fail(_: str) -> None:
        raise OSError("read-only")

    before = signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    try:
        with serve_metadata() as service:
            service.notice = NOTICE
            with spot_notices("auto", {ENDPOINT_VARIABLE: service.address}, fail, dmi=tmp_path):
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not signalled.is_set() and time.monotonic() < deadline:
                    time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signalled.is_set()


@pytest.mark.parametrize(
    ("wanted", "environ"),
    [("off", {}), ("auto", {}), ("on", {"AWS_EC2_METADATA_DISABLED": "true"})],
    ids=["off", "not on EC2", "disabled"],
)
def test_nobody_is_asked(wanted, environ, tmp_path, monkeypatch):
    monkeypatch.setattr(SpotWatch, "start", lambda self: pytest.fail("it asked"))
    address = {} if wanted == "auto" else {ENDPOINT_VARIABLE: NOBODY}
    with spot_notices(wanted, {**environ, **address}, lambda text: None, dmi=tmp_path):
        pass


def test_an_ec2_instance_is_known_by_its_board(tmp_path):
    assert not is_ec2(tmp_path)
    (tmp_path / "sys_vendor").write_text("QEMU\n")
    assert not is_ec2(tmp_path)
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert is_ec2(tmp_path)
