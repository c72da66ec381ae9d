"""Files: tensors and a JSON header in one safetensors file with its digest; labelled results as zarr.

Everything is written whole or not at all, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import AftershockError, InvalidFile
from ..extras import require

if TYPE_CHECKING:
    import xarray as xr

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
PLACE = b'"digest": "'  # quotes inside the user's own text are escaped: this occurs once
BLANK = b"0" * 64  # stands in the digest's place while the digest is computed
CHUNK = 2**20
HEADER = "zarr.json"
MARK = "aftershock_file"  # the attribute of a store that tells that we wrote it
OTHER_VERSION = "read it with the version of aftershock that wrote it, or make it again with this one"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Write a safetensors file, whole or not at all, and return its digest.

    Tensors go to the file one at a time and straight from their own memory: a state is not copied again.
    """
    # readers view the data in place, so that wide types must come first to be aligned
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    start, entries = 0, {}
    for name in names:
        tensor = tensors[name]
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _dtype(name, tensor), "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    meta = {"digest": BLANK.decode(), "aftershock": json.dumps(header)}
    text = json.dumps({"__metadata__": meta, **entries}).encode()
    text += b" " * (-len(text) % 8)
    found = ""

    def write(part: str) -> None:
        nonlocal found
        digest = hashlib.sha256(text)
        with open(part, "wb", buffering=CHUNK) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                data = _memory(tensors[name])
                digest.update(data)
                file.write(data)
            found = digest.hexdigest()
            file.seek(8 + text.index(PLACE) + len(PLACE))
            file.write(found.encode())

    write_whole(path, write)
    return found


