"""The benchmark beside neighbours, on a window small enough for a test: its truth and its sides are what they say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks.models import loss_fn
from benchmarks.peers.scores import SIDES, Side, judge
from benchmarks.peers.unrolled import ours_keeping_states, relative_difference, torch_unrolled
from benchmarks.peers.window import Window, leave_one_out, with_bad_batch
from torch import nn

OURS = {side.name: side for side in SIDES if side.package in ("torch", "aftershock")}


@pytest.fixture(scope="module")
def window() -> Window:
    """Six steps of a small tanh network in float64, ten into its training."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    data = [
        (torch.randn(8, 5, generator=generator).double(), torch.randint(3, (8,), generator=generator))
        for _ in range(17)
    ]
    for batch in data[:10]:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    return Window("tanh", model, optimizer, loss_fn, tuple(data[10:16]), data[16])


def by_hand(window: Window, without: int | None) -> float:
    """The outcome of the run with one gradient zero, by AdamW's formulas on a model of its own."""
    model, optimizer = window.fresh()
    states = [optimizer.state[p] for p in model.parameters()]
    m, v = ([s[name].clone() for s in states] for name in ("exp_avg", "exp_avg_sq"))
    for at, batch in enumerate(window.batches):
        grads = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
        count = 11 + at
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(model.parameters(), grads)):
                g = torch.zeros_like(g) if at == without else g
                m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g**2
                p.mul_(1 - 1e-2 * 0.1)
                p.sub_(1e-2 * (m[i] / (1 - 0.9**count)) / ((v[i] / (1 - 0.999**count)).sqrt() + 1e-8))
    return window.outcome(model)


def test_the_truth_is_a_loop_by_hand_without_the_step(window: Window) -> None:
    whole = by_hand(window, None)
    expected = torch.tensor([whole - by_hand(window, at) for at in range(6)], dtype=torch.float64)
    truth = leave_one_out(window)
    assert expected.abs().min() > 1e-5
    assert torch.allclose(truth, expected, rtol=0, atol=1e-12)  # float64: sums of a few hundred roundings
    assert by_hand(window, None) == whole  # nothing of the window was changed by a run


def test_sides_are_judged_by_the_truth(window: Window) -> None:
    shuffled = Side("shuffled", "torch", lambda w: -leave_one_out(w))
    broken = Side("broken", "torch", lambda w: 1 / 0)  # type: ignore[arg-type,return-value]
    exact, ours, reverse, lost = judge(
        window, [OURS["exact leave-one-out"], OURS["aftershock explain, 5 reruns"], shuffled, broken]
    )
    assert (exact.rank, exact.top, exact.error) == (1.0, True, 0.0)
    assert ours.rank > 0.9
    assert ours.error < 0.1  # five of six steps are reruns
    assert reverse.rank == -1.0
    assert not reverse.top
    assert lost.failed.startswith("ZeroDivisionError")


def test_unrolled_torch_gives_our_adjoint(window: Window) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # torch keeps its step counts in it
    try:
        mine, other = ours_keeping_states(window), torch_unrolled(window)
    finally:
        torch.set_default_dtype(before)
    assert sum(float(x.norm()) for x in other[0]) > 1e-3
    assert relative_difference(mine, other) < 1e-12  # float64 over six steps


def test_a_bad_batch_has_its_own_inputs_and_shuffled_labels(window: Window) -> None:
    changed = with_bad_batch(window)
    assert changed.batches[2][0] is window.batches[2][0]
    assert not torch.equal(changed.batches[2][1], window.batches[2][1])
    assert torch.equal(changed.batches[2][1].sort().values, window.batches[2][1].sort().values)
    assert all(a is b for i, (a, b) in enumerate(zip(changed.batches, window.batches)) if i != 2)
    assert dataclasses.replace(changed, name=window.name, batches=window.batches) == window
