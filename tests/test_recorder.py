"""The recorder observes: training with it is equal to the bit to training without it, and it never raises into it."""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import AftershockError, InvalidInput
from aftershock.recorder.alarm import robust_z
from aftershock.recorder.explanation import FlightExplanation
from aftershock.recorder.records import Source, decode, encode
from aftershock.recorder.store import open_flight
from aftershock.recorder.triggers import AtStep, NotANumber, OnSignal, Spike

from .cases import cross_entropy, next_token

STEPS = 9


class Net(nn.Module):
    """Batch normalization, whose buffers move, and dropout, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def train(
    directory: Path | None,
    *,
    steps: int = STEPS,
    micro: int = 1,
    scaler: bool = False,
    clip: float | None = 0.5,
    overflow: int | None = None,
    feed: Callable[[int, Any], Any] = lambda step, batch: batch,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, list[float], ak.FlightRecorder | None]:
    """The loop a user would write, with everything at once; `directory` None is the loop without a recorder."""
    torch.manual_seed(3)
    model, generator = Net(), torch.Generator().manual_seed(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options.pop("optimizer", {}))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaler)
    recorder = None
    if directory is not None:
        recorder = ak.FlightRecorder(model, optimizer, cross_entropy, directory, clip=clip, **options)
        recorder.__enter__()
    losses = []
    for step in range(steps):
        total = 0.0
        for i in range(micro):
            torch.rand(3)  # a loader that draws moves the global random state between forward passes
            batch = feed(step, data(generator))
            loss = cross_entropy(model, batch) / micro
            scale.scale(loss * math.inf if step == overflow else loss).backward()
            total += loss.item()
            if recorder and i < micro - 1:
                recorder.micro(batch, loss)
        scale.unscale_(optimizer) if scaler else None
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        scheduler.step()
        if recorder:
            recorder.step(batch, loss, norm=norm)
        with torch.no_grad():
            model(batch[0])  # a look at the model that is no step
        losses.append(total)
    if recorder:
        recorder.__exit__(None, None, None)
    return model, optimizer, losses, recorder


LOOPS: dict[str, dict[str, Any]] = {
    "single": {"optimizer": {"foreach": False}},
    "foreach": {"optimizer": {"foreach": True}},
    "fused": {"optimizer": {"fused": True}},
    "no clipping": {"clip": None},
    "accumulation": {"micro": 3},
    "scaler": {"scaler": True},
    "scaler, fused": {"scaler": True, "optimizer": {"fused": True}},
    "scaler skips a step": {"scaler": True, "overflow": 4},
    "scaler skips a step, fused": {"scaler": True, "overflow": 4, "optimizer": {"fused": True}},
}


@pytest.mark.parametrize("name", list(LOOPS))
def test_training_is_equal_to_the_bit_and_so_is_its_replay(name: str, tmp_path: Path) -> None:
    options = LOOPS[name]
    plain, _, losses, _ = train(None, **options)
    after = torch.rand(2)
    model, _, seen, recorder = train(tmp_path, window=8, every=3, **options)
    assert torch.equal(after, torch.rand(2)), "the global random state moved"
    assert seen == losses
    for a, b in zip(plain.state_dict().values(), model.state_dict().values()):
        assert torch.equal(a, b)
    assert recorder is not None
    assert recorder.recording is False
    skipped = 1 if "overflow" in options else 0
    assert [r.step for r in recorder.recent] == list(range(STEPS - skipped))[-8:]
    found = ak.explain(recorder, step=STEPS - 1 - skipped, verify=0, references=0, window=5)
    assert "to the bit" in str(found.certificate)


def test_the_state_of_numpys_generator_is_that_before_each_pass(tmp_path: Path) -> None:
    """It rests, moves, and holds the second number of a pair of normal draws; where it rests it is read once."""
    model, generator, states, reads = Net(), torch.Generator().manual_seed(4), [], []
    optimizer = torch.optim.AdamW(model.parameters())
    np.random.seed(1)  # noqa: NPY002 - the generator that users' loops draw from
    real, recorder = np.random.get_state, ak.FlightRecorder(model, optimizer, cross_entropy, tmp_path)
    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(np.random, "get_state", lambda *a, **k: (reads.append(len(states)), real(*a, **k))[1])
        for draws in (0, 0, 1, 0, 1, 0, 0, 1):
            np.random.randn(draws)  # noqa: NPY002
            states.append(real(legacy=False))
            batch = data(generator)
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(batch, loss)
    found = [record.fed[0].random.numpy for record in recorder.recent]
    assert [np.frombuffer(one.words, np.uint32)[:-1].tolist() for one in found] == [
        state["state"]["key"].tolist() for state in states
    ]
    assert [not math.isnan(one.gauss) for one in found] == [bool(state["has_gauss"]) for state in states]
    assert {2, 7}.isdisjoint(reads), "it had not moved"


def train_on_odd_batches(directory: Path) -> None:
    class Odd:
        pass

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with ak.FlightRecorder(model, optimizer, cross_entropy, directory) as recorder:
        for _ in range(3):
            cross_entropy(model, data(torch.Generator().manual_seed(0))).backward()
            optimizer.step()
            recorder.step(Odd(), 1.0)


def recorded(directory: Path, losses: list[Any], **told: Any) -> ak.FlightRecorder:
    """A step for each of the losses that `step` is given."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = data(torch.Generator().manual_seed(0))
    with ak.FlightRecorder(model, optimizer, cross_entropy, directory) as recorder:
        for loss in losses:
            cross_entropy(model, batch).backward()
            optimizer.step()
            recorder.step(batch, loss, **told)
    return recorder


