"""What the commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

_READER_GONE = 141  # the status that a shell gives a program which SIGPIPE ends


def end_quietly(main: Callable[[], int]) -> int:
    """The exit status of `main`; without a word when nobody reads its output any more, as in `... | head -1`."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes what is left once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    return status


def check_output(file: Path) -> None:
    """Raise ValueError where `file` could not be written after the work is done."""
    parent = file.resolve().parent
    if file.is_dir():
        raise ValueError(f"{file} cannot be written: it is a folder")
    if not parent.is_dir():
        raise ValueError(f"{file} cannot be written: there is no folder {parent}")
    if not os.access(file if file.exists() else parent, os.W_OK):
        raise ValueError(f"{file} cannot be written: no permission")
