"""Registers that Hopper's tensor core still reads while a kernel writes to them, found in its machine code.

A product with an operand in registers (`wgmma`, in machine code HGMMA, QGMMA and others) reads them some time after it
is launched. PTX leaves it to the program not to write them before it has waited, and neither Triton 3.6 nor ptxas sees
to that (Triton's issue 9433): results are then wrong at times, as other work on the processor has it. Which registers
are meant shows in machine code alone.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"^\s*(\.L_x_\d+):", re.MULTILINE)
_PREDICATE = re.compile(r"!?U?P[0-9T]\b")
_REGISTER = re.compile(r"R(\d+)\b")
_PRODUCT = re.compile(r"[A-Z]GMMA\b")
# Which write predicates alone, or nothing, and have a register first all the same.
_NO_TARGET = ("ISETP", "FSETP", "DSETP", "HSETP2", "PLOP3", "FCHK", "BAR", "WARPSYNC", "RET")
_TWO = re.compile(r"\.(64|WIDE|[FSU]64)\b|^(D|CS2R)|^LDSM\..*\.2$")
_FOUR = re.compile(r"\.128\b|^[HI]MMA|^LDSM\..*\.4$")
_ELSEWHERE = ("CALL", "BRX", "JMP", "JMX", "BRXU")  # whose code is not followed

# What the tensor core may still read: register -> how many groups of products were closed since that product's own, -1
# while its own is open.
Pending = Mapping[int, int]


@dataclass(frozen=True)
class Instruction:
    address: str
    guarded: bool
    name: str
    operands: tuple[str, ...]

    @property
    def ends_here(self) -> bool:
        """Whether no thread goes on to the next instruction. A branch may name its condition among its operands."""
        return not self.guarded and (
            self.name.startswith("EXIT") or (self.name.startswith("BRA") and len(self.operands) == 1)
        )

    def __str__(self) -> str:
        return f"{self.address} {self.name} {', '.join(self.operands)}"


def disassembled(cubin: bytes) -> str:
    """By Triton's own nvdisasm, which runs without a GPU."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def overwritten_operands(text: str) -> list[str]:
    """The instructions of nvdisasm's `text` that may write a register of an operand before it has been read; also those
    that go where this does not follow while operands are pending.
    """
    code, labels = _parsed(text)
    before: list[Pending | None] = [None] * (len(code) + 1)
    found: set[int] = set()
    work: list[tuple[int, Pending]] = [(0, {})]
    while work:
        at, pending = work.pop()
        while at < len(code):
            known = before[at]
            pending = pending if known is None else _either(known, pending)
            if pending == known:
                break
            before[at] = pending
            instruction = code[at]
            elsewhere = instruction.name.startswith(_ELSEWHERE) and pending
            if elsewhere or not pending.keys().isdisjoint(_written(instruction)):
                found.add(at)
            pending = _after(instruction, pending)
            if instruction.name.startswith("BRA"):
                work.append((labels[_target(instruction)], pending))
            if instruction.ends_here:
                break
            at += 1
    return [str(code[at]) for at in sorted(found)]


def _parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and where each label stands among them."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(code)
        elif match := _LINE.search(line):
            operands = tuple(operand.strip() for operand in match["operands"].split(",") if operand.strip())
            code.append(Instruction(match["address"], match["guard"] is not None, match["name"], operands))
    return code, labels


def _either(known: Pending, other: Pending) -> Pending:
    """On either way here: of a register that is in both, the product launched last."""
    both = {register: min(known[register], age) for register, age in other.items() if register in known}
    return {**known, **other, **both}


def _after(instruction: Instruction, pending: Pending) -> Pending:
    if _PRODUCT.match(instruction.name):
        operand = _REGISTER.match(instruction.operands[1])
        own = dict(pending)
        if operand is not None:  # else in shared memory
            own |= dict.fromkeys(range(int(operand[1]), int(operand[1]) + 4), -1)
        closes = "gsb0" in instruction.operands
        return {register: age + 1 for register, age in own.items()} if closes else own
    if instruction.name.startswith("WARPGROUP.DEPBAR") and not instruction.guarded:
        left = int(instruction.operands[1], 16)
        return {register: age for register, age in pending.items() if age < left}
    return pending


def _written(instruction: Instruction) -> Iterable[int]:
    """Registers that it writes; a product's own sums left aside."""
    name = instruction.name
    if _PRODUCT.match(name) or name.startswith(_NO_TARGET):
        return ()
    targets = [operand for operand in instruction.operands if not _PREDICATE.fullmatch(operand)]
    first = _REGISTER.match(targets[0]) if targets else None
    if first is None:  # a store, a branch, or a uniform register
        return ()
    width = 4 if _FOUR.search(name) else 2 if _TWO.search(name) else 1
    return range(int(first[1]), int(first[1]) + width)


def _target(instruction: Instruction) -> str:
    return instruction.operands[-1].strip("`()")
