"""Exact responses against a second real training run, made by hand with torch.optim."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.batches import Accumulated

from .cases import CASES, Case, make

STEPS, AT = 5, 1


def gradients(case: Case, batch: object) -> None:
    """Leave the raw gradient of a batch in .grad."""
    case.optimizer.zero_grad()
    micro = batch.batches if isinstance(batch, Accumulated) else (batch,)
    for part in micro:
        (case.loss_fn(case.model, part) / len(micro)).backward()


def clip_and_step(case: Case) -> None:
    if case.clip is not None:
        nn.utils.clip_grad_norm_(case.model.parameters(), case.clip)
    case.optimizer.step()


def probe_loss(case: Case, probe: object, random: torch.Tensor) -> float:
    """The probe's loss in training mode, without leaving a trace in buffers or random state."""
    kept = {name: b.clone() for name, b in case.model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random)
        micro = probe.batches if isinstance(probe, Accumulated) else (probe,)
        loss = float(sum(case.loss_fn(case.model, b) for b in micro) / len(micro))
    for name, b in case.model.named_buffers():
        b.copy_(kept[name])
    return loss


def run_by_hand(
    case: Case, path: ak.Path, probe: object, shocked: Callable[[Case, object], None] | None
) -> list[float]:
    """Train a twin of the live run along the path, `shocked` at step AT; the probe's loss after AT."""
    twin = case.twin()
    losses = []
    for step in path.steps:
        torch.set_rng_state(step.random.cpu)
        if step.index == AT and shocked is not None:
            shocked(twin, step.batch)
        else:
            gradients(twin, step.batch)
            clip_and_step(twin)
        if step.index >= AT:
            losses.append(probe_loss(twin, probe, path.steps[0].random.cpu))
    return losses


def replaced(other: object) -> Callable[[Case, object], None]:
    def shocked(twin: Case, batch: object) -> None:
        gradients(twin, other)
        clip_and_step(twin)

    return shocked


def skipped(twin: Case, batch: object) -> None:
    """No step at all, but the forward pass that the batch's dropout and statistics need is not made either."""


def zeroed(twin: Case, batch: object) -> None:
    gradients(twin, batch)
    for p in twin.model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    clip_and_step(twin)


def with_lr(lr: float) -> Callable[[Case, object], None]:
    def shocked(twin: Case, batch: object) -> None:
        kept = [group["lr"] for group in twin.optimizer.param_groups]
        for group in twin.optimizer.param_groups:
            group["lr"] = lr
        gradients(twin, batch)
        clip_and_step(twin)
        for group, old in zip(twin.optimizer.param_groups, kept):
            group["lr"] = old

    return shocked


def without_moment(key: str) -> Callable[[Case, object], None]:
    def shocked(twin: Case, batch: object) -> None:
        for state in twin.optimizer.state.values():
            state[key].zero_()
        gradients(twin, batch)
        clip_and_step(twin)

    return shocked


def halved_gradient(twin: Case, batch: object) -> None:
    gradients(twin, batch)
    for p in twin.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    clip_and_step(twin)


CHANGES = {
    "replace": (lambda path, other: path.replace([other], at=AT), lambda other: replaced(other), 1.0),
    "skip": (lambda path, other: path.skip(AT), lambda other: skipped, 1.0),
    "zero": (lambda path, other: path.zero(AT), lambda other: zeroed, 1.0),
    "half of zero": (lambda path, other: path.zero(AT), lambda other: halved_gradient, 0.5),
    "set lr": (lambda path, other: path.set(AT, lr=0.05), lambda other: with_lr(0.05), 1.0),
    "reset m": (lambda path, other: path.reset(AT, "m"), lambda other: without_moment("exp_avg"), 1.0),
    "reset v": (lambda path, other: path.reset(AT, "v"), lambda other: without_moment("exp_avg_sq"), 1.0),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", CASES)
def test_exact_response_is_a_second_training_run(name: str, kind: str) -> None:
    case = make(name)
    path = case.path(STEPS)
    probe, other = case.batch(), case.batch()
    change, by_hand, scale = CHANGES[kind]
    response = change(path, other).response(probe, scales=[scale], answers=("exact",))
    control = run_by_hand(case, path, probe, None)
    shocked = run_by_hand(case, path, probe, by_hand(other))
    expected = torch.tensor(shocked, dtype=torch.float64) - torch.tensor(control, dtype=torch.float64)
    assert expected.abs().max() > 0
    found = torch.tensor(response.exact.values[0, 0])
    # losses of order 1 in float64, printed through float(): a few ulps
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_semilinear_equals_exact_at_the_first_horizon(name: str) -> None:
    """Before any propagation the semilinear answer is exact: the same θ, the same probe."""
    case = make(name)
    path = case.path(3)
    response = path.replace(case.batches(2)).response(case.batch(), scales=[0.3, 1.0])
    first = response.data["response"].isel(horizon=0)
    exact, semilinear = (first.sel({"answer": answer}).values for answer in ("exact", "semilinear"))
    # θ^c + (θ^s − θ^c) rounds once
    torch.testing.assert_close(torch.tensor(exact), torch.tensor(semilinear), rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("relu_cnn",)])
def test_tangent_error_falls_quadratically(name: str) -> None:
    """Taylor: |δF(α) − α G ξ| has slope 2 in α for smooth systems, at every horizon."""
    case = make(name)
    path = case.path(4)
    scales = [2.0**-k for k in range(6, 11)]
    # untouched coordinates bend over gradients of size eps, and a loose clip jumps: the probe stays inside both
    response = path.replace([case.batch()]).response(case.batch(), scales=scales, answers=("exact", "tangent"))
    error = abs(response.exact - response.tangent).isel(change=0).values
    log_scale = torch.tensor(scales).log()
    slopes = []
    for h in range(error.shape[1]):
        y = torch.tensor(error[:, h]).log()
        x = log_scale.double()
        slopes.append(float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()))
    assert all(1.9 < slope < 2.1 for slope in slopes), slopes


