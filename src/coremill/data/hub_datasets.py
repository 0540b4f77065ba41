"""Datasets of the Hugging Face hub: `hf://[owner/]name[:config][@revision]`.

Access goes through `huggingface_hub` and `datasets`, each imported only when a source needs it. The commit is asked
for first, with one request and a deadline: it identifies the text for the cache, and it finds a missing, gated or
unreachable dataset in seconds, where `datasets` alone retries for 23 s on a refused connection (measured) and, by its
settings, for over a minute on a silent one.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill import hub
from coremill.data.bad_rows import BadRows
from coremill.data.files import BATCH_ROWS, Wanted, columns_read, pieces_of_arrow, require_text_type
from coremill.data.pieces import Piece
from coremill.errors import InputError

PREFIX = "hf://"

_NAME = re.compile(r"hf://(?P<repository>[^:@]+?)(?::(?P<config>[^@]+))?(?:@(?P<revision>.+))?")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One split of one commit of a dataset."""

    repository: str
    config: str | None
    split: str
    commit: str
    offline: bool  # the hub does not answer, or must not be asked: what is already on this machine serves

    @property
    def identity(self) -> tuple[str, ...]:
        """What its text depends on."""
        return (self.repository, self.config or "", self.split, self.commit)

    @property
    def label(self) -> str:
        """What its rows name as their file."""
        return f"{PREFIX}{self.repository}[{self.split}]"


def parse_name(name: str, setting: str) -> tuple[str, str | None, str | None]:
    """Repository, config and revision of an hf:// name."""
    match = _NAME.fullmatch(name)
    repository = match["repository"].strip("/") if match else ""
    if match is None or not repository or repository.count("/") > 1:
        raise InputError(
            "not the name of a dataset",
            where=f"{setting}: {name}",
            why="the form is hf://[owner/]name[:config][@revision]",
            do="for instance hf://wikitext:wikitext-2-raw-v1",
        )
    return repository, match["config"], match["revision"]


def resolve_dataset(name: str, *, split: str, setting: str) -> Dataset:
    """The commit that `name` means now; from this machine's own cache where the hub cannot be asked."""
    repository, config, revision = parse_name(name, setting)
    where = f"{setting}: {name}"
    try:
        commit, offline = _commit_on_hub(repository, revision), False
    except Exception as error:
        problem = hub.explain(error, "dataset", repository, revision, where)
        if problem is not None:
            raise problem from None
        here = _commits_in_cache(repository)
        found = [commit for commit, names in here.items() if revision is None or _is_named(revision, commit, names)]
        if not found or (revision is not None and len(found) > 1):
            raise _unreachable(error, repository, where, revision if here else None, list(here)) from None
        commit, offline = found[0], True
    return Dataset(repository=repository, config=config, split=split, commit=commit, offline=offline)


def bytes_on_card(dataset: Dataset) -> int | None:
    """How large the split is, all columns together, as the dataset's card has it; None where that cannot be told."""
    from huggingface_hub import HfApi

    def ask() -> Any:
        return HfApi().dataset_info(dataset.repository, revision=dataset.commit, timeout=hub.REQUEST_SECONDS).card_data

    try:
        card = hub.within(hub.DEADLINE_SECONDS, ask)
        described = (card.to_dict() if card is not None else {}).get("dataset_info") or []
    except Exception:  # a plan goes without
        return None
    entries = described if isinstance(described, list) else [described]
    named = [entry for entry in entries if entry.get("config_name", "default") == (dataset.config or "default")]
    found = named or (entries if len(entries) == 1 and dataset.config is None else [])
    sizes = [
        part.get("num_bytes") for entry in found for part in entry.get("splits") or () if part["name"] == dataset.split
    ]
    return int(sizes[0]) if sizes and sizes[0] else None


def open_dataset(dataset: Dataset, *, wanted: Wanted, where: str, bad: BadRows) -> tuple[Iterator[Piece], int | None]:
    """The rows of a dataset, downloaded where needed; the first call in its process."""
    rows = _load(dataset, where)
    texts = rows.select_columns(columns_read(wanted, rows.column_names, where))
    if isinstance(wanted, str):
        require_text_type(texts.features.arrow_schema.field(wanted).type, wanted, where, rows.features.arrow_schema)
    bytes_per_row = texts.data.nbytes / max(1, len(texts))
    return _rows(texts, wanted, dataset.label, bytes_per_row, bad), texts.data.nbytes


def columns_of_dataset(dataset: Dataset, where: str) -> list[str]:
    """The names of its columns; it is downloaded for that, and found again by whoever reads it."""
    return list(_load(dataset, where).column_names)


def schema_of_dataset(dataset: Dataset, where: str) -> Any:
    """Of Arrow, with the features of the dataset in its metadata."""
    return _load(dataset, where).features.arrow_schema


