"""float16 and a GradScaler: gradients are those of the scaled loss, unscaled, as the loop computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aftershock as ak
from aftershock.core.graphs import GradientGraph
from aftershock.errors import InvalidInput
from aftershock.recorder.not_a_number import not_a_number

SCALE = 2.0**16
STEPS = 40


class Net(nn.Module):
    """Its weights are float32, and its gradients so small that float16 loses most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.words(x))))


def half(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        logits = model(x[:, :-1])
    return 1e-2 * F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(32, (16, 1), generator=generator) + torch.arange(17)) % 32 for _ in range(count)]


def made(**adamw: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, **adamw)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=SCALE)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: Tensor, clip: float | None
) -> tuple[Tensor, Tensor | None]:
    optimizer.zero_grad()
    loss, norm = half(model, x), None
    scaler.scale(loss).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


@pytest.mark.parametrize("clip", [None, 1e-4])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_float16_run_is_replayed_to_the_bit(fused: bool, clip: float | None, tmp_path: Path) -> None:
    model, optimizer, scaler = made(fused=fused)
    with ak.FlightRecorder(model, optimizer, half, tmp_path, window=16, clip=clip, triggers=()) as recorder:
        for x in batches(STEPS):
            loss, norm = step(model, optimizer, scaler, x, clip)
            recorder.step(x, loss, norm=norm)
    assert {record.scale for record in recorder.recent} == {SCALE}
    found = ak.explain(recorder, step=STEPS - 1, verify=0)
    assert "equal to the recorded one to the bit" in str(found.certificate)
    other = ak.explain(tmp_path, step=STEPS - 1, verify=0, model=Net(), loss_fn=half)
    assert other.data.equals(found.data), "the scale is in the files"


def test_a_followed_path_has_the_bits_of_scaled_training(tmp_path: Path) -> None:
    model, optimizer, scaler = made()
    data = batches(STEPS)
    for x in data[:20]:
        step(model, optimizer, scaler, x, None)
    point = ak.capture(model, optimizer, half, loss_scale=scaler.get_scale())
    plain = ak.capture(model, optimizer, half)
    point.save(tmp_path / "point.safetensors")
    again = ak.load_point(tmp_path / "point.safetensors", Net(), half)
    for x in data[20:]:
        step(model, optimizer, scaler, x, None)

    def ends_as_training(point: ak.TrainingPoint) -> bool:
        end = point.follow(data[20:]).end
        return all(torch.equal(end.parameters[name], p) for name, p in model.named_parameters())

    assert ends_as_training(point)
    assert ends_as_training(again)
    assert not ends_as_training(plain), "float16 loses nothing here without a scale: the test says nothing"


def test_a_scale_that_was_not_told_is_named() -> None:
    model, optimizer, scaler = made()
    data = batches(4)
    step(model, optimizer, scaler, data[0], None)
    paths = [ak.capture(model, optimizer, half, loss_scale=scale).follow(data[1:]) for scale in (1.0, SCALE)]
    step(model, optimizer, scaler, data[1], None)
    missed, told = (path.matches(model, optimizer) for path in paths)
    assert told.equal
    assert "multiplied by 65536" in missed.cause
    assert "loss_scale" in missed.remedy


@pytest.mark.parametrize("scale", [0.0, float("nan"), -1.0])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    model, optimizer, _ = made()
    with pytest.raises(InvalidInput, match="positive"):
        ak.capture(model, optimizer, half, loss_scale=scale)


@pytest.mark.parametrize("together", [False, True])
def test_a_scale_changes_no_answer(together: bool) -> None:
    """In float64 nothing is lost, and a power of two changes no bit."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches(12)
    for x in data[:4]:
        optimizer.zero_grad()
        loss_fn(model, x).backward()
        optimizer.step()
    found = []
    for scale in (1.0, 2.0**10):
        point = ak.capture(model, optimizer, loss_fn, loss_scale=scale)
        point.loss.sharing.wanted = together
        path = point.follow(data[4:10])
        path.check()
        response = path.replace(data[10:], at=0).response(probe=data[3])
        ranking = path.rank(data[8:], probe=data[3], verify=2)
        kinds = ("gradient", "value", "pool", "product")
        assert [point.loss.sharing.tries(kind, 8) for kind in kinds] == [together] * 4, "rows that disagree run alone"
        state = point.captured.state
        graph = GradientGraph(point.loss, state.theta, state.buffers, data[5], point.captured.random, "here")
        vectors = torch.stack([state.theta, state.m])
        onto = torch.ones_like(vectors)
        graph.add_products_(onto, vectors)
        found.append((graph.raw, graph.products(vectors), onto, response.data, ranking.data["response"]))
    (raw, products, onto, response, ranking), scaled = found[0], found[1]
    assert float(products.norm()) > 0
    assert all(torch.equal(a, b) for a, b in zip((raw, products), scaled[:2]))
    torch.testing.assert_close(onto, scaled[2], rtol=1e-14, atol=1e-14)  # added in another order
    for answer in ("exact", "semilinear", "tangent"):
        a, b = (each["response"].sel(answer=answer).values for each in (response, scaled[3]))
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(torch.tensor(ranking.values), torch.tensor(scaled[4].values), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_a_finite_gradient_is_told_without_its_scale(scale: float) -> None:
    """A norm of 4e15; times 65,536 its square would overflow in float32."""
    model = nn.Linear(4, 1)
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).sum(), loss_scale=scale)
    batch = torch.full((2, 4), 1e15)
    found = not_a_number(point.loss, point.captured.state, batch, point.captured.random, [])
    assert (found.kind, found.norm) == ("finite", pytest.approx(4e15, rel=1e-6))
