"""What the studies ask of an engine. Three kinds have it: `megatron`, `vllm`, `hf`.

An engine says what its expert layers do in its own forward pass (through taps), and computes them alone on inputs that
it is given. Everything else is made from that, once for all engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from kernels import backends
from kernels.experts import ExpertWeights, StoredLayout
from kernels.precision_map import PrecisionMap
from kernels.probe import Shown, listening
from kernels.quantizer_spec import Block, ScaleDomain
from kernels.report import EngineReport
from kernels.routing import Routing, sort_slots
from kernels.spec import ExecutionSpec, RouterPosition
from rl.diagnosis.corpus import Corpus


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer's experts in a forward pass.

    sequences, positions: int64 [R], of the tokens that the rows belong to. x: [R, H]; ids: int64 [R, k], by descending
    coefficient; coefficients: float32 [R, k]; output: [R, H].
    """

    layer: int
    sequences: np.ndarray
    positions: np.ndarray
    x: torch.Tensor
    ids: torch.Tensor
    coefficients: torch.Tensor
    output: torch.Tensor


Tap = Callable[[Call], "torch.Tensor | None"]


@dataclass(frozen=True, eq=False)
class Given:
    """Input of a layer's experts: x [R, H], ids int64 [R, k], coefficients float32 [R, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    coefficients: torch.Tensor
    sequences: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, eq=False)
class Trace:
    """What an engine computed from a `Given`.

    device: the type of device that computed. weights: what it holds, `ExpertWeights.tensors` in rows. stale: names of
    tensors that it uses in their place and that are not what its own back end makes of them now. operands: `FC1 input`,
    `FC2 input` as they were shown. fc1, swiglu, fc2: in grouped order; None where the back end does not show them.
    combined: [R, H].
    """

    spec: ExecutionSpec
    backend: str
    device: str
    weights: Mapping[str, torch.Tensor]
    stale: tuple[str, ...]
    operands: Mapping[str, Sequence[Shown] | torch.Tensor]
    fc1: torch.Tensor | None
    swiglu: torch.Tensor | None
    fc2: torch.Tensor | None
    combined: torch.Tensor


@dataclass(frozen=True, eq=False)
class Imposed:
    """A layer under experts that were given, at chosen tokens N, with the input and coefficients of the engine's own.

    x: [N, H]; own: int64 [N, k], what its router chose. coefficients: float32 [N, k], fc1: [N, k, 2F], fc2: [N, k, H],
    in ascending order of the experts. weighted: whether fc2 holds the coefficients already.
    invalid: slots for which an expert was given that the layer does not have.
    """

    x: torch.Tensor
    own: torch.Tensor
    coefficients: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor
    weighted: bool
    invalid: int

    def contribution(self, weighted: bool) -> torch.Tensor:
        """FC2's outputs, [N, k, H]; times their coefficients if `weighted`."""
        if not weighted or self.weighted:
            return self.fc2
        return self.coefficients[:, :, None] * self.fc2.float()


