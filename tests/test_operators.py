"""Every operator against every case: dense parity, adjoint identity, linearity, one vector or many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aftershock.core.operators import as_rows, readout
from aftershock.core.state import Cotangent, Tangent

from .cases import CASES, make
from .oracles import StepOracle

H = 3
SMOOTH = 1e-9  # reverse-mode against closed form in float64: rounding of a few hundred operations
DIFFERENCE = 1e-5  # central differences: truncation h² f''' and rounding 1e-16 / h, h from 1e-6 to 1e-10


class System:
    """A case with its path and the dense oracles of its steps."""

    def __init__(self, name: str) -> None:
        self.case = make(name)
        self.path = self.case.path(H + 1)
        self.probe = self.case.batch()
        self.layout = self.path.point.loss.layout
        # autograd through sqrt gives NaN where v = 0, and a checkpointed model cannot be differentiated
        # outside functional_call: there central differences are the oracle
        self.exact_oracle = name != "checkpointed" and all(
            self.layout.compact(self.path.trajectory.state(h).v).all() for h in range(1, H + 2)
        )
        self.tolerance = SMOOTH if self.exact_oracle else DIFFERENCE

    def oracle(self, at: int) -> StepOracle:
        return StepOracle(self.path, at, self.case.model, self.case.loss_fn)

    def dense_transition(self, at: int) -> Tensor:
        return self.oracle(at).transition(self.exact_oracle)

    def dense_readouts(self) -> Tensor:
        rows = []
        for h in range(1, H + 2):
            oracle = StepOracle.__new__(StepOracle)
            oracle.layout, oracle.step, oracle.state = (
                self.layout,
                self.path.steps[0],
                self.path.trajectory.state(h),
            )
            oracle.model, oracle.loss_fn = self.case.model, self.case.loss_fn
            theta = self.layout.compact(oracle.state.theta)
            grads = oracle.gradients(theta, batch=self.probe)
            flat = [theta.new_zeros(n) if g is None else g.reshape(-1) for g, n in zip(grads, self.layout.sizes)]
            rows.append(torch.cat([torch.cat(flat), theta.new_zeros(2 * self.layout.size)]))
        return torch.stack(rows)


def write_in(s: System):  # type: ignore[no-untyped-def]
    return s.path.write_in(0), s.oracle(0).write_in(s.exact_oracle)


def transition(s: System):  # type: ignore[no-untyped-def]
    return s.path.transition(1), s.dense_transition(1)


def propagate(s: System):  # type: ignore[no-untyped-def]
    return s.path.propagate(1, 3), s.dense_transition(2) @ s.dense_transition(1)


def response(s: System):  # type: ignore[no-untyped-def]
    operator = s.path.response_operator(s.probe, at=0)
    state, rows, readouts = s.oracle(0).write_in(s.exact_oracle), [], s.dense_readouts()
    for h in range(H + 1):
        rows.append(readouts[h] @ state)
        if h < H:
            state = s.dense_transition(h + 1) @ state
    return operator, torch.stack(rows)


OPERATORS = {f.__name__: f for f in (write_in, transition, propagate, response)}
BOTH = [(case, operator) for case in CASES for operator in OPERATORS]


@pytest.fixture(scope="module")
def systems() -> dict[str, System]:
    return {}


@pytest.fixture
def system(request: pytest.FixtureRequest, systems: dict[str, System]) -> System:
    name = request.param
    if name not in systems:
        systems[name] = System(name)
    return systems[name]


def random_like(basis: object, rows: int, seed: int, dual: bool = False) -> object:
    """Random rows of the space that a basis spans."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(basis, Tensor):
        return torch.randn(rows, len(basis), generator=generator, dtype=basis.dtype) @ basis
    weights = torch.randn(rows, len(basis.theta), generator=generator, dtype=basis.theta.dtype)
    kind = Cotangent if dual else Tangent
    return kind(weights @ basis.theta, weights @ basis.m, weights @ basis.v)


def random_dual(operator: object, system: System, rows: int, seed: int) -> object:
    """Random rows of the dual of the operator's codomain."""
    out = operator.mv(random_like(operator.domain_basis(), 1, 0))
    generator = torch.Generator().manual_seed(seed)
    if isinstance(out, Tensor):
        return torch.randn(rows, out.shape[-1], generator=generator, dtype=out.dtype)
    d = system.layout.size
    return Cotangent(
        *(system.layout.expand(torch.randn(rows, d, generator=generator, dtype=out.theta.dtype)) for _ in range(3))
    )


