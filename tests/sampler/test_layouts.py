"""An engine whose experts stand in tiles: it writes what one in rows writes, and is updated in place like one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights, StoredLayout, split_wire_name, wire_name
from kernels.precision_map import PrecisionMap
from rl.sync.protocol import RefusedError
from rl.sync.receiver import Receiver
from sampler.engine import Sampler
from tests.sampler.conftest import LAYERS, StartSampler, qwen_config
from tests.sampler.test_updates import announcement, expected_digests, respond, update, with_version
from tests.sampler.wire import wire_tensors

MAP = PrecisionMap.resolve(LAYERS, named_spec("minite"), last_layers_bf16=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of widths that fit tiles."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(qwen_config(hidden_size=128, moe_intermediate_size=128))
        made.append(tmp_path_factory.mktemp("model"))
        model.save_pretrained(made[-1])
    return made


@pytest.fixture(scope="module")
def samplers(folders: list[Path], start_sampler: StartSampler) -> dict[str, Sampler]:
    return {name: start_sampler(folders[0], MAP, expert_layout=name) for name in ("rows", "tiles")}


def in_tiles(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What travels, its experts laid out again."""
    found = {name: tensor for name, tensor in tensors.items() if split_wire_name(name) is None}
    for layer, spec in enumerate(MAP.layers):
        prefix = wire_name(layer, "")
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        weights = ExpertWeights.from_tensors(own, spec).in_layout(StoredLayout.TILES)
        found |= {wire_name(layer, part): tensor for part, tensor in weights.tensors().items()}
    return found


def test_an_engine_in_tiles_writes_what_one_in_rows_writes(samplers: dict[str, Sampler]) -> None:
    assert {name: str(own.weights.layout) for name, own in samplers.items()} == {
        "rows": "rows",
        "tiles": "tiles",
    }
    held = {name: set(own.weights.tensors()) for name, own in samplers.items()}
    assert wire_name(0, "w13.words") in held["tiles"] and wire_name(0, "w13.codes") not in held["tiles"]
    assert wire_name(0, "w13.codes") in held["rows"] and wire_name(1, "w13.weight") in held["tiles"]
    assert respond(samplers["tiles"]) == respond(samplers["rows"])


def test_an_update_in_tiles_is_in_place_and_gives_the_same_engine(
    samplers: dict[str, Sampler], folders: list[Path]
) -> None:
    new = wire_tensors(folders[1], MAP)
    tiles, places = in_tiles(new), addresses(samplers["tiles"])
    assert update(samplers["rows"], new) == expected_digests(new, MAP)
    assert update(samplers["tiles"], tiles) == expected_digests(tiles, MAP)
    assert addresses(samplers["tiles"]) == places
    assert with_version(respond(samplers["tiles"]), 1) == respond(samplers["rows"])


def addresses(sampler: Sampler) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in sampler.weights.tensors().items()}


def test_weights_in_rows_are_refused_by_an_engine_in_tiles(
    samplers: dict[str, Sampler], folders: list[Path]
) -> None:
    said = announcement(samplers["tiles"], wire_tensors(folders[0], MAP), 1, StoredLayout.ROWS)
    with pytest.raises(RefusedError, match="laid out in rows, this sampler holds its experts in tiles"):
        Receiver(samplers["tiles"].weights).begin(said)
