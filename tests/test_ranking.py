"""Rankings against a forward oracle, calibration by hand, shares against per-example gradients, and explanations."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.api.contributions import EDITS
from aftershock.api.ranking import SUMMARIES
from aftershock.core.scores import (
    Layers,
    adjoint,
    contributions,
    example_direction,
    example_scores,
    mean_write,
    midpoint_slopes,
    pool_scores,
)
from aftershock.errors import ExamplesCouple, InvalidInput

from .cases import CASES, Case, classes, make, mlp
from .oracles import KickOracle

CPU = torch.device("cpu")


def oracle(case: Case, path: ak.Path) -> KickOracle:
    return KickOracle(path, case.model, case.loss_fn)


# --- kicks


def predicted(truth: KickOracle, at: int, pool: list, slopes: dict[int, Tensor]) -> Tensor:
    """Responses by batch and state: exact at stiff coordinates, elsewhere linear in the clipped gradient.

    A batch that uses other parameters than the control's has no such linear part: its difference is exact throughout.
    """
    dx, lag = map(torch.stack, zip(*(truth.written(at, batch) for batch in pool)))
    stiff, linear = truth.is_stiff(at, dx[:, 2]), torch.stack([truth.linear_write(at, batch) for batch in pool])
    exact = stiff | lag.any(1, keepdim=True)
    return truth.responses(at, torch.where(exact[:, None], dx, linear), stiff, lag, slopes)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_the_forward_recursion(name: str, at: int) -> None:
    case = make(name)
    path = case.path(6)
    pool, probe = case.batches(4), case.batch()
    watch, truth = path.watch(at, probe), oracle(case, path)
    found = pool_scores(
        path.control(at), adjoint(watch, watch.slope, watch.range, CPU), path.trajectory, pool, at_once=3
    )
    slopes = {at + h: watch.slope(h) for h in watch.range}
    expected = predicted(truth, at, pool, slopes)
    assert found.stiff > 0.1
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found.response, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))
    sizes = path.replace(pool, at).response(probe, answers=("tangent",), horizon=1).data["xi_norm"].values
    np.testing.assert_allclose(found.xi_norm, sizes, rtol=1e-6)


def edited(truth: KickOracle, at: int, change: str) -> tuple[Tensor, Tensor]:
    """The exact difference that a change makes, and by how many steps the counts are then behind."""
    o = truth.steps[at]
    theta, m, v = o.split(o.x)
    raw = o.raw(theta).detach()
    end = {
        "zero": lambda: o.update(o.x, 0 * raw),
        "skip": lambda: o.x,
        "reset m": lambda: o.update(torch.cat([theta, 0 * m, v]), raw),
        "reset v": lambda: o.update(torch.cat([theta, m, 0 * v]), raw),
    }[change]()
    return end.view(3, -1) - truth.after[at], o.columns["present"] * (change == "skip")


@pytest.mark.parametrize("name", CASES)
def test_contributions_are_the_forward_recursion(name: str) -> None:
    """Of all changes at all steps, channel by channel: what waits in θ, what m does alone, and what v adds."""
    case = make(name)
    path = case.path(5)
    watch, truth = path.watch(0, case.batch()), oracle(case, path)
    slope = watch.slope(4)  # an outcome before the end of the path
    layers = Layers.of(path.point.loss.layout)
    by_layer = contributions(path.trajectory, 4, slope, lambda step: EDITS, CPU, layers)
    whole = contributions(path.trajectory, 4, slope, lambda step: EDITS, CPU)
    for change in EDITS:
        torch.testing.assert_close(by_layer[change].sum(2), whole[change][..., 0], rtol=1e-9, atol=1e-14)
        scale = float(whole[change].abs().max())
        for at in range(4):
            dx, lag = edited(truth, at, change)
            starts = dx * torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]])[:, :, None]
            found = -truth.responses(at, starts, truth.is_stiff(at, dx[2]), lag, {4: slope})[:, 0]
            every, theta, m, nothing = found.tolist()
            parts = torch.tensor([theta, m - nothing, every - theta - m + nothing], dtype=torch.float64)
            torch.testing.assert_close(whole[change][at, :, 0], parts, rtol=1e-8, atol=1e-9 * scale)
            assert float(whole[change][at].sum()) == pytest.approx(every, rel=1e-8, abs=1e-9 * scale)


def test_a_skip_of_the_first_step_ever() -> None:
    """Moments that do not exist yet, counts that start at zero, and a parameter that appears later."""
    case = make("unused_parameters")
    case.optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2, eps=1e-4)
    path = case.path(4)
    assert path.steps[0].present == (True, True, False, False)
    assert path.steps[1].present == (True,) * 4
    watch, truth = path.watch(0, case.batch()), oracle(case, path)
    found = contributions(path.trajectory, 4, watch.slope(4), lambda step: EDITS, CPU)["skip"]
    for at in range(4):
        dx, lag = edited(truth, at, "skip")
        expected = -truth.responses(at, dx[None], truth.is_stiff(at, dx[2]), lag, {4: watch.slope(4)})
        assert float(found[at].sum()) == pytest.approx(float(expected), rel=1e-8)


# --- midpoint


def test_the_probe_is_read_half_way_along_the_mean() -> None:
    """On a quadratic the shared row is an exact run from the mean write, and its midpoint slope has no error."""
    case = make("quadratic")
    path = case.path(5)
    pool, probe = case.batches(3), case.batch()
    watch, truth = path.watch(1, probe), oracle(case, path)
    mean = torch.stack([truth.written(1, batch)[0] for batch in pool]).mean(0)
    x, d, u, q = (truth.after[1] + mean).reshape(-1), *probe
    slopes = {}
    for time in range(2, 6):
        middle = (x.view(3, -1)[0] + truth.after[time - 1][0]) / 2
        slopes[time] = d * middle + u @ (u.mT @ middle) / u.shape[1] + q
        x = truth.steps[time].step_of(x).detach() if time < 5 else x
    found = midpoint_slopes(watch, mean_write(path.control(1), pool), watch.range)
    for time, slope in slopes.items():
        torch.testing.assert_close(truth.layout.compact(found[time - 1]), slope, rtol=1e-9, atol=1e-12)
        assert (slope - truth.layout.compact(watch.slope(time - 1))).norm() > 1e-4 * slope.norm()
    padded = {time: truth.layout.expand(slope) for time, slope in slopes.items()}
    expected = predicted(truth, 1, pool, padded)
    ranking = path.rank(pool, probe, at=1, verify=0).data.sel(change=[f"batch {i}" for i in range(3)])
    np.testing.assert_allclose(ranking["predicted"].values, expected, rtol=1e-8, atol=1e-12)


def test_the_midpoint_of_one_candidate_leaves_no_curvature_of_the_probe() -> None:
    """F(θ+d) − F(θ) = ⟨∇F(θ + d/2), d⟩ for a quadratic: with the exact displacement nothing is left over."""
    case = make("quadratic")
    path = case.path(4)
    batch, probe = case.batch(), case.batch()
    watch = path.watch(0, probe)
    found = midpoint_slopes(watch, mean_write(path.control(0), [batch]), watch.range)
    exact = path.replace([batch]).response(probe, answers=("exact",)).exact.values[0, 0]
    other = case.point().follow([batch, *(step.batch for step in path.steps[1:])])
    for h in watch.range:
        moved = other.trajectory.state(h).theta - path.trajectory.state(h).theta
        assert float(found[h] @ moved) == pytest.approx(exact[h - 1], rel=1e-9, abs=1e-14)
        assert float(watch.slope(h) @ moved) != pytest.approx(exact[h - 1], rel=1e-4)


# --- calibration


def by_hand(truth: np.ndarray, guess: np.ndarray) -> float:
    return math.sqrt(((truth - guess) ** 2).sum() / (truth**2).sum())


@pytest.mark.parametrize("verify", [0, 1, 2, 4, 99])
def test_calibration_by_hand(verify: int) -> None:
    case = make("tanh_mlp")
    path = case.path(5)
    pool, probe = case.batches(6), case.batch()
    ranking = path.rank(pool, probe, verify=verify)
    data = ranking.data.sel(change=[f"batch {i}" for i in range(6)])
    guess, truth = data["predicted"].values, data["measured"].values
    top = np.argsort(-np.abs(guess).max(1))[:verify]
    assert {f"batch {i}" for i in top} == set(ranking.verified)
    for i in range(6):
        exact = path.replace([pool[i]]).response(probe, answers=("exact",)).exact.values[0, 0]
        np.testing.assert_array_equal(truth[i], exact if i in top else np.full(5, np.nan))
    residual = truth[top] - guess[top]
    offset = residual.mean(0) if len(top) else np.zeros(5)
    np.testing.assert_allclose(data["offset"].values, offset, rtol=1e-12, atol=0)
    np.testing.assert_allclose(data["response"].values, guess + offset, rtol=1e-12)
    np.testing.assert_allclose(ranking.data["score"].values, np.sort(np.abs(guess + offset).max(1))[::-1])
    if len(top) > 1:
        left_out = [residual[[k for k in range(len(top)) if k != j]].mean(0) for j in range(len(top))]
        errors = [by_hand(truth[i], guess[i] + others) for i, others in zip(top, left_out)]
        raw = [by_hand(truth[i], guess[i]) for i in top]
        assert float(data["held_out_error"]) == pytest.approx(np.median(errors), rel=1e-9)
        assert float(data["raw_error"]) == pytest.approx(np.median(raw), rel=1e-9)
        assert f"off by {np.median(errors):.2g} (NRMSE, median of {len(top)})" in str(ranking)
    else:
        assert np.isnan(float(data["held_out_error"]))
        assert ("Not verified" if verify == 0 else "cannot judge itself") in str(ranking)


def test_one_outcome_is_the_last_of_many() -> None:
    case = make("dropout")
    path = case.path(5)
    pool, probe = case.batches(4), case.batch()
    last = path.rank(pool, probe, by="response", verify=1)
    every = path.rank(pool, probe, verify=0)
    assert last.data["horizon"].values.tolist() == [5]
    expected = every.data["predicted"].sel(change=last.order).isel(horizon=-1)
    np.testing.assert_allclose(last.data["predicted"].values[:, 0], expected.values, rtol=1e-10)
    exact = path.replace([pool[int(last.verified[0].split()[1])]]).response(probe, answers=("exact",)).exact
    assert float(last.data["measured"].sel(change=last.verified[0])[0]) == float(exact.values[0, 0, -1])
    assert last.verified[0] == last.data["change"].values[last.data["predicted"].values[:, 0].argmax()]


def test_a_rerun_that_diverges_does_not_spoil_the_others() -> None:
    """One candidate pushes a weight over a wall after two states: what is known of it counts, and no more."""
    case = make("quadratic")
    wall = float(case.model.theta.detach()[0]) + 0.02
    case.loss_fn = lambda m, b: m(b) - 1e-6 * (wall - m.theta[0]).log()
    path = case.path(5)
    pool, probe = case.batches(4), case.batch()
    pool[0][2][0] = -1e3
    ranking = path.rank(pool, probe, verify=3)
    data = ranking.data.sel(change=[f"batch {i}" for i in range(4)])
    truth = data["measured"].values
    known = np.isfinite(truth[0])
    assert known.tolist() == [True, True, False, False, False]
    assert np.isposinf(truth[0, 2:]).all()
    residual = (truth - data["predicted"].values)[~np.isnan(truth[:, 0])]
    np.testing.assert_allclose(data["offset"].values[known], residual.mean(0)[known])
    np.testing.assert_allclose(data["offset"].values[~known], residual[1:].mean(0)[~known])
    assert np.isfinite(data["response"].values).all()
    errors = []
    for j, row in enumerate(residual):
        finite = np.isfinite(row)
        others = [np.mean([r[h] for k, r in enumerate(residual) if k != j and np.isfinite(r[h])]) for h in range(5)]
        exact = truth[~np.isnan(truth[:, 0])][j]
        errors.append(by_hand(exact[finite], (exact - row + others)[finite]))
    assert float(data["held_out_error"]) == pytest.approx(np.median(errors), rel=1e-9)


# --- what is printed and kept


@pytest.mark.parametrize("by", [*SUMMARIES, "response"])
def test_the_table_is_in_the_order_of_its_heading_and_has_signs(by: str) -> None:
    case = make("tanh_mlp")
    path = case.path(4)
    ranking = path.rank(case.batches(13), case.batch(), by=by, verify=2)
    heading, _, *rows = str(ranking).splitlines()[:-1]
    assert f"by predicted {by}, largest first" in heading
    shown = [row.split() for row in rows]
    names = [f"{cells[1]} {cells[2]}" for cells in shown]
    assert names[:10] == ranking.order[:10]
    assert set(names[10:]) == set(ranking.verified) - set(ranking.order[:10])
    for name, cells in zip(names, shown):
        response = ranking.data["response"].sel(change=name).values
        up, down = response.clip(min=0), (-response).clip(min=0)
        signed = {
            "peak": response[np.abs(response).argmax()], "response": response[-1], "total_abs": up.sum() + down.sum(),
            "max_increase": up.max(), "max_decrease": -down.max(),
            "total_increase": up.sum(), "total_decrease": -down.sum(),
        }[by]  # fmt: skip
        assert float(cells[3]) == pytest.approx(signed, rel=1e-3)
    sizes = [float(cells[3]) if by == "response" else abs(float(cells[3])) for cells in shown]
    assert sizes == sorted(sizes, reverse=True)


def test_results_survive_a_file(tmp_path: Path) -> None:
    case = make("tanh_mlp")
    path = case.path(4)
    results = [
        path.rank(case.batches(3), case.batch(), verify=2),
        path.rank_examples(case.batches(2), case.batch(), verify=2),
        path.explain(case.batch(), verify=2),
    ]
    for i, result in enumerate(results):
        result.save(tmp_path / f"{i}.zarr")
        loaded = type(result).load(tmp_path / f"{i}.zarr")
        assert loaded.data.identical(result.data)
        assert str(loaded) == str(result)
        assert loaded.certificate == result.certificate
