"""The noise floor is what rounding does: judged by runs that differ by roundings, and by readings in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.loss import LossFunction
from aftershock.core.noise import Arithmetic

from .cases import make, mlp

DRAWS = 20
FACTOR = 5  # between the stated floor and the scatter of 20 draws, itself known to a sixth
PRECISIONS = ("float64", "float32", "bfloat16")


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].to(next(model.parameters()).dtype)
    return F.cross_entropy(model(x), batch[1])


def in_bfloat16(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return classify(model, batch)


def run(precision: str, lr: float = 3e-3, steps: int = 6) -> tuple[ak.TrainingPoint, list[Any], Any]:
    """A warm classifier of three layers that learns noisy prototypes; autocast is inside the loss."""
    torch.manual_seed(0)
    model = mlp(10, 32, 32, 6).to(torch.float64 if precision == "float64" else torch.float32)
    loss = in_bfloat16 if precision == "bfloat16" else classify
    centres = torch.randn(6, 10)

    def batch() -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 6, (32,))
        return centres[y] + 1.5 * torch.randn(32, 10), y

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(40):
        optimizer.zero_grad()
        loss(model, batch()).backward()
        optimizer.step()
    return ak.capture(model, optimizer, loss), [batch() for _ in range(steps)], batch()


def jittered(point: ak.TrainingPoint, seed: int) -> ak.TrainingPoint:
    """The same point with every parameter moved up or down by one rounding."""
    draw, state = torch.Generator().manual_seed(seed), point.captured.state
    eps = torch.finfo(state.theta.dtype).eps
    signs = torch.randint(0, 2, state.theta.shape, generator=draw).to(state.theta) * 2 - 1
    return ak.TrainingPoint(replace(point.captured, state=replace(state, theta=state.theta * (1 + eps * signs))))


def read(path: ak.Path, probe: Any) -> np.ndarray:
    """The probe at every state after the first step, by a plain forward pass."""
    loss, random = path.point.loss, path.steps[0].random
    states = (path.trajectory.state(t) for t in range(1, len(path) + 1))
    return np.array([float(loss.value(s.theta, s.buffers, probe, random, "here").loss) for s in states])


def run_scatter(point: ak.TrainingPoint, batches: list[Any], probe: Any) -> np.ndarray:
    """By horizon: how far runs from one rounding beside the state after the first step end up from the control's."""
    control = point.follow(batches)
    after = control.point.follow(batches[:1]).end
    reads = np.array([read_from(jittered(after, seed), batches[1:], probe) for seed in range(1, DRAWS + 1)])
    return np.sqrt(((reads - read(control, probe)) ** 2).mean(0))


def read_from(point: ak.TrainingPoint, batches: list[Any], probe: Any) -> np.ndarray:
    path = point.follow(batches)
    first = point.loss.value(point.captured.state.theta, {}, probe, path.steps[0].random, "here").loss
    return np.array([float(first), *read(path, probe)])


def read_scatter(point: ak.TrainingPoint, probe: Any, size: float) -> float:
    """The error of a difference of two readings, against the same in float64, at displacements of a step's size."""
    if point.captured.state.theta.dtype == torch.float64:
        return 0.0
    theta, random, draw = point.captured.state.theta, point.captured.random, torch.Generator().manual_seed(9)
    better, errors = point.to(dtype=torch.float64), []

    def low(x: Tensor) -> float:
        return float(point.loss.value(x, {}, probe, random, "here").loss)

    def high(x: Tensor) -> float:
        flat = better.loss.layout.join([view.double() for view in point.loss.layout.views(x)])
        return float(better.loss.value(flat, {}, probe, random, "here").loss)

    for _ in range(DRAWS):
        near = theta + size * torch.randn(theta.shape, generator=draw) * (theta != 0)
        errors.append((low(near) - low(theta)) - (high(near) - high(theta)))
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_floor_is_the_scatter_of_rounding(precision: str) -> None:
    point, batches, probe = run(precision)
    response = point.follow(batches).skip(0).response(probe)
    floor = response.data["noise_floor"].values
    truth = np.hypot(run_scatter(point, batches, probe), read_scatter(point, probe, 3e-3))
    assert (floor > truth / FACTOR).all(), floor / truth
    assert (floor < truth * FACTOR).all(), floor / truth
    if precision == "bfloat16":  # float32's eps, as it used to be taken, is hundreds of times too small
        assert (floor > 200 * torch.finfo(torch.float32).eps * response.data["control"].values).all()


def test_a_run_that_amplifies_roundings_has_a_floor_that_grows() -> None:
    """At this learning rate a rounding grows a thousandfold in 24 steps; one draw is far off only where it is small."""
    point, batches, probe = run("float32", lr=0.15, steps=24)
    floor = point.follow(batches).skip(0).response(probe, answers=("exact",)).data["noise_floor"].values
    truth = run_scatter(point, batches, probe)
    assert truth[-1] > 30 * truth[0]
    assert (floor[-6:] > truth[-6:] / FACTOR).all(), floor / truth
    assert (floor[-6:] < truth[-6:] * FACTOR).all(), floor / truth


