"""The state of a Hugging Face checkpoint <-> the state of the Megatron model, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from learner.layout import Box
from learner.mapping import Rule, is_expert

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SHOWN = 20  # problems named in one message


def to_megatron(
    hf_state: Mapping[str, torch.Tensor], rules: Sequence[Rule], shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Megatron state from the tensors of a Hugging Face checkpoint.

    shapes: of the Megatron parameters. Raises ValueError naming missing, unexpected and mis-shaped tensors.
    """
    check_fits(hf_state, rules, shapes)
    return {rule.megatron: rule.merge([hf_state[name] for name in rule.hf]) for rule in rules}


def block_of(hf_state: Mapping[str, torch.Tensor], rule: Rule, box: Box) -> torch.Tensor:
    """The block `box` of one Megatron parameter; of experts, no others are read."""
    if is_expert(rule.megatron):
        rule = rule.of_experts(box.start[0], box.shape[0])
        box = Box((0, *box.start[1:]), box.shape)
    return rule.merge([hf_state[name] for name in rule.hf])[box.slices]


def check_fits(
    hf_state: Mapping[str, torch.Tensor], rules: Sequence[Rule], shapes: Mapping[str, torch.Size]
) -> None:
    """Raise ValueError as `to_megatron` does. Reads no tensor of a state that knows shapes (`folders.FolderState`)."""
    known = getattr(hf_state, "shapes", None)
    stored: Mapping[str, Any] = known if known is not None else {n: t.shape for n, t in hf_state.items()}
    expected = hf_shapes(rules, shapes)
    unexpected = hf_state.keys() - expected.keys()
    # A tied head may be stored as well, as long as it is the embedding.
    if _HEAD in unexpected and torch.equal(hf_state[_HEAD], hf_state.get(_EMBEDDING, torch.empty(0))):
        unexpected -= {_HEAD}
    problems = [f"{name} is unexpected" for name in sorted(unexpected)]
    for name, shape in expected.items():
        if name not in hf_state:
            problems.append(f"{name} is missing")
        elif tuple(stored[name]) != tuple(shape):
            problems.append(f"{name} has shape {tuple(stored[name])}, expected {tuple(shape)}")
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ValueError("the checkpoint does not fit the model: " + "; ".join(problems[:_SHOWN] + more))


def to_hf(
    megatron_state: Mapping[str, torch.Tensor], rules: Iterable[Rule]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a Hugging Face checkpoint, in the order of `rules`; views where layout allows."""
    for rule in rules:
        yield from zip(rule.hf, rule.split(megatron_state[rule.megatron]), strict=True)


def hf_shapes(rules: Iterable[Rule], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Shape of every Hugging Face tensor, given those of the Megatron parameters."""
    rules = list(rules)
    meta = {rule.megatron: torch.empty(shapes[rule.megatron], device="meta") for rule in rules}
    return {name: tensor.shape for name, tensor in to_hf(meta, rules)}
