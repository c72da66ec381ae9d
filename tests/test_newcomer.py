"""A stranger's first hour with the recorder: two spikes at once, a hard source, many windows, a missing clip."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import InvalidInput, ReplayMismatch
from aftershock.recorder.draws import may_draw
from aftershock.recorder.store import open_flight
from aftershock.recorder.triggers import AtStep, Spike, Triggered

from .test_cli import call, failed

QUICK: dict[str, Any] = {"verify": 0, "treatments": False}


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(
    folder: Path, high: dict[int, float], steps: int = 48, limit: float | None = None, **options: Any
) -> ak.FlightRecorder:
    """Targets near zero, whose loss is about 1; those of the steps in `high` are moved by that much.

    limit: the max_norm at which the loop clips.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ak.FlightRecorder(model, optimizer, squares, folder, **{"window": 16, "after": 4, **options}) as recorder:
        for step in range(steps):
            batch = torch.randn(64, 3), torch.randn(64, 1) + high.get(step, 0.0)
            optimizer.zero_grad()
            loss = squares(model, batch)
            loss.backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            recorder.step(batch, loss)
    return recorder


def named(recorder: ak.FlightRecorder) -> list[str]:
    return [path.name for path in recorder.flights]


# --- two spikes in one window


def test_the_largest_event_of_a_window_is_explained(tmp_path: Path) -> None:
    recorder = train(tmp_path, {30: 3.0, 33: 9.0}, triggers=[AtStep(30)])
    found = ak.explain(recorder, **QUICK)
    assert found.facts.event.explained == 33
    assert "kept for step 30; step 33 stands out more and is explained here" in str(found)
    assert "step=30 (--step 30)" in str(found)
    other = ak.explain(recorder, step=30, **QUICK)
    assert (other.facts.event.explained, other.facts.recording.which) == (30, "")
    # a step that was asked for is not left for the run's own noise
    assert ak.explain(train(tmp_path / "calm", {}, triggers=[AtStep(30)]), **QUICK).facts.event.explained == 30


def test_what_was_seen_is_said_where_it_was_not_the_loss(tmp_path: Path) -> None:
    loud = lambda step: "the gradient norm is 9" if step.step == 30 else None  # noqa: E731
    norm: Any = SimpleNamespace(begin=lambda window: None, fires=loud, end=lambda: None)
    found = ak.explain(train(tmp_path / "calm", {}, triggers=[norm]), **QUICK)
    calm, page = str(found), found.report(tmp_path / "calm.html").read_text()
    assert "Step 30 is no spike" in calm
    assert "measured" not in calm.split("Earlier steps")[1]  # no columns for what was not looked into
    assert "<summary>The 16 steps before it: nothing was run again without any</summary>" in page
    assert "for what it saw at step 30: the gradient norm is 9. No loss that was recorded from there" in calm
    later = train(tmp_path / "later", {33: 1.1}, triggers=[norm])  # 6.9 robust σ: less than would trigger by itself
    assert ak.explain(later, **QUICK).facts.event.explained == 33
    assert "The loss rose at step 33: step=33 (--step 33) explains that." in str(ak.explain(later, step=30, **QUICK))
    none = ak.explain(train(tmp_path / "none", {}, triggers=[]), **QUICK)
    assert "This is the last step that was recorded (step= explains another)." in str(none)


def test_a_far_higher_spike_in_an_open_window_is_told_and_takes_it_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Triggered] = []
    recorder = train(tmp_path, {30: 3.0, 31: 9.0, 32: 8.0}, triggers=[Spike()], on_trigger=seen.append)
    assert [one.step for one in seen] == [30, 31]  # the third is no news
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines] == [" step 30", " step 31"]
    assert named(recorder) == ["step-000031"]
    flight = open_flight(tmp_path)
    assert (flight.trigger, flight.last, flight.after) == (31, 35, 4)
    assert flight.reason.startswith("the loss is 8")
    assert "; step 30: the loss is" in flight.reason
    assert flight.start(30, 16) <= 14  # the first can be asked for as well


