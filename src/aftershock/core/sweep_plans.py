"""What rankings need in memory: a sweep back from every outcome, then gradients of a pool and their kicks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import OutOfMemory
from .batches import Accumulated, Batch, example_count, take_examples
from .contributions import LANCZOS
from .examples import EXAMPLES_AT_ONCE, TESTED, example_derivatives
from .footprint import Curvature, Footprint, peak_on, room
from .kicks import IN_CACHE, PAIRS_AT_ONCE
from .memory import budget, enough, lacking, readable
from .planning import LANE_SHARE, Work, pass_bytes, plan_history, plan_lanes, plan_reruns, plan_responses
from .probe import Watch
from .responses import Pass
from .row_costs import Load, pool_bytes, product_bytes, rollout_bytes
from .scores import SAMPLE, AtOnce
from .structure import flatten
from .trajectory import Trajectory
from .waiting import SUMS

# gradients of a pool held at once: their product with the adjoints then reads those once a chunk
POOL_AT_ONCE, POOL_ON_CPU = 128, 64
# of what else is held, for pairs of a batch and a coordinate on a CPU, which gains nothing from many of them: how many
# there will be is not known, so that they must not matter
PAIRS_SHARE = 0.1
FEWEST_PAIRS = 2**12
# pieces that are alive at once while three points of every curve are computed, and while curves are drawn through them
FOLDED = 23
DRAWN_BY_OUTCOME, DRAWN = 6, 12
# examples of one forward-mode pass on a GPU: launching that of a small model takes as long for a few as for thousands
EXAMPLES_LAUNCHED = 4096


@dataclass(frozen=True)
class SweepPlan:
    """Where a sweep is kept, how much of the pool is held at once, and the peak beside the model and the path.

    peak: without pairs beyond their curves that wait for a replay of the path, or on a GPU: how many there will be is
        not known before the gradients are, and they have at most a part of `spare`.
    spare: what the budget leaves while the pool is read.
    products: Hessian products of a step of the sweep that are computed together; None for all.
    """

    place: torch.device
    at_once: AtOnce
    peak: int
    spare: int = 0
    products: int | None = None

    def __str__(self) -> str:
        size = self.at_once
        return (
            f"{readable(self.peak)}: the sweep kept on {self.place}, {size.gradients} gradients of the pool at once, "
            f"kicks of {size.waiting:,} pairs"
        )

    def elsewhere(self) -> SweepPlan | None:
        """The sweep kept in host memory, and fewer kicks at once; None where it is."""
        host, few = torch.device("cpu"), replace(self.at_once, waiting=FEWEST_PAIRS)
        found = replace(self, place=host, at_once=few)
        return None if found == self else found

    def smaller(self) -> SweepPlan | None:
        """Half as much of the pool at once; None where it is one gradient and few pairs."""
        size = self.at_once
        half = AtOnce(max(1, size.gradients // 2), *(max(FEWEST_PAIRS, n // 2) for n in (size.pairs, size.waiting)))
        done = half.gradients == size.gradients and half.waiting >= size.waiting
        return None if done else replace(self, at_once=half)


@dataclass(frozen=True)
class ExampleFootprint:
    """What single examples hold: their forward-mode pass, and the gradient of those on which it is tested."""

    vector: int
    slopes: int  # of one example
    gradient: int  # of one, beside the gradient itself

    @classmethod
    def of(cls, trajectory: Trajectory, batch: Batch) -> ExampleFootprint:
        """Measured once on a few examples of a batch of this shape: about a gradient of it."""
        few = take_examples(batch, slice(0, TESTED))
        shapes = tuple((x.shape, x.dtype) for x in flatten(few)[0] if isinstance(x, Tensor))
        player = trajectory.dynamics.loss.player
        return player.measured(trajectory, (cls, shapes), lambda: _example_footprint(trajectory, few))

    def nbytes(self, count: int) -> int:
        """While so many pass at once: the control's gradient, the direction, and the larger of the two."""
        return 2 * self.vector + max(count * self.slopes, self.vector + max(self.vector, count * self.gradient))


