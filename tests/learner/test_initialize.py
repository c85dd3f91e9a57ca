from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.folders import read_state
from learner.initialize import initialize
from tests.learner.conftest import MODELS


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_seed_decides_the_weights(tmp_path: Path, family: str) -> None:
    before = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        initialize(tmp_path / name, MODELS[family], seed)
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (read_state(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert {tensor.dtype for tensor in a.values()} == {torch.float32}
    embedding = a["model.embed_tokens.weight"]
    assert not torch.equal(embedding, c["model.embed_tokens.weight"])
    assert embedding.std().item() == pytest.approx(0.15, rel=0.1)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a").config.model_type == family


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "knows no model_type None"),
        ({"model_type": "mixtrall"}, "knows no model_type 'mixtrall'"),
        ({"model_type": "llama"}, "'llama' is not supported"),
        ({**MODELS["mixtral"], "sliding_window": 8}, "sliding_window=8"),
    ],
)
def test_a_model_that_the_learner_cannot_hold_is_refused(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        initialize(tmp_path / "model", config, 0)
    assert not (tmp_path / "model").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        initialize(tmp_path, MODELS["mixtral"], 0)
