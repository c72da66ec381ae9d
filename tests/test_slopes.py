"""A probe whose gradient is not its derivative is told: tangent answers and rankings read it by that gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak

from .cases import CASES, make

Batch = tuple[Tensor, Tensor]


def plain(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def counted(model: nn.Module, batch: Batch) -> Tensor:
    """With a term that is counted and not trained."""
    return plain(model, batch) + model(batch[0]).square().mean().detach()


def straight_through(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of rounded outputs, with the gradient of those that are not rounded."""
    out = model(batch[0])
    return F.cross_entropy(out + (out.round() - out).detach(), batch[1])


def path(loss_fn: Callable[[nn.Module, Batch], Tensor], dtype: torch.dtype = torch.float64) -> ak.Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        loss_fn(model, batch(dtype)).backward()
        optimizer.step()
    return ak.capture(model, optimizer, loss_fn).follow([batch(dtype) for _ in range(4)])


def batch(dtype: torch.dtype = torch.float64) -> Batch:
    return torch.randn(16, 4).to(dtype), torch.randint(3, (16,))


def said(certificate: ak.Certificate) -> list[str]:
    return [finding.sentence for finding in certificate.findings if finding.subject == "slope"]


def test_a_gradient_that_is_no_slope_is_told() -> None:
    """The check of Hessian products passes it."""
    followed, probe = path(counted), batch()
    change = followed.replace([batch()])
    (sentence,) = said(change.response(probe, answers=("tangent",)).certificate)
    truth = change.response(probe, answers=("exact", "tangent"), scales=[1e-4])
    off = abs(1 - float((truth.tangent / truth.exact).isel(change=0, scale=0, horizon=-1)))
    assert off > 0.2  # so that it matters, however small the change
    assert f"by {followed.watch(0, probe).slope_error():.0%} less or more" in sentence
    assert said(truth.certificate) == [sentence]
    assert said(change.response(probe, answers=("exact", "semilinear")).certificate) == []  # which read no slope
    assert said(followed.rank([batch() for _ in range(6)], probe).certificate) == [sentence]
    assert len(said(followed.explain(ak.own_loss, outcome=3).certificate)) == 1


def test_a_function_that_rounds_is_told() -> None:
    followed = path(plain)
    probe = ak.Probe(function=lambda model: straight_through(model, held_out))
    held_out = batch()
    assert followed.watch(0, probe).slope_error() > 0.05
    assert followed.watch(0, held_out).slope_error() < 1e-3


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_case_is_told(name: str) -> None:
    """ReLUs, dropout, BatchNorm, rows without a gradient, …"""
    case = make(name)
    assert case.path().watch(0, case.batch()).slope_error() < 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_ordinary_loss_is_not_told(dtype: torch.dtype) -> None:
    followed = path(plain, dtype)
    assert followed.watch(0, batch(dtype)).slope_error() < 0.02
    assert followed.watch(0, ak.own_loss).slope_error() < 0.02
    assert followed.watch(0, lambda model: 1e3 + model[0].weight.square().sum()).slope_error() < 0.02
    assert followed.watch(0, lambda model: 0.0 * model[0].weight.sum()).slope_error() == 0.0
