"""What a diagnosis resolves to, with everything checked that can be checked before an engine starts."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.spec import ExecutionSpec
from learner.families.architecture import Architecture
from learner.folders import read_config
from rl.diagnosis.config import OWN, DiagnoseConfig
from rl.diagnosis.corpus import Corpus, check_fits
from rl.diagnosis.pair import Maps
from rl.errors import ConfigError, DataError
from rl.evaluation.candidate import open_candidate
from rl.models import folder_digest, initial_model, model_architecture
from rl.records.provenance import package_versions, source_digest
from rl.task import Task, own_tokenizer, problem_source
from rl.validate import check_against_model, resolve_maps
from sampler.config import SamplingConfig
from sampler.model_check import DENSE as DENSE_ARCHITECTURES
from sampler.model_check import check_model

DENSE = "dense"  # the condition of a dense model


@dataclass(frozen=True)
class Plan:
    """architecture: None for a dense model. study: what is done of `config.study`; notes: why the rest is not.
    conditions: label -> the maps of the left and the right engine. changes: of the study scale, change -> label.
    attributed: the specs of both sides. given: sequences from a file; None: they are to be sampled.
    """

    config: DiagnoseConfig
    model: Path
    model_digest: str
    architecture: Architecture | None
    task: Task
    study: tuple[str, ...]
    notes: tuple[str, ...]
    conditions: dict[str, Maps]
    changes: dict[str, str]
    attributed: tuple[ExecutionSpec, ExecutionSpec] | None
    given: Corpus | None

    @property
    def sampling(self) -> SamplingConfig:
        return replace(
            self.config.algorithm.sampling, stop_token_ids=self.task.stop_token_ids, return_routes=False
        )

    @property
    def temperature(self) -> float:
        return self.config.algorithm.sampling.temperature

    @property
    def labels(self) -> list[str]:
        """The conditions of the configuration, without what the study scale adds."""
        return [label for label in self.conditions if label in (*self.config.conditions, DENSE)]

    @property
    def layers(self) -> int:
        """With experts."""
        return self.architecture.layers if self.architecture else 0

    def uniform(self, spec: ExecutionSpec) -> PrecisionMap:
        """`spec` wherever the section `spec` leaves no layer in BF16."""
        own = self.config.spec
        return PrecisionMap.resolve(self.layers, spec, own.first_layers_bf16, own.last_layers_bf16)

    @property
    def sampled_map(self) -> PrecisionMap | None:
        """Under which the responses are written."""
        return self.uniform(named_spec(self.config.sampled_under)) if self.architecture else None

    def base(self) -> dict[str, Any]:
        """All that the log-probabilities of every condition depend on, but for the sequences and the specs: a gate must
        not pass on what other code, packages or settings of the engines once gave.
        """
        config = self.config
        return {
            "model": self.model_digest,
            "engines": config.engines,
            "learner": asdict(config.learner),
            "sampler": asdict(config.sampler),
            "temperature": self.temperature,
            "source": source_digest(),
            "versions": package_versions(),
        }

    def sampled(self) -> dict[str, Any]:
        """All that the sequences depend on."""
        config = self.config
        return {
            "model": self.model_digest,
            "data": self.task.prompts.fingerprint,
            "sampling": asdict(self.sampling),
            "sampled_under": config.sampled_under,
            "prompts": config.prompts,
            "samples": config.samples,
            "seed": config.run.seed,
            "file": None if self.given is None else hashlib.sha256(self.given.to_json().encode()).hexdigest(),
        }

    @property
    def folder(self) -> Path:
        """The same for the same model, engines and sequences, so that a diagnosis goes on, and grows by studies."""
        text = repr((self.base(), self.sampled()))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return Path(self.config.run.output_dir) / "diagnose" / f"{self.config.run.name}-{digest}"


def make_plan(config: DiagnoseConfig) -> Plan:
    """Check everything that can be checked before an engine starts. Raises UserError."""
    if config.sampler.stock:
        raise ConfigError(
            "sampler.stock=True: the expert layers of a stock engine cannot be observed; set it to false"
        )
    if config.sampler.processes != 1:
        raise ConfigError(
            f"sampler.tensor_parallel={config.sampler.processes}: a diagnosis observes a sampler of one process, set it"
            " to 1"
        )
    if config.learner.processes != 1:
        raise ConfigError(
            f"learner: {config.learner.processes} processes; a diagnosis observes a learner of one, set its"
            " *_parallel keys to 1"
        )
    source = problem_source(config.data, config.run.seed)
    cache = Path(config.run.cache_dir)
    if config.checkpoint is not None:
        model = open_candidate(config.checkpoint, config.run.cache_dir).model
    else:
        model = initial_model(config.model, own_tokenizer(source, cache), config.run.seed, cache)
    if is_dense(model):
        return _dense_plan(config, model, Task(config, source, model))
    architecture = model_architecture(model)
    check_against_model(replace_differences(config), architecture)
    task = Task(config, source, model)
    if config.prompts > task.prompts.training_count:
        raise ConfigError(f"prompts={config.prompts}: the data hold {task.prompts.training_count}")
    conditions = {label: _maps(config, label, architecture.layers) for label in config.conditions}
    changes = _add_changes(config, conditions, architecture.layers)
    attributed = _attributed(config)
    _check_strict(config, conditions, attributed)
    for maps in conditions.values():
        for precision_map in maps or ():
            _check(model, precision_map, config)
    return Plan(
        config,
        model,
        folder_digest(model),
        architecture,
        task,
        config.study,
        (),
        conditions,
        changes,
        attributed,
        _given(config, architecture.vocab),
    )


def is_dense(folder: Path) -> bool:
    """Whether the model has no experts, and is one that vLLM's side runs."""
    return bool(set(read_config(folder).architectures or ()) & set(DENSE_ARCHITECTURES))


