"""Which text a run trains on and which it evaluates on, as the section `data` of its file names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coremill.config.schema import DataSection
from coremill.data.examples import ExampleForm
from coremill.data.hub_datasets import PREFIX as HUB_PREFIX
from coremill.data.recognised import recognised, require_columns
from coremill.data.sources import TextSource, resolve_source
from coremill.errors import InputError


def sources_of(
    section: DataSection, form: ExampleForm | None = None
) -> tuple[tuple[TextSource, ...], TextSource | None]:
    """The text to train on, and the one to evaluate on; with a `form` they are read as examples."""

    def resolve(name: str, *, column: str, split: str, setting: str = "data.source") -> TextSource:
        found = resolve_source(name, column=column, split=split, setting=setting, on_bad_rows=section.on_bad_rows)
        return recognised(found, section) if form is None else with_examples(found, form)

    column, split = section.column, section.evaluation_split
    if section.sources is None:
        training = [resolve(section.source, column=column, split=section.split)]
    else:
        training = [
            resolve(
                entry.source,
                column=entry.column or column,
                split=entry.split or section.split,
                setting=f"data.sources[{index}].source",
            )
            for index, entry in enumerate(section.sources)
        ]
        _require_apart(training)
    if section.evaluation_source is not None:
        setting = "data.evaluation_source"
        evaluation = resolve(section.evaluation_source, column=column, split=split or section.split, setting=setting)
        return tuple(training), evaluation
    if split is None:
        return tuple(training), None
    if not section.source.startswith(HUB_PREFIX):
        raise InputError(
            "only a dataset of the hub has splits",
            where=f"data.evaluation_split: {split}",
            why=f"data.source is {section.source}",
            do="name files in data.evaluation_source, or a share of the rows in data.evaluation_fraction",
        )
    return tuple(training), resolve(section.source, column=column, split=split)


def commits_of(sources: Sequence[TextSource | None]) -> dict[str, str]:
    """Of datasets of the hub, by their names in the run file: the commit that was read."""
    return {source.name: source.dataset.commit for source in sources if source is not None and source.dataset}


def with_examples(source: TextSource, form: ExampleForm) -> TextSource:
    """The source, read as examples."""
    require_columns(source, f"examples are read from {form.in_words()}")
    return replace(source, examples=form)


def _require_apart(sources: Sequence[TextSource]) -> None:
    """No text is in two of the sources: it would be there more often than its share says."""
    seen: dict[object, TextSource] = {}
    for source in sources:
        texts: list[object] = [(file, "" if source.kind == "txt" else source.wanted) for file in source.files]
        if source.dataset is not None:
            texts = [(source.dataset.identity, source.wanted)]
        for text in texts:
            earlier = seen.setdefault(text, source)
            if earlier is not source:
                shared = source.files[texts.index(text)] if source.files else source.name
                raise InputError(
                    "the same text is in two of the sources",
                    where=source.where,
                    why=f"{shared} belongs to {earlier.name} and to {source.name}",
                    do="name each file in one source only; its share says how often it is used",
                )
