"""Rows carried along a path: nothing changes nothing, together as alone, by hand with torch.optim, and divergence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.core import rows as rows_module
from aftershock.core import sweeps
from aftershock.core.batches import same_batch
from aftershock.core.exact_rows import ExactRows
from aftershock.core.mapping import mapped_over
from aftershock.core.probe import Reader, own_loss
from aftershock.core.responses import ANSWERS, Pass, respond
from aftershock.core.rollout import Rows, rollout
from aftershock.core.state import CHANNELS, JointState, Tangent, stack
from aftershock.errors import OutOfMemory

from .cases import CASES, Case, classes, cross_entropy, make, mlp
from .test_changes import clip_and_step, gradients

TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])


def with_rows(path: ak.Path, together: bool) -> ak.Path:
    path.point.loss.sharing.wanted = together
    return path


# --- nothing


@TOGETHER
@pytest.mark.parametrize("name", CASES)
def test_a_change_of_nothing_has_no_response(name: str, together: bool) -> None:
    case = make(name)
    path = with_rows(case.path(4), together)
    probe = case.batch()
    zero = torch.zeros(path.point.loss.layout.size, dtype=torch.float64)
    changes = [path.replace([path.steps[1].batch], at=1), path.perturb(zero, at=1)]
    rates = {float(hyper.lr) for hyper in path.steps[1].hypers}
    if len(rates) == 1:
        changes.append(path.set(1, lr=rates.pop()))
    edits = tuple(edit for change in changes for edit in change.edits)
    other = path.replace([case.batch()], at=1).edits  # a row that moves, so that rows are carried at all
    nothing = replace(changes[0], edits=(*edits, *other))
    labels = [*map(str, range(len(edits))), "other"]
    for watched, answers in ((probe, ANSWERS), (ak.own_loss, ("exact",))):
        response = nothing.response(watched, labels=labels, answers=answers).data["response"].values[:, :, 0]
        assert (response[0, :-1] == 0.0).all()
        assert (response[0, -1] != 0.0).all()
        assert (response[:, :-1] == 0.0).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_of_the_controls_batch_is_nothing_among_others(seed: int) -> None:
    """Gradients of one mapped pool round differently by their place in it, and so do losses of mapped rows."""
    torch.manual_seed(seed)
    model, draw = mlp(8, 125, 3).double(), classes((8,), size=5)
    batches = [(x.double(), y) for x, y in (draw() for _ in range(9))]
    point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-3), cross_entropy)
    path = with_rows(point.follow(batches[:3]), True)
    copies = [tuple(x.clone() for x in batches[0]), *batches[4:]]
    response = path.replace(copies, 0).response(batches[3]).data["response"].values
    assert (response[:, 0] == 0.0).all()
    assert (response[:, 1:] != 0.0).all()


def test_what_counts_as_the_same_batch() -> None:
    x = torch.arange(4.0)
    for a, b in [(x, x.clone()), ({"x": x, "n": 2}, {"x": x.clone(), "n": 2}), (ak.accumulate([x]),) * 2]:
        assert same_batch(a, b)
    assert same_batch(ak.accumulate([x, x]), ak.accumulate([x.clone(), x]))
    for a, b in [
        (x, x + 1), (x, x.double()), (x, x[:3]), ([x], (x,)), ({"x": x, "n": 2}, {"x": x, "n": 3}),
        (x, ak.accumulate([x])),
        (ak.accumulate([x, x]), ak.accumulate([x])), (ak.accumulate([x, x]), ak.accumulate([x, x], weights=[1, 0])),
        ([object()], [object()]), (x.to_sparse(), x.to_sparse()),
    ]:  # fmt: skip
        assert not same_batch(a, b)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError, RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=["gpu", "cpu"]
)
def test_rows_that_do_not_fit_together_are_halved(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mapped rows run out of memory to the last one, fewer changes are carried at once, and then each alone."""
    case = make("tanh_mlp")
    path, probe, others = with_rows(case.path(4), True), case.batch(), case.batches(5)
    expected = path.replace(others).response(probe).data["response"].values  # rows have been compared here

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(rows_module, "_mapped", full)
    found = path.replace(others).response(probe).data["response"].values
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)
    monkeypatch.setattr(ExactRows, "advance", full)
    with pytest.raises(OutOfMemory, match=r"of one change ran out of memory in spite of the plan \(6 × exact"):
        path.replace(others).response(probe)


def test_a_row_that_is_retired_takes_no_further_step() -> None:
    """Also where nobody has looked at the numbers of its last one yet."""
    case = make("tanh_mlp")
    path = with_rows(case.path(4), False)
    state = path.trajectory.state(1)
    rows = Rows([replace(state, theta=state.theta * factor) for factor in (1.1, 1.2)])
    ends = []
    for moment in rollout(path.trajectory, 1, rows, 4):
        if moment.time == 2:
            moment.exact.retire(0)
        ends.append([row.theta.clone() for row in moment.states])
    assert torch.equal(ends[1][0], ends[-1][0])
    assert not torch.equal(ends[1][1], ends[-1][1])


