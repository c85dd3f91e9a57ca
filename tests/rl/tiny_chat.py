"""A tokenizer of bytes with a chat template, a tiny model that goes with it, and small benchmark files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SHAPE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
# Questions of our own in the form of the benchmarks' files.
ROWS: dict[str, list[dict[str, Any]]] = {
    "aime24.jsonl": [
        {"id": "a1", "problem": "Find $5^2$.", "answer": "025"},
        {"id": "a2", "problem": "Find $2^7$.", "answer": "128"},
    ],
    "aime25.jsonl": [{"id": "b1", "problem": "How many degrees has a circle?", "answer": r"360^\circ"}],
    "math500.jsonl": [
        {"id": "m1", "problem": "Halve 1.", "answer": r"\frac{1}{2}"},
        {"id": "m2", "problem": "Give the pair (0, pi).", "answer": r"\left( 0, \pi \right)"},
        {"id": "m3", "problem": "Factor $x^2-1$.", "answer": "(x-1)(x+1)"},
    ],
    "gsm8k_test.jsonl": [
        {"id": "g1", "problem": "Tom has 70 bags of 1000 nuts. How many nuts?", "answer": "70,000"},
        {"id": "g2", "problem": "Ann has 3 pens and loses 5 debts of a pen. How many?", "answer": "-2"},
    ],
    "ifeval.jsonl": [
        {
            "key": 1,
            "prompt": "Write about rain without commas, in lower case.",
            "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
            "kwargs": [{}, {}],
        },
        {
            "key": 2,
            "prompt": "Write at least 5 words.",
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"relation": "at least", "num_words": 5}],
        },
    ],
}


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """<pad> (0), <eos> (1), then the 256 bytes: every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast


def make_model(folder: Path, **changes: Any) -> Path:
    """A model folder with random weights."""
    from learner.initialize import initialize

    tokenizer = byte_tokenizer()
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "vocab_size": len(tokenizer)}
    initialize(folder, {**SHAPE, **special, **changes}, 0)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(folder: Path) -> Path:
    """A folder of benchmark files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_run(folder: Path, base: Path, *overrides: str) -> Any:
    """A run folder with the checkpoints of two supervised steps from the model `base`; returns the learner."""
    import torch

    from kernels.catalogue import named_spec
    from kernels.precision_map import PrecisionMap
    from learner.config import LearnerConfig
    from learner.policy import Policy
    from rl.checkpoint import CheckpointStore
    from rl.compose import load_config, to_yaml

    model = ["model=folder", f"model.path={base}", "model.warm_start.steps=0"]
    data = ["data=file", "data.path=gone.jsonl"]  # what the run was trained on is not needed
    places = [f"run.cache_dir={folder.parent / 'cache'}", "sampler.kv_cache_gib=0.25"]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        to_yaml(load_config(["+recipe=tiny", *model, *data, *places, *overrides]))
    )
    policy = Policy(base, PrecisionMap.resolve(2, named_spec("minite")), LearnerConfig(lr=1e-2), 0)
    store = CheckpointStore(folder / "checkpoints", keep=5)
    tokens = torch.arange(40).reshape(2, 20) + 2
    lengths, mask = torch.tensor([20, 20]), torch.ones(2, 20, dtype=torch.bool)
    mask[:, 0] = False
    for step in (1, 2):
        policy.supervised_step(tokens, lengths, mask)
        store.save(step, lambda path: policy.checkpoint(path / "learner"), {"iteration": step})
    return policy
