"""Recorded passes: the bits of plain ones, and no recording where a pass is more than its kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.core import planning, playback
from aftershock.core.loss import Gradient, LossFunction
from aftershock.core.recordings import Shape

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def test_a_shape_is_everything_but_the_numbers_on_the_device() -> None:
    def shape(batch: object, kind: str = "value", evaluating: bool = False) -> Shape:
        return Shape.of(kind, evaluating, batch, CPU)[0]

    one = {"x": torch.zeros(2, 3), "scale": 2.0}
    assert shape(one).fits(shape({"x": torch.ones(2, 3), "scale": 2.0}))
    assert not shape(one).fits(shape({"x": torch.ones(2, 3), "scale": 3.0}))
    assert not shape(one).fits(shape({"x": torch.ones(2, 4), "scale": 2.0}))
    assert not shape(one).fits(shape({"x": torch.ones(3, 2).mT, "scale": 2.0}))
    assert not shape(one).fits(shape({"y": torch.ones(2, 3), "scale": 2.0}))
    assert not shape(one).fits(shape(one, "gradient"))
    assert not shape(one).fits(shape(one, evaluating=True))


def test_tensors_elsewhere_are_part_of_the_shape() -> None:
    def shape(lengths: list[int]) -> Shape:
        batch = (torch.zeros(2, device="meta"), torch.tensor(lengths))
        return Shape.of("value", False, batch, torch.device("meta"))[0]

    assert shape([1, 2]).fits(shape([1, 2]))
    assert not shape([1, 2]).fits(shape([1, 3]))


# --- on a GPU


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is on the card: whether a pass waits for Python is a matter of time, and of who shares it."""
    monkeypatch.setattr(playback, "LAUNCHING", 0.0)


