"""A diagnosis from plan to report: pieces of work that are stored as they are done, and made once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kernels.precision_map import PrecisionMap
from kernels.spec import ExecutionSpec
from rl.compose import to_yaml
from rl.diagnosis import studies
from rl.diagnosis.boundaries import examine
from rl.diagnosis.corpus import Corpus
from rl.diagnosis.masters import Masters
from rl.diagnosis.pair import Pair
from rl.diagnosis.plan import Plan
from rl.diagnosis.store import Piece, Store
from rl.evaluation.view import progress
from rl.records.provenance import record_engines, record_launch
from rl.rollout import response_seed
from rl.run_folder import RunFolder, RunFolderError, write_atomically

SEQUENCES = "sequences.json"


@dataclass(frozen=True)
class Outcome:
    """The pieces of a diagnosis: study -> condition -> piece. corpus: what was scored."""

    plan: Plan
    folder: RunFolder
    corpus: Corpus
    pieces: dict[str, dict[str, Piece]]


def diagnose(plan: Plan, console: Console) -> Iterator[Outcome]:
    """Run the studies, from whatever an earlier run of them has stored. Gives what there is after each of them."""
    folder = _open_folder(plan)
    record_launch(folder)
    with Pair(plan.config, plan.model, folder.path, console.print) as pair:
        corpus = _corpus(plan, folder, pair)
        console.print(
            f"{len(corpus.sequences)} sequences of {len(set(corpus.prompts))} prompts, {corpus.tokens} response tokens"
        )
        work = _Work(plan, folder, Store(folder.path / "pieces"), pair, corpus, console)
        pieces: dict[str, dict[str, Piece]] = {study: {} for study in _ordered(plan.study)}
        for study, found in work.parts():
            pieces[study] |= found
            if pair.reports:
                record_engines(folder, [report for own in pair.reports.values() for report in own])
            yield Outcome(plan, folder, corpus, {name: dict(own) for name, own in pieces.items()})


def _ordered(study: tuple[str, ...]) -> list[str]:
    """Routing comes ahead of frozen, whose log-probabilities it brings with it."""
    order = ("routing", "frozen", "boundaries", "scale", "attribution")
    return sorted(study, key=order.index)


class _Work:
    def __init__(
        self, plan: Plan, folder: RunFolder, store: Store, pair: Pair, corpus: Corpus, console: Console
    ):
        self.plan, self.folder, self.store, self.pair = plan, folder, store, pair
        self.corpus, self.console = corpus, console
        self.layers = plan.layers
        self._left: tuple[Any, studies.LeftPass] | None = None  # the latest, and what it depends on

    def parts(self) -> Iterator[tuple[str, dict[str, Piece]]]:
        """Study and pieces: all studies of a condition, then the next condition, as to put an engine under another spec
        takes it seconds.
        """
        own = {"routing": self._routing, "frozen": self._frozen, "boundaries": self._boundaries}
        study = _ordered(self.plan.study)
        for label in self.plan.labels:
            for name in study:
                if name in own:
                    yield name, {label: own[name](label)}
        for name in study:
            if name not in own:
                yield name, getattr(self, name)()

    def scale(self) -> dict[str, Piece]:
        """For each of its conditions the table of the study frozen, and, named `routing LABEL`, that of routing."""
        found = {}
        for label in (self.plan.config.scale.spec, *self.plan.changes.values()):
            found[f"routing {label}"] = self._routing(label)
            found[label] = self._frozen(label)
        return found

    def attribution(self) -> dict[str, Piece]:
        plan = self.plan
        assert plan.attributed is not None
        left, right = plan.attributed
        few = self.corpus.first(plan.config.attribution.prompts)
        label = f"{left.name}/{right.name}"

        def make() -> Piece:
            start = plan.uniform(left)

            def use(spec: ExecutionSpec) -> None:
                self.pair.under(label, (start, plan.uniform(spec)))

            engines = self.pair.under(label, (start, start))
            total = sum(len(studies.path(left, right, backwards)) for backwards in (False, True))
            with self._progress("attribution", label, total) as advance:
                return studies.attribution(engines, use, few, plan.temperature, left, right, advance)

        return {label: self.store.piece("attribution", self._settings(left, right, few), make)}

    def _frozen(self, label: str) -> Piece:
        maps = self.plan.conditions[label]
        left, right = maps or (None, None)

        def make() -> Piece:
            with self._progress("frozen", label, 1) as advance:
                _, table = studies.frozen(self.pair.under(label, maps), self.corpus, self.plan.temperature)
                advance(1)
            return self._backends(label), table

        return self.store.piece(f"frozen.{label}", self._settings(left, right, self.corpus), make)

    def _routing(self, label: str) -> Piece:
        maps, config = self.plan.conditions[label], self.plan.config.routing
        assert maps is not None
        layers = studies.depths(self.layers, config.depths)

        def make() -> Piece:
            with self._progress("routing", label, 1) as advance:
                engines = self.pair.under(label, maps)
                left = self._left_pass(engines[0], maps[0], layers)
                piece, table = studies.routing(
                    left, engines[1], self.corpus, self.plan.temperature, config.tokens
                )
                advance(1)
            own = self._backends(label), table
            self.store.piece(f"frozen.{label}", self._settings(*maps, self.corpus), lambda: own)
            return piece

        settings = [self._settings(*maps, self.corpus), layers, config.tokens]
        return self.store.piece(f"routing.{label}", settings, make)

    def _backends(self, label: str) -> dict[str, Any]:
        """What computes the experts of either engine; nothing for a dense model."""
        reports = self.pair.reports.get(label)
        return {"backends": [report.backend for report in reports]} if reports else {}

    def _left_pass(self, left: Any, own: PrecisionMap, layers: list[int]) -> studies.LeftPass:
        """Of conditions that follow each other and differ in the right engine alone, one."""
        if self._left is None or self._left[0] != own:
            self._left = None  # not both in memory
            tokens = self.plan.config.routing.tokens
            self._left = own, studies.left_pass(left, self.corpus, self.plan.temperature, layers, tokens)
        return self._left[1]

    def _boundaries(self, label: str) -> Piece:
        maps, config = self.plan.conditions[label], self.plan.config.boundaries
        assert maps is not None
        layers = studies.depths(self.layers, config.depths)
        few = self.corpus.first(config.prompts)

        def make() -> Piece:
            left, right = self.pair.under(label, maps)
            masters = Masters(self.plan.model, self.plan.config.learner.dtype)
            with self._progress("boundaries", label, len(layers)) as advance:
                results = examine(left, right, few, self.plan.temperature, layers, masters, advance)
            return {"layers": [result.to_dict() for result in results]}, {}

        settings = [self._settings(*maps, few), layers]
        return self.store.piece(f"boundaries.{label}", settings, make)

    def _settings(self, left: Any, right: Any, corpus: Corpus) -> list[Any]:
        prints = [None if side is None else side.fingerprint for side in (left, right)]
        return [self.plan.base(), *prints, corpus.to_json()]

    def _progress(self, study: str, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        return progress(self.console, f"{study} under {label}", total, "parts")


def _corpus(plan: Plan, folder: RunFolder, pair: Pair) -> Corpus:
    """The sequences: those of the file that was named, those of an earlier launch, or new ones."""
    path = folder.path / SEQUENCES
    if path.is_file():
        return Corpus.read(path)
    corpus = plan.given or _sample(plan, pair)
    write_atomically(path, corpus.to_json())
    return corpus


def _sample(plan: Plan, pair: Pair) -> Corpus:
    config = plan.config
    prompts = [plan.task.prompts.training(position) for position in range(config.prompts)]
    seeds = [
        [response_seed(config.run.seed, "diagnose", prompt.position, k) for k in range(config.samples)]
        for prompt in prompts
    ]
    writer, done = pair.writer(plan.sampled_map)
    answers = writer.generate([list(prompt.token_ids) for prompt in prompts], seeds, plan.sampling)
    done()
    rows = [
        ((*prompt.token_ids, *completion.token_ids), len(prompt.token_ids), number)
        for number, (prompt, own) in enumerate(zip(prompts, answers, strict=True))
        for completion in own
    ]
    sequences, lengths, numbers = zip(*rows, strict=True)
    return Corpus(sequences, lengths, numbers)


def _open_folder(plan: Plan) -> RunFolder:
    path = plan.folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / "config.yaml", to_yaml(plan.config))
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error}") from error
    return RunFolder.open(path)


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=1) + "\n")
