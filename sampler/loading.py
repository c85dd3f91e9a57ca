"""A layer's experts on their way from vLLM's loader: held in the model's type only while the layer is incomplete.

vLLM makes a layer's parameters when it makes the model, and quantises after it has loaded everything: for a while the
whole model would lie on the GPU in the type of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kernels.shard import Shard

_MATRICES = ("w1", "w2", "w3")  # vLLM's names of an expert's gate, down and up matrix


class IncomingExperts:
    """The loader of a layer's parameters, in the place of vLLM's own, `load`.

    parameters: of shapes [E, ...]. own: which of the checkpoint's experts these are; None: all of them. Others are
    passed by. complete: called once, when every matrix of every expert has come; what it does not copy is lost then.
    Between the first one and that, the parameters hold memory; before and after, a shape only.
    """

    def __init__(
        self,
        layer: str,
        parameters: Mapping[str, nn.Parameter],
        load: Callable[..., Any],
        complete: Callable[[Mapping[str, torch.Tensor]], None],
        own: Shard | None = None,
    ) -> None:
        self._layer, self._parameters = layer, parameters
        experts = len(next(iter(parameters.values())))
        own = own or Shard(0, 0, experts, experts)
        self._own, self._all = range(own.start, own.start + own.length), range(own.size)
        self._load: Callable[..., Any] | None = load
        self._complete: Callable[[Mapping[str, torch.Tensor]], None] | None = complete
        self._missing = {(expert, name) for expert in self._own for name in _MATRICES}
        self._holds = False

    def __call__(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        """As vLLM's. Raises ValueError for a matrix that came before."""
        if expert_id in self._all and expert_id not in self._own:
            return False if return_success else None
        if (expert_id, shard_id) not in self._missing:
            raise ValueError(
                f"{self._layer}: {shard_id} of expert {expert_id} came twice, or is one too many"
            )
        assert self._load is not None and self._complete is not None
        if not self._holds:
            for own in self._parameters.values():
                own.data = torch.empty(own.shape, dtype=own.dtype, device=own.device)
            self._holds = True
        result = self._load(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        self._missing.discard((expert_id, shard_id))
        if not self._missing:
            self._complete({name: own.data for name, own in self._parameters.items()})
            for own in self._parameters.values():
                own.data = shape_only(own.shape, own.dtype, own.device)
        return result

    def close(self) -> None:
        """Nothing comes any more. Raises ValueError, naming the first of them, when matrices did not come."""
        if self._missing:
            expert, name = min(self._missing)
            count = len(self._missing)
            raise ValueError(
                f"{self._layer}: the checkpoint lacks experts: {name} of expert {expert}, of {count} matrices"
            )
        # vLLM keeps what it knows of a parameter, this loader too, for as long as the layer lives: which it would then
        # do for ever.
        self._parameters, self._load, self._complete = {}, None, None


def shape_only(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: Any = None) -> torch.Tensor:
    """A tensor of that shape over the memory of one element."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)
