"""The doctor runs the user's own train_step, and names the trick in it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.commands.building import Built
from aftershock.commands.findings import Finding
from aftershock.commands.loop import prove_loop as findings_of

from .test_agreement import dropout, normalized, plain, running, squares
from .test_cli import call, failed

Model, Optimizer = nn.Module, torch.optim.Optimizer


def built(train_step: Callable[..., Any], make: Callable[[], nn.Module] = plain, **options: Any) -> Built:
    run = running(make)
    given = {"batches": run.batches} | options
    return Built(run.model, squares, run.optimizer, run.batches[0], train_step=train_step, **given)


def prove_loop(built: Built) -> Finding:
    """The only finding."""
    (found,) = findings_of(built)
    assert "follow(" not in found.text
    return found


def train_step(model: Model, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("make", [plain, dropout, normalized])
def test_a_plain_loop_is_proved(make: Callable[[], nn.Module]) -> None:
    found = prove_loop(built(train_step, make))
    assert found == Finding("your loop", "supported", "5 steps of train_step are equal to the path to the bit")


def test_a_loop_that_closes_over_its_model_and_tells_clip_and_schedule() -> None:
    run = running(dropout)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=20)

    def closed(batch: Any) -> None:
        run.optimizer.zero_grad()
        squares(run.model, batch).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        run.optimizer.step()
        scheduler.step()

    def given(**told: Any) -> Built:
        return Built(run.model, squares, run.optimizer, run.batches[0], train_step=closed, **told)

    random = torch.get_rng_state()
    assert prove_loop(given(clip=0.05, scheduler=scheduler)).level == "supported"
    assert torch.equal(random, torch.get_rng_state())
    found = prove_loop(given(clip=0.05))
    assert found.level == "refused"
    assert "Let build() return scheduler= too" in found.text
    assert "clip=0.05" in prove_loop(given(scheduler=scheduler)).text


def test_accumulation_is_told_by_the_batches() -> None:
    def accumulating(model: Model, optimizer: Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        for micro in batch.batches:
            (squares(model, micro) / len(batch.batches)).backward()
        optimizer.step()

    run = running()
    told = [ak.accumulate(run.batches[i : i + 2]) for i in range(4)]
    assert "4 steps" in prove_loop(built(accumulating, batches=told)).text


def scaler_skips(model: Model, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    squares(model, batch).backward()
    model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
    if model.calls != 3:
        optimizer.step()


def accumulates(model: Model, optimizer: Optimizer, batch: Any) -> None:
    (squares(model, batch) / 2).backward()
    model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
    if model.calls % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()


def hooked(model: Model, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    for p in model.parameters():
        p.grad.add_(0.01 * p.grad.sign())  # type: ignore[union-attr]
    optimizer.step()
    return loss


def other_loss(model: Model, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, batch) + model(batch[0]).abs().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("step", "at", "words"),
    [
        (scaler_skips, 2, "skipped (GradScaler"),
        (accumulates, 0, "accumulated over several calls"),
        (hooked, 0, "edits gradients in place between backward() and optimizer.step()"),
        (other_loss, 0, "another loss"),
    ],
)
def test_what_only_the_doctor_can_know_is_named(step: Callable[..., Any], at: int, words: str) -> None:
    found = prove_loop(built(step))
    assert found.level == "refused"
    assert found.text.startswith(f"at step {at} ")
    assert words in found.text


def rounded(model: Model, optimizer: Optimizer, batch: Any) -> Tensor:
    return train_step(model, optimizer, (batch[0].flip(0), batch[1].flip(0)))


def test_rounding_is_no_refusal_and_hides_nothing() -> None:
    found = prove_loop(built(rounded))
    assert found.level == "approximated"
    assert "agree to rounding" in found.text

    def with_average(model: Model, optimizer: Optimizer, batch: Any) -> None:
        rounded(model, optimizer, batch)
        model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
        if model.calls == 3:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.2, 0.2)

    found = prove_loop(built(with_average))
    assert found.level == "refused"
    assert found.text.startswith("at step 2 weights")
    assert "clamped at 0.2" in found.text


def test_rounding_does_not_hide_a_schedule() -> None:
    def scheduled(model: Model, optimizer: Optimizer, batch: Any) -> None:
        rounded(model, optimizer, batch)
        optimizer.param_groups[0]["lr"] *= 0.9

    found = prove_loop(built(scheduled))
    assert found.level == "refused"
    assert found.text.startswith("at step 1 hyperparameter of group 0 differs")


def test_every_problem_is_listed_once_in_the_words_of_build() -> None:
    def many(model: Model, optimizer: Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        squares(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
        if model.calls == 3:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.2, 0.2)

    def given(**told: Any) -> Built:
        run = running()
        nonlocal scheduler
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        return Built(run.model, squares, run.optimizer, run.batches[0], train_step=many, batches=run.batches, **told)

    scheduler: Any = None
    found = findings_of(given())
    assert {each.level for each in found} == {"refused"}
    clip, rate, clamp = (each.text for each in found)
    assert clip.startswith("at step 0 gradient")
    assert clip.endswith("Let build() return, and tell the recorder, clip=0.05.")
    assert rate.startswith("at step 1 hyperparameter of group 0")
    assert rate.endswith("Let build() return scheduler= too (the recorder sees it).")
    assert clamp.startswith("at step 2 weights")
    assert "clamped at 0.2" in clamp
    assert not re.search(r"follow\(|\bpath\b", " ".join((clip, rate, clamp)))
    assert [each.text for each in findings_of(given(clip=0.05))] == [rate, clamp]


def test_a_scheduler_that_has_not_moved_yet_is_told_too() -> None:
    run = running()
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1000)
    told = Built(run.model, squares, run.optimizer, run.batches[0], train_step=train_step, batches=run.batches)
    assert "a scheduler is attached to the optimizer, and build() does not return it" in prove_loop(told).text


def test_a_batch_that_train_step_edits_is_still_the_paths() -> None:
    def editing(model: Model, optimizer: Optimizer, batch: Any) -> None:
        train_step(model, optimizer, batch)
        batch[0].zero_()

    run = running()
    assert prove_loop(built(editing, batches=copy.deepcopy(run.batches))).level == "supported"


def test_what_fails_is_said() -> None:
    def failing(model: Model, optimizer: Optimizer, batch: Any) -> None:
        raise RuntimeError("boom")

    assert "train_step failed at step 0: RuntimeError: boom" in prove_loop(built(failing)).text
    assert "takes 2 arguments" in prove_loop(built(lambda model, batch: None)).text
    found = prove_loop(Built(plain(), squares))
    assert (found.level, "not proved" in found.text, "train_step" in found.text) == ("note", True, True)


SCRIPT = """
import itertools

import torch
from torch import nn


def build(clip=None):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(model, batch):
        return model(batch).square().mean()

    def train_step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return loss

    endless = (torch.ones(2, 3) * i for i in itertools.count(1))
    return dict(model=model, optimizer=optimizer, loss_fn=loss_fn, batches=endless, train_step=train_step, clip=clip)


def told():
    return build(clip=0.01)


def wrong():
    return {"model": nn.Linear(3, 1), "loss_fn": lambda m, b: 0, "trainstep": 1}
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_loop.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    result = call("doctor", "a_loop:told")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.split()[:3] == ["your", "loop", "supported"]
    result = call("doctor", "a_loop:build")
    assert result.exit_code == 1
    assert "a missing clip=0.01" in " ".join(result.stdout.split())
    assert "train_step" in failed(call("doctor", "a_loop:wrong"))
