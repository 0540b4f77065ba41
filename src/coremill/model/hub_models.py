"""Models on the Hugging Face hub: downloads, and cards without weights.

The hub is asked for the file list first, under a deadline: a missing network, a gated or unknown model and a
pickle-only checkpoint are known within seconds, before a single weight has moved. Files go to the hub's own cache,
which other tools share.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coremill import hub
from coremill.errors import InputError
from coremill.plan.card import ModelCard, card_of, read_card
from coremill.plan.config_file import read_config
from coremill.plan.headers import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorHeader,
    parse_index,
    pickle_files,
    pickle_refusal,
    read_headers,
    weight_files,
)
from coremill.remote_code import is_code, require_own_classes
from coremill.tasks.base import Task

# Configs and every form a tokenizer comes in; weights are chosen by name.
SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")


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

    hub.quieten(bars=sys.stderr.isatty())
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
        if hub.is_unreachable(error):
            cached = _cached(name, revision, weights)
            if cached is not None:
                return cached
        problem = hub.explain(error, "model", name, revision, setting)
        if problem is None:
            raise
        raise problem from None


def download_files(name: str, files: list[str], *, setting: str) -> Path:
    """The folder of a hub repository in the hub's cache, with these files of it, the first of which it has."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    hub.quieten(bars=sys.stderr.isatty())
    try:
        _ask(name, None)
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        cached = try_to_load_from_cache(name, files[0]) if hub.is_unreachable(error) else None
        if isinstance(cached, str):
            return Path(cached).parent
        problem = hub.explain(error, "model", name, None, setting)
        if problem is None:
            raise
        raise problem from None


def card_on_hub(
    name: str,
    task: Task[Any],
    *,
    revision: str | None,
    weights: bool,
    setting: str,
    code: bool = False,
    labels: int | None = None,
) -> ModelCard:
    """The card of a hub model: config.json, and of the weights only the headers, by range request. `labels`: of a head
    for classification, where the run says how many."""
    from huggingface_hub import HfApi, hf_hub_download

    hub.quieten(bars=False)
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
        cached = _cached(name, revision, weights=False) if hub.is_unreachable(error) else None
        if cached is not None:
            config, where = read_config(cached), f"{cached}/config.json"
            task.check_model(config, description=name, where=where, trusted=code)
            return read_card(
                cached, config=config, name=name, pretrained=weights, model_class=task.model_class, labels=labels
            )
        problem = hub.explain(error, "model", name, revision, setting)
        if problem is None:
            raise
        raise problem from None
    task.check_model(config, description=name, where=f"{name}/config.json on the hub", trusted=code)
    headers = None if metadata is None else _headers_of(metadata)
    return card_of(config, headers, name=name, model_class=task.model_class, labels=labels)


def tensor_names_on_hub(name: str, revision: str | None) -> frozenset[str] | None:
    """Of the model's weights, by their headers; None where these cannot be had: a plan is made all the same."""
    from huggingface_hub import HfApi

    try:
        return frozenset(_headers_of(HfApi().get_safetensors_metadata(name, revision=revision)))
    except Exception as error:
        if hub.is_unreachable(error) and (cached := _cached(name, revision, weights=True)) is not None:
            return frozenset(read_headers(cached))
        return None


def _headers_of(metadata: Any) -> dict[str, TensorHeader]:
    """The hub client's description of safetensors files in our words; offsets count from the end of the header."""
    return {
        tensor: TensorHeader(tensor, info.dtype, tuple(info.shape), file, *info.data_offsets)
        for file, description in metadata.files_metadata.items()
        for tensor, info in description.tensors.items()
    }


def _ask(name: str, revision: str | None) -> Any:
    """The repository's file list, within the deadline whatever the network does."""
    from huggingface_hub import HfApi

    def ask() -> Any:
        return HfApi().model_info(name, revision=revision, timeout=hub.REQUEST_SECONDS, files_metadata=True)

    return hub.within(hub.DEADLINE_SECONDS, ask)


def _require_commit(name: str, info: Any, revision: str | None) -> None:
    """Code was read at a commit: what the hub takes for it has to be that very one."""
    if info.sha != revision:
        raise InputError(
            f"the hub gives commit {info.sha} of {name} for {revision}",
            where="model.revision",
            why="code is run only from the commit that was named",
            do="set model.revision to the full commit whose code you have read",
        )


def _choose_files(name: str, info: Any, revision: str | None, weights: bool, *, code: bool) -> tuple[list[str], int]:
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
