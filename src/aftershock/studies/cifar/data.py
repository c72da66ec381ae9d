"""CIFAR-10 from a file, a folder or Hugging Face, checked before it is used. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ...errors import AftershockError, InvalidFile, InvalidInput

if TYPE_CHECKING:
    import numpy as np

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of each channel, the usual ones
CLASSES = 10
RECORD = 1 + 3 * 32 * 32  # the binary version: a label, then the red, green and blue planes
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
ARCHIVE, NPZ, HUB = "cifar-10-binary.tar.gz", "cifar10.npz", "uoft-cs/cifar10"
THREE_WAYS = (
    f"CIFAR-10 comes from one of: a file {NPZ} with {', '.join(ARRAYS)} (uint8, images as [n, 32, 32, 3]); the binary "
    f"version of the official distribution, {ARCHIVE} or its folder (https://www.cs.toronto.edu/~kriz/cifar.html); "
    "each given with --data; or, without --data, Hugging Face: pip install datasets, and a network"
)

Parts = dict[str, "np.ndarray"]


@dataclass(frozen=True)
class Images:
    """Images as they are stored, [n, channel, row, column], with their labels."""

    pixels: UInt8[Tensor, "n 3 32 32"]
    labels: Int64[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(
        self, index: Int64[Tensor, " batch"], device: torch.device
    ) -> tuple[Float[Tensor, "batch 3 32 32"], Int64[Tensor, " batch"]]:
        """Some images in float64, each channel with the usual mean and deviation taken out, and their labels."""
        mean, deviation = (torch.tensor(x, dtype=torch.float64, device=device).view(3, 1, 1) for x in (MEAN, DEVIATION))
        pixels = self.pixels[index].to(device).double() / 255
        return (pixels - mean) / deviation, self.labels[index].to(device)


@dataclass(frozen=True)
class Cifar:
    """The set, or as much of it as the file holds; `digest` says which."""

    train: Images
    test: Images
    digest: str

    def require(self, train: int, test: int) -> None:
        """Refuse a set with fewer images than one system draws, without replacement."""
        for name, images, needed in (("training", self.train, train), ("test", self.test, test)):
            if len(images) < needed:
                raise InvalidFile(
                    f"the data has {len(images):,} {name} images and one system needs {needed:,}, each used once; "
                    "give the whole set"
                )


@cache
def load_cifar(source: Path | None) -> Cifar:
    """CIFAR-10 from a file or folder, or from Hugging Face where `source` is None. Loaded once per process."""
    where = HUB if source is None else str(source)
    try:
        return _checked(_from_hub() if source is None else _from_disk(source), where)
    except AftershockError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise InvalidFile(f"{where} could not be read as CIFAR-10: {error}. {THREE_WAYS}") from error


def _from_disk(source: Path) -> Parts:
    if not source.exists():
        raise InvalidFile(f"there is nothing at {source}. {THREE_WAYS}")
    if source.is_file():
        readers: Mapping[str, Callable[[Path], Parts]] = {".npz": _from_npz, ".tar.gz": _from_archive}
        for ending, read in readers.items():
            if source.name.endswith(ending):
                return read(source)
        raise InvalidFile(f"{source.name} is none of the files that hold CIFAR-10. {THREE_WAYS}")
    for name, read in ((NPZ, _from_npz), ("data_batch_1.bin", _from_records), (ARCHIVE, _from_archive)):
        found = [path for path in (source / name, source / "cifar-10-batches-bin" / name) if path.exists()]
        if found:
            return read(found[0])
    raise InvalidFile(f"the folder {source} holds no CIFAR-10 that can be read. {_pickles(source)}{THREE_WAYS}")


def _pickles(folder: Path) -> str:
    """A word to who has the Python version: pickles run code when they are opened."""
    names = ("data_batch_1", "cifar-10-batches-py", "cifar-10-python.tar.gz")
    found = [name for name in names if (folder / name).exists()]
    return f"{found[0]} is the Python version, whose pickles are never opened: take the binary one. " if found else ""


def _from_npz(path: Path) -> Parts:
    import numpy as np

    with np.load(path, allow_pickle=False) as stored:
        missing = [name for name in ARRAYS if name not in stored.files]
        if missing:
            raise InvalidFile(f"{path} is not CIFAR-10: it has no array {missing[0]!r}. {THREE_WAYS}")
        return {name: stored[name] for name in ARRAYS}


def _from_archive(path: Path) -> Parts:
    with tarfile.open(path, "r:gz") as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        if "data_batch_1" in members:
            raise InvalidFile(f"{path} is the Python version, whose pickles are never opened: take {ARCHIVE}")
        opened = {name: archive.extractfile(member) for name, member in members.items() if name.endswith(".bin")}
        return _records({name: file.read() for name, file in opened.items() if file is not None}, path)


def _from_records(first: Path) -> Parts:
    return _records({path.name: path.read_bytes() for path in first.parent.glob("*_batch*.bin")}, first.parent)


def _records(files: Mapping[str, bytes], where: Path) -> Parts:
    """Images and labels of the binary version, the training files in their order."""
    import numpy as np

    train = sorted(name for name in files if re.fullmatch(r"data_batch_[1-5]\.bin", name))
    if not train or "test_batch.bin" not in files:
        raise InvalidFile(f"{where} has no data_batch_1.bin … and test_batch.bin. {THREE_WAYS}")
    parts: Parts = {}
    for kind, names in (("train", train), ("test", ["test_batch.bin"])):
        cut = [name for name in names if len(files[name]) % RECORD]
        if cut:
            raise InvalidFile(f"{cut[0]} in {where} is cut off: it is not a whole number of images; fetch it again")
        rows = np.frombuffer(b"".join(files[name] for name in names), dtype=np.uint8).reshape(-1, RECORD)
        parts[f"x_{kind}"] = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        parts[f"y_{kind}"] = rows[:, 0]
    return parts


def _from_hub() -> Parts:
    import numpy as np

    try:
        found = import_module("datasets").load_dataset(HUB)
    except ImportError as error:
        raise InvalidInput(f"no data was given, and the package datasets is not installed. {THREE_WAYS}") from error
    except Exception as error:  # whatever the hub's client makes of a missing network
        raise InvalidInput(f"no data was given, and {HUB} could not be fetched ({error}). {THREE_WAYS}") from error
    parts: Parts = {}
    for kind in ("train", "test"):
        parts[f"x_{kind}"] = np.stack([np.asarray(image) for image in found[kind]["img"]])
        parts[f"y_{kind}"] = np.asarray(found[kind]["label"], dtype=np.uint8)
    return parts


def _checked(parts: Parts, where: str) -> Cifar:
    """Shapes, types and labels are those of CIFAR-10, or the reason why not."""
    import numpy as np

    digest = hashlib.sha256()
    for name in ARRAYS:
        array, images = parts[name], name.startswith("x")
        shape, wanted = array.shape, (32, 32, 3) if images else ()
        if array.ndim != len(wanted) + 1 or shape[1:] != wanted or array.dtype != np.uint8 or not len(array):
            expected = f"uint8 of shape ({', '.join(map(str, ('n', *wanted)))})"
            raise InvalidFile(f"{where} is not CIFAR-10: {name} is {array.dtype} of shape {shape}, not {expected}")
        digest.update(f"{name}{shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    for kind in ("train", "test"):
        labels, count = parts[f"y_{kind}"], len(parts[f"x_{kind}"])
        if len(labels) != count:
            raise InvalidFile(f"{where} is not CIFAR-10: {count} {kind} images have {len(labels)} labels")
        if labels.max() >= CLASSES:
            raise InvalidFile(f"{where} is not CIFAR-10: a {kind} label is {labels.max()}; they go from 0 to 9")
    train, test = (_images(parts[f"x_{kind}"], parts[f"y_{kind}"]) for kind in ("train", "test"))
    return Cifar(train, test, digest.hexdigest())


def _images(pixels: np.ndarray, labels: np.ndarray) -> Images:
    import numpy as np

    planes = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return Images(torch.from_numpy(planes), torch.from_numpy(labels.astype(np.int64)))
