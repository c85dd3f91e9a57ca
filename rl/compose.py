"""Command-line overrides -> `Config`: Hydra composes the groups, pydantic checks names and types.

Every key of a group exists with its dataclass default before any YAML is read, so the files under ``configs/`` hold
differences only. The names of `kernels.catalogue` are those of the group `spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from kernels.catalogue import CATALOGUE
from learner.config import LearnerConfig
from rl.config import Config
from rl.config.algorithm import AlgorithmConfig
from rl.config.cluster import ClusterConfig, SyncConfig
from rl.config.data import ArithmeticData, FileData, SumsData
from rl.config.model import ModelConfig, SpecConfig
from rl.config.run import LoggingConfig, RunConfig
from rl.config.scoring import EvaluationConfig, RewardConfig
from rl.errors import ConfigError
from rl.override_errors import explain, known_keys, no_such_key, no_such_value
from sampler.config import SamplerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"

# group/name -> the dataclass whose defaults stand under that name
_DEFAULTS: dict[tuple[str, str], type] = {
    ("run", "defaults"): RunConfig,
    ("model", "defaults"): ModelConfig,
    ("spec", "defaults"): SpecConfig,
    ("learner", "defaults"): LearnerConfig,
    ("sampler", "defaults"): SamplerConfig,
    ("algorithm", "defaults"): AlgorithmConfig,
    ("data", "arithmetic_defaults"): ArithmeticData,
    ("data", "sums_defaults"): SumsData,
    ("data", "file_defaults"): FileData,
    ("reward", "defaults"): RewardConfig,
    ("evaluation", "defaults"): EvaluationConfig,
    ("sync", "defaults"): SyncConfig,
    ("logging", "defaults"): LoggingConfig,
    ("cluster", "defaults"): ClusterConfig,
}


def load_config(overrides: list[str]) -> Config:
    """Compose and check the configuration that `overrides` (Hydra syntax) ask for.

    Raises:
        ConfigError: unknown key or recipe, missing value, wrong type, or a broken rule; the message names the key.
    """
    return check_config(_composed_run("config", Config, overrides))


def load_extended(name: str, cls: type[T], overrides: list[str]) -> T:
    """As `load_config`, for a subclass `cls` of `Config` with keys of its own; configs/NAME.yaml puts both together."""
    own = {key: value for key, value in _default_values(cls).items() if key not in _default_values(Config)}
    ConfigStore.instance().store(name=f"{name}_defaults", node=own)
    return _checked(cls, _composed_run(name, cls, overrides))


def _composed_run(name: str, cls: type, overrides: list[str]) -> Any:
    if not any(item.startswith(("+recipe=", "data=")) for item in overrides):
        raise ConfigError(f"name what to run: +recipe=NAME, one of {', '.join(recipes())}")
    _register_defaults()
    return _composed(name, cls, overrides)


def compose_defaults(name: str, cls: type[T], overrides: list[str]) -> T:
    """A configuration without groups: the defaults of the dataclass `cls`, changed by `overrides` (Hydra syntax).

    Raises ConfigError as `load_config` does.
    """
    ConfigStore.instance().store(name=name, node=_default_values(cls))
    return _checked(cls, _composed(name, cls, overrides))


def _composed(name: str, cls: type, overrides: list[str]) -> Any:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return OmegaConf.to_container(compose(name, overrides), resolve=True, throw_on_missing=True)
    except (
        HydraException,
        OmegaConfBaseException,
        ValueError,
    ) as error:  # a group that is set to a number: ValueError
        raise ConfigError(explain(error, overrides, known_keys(cls))) from error


def check_config(values: Any) -> Config:
    """Nested plain mappings (from YAML) -> `Config`. Raises ConfigError naming every wrong key."""
    return _checked(Config, values)


def _checked(cls: type[T], values: Any) -> T:
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        known = known_keys(cls)
        raise ConfigError("; ".join(_describe(detail, known) for detail in error.errors())) from error


def to_yaml(config: DataclassInstance) -> str:
    """The resolved configuration as YAML text; `check_config(yaml.safe_load(text))` gives a `Config` back."""
    return yaml.safe_dump(asdict(config), sort_keys=False)


def from_yaml(path: Path, overrides: list[str]) -> Config:
    """The configuration saved at `path`, changed by `overrides` of the form ``group.key=value``."""
    saved = OmegaConf.create(yaml.safe_load(path.read_text()))
    OmegaConf.set_struct(saved, True)
    try:
        merged = OmegaConf.merge(saved, OmegaConf.from_dotlist([item.lstrip("+") for item in overrides]))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, overrides, known_keys(Config))) from error
    return check_config(OmegaConf.to_container(merged, resolve=True))


def differing_keys(left: Config, right: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in `left`, value in `right`) wherever two configurations differ."""
    a, b = _flatten(asdict(left)), _flatten(asdict(right))
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def recipes() -> list[str]:
    """Names that ``+recipe=`` accepts."""
    return sorted(path.stem for path in (CONFIG_DIR / "recipe").glob("*.yaml"))


def _register_defaults() -> None:
    store = ConfigStore.instance()
    for (group, name), cls in _DEFAULTS.items():
        store.store(group=group, name=name, node=_default_values(cls))
    for name in CATALOGUE:
        store.store(group="spec", name=name, node=_default_values(SpecConfig) | {"name": name})


def _default_values(cls: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for spec in fields(cls):
        if spec.default is not MISSING:
            value: Any = spec.default
        elif spec.default_factory is not MISSING:
            value = spec.default_factory()
        else:
            value = "???"
        values[spec.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    """`value` in the types that YAML has."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _describe(detail: Any, known: Mapping[str, Any]) -> str:
    parts = list(detail["loc"])
    if parts[:1] == ["data"] and len(parts) > 2:
        del parts[1]  # data.source, by which pydantic chose the dataclass
    key = ".".join(str(part) for part in parts)
    match detail["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return no_such_key(f"{key}={detail['input']!r}", known)
        case "missing" | "missing_argument":
            return f"{key}: a value is needed"
        case "dataclass_type":
            return no_such_value(f"{key}={detail['input']!r}", known)
        case "value_error":
            return str(detail["ctx"]["error"])
        case _:
            return f"{key}={detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
