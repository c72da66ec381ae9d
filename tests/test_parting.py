"""A recorded run that does not repeat itself says why, in the words that `path.matches` has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aftershock as ak
from aftershock.api import storage
from aftershock.core.randomness import RandomState
from aftershock.errors import Nondeterministic, ReplayMismatch
from aftershock.recorder import parting

from . import test_agreement as tricks
from .test_agreement import Batch, Loop, Run, plain, running, squares

STEPS = 12


def mismatch(tmp_path: Path, loop: Loop, *, every: int = STEPS, clip: float | None = None, loss_fn=squares) -> str:  # type: ignore[no-untyped-def]
    """Record a loop, explain its last step, and return what the replay says."""
    run = running(plain)
    batches = run.batches * 3
    with ak.FlightRecorder(
        run.model, run.optimizer, loss_fn, tmp_path, window=STEPS, every=every, triggers=(), clip=clip
    ) as recorder:
        for i, batch in enumerate(batches[:STEPS]):
            random = torch.get_rng_state()
            with torch.no_grad():
                loss = loss_fn(run.model, batch)
            torch.set_rng_state(random)
            loop(run, i, batch)
            recorder.step(batch, loss)
    with pytest.raises(ReplayMismatch) as raised:
        ak.explain(recorder, step=recorder.recent[-1].step)
    return str(raised.value)


def test_a_missing_clip(tmp_path: Path) -> None:
    said = mismatch(tmp_path, tricks.clipping)
    assert "part at step 3, 0 step" in said
    assert "a missing clip=0.05" in said


@pytest.mark.parametrize("both", [0, 1, 16])
@pytest.mark.parametrize("limit", [0.05, 0.3])
def test_a_missing_clip_where_the_norm_before_it_is_told(
    tmp_path: Path, limit: float, both: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the first steps the norm that arrived is taken, too; later it is not seen, but the next loss is."""
    monkeypatch.setattr("aftershock.recorder.recorder.BOTH", both)
    run, norms = running(plain), []
    with ak.FlightRecorder(run.model, run.optimizer, squares, tmp_path, triggers=()) as recorder:
        for batch in (run.batches * 3)[:STEPS]:
            run.optimizer.zero_grad()
            loss = squares(run.model, batch)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(run.model.parameters(), limit))
            run.optimizer.step()
            recorder.step(batch, loss, norm=norms[-1])
    assert min(norms) > limit
    told = capsys.readouterr().err
    assert told.count(f"tell the recorder clip={limit:g}, or no replay") == 1  # of the first step, which is always seen
    with pytest.raises(ReplayMismatch, match=rf"a missing clip={limit:g}: .* with clip={limit:g} "):
        ak.explain(recorder, step=recorder.recent[-1].step)
    found = ak.explain(recorder, step=recorder.recent[-1].step, clip=limit, verify=0, treatments=False)
    assert "every loss is equal to the recorded one to the bit" in str(found.certificate)


def test_where_several_limits_lead_to_the_loss_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far below the norm they are hardly apart: 0.001 was named for 0.008."""
    monkeypatch.setattr("aftershock.recorder.recorder.BOTH", 0)
    run = running(plain)
    with ak.FlightRecorder(run.model, run.optimizer, squares, tmp_path, triggers=()) as recorder:
        for i, batch in enumerate((run.batches * 3)[:STEPS]):
            run.optimizer.param_groups[0]["lr"] = 3e-3
            run.optimizer.zero_grad()
            loss = squares(run.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.008 if i >= 6 else 1e9)
            run.optimizer.step()
            recorder.step(batch, loss, norm=norm)
    with pytest.raises(ReplayMismatch, match=r"a missing clip=max_norm: clipped at 0\.\d+ to 0\.\d+, which its loss"):
        ak.explain(recorder, step=recorder.recent[-1].step)


def test_a_clip_that_is_told_is_no_cause(tmp_path: Path) -> None:
    """The gradients of one step are edited before they are clipped, as told: they arrive with max_norm."""
    run, clip = running(plain), 5.0
    with ak.FlightRecorder(run.model, run.optimizer, squares, tmp_path, triggers=(), clip=clip) as recorder:
        for i, batch in enumerate((run.batches * 3)[:STEPS]):
            run.optimizer.zero_grad()
            loss = squares(run.model, batch)
            loss.backward()
            for p in run.model.parameters():
                p.grad *= 40 * torch.rand_like(p) if i == 6 else 1  # type: ignore[operator]
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), clip)
            run.optimizer.step()
            recorder.step(batch, loss, norm=norm)
    assert recorder.recent[6].raw_norm > recorder.recent[6].norm == pytest.approx(clip)
    with pytest.raises(ReplayMismatch, match="edits gradients in place") as raised:
        ak.explain(recorder, step=recorder.recent[-1].step)
    assert "where the loop clips at" not in str(raised.value)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_of_a_loop_that_clips_as_it_tells_nothing_is_said(
    tmp_path: Path, clip: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it computes the norm in half precision."""
    run = running(plain)
    with ak.FlightRecorder(run.model, run.optimizer, squares, tmp_path, triggers=(), clip=clip) as recorder:
        for batch in (run.batches * 3)[:STEPS]:
            run.optimizer.zero_grad()
            loss = squares(run.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), clip or 1e9)
            run.optimizer.step()
            recorder.step(batch, loss, norm=norm.bfloat16() * 1.004)
    assert "tell the recorder" not in capsys.readouterr().err


