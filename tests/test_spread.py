"""The ± of a run that does not repeat itself: against the same reruns by plain torch with noise of their own, and no
blame or treatment that holds in one run alone."""

from __future__ import annotations

import copy
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.spike_truth import Event as TrueEvent
from torch import Tensor, nn

import aftershock as ak
from aftershock.recorder import trials
from aftershock.recorder.explanation import FlightExplanation
from aftershock.recorder.other_runs import other_runs
from aftershock.recorder.reruns import Run
from aftershock.recorder.triggers import AtStep
from aftershock.report.flight_figures import treatment_figure, trial_figure

from .cases import mlp
from .test_report import Tags

WARM, CULPRIT, SPIKE, STEPS = 300, 324, 328, 336
NOISE = 1e-2  # of the model's answers, at every call: as much as makes replays part by a tenth
RUNS = 12
Batch = tuple[Tensor, Tensor]
Change = Callable[[int, torch.optim.Optimizer], bool]  # may do something before a step, and says whether to skip it


class Noisy:
    """A loss that is another one at every call, from a source that nobody sees: as kernels that add in any order."""

    def __init__(self, seed: int, size: float = NOISE) -> None:
        draw = random.Random(seed)
        self.noise = itertools.cycle([size * draw.gauss(0, 1) for _ in range(9973)])

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0]) * (1 + next(self.noise)) - batch[1]).square().mean()


def batches() -> list[Batch]:
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        x = torch.randn(64, 5, generator=generator, dtype=torch.float64)
        y = x.sum(1, keepdim=True).tanh() + 0.1 * torch.randn(64, 1, generator=generator, dtype=torch.float64)
        y[[3, 8]] += 40 * (step == CULPRIT)
        found.append((x, y))
    return found


