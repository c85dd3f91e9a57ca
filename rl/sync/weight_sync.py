"""One learner, several samplers: who is sent what, in which order, and what happens when one of them fails or dies."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.actor_group import ActorGroup, members_of
from rl.cluster import Remote, as_done, wait
from rl.config.cluster import SyncConfig
from rl.deaths import ActorDied
from rl.sync.protocol import Announcement, attest
from rl.sync.receiver import Installed
from rl.sync.sender import Sent
from rl.sync.transport import Receiving

log = logging.getLogger(__name__)


class SamplerLost(Exception):
    """A process of sampler `index` ended during a sync."""

    def __init__(self, index: int, died: ActorDied) -> None:
        super().__init__(index, died)  # from which it is made again in another process
        self.index, self.died = index, died

    def __str__(self) -> str:
        return str(self.died)


class NoSamplerLeft(Exception):
    """All samplers died before one of them held what was sent: nobody has it, and no copy of it is kept."""


class WeightSync:
    """Brings every sampler to the learner's weights.

    learner, samplers: the actors (`rl.actors`). Every process of a sampler is a receiver, and the death of one is that
    of the sampler. precision_map: what the samplers hold. Raises ValueError for samplers that hold 4-bit weights in
    different layouts, or share tensors out differently.
    """

    def __init__(
        self,
        learner: Remote | ActorGroup,
        samplers: Sequence[Remote | ActorGroup],
        precision_map: PrecisionMap,
        config: SyncConfig,
    ) -> None:
        self.learner = learner
        self.precision_map = precision_map
        self.config = config
        self._samplers = {index: members_of(sampler) for index, sampler in enumerate(samplers)}
        self._lost: dict[int, ActorDied] = {}
        self._at = "before the first weight sync"  # what samplers are in the midst of
        self._linked: list[Receiving] | None = None  # who is in the transport's group
        layouts = self._all(list(self._samplers), "expert_layout")
        if len(set(layouts.values())) > 1:
            held = ", ".join(f"sampler {index}: {layout}" for (index, _), layout in layouts.items())
            raise ValueError(f"samplers must hold experts in one layout, got {held}")
        shards = self._all(list(self._samplers), "shards")
        parts = [dict(shards[0, rank]) for rank in range(len(self._samplers[0]))]
        if any(dict(own) != parts[rank] for (_, rank), own in shards.items()):
            raise ValueError("samplers must share tensors out over their processes alike")
        layout = next(iter(layouts.values()))
        learner.open_sender(precision_map, layout, config.keep, config.transport, parts)

    def report(self) -> EngineReport:
        layers = len(self.precision_map.layers)
        return EngineReport("weight_sync", self.precision_map, self.learner.report().backend, layers, 0)

    def sync(self, version: int) -> dict[str, Any]:
        """Send the learner's weights as `version`; the metrics of the section `sync`, and times.

        A sampler that dies on the way is left out (see `lost`) and the others are brought to the version all the same.
        Raises what a receiver raised, or AttestationError; then nothing serves the new version, and before their end
        the samplers are as they were. Raises NoSamplerLeft when the last sampler has died: `sync` again is right once
        there are others (`take`). Raises ActorDied when the learner has died.
        """
        started = time.perf_counter()
        self._at = f"in the weight sync of version {version}"
        while self._samplers:
            try:
                metrics = self._sync(version)
                break
            except SamplerLost as lost:
                self._forget(lost)
        else:
            raise NoSamplerLeft(f"no sampler is left for version {version}")
        log.info(
            "version %d: %d bytes in %.2f s", version, metrics["sync/bytes"], time.perf_counter() - started
        )
        return metrics

    def lost(self) -> dict[int, ActorDied]:
        """The samplers that died and were not replaced, by their numbers."""
        return dict(self._lost)

    def take(self, index: int, sampler: Remote | ActorGroup) -> None:
        """From now on `sampler` is number `index`; the next sync sends it whole tensors."""
        self._samplers[index] = members_of(sampler)
        self._lost.pop(index, None)
        self._linked = None

    def rejoin(self, index: int, sampler: Remote | ActorGroup) -> None:
        """`take`, and bring it to the version that was sent last, not a later one.

        Raises ProtocolError when nothing was sent, or no copy of it kept, and SamplerLost when a sampler dies; else as
        `sync` does.
        """
        self.take(index, sampler)
        self._at = "while a sampler was brought to the others' version"
        try:
            self._link()
            self._send_kept([index])
        except SamplerLost as lost:
            self._forget(lost)
            raise

    def _sync(self, version: int) -> dict[str, Any]:
        self._link()
        held = self._all(list(self._samplers), "held")
        base = self.learner.kept_root() if self.config.codec == "delta" else None
        # Those who hold what the changes are changes of; the others get the same content whole, from the copy.
        astray = {index for (index, _), own in held.items() if own.root != base}
        at_base = [index for index in self._samplers if base is not None and index not in astray]
        first = at_base or list(self._samplers)
        behind = [index for index in self._samplers if index not in first]
        session = _session(version)
        arguments = (session, version, self.config.codec, self.config.bucket_mib * 2**20)
        said = self.learner.open_sync(*arguments, base if at_base else None)
        metrics = self._run(said, first)
        self._bring_up(behind)
        return metrics

    def _bring_up(self, behind: list[int]) -> None:
        """Bring these to the version that the others hold. Whoever dies meanwhile is left out; the others have it."""
        while behind:
            try:
                self._link()
                self._send_kept(behind)
                return
            except SamplerLost as lost:
                self._forget(lost)
                behind = [index for index in behind if index in self._samplers]

    def _send_kept(self, indices: list[int]) -> None:
        said = self.learner.open_kept(_session("kept"), self.config.bucket_mib * 2**20)
        self._run(said, indices)

    def _run(self, said: Announcement, indices: list[int]) -> dict[str, Any]:
        """One session of the protocol with these samplers."""
        try:
            self.learner.address(self._receivers(indices))
            self._all(indices, "begin", said)
            started = time.perf_counter()
            self._chunks(said, indices)
            sending = time.perf_counter() - started
            ends = self._start(indices, "end", said.session)
            sent: Sent = self.learner.close_sync()
            installed: dict[Receiving, Installed] = self._wait(ends)
            self.learner.release()
            for (index, rank), found in installed.items():
                attest(sent.held_by(rank), found.digests, self._name(index, rank), said.version)
        except BaseException:
            self._abort(indices)
            self._linked = None  # what was under way in the group, if there is one, may still come
            raise
        self._commit(said.session, sent.content, indices)
        return _metrics(said, sent, list(installed.values()), sending)

    def _commit(self, session: str, content: str, indices: list[int]) -> None:
        """Nothing can be refused any more: who dies here is replaced, and concerns nobody else."""
        calls = self._start(indices, "commit", session, content)
        while calls:
            try:
                self._wait(calls)
                return
            except SamplerLost as lost:
                self._forget(lost)
                calls = {receiver: call for receiver, call in calls.items() if receiver[0] != lost.index}

    def _chunks(self, said: Announcement, indices: list[int]) -> None:
        """The learner makes a chunk while the samplers take the one before."""
        parcel = self.learner.later.ship() if said.chunks else None
        for number in range(said.chunks):
            taken = self._start(indices, "receive", parcel)
            parcel = self.learner.later.ship() if number + 1 < said.chunks else None
            self._wait(taken)

    def _link(self) -> None:
        """A process group of the learner and all samplers, unless there is one."""
        members = self._receivers(list(self._samplers))
        if self.config.transport != "process_group" or self._linked == members:
            return
        self._all(list(self._samplers), "held")  # all are free: the timeout need not cover what they were at
        timeout = self.config.timeout_s
        host, port = self.learner.open_link(members, timeout)
        joined = {
            receiver: self._later(receiver).join_link(host, port, place, len(members) + 1, timeout)
            for place, receiver in enumerate(members, start=1)
        }
        met = self.learner.later.join_link()
        self._wait(joined)
        wait(met)
        self._linked = members

    def _receivers(self, indices: list[int]) -> list[Receiving]:
        return [(index, rank) for index in indices for rank in range(len(self._samplers[index]))]

    def _later(self, receiver: Receiving) -> Any:
        index, rank = receiver
        return self._samplers[index][rank].later

    def _name(self, index: int, rank: int) -> str:
        return f"sampler {index}" + (f", rank {rank}," if len(self._samplers[index]) > 1 else "")

    def _all(self, indices: list[int], method: str, *args: Any) -> dict[Receiving, Any]:
        return self._wait(self._start(indices, method, *args))

    def _start(self, indices: list[int], method: str, *args: Any) -> dict[Receiving, Any]:
        """Of all processes of these samplers."""
        return {
            receiver: getattr(self._later(receiver), method)(*args) for receiver in self._receivers(indices)
        }

    def _wait(self, calls: dict[Receiving, Any]) -> dict[Receiving, Any]:
        """The results; all calls are over. A death comes before an error: it may be the cause of the others' errors."""
        results: dict[Receiving, Any] = {}
        errors: list[Exception] = []
        for receiver, call in as_done(calls):
            try:
                results[receiver] = wait(call)
            except ActorDied as died:
                index = receiver[0]
                lost = SamplerLost(index, died.said(f"sampler {index}", self._at))
                errors.insert(0, lost if self._is_gone(receiver) else died)
                self._sever()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _sever(self) -> None:
        """A member of the group has died: the others must not wait for what it was to pass on."""
        if self._linked is None:
            return
        self._linked = None
        with suppress(ActorDied):  # then its end is closed already
            self.learner.sever()

    def _is_gone(self, receiver: Receiving) -> bool:
        """Whether it is this process that died, and not the learner, whose parcel it was to take."""
        try:
            wait(self._later(receiver).held())
        except ActorDied:
            return True
        return False

    def _abort(self, indices: list[int]) -> None:
        """Release everybody who is still there; what ended the sync is what the caller hears of."""
        calls = [self.learner.later.abort_sync()]
        calls += [self._later(receiver).abort() for receiver in self._receivers(indices)]
        for call in calls:
            try:
                wait(call)
            except Exception as error:
                log.warning("while a sync was ended: %s", error)

    def _forget(self, lost: SamplerLost) -> None:
        log.warning("%s", lost)
        del self._samplers[lost.index]
        self._lost[lost.index] = lost.died
        self._linked = None


def _session(what: object) -> str:
    return f"{what}-{uuid.uuid4().hex[:8]}"


def _metrics(said: Announcement, sent: Sent, installed: list[Installed], sending: float) -> dict[str, Any]:
    gather, quantise = (sent.seconds.get(phase, 0.0) for phase in ("gather", "quantise"))
    attesting = [sent.seconds["attest"], *(found.seconds["attest"] for found in installed)]
    metrics: dict[str, Any] = {
        "sync/bytes": sent.nbytes,
        "sync/tensors": len(said.manifest),
        "time/sync_gather": gather,
        "time/sync_quantise": quantise,
        "time/sync_send": max(0.0, sending - gather - quantise),
        "time/sync_install": max(found.seconds["install"] for found in installed),
        "time/sync_attest": max(attesting),
    }
    if said.base is not None:
        metrics["sync/changed_share"] = sent.changed / sent.total
    return metrics
