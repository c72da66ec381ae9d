"""Who knows what is recorded: recordings that a CPU stands in for, played by running the pass again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import aftershock as ak
from aftershock.core import planning, playback
from aftershock.core.footprint import Curvature, Footprint
from aftershock.core.graphs import GradientGraph
from aftershock.core.lanes import LANES, Lanes
from aftershock.core.loss import LossFunction
from aftershock.core.noise import noise_floor
from aftershock.core.planning import Work, pass_bytes, plan_history, plan_lanes, plan_responses
from aftershock.core.playback import Player
from aftershock.core.recordings import Played
from aftershock.core.responses import ANSWERS, Pass
from aftershock.core.row_costs import Load, rollout_bytes
from aftershock.core.structure import flatten
from aftershock.core.trajectory import Trajectory

from .cases import Case, make

BUSY = 10_000  # operations from which a pass keeps the stand-in busy: a gradient of some 40 examples
HELD = 2**20  # bytes that each recording is said to hold
MUCH = 2**40  # bytes, more than any test needs


class OnCPU:
    """A recording that runs the pass again; its inputs are those it is given, as a graph's are."""

    nbytes = HELD
    separate = True

    def __init__(self, work: Any, theta: Tensor, batch: Any, stream: object = None) -> None:
        self._work, (self._leaves, self._structure) = work, flatten(batch)
        self.result: Tensor
        self.grads: list[Tensor | None]
        self.played, self._lent = 0, list[Tensor]()

    def faithful(self, *_: object) -> bool:
        return True

    beside = faithful

    def play(
        self, theta: Tensor, buffers: Mapping[str, Tensor], inputs: Sequence[Tensor], random: Any, *, lent: bool = False
    ) -> Played:
        self.played += 1
        for grad in self._lent:  # it is gone with the next run
            grad.fill_(torch.nan)
        given = iter(inputs)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self._leaves]
        played = self._work.plain(theta, self._structure.unflatten(leaves))
        self.result, self.grads = played.loss, played.grads
        self._lent = [grad for grad in played.grads if grad is not None] if lent else []
        return played

    run = play


