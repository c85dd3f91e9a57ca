"""Why an override was refused, in one line, with what may have been meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

_NEAR = 3  # most keys that a message names
_LIKENESS = 0.8  # least likeness, in (0, 1], of a key that it names


def explain(error: Exception, overrides: Sequence[str], known: Mapping[str, Any]) -> str:
    """What Hydra or OmegaConf refused of `overrides`. known: `known_keys` of the configuration."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return no_such_choice(group, name, error.options)
    if needed := re.match(r"You must specify '([^']+)'", text):
        options = [line.strip() for line in text.splitlines() if line.startswith("\t")]
        return f"{needed[1]}=NAME is needed; there are: {', '.join(_presets(options))}"
    if refused := re.match(r"Could not override '([^']+)'", text):
        return no_such_key(_override_of(refused[1], overrides), known)
    key = str(getattr(error, "full_key", None) or "")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return no_such_key(_override_of(key, overrides), known)
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: a value is needed"
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):
        return f"{_unnamed_choice(overrides)}: a group takes the name of a choice, or single keys: GROUP.KEY=VALUE"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (f"{key}: " if key else "") + (lines[0] if lines else type(error).__name__)


def no_such_choice(group: str, name: str, options: Iterable[str]) -> str:
    """For a group that has no file, or stored node, of this name."""
    if presets := _presets(options):
        return f"{group}={name}: no such choice; there are: {', '.join(presets)}"
    return f"{group}={name}: {group} has no presets, set its keys one by one: {group}.KEY=VALUE"


def no_such_key(override: str, known: Mapping[str, Any]) -> str:
    """For an override `key=value`, or a key alone, that is not in the configuration."""
    override = override.lstrip("+~")
    key = override.partition("=")[0]
    for name, hint in known.items():
        if get_origin(hint) is dict and key.startswith(f"{name}."):
            return _no_such_entry(override, key, name, get_args(hint)[1])
    if key in known:
        return f"{override}: the chosen {key.partition('.')[0]} has no such key"
    return _refusal(override, near_keys(key, known))


def no_such_value(override: str, known: Iterable[str]) -> str:
    """For a value that stands where keys are expected."""
    section = f"{override.partition('=')[0]}."
    keys = [key for key in known if key.startswith(section) and "." not in key.removeprefix(section)]
    more = ", ..." if len(keys) > _NEAR else ""
    expected = ", ".join(f"{key}=VALUE" for key in keys[:_NEAR])
    return f"{override}: its keys are set one by one: {expected}{more}"


def _no_such_entry(override: str, key: str, mapping: str, values: Any) -> str:
    """For a key below a mapping whose entries are `values`: of any name, or dataclasses."""
    entry, _, name = key.removeprefix(f"{mapping}.").partition(".")
    if is_dataclass(values) and isinstance(values, type) and name:
        return _refusal(
            override, [f"{mapping}.{entry}.{near}" for near in near_keys(name, known_keys(values))]
        )
    return f"{override}: {mapping} has no such key; a new one is written +{key}=VALUE"


def _refusal(override: str, near: Sequence[str]) -> str:
    return f"{override}: no such key" + (f"; near it: {', '.join(near)}" if near else "")


def near_keys(key: str, known: Iterable[str]) -> list[str]:
    """Keys that are spelled like `key`, then those whose last part is spelled like its last part."""
    leaves: dict[str, list[str]] = {}
    for name in known:
        leaves.setdefault(_leaf(name), []).append(name)
    whole = get_close_matches(key, [name for names in leaves.values() for name in names], _NEAR, _LIKENESS)
    alike = [
        name for leaf in get_close_matches(_leaf(key), leaves, _NEAR, _LIKENESS) for name in leaves[leaf]
    ]
    return list(dict.fromkeys([*whole, *alike]))[:_NEAR]


def known_keys(cls: type) -> dict[str, Any]:
    """Dotted key -> type, of every key of a configuration dataclass, sections included."""
    keys: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for entry in fields(cls):
        keys[entry.name] = hints[entry.name]
        for section in _dataclasses(hints[entry.name]):
            keys |= {f"{entry.name}.{key}": hint for key, hint in known_keys(section).items()}
    return keys


def _dataclasses(hint: Any) -> list[type]:
    if get_origin(hint) in (Union, UnionType):
        return [found for part in get_args(hint) for found in _dataclasses(part)]
    return [hint] if isinstance(hint, type) and is_dataclass(hint) else []


def _override_of(key: str, overrides: Sequence[str]) -> str:
    """The override that set `key`, or something below it."""
    found = (item for item in overrides if re.match(rf"[+~]*{re.escape(key)}(?:[.=]|$)", item))
    return next(found, key)


def _unnamed_choice(overrides: Sequence[str]) -> str:
    """The override of a whole group by a value that is neither a name nor a list."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    odd = (
        item for item in parsed if "." not in item.key_or_group and not isinstance(item.value(), str | list)
    )
    return next((str(item.input_line) for item in odd), ", ".join(overrides))


def _presets(options: Iterable[str]) -> list[str]:
    """Without the names under which the dataclasses' defaults are stored."""
    return [name for name in options if not name.endswith("defaults")]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
