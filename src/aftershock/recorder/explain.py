"""`explain`: which earlier batch raised this loss, through which memory, proved by running again without it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..api.progress import progress
from ..api.ranking import VERIFY
from ..core.batches import Batch
from ..core.changes import ControlStep, Reset, Skip
from ..core.contributions import BentReadout
from ..core.probe import Watch, own_loss
from ..core.scores import adjoint
from ..core.state import CHANNELS
from ..errors import InvalidInput
from ..results.provenance import provenance
from .examples import example_shares
from .explanation import FlightExplanation
from .recorder import FlightRecorder, find_flight
from .records import Record
from .replay import Replay, own_value, replay, rerun
from .store import Flight
from .sweep import CHANGES, Hypers, Jump, Swept, edits_at, largest_jump, sweep
from .triggers import usual

if TYPE_CHECKING:
    import xarray as xr

OTHERS = 8  # batches run on the spike's weights, to tell a bad batch from bad weights


def explain(
    flight: FlightRecorder | str | FilePath,
    step: int | None = None,
    *,
    model: nn.Module | None = None,
    loss_fn: Callable[[nn.Module, Batch], Tensor] | None = None,
    dataset: Any = None,
    window: int | None = None,
    references: int = 4,
    verify: int = VERIFY,
    examples: int = 1,
) -> FlightExplanation:
    """Name the earlier steps that raised the loss of `step`, and prove it.

    flight: a recorder, or its directory; a directory recorded by another process needs `model` and `loss_fn`
        (and `dataset`, where indices were recorded). Weights of `model` are not used.
    step: updates made before it; default: the one that triggered. A loss that is not finite is explained at the
        last finite one before it.
    window: how many steps back to look; default: as recorded.
    references: neighbours whose mean gradient stands for an ordinary batch.
    verify: how many steps to run again without: the highest predicted, and some with the largest gradients.
        examples: in how many of those to look inside.

    First the window is replayed and compared with the record (`ReplayMismatch`). Costs, in gradients: a replay from
    the last state before the window, 2–3 per step for one adjoint sweep, `references` per step, about 10 for the
    proof that Hessian products are right, and for each verification one per step after it.
    """
    found, recorder = find_flight(flight, step)
    code = _code(found, recorder, model, loss_fn, dataset)
    if step is None:
        step = found.last if found.trigger is None else found.trigger
    target = _last_finite(found, step)
    window = found.run["window"] if window is None else window
    start = found.start(target, window)
    records = [found.records[number] for number in range(start, target + 1)]
    replayed = replay(records, window, found.states, code.model, code.loss_fn, code.dataset)
    path, last = replayed.path, replayed.last
    watch = path.watch(0, own_loss, last)
    path.require_linear(watch)
    jump = largest_jump([record.hypers for record in replayed.records])
    with progress("adjoint sweep", last) as tick:
        swept = sweep(
            path.trajectory, last, BentReadout.of(watch, directions=0),
            references=references, jump=jump, tick=tick,
        )  # fmt: skip
    spike = Spike.of(replayed)
    proofs = _verify(replayed, swept, spike, references, verify)
    data = _labelled(replayed, swept, proofs, spike, jump, found, step)
    _add_examples(data, replayed, watch, proofs, examples)
    return FlightExplanation(data)


@dataclass(frozen=True)
class _Code:
    """What a file cannot hold: the model's code, the loss, the dataset."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    dataset: Any


def _code(
    flight: Flight, recorder: FlightRecorder | None, model: nn.Module | None, loss_fn: Any, dataset: Any
) -> _Code:
    if recorder is not None:
        model = recorder.model if model is None else model
        loss_fn = recorder.loss_fn if loss_fn is None else loss_fn
        dataset = recorder.dataset if dataset is None else dataset
    if model is None or loss_fn is None:
        raise InvalidInput(
            f"{flight.folder} was recorded by another process: explain() needs model= and loss_fn= as the training "
            "script builds them (on the command line: --build module:function)"
        )
    return _Code(model, loss_fn, dataset)


