"""What loss_fn uses beside the model it is given: never the live model, and nothing that training moves.

The private copy follows the path; whatever else a loss reaches stays as it is. A frozen teacher is such a constant. The
live model, a moving average of it or a target network is not, and would give wrong numbers without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..errors import InvalidLoss, UnsupportedModel
from .reductions import apart
from .uses import Found, used_by

LOOKED_AT = 1024  # numbers of each tensor; what moves a network moves all of it
CONSTANT = (
    "name it in constant=[…] (of capture, FlightRecorder and explain; for a command, in the dict that build() returns) "
    "where the loop leaves it as it is. What a moving one gives can be computed in the loop and be a part of the batch"
)


class Mark(NamedTuple):
    """How a tensor looked at capture: `.data` can be written to without a new version."""

    words: str
    tensor: Tensor
    pointer: int
    version: int
    head: Tensor

    @classmethod
    def of(cls, words: str, tensor: Tensor) -> Mark:
        version = 0 if tensor.is_inference() else tensor._version
        return cls(words, tensor, tensor.data_ptr(), version, _head(tensor))

    @property
    def moved(self) -> bool:
        now = Mark.of(self.words, self.tensor)
        return (now.pointer, now.version) != (self.pointer, self.version) or not torch.equal(now.head, self.head)

    @property
    def distance(self) -> float:
        """How far its first numbers are from those at capture, relative to them."""
        then, now = (head.view(self.tensor.dtype).double() for head in (self.head, _head(self.tensor)))
        return apart(now, then)


class Outside:
    """The constants of a loss: refused where they are not, and watched from then on."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        model: nn.Module,
        private: nn.Module,
        constant: Sequence[nn.Module],
    ) -> None:
        self._model = ref(model)
        self._marks: list[Mark] = []
        used = [found for function in functions for found in used_by(function)]
        if not used:
            return
        live, own = _pointers(model), {id(part) for part in private.modules()}
        spoken_for = {id(part) for module in constant for part in module.modules()}
        for found in used:
            if id(found.value) in own:
                continue
            _refuse_live("loss_fn", found, live)
            _refuse_moving(found, model, id(found.value) in spoken_for)
            self._marks += [Mark.of(found.words, tensor) for tensor in _tensors(found.value) if _pointer(tensor)]

    def refuse_live(self, user: str, function: Callable[..., Any]) -> None:
        """Refuse another function that uses the live model in the place of the one it is given."""
        model = self._model()
        if model is not None:
            live = _pointers(model)
            for found in used_by(function):
                _refuse_live(user, found, live)

    def refuse_moved(self) -> None:
        """Refuse to go on with a constant that has changed since capture."""
        moved = next((mark for mark in self._marks if mark.moved), None)
        if moved is not None:
            raise InvalidLoss(
                f"loss_fn uses `{moved.words}`, which has changed since capture: it is not the model's, so no step of "
                "the path moves it. Make it part of the model, or capture again and leave it as it is"
            )


def marked(tensors: Mapping[str, Tensor]) -> list[Mark]:
    """How tensors look now, by name."""
    return [Mark.of(name, tensor) for name, tensor in tensors.items() if _pointer(tensor)]


def refuse_rewritten(frozen: Sequence[Mark]) -> None:
    """Refuse to go on with a frozen parameter that has changed since capture."""
    moved = next((mark for mark in frozen if mark.moved), None)
    if moved is not None:
        raise UnsupportedModel(
            f"the frozen parameter {moved.words!r} has changed since capture. Frozen parameters are shared with "
            "the live model, not copied: capture again, or capture a deepcopy of a model whose frozen part will change"
        )


def refuse_written(frozen: Sequence[Mark]) -> None:
    """Refuse a model whose own passes have written to its frozen parameters."""
    written = next((mark for mark in frozen if mark.moved), None)
    if written is not None:
        raise UnsupportedModel(
            f"a pass of the model writes to its frozen parameter {written.words!r}, as momentum encoders do; that is "
            "state which no step of the path carries. Register it as a buffer: buffers are carried"
        )


def _refuse_live(user: str, found: Found, live: set[int]) -> None:
    if any(_pointer(tensor) in live for tensor in _tensors(found.value)):
        what = "the live model" if isinstance(found.value, nn.Module) else "a tensor of the live model"
        raise InvalidLoss(
            f"{user} uses {what} through `{found.words}`, whose weights do not move with the path; "
            f"use the model that {user} is given (and a clone() of what stays as it is)"
        )


def _refuse_moving(found: Found, model: nn.Module, spoken_for: bool) -> None:
    words, value = found
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise InvalidLoss(
                f"loss_fn uses the tensor `{words}`, which needs a gradient and is not the model's. Make it a "
                "parameter of the model if it is trained, or detach() it"
            )
        return
    normalizing = [part for part in value.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    if any(part.training and part.track_running_stats for part in normalizing):
        raise InvalidLoss(
            f"loss_fn uses the module `{words}`, whose batch normalization is in training mode: every pass moves its "
            "running statistics. Call its eval(), or make it part of the model"
        )
    reason = None if spoken_for else _why_it_may_move(value, model)
    if reason is not None:
        raise InvalidLoss(
            f"loss_fn uses the module `{words}` beside the model it is given, and {reason}: no step of the path moves "
            f"it. Make it part of the model, or {CONSTANT}"
        )


def _why_it_may_move(module: nn.Module, model: nn.Module) -> str | None:
    if any(isinstance(part, AveragedModel) for part in module.modules()):
        return "it is a moving average"
    if any(p.requires_grad for p in module.parameters()):
        return "its parameters need gradients, as if it were trained"
    shapes = [p.shape for p in module.parameters()]
    if shapes and shapes == [p.shape for p in model.parameters()]:
        return "it has the model's own shapes, as a moving average or a target network has"
    return None


def _tensors(value: nn.Module | Tensor) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        yield from value.parameters()
        yield from value.buffers()


def _pointers(model: nn.Module) -> set[int]:
    return {pointer for tensor in _tensors(model) if (pointer := _pointer(tensor))}


def _pointer(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none."""
    strided = tensor.layout == torch.strided and not nn.parameter.is_lazy(tensor) and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if strided else 0


def _head(tensor: Tensor) -> Tensor:
    """The first numbers as bytes, so that NaN equals itself."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return torch.empty(0)
    return tensor.detach().flatten()[:LOOKED_AT].clone().view(torch.uint8)