@dataclass
class Loop:
    """A loop that stands before its first recorded step, which came without noise."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]

    @classmethod
    def warm(cls) -> Loop:
        torch.manual_seed(0)
        model = mlp(5, 12, 1, activation=nn.GELU).double()
        loop = cls(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches())
        loop.run(Noisy(0, 0.0), 0, WARM)
        return loop

    def run(
        self,
        loss_fn: Noisy,
        first: int = WARM,
        stop: int = STEPS,
        change: Change = lambda step, optimizer: False,
        seen: Callable[[Batch, Tensor], object] = lambda batch, loss: None,
    ) -> dict[int, float]:
        losses = {}
        for step in range(first, stop):
            if change(step, self.optimizer):
                continue
            self.optimizer.zero_grad()
            loss = loss_fn(self.model, self.batches[step])
            loss.backward()
            self.optimizer.step()
            seen(self.batches[step], loss)
            losses[step] = float(loss.detach())
        return losses

    def again(self, seed: int, change: Change = lambda step, optimizer: False) -> dict[int, float]:
        """The recorded steps by plain torch, with noise of their own."""
        twin = copy.deepcopy(self)
        return twin.run(Noisy(seed), change=change)


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop.warm()


def explained(loop: Loop, loss_fn: Any, folder: Path) -> FlightExplanation:
    own, triggers = copy.deepcopy(loop), [AtStep(SPIKE)]
    with ak.FlightRecorder(own.model, own.optimizer, loss_fn, folder, window=24, triggers=triggers) as recorder:
        own.run(loss_fn, seen=recorder.step)
    return ak.explain(recorder, SPIKE)


@pytest.fixture(scope="module")
def found(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> FlightExplanation:
    return explained(loop, Noisy(4), tmp_path_factory.mktemp("run") / "flight")


def without(step: int, optimizer: torch.optim.Optimizer) -> bool:
    return step == CULPRIT


def restarted(at: int) -> Change:
    def change(step: int, optimizer: torch.optim.Optimizer) -> bool:
        if step == at:
            optimizer.state.clear()
        return False

    return change


def at_the_end(run: dict[int, float]) -> float:
    return statistics.fmean(list(run.values())[-4:])


def near(told: float, true: list[float], unchanged: Sequence[float] = (0.0, 0.0)) -> bool:
    """Not far below the spread of a dozen runs, and not absurdly above it: the outermost of six are 2.5 σ apart.

    unchanged: the same number of the unchanged run, which scatters more where it has more of the event.
    """
    sigma = statistics.stdev(true)
    return sigma > 0 and 0.7 * sigma < told < 5 * max(sigma, statistics.stdev(unchanged))


def test_the_spread_is_that_of_the_same_reruns_by_plain_torch(loop: Loop, found: FlightExplanation) -> None:
    first = found.facts.event.onset - 8
    plain = [loop.again(100 + i) for i in range(RUNS)]
    bare = [loop.again(200 + i, without) for i in range(RUNS)]
    anew = [loop.again(300 + i, restarted(first)) for i in range(RUNS)]
    event, best = TrueEvent.of(plain[0], SPIKE), found.culprits[0]
    assert (found.blamed, event.onset) == ((CULPRIT,), found.facts.event.onset)
    added = [run[SPIKE] - other[SPIKE] for run, other in zip(plain, bare)]
    assert near(best.measured_spread, added)
    assert abs(best.measured - statistics.fmean(added)) < best.measured_spread + statistics.stdev(added)
    treated = found.data.sel(treatment=f"Adam restarted at step {first}, 8 before it (m, v and count)")
    for name, number in (("left", event.left), ("after", at_the_end)):
        true = [number(run) for run in anew]
        told, spread = float(treated[f"treatment_{name}"]), float(treated[f"treatment_{name}_spread"])
        assert near(spread, true, [number(run) for run in plain]), name
        assert abs(told - statistics.fmean(true)) < spread + statistics.stdev(true), name
    own = found.data.sel(step=CULPRIT)
    ends = [at_the_end(run) for run in bare]
    assert near(float(own["tail_without_spread"]), ends, [at_the_end(run) for run in plain])
    assert abs(float(own["tail_without"]) - statistics.fmean(ends)) < own["tail_without_spread"] + statistics.stdev(
        ends
    )
    kept = [c for c in found.culprits if c.role == "placebo"]
    assert len(kept) == 8
    assert near(statistics.median(c.left_spread for c in kept), [event.left(run) for run in plain])
    assert near(found.facts.event.value_spread, [run[SPIKE] for run in plain])


def test_every_measured_number_is_told_with_its_spread(found: FlightExplanation, tmp_path: Path) -> None:
    event, best = found.facts.event, found.culprits[0]
    raised, size = (
        f"by {best.measured:.3g} ± {best.measured_spread:.2g}",
        f"{event.size:.3g} ± {event.value_spread:.2g}",
    )
    part = f"of {size}" if best.measured <= event.size else f"(the spike is {size} above the usual)"  # about as much
    assert f"It raised the loss at step {SPIKE} {raised} {part}." in found.verdict
    assert f"The event is the spike of {event.peak:.3g} ± {event.peak_spread:.2g} (steps" in found.verdict
    assert f"the loss of step {SPIKE}: {event.value_spread:.2g}). A run with something changed was made once, and" in (
        found.certificate.findings[1].sentence
    )
    steps = [line for line in str(found).splitlines() if " suspect " in line or " placebo " in line]
    assert len(steps) == 10
    assert all(line.count(" ± ") == 2 for line in steps)
    assert f"{best.measured:+.3g} ± {best.measured_spread:.2g}  " in steps[0]
    text = Tags.of(found.report(tmp_path / "page.html")).text
    for c in (c for c in found.culprits if c.role):
        assert f"{c.measured:+.3g} ± {c.measured_spread:.2g}" in text
        left = math.floor(100 * c.left) / 100 if c.left_so_far else c.left  # at least so much is rounded down
        assert f"{left:.0%} ± {100 * c.left_spread:.2g}%" in text
    for run in (run for run in other_runs(found) if math.isfinite(run.after)):
        assert f"{run.after:.4g} ± {run.after_spread:.2g}" in text
    drawn = {trace.name: trace.error_y.array for trace in trial_figure(found, found.culprits, []).data}
    assert list(drawn["without a blamed step"]) == [best.left_spread]
    assert set(drawn["measured"]) == {c.measured_spread for c in found.culprits if c.role}
    (shown,) = (trace for trace in treatment_figure(found, other_runs(found)[:1]).data if trace.name == "as it was")
    assert shown.error_y.array[-1] == found.data["spread"].values[-1] > 0
    assert list(shown.customdata)[-1] == f" ± {shown.error_y.array[-1]:.2g}"
    assert text.count("Upright lines: the ± of each") == 2
    assert "Upright lines: the ± of the run as it was." in text


def test_two_runs_with_one_change_that_end_apart_are_no_nearer_than_that(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the second run, which begins a rounding away, is 0.03 higher at its end, in the mean of the last four."""
    plain = trials.run_again

    def run_again(trajectory: Any, some: list[Run], last: int, *args: Any) -> Any:
        (values,) = plain(trajectory, some, last, *args)
        return [{**values, last: values[last] + 0.03} if some[0].jittered else values]

    monkeypatch.setattr(trials, "run_again", run_again)
    found = explained(loop, Noisy(4), tmp_path / "flight")
    tail = float(found.data["tail_without_spread"].sel(step=CULPRIT))
    assert tail == pytest.approx(0.03 / 4, abs=0.002)
    assert found.facts.event.tail_spread < 0.004
    (own,) = (run for run in other_runs(found) if str(CULPRIT) in run.name and "left out" in run.name)
    assert own.after_spread == tail


def test_numbers_of_a_scattering_run_are_in_its_file(found: FlightExplanation, tmp_path: Path) -> None:
    found.save(tmp_path / "found.zarr")
    loaded = FlightExplanation.load(tmp_path / "found.zarr")
    assert str(loaded) == str(found)
    pages = [one.report(tmp_path / "page.html").read_text() for one in (found, loaded)]
    assert pages[0] == pages[1]
    tried = found.data.sel(step=[c.step for c in found.culprits if c.role], change="skip")
    for name in ("measured_spread", "left_spread", "tail_without_spread", "spread", "treatment_left_spread"):
        assert (tried[name] > 0).all(), name


def test_a_run_that_repeats_itself_has_no_spread_and_nothing_is_run_twice(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, plain = list[Run](), trials.run_again

    def run_again(trajectory: Any, some: list[Run], *args: Any) -> Any:
        runs.extend(some)
        return plain(trajectory, some, *args)

    monkeypatch.setattr(trials, "run_again", run_again)
    found = explained(loop, Noisy(4, 0.0), tmp_path / "flight")
    assert found.blamed == (CULPRIT,)
    assert len({run.left_out for run in runs}) == len(runs) > 8
    spreads = [name for name in map(str, found.data.variables) if name.endswith("spread")]
    assert len(spreads) > 12
    assert all(np.isnan(found.data[name].values).all() for name in spreads)
    assert "±" not in str(found)
