"""One pass as a CUDA graph: what it is bound to, how it is made, compared with plain passes and played."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .batches import Batch
from .keeper import Left
from .memory import set_aside
from .randomness import RandomState, drawing_from
from .reductions import gradients_apart
from .structure import flatten

if TYPE_CHECKING:
    from .lanes import Lanes
    from .loss import LossFunction

APART = 1.1  # how far from the first place, as a factor of θ, a recording is compared again
SCATTER = 3.0  # where plain passes do not repeat their bits: how much further apart a recording may be


@dataclass(frozen=True)
class Shape:
    """What a recording is bound to: what is computed, and everything of a batch but the numbers on the device."""

    kind: str
    evaluating: bool
    structure: Any
    leaves: tuple[Any, ...]  # of tensors on the device their shape, stride and dtype; all else as it is

    @classmethod
    def of(cls, kind: str, evaluating: bool, batch: Batch, device: torch.device) -> tuple[Shape, list[Tensor]]:
        """The shape, and the tensors that are copied in."""
        leaves, structure = flatten(batch)
        inputs = [x for x in leaves if isinstance(x, Tensor) and x.device == device]
        seen = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) and x.device == device else x for x in leaves]
        return cls(kind, evaluating, structure, tuple(seen)), inputs

    def fits(self, other: Shape) -> bool:
        alike = self.kind == other.kind and self.evaluating == other.evaluating and self.structure == other.structure
        return alike and all(map(_equal, self.leaves, other.leaves))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    try:
        return a is b or bool(type(a) is type(b) and a == b)
    except Exception:  # an object that cannot be compared is another one
        return False


@dataclass(frozen=True)
class Played:
    """What a pass gave: the loss, the gradient by parameter and its norm, buffers, randomness."""

    loss: Tensor
    grads: list[Tensor | None]
    norm: Tensor | None
    buffers: dict[str, Tensor]
    random: RandomState

    @property
    def present(self) -> tuple[bool, ...]:
        return tuple(grad is not None for grad in self.grads)


# A pass at θ over a batch: the parameters that are put in place, and what is computed with the model. By parameter it
# gives a gradient, or Hessian products of several vectors.
Program = Callable[[nn.Module], tuple[Tensor, list[Tensor | None], Tensor | None]]
Make = Callable[[Float[Tensor, " param"], Batch], tuple[list[Tensor], Program]]


@dataclass(frozen=True)
class Work:
    """A pass, and what it is given beside θ and the batch."""

    loss: LossFunction
    make: Make
    buffers: Mapping[str, Tensor]
    random: RandomState
    evaluating: bool
    derivative: bool

    def run(
        self, parameters: Sequence[Tensor], program: Callable[[nn.Module], Any], left: list[Left]
    ) -> tuple[Any, dict[str, Tensor], RandomState]:
        return self.loss.call(
            parameters, self.buffers, self.random, program,
            derivative=self.derivative, evaluating=self.evaluating, left=left,
        )  # fmt: skip

    def plain(self, theta: Float[Tensor, " param"], batch: Batch) -> Played:
        """By running the user's code."""
        parameters, program = self.make(theta, batch)
        (loss, grads, norm), after, random = self.run(parameters, program, [])
        return Played(loss, grads, norm, after, random)