def test_what_is_not_a_number_does_not_take_a_spikes_window(tmp_path: Path) -> None:
    recorder = train(tmp_path, {30: 3.0, 32: float("nan")}, steps=34)
    assert named(recorder) == ["step-000030"]
    assert ak.explain(recorder, **QUICK).facts.event.explained == 30
    assert ak.explain(recorder, step=32, **QUICK).kind == "not a number"


# --- a source of data that is harder than the rest


def fired(losses: list[float]) -> list[int]:
    spike = Spike()
    spike.begin(32)
    return [i for i, loss in enumerate(losses) if spike.fires(SimpleNamespace(loss=loss))]  # type: ignore[arg-type]


def test_a_height_that_keeps_coming_back_is_told_four_times() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (1 + 0.05 * torch.randn(300, generator=generator)).tolist()
    heights = (2 + 0.5 * torch.rand(300, generator=generator)).tolist()
    losses = [x + (heights[i] if i % 6 == 0 else 0) for i, x in enumerate(noise)]
    losses[231] += 6.0  # more than twice as high as the source
    rare = fired(losses)
    assert rare == [18, 24, 30, 36, 231]
    losses[231] -= 2.2  # less than twice as high, and still the worst of the run by far
    assert fired(losses) == rare
    # what comes back when all that is forgotten is news again
    losses = noise + noise
    for i in (20, 26, 32, 38, 44, 400):
        losses[i] += 2.0
    assert fired(losses) == [20, 26, 32, 38, 400]


# --- many windows


def test_the_worst_window_stays_and_is_explained_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    high = {20: 3.0, 40: 9.0, 60: 3.0, 80: 4.0}
    recorder = train(tmp_path / "flight", high, steps=90, triggers=[Spike()], keep=2)
    assert named(recorder) == ["step-000040", "step-000080"]
    dropped = [line for line in capfd.readouterr().err.splitlines() if "dropped" in line]
    assert len(dropped) == 1  # that the oldest goes is as ever
    assert "keep=2: the window of step 60 is dropped; that of step 40 stays, the worst of this run" in dropped[0]
    for flight in (recorder, recorder.directory):
        found = ak.explain(flight, **QUICK)
        assert found.facts.event.explained == 40
        assert "worst of the 2 windows that the run has kept; the other is of step 80 (step=" in str(found)
    assert ak.explain(recorder, step=80, **QUICK).facts.recording.which == ""
    with pytest.raises(InvalidInput, match=r"holds steps 0–44, 48–89$"):
        ak.explain(recorder, step=45)
    again = train(tmp_path / "flight", {}, steps=10)
    found = ak.explain(tmp_path / "flight", 5, model=nn.Linear(3, 1), loss_fn=squares, **QUICK)
    assert "Run 2 of 2 in flight." in str(found)
    assert found.page() == Path("flight-run2-step5.html")
    assert ak.explain(again, 5, **QUICK).facts.recording.which == "Run 2 of 2 in flight."
    with pytest.raises(InvalidInput, match=r"holds steps 0–9 \(run 2\); 0–44, 48–84 \(run 1\)$"):
        ak.explain(tmp_path / "flight", 45, model=nn.Linear(3, 1), loss_fn=squares)


# --- the command that is printed


def test_the_command_names_the_running_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my loop.py").write_text("")
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "my loop.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", script)
    train(tmp_path / "a", {}, steps=20, triggers=[AtStep(3), AtStep(15)])
    first, hint, second = capfd.readouterr().err.splitlines()
    assert first.endswith("--step 3 --build 'my loop.py:build'")
    assert "write a function build() in my loop.py that returns (model, optimizer, loss_fn)" in hint
    assert second.endswith("--step 15 --build 'my loop.py:build'")
    (tmp_path / "my loop.py").write_text("main()\n\n\ndef build():\n    ...\n")  # not yet there when it runs
    train(tmp_path / "b", {}, steps=6, triggers=[AtStep(3)])
    assert len(capfd.readouterr().err.splitlines()) == 1
    (tmp_path / "my loop.py").write_text("from beside import build\n")
    script.build = lambda: None  # type: ignore[attr-defined]
    train(tmp_path / "c", {}, steps=6, triggers=[AtStep(3)])
    assert len(capfd.readouterr().err.splitlines()) == 1


