"""`coremill data show`: rows as the model will see them, without training and without torch.

What there is to show of a row says the task (`Task.shown_rows`); how it looks is decided here: what is learned in
colour, or between marks where there is no terminal, special tokens by their names, a line between documents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from coremill.config.load import LoadedConfig
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.data.token_text import Segment, TokenText, load_token_text
from coremill.errors import InputError
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.model.source import resolve_model, resolve_tokenizer
from coremill.model.tokenizer_fit import require_fitting_tokenizer
from coremill.remote_code import is_folder
from coremill.report.progress import StageProgress
from coremill.report.sources import COUNTS, kind_of_documents
from coremill.report.terminal import format_share, print_line, print_rows
from coremill.run.cards import card_for
from coremill.run.opening import say_basis
from coremill.run.prepare import say
from coremill.tasks.base import Rows, ShownRow, make_task

LEARNED, NOT_LEARNED, SPECIAL, BORDER = "green", "bright_black", "bold magenta", "cyan"
SPECIAL_LEARNED = "bold green"  # the end token of an answer, for one
OPENED, CLOSED = "«", "»"  # around what is learned, off a terminal
NEXT_DOCUMENT = "--- next {} ---"
# Characters that would move the cursor or change colours are shown as their pictures.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class ReadRow:
    """A row and its text."""

    shown: ShownRow
    segments: tuple[Segment, ...]
    kind: str  # documents or conversations

    @property
    def documents(self) -> int:
        return len(self.shown.document_starts) + 1

    @property
    def border(self) -> str:
        """Between two of them."""
        return NEXT_DOCUMENT.format(self.kind.removesuffix("s"))

    def in_words(self, total: int) -> str:
        """`row 17 of 557, from small.csv: 64 tokens, 63 of them learned, 3 documents`."""
        tokens, learned = len(self.shown.ids), sum(self.shown.learned)
        source = f", from {self.shown.source}" if self.shown.source else ""
        documents = f"{self.documents:,} {self.kind if self.documents > 1 else self.kind.removesuffix('s')}"
        more = f", {self.shown.words}" if self.shown.words else ""
        holds = self.shown.summary or f"{learned:,} of them learned, {documents}"
        return f"row {self.shown.row:,} of {total:,}{source}: {tokens:,} tokens, {holds}{more}"

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.shown.row,
            "source": self.shown.source or None,
            "tokens": len(self.shown.ids),
            "learned_tokens": sum(self.shown.learned),
            "documents": self.documents,
            "words": self.shown.words or None,
            **({"summary": self.shown.summary} if self.shown.summary else {}),
            "segments": [asdict(segment) for segment in self.segments],
        }


def show_data(loaded: LoadedConfig, *, rows: int, evaluation: bool, as_json: bool, console: Console) -> None:
    """The first rows of a run, or of its evaluations; progress and what is found on the way go to stderr."""
    if rows < 1:
        raise InputError(f"--rows {rows} shows nothing", do="give 1 or more")
    aside = Console(stderr=True)
    if not as_json:
        say_basis(loaded, aside)
    data, text = _prepare(loaded, aside)
    total = data.evaluation_rows if evaluation else data.train_rows
    if total == 0:
        raise InputError(
            "there are no rows to evaluate on",
            where="--evaluation",
            why="no evaluation source, split or fraction is named in the section data",
            do="leave --evaluation out, or try --set data.evaluation_fraction=0.05",
        )
    task = make_task(loaded.config)
    found = [
        ReadRow(row, tuple(text.segments(row.ids, row.learned, row.document_starts)), kind_of_documents(data.counts()))
        for row in task.shown_rows(data, count=rows, evaluation=evaluation)
    ]
    if as_json:
        split = "evaluation" if evaluation else "train"
        document = {"task": loaded.config.task, "split": split, "rows_total": total, "data": data.counts()}
        print(json.dumps({**document, "rows": [row.to_json() for row in found]}, indent=2))
        return
    _say_what_there_is(loaded.config, data, found, evaluation, console)
    for row in found:
        _show_row(row, total, console)


def _prepare(loaded: LoadedConfig, console: Console) -> tuple[Rows, TokenText]:
    """The rows of a run and what reads them; of a model on the hub nothing is fetched but its small files."""
    with loaded.placing(), StageProgress(console) as bars:
        for note in loaded.places.notes:
            say(console, note)
        config = loaded.located
        cache = cache_folder(environment_snapshot())
        task = make_task(config)
        section = config.model
        if section.config is None and section.name != BUILT_IN and not is_folder(section.name):
            section = section.model_copy(update={"weights": "random"})

        def on_model(text: str) -> None:
            say(console, text)

        model = resolve_model(section, task, cache=cache, progress=on_model)
        task = task.on_model(model.config, pretrained=config.model.weights == "pretrained")
        card = card_for(config, model)
        task.check_data(max_positions=card.max_positions)
        tokenizer = resolve_tokenizer(config, model, cache=cache, progress=on_model, training_progress=bars.show)
        doubt = require_fitting_tokenizer(config.tokenizer, tokenizer, model, card.vocabulary_rows)
        if doubt is not None:
            say(console, doubt)
        code_sha256 = model.code_sha256 if tokenizer == model.folder else None
        data: Rows = task.make_rows(
            tokenizer_folder=tokenizer,
            code_sha256=code_sha256,
            vocabulary_rows=card.vocabulary_rows,
            max_positions=card.max_positions,
            cache=cache,
            progress=bars.show,
        )
    return data, load_token_text(tokenizer, code_sha256=code_sha256, cache=cache)


def _say_what_there_is(
    config: RunConfig, data: Rows, found: Sequence[ReadRow], evaluation: bool, console: Console
) -> None:
    counts = data.counts()
    say(console, data.in_words())
    for words in (data.bad_rows_words, data.evaluation_words, *(counts.get("notes") or ())):
        if words:
            say(console, words)
    sources = [{name: source.get(name) for name in COUNTS} for source in counts.get("sources") or ()]
    if sources:
        columns = ("source", "share", kind_of_documents(counts), "rows", "passes in an epoch")
        rows = [
            (
                str(source["name"]),
                format_share(source["share"]),
                f"{source['documents']:,}",
                f"{source['rows']:,}",
                f"{source['passes_per_epoch']:.2f}",
            )
            for source in sources
        ]
        print_rows(console, "source", columns, rows)
    if not found:
        say(console, f"the task {config.task} has nothing to show of a row")
        return
    order = "as evaluations take them" if evaluation else f"in the order of the run (train.seed {config.train.seed})"
    legend = Text(f"shown: {len(found):,} row{'s' if len(found) > 1 else ''}, {order}; ")
    if all(row.shown.summary and not any(row.shown.learned) for row in found):
        legend.append("no token is learned: what is stands above each row")
    elif console.is_terminal:
        legend.append("learned", LEARNED).append(", ").append("not learned", NOT_LEARNED).append(", ")
        legend.append("special tokens", SPECIAL).append(", ").append("learned ones", SPECIAL_LEARNED)
    else:
        legend.append(f"what is learned stands between {OPENED} and {CLOSED}")
    print_line(console, legend)


def _show_row(row: ReadRow, total: int, console: Console) -> None:
    console.print()
    print_line(console, row.in_words(total), style="bold")
    if console.is_terminal:
        console.print(Padding(_coloured(row), (0, 0, 0, 2)), highlight=False)
    else:
        console.print(Text(_marked(row)), soft_wrap=True, highlight=False)


def _coloured(row: ReadRow) -> Text:
    text = Text()
    for segment in row.segments:
        if segment.starts_document:
            text.append(f"\n{row.border}\n", BORDER)
        special = SPECIAL_LEARNED if segment.learned else SPECIAL
        text.append(visible(segment.text), special if segment.special else LEARNED if segment.learned else NOT_LEARNED)
    return text


def _marked(row: ReadRow) -> str:
    """Plain text; no learned stretch goes on behind the line between two documents."""
    parts, is_open = [], False
    for segment in row.segments:
        if is_open and (segment.starts_document or not segment.learned):
            parts.append(CLOSED)
            is_open = False
        if segment.starts_document:
            parts.append(f"\n{row.border}\n")
        if segment.learned and not is_open:
            parts.append(OPENED)
            is_open = True
        parts.append(visible(segment.text))
    return "".join(parts) + (CLOSED if is_open else "")


def visible(text: str) -> str:
    """Without characters that a terminal obeys."""
    return _CONTROL.sub(lambda match: "\u2421" if match[0] == "\x7f" else chr(0x2400 + ord(match[0])), text)
