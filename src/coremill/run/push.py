"""`coremill export --push`: a folder to the Hugging Face hub, by its own client and with its own login.

Whatever would stop it is asked before anything is written here: a login, the right to write there, the network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from coremill import hub
from coremill.errors import CoremillError, InputError

T = TypeVar("T")

# Of an earlier push with more or fewer files: a loader would take them for this one's.
REPLACED = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]


def require_place(name: str, *, private: bool) -> None:
    """OWNER/NAME on the hub is ours to write, and where it is there already as private as asked; nothing is made."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        is_whole = name.count("/") == 1
    except HFValidationError:
        is_whole = False
    if not is_whole:
        raise InputError(f"{name!r} cannot be the name of a model on the hub", where="--push", do="give OWNER/NAME")
    if get_token() is None:
        raise InputError(
            "this machine is not logged in to the hub",
            where="--push",
            why="a push needs a token that may write",
            do="run: hf auth login (or set HF_TOKEN in the environment); then the same command again",
        )
    hub.quieten(bars=sys.stderr.isatty())
    client = HfApi()
    who = _ask(name, lambda: client.whoami())
    owners = [who["name"], *(each["name"] for each in who.get("orgs", ()))]
    if name.split("/")[0] not in owners:
        raise InputError(
            f"this login may not write to {name} on the hub",
            where="--push",
            why=f"it may write to names of {' and '.join(owners)}",
            do="push to a name of your own, or log in as somebody who may: hf auth login",
        )
    is_there = private and _ask(name, lambda: client.repo_exists(name))
    if is_there and not _ask(name, lambda: client.model_info(name)).private:
        raise InputError(
            f"{name} is there already, and public",
            where="--private",
            why="what is pushed would be seen by everybody",
            do=f"make it private at {client.endpoint}/{name}/settings, or push to another name",
        )


def push_folder(folder: Path, name: str, *, message: str, private: bool) -> str:
    """Upload, to a new model where there is none of that name; gives the address. The folder stays in any case."""
    from huggingface_hub import HfApi

    client = HfApi()
    try:
        client.create_repo(name, private=private or None, exist_ok=True)
        client.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=REPLACED)
    except Exception as error:
        raise CoremillError(
            f"the model lies in {folder}, but could not be pushed to {name}",
            why=_reason(error),
            do=f"hf upload {name} {folder} tries again",
        ) from None
    return f"{client.endpoint}/{name}"


def license_on_hub(name: str) -> str | None:
    """Of a base model, as its card says; None: it says none, or the hub does not answer."""
    from huggingface_hub import HfApi

    try:
        card = hub.within(hub.DEADLINE_SECONDS, lambda: HfApi().model_info(name, timeout=hub.REQUEST_SECONDS)).card_data
    except Exception:  # a card without its license is a card all the same
        return None
    found = None if card is None else card.to_dict().get("license")
    return found if isinstance(found, str) else None


def _ask(name: str, request: Callable[[], T]) -> T:
    """One question before the push; whatever is wrong is bad input, said in words."""
    try:
        return hub.within(hub.DEADLINE_SECONDS, request)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if hub.is_unreachable(error):
            what, do = "the hub cannot be reached", "check the network or proxy; without --push the model stays here"
        elif status == 401:
            what, do = "the hub does not accept the token of this machine", "run: hf auth login"
        elif status in (403, 404):
            what = f"this login may not write to {name} on the hub"
            do = "push to a name of your own, or use a token with the right to write there: hf auth login"
        else:
            what, do = f"the hub refused to make {name} ready", "try again later"
        raise InputError(what, where="--push", why=_reason(error), do=do) from None


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {hub.plain(error)}"