# --- a clip that the recorder was not told

SCRIPT = """
from torch import nn


def build():
    return nn.Linear(3, 1), None, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
"""


def test_a_forgotten_clip_can_be_told_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = train(tmp_path / "flight", {30: 3.0}, limit=0.05)
    with pytest.raises(ReplayMismatch, match=r"Explain this recording with clip=0.05 \(--clip 0.05\), and tell the"):
        ak.explain(recorder)
    told = ak.explain(recorder, clip=0.05, **QUICK)
    assert "to the bit. That is with clip=0.05, which explain() was told." in str(told.certificate)
    with pytest.raises(ReplayMismatch, match=r"clip=0.5, where the loop clips at 0.05"):
        ak.explain(recorder, clip=0.5)
    (tmp_path / "its_build.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    words = ["explain", "flight", "--build", "its_build.py:build", "--verify", 0, "--no-treatments"]
    assert "--clip 0.05" in failed(call(*words))
    (tmp_path / "loop.py").write_text("raise AssertionError('the training runs again')")
    refused = failed(call("explain", "flight", "--build", "loop.py:build"))
    assert "loop.py has no function 'build': write one that returns (model, optimizer, loss_fn)" in refused
    result = call(*words, "--clip", 0.05)
    assert result.exit_code == 0, result.stderr
    assert "which explain() was told" in result.stdout
    assert "\nwrote flight-step30.html: the same with its charts" in result.stdout


# --- random numbers that loss_fn draws before it calls the model


def denoised(model: nn.Module, batch: Tensor) -> Tensor:
    noise = torch.randn_like(batch)
    return (model(batch + noise) - noise[:, :1]).square().mean()


def denoising(folder: Path, begins: bool, precision: torch.dtype | None = None) -> tuple[ak.FlightRecorder, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, denoised, folder, window=8) as recorder:
        for _ in range(8):
            optimizer.zero_grad()
            batch = torch.randn(4, 3)  # drawn from the same generator, between the steps
            if begins:
                recorder.before_forward()
            with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
                loss = denoised(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    return recorder, model.weight.detach()


def test_numbers_drawn_before_the_model_is_called_are_told_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, weight = denoising(tmp_path / "plain", begins=False)
    assert capfd.readouterr().err.count("call recorder.before_forward() in the loop, right before loss_fn") == 1
    with pytest.raises(ReplayMismatch, match=r"loss_fn draws random numbers \(noise, masks, times\) before it calls"):
        ak.explain(plain, step=7, **QUICK)
    told, same = denoising(tmp_path / "told", begins=True)
    assert "before_forward" not in capfd.readouterr().err
    assert torch.equal(weight, same)
    found = ak.explain(told, step=7, **QUICK)
    assert "every loss is equal to the recorded one to the bit" in str(found.certificate)


def noised(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


class Trainer:
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(self.mixed(batch)).sum()

    def mixed(self, batch: Tensor) -> Tensor:
        return batch * torch.rand(1)


@pytest.mark.parametrize(
    ("loss_fn", "draws"),
    [
        (denoised, True),
        (lambda model, batch: model(noised(batch)).sum(), True),
        (Trainer().loss, True),
        (functools.partial(denoised), True),
        (squares, False),
        (len, False),
    ],
)
def test_only_code_that_names_something_that_draws_is_suspected(loss_fn: Any, draws: bool) -> None:
    assert may_draw(loss_fn) is draws


def test_a_name_that_is_not_assigned_yet_is_no_error() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return later(model, batch)

    assert may_draw(loss_fn) is False
    later = denoised
    assert may_draw(loss_fn) is True


def test_the_recorder_never_calls_loss_fn(tmp_path: Path) -> None:
    """A second stream of data inside loss_fn, as of unlabelled batches: a call of the recorder's would take one."""

    def trained(folder: Path | None) -> tuple[list[int], Tensor]:
        torch.manual_seed(0)
        stream, taken = iter(range(8)), []
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
            taken.append(next(stream))
            return (model(batch) - taken[-1]).square().mean()

        recorder = None if folder is None else ak.FlightRecorder(model, optimizer, loss_fn, folder, window=8)
        with recorder or contextlib.nullcontext():
            for _ in range(8):
                optimizer.zero_grad()
                batch = torch.randn(4, 3)
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                if recorder is not None:
                    recorder.step(batch, loss)
        return taken, model.weight.detach()

    (plain, weight), (recorded, same) = trained(None), trained(tmp_path)
    assert plain == recorded == list(range(8))
    assert torch.equal(weight, same)


class PartInFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)


def test_a_first_part_outside_autocast_does_not_end_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PartInFloat32()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(model: PartInFloat32, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = model.first(batch)
        return model(hidden).square().mean()

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=8) as recorder:
        for _ in range(8):
            optimizer.zero_grad()
            batch = torch.randn(4, 3)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                recorder.before_forward()
                loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    assert all(record.forward.autocast for record in recorder.recent)
    assert "to the bit" in str(ak.explain(recorder, step=7, **QUICK).certificate)


def test_who_said_where_loss_fn_begins_is_not_told_to_say_it(tmp_path: Path) -> None:
    """A weight that is annealed: the loss is another one, and it draws before the model, as it was told."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = {"noise": 1.0}

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return weights["noise"] * denoised(model, batch)

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=8) as recorder:
        for _ in range(8):
            optimizer.zero_grad()
            batch = torch.randn(4, 3)
            recorder.before_forward()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
            weights["noise"] *= 0.9
    with pytest.raises(ReplayMismatch) as raised:
        ak.explain(recorder, step=7, **QUICK)
    assert "cannot be explained" not in str(raised.value)
    assert "annealed" in str(raised.value)


def test_autocast_is_that_of_the_models_call_wherever_the_loop_says_that_a_pass_begins(tmp_path: Path) -> None:
    recorder, _ = denoising(tmp_path, begins=True, precision=torch.bfloat16)
    assert all(record.forward.autocast for record in recorder.recent)


# --- not a number


def test_a_loss_that_the_loops_own_guard_skips_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ak.FlightRecorder(model, optimizer, squares, tmp_path, window=8) as recorder:
        for step in range(12):
            batch = torch.randn(8, 3), torch.full((8, 1), float("nan") if step in (5, 7) else 1.0)
            optimizer.zero_grad()
            loss = squares(model, batch)
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
            recorder.step(batch, loss)
    told = capfd.readouterr().err
    assert told.count("after step 4 step() was given a loss that is not finite, and the optimizer made no step") == 1
    assert [record.step for record in recorder.recent] == list(range(2, 10))  # steps that were made, the last eight


def test_a_step_after_the_first_that_is_not_finite_says_which_is_told(tmp_path: Path) -> None:
    recorder = train(tmp_path, {20: float("nan")}, steps=30)
    found = ak.explain(recorder, step=23, **QUICK)
    assert "Step 23 comes after step 20, the first that is not finite" in str(found)
    assert found.verdict.startswith("The loss or gradient of step 20 is not finite")
    assert "comes after" not in str(ak.explain(recorder, step=20, **QUICK))


def test_a_run_that_begins_with_what_is_not_finite_is_not_told_to_begin_earlier(tmp_path: Path) -> None:
    found = ak.explain(train(tmp_path, {0: float("nan")}, steps=12), **QUICK)
    assert "the run begins with it" in found.verdict
    assert "earlier" not in found.verdict
