"""The table of scores: every definition against dense matrices, and what the table costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

import aftershock as ak
from aftershock.core.footprint import Curvature
from aftershock.core.graphs import GradientGraph
from aftershock.core.loss import LossFunction
from aftershock.errors import HiddenState, InvalidInput, OutOfMemory
from aftershock.theory.baselines import SCORES, STATIC, TRAJECTORIES, readout_null, scores

from .cases import advised, make
from .oracles import reverse_jacobian
from .test_operators import H, System

N = 3
DENSE = ("tanh_mlp", "two_groups", "adam_coupled", "clipped", "maximize", "accumulated")


@pytest.fixture(scope="module", params=DENSE)
def dense(request: pytest.FixtureRequest) -> tuple[System, dict[str, np.ndarray], Any]:
    """A system, its trajectories [change, horizon] by dense matrices, and the table."""
    system = System(request.param)
    assert system.exact_oracle
    change = system.path.replace(system.case.batches(N))
    own, d = system.oracle(0), system.layout.size
    theta = own.split(own.x)[0]

    def raw(batch: object) -> torch.Tensor:
        return torch.cat([g.reshape(-1) for g in own.gradients(theta, batch=batch)])

    xi = torch.stack([raw(edit.batch) - raw(own.step.batch) for edit in change.edits])
    c = system.dense_readouts()[:, :d]
    a = [system.dense_transition(s) for s in range(1, H + 1)]
    start = own.write_in(True) @ xi.mT
    only = torch.cat([start[:d], torch.zeros_like(start[d:])])
    full, initial, clamped, frozen = [start], [only], [start[:d]], [start]
    for transition in a:
        full.append(transition @ full[-1])
        initial.append(transition @ initial[-1])
        clamped.append(transition[:d, :d] @ clamped[-1])
        frozen.append(a[0] @ frozen[-1])

    def rows(states: list[torch.Tensor], readouts: torch.Tensor) -> np.ndarray:
        return torch.stack([r @ x[:d] for r, x in zip(readouts, states)], dim=1).numpy()

    lengths = [c[h].norm() * full[h][:d].norm(dim=0) for h in range(H + 1)]
    hessian = reverse_jacobian(lambda x: own.raw(x, create_graph=True), theta)
    expected = {
        "full_iso": rows(full, c),
        "no_propagation": rows([start] * (H + 1), c),
        "initial_theta": rows(initial, c),
        "clamped_theta": rows(clamped, c),
        "frozen_dynamics": rows(frozen, c),
        "frozen_readout": rows(full, c[:1].expand_as(c)),
        "norm_product": torch.stack(lengths, dim=1).numpy(),
        "gradient_norm": xi.norm(dim=1).numpy(),
        "write_norm": start[:d].norm(dim=0).numpy(),
        "curvature": (xi * (xi @ hessian)).sum(1).abs().numpy(),
        "alignment": torch.stack([(c @ x[:d]).mT for x in full], dim=1).numpy(),
    }
    return system, expected, scores(change, system.probe)


@pytest.mark.parametrize("name", TRAJECTORIES[:7])
def test_trajectories_against_dense_matrices(dense: tuple, name: str) -> None:
    _, expected, table = dense
    size = np.abs(expected[name]).max()
    assert size > 0
    np.testing.assert_allclose(table[f"{name}_response"], expected[name], rtol=1e-9, atol=1e-9 * size)
    np.testing.assert_allclose(table[name], np.abs(expected[name]).max(1), rtol=1e-9)


def test_the_ablations_are_different_things(dense: tuple) -> None:
    """Where two scores agreed on a case, parity there would prove nothing about either."""
    _, expected, _ = dense
    names = list(TRAJECTORIES[:7])
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert np.abs(expected[a] - expected[b]).max() > 1e-6 * np.abs(expected[a]).max(), (a, b)


@pytest.mark.parametrize("name", ["gradient_norm", "write_norm", "curvature"])
def test_static_scores_against_dense_matrices(dense: tuple, name: str) -> None:
    _, expected, table = dense
    np.testing.assert_allclose(table[name], expected[name], rtol=1e-9)
    assert f"{name}_response" not in table


def test_alignment_and_cosines_against_dense_matrices(dense: tuple) -> None:
    system, expected, table = dense
    size = np.abs(expected["alignment"]).max()
    np.testing.assert_allclose(table["alignment"].values, expected["alignment"], rtol=1e-9, atol=1e-9 * size)
    c = system.dense_readouts()
    cosine = torch.nn.functional.cosine_similarity(c[:1], c, dim=1).numpy()
    np.testing.assert_allclose(table["readout_cosine"].values, cosine, rtol=1e-9)
    assert table["alignment"].dims == ("change", "horizon", "readout_horizon")
    assert table["readout_horizon"].values.tolist() == table["horizon"].values.tolist() == list(range(1, H + 2))


@pytest.mark.parametrize("name", ["tanh_mlp", "untouched_rows", "dropout", "batch_norm", "unused_parameters"])
def test_ours_are_the_engines_answers(name: str) -> None:
    case = make(name)
    change, probe = case.path(5).replace(case.batches(2), at=1), case.batch()
    table = scores(change, probe)
    response = change.response(probe).data["response"].isel(scale=0)
    for ours, theirs in (("full_iso", "tangent"), ("semilinear", "semilinear")):
        truth = response.sel({"answer": theirs}).values
        found = table[f"{ours}_response"].values
        # the difference of two losses: a few roundings of a loss of order one
        np.testing.assert_allclose(found, truth, rtol=1e-9, atol=1e-14)
    exact = abs(response.sel({"answer": "exact"}).isel(horizon=0)).values
    np.testing.assert_allclose(table["exact_one_step"].values, exact, rtol=1e-12, atol=1e-16)


def test_frozen_dynamics_after_a_skip_are_powers_of_one_matrix() -> None:
    """Counts are behind then: Full ISO has its own bias corrections, A_{t+1}^{h−1} δx_1 the control's."""
    system = System("tanh_mlp")
    d, c, a = system.layout.size, system.dense_readouts()[:, : system.layout.size], system.dense_transition(1)
    before, after = (system.path.trajectory.state(time) for time in (0, 1))
    parts = [getattr(before, name) - getattr(after, name) for name in ("theta", "m", "v")]
    dx = torch.cat([system.layout.compact(part) for part in parts])
    expected = []
    for readout in c:
        expected.append(float(readout @ dx[:d]))
        dx = a @ dx
    table = scores(system.path.skip(), system.probe).isel(change=0)
    np.testing.assert_allclose(table["frozen_dynamics_response"], expected, rtol=1e-9)
    assert abs(table["full_iso_response"][1] / expected[1] - 1) > 1e-6


