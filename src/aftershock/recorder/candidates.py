"""Which steps are worth a run without them: the suspects of an event."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InvalidInput
from .findings import Findings
from .groups import LARGEST
from .records import Record

RESERVE = 3  # further suspects where one removes half of the event, and it is not clear that it is special
REPEATED = 3  # further steps that are suspected because they saw the inputs of a suspect


def suspected(f: Findings, few: int, named: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which steps to run without: those named; or as many as asked for, the highest predicted and, because a prediction
    is linear and a batch that was bad enough is not, those with the largest gradients (a third of the places) and the
    one with the largest loss; and steps that saw the same inputs as one of them. The explained step itself comes last,
    where its own batch is high. Second, the next highest predicted, in reserve."""
    last = f.replayed.last
    numbers = [record.step for record in f.replayed.records[: last + 1]]
    if named:
        unknown = [number for number in named if number not in numbers]
        if unknown:
            raise InvalidInput(f"step {unknown[0]} is not among the steps {numbers[0]}–{numbers[-1]} of the window")
        return [numbers.index(number) for number in named], []
    steps, scores = f.replayed.trajectory.steps[:last], f.swept.total(f.main).nan_to_num(-math.inf)
    loud = sorted(range(last), key=lambda i: -steps[i].clip.norm)
    predicted = [i for i in scores.argsort(descending=True).tolist() if math.isfinite(scores[i])]
    loudest = loud[: few // 3] if predicted else loud[:few]
    if len(loudest) < few and last:
        loudest = list(dict.fromkeys([*loudest, max(range(last), key=lambda i: steps[i].loss)]))
    highest = [i for i in predicted if i not in loudest]
    places = few - len(loudest)
    chosen, reserve = loudest + highest[:places], highest[places : places + RESERVE] if few else []
    own = [last] if few and f.data is not None and f.data.kind in ("own batch", "both") else []
    return chosen + _same_inputs(f.replayed.records, chosen, range(last))[:REPEATED] + own, reserve


def one_batch(records: Sequence[Record], suspected: Sequence[int]) -> list[tuple[int, ...]]:
    """Suspects that saw the same inputs, few enough to be blamed together."""
    sets = dict.fromkeys(tuple(sorted((i, *_same_inputs(records, [i], suspected)))) for i in suspected)
    return [steps for steps in sets if 1 < len(steps) <= LARGEST]


def _same_inputs(records: Sequence[Record], chosen: Sequence[int], among: Sequence[int]) -> list[int]:
    """Other steps that saw the inputs of a chosen one: the largest of its tensors is equal."""
    seen = [_inputs(records[i]) for i in chosen]
    return [i for i in among if i not in chosen and any(_equal(_inputs(records[i]), x) for x in seen)]


def _inputs(record: Record) -> Tensor | None:
    return max(record.fed[0].tensors, key=lambda x: x.numel(), default=None)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
