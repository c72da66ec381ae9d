"""What a GradScaler multiplies the loss by: seen from inside the optimizer's step, which it calls."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

SCALERS = torch.amp.grad_scaler.__name__


def loss_scale(like: Tensor) -> Tensor | float:
    """The factor of the scaler that has called the optimizer, 1 where the loop calls `optimizer.step()` itself.

    On a GPU it is a tensor, for which nobody waits.
    """
    scaler = _calling_scaler()
    return 1.0 if scaler is None else scaler.scale(torch.ones((), dtype=torch.float32, device=like.device))


def _calling_scaler() -> torch.amp.GradScaler | None:
    """The scaler among the callers of this function.

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
