"""G = cᵀ Φ B does not depend on the coordinates in which the joint state, or the input, is written."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.operators import as_rows, readout

H = 4
drawn = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def systems(draw: st.DrawFn) -> tuple[ak.Path, object, torch.Generator]:
    """A small network with warm moments under drawn hyperparameters and clipping."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=draw(st.floats(1e-4, 1e-1)),
        betas=(draw(st.floats(0.0, 0.95)), draw(st.floats(0.5, 0.999))),
        eps=draw(st.sampled_from([1e-6, 1e-3])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
    )
    clip = draw(st.sampled_from([None, 0.1]))

    def batch() -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(6, n, generator=generator).double() for n in (2, 1))  # type: ignore[return-value]

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        return (m(b[0]) - b[1]).square().mean()

    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model, batch()).backward()
        optimizer.step()
    path = ak.capture(model, optimizer, loss_fn).follow([batch() for _ in range(H)], clip=clip)
    return path, batch(), generator


def invertible(size: int, generator: torch.Generator, spread: float) -> Tensor:
    """Q1 diag(e^{±spread}) Q2: a dense change of coordinates whose condition number is at most e^{2 spread}."""
    q1, q2 = (torch.linalg.qr(torch.randn(size, size, generator=generator).double())[0] for _ in range(2))
    scales = torch.exp(spread * (2 * torch.rand(size, generator=generator).double() - 1))
    return q1 @ torch.diag(scales) @ q2


def dense_factors(path: ak.Path, probe: object) -> tuple[Tensor, list[Tensor], Tensor]:
    """B, A_1 … A_{H−1} and the readouts c_1 … c_H as matrices, each from the engine's own operator."""
    layout = path.point.loss.layout
    transitions = [path.transition(h).as_matrix() for h in range(1, H)]
    readouts = as_rows(layout, readout(path.response_operator(probe).readouts))
    return path.write_in(0).as_matrix(), transitions, readouts


def input_output(write: Tensor, transitions: list[Tensor], readouts: Tensor) -> Tensor:
    rows, state = [], write
    for h in range(H):
        rows.append(readouts[h] @ state)
        state = transitions[h] @ state if h < H - 1 else state
    return torch.stack(rows)


@drawn
@given(systems(), st.floats(0.0, 3.0))
def test_response_operator_is_invariant(system: tuple, spread: float) -> None:
    """x̃_s = T_s x_s with another T_s at every time, ξ̃ = R ξ: G̃ R = G, and it is the engine's G."""
    path, probe, generator = system
    write, transitions, readouts = dense_factors(path, probe)
    size, inputs = write.shape
    changes = [invertible(size, generator, spread) for _ in range(H)]
    back = [torch.linalg.inv(change) for change in changes]
    of_input = invertible(inputs, generator, spread)
    moved = input_output(
        changes[0] @ write @ torch.linalg.inv(of_input),
        [changes[h + 1] @ transitions[h] @ back[h] for h in range(H - 1)],
        torch.stack([readouts[h] @ back[h] for h in range(H)]),
    )
    engine = path.response_operator(probe).as_matrix()
    assert engine.norm() > 0
    # float64 through H coordinate changes of condition e^{2·spread} ≤ 400: measured ≤ 1e-9
    torch.testing.assert_close(moved @ of_input, engine, rtol=0, atol=1e-8 * float(engine.norm()))


@drawn
@given(systems(), st.floats(0.5, 3.0))
def test_state_gain_is_not_invariant(system: tuple, spread: float) -> None:
    """The paper's contrast: rescaling the moment blocks changes ‖B‖ and leaves G alone."""
    path, probe, _ = system
    write, transitions, readouts = dense_factors(path, probe)
    d = path.point.loss.layout.size
    scale = torch.ones(3 * d, dtype=torch.float64)
    scale[d:] = torch.exp(torch.tensor(spread))
    moved = input_output(
        scale[:, None] * write, [scale[:, None] * a / scale for a in transitions], readouts / scale[None]
    )
    engine = path.response_operator(probe).as_matrix()
    torch.testing.assert_close(moved, engine, rtol=1e-9, atol=1e-11 * float(engine.abs().max()))
    assert (scale[:, None] * write).norm() > 1.01 * write.norm()
