"""Writing to a disk that may be full: whole or not at all, and an error that says which file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from rl.errors import DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Around what writes `path`: raises DiskFull, naming it, where a full disk is what went wrong."""
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise DiskFull(f"{path} is not written: the disk is full, or the quota is used up") from error


def append(file: FileIO, data: bytes) -> None:
    """Add `data` to a file opened for appending without a buffer; it is on disk on return, or nothing has changed."""
    length = os.fstat(file.fileno()).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            file.truncate(length)
        raise


def _is_full(error: Exception) -> bool:
    """Libraries that are not written in Python have errors of their own, with the system's words in them."""
    return getattr(error, "errno", None) in _FULL or any(os.strerror(code) in str(error) for code in _FULL)
