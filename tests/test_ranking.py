"""Rankings: calibration by hand, tables and files, shares against per-example gradients, and explanations."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

import aftershock as ak
from aftershock.api import ranking as ranking_module
from aftershock.api.ranking import SUMMARIES, Ranking
from aftershock.api.reruns import ODD, odd_one, to_rerun
from aftershock.core import scores, sweep_plans
from aftershock.core.examples import example_scores
from aftershock.core.scores import AtOnce, adjoint, example_direction, pool_scores
from aftershock.errors import ExamplesCouple, InvalidFile, InvalidInput
from aftershock.results.calibration import held_out, shared_offset

from .cases import Case, classes, cross_entropy, make, mlp
from .oracles import KickOracle

CPU = torch.device("cpu")


# --- calibration


def by_hand(truth: np.ndarray, guess: np.ndarray) -> float:
    return math.sqrt(((truth - guess) ** 2).sum() / (truth**2).sum())


def offset_by_hand(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """The mean residual, whole where at least half of the others' predicts each best, in relative size."""

    def mean(rows: list[int]) -> np.ndarray:
        known = [[truth[i, h] - guess[i, h] for i in rows if np.isfinite(truth[i, h])] for h in range(truth.shape[1])]
        return np.array([sum(column) / max(1, len(column)) for column in known])

    each = [i for i in range(len(truth)) if np.isfinite(truth[i]).any()]
    up = down = 0.0
    for i in each if len(each) > 1 else ():
        others, known = mean([k for k in each if k != i]), np.isfinite(truth[i])
        size = sum(truth[i, known] ** 2 + guess[i, known] ** 2)
        up += others[known] @ (truth - guess)[i, known] / size
        down += others[known] @ others[known] / size
    return (min(1.0, max(0.0, 4 * up / down - 1)) if down else 1.0) * mean(each)


# by their predicted rank: half of the reruns at the top, the others evenly over the rest
RERUN = {0: ([], []), 1: ([0], []), 2: ([0], [3]), 3: ([0], [2, 4]), 4: ([0, 1], [3, 4]), 99: ([0, 1, 2], [3, 4, 5])}


@pytest.mark.parametrize("verify", RERUN)
def test_calibration_by_hand(verify: int) -> None:
    case = make("tanh_mlp")
    path = case.path(5)
    pool, probe = case.batches(6), case.batch()
    ranking = path.rank(pool, probe, verify=verify)
    data = ranking.data.sel(change=[f"batch {i}" for i in range(6)])
    guess, truth = data["predicted"].values, data["measured"].values
    order = np.argsort(-np.abs(guess).max(1))
    top, spread = (order[ranks].tolist() for ranks in RERUN[verify])
    assert data["judging"].values.nonzero()[0].tolist() == sorted(spread)
    top = [*top, *spread]
    assert {f"batch {i}" for i in top} == set(ranking.verified)
    for i in range(6):
        exact = path.replace([pool[i]]).response(probe, answers=("exact",)).exact.values[0, 0]
        np.testing.assert_array_equal(truth[i], exact if i in top else np.full(5, np.nan))
    offset = offset_by_hand(truth[top], guess[top])
    np.testing.assert_allclose(data["offset"].values, offset, rtol=1e-9, atol=0)
    np.testing.assert_allclose(data["response"].values, guess + offset, rtol=1e-12)
    best = np.where(np.isnan(truth), guess + offset, truth)
    np.testing.assert_allclose(ranking.data["score"].values, np.sort(np.abs(best).max(1))[::-1])
    if len(top) > 1:
        left_out = [offset_by_hand(*(x[[k for k in top if k != j]] for x in (truth, guess))) for j in top]
        left_out = left_out if offset.any() else [offset] * len(top)  # nothing is added to the others either
        errors = [by_hand(truth[i], guess[i] + others) for i, others in zip(top, left_out) if i in spread]
        raw = [by_hand(truth[i], guess[i]) for i in spread]
        signs = [np.sign(truth[i]) == np.sign(guess[i] + others) for i, others in zip(top, left_out) if i in spread]
        assert float(data["held_out_sign"]) == pytest.approx(np.mean(signs))
        assert float(data["held_out_error"]) == pytest.approx(np.median(errors), rel=1e-9)
        assert float(data["raw_error"]) == pytest.approx(np.median(raw), rel=1e-9)
        assert f"off by {np.median(errors):.2g} (NRMSE, median of {len(spread)})" in str(ranking)
    else:
        assert np.isnan(float(data["held_out_error"]))
        assert ("Not verified" if verify == 0 else "cannot judge itself") in str(ranking)