# --- together as alone


@pytest.mark.parametrize("name", CASES)
def test_rows_together_equal_rows_alone(name: str) -> None:
    case = make(name)
    path = case.path(4)
    pool, probe = case.batches(3), case.batch()

    def answers() -> Iterator[np.ndarray]:
        yield path.replace(pool, at=1).response(probe, scales=[0.5, 1.0]).data["response"].values
        yield path.skip(1).response(ak.own_loss).data["response"].values
        ranking = path.rank(pool, probe, at=1, verify=0)
        yield ranking.data["response"].sel(change=[f"batch {i}" for i in range(3)]).values

    alone = list(answers())
    sharing = with_rows(path, True).point.loss.sharing
    for a, b in zip(alone, answers()):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11 * np.abs(a).max())
    # checkpointing runs its forward pass again in the backward pass, where no mapping is in force
    assert sharing._agreed["gradient"] == (name != "checkpointed")
    assert sharing._agreed["product"]
    assert sharing._agreed["value"]


# --- rows with steps of their own, by hand


def by_hand(case: Case, path: ak.Path, at: int, stepped: Callable[[Case, int, object], None]) -> list[list[Tensor]]:
    """Parameters after every step from `at` on of a twin that trains along the path, `stepped` after step `at`."""
    twin, found = case.twin(), []
    for step in path.steps:
        torch.set_rng_state(step.random.cpu)
        if step.index > at:
            stepped(twin, step.index, step.batch)
        else:
            gradients(twin, step.batch)
            clip_and_step(twin)
        if step.index >= at:
            found.append([p.detach().clone() for p in twin.model.parameters()])
    return found


@TOGETHER
@pytest.mark.parametrize(
    "name", ["tanh_mlp", "two_groups", "dropout", "batch_norm", "unused_parameters", "accumulated"]
)
def test_steps_of_their_own(name: str, together: bool) -> None:
    """Another learning rate from step 3 on, another batch at step 2, both, and no step 3."""
    case = make(name)
    path = with_rows(case.path(6), together)
    other = [case.batch() for _ in range(2)][1]  # where parameters are unused, it uses others than step 2's own

    def slower(twin: Case, index: int, batch: object) -> None:
        for group in twin.optimizer.param_groups:
            group["lr"] = 0.003 if index >= 3 else group["lr"]
        gradients(twin, batch)
        clip_and_step(twin)

    def changed(twin: Case, index: int, batch: object) -> None:
        slower(twin, index, other if index == 2 else batch)

    def replaced(twin: Case, index: int, batch: object) -> None:
        gradients(twin, other if index == 2 else batch)
        clip_and_step(twin)

    def skipped(twin: Case, index: int, batch: object) -> None:
        if index != 3:
            gradients(twin, batch)
            clip_and_step(twin)

    steps = path.steps
    slow = [replace(s, hypers=tuple(h.with_lr(0.003) for h in s.hypers)) if s.index >= 3 else s for s in steps]
    instead = [replace(s, batch=other) if s.index == 2 else s for s in steps]
    without = [None if s.index == 3 else s for s in steps]
    start = path.trajectory.state(2)
    both = [replace(s, batch=other) if s.index == 2 else s for s in slow]
    rows = Rows([start] * 5, steps=[slow, instead, without, both, None])
    layout, names = path.point.loss.layout, [n for n, _ in case.model.named_parameters()]
    truth = [by_hand(case, path, 1, stepped) for stepped in (slower, replaced, skipped, changed)]
    for moment in rollout(path.trajectory, 2, rows, 6):
        for run, state in zip(truth, moment.states):
            found = layout.by_name(state.theta)
            for key, expected in zip(names, run[moment.time - 2]):
                close = {"rtol": 1e-9, "atol": 1e-12} if together else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(found[key], expected, **close)
        torch.testing.assert_close(moment.states[4].theta, path.trajectory.state(moment.time).theta)
    assert moment.states[2].counts != moment.states[4].counts
    assert moment.exact.slots[4] is None  # a row that starts as the control and takes its steps is the control
    assert moment.states[4] is moment.control


