"""`explain` judges itself: reruns choose its readout and factor, and each is judged by the others."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn import functional as F

import aftershock as ak
from aftershock.api.contributions import EDITS, Calibrated, Contributions
from aftershock.core import contributions as contributions_module
from aftershock.core.contributions import BentReadout, contributions
from aftershock.errors import InvalidInput

from .cases import make

CPU = torch.device("cpu")


@pytest.mark.parametrize("change", EDITS)
@pytest.mark.parametrize("verify", [0, 1, 3])
def test_every_explanation_prints_a_verdict_on_itself(change: str, verify: int) -> None:
    case = make("tanh_mlp")
    path, probe = case.path(7), case.batch()
    found = path.explain(probe, change=change, verify=verify)
    verdict = found.certificate.findings[0]
    assert str(found).endswith(str(found.certificate))
    if change == "reset v":
        assert (verdict.level, "No sizes are predicted" in verdict.sentence) == ("bad", True)
    elif verify < 2:
        assert (verdict.level, verdict.value) == ("care", verify)
        assert ("Not verified" if verify == 0 else "cannot judge itself") in verdict.sentence
    else:
        assert verdict.value == float(found.data["held_out_error"])
        assert "predicted with the calibration of the others" in verdict.sentence


def test_a_reset_of_v_is_measured_and_not_predicted() -> None:
    """Its adjoint had rank correlations of −0.5 to 0.3 with the truth."""
    case = make("tanh_mlp")
    path, probe = case.path(7), case.batch()
    found = path.explain(probe, change="reset v", verify=3)
    assert np.isnan(found.total.values).all()
    measured = found.data["measured"]
    assert np.flatnonzero(measured.notnull()).tolist() == [0, 3, 6]
    for step in (0, 3, 6):
        exact = path.reset(step, "v").response(probe, answers=("exact",)).exact.values[0, 0, -1]
        assert float(measured[step]) == -exact
    rows = [line.split() for line in str(found).splitlines()[2:5]]
    assert all(len(cells) == 2 for cells in rows)  # a step and its measurement, no predicted size


def test_calibration_is_judged_by_reruns_it_has_not_seen() -> None:
    """The readout and the factor by hand, from both readouts and exact reruns."""
    case = make("tanh_mlp")
    path, probe = case.path(12), case.batch()
    found = path.explain(probe, verify=5)
    watch, edits = path.watch(0, probe), {"zero": EDITS["zero"]}
    reads = {
        name: contributions(path.trajectory, 12, BentReadout.of(watch, k), lambda _: edits, CPU)["zero"].sum((1, 2))
        for name, k in (("straight", 0), ("bent", 1))
    }
    measured = found.data["measured"].values
    known = np.flatnonzero(np.isfinite(measured))
    top = np.argsort(-abs(reads["bent"].numpy()))[:2]
    rest = np.setdiff1d(np.arange(12), top)
    assert set(known.tolist()) == {*top.tolist(), *rest[[0, 3, 6]].tolist()}  # not the strongest alone

    def fit(steps: np.ndarray) -> tuple[float, str, float]:
        fits = []
        for name, read in reads.items():
            factor = float(np.median(measured[steps] / read.numpy()[steps]))
            fits.append((abs(measured[steps] - factor * read.numpy()[steps]).sum(), name, factor))
        return min(fits)

    _, readout, factor = fit(known)
    assert found.data["readout"].item() == readout
    assert float(found.data["factor"]) == pytest.approx(factor, rel=1e-9)
    np.testing.assert_allclose(found.total.values, factor * reads[readout].numpy(), rtol=1e-9, atol=1e-15)
    miss = 0.0
    for step in known:
        _, readout, factor = fit(known[known != step])
        miss += abs(measured[step] - factor * float(reads[readout][step]))
    assert float(found.data["held_out_error"]) == pytest.approx(miss / abs(measured[known]).sum(), rel=1e-9)


def channels(*totals: float) -> torch.Tensor:
    """Contributions in θ alone."""
    return torch.tensor([[total, 0.0, 0.0] for total in totals], dtype=torch.float64)


def test_reruns_refuse_a_curvature_that_runs_away() -> None:
    """An unstable path: the straight readout is half of the truth, and the bent one squares what was amplified."""
    straight, bent = channels(-0.1, 0.2, -0.15, 0.05), channels(32.0, 40.0, 21.0, 3.0)
    readings = {"straight": straight, "bent": bent}
    measured = torch.tensor([-0.2, 0.4, torch.nan, torch.nan], dtype=torch.float64)
    found = Calibrated.by(readings, measured)
    assert (found.readout, found.factor) == ("straight", pytest.approx(2.0))
    torch.testing.assert_close(found.contribution, 2 * straight)
    assert found.held_out_error == pytest.approx(0.0, abs=1e-12)
    unverified = Calibrated.by(readings, torch.full_like(measured, torch.nan))
    assert (unverified.readout, unverified.factor) == ("straight", 1.0)
    assert math.isnan(unverified.held_out_error)
    mild = {"straight": straight, "bent": 1.2 * straight}
    assert Calibrated.by(mild, torch.full_like(measured, torch.nan)).readout == "bent"


def explanation(total: list[float], measured: list[float], value: float = 0.5) -> Contributions:
    found = Calibrated.by({"straight": channels(*total)}, torch.tensor(measured, dtype=torch.float64))
    steps = len(total)
    data = {
        "contribution": (("step", "channel"), found.contribution.numpy()),
        "predicted": ("step", found.predicted.numpy()),
        "measured": ("step", found.measured.numpy()),
        "held_out": ("step", found.held_out.numpy()),
    }
    scalars = {
        "held_out_error": found.held_out_error, "raw_error": found.raw_error, "readout": found.readout,
        "factor": found.factor, "outcome": steps, "value": value, "change": "zero", "probe": "a fixed batch",
    }  # fmt: skip
    coords = {"step": list(range(steps)), "channel": ["theta", "m", "v"]}
    return Contributions(xr.Dataset({**data, **scalars}, coords))


def test_absurd_sizes_are_not_printed() -> None:
    nothing = math.nan
    found = explanation([32.0, -0.2, -0.3], [nothing, -0.2, -0.3])
    assert found.off_scale.values.tolist() == [True, False, False]
    assert "32" not in str(found)
    assert "off the scale" in str(found)
    assert found.certificate.level == "bad"
    assert "off the scale" not in str(explanation([2.9, -0.2, -0.3], [nothing, -0.2, -0.3]))  # under ten reruns
    assert explanation([32.0], [nothing], value=3.0).off_scale.item()  # ten outcomes, where nothing was rerun
    assert not explanation([32.0], [nothing], value=4.0).off_scale.item()


def test_reruns_that_diverge_calibrate_nothing_and_are_counted() -> None:
    found = explanation([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, -math.inf, math.nan])
    assert float(found.data["factor"]) == pytest.approx(1.0)
    assert "1 of the reruns diverged" in str(found)
    assert "nan" not in str(found)


def test_several_edits_of_a_path_that_replays_are_kicked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where v is tiny, every coordinate of every edit waits for exact kicks."""
    case = make("tanh_mlp")
    for state in case.optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-6)
    path, probe = case.point().follow(case.batches(4), keep="checkpoints"), case.batch()
    watch, cpu, passes = path.watch(0, probe), torch.device("cpu"), list[int]()
    real = contributions_module.pass_by
    monkeypatch.setattr(contributions_module, "pass_by", lambda *given: passes.append(len(given[1])) or real(*given))
    made = {"skip": EDITS["skip"], **{f"zero {i}": EDITS["zero"] for i in range(15)}}
    together = contributions(path.trajectory, watch.last, BentReadout.of(watch), lambda step: made, cpu)
    assert path.trajectory.spacing > 1
    assert passes == [len(made)]
    alone = contributions(path.trajectory, watch.last, BentReadout.of(watch), lambda step: {"skip": made["skip"]}, cpu)
    torch.testing.assert_close(together["skip"], alone["skip"])


