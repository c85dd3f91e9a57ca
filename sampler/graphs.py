"""Decoding steps as CUDA graphs, which vLLM captures for some numbers of sequences and replays.

Nothing in the experts waits for the device, so that a whole step is one graph; no part of the model is compiled. What
happens in Python does not happen in a replay: choices of experts are not kept, taps see nothing. Those who need that
have the steps run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def graph_settings(sizes: Sequence[int]) -> dict[str, Any]:
    """vLLM's settings for graphs of decoding steps of so many sequences; none for none."""
    if not sizes:
        return {"enforce_eager": True}
    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(sizes)}
    return {"enforce_eager": False, "compilation_config": compilation}


def token_places(rows: int) -> torch.Tensor | None:
    """int64 [rows], the cache slots of the tokens of the step under way; negative in rows that hold none. None where
    vLLM names no slots (while it measures memory).

    In a graph for more sequences than there are, the other rows hold what was in their memory before. Asked in steps
    that are launched, too, so that a capture is not the first to need a kernel.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    slots = get_forward_context().slot_mapping if is_forward_context_available() else {}
    places = next(iter(slots.values()), None) if isinstance(slots, dict) else None
    if places is not None and len(places) == rows:
        return places
    assert not torch.cuda.is_current_stream_capturing(), "vLLM does not say which rows of a graph hold tokens"
    return None


@contextmanager
def eagerly(runner: Any) -> Iterator[None]:
    """Inside, `runner` (vLLM's model runner) replays no graph."""
    from vllm.config import CUDAGraphMode

    dispatcher = runner.cudagraph_dispatcher
    mode, dispatcher.cudagraph_mode = dispatcher.cudagraph_mode, CUDAGraphMode.NONE
    try:
        yield
    finally:
        dispatcher.cudagraph_mode = mode