@pytest.mark.parametrize("name", ["tanh_mlp", "adam_coupled", "clipped"])
def test_a_row_that_is_not_shifted_is_the_difference_of_two_that_are(name: str) -> None:
    """What counts of their own do at the control's moments is the same in both."""
    case = make(name)
    path = case.path(6)
    one, other = (path.replace([case.batch()]).difference()[0] for _ in range(2))
    apart = Tangent(*(getattr(one, channel) - getattr(other, channel) for channel in CHANNELS))
    lag = (2,) * len(path.trajectory.state(1).counts)
    kinds = [True, True, False, True]  # the last is what the third would be, shifted
    rows = Rows(linear=stack([one, other, apart, apart]), linear_lags=4 * [lag], linear_shifted=kinds)
    for moment in rollout(path.trajectory, 1, rows, 6):
        assert moment.linear is not None
    a, b, difference, shifted = rows.linear.theta
    torch.testing.assert_close(difference, a - b, rtol=1e-9, atol=1e-12 * float(a.abs().max()))
    assert (shifted - difference).norm() > 1e-3 * difference.norm()


# --- divergence


@TOGETHER
@pytest.mark.parametrize(("probe", "first"), [("batch", 3), ("own", 3), ("function", 4)])
def test_a_row_that_diverges_is_infinite_from_there_on(together: bool, probe: str, first: int) -> None:
    """One change pushes a weight over a wall behind which the loss is not a number.

    A probe that does not see the wall reads the last state; no other one follows.
    """
    case = make("quadratic")
    batches, pool = case.batches(6), case.batches(3)
    watched = {"batch": case.batch(), "own": ak.own_loss, "function": lambda m: m.theta.square().sum()}[probe]
    pool[1][2][0] = -1e3
    free = case.point().follow([pool[1], *batches[1:]]).trajectory
    wall = float(free.state(2).theta[0] + free.state(3).theta[0]) / 2
    case.loss_fn = lambda m, b: m(b) - 1e-6 * (wall - m.theta[0]).log()
    path = with_rows(case.point().follow(batches), together)
    response = path.replace(pool).response(watched)
    exact = response.exact.values[:, 0]
    assert np.isfinite(exact[1, : first - 1]).all()
    assert np.isposinf(exact[1, first - 1 :]).all()
    assert exact.shape[1] > 4
    close = {"rtol": 1e-9, "atol": 1e-14} if together else {"rtol": 0, "atol": 0}
    for i in (0, 2):
        np.testing.assert_allclose(
            exact[i], path.replace([pool[i]]).response(watched, answers=("exact",)).exact.values[0, 0], **close
        )
    divergence = next(finding for finding in response.certificate.findings if finding.subject == "divergence")
    assert divergence.level == "bad"
    assert divergence.value == first
    assert "replace 1" in divergence.sentence
    assert response.certificate.level == "bad"


# --- rows that wait in host memory


@pytest.mark.parametrize("name", ["tanh_mlp", "two_groups", "batch_norm", "dropout"])
def test_parked_rows_equal_others_to_the_bit(name: str) -> None:
    case = make(name)
    path = case.path(5)
    edits, probe = path.replace(case.batches(3), at=1).edits, case.batch()
    found = [
        respond(path.watch(1, watched), edits, [0.5, 1.0], [Pass(("exact",), at_once, parked=parked)]).values["exact"]
        for watched in (probe, ak.own_loss) for at_once, parked in ((3, False), (1, True), (3, True))
    ]  # fmt: skip
    assert found[0].abs().min() > 0
    for start in (0, 3):
        assert torch.equal(found[start], found[start + 1])
        assert torch.equal(found[start], found[start + 2])


# --- models that cannot be mapped, or must not be


class Layer(nn.Module):
    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 5), nn.Linear(5, 3), act
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self, self.a(x)))


def branching(layer: nn.Module, h: Tensor) -> Tensor:
    return torch.tanh(h) if h.sum() > 0 else torch.tanh(2 * h)


def reading(layer: nn.Module, h: Tensor) -> Tensor:
    layer.last = h.mean().item()
    return torch.tanh(h)


class Coupled(torch.autograd.Function):
    """tanh with a batching rule that mixes rows, as an operation of somebody else's may have."""

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return torch.tanh(h)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return grad * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def vmap(info, dims, h: Tensor) -> tuple[Tensor, int]:  # type: ignore[no-untyped-def]
        mean = h.mean(dims[0], keepdim=True).expand_as(h)
        return Coupled.apply(mean), dims[0]


def coupled(layer: nn.Module, h: Tensor) -> Tensor:
    return Coupled.apply(h)


def layered(act: Callable[[nn.Module, Tensor], Tensor]) -> tuple[ak.Path, list, object]:
    torch.manual_seed(0)
    model = Layer(act).double()
    case = Case("layer", model, torch.optim.AdamW(model.parameters(), lr=1e-2), cross_entropy, classes((4,)))
    batches = [(x.double(), y) for x, y in case.batches(12)]
    case.train(batches[:3])
    return case.point().follow(batches[3:8]), batches[8:11], batches[11]


