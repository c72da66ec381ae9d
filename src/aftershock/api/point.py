"""`capture` and `TrainingPoint`: an immutable copy of a training run at one moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..core import capture as reading
from ..core.batches import Batch
from ..core.capture import Captured
from ..core.checkpoint import overwrite
from ..core.dynamics import Dynamics, Step
from ..core.given import max_norm
from ..core.guards import Check, check, check_later, other_masks, refuse_changing, repeated
from ..core.hooks import Hooks
from ..core.lifting import lifting
from ..core.live_loop import Unused
from ..core.loss import Gradient, LossFunction
from ..core.path_plans import fits_lifted, plan_states
from ..core.randomness import RandomState
from ..core.structure import map_leaves
from ..core.trajectory import Keep, Trajectory
from ..errors import (
    HiddenState,
    InvalidInput,
    InvalidLoss,
    Nondeterministic,
    UnsupportedModel,
    WrongHessian,
)
from .schedule import Betas, LearningRate, Number, schedule

if TYPE_CHECKING:
    from .path import Path


@dataclass(frozen=True)
class TrainingPoint:
    """x_t: parameters, moments, step counts, hyperparameters, buffers and random state of a live run.

    Nothing in it changes, and what happens to the live model afterwards does not reach it. Modules keep
    the train or eval mode that they had at capture.

    >>> point
    TrainingPoint(step 40, 22 parameters in 4 tensors, 1 group(s), float64 on cpu)
    >>> point.step, list(point.parameters)
    (40, ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    captured: Captured
    _checked: list[tuple[Batch, Check]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def loss(self) -> LossFunction:
        """The loss of the private copy of the model.

        >>> point.loss.layout.names
        ('0.weight', '0.bias', '2.weight', '2.bias')
        """
        return self.captured.loss

    @property
    def step(self) -> int:
        """How many updates the run has made.

        >>> point.step
        40
        """
        return max(self.captured.state.counts)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """θ by name, as copies.

        >>> list(point.parameters)
        ['0.weight', '0.bias', '2.weight', '2.bias']
        """
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
        weight_decay: Number = None,
        betas: Betas = None,
        eps: Number = None,
        clip: float | None = None,
        random: Sequence[RandomState] | None = None,
        keep: Keep | None = None,
        memory: str | int | None = None,
    ) -> Path:
        """Train on through `batches`, exactly as torch would: one gradient per batch.

        batches: one per step; `ak.accumulate` makes one of several micro-batches.
        lr: the learning rate per step: a number, a list with one entry per step, a function of the step's index,
            or the `torch` scheduler that the loop steps after every update, or a list of them (copied, never
            advanced; whatever they move is followed). An entry may be one number or one per parameter group.
            "constant" is the optimizer's own, as is None where no scheduler is attached to it.
        weight_decay, betas, eps: the same, where the loop moves them by itself.
        clip: `max_norm` of `torch.nn.utils.clip_grad_norm_` over all parameters.
        random: the random state before each step, where it was recorded; else it runs on from capture.
        keep: "states", "checkpoints" (√H of them, the rest recomputed) or "graphs"; default: what fits.
        memory: a budget such as "8GiB"; default: what is free.

        >>> path = point.follow(batches[:4], lr=[0.01, 0.01, 0.005, 0.005], clip=1.0)
        >>> len(path), path.losses[0] == loss_fn(model, batches[0]).item()
        (4, True)
        """
        from .path import Path

        taken = list(batches)
        if not taken:
            raise InvalidInput("the path is empty: follow() needs at least one batch")
        if random is not None and len(random) != len(taken):
            raise InvalidInput(f"{len(random)} random states for {len(taken)} batches")
        limit = max_norm(clip)
        loop = self.captured.loop
        loop.refuse_unscheduled(lr)
        loop.refuse_moved(self.loss)
        hypers = schedule(self.captured.hypers, len(taken), lr, weight_decay=weight_decay, betas=betas, eps=eps)
        start = random[0] if random else self.captured.random
        steps = [
            Step(i, batch, random[i] if random else start, hypers[i], limit, own_random=random is not None)
            for i, batch in enumerate(taken)
        ]
        if keep not in (None, "states", "checkpoints", "graphs"):
            raise InvalidInput(f'keep is "states", "checkpoints" or "graphs"; got {keep!r}')
        state = self.captured.state
        loop.refuse_other_precision(self.loss, state, steps[0])
        known = list[Gradient]()
        if self.loss.noise is None:  # exact answers stand on it as well
            first, self.loss.noise = repeated(self.loss, state, taken[0], start, steps[0].where)
            if len(steps) > 1:  # a single step that is not computed does not tell how long one takes
                known.append(first)
            del first
        kept, spacing = plan_states(len(taken), state.nbytes, keep, memory, self.loss.layout.device)
        trajectory = Trajectory.follow(Dynamics(self.loss), state, start, steps, kept, spacing, known)
        loop.refuse_unused(trajectory.steps, self.loss.layout.names)
        trajectory.dynamics.heads = loop.heads(trajectory.steps)
        return Path(self, trajectory, memory)

    def check(self, batch: Batch, memory: str | int | None = None) -> Check:
        """Prove on one batch that Hessian products of this model are right; raises where they are not.

        Runs in float64, which autocast leaves alone, where `memory` (default: what is free) and the model allow it.
        Costs about 8 gradients. The batch that was checked last is not checked again, since many paths may start from
        one point. A model that has failed is refused from then on, with any batch.

        >>> point.check(batches[0]).error < 1e-6
        True
        """
        self._refuse_known()
        if not (self._checked and self._checked[0][0] is batch):
            try:
                found = self._check_lifted(batch, memory)
                masks = other_masks(self.loss, self.captured.state, batch, self.captured.random)
                self._checked[:] = [(batch, replace(found, other_masks=masks))]
            except (Nondeterministic, WrongHessian, HiddenState) as error:
                self.loss.refused = error
                raise
        return self._checked[0][1]

    def check_later(self, batch: Batch, first: Check, memory: str | int | None = None) -> Check:
        """The same at a later step of a path whose first step was checked: about 4 gradients, and the whole check where
        a product and a difference of gradients do not agree.

        >>> point.check_later(batches[1], first=point.check(batches[0])).error < 1e-6
        True
        """
        self._refuse_known()
        lifted = self._lifted(memory)
        with contextlib.suppress(InvalidLoss):  # a model that insists on its own dtype
            found = check_later(lifted.loss, lifted.captured.state, batch, lifted.captured.random, first)
            if found is not None:
                return found
        return self.check(batch, memory)

    def _refuse_known(self) -> None:
        self.captured.loop.refuse_moved(self.loss)
        self.captured.loop.refuse_distorted()
        if self.loss.refused is not None:
            raise self.loss.refused

    def _lifted(self, memory: str | int | None) -> TrainingPoint:
        """A copy in float64, or itself where there is no memory for one."""
        return self.to(dtype=torch.float64) if fits_lifted(self.loss.layout, memory) else self

    def _check_lifted(self, batch: Batch, memory: str | int | None) -> Check:
        lifted = self._lifted(memory)
        if lifted is self:
            return self._check(batch)
        throughout = TrainingPoint(replace(lifted.captured, loss=lifted.loss.within(lifting)))
        try:
            return lifted._check(batch)
        except WrongHessian as error:  # parts in float32 round, and kinks allow no step at which that is little
            wrong = error
        except InvalidLoss:
            with contextlib.suppress(InvalidLoss, WrongHessian):
                return throughout._check(batch)
            return self._check(batch)  # a model that insists on its own dtype is checked in it
        with contextlib.suppress(InvalidLoss, WrongHessian):
            found = throughout._check(batch)
            refuse_changing(lambda: lifted._check(batch))
            return found
        raise wrong

    def _check(self, batch: Batch) -> Check:
        return check(self.loss, self.captured.state, batch, self.captured.random)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TrainingPoint:
        """The same point elsewhere or in another precision; batches are then moved and cast as they come.

        device, dtype: None leaves it as it is. Costs a copy of θ, m and v.

        >>> point.to(dtype=torch.float32)
        TrainingPoint(step 40, 22 parameters in 4 tensors, 1 group(s), float32 on cpu)
        """
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
            lambda batch: map_leaves(place, self.loss.place(batch)),
            zeroed=self.loss.zeroed,
        )
        hypers = captured.hypers
        if device.type != layout.device.type:  # other kernels: torch's defaults there
            hypers = tuple(replace(h, foreach=None, fused=None, capturable=False) for h in hypers)
        hypers = tuple(replace(h, lr=h.lr.to(device)) if isinstance(h.lr, Tensor) else h for h in hypers)
        return TrainingPoint(replace(captured, loss=loss, state=state, hypers=hypers))

    def save(self, path: str | FilePath) -> None:
        """Write the point as one safetensors file, whole or not at all. The model's code is not in it.

        It is as large as θ, m, v, the buffers and the frozen parameters together.

        >>> point.save("point.safetensors")
        >>> ak.load_point("point.safetensors", model, loss_fn).step
        40
        """
        from .storage import save_point

        save_point(self.captured, FilePath(path))


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    *,
    hooks: Hooks | None = None,
    autocast: torch.dtype | Literal[False] | None = None,
    loss_scale: float = 1.0,
    unused: Unused | None = None,
    constant: Sequence[nn.Module] = (),
) -> TrainingPoint:
    """Copy a live model and optimizer into a `TrainingPoint`. Neither is touched. Costs a copy of θ, m and v.

    loss_fn: `loss_fn(model, batch)` returns one number, computed with the model it is given.
    hooks: what your hooks do: "run" where they are part of the computation, "ignore" where they only look.
    autocast: the dtype of the autocast that training runs in, or False; default: the one that is in force now.
    loss_scale: `scaler.get_scale()`, where training runs in float16 with a GradScaler; gradients are then those of the
        scaled loss, unscaled, as in the loop: float16 loses small ones otherwise.
    unused: what the loop does with a parameter that a step does not use: "skip" after `zero_grad()`, "zero" after
        `zero_grad(set_to_none=False)`; default: as the live gradients show.
    constant: modules that loss_fn uses beside the model and that the loop leaves as they are (a frozen teacher needs no
        word unless it has the model's own shapes).

    >>> point = ak.capture(model, optimizer, loss_fn)
    >>> point.step, len(point.parameters)
    (40, 4)
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if unused not in (None, "skip", "zero"):
        raise InvalidInput(f'unused is "skip" or "zero"; got {unused!r}')
    return TrainingPoint(
        reading.read(
            model, optimizer, loss_fn,
            hooks=hooks, autocast=autocast, loss_scale=loss_scale, unused=unused, constant=constant,
        )
    )  # fmt: skip


def from_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    model_state: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any],
    **options: Any,
) -> TrainingPoint:
    """A point from a checkpoint's two `state_dict()`s. Costs a copy of θ, m and v.

    model, optimizer: built as the training script builds them; they say what the numbers belong to, and stay as they
        are. options: those of `capture`.

    >>> saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    >>> ak.from_checkpoint(model, optimizer, loss_fn, saved["model"], saved["optimizer"]).step
    40
    """
    captured = capture(model, optimizer, loss_fn, **options).captured
    return TrainingPoint(overwrite(captured, model, optimizer, model_state, optimizer_state))


def load_point(
    path: str | FilePath,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    *,
    constant: Sequence[nn.Module] = (),
) -> TrainingPoint:
    """A point saved by `TrainingPoint.save`, with the code of `model`; its weights are not used.

    What was said at capture of hooks, autocast and unused parameters is in the file; `constant` is as there.

    >>> point.save("point.safetensors")
    >>> ak.load_point("point.safetensors", model, loss_fn)
    TrainingPoint(step 40, 22 parameters in 4 tensors, 1 group(s), float64 on cpu)
    """
    from .storage import load_captured

    return TrainingPoint(load_captured(FilePath(path), model, loss_fn, constant=constant))