@pytest.mark.parametrize(
    ("precision", "size", "count"), [("float64", 1e-14, 1), ("float32", 1e-7, 50), ("bfloat16", 1e-7, 50)]
)
def test_pure_noise_is_called_noise_and_nothing_is_nothing(precision: str, size: float, count: int) -> None:
    """A gradient of 1e-2 that differs by a rounding in some coordinates."""
    point, batches, probe = run(precision)
    path = point.follow(batches)
    nothing, below = (torch.zeros(point.loss.layout.size, dtype=point.captured.state.theta.dtype) for _ in range(2))
    below[7 : 7 + count] = size
    response = path.perturb([below, nothing]).response(probe, labels=["tiny", "nothing"])
    exact = response.exact.isel(scale=0)
    assert (exact.sel(change="nothing").values == 0).all()
    tiny = exact.sel(change="tiny").values
    noise = response.noise.sel(answer="exact", change="tiny").isel(scale=0).values
    assert (noise == (tiny != 0)).all()
    assert int(response.summary["peak_sign"].sel(answer="exact", change="tiny").item()) == 0
    found = next(f for f in response.certificate.findings if f.subject == "noise")
    assert (found.level, "do not trust any sign" in found.sentence) == ("bad", True)
    if tiny.any():
        assert "told from rounding" in response.verdict
        assert "noise" in response.table()
    assert "does not move the loss at all" in str(path.perturb(nothing).response(probe))
    real = path.skip(0).response(probe)
    assert not real.noise.any()
    assert next(f for f in real.certificate.findings if f.subject == "noise").level == "note"


def test_a_tiny_change_that_float64_does_carry_is_no_noise() -> None:
    """1e-12 in one coordinate moves this loss by 1e-15, ten roundings: float64's exact run agrees with the tangent."""
    point, batches, probe = run("float64")
    one = torch.zeros(point.loss.layout.size, dtype=torch.float64)
    one[7] = 1e-12
    response = point.follow(batches).perturb(one).response(probe)
    assert not response.noise[..., 1:].any()
    np.testing.assert_allclose(response.exact.values[0, 0, 1:], response.tangent.values[0, 0, 1:], rtol=0.3)
    single, batches, probe = run("float32")
    response = single.follow(batches).perturb(one.float()).response(probe, answers=("exact",))
    assert ((response.exact.values == 0) | response.noise.values[0]).all()


def test_noise_is_shown_on_the_page(tmp_path: Any) -> None:
    point, batches, probe = run("float32")
    path, some = point.follow(batches), torch.zeros(point.loss.layout.size)
    for size in (1e-7, 3e-7, 1e-6):  # which of them moves the loss by a rounding depends on the CPU
        some[7:57] = size
        response = path.perturb(some).response(probe, answers=("exact",))
        if response.exact.any():
            break
    assert response.noise.any()
    page = response.report(tmp_path / "page.html").read_text()
    assert "can be told from rounding" in page
    assert ">±" in page


def test_the_arithmetic_is_seen_wherever_autocast_is() -> None:
    model, batch = mlp(4, 5, 3), (torch.randn(6, 4), torch.randint(0, 3, (6,)))
    for loss, dtype in ((classify, torch.float32), (in_bfloat16, torch.bfloat16)):
        with Arithmetic() as seen:
            loss(model, batch)
        assert seen.dtype == dtype
    with Arithmetic() as seen:
        classify(model.double(), batch)
    assert seen.dtype == torch.float64  # the batch comes in float32, and nothing is computed in it


@pytest.mark.parametrize("name", ["untouched_rows", "dropout", "batch_norm", "accumulated"])
def test_a_floor_is_there_for_every_kind_of_model(name: str) -> None:
    case = make(name)
    path = case.path(4)
    floor = path.skip(0).response(ak.own_loss).data["noise_floor"].values
    losses = np.array(path.losses[1:])
    assert ((floor > 0.1 * np.finfo(float).eps * losses) & (floor < 1e3 * np.finfo(float).eps * losses)).all()


def test_it_walks_no_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row goes along with the others, whichever way the path is cut. Where it is cut, the control goes first, and
    its first state alone is computed again."""
    case, horizons, taken = make("tanh_mlp"), 6, []
    path = case.point().follow(case.batches(horizons), keep="checkpoints")
    path.trajectory._states = {0: path.trajectory.state(0)}  # every later one is computed again
    change, probe = path.replace(case.batches(3)), case.batch()
    one = path.replace(case.batches(1)).estimate(probe, answers=("exact",)).memory
    change.response(probe, answers=("exact",), memory=one)
    plain = LossFunction.gradient
    monkeypatch.setattr(LossFunction, "gradient", lambda *a, **k: taken.append(1) or plain(*a, **k))
    for memory, chunks in ((None, 1), (one, 2)):
        taken.clear()
        change.response(probe, answers=("exact",), memory=memory)
        rows, control = 4 * (horizons - 1), horizons - 1
        assert change.estimate(probe, answers=("exact",), memory=memory).chunks == chunks
        first = chunks > 1
        assert len(taken) == 3 + rows + control + first + 1  # the control's own step is seen once for all chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_in_float64_is_not_told_to_use_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(dtype)
    rate = 0.2 * torch.finfo(dtype).eps
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)  # it moves the loss by no more than rounding does
    batch = torch.randn(4, 3, dtype=dtype)
    path = ak.capture(model, optimizer, lambda model, batch: model(batch).square().mean()).follow([batch] * 3)
    found = next(f for f in path.skip(0).response(batch).certificate.findings if f.subject == "noise")
    assert ("do not trust any sign" in found.sentence, "point.to(dtype=" in found.sentence) == (
        True,
        dtype == torch.float32,
    )