@pytest.mark.parametrize(("system", "name"), BOTH, indirect=["system"])
def test_operator_against_dense_jacobian(system: System, name: str) -> None:
    operator, dense = OPERATORS[name](system)
    assert dense.norm() > 0
    assert torch.isfinite(dense).all()
    error = (operator.as_matrix() - dense).norm() / dense.norm()
    assert error < system.tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize(("system", "name"), BOTH, indirect=["system"])
def test_adjoint_identity(system: System, name: str) -> None:
    """⟨A u, w⟩ = ⟨u, Aᵀ w⟩, to rounding of the sums."""
    operator, _ = OPERATORS[name](system)
    u = random_like(operator.domain_basis(), 3, 1)
    w = random_dual(operator, system, 2, 2)
    forward = as_rows(system.layout, operator.mv(u))
    backward = as_rows(system.layout, operator.rmv(w))
    left = forward @ as_rows(system.layout, w).mT
    right = as_rows(system.layout, u) @ backward.mT
    assert left.norm() > 0
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-10 * float(left.norm()))


@pytest.mark.parametrize(("system", "name"), BOTH, indirect=["system"])
def test_linear_and_batched_and_inputs_unchanged(system: System, name: str) -> None:
    operator, _ = OPERATORS[name](system)
    u = random_like(operator.domain_basis(), 2, 3)
    before = as_rows(system.layout, u).clone()
    both = as_rows(system.layout, operator.mv(u))
    assert torch.equal(as_rows(system.layout, u), before)
    alone = [as_rows(system.layout, operator.mv(u[i])) for i in range(2)]
    torch.testing.assert_close(both, torch.stack(alone), rtol=1e-10, atol=1e-14 * float(both.norm()))
    combined = as_rows(system.layout, operator.mv(u[0] * 2.0))
    torch.testing.assert_close(combined, 2 * alone[0], rtol=1e-9, atol=1e-12 * float(both.norm()))
    w = random_dual(operator, system, 2, 4)
    dual_before = as_rows(system.layout, w).clone()
    transposed = as_rows(system.layout, operator.T.mv(w))
    assert torch.equal(as_rows(system.layout, w), dual_before)
    one = as_rows(system.layout, operator.rmv(w[0]))
    torch.testing.assert_close(transposed[0], one, rtol=1e-9, atol=1e-12 * float(transposed.norm()))


@pytest.mark.parametrize("system", ["tanh_mlp"], indirect=True)
def test_transposes_and_views(system: System) -> None:
    operator, dense = OPERATORS["transition"](system)
    assert operator.T.T is operator
    torch.testing.assert_close(operator.T.as_matrix(), operator.as_matrix().mT)
    identity = system.path.propagate(2, 2).as_matrix()
    assert torch.equal(identity, torch.eye(len(dense), dtype=dense.dtype))
    c = readout(system.layout.zeros(1))
    assert not c.m.any()
    assert not c.v.any()


@pytest.mark.parametrize("system", ["tanh_mlp", "clipped"], indirect=True)
def test_powers_of_a_transition(system: System) -> None:
    operator, dense = OPERATORS["transition"](system)
    start = random_like(operator.domain_basis(), 2, 5)
    before = as_rows(system.layout, start).clone()
    for k, power in zip(range(4), operator.powers(start)):
        expected = before @ torch.linalg.matrix_power(dense, k).mT
        assert (as_rows(system.layout, power) - expected).norm() < 4 * system.tolerance * expected.norm()
    assert torch.equal(as_rows(system.layout, start), before)


def test_write_in_at_zero_v_is_the_closed_slope() -> None:
    """Where no gradient ever came the write-in's slope is −η(1−β1)/(ρ1 ε); autograd gives NaN there."""
    system = System("untouched_rows")
    control = system.path.control(0)
    zero = system.layout.compact(control.linear.zero_v.double()).bool()
    assert zero.sum() == 2 * 3  # two rows of three
    hyper = system.path.steps[0].hypers[0]
    count = system.path.trajectory.state(0).counts[0] + 1
    slope = -hyper.lr * (1 - hyper.beta1) / ((1 - hyper.beta1**count) * hyper.eps)
    diagonal = system.path.write_in(0).as_matrix()[: system.layout.size].diagonal()
    torch.testing.assert_close(diagonal[zero], torch.full_like(diagonal[zero], slope))
    assert not system.layout.compact(control.linear.broken.double()).any()