def _example_footprint(trajectory: Trajectory, few: Batch) -> ExampleFootprint:
    loss, state, random = trajectory.dynamics.loss, trajectory.state(0), trajectory.steps[0].random
    zero, vector, device = loss.layout.zeros(), Footprint.of(trajectory).vector, trajectory.device
    count = example_count(few)

    def held(n: int) -> tuple[int, int]:
        at = (state.theta, state.buffers, take_examples(few, slice(0, n)), random)
        slopes = peak_on(device, lambda: example_derivatives(loss, *at, zero, "the pool"))
        return slopes, peak_on(device, lambda: loss.gradient(*at, "the pool"))

    whole, half = held(count), held(max(1, count // 2))
    apart = count - max(1, count // 2)
    further = (whole[1] - half[1]) // apart if apart else whole[1] - vector
    return ExampleFootprint(vector, -(-whole[0] // count), max(further, 0))


def examples_at_once(trajectory: Trajectory, each: ExampleFootprint, examples: int, memory: str | int | None) -> int:
    """How many of so many single examples go through one forward-mode pass, as many as fit."""
    loss, available = trajectory.dynamics.loss, room(trajectory, memory)
    few = not loss.sharing.wanted or loss.player.pays or isinstance(trajectory.steps[0].batch, Accumulated)
    most = min(examples, EXAMPLES_AT_ONCE if few else EXAMPLES_LAUNCHED)
    size = next((n for n in range(most, 0, -1) if each.nbytes(n) <= available), None)
    if size is None:
        raise OutOfMemory(
            f"one example at a time {lacking(each.nbytes(1), available)}. What would fit: {enough(each.nbytes(1))}"
        )
    return size


def left_for_reruns(trajectory: Trajectory, few: int, memory: str | int | None) -> int | None:
    """What is left of a budget beside the gradients of so many examples and the control's; what is free does not hold
    them."""
    held = (few + 1) * Footprint.of(trajectory).vector
    return None if memory is None else max(1, budget(memory, trajectory.device) - held)


def plan_examples(watch: Watch, sample: int, few: int, memory: str | int | None) -> SweepPlan:
    """The sweep of one outcome, slopes of examples from gradients of a sample of batches, and so many reruns."""
    trajectory, horizons = watch.trajectory, [watch.horizons]
    held, work, rerun, least = (few + 1) * Footprint.of(trajectory).vector, Work(watch, few, 1), 0, 0
    given = budget(memory, trajectory.device) + trajectory.dynamics.loss.player.nbytes * (memory is None)
    try:
        rerun = held + plan_responses(work, ("exact",), left_for_reruns(trajectory, few, given)).peak if few else 0
    except OutOfMemory:
        least = held + pass_bytes(work, Pass(("exact",), 1))
    place = plan_history(trajectory, 3 * watch.horizons, memory)
    needs, available = _Needs(watch, place), room(trajectory, memory)
    swept = needs.swept(horizons, 1) - needs.control + needs.begun  # the state after the step is not used
    peak = max(swept, needs.sloped(horizons, sample))
    if least > peak:
        raise OutOfMemory(
            f"rerunning {few} examples, whose gradients are there at once, {lacking(least, available)}. What would "
            f"fit: {enough(least)}, or a smaller verify="
        )
    if peak > available:
        raise OutOfMemory(_advice(needs, watch, horizons, available, sample, peak))
    spare = available - needs.sloped(horizons, sample)
    return SweepPlan(place, needs.at_once(horizons, sample, sample, spare), max(peak, rerun), spare)


def with_reruns(sweep: Callable[[], SweepPlan], watch: Watch, count: int, memory: str | int | None) -> SweepPlan:
    """The plan of a sweep that exact reruns follow; where neither fits, what the sweep lacks is told, which is more."""
    try:
        rerun = plan_reruns(watch, count, memory) if count else 0
    except OutOfMemory:
        sweep()
        raise
    plan = sweep()
    return replace(plan, peak=max(plan.peak, rerun))


def plan_ranking(watch: Watch, horizons: Sequence[int], pool: int, memory: str | int | None) -> SweepPlan:
    """A ranking of so many batches by one sweep back from some outcomes, cut to fit into memory."""
    trajectory = watch.trajectory
    place = plan_history(trajectory, sum(horizons) + 2 * watch.horizons, memory)
    needs = _Needs(watch, place)
    available = room(trajectory, memory)
    most = min(pool, POOL_ON_CPU if trajectory.device.type == "cpu" else POOL_AT_ONCE)
    fits = (n for n in range(most, 0, -1) if needs.peak(horizons, n) <= available)
    count = next(fits, None)
    if count is None:
        raise OutOfMemory(_advice(needs, watch, horizons, available, 1, needs.peak(horizons, 1)))
    spare = max(0, available - needs.held(horizons, count) - needs.gradients(count))
    products = next(n for n in range(len(horizons), 0, -1) if n == 1 or needs.swept(horizons, n) <= available)
    peak = max(needs.peak(horizons, count), needs.swept(horizons, products))
    return SweepPlan(place, needs.at_once(horizons, count, pool, spare), peak, spare, products)


def widen(plan: SweepPlan, trajectory: Trajectory) -> None:
    """After the sweep and before the pool: gradients of a large model on more lanes, in what the plan leaves."""
    plan_lanes(trajectory, plan.at_once.gradients, POOL_AT_ONCE, plan.spare)


class _Needs:
    """Bytes at the peak of each stage, beside the model and the path."""

    def __init__(self, watch: Watch, place: torch.device) -> None:
        trajectory = watch.trajectory
        self.watch, self.trajectory, self.beside = watch, trajectory, place == trajectory.device
        self.f, self.c = Footprint.of(trajectory), Curvature.of(trajectory)
        self.read = watch.reading()
        made = sum(trajectory.kept(time) is None for time in (watch.at, watch.at + 1))
        self.control = self.f.vector * (1 + 3 * made)
        self.begun = self.f.vector * (1 + 3 * (trajectory.kept(watch.at) is None))  # without the state after the step
        self.clips = any(step.clip.binds for step in trajectory.steps)

    def peak(self, horizons: Sequence[int], count: int) -> int:
        """With so many gradients of the pool at once."""
        pairs = self.pairs(horizons, count) * self.per_pair(horizons)
        pool = self.held(horizons, count) + max(self.gradients(count), pairs)
        return max(self.started(len(horizons), count), self.swept(horizons, 1), self.curves(horizons), pool)

    def gradients(self, count: int) -> int:
        """While so many are computed."""
        together = pool_bytes(self.trajectory, count)
        return self.f.gradient if together is None else together

    def sloped(self, horizons: Sequence[int], count: int) -> int:
        """While slopes of examples are fitted to so many gradients: cotangents, how far curves reach, the slopes."""
        f, v, states = self.f, self.f.vector, self.trajectory.spacing > 1
        held = self.begun + v * (3 + 4 + count) + self.history(horizons)
        start = held - count * v + 3 * v + f.piece * 2 // 3
        beyond = self.trajectory.dynamics.layout.size * torch.int64.itemsize  # at most every coordinate
        replayed = max(f.gradient, 3 * v) * states
        return max(start, held + self.gradients(count), held + v + beyond + replayed)

    def started(self, outcomes: int, count: int) -> int:
        """Slopes of the probe on the way of the mean displacement, which is there twice."""
        row, f = rollout_bytes(self.trajectory, Load(semilinear=1), reading=self.read), self.f
        mean = 8 * f.vector + self.gradients(min(SAMPLE, count)) + f.update
        return self.control + max(mean, (3 + outcomes) * f.vector + max(row, self.read.gradient + 3 * f.vector))

    def swept(self, horizons: Sequence[int], products: int) -> int:
        """The end of the sweep: cotangents, their history, and what so many products at once are of."""
        f, c, rows = self.f, self.c, len(horizons)
        states = 0 if self.trajectory.spacing == 1 else 6 * f.vector
        together = product_bytes(self.trajectory, products)
        work = c.graph + f.vector * rows * (1 + self.clips) + max(together, f.piece)
        return self.control + states + 3 * rows * f.vector + self.history(horizons) + max(c.build, work)

    def history(self, horizons: Sequence[int]) -> int:
        return self.f.vector * sum(h - 1 for h in horizons) * self.beside

    def curves(self, horizons: Sequence[int]) -> int:
        """While they are drawn: three points of every outcome, and the moments after states that are not kept."""
        times = range(self.watch.at + 2, self.watch.at + max(horizons) + 1)
        copied = 2 * sum(self.trajectory.kept(time) is None for time in times) * self.beside
        made = 3 * (self.trajectory.spacing > 1)
        rows, piece = len(horizons), self.f.block(len(horizons))
        work = max(FOLDED * piece, (DRAWN_BY_OUTCOME * rows + DRAWN) * piece)
        return self.control + (6 * rows + 6 + copied + made) * self.f.vector + work + self.history(horizons)

    def held(self, horizons: Sequence[int], count: int) -> int:
        """While gradients of the pool are read: cotangents, curves, how far they reach, and the gradients."""
        return self.control + (6 * len(horizons) + 4 + count) * self.f.vector + self.history(horizons)

    def per_pair(self, horizons: Sequence[int]) -> int:
        """Of a batch and a coordinate beyond its curve: where it is, its write, and numbers by outcome."""
        return 200 + 32 * len(horizons)

    def pairs(self, horizons: Sequence[int], count: int) -> int:
        few = int(PAIRS_SHARE * self.held(horizons, count)) // self.per_pair(horizons)
        return max(FEWEST_PAIRS, min(few, IN_CACHE))

    def at_once(self, horizons: Sequence[int], count: int, pool: int, spare: int) -> AtOnce:
        pairs = self.pairs(horizons, count)
        if self.trajectory.device.type == "cpu" and self.trajectory.spacing == 1:
            return AtOnce(count, pairs, pairs)
        # a GPU starts few kernels, and a path that replays its states does so for many pairs at once
        left = int((1 - LANE_SHARE) * spare) // self.per_pair(horizons)
        most = pool * self.trajectory.dynamics.layout.size  # every batch at every coordinate
        many = max(pairs, min(left, PAIRS_AT_ONCE // len(horizons), most))
        return AtOnce(count, pairs if self.trajectory.device.type == "cpu" else many, many)


def plan_explanation(watch: Watch, outcomes: int, memory: str | int | None) -> SweepPlan:
    """Every step's contribution by one sweep of so many rows from the last state."""
    trajectory, steps = watch.trajectory, watch.last
    place = plan_history(trajectory, outcomes * steps, memory, sums=outcomes * SUMS)
    f, c, available = Footprint.of(trajectory), Curvature.of(trajectory), room(trajectory, memory)
    v, beside = f.vector, place == trajectory.device
    further = watch.reading(curved=True).further  # of the probe's graph
    readout = c.graph + further + max(c.build - c.graph, (3 * LANCZOS + 2) * v)
    states = 0 if trajectory.spacing == 1 else 9 * v
    clipped = outcomes * v * any(step.clip.binds for step in trajectory.steps)
    held = (4 + SUMS) * outcomes * v + outcomes * steps * v * beside + states
    products = c.graph + outcomes * v + clipped + product_bytes(trajectory, outcomes)
    step = max(c.build, products, c.graph + 3 * v + f.update, c.graph + 4 * v)
    pairs = max(FEWEST_PAIRS, min(int(PAIRS_SHARE * held) // (120 + 8 * outcomes), PAIRS_AT_ONCE))
    peak = max(readout, held + step + int(PAIRS_SHARE * held) // 2)
    if peak > available and trajectory.device.type == "cpu":
        raise OutOfMemory(
            f"the sweep over {steps} steps {lacking(peak, available)}. What would fit: "
            f"{_earlier(peak, available, outcomes * v, steps)}{enough(peak)}"
        )
    return SweepPlan(place, AtOnce(1, pairs, pairs), peak)


def plan_window_sweep(trajectory: Trajectory, cotangents: int, *, sums: int) -> torch.device:
    """Where the sweep over a recorded window is kept, as `plan_history` says. On a CPU its cotangents may take half of
    what was given; where nothing was, they may take what is free."""
    memory, layout = trajectory.memory, trajectory.dynamics.layout
    if memory is not None and trajectory.device.type == "cpu":
        needed, limit = cotangents * layout.padded_size * layout.dtype.itemsize, budget(memory, trajectory.device)
        if 2 * needed > limit:
            raise OutOfMemory(
                f"the sweep keeps {cotangents} vectors of all weights, {readable(needed)}, and may use half of "
                f"memory={readable(limit)}; pass more, or a shorter window="
            )
    return plan_history(trajectory, cotangents, memory, sums=sums)


def _earlier(peak: int, available: int, step: int, steps: int) -> str:
    """An outcome that fits, where there is one."""
    outcome = steps - math.ceil((peak - available) / step)
    return f"outcome={outcome} (now {steps}), " if outcome > 0 else ""


def _advice(needs: _Needs, watch: Watch, horizons: Sequence[int], available: int, count: int, need: int) -> str:
    """What is missing, and what would fit."""
    fits = [enough(need)]
    if len(horizons) > 1:
        if needs.peak(horizons[-1:], 1) <= available:
            fits.append('one outcome (by="response")')
        shorter = [h for h in horizons if needs.peak(range(1, h + 1), 1) <= available]
        if shorter:
            fits.append(f"horizon={max(shorter)} (now {watch.horizons})")
    batches = "one batch" if count == 1 else f"{count} batches"
    return f"ranking {batches} at a time {lacking(need, available)}. What would fit: {', '.join(fits)}"