@pytest.mark.parametrize("act", [branching, reading, coupled])
@pytest.mark.parametrize("probe", ["batch", "own"])
def test_models_that_rows_cannot_share_run_alone(act: Callable[..., Tensor], probe: str) -> None:
    found, values, predicted = [], [], []
    for together in (False, True):
        path, pool, batch = layered(act)
        watched = batch if probe == "batch" else ak.own_loss
        with_rows(path, together)
        found.append(path.replace(pool).response(watched, answers=("exact",)).exact.values)
        values.append(path.replace(pool).response(watched, answers=("semilinear",)).semilinear.values)
        predicted.append(path.rank(pool, watched, verify=1).data["response"].values)
    sharing = path.point.loss.sharing
    assert sharing._agreed["gradient"] is False
    assert sharing._agreed.get("value", False) is False
    assert np.abs(found[0]).max() > 1e-3
    for a, b in (found, values, predicted):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-14)


def test_equal_batches_do_not_hide_that_one_leaks_into_another() -> None:
    """A pool that begins with the same batch over and over: rows of it agree whatever they mix."""
    found = []
    for together in (False, True):
        path, pool, probe = layered(coupled)
        with_rows(path, together)
        path.replace(3 * pool[:1]).response(probe, answers=("exact",))
        path.estimate_rank(pool, probe)
        found.append(path.rank(pool, probe, verify=0).data["predicted"].values)
    assert path.point.loss.sharing._agreed["pool"] is False
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9, atol=1e-14)


# --- what belongs to the path stays as it is


@TOGETHER
@pytest.mark.parametrize("keep", ["states", "checkpoints"])
@pytest.mark.parametrize("name", ["batch_norm", "two_groups"])
def test_nothing_writes_to_the_states_of_the_path(name: str, keep: str, together: bool) -> None:
    case = make(name)
    path = with_rows(case.path(9, keep=keep), together)
    probe, pool = case.batch(), case.batches(3)
    path.check()
    kept = {time: copied(state) for time, state in path.trajectory._states.items()}
    assert len(kept) == (10 if keep == "states" else 4)
    point = copied(path.point.captured.state)
    for at in (0, 4):
        change = path.replace(pool[:1], at)
        edits = [each.edits[0] for each in (path.skip(at), path.zero(at), path.set(at, lr=0.1), path.reset(at, "m"))]
        replace(change, edits=(*change.edits, *edits)).response(probe)
        change.response(ak.own_loss, horizon=2)
    path.rank(pool, probe, at=4, verify=2)
    path.explain(probe, change="skip", verify=2)
    if name != "batch_norm":
        path.rank_examples(pool, probe, verify=2)
    reader = Reader(path.trajectory, own_loss)
    for moment in rollout(path.trajectory, 4, Rows([path.trajectory.state(t) for t in (4, 2, 6)]), 8):
        reader.exact(moment)
    assert set(path.trajectory._states) == set(kept)
    for time, state in path.trajectory._states.items():
        assert same(state, kept[time]), time
    assert same(path.point.captured.state, point)


def copied(state: JointState) -> JointState:
    return replace(state.clone(), buffers={name: b.clone() for name, b in state.buffers.items()})


def same(a: JointState, b: JointState) -> bool:
    tensors = [(a.theta, b.theta), (a.m, b.m), (a.v, b.v), *((x, b.buffers[n]) for n, x in a.buffers.items())]
    return a.counts == b.counts and all(torch.equal(x, y) for x, y in tensors)


# --- what rows do not cost


def test_rows_that_are_not_behind_take_no_pass_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    path, probe, seen = case.path(3), case.batch(), list[object]()
    late = sweeps.late_runs_of
    monkeypatch.setattr(sweeps, "late_runs_of", lambda *given: seen.append(given) or late(*given))
    path.replace(case.batches(2)).response(probe)
    assert not seen
    path.skip().response(probe)
    assert seen


def test_a_warning_of_the_model_is_shown_once() -> None:
    """Calls for many rows leave one warning of torch's out, and Python's memory of the others alone."""

    def work(x: Tensor) -> Tensor:
        warnings.warn("the model's own", stacklevel=1)
        return 2 * x

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *where, **more: shown.append(str(message))
        shown = list[str]()
        for _ in range(5):
            mapped_over((0,), work)(torch.ones(3))
    assert shown == ["the model's own"]


# files that carry predicted rows by themselves, and why
OWN_STEPS = {
    "core/operators.py": "A of one step",
    "core/sweeps.py": "what a step does to them",
    "theory/baselines.py": "products that kinds of rows share in their first step: 6 % of all at 12 horizons",
}


def test_predicted_rows_are_carried_by_the_rollout_alone() -> None:
    home = Path(ak.__file__).parent
    found = {
        str(path.relative_to(home))
        for path in home.rglob("*.py")
        if re.search(r"(?<!def )\btransit_\w*\(", path.read_text())
    }
    assert found == {"core/rollout.py", *OWN_STEPS}
