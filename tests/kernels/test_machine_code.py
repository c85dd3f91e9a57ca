"""Which registers a product may still read, on machine code written out by hand."""

from __future__ import annotations

import pytest

from kernels.machine_code import overwritten_operands

FIRST = "HGMMA.64x128x16.F32 R24, R160, gdesc[UR8], R24, gsb0"
SECOND = "HGMMA.64x128x16.F32 R24, R164, gdesc[UR8], R24, gsb0"
SHARED = "HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0"
AGAIN = "@P0 BRA `(.L_x_0)"
BOTH, ONE, NONE = (f"WARPGROUP.DEPBAR.LE gsb0, {left:#x}" for left in (2, 1, 0))  # that may be left pending


def listing(*lines: str) -> str:
    """As nvdisasm writes it: labels as they are, instructions with their addresses."""
    written = [
        line if line.startswith(".L") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(lines)
    ]
    return "\n".join(written)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        pytest.param(
            ["MOV R160, R1", FIRST, NONE, "MOV R160, R2"], [], id="written ahead, and behind the wait"
        ),
        pytest.param([FIRST, "MOV R160, R2", NONE], ["0010 MOV R160, R2"], id="written ahead of the wait"),
        pytest.param([FIRST, "MOV R164, R160", NONE], [], id="another register"),
        pytest.param([FIRST, SECOND, ONE, "MOV R162, R2"], [], id="the older one is done"),
        pytest.param([FIRST, SECOND, ONE, "MOV R164, R2"], ["0030 MOV R164, R2"], id="the newer one is not"),
        pytest.param([FIRST, SECOND, BOTH, "MOV R160, R2"], ["0030 MOV R160, R2"], id="a wait for neither"),
        pytest.param(
            [FIRST.replace(", gsb0", ""), SECOND, ONE, "MOV R160, R2"],
            ["0030 MOV R160, R2"],
            id="two products of a group",
        ),
        pytest.param([SHARED, "MOV R24, R2"], [], id="operands in shared memory"),
        pytest.param([FIRST, "LDS.128 R157, [R8+0x10]"], ["0010 LDS.128 R157, [R8+0x10]"], id="four at once"),
        pytest.param([FIRST, "LDS.64 R158, [R8+0x10]"], [], id="two at once"),
        pytest.param(
            [FIRST, "LOP3.LUT P1, R161, R4, 0x1, RZ"],
            ["0010 LOP3.LUT P1, R161, R4, 0x1, RZ"],
            id="second target",
        ),
        pytest.param([FIRST, "ISETP.GT.AND P1, PT, R160, R2, PT", "STS.128 [R8], R160"], [], id="read only"),
        pytest.param(
            [".L_x_0:", "MOV R160, R2", FIRST, BOTH, AGAIN, "EXIT"], ["0010 MOV R160, R2"], id="the next turn"
        ),
        pytest.param([".L_x_0:", NONE, "MOV R160, R2", FIRST, AGAIN, "EXIT"], [], id="the next turn waits"),
        pytest.param(
            [FIRST, "@P0 BRA `(.L_x_0)", NONE, ".L_x_0:", "MOV R160, R2", "EXIT"],
            ["0040 MOV R160, R2"],
            id="a way around the wait",
        ),
        pytest.param([FIRST, "EXIT", "MOV R160, R2"], [], id="behind the end"),
        pytest.param(
            [FIRST, "BRA !P5, `(.L_x_0)", "MOV R160, R2", ".L_x_0:", "EXIT"],
            ["0020 MOV R160, R2"],
            id="a branch that asks for a predicate",
        ),
        pytest.param(
            [FIRST, "@P1 WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R160, R2"],
            ["0020 MOV R160, R2"],
            id="a wait of some threads",
        ),
        pytest.param(
            [FIRST, "CALL.REL.NOINC `(.L_x_0)", NONE, ".L_x_0:", "EXIT"],
            ["0010 CALL.REL.NOINC `(.L_x_0)"],
            id="a call",
        ),
        pytest.param(
            [FIRST, NONE, "CALL.REL.NOINC `(.L_x_0)", ".L_x_0:", "EXIT"], [], id="a call behind the wait"
        ),
        pytest.param(
            [FIRST.replace("HGMMA", "QGMMA"), "F2F.F64.F32 R159, R2"],
            ["0010 F2F.F64.F32 R159, R2"],
            id="other elements, and two registers",
        ),
    ],
)
def test_what_is_written_before_it_has_been_read(code: list[str], found: list[str]) -> None:
    assert overwritten_operands(listing(*code)) == found