def _hardest(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean loss of the six hardest examples: a loss with many kinks."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.sort(descending=True).values[:6].mean()


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A small classifier after 30 steps, 16 batches for the path, and one more."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(4, (16,), generator=generator)
        return centres[labels] + 1.5 * torch.randn(16, 16, generator=generator, dtype=torch.float64), labels

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        _hardest(model, draw()).backward()
        optimizer.step()
    return model, optimizer, [draw() for _ in range(17)]


def _by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list, probe: object, zero: int) -> float:
    """The probe's loss after a plain torch run with a zero gradient at one step."""
    model, optimizer = copy.deepcopy((model, optimizer))
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        _hardest(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad *= i != zero
        optimizer.step()
    return float(_hardest(model, probe).detach())


@pytest.mark.parametrize("seed", [6, 9, 11])
def test_the_stated_error_holds_for_steps_far_back(seed: int) -> None:
    """They are predicted worst, and reruns spread over the ranking missed them: 0.18 was stated, with "trust it", where
    the steps that were not rerun were off by 1.08 in sum (0.34 and 0.25 where they were off by 0.70 and 0.53)."""
    model, optimizer, (*batches, probe) = _trained(seed)
    found = ak.capture(model, optimizer, _hardest).follow(batches).explain(probe, verify=3)
    control = _by_hand(model, optimizer, batches, probe, zero=-1)
    truth = control - np.array([_by_hand(model, optimizer, batches, probe, step) for step in range(16)])
    rest = found.data["measured"].isnull().values
    np.testing.assert_allclose(found.data["measured"].values[~rest], truth[~rest], rtol=1e-9)
    off = abs(found.total.values - truth)[rest].sum() / abs(truth)[rest].sum()
    assert 0.1 < off < 1.5 * float(found.data["held_out_error"])


def test_steps_without_any_effect_have_no_error_to_trust() -> None:
    model, optimizer, (*batches, probe) = _trained(0)
    optimizer.param_groups[0]["lr"] = 0.0
    found = ak.capture(model, optimizer, _hardest).follow(batches).explain(probe, verify=3)
    assert not found.data["measured"].fillna(0.0).any()
    verdict = found.certificate.findings[0]
    assert (verdict.level, "None of 3 exact reruns changes the outcome" in verdict.sentence) == ("care", True)


@pytest.mark.parametrize("change", ["zero", "reset v"])
def test_steps_to_rerun_may_be_given_by_number(change: str) -> None:
    """As to `ak.explain`; each against the response to the same change."""
    case = make("tanh_mlp")
    path, probe = case.path(6), case.batch()
    found = path.explain(probe, outcome=5, change=change, verify=(4, 1))
    measured = found.data["measured"].values
    assert np.flatnonzero(~np.isnan(measured)).tolist() == [1, 4]
    for step in (1, 4):
        made = path.zero(step) if change == "zero" else path.reset(step, "v")
        exact = made.response(probe, horizon=5 - step, answers=("exact",)).exact.values[0, 0, -1]
        assert measured[step] == -exact != 0
    for some in ([5], [-1], [2, 2]):
        with pytest.raises(InvalidInput, match="verify names different steps before the outcome, 0 to 4"):
            path.explain(probe, outcome=5, change=change, verify=some)
    assert path.estimate_explain(probe, verify=[0, 3]) == path.estimate_explain(probe, verify=2)
    assert not path.explain(probe, change=change, verify=[]).data["measured"].notnull().any()


def test_an_outcome_past_the_end_is_named_as_one() -> None:
    case = make("tanh_mlp")
    path = case.path(4)
    with pytest.raises(InvalidInput, match=r"outcome is a state .* from 1 to 4 with a fixed batch as the probe; got 7"):
        path.explain(case.batch(), outcome=7)
    with pytest.raises(InvalidInput, match="from 1 to 3 with each step's own loss as the probe; got 4"):
        path.explain(ak.own_loss, outcome=4)


def test_how_an_explanation_prints_zero_and_one() -> None:
    found = explanation([0.0, 0.3], [math.nan, 0.3])
    found.data["contribution"][0] = -0.0
    assert "-0 " not in str(found) + " "
    assert "as 1 exact rerun has it" in str(found)
    assert "as 2 exact reruns have it" in str(explanation([0.1, 0.3], [0.1, 0.3]))
