"""miniTE as a vLLM quantisation method: expert layers under execution specs, everything else left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from kernels import backends
from kernels.experts import ExpertWeights, StoredLayout
from kernels.guard import NonFiniteGuard
from kernels.precision_map import PrecisionMap
from kernels.slots import slot_spec
from kernels.spec import ExecutionSpec
from sampler.expert_parallel import shared_experts
from sampler.graphs import token_places
from sampler.loading import IncomingExperts, shape_only

METHOD = "minite"

# Input [T, H], experts [T, k], coefficients [T, k] and output [T, H] of a layer's experts -> another output, or None
Tap = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


def quantization_config(precision_map: PrecisionMap, expert_layout: str = "auto") -> dict[str, Any]:
    """`precision_map` as the `quantization_config` of a model configuration. expert_layout: as in `SamplerConfig`."""
    return {"quant_method": METHOD, "expert_layout": expert_layout, **precision_map.to_dict()}


class MiniteConfig(QuantizationConfig):
    """Gives the experts of each layer the spec that the precision map names."""

    def __init__(self, precision_map: PrecisionMap, expert_layout: str = "auto") -> None:
        super().__init__()
        self.precision_map = precision_map
        self.expert_layout = expert_layout

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MiniteConfig:
        """The inverse of `quantization_config`. Raises ValueError when it holds anything else."""
        own = ("quant_method", "expert_layout")
        precision_map = PrecisionMap.from_dict({k: v for k, v in config.items() if k not in own})
        return cls(precision_map, config["expert_layout"])

    def stored_layout(self, device: torch.device) -> StoredLayout:
        """Of all layers that can stand in it: as configured, or tiles if a layer's back end on `device` reads these."""
        if self.expert_layout != "auto":
            return StoredLayout(self.expert_layout)
        read = {backends.choose(spec, device).layout for spec in set(self.precision_map.layers)}
        return StoredLayout.TILES if StoredLayout.TILES in read else StoredLayout.ROWS

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            index = extract_layer_index(prefix)
            spec = self.precision_map.spec_for(index)
            return ExpertMethod(layer.moe_config, spec, index, self.stored_layout)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class ExpertMethod(FusedMoEMethodBase):
    """The experts of layer number `index`, computed under `spec` by the back end for their device.

    shared: this rank's experts, where several ranks share them out; `weights` holds those alone, and they compute under
    `computed_spec`, which is `spec` where the layer is whole. The layer's parameters are the tensors of `weights`, the
    same storage. stored_layout: device -> their order. guard: to be checked before anything that `apply` computed is
    used. chosen: integer [T, k], the experts of the last `apply`, by descending coefficient. tap: sees every `apply`,
    and may replace its output; for a diagnosis. A step that is replayed as a CUDA graph does not call `apply`.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        spec: ExecutionSpec,
        index: int,
        stored_layout: Callable[[torch.device], StoredLayout],
    ) -> None:
        super().__init__(moe)
        parallel = moe.moe_parallel_config
        self.shared = shared_experts(moe.num_experts, parallel.ep_rank, parallel.ep_size)
        moe.skip_final_all_reduce = True  # `apply` gives the whole layer's output on every rank
        self._run_under(spec)
        self.stored_layout = stored_layout
        first = self.shared.own.start if self.shared else 0
        self.guard = NonFiniteGuard(index, moe.num_local_experts, first)
        self.weights: ExpertWeights | None = None  # once the checkpoint is loaded
        self.calls = 0  # of apply
        self.chosen = torch.empty(0, moe.experts_per_token, dtype=torch.int64)
        self.tap: Tap | None = None
        self._backend: tuple[ExecutionSpec, backends.ExpertKernels] | None = None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """What vLLM's weight loader fills from the checkpoint, expert by expert; quantised when all have come."""
        ffn = intermediate_size_per_partition
        shapes = {
            "w13_weight": (num_experts, 2 * ffn, hidden_size),
            "w2_weight": (num_experts, hidden_size, ffn),
        }
        made = {
            name: nn.Parameter(shape_only(shape, params_dtype), requires_grad=False)
            for name, shape in shapes.items()
        }
        load = extra_weight_attrs.pop("weight_loader")
        take = partial(self._take, layer.layer_name)
        own = self.shared.own if self.shared else None
        self._incoming = IncomingExperts(layer.layer_name, made, load, take, own)
        for name, weight in made.items():
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, {**extra_weight_attrs, "weight_loader": self._incoming})

    def _take(self, layer: str, loaded: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for weights that are not finite, or that the spec cannot hold."""
        if not all(weight.isfinite().all() for weight in loaded.values()):
            raise ValueError(f"{layer}: the checkpoint holds experts that are not finite")
        self.weights = self._quantized(loaded["w13_weight"], loaded["w2_weight"], self.spec)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Put the weights under the spec in the place of those loaded. Raises ValueError for missing experts."""
        self._incoming.close()
        assert self.weights is not None
        del layer.w13_weight, layer.w2_weight
        for part, tensor in self.weights.tensors().items():
            layer.register_parameter(part.replace(".", "_"), nn.Parameter(tensor, requires_grad=False))

    def weights_changed(self) -> None:
        """To be called after writing into `weights`: derives anew, into the same memory, so that whoever has its
        addresses (a CUDA graph) computes with the new weights.
        """
        if self._prepared is None:
            return
        held, fresh = self._prepared.derived(), self._prepare().derived()
        assert held.keys() == fresh.keys()
        for part, tensor in held.items():
            tensor.copy_(fresh[part])

    def forget_derived(self) -> None:
        """Drop what is derived from `weights`, until it is needed again: then it is made anew, in other memory."""
        self._prepared = None

    def prepared(self) -> Any:
        """What `apply` computes with, in the back end's form: made from `weights` when it is first asked for."""
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared

    def _prepare(self) -> Any:
        assert self.weights is not None, "the checkpoint is not loaded"
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # what is made in that mode cannot be written later
            return self._kernels().prepare(self.weights, self.computed_spec, compact=True)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: nn.Module | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, H], float32 [T, k], integer [T, k] -> [T, H] in x.dtype."""
        self.calls += 1
        kernels = self._kernels()
        places = token_places(len(x)) if x.is_cuda else None
        ids, coefficients = kernels.sort_slots(topk_ids, topk_weights, places)
        self.chosen = ids
        output = self.compute(x, ids, coefficients)
        replaced = None if self.tap is None else self.tap(x, ids, coefficients, output)
        return output if replaced is None else replaced

    def compute(self, x: torch.Tensor, ids: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """As `apply`, of slots that are sorted already."""
        kernels, computed = self._kernels(), self.computed_spec

        def own(rows: torch.Tensor, own_ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            return kernels.forward(rows, own_ids, factors, self.prepared(), computed, self.guard)

        if self.shared is None:
            return own(x, ids, coefficients).to(x.dtype)
        return self.shared.layer(x, ids, coefficients, own, kernels, self.spec).to(x.dtype)

    def hold(self, w13: torch.Tensor, w2: torch.Tensor, spec: ExecutionSpec) -> None:
        """Compute from here on under `spec`, with these master weights ([E, 2F, H] and [E, H, F])."""
        self.weights = self._quantized(w13, w2, spec)
        self._run_under(spec)

    def hold_as_they_are(self, spec: ExecutionSpec) -> bool:
        """Compute from here on under `spec` with the stored weights, where it stores them alike; else return False."""
        if (spec.weight, spec.operand) != (self.spec.weight, self.spec.operand):
            return False
        assert self.weights is not None, "the checkpoint is not loaded"
        self.weights = ExpertWeights(self.weights.stored, spec)
        self._run_under(spec)
        return True

    def _quantized(self, w13: torch.Tensor, w2: torch.Tensor, spec: ExecutionSpec) -> ExpertWeights:
        quantized = backends.choose(spec, w13.device).quantize(w13, w2, spec)
        return quantized.in_layout(self.stored_layout(w13.device))

    @property
    def backend(self) -> str:
        """The name of what computes `apply`, once the weights are loaded."""
        return self._kernels().name

    def _run_under(self, spec: ExecutionSpec) -> None:
        self.spec = spec
        self.computed_spec = spec if self.shared is None else slot_spec(spec)
        self._prepared: Any = None

    def _kernels(self) -> backends.ExpertKernels:
        # Kept: `choose` hashes the spec, which takes longer than a small launch.
        if self._backend is None or self._backend[0] is not self.computed_spec:
            assert self.weights is not None, "the checkpoint is not loaded"
            device = next(iter(self.weights.tensors().values())).device
            self._backend = self.computed_spec, backends.choose(self.computed_spec, device)
        return self._backend[1]

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None


def expert_methods(model: nn.Module) -> dict[int, ExpertMethod]:
    """Layer number -> what computes its experts."""
    methods: dict[int, ExpertMethod] = {}
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            assert isinstance(module.quant_method, ExpertMethod)
            methods[extract_layer_index(module.layer_name)] = module.quant_method
    return methods
