"""Reading a live model and optimizer without touching either, and refusing by name what is not modelled."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, MixedDevices, UnsupportedModel, UnsupportedOptimizer
from .adamw import Hyper
from .batches import Batch
from .layout import Layout
from .loss import Autocast, LossFunction
from .randomness import RandomState
from .state import JointState


@dataclass(frozen=True)
class Captured:
    """Everything that a training point is made of."""

    loss: LossFunction
    state: JointState
    hypers: tuple[Hyper, ...]
    random: RandomState


def read(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[[nn.Module, Batch], Tensor]) -> Captured:
    """Copy a live model and optimizer. Neither is touched."""
    optimizer = unwrapped_optimizer(optimizer)
    private = PrivateCopy(unwrapped(model))
    members = _optimized_parameters(private, optimizer)
    layout = _layout(private, members)
    device = layout.device
    originals = [private.original[name] for name in layout.names]
    moments = [optimizer.state.get(p, {}) for p in originals]
    state = JointState(
        theta=layout.join([p.detach() for p in originals]),
        m=layout.join([moment.get("exp_avg") for moment in moments]),
        v=layout.join([moment.get("exp_avg_sq") for moment in moments]),
        counts=tuple(int(moment.get("step", 0)) for moment in moments),
        buffers={name: b.detach().clone() for name, b in private.buffers.items()},
    )
    trained = set(layout.names)
    constants = {n: p.detach().clone() for n, p in private.original.items() if n not in trained}
    loss = LossFunction(private.model, loss_fn, layout, constants, Autocast.now(device))
    hypers = tuple(read_hyper(group, optimizer) for group in optimizer.param_groups)
    return Captured(loss, state, hypers, RandomState.now(device))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and DistributedDataParallel."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


class PrivateCopy:
    """The model's code and configuration with empty tensors in the place of its data.

    Data comes in through `functional_call`; a tensor that this forgets fails loudly, since it is on the
    meta device. The user's hooks stay behind, except those by which torch itself computes weights
    (weight_norm, spectral_norm, pruning).
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_unsupported_modules(model)
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
        for module in model.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                hooks = getattr(module, name)
                memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if _is_torchs_own(hook))
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:  # deepcopy refuses these
                    memo[id(value)] = value.detach().clone()
        blank = {id(memo[id(p)]): p for p in model.parameters()}
        blank_buffers = {id(memo[id(b)]): b for b in model.buffers()}
        try:
            self.model = copy.deepcopy(model, memo)
        except Exception as error:
            raise UnsupportedModel(
                f"the model cannot be copied: {type(error).__name__}: {error}. Remove what cannot be deep-copied "
                "(locks, open files, tensors with a graph) from its attributes"
            ) from error
        _strip_compilation(self.model)
        self.original = {name: blank[id(p)] for name, p in self.model.named_parameters()}
        self.buffers = {name: blank_buffers[id(b)] for name, b in self.model.named_buffers()}


def _strip_compilation(model: nn.Module) -> None:
    for module in model.modules():
        module._compiled_call_impl = None
        for name, child in module.named_children():
            if hasattr(child, "_orig_mod"):
                setattr(module, name, child._orig_mod)


def _is_torchs_own(hook: object) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils")


def _refuse_unsupported_modules(model: nn.Module) -> None:
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UnsupportedModel(f"{name!r} has no shape yet (a lazy module); run one forward pass first")
    for name, module in model.named_modules():
        if type(module).__name__ in {"FullyShardedDataParallel", "FSDPModule"} or any(
            base.__name__ == "FSDPModule" for base in type(module).__mro__
        ):
            raise UnsupportedModel(
                f"module {name or 'model'!r} is sharded by FSDP; gather the full parameters into an ordinary "
                "module (torch.distributed.checkpoint.state_dict) and capture that"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedModel(
                f"module {name!r} has max_norm={module.max_norm:g}: it rescales its weights in place in every forward "
                "pass, which is no step of the optimizer; set max_norm=None and divide by the norm in forward()"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedModel(f"module {name!r} has sparse gradients; set sparse=False")


def unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate and Lightning wrap it
    ours = {inspect.unwrap(cls.step) for cls in (torch.optim.Adam, torch.optim.AdamW)}
    if not isinstance(optimizer, torch.optim.Optimizer) or inspect.unwrap(type(optimizer).step) not in ours:
        raise UnsupportedOptimizer(
            f"the optimizer is {type(optimizer).__name__}; aftershock models torch.optim.AdamW and torch.optim.Adam"
        )
    for i, group in enumerate(optimizer.param_groups):
        if group.get("amsgrad"):
            raise UnsupportedOptimizer(f"group {i} has amsgrad=True; aftershock models amsgrad=False")
    return optimizer


def _optimized_parameters(private: PrivateCopy, optimizer: torch.optim.Optimizer) -> list[tuple[str, int]]:
    """(name, group) of every trainable parameter, in the optimizer's order."""
    names = {id(p): name for name, p in private.original.items()}
    members: list[tuple[str, int]] = []
    for group, entries in enumerate(optimizer.param_groups):
        for p in entries["params"]:
            if id(p) not in names:
                raise UnsupportedOptimizer(
                    f"group {group} of the optimizer holds a parameter of shape {tuple(p.shape)} that the model "
                    "does not have; capture the module that owns it (put the loss's parameters inside the model)"
                )
            if p.requires_grad:
                _refuse_unsupported_parameter(names[id(p)], p)
                members.append((names[id(p)], group))
    known = {name for name, _ in members}
    for name, p in private.original.items():
        if p.requires_grad and name not in known:
            raise UnsupportedModel(
                f"parameter {name!r} needs a gradient but is in no group of the optimizer; "
                "freeze it with requires_grad_(False) or give it to the optimizer"
            )
    if not members:
        raise InvalidInput("the model has no parameter that needs a gradient: there is nothing to train")
    return members


def _refuse_unsupported_parameter(name: str, p: nn.Parameter) -> None:
    if type(p).__name__ == "DTensor" or type(p.data) is not Tensor:
        raise UnsupportedModel(
            f"parameter {name!r} is a {type(p.data).__name__}; aftershock needs ordinary tensors "
            "(for a DTensor: .full_tensor())"
        )
    if p.is_complex():
        raise UnsupportedModel(f"parameter {name!r} is complex; aftershock models real parameters")
    if p.is_meta:
        raise UnsupportedModel(f"parameter {name!r} is on the meta device and holds no data; materialize it first")
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        raise UnsupportedModel(
            f"parameter {name!r} has a gradient hook, which may change its gradient (clipping by value, scaling) "
            "unseen; remove the hook. Clipping by the global norm is follow(..., clip=max_norm)"
        )


def _layout(private: PrivateCopy, members: list[tuple[str, int]]) -> Layout:
    tensors = [private.original[name] for name, _ in members]
    devices = {p.device for p in tensors}
    if len(devices) > 1:
        raise MixedDevices(
            f"parameters are on {', '.join(sorted(map(str, devices)))}; aftershock needs the model on one device"
        )
    position = {name: i for i, (name, _) in enumerate(members)}
    return Layout(
        names=tuple(name for name, _ in members),
        shapes=tuple(p.shape for p in tensors),
        strides=tuple(dense_stride(p) for p in tensors),
        dtypes=tuple(p.dtype for p in tensors),
        groups=tuple(group for _, group in members),
        model_order=tuple(position[name] for name in private.original if name in position),
        device=tensors[0].device,
    )


def dense_stride(p: Tensor) -> tuple[int, ...]:
    """The parameter's own stride where it fills its memory (channels_last does), else a plain one."""
    dense = torch.empty_like(p, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())


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
