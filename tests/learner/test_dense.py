from __future__ import annotations

import importlib.util

import pytest
import torch

from learner import dense
from learner.modules import RMSNorm


@pytest.mark.parametrize(
    ("device", "wanted", "said"),
    [
        ("cpu", True, "on cpu: torch (no GPU)"),
        ("cuda", True, "on cuda: torch (Transformer Engine is not installed)"),
        ("cuda", False, "on cuda: torch (learner.transformer_engine=false)"),
    ],
)
def test_without_transformer_engine_torch_is_taken_and_named(
    device: str, wanted: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is installed")
    chosen = dense.choose(torch.device(device), wanted)
    assert chosen.norm is RMSNorm and chosen.column_linear is None and chosen.row_linear is None
    assert said in capsys.readouterr().out
