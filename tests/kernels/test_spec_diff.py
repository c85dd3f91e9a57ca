"""What single fields move: known differences, hand-made operands, the command line."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kernels.catalogue import CATALOGUE, named_spec
from kernels.labels import spec_from_label
from kernels.layer_input import LayerInput, LayerShape, load_layer, synthetic_layer
from kernels.quantize import quantize_weight
from kernels.spec import ExecutionSpec, spec_diff
from kernels.spec_diff.__main__ import format_changes, main, measure_changes
from kernels.spec_diff.changes import single_changes
from kernels.spec_diff.field_sizes import FIELD_SIZES, measure_sizes
from kernels.spec_diff.heatmap import draw, pairwise_l2, percent
from kernels.spec_diff.sensitivity import (
    Move,
    Operand,
    activation_operand,
    compare_operands,
    measure,
    relative_l2,
    run_layer,
    weight_operand,
)

SMALL = LayerShape(tokens=48, hidden=128, ffn=64, experts=4, top_k=2)


@pytest.fixture(scope="module")
def data() -> LayerInput:
    return synthetic_layer(SMALL, "gaussian", 3)


def moved(data: LayerInput, left: str, right: str) -> Move:
    return measure(data, *(run_layer(data, spec_from_label(label)) for label in (left, right)))


def only(move: Move, operand: str) -> None:
    """No operand but this one differs."""
    for name, one in move.operands.items():
        if name != operand:
            assert (one.memory, one.scales or 0, one.codes or 0, one.values, one.relative_l2) == (0,) * 5, (
                name
            )


@pytest.mark.parametrize("name", ["minite", "te_per_tensor_2d", "mxfp6_e3m2", "fp8_per_token", "bf16"])
def test_a_spec_against_itself_moves_nothing(data: LayerInput, name: str) -> None:
    move = moved(data, name, name)
    only(move, "")
    assert (move.output.relative_l2, move.output.differing) == (0, 0)


def test_the_order_of_scales_in_memory_moves_bytes_and_no_value(data: LayerInput) -> None:
    move = moved(data, "minite", "minite[weight.scale_layout=swizzled_128x4]")
    for name in ("w13", "w2"):
        one = move.operands[name]
        assert one.memory > 0
        assert (one.scales, one.codes, one.values) == (0, 0, 0)
    assert move.operands["x"].memory == 0
    assert (move.output.relative_l2, move.output.differing) == (0, 0)


def test_the_stored_outer_quantity_moves_four_bytes_a_row_at_most(data: LayerInput) -> None:
    move = moved(data, "minite", "minite[activation.outer_stored=A]")
    stored_bytes = SMALL.hidden // 2 + SMALL.hidden // 16 + 4
    assert 0 < move.operands["x"].memory <= 4 / stored_bytes
    assert move.operands["x"].values == 0


def test_the_epilogue_moves_no_operand_and_single_roundings_of_the_output(data: LayerInput) -> None:
    move = moved(data, "flashinfer_exact", "flashinfer_exact[output=fp32,fc2_output=fp32,fc1_output=fp32]")
    left = "flashinfer_exact[output=fp32,fc2_output=fp32,fc1_output=fp32]"
    move = moved(data, left, left[:-1] + ",epilogue=(acc*gx)*gw]")
    only(move, "")
    assert 0 < move.output.relative_l2 < 0.2  # FP32 roundings of FC1, handed on through FC2's quantiser


def test_a_weight_field_moves_the_weights_alone(data: LayerInput) -> None:
    move = moved(data, "minite", "minite_expert")
    for name in ("x", "fc2_input"):
        assert move.operands[name].memory == 0
    for name in ("w13", "w2"):
        assert move.operands[name].values > 0.5
        assert 0.05 < move.operands[name].relative_l2 < 0.12
    assert move.output.relative_l2 > 0.05


def test_router_position_moves_the_input_of_fc2_alone(data: LayerInput) -> None:
    move = moved(data, "minite", "minite[router_position=swiglu_output,router_product=bf16]")
    only(move, "fc2_input")
    assert move.operands["fc2_input"].values > 0.5  # p is in it


def test_a_rule_for_zero_blocks_moves_as_many_scale_bytes_as_there_are_zero_blocks(data: LayerInput) -> None:
    rule = "minite[activation.zero_block=a=0:s=1]"
    move = moved(data, "minite", rule)
    only(move, "")

    x = data.x.clone()
    x[5, 32:64] = 0
    zeros = LayerInput(x, data.topk_ids, data.topk_weights, data.w13, data.w2, "with two zero blocks")
    one = moved(zeros, "minite", rule).operands["x"]
    slots = SMALL.tokens * SMALL.top_k
    assert one.scales == 2 * SMALL.top_k / (slots * SMALL.hidden / 16)
    assert (one.codes, one.values, one.relative_l2) == (0, 0, 0)


def test_a_rule_for_zero_groups_moves_the_outer_scale_of_zero_rows(data: LayerInput) -> None:
    rule = "minite[activation.zero_group=A>=1e-8]"
    only(moved(data, "minite", rule), "")
    x = data.x.clone()
    x[7] = 0
    zeros = LayerInput(x, data.topk_ids, data.topk_weights, data.w13, data.w2, "with a zero row")
    one = moved(zeros, "minite", rule).operands["x"]
    row_bytes = SMALL.hidden // 2 + SMALL.hidden // 16 + 4
    g = np.array([1.0, np.float32(1e-8) / np.float32(2688)], dtype=np.float32).view(np.uint8).reshape(2, 4)
    assert one.memory == (g[0] != g[1]).sum() / row_bytes / SMALL.tokens
    assert one.values == 0


def test_relative_l2_equals_numpy_in_float64() -> None:
    a, b = torch.randn(37, 11), torch.randn(37, 11)
    x, y = a.numpy().astype(np.float64), b.numpy().astype(np.float64)
    expected = np.sqrt(((y - x) ** 2).sum()) / np.sqrt((x**2).sum())
    assert relative_l2(a, b) == pytest.approx(expected, rel=1e-12)
    assert relative_l2(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_l2(torch.zeros(3), torch.ones(3)) == float("inf")


def test_the_output_difference_is_that_of_the_two_layers(data: LayerInput) -> None:
    left, right = (run_layer(data, named_spec(name)) for name in ("minite", "mslk"))
    x, y = (run.output.double().numpy() for run in (left, right))
    output = measure(data, left, right).output
    assert output.relative_l2 == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    assert output.differing == (x != y).mean()


def test_shares_of_hand_made_operands() -> None:
    quantizer = named_spec("minite").weight

    def operand(memory: list[int], scales: list[int], codes: list[int], values: list[float]) -> Operand:
        as_bytes = [torch.tensor(part, dtype=torch.uint8) for part in (memory, scales, codes)]
        return Operand(quantizer, [as_bytes[0]], as_bytes[1], as_bytes[2], torch.tensor(values))

    left = operand([1, 2, 3], [7, 7], [1, 2, 3, 4], [3.0, 0.0, 4.0, 0.0])
    right = operand([1, 9, 3, 4, 5], [7, 8], [1, 2, 3, 5], [3.0, -0.0, 1.0, 0.0])
    move = compare_operands(left, right)
    assert move.memory == 3 / 5  # one other, two surplus
    assert (move.scales, move.codes, move.values) == (1 / 2, 1 / 4, 1 / 4)  # -0 equals 0
    assert move.relative_l2 == pytest.approx(3 / 5)


@pytest.mark.parametrize(("block", "height", "width"), [("1x16", 1, 1), ("16x16", 16, 1), ("1x32", 1, 2)])
def test_scales_are_compared_for_every_16_elements(block: str, height: int, width: int) -> None:
    name = "mxfp4" if block == "1x32" else f"te_exact[weight.block={block}]"
    quantizer = spec_from_label(name).weight
    assert quantizer is not None
    weight = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    operand = weight_operand(weight, quantizer, torch.bfloat16, halves=False)
    scales = quantize_weight(weight, quantizer).block_scales
    assert operand.scales is not None and scales is not None
    for expert, row, column in itertools.product(range(2), range(40), range(4)):
        expected = scales[expert, row // height, column // width]
        assert operand.scales[expert * 40 + row, column] == expected


def test_operands_of_different_formats_have_codes_and_scales_in_common_only_where_formats_agree(
    data: LayerInput,
) -> None:
    x = moved(data, "mxfp4", "mxfp8").operands["x"]
    assert x.codes is None and x.scales is not None
    x = moved(data, "minite", "mxfp4").operands["x"]
    assert x.codes is not None and x.scales is None
    x = moved(data, "minite", "bf16").operands["x"]
    assert x.codes is None and x.scales is None and x.memory > 0.9


def test_a_tensor_scale_is_taken_over_the_rows_of_an_expert() -> None:
    quantizer = named_spec("te_exact").activation
    small, large = torch.ones(2, 16), torch.full((2, 16), 100.0)
    apart = activation_operand([small, large], quantizer, torch.bfloat16)
    together = activation_operand([torch.cat((small, large))], quantizer, torch.bfloat16)
    assert apart.scales is not None and together.scales is not None
    assert apart.scales[0] == apart.scales[2] != together.scales[0]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (
            "minite",
            "minite[activation.outer_domain=none,activation.outer_scale=none,activation.outer_stored=none,"
            "activation.zero_group=none,activation.quotient=x/s]",
        ),
        (
            "minite",
            "minite[activation.outer_stored=A,weight.outer_stored=A,epilogue=acc*((Ax*Aw)*(1/(Mx*Mw)))]",
        ),
        ("minite[combine=slot_order_fma]", "minite[combine=any_order,combine_sum=bf16,router_product=bf16]"),
        ("te_exact", "te_per_tensor"),
        ("minite", "minite_mxfp8_backward"),
        ("mxfp4", "mxfp8"),
        ("mxfp8", "bf16"),
        ("bf16", "fp32"),
    ],
)
def test_the_fields_that_change_together_are_the_fewest_possible(left: str, right: str) -> None:
    a, b = spec_from_label(left), spec_from_label(right)
    names = [difference.field for difference in spec_diff(a, b)]
    assert len(names) <= 9
    changes = single_changes(a, b)
    assert [change.difference.field for change in changes] == names
    for change in changes:
        field = change.difference.field
        rest = [name for name in names if name != field]
        fewest = next(
            count
            for count in range(len(rest) + 1)
            if any(possible(a, b, {field, *others}) for others in itertools.combinations(rest, count))
        )
        assert len(change.others) == fewest
        assert {d.field for d in spec_diff(a, change.spec)} == {field, *change.others}


def possible(left: ExecutionSpec, right: ExecutionSpec, names: set[str]) -> bool:
    """Whether the constructor takes `left` with these fields of `right`, by their plain form."""
    values = left.to_dict()
    for name in names:
        values = {
            key: value for key, value in values.items() if key != name and not key.startswith(f"{name}.")
        }
        values |= {k: v for k, v in right.to_dict().items() if k == name or k.startswith(f"{name}.")}
    try:
        ExecutionSpec.from_dict(values)
    except ValueError:
        return False
    return True


def test_a_tile_of_weights_needs_an_outer_scale_that_its_rows_share(data: LayerInput) -> None:
    changes = single_changes(named_spec("minite"), named_spec("te_per_tensor_2d"))
    others = {change.difference.field: change.others for change in changes}
    assert others["weight.block"] == ("weight.outer_domain",)
    assert others["weight.outer_domain"] == ()


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_all_fields_together_are_the_other_spec_for_every_entry_against_minite(name: str) -> None:
    a, b = named_spec("minite"), named_spec(name)
    assert [change.difference for change in single_changes(a, b)] == list(spec_diff(a, b))


def test_every_field_has_a_row_and_says_with_which_others(data: LayerInput) -> None:
    left, right = named_spec("minite"), named_spec("te_per_tensor")
    measured = measure_changes(data, left, right)
    lines = format_changes(measured).splitlines()
    for difference in spec_diff(left, right):
        assert sum(line.split()[:1] == [difference.field] for line in lines) == 1
    assert "    with activation.outer_stored, weight.outer_stored" in lines
    backward = next(number for number, line in enumerate(lines) if line.startswith("gradient"))
    assert lines[backward + 1 : backward + 3] == ["    with backward", "    not read by the forward"]
    assert any(line.startswith("backward") and line.endswith("as for gradient") for line in lines)
    assert measured[-1].change is None
    assert measured[-1].move.output == moved(data, "minite", "te_per_tensor").output


def test_a_layer_file_gives_what_was_saved(data: LayerInput, tmp_path: Path) -> None:
    path = save(data, tmp_path)
    loaded = load_layer(path)
    for name in ("x", "topk_ids", "topk_weights", "w13", "w2"):
        assert torch.equal(getattr(loaded, name), getattr(data, name))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"w2": None}, "lacks w2; it has: topk_ids"),
        ({"x": torch.zeros(48, 2, 64)}, "x must have 2 dimensions"),
        ({"w2": torch.zeros(4, 128, 32)}, r"w2 must be \(4, 128, 64\) to fit the rest, got \(4, 128, 32\)"),
        ({"w13": torch.zeros(4, 127, 128)}, r"w13 must be \(4, 126, 128\)"),
        ({"topk_ids": torch.full((48, 2), 4)}, r"topk_ids must be in \[0, 4\), got values in \[4, 4\]"),
        ({"topk_ids": torch.zeros(48, 2)}, "topk_ids must be of an integer type, got torch.float32"),
        ({"x": torch.full((48, 128), float("nan"))}, "NaN"),
    ],
)
def test_a_layer_file_that_does_not_fit_is_refused_in_one_line(
    data: LayerInput,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, torch.Tensor | None],
    part: str,
) -> None:
    path = save(data, tmp_path, change)
    assert main(["minite", "minite_expert", "--layer", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(AssertionError, match=part):
        raise AssertionError(error)


def save(data: LayerInput, folder: Path, change: dict[str, torch.Tensor | None] | None = None) -> Path:
    names = ("x", "topk_ids", "topk_weights", "w13", "w2")
    tensors = {name: getattr(data, name) for name in names} | (change or {})
    path = folder / "layer.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, path)
    return path


def test_the_command_prints_tables_and_writes_json(data: LayerInput, tmp_path: Path) -> None:
    layer, report = save(data, tmp_path), tmp_path / "diff.json"
    result = run(
        "minite", "minite[output=fp32,combine=expert_order]", "--layer", str(layer), "--json", str(report)
    )
    assert result.returncode == 0, result.stderr
    assert named_spec("minite").fingerprint in result.stdout
    written = json.loads(report.read_text())
    assert [one["field"] for one in written["differences"]] == ["combine", "output"]
    (measured,) = written["measured"]
    assert measured["data"] == str(layer)
    assert [one["change"] and one["change"]["field"] for one in measured["changes"]] == [
        "combine",
        "output",
        None,
    ]
    assert measured["changes"][2]["output"]["relative_l2"] > 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("minite",), "give two specs"),
        (("minite", "minute"), "no execution spec is called 'minute'"),
        (("minite", "minite_expert", "--layer", "absent.safetensors"), "absent.safetensors"),
        (("minite", "minite_expert", "--hidden", "40"), "multiple of 16"),
        (("minite", "minite_expert", "--top-k", "9"), "top_k must be at most experts=8"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_the_exit_status_of_a_refusal_is_2() -> None:
    result = run("minite", "minute")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("spec_diff: no execution spec is called 'minute'")


def test_specs_that_are_equal_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["minite_expert", "minite[weight.outer_domain=expert]"]) == 0
    assert "No field differs." in capsys.readouterr().out


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernels.spec_diff", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_weight_of_fields_has_the_order_and_rough_size_that_an_independent_emulation_found() -> None:
    shape = LayerShape(tokens=96, hidden=256, ffn=128, experts=8, top_k=4)
    measured = measure_sizes(synthetic_layer(shape, "gaussian", 1))
    size = {one.field.title: one.output.relative_l2 for one in measured}
    assert list(size) == [field.title for field in FIELD_SIZES]
    expected = {
        "weight blocks 1x16 -> 16x16": 0.14,
        "activations: largest code 6 -> 4over6 (MSE, 256)": 0.095,
        "weight outer scale: row -> expert": 0.086,
        "activation outer scale: token -> tensor": 0.08,
        "FC2 input quantised from BF16 -> FP32": 0.024,
        "TE fast math: BF16 coefficient of elements": 0.018,
        "combine: FP32 FMA -> BF16 terms and sums (atomics)": 0.0046,
        "router coefficient and product FP32 -> BF16": 0.0033,
    }
    for title, value in expected.items():
        assert value / 1.5 < size[title] < value * 1.5, title
    assert [*expected] == sorted(expected, key=lambda title: -size[title])
    association = [one.output for one in measured if one.field.title.startswith("epilogue")]
    assert all(0 < output.relative_l2 < 1e-6 and output.differing < 1e-4 for output in association)


def test_the_heat_map_is_a_matrix_of_relative_distances_in_a_picture(
    data: LayerInput, tmp_path: Path
) -> None:
    names = ["minite", "minite_mxfp8_backward", "bf16"]
    matrix = pairwise_l2(data, [named_spec(name) for name in names])
    assert matrix[0][1] == matrix[1][0] == matrix[2][2] == 0
    assert matrix[2][0] == moved(data, "bf16", "minite").output.relative_l2
    for ending, signature in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        path = tmp_path / f"map.{ending}"
        draw(names, matrix, data.label, path)
        assert path.read_bytes().startswith(signature)


@pytest.mark.parametrize(
    ("value", "cell"),
    [(0.0, "0"), (3e-7, "3e-5"), (0.0039, ".39"), (0.0996, "10"), (0.0994, "9.9"), (0.41, "41")],
)
def test_cells_of_the_heat_map_are_short(value: float, cell: str) -> None:
    assert percent(value) == cell
