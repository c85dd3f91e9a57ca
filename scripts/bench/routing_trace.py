"""A routing trace for `expert_layer.py --trace`: real text through a real model, experts by a random router.

    PYTHONPATH=. python scripts/bench/routing_trace.py --text FILE.jsonl --out trace.safetensors [--tokens N]

Hidden states are those ahead of the feed-forward network of one layer of SmolLM2-135M-Instruct, on the string fields
of the rows of FILE. That model has no experts, so the router's weights are normal random numbers: the load is as uneven
and as correlated between neighbouring tokens as these hidden states are, but no training balanced it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.upcycle import SMOLLM2, upcycle

LENGTH = 512  # tokens of a sequence


def sequences(text: Path, tokenizer: object, count: int) -> Iterator[torch.Tensor]:
    """int64 [1, LENGTH], rows of the file one after another, `count` of them."""
    pending: list[int] = []
    for line in text.read_text().splitlines():
        row = json.loads(line)
        words = "\n".join(value for value in row.values() if isinstance(value, str))
        pending += tokenizer(words)["input_ids"]  # type: ignore[operator]
        while len(pending) >= LENGTH and count:
            yield torch.tensor([pending[:LENGTH]])
            pending, count = pending[LENGTH:], count - 1
        if not count:
            return
    raise SystemExit(f"{text} has too few tokens: {count} sequences of {LENGTH} short")


@torch.inference_mode()
def hidden_states(text: Path, tokens: int, layer: int) -> torch.Tensor:
    """float32 [tokens, hidden], ahead of the feed-forward network of `layer`."""
    found: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        upcycle(SMOLLM2, folder, experts=2)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        norm = model.model.layers[layer].post_attention_layernorm
        norm.register_forward_hook(lambda module, inputs, output: found.append(output[0].clone()))
        for ids in sequences(text, tokenizer, -(-tokens // LENGTH)):
            model(ids, logits_to_keep=1)
    return torch.cat(found)[:tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    hidden = hidden_states(given.text, given.tokens, given.layer)
    router = torch.randn(given.experts, hidden.shape[1], generator=torch.Generator().manual_seed(given.seed))
    ids = (hidden @ router.T).topk(given.top_k).indices.int()
    counts = ids.flatten().bincount(minlength=given.experts).sort(descending=True).values
    busiest = int(counts[0]) / ids.numel() * given.experts
    print(f"{len(ids)} tokens: {int((counts > 0).sum())} of {given.experts} experts chosen,", end=" ")
    print(f"the busiest {busiest:.1f} times the mean")
    save_file({"topk_ids": ids}, given.out)


if __name__ == "__main__":
    main()
