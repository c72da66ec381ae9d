"""`Change`: what differs at one step of a path, and its response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from ..core.changes import Edit, names_of, scales_of
from ..core.noise import Noise
from ..core.planning import Plan, Work, plan_responses
from ..core.probe import Watch
from ..core.responses import ANSWERS, Responses, first_disagreement, respond
from ..core.state import JointState, Tangent, difference
from ..errors import HiddenState, InvalidInput, NoDerivative
from ..results.certificate import TRUST
from .progress import Estimate, progress
from .response import Response, labelled

if TYPE_CHECKING:
    from .path import Path

PRODUCT_COST = 1.7  # a Hessian product in gradients: 1.1–1.3 (MLP) to 1.6–2.0 (CNN)
GRAPH_COST = 1.3
FORWARD_COST = 0.35


@dataclass(frozen=True)
class Change:
    """One or more changes at one step, held as exact state differences after it. Made by the methods of `Path`.

    at: the changed step. kind: "replace", "skip", …; edits: one per change.

    >>> change
    Change(replace at step 0, 2 change(s))
    """

    path: Path
    at: int
    kind: str
    edits: tuple[Edit, ...]

    def __len__(self) -> int:
        return len(self.edits)

    def __repr__(self) -> str:
        return f"Change({self.kind} at step {self.at}, {len(self)} change(s))"

    def difference(self, scale: float = 1.0) -> list[Tangent]:
        """The exact δx = (δθ, δm, δv) right after the step, one per change. Costs a gradient per new batch.

        scale: α between the control (0) and the change (1).

        >>> [f"{float(dx.theta.norm()):.4f}" for dx in change.difference()]
        ['0.0029', '0.0126']
        """
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
        answers: "exact" (the truth: a second run), "semilinear" (AdamW exact, only the network's gradient linear)
            and "tangent" (all linear); default: all three, or "exact" alone where the probe has no derivative or reads
            buffers that training moves. A model whose Hessian products are wrong is refused unless it alone is asked.
        horizon: how many states after the step; default: to the end of the path.
        labels: names of the changes in the result.
        memory: a budget such as "8GiB"; default: the path's own, or what is free. The work is cut to fit it.

        Costs, per change and horizon: a gradient (exact) and a Hessian product (semilinear) for each scale, one Hessian
        product for all scales (tangent), and readings of the probe; `estimate` adds it up beforehand. The control runs
        once more from a state that differs by one rounding: how far its loss moves is the noise floor.

        >>> response = change.response(probe, scales=[0.1, 1.0])
        >>> dict(response.exact.sizes)
        {'change': 2, 'scale': 2, 'horizon': 4}
        >>> response.summary["peak_sign"].sel(answer="exact", scale=1.0).values.tolist()
        [-1, 1]
        """
        watch = self._watch(probe, horizon)
        scales = scales_of(self.edits, scales)
        answers, refused = self._answers(answers, watch)
        names = names_of(self.edits, labels)
        plan, noise = self._plan(watch, scales, answers, memory), Noise(watch)
        cost = self._cost(plan, watch, scales, _noise_cost(watch, answers))
        with progress("response", plan.chunks * watch.horizons, cost) as tick:
            found = respond(watch, self.edits, scales, plan.passes, tick, noise)
        floor = noise.floor(found.control)
        self._prove_where_wrong(found, floor)
        return labelled(self, watch, found, floor, names, scales, refused)

    def numbers(
        self, watch: Watch, answer: str = "exact", *, scale: float = 1.0, memory: str | int | None = None
    ) -> Float[Tensor, "change horizon"]:
        """One answer alone, by horizon, for those who have their own noise floor and checks.

        >>> exact = change.numbers(path.watch(0, probe, horizon=2))
        >>> torch.equal(exact, torch.as_tensor(response.exact.values[:, 0, :2]))
        True
        """
        plan = self._plan(watch, (scale,), (answer,), memory, rounding=False)
        cost = self._cost(plan, watch, (scale,))
        with progress(f"{answer} response", plan.chunks * watch.horizons, cost) as tick:
            return respond(watch, self.edits, (scale,), plan.passes, tick).values[answer][:, 0]

    def estimate(
        self,
        probe: Any,
        *,
        scales: Sequence[float] = (1.0,),
        answers: Sequence[str] | None = None,
        horizon: int | None = None,
        memory: str | int | None = None,
    ) -> Estimate:
        """What `response` will cost, before any of it is done: gradients, seconds, peak memory.

        The arguments are those of `response`, and what that refuses is refused. The first one of a path measures a few
        passes of the model (about 10 g) and, where something is predicted, makes its check, which a response then finds
        done.

        >>> estimate = change.estimate(probe)
        >>> round(estimate.gradients), estimate.chunks
        (60, 1)
        """
        watch = self._watch(probe, horizon)
        scales, (answers, _) = scales_of(self.edits, scales), self._answers(answers, watch)
        return self._cost(self._plan(watch, scales, answers, memory), watch, scales, _noise_cost(watch, answers))

    # --- inside

    def _prove_where_wrong(self, found: Responses, noise: Float[Tensor, " horizon"]) -> None:
        """Check the steps before a state at which the best prediction is grossly wrong, or any is not finite: a Hessian
        there may be."""
        for answer in set(found.values) - {"exact"}:
            self.path.check_lost(self.at, found.values[answer].flatten(0, 1))
        exact = found.values.get("exact")
        predicted = found.values.get("semilinear", found.values.get("tangent"))
        if exact is not None and predicted is not None:
            curves = exact.flatten(0, 1), predicted.flatten(0, 1)
            h = first_disagreement(*curves, noise, gross=TRUST.careful_nrmse, parted=TRUST.symmetric_error)
            self.path.check_before(self.at, None if h is None else self.at + h)

    def _watch(self, probe: Any, horizon: int | None) -> Watch:
        return self.path.watch(self.at, probe, horizon)

    def _plan(
        self,
        watch: Watch,
        scales: Sequence[float],
        answers: Sequence[str],
        memory: str | int | None,
        *,
        rounding: bool = True,
    ) -> Plan:
        limit = self.path.memory if memory is None else memory
        work = Work(watch, len(self), len(scales), by_scale=self.edits[0].by_gradient, rounding=rounding)
        return plan_responses(work, answers, limit)

    def _cost(self, plan: Plan, watch: Watch, scales: Sequence[float], beside: float = 0.0) -> Estimate:
        """What the rows cost, and `beside` them, in gradients."""
        rows, gradients = len(self) * len(scales), beside
        for each in plan.passes:
            chunks = math.ceil(len(self) / each.at_once)
            predicted = rows * ("semilinear" in each.answers) + len(self) * ("tangent" in each.answers)
            read = rows * (("semilinear" in each.answers) + ("exact" in each.answers))
            gradients += len(self) + watch.horizons * (
                rows * ("exact" in each.answers)
                + predicted * PRODUCT_COST
                + chunks * (GRAPH_COST * (predicted > 0) + ("tangent" in each.answers))
                + read * FORWARD_COST
            )
        seconds = gradients * self.path.trajectory.seconds_per_step
        return Estimate(gradients, seconds, plan.peak, plan.chunks)

    def _answers(self, answers: Sequence[str] | None, watch: Watch) -> tuple[list[str], str]:
        """The answers to run, and why others are not."""
        wanted = list(ANSWERS if answers is None else answers)
        unknown = [answer for answer in wanted if answer not in ANSWERS]
        if unknown or not wanted:
            raise InvalidInput(f"answers are {', '.join(ANSWERS)}; got {wanted}")
        if wanted == ["exact"]:
            return wanted, ""
        try:
            watch.require_derivative()
        except NoDerivative:
            if answers is not None:
                raise
            return ["exact"], "the probe has no derivative, so that only its exact response exists"
        hidden = self.path.check().hidden or watch.hidden()
        if not hidden:
            return wanted, ""
        reason = (
            f"the loss of the path or probe depends on buffers that training moves ({', '.join(hidden[:2])}…), which "
            "are state outside (θ, m, v), so the linear answers would be wrong"
        )
        if answers is not None:
            raise HiddenState(f"{reason}; ask for answers=('exact',), or probe in training mode")
        return ["exact"], reason


def _noise_cost(watch: Watch, answers: Sequence[str]) -> float:
    """Of the noise floor, in gradients: seven readings, and one exact row where there are others."""
    return 7 * FORWARD_COST + watch.horizons * (1 + FORWARD_COST) * ("exact" in answers)
