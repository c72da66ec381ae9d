"""The user's own code, named on the command line: `module:function`, `train.py:function` or `train.py` builds what a
file cannot hold."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.batches import Batch
from ..core.derivatives import named_line
from ..errors import InvalidInput
from ..recorder.descriptions import Describe

NO_FUNCTION = "has no function {0!r}: write one that returns (model, optimizer, loss_fn) as the training makes them"
MOST_BATCHES = 5  # that are taken from what may be an endless loader
SHAPES = {
    2: ("model", "loss_fn"),
    3: ("model", "optimizer", "loss_fn"),
    4: ("model", "optimizer", "loss_fn", "batch"),
}


@dataclass(frozen=True)
class Built:
    """What a build function returned: a dict with these names, or a tuple as in `SHAPES`."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    optimizer: Optimizer | None = None
    batch: Batch = None
    dataset: Any = None
    train_step: Callable[..., Any] | None = None  # the user's own: (model, optimizer, batch), or (batch)
    batches: Sequence[Batch] | None = None  # what train_step is fed; default: `batch` again and again
    scheduler: LRScheduler | None = None
    clip: float | None = None
    constant: Sequence[nn.Module] = ()  # modules beside the model that loss_fn reads, as the recorder was told
    describe: Describe | None = None  # what the page shows of a batch


def build(reference: str, needed: Sequence[str] = ("model", "loss_fn")) -> Built:
    """Import a module as a script in this folder would, or a file as if it were run, call its function, and read what
    it returns. A file alone stands for its function `build`."""
    reference = f"{reference}:build" if reference.endswith(".py") else reference
    name, _, function = reference.rpartition(":")
    if not name or not function.isidentifier():
        raise InvalidInput(
            f"{reference!r} names no build function: write module:function or path/to/file.py:function, such as "
            "train.py:build"
        )
    module = _loaded(Path(name), function) if name.endswith(".py") else _imported(name)
    made = _called(reference, module, function)
    if isinstance(made, tuple | list) and len(made) in SHAPES:
        made = dict(zip(SHAPES[len(made)], made))
    known = {field.name for field in fields(Built)}
    if not isinstance(made, dict) or not set(made) <= known:
        raise InvalidInput(
            f"{reference} must return (model, loss_fn), (model, optimizer, loss_fn), (model, optimizer, loss_fn, "
            f"batch), or a dict with names among {', '.join(sorted(known))}; it returned {_described(made)}"
        )
    if made.get("batches") is not None:
        taken = list(itertools.islice(made["batches"], MOST_BATCHES))
        made = {"batch": taken[0] if taken else None, **made, "batches": taken}
    missing = [key for key in needed if made.get(key) is None]
    if missing:
        words = " and ".join("batches" if key == "batch" else key for key in missing)
        raise InvalidInput(
            f"{reference} does not return {words}, which this command needs: let it return a dict such as "
            '{"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batches": batches}'
        )
    if not isinstance(made["model"], nn.Module) or not callable(made["loss_fn"]):
        raise InvalidInput(f"{reference} must return a torch.nn.Module and a function loss_fn(model, batch)")
    return Built(**made)


def _imported(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidInput(f"there is no module {name!r} in {here} or among the installed packages") from error
        raise InvalidInput(f"importing {name!r} failed: {error}") from error
    except Exception as error:
        raise InvalidInput(f"importing {name!r} failed: {named_line(error)}") from error


def _loaded(file: Path, function: str) -> Any:
    """A file's module, under its whole path, so that it hides no other of its name; its folder is searched first.

    A file that does not name the function is not run: it may be a training script."""
    name = str(file.resolve())
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise InvalidInput(f"there is no file {file}")
    if not re.search(rf"\b({function}\b|import \*)", file.read_text("utf-8", "replace")):
        raise InvalidInput(f"{file} {NO_FUNCTION.format(function)}")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{file} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InvalidInput(f"running {file} failed: {named_line(error)}") from error
    return module


def _called(reference: str, module: Any, function: str) -> Any:
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{reference}: the module {NO_FUNCTION.format(function)}")
    try:
        return found()
    except Exception as error:
        raise InvalidInput(f"{reference} failed: {named_line(error)}") from error


def _described(made: Any) -> str:
    if isinstance(made, dict):
        return f"a dict with {', '.join(map(str, made))}"
    return f"{type(made).__name__} of {len(made)}" if isinstance(made, tuple | list) else type(made).__name__
