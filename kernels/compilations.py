"""Which Triton kernels `kernels.compile_check` compiles: with which types and constants, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TARGETS = (90, 100, 103)
HIDDEN, FFN, TOP_K, EXPERTS, VOCAB = 2048, 768, 8, 128, 151936  # Qwen3-30B-A3B

_WGMMA = r"wgmma\.mma_async"
_FP4 = r"tcgen05\.mma\S*kind::mxf4nvf4\S*block_scale"
_F16 = r"tcgen05\.mma\S*kind::f16"


@dataclass(frozen=True)
class Compilation:
    """One kernel for one target: argument types and constants, as `triton.compile` takes them."""

    name: str
    target: int
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    needed: str | None = None  # instruction that the PTX must hold
    exact: bool = False  # whether its arithmetic must stand as it is written
    in_registers: bool = False  # whether Hopper's tensor core must read an operand from registers


def compilations() -> Iterator[Compilation]:
    for target in TARGETS:
        yield from _products(target)
        yield from _quantisers(target)
        yield from _outside_experts(target)


def _products(target: int) -> Iterator[Compilation]:
    from kernels.triton.backward import _weight_gradient
    from kernels.triton.grouped_gemm import grouped_product
    from kernels.triton.tuning import EMULATED, NATIVE, GroupedTile

    pointers = {
        "ga_ptr": "*fp32",
        "gb_ptr": "*fp32",
        "tile_expert_ptr": "*i32",
        "starts_ptr": "*i32",
        "E": "i32",
    }

    def grouped(tile: GroupedTile, native: bool, features: int, width: int) -> Compilation:
        element, depth = ("u8", tile.depth // 2) if native else ("fp16", tile.depth)
        types = pointers | {
            "a_desc": f"tensordesc<{element}[{tile.rows}, {depth}]>",
            "w_desc": f"tensordesc<{element}[{tile.columns}, {depth}]>",
            "out_desc": f"tensordesc<bf16[{tile.rows}, {tile.columns // tile.parts}]>",
        }
        constants: dict[str, Any] = {"a_scales_desc": None, "w_scales_desc": None}
        if native:
            for name, rows in (("a_scales_desc", tile.rows), ("w_scales_desc", tile.columns)):
                types[name] = f"tensordesc<fp8e4nv[1, {rows // 128}, {tile.depth // 64}, 2, 256]>"
            constants = {}
        constants |= {"N": features, "K": width, "BM": tile.rows, "BN": tile.columns, "BK": tile.depth}
        constants |= {"TILE_ROWS": 128, "PROGRAMS": 132, "STAGES": tile.stages, "PARTS": tile.parts}
        needed = _FP4 if native else _WGMMA if target < 100 else _F16
        size = f"{tile.rows}x{tile.columns}x{tile.depth}x{tile.stages}"
        name = f"grouped product, {'native' if native else 'emulated'}, K={width}, {size}"
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return Compilation(
            name, target, grouped_product, types, constants | {"NATIVE": native}, options, needed
        )

    for features, width in ((2 * FFN, HIDDEN), (HIDDEN, FFN)):
        if target >= 100:
            for tile in NATIVE:
                yield grouped(tile, True, features, width)
        else:
            for tile in EMULATED:
                yield grouped(tile, False, features, width)
    if target >= 100:
        return
    yield from _packed_products(target, pointers)
    types = {
        "d_y_desc": "tensordesc<bf16[64, 128]>",
        "x_desc": "tensordesc<bf16[64, 256]>",
        "gradient": "*fp32",
        "starts": "*i32",
        "outer": "*i32",
    }
    constants = {"N": HIDDEN, "K": FFN, "BN": 128, "BK": 256, "ROWS": 64, "STAGES": 4}
    constants |= {"SCALED": False, "BF16": False}
    yield Compilation("weight gradient", target, _weight_gradient, types, constants, {"num_warps": 8}, _WGMMA)


def _packed_products(target: int, pointers: dict[str, str]) -> Iterator[Compilation]:
    """Those that read 4 bits, in every tile. pointers: of what they share with the others."""
    from kernels.triton.decode_gemm import decode_product
    from kernels.triton.packed_gemm import packed_product
    from kernels.triton.tuning import FEW_ROWS, PACKED

    types = pointers | {"words_ptr": "*i32", "scales_ptr": "*fp8e4nv"}
    few = types | {name: "*i32" for name in ("counts_ptr", "after_ptr", "finished_ptr")}
    few |= {"x_ptr": "*fp16", "out_ptr": "*bf16"}
    del few["E"]
    for name, features, width in (("FC1", 2 * FFN, HIDDEN), ("FC2", HIDDEN, FFN)):
        for rows, tile in (FEW_ROWS | PACKED).items():
            constants = {"N": features, "K": width, "BM": rows, "STAGES": tile.stages}
            options = {"num_warps": tile.warps, "maxnreg": tile.registers}
            title = f"product of 4-bit weights, {name}, {rows} rows"
            if rows in FEW_ROWS:
                constants |= {"AFTER": name == "FC2", "REPORT": name == "FC1"}
                yield Compilation(
                    title, target, decode_product, few, constants, options, _WGMMA, in_registers=True
                )
                continue
            descriptors = {
                "x_desc": f"tensordesc<fp16[{rows}, 64]>",
                "out_desc": "tensordesc<bf16[64, 128]>",
            }
            constants["PROGRAMS"] = 132 * tile.programs_per_processor
            options["num_stages"] = tile.stages
            yield Compilation(
                title,
                target,
                packed_product,
                types | descriptors,
                constants,
                options,
                _WGMMA,
                in_registers=True,
            )


def _quantisers(target: int) -> Iterator[Compilation]:
    from kernels import packed_rows as records
    from kernels.triton import combine, packed_rows, quantize, swiglu

    rows, strict = "i32", {"num_warps": 1, "enable_fp_fusion": False}
    pointers = {
        "x": "*i32",
        "codes": "*i32",
        "decoded": "*i32",
        "scales": "*u8",
        "outer": "*fp32",
        "bad": "*u8",
    }
    constants: dict[str, Any] = {"BLOCKS": HIDDEN // 16, "PADDED": HIDDEN // 16, "ROWS": 1, "BF16": True}
    constants |= {"SHARED": False, "PACKED": True, "DECODED": target < 100}
    forms = {"quantise rows": (0, 0), "permute and quantise": (TOP_K, 0)}
    if target < 100:
        forms["permute and quantise, few"] = (TOP_K, 16)
    for name, (top_k, align) in forms.items():
        types = pointers | {"amax": "*u8", "ids": "*i64", "row_of_slot": "*i32"}
        types |= {"tile_expert": "*i32", "bad_counts": "*i64"}
        types |= {"rows": rows, "rows_of_group": rows}
        own = constants | {"TOP_K": top_k, "ALIGN": align, "PACKED": not align}
        own |= {"COPIES": 2 if align else max(1, top_k), "EXPERTS": EXPERTS, "SLOTS": 256 if align else 0}
        yield Compilation(name, target, quantize._quantize, types, own, strict, None, True)
    pointers = {
        "fc1": "*i32",
        "table": "*fp32",
        "codes": "*i32",
        "decoded": "*i32",
        "act": "*i32",
        "scales": "*u8",
    }
    pointers |= {"outer": "*fp32", "bad": "*u8", "permutation": "*i32", "starts": "*i32", "count": rows}
    pointers |= {"tile_expert": "*i32", "bad_counts": "*i64", "after": "*i32", "finished": "*i32"}
    constants = {"EXPERTS": EXPERTS, "BLOCKS": FFN // 16, "PADDED": 64, "KEEP_ACT": False}
    constants |= {"QUANTIZE": True, "PACKED": target >= 100, "DECODED": target < 100}
    aligns = {"SwiGLU and quantise": 0} | ({"SwiGLU and quantise, few": 16} if target < 100 else {})
    for name, align in aligns.items():
        own = constants | {"ALIGN": align, "ROWS": 1 if align else 2}
        own |= {"AFTER": 2 * FFN // 128 if align else 0, "REPORT": align > 0}
        yield Compilation(name, target, swiglu._swiglu_quantize, pointers, own, strict, None, True)
    types = {
        "fc2": "*i32",
        "row_of_slot": "*i32",
        "coefficients": "*fp32",
        "output": "*i32",
        "after": "*i32",
    }
    constants = {"WIDTH": HIDDEN // 2, "COLUMNS": 256, "TOP_K": TOP_K, "ALIGN": 16}
    for name, parts in (("combine", 0), *([("combine, few", HIDDEN // 128)] if target < 100 else [])):
        own = constants | {"OVERLAP": parts > 0, "AFTER": parts}
        yield Compilation(name, target, combine._combine, types, own, strict, None, True)
    if target < 100:
        types = {"records": "*u8", "words": "*i32", "index": "*i64", "slot_of_row": "*i32", "starts": "*i32"}
        types |= {
            "tile_expert": "*i32",
            "decoded": "*i32",
            "outer": "*fp32",
            "bad": "*u8",
            "bad_counts": "*i64",
        }
        constants = {
            "EXPERTS": EXPERTS,
            "BLOCKS": HIDDEN // 16,
            "PADDED": HIDDEN // 16,
            "ROWS": 1,
            "TOP_K": 1,
        }
        constants |= {"RECORD": records.record_size(HIDDEN), "OUTER": HIDDEN // 2, "ALIGN": 0}
        constants |= {"SCALES": records.scales_at(HIDDEN), "FLAG": records.flag_at(HIDDEN)}
        kernel = packed_rows._permute_packed
        yield Compilation(
            "packed rows, permuted", target, kernel, types | {"rows": rows}, constants, strict, None, True
        )
    yield from _per_tensor(target)


def _per_tensor(target: int) -> Iterator[Compilation]:
    from kernels.triton.per_tensor import _ALONG_COLUMN, _ALONG_ROW, _quantize_tile

    types = {"x": "*bf16", "tile_expert": "*i32", "amax": "*i32", "codes": "*u8", "scales": "*u8"}
    types |= {"elements": "*fp16", "rotation": "*fp32", "features": "i32", "width": "i32", "seed": "i64"}
    for name, (rows, columns) in (("along rows", _ALONG_ROW), ("along columns", _ALONG_COLUMN)):
        column = name == "along columns"
        constants = {"ROWS": rows, "COLUMNS": columns, "ALIGN": 128, "ALONG_COLUMN": column}
        constants |= {"ROTATE": column, "MEASURE": False, "STOCHASTIC": column, "PACKED": False}
        options = {"num_warps": 4, "enable_fp_fusion": False}
        yield Compilation(
            f"per tensor, {name}", target, _quantize_tile, types, constants, options, None, True
        )


def _outside_experts(target: int) -> Iterator[Compilation]:
    from kernels.triton.outside import choice, rms_norm, rotary, token_scores, widen

    types = {
        "x": "*bf16",
        "cosines": "*bf16",
        "sines": "*bf16",
        "out": "*bf16",
        "count": "i32",
        "stride": "i32",
    }
    for back in (False, True):
        constants: dict[str, Any] = {"HEADS": 32, "HALF": 64, "VECTORS": 32, "BACK": back}
        options = {"enable_fp_fusion": False}
        name = f"rotary positions{', gradient' if back else ''}"
        yield Compilation(name, target, rotary._rotate, types, constants, options, None, True)
    constants = {"WIDTH": HIDDEN, "PADDED": HIDDEN, "ROWS": 2}
    types = {
        "x": "*bf16",
        "weight": "*bf16",
        "normed": "*bf16",
        "inverse": "*fp32",
        "rows": "i32",
        "eps": "fp32",
    }
    yield Compilation("RMS norm", target, rms_norm._forward, types, constants, {})
    types = {"d_normed": "*bf16", "x": "*bf16", "weight": "*bf16", "inverse": "*fp32", "d_x": "*bf16"}
    types |= {"sums": "*fp32", "rows": "i32", "blocks": "i32"}
    yield Compilation("RMS norm, gradient", target, rms_norm._backward, types, constants, {})
    types = {"values": "*fp32", "ids": "*i64", "dense": "*fp32", "tokens": "i32"}
    constants = {"EXPERTS": EXPERTS, "PADDED": EXPERTS, "TOP_K": TOP_K, "TOKENS": 32}
    yield Compilation("gradient of a choice", target, choice._to_experts, types, constants, {})
    types = {"x": "*bf16", "into": "*fp32", "count": "i32"}
    constants = {"ADD": True, "ELEMENTS": 4096}
    yield Compilation("BF16 added to FP32", target, widen._widen, types, constants, {})
    types = {
        "logits": "*fp32",
        "ids": "*i64",
        "entropy": "*fp32",
        "normalizer": "*fp32",
        "temperature": "fp32",
    }
    constants = {"VOCAB": VOCAB, "UNIT": False, "BLOCK": 4096}
    own = types | {"logp": "*fp32"}
    yield Compilation("scores of tokens", target, token_scores._statistics, own, constants, {"num_warps": 8})
    types |= {"d_logp": "*fp32", "d_entropy": "*fp32", "terms": "*bf16", "rows": "i32"}
    constants = constants | {"ENTROPY": True, "BLOCK": 2048}
    yield Compilation("scores of tokens, gradient", target, token_scores._gradient, types, constants, {})
    yield from _attention(target)


def _attention(target: int) -> Iterator[Compilation]:
    from kernels.triton.outside.attention import _forward
    from kernels.triton.outside.attention_blocks import Tile, tiling
    from kernels.triton.outside.attention_gradient import _key_gradient, _query_gradient

    heads, groups, width = 32, 4, 128
    tiles = tiling(width)
    fixed = {"HEADS": heads, "GROUPS": groups, "D": width}

    def rows(count: int) -> str:
        return f"tensordesc<bf16[{count}, {width}]>"

    def compiled(name: str, kernel: Any, tile: Tile, types: dict[str, str], **more: int) -> Compilation:
        operands = {"q_desc": rows(tile.queries), "k_desc": rows(tile.keys), "v_desc": rows(tile.keys)}
        types = operands | {"table": "*i32"} | types
        constants = fixed | {"BM": tile.queries, "BN": tile.keys, "STAGES": tile.stages} | more
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        needed = _WGMMA if target < 100 else _F16
        size = f"{tile.queries}x{tile.keys}x{tile.stages}"
        return Compilation(f"attention{name}, {size}", target, kernel, types, constants, options, needed)

    types = {"out": "*bf16", "lse": "*fp32", "tokens": "i32", "scale2": "fp32"}
    yield compiled("", _forward, tiles.forward, types)
    of_block = rows(tiles.d_query.queries)
    types = {
        "out_desc": of_block,
        "d_out_desc": of_block,
        "lse": "*fp32",
        "exponents": "*fp32",
        "deltas": "*fp32",
    }
    types |= {"d_q": "*bf16", "tokens": "i32", "room": "i32", "scale": "fp32"}
    yield compiled(", gradient of queries", _query_gradient, tiles.d_query, types)
    types = {"d_out_desc": rows(tiles.d_key.queries), "exponents": "*fp32", "deltas": "*fp32", "room": "i32"}
    types |= {"d_k": "*bf16", "d_v": "*bf16", "scale": "fp32"}
    pad = tiles.d_query.queries
    yield compiled(", gradient of keys", _key_gradient, tiles.d_key, types, PAD=pad)