@pytest.mark.parametrize(
    ("loss", "told", "words"),
    [
        (1.0, {"index": [3, 5]}, r"index= is the batch's place in the data, a whole number; got \[3, 5\]"),
        (1.0, {"index": torch.tensor([3, 5])}, r"index= is the batch's place in the data, a whole number; got tensor"),
        (None, {}, "loss= is the loss of this batch, a number or a tensor; got None"),
        ([1.0], {}, "loss= is the loss of this batch, a number or a tensor; got \\[1.0\\]"),
    ],
)
def test_what_step_cannot_take_is_named_and_explained_later(
    tmp_path: Path, loss: Any, told: dict[str, Any], words: str
) -> None:
    with pytest.warns(RuntimeWarning, match=f"has stopped, training goes on: .*{words}"):
        recorder = recorded(tmp_path, [loss] * 3, **told)
    for asked in ({"step": 2}, {}):
        with pytest.raises(AftershockError, match=f"The recorder stopped: .*{words}"):
            ak.explain(recorder, **asked)


def test_a_number_of_any_library_is_a_loss(tmp_path: Path) -> None:
    recorder = recorded(tmp_path, [np.float32(1.5), np.float64(1.5), 1.5, torch.tensor(1.5)])
    assert [record.loss for record in recorder.recent] == [1.5] * 4


def test_the_loop_never_sees_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, losses, _ = train(None)
    with pytest.warns(RuntimeWarning, match="has stopped, training goes on.*Odd") as seen:
        train_on_odd_batches(tmp_path / "odd")
    assert len(seen) == 1

    def full(*arguments: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aftershock.recorder.ring.write_tensors", full)
    with pytest.warns(RuntimeWarning, match="No space left on device") as seen:
        model, _, with_recorder, _ = train(tmp_path / "full")
    assert len(seen) == 1
    assert with_recorder == losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))


