from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner import convert
from learner.families.registry import family_of
from learner.folders import new_folder, read_config, read_state, write_model
from learner.mapping import GateUp, Qkv, Rule, Stack, rules
from tests.learner.conftest import MakeFolder


def read(folder: Path) -> tuple[dict[str, torch.Tensor], list[Rule]]:
    config = read_config(folder)
    family = family_of(config)
    return read_state(folder), rules(family, family.read(config))


def merged(state: Mapping[str, torch.Tensor], ruleset: list[Rule]) -> dict[str, torch.Tensor]:
    return {rule.megatron: rule.merge([state[name] for name in rule.hf]) for rule in ruleset}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_round_trip_is_exact_both_ways(model_folder: MakeFolder, family: str, tied: bool) -> None:
    state, ruleset = read(model_folder(family, tie_word_embeddings=tied))
    shapes = {name: tensor.shape for name, tensor in merged(state, ruleset).items()}
    megatron = convert.to_megatron(state, ruleset, shapes)
    back = dict(convert.to_hf(megatron, ruleset))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    again = convert.to_megatron(back, ruleset, shapes)
    assert all(torch.equal(again[name], megatron[name]) for name in megatron)


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 4]))
def test_queries_are_grouped_with_their_key_and_value(groups: int, per_group: int, head_dim: int) -> None:
    def heads(first: int, count: int) -> torch.Tensor:
        return torch.arange(first, first + count).repeat_interleave(head_dim).unsqueeze(1).float()

    rule = Qkv("qkv", ("q", "k", "v"), groups, head_dim)
    separate = [heads(0, groups * per_group), heads(100, groups), heads(200, groups)]
    fused = rule.merge(separate)
    expected = []
    for group in range(groups):
        expected += [*range(group * per_group, (group + 1) * per_group), 100 + group, 200 + group]
    assert fused[::head_dim, 0].tolist() == expected
    assert all(torch.equal(a, b) for a, b in zip(rule.split(fused), separate, strict=True))


def test_gate_rows_come_before_up_rows() -> None:
    gates, ups = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    fused = GateUp("w", ()).merge([*gates, *ups])
    assert torch.equal(fused[:, :4], gates) and torch.equal(fused[:, 4:], ups)
    downs = torch.randn(3, 5, 4)
    assert torch.equal(Stack("w", ()).merge(list(downs)), downs)


def test_missing_unexpected_and_mis_shaped_tensors_are_named(model_folder: MakeFolder) -> None:
    state, ruleset = read(model_folder("qwen3_moe"))
    shapes = {name: tensor.shape for name, tensor in merged(state, ruleset).items()}
    del state["model.norm.weight"]
    state["model.layers.7.extra"] = torch.zeros(1)
    query, key = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    state[query], state[key] = state[key], state[query]
    with pytest.raises(ValueError, match="does not fit the model") as raised:
        convert.to_megatron(state, ruleset, shapes)
    message = str(raised.value)
    assert "model.norm.weight is missing" in message
    assert "model.layers.7.extra is unexpected" in message
    assert f"{query} has shape (32, 48), expected (64, 48)" in message


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(model_folder: MakeFolder) -> None:
    state, ruleset = read(model_folder("mixtral", tie_word_embeddings=True))
    shapes = {name: tensor.shape for name, tensor in merged(state, ruleset).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    convert.to_megatron(state, ruleset, shapes)
    state["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight is unexpected"):
        convert.to_megatron(state, ruleset, shapes)


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_folder(tmp_path / "model") as partial:
        (partial / "config.json").write_text("{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "model") as partial:
        (partial / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(FileExistsError, match="not an empty folder"), new_folder(tmp_path / "model"):
        pass


def test_a_tensor_stored_twice_is_refused(model_folder: MakeFolder, tmp_path: Path) -> None:
    source = model_folder("mixtral")
    write_model(tmp_path / "m", read_config(source), read_state(source), lambda _: None)
    (tmp_path / "m" / "copy.safetensors").write_bytes((tmp_path / "m" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="twice"):
        read_state(tmp_path / "m")


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        read_state(tmp_path)
