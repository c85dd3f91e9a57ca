"""Ray: started for one machine on the loopback interface, quiet, and gone when the run is; or one that is there.

The environment variables below configure Ray itself (they must be set before it is imported); no numerics here.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from rl.deaths import death, know
from rl.errors import ClusterError
from rl.placement import HERE, HOST, Node, Place

Key = TypeVar("Key")
LOG_VARIABLE = "MINITE_ACTOR_LOG"  # where an actor's output goes

_LOCAL_ENVIRONMENT = {
    # Without this Ray replaces 127.0.0.1 by the machine's outward address and listens there.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A worker that Ray starts ahead has not the environment that any of our actors asks for.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # the engines are the job, not a background task
}
# Engines write their logs to the run folder; what they print reaches the terminal only when they fail.
_ENGINE_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # engines share the cores: a thread that spins at a barrier takes another's
}


def open_cluster(address: str, object_store_mib: int) -> AbstractContextManager[None]:
    """`local_cluster` where `address` is `local`, else `joined_cluster`."""
    return local_cluster(object_store_mib) if address == "local" else joined_cluster(address)


@contextmanager
def local_cluster(object_store_mib: int) -> Iterator[None]:
    """Start a private Ray on 127.0.0.1 and shut it down, with every actor, on the way out.

    Raises ClusterError when it does not start.
    """
    os.environ.update(_RAY_ENVIRONMENT | _LOCAL_ENVIRONMENT)
    import ray

    _keep_deaths_off_the_terminal()
    try:
        _start_ray(object_store_mib)
        yield
    finally:
        ray.shutdown()


@contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """Join the Ray at `address`: HOST:PORT, or `auto`, which finds that of this machine. On the way out the actors that
    were started end, and Ray goes on.

    Raises ClusterError when there is none.
    """
    os.environ.update(_RAY_ENVIRONMENT)
    import ray

    _keep_deaths_off_the_terminal()
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray has no class for this, and raises several
            reason = shorten(str(error), 300, placeholder=" ...") or type(error).__name__
            raise ClusterError(
                f"cluster.ray_address={address}: no Ray to join: {reason.rstrip('.')}"
            ) from error
        yield
    finally:
        ray.shutdown()


def _keep_deaths_off_the_terminal() -> None:
    """Ray prints its account of every death there, whatever `log_to_driver` is; `rl.deaths` has a place for it."""
    import ray._private.worker

    ray._private.worker._worker_logs_enabled = False


def _start_ray(object_store_mib: int) -> None:
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=1,  # actors ask for none
            include_dashboard=False,
            _node_ip_address=HOST,
            object_store_memory=object_store_mib * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray has no class for this, and raises several
        reason = shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        raise ClusterError(
            f"Ray did not start: {reason.rstrip('.')}. It gives up after half a minute, which a busy machine can need:"
            " start again when other work is done"
        ) from error


def start_actor(
    actor_class: Any,
    name: str,
    threads: int,
    log: Path,
    *args: Any,
    place: Place = HERE,
    environment: Mapping[str, str] | None = None,
) -> Remote:
    """Begin to start one Ray actor of the class `actor_class`; ``wait(actor.later.ready())`` waits until it is there.

    `threads` is the number of threads of its tensor operations; what it prints goes to the file `log`. `environment`:
    variables beside those that all have, and those of its `place`.
    """
    import ray

    environment = {**_ENGINE_ENVIRONMENT, LOG_VARIABLE: str(log), **place.environment, **(environment or {})}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    # The actors of a run take turns on the cores: Ray must not keep one waiting until a core is its own.
    # Ray keeps the name of an actor that died for a while, and its successor must not wait for that.
    unique = f"{name}-{uuid.uuid4().hex[:8]}"
    options = {"name": unique, "max_restarts": 0, "runtime_env": {"env_vars": environment}}
    return Remote(ray.remote(actor_class).options(**options, **_on(place.node)).remote(*args), name, str(log))


def free_port(node: Node) -> int:
    """One that nobody listens on at the node's address, found there. Raises OSError when it has not that address."""
    import ray

    if node.id is None:
        return _free_port(node.address)
    port: int = wait(ray.remote(_free_port).options(**_on(node)).remote(node.address))
    return port


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        port: int = free.getsockname()[1]
        return port


def _on(node: Node) -> dict[str, Any]:
    """Options of what Ray starts: there or nowhere, and no core of its own."""
    if node.id is None:
        return {"num_cpus": 0}
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}


def stop_actor(remote: Any) -> None:
    """End an actor's process, or those of a group (`rl.actor_group`)."""
    import ray

    for member in [remote] if isinstance(remote, Remote) else remote.members:
        ray.kill(member._handle)


class Remote:
    """A Ray actor's methods, called as if it were here: ``remote.score(batch)`` waits for the result.

    ``remote.later.score(batch)`` starts the call and returns its reference, which may be passed to another actor
    (the bytes then go from actor to actor). An error raised in the actor is raised here as the same type. name, log:
    what is said of its death (`rl.deaths`).
    """

    def __init__(self, handle: Any, name: str, log: str):
        self._handle, self._said = handle, (name, log)
        self.later = _Later(handle)
        know(handle._actor_id.hex(), name, log)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda *args, **kwargs: wait(getattr(self._handle, method).remote(*args, **kwargs), method)

    def __reduce__(self) -> Any:
        return (Remote, (self._handle, *self._said))


class _Later:
    def __init__(self, handle: Any):
        self._handle = handle

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return getattr(self._handle, method).remote


def as_done(calls: Mapping[Key, Any]) -> Iterator[tuple[Key, Any]]:
    """The entries of `calls`, name -> reference, each as soon as its call is over: with a result, an error, or a
    death, which Ray notices by itself.
    """
    import ray

    pending = {reference: name for name, reference in calls.items()}
    while pending:
        [done], _ = ray.wait(list(pending), num_returns=1)
        yield pending.pop(done), done


def wait(reference: Any, method: str = "") -> Any:
    """The value of a reference (or of a list of them); the actor's own exception if the call failed. Raises ActorDied,
    which names the `method`.
    """
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise death(error, method) from error