def test_a_batch_with_a_far_larger_gradient_is_rerun_and_calibrates_nobody_else() -> None:
    case = make("quadratic")
    path, pool, probe = case.path(5), case.batches(8), case.batch()
    alone = path.rank(pool, probe, verify=4)
    a, x, y = pool[5]
    odd = path.rank([*pool[:5], (a, x, 30 * y), *pool[6:]], probe, verify=4)
    norms = odd.data["xi_norm"]
    assert float(norms.sel(change="batch 5")) > ODD * float(norms.median())
    assert "batch 5" in odd.verified
    assert not bool(odd.data["judging"].sel(change="batch 5"))
    rerun = [name for name in odd.verified if name != "batch 5"]
    assert len(rerun) == 3
    residuals = (odd.data["measured"] - odd.data["predicted"]).sel(change=rerun).mean("change")
    np.testing.assert_allclose(odd.data["offset"], float(odd.data["offset_share"]) * residuals, rtol=1e-9, atol=1e-18)
    assert float(abs(alone.data["xi_norm"]).max()) < ODD * float(alone.data["xi_norm"].median())
    assert [odd.data["odd"].sel(change=name).item() for name in ("batch 5", *rerun)] == [True, False, False, False]
    assert "batch 5 was rerun for its odd gradient, and calibrates nobody." in str(odd)
    of_whom = str(odd).split("exact reruns of ")[1].split(" have")[0].split(":")[0]
    assert "batch 5" not in of_whom
    assert "odd gradient" not in str(alone)


def test_two_candidates_leave_no_room_for_an_odd_one() -> None:
    """One of them calibrates, the other judges; nothing is said of reruns that change nothing."""
    case = make("quadratic")
    path, pool, probe = case.path(3), case.batches(2), case.batch()
    a, x, y = pool[1]
    ranking = path.rank([pool[0], (a, x, 30 * y)], probe, verify=5)
    assert not ranking.data["odd"].any()
    assert np.isfinite(float(ranking.data["held_out_error"]))


def test_whose_gradient_is_odd() -> None:
    norms = torch.tensor([1.0, 1.1, 0.0, 0.9, 4.0])
    assert [odd_one(norms, few) for few in (2, 3)] == [None, 4]
    assert odd_one(norms.clamp(max=2.0), 5) is None
    assert odd_one(norms[3:], 5) is None
    assert odd_one(torch.zeros(3), 5) is None
    assert to_rerun(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]), 3, 4) == ([4, 0], [2])


def test_the_error_of_a_ranking_that_is_not_calibrated_is_that_of_its_predictions() -> None:
    """Reruns whose residuals have nothing in common: what the others share is not added to one that is held out."""
    horizon, names = [1, 2], [f"batch {i}" for i in range(4)]
    predicted = xr.DataArray(np.ones((4, 2)), {"change": names, "horizon": horizon}, ("change", "horizon"))
    measured = predicted.copy(data=[[1.3, 1.3], [0.7, 0.7], [1.2, 1.2], [0.9, 0.9]])
    guess, truth = predicted.values, measured.values
    assert shared_offset(guess, truth)[1] == 0
    case = make("tanh_mlp")
    path = case.path(2)
    found: Any = SimpleNamespace(xi_norm=torch.ones(4), stiff=0.0, curve_error=0.0)
    watch = path.watch(0, case.batch())
    data = ranking_module._calibrated(predicted, measured, range(4), None, "peak", found, watch, path)
    assert float(data["held_out_error"]) == float(data["raw_error"])


@pytest.mark.parametrize(("signs", "words"), [(1.0, "do not trust the sizes"), (0.5, "trust neither sizes nor signs")])
def test_a_ranking_that_is_far_off_says_what_is_left_of_it(signs: float, words: str) -> None:
    case = make("tanh_mlp")
    ranking = case.path(3).rank(case.batches(4), case.batch())
    far = type(ranking)(ranking.data.assign(held_out_error=0.9, held_out_sign=signs))
    assert far.certificate.level == "bad"
    assert f": {words}. " in str(far.certificate)
    assert f"Their signs are right at {signs:.0%} of horizons." in str(far.certificate)


