"""Spot notices: two minutes before EC2 takes a spot machine back it says so at its metadata address. No torch here.

A watcher asks every five seconds, as AWS advises, from a thread of its own: a metadata service that does not answer
holds nothing up. A notice is handed on as SIGTERM to this process, so that what follows is what always follows a
request to stop: the ranks of all machines agree on a step, save it and end with 75.

The session token of IMDSv2 goes with every question. Only a machine that is an EC2 instance is asked (`auto`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

DEFAULT_ENDPOINT = "http://169.254.169.254"
ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
POLL_SECONDS = 5.0
ANSWER_SECONDS = 2.0
TOKEN_SECONDS = 300
# A container more than one hop away gets no answer, ever: an automatic watch then gives up.
SILENCES_TO_GIVE_UP = 3
DMI = Path("/sys/devices/virtual/dmi/id")

SpotNotices = Literal["auto", "on", "off"]


def is_ec2(dmi: Path = DMI) -> bool:
    """Whether this machine says it is an EC2 instance; costs two small reads."""
    for name, start in (("sys_vendor", "Amazon EC2"), ("bios_vendor", "Amazon EC2"), ("board_asset_tag", "i-")):
        try:
            if (dmi / name).read_text().startswith(start):
                return True
        except (OSError, UnicodeDecodeError):
            continue
    return False


class Metadata:
    """The metadata service of an instance."""

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._token: str | None = None
        # Its address means this machine: no proxy can ask for us.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def spot_action(self) -> str | None:
        """What is going to happen to this machine, in words; None: nothing. Raises OSError where nobody answers."""
        try:
            text = self._get("/latest/meta-data/spot/instance-action")
        except urllib.error.HTTPError as error:
            if error.code == 404:  # the usual answer
                return None
            if error.code == 401:  # the token is too old: a new one next time
                self._token = None
                return None
            raise
        try:
            notice = json.loads(text)
            action, moment = str(notice["action"]), str(notice.get("time", "soon"))
        except (ValueError, KeyError, TypeError, AttributeError):
            action, moment = "terminate", "soon"
        return f"spot notice: EC2 will {action} this machine at {moment}"

    def _get(self, path: str) -> str:
        if self._token is None:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            request = urllib.request.Request(f"{self._endpoint}/latest/api/token", headers=header, method="PUT")
            self._token = self._answer(request)
        return self._answer(
            urllib.request.Request(f"{self._endpoint}{path}", headers={"X-aws-ec2-metadata-token": self._token})
        )

    def _answer(self, request: urllib.request.Request) -> str:
        with self._opener.open(request, timeout=ANSWER_SECONDS) as response:
            return str(response.read(65536).decode("utf-8", "replace"))


class SpotWatch:
    """Asks until there is a notice; then calls `on_notice` once, from its thread."""

    def __init__(
        self,
        metadata: Metadata,
        on_notice: Callable[[str], None],
        *,
        insists: bool,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._metadata, self._on_notice, self._insists = metadata, on_notice, insists
        self._poll_seconds = poll_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="coremill-spot", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No further question; the thread may still wait for an answer, and is not waited for."""
        self._done.set()

    def _watch(self) -> None:
        silences, has_answered = 0, False
        while not self._done.is_set():
            asked = time.monotonic()
            try:
                notice = self._metadata.spot_action()
                has_answered = True
            except (OSError, ValueError, http.client.HTTPException):
                notice = None
                silences += 1
                if silences >= SILENCES_TO_GIVE_UP and not has_answered and not self._insists:
                    return
            if notice is not None and not self._done.is_set():
                self._on_notice(notice)
                return
            self._done.wait(max(0.0, self._poll_seconds - (time.monotonic() - asked)))


@contextlib.contextmanager
def spot_notices(
    wanted: SpotNotices, environ: Mapping[str, str], on_notice: Callable[[str], None], *, dmi: Path = DMI
) -> Iterator[None]:
    """While the block runs, a spot notice is told to `on_notice` and then sent to this process as SIGTERM."""
    endpoint = environ.get(ENDPOINT_VARIABLE)
    is_off = wanted == "off" or environ.get(DISABLED_VARIABLE, "").lower() == "true"
    if is_off or (wanted == "auto" and not endpoint and not is_ec2(dmi)):
        yield
        return

    def pass_on(text: str) -> None:
        try:
            on_notice(text)
        finally:  # what cannot be written down is heeded all the same
            os.kill(os.getpid(), signal.SIGTERM)

    watch = SpotWatch(Metadata(endpoint or DEFAULT_ENDPOINT), pass_on, insists=wanted == "on")
    watch.start()
    try:
        yield
    finally:
        watch.close()