def test_skip_zero_and_minus_g_are_three_changes() -> None:
    case = make("tanh_mlp")
    path = case.path(6)
    probe = case.batch()
    raw = path.point.loss.layout.compact(path.control(0).raw)
    skip = path.skip(0).response(probe).data["response"].isel(change=0, scale=0)
    zero = path.zero(0).response(probe).data["response"].isel(change=0, scale=0)
    minus = path.perturb(-raw, 0).response(probe).data["response"].isel(change=0, scale=0)
    exact = {"answer": "exact"}
    assert abs(skip.sel(exact) - zero.sel(exact)).max() > 0.1 * abs(zero.sel(exact)).max()
    # g − g = 0: in an exact pair the last two meet; linearized, ξ = −g writes twice the second moment
    torch.testing.assert_close(torch.tensor(zero.sel(exact).values), torch.tensor(minus.sel(exact).values))


def test_a_steps_own_gradient_can_be_taken_away() -> None:
    """`path.control(at).raw` has room between parameters, and was refused for its length."""
    case = make("tanh_mlp")
    path, probe = case.path(4), case.batch()
    raw = path.control(1).raw
    assert len(raw) > path.point.loss.layout.size
    without, zeroed = (change.response(probe).exact.values for change in (path.perturb(-raw, at=1), path.zero(at=1)))
    assert abs(zeroed).max() > 1e-6
    assert (without == zeroed).all()


def test_perturb_takes_vectors_mappings_and_lists() -> None:
    case = make("tanh_mlp")
    path = case.path(3)
    layout = path.point.loss.layout
    xi = torch.randn(layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pieces = [p.view(s) for p, s in zip(xi.split(layout.sizes), layout.shapes)]
    mapping = dict(zip(layout.names, pieces))
    probe = case.batch()
    answers = [
        path.perturb(form).response(probe, answers=("tangent",)).tangent.values[0, 0]
        for form in (xi, xi[None], mapping, pieces, [xi], [mapping])
    ]
    for answer in answers[1:]:
        torch.testing.assert_close(torch.tensor(answer), torch.tensor(answers[0]))
    assert path.perturb(torch.stack([xi, 2 * xi])).response(probe).data.sizes["change"] == 2


def test_accumulated_reference_is_the_papers_control() -> None:
    """A path on accumulate(references) has their mean gradient: ξ_i = g_i − ḡ."""
    case = make("tanh_mlp")
    references = case.batches(4)
    path = case.point().follow([ak.accumulate(references), *case.batches(2)])
    separate = [case.point().follow([r]).control(0).raw for r in references]
    torch.testing.assert_close(path.control(0).raw, torch.stack(separate).mean(0))
    drawn = ak.accumulate((b for b in references), draws=3)
    assert drawn.batches == tuple(references[:3])
    weighted = case.point().follow([ak.accumulate(references[:2], weights=[3.0, -1.0])]).control(0).raw
    torch.testing.assert_close(weighted, 3 * separate[0] - separate[1])


def test_lists_given_to_set_are_one_change_each() -> None:
    case = make("two_groups")
    path = case.path(3)
    response = path.set(0, lr=[0.0, 0.1], weight_decay=0.0).response(case.batch())
    assert list(response.data["change"].values) == ["set lr=0, weight_decay=0", "set lr=0.1, weight_decay=0"]


def test_a_list_with_the_structure_of_a_batch_is_one_batch() -> None:
    """Data loaders make batches that are lists: replace([x, y]) must not become two batches."""
    case = make("tanh_mlp")
    path = case.point().follow([list(b) for b in case.batches(3)])
    one, two = list(case.batch()), list(case.batch())
    assert len(path.replace(one)) == 1
    assert len(path.replace([one, two])) == 2
    assert len(case.path(2).replace(tuple(one))) == 1


def test_a_change_to_itself_has_no_response() -> None:
    case = make("dropout")
    path = case.path(4)
    response = path.replace([path.steps[0].batch]).response(case.batch())
    assert not response.exact.values.any()
    assert not response.semilinear.values.any()
    assert not response.tangent.values.any()


def test_a_list_of_sequences_of_another_length_is_one_batch() -> None:
    """A batch of so many sequences, each of a length of its own; a list of such batches is a change each."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return torch.stack([model(sequence).square().mean() for sequence in batch]).mean()

    def draw(count: int) -> list[Tensor]:
        return [torch.randn(2 + i, 3, dtype=torch.float64) for i in range(count)]

    point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, unused="skip")
    (own, later), longer, probe = (draw(3), draw(2)), draw(4), draw(5)
    path = point.follow([own, later])
    changed, control = (point.follow([first, later, probe]).losses[2] for first in (longer, own))
    found = path.replace(longer).response(probe, answers=("exact",)).exact
    assert found.values[:, 0, 1] == pytest.approx([changed - control], abs=1e-12)
    assert len(path.replace([longer])) == 1
    assert len(path.replace([longer, draw(3)])) == 2
    assert len(path.replace([ak.accumulate([longer]), ak.accumulate([draw(3)])])) == 2


def test_set_takes_tensors_and_arrays() -> None:
    path = make("tanh_mlp").path(2)
    given = [path.set(0, lr=values) for values in ([0.0, 0.25], torch.tensor([0.0, 0.25]), np.array([0.0, 0.25]))]
    assert len({str(change.edits) for change in given}) == 1
    assert str(path.set(0, beta1=torch.tensor(0.5)).edits) == str(path.set(0, beta1=0.5).edits)
