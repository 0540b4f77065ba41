"""What a command says of itself: how far a long preparation is, and what went wrong."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coremill.data.packed import Progress, Stage
from coremill.redaction import redact
from coremill.report.terminal import format_bytes, format_percent, format_seconds, print_line, print_verbatim

PLAIN_EVERY_SECONDS = 5.0  # a log line per step would bury everything else
REDRAW_EVERY_SECONDS = 0.1
WORTH_A_LINE_SECONDS = 1.0  # what counts nothing and took less leaves no line

WORDS_OF_STAGE: dict[Stage, str] = {
    "hash": "reading the text",
    "wait": "waiting for another process that prepares the same data",
    "download": "fetching the data from the hub or its cache",
    "tokenise": "tokenising",
    "encode": "encoding",
    "hold out": "holding out for evaluation",
    "train tokenizer": "making the tokenizer",
}


class AmountProgress:
    """One long preparation (tokenising, a download): a bar on a terminal, a line every few seconds elsewhere.

    `show` takes what is done so far; the details (documents, tokens) are words the caller may add.
    """

    def __init__(self, what: str, console: Console | None = None) -> None:
        self.console = console if console is not None else Console()
        self.what = what
        self._started = time.monotonic()
        self._printed = self._started
        self._done = 0.0
        self._total: float | None = None
        self._detail = ""
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True, get_renderable=self._display)
            self._live.start()

    def show(self, bytes_done: float, bytes_total: float | None = None, detail: str = "") -> None:
        """Show how far it is."""
        self._done, self._total, self._detail = bytes_done, bytes_total or None, detail
        now = time.monotonic()
        if self._live is not None:
            if now - self._printed >= REDRAW_EVERY_SECONDS:
                self._printed = now
                self._live.refresh()
        elif now - self._printed >= PLAIN_EVERY_SECONDS:
            self._printed = now
            print_line(self.console, f"{self.what}: {self._words()}")

    def close(self, closing_line: str | None = None, *, done: bool = True) -> None:
        """Take the bar away; one line stays, where it is done: the caller's, or how much was done in what time."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if not done:
            return
        self._done = max(self._done, self._total or 0.0)  # the last report may have come before the end
        seconds = time.monotonic() - self._started
        if not self._done and closing_line is None and seconds < WORTH_A_LINE_SECONDS:
            return
        amount = format_bytes(self._done) if self._done else "done"
        detail = f", {self._detail}" if self._detail else ""
        print_line(self.console, closing_line or f"{self.what}: {amount}{detail} in {format_seconds(seconds)}")

    def _words(self) -> str:
        total = f" of {format_bytes(self._total)}" if self._total else ""
        share = f" ({format_percent(self._done / self._total)})" if self._total else ""
        return f"{format_bytes(self._done)}{total}{share}" + (f", {self._detail}" if self._detail else "")

    def _display(self) -> Group:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        pace = self._done / max(time.monotonic() - self._started, 1e-9)
        left = format_seconds((self._total - self._done) / pace) if self._total and pace > 0 else ""
        share = format_percent(self._done / self._total) if self._total else format_bytes(self._done)
        grid.add_row(
            Text(self.what, style="bold"),
            ProgressBar(total=self._total, completed=self._done, pulse=self._total is None),
            Text(f"{share}  ETA {left}" if left else share, style="cyan"),
        )
        return Group(grid, Text(self._words(), style="dim", no_wrap=True, overflow="ellipsis"))


class StageProgress:
    """The stages of making rows, one bar after the other, each from the moment its work begins until it is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: Stage | None = None
        self._bar: AmountProgress | None = None

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(done=kind is None)

    def show(self, progress: Progress) -> None:
        """Of the stage under way; a word on the end of one that was never shown is passed over."""
        if self._stage != progress.stage:
            if progress.is_done:
                return
            self._close()
            self._stage, self._bar = progress.stage, AmountProgress(WORDS_OF_STAGE[progress.stage], self._console)
        assert self._bar is not None
        if progress.bytes_done or not progress.is_done:
            documents = f"{progress.documents_done:,} {progress.counted}, " if progress.documents_done else ""
            counts = f"{documents}{progress.tokens:,} tokens" if progress.tokens else ""
            self._bar.show(progress.bytes_done, progress.bytes_total, counts)
        if progress.is_done:
            self._close()

    def _close(self, *, done: bool = True) -> None:
        if self._bar is not None:
            self._bar.close(done=done)
        self._stage = self._bar = None


def show_error(
    message: str, rank: int | None = None, traceback: str | None = None, console: Console | None = None
) -> None:
    """What went wrong, message first, the rank named, that rank's own traceback once."""
    console = console if console is not None else Console(stderr=True)
    first, *rest = redact(message).strip().splitlines() or ["no message"]
    line = Text()
    line.append("error", style="bold red").append(f" on rank {rank}: " if rank is not None else ": ").append(first)
    print_line(console, line)
    for text in rest:
        print_line(console, text)
    if traceback and traceback.strip():
        print_line(console, f"traceback of rank {rank}:" if rank is not None else "traceback:", style="dim")
        for text in redact(traceback).rstrip().splitlines():
            print_verbatim(console, f"  {text}", style="dim")
