"""Which hyperparameters changed: planted changes among the schedules that people use."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aftershock as ak
from aftershock.core.adamw import Hyper
from aftershock.recorder.hyperparameters import HyperChange, hyperparameters, one_of_each
from aftershock.recorder.records import Forward, Record

from .cases import cross_entropy, mlp


def records(first: int = 100, clip: list[float | None] | None = None, **series: Any) -> list[Record]:
    """Records with the given series; a list of lists is one series per group."""
    length = len(clip) if clip is not None else len(next(iter(series.values()))[0])
    defaults = {"lr": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    groups = max((len(s) for s in series.values()), default=1)
    out = []
    for i in range(length):
        hypers = tuple(
            Hyper(**{n: series[n][g][i] if n in series else x for n, x in defaults.items()}, decoupled=True)
            for g in range(groups)
        )
        forward = Forward(False, torch.float32, ())
        seen = {"loss": 1.0, "norm": 1.0, "raw_norm": 1.0}
        told = None if clip is None else clip[i]
        out.append(Record(step=first + i, fed=(), **seen, hypers=hypers, clip=told, forward=forward))
    return out


def only(found: list[HyperChange]) -> HyperChange:
    assert len(found) == 1, found
    return found[0]


N = 32
COSINE = [1e-3 * (1 + math.cos(math.pi * i / 60)) / 2 for i in range(N)]


@pytest.mark.parametrize(
    ("name", "series", "kind", "at", "until", "was", "now"),
    [
        ("lr", [1e-3] * 20 + [5e-3] * 12, "jump", 20, N, 1e-3, 5e-3),
        ("lr", [1e-3] * 31 + [5e-3], "jump", 31, N, 1e-3, 5e-3),
        ("lr", [1e-3] * 20 + [1e-2] + [1e-3] * 11, "excursion", 20, 21, 1e-3, 1e-2),
        ("lr", [1e-3] * 20 + [2e-3, 4e-3, 3e-3] + [1e-3] * 9, "excursion", 20, 23, 1e-3, 4e-3),
        ("weight_decay", [0.01] * 25 + [250.0] + [0.01] * 6, "excursion", 25, 26, 0.01, 250.0),
        ("weight_decay", [0.0] * 25 + [0.1] * 7, "jump", 25, N, 0.0, 0.1),
        ("beta1", [0.9] * 9 + [0.0] + [0.9] * 22, "excursion", 9, 10, 0.9, 0.0),
        ("beta2", [0.999] * 9 + [0.9] * 23, "jump", 9, N, 0.999, 0.9),
        ("eps", [1e-8] * 9 + [1e-12] * 23, "jump", 9, N, 1e-8, 1e-12),
        ("lr", [1e-3 * 1.03**i for i in range(N)], "ramp", 1, N, 1e-3, 1e-3 * 1.03**31),
        ("lr", [1e-3 + 1e-4 * i for i in range(N)], "ramp", 1, N, 1e-3, 4.1e-3),  # straight, but not from zero
        ("lr", [1e-5 * 1.3**i for i in range(N)], "ramp", 1, N, 1e-5, 1e-5 * 1.3**31),
        ("weight_decay", [0.01 * (1 + i) for i in range(N)], "ramp", 1, N, 0.01, 0.32),
        ("lr", [1e-5 * (i + 1) for i in range(N)], "warm-up", 1, N, 1e-5, 3.2e-4),
        ("lr", [0.0] * 3 + [1e-5 * i for i in range(29)], "warm-up", 4, N, 0.0, 2.8e-4),
        ("lr", [min(1e-4 * i, 1e-3) for i in range(N)], "warm-up", 1, N, 0.0, 1e-3),
    ],
)
def test_one_change_is_found_and_named(
    name: str, series: list[float], kind: str, at: int, until: int, was: float, now: float
) -> None:
    found = only(hyperparameters(records(first=3, **{name: [series]})))
    assert (found.name, found.kind, found.at, found.until) == (name, kind, at, until)
    assert (found.was[0], found.now[0]) == pytest.approx((was, now))
    assert found.steps == (3 + at, 3 + until - 1)
    assert name in found.sentence


def test_what_every_schedule_does_is_no_event() -> None:
    assert hyperparameters(records(lr=[[1e-3] * N])) == []
    slow = [1e-3 * (1 + math.cos(math.pi * i / 3000)) / 2 for i in range(N)]
    assert hyperparameters(records(lr=[slow])) == []
    turning = [1e-3 * math.cos(math.pi * (i - 16) / 300) for i in range(N)]  # over the top of a one-cycle schedule
    assert hyperparameters(records(lr=[turning])) == []
    falls = only(hyperparameters(records(lr=[COSINE])))
    assert falls.kind == "ramp"
    later = only(hyperparameters(records(first=100, lr=[[1e-6 * (101 + i) for i in range(N)]])))
    assert later.kind == "warm-up"  # in its middle: it began at zero with the run


def test_a_restart_of_a_falling_rate() -> None:
    found = hyperparameters(records(lr=[COSINE[:24] + COSINE[:8]]))
    assert (found[0].kind, found[0].at, found[0].until) == ("restart", 24, N)
    before = next(c for c in found if c.kind == "ramp")  # it ends where the rate is restarted, and so do its words
    assert (before.at, before.until, before.steps[1]) == (1, 24, records(lr=[COSINE])[23].step)


def test_a_jump_inside_a_schedule_and_the_most_unusual_first() -> None:
    series = [x * (3 if i >= 20 else 1) for i, x in enumerate(COSINE)]
    decay = [0.01] * 28 + [250.0] + [0.01] * 3
    found = hyperparameters(records(lr=[series], weight_decay=[decay]))
    assert [(c.name, c.kind) for c in found[:2]] == [("weight_decay", "excursion"), ("lr", "restart")]
    bump = hyperparameters(records(lr=[[x * (3 if i == 20 else 1) for i, x in enumerate(COSINE)]]))
    assert (bump[0].kind, bump[0].at, bump[0].until) == ("excursion", 20, 21)
    drop = hyperparameters(records(lr=[[1e-3] * 16 + [1e-4] * 16], beta2=[[0.999] * 20 + [0.99] * 12]))
    assert [c.name for c in drop] == ["beta2", "lr"]  # smaller steps are the less likely cause


def test_clipping_that_was_switched_off() -> None:
    found = only(hyperparameters(records(clip=[1.0] * 20 + [None] * 12)))
    assert (found.name, found.kind, found.at) == ("clip", "jump", 20)
    assert "from 1 to off" in found.sentence
    steps = ak.capture(*_tiny_run()).follow([torch.ones(1)] * 22, clip=None).steps
    assert (found.hold(steps[19]).max_norm, found.hold(steps[20]).max_norm) == (None, 1.0)


def _tiny_run() -> tuple[nn.Module, torch.optim.AdamW, Any]:
    model = nn.Linear(1, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda m, x: m(x).square().mean()


def test_groups_that_change_together_are_one_change_and_holding_it_is_a_run_without_it() -> None:
    model = mlp(3, 4, 2)
    parts = list(model.parameters())
    groups = [{"params": parts[:2], "lr": 1e-3}, {"params": parts[2:], "lr": 4e-3}]
    bump = [1.0] * 5 + [20.0] + [1.0] * 2
    found = only(hyperparameters(records(lr=[[1e-3 * b for b in bump], [4e-3 * b for b in bump]])))
    assert (found.groups, found.was, found.kind) == ((0, 1), (1e-3, 4e-3), "excursion")
    assert "lr of parameter groups 0 and 1 was " in found.sentence
    assert " instead of 0.001 and 0.004 at step" in found.sentence
    batches = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in bump]
    point = ak.capture(model, torch.optim.AdamW(groups), cross_entropy)
    path = point.follow(batches)
    bumped = [step if i != 5 else _with_rates(step, [2e-2, 8e-2]) for i, step in enumerate(path.steps)]
    assert [float(h.lr) for h in bumped[5].hypers] == [2e-2, 8e-2]
    assert [found.hold(step).hypers for step in bumped] == [step.hypers for step in path.steps]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([[0.0] * 4 + [0.3] * 4, [1e-3] * 8], "lr of parameter group 0 changed from 0 to 0.3 at step 104"),
        ([[1e-3] * 8, [0.1] * 4 + [0.3] * 4, [0.1] * 4 + [0.3] * 4], "lr of parameter groups 1 and 2 changed from 0.1"),
        ([[0.1 * g] * 4 + [g] * 4 for g in (1, 2, 3, 4)], "lr of parameter groups 0 and 1 (and 2 more) changed"),
        ([[0.1] * 4 + [0.3] * 4] * 3, "lr changed from 0.1 to 0.3 at step 104"),
    ],
)
def test_groups_that_changed_are_named_where_not_all_did_so_alike(rates: list[list[float]], said: str) -> None:
    assert only(hyperparameters(records(lr=rates))).sentence.startswith(said)


def _with_rates(step: Any, rates: list[float]) -> Any:
    return dataclasses.replace(step, hypers=tuple(h.with_lr(rate) for h, rate in zip(step.hypers, rates)))


def _noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def _clipped_run(change: int, last: int, folder: Path | None = None) -> tuple[list[float], ak.FlightRecorder | None]:
    """A plain loop whose clipping is switched off at step `change`, recorded where there is a folder."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-2)
    recorder = None
    if folder is not None:
        recorder = ak.FlightRecorder(model, optimizer, _noisy, folder, window=24, triggers=(), clip=1e-3).__enter__()
    generator, losses = torch.Generator().manual_seed(1), []
    target = torch.randn(6, 1, generator=generator)
    for step in range(last + 1):
        x = torch.randn(16, 6, generator=generator)
        batch = (x, x @ target + 0.3 * torch.randn(16, 1, generator=generator))
        optimizer.zero_grad()
        loss = _noisy(model, batch)
        loss.backward()
        clip = 1e-3 if step < change else None
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        optimizer.step()
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(batch, loss, norm=norm, clip=clip)
    if recorder is not None:
        recorder.__exit__(None, None, None)
    return losses, recorder


