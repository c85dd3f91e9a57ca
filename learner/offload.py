"""Handing GPU memory to others between steps: a model, its gradients and its optimiser wait in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from learner.trainable import Trainable

_HOST = torch.device("cpu")


def offload(trainable: Trainable) -> int:
    """Move everything that `trainable` keeps between two steps to the host, and give the memory back to the GPU. Bytes
    that torch still holds there.

    Values stay as they are, bit for bit. What is derived from the weights is dropped, and made anew when it is needed.
    """
    _move(trainable, _HOST)
    for experts in trainable.model.experts():
        experts.forget_quantized()
    if trainable.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(trainable.device)


def onload(trainable: Trainable) -> None:
    """The inverse of `offload`."""
    _move(trainable, trainable.device)


def _move(trainable: Trainable, device: torch.device) -> None:
    with torch.no_grad():
        for tensor in _parameters(trainable):
            tensor.data = _moved(tensor.data, device)
        for buffer in trainable.model.buffers():
            buffer.data = _moved(buffer.data, device)
        # A model that never took a step has no optimiser yet.
        if "optimizer" in vars(trainable):
            for state in trainable.optimizer.adamw.state.values():
                for part, value in state.items():
                    state[part] = _moved(value, device)
    if trainable.device.type == "cuda":
        torch.cuda.synchronize(trainable.device)


def _parameters(trainable: Trainable) -> Iterator[torch.Tensor]:
    """Parameters, and the masters that are not parameters, each once."""
    seen: set[int] = set()
    masters = trainable.optimizer.masters.values() if "optimizer" in vars(trainable) else ()
    for tensor in (*trainable.model.parameters(), *masters):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensor.grad = None  # there are none between two steps
            yield tensor


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device`, in memory of its own; on the host in pinned memory, which a GPU copies to and from faster."""
    if device == _HOST and tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True, copy=True)
