"""What the Triton kernels compile to, without a GPU.

    python -m kernels.compile_check

compiles them for sm_90a (Hopper), sm_100a and sm_103a (Blackwell) down to machine code, and prints a table of the
instructions found in the PTX. Exit status: 0; 1 when a kernel does not compile, or an instruction that is needed is
missing, or one that must not be is there; 2 where Triton cannot be used.

The quantisers must divide with `div.rn`, never `div.full`, and must not fuse a product and a sum that are written
apart: more fused multiply-adds in the PTX than in the LLVM code, where the written ones stand by name, mean that.

Operands that Hopper's tensor core reads from registers must stay there until it has (`kernels.machine_code`).

Kernels with products on tensor cores must not divide integers by what is known at run time alone: sums in a loop with
such a division were wrong (`kernels.triton.outside.attention_gradient`).

Triton compiles a kernel anew for numbers that are 1, as constants: each must take them so, too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.compilations import Compilation, compilations
from kernels.machine_code import disassembled, overwritten_operands

HEADER = ("kernel", "target", "tensor core", "operands in registers", "copies", "arithmetic", "")
ONES = (90, 100)  # targets for which that is checked: those of Blackwell differ only behind it


@dataclass(frozen=True)
class Evidence:
    compilation: Compilation
    found: dict[str, int]  # occurrences in the PTX
    fused: int  # multiply-adds beyond those written
    in_registers: int  # products on Hopper's tensor core with an operand in registers
    overwritten: int  # instructions that may write one before it has been read

    @property
    def passed(self) -> bool:
        needed = self.compilation.needed
        present = needed is None or self.found["needed"] > 0
        present &= self.in_registers > 0 or not self.compilation.in_registers
        inexact = self.compilation.exact and (self.found["div.full"] or self.fused)
        divides = needed is not None and self.found["integer divisions"]
        return present and not (inexact or divides or self.overwritten or self.found["trap"])


def check(compilation: Compilation) -> Evidence:
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", compilation.target, 32)
    source = source_of(compilation, compilation.types, compilation.constants)
    compiled = triton.compile(source, target=target, options=compilation.options)
    ptx, llvm = compiled.asm["ptx"], compiled.asm["llir"]
    assert compiled.asm["cubin"]
    counted = {
        "needed": compilation.needed or "$^",
        "trap": r"\btrap;",  # what stands in for a kernel that asks for more memory than there is
        "div.full": r"div\.full",
        "div.rn": r"div\.rn\.f32",
        "integer divisions": r"\b(?:div|rem)\.[su](?:32|64)\b",
        "bulk copies": r"cp\.async\.bulk\.tensor",
        "scale copies": r"tcgen05\.cp",
    }
    found = {name: len(re.findall(pattern, ptx)) for name, pattern in counted.items()}
    written = len(re.findall(r"call[^\n]*@llvm\.(?:nvvm\.)?fma", llvm)) + len(
        re.findall(r"fma\.rn\.sat", ptx)
    )
    fused = len(re.findall(r"\bfma\.rn", ptx)) - written
    if "wgmma.mma_async" not in ptx:
        return Evidence(compilation, found, fused, 0, 0)
    code = disassembled(compiled.asm["cubin"])
    in_registers = len(re.findall(r"\b[A-Z]GMMA\S+ R\d+, R\d+,", code))
    return Evidence(compilation, found, fused, in_registers, len(overwritten_operands(code)))


def source_of(compilation: Compilation, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """An ASTSource of the kernel with these; pointers are aligned to 16 bytes."""
    from triton.compiler import ASTSource

    names = compilation.kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*")
    }
    return ASTSource(
        compilation.kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )


def check_ones(compilation: Compilation) -> None:
    """A number that is 1 in a call is a constant of the compilation, where it has no type: raises Triton's
    CompilationError for a kernel that does not take it so. Only to Triton's own intermediate code.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    ones = {name: 1 for name, kind in compilation.types.items() if kind in ("i32", "i64")}
    if not ones:
        return
    types = {name: kind for name, kind in compilation.types.items() if name not in ones}
    target = GPUTarget("cuda", compilation.target, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(dict(compilation.options))
    source = source_of(compilation, types, compilation.constants | ones)
    implementation, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(target, options, implementation, modules, context)


def report(evidence: Evidence) -> tuple[str, ...]:
    compilation, found = evidence.compilation, evidence.found
    instruction = "-"
    if compilation.needed is not None:
        instruction = f"{found['needed']} x {compilation.needed.replace(chr(92), '').replace('S*', '..')}"
    exact = f"{found['div.rn']} div.rn, {found['div.full']} div.full, {evidence.fused} fused"
    return (
        compilation.name,
        f"sm_{compilation.target}a",
        instruction,
        f"{evidence.in_registers}, {evidence.overwritten} overwritten" if evidence.in_registers else "-",
        f"{found['bulk copies']} bulk, {found['scale copies']} tcgen05.cp" if compilation.needed else "-",
        exact if compilation.exact else "-",
        "ok" if evidence.passed else "FAILS",
    )


def main(arguments: Sequence[str] = (), write: Callable[[str], object] = print) -> int:
    argparse.ArgumentParser(
        prog="python -m kernels.compile_check", description=__doc__.split("\n")[0]
    ).parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        write("TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled")
        return 2
    try:
        import triton
    except ImportError as error:
        write(f"cannot import triton: {error}")
        return 2
    write(f"triton {triton.__version__}, shapes of Qwen3-30B-A3B")
    from triton.compiler.errors import CompilationError

    table: list[tuple[str, ...]] = [HEADER]
    good, errors = True, []
    for compilation in compilations():
        try:
            if compilation.target in ONES:
                check_ones(compilation)
            evidence = check(compilation)
        except CompilationError as error:
            errors.append(f"{compilation.name}, sm_{compilation.target}a: {error}")
            table.append((compilation.name, f"sm_{compilation.target}a", *["-"] * (len(HEADER) - 3), "FAILS"))
        else:
            good &= evidence.passed
            table.append(report(evidence))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for message in errors:
        write(f"\n{message}")
    return 0 if good and not errors else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
