"""Who knows what is recorded: recordings that a CPU stands in for, played by running the pass again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import aftershock as ak
from aftershock.core import playback
from aftershock.core.footprint import Curvature, Footprint
from aftershock.core.playback import Played, Player
from aftershock.core.structure import flatten

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
    player = point.loss.player
    for size in sizes:
        path = point.follow(batches(case, size))
        Curvature.of(path.trajectory)
        for kind in ("gradient", "products"):
            found = player.find(kind, path.steps[1].batch, evaluating=False)
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
    assert point.loss.player.find("gradient", path.steps[0].batch, evaluating=False) is not None
