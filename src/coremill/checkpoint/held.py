"""A checkpoint that stays readable while the run that made it goes on, and may let it go any moment. No torch here.

All its files are opened at once; a file that is open can still be read after it was removed. Whoever reads finds them
under their names in a folder of links to what is open.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from coremill.checkpoint.manifest import READ_BYTES, Checkpoint, StoredFile, Unusable


@contextlib.contextmanager
def held(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """The same checkpoint under another folder; raises Unusable where a file is gone already."""
    with contextlib.ExitStack() as stack:
        links = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coremill-held-")))
        for file in checkpoint.manifest.files:
            descriptor = _open(checkpoint.folder / file.name, file)
            stack.callback(os.close, descriptor)
            (links / file.name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield Checkpoint(links, checkpoint.manifest, checkpoint.digest)


def verify_held(checkpoint: Checkpoint, on_bytes: Callable[[int], None]) -> None:
    """Hash every file; raises Unusable with the first that is not what was written."""
    for file in checkpoint.manifest.files:
        digest = hashlib.sha256()
        try:
            with (checkpoint.folder / file.name).open("rb", buffering=0) as stream:
                while piece := stream.read(READ_BYTES):
                    digest.update(piece)
                    on_bytes(len(piece))
        except OSError as error:
            raise Unusable(f"{file.name} cannot be read: {error.strerror}") from None
        if digest.hexdigest() != file.sha256:
            raise Unusable(f"{file.name} was altered: its hash is not the manifest's")


def _open(path: Path, file: StoredFile) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Unusable(f"{file.name} cannot be opened: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
        os.close(descriptor)
        raise Unusable(f"{file.name} is not the file that was written")
    return descriptor