class Net(nn.Module):
    """Dropout, BatchNorm and a head that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.unused, self.drop = nn.Linear(2, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(F.gelu(self.norm(self.one(x)))))


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator).cuda(), torch.randint(3, (6,), generator=generator).cuda()


def made(loss_fn: Callable[[nn.Module, Any], Tensor]) -> tuple[ak.TrainingPoint, LossFunction]:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for seed in range(3):
        optimizer.zero_grad()
        plain_loss(model, batch(seed)).backward()
        optimizer.step()
    point = ak.capture(model, optimizer, loss_fn)
    return point, point.loss


def rehearsed(point: ak.TrainingPoint, kind: str = "gradient") -> bool:
    state, loss = point.captured.state, point.loss
    random = point.captured.random
    return loss.rehearse(kind, state.theta, state.buffers, (batch(3), batch(4)), random)


@on_gpu
@pytest.mark.parametrize("kind", ["gradient", "value"])
def test_a_recording_has_the_bits_of_plain_passes(kind: str) -> None:
    point, loss = made(plain_loss)
    assert rehearsed(point, kind)
    state, random = point.captured.state, point.captured.random
    buffers = state.buffers
    for seed in range(5, 9):
        theta = state.theta * (1 + 0.01 * seed)
        plain = loss.plain(kind, theta, buffers, batch(seed), random)
        found = loss._played(kind, theta, buffers, batch(seed), random, False)
        assert found is not None
        assert torch.equal(found.loss, plain.loss)
        assert found.random.same(plain.random)
        assert not plain.random.same(random), "the test needs a model that draws"
        assert all(torch.equal(found.buffers[name], b) for name, b in plain.buffers.items())
        assert any(not torch.equal(buffers[name], b) for name, b in plain.buffers.items())
        if isinstance(plain, Gradient):
            assert isinstance(found, Gradient)
            assert found.present == plain.present
            assert not all(plain.present)
            pairs = [(a, b) for a, b in zip(found.grads, plain.grads) if a is not None and b is not None]
            assert all(torch.equal(a, b) for a, b in pairs)
            assert torch.equal(found.norm, plain.norm)
        random, buffers = plain.random, plain.buffers


@on_gpu
def test_a_long_path_is_played_back_with_the_bits_of_training() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    plain_loss(model, batch(0)).backward()
    optimizer.step()
    batches = [batch(seed) for seed in range(40)]
    torch.manual_seed(7)
    point = ak.capture(model, optimizer, plain_loss)
    path = point.follow(batches)
    assert point.loss.player.recordings == 1
    torch.manual_seed(7)
    for each in batches:
        optimizer.zero_grad()
        plain_loss(model, each).backward()
        optimizer.step()
    assert path.matches(model, optimizer)


COUNTER = [0]


def counting(model: nn.Module, batch: Any) -> Tensor:
    COUNTER[0] += 1
    return plain_loss(model, batch) * (1 + 0 * COUNTER[0])


def looking(model: nn.Module, batch: Any) -> Tensor:
    loss = plain_loss(model, batch)
    return loss if loss > 0 else 2 * loss


def rolling(model: nn.Module, batch: Any) -> Tensor:
    return plain_loss(model, batch) * (1.0 + (random.random() < 0.01))


@on_gpu
@pytest.mark.parametrize("loss_fn", [counting, looking, rolling])
def test_a_pass_that_is_more_than_its_kernels_is_not_recorded(loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
    point, _ = made(loss_fn)
    assert not rehearsed(point)
    assert point.loss.player.recordings == 0
    torch.nn.functional.dropout(torch.ones(3, device="cuda"))  # the generator is as good as before
    assert not rehearsed(point)  # and it is not tried again


@on_gpu
def test_batches_of_another_shape_run_as_ever() -> None:
    point, loss = made(plain_loss)
    assert rehearsed(point)
    state, (x, y) = point.captured.state, batch(1)
    assert loss._played("gradient", state.theta, state.buffers, (x[:4], y[:4]), point.captured.random, False) is None


@on_gpu
def test_a_scalar_made_on_the_cpu_is_recorded() -> None:
    def masked(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(torch.where(out > 9, torch.tensor(0.0, device=out.device), out), batch[1])

    point, _ = made(masked)
    assert rehearsed(point)


@on_gpu
def test_responses_of_a_large_model_are_played_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playback, "LARGE", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    plain_loss(model, batch(0)).backward()
    optimizer.step()
    point = ak.capture(model, optimizer, plain_loss)
    batches, pool, probe = [batch(seed) for seed in range(6)], [batch(seed) for seed in range(10, 16)], batch(30)
    answers = []
    for each in (point, point.to("cpu")):
        path = each.follow(batches)
        found = path.replace([*pool, batches[0]]).response(probe)
        answers.append(found.data["response"])
        assert not found.data["response"].sel(answer="exact").isel(change=-1).any()  # a change of nothing
    assert point.loss.player.has("gradient")
    assert point.loss.player.has("value")
    assert point.loss.player.has("products")
    # float32: the difference of two losses near 1 keeps about four digits
    np.testing.assert_allclose(*answers, rtol=2e-2, atol=2e-6)


@on_gpu
@pytest.mark.parametrize(("count", "at_once"), [(1, 4), (4, 4), (6, 4), (3, 2), (2, 1)])
def test_recorded_products_are_the_plain_ones(count: int, at_once: int) -> None:
    """Any number of vectors, at another batch and another θ than those that were recorded."""
    from aftershock.core.graphs import GradientGraph
    from aftershock.core.rehearsals import rehearse_products

    point, loss = made(plain_loss)
    state, random_state = point.captured.state, point.captured.random
    theta = state.theta * 1.05
    vectors = torch.randn(count, len(theta), device="cuda")
    at = (theta, state.buffers, batch(7), random_state, "here")
    graph = GradientGraph(loss, *at)
    alone = torch.cat([graph.products(v[None]) for v in vectors])
    rehearse_products(loss, state.theta, state.buffers, (batch(3), batch(4)), random_state, at_once)
    assert loss.player.has("products")
    played = GradientGraph(loss, *at)
    assert len(played.pieces(count)) == -(-count // at_once)
    torch.testing.assert_close(played.products(vectors), alone, rtol=1e-4, atol=1e-6)  # rounding of float32
    torch.testing.assert_close(played.raw, graph.raw, rtol=0, atol=0)


@on_gpu
def test_recorded_products_of_an_overwritten_state_are_refused() -> None:
    from aftershock.core.graphs import GradientGraph
    from aftershock.core.rehearsals import rehearse_products

    point, loss = made(plain_loss)
    state = point.captured.state
    rehearse_products(loss, state.theta, state.buffers, (batch(3), batch(4)), point.captured.random, 4)
    theta = state.theta.clone()
    graph = GradientGraph(loss, theta, state.buffers, batch(7), point.captured.random, "here")
    theta.add_(1)
    with pytest.raises(RuntimeError, match="overwritten"):
        graph.products(torch.randn(1, len(theta), device="cuda"))


# --- in lanes


def smooth_model() -> ak.TrainingPoint:
    """Neither draws nor moves buffers, and is wide enough that its kernels overlap."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plain_loss(model, batch(0)).backward()
    optimizer.step()
    return ak.capture(model, optimizer, plain_loss)