def read_tensors(path: Path, what: str, format: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file of this `format`, its digest proved. `what` names it to the user."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InvalidFile(f"there is no {what} at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            header = json.loads(meta.get("aftershock", "{}"))
            if header.get("format") != format:
                raise InvalidFile(f"{path} is not a {what} of this version of aftershock ({format}); {OTHER_VERSION}")
            if meta.get("digest") != digest_of(path):
                raise InvalidFile(f"{path} was changed after it was written: its digest does not match")
            return {key: file.get_tensor(key) for key in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidFile(f"{path} is damaged or not a {what}: {error}") from error


@contextlib.contextmanager
def malformed(path: Path, what: str) -> Iterator[None]:
    """Whatever goes wrong with the contents of a file is an `InvalidFile`."""
    try:
        yield
    except AftershockError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidFile(f"{path} is damaged or not a {what}: {reason[:300]}") from error


def read_header(path: Path) -> tuple[str, dict[str, Any]]:
    """(the digest that a file of ours says it has, its header). It must be as long as it says; data are not read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
        header = json.loads(meta.get("aftershock", "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise InvalidFile(f"{path} is damaged: {error}") from error
    return str(meta.get("digest")), header if isinstance(header, dict) else {}


def digest_of(path: Path) -> str:
    """sha256 of a file that `write_tensors` wrote, with its own digest left out."""
    with open(path, "rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
        begin = text.index(PLACE) + len(PLACE)
        digest = hashlib.sha256(text[:begin] + BLANK + text[begin + len(BLANK) :])
        for chunk in _chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def write_whole(path: Path, write: Callable[[str], object]) -> None:
    """Write a file beside its place and move it there: a reader never sees half of it."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    part = str(path.with_name(f".{path.name}.{secrets.token_hex(4)}"))
    try:
        write(part)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _memory(tensor: Tensor) -> memoryview:
    """Its bytes; those of a dense tensor on the host are not copied.

    Read through NumPy: each call into torch lets other threads in, and beside a training loop this one, and the loop,
    would then wait for their turn.
    """
    if tensor.device.type != "cpu" or tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know
        tensor = tensor.view(torch.int16)
    return tensor.numpy().reshape(-1).view(np.uint8).data


def _dtype(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in NAMES:
        raise InvalidFile(f"{name!r} is {tensor.dtype}, which cannot be written to a safetensors file here")
    return NAMES[tensor.dtype]


def _chunks(file: IO[bytes]) -> Any:
    return iter(lambda: file.read(CHUNK), b"")


# --- labelled results


def save_dataset(data: xr.Dataset, path: Path) -> None:
    """Write a dataset as zarr, whole or not at all: beside its place, then moved there.

    path: a folder that does not exist yet, an empty one, or an older result, which is replaced.
    """
    require("zarr", "studies", "saved results")
    try:
        _may_replace(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise InvalidFile(f"nothing can be saved at {path}: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zarr's remarks on strings and metadata are not the user's concern
            # a chunk that is left out because it is empty would come back with other bits: -0.0 as 0.0
            data.drop_encoding().to_zarr(part, mode="w", consolidated=False, write_empty_chunks=True)
        _mark(part, list(map(str, data.variables)))
        _move(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_dataset(path: Path, wanted: Iterable[str], what: str) -> xr.Dataset:
    """A dataset that `save_dataset` wrote, in memory; whatever is wrong with the file is an `InvalidFile`.

    wanted: variables that it must have; where any is named, a file without a digest is read, too, as builds before it
        wrote them. what: its name for the user, such as "saved response".
    """
    import xarray as xr

    if not path.exists():
        raise InvalidFile(f"there is no {what} at {path}")
    require("zarr", "studies", "saved results")
    try:
        mark, found = _header(path)["attributes"].get(MARK), _contents_digest(path)
        data = xr.open_zarr(path, chunks=None, consolidated=False).load().drop_encoding()
        order = mark["variables"] if mark else list(data.variables)
        changed = mark is not None and found != mark["digest"]
    except Exception as error:  # whatever zarr finds wrong in a foreign file
        raise InvalidFile(f"{path} is damaged or not a {what}: {error}") from error
    if changed:
        raise InvalidFile(f"{path} is damaged: it was changed after it was written, and its digest does not match")
    wanted = list(wanted)
    missing = [name for name in wanted if name not in data.variables]
    if missing or not (mark or wanted):
        lacks = repr(missing[0]) if missing else "digest"
        raise InvalidFile(f"{path} is not a {what} of this version of aftershock: it has no {lacks}; {OTHER_VERSION}")
    data.attrs.pop(MARK, None)
    return _in_order(data, order)


def _in_order(data: xr.Dataset, names: Iterable[str]) -> xr.Dataset:
    """A folder has no order of its own, and a table has one that its reader knows."""
    import xarray as xr

    ordered = {name: data.variables[name] for name in names}
    values = {name: one for name, one in ordered.items() if name not in data.coords}
    return xr.Dataset(values, {name: one for name, one in ordered.items() if name in data.coords}, data.attrs)


def _header(path: Path) -> dict[str, Any]:
    header: dict[str, Any] = json.loads((path / HEADER).read_text())
    return header


def _mark(path: Path, variables: list[str]) -> None:
    """Say in a store's header that it is ours, in which order its variables come, and what its files hold."""
    header = _header(path)
    header["attributes"] = header.get("attributes", {}) | {
        MARK: {"variables": variables, "digest": _contents_digest(path)}
    }
    (path / HEADER).write_text(json.dumps(header, indent=2))


def _contents_digest(path: Path) -> str:
    """sha256 of a store's files with their names, without its mark: of a file that is missing, zarr makes up zeros."""
    header = _header(path)
    header["attributes"] = {key: value for key, value in header.get("attributes", {}).items() if key != MARK}
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    for name in sorted(name for name in files if name != HEADER and not files[name].name.startswith(".")):
        digest.update(json.dumps([name, files[name].stat().st_size]).encode())
        with open(files[name], "rb") as file:
            for chunk in _chunks(file):
                digest.update(chunk)
    return digest.hexdigest()


def _may_replace(path: Path) -> None:
    """Only results are replaced: a folder of something else would be lost."""
    if path.exists() and not (path.is_dir() and (not any(path.iterdir()) or _is_ours(path))):
        raise InvalidFile(f"{path} exists and is not a saved result: choose another path")


def _is_ours(path: Path) -> bool:
    """A store with our mark, or with the provenance that builds before it wrote, which holds nothing but arrays."""
    try:
        attributes = _header(path)["attributes"]
        known = MARK in attributes or "aftershock" in attributes
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    others = (one for one in path.iterdir() if one.name != HEADER and not one.name.startswith("."))
    return known and all((one / HEADER).is_file() for one in others)


def _move(part: Path, path: Path) -> None:
    """Into its place; what was there before comes back where that fails."""
    if not path.exists():
        part.rename(path)
        return
    away = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    path.rename(away / "old")
    try:
        part.rename(path)
    except BaseException:
        (away / "old").rename(path)
        raise
    finally:
        shutil.rmtree(away)
