"""Models on the Hugging Face hub: downloads, cards without weights, and what to say when it does not work.

The hub is asked for the file list first, under a deadline: a missing network, a gated or unknown model and a
pickle-only checkpoint are known within seconds, before a single weight has moved. Files go to the hub's own cache,
which other tools share.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.plan.card import ModelCard, card_of, read_card, read_config
from coremill.plan.headers import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorHeader,
    parse_index,
    pickle_files,
    pickle_refusal,
    weight_files,
)
from coremill.remote_code import is_code, require_own_classes
from coremill.tasks.base import Task

# Configs and every form a tokenizer comes in; weights are chosen by name.
SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# A dead network answers at once, a silent one not at all; bad input has to be reported within 30 s.
ANSWER_SECONDS = 10.0
DEADLINE_SECONDS = 20.0


def download(
    name: str,
    *,
    revision: str | None,
    weights: bool,
    progress: Callable[[str], None] | None,
    setting: str,
    code: bool = False,
) -> Path:
    """The folder of a hub repository in the hub's cache: configs, tokenizer and, if asked for, safetensors and code.

    With `code` the revision is a commit, and nothing else is taken for it.
    """
    from huggingface_hub import snapshot_download

    _quieten(bars=sys.stderr.isatty())
    try:
        info = _ask(name, revision)
        if code:
            _require_commit(name, info, revision)
        files, total_bytes = _choose_files(name, info, revision, weights, code=code)
        if progress is not None:
            size = f"{total_bytes / 1e9:.2f} GB" if total_bytes >= 1e9 else f"{total_bytes / 1e6:.1f} MB"
            progress(f"{name}: {len(files)} files, {size}, from the hub or its cache")
        # By branch, not by commit: only so does the cache remember what the branch meant, for days without a hub.
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except InputError:
        raise
    except Exception as error:
        if _is_unreachable(error):
            cached = _cached(name, revision, weights)
            if cached is not None:
                return cached
        problem = explain(error, name, revision, setting)
        if problem is None:
            raise
        raise problem from None


def card_on_hub(
    name: str, task: Task[Any], *, revision: str | None, weights: bool, setting: str, code: bool = False
) -> ModelCard:
    """The card of a hub model: config.json, and of the weights only the headers, by range request."""
    from huggingface_hub import HfApi, hf_hub_download

    _quieten(bars=False)
    try:
        info = _ask(name, revision)
        files, _ = _choose_files(name, info, revision, weights, code=code)
        if "config.json" not in files:
            why = "it says what shape the model has"
            raise InputError(f"{name} on the hub has no config.json", where=setting, why=why)
        config = read_config(Path(hf_hub_download(name, "config.json", revision=revision)).parent)
        if code:
            _require_commit(name, info, revision)
            require_own_classes(config, [file for file in files if is_code(file)], f"{name}/config.json on the hub")
        metadata = HfApi().get_safetensors_metadata(name, revision=revision) if weights else None
    except InputError:
        raise
    except Exception as error:
        cached = _cached(name, revision, weights=False) if _is_unreachable(error) else None
        if cached is not None:
            return read_card(cached, name=name, pretrained=weights)
        problem = explain(error, name, revision, setting)
        if problem is None:
            raise
        raise problem from None
    task.check_model(config, description=name, where=f"{name}/config.json on the hub", trusted=code)
    return card_of(config, None if metadata is None else _headers_of(metadata), name=name)


def _headers_of(metadata: Any) -> dict[str, TensorHeader]:
    """The hub client's description of safetensors files in our words; offsets count from the end of the header."""
    return {
        tensor: TensorHeader(tensor, info.dtype, tuple(info.shape), file, *info.data_offsets)
        for file, description in metadata.files_metadata.items()
        for tensor, info in description.tensors.items()
    }


def _quieten(*, bars: bool) -> None:
    """What the hub's client would say by itself (retries, hints to log in) is said by us, once, or not at all."""
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not bars:
        disable_progress_bars()


