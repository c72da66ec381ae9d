"""Adjoint scores against forward ones, per-example scores against per-example gradients, and explanations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aftershock as ak
from aftershock.errors import ExamplesCouple, InvalidInput

from .cases import CASES, Case, classes, make, mlp


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", [0, 2])
def test_adjoint_equals_forward(name: str, at: int) -> None:
    case = make(name)
    path = case.path(6)
    pool, probe = case.batches(5), case.batch()
    ranking = path.rank(pool, probe, at=at, exact_write=True)
    by_name = ranking.data.sel(change=[f"batch {i}" for i in range(5)])["response"]
    response = path.replace(pool, at).response(probe, answers=("tangent",))
    forward = response.tangent.isel(scale=0).values
    assert np.abs(forward).max() > 0
    sizes = ranking.data["xi_norm"].sel(change=by_name["change"]).values
    np.testing.assert_allclose(sizes, response.data["xi_norm"].values, rtol=1e-6)
    adjoint = by_name.sel({"answer": "tangent"}).values
    np.testing.assert_allclose(adjoint, forward, rtol=1e-8, atol=1e-10 * np.abs(forward).max())
    written = by_name.sel({"answer": "write"}).values
    differences = path.replace(pool, at).difference()
    for i, dx in enumerate(differences):
        gradient = path.response_operator(probe, at).readouts
        for h in (1, 2):
            out = dx if h == 1 else path.propagate(at + 1, at + h).mv(dx)
            assert written[i, h - 1] == pytest.approx(float(gradient[h - 1] @ out.theta), rel=1e-6, abs=1e-13)


def test_order_and_summaries() -> None:
    case = make("tanh_mlp")
    path = case.path(5)
    ranking = path.rank(case.batches(9), case.batch(), by="max_increase")
    scores = ranking.data["score"].values
    assert (np.diff(scores) <= 0).all()
    assert len(set(ranking.order)) == 9
    response = ranking.data["response"].isel(answer=0)
    np.testing.assert_allclose(scores, response.clip(min=0).max("horizon").values)
    assert "Not verified" in str(ranking)


def test_verification_is_the_exact_response() -> None:
    case = make("tanh_mlp")
    path = case.path(5)
    pool, probe = case.batches(6), case.batch()
    ranking = path.rank(pool, probe, verify=2)
    assert ranking.verified is not None
    top = ranking.order[:2]
    assert list(ranking.verified.data["change"].values) == top
    index = int(top[0].split()[1])
    exact = path.replace([pool[index]]).response(probe, answers=("exact",)).exact.values[0, 0]
    np.testing.assert_array_equal(ranking.verified.exact.sel(change=top[0]).values[0], exact)
    assert "Verified by rerunning the top 2" in str(ranking)


def test_many_sweeps_in_little_memory_give_the_same_scores() -> None:
    case = make("tanh_mlp")
    path = case.path(6)
    pool, probe = case.batches(3), case.batch()
    vector = path.point.loss.layout.padded_size * 8
    whole = path.rank(pool, probe).data["response"]
    small = path.rank(pool, probe, memory=20 * vector).data["response"]
    np.testing.assert_allclose(small.values, whole.values, rtol=1e-10, atol=1e-15)


# --- examples


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_example_shares_against_per_example_gradients(reduction: str) -> None:
    case = make("tanh_mlp")

    def loss_fn(m: nn.Module, b: tuple) -> torch.Tensor:
        return F.cross_entropy(m(b[0]), b[1], reduction=reduction)

    case.loss_fn = loss_fn
    path = case.path(5)
    pool, probe = case.batches(3), case.batch()
    ranking = path.rank_examples(pool, probe, horizon=4, verify=2)
    row = path.response_operator(probe, 0, 4).rmv(torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    control = path.control(0)
    for k in range(ranking.data.sizes["example"]):
        item = ranking.data.isel(example=k)
        x, y = pool[int(item["batch"])]
        i = int(item["index"])
        one = path.point.loss.gradient(
            control.before.theta, {}, (x[i : i + 1], y[i : i + 1]), control.step.random, "here"
        )
        slope = float(row @ path.point.loss.layout.join(one.grads)) / (1 if reduction == "sum" else len(y))
        assert float(item["share"]) == pytest.approx(slope, rel=1e-9, abs=1e-14)
    assert (np.diff(np.abs(ranking.data["share"].values)) <= 0).all()
    # shares of a batch sum to its gradient's score
    tangent = path.rank(pool, probe, horizon=4).data.sel(change=["batch 0", "batch 1", "batch 2"])
    base = float(row @ control.raw)
    for b in range(3):
        total = float(ranking.data["share"].where(ranking.data["batch"] == b).sum())
        expected = float(tangent["response"].isel(answer=0, change=b, horizon=-1))
        assert total - base == pytest.approx(expected, rel=1e-7, abs=1e-13)
    predicted, measured = ranking.data["share"].values[:2], [ranking.verified[k] for k in range(2)]
    np.testing.assert_allclose(measured, predicted, rtol=0.5)
    assert "measured" in str(ranking)


def test_convolutions_and_text_rank_by_example() -> None:
    for name in ("relu_cnn", "transformer", "tied"):
        case = make(name)
        path = case.path(3)
        ranking = path.rank_examples([case.batch()], case.batch())
        assert ranking.data["share"].notnull().all(), name


@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_examples_that_couple_are_refused(name: str) -> None:
    case = make(name)
    path = case.path(3)
    with pytest.raises(ExamplesCouple, match=r"[Bb]atch normalization|depend on each other"):
        path.rank_examples([case.batch()], case.batch())


def test_a_contrastive_loss_is_refused() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3).double()

    def loss_fn(m: nn.Module, b: tuple) -> torch.Tensor:
        z = m(b[0].double())
        return (z @ z.mT).logsumexp(1).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    case = Case("contrastive", model, optimizer, loss_fn, classes((4,)))
    case.train(case.batches(3))
    with pytest.raises(ExamplesCouple, match="neither the mean nor the sum"):
        case.path(3).rank_examples([case.batch()], case.batch())


# --- explaining


@pytest.mark.parametrize("name", ["tanh_mlp", "two_groups", "unused_parameters", "accumulated"])
@pytest.mark.parametrize("change", ["zero", "skip", "reset m"])
def test_contributions_are_adjoints_of_exact_differences(name: str, change: str) -> None:
    case = make(name)
    path = case.path(5)
    probe = case.batch()
    explanation = path.explain(probe, change=change)
    kinds = {"zero": path.zero, "skip": path.skip, "reset m": lambda at: path.reset(at, "m")}
    for step in range(5):
        dx = kinds[change](step).difference()[0]
        readout = path.response_operator(probe, step).readouts[-1]
        carry = path.propagate(step + 1, 5)
        parts = []
        for channel in ("theta", "m", "v"):
            alone = type(dx)(
                *(getattr(dx, c) if c == channel else torch.zeros_like(dx.theta) for c in ("theta", "m", "v"))
            )
            parts.append(-float(readout @ carry.mv(alone).theta))
        found = explanation.data["contribution"].sel(step=step).values
        scale = max(map(abs, parts))
        np.testing.assert_allclose(found, parts, rtol=1e-6, atol=1e-9 * scale)


def test_explanation_is_close_to_the_rerun_and_says_so() -> None:
    case = make("tanh_mlp")
    path = case.path(6)
    explanation = path.explain(ak.own_loss, at=5, verify=2)
    measured = explanation.data["measured"]
    assert int(measured.notnull().sum()) == 2
    top = abs(explanation.total).argsort().values[::-1][:2]
    # a whole gradient is not a small change: the adjoint has the sign and the size, not the digits
    np.testing.assert_allclose(measured.values[top], explanation.total.values[top], rtol=0.5)
    step = int(top[0])
    exact = path.zero(step).response(ak.own_loss, answers=("exact",), horizon=5 - step).exact.values[0, 0, -1]
    assert measured.values[step] == -exact
    assert "Contribution of each step" in str(explanation)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path, batch: path.rank([], batch), "pool is empty"),
        (lambda path, batch: path.rank([batch], batch, by="size"), "by is one of"),
        (lambda path, batch: path.rank([batch], batch, horizon=9), "past the end"),
        (lambda path, batch: path.rank([batch], batch, labels=["a", "b"]), "labels"),
        (lambda path, batch: path.explain(batch, at=9), "past the end"),
        (lambda path, batch: path.explain(batch, change="delete"), "change is one of"),
    ],
)
def test_bad_input(call, words) -> None:  # type: ignore[no-untyped-def]
    case = make("tanh_mlp")
    path = case.path(3)
    with pytest.raises(InvalidInput, match=words):
        call(path, case.batch())
