"""Which batch did this: every contribution against a second run by hand, and the verdict in words."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import aftershock as ak
from aftershock.api.contributions import EDITS
from aftershock.core import kicks
from aftershock.core.contributions import BentReadout, contributions
from aftershock.core.scores import adjoint
from aftershock.core.state import pair, stack
from aftershock.errors import AftershockError, InvalidInput, Nondeterministic, ReplayMismatch
from aftershock.recorder.examples import example_shares
from aftershock.recorder.neighbours import neighbours

from .cases import TinyTransformer, cross_entropy, make, mlp, next_token

WARM = 400  # steps before the recording: by then v remembers more than the last batch
CULPRIT, SPIKE = WARM + 24, WARM + 28


@dataclass
class Run:
    """A recorded run, and its batches for running it again by hand."""

    directory: Path
    model: nn.Module
    recorder: ak.FlightRecorder
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: list[Any] = field(default_factory=list)
    states: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    randoms: list[Tensor] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    clip: float | None = None

    def again(self, start: int, stop: int, change: Callable[[int, nn.Module, Any], bool]) -> float:
        """The loss of step `stop` in a plain torch loop from `start`; `change` may do a step in its own way."""
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters())
        model.load_state_dict(self.states[start][0])
        optimizer.load_state_dict(copy.deepcopy(self.states[start][1]))
        for step in range(start, stop):
            torch.set_rng_state(self.randoms[step])
            optimizer.param_groups[0]["lr"] = self.lrs[step]
            optimizer.zero_grad()
            if change(step, model, optimizer):
                continue
            self.loss_fn(model, self.batches[step]).backward()
            self.finish(model, optimizer)
        torch.set_rng_state(self.randoms[stop])
        return float(self.loss_fn(model, self.batches[stop]).detach())

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()


def record(
    directory: Path,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    feed: Callable[[int], Any],
    *,
    steps: int = 34,
    lr: Callable[[int], float] = lambda step: 1e-2,
    clip: float | None = None,
    tell: bool = True,
    **options: Any,
) -> Run:
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = ak.FlightRecorder(
        model, optimizer, loss_fn, directory, clip=clip if tell else None, **{"window": 16, **options}
    )
    run = Run(directory, model, recorder, loss_fn, clip=clip)
    for step in range(WARM + steps):
        batch = feed(step)
        optimizer.param_groups[0]["lr"] = lr(step)
        if step == WARM:
            recorder.__enter__()
        run.states.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        run.randoms.append(torch.get_rng_state())
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        run.finish(model, optimizer)
        if step >= WARM:
            recorder.step(batch, loss)
        run.batches.append(batch)
        run.losses.append(float(loss.detach()))
        run.lrs.append(lr(step))
    recorder.__exit__(None, None, None)
    return run


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def regression(directory: Path, *, bad: int | None = CULPRIT, **options: Any) -> Run:
    """An MLP on a task it learns; at step `bad` two examples are far off."""
    torch.manual_seed(0)
    model = mlp(6, 16, 1, activation=nn.GELU).double()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(6, 1, generator=generator, dtype=torch.float64)

    def feed(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        y = torch.tanh(x @ weights)
        if step == bad:
            y[[3, 8]] += 40
        return x, y

    return record(directory, model, squares, feed, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return regression(tmp_path_factory.mktemp("flight"))


@pytest.fixture(scope="module")
def found(run: Run) -> Any:
    return ak.explain(run.recorder, step=SPIKE)


def test_measured_is_what_a_loop_without_the_batch_gives(run: Run, found: Any) -> None:
    start = int(found.data["step"].values[0])
    measured = found.data["measured"]

    def near(step: int) -> list[int]:
        others = [i for i in range(start, SPIKE) if i != step]
        return sorted(others, key=lambda i: (abs(i - step), i))[:4]

    def replaced(step: int, model: nn.Module, optimizer: Any) -> bool:
        if step != CULPRIT:
            return False
        for i in near(step):
            (squares(model, run.batches[i]) / 4).backward()
        optimizer.step()
        return True

    def reset(name: str) -> Callable[[int, nn.Module, Any], bool]:
        def change(step: int, model: nn.Module, optimizer: Any) -> bool:
            if step == CULPRIT + 1:
                for state in optimizer.state.values():
                    state[name].zero_()
            return False

        return change

    def expected(change: Callable[[int, nn.Module, Any], bool]) -> float:
        return run.losses[SPIKE] - run.again(CULPRIT - 2, SPIKE, change)

    assert abs(expected(lambda *_: False)) < 1e-12
    assert abs(expected(replaced)) > 0.01
    assert float(measured.sel(change="replace", step=CULPRIT)) == pytest.approx(expected(replaced), rel=1e-8)
    skipped = expected(lambda step, *_: step == CULPRIT)
    assert float(measured.sel(change="skip", step=CULPRIT)) == pytest.approx(skipped, rel=1e-8)
    for change, name in (("reset m", "exp_avg"), ("reset v", "exp_avg_sq")):
        assert float(measured.sel(change=change, step=CULPRIT + 1)) == pytest.approx(expected(reset(name)), rel=1e-6)
    curve = found.data["emergence"].sel(step=CULPRIT).values
    for h in (1, 2):
        model_loss = run.again(CULPRIT - 2, CULPRIT + h, replaced)
        assert curve[h - 1] == pytest.approx(run.losses[CULPRIT + h] - model_loss, rel=1e-8)


def test_the_culprit_and_its_examples_are_named(run: Run, found: Any) -> None:
    best = found.culprits[0]
    assert (best.step, best.delay, best.batches) == (CULPRIT, SPIKE - CULPRIT, (CULPRIT - WARM,))
    assert {i for i, _ in best.examples[:2]} == {3, 8}
    assert found.verdict.startswith(f"Step {CULPRIT} raised the loss at step {SPIKE} by ")
    assert "examples 3 and 8 carry" in found.verdict
    assert "there is no spike (replayed)" in found.verdict
    assert (
        f"{best.measured:.3g} of {run.losses[SPIKE] - np.median(run.losses[SPIKE - 16 : SPIKE]):.3g}" in found.verdict
    )
    assert "to the bit" in str(found.certificate)
    assert str(found).count("\n") > 10


def test_contributions_agree_with_the_engine_and_add_up(run: Run, found: Any) -> None:
    """The same zeroed and skipped steps by the engine, from a point made by hand."""
    start = int(found.data["step"].values[0])
    model = copy.deepcopy(run.model)
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(run.states[start][0])
    optimizer.load_state_dict(copy.deepcopy(run.states[start][1]))
    path = ak.capture(model, optimizer, squares).follow(run.batches[start : SPIKE + 1])
    for change in ("zero", "skip"):
        watch = path.watch(0, ak.own_loss)
        straight = BentReadout.of(watch, directions=0)
        edits = {change: EDITS[change]}
        parts = contributions(path.trajectory, watch.last, straight, lambda step: edits, torch.device("cpu"))  # noqa: B023
        wanted = parts[change].sum(-1).numpy()
        got = found.data["contribution"].sel(change=change).values
        assert np.abs(wanted).max() > 1e-4
        np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-12)
    by_layer = found.data["layer_contribution"].sum("layer")
    np.testing.assert_allclose(by_layer, found.data["contribution"].sum("channel"), rtol=1e-9, atol=1e-13)
    assert list(found.data["layer"].values) == ["0", "2"]


def test_small_changes_are_predicted(tmp_path: Path) -> None:
    """With a small learning rate the linear predictions meet the second runs."""
    run = regression(tmp_path, bad=None, lr=lambda step: 1e-2 if step < WARM else 1e-5)
    found = ak.explain(run.recorder, step=SPIKE, verify=4)
    for culprit in found.culprits[:4]:
        assert culprit.predicted == pytest.approx(culprit.measured, rel=0.1)


def test_the_skip_list_is_lightnings(tmp_path: Path, found: Any) -> None:
    path = found.save_skip_list(tmp_path / "skip_batches.json")
    assert json.loads(path.read_text()) == [CULPRIT - WARM]


def test_tensorboard_gets_scalars(found: Any) -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.seen.append((tag, value, step))

    writer = Writer()
    found.to_tensorboard(writer)
    assert ("aftershock/measured", found.culprits[0].measured, CULPRIT) in writer.seen


def test_a_learning_rate_that_rose(tmp_path: Path) -> None:
    run = regression(tmp_path, bad=None, lr=lambda step: 1e-2 if step < WARM + 20 else 0.5)
    found = ak.explain(run.recorder, step=SPIKE)
    jump = found.data.attrs["jump"]

    def held(step: int, model: nn.Module, optimizer: Any) -> bool:
        optimizer.param_groups[0]["lr"] = 1e-2
        return False

    assert (jump["step"], jump["from"], jump["to"]) == (WARM + 20, 1e-2, 0.5)
    assert jump["measured"] == pytest.approx(run.losses[SPIKE] - run.again(WARM + 20, SPIKE, held), rel=1e-8)
    assert "No single batch explains this spike" in found.verdict
    assert f"the learning-rate change at {WARM + 20}" in found.verdict
    assert found.skip == []


def test_a_batch_that_is_itself_the_spike(run: Run) -> None:
    found = ak.explain(run.recorder, step=CULPRIT)
    assert found.verdict.startswith(f"The batch of step {CULPRIT} itself raises its loss")
    assert found.skip == [CULPRIT - WARM]


def test_an_ordinary_step_is_called_ordinary(run: Run) -> None:
    assert "is no spike" in ak.explain(run.recorder, step=WARM + 20, verify=1).verdict


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(6, 8, 3)

    def feed(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 6)
        return x * (math.nan if step == WARM + 20 else 1), torch.arange(8) % 3

    run = record(tmp_path, model, cross_entropy, feed, steps=23)
    assert [path.name for path in run.recorder.flights] == ["step-000420"]
    found = ak.explain(run.recorder, verify=1)
    assert found.data.attrs["step"] == WARM + 19
    assert found.verdict == (
        "The loss of step 420 is not finite; step 419 is the last finite one. "
        "The batch of step 420 itself holds values that are not finite."
    )
    assert found.skip == [20]
    with pytest.raises(InvalidInput, match="not recorded"):
        ak.explain(run.recorder, step=999)


def test_dropout_and_clipping_and_examples_that_couple(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyTransformer(dropout=0.2)
    cycle = torch.arange(6)

    def feed(step: int) -> Tensor:
        tokens = (cycle + torch.randint(0, 5, (8, 1))) % 5
        if step == CULPRIT:
            tokens[2] = torch.randint(0, 5, (6,))
        return tokens

    run = record(tmp_path, model, next_token, feed, clip=0.5, lr=lambda step: 3e-2)
    found = ak.explain(run.recorder, step=SPIKE)
    assert "to the bit" in str(found.certificate)
    best = found.culprits[0]
    assert len(best.examples) == 8
    assert "put alone" in found.data.attrs["examples"][str(best.step)]
    assert run.losses[SPIKE] - run.again(best.step, SPIKE, lambda step, *_: step == best.step) == pytest.approx(
        float(found.data["measured"].sel(change="skip", step=best.step)), rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize("name", ["tanh_mlp", "batch_norm", "dropout"])
def test_an_examples_share_is_that_of_an_ordinary_batch_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """⟨λ, x(ordinary with it) − x(ordinary)⟩ from the path's own replaced batches, where examples couple too."""
    monkeypatch.setattr(kicks, "STIFF", math.inf)  # nowhere stiff: the linear pairing alone
    case = make(name)
    path = case.path(5)
    at, last = 1, 4
    control = path.control(at)
    watch = path.watch(at, ak.own_loss, last - at)
    swept = adjoint(watch, watch.slope, [last - at], torch.device("cpu"))
    batch, ordinary = path.steps[at].batch, path.steps[at - 1].batch
    shares, how = example_shares(control, path.trajectory, swept, batch, ordinary)
    assert shares is not None
    assert "put alone" in how

    def mixed(i: int) -> Any:
        found = tree_map(torch.clone, ordinary)
        for x, y in zip(tree_leaves(found), tree_leaves(batch)):
            x[i] = y[i]
        return found

    everything = path.replace([ordinary, *(mixed(i) for i in range(len(shares)))], at=at)
    paired = pair(swept.first, stack(everything.difference()))[0].double()
    assert torch.allclose(shares, paired[1:] - paired[0], rtol=1e-7, atol=1e-12)
    assert shares.abs().max() > 1e-6