def explain(error: Exception, name: str, revision: str | None, setting: str) -> InputError | None:
    """One clear message for each way a download fails; never what was sent, since that may hold a token.

    None for an error that is neither the hub's nor the network's nor the disk's.
    """
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return InputError(
            f"{name!r} is neither a folder nor a hub id", where=setting, do="give an existing folder or owner/name"
        )
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return InputError(
            f"{name} is gated on the hub",
            where=setting,
            why="its owner wants a licence accepted, and this machine is not logged in with an account that did",
            do=f"accept the licence at https://huggingface.co/{name}, then run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"{name} has no revision {revision!r}", where=f"{setting}.revision")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return InputError(
            f"no folder and no hub model named {name}",
            where=setting,
            why="the hub says it does not exist, or it is private and this machine is not logged in",
            do="check the spelling; for a private model run: hf auth login",
        )
    if _is_unreachable(error):
        return InputError(
            f"{name} is not a folder here, and the hub cannot be reached",
            where=setting,
            why=f"{type(error).__name__}, and the hub's cache on this machine does not have it",
            do="check the network or proxy, or give the path of a folder that has the model",
        )
    if status is None and not isinstance(error, OSError):
        return None
    reason = f"HTTP status {status}" if status is not None else f"{type(error).__name__}: {error}"
    return InputError(f"cannot download {name} from the hub", where=setting, why=reason, do="try again later")


def _ask(name: str, revision: str | None) -> Any:
    """The repository's file list, within the deadline whatever the network does."""
    from huggingface_hub import HfApi

    answer: list[Any] = []
    failure: list[Exception] = []

    def ask() -> None:
        try:
            answer.append(HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS, files_metadata=True))
        except Exception as error:
            failure.append(error)

    # A daemon thread: name resolution has no timeout of its own, and must not hold up the exit.
    thread = threading.Thread(target=ask, daemon=True, name="hub")
    thread.start()
    thread.join(DEADLINE_SECONDS)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError(f"no answer from the hub within {DEADLINE_SECONDS:.0f} s")
    return answer[0]


def _require_commit(name: str, info: Any, revision: str | None) -> None:
    """Code was read at a commit: what the hub takes for it has to be that very one."""
    if info.sha != revision:
        raise InputError(
            f"the hub gives commit {info.sha} of {name} for {revision}",
            where="model.revision",
            why="code is run only from the commit that was named",
            do="set model.revision to the full commit whose code you have read",
        )


def _choose_files(
    name: str, info: Any, revision: str | None, weights: bool, *, code: bool = False
) -> tuple[list[str], int]:
    """Exactly the files of the model: repositories also hold the same weights in other formats and precisions."""
    from huggingface_hub import hf_hub_download

    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    top = [file for file in sizes if "/" not in file]
    files = [file for file in top if file.endswith(SMALL_FILES) and not file.endswith(".bin.index.json")]
    if code:
        files += [file for file in top if is_code(file)]
    if weights:
        if SINGLE_FILE in top:
            files.append(SINGLE_FILE)
        elif INDEX_FILE in top:
            path = Path(hf_hub_download(name, INDEX_FILE, revision=revision))
            weight_map = parse_index(json.loads(path.read_text(encoding="utf-8")), f"{name}/{INDEX_FILE}")
            files += sorted(set(weight_map.values()))
        else:
            pickles = pickle_files(top)
            if pickles:
                raise pickle_refusal(name, pickles[0], f"{name.split('/')[-1]}-safetensors")
            raise InputError(f"{name} on the hub has no safetensors weights", where=name, why=f"no {SINGLE_FILE}")
    return files, sum(sizes.get(file, 0) for file in files)


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer at all."""
    from huggingface_hub import errors

    if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, TimeoutError, ConnectionError)):
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    # The hub's client is httpx or requests by version: both name their base classes like this.
    names = {base.__name__ for base in type(error).__mro__}
    return status in (502, 503, 504) or bool(names & {"TransportError", "ConnectionError", "Timeout", "ProxyError"})


def _cached(name: str, revision: str | None, weights: bool) -> Path | None:
    """What an earlier download left, where the hub cannot be asked; None unless it is whole."""
    from huggingface_hub import try_to_load_from_cache

    # Not snapshot_download(local_files_only=True): newer ones want every file of the repository, other formats too.
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        path = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(path, str):
            folder = Path(path).parent
            try:
                if weights:
                    weight_files(folder)
            except InputError:
                return None
            return folder
    return None
