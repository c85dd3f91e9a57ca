"""An evaluation from plan to table: everything is checked first, then the engines start, one after another."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.actor_group import ActorGroup, start_group, wait_until_ready
from rl.actors import SamplerActor
from rl.cluster import Remote, local_cluster
from rl.compose import to_yaml
from rl.evaluation.candidate import Candidate, open_candidate
from rl.evaluation.config import EvaluateConfig
from rl.evaluation.exams import Exam, make_exam
from rl.evaluation.results import (
    Result,
    compare,
    in_order,
    metrics_of,
    metrics_of_difference,
    write_results,
)
from rl.evaluation.runner import pool_for, run_exam
from rl.evaluation.samples import SampleFile
from rl.evaluation.summary import Bootstrap, summarise
from rl.evaluation.view import progress, results_table
from rl.records.logger import RunLogger
from rl.records.provenance import record_engines, record_launch
from rl.run_folder import RunFolder, RunFolderError, write_atomically
from rl.specs import check_experts_ran, check_specifications
from sampler.config import SamplerConfig, SamplingConfig
from sampler.engine import Completion

_FROM_THE_FIRST = -1  # metrics.jsonl is written anew: its numbers come from the samples


@dataclass(frozen=True)
class Plan:
    """What a configuration resolves to.

    maps: spec -> precision map, all different. same: specs that were asked for, to one with the same map.
    """

    config: EvaluateConfig
    candidate: Candidate
    exams: tuple[Exam, ...]
    maps: dict[str, PrecisionMap]
    same: dict[str, str]
    engine: SamplerConfig

    @property
    def folder(self) -> Path:
        """Where results and samples go: the same for the same checkpoint, so that an evaluation goes on."""
        name = f"{self.candidate.title.replace('/', '-')}-{self.candidate.fingerprint[:8]}"
        return Path(self.config.output_dir) / "evaluate" / name

    def samples_name(self, exam: Exam, spec: str) -> str:
        """The file of the samples: its name holds a fingerprint of all that a sample depends on."""
        parts = (
            self.candidate.fingerprint,
            self.maps[spec].fingerprint,
            exam.fingerprint,
            self.engine.dtype,
            str(self.config.seed),
        )
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        return f"samples/{exam.name}.{spec}.{digest}.jsonl"


def make_plan(config: EvaluateConfig) -> Plan:
    """Check everything that can be checked before an engine starts. Raises UserError."""
    from transformers import AutoTokenizer

    candidate = open_candidate(config.checkpoint, config.cache_dir)
    maps, same = _different({name: candidate.precision_map(name) for name in config.specs})
    tokenizer = AutoTokenizer.from_pretrained(candidate.model, local_files_only=True)
    exams = tuple(
        make_exam(
            name,
            config.resolved(name),
            tokenizer,
            candidate.architecture.max_positions,
            data_dir=config.data_dir,
            problems=config.problems,
            overlong=config.overlong,
        )
        for name in config.benchmarks
    )
    engine = candidate.engine(config.sampler, max(exam.longest for exam in exams))
    for precision_map in maps.values():
        candidate.check(precision_map, engine)
    return Plan(config, candidate, exams, maps, same, engine)


def _different(
    maps: dict[str, PrecisionMap],
) -> tuple[dict[str, PrecisionMap], dict[str, str]]:
    """The maps that differ from all before them, and the names of the others with that of their double."""
    first: dict[str, str] = {}
    same = {}
    for name, precision_map in maps.items():
        double = first.setdefault(precision_map.fingerprint, name)
        if double != name:
            same[name] = double
    return {name: found for name, found in maps.items() if name not in same}, same


def evaluate(plan: Plan, console: Console) -> Path:
    """Run the plan, from whatever an earlier run of it has saved. Returns the path of the result file."""
    config, candidate = plan.config, plan.candidate
    for name, double in plan.same.items():
        console.print(f"spec {name} is {double} for this model: evaluated once")
    folder = _open_folder(plan)
    bootstrap = Bootstrap(config.resamples, config.confidence, config.seed)
    record = config.logging
    with RunLogger(folder, wandb=record.wandb, project=record.project, resumed_at=_FROM_THE_FIRST) as logger:
        record_launch(folder)
        results: list[Result] = []
        reports: list[EngineReport] = []
        for spec in plan.maps:
            with _Engine(plan, spec, folder, console, reports) as engine:
                for exam in plan.exams:
                    results = in_order([*results, _result(plan, exam, spec, engine, folder, console)])
                    written = write_results(
                        folder.path, candidate, plan.exams, plan.maps, results, bootstrap, config.seed
                    )
        differences = compare(results, bootstrap)
        for result in results:
            logger.log(candidate.step, metrics_of(result))
        for difference in differences:
            logger.log(candidate.step, metrics_of_difference(difference))
    console.print(results_table(candidate.title, results, differences))
    return written


def _result(
    plan: Plan, exam: Exam, spec: str, engine: _Engine, folder: RunFolder, console: Console
) -> Result:
    config, name = plan.config, plan.samples_name(exam, spec)
    file = SampleFile(folder.path / name)
    total = len(exam.prompts) * exam.protocol.samples
    with (
        pool_for(exam, config.workers, config.timeout_s) as pool,
        progress(console, f"{exam.name} under {spec}", total) as advance,
    ):
        samples = run_exam(
            exam,
            engine.generate,
            pool.score,
            seed=config.seed,
            part=config.save_every,
            file=file,
            progress=advance,
        )
    bootstrap = Bootstrap(config.resamples, config.confidence, config.seed)
    return Result(exam, spec, summarise(samples, bootstrap), name)


class _Engine:
    """A sampler under one spec, which starts when something is first asked of it, and ends with the block.

    Its report joins `reports`, which are recorded. Raises SpecMismatch or RuntimeError at the end when the experts did
    not run, or not under the plan's map.
    """

    def __init__(
        self, plan: Plan, spec: str, folder: RunFolder, console: Console, reports: list[EngineReport]
    ):
        self._plan, self._spec, self._folder, self._console = plan, spec, folder, console
        self._reports = reports
        self._remote: Remote | ActorGroup | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if self._remote and error is None:
                report = self._remote.report()
                self._reports.append(report)
                record_engines(self._folder, self._reports)
                check_specifications([self._expected(), report], allow_difference=False)
                check_experts_ran([report])

    def generate(
        self, prompts: list[list[int]], seeds: list[list[int]], sampling: SamplingConfig
    ) -> list[list[Completion]]:
        """See `sampler.engine.Sampler.generate`."""
        if self._remote is None:
            self._remote = self._start()
        return self._remote.generate(prompts, seeds, sampling)

    def _start(self) -> Remote | ActorGroup:
        plan = self._plan
        self._console.print(f"starting vLLM under {self._spec}")
        self._stack.enter_context(local_cluster(plan.config.object_store_mib))
        arguments = (plan.candidate.model, plan.maps[self._spec], plan.engine)
        remote = start_group(
            SamplerActor, f"sampler.{self._spec}", plan.engine, self._folder.path, *arguments
        )
        wait_until_ready([remote])
        return remote

    def _expected(self) -> EngineReport:
        precision_map = self._plan.maps[self._spec]
        return EngineReport("plan", precision_map, "reference", len(precision_map.layers), 0)


def _open_folder(plan: Plan) -> RunFolder:
    path = plan.folder
    try:
        (path / "samples").mkdir(parents=True, exist_ok=True)
        write_atomically(path / "config.yaml", to_yaml(plan.config))
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error}") from error
    return RunFolder.open(path)
