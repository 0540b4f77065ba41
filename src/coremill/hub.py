"""Requests to the Hugging Face hub: an answer within a deadline, and what is wrong with it in words.

Nothing that was sent is ever told: it may hold a token. `huggingface_hub` is imported when a source needs it.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from coremill.errors import InputError
from coremill.nearby import PATH_ADVICE, nearest_path, what_is_in
from coremill.redaction import BLOT, redact

# A dead network answers at once, a silent one not at all; bad input has to be reported within 30 s.
REQUEST_SECONDS = 10.0
DEADLINE_SECONDS = 20.0  # name resolution has no time-out of its own

Kind = Literal["model", "dataset"]
Fault = Literal["bad name", "gated", "no revision", "not found", "no access", "unreachable", "refused", "cache"]
T = TypeVar("T")

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC, errno.EDQUOT)
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+(?:/[\w.-]+)?).*|hf://(.+)")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{4,}|(?<=//)[^/@\s]+(?=@)|(?<=[Bb]earer )\S+")
# What, why and do of each message.
_WORDS: dict[tuple[Kind, Fault], tuple[str, str, str]] = {
    ("model", "bad name"): ("{name!r} is neither a folder nor a hub id", "", "give an existing folder or owner/name"),
    ("model", "gated"): (
        "{name} is gated on the hub",
        "its owner wants a licence accepted, and this machine is not logged in with an account that did",
        "accept the licence at https://huggingface.co/{name}, then run: hf auth login",
    ),
    ("model", "no revision"): ("{name} has no revision {revision!r}", "", ""),
    ("model", "not found"): (
        "no folder and no hub model named {name}",
        "the hub says it does not exist, or it is private and this machine is not logged in",
        "check the spelling; for a private model run: hf auth login",
    ),
    ("model", "unreachable"): (
        "{name} is not a folder here, and the hub cannot be reached",
        "{type}, and the hub's cache on this machine does not have it",
        "check the name, network or proxy; or on a machine with network: hf download {name} "
        "--local-dir models/{folder}, copy the folder here and set {where}: models/{folder}",
    ),
    ("model", "refused"): ("cannot download {name} from the hub", "{reason}", "try again later"),
    ("model", "cache"): (
        "the hub's cache on this machine cannot be written",
        "{plain}",
        "make it writable, or set HF_HOME to a folder that you may write, on a disk with room",
    ),
    ("dataset", "cache"): (
        "the hub's cache on this machine cannot be written",
        "{plain}",
        "make it writable, or set HF_HOME to a folder that you may write, on a disk with room",
    ),
    ("dataset", "bad name"): ("'{name}' cannot be the name of a dataset", "{plain}", ""),
    ("dataset", "gated"): (
        "the dataset {name} is gated",
        "the hub asks you to log in with an account that was granted access",
        "ask for access at https://huggingface.co/datasets/{name}, then run: hf auth login",
    ),
    ("dataset", "no revision"): (
        "the dataset {name} has no revision '{revision}'",
        "",
        "leave @{revision} out, or see https://huggingface.co/datasets/{name}/tree/main ",
    ),
    ("dataset", "not found"): (
        "the hub has no dataset {name}",
        "the name is wrong, or it is private and this machine is not logged in",
        "check the spelling of [owner/]name; for a private dataset run: hf auth login",
    ),
    ("dataset", "no access"): ("the hub refused the dataset {name}", "{reason}", "run: hf auth login"),
    ("dataset", "refused"): ("the hub refused the dataset {name}", "{reason}", "try again later"),
}


def quieten(*, bars: bool) -> None:
    """What the hub's client would say by itself (retries, hints to log in) is said by us, once, or not at all."""
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not bars:
        disable_progress_bars()