@on_gpu
def test_rows_in_lanes_have_the_bits_of_plain_passes() -> None:
    point = smooth_model()
    state, random, loss = point.captured.state, point.captured.random, point.loss
    at = (state.theta, state.buffers, (batch(3), batch(4)), random)
    assert loss.rehearse("gradient", *at, lanes=3)
    assert loss.rehearse("value", *at, lanes=3)
    assert len(loss.player.lanes) == 3
    thetas, given = [state.theta * (1 + 0.01 * i) for i in range(7)], batch(5)
    here: Any = ({}, given, random, "here")
    plain = [loss.plain("gradient", theta, {}, given, random) for theta in thetas]
    for _ in range(20):  # a race would not show every time
        found = loss.spread("gradient", given, 7, lambda i: loss.gradient(thetas[i], *here, wait=False))
        values = loss.spread("value", given, 7, lambda i: loss.value(thetas[i], *here, wait=False))
        for alone, gradient, value in zip(plain, found, values):
            assert isinstance(alone, Gradient)
            assert all(torch.equal(a, b) for a, b in zip(gradient.grads, alone.grads))
            assert torch.equal(gradient.loss, alone.loss)
            assert torch.equal(value.loss, alone.loss)


@on_gpu
@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.BatchNorm1d(16)])
def test_a_pass_that_draws_or_moves_buffers_has_one_lane(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 16), layer, nn.Linear(16, 3)).cuda()
    point = ak.capture(model, torch.optim.AdamW(model.parameters(), fused=True), plain_loss)
    state, loss = point.captured.state, point.loss
    assert loss.rehearse("gradient", state.theta, state.buffers, (batch(3), batch(4)), point.captured.random, lanes=3)
    assert len(loss.player.lanes) == 1


@on_gpu
def test_a_recording_outlives_that_of_another_point() -> None:
    """Both on the same stream: what one of them works in is not the other's."""
    first, second = smooth_model(), smooth_model()
    state, random = second.captured.state, second.captured.random
    for point in (first, second):
        at = point.captured
        assert point.loss.rehearse("gradient", at.state.theta, {}, (batch(3), batch(4)), at.random)
    plain = second.loss.plain("gradient", state.theta, {}, batch(5), random)
    first.loss.player.give_back()
    torch.cuda.empty_cache()
    others = [torch.zeros(2**20, device="cuda") for _ in range(64)]  # where a freed workspace would be
    found = second.loss.gradient(state.theta, {}, batch(5), random, "here")
    assert isinstance(plain, Gradient)
    assert all(torch.equal(a, b) for a, b in zip(found.grads, plain.grads))
    assert not any(other.any() for other in others)


@on_gpu
@pytest.mark.parametrize("probe", ["batch", "own"])
def test_responses_in_lanes_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch, probe: str) -> None:
    """To the bit; a replaced batch that is the control's own has no response."""
    monkeypatch.setattr(playback, "LARGE", 0)
    pool, found = [batch(seed) for seed in range(10, 17)], []
    for lanes in (4, 1):
        monkeypatch.setattr(planning, "LANES", lanes)
        point = smooth_model()
        path = point.follow([batch(seed) for seed in range(8)])
        change = path.replace([*pool, batch(0)])
        found.append(change.response(batch(30) if probe == "batch" else ak.own_loss).data["response"])
        assert len(point.loss.player.lanes) == lanes
        assert not found[-1].sel(answer="exact").isel(change=-1).any()
    np.testing.assert_array_equal(*found)
