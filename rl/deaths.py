"""What is said of an actor's process that died: one line. Ray's own account goes to the end of that process's log."""

from __future__ import annotations

import re
from contextlib import suppress
from textwrap import shorten
from typing import Any

_LONGEST = 300  # characters of an error that kept a process from starting
_KNOWN: dict[str, tuple[str, str]] = {}  # Ray's id of an actor -> its name and its log
_TOLD: set[str] = set()  # whose deaths this process has written to their logs


class ActorDied(RuntimeError):
    """An actor's process ended, or its constructor failed: whose, which process, how, and where its log is.

    how: "died", with what it was at, or "did not start", with the error. more: what else there is to say.
    """

    def __init__(
        self, name: str, how: str = "died", process: int | None = None, log: str = "", more: str = ""
    ) -> None:
        super().__init__(name, how, process, log, more)  # from which it is made again in another process
        self.name, self.how, self.process, self.log, self.more = name, how, process, log, more

    def __str__(self) -> str:
        number = "" if self.process is None else f" (process {self.process})"
        log = f"its log: {self.log}" if self.log else ""
        return "; ".join(part for part in (f"{self.name}{number} {self.how}", log, self.more) if part)

    def said(self, name: str = "", at: str = "", more: str = "") -> ActorDied:
        """The same death under another `name`, `at` other work, and with `more` to say."""
        how = f"died {at}" if at and self.how.startswith("died") else self.how
        return ActorDied(name or self.name, how, self.process, self.log, more or self.more)


def know(actor_id: str, name: str, log: str) -> None:
    """From now on this process can say whose a death is. actor_id: Ray's, in hexadecimal digits."""
    _KNOWN[actor_id] = name, log


def death(error: Any, method: str = "") -> ActorDied:
    """Of the actor that `error`, a RayActorError, is about, in a call of `method`."""
    text = re.sub(r"\x1b\[\d+m", "", str(error))
    name, log = _KNOWN.get(error.actor_id or "", ("an actor", ""))
    number = re.search(r"\bpid[:=] ?(\d+)", text)
    how = f"died in {method}" if method else "died"
    if error.actor_init_failed:
        how = f"did not start: {_cause(text)}"
    if log and error.actor_id not in _TOLD:
        _TOLD.add(error.actor_id)
        with suppress(OSError), open(log, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    return ActorDied(name, how, int(number[1]) if number else None, log)


def _cause(trace: str) -> str:
    """What follows the last frame."""
    lines = trace.rstrip().splitlines()
    last = max((at for at, line in enumerate(lines) if line.startswith(" ")), default=-1)
    return shorten(" ".join(lines[last + 1 :]), _LONGEST, placeholder=" ...")
