"""What made a result, so that it explains itself years later."""

from __future__ import annotations

import platform
from typing import Any

import torch

from ..core.probe import Probe
from ..core.trajectory import Trajectory
from ..version import __version__


def provenance(trajectory: Trajectory) -> dict[str, Any]:
    """Versions, device, precision and the run's own numbers, as plain attributes of a dataset."""
    layout, step = trajectory.dynamics.layout, trajectory.steps[0]
    return {
        "aftershock": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(layout.device),
        "dtype": str(layout.dtypes[0]).removeprefix("torch."),
        "parameters": layout.size,
        "training_step": max(trajectory.state(0).counts),
        "path_steps": len(trajectory),
        "clip": "none" if step.max_norm is None else step.max_norm,
        "lr": float(step.hypers[0].lr),
        "attention": "path: as trained; Hessian products: math",
    }


def asked(kind: str, at: int, probe: Probe | None) -> dict[str, Any]:
    """What was changed, at which step, and what is watched: variables of a dataset, since they are no provenance."""
    return {"kind": kind, "at": at, "probe": "none" if probe is None else probe.name}
