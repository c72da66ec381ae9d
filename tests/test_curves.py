"""Curves of a batch's gradient, coordinate by coordinate, against AdamW's own steps over a dense scan of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import aftershock as ak
from aftershock.core import curves
from aftershock.core.changes import ControlStep
from aftershock.core.curves import NOTHING, Curves, Sweep, folded
from aftershock.core.scores import adjoint

from .cases import Case, cross_entropy, mlp

CPU = torch.device("cpu")
BETA2 = 0.99
UNUSED = 4  # inputs that are always zero: their weights have v = 0
DENSE = torch.linspace(-1.0, 1.0, 41, dtype=torch.float64)


def trained(eps: float, beta2: float = BETA2) -> tuple[ak.Path, Tensor]:
    """Inputs of different sizes: √v̂ goes from 1e-3 to 1e-1."""
    torch.manual_seed(0)
    sizes = torch.logspace(-1, 0, 32, dtype=torch.float64)
    sizes[:UNUSED] = 0
    model = mlp(32, 8, 3).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, beta2), eps=eps)
    case = Case(
        "sizes", model, optimizer, cross_entropy, lambda: (sizes * torch.randn(16, 32), torch.randint(3, (16,)))
    )
    case.train(case.batches(40))
    return case.path(6), case.batch()


def swept(path: ak.Path, probe: Tensor) -> tuple[ControlStep, Sweep]:
    watch = path.watch(0, probe)
    found = adjoint(watch, watch.slope, watch.range, CPU)
    return path.control(0), Sweep(path.trajectory, found.first, found.history)


@pytest.mark.parametrize("eps", [1e-8, 1e-4, 1e-3, 1e-2, 1e-1])
def test_curves_hold_for_every_eps(eps: float) -> None:
    """Nine coordinates of ten have a curve, right up to R, the gradient at which v doubles."""
    control, sweep = swept(*trained(eps))
    found = Curves.of(control, sweep)
    kept, used = found.reach.edge > NOTHING, control.before.v > 0
    assert not (kept & ~used).any()
    assert int(kept.sum()) > 0.9 * int(used.sum())
    scan = DENSE[:, None] * (control.before.v * (BETA2 / (1 - BETA2))).sqrt()
    truth = folded(control, sweep, scan)[..., kept]

    def drawn(g: Tensor) -> Tensor:
        return (found.sine * g + found.cosine) / (found.reach.square + g.square()).sqrt()

    error = (drawn(scan[:, None]) - drawn(found.reach.own))[..., kept] - truth
    assert float(error.norm()) < 0.05 * float(truth.norm())
    largest = error.abs().amax(0) / truth.abs().amax(0)
    assert float(largest.quantile(0.99)) < 0.1  # the judged point allows half of it, in the middle of the scan
    assert float(largest.median()) < 0.02


def test_what_has_no_curve_does_not_loosen_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much an outcome depends on weights with v = 0, the same curves are good enough elsewhere."""
    control, sweep = swept(*trained(1e-8, beta2=0.9))
    used = control.before.v > 0
    monkeypatch.setattr(curves, "ALLOWED", 0.005)
    kept = Curves.of(control, sweep).reach.edge > NOTHING
    assert 0.2 * int(used.sum()) < int(kept.sum()) < 0.8 * int(used.sum()), "the test needs curves of both kinds"
    sweep.first.theta[:, ~used] = 1e30
    assert torch.equal(Curves.of(control, sweep).reach.edge > NOTHING, kept)
