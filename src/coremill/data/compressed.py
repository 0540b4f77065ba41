"""Files that may be compressed (.gz, .zst), opened as a stream of the bytes inside.

zstd comes with pyarrow, which is there for parquet: no library of its own is needed. Nothing is unpacked beside the
file but a .parquet.gz, whose footer has to be read first.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from coremill.errors import InputError

COMPRESSIONS = (".gz", ".zst")
# Forms of compression that are not read, and how each is undone.
UNREAD_COMPRESSIONS = {
    ".bz2": "bunzip2",
    ".xz": "unxz",
    ".lzma": "unlzma",
    ".lz4": "unlz4",
    ".br": "brotli -d",
    ".zip": "unzip",
    ".7z": "7z x",
    ".rar": "unrar x",
    ".tar": "tar -xf",
    ".tgz": "tar -xzf",
}
BUFFER_BYTES = 1 << 17


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS


@contextlib.contextmanager
def open_bytes(path: Path, on_read: Callable[[int], None] | None = None) -> Iterator[io.BufferedReader]:
    """The bytes inside `path`; `on_read` is told how much of a compressed file has been read so far."""
    if not is_compressed(path):
        with path.open("rb") as stream:
            yield stream
        return
    with path.open("rb", buffering=0) as packed, _damage_told(path):
        counted = packed if on_read is None else _Counted(packed, on_read)
        with io.BufferedReader(_unpacked(path, counted), BUFFER_BYTES) as stream:
            yield stream


class _Counted(io.RawIOBase):
    """A file that tells how far it was read."""

    def __init__(self, inner: Any, on_read: Callable[[int], None]) -> None:
        self._inner, self._on_read = inner, on_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._inner.readinto(buffer))
        self._on_read(int(self._inner.tell()))
        return count


def _unpacked(path: Path, packed: Any) -> Any:
    buffered: BinaryIO = io.BufferedReader(packed, BUFFER_BYTES)
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=buffered, mode="rb")
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(buffered, mode="r"), "zstd")


@contextlib.contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:  # pyarrow's are OSErrors too
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of what is on it
        suffix = path.suffix.lower()
        raise InputError(
            f"not a whole {suffix} file",
            where=str(path),
            why=f"{str(error).splitlines()[0]} ({path.stat().st_size:,} bytes on disk)",
            do=f"copy or download the file again; where it is not compressed at all, take {suffix} off its name",
        ) from None
