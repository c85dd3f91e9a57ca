"""What GPUs can do at most: memory, and rates of dense products and of memory, by the name that the driver gives.

Only devices whose figures the vendor has published are here, each with its source. For any other there is no
utilisation to report: nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """memory: bytes that a process can use; bf16, nvfp4: dense floating-point operations a second, without sparsity
    (nvfp4 None: no such tensor cores); bandwidth: bytes a second of the GPU's memory.
    """

    name: str
    pattern: str
    memory: int
    bf16: float
    nvfp4: float | None
    bandwidth: float
    source: str

    @property
    def expert_backend(self) -> str:
        """The back end of `kernels.backends` that computes NVFP4 experts there."""
        return "triton_native" if self.nvfp4 else "triton_emulated"


# Memory of the H200: total_memory as CUDA reports it there. Of the others: what the vendor calls GB, in GiB where
# boards report it so (H100: 80, B200: 180 less what the driver keeps), else in 10^9 bytes (B300).
DEVICES = {
    device.name: device
    for device in (
        Device(
            "h100",
            r"\bH100\b(?!.*(PCIe|NVL))",
            79 * GIB,
            989.4e12,
            None,
            3.35e12,
            "NVIDIA H100 data sheet, SXM",
        ),
        Device(
            "h200",
            r"\bH200\b(?!.*NVL)",
            int(139.8 * GIB),
            989.4e12,
            None,
            4.8e12,
            "NVIDIA H200 data sheet, SXM",
        ),
        Device(
            "b200",
            r"\bB200\b",
            178 * GIB,
            2250e12,
            9000e12,
            8.0e12,
            "NVIDIA HGX B200 specification, an eighth",
        ),
        Device(
            "b300",
            r"\bB300\b",
            288 * 10**9,
            2250e12,
            13125e12,
            8.0e12,
            "NVIDIA HGX B300 specification, an eighth",
        ),
    )
}


def device_of(reported: str) -> Device | None:
    """The device that the driver calls `reported` ("NVIDIA H200"), or None for one that is not in the table."""
    return next((d for d in DEVICES.values() if re.search(d.pattern, reported, re.IGNORECASE)), None)
