"""A live run's state as it is now: copied on its own device at once, brought to the host beside training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..core.adamw import Hyper
from ..core.capture import Captured, plain_name, read_hyper, unwrapped
from ..core.layout import Layout
from ..core.randomness import RandomState
from ..core.state import JointState
from .transfer import Transfer


@dataclass(frozen=True)
class Snapshot:
    """θ, m, v and what travels with them, on the training device: one state of memory until it is written."""

    channels: tuple[Tensor, Tensor, Tensor]
    counts: Tensor | tuple[int, ...]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    hypers: tuple[Hyper, ...]
    random: RandomState
    taken: torch.cuda.Event | None


class Snapshots:
    """Takes the states of one run, whose layout and code `first` has."""

    def __init__(self, first: Captured, model: nn.Module, optimizer: torch.optim.Optimizer, transfer: Transfer) -> None:
        self.model, self.optimizer, self.transfer = unwrapped(model), optimizer, transfer
        self.layout = first.loss.layout
        self._code = replace(first, state=_nothing())  # its tensors are not held on to

    def take(self) -> Snapshot:
        """Without waiting for the GPU. Where it has no room for a second state, the host's memory takes it, slowly."""
        try:
            return self._take(self.layout)
        except torch.OutOfMemoryError:
            return self._take(replace(self.layout, device=torch.device("cpu")))

    def landed(self, snapshot: Snapshot) -> Captured:
        """The same on the host, as it is written to a file."""
        self.transfer.after(snapshot.taken)
        fetch = self.transfer.fetch
        theta, m, v = (fetch(channel) for channel in snapshot.channels)
        counts = snapshot.counts
        if isinstance(counts, Tensor):
            counts = tuple(int(count) for count in fetch(counts))
        loss = copy.copy(self._code.loss)
        loss.constants = {name: fetch(constant) for name, constant in snapshot.constants.items()}
        buffers = {name: fetch(buffer) for name, buffer in snapshot.buffers.items()}
        hypers = tuple(replace(h, lr=fetch(h.lr) if isinstance(h.lr, Tensor) else h.lr) for h in snapshot.hypers)
        state = JointState(theta, m, v, counts, buffers)
        return replace(self._code, loss=loss, state=state, hypers=hypers, random=snapshot.random)

    def _live(self) -> dict[str, nn.Parameter]:
        return {plain_name(name): parameter for name, parameter in self.model.named_parameters()}

    def _take(self, layout: Layout) -> Snapshot:
        live = self._live()
        originals = [live[name] for name in layout.names]
        moments = [self.optimizer.state.get(parameter, {}) for parameter in originals]
        steps = [moment.get("step", 0) for moment in moments]
        on_device = any(isinstance(step, Tensor) and step.device.type != "cpu" for step in steps)
        trained = set(layout.names)
        return Snapshot(
            channels=(
                layout.join([parameter.detach() for parameter in originals]),
                layout.join([moment.get("exp_avg") for moment in moments]),
                layout.join([moment.get("exp_avg_sq") for moment in moments]),
            ),
            counts=_stacked(steps, self.layout.device) if on_device else tuple(int(step) for step in steps),
            buffers={plain_name(name): _owned(buffer, layout) for name, buffer in self.model.named_buffers()},
            constants={name: _owned(parameter, layout) for name, parameter in live.items() if name not in trained},
            hypers=tuple(read_hyper(group, self.optimizer) for group in self.optimizer.param_groups),
            random=RandomState.now(self.layout.device),
            taken=self.transfer.moment(),
        )


def _owned(tensor: Tensor, layout: Layout) -> Tensor:
    copied = tensor.detach().clone()
    return copied if layout.device.type != "cpu" else copied.cpu()


def _stacked(steps: list[Tensor | int], device: torch.device) -> Tensor:
    """Counts of which some live on the GPU (fused or capturable AdamW), together there: nothing waits for it."""

    def there(step: Tensor | int) -> Tensor:
        if isinstance(step, Tensor) and step.device == device:
            return step.double().reshape(())
        return torch.full((), float(step), dtype=torch.float64, device=device)

    return torch.stack([there(step) for step in steps])


def _nothing() -> JointState:
    empty = torch.empty(0)
    return JointState(empty, empty, empty, (), {})