def test_a_bad_batch_is_no_reference_for_the_steps_around_it() -> None:
    norms = [1.0, 1.1, 0.9, 1.0, 50.0, 1.05, 0.95, 1.0]
    assert neighbours(5, norms, 3) == [6, 3, 7]
    assert neighbours(4, norms, 3) == [3, 5, 2]
    assert neighbours(0, [1.0, 2.0, 90.0], 2) == [1, 2]  # too few are left without it


# --- what cannot be replayed is said


def test_untold_clipping_is_named(tmp_path: Path) -> None:
    run = regression(tmp_path, clip=0.05, tell=False)
    with pytest.raises(ReplayMismatch, match=r"a missing clip=0.05: the gradients of \d+ steps"):
        ak.explain(run.recorder, step=SPIKE)


def test_a_run_that_does_not_repeat_is_named(tmp_path: Path) -> None:
    run = regression(tmp_path)
    with pytest.raises(ReplayMismatch, match="part at step 400, 0 step"):
        ak.explain(run.recorder, step=SPIKE, loss_fn=lambda m, b: 2 * squares(m, b))
    noise = torch.Generator().manual_seed(0)

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0] + 0.1 * torch.randn(batch[0].shape, generator=noise)), batch[1])

    with pytest.raises(Nondeterministic, match="`noise`"):
        ak.explain(run.recorder, step=SPIKE, loss_fn=noisy)


def test_another_process_needs_the_code(tmp_path: Path, run: Run) -> None:
    elsewhere = tmp_path / "copied"
    import shutil

    shutil.copytree(run.directory, elsewhere)
    with pytest.raises(InvalidInput, match="--build module:function"):
        ak.explain(elsewhere, step=SPIKE)
    fresh = mlp(6, 16, 1, activation=nn.GELU).double()
    found = ak.explain(elsewhere, step=SPIKE, model=fresh, loss_fn=squares, verify=1)
    assert found.culprits[0].step == CULPRIT
    with pytest.raises(AftershockError, match="another model"):
        ak.explain(elsewhere, step=SPIKE, model=mlp(6, 16, 16, 1).double(), loss_fn=squares)
