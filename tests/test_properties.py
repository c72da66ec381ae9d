"""Drawn hyperparameters and shapes: the closed form against reverse mode, torch's step against the paper's."""

from __future__ import annotations

import itertools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import aftershock as ak
from aftershock.core.operators import as_rows
from aftershock.core.state import Cotangent, Tangent

from .oracles import StepOracle

groups = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-5, 0.3),
        "betas": st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-6, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.5]),
    }
)


@st.composite
def systems(draw: st.DrawFn) -> tuple[ak.Path, nn.Module, object]:
    """A small network under drawn groups, clipping, warm-up and kind of decay."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=draw(st.booleans())), nn.Tanh()]
    model = nn.Sequential(*layers).double()
    parameters = list(model.parameters())
    cut = draw(st.integers(0, len(parameters) - 1))
    chosen = [p for p in (parameters[:cut], parameters[cut:]) if p]
    options = {"maximize": draw(st.booleans()), "foreach": draw(st.booleans())}
    cls = draw(st.sampled_from([torch.optim.AdamW, torch.optim.Adam]))
    optimizer = cls([{"params": p, **draw(groups)} for p in chosen], **options)
    clip = draw(st.sampled_from([None, 1e-3, 10.0]))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(5, sizes[0]).double(), torch.randn(5, sizes[-1]).double()

    def loss_fn(m: nn.Module, b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (m(b[0]) - b[1]).square().mean()

    for _ in range(draw(st.integers(0, 3))):
        optimizer.zero_grad()
        loss_fn(model, batch()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([batch(), batch()], clip=clip)
    return path, model, loss_fn


slow = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@slow
@given(systems())
def test_closed_form_equals_reverse_mode(system: tuple) -> None:
    path, model, loss_fn = system
    oracle = StepOracle(path, 1, model, loss_fn)
    for found, dense in (
        (path.transition(1), oracle.transition(True)),
        (path.write_in(1), oracle.write_in(True)),
    ):
        scale = dense.abs().max()
        # the derivative of √v amplifies rounding by up to 1/√v; entries are compared with the largest
        assert torch.allclose(found.as_matrix(), dense, rtol=1e-6, atol=1e-9 * float(scale))


@slow
@given(systems(), st.integers(0, 1000))
def test_adjoint_identity(system: tuple, seed: int) -> None:
    path, _, _ = system
    layout = path.point.loss.layout
    generator = torch.Generator().manual_seed(seed)
    u = Tangent(*(layout.expand(torch.randn(2, layout.size, generator=generator).double()) for _ in range(3)))
    w = Cotangent(*(layout.expand(torch.randn(2, layout.size, generator=generator).double()) for _ in range(3)))
    operator = path.transition(1)
    left = as_rows(layout, operator.mv(u)) @ as_rows(layout, w).mT
    right = as_rows(layout, u) @ as_rows(layout, operator.rmv(w)).mT
    assert torch.allclose(left, right, rtol=1e-8, atol=1e-10 * float(left.abs().max()))


@slow
@given(systems())
def test_torchs_step_is_the_papers(system: tuple) -> None:
    """The path's own states against the paper's equations, written out in tests/oracles.py."""
    path, model, loss_fn = system
    oracle = StepOracle(path, 1, model, loss_fn)
    layout, after = path.point.loss.layout, path.trajectory.state(2)
    expected = oracle.step_of(oracle.x).detach()
    found = torch.cat([layout.compact(t) for t in (after.theta, after.m, after.v)])
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-14)