def _last_finite(flight: Flight, step: int) -> int:
    """The step itself, or the last one before it whose loss and gradient are finite."""
    if step not in flight.records:
        raise InvalidInput(f"step {step} was not recorded: the flight holds steps {min(flight.records)}–{flight.last}")
    finite = [number for number, record in flight.records.items() if number <= step and record.finite]
    if not finite or not _unbroken(flight.records, finite[-1]):
        raise InvalidInput(f"no loss before step {step} is finite in the recorded window: nothing can be replayed")
    return finite[-1]


def _unbroken(records: Any, step: int) -> bool:
    return all(record.finite for number, record in records.items() if number <= step)


# --- the spike


@dataclass(frozen=True)
class Spike:
    """The loss that is explained, against what was usual before it."""

    loss: float
    baseline: float  # the median of the losses before it in the window
    sigma: float  # their robust spread
    others: float  # the median loss of other batches on the same weights

    @property
    def size(self) -> float:
        return self.loss - self.baseline

    @classmethod
    def of(cls, replayed: Replay) -> Spike:
        trajectory, last = replayed.trajectory, replayed.last
        before = [step.loss for step in trajectory.steps[:last]]
        middle, spread = usual(before)
        batches = [step.batch for step in trajectory.steps[max(0, last - OTHERS) : last]]
        others = statistics.median(own_value(trajectory, last, batch) for batch in batches)
        return cls(trajectory.steps[last].loss, middle, spread, others)


# --- verification: the same run without it


@dataclass(frozen=True)
class Proofs:
    """Measured contributions `[change, step]`, their emergence at each later step, and the jump's."""

    measured: Tensor
    emergence: Tensor
    jump: float
    order: list[int]  # verified steps, largest measured contribution first


def _verify(replayed: Replay, swept: Swept, spike: Spike, references: int, verify: int) -> Proofs:
    trajectory, last = replayed.trajectory, replayed.last
    measured = torch.full((len(CHANGES), last), torch.nan, dtype=torch.float64)
    emergence = torch.full((last, last), torch.nan, dtype=torch.float64)
    main = "replace" if references and last > 1 else "zero"
    top = _candidates(replayed, swept.total(main), verify)
    with progress("running without each of the top steps", len(top)) as tick:
        for at in top:
            edit = edits_at(trajectory, at, last, references)[main]
            losses = rerun(trajectory, at, edit, last)
            change = torch.tensor([step.loss for step in trajectory.steps[at + 1 : last + 1]], dtype=torch.float64)
            change -= torch.tensor(losses, dtype=torch.float64)
            emergence[at, : last - at] = change
            measured[CHANGES.index(main), at] = change[-1]
            tick()
    row = measured[CHANGES.index(main)]
    order = sorted(top, key=lambda i: -float(row[i]))
    if order:
        _verify_best(replayed, measured, order[0])
    jump = largest_jump([record.hypers for record in replayed.records])
    held = math.nan
    if jump is not None and verify and jump.at < last:
        held = spike.loss - _without_jump(replayed, jump)
    return Proofs(measured, emergence, held, order)