def _load(dataset: Dataset, where: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        if dataset.offline:
            return _prepared_earlier(dataset, where)
        return datasets.load_dataset(dataset.repository, dataset.config, split=dataset.split, revision=dataset.commit)
    except InputError:
        raise
    except Exception as error:
        raise _load_problem(error, dataset, where) from None


def _rows(texts: Any, wanted: Wanted, label: str, bytes_per_row: float, bad: BadRows) -> Iterator[Piece]:
    row = 0
    for table in texts.with_format("arrow").iter(batch_size=BATCH_ROWS):
        yield from pieces_of_arrow(table, wanted, label, row, bytes_per_row, bad)
        row += len(table)


def _commit_on_hub(repository: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    hub.quieten(bars=True)

    def ask() -> str:
        api = HfApi()
        info = api.dataset_info(repository, revision=revision, timeout=hub.REQUEST_SECONDS)
        if info.gated:
            # What a gated dataset is may be read by all, its files may not.
            api.auth_check(repository, repo_type="dataset")
        return str(info.sha)

    return hub.within(hub.DEADLINE_SECONDS, ask)


def _commits_in_cache(repository: str) -> dict[str, frozenset[str]]:
    """The commits that are on this machine, the newest first, with the branches and tags known to mean them."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    found = [repo for repo in repos if repo.repo_type == "dataset" and repo.repo_id == repository]
    commits = [commit for repo in found for commit in repo.revisions]
    commits.sort(key=lambda commit: float(commit.last_modified), reverse=True)
    return {str(commit.commit_hash): frozenset(commit.refs) for commit in commits}


def _is_named(revision: str, commit: str, names: frozenset[str]) -> bool:
    return revision in names or (_SHORT_COMMIT.fullmatch(revision) is not None and commit.startswith(revision))


def _prepared_earlier(dataset: Dataset, where: str) -> Any:
    """What `datasets` made of exactly this commit; its own way of going offline takes the newest of any commit."""
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, slash, name = dataset.repository.rpartition("/")
    folder = Path(datasets.config.HF_DATASETS_CACHE, f"{owner}{'___' if slash else ''}{camelcase_to_snakecase(name)}")
    prepared = sorted(folder.glob(f"{glob.escape(dataset.config or '*')}/*/*"))
    by_config = {path.parts[-3]: path for path in prepared if path.name == dataset.commit}
    if not by_config:
        others = sorted({path.name for path in prepared if _SHORT_COMMIT.fullmatch(path.name)})
        raise InputError(
            f"the dataset {dataset.repository} is not on this machine at commit {dataset.commit}",
            where=where,
            why=f"the hub cannot be asked for it, and of its commits were prepared here: {', '.join(others) or 'none'}",
            do="let it be downloaded once, or name one of those after @",
        )
    config = next(iter(by_config)) if len(by_config) == 1 else "default"
    if config not in by_config:
        raise ValueError(f"its configs are {', '.join(by_config)}")
    version = by_config[config].parts[-2]
    builder = Cache(
        dataset_name=name, repo_id=dataset.repository, config_name=config, version=version, hash=dataset.commit
    )
    return builder.as_dataset(split=dataset.split)


def _unreachable(
    error: Exception, repository: str, where: str, revision: str | None = None, here: Sequence[str] = ()
) -> InputError:
    """`revision` where the dataset is on this machine, `here`, but not that one."""
    from huggingface_hub import constants

    missing = "the dataset is not on this machine"
    if revision is not None:
        missing = f"of its revisions this machine has not '{revision}' but {', '.join(here)}"
    if constants.HF_HUB_OFFLINE:
        why = f"HF_HUB_OFFLINE is set, and {missing}"
        do = "unset HF_HUB_OFFLINE, or download the dataset first"
    else:
        why = f"{type(error).__name__}: {hub.plain(error)}; and {missing}"
        do = "check the network and its proxy, or use local files: data.source: texts/*.jsonl"
    if revision is not None:
        do = f"{do}, or name a whole commit after @"
    return InputError(f"cannot reach the Hugging Face hub for the dataset {repository}", where=where, why=why, do=do)


def _load_problem(error: Exception, dataset: Dataset, where: str) -> InputError:
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    known = hub.explain(error, "dataset", dataset.repository, dataset.commit, where)
    if known is not None:
        return known
    if isinstance(error, ConnectionError) or (dataset.offline and isinstance(error, FileNotFoundError)):
        return _unreachable(error, dataset.repository, where)
    name, text = f"the dataset {dataset.repository}", hub.plain(error)
    what, why, do = f"{name} cannot be read", f"{type(error).__name__}: {text}", None
    if isinstance(error, ValueError) and "split" in text.lower():
        what, why = f"{name} has no split '{dataset.split}'", text
        do = "set data.split (or data.evaluation_split) to one of them"
    elif isinstance(error, ValueError) and "config" in text.lower():
        config = f"has no config '{dataset.config}'" if dataset.config else "has several configs"
        what, why, do = f"{name} {config}", text, f"write {PREFIX}{dataset.repository}:CONFIG"
    elif isinstance(error, RuntimeError) and "scripts" in text:
        what = f"{name} needs a program of its own to be read"
        why = "datasets no longer runs such programs, and coremill never did"
        do = "use its parquet version, which many have: add @refs/convert/parquet to the name"
    elif isinstance(error, (DataFilesNotFoundError, DatasetNotFoundError)) or "Empty" in type(error).__name__:
        what, why = f"{name} holds no data files", text
    return InputError(what, where=where, why=why, do=do)
