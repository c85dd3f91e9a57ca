"""What is evaluated: a checkpoint of a run, or a model folder, in the form that a sampler loads."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.checkpoint import read_weights
from learner.convert import to_hf
from learner.families.architecture import Architecture
from learner.families.registry import family_of
from learner.folders import carry_from, read_config, write_model
from learner.mapping import rules
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.compose import from_yaml
from rl.config import Config
from rl.config.data import ArithmeticData
from rl.errors import ConfigError, DataError
from rl.evaluation.benchmarks import TRAINED
from rl.evaluation.config import EngineConfig
from rl.models import cached_folder, folder_digest, initial_model, model_architecture
from rl.run_folder import RunFolder
from rl.task import own_tokenizer, problem_source
from rl.validate import resolve_maps
from sampler.config import SamplerConfig
from sampler.model_check import check_model

LEARNER = "learner"  # the learner's part of a checkpoint
CACHE = Path(".cache/minite")

_STEP = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Candidate:
    """A model folder and where it comes from.

    title: names it on the terminal and in `output_dir`. origin: the checkpoint, or the model folder. model: what a
    sampler loads. fingerprint: of the content of `origin`. step: iterations of the run, 0 for a plain model. run: the
    configuration that trained it, None for a plain model.
    """

    title: str
    origin: Path
    model: Path
    fingerprint: str
    step: int
    run: Config | None
    cache: Path

    @property
    def architecture(self) -> Architecture:
        return model_architecture(self.model)

    def precision_map(self, name: str) -> PrecisionMap:
        """The map called `name`; see `rl.evaluation.config.EvaluateConfig.specs`. Raises ConfigError."""
        layers = self.architecture.layers
        if name != TRAINED:
            return PrecisionMap.resolve(layers, named_spec(name))
        if self.run is None:
            raise ConfigError(
                f"specs={TRAINED}: {self.title} is a plain model folder, which does not say under which spec it"
                " was trained; name the specs, as in specs=[minite,bf16]"
            )
        return resolve_maps(self.run.spec, layers)[1]

    def engine(self, given: EngineConfig, max_model_len: int) -> SamplerConfig:
        """The sampler's settings for sequences of `max_model_len` tokens. Raises ConfigError."""
        base = self.run.sampler if self.run else SamplerConfig()
        base = replace(
            base, stock=False, sleep="off"
        )  # here experts follow the specs, and there is no learner
        changes = {entry.name: getattr(given, entry.name) for entry in fields(given)}
        changes = {key: value for key, value in changes.items() if value is not None}
        seqs = changes.get("max_num_seqs", base.max_num_seqs)
        needed = max(max_model_len, seqs, base.max_num_batched_tokens)
        try:
            return replace(
                base, **{"max_num_batched_tokens": needed, **changes, "max_model_len": max_model_len}
            )
        except ValueError as error:
            raise ConfigError(f"sampler: {error}") from error

    def check(self, precision_map: PrecisionMap, engine: SamplerConfig) -> None:
        """Raise DataError unless the sampler can run the model so."""
        try:
            check_model(self.model, precision_map, engine)
        except ValueError as error:
            raise DataError(f"checkpoint: {error}") from error


def open_candidate(path: str, cache_dir: str | None) -> Candidate:
    """The run folder, checkpoint or model folder at `path`.

    A checkpoint is converted into a model folder once, and kept in the cache under its content hash. Raises
    DataError for anything else, and for a run without a complete checkpoint.
    """
    place = Path(path).resolve()
    if (place / "config.json").is_file():
        title, cache = place.name, Path(cache_dir) if cache_dir else CACHE
        return Candidate(title, place, place, folder_digest(place), 0, None, cache)
    if (place / "config.yaml").is_file():
        folder = RunFolder.open(place)
        checkpoint = CheckpointStore(folder.checkpoints, keep=1).latest_complete()
        if checkpoint is None:
            raise DataError(f"checkpoint={path!r}: the run has no complete checkpoint")
    elif (match := _STEP.fullmatch(place.name)) and (place.parents[1] / "config.yaml").is_file():
        folder = RunFolder.open(place.parents[1])
        checkpoint = CheckpointStore(folder.checkpoints, keep=1).complete(int(match[1]))
        if checkpoint is None:
            raise DataError(f"checkpoint={path!r}: is missing or not complete")
    else:
        raise DataError(
            f"checkpoint={path!r}: neither a run folder (config.yaml), nor a checkpoint in one"
            " (checkpoints/step_000012), nor a Hugging Face model folder (config.json)"
        )
    config = from_yaml(folder.config, [])
    cache = Path(cache_dir or config.run.cache_dir)
    title = f"{folder.title}/{checkpoint.path.name}"
    model = _converted(checkpoint, config, cache)
    return Candidate(title, checkpoint.path, model, checkpoint.fingerprint, checkpoint.step, config, cache)


def _converted(checkpoint: Checkpoint, config: Config, cache: Path) -> Path:
    base = _initial_model(config, cache)
    key = {"checkpoint": checkpoint.fingerprint, "base": folder_digest(base)}
    return cached_folder(
        cache, "policy", key, lambda out: convert_checkpoint(checkpoint.path / LEARNER, base, out)
    )


def _initial_model(config: Config, cache: Path) -> Path:
    """The folder that the run started from: its configuration and tokenizer are those of the checkpoint."""
    tokenizer = None
    if isinstance(config.data, ArithmeticData):
        tokenizer = own_tokenizer(problem_source(config.data, config.run.seed), cache)
    return initial_model(config.model, tokenizer, config.run.seed, cache)


def convert_checkpoint(checkpoint: Path, base: Path, out: Path) -> None:
    """Write the weights of the learner's checkpoint as a model folder, with the tokenizer of the model `base`.

    The optimiser's state is not read. Raises DataError when the checkpoint belongs to a model of another shape.
    """
    config = read_config(base)
    family = family_of(config)
    architecture = family.read(config)
    saved = json.loads((checkpoint / "state.json").read_text())["identity"]["architecture"]
    present: dict[str, Any] = json.loads(json.dumps(asdict(architecture)))
    if saved != present:
        differing = sorted(key for key in saved.keys() | present.keys() if saved.get(key) != present.get(key))
        raise DataError(f"{checkpoint} holds a model of another shape than {base}: {', '.join(differing)}")
    weights = read_weights(checkpoint)
    write_model(out, config, dict(to_hf(weights, rules(family, architecture))), carry_from(base))
