"""The paper's ISO Tangent (FD): the tangent response from reruns alone, by centred differences of logits.

Nothing is differentiated twice, so that it runs on any model whose probe has logits. How far it may be trusted is
seen by comparing several steps ε, or the exact tangent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..core.batches import Batch
from ..core.changes import ControlStep, Shock, names_of, scales_of
from ..core.exact_rows import ExactRows
from ..core.footprint import Footprint
from ..core.memory import in_chunks, in_one_piece, ran_out
from ..core.planning import plan_readings, plan_rerun_lanes
from ..core.probe import Watch
from ..core.readings import row_readings
from ..core.reductions import norms
from ..core.rehearsals import rehearse_reading
from ..core.rollout import Moment, Rows, rollout
from ..core.state import JointState
from ..errors import InvalidInput, InvalidLoss
from ..results.provenance import asked, provenance

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change

STEPS = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
READ_AT_ONCE = 8  # rows whose logits are in memory together
READ_COPIES = 8  # of one row's logits, in float32, while they are read
Logits = Callable[[nn.Module, Batch], tuple[Float[Tensor, "*token kind"], Int[Tensor, "*token"]]]


def token_loss(logits: Float[Tensor, "*token kind"], labels: Int[Tensor, "*token"]) -> Tensor:
    """The mean cross-entropy, in float64: two nearly equal losses then differ by what their logits differ by.

    >>> round(float(theory.token_loss(torch.zeros(5, 2), torch.tensor([0, 1, 1, 0, 1]))), 4)  # log 2
    0.6931
    """
    return cross_entropy(logits.flatten(0, -2).double(), labels.flatten())


def logit_tangent(
    change: Change,
    probe: Batch,
    logits: Logits,
    *,
    steps: Sequence[float] = STEPS,
    scales: Sequence[float] = (1.0,),
    horizon: int | None = None,
    memory: str | int | None = None,
) -> xr.Dataset:
    """Exact responses at every scale α, and the derivative at α = 0 by centred differences ±ε of the logits.

    δz = (z(+ε) − z(−ε)) / 2ε, then the control's exact cross-entropy differential in float64:
    `derivative[fd_step, change, horizon]` = 1/N Σ_n ⟨softmax(z⁰_n) − e_{y_n}, δz_n⟩. `exact[scale, change, horizon]`
    is the difference of the mean token losses, in float64; `control[horizon]` the control's. `gradient_norm` is ‖ξ‖
    and `write_norm` the norm of the exact change of θ at α = 1 by the step itself.

    A scale that is also a step is run once. Costs a rerun for every scale and every ±ε: 1 g and a forward pass of the
    probe per horizon. Paper: "Numerical ISO directional response".

    probe: a batch. logits: `logits(model, batch)` gives the logits and their labels, as `torch.nn.functional.
    cross_entropy` takes them (−100 is not counted).
    memory: a budget such as "8GiB"; default: the path's own, or what is free. The work is cut to fit it.

    >>> found = theory.logit_tangent(change, probe, lambda model, batch: (model(batch[0]), batch[1]), steps=[0.01])
    >>> float(abs(found["derivative"].values[0] - response.tangent.values[:, 0]).max()) < 1e-5
    True
    """
    steps = sorted(scales_of(change.edits, steps), reverse=True)
    scales = scales_of(change.edits, scales)
    if steps[-1] < 0:
        raise InvalidInput(f"steps of a centred difference are positive; got {steps}")
    watch = change.path.watch(change.at, probe, horizon)
    ways = sorted({*scales, *steps, *(-step for step in steps), 1.0}, reverse=True)
    limit = change.path.memory if memory is None else memory
    found = _Reruns(watch, logits, ways, limit).of(change)
    return _labelled(change, watch, found, ways, steps, scales)


class LogitReader:
    """The mean token loss of every row, and its linear part ⟨softmax(z⁰) − e, z⟩ / N: both less the control's.

    The control is read first, at every horizon: H gradients and 2·H forward passes.
    """

    def __init__(self, watch: Watch, logits: Logits) -> None:
        self._logits, self._batch = logits, watch.probe.batch
        self._loss, self._random = watch.trajectory.dynamics.loss, watch.trajectory.steps[0].random
        self._slopes: dict[int, Tensor] = {}
        self.controls: dict[int, Tensor] = {}  # the control's two readings by time
        Footprint.of(watch.trajectory)  # a large model's gradient is recorded with it
        for moment in rollout(watch.trajectory, watch.first, Rows(), watch.last):
            state = moment.control
            self._slopes[moment.time] = self._slope(state)
            if moment.time == watch.first and self._loss.player.pays:
                rehearse_reading(
                    self._loss, state.theta, state.buffers, self._given(moment.time), read_both, self._random
                )
            self.controls[moment.time] = self._values(moment.time, state.theta[None], [state.buffers])[0]

    def read(self, moment: Moment) -> Float[Tensor, "row 2"]:
        """One forward pass a row, or less where rows run together; a GPU is not waited for."""
        rows, time = moment.exact, moment.time
        if rows.together:
            values = self._values(time, rows.thetas, rows.buffers)
            self.controls[time] = values[0]
        else:
            found = self._loss.spread(
                "reading", (read_both, self._given(time)), len(rows.buffers), lambda slot: self._row(time, rows, slot)
            )
            values = torch.cat(found) if found else self.controls[time][None]
        return rows.differences(values, self.controls[time])

    def _row(self, time: int, rows: ExactRows, slot: int) -> Float[Tensor, "1 2"]:
        state = rows.slot_state(slot)
        return self._values(time, state.theta[None], [state.buffers])

    def nbytes(self, rows: int) -> int:
        """Logits on the way, while so many rows are read."""
        return next(iter(self._slopes.values())).nbytes * READ_COPIES * min(rows, READ_AT_ONCE)

    def _values(self, time: int, thetas: Float[Tensor, "row param"], buffers: Sequence[Any]) -> Float[Tensor, "row 2"]:
        batch = self._given(time)
        pieces = [slice(first, first + READ_AT_ONCE) for first in range(0, len(thetas), READ_AT_ONCE)]
        return torch.cat(
            [row_readings(self._loss, thetas[p], buffers[p], batch, read_both, self._random) for p in pieces]
        )

    def _given(self, time: int) -> Batch:
        return {"probe": self._batch, "slope": self._slopes[time], "logits": self._logits}

    def _slope(self, state: JointState) -> Float[Tensor, "*token kind"]:
        """∂F/∂z at the control: (softmax(z) − e) / N."""

        def slope(model: nn.Module) -> Tensor:
            try:
                z, labels = self._logits(model, self._loss.place(self._batch))
                z = z.detach().requires_grad_()
                return torch.autograd.grad(token_loss(z, labels), z)[0]
            except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
                if ran_out(error):
                    raise
                raise InvalidLoss(
                    "logits(model, batch) gives the logits and their labels, as cross_entropy takes them; here it "
                    f"failed: {type(error).__name__}: {error}"
                ) from error

        views = self._loss.layout.typed_views(state.theta)
        found: Tensor = self._loss.call(views, state.buffers, self._random, slope)[0]
        return found


def read_both(model: nn.Module, batch: Batch) -> Float[Tensor, " 2"]:
    z, labels = batch["logits"](model, batch["probe"])
    return torch.stack([token_loss(z, labels), (z.double() * batch["slope"]).sum()])


class _Reruns:
    """Exact rows of changes at signed scales, as many at once as fit."""

    def __init__(self, watch: Watch, logits: Logits, ways: Sequence[float], memory: str | int | None) -> None:
        plan_rerun_lanes(watch.trajectory, len(ways), watch.horizons, memory)
        self.watch, self.ways = watch, ways
        self.reader = in_one_piece(lambda: LogitReader(watch, logits), "the control alone")
        self.size = plan_readings(watch, len(ways), self.reader.nbytes, memory)
        self.gradient_norm: list[float] = []
        self.write_norm: list[float] = []
        self.values: Float[Tensor, "change way 2 horizon"]

    def of(self, change: Change) -> _Reruns:
        control = ControlStep.of(self.watch.trajectory, self.watch.at)
        self.values = torch.stack([self._change(edit.shock(control)) for edit in change.edits])
        return self

    def _change(self, shock: Shock) -> Float[Tensor, "way 2 horizon"]:
        self.gradient_norm.append(math.nan if shock.xi is None else float(norms(shock.xi)))
        self.write_norm.append(self._write_norm(shock))
        distinct = self.write_norm[-1] > 0

        def run(some: range) -> Float[Tensor, "way 2 horizon"]:
            rows = Rows((shock.endpoint(self.ways[i])[0] for i in some), distinct=distinct, owned=True)
            moments = rollout(self.watch.trajectory, self.watch.first, rows, self.watch.last)
            return torch.stack([self.reader.read(moment) for moment in moments], dim=-1).cpu()

        return torch.cat(in_chunks(len(self.ways), self.size, run, "reruns of one change"))

    def _write_norm(self, shock: Shock) -> float:
        theta = self.watch.trajectory.state(self.watch.first).theta  # of both states nothing else is held
        return float(norms(shock.endpoint(1.0)[0].theta.sub_(theta)))


def _labelled(
    change: Change, watch: Watch, found: _Reruns, ways: Sequence[float], steps: Sequence[float], scales: Sequence[float]
) -> xr.Dataset:
    import xarray as xr

    values, at = found.values, {way: i for i, way in enumerate(ways)}
    exact = torch.stack([values[:, at[scale], 0] for scale in scales])
    derivative = torch.stack([(values[:, at[e], 1] - values[:, at[-e], 1]) / (2 * e) for e in steps])
    control = [float(found.reader.controls[time][0]) for time in range(watch.first, watch.last + 1)]
    return xr.Dataset(
        {
            "exact": (("scale", "change", "horizon"), exact.numpy()),
            "derivative": (("fd_step", "change", "horizon"), derivative.numpy()),
            "control": ("horizon", control),
            "gradient_norm": ("change", found.gradient_norm),
            "write_norm": ("change", found.write_norm),
            **asked(change.kind, watch.at, watch.probe),
        },
        {"scale": list(scales), "fd_step": list(steps), "change": names_of(change.edits), "horizon": watch.range},
        provenance(watch.trajectory),
    )