@pytest.mark.parametrize("order", [1.0, float("inf")])
def test_another_norm_than_that_of_the_gradients(
    tmp_path: Path, order: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop changes no gradient: "edits gradients in place" was said."""
    run = running(plain)
    with ak.FlightRecorder(run.model, run.optimizer, squares, tmp_path, triggers=()) as recorder:
        for batch in (run.batches * 9)[:24]:
            run.optimizer.zero_grad()
            loss = squares(run.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), 1e9, norm_type=order)
            run.optimizer.step()
            recorder.step(batch, loss, norm=norm)
    assert ("if norm= is another norm" in capsys.readouterr().err) == (order == 1.0)  # a smaller one is no clipping
    with pytest.raises(ReplayMismatch, match=r"part at step 19, .* norm= is not the norm of all gradients"):
        ak.explain(recorder, step=recorder.recent[-1].step)


def test_another_clip_than_told(tmp_path: Path) -> None:
    assert "clip=0.1, where the loop clips at 0.05" in mismatch(tmp_path, tricks.clipping, clip=0.1)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("later", [0.05, 1e3])
def test_a_max_norm_that_changes(tmp_path: Path, later: float, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftershock.recorder.recorder.BOTH", 1)  # beyond the first steps
    run, clip, norms = running(plain), 0.02, []
    with ak.FlightRecorder(run.model, run.optimizer, squares, tmp_path, triggers=(), clip=clip) as recorder:
        for i, batch in enumerate((run.batches * 3)[:STEPS]):
            run.optimizer.zero_grad()
            loss = squares(run.model, batch)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(run.model.parameters(), clip if i < 6 else later))
            run.optimizer.step()
            recorder.step(batch, loss, norm=norms[-1] if told else None)
    assert min(norms) > 0.06  # both bind, or the larger does not
    with pytest.raises(ReplayMismatch) as raised:
        ak.explain(recorder, step=recorder.recent[-1].step)
    first = recorder.recent[6].step
    if told and later == 0.05:  # the norm that arrived is not seen
        assert "clipping at another max_norm than clip= says" in str(raised.value)
    else:
        how = "arrived with 0.05" if later == 0.05 else "arrived unclipped"
        assert f"max_norm changed at step {first}, where the recorder was told clip=0.02" in str(raised.value)
        assert how in str(raised.value)
    assert "recorder.step(…, clip=)" in str(raised.value)


@pytest.mark.parametrize("every", [1, STEPS])
def test_gradients_edited_in_place(tmp_path: Path, every: int) -> None:
    said = mismatch(tmp_path, tricks.noise, every=every)
    assert "gradient norm was" in said
    assert "edits gradients in place" in said


def test_one_parameters_gradient_is_named_where_a_state_is_near(tmp_path: Path) -> None:
    said = mismatch(tmp_path, tricks.one_edited, every=1)
    assert "part at step 4, 1 step" in said
    assert "'2.weight' alone are edited in place (0.5 times" in said


def test_a_divided_loss(tmp_path: Path) -> None:
    assert "divides the loss by 4" in mismatch(tmp_path, tricks.divided)


@pytest.mark.parametrize(("every", "words"), [(1, "a wrapper such as Lookahead"), (STEPS, "another optimizer wrapper")])
def test_weights_that_a_wrapper_writes(tmp_path: Path, every: int, words: str) -> None:
    said = mismatch(tmp_path, tricks.lookahead, every=every)
    assert "part at step 6, 3 step(s)" in said
    assert "its loss was" in said
    assert words in said


def test_an_unrecorded_generator(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)

    def noisy(model: nn.Module, batch: Batch) -> torch.Tensor:
        return squares(model, (batch[0] + 0.5 * float(drawn.normal()), batch[1]))

    def loop(run: Run, i: int, batch: Batch) -> None:
        run.optimizer.zero_grad()
        noisy(run.model, batch).backward()
        run.optimizer.step()

    with pytest.raises(Nondeterministic, match="`drawn`"):
        mismatch(tmp_path, loop, loss_fn=noisy)


def test_a_step_without_zero_grad(tmp_path: Path) -> None:
    def loop(run: Run, i: int, batch: Batch) -> None:
        if i != 6:
            run.optimizer.zero_grad()
        squares(run.model, batch).backward()
        run.optimizer.step()

    assert "the gradients of the step before were still there" in mismatch(tmp_path, loop)


def test_a_small_gradient_that_was_not_zeroed_is_found_at_its_own_step() -> None:
    """By a plain loop, the norm there changes by less than what two runs may differ by; their losses part later."""
    left_over, last = 2, 4

    def weighted(model: nn.Module, batch: Batch) -> torch.Tensor:
        return batch[2] * squares(model, batch)  # type: ignore[misc, no-any-return]

    def norms(run: Run, batches: list[Batch], zeroed: bool) -> list[SimpleNamespace]:
        found = []
        for i, batch in enumerate(batches):
            if zeroed or i != left_over + 1:
                run.optimizer.zero_grad()
            weighted(run.model, batch).backward()
            found.append(SimpleNamespace(norm=float(nn.utils.get_total_norm(run.grads))))
            run.optimizer.step()
        return found

    weights = [torch.tensor(5e-4 if i == left_over else 1.0) for i in range(last + 1)]
    run = running(plain)
    batches: list[Batch] = [(*batch, weight) for batch, weight in zip(run.batches, weights)]  # type: ignore[misc]
    trajectory = ak.capture(run.model, run.optimizer, weighted).follow(batches).trajectory
    zeroed, not_zeroed = (norms(running(plain), batches, yes) for yes in (True, False))
    assert 1e-5 < abs(not_zeroed[left_over + 1].norm / zeroed[left_over + 1].norm - 1) < 1e-4
    assert parting._not_zeroed(not_zeroed, last, trajectory)  # type: ignore[arg-type]
    assert not parting._not_zeroed(zeroed, last, trajectory)  # type: ignore[arg-type]
    zeroed[left_over + 1].norm *= 1 - 5e-5  # something else did this
    assert not parting._not_zeroed(zeroed, last, trajectory)  # type: ignore[arg-type]


def adversary(folder: Path, *, told: bool) -> ak.FlightRecorder:
    """A discriminator with dropout, through which its generator is trained between its own steps."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    maker = nn.Linear(2, 4)
    optimizer, other = (torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (judge, maker))

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.softplus(-model(batch[0])).mean() + nn.functional.softplus(model(batch[1])).mean()

    with ak.FlightRecorder(judge, optimizer, loss_fn, folder, window=STEPS, triggers=()) as recorder:
        for _ in range(STEPS):
            batch = torch.randn(8, 4), maker(torch.randn(8, 2)).detach()
            if told:
                recorder.before_forward()
            optimizer.zero_grad()
            loss = loss_fn(judge, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
            other.zero_grad()
            (-judge(maker(torch.randn(8, 2))).mean()).backward()
            other.step()
    return recorder


def test_a_model_that_is_called_before_the_recorded_pass(tmp_path: Path) -> None:
    untold = adversary(tmp_path / "untold", told=False)
    with pytest.raises(
        ReplayMismatch, match=r"Likely cause: the loss draws random numbers .* Call recorder\.before_forw"
    ):
        ak.explain(untold, step=STEPS - 1)
    told = adversary(tmp_path / "told", told=True)
    found = ak.explain(told, step=STEPS - 1, verify=0, treatments=False)
    assert "every loss is equal to the recorded one to the bit" in str(found.certificate)


def accumulated(folder: Path, *, edited: bool) -> ak.FlightRecorder:
    """Updates of four micro-batches, each divided by four; one has three. Or all have four, and the gradients of one
    are changed after the norm was taken."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, squares, folder, window=STEPS, triggers=()) as recorder:
        for i in range(STEPS):
            optimizer.zero_grad()
            count = 3 if i == 6 and not edited else 4
            for part in range(count):
                batch = torch.randn(8, 4), torch.randn(8, 1)
                loss = squares(model, batch) / 4
                loss.backward()
                if part < count - 1:
                    recorder.micro(batch, loss)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if edited and i == 6:
                for p in model.parameters():
                    p.grad *= torch.randn_like(p)  # type: ignore[operator]
            optimizer.step()
            recorder.step(batch, loss, norm=norm)
    return recorder


def test_a_short_update_that_was_divided_as_the_others(tmp_path: Path) -> None:
    with pytest.raises(ReplayMismatch, match=r"part at step 6, .* has 3 micro-batches where others have 4.* divisor=4"):
        ak.explain(accumulated(tmp_path, edited=False), step=STEPS - 1)


def weighed(folder: Path, *, inside: bool = False, by_tokens: bool = False) -> ak.FlightRecorder:
    """Micro-batches whose losses are weighed by their numbers of examples, which differ at step 6, or by something
    else; `inside` loss_fn, as the message of the other advises."""

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, float]) -> torch.Tensor:
        return squares(model, batch[:2]) * (batch[2] if inside else 1.0)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, loss_fn, folder, window=STEPS, triggers=()) as recorder:
        for i in range(STEPS):
            optimizer.zero_grad()
            sizes = (8, 8, 3) if i == 6 and not by_tokens else (8, 8, 8)
            for part, size in enumerate(sizes):
                weight = (0.5, 0.3, 0.2)[part] if by_tokens and i == 6 else size / sum(sizes)
                batch = torch.randn(size, 4), torch.randn(size, 1), weight
                loss = loss_fn(model, batch) * (1.0 if inside else weight)
                loss.backward()
                if part < 2:
                    recorder.micro(batch, loss)
            optimizer.step()
            recorder.step(batch, loss, divisor=1 if inside else None)
    return recorder


def test_micro_batches_that_were_weighed_by_their_sizes(tmp_path: Path) -> None:
    """A short last one, as of an epoch: it was taken for weights that something else had written to."""
    with pytest.raises(ReplayMismatch, match=r"part at step 6, .* weighed by their numbers of examples.* divisor=1"):
        ak.explain(weighed(tmp_path / "told"), step=STEPS - 1)
    with pytest.raises(ReplayMismatch, match=r"part at step 6, .* not all divided by the same number; or .* divisor=1"):
        ak.explain(weighed(tmp_path / "tokens", by_tokens=True), step=STEPS - 1)
    found = ak.explain(weighed(tmp_path / "inside", inside=True), step=STEPS - 1, treatments=False)
    assert f"The {STEPS} steps were replayed: every loss is equal" in str(found.certificate)


@pytest.mark.parametrize(
    ("both", "words"),
    [(1, "part at step 7, .* changed after the norm was taken"), (16, "part at step 6, .* edits gradients in place")],
)
def test_gradients_that_were_changed_behind_a_told_norm(
    tmp_path: Path, both: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aftershock.recorder.recorder.BOTH", both)
    with pytest.raises(ReplayMismatch, match=words):
        ak.explain(accumulated(tmp_path, edited=True), step=STEPS - 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the replay would go to the GPU")
def test_a_run_of_a_gpu_is_not_that_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it says where there is none: other masks, and so another loss."""
    now = RandomState.now

    def on_gpu(*given: Any) -> RandomState:
        return replace(now(*given), cuda=torch.get_rng_state())

    def step(run: Run, i: int, batch: Batch) -> None:
        run.backward(batch)
        run.optimizer.step()

    monkeypatch.setattr(RandomState, "now", on_gpu)
    calls = iter(range(10**6))

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        return squares(model, batch) + (0.0 if next(calls) < STEPS else model[0].weight.sum())

    said = mismatch(tmp_path, step, loss_fn=loss_fn)
    assert "recorded on a GPU and is replayed on a CPU" in said


def test_a_run_is_replayed_on_its_own_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card, other = torch.device("cpu"), torch.device("cuda", 1), torch.device("mps")
    of_cpu = RandomState.now(cpu)
    of_gpu = replace(of_cpu, cuda=torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for there, model_on, recorded, chosen in (
        (True, cpu, of_gpu, torch.device("cuda", 0)),
        (True, card, of_gpu, card),
        (True, card, of_cpu, cpu),
        (True, other, of_cpu, other),
        (False, cpu, of_gpu, cpu),
        (False, cpu, of_cpu, cpu),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert storage._same_kind(model_on, recorded) == chosen
