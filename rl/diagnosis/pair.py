"""The two engines of a diagnosis, which start when they are first needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.cluster import Remote, local_cluster, start_actor, stop_actor, wait
from rl.diagnosis.actors import EngineActor
from rl.diagnosis.config import DiagnoseConfig
from rl.errors import SpecMismatch

SIDES = ("left", "right")
Maps = tuple[PrecisionMap, PrecisionMap] | None  # of the left and the right engine; None: a dense model


class Pair:
    """left, right: `Remote`s of `EngineActor`. Everything ends with the block."""

    def __init__(self, config: DiagnoseConfig, model: Path, folder: Path, say: Callable[[str], None]):
        self._config, self._model, self._folder, self._say = config, model, folder, say
        self._stack = ExitStack()
        self._remotes: tuple[Remote, Remote] | None = None
        self._maps: Maps | None = None
        self._cluster = False
        self.reports: dict[str, list[EngineReport]] = {}  # condition -> what the engines said

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def under(self, condition: str, maps: Maps) -> tuple[Remote, Remote]:
        """Both engines, each under its map. Raises SpecMismatch when one says that it runs another."""
        own_maps = maps or (None, None)
        if self._remotes is None:
            self._say(f"starting {self._config.engines[0]} and {self._config.engines[1]}")
            self._start_cluster()
            started = [self._start(side, own_maps[side]) for side in range(2)]
            wait([remote.later.ready() for remote in started])
            self._remotes = started[0], started[1]
        elif maps is not None and maps != self._maps:
            wait([remote.later.use(own) for remote, own in zip(self._remotes, maps, strict=True)])
        self._maps = maps
        if maps is None:
            return self._remotes
        reports = wait([remote.later.report() for remote in self._remotes])
        for report, own, side in zip(reports, maps, SIDES, strict=True):
            difference = own.diff(report.precision_map, "asked for", f"{side} engine")
            if difference:
                raise SpecMismatch(
                    f"the {side} engine ({report.engine}) runs another specification\n{difference}"
                )
        self.reports[condition] = reports
        return self._remotes

    def writer(self, precision_map: PrecisionMap | None) -> tuple[Remote, Callable[[], None]]:
        """A vLLM engine that writes responses, and what ends its use: the pair's own where it has one."""
        if "vllm" in self._config.engines:
            remotes = self.under(
                "sampling", None if precision_map is None else (precision_map, precision_map)
            )
            return remotes[self._config.engines.index("vllm")], lambda: None
        self._say("starting vllm to write the responses")
        self._start_cluster()
        remote = self._start(1, precision_map, kind="vllm", name="writer")
        remote.ready()
        return remote, lambda: stop_actor(remote)

    def _start_cluster(self) -> None:
        if not self._cluster:
            self._stack.enter_context(local_cluster(self._config.run.object_store_mib))
            self._cluster = True

    def _start(
        self, side: int, precision_map: PrecisionMap | None, kind: str | None = None, name: str | None = None
    ) -> Any:
        config = self._config
        kind, name = kind or config.engines[side], name or SIDES[side]
        as_sampler = kind == "vllm" or (kind == "hf" and side == 1)
        threads = config.sampler.threads if as_sampler else config.learner.threads
        log = self._folder / f"{name}.{kind}.log"
        arguments = (kind, side, self._model, precision_map, config.learner, config.sampler)
        return start_actor(EngineActor, f"diagnosis_{name}", threads, log, *arguments)


def both(pair: tuple[Remote, Remote], method: str, *arguments: Any) -> tuple[Any, Any]:
    """The method of both engines, at the same time."""
    left, right = wait([getattr(remote.later, method)(*arguments) for remote in pair])
    return left, right
