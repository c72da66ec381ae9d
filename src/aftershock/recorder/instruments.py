"""What kind of event a spike was, in the run's own numbers: the update against its memory, the data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.adamw import Hyper
from ..core.batches import Batch
from ..core.contributions import Layers
from ..core.layout import Layout
from ..core.reductions import parts
from ..core.state import JointState
from ..core.trajectory import Trajectory
from ..errors import InvalidInput
from .alarm import ALARM, usual
from .event import Event
from .neighbours import Likeness
from .quantity import Quantity, on_weights, seen, with_other_draws


@dataclass(frozen=True)
class Heights:
    """The numbers that decide what kind of event a spike was."""

    large_update: float = 2.0  # RMS of g/√v̂: ordinary steps have 0.5–1.2, the steps before spikes 3.6–6.2
    unusual: float = 2.0  # times the usual RMS here: a run whose updates are always large has none that is
    # Robust σ above the usual value; beyond 3 σ of losses, whose tails are heavy, many a batch lies.
    ordinary: float = 5.0
    half: float = 0.5  # of the spike: a batch with less of it on the same weights is ordinary
    # Times what is ordinary: bad targets of a likelihood had 1,400 times that on weights of sixty steps before; a sound
    # batch of a rare kind, on weights that others had spoilt for it, 7 times (benchmarks/culprits).
    extreme: float = 100.0
    low: float = 0.2  # of the earlier weights: on so many a batch may be lower without being ordinary
    least_after: int = 2  # high batches after the spike that make a shift: one may be bad by itself
    many: float = 0.5  # of the earlier half of the batches after it: if fewer are high, they are odd ones
    # Of the later half of the batches after it: if fewer are high, what came was a bad shard and has ended.
    staying: float = 0.25
    fewest_alike: int = 2  # earlier batches of a rare kind, whose losses speak of it
    most_alike: int = 3  # batches whose median stands for their kind: one of them may be bad itself
    newest: int = 4  # how many steps before a batch's own its loss is looked at again, at least
    looked: int = 12  # earlier states, spread over the window: those before an earlier culprit must be among them


HEIGHTS = Heights()
LEADERS = 3


# --- the update against its memory


@dataclass(frozen=True)
class Leader:
    """A tensor whose gradient is large against its memory."""

    name: str
    rms: float
    usual: float  # the median of it over the steps before
    share: float  # of the whole model's Σ g²/v̂


@dataclass(frozen=True)
class UpdateSizes:
    """RMS of g/√v̂ at each step of the path; NaN where a tensor had no gradient."""

    whole: Float[Tensor, " step"]
    by_layer: Float[Tensor, "step layer"]
    by_tensor: Float[Tensor, "step tensor"]
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    sizes: tuple[int, ...]  # elements of each tensor

    def leaders(self, at: int = -1, count: int = LEADERS) -> tuple[Leader, ...]:
        """The tensors with the largest RMS at a step."""
        row = self.by_tensor[at]
        squares = row.square().nan_to_num(0.0) * torch.tensor(self.sizes, dtype=row.dtype)
        shares = squares / squares.sum().clamp(min=1e-300)
        order = row.nan_to_num(-1.0).argsort(descending=True)[:count].tolist()
        before = self.by_tensor[:at]
        usual = before.nanmedian(0).values if len(before) else torch.full_like(row, torch.nan)
        return tuple(Leader(self.tensors[i], float(row[i]), float(usual[i]), float(shares[i])) for i in order)

    def usual(self, at: int = -1) -> float:
        """The median over the steps before `at`."""
        before = self.whole[:at]
        return float(before.median()) if len(before) else math.nan

    def large(self, at: int = -1) -> bool:
        """Larger than a gradient that its memory knows: beyond any ordinary step, and twice what is usual here."""
        usual = HEIGHTS.unusual * self.usual(at)
        return float(self.whole[at]) > max(HEIGHTS.large_update, 0.0 if math.isnan(usual) else usual)

    def sentence(self, at: int = -1) -> str:
        leaders = [f"{leader.name} ({leader.rms:.2g}, usual {leader.usual:.2g})" for leader in self.leaders(at)]
        return (
            f"the gradient is {float(self.whole[at]):.2g} times what Adam's memory of it expects (RMS of g/√v̂; usual "
            f"here {self.usual(at):.2g}), most of all in {', '.join(leaders)}"
        )


def update_sizes(trajectory: Trajectory, layers: Layers | None = None) -> UpdateSizes:
    """√mean(g²/max(v̂, ε²)) by step and layer: StableAdamW's RMS, g as it reaches the moments, v̂ after the step.

    g = (m' − β1 m)/(1−β1) from the states, so that no gradient is computed where they are kept; elsewhere one per
    step. Its rounding error is that of m, ten times: far below what an RMS shows.
    """
    layout = trajectory.dynamics.layout
    layers = Layers.of(layout) if layers is None else layers
    sums: list[Tensor] = []
    before: JointState | None = None
    for time, state in trajectory.states(0, len(trajectory)):
        if before is not None:
            sums.append(_squares(layout, trajectory.steps[time - 1].hypers, before, state))
        before = replace(state, m=state.m.clone())  # the next state may be written in its place
    squares = torch.stack(sums)
    sizes = torch.tensor(layout.sizes, dtype=squares.dtype).expand_as(squares)
    counted = torch.where(squares.isnan(), 0.0, sizes)
    squared = squares.nan_to_num(0.0)
    by_layer = (layers.summed(squared) / layers.summed(counted)).sqrt()
    whole = (squared.sum(1) / counted.sum(1)).sqrt()
    by_tensor = (squares / sizes).sqrt()
    return UpdateSizes(whole, by_layer, by_tensor, tuple(layers.names), layout.names, layout.sizes)


def _squares(
    layout: Layout, hypers: Sequence[Hyper], before: JointState, after: JointState
) -> Float[Tensor, " tensor"]:
    """Σ g²/max(v̂, ε²) of each tensor at one step; NaN where it had no gradient."""
    out = torch.full((len(layout.names),), torch.nan, dtype=torch.float64)
    ratio = torch.zeros_like(after.m)
    pieces = [flat.split(layout.padded_sizes) for flat in (before.m, after.m, after.v, ratio)]
    taken = [i for i, (was, now) in enumerate(zip(before.counts, after.counts)) if now > was]
    for i in taken:
        m_before, m, v, place = (piece[i] for piece in pieces)
        hyper = hypers[layout.groups[i]]
        g = torch.sub(m, m_before, alpha=hyper.beta1).div_(1 - hyper.beta1)
        root = (v / (1 - hyper.beta2 ** after.counts[i])).sqrt_().clamp_(min=max(hyper.eps, torch.finfo(v.dtype).tiny))
        torch.div(g, root, out=place)
    found = parts(ratio, ratio, layout.padded_sizes).double().cpu()
    out[taken] = found[taken]
    return out


# --- the data


@dataclass(frozen=True)
class DataFinding:
    """The spike's batch beside others on the same weights, and on the weights of earlier steps.

    kind: "draw" (with the random numbers of other steps it is ordinary, and others are high with its own), "own batch"
    (high on any weights, others are ordinary), "source" (the same, and earlier batches like it were high at their own
    steps), "shift" (those that follow are as high, earlier ones ordinary), "weights" (other batches are high too),
    "both" (this batch, and on these weights or with these random numbers only, as far as is known), "ordinary" (the
    batch is not high).
    """

    kind: str
    own: float
    usual: float  # the median before it, as the run had it
    sigma: float
    before: tuple[float, ...]  # earlier batches on the weights before the step
    after: tuple[float, ...]  # the following ones there
    elsewhere: tuple[float, ...]  # the batch itself on the weights of earlier steps at which the run was not high
    alike: tuple[float, ...]  # the earlier batches most like it, at their own steps
    redrawn: tuple[float, ...]  # the batch there with the random numbers of earlier steps; nothing where none are drawn
    quantity: Quantity = "loss"

    @property
    def kin_high(self) -> float:
        """What the one earlier batch most like it had when it came, where that was high, too: one alone does not make a
        kind, as it may be near by chance, and may speak of one. NaN where it was not."""
        high = bool(self.alike) and self.alike[0] - self.usual >= HEIGHTS.half * (self.own - self.usual)
        return self.alike[0] if high else math.nan

    @property
    def sentence(self) -> str:
        high = f"its {self.quantity} is {self.own:.3g} (usual {self.usual:.3g})"
        if self.kind == "ordinary":
            far = (self.own - self.usual) / self.sigma if self.sigma else 0.0
            slight = f"{far:.1f} robust σ above it, too little to tell a bad batch by"
            return f"{high}, {'within the usual spread' if far <= ALARM.usual else slight}"
        count, middle = len(self.before), statistics.median(self.before)
        others = f"{count} earlier batches have {middle:.3g} on the same weights"
        if count == 1:
            others = f"one earlier batch has {middle:.3g} on the same weights"
        if self.kind == "draw":
            return (
                f"{high}; {others} with the same random numbers (noise, masks, dropout), and with those of "
                f"{len(self.redrawn)} earlier steps, it has {statistics.median(self.redrawn):.3g} (median)"
            )
        if self.after:
            others += f", the {len(self.after)} after it {statistics.median(self.after):.3g}"
        before = "on earlier weights every batch is as high"
        if self.elsewhere:
            before = f"on earlier weights it has {_low(self.elsewhere):.3g} itself"
        half = self.usual + HEIGHTS.half * (self.own - self.usual)
        weights = "the data changed here, or the weights are bad for all that was not just trained on"
        if statistics.median(self.before) >= half:
            bad_itself = bool(self.elsewhere) and _low(self.elsewhere) >= half
            weights = f"the weights are bad, and {before}" if bad_itself else "the weights are bad, not the batch"
        meaning = {
            "weights": weights,
            "both": f"{before}, so that nobody can tell whether it is bad by itself",
            "shift": f"{before}, and what follows is like it",
            "own batch": before,  # that it is this batch is for the verdict to say: runs without it may show otherwise
            "source": f"{before}, and the {len(self.alike)} earlier batches whose inputs are most like its own had "
            f"{', '.join(f'{value:.3g}' for value in self.alike)} when they came",
        }
        return f"{high}; {others}; {meaning[self.kind]}"


def data(
    trajectory: Trajectory,
    at: int,
    before: Sequence[Batch],
    after: Sequence[Batch] = (),
    quantity: Quantity = "loss",
) -> DataFinding:
    """Is it the batch of step `at`, the data from there on, or the weights? One forward pass per batch, and a few more;
    gradients where the gradient norm is what is asked about.

    A value is high when it has half of the spike: the spike is beyond 5 σ of the values that the run had, so that half
    of it separates the two, and a median does not follow one odd batch. A shift takes at least two high batches after
    it, half of those that follow soon, and goes on: one may be bad by itself, and a bad shard ends. Where a run is
    unstable, weights are often bad for a batch that is ordinary on all others: data are to blame only if they are high
    on earlier weights too, and higher than others of their kind (`_beside_its_kind`). Where the loss draws random
    numbers, neither is, if the batch is ordinary with most other draws, and others are high with the same one: a batch
    of which a mask shows only some may be bad where it shows.
    """
    if not before or not at:
        raise InvalidInput("a batch is judged beside earlier ones: explain a step with at least one step before it")
    batch, own = trajectory.steps[at].batch, seen(quantity, trajectory.steps[at])
    others = on_weights(quantity, trajectory, at, [*before, *after])
    earlier, later = others[: len(before)], others[len(before) :]
    middle, sigma = usual([seen(quantity, step) for step in trajectory.steps[:at]])
    sigma = max(sigma, ALARM.flattest * abs(middle))

    def high(value: float) -> bool:
        return value - middle >= HEIGHTS.half * (own - middle)

    elsewhere = _elsewhere(trajectory, _earlier_times(trajectory, at, high, quantity), batch, quantity)
    alike = _alike(trajectory, at, high, quantity)
    redrawn = with_other_draws(quantity, trajectory, at, range(max(0, at - len(before)), at))

    soon, late = later[: len(later) // 2], later[len(later) // 2 :]
    many, stay = sum(map(high, soon)) >= HEIGHTS.many * len(soon), sum(map(high, late)) >= HEIGHTS.staying * len(late)
    follows = sum(map(high, later)) >= HEIGHTS.least_after and many and stay
    if own - middle <= HEIGHTS.ordinary * sigma:
        kind = "ordinary"
    elif high(statistics.median(earlier)):  # they were given the same draw
        kind = "draw" if redrawn and not high(statistics.median(redrawn)) else "weights"
    else:
        kind = _beside_its_kind(trajectory, at, elsewhere, alike, middle, sigma, quantity)
        if follows:  # batches that were just trained on may still do well
            kind = "weights" if kind == "both" else "shift"
    theirs = tuple(seen(quantity, trajectory.steps[time]) for time in alike.times)
    return DataFinding(kind, own, middle, sigma, earlier, later, elsewhere, theirs, redrawn, quantity)


def own_batches(trajectory: Trajectory, event: Event) -> tuple[int, ...]:
    """The steps of an event whose batches are bad by themselves; none where the explained step is not one of them."""
    own = bad_by_themselves(trajectory, event, event.onset)
    return own if event.step in own else ()


def later_events(trajectory: Trajectory, event: Event, first: int) -> tuple[int, ...]:
    """The steps from a first one on that are events of their own: their batches are bad by themselves, and would be
    told on earlier weights, too. Half of a low event is what sound batches of any run may have."""
    return bad_by_themselves(trajectory, event, first, ALARM.threshold)


def bad_by_themselves(trajectory: Trajectory, event: Event, first: int, far: float = 0.0) -> tuple[int, ...]:
    """The steps of an event, from a first one on, whose batches are high on the weights of earlier steps, too.

    A bad batch whose like has been trained on is lower than the first, and as high on earlier weights: without the
    first it would be, too. Beside one that is extreme, others are that have less than half of its height. far: robust σ
    above the usual that they have there at least.
    """
    bar = min(HEIGHTS.half * (event.values[event.step] - event.usual), HEIGHTS.extreme * event.ordinary)

    def high(value: float) -> bool:
        return value - event.usual >= bar

    loud = [i for i in range(first, event.last + 1) if event.values[i] > event.level]
    times, steps = _earlier_times(trajectory, event.onset, high, event.quantity), trajectory.steps

    def bad(i: int) -> bool:
        there = _elsewhere(trajectory, times, steps[i].batch, event.quantity)
        low = _low(there) if there else -math.inf
        if not high(max(event.values[i], low)) or (far and low - event.usual <= far * event.sigma):
            return False
        alike = _alike(trajectory, i, high, event.quantity)
        usual = (event.usual, event.sigma, event.quantity)
        return _beside_its_kind(trajectory, i, there, alike, *usual) == "own batch"

    return tuple(filter(bad, loud))


def _beside_its_kind(
    trajectory: Trajectory,
    at: int,
    elsewhere: Sequence[float],
    alike: _Alike,
    middle: float,
    sigma: float,
    quantity: Quantity,
) -> str:
    """Is a batch bad by itself ("own batch")? It is high on earlier weights too, with half of its height or extreme in
    any case, or had half of its height when it came before, in another epoch; and the batches most like it are not:
    neither about as high at their own steps, else all of their kind are harder ("source", where they are one), nor on
    its own weights, else these may be bad for that kind ("both").

    The height itself may grow with the run: a likelihood's does as it learns its scale.
    """
    half = HEIGHTS.half * (seen(quantity, trajectory.steps[at]) - middle)
    there = _low(elsewhere) - middle if elsewhere else -math.inf
    if there < half and there <= HEIGHTS.extreme * max(ALARM.threshold * sigma, abs(middle)):
        again = Likeness(trajectory.steps[: at + 1]).same({at}, range(at)) - {at}
        if all(seen(quantity, trajectory.steps[time]) - middle < half for time in again):
            return "both"
    came = [seen(quantity, trajectory.steps[time]) - middle for time in alike.times]
    as_high = [half <= height <= ALARM.far * half / HEIGHTS.half for height in came]  # far higher ones may be bad
    if alike.a_kind and 2 * sum(as_high) > len(came):
        return "source"
    here = on_weights(quantity, trajectory, at, [trajectory.steps[time].batch for time in alike.times])
    as_bad = max(half, HEIGHTS.half * there)  # it may be lower here, because its like has been trained on
    return "both" if here and statistics.median(here) - middle >= as_bad else "own batch"


def _low(values: Sequence[float]) -> float:
    """The value that all but a few exceed."""
    return sorted(values)[int(HEIGHTS.low * len(values))]


def _settled(trajectory: Trajectory, at: int, high: Callable[[float], bool], quantity: Quantity) -> list[int]:
    """Times up to some steps before, less those at which the run's own values are high, as where it has only begun to
    learn: there every batch is, and that says nothing of one."""
    last = max(0, at - HEIGHTS.newest)
    own = [seen(quantity, step) for step in trajectory.steps[: last + 2]]
    return [time for time in range(last + 1) if not high(statistics.median(own[max(0, time - 1) : time + 2]))]


def _earlier_times(trajectory: Trajectory, at: int, high: Callable[[float], bool], quantity: Quantity) -> list[int]:
    """Some of these, spread over the window; states in memory are free."""
    settled = _settled(trajectory, at, high, quantity)
    kept = [time for time in settled if trajectory.kept(time) is not None] or settled[-1:]
    count = HEIGHTS.looked
    return sorted({kept[round(i * (len(kept) - 1) / (count - 1))] for i in range(count)}) if kept else []


class _Alike(NamedTuple):
    """Earlier times whose batches are most like one, and whether some are of a kind with it that stands apart: where
    all data are of one kind, some are most alike, too, and their losses say nothing of it."""

    times: list[int]
    a_kind: bool


def _alike(trajectory: Trajectory, at: int, high: Callable[[float], bool], quantity: Quantity) -> _Alike:
    """Those of the settled times that are so of the batch of step `at`."""
    times, likeness = _settled(trajectory, at, high, quantity), Likeness(trajectory.steps[: at + 1])
    nearest = likeness.nearest(at, times, HEIGHTS.most_alike)
    return _Alike(nearest, bool(likeness.kin(at, times, least=HEIGHTS.fewest_alike)))


def _elsewhere(trajectory: Trajectory, times: Sequence[int], batch: Batch, quantity: Quantity) -> tuple[float, ...]:
    """A batch on the weights of some times."""
    return tuple(value for time in times for value in on_weights(quantity, trajectory, time, [batch]))