class Engine(ABC):
    """One model in one engine, whose experts can be put under any precision map.

    renormalize: whether router coefficients of the chosen experts sum to one.
    """

    kind: str
    layers: int
    experts: int
    renormalize: bool

    @abstractmethod
    def use(self, precision_map: PrecisionMap) -> None:
        """Compute the experts under this map from here on."""

    @abstractmethod
    def report(self) -> EngineReport: ...

    @abstractmethod
    def score(self, corpus: Corpus, temperature: float) -> list[np.ndarray]:
        """float32 log-probabilities of each response, by teacher forcing."""

    @abstractmethod
    def tapped(self, taps: Mapping[int, Tap]) -> AbstractContextManager[None]:
        """Inside, during one call of `score`, the taps (by layer) see every call of the experts; what one returns
        replaces the output."""

    @abstractmethod
    def run_layer(self, layer: int, given: Given) -> torch.Tensor:
        """The engine's own expert layer on `given`, whose slots are sorted: [R, H]."""

    @abstractmethod
    def router_weight(self, layer: int) -> torch.Tensor:
        """[E, H]"""

    @abstractmethod
    def spec(self, layer: int) -> ExecutionSpec: ...

    @abstractmethod
    def held(self, layer: int) -> tuple[ExpertWeights, Mapping[str, torch.Tensor]]:
        """The stored weights of a layer's experts, and what is derived from them and used."""

    def derived_anew(self, layer: int) -> Mapping[str, torch.Tensor]:
        """What the engine would derive now from its stored weights."""
        return self.kernels(layer).prepare(self.held(layer)[0], self.spec(layer)).derived()

    def kernels(self, layer: int) -> backends.ExpertKernels:
        stored = next(iter(self.held(layer)[0].tensors().values()))
        return backends.choose(self.spec(layer), stored.device)

    def inputs(
        self, corpus: Corpus, temperature: float, layers: Sequence[int]
    ) -> tuple[list[np.ndarray], dict[int, list[Given]]]:
        """`score`, and what reaches the experts of each layer, one `Given` for each of the engine's batches, on the
        CPU.
        """
        found: dict[int, list[Given]] = {layer: [] for layer in layers}

        def see(call: Call) -> None:
            x, ids, p = (part.detach().cpu().clone() for part in (call.x, call.ids, call.coefficients))
            found[call.layer].append(Given(x, ids, p, call.sequences, call.positions))

        with self.tapped({layer: see for layer in layers}):
            logp = self.score(corpus, temperature)
        return logp, found

    def score_with(
        self, corpus: Corpus, temperature: float, layer: int, outputs: Sequence[torch.Tensor]
    ) -> list[np.ndarray]:
        """As `score`, with these in place of the outputs of a layer's experts, one for each of its calls."""
        left = iter(outputs)

        def replace(call: Call) -> torch.Tensor:
            return next(left).to(call.output)

        with self.tapped({layer: replace}):
            return self.score(corpus, temperature)

    def imposed(
        self,
        corpus: Corpus,
        temperature: float,
        layers: Sequence[int],
        routes: Mapping[int, np.ndarray] | None,
        chosen: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], dict[int, np.ndarray], dict[int, Imposed]]:
        """`score`; of each layer the experts that its router chose, int16 [sequences, longest, k], -1 where there is no
        token; and its FC1 and FC2 outputs at the chosen positions of every sequence under the experts in `routes`
        (None: its own). The forward pass itself goes on with the router's own.

        Where tokens share scales a batch of which any token is sent elsewhere is computed again as a whole, else those
        tokens alone. A token whose route does not name experts of the layer keeps its own.
        """
        parts: dict[int, list[tuple[np.ndarray, Imposed]]] = {layer: [] for layer in layers}
        shape = len(corpus.sequences), max(map(len, corpus.sequences))
        wanted = np.zeros(shape, bool)
        for sequence, positions in enumerate(chosen):
            wanted[sequence, positions] = True
        own: dict[int, np.ndarray] = {}

        latest: dict[str, torch.Tensor] = {}  # what the call under way has shown

        def keep(name: str, value: torch.Tensor | Shown) -> None:
            if isinstance(value, torch.Tensor):
                latest[name] = value

        def see(call: Call) -> None:
            table = own.setdefault(call.layer, np.full((*shape, call.ids.shape[1]), -1, np.int16))
            table[call.sequences, call.positions] = call.ids.cpu().numpy()
            given = table if routes is None else routes[call.layer]
            kept = wanted[call.sequences, call.positions]
            route = given[call.sequences, call.positions]
            one = self._imposed_rows(call, route, np.flatnonzero(kept), latest)
            parts[call.layer].append((call.sequences[kept] * shape[1] + call.positions[kept], one))

        with listening(keep), self.tapped({layer: see for layer in layers}):
            logp = self.score(corpus, temperature)
        return logp, own, {layer: _in_order(found) for layer, found in parts.items()}

    def _imposed_rows(
        self, call: Call, route: np.ndarray, kept: np.ndarray, shown: Mapping[str, torch.Tensor]
    ) -> Imposed:
        """The rows `kept` of a call under the experts `route`, int [R, k]. shown: what the call itself has shown, which
        holds for tokens that the router sends to these experts as well.
        """
        device, rows = call.ids.device, torch.from_numpy(kept)
        given = torch.from_numpy(route.astype(np.int64)).to(device)
        unknown = ((given < 0) | (given >= self.experts)).any(1)
        elsewhere = (given.sort(1).values != call.ids.sort(1).values).any(1) & ~unknown
        ids, coefficients = call.ids.clone(), call.coefficients.detach().clone()
        moved = elsewhere.nonzero().flatten()
        ids[moved], coefficients[moved] = sort_slots(
            given[moved], self._coefficients(call.layer, call.x[moved], given[moved])
        )
        rows = rows.to(device)
        fc1, fc2 = self._slots(call.layer, call.ids, shown, rows)
        if len(moved):
            together = shares_scales(self.spec(call.layer))
            again = torch.arange(len(ids), device=device) if together else rows[elsewhere[rows]]
            place = rows if together else torch.arange(len(again), device=device)
            target = slice(None) if together else elsewhere[rows]
            here = again.cpu().numpy()
            other = Given(
                call.x[again],
                ids[again],
                coefficients[again],
                call.sequences[here],
                call.positions[here],
            )
            fc1[target], fc2[target] = self._slots(call.layer, other.ids, self._run(call.layer, other), place)
        by_expert = ids[rows].argsort(1)
        return Imposed(
            call.x.detach()[rows].cpu(),
            call.ids.detach()[rows].cpu(),
            coefficients[rows].gather(1, by_expert).cpu(),
            fc1.take_along_dim(by_expert[:, :, None], 1).cpu(),
            fc2.take_along_dim(by_expert[:, :, None], 1).cpu(),
            self.spec(call.layer).router_position is not RouterPosition.FC2_OUTPUT,
            int(unknown[rows].sum()),
        )

    def trace(self, layer: int, given: Given) -> Trace:
        """The layer on `given`, with everything that its back end shows."""
        weights, derived = self.held(layer)
        rows = weights.in_layout(StoredLayout.ROWS)
        kernels, spec = self.kernels(layer), self.spec(layer)
        fresh = self.derived_anew(layer)
        stale = tuple(name for name, tensor in fresh.items() if not torch.equal(tensor, derived[name]))
        seen = Seen()
        with listening(seen):
            combined = self.run_layer(layer, given)
        return Trace(
            spec,
            kernels.name,
            combined.device.type,
            {name: tensor.detach().cpu().clone() for name, tensor in rows.tensors().items()},
            stale,
            {name: seen.operands[name] for name in ("FC1 input", "FC2 input") if name in seen.operands},
            seen.tensors.get("fc1"),
            seen.tensors.get("swiglu"),
            seen.tensors.get("fc2"),
            combined.detach().cpu(),
        )

    def _coefficients(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = x.float() @ self.router_weight(layer).float().T
        if self.renormalize:
            return logits.gather(1, ids).softmax(1)
        return logits.softmax(1).gather(1, ids)

    def _run(self, layer: int, given: Given) -> Mapping[str, torch.Tensor]:
        """What the layer shows on `given`."""
        seen = Seen()
        with listening(seen):
            self.run_layer(layer, given)
        return seen.tensors

    def _slots(
        self, layer: int, ids: torch.Tensor, shown: Mapping[str, torch.Tensor], rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FC1 and FC2 of every slot of some rows (int64 [N]), [N, k, *], in the order of `ids`."""
        if not {"fc1", "fc2"} <= shown.keys():
            name = self.kernels(layer).name
            raise ValueError(f"the back end {name!r} of {self.kind} does not show the outputs of FC1 and FC2")
        routing = Routing.group(ids, self.experts)
        fc1, fc2 = (routing.by_token(shown[name].detach().to(ids.device))[rows] for name in ("fc1", "fc2"))
        return fc1, fc2


def shares_scales(spec: ExecutionSpec) -> bool:
    """Whether tokens of an expert share an activation scale, so that each depends on the others."""
    activation = spec.activation
    return activation is not None and (
        activation.outer_domain is ScaleDomain.TENSOR or activation.block is Block.TILE_16
    )


class Seen:
    """A listener that keeps what is shown."""

    def __init__(self) -> None:
        self.operands: dict[str, list[Shown] | torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, value: torch.Tensor | Shown) -> None:
        name = str(name)
        if isinstance(value, Shown):
            own = self.operands.setdefault(name, [])
            assert isinstance(own, list)
            own.append(_on_cpu(value))
        elif name in ("fc1", "swiglu", "fc2"):
            self.tensors[name] = value.detach().cpu().clone()
        else:
            self.operands[name] = value.detach().cpu().clone()


def _on_cpu(shown: Shown) -> Shown:
    quantized = shown.quantized
    parts = [
        None if tensor is None else tensor.cpu()
        for tensor in (quantized.codes, quantized.block_scales, quantized.outer_scales)
    ]
    return Shown(type(quantized)(*parts), None if shown.rows is None else shown.rows.cpu())  # type: ignore[arg-type]


def _in_order(parts: list[tuple[np.ndarray, Imposed]]) -> Imposed:
    """The parts of a layer, sorted by sequence and position."""
    order = torch.from_numpy(np.argsort(np.concatenate([place for place, _ in parts]), kind="stable"))

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name) for _, one in parts])[order]

    return Imposed(
        x=joined("x"),
        own=joined("own"),
        coefficients=joined("coefficients"),
        fc1=joined("fc1"),
        fc2=joined("fc2"),
        weighted=parts[0][1].weighted,
        invalid=sum(one.invalid for _, one in parts),
    )
