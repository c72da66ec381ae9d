"""Reading a live optimizer, and refusing by name a step that is not AdamW's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOptimizer
from .adamw import Hyper
from .hooks import Hooks, name_of, origin, refuse_step_hooks, within

WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")  # they call the step of what they hold
TORCH = ("torch.optim", "torch._dynamo")  # their layers around a step count calls, profile, and switch gradients off


def unwrapped_optimizer(optimizer: Any, hooks: Hooks | None = None) -> torch.optim.Optimizer:
    """The AdamW or Adam inside accelerate's and Lightning's wrappers; anything else is refused by name."""
    while hasattr(optimizer, "optimizer"):
        if not within(type(optimizer).__module__, WRAPPERS):
            raise UnsupportedOptimizer(
                f"the optimizer is a {type(optimizer).__name__} around a {type(optimizer.optimizer).__name__}; what it "
                "does beside calling it is not modelled. Train without it: the inner optimizer alone is another run"
            )
        optimizer = optimizer.optimizer
    _refuse_other_steps(optimizer)
    refuse_step_hooks(optimizer, hooks)
    for i, group in enumerate(optimizer.param_groups):
        if group.get("amsgrad"):
            raise UnsupportedOptimizer(f"group {i} has amsgrad=True; aftershock models amsgrad=False")
    return optimizer


def _refuse_other_steps(optimizer: Any) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        raise UnsupportedOptimizer(
            f"the optimizer is {kind.__name__}; aftershock models torch.optim.AdamW and torch.optim.Adam"
        )
    for name in ("step", "_init_group"):
        patched = vars(optimizer).get(name)
        for found, where in ((getattr(kind, name), f"class {kind.__name__}"), (patched, "the optimizer object")):
            foreign = None if found is None else _foreign_layer(found)
            if foreign is not None:
                raise UnsupportedOptimizer(
                    f"{name}() of {where} is {name_of(foreign)} of {origin(foreign)}, not torch's; aftershock models "
                    "the step of torch.optim.AdamW and torch.optim.Adam. Do the extra work outside the optimizer, or "
                    "not at all"
                )


def _foreign_layer(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The outermost layer of a function that torch did not write. `functools.wraps` does not hide it."""
    return next((layer for layer in _layers(function) if not within(origin(layer), TORCH)), None)


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def is_scheduled(groups: list[dict[str, Any]]) -> bool:
    """Whether a scheduler of torch's has been attached: it notes the first learning rate in every group."""
    return any("initial_lr" in group for group in groups)


def read_hyper(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Hyper:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr = group["lr"]
    return Hyper(
        lr=lr.detach().clone() if isinstance(lr, Tensor) else float(lr),
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
        maximize=bool(group.get("maximize", False)),
        foreach=False if group.get("differentiable") else group.get("foreach"),
        fused=group.get("fused"),
        capturable=bool(group.get("capturable", False)),
    )
