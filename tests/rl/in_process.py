"""Runs whose engines, the real ones, are all in this process: without Ray, and without loading them anew for each."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:
    from sampler.engine import Sampler

_AT_WORK = threading.RLock()  # one actor at a time: engines in one process share torch's and vLLM's state
_ACTORS: list[Any] = []


class Here:
    """`rl.cluster.Remote` of an actor in this process. What `later` asks for is done at once."""

    def __init__(self, number: int) -> None:
        self._number, self.later = number, _Later(number)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **kwargs: wait(getattr(self.later, method)(*args, **kwargs))

    def __reduce__(self) -> Any:
        return Here, (self._number,)


class _Later:
    def __init__(self, number: int) -> None:
        self._number = number

    def __getattr__(self, method: str) -> Callable[..., _Done]:
        def call(*args: Any, **kwargs: Any) -> _Done:
            try:
                given = _passed([wait(arg) if isinstance(arg, _Done) else arg for arg in args])
                with _AT_WORK:
                    return _Done(_passed(getattr(_ACTORS[self._number], method)(*given, **_passed(kwargs))))
            except Exception as error:
                return _Done(error=error)

        return call


class _Done:
    """What stands for Ray's reference: a call is over, with a value or an error."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error


def _passed(value: Any) -> Any:
    """As it comes from another process through Ray's store: a copy, whose NumPy arrays cannot be written."""
    buffers: list[pickle.PickleBuffer] = []
    told = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(told, buffers=[bytes(buffer.raw()) for buffer in buffers])


def wait(reference: Any, method: str = "") -> Any:
    if isinstance(reference, list):
        return [wait(one) for one in reference]
    if reference.error is not None:
        raise reference.error
    return reference.value


def start_actor(actor_class: Any, name: str, threads: int, log: Path, *args: Any, **options: Any) -> Here:
    with _AT_WORK:
        actor = actor_class(*_passed(args))
    sampler = getattr(getattr(actor, "engine", actor), "sampler", None)  # of a diagnosis, of a run
    if sampler is not None:
        leave_groups(sampler)
    _ACTORS.append(actor)
    return Here(len(_ACTORS) - 1)


def leave_groups(sampler: Sampler) -> None:
    """When this engine ends, vLLM's process groups stay, as others of this process may use them."""
    finalizer = getattr(sampler._llm.llm_engine.engine_core, "_finalizer", None)  # not every vLLM has it
    if finalizer is not None:
        finalizer.detach()


def _without_groups_of_dense_models() -> None:
    """A dense model's engine makes process groups without one for experts, which later engines would take over."""
    import vllm.distributed.parallel_state as groups

    if groups.model_parallel_is_initialized() and groups._EP is None:
        groups.destroy_model_parallel()


def _start_group(actor_class: Any, name: str, config: Any, folder: Path, *args: Any, **options: Any) -> Here:
    assert config.processes == 1
    return start_actor(actor_class, name, config.threads, folder / name, *args)


def _largest(engines: Sequence[Here], measure: str) -> float:
    return max(getattr(engine, measure)() for engine in engines)


def _no_cluster(*_: Any) -> Any:
    return nullcontext()


def _nothing(*_: Any) -> None:
    pass


@contextmanager
def engines_in_process() -> Iterator[None]:
    """Inside, the commands' `main` starts every engine, each of one process, in this one. The environment variables
    that engines set are gone afterwards, as other processes must not get them.
    """
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        for place, stand_in in {
            "rl.job.open_cluster": _no_cluster,
            "rl.engines.start_actor": start_actor,
            "rl.engines.start_group": _start_group,
            "rl.engines.stop_actor": _nothing,
            "rl.engines.wait_until_ready": _nothing,
            "rl.engines.largest": _largest,
            "rl.fleet.wait": wait,
            "rl.sync.weight_sync.wait": wait,
            "rl.sync.weight_sync.as_done": lambda calls: iter(calls.items()),
            "rl.diagnosis.pair.local_cluster": _no_cluster,
            "rl.diagnosis.pair.start_actor": start_actor,
            "rl.diagnosis.pair.stop_actor": _nothing,
            "rl.diagnosis.pair.wait": wait,
            "rl.evaluation.session.local_cluster": _no_cluster,
            "rl.evaluation.session.start_group": _start_group,
            "rl.evaluation.session.wait_until_ready": _nothing,
        }.items():
            patch.setattr(place, stand_in)
        try:
            yield
        finally:
            _ACTORS.clear()
            _without_groups_of_dense_models()