def test_a_clip_that_changes_is_recorded_replayed_and_named(tmp_path: Path) -> None:
    losses, recorder = _clipped_run(76, 83, tmp_path)
    held, _ = _clipped_run(84, 83)
    usual = sorted(losses[60:76])[8]
    assert max(held[77:]) - usual < 0.5 * (max(losses[77:]) - usual)  # plain torch: it is the clip
    assert recorder is not None
    assert [record.clip for record in recorder.recent][-9:] == [1e-3] + [None] * 8
    found = ak.explain(recorder, step=max(range(77, 84), key=losses.__getitem__), treatments=False)
    assert "to the bit" in str(found.certificate)
    assert (found.kind, found.hyperparameter) == ("hyperparameter", "clip")
    assert "clip changed from 0.001 to off at step 76" in found.verdict


def test_what_changes_all_the_time_does_not_keep_another_from_being_asked() -> None:
    clip: list[float | None] = [None if i % 4 == 3 else 1.0 for i in range(N)]
    rate = [1e-3 * (2 if i == 9 else 1) for i in range(N)]
    found = hyperparameters(records(lr=[rate], clip=clip))
    assert [change.name for change in found[:3]] == ["clip"] * 3
    names = [change.name for change in one_of_each(found)]
    assert (names[:3], sorted(names)) == (["clip", "lr", "clip"], sorted(change.name for change in found))


def test_an_excursion_is_told_at_the_steps_of_its_extreme_value() -> None:
    """The former value, 1, comes back some steps before and after; clip is 60 at one of them."""
    clip: list[float | None] = [1.0] * 4 + [1.25, 1.3, 1.2, 60.0, 1.3, 1.25] + [1.0] * (N - 10)
    (found,) = hyperparameters(records(clip=clip))
    assert found.sentence == "clip was 60 instead of 1 at step 107"
    assert (found.at, found.until) == (4, 10)
