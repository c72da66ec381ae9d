"""Who knows what is recorded: recordings that a CPU stands in for, played by running the pass again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import aftershock as ak
from aftershock.core import playback
from aftershock.core.footprint import Curvature, Footprint
from aftershock.core.graphs import GradientGraph
from aftershock.core.planning import Work, plan_history, plan_responses
from aftershock.core.playback import Player
from aftershock.core.recordings import Played
from aftershock.core.responses import ANSWERS
from aftershock.core.structure import flatten
from aftershock.core.trajectory import Trajectory

from .cases import Case, make

BUSY = 10_000  # operations from which a pass keeps the stand-in busy: a gradient of some 40 examples
HELD = 2**20  # bytes that each recording is said to hold


class OnCPU:
    """A recording that runs the pass again; its inputs are those it is given, as a graph's are."""

    nbytes = HELD

    def __init__(self, work: Any, theta: Tensor, batch: Any) -> None:
        self._work, (self._leaves, self._structure) = work, flatten(batch)
        self.result: Tensor

    def faithful(self, *_: object) -> bool:
        return True

    def play(self, theta: Tensor, buffers: Mapping[str, Tensor], inputs: Sequence[Tensor], random: Any) -> Played:
        given = iter(inputs)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self._leaves]
        played = self._work.plain(theta, self._structure.unflatten(leaves))
        self.result = played.loss
        return played

    run = play


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