class Recording:
    """One pass as a CUDA graph: inputs are copied in, the graph runs, results are copied out.

    `grads` are what it gives by parameter, in its own memory, to be read before the next run.
    """

    def __init__(
        self, work: Work, theta: Float[Tensor, " param"], batch: Batch, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.layout, self._theta = work.loss.layout, theta
        leaves, structure = flatten(batch)
        own = [x.clone() if isinstance(x, Tensor) and x.device == theta.device else x for x in leaves]
        self._inputs = [x for x in own if isinstance(x, Tensor) and x.device == theta.device]
        self._graph = torch.cuda.CUDAGraph()
        self._buffers: dict[str, Tensor] = {}
        parameters, program = work.make(theta, structure.unflatten(own))

        def record(model: nn.Module) -> Any:
            self._buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in work.buffers}
            found, self.nbytes, idle = _recorded(self._graph, theta.device, lambda: program(model), stream)
            set_aside(self, idle)
            return found

        left: list[Left] = []
        found, after, drawn = work.run(parameters, record, left)
        self.result, self.grads, self._norm = found
        self._moving = [name for name in self._buffers if name in work.loss.moving]
        self._draws = True
        replaced = any(after[name].data_ptr() != b.data_ptr() for name, b in self._buffers.items())
        if left or replaced or not drawn.same(replace(work.random, cuda=drawn.cuda)):
            raise RuntimeError("this pass leaves something in Python, which playing it back would not")

    def faithful(self, work: Work, theta: Float[Tensor, " param"], batches: Sequence[Batch]) -> bool:
        """Whether it gives what plain passes give: to the bit, or as nearly as these repeat themselves."""
        draws = False
        for at, batch in ((theta, batches[0]), (APART * theta, batches[-1])):
            plain, inputs = work.plain(at, batch), Shape.of("", False, batch, theta.device)[1]
            played = self.play(at, work.buffers, inputs, work.random, lent=True)
            draws |= not plain.random.same(work.random)
            same = plain.random.same(played.random) and plain.present == played.present
            if not same or any(not torch.equal(plain.buffers[name], b) for name, b in played.buffers.items()):
                return False
            off = _apart(plain, played)
            if off > 0 and not off <= SCATTER * _apart(plain, work.plain(at, batch)):
                return False
        self._draws = draws
        return True

    @property
    def separate(self) -> bool:
        """Whether it may be played while another recording of the same pass is: neither draws, nor moves buffers."""
        return not (self._draws or self._moving)

    def beside(self, first: Recording, lanes: Lanes, work: Work, theta: Float[Tensor, " param"], batch: Batch) -> bool:
        """Whether this and the first recording of a pass, played beside each other at two places, give what the first
        gives alone: to the bit, or as nearly as that repeats."""
        self._draws = first._draws
        inputs = Shape.of("", False, batch, theta.device)[1]

        def played(recording: Recording, factor: float) -> Played:
            return recording.play(factor * theta, work.buffers, inputs, work.random)

        pairs = [(first, 1.0), (self, APART)]
        for found, (_, factor) in zip(lanes.spread(2, lambda i: played(*pairs[i]), most=2), pairs):
            truth = played(first, factor)
            off = _apart(truth, found)
            if off > 0 and not off <= SCATTER * _apart(truth, played(first, factor)):
                return False
        return True

    def play(
        self,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        random: RandomState,
        *,
        lent: bool = False,
    ) -> Played:
        """The pass at other numbers; nobody has looked whether what it gives is finite.

        lent: the gradient stays in the recording's own memory, and is gone with the next run.
        """
        random = self.run(theta, buffers, inputs, random)
        after = {**buffers, **{name: self._buffers[name].clone() for name in self._moving}}
        norm = None if self._norm is None else self._norm.clone()
        return Played(self.result.clone(), self.grads if lent else self._copied(), norm, after, random)

    def _copied(self) -> list[Tensor | None]:
        """The gradient in memory of its own: views of one vector."""
        if not self.grads:
            return []
        views = self.layout.views(self.layout.join(self.grads))
        return [None if grad is None else view for view, grad in zip(views, self.grads)]

    def run(
        self,
        theta: Float[Tensor, " param"],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        random: RandomState,
    ) -> RandomState:
        """The same, left in the recording's own memory: `result` and `grads` are to be read before the next run."""
        self._theta.copy_(theta)
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(inputs))
        if self._buffers:
            torch._foreach_copy_(list(self._buffers.values()), [buffers[name] for name in self._buffers])
        if self._draws:
            with drawing_from(random, theta.device) as drawing:
                self._graph.replay()
            random = drawing.after
        else:
            self._graph.replay()
        return random


def _apart(a: Played, b: Played) -> float:
    """How far two passes are from each other, relative to the first: 0 where their bits are the same."""
    return max(gradients_apart([a.loss], [b.loss]), gradients_apart(a.grads, b.grads))


# --- recording


def _recorded(
    graph: torch.cuda.CUDAGraph, device: torch.device, work: Callable[[], Any], stream: torch.cuda.Stream | None
) -> tuple[Any, int, int]:
    """Run the work once watching for waits, which a recording does not survive, and record it.

    Returns what it gives, the bytes that the recording keeps, and those of them that torch counts as free.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    fresh = generator.clone_state()
    with _ScalarsOnDevice():
        with _refusing_waits():
            work()
        try:
            with _own_workspaces(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                # torch collects garbage and frees what it caches where a recording begins: counted from before, it
                # would seem to hold that much less
                reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
                found = work()
        except BaseException:
            generator.graphsafe_set_state(fresh)  # a recording that fails leaves it unusable
            raise
    kept = torch.cuda.memory_reserved(device) - reserved
    return found, kept, kept - (torch.cuda.memory_allocated(device) - allocated)


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS keeps one workspace for each stream, and graphs that are recorded on it would share it: two of them then
    write to it at once, or one is deleted and takes the other's along. So each gets its own, as torch's compiler does.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def _refusing_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _ScalarsOnDevice(TorchFunctionMode):
    """`torch.tensor(0.0, device="cuda")` filled in on the device: a copy from the CPU cannot be recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        plain = func is torch.tensor and len(args) == 1 and isinstance(args[0], bool | int | float)
        if not plain or device is None or torch.device(device).type != "cuda" or kwargs.get("requires_grad"):
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
        return torch.full((), args[0], dtype=dtype, device=device)