def within(seconds: float, ask: Callable[[], T]) -> T:
    """`ask()`, or TimeoutError: the thread is left to die with the process, and holds up no exit."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name="hub request", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    return answers[0]


def explain(error: Exception, kind: Kind, name: str, revision: str | None, where: str) -> InputError | None:
    """One clear message for each way a request fails; None for an error that is not of the hub's making.

    For a dataset that is also one where the hub did not answer: it may be on this machine.
    """
    # `datasets` wraps what the hub's client raises.
    for link in _chain(error) if kind == "dataset" else (error,):
        fault = _dataset_fault(link) if kind == "dataset" else _model_fault(link)
        if fault is not None:
            status = _status_of(link)
            named = type(link).__name__
            reason = f"HTTP status {status}" if status is not None else f"{named}: {link}"
            what, why, do = (
                text.format(
                    name=name,
                    folder=name.split("/")[-1],
                    where=where,
                    revision=revision,
                    type=named,
                    reason=reason,
                    plain=plain(link),
                )
                for text in _WORDS[kind, fault]
            )
            setting = f"{where}.revision" if (kind, fault) == ("model", "no revision") else where
            if kind == "model" and fault in ("bad name", "not found", "unreachable"):
                on_hub = why if fault == "not found" else "nor could it be found on the hub"
                what, why, do = _perhaps_a_folder(name, where, on_hub) or (what, why, do)
            return InputError(what, where=setting, why=why or None, do=do or None)
    return None


def _perhaps_a_folder(name: str, setting: str, on_hub: str) -> tuple[str, str, str] | None:
    """For a name that is no model: what, why and do where an address or a folder of this machine was meant."""
    if address := _ADDRESS.fullmatch(name):
        return (
            f"{name} is an address, not a hub id",
            "a model is named owner/name",
            f"set {setting}: {address[1] or address[2]}",
        )
    near = nearest_path(name, Path.is_dir)
    if near is None and not ("/" in name and Path(name).parent.is_dir()):
        return None
    do = PATH_ADVICE if near is None else f"did you mean {near}?"
    return f"there is no folder {name}", f"{what_is_in(name)}; {on_hub}", do


def is_unreachable(error: BaseException) -> bool:
    """Whether the hub gave no answer at all."""
    from huggingface_hub import errors

    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, TimeoutError, ConnectionError)):
        return True
    # The hub's client is httpx or requests by version: both name their base classes like this.
    names = {base.__name__ for base in type(error).__mro__}
    gone = names & {"TransportError", "ConnectionError", "Timeout", "ProxyError"}
    return _status_of(error) in (502, 503, 504) or bool(gone)


def plain(error: BaseException) -> str:
    """The message on one line, with anything that could be a secret taken out."""
    return _TOKEN.sub(BLOT, redact(" ".join(str(error).split())))[:400]


def _model_fault(error: BaseException) -> Fault | None:
    status = _status_of(error)
    if (answer := _answer_of(error)) is not None:
        return answer
    if status == 403:
        return "gated"
    if status in (401, 404):
        return "not found"
    if is_unreachable(error):
        return "unreachable"
    if getattr(error, "errno", None) in _NOT_WRITABLE:
        return "cache"
    return "refused" if status is not None or isinstance(error, OSError) else None


def _dataset_fault(error: BaseException) -> Fault | None:
    from huggingface_hub import errors

    if (answer := _answer_of(error)) is not None:
        return answer
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        return "cache"
    status = _status_of(error)
    if not isinstance(error, errors.HfHubHTTPError) or status is None or not 400 <= status < 500:
        return None
    return "no access" if status in (401, 403) else "refused"


def _answer_of(error: BaseException) -> Fault | None:
    from huggingface_hub import errors

    answers: tuple[tuple[type, Fault], ...] = (
        (errors.HFValidationError, "bad name"),
        (errors.GatedRepoError, "gated"),  # one of the last kind, too
        (errors.RevisionNotFoundError, "no revision"),
        (errors.RepositoryNotFoundError, "not found"),
    )
    return next((fault for kind, fault in answers if isinstance(error, kind)), None)


def _status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
