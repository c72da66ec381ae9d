"""A training point from a checkpoint's two state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidFile, UnsupportedOptimizer
from .capture import Captured, plain_name, unwrapped
from .live_optimizer import is_scheduled, read_hyper, unwrapped_optimizer
from .loss import LossFunction
from .state import JointState


def overwrite(
    captured: Captured,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_state: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any],
) -> Captured:
    """The captured point with its numbers taken from a checkpoint. Model and optimizer stay as they are."""
    optimizer, loss, layout = unwrapped_optimizer(optimizer, captured.loop.hooks), captured.loss, captured.loss.layout
    weights = _Weights.of(unwrapped(model), model_state, layout.device)
    groups = _groups(optimizer, optimizer_state)
    moments = _moments(unwrapped(model), optimizer, groups, optimizer_state)
    pairs = list(zip(layout.names, layout.shapes))
    buffers = captured.state.buffers
    state = JointState(
        theta=layout.join([weights.read(name, shape) for name, shape in pairs]),
        m=layout.join([_moment(moments, name, shape, "exp_avg") for name, shape in pairs]),
        v=layout.join([_moment(moments, name, shape, "exp_avg_sq") for name, shape in pairs]),
        counts=tuple(int(moments[name].get("step", 0)) for name in layout.names),
        # buffers that are not persistent are in no checkpoint
        buffers={n: weights.read(n, b.shape) if n in weights.tensors else b for n, b in buffers.items()},
    )
    constants = {name: weights.read(name, p.shape) for name, p in loss.constants.items()}
    loop = replace(captured.loop, scheduled=is_scheduled(groups))
    if loop.unused == "zero":
        loop = replace(loop, held=frozenset(i for i, count in enumerate(state.counts) if count))
    fresh = LossFunction(loss.model, loss.loss_fn, layout, constants, loss.autocast, zeroed=loop.zeroed)
    hypers = tuple(read_hyper({**own, **saved}, optimizer) for saved, own in zip(groups, optimizer.param_groups))
    return replace(captured, loss=fresh, state=state, hypers=hypers, loop=loop)


@dataclass(frozen=True)
class _Weights:
    """The model's tensors in a checkpoint, under the names that this model gives them."""

    tensors: dict[str, Tensor]
    aliases: dict[str, list[str]]
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, state: Mapping[str, Tensor], device: torch.device) -> _Weights:
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}  # a checkpoint may hold a tied parameter under any of its names
        for name, p in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(first.setdefault(id(p), _plain(name)), []).append(_plain(name))
        return cls({_plain(name): value for name, value in state.items()}, aliases, device)

    def read(self, name: str, shape: torch.Size) -> Tensor:
        found = next((self.tensors[a] for a in self.aliases.get(name, [name]) if a in self.tensors), None)
        if found is None:
            raise InvalidFile(f"the checkpoint has no tensor for {name!r}; it belongs to another model")
        if found.shape != shape:
            raise InvalidFile(f"the checkpoint's {name!r} is {tuple(found.shape)}; the model's is {tuple(shape)}")
        return found.detach().to(self.device)


def _groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = state.get("param_groups", [])
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
        raise InvalidFile(
            "the checkpoint's optimizer has other parameter groups than this one; "
            "build the optimizer as the training script did"
        )
    if any(group.get("amsgrad") for group in groups):
        raise UnsupportedOptimizer("the checkpoint's optimizer has amsgrad=True; aftershock models amsgrad=False")
    return groups


def _moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The saved optimizer state of each parameter by name: both sides list parameters in the same order."""
    names = {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}
    return {
        names[id(p)]: state["state"].get(key, {})
        for saved, own in zip(groups, optimizer.param_groups)
        for key, p in zip(saved["params"], own["params"])
    }


def _moment(moments: Mapping[str, Mapping[str, Any]], name: str, shape: torch.Size, key: str) -> Tensor | None:
    value = moments[name].get(key)
    if value is not None and value.shape != shape:
        raise InvalidFile(f"the checkpoint's {key} of {name!r} is {tuple(value.shape)}; expected {tuple(shape)}")
    return value


def _plain(name: str) -> str:
    return plain_name(name.removeprefix("module."))