class _Stream:
    """A CPU has one and waits for all; what was asked of it is noted."""

    noted: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: _Stream) -> None:
        self.noted.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], ak.TrainingPoint]:
    """A point whose passes are recorded as a large model's on a GPU would be."""

    def launching(device: torch.device, work: Callable[[], object]) -> float:
        with FlopCounterMode(display=False) as counter:
            work()
        return 0.9 if counter.get_total_flops() < BUSY else 0.1

    monkeypatch.setattr(playback, "LARGE", 0)
    monkeypatch.setattr(playback, "Recording", OnCPU)
    monkeypatch.setattr(playback, "_launching", launching)
    monkeypatch.setattr(Lanes, "stream", lambda self, lane: _Stream(f"lane {lane}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(_Stream.noted.append(stream.name)))
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)

    def point(case: Case) -> ak.TrainingPoint:
        found = case.point()
        found.loss.sharing.wanted = True
        found.loss.player = Player(found.loss.layout, wanted=True)
        return found

    return point


def batches(case: Case, examples: int, count: int = 3) -> list[Any]:
    many = case.batches(count * -(-examples // len(case.batch()[0])))
    whole = [torch.cat([batch[i] for batch in many])[: count * examples] for i in range(2)]
    return list(zip(*(x.split(examples) for x in whole)))


# --- by shape


@pytest.mark.parametrize("sizes", [(60, 6), (6, 60)])
def test_a_busy_shape_says_nothing_of_another(
    recording: Callable[[Case], ak.TrainingPoint], sizes: tuple[int, int]
) -> None:
    """A batch that keeps the GPU busy is not recorded; a small one is, whichever came first."""
    case = make("tanh_mlp")
    point = recording(case)
    for size in sizes:
        path = point.follow(batches(case, size))
        Curvature.of(path.trajectory)
        for kind in ("gradient", "products"):
            found = point.loss.recorded(kind, path.steps[1].batch)
            assert (found is not None) == (size == 6), (kind, size)
        assert not path.trajectory.together("gradient", 8)  # recorded, or busy
        assert path.trajectory.together("product", 8) == (size == 6)
    other = batches(case, 9)
    assert point.loss.together("gradient", other[0], 8)  # nobody has looked at this shape
    assert point.loss.together("product", other[0], 8)


def test_busy_batches_leave_room_for_others(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """Shapes that are not recorded do not count among the recordings."""
    case = make("tanh_mlp")
    point = recording(case)
    for size in range(60, 61 + playback.MOST):
        Footprint.of(point.follow(batches(case, size, 1)).trajectory)
    assert point.loss.player.recordings == 0
    path = point.follow(batches(case, 6))
    Footprint.of(path.trajectory)
    assert point.loss.recorded("gradient", path.steps[0].batch) is not None


# --- given back


def test_nothing_counts_or_plays_what_was_given_back(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """Two paths, a function of the model and a graph along a path: work on one path gives back for all of them."""
    case = make("tanh_mlp")
    point = recording(case)
    given = batches(case, 6, 4)
    paths = [point.follow(given) for _ in range(2)]
    step, state = paths[0].steps[1], paths[0].trajectory.state(1)

    def squares(model: nn.Module) -> Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros((), dtype=torch.float64))

    def work(memory: int | None = None) -> Any:
        return plan_responses(Work(paths[1].watch(0, squares), changes=2, scales=1), ANSWERS, memory)

    Curvature.of(paths[0].trajectory)
    work()
    later, function = point.follow(given, keep="graphs"), point.loss.with_function(squares)
    kept, alive = (
        later.trajectory.linearize(step, state).graph,
        weakref.ref(point.loss.recorded("products", given[0])[0]),
    )
    graph = GradientGraph(point.loss, state.theta, state.buffers, step.batch, step.random, "here")
    vectors = torch.randn(3, point.loss.layout.padded_size, dtype=torch.float64)
    before = graph.products(vectors)
    assert Curvature.of(paths[0].trajectory).played
    assert function.recorded("value", None) is not None
    assert point.loss.player.recordings == 3  # a gradient, products and the function's value
    assert point.loss.player.nbytes >= 3 * HELD
    assert len(graph.pieces(6)) == 2

    work(3 * HELD)  # no more than the recordings hold
    assert alive() is None
    assert point.loss.player.recordings == point.loss.player.nbytes == 0
    assert function.recorded("value", None) is None
    assert not any(Curvature.of(path.trajectory).played for path in paths)
    assert len(graph.pieces(6)) == 1
    torch.testing.assert_close(graph.products(vectors), before)
    torch.testing.assert_close(kept.products(vectors), before)
    Footprint.of(paths[0].trajectory)
    work()
    assert point.loss.player.recordings == 0  # nor is anything recorded again


def test_a_history_has_no_room_in_what_is_recorded(
    recording: Callable[[Case], ak.TrainingPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a budget is for cotangents, of what recordings leave of it; what does not fit waits in host memory."""
    case = make("tanh_mlp")
    point = recording(case)
    trajectory = point.follow(batches(case, 6)).trajectory
    Curvature.of(trajectory)
    vector = Footprint.of(trajectory).vector
    held, gpu = point.loss.player.nbytes, torch.device("cuda")
    assert held > 2 * HELD
    monkeypatch.setattr(Trajectory, "device", gpu)
    assert plan_history(trajectory, 5, held + 10 * vector) == gpu
    assert plan_history(trajectory, 5, held + 10 * vector - 2) == torch.device("cpu")
    point.loss.player.give_back()
    assert plan_history(trajectory, 5, held) == gpu


def test_a_function_of_the_model_does_not_play_the_loss(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """One owner for all functions: each plays its own recording."""
    point = recording(make("tanh_mlp"))
    state, random = point.captured.state, point.captured.random
    doubled, tripled = (
        point.loss.with_function(lambda model, k=k: k * next(model.parameters()).square().sum()) for k in (2.0, 3.0)
    )
    for function in (doubled, tripled):
        assert function.rehearse("value", state.theta, state.buffers, (None, None), random)
    values = [float(f.value(state.theta, state.buffers, None, random, "here").loss) for f in (doubled, tripled)]
    assert values[1] == pytest.approx(1.5 * values[0], rel=1e-12)
    assert point.loss.recorded("value", None) is None


# --- in lanes


def test_rows_are_spread_over_the_lanes_of_a_recording(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """Each row plays its own lane's recording, two on each but the last; the answers are those one by one."""
    case = make("tanh_mlp")
    given, found = batches(case, 6, 17), []
    for lanes in (True, False):
        point = recording(case) if lanes else case.point()
        path = point.follow(given[:8])
        found.append(path.replace(given[8:16]).response(given[16], answers=("exact",)).data["response"])
        if not lanes:
            continue
        looked, _ = point.loss.player.looked_at(point.loss.loss_fn, "gradient", path.steps[0].batch, evaluating=False)
        assert looked is not None
        assert len(looked.recordings) == LANES
        # gradients of eight batches at the step, then nine rows, one of them rounding's, seven steps
        assert [each.played for each in looked.recordings[1:]] == [2 + 7 * 2, 2 + 7 * 2, 1 + 7 * 2, 1 + 7]
    xr.testing.assert_allclose(*found, rtol=1e-12)


def test_a_lane_without_a_recording_runs_as_ever(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """A pass that is recorded on the first lane only is a plain one on the second, never the first one's recording."""
    case = make("tanh_mlp")
    point = recording(case)
    path = point.follow(batches(case, 6, 4))
    plan_lanes(path.trajectory, 8, 8, MUCH)
    loss, own, state, random = point.loss, path.steps[0].batch, point.captured.state, point.captured.random
    loss.rehearse("value", state.theta, state.buffers, (own, own), random)
    thetas = [state.theta, 2 * state.theta]

    def value(i: int) -> Tensor:
        return loss.value(thetas[i], state.buffers, own, random, "here").loss

    assert loss.spread("gradient", own, 2, lambda i: loss.recorded("value", own) is None) == [False, True]
    found = loss.spread("gradient", own, 2, value)
    plain = [loss.plain("value", theta, state.buffers, own, random).loss for theta in thetas]
    assert torch.equal(torch.stack(found), torch.stack(plain))


def test_lanes_begin_after_what_came_before_and_end_before_what_comes_after(
    recording: Callable[[Case], ak.TrainingPoint],
) -> None:
    case = make("tanh_mlp")
    point = recording(case)
    path = point.follow(batches(case, 6, 4))
    plan_lanes(path.trajectory, 8, 8, MUCH)
    _Stream.noted.clear()

    def run(i: int) -> None:
        _Stream.noted.append(f"run {i}")
        if i == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        point.loss.player.lanes.spread(4, run, most=2)
    lanes = ["lane 0", "lane 1"]
    assert _Stream.noted == [
        *(f"{lane} waits for main" for lane in lanes),
        *("lane 0", "run 0", "lane 1", "run 1", "lane 0", "run 2"),
        *(f"main waits for {lane}" for lane in lanes),
    ]
    assert point.loss.player.lanes.turn == 0


def test_rounding_alone_gives_the_lanes_back(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """One row needs one lane: what the others hold is in nobody's plan there."""
    case = make("tanh_mlp")
    point, given = recording(case), batches(case, 6, 5)
    path = point.follow(given[:4])
    plan_lanes(path.trajectory, 8, 8, MUCH)
    noise_floor(path.watch(0, given[4]), torch.ones(4, dtype=torch.float64))
    assert point.loss.player.lane_bytes == 0
    assert point.loss.player.recordings == 1


@pytest.mark.parametrize("keep", ["states", "checkpoints"])
def test_the_control_steps_beside_its_rows(
    recording: Callable[[Case], ak.TrainingPoint], monkeypatch: pytest.MonkeyPatch, keep: Any
) -> None:
    """Where its states are not kept it is one more of those that are launched at once; its readings stay the same."""
    case, at_once, spread = make("tanh_mlp"), list[int](), LossFunction.spread

    def noted(self: LossFunction, kind: str, batch: Any, count: int, run: Any, **others: Any) -> Any:
        at_once.extend([count] if kind == "gradient" else [])
        return spread(self, kind, batch, count, run, **others)

    monkeypatch.setattr(LossFunction, "spread", noted)
    point, given = recording(case), batches(case, 6, 11)
    found = [
        point.follow(given[:8], keep=keep).replace(given[8:10]).response(given[10], answers=("exact",)).data
        for point in (point, case.point())
    ]
    xr.testing.assert_allclose(*(data["response"] for data in found), rtol=1e-12)
    xr.testing.assert_equal(*(data["control"] for data in found))
    # two changes and rounding's row; every second state is kept as a checkpoint
    assert set(at_once) == ({3} if keep == "states" else {3, 4})


def test_lanes_are_counted(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """What lanes hold belongs to the recordings, and rows beside each other have their gradients at the same time."""
    case = make("tanh_mlp")
    point = recording(case)
    trajectory = point.follow(batches(case, 6, 4)).trajectory
    plan_lanes(trajectory, 8, 8, MUCH)
    vector = Footprint.of(trajectory).vector
    assert point.loss.player.nbytes == LANES * (HELD + vector)
    assert point.loss.player.lane_bytes == (LANES - 1) * (HELD + vector)
    many, one = (rollout_bytes(trajectory, Load(exact=n)) for n in (8, 1))
    assert many - one == 7 * 3 * vector + (LANES - 1) * Footprint.of(trajectory).step


def test_predictions_have_the_room_of_the_lanes(
    recording: Callable[[Case], ak.TrainingPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes are for exact rows: a pass without any gives them back, is planned with what they held, and exact rows
    that come later have them again."""
    monkeypatch.setattr(planning, "LANE_SHARE", 1.0)
    case = make("tanh_mlp")
    point = recording(case)
    given = batches(case, 6, 13)
    path = point.follow([*given[:4], *given[:4]])
    change, player = path.replace(given[4:12]), point.loss.player
    both = change.response(given[12], answers=("exact", "semilinear"))
    vector = Footprint.of(path.trajectory).vector
    work = Work(path.watch(0, given[12]), changes=8, scales=1)
    need = 9 * 3 * vector  # eight rows of each answer do not fit at once, and those of one answer do
    limit = player.nbytes + need
    plan = plan_responses(work, ("exact", "semilinear"), limit)
    assert [each.answers for each in plan.passes] == [("exact",), ("semilinear",)]
    assert len(player.lanes) == LANES
    assert plan.peak <= plan.available
    assert pass_bytes(work, plan.passes[1]) > plan.available - player.lane_bytes
    again = change.response(given[12], answers=("exact", "semilinear"), memory=limit)
    assert len(player.lanes) == 1  # the last pass had no exact rows
    xr.testing.assert_allclose(again.data["response"], both.data["response"], rtol=1e-12)
    change.response(given[12], answers=("exact",))
    assert len(player.lanes) == LANES


def test_recordings_serve_the_truth_and_then_give_predictions_their_room(
    recording: Callable[[Case], ak.TrainingPoint],
) -> None:
    """Within a budget that holds predictions or recordings: exact rows are played, predictions are not, and the next
    exact rows are played again."""
    case = make("tanh_mlp")
    point = recording(case)
    given = batches(case, 6, 13)
    path = point.follow([*given[:4], *given[:4]])
    change, player = path.replace(given[4:12]), point.loss.player
    whole = change.response(given[12])
    work = Work(path.watch(0, given[12]), changes=8, scales=1, rounding=True)
    need = {answer: pass_bytes(work, Pass((answer,), 1)) for answer in ANSWERS}
    player.narrow()
    limit = player.nbytes + (need["exact"] + need["tangent"]) // 2  # recordings and a row, not one tangent beside them
    assert need["exact"] < need["tangent"]
    plan = plan_responses(work, ANSWERS, limit)
    assert [(each.answers, each.unrecorded) for each in plan.passes] == [
        (("exact",), False), (("semilinear", "tangent"), True)
    ]  # fmt: skip
    assert player.recordings
    assert player.nbytes + plan.peak <= limit
    played = [known.recordings[0] for known in player._looked if known.recordings]
    before = sum(each.played for each in played)
    again = change.response(given[12], memory=limit)
    assert sum(each.played for each in played) > before + 8 * 8  # gradients of rows, and their readings
    assert player.recordings == player.nbytes == 0
    xr.testing.assert_allclose(again.data["response"], whole.data["response"], rtol=1e-12)
    change.response(given[12], answers=("exact",), memory=limit)
    assert player.recordings


def test_a_pass_that_is_another_one_in_a_lane_has_one(
    recording: Callable[[Case], ak.TrainingPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once, and what it took is given back."""
    tried = []
    monkeypatch.setattr(OnCPU, "beside", lambda self, *_: tried.append(self))
    case = make("tanh_mlp")
    point = recording(case)
    trajectory = point.follow(batches(case, 6)).trajectory
    for _ in range(2):
        plan_lanes(trajectory, 8, 8, MUCH)
    assert len(tried) == 1
    assert len(point.loss.player.lanes) == 1
    assert point.loss.player.lane_bytes == 0


def test_a_lane_that_did_not_fit_is_tried_again(
    recording: Callable[[Case], ak.TrainingPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make("tanh_mlp")
    point = recording(case)
    trajectory = point.follow(batches(case, 6)).trajectory

    def full(*_: object) -> bool:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(OnCPU, "beside", full)
        plan_lanes(trajectory, 8, 8, MUCH)
    assert len(point.loss.player.lanes) == 1
    plan_lanes(trajectory, 8, 8, MUCH)
    assert len(point.loss.player.lanes) == LANES


@pytest.mark.parametrize(("rows", "steps", "lanes"), [(1, 999, 1), (2, 40, 2), (8, 8, LANES), (8, 2, 1)])
def test_as_many_lanes_as_rows_use(
    recording: Callable[[Case], ak.TrainingPoint], rows: int, steps: int, lanes: int
) -> None:
    """One row has nobody beside it; few steps do not pay for the recording."""
    case = make("tanh_mlp")
    point = recording(case)
    plan_lanes(point.follow(batches(case, 6)).trajectory, rows, steps, MUCH)
    assert len(point.loss.player.lanes) == lanes


@pytest.mark.parametrize("vectors", [18, 22, 26, 60])
def test_lanes_do_not_cost_the_recordings(
    recording: Callable[[Case], ak.TrainingPoint], monkeypatch: pytest.MonkeyPatch, vectors: int
) -> None:
    """Where rows and lanes do not fit, lanes go and recordings stay; with more room, lanes come back."""
    case = make("tanh_mlp")
    point = recording(case)
    given = batches(case, 6, 17)
    path = point.follow(given[:8])
    vector = Footprint.of(path.trajectory).vector
    monkeypatch.setattr(OnCPU, "nbytes", 2 * vector)
    change, player = path.replace(given[8:16]), point.loss.player
    change.response(given[16], answers=("exact",))
    assert len(player.lanes) == LANES
    change.response(given[16], answers=("exact",), memory=vectors * vector)
    assert player.recordings == 2
    assert len(player.lanes) == {22: 2, 26: 3, 60: LANES}.get(vectors, 1)
    change.response(given[16], answers=("exact",))
    assert len(player.lanes) == LANES


def test_an_estimate_is_never_negative(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    case = make("tanh_mlp")
    point = recording(case)
    given = batches(case, 6, 17)
    path = point.follow(given[:8])
    change = path.replace(given[8:16])
    change.response(given[16], answers=("exact",))
    vector = Footprint.of(path.trajectory).vector
    assert change.estimate(given[16], answers=("semilinear",)).memory > 8 * 3 * vector


def test_products_are_recorded_after_exact_rows_as_before(recording: Callable[[Case], ak.TrainingPoint]) -> None:
    """Lanes that exact rows had do not stand in the way of what predictions record."""
    case = make("tanh_mlp")
    given = batches(case, 6, 17)
    found = []
    for first in (("exact",), ()):
        point = recording(case)
        vector = Footprint.of(point.follow(given[:8]).trajectory).vector
        path = point.follow(given[:8], memory=3 * HELD + 60 * vector)
        change = path.replace(given[8:16])
        for answer in (*first, "semilinear"):
            change.response(given[16], answers=(answer,))
        found.append(point.loss.player.has("products"))
    assert found == [True, True]