@pytest.mark.parametrize("verify", [(4, 1, 3), np.array([4, 1, 3]), torch.tensor([4, 1, 3])], ids=type)
def test_batches_to_rerun_may_be_named_and_each_judges(verify: Any) -> None:
    case = make("tanh_mlp")
    path = case.path(5)
    pool, probe = case.batches(6), case.batch()
    ranking = path.rank(pool, probe, verify=verify)
    data = ranking.data.sel(change=[f"batch {i}" for i in range(6)])
    guess, truth = data["predicted"].values, data["measured"].values
    assert np.flatnonzero(~np.isnan(truth).any(1)).tolist() == [1, 3, 4]
    exact = path.replace([pool[i] for i in (1, 3, 4)]).response(probe, answers=("exact",)).exact.isel(scale=0)
    np.testing.assert_allclose(truth[[1, 3, 4]], exact.values, rtol=1e-9)
    assert data["judging"].values.tolist() == [False, True, False, True, True, False]
    some = guess[[1, 3, 4]], truth[[1, 3, 4]]
    left = held_out(*some) if shared_offset(*some)[1] else some[0]
    error = np.median([by_hand(true, one) for true, one in zip(truth[[1, 3, 4]], left)])
    assert float(data["held_out_error"]) == pytest.approx(error)
    assert f"Reruns that were named are off by {error:.2g} (NRMSE, median of 3)." in str(ranking.certificate)
    assert "Those that were named are no sample of the others." in str(ranking.certificate)
    assert "Reruns spread over the ranking" in str(path.rank(pool, probe, verify=3).certificate)
    assert "cannot judge itself" in str(path.rank(pool, probe, verify=[2]))
    assert "Not verified" in str(path.rank(pool, probe, verify=[]))
    assert path.estimate_rank(pool, probe, verify=verify) == path.estimate_rank(pool, probe, verify=3)


def test_examples_to_rerun_may_be_named_by_their_place_in_the_pool() -> None:
    case = make("tanh_mlp")
    path, probe = case.path(4), case.batch()
    pool = [tuple(part[:size] for part in batch) for batch, size in zip(case.batches(2), (2, 4))]
    every = path.rank_examples(pool, probe, verify=99).data
    ranking = path.rank_examples(pool, probe, verify=[3, 0])
    known = ranking.data.where(ranking.data["measured"].notnull(), drop=True)
    assert sorted(zip(known["batch"].values, known["index"].values)) == [(0, 0), (1, 1)]
    assert known["judging"].all()
    assert ranking.data["judging"].sum() == 2
    for place in range(2):
        one = known.isel(example=place)
        same = (every["batch"] == one["batch"]) & (every["index"] == one["index"])
        assert float(one["measured"]) == pytest.approx(float(every["measured"][same.values][0]), rel=1e-9)
    a, b = (known["measured"] / known["predicted"]).values
    sizes = abs(known["measured"].values)
    assert float(ranking.data["held_out_error"]) == pytest.approx(
        (abs(b / a - 1) * sizes[0] + abs(a / b - 1) * sizes[1]) / sizes.sum()
    )
    assert "Those that were named, each predicted" in str(ranking)


def test_a_pool_that_shares_nothing_is_not_shifted_by_its_strongest() -> None:
    """One residual a hundred times the small responses: the mean of five would be 20 times these, as a tutorial had."""
    generator = np.random.default_rng(0)
    sizes = np.array([1.0, 0.3, 0.1, 0.01, 0.01])[:, None]
    truth = sizes * (1 + 0.1 * generator.normal(size=(5, 8)))
    guess = np.concatenate([0.2 * truth[:1], truth[1:] * (1 + 0.1 * generator.normal(size=(4, 8)))])
    offset, share = shared_offset(guess, truth)
    assert share == 0.0
    assert not offset.any()
    assert abs((truth - guess).mean(0)).min() > 10 * abs(truth[3:]).max()
    errors = [by_hand(truth[i], left) for i, left in enumerate(held_out(guess, truth))]
    assert np.median(errors) < 0.2


def test_what_all_residuals_share_is_added_whole() -> None:
    guess = np.random.default_rng(1).normal(size=(4, 6))
    common = np.linspace(0.1, 1.0, 6)
    offset, share = shared_offset(guess, guess + common)
    assert share == pytest.approx(1.0)
    np.testing.assert_allclose(offset, common, rtol=1e-12)
    lost = guess + common
    lost[1, 3:], lost[2] = np.inf, np.nan  # a run that diverged, and one that was never finite
    np.testing.assert_allclose(shared_offset(guess, lost)[0], common, rtol=1e-12)
    np.testing.assert_allclose(held_out(guess, lost)[0], guess[0] + common, rtol=1e-12)


