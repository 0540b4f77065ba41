"""The process that tokenises, started by child_process.py, which says how the two talk."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any

from coremill.child import die_with_parent, read_line
from coremill.data.packed import Progress
from coremill.errors import CoremillError, InputError, StorageError
from coremill.remote_code import remove_copies

PROGRESS_SECONDS = 0.1


class Speaker:
    """Writes messages to the parent, progress not more often than a person can see."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._last_progress = 0.0

    def say(self, kind: str, **fields: Any) -> None:
        self._stream.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        self._stream.flush()

    def progress(self, progress: Progress, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self.say("progress", **vars(progress))

    def error(self, error: BaseException) -> None:
        """The error in the parts the parent needs to raise it again."""
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            error = StorageError(
                "the packed data cannot be written", where=error.filename, why=error.strerror, do="free some space"
            )
        if not isinstance(error, CoremillError):
            text = "".join(traceback.format_exception(error))
            error = CoremillError(f"tokenising failed: {type(error).__name__}: {error}", why=text.rstrip())
        name = "input" if isinstance(error, InputError) else "storage" if isinstance(error, StorageError) else "other"
        self.say("error", **{"class": name}, what=error.what, where=error.where, why=error.why, do=error.do)


def tie_to_parent(parent_pid: int) -> None:
    """End with the parent, whatever ends it."""
    die_with_parent(parent_pid)
    if os.getppid() != parent_pid:  # not Linux
        os._exit(1)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def private_stdout() -> IO[bytes]:
    """Our own way to the parent: what libraries print goes to stderr and cannot garble the messages."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return stream


def do_job(job: dict[str, Any], speaker: Speaker) -> dict[str, Any]:
    """Imports stand here: each job pays only for its own."""
    if job["job"] == "train tokenizer":
        from coremill.data.built_in_tokenizer import train_into

        train_into(Path(job["destination"]), job["vocabulary"], job["files"], speaker.progress)
        return {}
    if job["job"] == "hold out":
        from coremill.data.holdout import hold_out

        speaker.progress(Progress(0, 0, None, 0, "hold out"), always=True)
        whole, split = Path(job["whole"]), Path(job["destination"])
        return hold_out(whole, split, fraction=job["fraction"], seed=job["seed"], on_progress=speaker.progress)
    if job["job"] == "columns":
        from coremill.data.hub_datasets import columns_of_dataset
        from coremill.data.sources import TextSource

        source = TextSource.from_json(job["source"])
        assert source.dataset is not None
        with tempfile.TemporaryDirectory() as empty:  # as below
            os.chdir(empty)
            return {"columns": columns_of_dataset(source.dataset, source.where)}
    if job["job"] == "tokens of class":
        from coremill.data.tokenizer_files import tokens_of_class

        return tokens_of_class(Path(job["tokenizer_folder"]), job["names"], job["code_sha256"], Path(job["cache"]))
    if job["job"] == "sample examples":
        from coremill.data.counting_examples import count_sample

        return count_sample(job)
    if job["job"] == "encode":
        from coremill.data.encoding import encode_source

        return encode_source(job, speaker.progress)
    from coremill.data.packing import pack_text
    from coremill.data.sources import TextSource, open_text
    from coremill.data.tokenizer_files import load_tokenizer

    source = TextSource.from_json(job["source"])
    tokenizer = load_tokenizer(
        Path(job["tokenizer_folder"]), job["special_tokens"], code_sha256=job["code_sha256"], cache=Path(job["cache"])
    )
    chat = None
    if source.conversations is not None:
        from coremill.data.chat_packing import ChatJob, count_chat_tokens, pack_conversations

        chat = ChatJob(
            job["chat_template"], job["learn"], job["sequence_length"], job["vocabulary_rows"], job["class_tokens"]
        )
    if job["job"] == "sample":
        from coremill.data.counting import sample_of
        from coremill.data.packing import count_tokens

        sample = sample_of(source, job["sample_bytes"])
        if chat is not None:
            return count_chat_tokens(sample, tokenizer, Path(job["tokenizer_folder"]), chat)
        return count_tokens(sample, tokenizer, job["vocabulary_rows"])
    destination = Path(job["destination"])
    if source.dataset is not None:
        # datasets takes a folder of the same name for the dataset; here there is none.
        os.chdir(destination)
    if chat is not None:
        return pack_conversations(
            open_text(source),
            tokenizer,
            Path(job["tokenizer_folder"]),
            chat,
            destination=destination,
            where=source.where,
            on_progress=speaker.progress,
        )
    return pack_text(
        open_text(source),
        tokenizer,
        destination=destination,
        sequence_length=job["sequence_length"],
        vocabulary_rows=job["vocabulary_rows"],
        where=source.where,
        on_progress=speaker.progress,
    )


def main() -> int:
    """Read the job, do it, say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent got the same Ctrl-C and decides
    speaker = Speaker(private_stdout())
    line = read_line(0)  # unbuffered: the watcher reads the same pipe
    if not line.endswith(b"\n"):
        return 1  # the parent is gone already
    job = json.loads(line)
    tie_to_parent(job["parent_pid"])
    # Read by the libraries when they are imported, so set before.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if (job.get("source") or {}).get("dataset") is not None and job["source"]["dataset"]["offline"]:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        try:
            result = do_job(job, speaker)
        finally:
            remove_copies()  # before the last word: the parent does not wait for more
    except Exception as error:
        speaker.error(error)
        return 1
    speaker.say("result", **result)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # native threads of the libraries have nothing left to do
