"""A loss in float64 all the way: what loss_fn holds itself, a teacher or class weights, is lifted where it meets the
model's numbers, and casts to shorter types (`logits.float()`) leave them as they are."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .kinks import function_name

SHORTER = {"float", "half", "bfloat16"}


def lifting(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Around a loss: every operation with a float64 number among its inputs has all of them in float64, and its result.

    Under any such mode torch's `F.l1_loss` loses its weight: a check would then be of the loss without it.
    """
    return _Lifting()


class _Lifting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        written = name.endswith("_") and not name.endswith("__")  # what is written to keeps its type
        if not written and any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves((args, kwargs))):
            if name in SHORTER:
                return args[0]
            args, kwargs = tree_map(_lifted, (args, kwargs))
        return func(*args, **kwargs)


def _lifted(x: Any) -> Any:
    """A tensor in float64; of a dtype that is asked for, float64 instead of a shorter one."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
