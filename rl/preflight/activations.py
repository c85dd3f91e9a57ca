"""Bytes of what autograd saves in the learner's forward pass, and of what is made on the way.

Counted operation by operation from `learner.model`, `learner.modules`, `learner.moe` and `kernels.autograd`; the tests
compare with what autograd does save on a CPU. T tokens are packed without padding; attention alone sees them padded,
to at most twice as many, and that not in 16 bits on a GPU. The plan counts tokens without it.
"""

from __future__ import annotations

from kernels.experts import TORCH_TYPE
from kernels.precision_map import PrecisionMap
from kernels.spec import ExecutionSpec, RouterPosition
from learner.config import LearnerConfig
from learner.families.architecture import Architecture
from learner.layout import Layout
from sampler.config import SamplerConfig

_ROW_BLOCK = 128  # to which the Triton kernels pad the rows of an expert
_SIZE = {"float32": 4, "bfloat16": 2}


def layer_bytes_per_token(
    model: Architecture, spec: ExecutionSpec, dtype: str, *, gpu: bool, padding: float = 1.0, tensor: int = 1
) -> float:
    """Saved by one decoder layer under `spec`. padding: padded tokens a token, in attention that sees padding; tensor:
    ranks that share out heads, and, outside attention, tokens (sequence parallelism).
    """
    e, hidden = _SIZE[dtype], model.hidden
    packed = gpu and dtype == "bfloat16" and not spec.strict
    attention = _packed_attention(model, e) if packed else _padded_attention(model, dtype, padding, gpu)
    # Norms, the input of the query-key-value projection, and that of the router, widened.
    elsewhere = 2 * _norm(hidden, 1, e, gpu) + e * hidden + (0 if packed else 4 * hidden)
    return (attention + elsewhere + _moe_bytes(model, spec)) / tensor


def _packed_attention(model: Architecture, e: int) -> float:
    """Queries and keys before and after the norm of heads; the projection's output, for the values in it; the output of
    attention, which is the next projection's input, and its log-sum-exp.
    """
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = _norm(queries, model.heads, e, True) + _norm(keys, model.kv_heads, e, True)
    return (norms if model.qk_norm else 0) + e * (3 * queries + 3 * keys) + 4 * model.heads


def _padded_attention(model: Architecture, dtype: str, padding: float, gpu: bool) -> float:
    e, queries, keys = _SIZE[dtype], model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = (
        4 * e * model.head_dim  # sines and cosines, for queries and keys
        + padding * (e * (2 * queries + 2 * keys) + 4 * model.heads)  # q, k, v, output, and its log-sum-exp
        + e * queries  # output projection's input
    )
    if model.qk_norm:
        attention += _norm(queries, model.heads, e, gpu) + _norm(keys, model.kv_heads, e, gpu)
        if gpu or dtype == "float32":  # saved without a conversion, the keys are a view of all three
            attention += e * (queries + keys)
    return attention


def _norm(width: int, vectors: int, e: int, gpu: bool) -> int:
    """Of RMS norms of `vectors` vectors of `width` in all. On a GPU one kernel saves its input and the roots; on a CPU
    the norm is made of operations that save the input and the normalised values in FP32.
    """
    return e * width + 4 * vectors if gpu else 8 * width + 4 * vectors


def _moe_bytes(model: Architecture, spec: ExecutionSpec) -> int:
    """The router's choice and the experts, which save what they compute in the spec's operand type."""
    k, hidden, ffn = model.experts_per_token, model.hidden, model.expert_ffn
    router = (8 + 4) * k  # experts and coefficients of the slots
    router += 0 if model.renormalize_router else 4 * model.experts  # a softmax over all
    slot = 2 * ffn + ffn  # FC1 and SwiGLU
    if spec.router_position is RouterPosition.FC2_OUTPUT:
        slot += hidden  # FC2, for the gradient of the coefficient that multiplies it
    return router + TORCH_TYPE[spec.operand].itemsize * (hidden + k * slot)


def saved_bytes(
    model: Architecture, specs: PrecisionMap, config: LearnerConfig, layout: Layout, stage: int
) -> int:
    """Of the micro-batches that are in flight on a rank of pipeline stage `stage`, whose layers have these specs, under
    the 1F1B schedule: as many as stages follow, itself included (Narayanan et al. 2021, arXiv 2104.04473). With
    `recompute` each of them keeps its layers' inputs, and one layer at a time has the rest.
    """
    e, gpu = _SIZE[config.dtype], config.device.startswith("cuda")
    in_flight, per_token = layout.pipeline - stage, []
    for spec in specs.layers:
        layer = layer_bytes_per_token(model, spec, config.dtype, gpu=gpu, tensor=layout.tensor)
        per_token.append(layer + 8 * 3 * model.experts_per_token)  # the order of the slots, int64
    each = [own * config.micro_batch_tokens for own in per_token]
    if gpu:
        padding = _padding_rows(model, layout) * 2 * (3 * model.expert_ffn + model.hidden)
        each = [own + padding for own in each]
    last = _norm(model.hidden, 1, e, gpu) * config.micro_batch_tokens
    if config.recompute:
        inputs = len(each) * e * model.hidden * config.micro_batch_tokens // layout.tensor
        return int(in_flight * (inputs + last) + max(each))
    return int(in_flight * (sum(each) + last))


def backward_bytes(model: Architecture, config: LearnerConfig, layout: Layout, backend: str) -> int:
    """What the backward of one expert layer makes: of every slot the gradients of FC2's and SwiGLU's outputs and of
    FC1's, the inputs, and the gradient of the inputs, in bfloat16 (`kernels.triton.backward`).
    """
    rows = config.micro_batch_tokens * model.experts_per_token // layout.tensor
    if config.device.startswith("cuda"):
        rows += _padding_rows(model, layout)
    return 2 * rows * (3 * model.hidden + 3 * model.expert_ffn)


def forward_bytes(model: Architecture, config: SamplerConfig) -> int:
    """Of a sampler's largest forward pass, on one rank: one layer's intermediates, or the FP32 logits of all sequences
    with their log-softmax and a copy. Ranks that share experts out hold each slot's input and output as well.
    """
    e, tokens, tensor = _SIZE[config.dtype], config.max_num_batched_tokens, config.tensor_parallel
    slots = tokens * model.experts_per_token
    experts = 2 * slots * (3 * model.expert_ffn + (2 if tensor == 1 else 4) * model.hidden)
    attention = e * tokens * (2 * model.heads + 2 * model.kv_heads) * model.head_dim // tensor
    logits = 3 * 4 * config.max_num_seqs * model.vocab
    return 4 * e * tokens * model.hidden + max(experts, attention, logits)


def _padding_rows(model: Architecture, layout: Layout) -> int:
    """Most rows that padding every expert to whole blocks adds."""
    return model.experts // layout.expert * (_ROW_BLOCK - 1)