def test_a_watched_model_can_be_copied_and_pickled(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with ak.FlightRecorder(model, optimizer, cross_entropy, tmp_path) as recorder:
        batch = data(torch.Generator().manual_seed(0))
        loss = cross_entropy(model, batch)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            cross_entropy(twin, batch)
        loss.backward()
        optimizer.step()
        recorder.step(batch, loss)
        cross_entropy(copy.deepcopy(model), batch)
        assert recorder._passes.random is None, "a copy's forward pass was taken for the model's"
        assert recorder.recording


def test_what_cannot_be_recorded_is_said_before_the_loop(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(AftershockError, match="AdamW"):
        ak.FlightRecorder(model, torch.optim.SGD(model.parameters()), cross_entropy, tmp_path)
    with pytest.raises(InvalidInput, match="window"):
        ak.FlightRecorder(model, torch.optim.AdamW(model.parameters()), cross_entropy, tmp_path, window=1)


def test_the_ring_is_bounded(tmp_path: Path) -> None:
    _, _, _, recorder = train(tmp_path, steps=40, window=8, every=4, triggers=())
    assert recorder is not None
    files = sorted(path.name for path in (tmp_path / "ring").iterdir())
    assert len([name for name in files if name.startswith("state")]) <= 4
    assert len([name for name in files if name.startswith("step")]) <= 16
    flight = open_flight(tmp_path)
    assert flight.last == 39
    assert flight.start(39, 8) == 28
    assert not [name for name in files if name.startswith(".")]


def test_triggers_keep_windows(tmp_path: Path) -> None:
    def feed(step: int, batch: Any) -> Any:
        if step == 14:
            os.kill(os.getpid(), signal.SIGUSR1)
        return (batch[0] * (math.nan if step == 25 else 1), batch[1])

    before = signal.getsignal(signal.SIGUSR1)
    triggers = [AtStep(5), OnSignal(signal.SIGUSR1), NotANumber()]
    _, _, _, recorder = train(tmp_path, steps=30, window=8, after=3, feed=feed, triggers=triggers)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert recorder is not None
    names = [path.name for path in recorder.flights]
    assert names == ["step-000005", "step-000014", "step-000025"]
    assert open_flight(tmp_path / "step-000025").reason == "the loss is nan and the gradient norm nan"
    assert open_flight(tmp_path, 14).reason == "signal SIGUSR1"


def test_numbers_that_are_not_finite_are_told_once_and_then_counted(capsys: pytest.CaptureFixture[str]) -> None:
    trigger = NotANumber()
    trigger.begin(16)
    records = [
        SimpleNamespace(loss=x, norm=1.0, finite=math.isfinite(x)) for x in (1.0, math.nan, 1.0, math.inf, math.nan)
    ]
    fired = [trigger.fires(record) for record in records]  # type: ignore[arg-type]
    assert fired == [None, "the loss is nan and the gradient norm 1", None, None, None]
    trigger.end()
    assert "after the first, 2 more step(s) had a loss or gradient norm that is not finite" in capsys.readouterr().err
    trigger.begin(16)
    trigger.end()
    assert not capsys.readouterr().err


def test_a_trigger_fires_once_per_spike() -> None:
    spike = Spike(warmup=4, threshold=5)
    spike.begin(16)

    class Fake:
        def __init__(self, loss: float) -> None:
            self.loss = loss

    losses = [1.0, 1.1, 0.9, 1.0, 1.05, 9.0, 9.5, 1.0, 1.0, 8.0]
    fired = [i for i, loss in enumerate(losses) if spike.fires(Fake(loss))]  # type: ignore[arg-type]
    assert fired == [5, 9]
    # median 3, deviations 2 1 0 1 97 → MAD 1: (10 − 3) / 1.4826
    assert robust_z(10.0, [1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(7 / 1.4826)


def test_a_folder_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    _, _, losses, _ = train(None)
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="has stopped, training goes on"):
        _, _, with_recorder, _ = train(tmp_path / "file" / "flight")
    assert with_recorder == losses


def test_batches_come_back_as_they_were() -> None:
    batch = {"x": torch.randn(2, 3).mT, "n": [1, None, "a"], 3: (torch.tensor(True), torch.ones(2).bfloat16(), 0.1)}
    structure, tensors = encode(batch)
    batch["x"].zero_()
    again = decode(structure, tensors, torch.device("cpu"))
    assert list(again) == ["x", "n", 3]
    assert again["n"] == [1, None, "a"]
    assert again["x"].abs().sum() > 0
    assert isinstance(again[3], tuple)
    assert again[3][1].dtype == torch.bfloat16
    with pytest.raises(InvalidInput, match="pickling"):
        encode({"x": object()})


def test_indices_with_a_dataset(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randint(0, 5, (20, 6)))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(m: nn.Module, batch: list[Tensor]) -> Tensor:
        return next_token(m, batch[0])

    with ak.FlightRecorder(model, optimizer, loss_fn, tmp_path, window=8, dataset=dataset) as recorder:
        for step in range(10):
            indices = torch.arange(step, step + 4)
            optimizer.zero_grad()
            loss = loss_fn(model, Source(torch.device("cpu"), dataset).batch(recorder_view(indices)))
            loss.backward()
            optimizer.step()
            recorder.step(indices, loss, index=100 + step)
    assert recorder.recent[-1].fed[0].tensors[0].tolist() == [9, 10, 11, 12]
    found = ak.explain(tmp_path, step=9, verify=1)
    assert "to the bit" in str(found.certificate)
    assert found.data["batch_index"].values[-2:, 0].tolist() == [108, 109]


def recorder_view(indices: Tensor) -> Any:
    from aftershock.core.randomness import RandomState
    from aftershock.recorder.records import Fed

    return Fed(*encode(indices), 0, RandomState.now(torch.device("cpu")))


def test_a_forecast_is_exact_and_leaves_training_alone(tmp_path: Path) -> None:
    model, optimizer, _, recorder = train(tmp_path, steps=20, window=16, clip=None)
    assert recorder is not None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    good = data(torch.Generator().manual_seed(9))
    bad = recorder.forecast((good[0] * 50, 2 - good[1]), horizon=4, futures=2)
    assert bad.response is not None
    assert bad.largest_increase == pytest.approx(float(bad.response.mean("future").max()))
    assert bad.peak_horizon == int(bad.response.mean("future").argmax("horizon")) + 1
    assert bad.harmful(bad.largest_increase - 1e-9)
    assert not bad.harmful(bad.largest_increase)
    bad.save(tmp_path / "forecast.zarr")
    loaded = type(bad).load(tmp_path / "forecast.zarr")
    assert loaded.data.identical(bad.data)
    assert str(loaded) == str(bad)
    diverged = recorder.forecast((good[0] * math.inf, good[1]), horizon=4, futures=2)
    diverged.save(tmp_path / "diverged.zarr")
    assert type(bad).load(tmp_path / "diverged.zarr").response is None
    assert "the run diverges" in str(type(bad).load(tmp_path / "diverged.zarr"))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    # the truth by hand: the next step taken with the batch and with the mean of the last four, one horizon later
    expected = _by_hand(model, optimizer, recorder, good)
    assert abs(expected) > 1e-4
    # both difference float32 losses near 1, a rounding of which is 1.2e-7
    assert float(bad.response.isel(horizon=0)[0]) == pytest.approx(expected, abs=3e-7)


def _by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: ak.FlightRecorder, good: Any) -> float:
    everything = [record.batch(recorder.source) for record in recorder.recent]
    past, watched = everything[-4:], [everything[i] for i in (0, 2, 4, 6, 9, 11, 13, 15)]  # eight, spread over all
    found, random = [], torch.get_rng_state()  # dropout masks of both runs and of the probe start from here
    for batches in (past, [(good[0] * 50, 2 - good[1])]):
        memo: dict[int, Any] = {}
        twin, stepper = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
        torch.set_rng_state(random)
        for batch in batches:
            (cross_entropy(twin, batch) / len(batches)).backward()
        stepper.step()
        found.append(twin)
    losses = []
    with torch.no_grad():
        for twin in found:
            torch.set_rng_state(random)
            losses.append(sum(float(cross_entropy(twin, batch)) for batch in watched) / len(watched))
    return losses[1] - losses[0]


def test_findings_of_the_instruments_hold_the_numbers_that_decided_them(tmp_path: Path) -> None:
    _, _, _, recorder = train(tmp_path)
    assert recorder is not None
    found = ak.explain(recorder, verify=0, placebos=0, treatments=False)
    (product,) = [finding for finding in found.certificate.findings if finding.subject == "Hessian products"]
    assert product.value is not None
    assert f"of the gradient to {product.value:.1e}" in product.sentence
    assert "(in float64" in product.sentence
    assert 0 < product.value < product.threshold == 1e-3
    wild = FlightExplanation(found.data.assign(growth=2.0**8, growth_steps=8))
    (growth,) = [finding for finding in wild.certificate.findings if finding.subject == "growth"]
    assert (growth.level, growth.quantity, growth.threshold) == ("care", "per step", 1.3)
    assert growth.value == pytest.approx(2.0)