def _dense_plan(config: DiagnoseConfig, model: Path, task: Task) -> Plan:
    """Log-probabilities alone can be compared, and no spec applies."""
    if "megatron" in config.engines:
        raise ConfigError(
            f"engines={list(config.engines)}: the learner's Megatron model has experts in every layer, and"
            f" {model.name} is a dense model; name two of vllm and hf"
        )
    if "frozen" not in config.study:
        raise ConfigError(
            f"study={list(config.study)}: {model.name} is a dense model, of which only frozen can be made"
        )
    _check(model, None, config)
    left_out = [name for name in config.study if name != "frozen"]
    notes = [f"{model.name} is a dense model: the conditions, which are specs of experts, do not apply."]
    if left_out:
        notes.append(f"Left out, as they are about experts: {', '.join(left_out)}.")
    given = _given(config, read_config(model).vocab_size)
    digest = folder_digest(model)
    return Plan(config, model, digest, None, task, ("frozen",), tuple(notes), {DENSE: None}, {}, None, given)


def _given(config: DiagnoseConfig, vocab: int) -> Corpus | None:
    if config.sequences is None:
        return None
    corpus = Corpus.read(Path(config.sequences)).first(config.prompts)
    check_fits(corpus, vocab, config.sampler.max_model_len)
    return corpus


def replace_differences(config: DiagnoseConfig) -> DiagnoseConfig:
    """The configuration with differences between the engines allowed: they are what a diagnosis is about."""
    return replace(config, spec=replace(config.spec, allow_difference=True))


def _maps(config: DiagnoseConfig, label: str, layers: int) -> Maps:
    if label == OWN:
        return resolve_maps(config.spec, layers)
    left, _, right = label.partition("/")
    first, last = config.spec.first_layers_bf16, config.spec.last_layers_bf16
    return (
        PrecisionMap.resolve(layers, named_spec(left), first, last),
        PrecisionMap.resolve(layers, named_spec(right or left), first, last),
    )


def _add_changes(config: DiagnoseConfig, conditions: dict[str, Maps], layers: int) -> dict[str, str]:
    """The study scale's conditions, added to `conditions`: change -> label."""
    if "scale" not in config.study:
        return {}
    scale, changes = config.scale, {}
    conditions.setdefault(scale.spec, _maps(config, scale.spec, layers))
    for change in scale.changes:
        field, _, value = change.partition(":")
        try:
            spec = named_spec(scale.spec, {field: int(value) if value.isdigit() else value})
        except ValueError as error:
            raise ConfigError(f"scale.changes={change!r}: {error}") from error
        label = f"{scale.spec}/{spec.name}"
        first, last = config.spec.first_layers_bf16, config.spec.last_layers_bf16
        base = _maps(config, scale.spec, layers)
        assert base is not None
        conditions[label] = base[0], PrecisionMap.resolve(layers, spec, first, last)
        changes[change] = label
    return changes


def _attributed(config: DiagnoseConfig) -> tuple[ExecutionSpec, ExecutionSpec] | None:
    if "attribution" not in config.study:
        return None
    sides = []
    for side in ("learner", "sampler"):
        name = getattr(config.attribution, side)
        try:
            overrides = {} if name is not None else getattr(config.spec, side)
            sides.append(named_spec(name or config.spec.name, overrides))
        except ValueError as error:
            raise ConfigError(f"attribution.{side}: {error}") from error
    if sides[0] == sides[1]:
        raise ConfigError(
            f"study=attribution: both sides are {sides[0].name}; name two, as in attribution.learner=minite"
            " attribution.sampler=te_per_tensor, or set fields of spec.sampler"
        )
    return sides[0], sides[1]


def _check_strict(
    config: DiagnoseConfig,
    conditions: dict[str, Maps],
    attributed: tuple[ExecutionSpec, ExecutionSpec] | None,
) -> None:
    """Engines that are strict cannot be anything else, and the other way round."""
    strict = {f"sampled_under={config.sampled_under}": named_spec(config.sampled_under).strict}
    strict |= {
        f"condition {label}": each.model is not None
        for label, maps in conditions.items()
        for each in maps or ()
    }
    strict |= {f"study=attribution of {spec.name}": spec.strict for spec in attributed or ()}
    if not any(strict.values()):
        return
    if not all(strict.values()):
        named = {wanted: next(key for key in strict if strict[key] is wanted) for wanted in (True, False)}
        raise ConfigError(
            f"{named[True]} is strict and {named[False]} is not: a diagnosis of strict specs is one of its own"
            " (sampled_under=strict too)"
        )
    if "hf" in config.engines:
        raise ConfigError(f"engines={list(config.engines)}: hf does not compute under a strict spec")


def _check(model: Path, precision_map: PrecisionMap | None, config: DiagnoseConfig) -> None:
    try:
        check_model(model, precision_map, config.sampler)
    except ValueError as error:
        raise DataError(f"model: {error}") from error
