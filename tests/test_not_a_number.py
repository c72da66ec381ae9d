"""A loss or gradient that is not finite: models and batches whose fault is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.batches import accumulate
from aftershock.recorder.not_a_number import NotANumberFinding, not_a_number

from .cases import mlp


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Trapped(nn.Module):
    """log(0), masked: the loss is finite, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), LogHead()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class LogHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        positive = self.out(x).abs()
        return torch.where(positive > 0, torch.log(positive), 0.0)


class Overflow(nn.Module):
    """exp of a large input; and a mask of −∞ that every batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.body, self.grow, self.head = Mask(), nn.Linear(3, 3), Exp(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.mask(x).exp()
        return self.head(self.grow(self.body(x)).softmax(-1) + nothing)


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, -math.inf)


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


def judged(model: nn.Module, batch: Any, others: list[Any]) -> NotANumberFinding:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    point = ak.capture(model, optimizer, lambda m, x: m(x).square().mean())
    captured = point.captured
    before = {n: p.clone() for n, p in model.state_dict().items()}
    found = not_a_number(captured.loss, captured.state, batch, captured.random, others)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in captured.loss.model.modules())
    return found


def test_a_finite_loss_whose_gradient_is_not() -> None:
    model = Trapped()
    model.head.out.weight.data.fill_(1.0)
    model.head.out.bias.data.zero_()
    model.body.weight.data.fill_(1.0)
    model.body.bias.data.zero_()
    good, trap = torch.rand(5, 3) + 0.1, torch.rand(5, 3) + 0.1
    trap[2] = 0.0
    loss = model(trap).square().mean()
    loss.backward()
    bad = [n for n, p in model.named_parameters() if not p.grad.isfinite().all()]
    assert math.isfinite(float(loss.detach()))
    assert bad
    found = judged(model, trap, [good, good + 1])
    assert (found.kind, found.module, found.operation, found.others) == ("batch", "head", "log", (True, True))
    assert list(found.parameters) == bad
    assert found.loss == pytest.approx(float(loss.detach()))
    assert found.sentence.startswith(
        f"the loss is {float(loss.detach()):.4g}, and the gradient is not finite from `log`"
    )
    assert judged(model, trap, [trap, good, trap]).kind == "weights"
    assert judged(model, trap, []).kind == "unknown"
    inside = judged(model, accumulate([good, trap]), [good])
    assert (inside.kind, inside.module, inside.operation) == ("batch", "head", "log")


def test_a_loss_that_is_not_finite_names_the_module_and_not_the_mask() -> None:
    model = Overflow()
    good, bad = torch.randn(4, 3), torch.randn(4, 3)
    bad[1] = 1e5 * torch.sign(model.body.weight.detach()[0])
    found = judged(model, bad, [good])
    assert not found.loss_finite
    assert (found.kind, found.module, found.operation) == ("batch", "grow", "exp")
    assert "comes out of `exp` in module `grow`" in found.sentence


def test_values_of_the_batch_and_of_the_weights_that_are_not_finite() -> None:
    model = mlp(3, 4, 1)
    good = torch.randn(4, 3)
    bad = good.clone()
    bad[0, 0] = math.nan
    found = judged(model, bad, [good])
    assert (found.kind, found.module, found.operation) == ("batch values", "0", None)  # no operation made it
    said = "The batch itself holds values that are not finite; 1 of 1 other batches are finite on the same weights"
    assert found.sentence.endswith(said)
    assert judged(model, bad, []).sentence.endswith("holds values that are not finite")
    assert judged(model, good, [good]).kind == "finite"
    model[2].weight.data[0, 0] = math.inf
    found = judged(model, good, [good])
    assert (found.kind, found.parameters) == ("weights values", ("2.weight",))


def test_a_loss_function_that_divides_by_zero_is_no_module() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    point = ak.capture(model, optimizer, lambda m, x: (m(x).square() / x.sum()).mean())
    found = not_a_number(
        point.captured.loss, point.captured.state, torch.zeros(3, 2), point.captured.random, [torch.ones(3, 2)]
    )
    assert (found.kind, found.module, found.operation) == ("batch", None, "div")
    assert "comes out of `div` in loss_fn" in found.sentence


class Attention(nn.Module):
    """Rows of which nothing is kept have a softmax of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) @ x.mT).masked_fill(x[:, 0] < 0, -math.inf)
        return self.out(scores.softmax(-1) @ x)


def test_a_module_that_is_given_what_is_not_finite_did_not_make_it() -> None:
    good = torch.randn(4, 3)
    good[0, 0], bad = 1.0, -good.abs()
    found = judged(Attention(), bad, [good])
    assert (found.kind, found.module, found.operation) == ("batch", "Attention", "softmax")
    assert "comes out of `softmax` in module `Attention`" in found.sentence


def test_a_loss_function_that_spoils_what_it_gives_to_the_model() -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    captured = ak.capture(model, optimizer, lambda m, x: m((x - x.mean()) / x.std()).square().mean()).captured
    good, constant = torch.randn(4, 3), torch.ones(4, 3)
    found = not_a_number(captured.loss, captured.state, constant, captured.random, [good])
    assert (found.kind, found.module, found.operation) == ("batch", None, "div")
    assert found.sentence.startswith(
        "the loss is nan; the first value that is not finite comes out of `div` in loss_fn."
    )


def test_a_norm_that_overflows_over_finite_numbers_is_told_as_that(tmp_path: Path) -> None:
    """One step with a learning rate of 200: plain torch has a loss of 1e35, a finite gradient, and an infinite norm."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    draw, optimizer = torch.Generator().manual_seed(3), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) ** 4).mean() + model(x).square().mean()

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=12) as recorder:
        for step in range(26):
            x = torch.randn(32, 10, generator=draw)
            optimizer.param_groups[0]["lr"] = 200.0 if step == 24 else 1e-3
            optimizer.zero_grad()
            loss = loss_fn(model, x)
            loss.backward()
            if step == 25:
                grads = [parameter.grad for parameter in model.parameters()]
            optimizer.step()
            recorder.step(x, loss)
    norm = float(torch.cat([grad.flatten() for grad in grads]).double().norm())
    assert math.isfinite(float(loss) + norm)
    assert math.isinf(float(nn.utils.get_total_norm(grads)))
    found = ak.explain(recorder, 25)
    assert found.verdict.startswith("The gradient norm of step 25 overflows; step 24 is the last finite one. ")
    assert f"its loss is {float(loss):.4g} and every element of its gradient is finite" in found.verdict
    assert f"their norm, {norm:.3g}," in found.verdict
    assert "with the former value the norm of step 25 is finite (replayed)" in found.verdict
    assert (found.hyperparameter, found.skip) == ("lr", [])