def test_reruns_are_spread_over_a_ranking() -> None:
    """As many as asked for, all different, for every size of a pool."""
    for size in range(1, 12):
        sizes = torch.rand(size, generator=torch.Generator().manual_seed(size))
        order = sizes.argsort(descending=True).tolist()
        for few in range(14):
            top, spread = to_rerun(sizes, few)
            assert len({*top, *spread}) == min(few, size)
            assert top == order[: len(top)]
            assert len(top) == (max(1, min(few, size) // 2) if few else 0)
            gaps = np.diff([len(top) - 1, *sorted(order.index(i) for i in spread), size])
            assert not spread or gaps.max() <= gaps.min() + 1


@pytest.mark.parametrize("verify", [3, 5])
def test_the_stated_error_is_that_of_the_others(verify: int) -> None:
    """In the median of fifteen pools of twelve: two or three that judge one pool scatter by a factor of several. The
    strongest alone would state 0.2 to 0.4 of the error of the rest."""
    ratios = []
    for case in map(make, ("untouched_rows", "transformer", "two_groups")):
        path, probe, names = case.path(6), case.batch(), [f"batch {i}" for i in range(12)]
        for pool in (case.batches(12) for _ in range(5)):
            ranking = path.rank(pool, probe, verify=verify)
            truth = path.replace(pool).response(probe, answers=("exact",), labels=names).exact.values[:, 0]
            guess = ranking.data["response"].sel(change=names).values
            others = [i for i, name in enumerate(names) if name not in ranking.verified]
            real = np.median([by_hand(truth[i], guess[i]) for i in others])
            ratios.append(float(ranking.data["held_out_error"]) / real)
    assert 0.5 < np.median(ratios) < 2


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
    batches, pool, probe = case.batches(5), case.batches(4), case.batch()
    pool[0][2][0] = -1e3
    free = case.point().follow([pool[0], *batches[1:]]).trajectory
    wall = float(free.state(2).theta[0] + free.state(3).theta[0]) / 2
    case.loss_fn = lambda m, b: m(b) - 1e-6 * (wall - m.theta[0]).log()
    path = case.point().follow(batches)
    ranking = path.rank(pool, probe, verify=[0, 1, 2])  # where none is named, it is the odd one, and calibrates nobody
    assert not np.isfinite(path.rank(pool, probe, verify=3).data["measured"].sel(change="batch 0").values[2:]).any()
    data = ranking.data.sel(change=[f"batch {i}" for i in range(4)])
    truth = data["measured"].values
    known = np.isfinite(truth[0])
    assert known.tolist() == [True, True, False, False, False]
    assert np.isposinf(truth[0, 2:]).all()
    guess = data["predicted"].values
    rerun = np.flatnonzero(~np.isnan(truth[:, 0]))
    np.testing.assert_allclose(data["offset"].values, offset_by_hand(truth[rerun], guess[rerun]), rtol=1e-9)
    assert np.isfinite(data["response"].values).all()
    errors = []
    for i in rerun:
        others, finite = rerun[rerun != i], np.isfinite(truth[i])
        left_out = guess[i] + offset_by_hand(truth[others], guess[others]) * data["offset"].values.any()
        errors.append(by_hand(truth[i, finite], left_out[finite]))
    spread = data["judging"].values[~np.isnan(truth[:, 0])]
    assert spread.sum() == 3
    assert float(data["held_out_error"]) == pytest.approx(np.median(np.array(errors)[spread]), rel=1e-9)
    last = path.rank(pool[:2], probe, by="response", verify=2)
    assert "fewer than two of them stayed finite" in str(last)
    assert last.certificate.level == "care"


def test_reruns_that_change_nothing_judge_nothing() -> None:
    """The control's own batch in the pool: its exact response is zero, and no error is relative to that."""
    case = make("tanh_mlp")
    batches, probe = case.batches(4), case.batch()
    path, other = case.point().follow(batches), case.batches(3)
    ranking = path.rank([batches[0], other[0]], probe, verify=2)
    assert not ranking.data["measured"].sel(change="batch 0").any()
    assert "those spread over the ranking change nothing at all" in str(ranking)
    assert ranking.certificate.level == "care"
    both = path.rank([batches[0], *other[:2]], probe, verify=3)
    assert both.data["judging"].sum() == 2
    assert "(NRMSE, median of 1)" in str(both)
    assert np.isfinite(float(both.data["held_out_error"]))
    blank = other[0][0].clone(), other[0][1]  # all but one example have no loss
    case.loss_fn = lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none") * (b[0][:, 0] != 0)).mean()
    blank[0][1:, 0] = 0.0
    shares = case.path(3).rank_examples([blank], probe, verify=2)
    assert "none of those spread over the ranking stayed finite and changed anything" in str(shares)
    assert shares.certificate.level == "care"


@pytest.mark.parametrize("verify", [0, 3, 12])
def test_the_controls_own_batch_is_no_change(verify: int) -> None:
    """Whatever reruns say of others: replacing a batch by itself changes nothing, and it is the last of a ranking."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    case = Case("float32", model, optimizer, cross_entropy, classes((6,)), clip=0.5)
    case.train(case.batches(20))
    batches, probe = case.batches(6), case.batch()
    path, copied = case.point().follow(batches, clip=0.5), tuple(x.clone() for x in batches[0])
    for pool in ([copied, *case.batches(10)], [*case.batches(10), copied]):
        ranking = path.rank(pool, probe, verify=verify)
        own = ranking.data.isel(change=-1)
        assert str(own["change"].item()) == f"batch {10 * (pool[10] is copied)}"
        assert not own["response"].any()
        assert not own["predicted"].any()
        assert float(own["xi_norm"]) == 0
        others = ranking.data.isel(change=slice(0, -1))
        assert (others["score"] > 0).all()
        shift = (others["response"] - others["predicted"]).values
        np.testing.assert_allclose(shift, np.broadcast_to(ranking.data["offset"], shift.shape), rtol=1e-6, atol=1e-12)
        assert bool(ranking.data["offset"].any()) == (verify > 0)


def test_curves_are_not_judged_by_the_controls_own_batch() -> None:
    """There is nothing to be off from; one gradient at a time, as of a large model, it would be the first to come."""
    case = make("tanh_mlp")
    path, probe, other = case.path(4), case.batch(), case.batch()
    control, watch = path.control(0), path.watch(0, probe)
    swept = adjoint(watch, watch.slope, watch.range, CPU)

    def error(*pool: Any) -> float:
        return pool_scores(control, swept, path.trajectory, pool, AtOnce(1)).curve_error

    own = path.steps[0].batch
    assert math.isnan(error(own))
    assert error(own, other) == error(other) > 0


def test_a_file_of_another_time_is_no_ranking(tmp_path: Path) -> None:
    case = make("tanh_mlp")
    ranking = case.path(3).rank(case.batches(2), case.batch(), verify=2)
    Ranking(ranking.data.drop_vars("judging")).save(tmp_path / "old.zarr")
    with pytest.raises(InvalidFile, match="judging"):
        Ranking.load(tmp_path / "old.zarr")


# --- what is printed and kept


@pytest.mark.parametrize("by", [*SUMMARIES, "response"])
def test_the_table_is_in_the_order_of_its_heading_and_has_signs(by: str) -> None:
    case = make("tanh_mlp")
    path = case.path(4)
    ranking = path.rank(case.batches(13), case.batch(), by=by, verify=2)
    heading, _, *rows = str(ranking).splitlines()[:-1]
    assert f"by {by}, largest first: as measured where they were rerun, else as predicted" in heading
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
    known = [float(cells[4 if name in ranking.verified else 3]) for name, cells in zip(names, shown)]
    sizes = known if by == "response" else list(map(abs, known))
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


# --- examples


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_example_shares_against_per_example_gradients(reduction: str, clip: float | None) -> None:
    """Where v is large no write is stiff, and at the control's slope a share is the tangent's, to the digit."""
    case = make("tanh_mlp")
    case.loss_fn, case.clip = lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction=reduction), clip
    for state in case.optimizer.state.values():
        state["exp_avg_sq"].add_(10.0)
    path = case.path(5)
    assert path.steps[0].clip.binds == (clip is not None)
    pool, probe = case.batches(3), case.batch()
    watch, control, truth = path.watch(0, probe, 4), path.control(0), KickOracle(path, case.model, case.loss_fn)
    assert not any(truth.is_stiff(0, truth.written(0, batch)[0][2]).any() for batch in pool)
    swept = adjoint(watch, watch.slope, [4], CPU)
    direction = example_direction(control, swept, path.trajectory, pool)
    row = path.response_operator(probe, 0, 4).rmv(torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(direction, row, rtol=1e-8, atol=1e-12)
    o = truth.steps[0]
    slopes = {
        (b, i): torch.cat([g.reshape(-1) for g in o.gradients(o.split(o.x)[0], (x[i : i + 1], y[i : i + 1]))])
        @ truth.layout.compact(row) * (1 if reduction == "sum" else 1 / len(y))
        for b, (x, y) in enumerate(pool) for i in range(len(y))
    }  # fmt: skip
    for b, batch in enumerate(pool):
        weight = 1.0 if reduction == "sum" else None
        found = example_scores(control, direction, batch, "here", weight=weight, tested=32) * (
            weight or 1 / len(batch[1])
        )
        expected = torch.stack([slopes[b, i] for i in range(len(found))])
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-14)
    ranking = path.rank_examples(pool, probe, horizon=4, verify=2)
    data = ranking.data
    measured, k = data["measured"].values, np.arange(data.sizes["example"])
    shares = [float(slopes[int(data["batch"][j]), int(data["index"][j])]) for j in k]
    np.testing.assert_allclose(data["predicted"].values, shares, rtol=1e-8, atol=1e-14)
    rerun = [0, (len(k) + 1) // 2]  # the strongest, and one in the middle of the rest
    assert np.flatnonzero(np.isfinite(measured)).tolist() == rerun
    assert np.flatnonzero(data["judging"].values).tolist() == rerun[1:]
    ratios = measured[rerun] / data["predicted"].values[rerun]
    np.testing.assert_allclose(data["share"].values, np.mean(ratios) * data["predicted"].values, rtol=1e-9)
    assert float(data["held_out_error"]) == pytest.approx(abs(ratios[0] / ratios[1] - 1), rel=1e-5)
    assert (np.diff(np.abs(data["share"].values)) <= 0).all()
    # the top example's part, added to the control's gradient in a second run
    b, i = int(data["batch"][0]), int(data["index"][0])
    x, y = pool[b]
    part = torch.cat([g.reshape(-1) for g in o.gradients(o.split(o.x)[0], (x[i : i + 1], y[i : i + 1]))])
    part = part if reduction == "sum" else part / len(y)
    assert measured[0] == pytest.approx(path.perturb(part).response(probe, horizon=4).exact.values[0, 0, -1], rel=1e-6)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_shares_of_untouched_rows_are_useful_where_the_tangent_is_absurd(clip: float | None) -> None:
    case = make("untouched_rows")
    case.clip = clip
    case.optimizer.param_groups[0]["eps"] = 1e-8
    path = case.path(6)
    draw = torch.Generator().manual_seed(0)
    *pool, probe = (torch.randint(0, 6, (4, 6), generator=draw) for _ in range(4))
    data = path.rank_examples(pool, probe, verify=99).data
    predicted, measured = data["predicted"].values, data["measured"].values
    row = path.response_operator(probe).rmv(torch.eye(6, dtype=torch.float64)[-1])
    before, random = path.control(0).before, path.steps[0].random
    tangent = []
    for b, i in zip(data["batch"].values.tolist(), data["index"].values.tolist()):
        one = path.point.loss.gradient(before.theta, {}, pool[b][i : i + 1], random, "here")
        tangent.append(float(row @ path.point.loss.layout.join(one.grads)) / 4)
    assert np.median(abs(np.array(tangent) - measured)) > 1e3 * np.median(abs(measured))
    assert np.median(abs(predicted - measured)) < 0.6 * np.median(abs(measured))
    assert np.corrcoef(predicted, measured)[0, 1] > 0.9


def test_a_path_that_replays_does_so_once_for_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    for state in case.optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-6)  # no curve covers a gradient that is large beside √v
    path, pool, probe = case.point().follow(case.batches(5), keep="checkpoints"), case.batches(4), case.batch()
    passes, real = list[int](), scores.kick_responses
    monkeypatch.setattr(scores, "kick_responses", lambda *given: passes.append(len(given[2])) or real(*given))
    monkeypatch.setattr(sweep_plans, "FEWEST_PAIRS", 8)
    path.rank_examples(pool, probe, verify=0)
    assert len(passes) == 1
    assert passes[0] > 2 * sweep_plans.plan_ranking(path.watch(0, probe), [5], 4, None).at_once.pairs


def test_convolutions_and_text_rank_by_example() -> None:
    for name in ("relu_cnn", "transformer", "tied"):
        case = make(name)
        path = case.path(3)
        ranking = path.rank_examples([case.batch()], case.batch())
        assert ranking.data["share"].notnull().all(), name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("batch_norm", r"1 is BatchNorm1d in training mode, which normalizes an example by the others"),
        ("dropout", r"is Dropout in training mode, which draws one mask for the whole batch"),
    ],
)
def test_examples_that_couple_are_refused(name: str, told: str) -> None:
    case = make(name)
    path = case.path(3)
    with pytest.raises(ExamplesCouple, match=told):
        path.rank_examples([case.batch()], case.batch())


def test_a_contrastive_loss_is_refused() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3).double()

    def loss_fn(m: nn.Module, b: tuple) -> torch.Tensor:
        z = m(b[0].double())
        return (z @ z.mT).logsumexp(1).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    case = Case("contrastive", model, optimizer, loss_fn, classes((4,)))
    case.train(case.batches(3))
    with pytest.raises(ExamplesCouple, match="neither the mean nor the sum"):
        case.path(3).rank_examples([case.batch()], case.batch())


@pytest.mark.parametrize("flat", [False, True])
def test_examples_of_other_weights_further_on_are_refused(flat: bool) -> None:
    """The mean over tokens that are not padding. The first examples have as many each, so that a test of eight passed,
    and a sequence of one token was given eight times its share, "measured" too. Flat: where the loss hardly depends on
    the example, as early in training, its value does not tell."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 16), nn.Tanh(), nn.Linear(16, 12))
    if flat:
        nn.init.normal_(model[2].weight, std=1e-4)
        nn.init.zeros_(model[2].bias)

    def draw(padded: bool = False) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(12, (16, 9), generator=generator)
        wanted = tokens[:, 1:].clone()
        if padded:
            wanted[10:, 1:] = -100
        return tokens[:, :-1], wanted

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if flat else 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model, draw()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([draw() for _ in range(3)])
    assert path.rank_examples([draw()], draw(), verify=0).data.sizes["example"] == 16
    match = "slopes of 32 examples .* token-weighted means" if flat else "neither the mean nor the sum"
    with pytest.raises(ExamplesCouple, match=match):
        path.rank_examples([draw(), draw(padded=True)], draw())


# --- explaining


def test_an_explanation_is_checked_by_reruns() -> None:
    case = make("tanh_mlp")
    path = case.path(6)
    explanation = path.explain(ak.own_loss, outcome=5, verify=2)
    total, measured = explanation.total.values, explanation.data["measured"].values
    strongest = int(np.argmax(abs(total)))
    top = np.array([strongest, int(strongest == 0)])  # and the earliest of the rest
    assert set(np.flatnonzero(np.isfinite(measured))) == set(top)
    for step in top.tolist():
        exact = path.zero(step).response(ak.own_loss, answers=("exact",), horizon=5 - step).exact.values[0, 0, -1]
        assert measured[step] == -exact
    # a whole gradient is not a small change: the adjoint has the sign and the size, not the digits
    np.testing.assert_allclose(measured[top], total[top], rtol=0.5)
    heading, _, *rows = str(explanation).splitlines()[:-1]
    assert "by the size of the prediction, largest first" in heading
    assert [int(row.split()[0]) for row in rows] == np.argsort(-abs(total)).tolist()
    for row in rows:
        cells = row.split()
        assert float(cells[1]) == pytest.approx(total[int(cells[0])], rel=1e-2)
        assert cells[1][0] in "+-"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path, batch: path.rank([], batch), "pool is empty"),
        (lambda path, batch: path.rank([batch], batch, by="size"), "by is one of"),
        (lambda path, batch: path.rank([batch], batch, horizon=9), "past the end"),
        (lambda path, batch: path.rank([batch], batch, labels=["a", "b"]), "labels"),
        (lambda path, batch: path.rank([batch], batch, horizon=0), "a state after the change, counted from 1; got 0"),
        (lambda path, batch: path.rank([batch], batch, verify=2.5), r"verify is the number of exact reruns.*got 2\.5"),
        (lambda path, batch: path.rank([batch], batch, verify=-1), "whole number from 0 on; got -1"),
        (lambda path, batch: path.rank([batch], batch, verify=[1]), "different batches of the pool, 0 to 0; got"),
        (lambda path, batch: path.rank([batch] * 2, batch, verify=[-1]), "different batches of the pool, 0 to 1; got"),
        (lambda path, batch: path.rank([batch] * 2, batch, verify=(1, 1)), r"different batches .*; got \[1, 1\]"),
        (
            lambda path, batch: path.rank([batch], batch, verify=["0"]),
            "verify names batches of the pool, a whole .*'0'",
        ),
        (lambda path, batch: path.estimate_rank([batch], batch, verify=[1]), "different batches of the pool, 0 to 0"),
        (
            lambda path, batch: path.rank_examples([batch] * 2, batch, verify=[99]),
            "different examples of the pool, 0 to",
        ),
        (lambda path, batch: path.estimate_rank_examples([batch], batch, verify=[0, 0]), "different examples"),
        (lambda path, batch: ak.explain("no flight", verify=[3, 3]), r"different recorded steps; got \[3, 3\]"),
        (lambda path, batch: ak.explain("no flight", verify=[1.5]), r"verify names recorded steps, a whole .*1\.5"),
        (lambda path, batch: path.rank_examples([batch], batch, verify=2.5), r"verify .*; got 2\.5"),
        (lambda path, batch: path.rank_examples([batch], batch, verify=-1), "verify .*; got -1"),
        (lambda path, batch: path.explain(batch, outcome=9), "outcome is a state .* from 1 to 3 .*; got 9"),
        (lambda path, batch: path.explain(batch, outcome=0), "outcome is a state .* from 1 to 3 .*; got 0"),
        (lambda path, batch: path.explain(batch, verify=2.5), r"verify .*; got 2\.5"),
        (lambda path, batch: path.explain(batch, verify=-1), "verify .*; got -1"),
        (lambda path, batch: ak.explain("no flight", verify=2.5), r"verify .*; got 2\.5"),
        (lambda path, batch: ak.explain("no flight", verify=-1), "verify .*; got -1"),
        (lambda path, batch: path.explain(batch, change="delete"), "change is one of"),
        (lambda path, batch: path.explain(batch, outcome=2.0), r"outcome is a state .*, a whole number; got 2\.0"),
        (lambda path, batch: path.explain(batch, verify=[1.0]), r"verify names steps .*, a whole number; got 1\.0"),
        (lambda path, batch: path.rank([batch], batch, horizon=2.5), r"a horizon is .*, a whole number; got 2\.5"),
        (lambda path, batch: path.rank([batch] * 2, batch, labels=[1, "1"]), "2 changes need as many different labels"),
        (lambda path, batch: path.replace([batch] * 2).response(batch, labels=[1, "1"]), "as many different labels"),
        (lambda path, batch: path.skip(1.0), r"its place on the path, a whole number; got 1\.0"),
        (lambda path, batch: path.skip("1"), "its place on the path, a whole number; got '1'"),
        (lambda path, batch: path.skip().response(batch, horizon="2"), "a horizon is .*, a whole number; got '2'"),
    ],
)
def test_bad_input(call, words) -> None:  # type: ignore[no-untyped-def]
    case = make("tanh_mlp")
    path = case.path(3)
    with pytest.raises(InvalidInput, match=words):
        call(path, case.batch())


