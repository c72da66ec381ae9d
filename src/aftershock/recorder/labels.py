"""The dataset of an explanation: every number by step and treatment under its labels, and the facts beside them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.changes import ControlStep
from ..core.probe import own_loss
from ..core.scores import adjoint
from ..core.state import CHANNELS
from ..results.provenance import provenance
from .event import BARS
from .examples import example_shares
from .findings import Findings
from .stated import facts, left_spread
from .sweep import CHANGES, readout_at
from .treatments import sufficient

if TYPE_CHECKING:
    import xarray as xr

Variables = dict[str, Any]


def labelled(f: Findings, examples: int) -> xr.Dataset:
    """The dataset of a `FlightExplanation`. Its attributes say what made it, and hold no data."""
    import xarray as xr

    numbers, tried = [record.step for record in f.replayed.records], f.held + f.outcomes
    measured = _by_step(f)
    return xr.Dataset(
        {
            **_predicted(f),
            **measured,
            **_inside(f, measured["measured"][1][CHANGES.index(f.main)], examples),
            **_by_place(f),
            **_by_treatment(f),
            **_described(f),
            **facts(f).variables,
        },
        coords={
            "change": list(CHANGES),
            "step": numbers[: f.replayed.last],
            "place": numbers,
            "channel": list(CHANNELS),
            "layer": f.swept.layers,
            "horizon": list(range(1, len(numbers))),
            "treatment": np.array([o.treatment.name for o in tried], dtype=str),
        },
        attrs=provenance(f.replayed.trajectory),
    )


def _predicted(f: Findings) -> Variables:
    return {
        "contribution": (("change", "step", "channel"), f.swept.contribution.sum(-1).numpy()),
        "layer_contribution": (("change", "step", "layer"), f.swept.contribution.sum(-2).numpy()),
    }


def _by_step(f: Findings) -> Variables:
    """Of the runs without one step each: what it added to the explained value, what is left of the event, the mean of
    the last values, and what it added to every later value."""
    last, values, row = f.replayed.last, f.event.values, CHANGES.index(f.main)
    measured, measured_spread = np.full((2, len(CHANGES), last), math.nan)
    left, left_spread, tail, tail_spread = np.full((4, last), math.nan)
    emergence = np.full((last, len(values) - 1), math.nan)
    roles, (lucky, so_far) = np.full(last, "", dtype="<U7"), np.zeros((2, last), dtype=bool)
    for role, trials in (("suspect", f.inquiry.suspects), ("placebo", f.inquiry.placebos)):
        for trial in trials:
            (at,) = trial.steps
            if at == last:
                continue  # the explained step itself: its value is what is explained
            roles[at], lucky[at], so_far[at] = role, trial.lucky, trial.so_far
            left[at], left_spread[at] = trial.left, trial.left_spread
            tail[at], tail_spread[at] = trial.after, trial.after_spread
            measured[row, at] = values[last] - trial.values[last]
            measured_spread[row, at] = trial.value_spread
            for i in range(at + 1, max(trial.values) + 1):
                emergence[at, i - at - 1] = values[i] - trial.values[i]
    return {
        "measured": (("change", "step"), measured),
        "measured_spread": (("change", "step"), measured_spread),
        "left": ("step", left),
        "left_spread": ("step", left_spread),
        "left_so_far": ("step", so_far),
        "tail_without": ("step", tail),
        "tail_without_spread": ("step", tail_spread),
        "lucky": ("step", lucky),
        "role": ("step", roles),
        "emergence": (("step", "horizon"), emergence),
    }


def _by_place(f: Findings) -> Variables:
    """Of every step of the path."""
    steps, records, layers = f.replayed.trajectory.steps, f.replayed.records, f.swept.layers
    unknown = np.full((len(steps), len(layers)), math.nan)
    batches = np.zeros((len(records), max(len(record.indices) for record in records)), dtype=np.int64)
    for row, record in zip(batches, records):
        row[: len(record.indices)] = record.indices
    return {
        "loss": ("place", [step.loss for step in steps]),
        "norm": ("place", [step.clip.norm for step in steps]),
        "spread": ("place", [f.scatter.spread(lambda run, i=i: run[i]) for i in range(len(steps))]),  # type: ignore[misc]
        "clip_factor": ("place", [step.clip.factor for step in steps]),
        "lr": ("place", [record.lr for record in records]),
        "update_size": ("place", [math.nan] * len(steps) if f.updates is None else f.updates.whole.numpy()),
        "layer_update_size": (("place", "layer"), unknown if f.updates is None else f.updates.by_layer.numpy()),
        "batch_index": (("place", "batch"), batches),
        "batch_count": ("place", [len(record.indices) for record in records]),
    }


def _by_treatment(f: Findings) -> Variables:
    tried, best = f.held + f.outcomes, sufficient(f.outcomes)
    named = f.held[f.setting] if f.setting is not None and f.held else None
    numbers = {
        "left": [o.left for o in tried],
        "left_spread": [left_spread(f, o) for o in tried],
        "after": [o.after for o in tried],
        "after_spread": [max(f.scatter.spread(f.event.after), o.after_apart) for o in tried],  # NaN stays NaN
    }
    flags = {
        "prevents": [o.prevents for o in tried],
        "delays": [o.delays for o in tried],
        "blows_up": [o.blows_up for o in tried],
        "lucky": [o.lucky for o in tried],
        "left_so_far": [o.so_far for o in tried],
        "idle": [o.idle for o in tried],
        "sufficient": [o is best for o in tried],
        "held": [o is named for o in tried],
    }
    return {
        **{f"treatment_{name}": ("treatment", np.array(one, dtype=float)) for name, one in numbers.items()},
        **{f"treatment_{name}": ("treatment", np.array(one, dtype=bool)) for name, one in flags.items()},
        "treatment_value": (("treatment", "place"), _curves(f)),
    }


def _curves(f: Findings) -> np.ndarray:
    """The values of the run with each treatment; the path's own before it begins, NaN after it ended."""
    values, tried = f.event.values, f.held + f.outcomes
    curves = [
        [o.values.get(i, value if i < o.treatment.run.at else math.nan) for i, value in enumerate(values)]
        for o in tried
    ]
    return np.array(curves, dtype=float).reshape(len(tried), len(values))


