"""Weight sync over objects that stand for the actors: what is sent, when, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.catalogue import named_spec
from kernels.digest import tensor_digest
from kernels.precision_map import PrecisionMap
from rl import weight_sync
from rl.weight_sync import AttestationError, WeightSync, attest, chunks

MAP = PrecisionMap.resolve(2, named_spec("minite"))
WEIGHTS = {"a": torch.arange(6.0), "b": torch.zeros(3, 2, dtype=torch.uint8), "c": torch.ones(4)}


class Local:
    """`rl.cluster.Remote` without a process: `later` answers at once."""

    @property
    def later(self) -> Local:
        return self


class Learner(Local):
    def open_export(self, precision_map: PrecisionMap) -> dict[str, tuple[str, tuple[int, ...]]]:
        assert precision_map == MAP
        return {k: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in WEIGHTS.items()}

    def export_chunk(self, names: list[str]) -> dict[str, torch.Tensor]:
        return {name: WEIGHTS[name] for name in names}

    def close_export(self) -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in WEIGHTS.items()}


class Receiver(Local):
    def __init__(self, fail_in: str = "", corrupt: Callable[[dict[str, Any]], None] = lambda held: None):
        self.calls: list[str] = []
        self.staged: dict[str, torch.Tensor] = {}
        self.fail_in, self.corrupt = fail_in, corrupt

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_in:
            raise ValueError(f"refused in {name}")

    def begin_update(self, version: int, fingerprint: str, manifest: dict[str, Any]) -> None:
        assert (version, fingerprint, list(manifest)) == (7, MAP.fingerprint, list(WEIGHTS))
        self._call("begin")

    def receive(self, chunk: dict[str, torch.Tensor]) -> None:
        self._call("receive")
        self.staged |= chunk

    def finish_update(self) -> dict[str, str]:
        self._call("finish")
        held = dict(self.staged)
        self.corrupt(held)
        return {name: tensor_digest(tensor) for name, tensor in held.items()}

    def abort_update(self) -> None:
        self.calls.append("abort")


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "wait", lambda value: value)


def test_every_receiver_gets_every_tensor_and_the_bytes_are_counted():
    receivers = [Receiver(), Receiver()]
    metrics = WeightSync(Learner(), receivers, MAP).sync(7)
    assert metrics == {"sync/bytes": 6 * 4 + 6 + 4 * 4, "sync/tensors": 3}
    for receiver in receivers:
        assert receiver.calls == ["begin", "receive", "finish"]
        assert all(torch.equal(receiver.staged[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize("stage", ["begin", "receive"])
def test_a_refusal_before_the_end_aborts_every_receiver_that_had_begun(stage: str):
    first, second = Receiver(), Receiver(fail_in=stage)
    with pytest.raises(ValueError, match=f"refused in {stage}"):
        WeightSync(Learner(), [first, second], MAP).sync(7)
    assert first.calls[-1] == "abort"
    assert "finish" not in first.calls + second.calls


def flip(held: dict[str, torch.Tensor]) -> None:
    held["b"] = held["b"] + 1


@pytest.mark.parametrize(
    "corrupt, named",
    [(flip, "b"), (lambda held: held.pop("c"), "c"), (lambda held: held.update(d=held["a"]), "d")],
)
def test_a_receiver_that_holds_anything_else_stops_the_run(corrupt: Callable[..., None], named: str):
    with pytest.raises(
        AttestationError, match=f"version 7: sampler 1 holds other bytes than were sent: {named}$"
    ):
        WeightSync(Learner(), [Receiver(), Receiver(corrupt=corrupt)], MAP).sync(7)


def test_many_differences_are_named_in_part():
    sent = {f"t{i}": "x" for i in range(9)}
    with pytest.raises(AttestationError, match="t0, t1, t2, t3, t4 and 4 more"):
        attest(sent, dict.fromkeys(sent, "y"), "sampler 0", 1)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_chunks_keep_the_order_and_the_limit(sizes: list[int], limit: int):
    manifest = {f"t{i}": ("uint8", (size,)) for i, size in enumerate(sizes)}
    cut = chunks(manifest, limit)
    assert [name for names in cut for name in names] == list(manifest)
    for names in cut:
        assert names
        assert len(names) == 1 or sum(sizes[int(name[1:])] for name in names) <= limit
