"""Optimizers and schedules as strangers use them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from .loop_losses import classes, cross_entropy
from .loops import Loop


def adamw(cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Callable[[nn.Module], Any]:
    settings = {"lr": 1e-2, "weight_decay": 0.1, **options}
    return lambda model: cls((p for p in model.parameters() if p.requires_grad), **settings)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Decay for matrices only, and everything else different too."""
    wide = [p for p in model.parameters() if p.ndim > 1]
    thin = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": thin, "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
            {"params": wide, "lr": 1e-2, "weight_decay": 0.2},
        ]
    )


class Shrinking(torch.optim.AdamW):
    """A subclass that does more than its parent."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)


class Disguised(torch.optim.AdamW):
    """The same, and it says that it is its parent's step."""

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, *args: Any, **options: Any) -> None:  # type: ignore[override]
        super().step(*args, **options)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)


class Renamed(torch.optim.AdamW):
    """A subclass that does nothing else than its parent."""


class Lookahead:
    """Slow weights around another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.taken = optimizer, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.taken += 1
        if self.taken % 2 == 0:
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"])):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def patched(model: nn.Module) -> torch.optim.Optimizer:
    """`step` replaced on the instance, as some libraries do."""
    optimizer = adamw()(model)
    original = optimizer.step

    def step(*args: Any, **options: Any) -> Any:
        for p in model.parameters():
            p.grad.sign_()  # type: ignore[union-attr]
        return original(*args, **options)

    optimizer.step = step
    return optimizer


def hooked(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A hook around the optimizer's step that changes gradients (pre) or weights (post)."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw()(model)

        @torch.no_grad()
        def change(*_: Any) -> None:
            for p in model.parameters():
                (p.grad if kind == "pre" else p).mul_(0.9)  # type: ignore[union-attr]

        getattr(optimizer, f"register_step_{kind}_hook")(change)
        return optimizer

    return make


def restored(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose state came out of a checkpoint."""
    first = adamw()(model)
    cross_entropy(model, classes()()).backward()
    first.step()
    second = adamw()(model)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    return second


def with_another(model: nn.Module) -> torch.optim.Optimizer:
    """One optimizer for the model and something else."""
    other = nn.Linear(2, 2)
    return torch.optim.AdamW([*model.parameters(), *other.parameters()])


def observed(model: nn.Module) -> torch.optim.Optimizer:
    """A step hook that looks on."""
    optimizer = adamw()(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def lbfgs(made: Loop, batch: Any) -> Tensor:
    def closure() -> Tensor:
        made.optimizer.zero_grad()
        loss = made.loss_fn(made.model, batch)
        loss.backward()
        return loss

    return made.optimizer.step(closure).detach()


def decaying(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20, cycle_momentum=True)


class HyperSchedule(lr_scheduler.LRScheduler):
    """Moves another hyperparameter than the learning rate."""

    def __init__(self, optimizer: Any, name: str) -> None:
        self.name = name
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            if self.name == "betas":
                group["betas"] = (0.9 - 0.05 * (self.last_epoch % 5), 0.999 - 0.01 * (self.last_epoch % 7))
            else:
                group[self.name] = {"weight_decay": 0.1, "eps": 1e-3}[self.name] * (1 + self.last_epoch)


def warmup_then_decay(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])
