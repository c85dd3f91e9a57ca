"""The ends of a transport, by its name in the configuration (`sync.transport`)."""

from __future__ import annotations

import torch

from rl.sync.transport import Inlet, Outlet, RayInlet, RayOutlet


def open_outlet(transport: str) -> Outlet:
    """The sender's end. With `process_group` the Ray end stands in until there is a group."""
    if transport == "cuda_ipc":
        from rl.sync.cuda_ipc import IpcOutlet

        return IpcOutlet()
    return RayOutlet()


def open_inlet(transport: str, device: torch.device) -> Inlet:
    """A receiver's end, likewise."""
    if transport == "cuda_ipc":
        from rl.sync.cuda_ipc import IpcInlet

        return IpcInlet(device)
    return RayInlet(device)
