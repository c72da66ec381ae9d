"""Points on disk: safetensors with a JSON header. Written whole or not at all; nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adamw import Hyper
from ..core.batches import Batch
from ..core.capture import Captured, PrivateCopy, dense_stride, unwrapped
from ..core.layout import Layout
from ..core.loss import Autocast, LossFunction
from ..core.randomness import RandomState
from ..core.state import CHANNELS, JointState
from ..errors import InvalidFile

FORMAT = "aftershock-point-1"


def save_point(captured: Captured, path: Path) -> None:
    """One file with every tensor by name and everything else in its header."""
    from safetensors.torch import save_file

    layout, state, loss = captured.loss.layout, captured.state, captured.loss
    tensors: dict[str, Tensor] = {}
    for channel in CHANNELS:
        for name, view, dtype in zip(layout.names, layout.views(getattr(state, channel)), layout.dtypes):
            tensors[f"{channel}/{name}"] = view.to(dtype)
    tensors |= {f"buffer/{name}": b for name, b in state.buffers.items()}
    tensors |= {f"constant/{name}": p for name, p in loss.constants.items()}
    tensors["random/cpu"] = captured.random.cpu
    if captured.random.cuda is not None:
        tensors["random/cuda"] = captured.random.cuda
    header = {
        "format": FORMAT,
        "names": layout.names,
        "groups": layout.groups,
        "model_order": layout.model_order,
        "counts": state.counts,
        "hypers": [_hyper_to_json(h) for h in captured.hypers],
        "autocast": [loss.autocast.enabled, str(loss.autocast.dtype).removeprefix("torch.")],
        "training": {name: module.training for name, module in loss.model.named_modules()},
    }
    contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(path, lambda part: save_file(contiguous, part, metadata={"aftershock": json.dumps(header)}))


def load_captured(path: Path, model: nn.Module, loss_fn: Callable[[nn.Module, Batch], Tensor]) -> Captured:
    """The point in `path` with the code of `model`."""
    tensors, header = _read(path)
    private = PrivateCopy(unwrapped(model))
    names = tuple(header["names"])
    expected = set(names) | {key.removeprefix("constant/") for key in tensors if key.startswith("constant/")}
    if expected != set(private.original):
        odd = sorted(expected ^ set(private.original))[0]
        raise InvalidFile(f"{path} was saved from another model: parameter {odd!r} is only in one of them")
    for name in names:
        if tensors[f"theta/{name}"].shape != private.original[name].shape:
            raise InvalidFile(
                f"{path}: parameter {name!r} is {tuple(tensors[f'theta/{name}'].shape)} in the file and "
                f"{tuple(private.original[name].shape)} in the model"
            )
    device = private.original[names[0]].device
    device = torch.device("cpu") if device.type == "meta" else device
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
    enabled, dtype = header["autocast"]
    constants = {name: part[f"constant/{name}"] for name in private.original if name not in set(names)}
    loss = LossFunction(private.model, loss_fn, layout, constants, Autocast(enabled, getattr(torch, dtype)))
    random = RandomState(tensors["random/cpu"], tensors.get("random/cuda"))
    return Captured(loss, state, tuple(_hyper_from_json(h) for h in header["hypers"]), random)


def write_whole(path: Path, write: Callable[[str], object]) -> None:
    """Write a file beside its place and move it there: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(part)
        os.chmod(part, 0o666 & ~_umask())  # mkstemp lets nobody else read; an ordinary file would
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)  # reading it means setting it
    os.umask(mask)
    return mask


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InvalidFile(f"there is no saved point at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("aftershock", "{}"))
            if header.get("format") != FORMAT:
                raise InvalidFile(f"{path} is not a saved point of this version of aftershock ({FORMAT})")
            return {key: file.get_tensor(key) for key in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise InvalidFile(f"{path} is damaged or not a saved point: {error}") from error


def _hyper_to_json(hyper: Hyper) -> dict[str, Any]:
    lr = hyper.lr
    dtype = str(lr.dtype).removeprefix("torch.") if isinstance(lr, Tensor) else None
    return {**asdict(hyper), "lr": float(lr), "lr_dtype": dtype}


def _hyper_from_json(values: dict[str, Any]) -> Hyper:
    values = dict(values)
    dtype = values.pop("lr_dtype")
    if dtype is not None:
        values["lr"] = torch.tensor(values["lr"], dtype=getattr(torch, dtype))
    return Hyper(**values)
