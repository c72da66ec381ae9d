"""One recorded update as a safetensors file, written and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.storage import hyper_from_json, hyper_to_json
from ..core.randomness import RandomState
from ..errors import InvalidFile
from ..results.files import malformed, read_tensors
from .records import Fed, Forward, Record, check

STEP_FORMAT = "aftershock-step-2"


def read_record(path: Path, step: int) -> Record:
    with malformed(path, "recorded step"):
        tensors, header = read_tensors(path, "recorded step", STEP_FORMAT)
        record = _from_file(tensors, header)
    if record.step != step:
        raise InvalidFile(f"{path} holds step {record.step}: it is not the file that its name says")
    return record


def _from_file(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Record:
    fed = []
    for i, entry in enumerate(header["fed"]):
        parts = tuple(tensors[f"batch/{i}/{k}"] for k in range(entry["tensors"]))
        check(entry["structure"], parts)
        own = f"random/{i}/"
        random = RandomState.of({key.removeprefix(own): t for key, t in tensors.items() if key.startswith(own)})
        fed.append(Fed(entry["structure"], parts, int(entry["index"]), random))
    autocast, dtype, evaluating, *begun = header["forward"]
    if not isinstance(getattr(torch, dtype), torch.dtype) or not fed:
        raise ValueError(f"autocast to {dtype!r}, {len(fed)} batches")
    clip, divisor = header["clip"], header["divisor"]
    return Record(
        step=int(header["step"]),
        fed=tuple(fed),
        loss=float(header["loss"]),
        norm=float(header["norm"]),
        raw_norm=float(header["raw_norm"]),
        hypers=tuple(hyper_from_json(h) for h in header["hypers"]),
        clip=None if clip is None else float(clip),
        forward=Forward(bool(autocast), getattr(torch, dtype), tuple(map(str, evaluating)), any(begun)),
        divisor=None if divisor is None else float(divisor),
        scale=float(header.get("scale", 1.0)),
    )


def to_file(record: Record) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    for i, fed in enumerate(record.fed):
        tensors |= {f"batch/{i}/{k}": tensor for k, tensor in enumerate(fed.tensors)}
        tensors |= {f"random/{i}/{name}": value for name, value in fed.random.tensors().items()}
    header = {
        "format": STEP_FORMAT,
        "step": record.step,
        "fed": [{"structure": f.structure, "tensors": len(f.tensors), "index": f.index} for f in record.fed],
        "loss": str(record.loss),
        "norm": str(record.norm),
        "raw_norm": str(record.raw_norm),
        "hypers": [hyper_to_json(h) for h in record.hypers],
        "clip": record.clip,
        "divisor": record.divisor,
        "scale": record.scale,
        "forward": [
            record.forward.autocast,
            str(record.forward.autocast_dtype).removeprefix("torch."),
            list(record.forward.evaluating),
            record.forward.begun,
        ],
    }
    return tensors, header
