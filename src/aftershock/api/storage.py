"""Points on disk: safetensors with a JSON header. Written whole or not at all; nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adamw import Hyper
from ..core.batches import Batch
from ..core.calls import Autocast
from ..core.capture import Captured, PrivateCopy, dense_stride, unwrapped
from ..core.hooks import gradient_hook
from ..core.layout import Layout
from ..core.live_loop import LiveLoop
from ..core.loss import LossFunction
from ..core.outside import Outside
from ..core.randomness import RandomState
from ..core.state import CHANNELS, JointState
from ..errors import InvalidFile
from ..results.files import malformed, read_tensors, write_tensors

FORMAT = "aftershock-point-2"
SAME_MODEL = "give the model with the sizes that it had there (model=; for a command, what build() returns)"


def save_point(captured: Captured, path: Path) -> str:
    """One file with every tensor by name and everything else in its header. Returns its digest."""
    layout, state, loss = captured.loss.layout, captured.state, captured.loss
    tensors: dict[str, Tensor] = {}
    for channel in CHANNELS:
        for name, view, dtype in zip(layout.names, layout.views(getattr(state, channel)), layout.dtypes):
            tensors[f"{channel}/{name}"] = view.to(dtype)
    tensors |= {f"buffer/{name}": b for name, b in state.buffers.items()}
    tensors |= {f"constant/{name}": p for name, p in loss.constants.items()}
    tensors |= {f"random/{name}": value for name, value in captured.random.tensors().items()}
    header = {
        "format": FORMAT,
        "names": layout.names,
        "groups": layout.groups,
        "model_order": layout.model_order,
        "counts": state.counts,
        "hypers": [hyper_to_json(h) for h in captured.hypers],
        "autocast": [loss.autocast.enabled, str(loss.autocast.dtype).removeprefix("torch."), loss.autocast.scale],
        "training": {name: module.training for name, module in loss.model.named_modules()},
        "loop": {
            "scheduled": captured.loop.scheduled,
            "unused": captured.loop.unused,
            "held": sorted(captured.loop.held),
            "hooks": captured.loop.hooks,
        },
    }
    return write_tensors(path, tensors, header)


def load_captured(
    path: Path,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    *,
    constant: Sequence[nn.Module] = (),
    where_saved: bool = False,
) -> Captured:
    """The point in `path` with the code of `model`, on the model's device.

    where_saved: on the kind of device that it was saved from, where this machine has one. A GPU's kernels and random
    numbers are its own: there alone a run repeats itself.
    """
    with malformed(path, "saved point"):
        return _load(path, model, loss_fn, constant, where_saved=where_saved)


def _load(
    path: Path,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    constant: Sequence[nn.Module],
    *,
    where_saved: bool,
) -> Captured:
    tensors, header = read_tensors(path, "saved point", FORMAT)
    said = header["loop"]
    model = unwrapped(model)
    private = PrivateCopy(model, said["hooks"])
    names = tuple(header["names"])
    expected = set(names) | {key.removeprefix("constant/") for key in tensors if key.startswith("constant/")}
    if expected != set(private.original):
        odd = sorted(expected ^ set(private.original))[0]
        raise InvalidFile(
            f"{path} was saved from another model: parameter {odd!r} is only in one of them; {SAME_MODEL}"
        )
    for name in names:
        saved, given = tuple(tensors[f"theta/{name}"].shape), tuple(private.original[name].shape)
        if saved != given:
            raise InvalidFile(
                f"{path} was saved from another model: parameter {name!r} is {saved} in the file and {given} in the "
                f"model; {SAME_MODEL}"
            )
    device = private.original[names[0]].device
    device = torch.device("cpu") if device.type == "meta" else device
    random = RandomState.of({k.removeprefix("random/"): t for k, t in tensors.items() if k.startswith("random/")})
    if where_saved:
        device = _same_kind(device, random)
        _tell_where(private.model, device)
    layout = Layout(
        names=names,
        shapes=tuple(tensors[f"theta/{name}"].shape for name in names),
        strides=tuple(dense_stride(private.original[name]) for name in names),
        dtypes=tuple(tensors[f"theta/{name}"].dtype for name in names),
        groups=tuple(header["groups"]),
        model_order=tuple(header["model_order"]),
        device=device,
    )
    part = {key: tensor.to(device) for key, tensor in tensors.items() if not key.startswith("random/")}
    theta, m, v = (layout.join([part[f"{channel}/{name}"] for name in names]) for channel in CHANNELS)
    state = JointState(
        theta,
        m,
        v,
        counts=tuple(header["counts"]),
        buffers={name: part[f"buffer/{name}"] for name in private.buffers},
    )
    for name, module in private.model.named_modules():
        module.training = header["training"].get(name, module.training)
    enabled, dtype, *scale = header["autocast"]
    constants = {name: part[f"constant/{name}"] for name in private.original if name not in set(names)}
    loop = LiveLoop(
        scheduled=said["scheduled"],
        unused=said["unused"],
        held=frozenset(said["held"]),
        hooks=said["hooks"],
        gradient_hook=gradient_hook(model, said["hooks"]),
        outside=Outside([loss_fn, *private.functions], model, private.model, constant),
    )
    around = Autocast(enabled, getattr(torch, dtype), *map(float, scale))
    loss = LossFunction(private.model, loss_fn, layout, constants, around, zeroed=loop.zeroed)
    return Captured(loss, state, tuple(hyper_from_json(h) for h in header["hypers"]), random, loop)


def _same_kind(device: torch.device, random: RandomState) -> torch.device:
    """The model's device, or another of the kind that the random numbers are of: Lightning moves a model to the CPU
    when its training ends."""
    on_gpu = random.cuda is not None
    if device.type == "cpu" and on_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cuda" and not on_gpu else device


def _tell_where(model: nn.Module, device: torch.device) -> None:
    """Modules of Lightning remember where they were moved to last, and make new tensors there."""
    for module in model.modules():
        if isinstance(vars(module).get("_device"), torch.device):
            vars(module)["_device"] = device


def hyper_to_json(hyper: Hyper) -> dict[str, Any]:
    lr = hyper.lr
    dtype = str(lr.dtype).removeprefix("torch.") if isinstance(lr, Tensor) else None
    return {**asdict(hyper), "lr": float(lr), "lr_dtype": dtype}


def hyper_from_json(values: dict[str, Any]) -> Hyper:
    values = dict(values)
    dtype = values.pop("lr_dtype")
    if dtype is not None:
        values["lr"] = torch.tensor(values["lr"], dtype=getattr(torch, dtype))
    return Hyper(**values)