def _described(f: Findings) -> Variables:
    """What `describe=` made of batches: a text, or a PNG in base64."""
    kept = list(f.descriptions.values())
    return {
        "described": ("described", np.array(list(f.descriptions), dtype=np.int64)),
        "description": ("described", np.array([one.content for one in kept], dtype=str)),
        "description_is_image": ("described", np.array([one.is_image for one in kept], dtype=bool)),
    }


def _inside(f: Findings, measured: np.ndarray, examples: int) -> Variables:
    """Shares of examples in the blamed steps, where the prediction of the step was right, or why there are none."""
    last, predicted = f.replayed.last, f.swept.total(f.main)
    shares: dict[int, Tensor] = {}
    notes = [""] * last
    for at in [i for i in f.blamed if i < last][:examples]:
        if abs(float(predicted[at]) - measured[at]) <= BARS.near * abs(measured[at]):
            found, notes[at] = _shares(f, at)
            if found is not None:
                shares[at] = found
        else:
            wrong = "the prediction of the step was wrong, and its parts would be too"
            notes[at] = wrong if f.refused is None else "nothing could be predicted here"
    table = torch.full((last, max(map(len, shares.values()), default=0)), torch.nan, dtype=torch.float64)
    for at, found in shares.items():
        table[at, : len(found)] = found
    return {
        "example_share": (("step", "example"), table.numpy()),
        "example_note": ("step", np.array(notes, dtype=str)),
    }


def _shares(f: Findings, at: int) -> tuple[Tensor | None, str]:
    """Each example's share in what a step adds, and in which way it was found."""
    trajectory, last = f.replayed.trajectory, f.replayed.last
    watch, other = f.replayed.path.watch(at, own_loss, last - at), trajectory.steps[at - 1 if at else at + 1].batch
    swept = adjoint(
        watch, lambda _: readout_at(trajectory, last, f.event.quantity).rows[0], [last - at], trajectory.device
    )
    return example_shares(ControlStep.of(trajectory, at), trajectory, swept, trajectory.steps[at].batch, other)