def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Hessian products by row, gradients, graphs and forward passes."""
    count = {"products": 0, "gradient": 0, "__init__": 0, "value": 0}

    def wrap(owner: type, name: str, size: Any) -> None:
        function = getattr(owner, name)

        def wrapper(self: Any, *args: Any, **options: Any) -> Any:
            count[name] += size(*args)
            return function(self, *args, **options)

        monkeypatch.setattr(owner, name, wrapper)

    wrap(GradientGraph, "products", lambda vectors: len(vectors))
    wrap(GradientGraph, "__init__", lambda *args: 1)
    for name in ("gradient", "value"):
        wrap(LossFunction, name, lambda *args: 1)
    return count


@pytest.mark.parametrize("steps", [3, 6, 12])
def test_the_whole_table_costs_little_more_than_its_propagations(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("quadratic")
    path, probe = case.path(steps), case.batch()
    change = path.replace(case.batches(N))
    path.check()
    Curvature.of(path.trajectory)  # measured once for a path
    count = counters(monkeypatch)
    scores(change, probe)
    five = 5 * N * (steps - 1)  # full, initial θ, clamped θ, frozen dynamics, endpoint: one product a row and step
    assert count == {
        "products": 6 * N * (steps - 1) - 3 * N,  # three kinds start where others do
        "gradient": N + 1 + steps,  # candidates, control, readouts
        "__init__": steps,  # graphs: one a step after the change, and the reference's
        "value": (2 * N + 1) * steps,  # two predictions of every change, and the control
    }
    # in gradients, with the measured costs of a product (1.7), a graph (1.3) and a forward pass (0.35)
    cost = 1.7 * count["products"] + count["gradient"] + 1.3 * count["__init__"] + 0.35 * count["value"]
    shared = N + 1 + steps + 1.3 * (steps - 1)  # gradients and graphs, which no propagation can do without
    assert cost <= 1.3 * (1.7 * five + 0.35 * N * steps + shared)


def test_memory_does_not_change_the_table() -> None:
    case = make("clipped")
    change, probe = case.path(4).replace(case.batches(3)), case.batch()
    with pytest.raises(OutOfMemory, match="scoring one change needs") as refused:
        scores(change, probe, memory=1)
    whole, parts = scores(change, probe), scores(change, probe, memory=advised(refused))
    short = scores(change, probe, horizon=2)
    for name in SCORES:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-10)
    for name in (f"{trajectory}_response" for trajectory in TRAJECTORIES):
        np.testing.assert_allclose(short[name], whole[name].isel(horizon=[0, 1]), rtol=1e-12, atol=1e-18)
    single = scores(change, probe, horizon=1)
    for name in ("no_propagation", "initial_theta", "clamped_theta", "frozen_dynamics", "frozen_readout"):
        np.testing.assert_allclose(single[name], single["full_iso"])


def test_a_change_without_xi_says_which_scores_it_lacks() -> None:
    case = make("tanh_mlp")
    change, probe = case.path(4).skip(1), case.batch()
    table = scores(change, probe)
    assert [name for name in SCORES if table[name].isnull().any()] == ["gradient_norm", "curvature"]
    said = "a skip is not a difference of gradients: it has no ξ, and no gradient_norm and no curvature"
    assert table["reason"].item() == said
    assert scores(case.path(4).replace(case.batches(1), 1), probe)["reason"].item() == ""
    whole = change.response(probe)
    for name, answer in (("full_iso", whole.tangent), ("semilinear", whole.semilinear)):
        expected = answer.isel(scale=0).values
        np.testing.assert_allclose(table[f"{name}_response"].values, expected, rtol=1e-9)
    assert [name for name in table.data_vars if name in SCORES] == [*TRAJECTORIES, *STATIC]


# --- readout permutations


@pytest.fixture(scope="module")
def ranked() -> tuple[Any, np.ndarray]:
    case = make("tanh_mlp")
    change, probe = case.path(6).replace(case.batches(8)), case.batch()
    exact = change.response(probe, answers=("exact",)).summary["peak"].isel(answer=0, scale=0)
    return scores(change, probe), exact.values


def test_shuffled_readouts_by_hand(ranked: tuple) -> None:
    table, exact = ranked
    null = readout_null(table, exact, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    alignment = table["alignment"].values
    expected = []
    for k in range(100):
        order = torch.randperm(6, generator=generator).tolist()
        assert list(null["order"].values[k] - 1) == order
        shuffled = [max(abs(row[h, order[h]]) for h in range(6)) for row in alignment]
        np.testing.assert_array_equal(null["score"].values[k], shuffled)
        expected.append(np.corrcoef(rankdata(shuffled), rankdata(exact))[0, 1])
    np.testing.assert_allclose(null["spearman"].values, expected, atol=1e-12)
    full = np.abs(np.einsum("ihh->ih", alignment)).max(1)
    true = np.corrcoef(rankdata(full), rankdata(exact))[0, 1]
    assert float(null["true_spearman"]) == pytest.approx(true)
    assert float(null["percentile"]) == pytest.approx(100 * np.mean(np.array(expected) <= true + 1e-12))
    assert len(set(null["spearman"].values.round(6))) > 1


def test_the_null_is_seeded_and_defaults_to_the_scores(ranked: tuple) -> None:
    table, _ = ranked
    a, b, c = (
        readout_null(table, generator=torch.Generator().manual_seed(seed), permutations=20) for seed in (1, 1, 2)
    )
    assert a.equals(b)
    assert not (a["order"] == c["order"]).all()
    assert float(a["true_spearman"]) == pytest.approx(1.0)
    assert float(a["percentile"]) == 100.0


def test_a_null_that_does_not_exist_is_refused_or_undefined(ranked: tuple) -> None:
    table, exact = ranked
    generator = torch.Generator()
    with pytest.raises(InvalidInput, match="two of them"):
        readout_null(table.isel(horizon=[0], readout_horizon=[0]), generator=generator)
    with pytest.raises(InvalidInput, match="two changes"):
        readout_null(table.isel(change=[0]), generator=generator)
    with pytest.raises(InvalidInput, match="one number per change"):
        readout_null(table, exact[1:], generator=generator)
    tied = readout_null(table, np.ones_like(exact), generator=generator)
    assert math.isnan(float(tied["true_spearman"]))
    assert math.isnan(float(tied["percentile"]))


def test_refusals() -> None:
    case = make("batch_norm")
    path, batch = case.path(3), case.batch()
    with pytest.raises(HiddenState, match="outside"):
        scores(path.replace([case.batch()]), ak.Probe(batch=batch, evaluating=True))
    with pytest.raises(InvalidInput, match="no state after it"):
        scores(path.replace([case.batch()], at=2), ak.own_loss)
