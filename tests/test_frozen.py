"""The frozen memory model against matrix powers, rational arithmetic, SciPy's filters and dense Jacobians."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter

from aftershock.errors import InvalidInput, NotFinite
from aftershock.report.memory_figure import memory_figure
from aftershock.theory.frozen import FrozenMemory

from .cases import Case, make
from .oracles import StepOracle

H = 24
ROUNDING = 1e-9  # a few dozen float64 operations; modal forms of condition up to 1e6 keep at least this much

drawn = settings(derandomize=True, deadline=None, max_examples=60)


@st.composite
def memories(draw: st.DrawFn, top: float = 1.5) -> FrozenMemory:
    """Any frozen system; m and v have units of their own, as in training."""
    a, b_m, b_v, d_m, d_v = (top * draw(st.integers(-1000, 1000)) / 1000 for _ in range(5))
    unit_m, unit_v = (10.0 ** draw(st.integers(-5, 5)) for _ in range(2))
    betas = [draw(st.floats(0, 0.999)) for _ in range(2)]
    return FrozenMemory(a, b_m * unit_m, b_v * unit_v, d_m / unit_m, d_v / unit_v, *betas)


def dense(memory: FrozenMemory) -> np.ndarray:
    a, b_m, b_v, d_m, d_v, beta1, beta2 = memory.coefficients.values()
    return np.array([[a, b_m, b_v], [d_m, beta1, 0], [d_v, 0, beta2]])


def brute(memory: FrozenMemory, horizons: int) -> np.ndarray:
    """r_k(h) by matrix powers, each from scratch."""
    matrix = dense(memory)
    return np.array([np.linalg.matrix_power(matrix, h)[0, 1:] for h in range(horizons)]).T


def rational(memory: FrozenMemory, horizons: int) -> list[list[Fraction]]:
    """The same without any rounding."""
    matrix = [[Fraction(float(x)) for x in row] for row in dense(memory)]
    row, rows = [Fraction(1), Fraction(0), Fraction(0)], []
    for _ in range(horizons):
        rows.append(row[1:])
        row = [sum((row[i] * matrix[i][j] for i in range(3)), Fraction(0)) for j in range(3)]
    return [list(channel) for channel in zip(*rows)]


def close(found: np.ndarray, truth: np.ndarray, tolerance: float = ROUNDING) -> None:
    np.testing.assert_allclose(found, truth, rtol=tolerance, atol=tolerance * max(np.abs(truth).max(), 1e-300))


# --- responses


@drawn
@given(memories(), st.floats(-10, 10).filter(lambda x: abs(x) > 1e-3))
def test_the_response_is_a_row_of_matrix_powers_scaled_by_the_probe(memory: FrozenMemory, sensitivity: float) -> None:
    found = memory.response(H, sensitivity)
    assert found.dims == ("channel", "horizon")
    assert list(found["horizon"].values) == list(range(1, H + 1))
    for k, truth in zip("mv", brute(memory, H)):
        close(found.sel(channel=k).values, sensitivity * truth)


@drawn
@given(memories())
def test_the_closed_forms_of_the_first_four_horizons(memory: FrozenMemory) -> None:
    found = memory.short_response()
    for k, truth in zip("mv", rational(memory, 4)):
        assert truth[0] == 0  # a write into memory is absent from the parameter at first
        close(found.sel(channel=k).values, np.array([float(x) for x in truth]), 1e-12)


@drawn
@given(memories(1.1))
def test_amplification_conditions_are_equivalent_to_growth(memory: FrozenMemory) -> None:
    found = memory.amplification()
    for k, r in zip("mv", rational(memory, 4)):
        sizes = [abs(x) for x in r]
        for low, high in itertools.pairwise(sizes[1:]):  # rounding cannot decide a tie
            assume(low == high == 0 or abs(float(high - low)) > 1e-9 * float(max(low, high)))
        here = found.sel(channel=k)
        assert bool(here["two_step"]) == (sizes[2] > sizes[1])
        # where r(3) = 0 both conditions of the proposition fail or the second alone decides: the same comparison
        assert bool(here["feedback"]) == (sizes[3] > sizes[2])
        assert bool(here["transient"]) == ((sizes[2] > sizes[1] or sizes[3] > sizes[2]) and memory.stable)


def test_a_stable_system_can_grow_before_it_decays() -> None:
    # positive curvature: the momentum loop returns −0.2, the poles are 0.8 ± 0.44i and 0.9
    memory = FrozenMemory(a=0.7, b_m=-0.1, b_v=-0.02, d_m=2.0, d_v=0.1, beta1=0.9, beta2=0.9)
    largest = max(abs(np.linalg.eigvals(dense(memory))))
    assert largest < 0.95
    assert memory.stable
    assert memory.spectral_radius == pytest.approx(largest)
    found = memory.amplification().sel(channel="m")
    assert bool(found["two_step"])
    assert bool(found["transient"])
    r = abs(brute(memory, 300)[0])
    assert r[2] > 1.5 * r[1]
    assert r[-1] < 1e-6 * r.max()
    assert bool(memory.peak(H).sel(channel="m")["settled"])


def test_the_proposition_with_both_conditions_in_a_stable_system() -> None:
    memory = FrozenMemory(a=0.9, b_m=-0.01, b_v=0.0, d_m=0.3, d_v=0.0, beta1=0.9, beta2=0.99)
    r = abs(brute(memory, 2000)[0])
    assert r[1] < r[2] < r[3]
    assert r[-1] < 1e-8 * r[1]
    found = memory.amplification().sel(channel="m")
    assert memory.stable
    assert all(bool(found[name]) for name in ("two_step", "feedback", "transient"))
    assert not memory.amplification().sel(channel="v").to_array().any()  # b_v = 0: nothing comes out at all


# --- spectrum


@drawn
@given(memories())
def test_characteristic_polynomial_and_poles(memory: FrozenMemory) -> None:
    matrix = dense(memory)
    for z in (0.3, -1.7, 0.5 + 0.8j):
        truth = np.linalg.det(z * np.eye(3) - matrix)
        found = np.polyval(memory.characteristic_polynomial, z)
        scale = 10 + abs(memory.loop_gains).sum()  # of the terms that cancel in either
        assert abs(found - truth) < 1e-10 * float(scale)
    poles = memory.poles
    assert list(abs(poles)) == sorted(abs(poles), reverse=True)
    for power in (1, 2, 3):  # the power sums fix the spectrum, and are well conditioned where it is not
        truth = np.trace(np.linalg.matrix_power(matrix, power))
        size = max(1.0, abs(poles[0]) ** power)
        assert abs((poles**power).sum() - truth) < 1e-9 * size * 3


@drawn
@given(memories(1.0))
def test_stability_is_jurys_criterion(memory: FrozenMemory) -> None:
    _, c2, c1, c0 = np.poly(dense(memory)).real
    margins = [1 + c2 + c1 + c0, 1 - c2 + c1 - c0, 1 - abs(c0), abs(c0**2 - 1) - abs(c0 * c2 - c1)]
    assume(min(abs(margin) for margin in margins) > 1e-6)
    assert memory.stable == (min(margins) > 0)


def test_without_feedback_the_poles_are_the_uncoupled_ones() -> None:
    memory = FrozenMemory(a=-0.5, b_m=3.0, b_v=0.0, d_m=0.0, d_v=7.0, beta1=0.9, beta2=0.99)
    assert not memory.loop_gains.any()
    close(memory.poles, np.array([0.99, 0.9, -0.5]))
    shifted = replace(memory, d_m=0.01).poles
    assert np.abs(shifted - memory.poles).max() > 1e-3


@drawn
@given(memories(), st.complex_numbers(min_magnitude=0.01, max_magnitude=4))
def test_transfer_functions_are_the_resolvent(memory: FrozenMemory, z: complex) -> None:
    matrix = z * np.eye(3) - dense(memory)
    unit = np.array([1, abs(memory.b_m) or 1, abs(memory.b_v) or 1])  # m and v in units of the parameter
    assume(np.linalg.cond(matrix * unit[:, None] / unit) < 1e5)
    truth = np.linalg.solve(matrix, np.eye(3))[0, 1:]
    found = memory.transfer(z)
    for k, value in zip("mv", truth):
        assert abs(complex(found.sel(channel=k)) - value) <= 1e-7 * abs(value) + 1e-300


@drawn
@given(memories())
def test_the_impulse_response_of_the_transfer_function_is_the_response(memory: FrozenMemory) -> None:
    impulse = np.zeros(H + 1)
    impulse[0] = 1
    for k, truth in zip("mv", brute(memory, H)):
        top, bottom = memory.transfer_polynomials(k)
        padded = np.concatenate([np.zeros(4 - len(top)), top])  # as polynomials in 1/z of the same length
        close(lfilter(padded, bottom, impulse)[1:], truth, 1e-7)


# --- modes


@drawn
@given(memories())
def test_modes_give_the_response_and_every_bound_holds(memory: FrozenMemory) -> None:
    modes, bounds, truth = memory.modes(), memory.bounds(H), brute(memory, H)
    assume(not modes["reason"].item())
    powers = modes["pole"].values[:, None] ** np.arange(H)
    for i, k in enumerate("mv"):
        residues = modes["residue"].sel(channel=k).values
        modal, norm = (bounds[name].sel(channel=k).values for name in ("modal", "norm"))
        # condition 1e6 times the rounding of the eigenvectors, 1e-16, with room; a residue that should be zero is not
        slack = 1e-9 * abs(residues).sum() * memory.spectral_radius ** np.arange(H) + 1e-300
        assert (abs((residues @ powers).real - truth[i]) <= slack).all()
        assert (abs((residues @ powers).imag) <= slack).all()  # conjugate pairs
        assert (abs(truth[i]) <= modal + slack).all()
        assert (modal <= norm * (1 + 1e-9) + 1e-300).all()
        assert (norm <= bounds["condition"].values * (1 + 1e-9)).all()
    # κ₂ of this V, by singular values rather than by the two norms
    _, vectors = np.linalg.eig(dense(memory))
    assert float(modes["condition"]) >= 1 - 1e-12
    if np.linalg.cond(vectors) < 1e4:
        assert float(modes["condition"]) == pytest.approx(np.linalg.cond(vectors), rel=1e-3)


DEFECTIVE = {
    "a chain m → θ at one pole": FrozenMemory(0.9, 1.0, 0.0, 0.0, 0.0, 0.9, 0.5),
    "a chain so weak that it looks like none": FrozenMemory(0.9, 1e-12, 0.0, 0.0, 0.0, 0.9, 0.5),
    "a chain θ → v at one pole": FrozenMemory(0.75, 0.0, 0.0, 0.0, 3.0, 0.9, 0.75),
    "a loop whose two poles meet": FrozenMemory(0.5, 0.25, 0.0, -0.25, 0.0, 0.0, 0.9),
    "the same in the units of training": FrozenMemory(0.5, -256.0, 0.0, 2.0**-12, 0.0, 0.0, 0.9),
    # p(λ) = (λ − 1/2)³ with β = (0, 1/4): the residues of p at β1 and β2 give the loops −1/2 and 1/16
    "three poles in one": FrozenMemory(1.25, 1.0, 1.0, -0.5, 0.0625, 0.0, 0.25),
}


@pytest.mark.parametrize("name", DEFECTIVE)
def test_a_defective_matrix_has_no_modal_form_and_says_so(name: str) -> None:
    memory = DEFECTIVE[name]
    matrix = dense(memory)
    # a multiple pole with fewer eigenvectors than its multiplicity, by hand: rank of Ā − λI in rational numbers
    double = {"three poles in one": 0.5}.get(name, 0.25 if "loop" in name or "units" in name else memory.a)
    characteristic = np.poly(matrix).real
    assert abs(np.polyval(characteristic, double)) < 1e-12
    assert abs(np.polyval(np.polyder(characteristic), double)) < 1e-12
    assert _rank(matrix - double * np.eye(3)) == 2
    modes = memory.modes()
    assert "defective" in modes["reason"].item()
    assert np.isnan(modes["residue"].values).all()
    assert math.isnan(modes["condition"])
    bounds = memory.bounds(H)
    assert "defective" in bounds["reason"].item()
    assert all(np.isnan(bounds[key].values).all() for key in ("modal", "norm", "condition"))
    # everything that needs no modal form still answers
    close(memory.response(H).values, brute(memory, H))
    close(np.sort(memory.poles.real), np.sort(np.linalg.eigvals(matrix).real), 1e-4)
    settled = memory.peak(H)["settled"]
    assert settled.values.tolist() == [memory.b_m == 0, memory.b_v == 0]


def _rank(matrix: np.ndarray) -> int:
    """Row reduction in rational numbers: small entries are not taken for zeros."""
    rows, rank = [[Fraction(float(x)) for x in row] for row in matrix], 0
    for column in range(3):
        pivot = next((i for i in range(rank, 3) if rows[i][column] != 0), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, 3):
            factor = rows[i][column] / rows[rank][column]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[rank])]
        rank += 1
    return rank


def test_a_double_pole_with_two_eigenvectors_has_a_modal_form() -> None:
    memory = FrozenMemory(0.9, 0.0, 0.1, 0.0, 0.2, 0.9, 0.9)
    assert memory.modes()["reason"].item() == ""
    diagonal = FrozenMemory(0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5)
    assert float(diagonal.modes()["condition"]) == pytest.approx(1.0)


def test_the_units_of_memory_do_not_hide_a_modal_form() -> None:
    """Well separated poles; the eigenvectors look parallel only because m is counted in tiny units."""
    plain = FrozenMemory(0.7, 0.1, 0.02, 0.1, 0.03, 0.7, 0.99)
    small = replace(plain, b_m=plain.b_m * 1e9, d_m=plain.d_m / 1e9)
    assert np.linalg.cond(np.linalg.eig(dense(small))[1]) > 1e6
    close(small.poles, plain.poles)
    found, truth = (x.modes()["residue"].sel(channel="m").values for x in (small, plain))
    close(found, truth * 1e9)


@drawn
@given(memories())
def test_a_normal_matrix_has_condition_one(memory: FrozenMemory) -> None:
    symmetric = replace(memory, b_m=memory.d_m, b_v=memory.d_v)
    matrix = dense(symmetric)
    np.testing.assert_array_equal(matrix, matrix.T)
    # vectors of eigenvalues that are close are known to a rounding over their distance
    gap = np.diff(np.linalg.eigvalsh(matrix)).min()
    known = 1e-9 + 10 * np.finfo(float).eps / max(gap, 1e-9)
    assert float(symmetric.modes()["condition"]) == pytest.approx(1.0, abs=known)
    a = symmetric.beta1
    rotating = replace(symmetric, a=a, beta2=a, b_m=-symmetric.d_m, b_v=-symmetric.d_v)
    assert float(rotating.modes()["condition"]) == pytest.approx(1.0, abs=1e-9)


def test_nonnormality_enlarges_the_response_of_decaying_modes() -> None:
    memory = FrozenMemory(a=0.9, b_m=-50.0, b_v=0.0, d_m=0.0, d_v=0.0, beta1=0.8, beta2=0.5)
    modes = memory.modes()
    assert memory.stable
    assert float(modes["condition"]) > 100
    # two decaying modes of opposite residues ±50/0.1 interfere: zero at first, far above |b_m| later
    close(np.sort(modes["residue"].sel(channel="m").values.real), np.array([-500.0, 0.0, 500.0]))
    peak = memory.peak(H).sel(channel="m")
    assert float(peak["peak"]) > 2.5 * 50
    assert bool(peak["delayed"])
    assert int(peak["peak_horizon"]) > 2


# --- peak


@drawn
@given(memories(0.8), st.sampled_from([1.0, -2.5]))
def test_the_peak_is_the_earliest_of_all_horizons_where_it_is_settled(memory: FrozenMemory, sensitivity: float) -> None:
    assume(memory.spectral_radius < 0.999)
    found, truth = memory.peak(H, sensitivity), sensitivity * brute(memory, 4 * H)
    for i, k in enumerate("mv"):
        here, first = found.sel(channel=k), int(np.argmax(abs(truth[i][:H])))
        top = abs(truth[i][first])
        ties = np.sum(abs(truth[i][:H]) > top * (1 - 1e-9)) > 1  # rounding picks among equal peaks
        assert float(here["peak"]) == pytest.approx(top, rel=1e-9)
        assert ties or int(here["peak_horizon"]) == first + 1
        assert ties or int(here["peak_sign"]) == np.sign(truth[i][first])
        if bool(here["settled"]):
            assert abs(truth[i]).max() <= top * (1 + 1e-9)


def test_a_peak_that_is_still_growing_is_not_settled() -> None:
    slow = FrozenMemory(a=0.99, b_m=-1.0, b_v=0.0, d_m=0.0, d_v=0.0, beta1=0.98, beta2=0.5)
    assert not bool(slow.peak(20).sel(channel="m")["settled"])
    found = slow.peak(400).sel(channel="m")
    assert bool(found["settled"])
    assert int(found["peak_horizon"]) == int(np.argmax(abs(brute(slow, 400)[0]))) + 1 > 20
    unstable = replace(slow, a=1.01)
    assert not unstable.stable
    assert unstable.peak(400)["settled"].values.tolist() == [False, True]
    assert bool(slow.peak(20).sel(channel="v")["settled"])  # b_v = 0: zero at every horizon


# --- from scalars


@drawn
@given(
    st.floats(-3, 3), st.floats(1e-8, 3), st.floats(-3, 3), st.floats(-5, 5), st.integers(1, 300),
    st.floats(0.01, 0.99), st.floats(0.01, 0.9999), st.floats(1e-5, 0.1), st.floats(0, 0.5),
)  # fmt: skip
def test_scalars_make_the_jacobian_of_the_scalar_recursion(
    m: float, v: float, g: float, curvature: float, s: int, beta1: float, beta2: float, lr: float, decay: float
) -> None:
    rho1, rho2, eps = 1 - beta1**s, 1 - beta2**s, 1e-8
    m_new, v_new = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    d = math.sqrt(v_new / rho2) + eps
    dq_dm = -lr / (rho1 * d)
    dq_dv = lr * (m_new / rho1) / (2 * rho2 * math.sqrt(v_new / rho2) * d**2)
    memory = FrozenMemory.of_scalars(
        retention=1 - lr * decay, dq_dm=dq_dm, dq_dv=dq_dv,
        dtheta_dg=(1 - beta1) * dq_dm + 2 * (1 - beta2) * dq_dv * g,
        curvature=curvature, gradient=g, beta1=beta1, beta2=beta2,
    )  # fmt: skip

    def step(x: torch.Tensor) -> torch.Tensor:
        theta, m, v = x
        grad = g + curvature * theta
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        return torch.stack([(1 - lr * decay) * theta - lr * (m / rho1) / ((v / rho2).sqrt() + eps), m, v])

    truth = torch.autograd.functional.jacobian(step, torch.tensor([0.0, m, v], dtype=torch.float64)).numpy()
    np.testing.assert_allclose(memory.matrix, truth, rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(memory.matrix, dense(memory))
    signs = memory.loop_signs()
    assert int(signs.sel(channel="m")) == -np.sign(curvature)
    assert int(signs.sel(channel="v")) == np.sign(m_new) * np.sign(g) * np.sign(curvature)


# --- from a real step


def block_diagonals(oracle: StepOracle, transition: torch.Tensor) -> np.ndarray:
    """Ā of every coordinate, [coordinate, 3, 3], out of a dense Jacobian."""
    d = oracle.layout.size
    blocks = transition.reshape(3, d, 3, d).permute(0, 2, 1, 3)
    return torch.diagonal(blocks, dim1=2, dim2=3).permute(2, 0, 1).numpy()


def systems(name: str, step: int = 1):  # type: ignore[no-untyped-def]
    case = make(name)
    path = case.path(3)
    oracle = StepOracle(path, step, case.model, case.loss_fn)
    smooth = bool(path.point.loss.layout.compact(path.trajectory.state(step + 1).v).all())
    return path, block_diagonals(oracle, oracle.transition(smooth)), ROUNDING if smooth else 1e-5


@pytest.mark.parametrize("name", ["quadratic", "clipped", "adam_coupled", "maximize", "untouched_rows"])
def test_a_coordinate_of_a_step_is_the_diagonal_of_the_dense_transition(name: str) -> None:
    path, truth, tolerance = systems(name)
    d = len(truth)
    for i in {0, d // 3, d - 1}:
        found = FrozenMemory.of(path, 1, i).matrix
        np.testing.assert_allclose(found, truth[i], rtol=tolerance, atol=tolerance * abs(truth[i]).max())
        assert abs(found[1, 0]) + abs(found[0, 1]) > 0
    found = FrozenMemory.of(path, 1, slice(1, d)).matrix  # more coordinates than products at once
    truth = truth[1:].mean(0)
    np.testing.assert_allclose(found, truth, rtol=tolerance, atol=tolerance * abs(truth).max())


def test_coordinates_have_names() -> None:
    path, truth, _ = systems("two_groups")
    layout = path.point.loss.layout
    flat = dict(zip(layout.names, np.split(np.arange(layout.size), np.cumsum(layout.sizes)[:-1])))
    rows = flat["0.weight"].reshape(5, 4)
    close(FrozenMemory.of(path, 1, ("0.weight", (2, 3))).matrix, truth[rows[2, 3]])
    close(FrozenMemory.of(path, 1, ("0.weight", 2)).matrix, truth[rows[2]].mean(0))
    close(FrozenMemory.of(path, 1, ("2.bias", slice(1, None))).matrix, truth[flat["2.bias"][1:]].mean(0))
    close(FrozenMemory.of(path, -2, "0.bias").matrix, truth[flat["0.bias"]].mean(0))
    close(FrozenMemory.of(path, 1, -1).matrix, truth[-1])


def test_the_estimate_over_a_range_is_unbiased() -> None:
    path, truth, _ = systems("quadratic")
    generator = torch.Generator().manual_seed(0)
    singles = [FrozenMemory.estimate(path, 1, "theta", samples=1, generator=generator).matrix for _ in range(300)]
    exact, error = truth.mean(0), np.std(singles, axis=0) / math.sqrt(len(singles))
    assert error[0, 0] > 0
    assert (abs(np.mean(singles, axis=0) - exact) <= 4 * error + 1e-12).all()
    many = FrozenMemory.estimate(path, 1, "theta", samples=40, generator=generator).matrix
    assert (abs(many - exact) <= 5 * np.std(singles, axis=0) / math.sqrt(40) + 1e-12).all()
    with pytest.raises(InvalidInput, match="at least one sample"):
        FrozenMemory.estimate(path, 1, "theta", samples=0, generator=generator)


# --- what cannot be frozen


def test_coefficients_that_are_not_finite_are_named() -> None:
    good = FrozenMemory(0.9, -1.0, 0.1, 0.1, 0.1, 0.9, 0.99)
    for name, value in (("a", math.nan), ("b_v", math.inf), ("d_m", -math.inf)):
        with pytest.raises(NotFinite, match=f"coefficient {name} is"):
            replace(good, **{name: value})
    for value in (1.0, -0.1):
        with pytest.raises(InvalidInput, match="beta2 must be"):
            replace(good, beta2=value)


def test_bad_questions_get_named_answers() -> None:
    memory = FrozenMemory(2.0, -1.0, 0.0, 0.0, 0.0, 0.5, 0.25)
    with pytest.raises(InvalidInput, match="first horizon is 1"):
        memory.response(0)
    with pytest.raises(InvalidInput, match="first horizon is 1"):
        memory.bounds(0)
    for sensitivity in (0.0, math.nan):
        with pytest.raises(InvalidInput, match="sensitivity"):
            memory.response(3, sensitivity)
    with pytest.raises(InvalidInput, match="is a pole"):
        memory.transfer(0.5)
    with pytest.raises(InvalidInput, match="channels are m and v"):
        memory.transfer_polynomials("theta")
    with pytest.raises(NotFinite, match=r"overflows at horizon 10\d\d: .* radius .* is 2"):
        memory.response(5000)


def test_coordinates_that_do_not_exist_are_named() -> None:
    path = make("two_groups").path(2)
    size = path.point.loss.layout.size
    for coordinate, message in (
        (size, "names no coordinate"),
        (slice(size, None), "holds no coordinate"),
        (("0.weight", (9, 0)), "names no coordinate"),
        (("0.weight", 1.5), "names no coordinate"),
        (("0.weight", 1, 2), "names no coordinate"),
        ("3.weight", "'3.weight' is not a trainable parameter"),
        (slice(None), "different betas"),
    ):
        with pytest.raises(InvalidInput, match=message):
            FrozenMemory.of(path, 0, coordinate)
    with pytest.raises(InvalidInput, match="not on this path"):
        FrozenMemory.of(path, 2, 0)


def test_a_parameter_without_gradient_cannot_be_frozen() -> None:
    case: Case = make("unused_parameters")  # warmed by five batches: the next one leaves b out
    path = case.path(2)
    FrozenMemory.of(path, 1, "b.bias")
    with pytest.raises(InvalidInput, match=r"step 0 .* no gradient"):
        FrozenMemory.of(path, 0, "b.bias")


def test_a_coordinate_without_a_derivative_cannot_be_frozen() -> None:
    case = make("untouched_rows")
    weight = case.model.embed.weight
    case.optimizer.state[weight]["exp_avg"][5] = 0.1  # a hybrid state: v = 0 but m ≠ 0
    path = case.path(2)
    FrozenMemory.of(path, 0, ("embed.weight", 4))
    with pytest.raises(NotFinite, match="no derivative at 3 of these"):
        FrozenMemory.of(path, 0, ("embed.weight", 5))


# --- the picture


def test_the_figure_shows_both_responses_and_the_poles() -> None:
    memory = FrozenMemory(a=0.9, b_m=-1.0, b_v=20.0, d_m=0.12, d_v=0.002, beta1=0.9, beta2=0.99)
    figure = memory_figure(memory, 30)
    curves = [trace for trace in figure.data if trace.hovertemplate and "h = %{x}" in trace.hovertemplate]
    for trace, truth in zip(curves, brute(memory, 30), strict=True):
        close(np.array(trace.y), truth)
    poles = next(trace for trace in figure.data if trace.name == "poles")
    found = np.sort_complex(np.array(poles.x) + 1j * np.array(poles.y))
    close(found, np.sort_complex(np.linalg.eigvals(dense(memory))))
    circle = next(trace for trace in figure.data if trace.name == "unit circle")
    np.testing.assert_allclose(np.hypot(circle.x, circle.y), 1.0)
    words = [trace.text for trace in figure.data if trace.mode == "markers+text"]
    peaks = abs(brute(memory, 30)).argmax(1) + 1
    assert all(f"at h = {h}" in text for h, text in zip(peaks, words, strict=True))
    assert "not stable" in figure.layout.annotations[1].text
    assert "poles: stable" in memory_figure(replace(memory, d_v=0.0)).layout.annotations[1].text
    silent = memory_figure(replace(memory, b_v=0.0)).data
    assert [len(trace.x) for trace in silent if trace.mode == "markers+text"] == [1, 0]
