"""`Change`: what differs at one step of a path, and its response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..core.changes import Edit
from ..core.memory import budget
from ..core.probe import Probe
from ..core.rollout import ANSWERS, Responses, respond
from ..core.state import JointState, Tangent, difference
from ..errors import HiddenState, InvalidInput
from .probing import Readouts
from .progress import Estimate, progress
from .response import Response, labelled

if TYPE_CHECKING:
    from .path import Path

DEFAULT_ANSWERS = ("exact", "semilinear", "tangent")
PRODUCT_COST = 1.7  # a Hessian product in gradients: 1.1–1.3 (MLP) to 1.6–2.0 (CNN)
GRAPH_COST = 1.3
FORWARD_COST = 0.35


@dataclass(frozen=True)
class Change:
    """One or more changes at one step, held as exact state differences after it."""

    path: Path
    at: int
    kind: str
    edits: tuple[Edit, ...]

    def __len__(self) -> int:
        return len(self.edits)

    def __repr__(self) -> str:
        return f"Change({self.kind} at step {self.at}, {len(self)} change(s))"

    def difference(self, scale: float = 1.0) -> list[Tangent]:
        """The exact δx after the step, one per change: one elementwise pass each."""
        control = self.path.control(self.at)
        return [difference(self._endpoint(edit, scale), control.after) for edit in self.edits]

    def _endpoint(self, edit: Edit, scale: float) -> JointState:
        return edit.shock(self.path.control(self.at)).endpoint(scale)[0]

    def response(
        self,
        probe: Any,
        *,
        scales: Sequence[float] = (1.0,),
        answers: Sequence[str] | None = None,
        horizon: int | None = None,
        labels: Sequence[str] | None = None,
        memory: str | int | None = None,
    ) -> Response:
        """How the probe's loss differs at each later state: positive means that it goes up.

        probe: a batch, `ak.own_loss`, a function of the model, or a `Probe`.
        scales: α between the control (0) and the change (1).
        answers: "exact" (the truth: a second run), "semilinear" (AdamW exact, only the network's gradient
            linear), "tangent" (all linear); default: all three, where they exist for this model and probe.
        horizon: how many states after the step; default: to the end of the path.
        """
        readouts = Readouts(self.path, Probe.of(probe), self.at, horizon)
        scales = self._scales(scales)
        answers, refused = self._answers(answers, readouts)
        names = self._labels(labels)
        size = self._chunk(len(scales), answers, memory)
        chunks = [self.edits[i : i + size] for i in range(0, len(self.edits), size)]
        control = self.path.control(self.at)
        horizons = len(readouts.horizons)
        estimate = self.estimate(probe, scales=scales, answers=answers, horizon=horizon, memory=memory)
        with progress("response", len(chunks) * horizons, estimate) as tick:
            parts = [
                respond(self.path.trajectory, control, chunk, readouts.probe, scales, answers, horizons, tick)
                for chunk in chunks
            ]
        return labelled(self, readouts, _joined(parts), names, scales, refused)

    def estimate(
        self,
        probe: Any,
        *,
        scales: Sequence[float] = (1.0,),
        answers: Sequence[str] = DEFAULT_ANSWERS,
        horizon: int | None = None,
        memory: str | int | None = None,
    ) -> Estimate:
        """What `response` will cost, before any of it is done."""
        horizons = len(Readouts(self.path, Probe.of(probe), self.at, horizon).horizons)
        size = self._chunk(len(scales), answers, memory)
        chunks = math.ceil(len(self) / size)
        to_probe = ("endpoint" in answers) + ("semilinear" in answers)
        rows = len(self) * (("tangent" in answers) + len(scales) * to_probe)
        pairs = len(self) * len(scales) * ("exact" in answers)
        forwards = len(self) * len(scales) * (to_probe + ("exact" in answers))
        gradients = len(self) + horizons * (
            pairs + rows * PRODUCT_COST + chunks * (GRAPH_COST * (rows > 0) + 1) + forwards * FORWARD_COST
        )
        used = min(size, len(self)) * self._bytes_per_change(len(scales), answers)
        return Estimate(gradients, gradients * self.path.trajectory.seconds_per_step, used, chunks)

    # --- inside

    def _bytes_per_change(self, scales: int, answers: Sequence[str]) -> int:
        layout = self.path.point.loss.layout
        vector = layout.padded_size * layout.dtype.itemsize
        rows = ("tangent" in answers) + scales * (("endpoint" in answers) + 2 * ("semilinear" in answers))
        return vector * (2 + 3 * scales + 6 * rows)  # ξ and a work vector; states; δx, products, work

    def _chunk(self, scales: int, answers: Sequence[str], memory: str | int | None) -> int:
        available = budget(self.path.memory if memory is None else memory, self.path.point.loss.layout.device)
        return max(1, available // self._bytes_per_change(scales, answers))

    def _scales(self, scales: Sequence[float]) -> list[float]:
        values = [float(scale) for scale in scales]
        if not values or not all(math.isfinite(scale) and scale != 0 for scale in values):
            raise InvalidInput(f"scales must be nonzero numbers; got {list(scales)}")
        if values != [1.0] and not all(edit.scalable for edit in self.edits):
            raise InvalidInput(f"a {self.kind} has no scale between control and change; leave scales at 1")
        return values

    def _answers(self, answers: Sequence[str] | None, readouts: Readouts) -> tuple[list[str], str]:
        """The answers to run, and why others are not."""
        wanted = list(DEFAULT_ANSWERS if answers is None else answers)
        unknown = [answer for answer in wanted if answer not in ANSWERS]
        if unknown or not wanted:
            raise InvalidInput(f"answers are {', '.join(ANSWERS)}; got {wanted}")
        hidden = self.path.check().hidden or readouts.hidden()
        if wanted == ["exact"] or not hidden:
            return wanted, ""
        reason = (
            f"the loss of the path or probe depends on buffers that training moves ({', '.join(hidden[:2])}…), which "
            "are state outside (θ, m, v), so the linear answers would be wrong"
        )
        if answers is not None:
            raise HiddenState(f"{reason}; ask for answers=('exact',), or probe in training mode")
        return ["exact"], reason

    def _labels(self, labels: Sequence[str] | None) -> list[str]:
        if labels is None:
            names = [edit.name for edit in self.edits]
            return names if len(set(names)) == len(names) else [f"{name} {i}" for i, name in enumerate(names)]
        if len(labels) != len(self) or len(set(labels)) != len(self):
            raise InvalidInput(f"{len(self)} changes need as many different labels; got {list(labels)}")
        return [str(label) for label in labels]


def _joined(parts: Sequence[Responses]) -> Responses:
    first = parts[0]
    return Responses(
        {answer: torch.cat([part.values[answer] for part in parts]) for answer in first.values},
        first.control,
        first.noise,
        torch.cat([part.clip_switched for part in parts]),
        [row for part in parts for row in part.zero_v],
        [norm for part in parts for norm in part.xi_norm],
    )
