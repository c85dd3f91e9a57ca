"""Values that must be finite: counted on their device, looked at once a step, so that nothing waits in between."""

from __future__ import annotations

import torch


class FiniteChecks:
    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, int, str]] = []

    def watch(self, values: torch.Tensor, name: str) -> None:
        """values: of any shape; name: what they are, in the plural."""
        self._found.append(((~torch.isfinite(values.detach())).sum(), values.numel(), name))

    def clear(self) -> None:
        self._found.clear()

    def check(self) -> None:
        """Wait for the device. Raises FloatingPointError for the first watched values that were not all finite."""
        if not self._found:
            return
        counts = torch.stack([bad for bad, _, _ in self._found]).tolist()
        for bad, (_, count, name) in zip(counts, self._found, strict=True):
            if bad:
                raise FloatingPointError(f"{bad} of {count} {name} are not finite; no weight was changed")