def test_every_rerun_is_in_the_table() -> None:
    """The certificate speaks of all of them."""
    case = make("tanh_mlp")
    path, probe = case.path(14), case.batch()
    found = path.explain(probe, verify=6)
    rerun = found.data["measured"].notnull().values.nonzero()[0]
    shown = [int(row.split()[0]) for row in str(found).splitlines()[2:-1]]
    assert set(rerun) <= set(shown)
    assert len(shown) < 14
    examples = path.rank_examples(case.batches(3), probe, verify=12)
    rerun = examples.data["measured"].notnull().values.nonzero()[0]
    assert len(rerun) == 12
    shown = [int(row.split()[0]) - 1 for row in str(examples).splitlines()[2:-1]]
    assert set(rerun) <= set(shown)
    assert len(shown) < 18


def test_batches_of_numpy_arrays_are_ranked() -> None:
    case = make("tanh_mlp")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, tuple(map(torch.as_tensor, batch)))  # type: ignore[arg-type]

    batches = [tuple(x.numpy() for x in batch) for batch in case.batches(6)]
    path = ak.capture(case.model, case.optimizer, loss_fn).follow(batches[:2])
    ranking = path.rank(batches[2:5], batches[5], verify=2)
    assert ranking.certificate.level == "ok"


class _Coder(nn.Module):
    """A variational autoencoder: what it draws multiplies what a batch with large inputs moves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 12), nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.encoder(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (log / 2).exp()
        apart = (mean**2 + log.exp() - 1 - log).sum(-1).mean() / 2
        return F.mse_loss(self.decoder(drawn), x) + 0.1 * apart


def test_a_strongest_batch_that_its_own_rerun_refutes_is_named() -> None:
    """Reruns of ordinary batches said "trust it", and nothing was said of the first row, off by 2.8 (NRMSE)."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = _Coder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def draw(scale: float = 1.0) -> Tensor:
        return scale * 1.5 * torch.randn(16, 16, generator=generator, dtype=torch.float64)

    for _ in range(30):
        optimizer.zero_grad()
        model(draw()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, lambda model, batch: model(batch)).follow([draw() for _ in range(8)])
    pool, probe = [draw() for _ in range(12)], draw()
    pool[3] = draw(scale=6.0)
    ranking = path.rank(pool, probe, verify=3)
    first = ranking.data.sel(change="batch 3")  # where its rerun puts it
    assert list(ranking.data["score"].values) == sorted(ranking.data["score"].values, reverse=True)
    assert abs(first["response"]).max() == abs(ranking.data["response"]).max()
    truth = path.replace(pool[3]).response(probe, answers=("exact",)).exact.values[0, 0]
    off = by_hand(truth, first["response"].values)
    assert (off > 0.5, float(ranking.data["held_out_error"]) < 0.5) == (True, True)
    named = next(finding for finding in ranking.certificate.findings if finding.subject == "strongest")
    assert named.value == pytest.approx(off)
    assert (named.level, f"batch 3 ({off:.2g})" in named.sentence) == ("care", True)
    del pool[3]
    assert {finding.subject for finding in path.rank(pool, probe, verify=3).certificate.findings} == {"ranking"}


@pytest.mark.parametrize("together", [False, True])
def test_weights_that_come_back_regularly_are_seen_in_large_groups(together: bool) -> None:
    """From the second batch on every fourth example has eight times the weight; a GPU takes 4,096 in one pass."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heavy: bool) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.ones(16)
        weights[1::4] = 8.0 if heavy else 1.0
        labels = torch.randint(3, (16,), generator=generator)
        return torch.randn(16, 4, generator=generator), labels, weights

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * batch[2]).sum() / batch[2].sum()

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn)
    point.loss.sharing.wanted = together
    path = point.follow([drawn(False) for _ in range(3)])
    with pytest.raises(ExamplesCouple):
        path.rank_examples([drawn(i > 0) for i in range(256)], drawn(False), verify=0)
