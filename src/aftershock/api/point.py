"""`capture` and `TrainingPoint`: an immutable copy of a training run at one moment."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..core import capture as reading
from ..core.batches import Batch
from ..core.capture import Captured
from ..core.checkpoint import overwrite
from ..core.dynamics import Dynamics, Step
from ..core.guards import Check, check, repeated
from ..core.loss import LossFunction
from ..core.memory import budget
from ..core.planning import plan_states
from ..core.randomness import RandomState
from ..core.trajectory import Keep, Trajectory
from ..errors import (
    HiddenState,
    InvalidInput,
    InvalidLoss,
    Nondeterministic,
    UnsupportedClipping,
    UnsupportedModel,
    WrongHessian,
)
from .schedule import LearningRate, schedule

if TYPE_CHECKING:
    from .path import Path

LIFTED_VECTORS = 16  # float64 copies of the parameters that `check` holds at once, with room to spare


@dataclass(frozen=True)
class TrainingPoint:
    """x_t: parameters, moments, step counts, hyperparameters, buffers and random state of a live run.

    Nothing in it changes, and what happens to the live model afterwards does not reach it. Modules keep
    the train or eval mode that they had at capture.
    """

    captured: Captured
    _checked: list[tuple[Batch, Check]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def loss(self) -> LossFunction:
        return self.captured.loss

    @property
    def step(self) -> int:
        """How many updates the run has made."""
        return max(self.captured.state.counts)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """θ by name, as copies."""
        layout = self.loss.layout
        return {name: value.clone() for name, value in layout.by_name(self.captured.state.theta).items()}

    def __repr__(self) -> str:
        layout = self.loss.layout
        return (
            f"TrainingPoint(step {self.step}, {layout.size:,} parameters in {len(layout.names)} tensors, "
            f"{len(self.captured.hypers)} group(s), {str(layout.dtypes[0]).removeprefix('torch.')} on {layout.device}"
            f"{'' if self.loss.model.training else ', in eval mode'})"
        )

    def follow(
        self,
        batches: Iterable[Batch],
        *,
        lr: LearningRate = None,
        clip: float | None = None,
        random: Sequence[RandomState] | None = None,
        keep: Keep | None = None,
        memory: str | int | None = None,
    ) -> Path:
        """Train on through `batches`, exactly as torch would: one gradient per batch.

        lr: the learning rate per step; None for the optimizer's own, a number, a list with one entry per
            step, a function of the step's index, or a `torch` scheduler (copied, never advanced). An entry
            may be one number or one per parameter group.
        clip: `max_norm` of `torch.nn.utils.clip_grad_norm_` over all parameters.
        random: the random state before each step, where it was recorded; else it runs on from capture.
        keep: "states", "checkpoints" (√H of them, the rest recomputed) or "graphs"; default: what fits.
        memory: a budget such as "8GiB"; default: what is free.
        """
        from .path import Path

        taken = list(batches)
        if not taken:
            raise InvalidInput("the path is empty: follow() needs at least one batch")
        if random is not None and len(random) != len(taken):
            raise InvalidInput(f"{len(random)} random states for {len(taken)} batches")
        max_norm = _max_norm(clip)
        hypers = schedule(self.captured.hypers, lr, len(taken))
        start = random[0] if random else self.captured.random
        steps = [
            Step(i, batch, random[i] if random else start, hypers[i], max_norm, own_random=random is not None)
            for i, batch in enumerate(taken)
        ]
        if keep not in (None, "states", "checkpoints", "graphs"):
            raise InvalidInput(f'keep is "states", "checkpoints" or "graphs"; got {keep!r}')
        state = self.captured.state
        if self.loss.noise is None:  # exact answers stand on it as well
            self.loss.noise = repeated(self.loss, state, taken[0], start, steps[0].where)[1]
        kept, spacing = plan_states(len(taken), state.nbytes, keep, memory, self.loss.layout.device)
        trajectory = Trajectory.follow(Dynamics(self.loss), state, start, steps, kept, spacing)
        return Path(self, trajectory, memory)

    def check(self, batch: Batch) -> Check:
        """Prove on one batch that Hessian products of this model are right; raises where they are not.

        It runs in float64, which autocast leaves alone, whatever the model's own dtype: about 8 gradients. The
        batch that was checked last is not checked again: many paths may start from one point with it. A model that
        has failed once has failed: it is not tried again on another batch.
        """
        if self.loss.refused is not None:
            raise self.loss.refused
        if not (self._checked and self._checked[0][0] is batch):
            try:
                self._checked[:] = [(batch, self._check_lifted(batch))]
            except (Nondeterministic, WrongHessian, HiddenState) as error:
                self.loss.refused = error
                raise
        return self._checked[0][1]

    def _check_lifted(self, batch: Batch) -> Check:
        needed = LIFTED_VECTORS * 8 * self.loss.layout.size
        if needed > budget(None, self.loss.layout.device):
            return self._check(batch)
        try:
            return self.to(dtype=torch.float64)._check(batch)
        except InvalidLoss:
            return self._check(batch)  # a model that insists on its own dtype is checked in it

    def _check(self, batch: Batch) -> Check:
        return check(self.loss, self.captured.state, batch, self.captured.random)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TrainingPoint:
        """The same point elsewhere or in another precision; batches are then moved and cast as they come."""
        layout, captured = self.loss.layout, self.captured
        device = layout.device if device is None else torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        dtypes = layout.dtypes if dtype is None else (dtype,) * len(layout.dtypes)
        moved = replace(layout, dtypes=dtypes, device=device)

        def place(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(device, dtype) if dtype is not None and x.is_floating_point() else x.to(device)

        def flat(vector: Tensor) -> Tensor:
            return moved.join([place(view) for view in layout.views(vector)])

        state = replace(
            captured.state,
            theta=flat(captured.state.theta),
            m=flat(captured.state.m),
            v=flat(captured.state.v),
            buffers={name: place(b) for name, b in captured.state.buffers.items()},
        )
        loss = LossFunction(
            self.loss.model,
            self.loss.loss_fn,
            moved,
            {name: place(p) for name, p in self.loss.constants.items()},
            self.loss.autocast,
            lambda batch: tree_map(place, self.loss.place(batch)),
        )
        hypers = captured.hypers
        if device.type != layout.device.type:  # other kernels: torch's defaults there
            hypers = tuple(replace(h, foreach=None, fused=None, capturable=False) for h in hypers)
        hypers = tuple(replace(h, lr=h.lr.to(device)) if isinstance(h.lr, Tensor) else h for h in hypers)
        return TrainingPoint(replace(captured, loss=loss, state=state, hypers=hypers))

    def save(self, path: str | FilePath) -> None:
        """Write the point as one safetensors file, whole or not at all. The model's code is not in it."""
        from .storage import save_point

        save_point(self.captured, FilePath(path))


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
) -> TrainingPoint:
    """Copy a live model and optimizer into a `TrainingPoint`. Neither is touched.

    `loss_fn(model, batch)` returns one number, computed with the model it is given.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"model must be a torch.nn.Module; got {type(model).__name__}")
    return TrainingPoint(reading.read(model, optimizer, loss_fn))


def from_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    model_state: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any],
) -> TrainingPoint:
    """A point from a checkpoint's two `state_dict()`s.

    `model` and `optimizer`, built as the training script builds them, say what the numbers belong to; they
    stay as they are.
    """
    captured = reading.read(model, optimizer, loss_fn)
    return TrainingPoint(overwrite(captured, model, optimizer, model_state, optimizer_state))


def load_point(path: str | FilePath, model: nn.Module, loss_fn: Callable[[nn.Module, Batch], Tensor]) -> TrainingPoint:
    """A point saved by `TrainingPoint.save`, with the code of `model`; its weights are not used."""
    from .storage import load_captured

    return TrainingPoint(load_captured(FilePath(path), model, loss_fn))


def _max_norm(clip: object) -> float | None:
    if clip is None:
        return None
    if isinstance(clip, bool) or not isinstance(clip, numbers.Real) or not float(clip) > 0:
        raise UnsupportedClipping(
            f"clip is the max_norm of torch.nn.utils.clip_grad_norm_ over all parameters, one positive number; got "
            f"{clip!r}. Clipping by value or per group is not modelled"
        )
    return float(clip)