def _candidates(replayed: Replay, scores: Tensor, verify: int) -> list[int]:
    """Which steps to run without: the highest scores, and a third of the places for the largest gradients.

    A prediction is linear, and a batch that was bad enough is not; what it did at once, its gradient, is another
    hint. The replay decides between them.
    """
    steps = replayed.trajectory.steps[: len(scores)]
    loudest = sorted(range(len(steps)), key=lambda i: -steps[i].clip.norm)[: verify // 3]
    highest = [i for i in scores.argsort(descending=True).tolist() if scores[i] > 0 and i not in loudest]
    return loudest + highest[: verify - len(loudest)]


def _verify_best(replayed: Replay, measured: Tensor, best: int) -> None:
    """The best candidate also skipped, and the run with m or v emptied right after it."""
    trajectory, last = replayed.trajectory, replayed.last
    loss = trajectory.steps[last].loss
    measured[CHANGES.index("skip"), best] = loss - rerun(trajectory, best, Skip(), last)[-1]
    if best + 1 < last:
        for name in ("m", "v"):
            without = rerun(trajectory, best + 1, Reset((name,)), last)[-1]
            measured[CHANGES.index(f"reset {name}"), best + 1] = loss - without


def _without_jump(replayed: Replay, jump: Jump) -> float:
    """The loss had the learning rate stayed where it was before the jump."""
    trajectory, last = replayed.trajectory, replayed.last
    steps = [step if i < jump.at else replace(step, hypers=jump.before) for i, step in enumerate(trajectory.steps)]
    return rerun(trajectory, jump.at, Hypers(jump.before), last, steps)[-1]


# --- labels


def _labelled(
    replayed: Replay, swept: Swept, proofs: Proofs, spike: Spike, jump: Jump | None, flight: Flight, asked: int
) -> xr.Dataset:
    import xarray as xr

    records, last = replayed.records, replayed.last
    explained = records[last].step
    numbers = [record.step for record in records[:last]]
    steps = replayed.trajectory.steps
    data = xr.Dataset(
        {
            "contribution": (("change", "step", "channel"), swept.contribution.sum(-1).numpy()),
            "layer_contribution": (("change", "step", "layer"), swept.contribution.sum(-2).numpy()),
            "measured": (("change", "step"), proofs.measured.numpy()),
            "emergence": (("step", "horizon"), proofs.emergence.numpy()),
            "loss": ("step", [record.loss for record in records[:last]]),
            "norm": ("step", [step.clip.norm for step in steps[:last]]),
            "clip_factor": ("step", [step.clip.factor for step in steps[:last]]),
            "lr": ("step", [record.lr for record in records[:last]]),
            "batch_index": ("step", [record.indices[0] for record in records[:last]]),
            "replay_deviation": replayed.deviation,
            "hessian_error": replayed.path.check().error,
        },
        coords={
            "change": list(CHANGES),
            "step": numbers,
            "channel": list(CHANNELS),
            "layer": swept.layers,
            "horizon": list(range(1, last + 1)),
        },
    )
    data.attrs = {
        **provenance(replayed.path.trajectory),
        "check": str(replayed.path.check()),
        "kind": "flight",
        "reason": flight.reason,
        "asked": asked,
        "step": explained,
        "loss": spike.loss,
        "baseline": spike.baseline,
        "sigma": spike.sigma,
        "others": spike.others,
        "ranked_by": "replace" if bool(torch.isfinite(swept.contribution[0]).any()) else "zero",
        "order": [numbers[i] for i in proofs.order],
        "batches": {str(r.step): list(r.indices) for r in (*records, flight.records[asked])},
        "replay": str(replayed),
        "jump": _jump_attributes(jump, swept, proofs, records),
        "not_a_number_in_batch": asked != explained and _has_nan(flight.records[asked]),
    }
    return data


def _jump_attributes(
    jump: Jump | None, swept: Swept, proofs: Proofs, records: Sequence[Record]
) -> dict[str, float | int]:
    if jump is None:
        return {}
    return {
        "step": records[jump.at].step,
        "from": float(jump.before[0].lr),
        "to": records[jump.at].lr,
        "ratio": jump.ratio,
        "predicted": float(swept.held.sum()),
        "measured": proofs.jump,
    }


def _has_nan(record: Record) -> bool:
    tensors = [tensor for fed in record.fed for tensor in fed.tensors if tensor.is_floating_point()]
    return any(not bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _add_examples(data: xr.Dataset, replayed: Replay, watch: Watch, proofs: Proofs, examples: int) -> None:
    trajectory, last = replayed.trajectory, replayed.last
    shares: dict[int, Tensor] = {}
    notes: dict[str, str] = {}
    for at in proofs.order[:examples]:
        steps = trajectory.steps
        other = steps[at - 1 if at else at + 1].batch
        control = ControlStep.of(trajectory, at)
        swept = adjoint(replace(watch, at=at), lambda horizon: watch.slope(last), [last - at], trajectory.device)
        found, note = example_shares(control, trajectory, swept, steps[at].batch, other)
        notes[str(data["step"].values[at])] = note
        if found is not None:
            shares[at] = found
    width = max((len(found) for found in shares.values()), default=0)
    table = torch.full((last, width), torch.nan, dtype=torch.float64)
    for at, found in shares.items():
        table[at, : len(found)] = found
    data["example_share"] = (("step", "example"), table.numpy())
    data.attrs["examples"] = notes
