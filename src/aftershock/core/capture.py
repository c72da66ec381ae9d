"""Reading a live model and optimizer without touching either, and refusing by name what is not modelled."""

from __future__ import annotations

import copy
import itertools
import math
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, MixedDevices, UnsupportedModel, UnsupportedOptimizer
from .adamw import Hyper
from .batches import Batch
from .calls import Autocast
from .hooks import KINDS, Hooks, gradient_hook, has_gradient_hook, kept, refuse_unspoken
from .layout import Layout
from .live_loop import LiveLoop, Unused, computed_in, unused_gradients
from .live_optimizer import is_scheduled, read_hyper, unwrapped_optimizer
from .loss import LossFunction
from .outside import Outside, marked
from .randomness import RandomState
from .state import JointState


@dataclass(frozen=True)
class Captured:
    """Everything that a training point is made of."""

    loss: LossFunction
    state: JointState
    hypers: tuple[Hyper, ...]
    random: RandomState
    loop: LiveLoop


def read(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    *,
    hooks: Hooks | None = None,
    autocast: torch.dtype | Literal[False] | None = None,
    loss_scale: float = 1.0,
    unused: Unused | None = None,
    constant: Sequence[nn.Module] = (),
) -> Captured:
    """Copy a live model and optimizer. Neither is touched."""
    model, optimizer = unwrapped(model), unwrapped_optimizer(optimizer, hooks)
    private = PrivateCopy(model, hooks)
    members = _optimized_parameters(private, optimizer)
    _refuse_shared_memory(private, {name for name, _ in members})
    layout = _layout(private, members)
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
    constants = {n: p.detach() for n, p in private.original.items() if n not in trained}  # shared, and watched
    grads = [p.grad for p in originals]
    loop = LiveLoop(
        scheduled=is_scheduled(optimizer.param_groups),
        unused=unused_gradients(grads, state.counts) if unused is None else unused,
        held=frozenset(
            i for i, p in enumerate(originals) if p.grad is not None or (unused == "zero" and state.counts[i])
        ),
        computed_in=computed_in(grads) if autocast is None else None,
        hooks=hooks,
        gradient_hook=gradient_hook(model, hooks),
        outside=Outside([loss_fn, *private.functions], model, private.model, constant),
    )
    around = replace(_autocast(autocast, layout.device), scale=_positive(loss_scale))
    loss = LossFunction(private.model, loss_fn, layout, constants, around, zeroed=loop.zeroed)
    loss.frozen = marked(constants)
    hypers = tuple(read_hyper(group, optimizer) for group in optimizer.param_groups)
    return Captured(loss, state, hypers, RandomState.now(layout.device), loop)


def _autocast(given: torch.dtype | Literal[False] | None, device: torch.device) -> Autocast:
    now = Autocast.now(device)
    if given is None:
        return now
    if given is not False and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise InvalidInput(f"autocast is a dtype such as torch.bfloat16, or False; got {given!r}")
    return Autocast(False, now.dtype) if given is False else Autocast(True, given)


def _positive(loss_scale: float) -> float:
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise InvalidInput(
            f"loss_scale is what the scaler multiplies the loss by, a positive number; got {loss_scale!r}"
        )
    return float(loss_scale)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and DistributedDataParallel."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def plain_name(name: str) -> str:
    """A parameter's or buffer's name without the prefix of compiled parts of the model."""
    return name.replace("_orig_mod.", "")


class PrivateCopy:
    """The model's code and configuration with empty tensors in the place of its data.

    Data comes in through `Places`; a tensor that this forgets fails loudly, since it is on the meta device. Hooks stay
    behind, except those by which torch itself computes weights (weight_norm, spectral_norm, pruning) and, with
    hooks="run", the user's.
    """

    def __init__(self, model: nn.Module, hooks: Hooks | None = None) -> None:
        _refuse_unsupported_modules(model)
        refuse_unspoken(model, hooks)
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
        for module in model.modules():
            for kind in KINDS:
                memo[id(getattr(module, kind))] = OrderedDict()
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:  # deepcopy refuses these
                    memo[id(value)] = value.detach().clone()
        blank = {id(memo[id(p)]): p for p in model.parameters()}
        blank_buffers = {id(memo[id(b)]): b for b in model.buffers()}
        try:
            self.model = copy.deepcopy(model, memo)
            self.functions = self._copy_hooks(model, hooks, memo) + _own_functions(self.model)
        except Exception as error:
            raise UnsupportedModel(
                f"the model cannot be copied: {type(error).__name__}: {error}. Remove what cannot be deep-copied "
                "(locks, open files, tensors with a graph) from its attributes"
            ) from error
        _strip_compilation(self.model)
        _leave_weights_in_place(self.model)
        self.original = {name: blank[id(p)] for name, p in self.model.named_parameters()}
        self.buffers = {name: blank_buffers[id(b)] for name, b in self.model.named_buffers()}

    @staticmethod
    def _copy_hooks(model: nn.Module, word: Hooks | None, memo: dict[int, Any]) -> list[Callable[..., Any]]:
        """Give the copy its hooks; a method of a part of the model becomes the copy's."""
        copied: list[Callable[..., Any]] = []
        for module, kind in itertools.product(model.modules(), KINDS):
            hooks = getattr(module, kind)
            if hooks:
                own = {key: copy.deepcopy(hook, memo) for key, hook in kept(hooks, word).items()}
                memo[id(hooks)].update(own)
                copied += own.values()
        return copied


def _own_functions(model: nn.Module) -> list[Callable[..., Any]]:
    """Functions put onto a module in the place of its methods, which may hold on to the live model."""
    kinds = types.FunctionType | types.MethodType
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, kinds)]


def _strip_compilation(model: nn.Module) -> None:
    for module in model.modules():
        module._compiled_call_impl = None
        for name, child in module.named_children():
            if hasattr(child, "_orig_mod"):
                setattr(module, name, child._orig_mod)


def _leave_weights_in_place(model: nn.Module) -> None:
    """cuDNN likes an RNN's weights in one piece, and torch moves the tensors that it finds there to make one: those of
    the path, and frozen ones of the live model. In a copy it copies them instead, with the same numbers."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _nothing  # type: ignore[method-assign]


def _nothing() -> None: ...


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
    if has_gradient_hook(p):
        raise UnsupportedModel(
            f"parameter {name!r} has a gradient hook, which may change its gradient (clipping by value, scaling) "
            "unseen; remove the hook. Clipping by the global norm is follow(..., clip=max_norm)"
        )


def _refuse_shared_memory(private: PrivateCopy, trained: set[str]) -> None:
    """Two tensors on one memory move together in the live run, and would not in a copy."""
    tensors = [*private.original.items(), *private.buffers.items()]
    dense = [(n, x) for n, x in tensors if x.layout == torch.strided and x.numel() and not x.is_meta]
    spans = sorted((*_span(tensor), name) for name, tensor in dense)
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end and trained & {name, other}:
            raise UnsupportedModel(
                f"{name!r} and {other!r} lie on the same memory without being the same parameter (tied through .data, "
                "or a view), so that a step moves both; tie them as one parameter: b.weight = a.weight"
            )


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """The device and the bytes between which a tensor lies."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


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
