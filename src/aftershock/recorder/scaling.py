"""What a GradScaler multiplies the loss by: seen from inside the optimizer's step, which it calls."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

SCALERS = torch.amp.grad_scaler.__name__


def calling_scaler() -> torch.amp.GradScaler | None:
    """The scaler among the callers of this function; None where the loop calls `optimizer.step()` itself.

    Nothing else tells of it: by the time an optimizer's hook runs, gradients may look as if they had never been scaled.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == SCALERS and isinstance(
            found := frame.f_locals.get("self"), torch.amp.GradScaler
        ):
            return found
        frame = frame.f_back
    return None


def scale_now(scaler: torch.amp.GradScaler | None, like: Tensor) -> Tensor | float:
    """Its factor; on a GPU as a tensor, for which nobody waits."""
    one = torch.ones((), dtype=torch.float32, device=like.device)
    return 1.0 if scaler is None else scaler.scale(one)
