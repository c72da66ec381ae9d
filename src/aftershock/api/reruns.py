"""Exact reruns beside predictions: how many and which, and what they say about those that are not rerun."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.given import whole
from ..errors import InvalidInput

if TYPE_CHECKING:
    import xarray as xr

ODD = 3.0  # times the usual gradient: batches of one source of data differ by less
VERIFY = 5  # exact reruns, unless told otherwise: they calibrate, and each is judged by the others


def reruns(verify: int | Sequence[int], what: str, known: Sequence[int] | None = None) -> tuple[int, list[int]]:
    """How many exact reruns are asked for, and of which candidates, where they are named.

    what: the candidates, in the words of the error. known: their numbers, in order; None: not known yet.
    """
    if not isinstance(verify, Iterable) or getattr(verify, "ndim", 1) == 0:  # a number may be a tensor
        return whole(verify, "verify is the number of exact reruns", 0), []  # type: ignore[arg-type]
    named = [whole(one, f"verify names {what}") for one in verify]
    if len(set(named)) < len(named) or not (known is None or all(one in known for one in named)):
        numbers = "" if known is None else f", {known[0]} to {known[-1]}"
        raise InvalidInput(f"verify names different {what}{numbers}; got {named}")
    return len(named), named


def odd_ones(norms: Float[Tensor, " candidate"]) -> Bool[Tensor, " candidate"]:
    """Whose gradient, less the control's, is unlike the others'."""
    usual = norms[norms > 0]
    return norms > (ODD * usual.median() if len(usual) else torch.inf)


def odd_one(norms: Float[Tensor, " candidate"], few: int) -> int | None:
    """The candidate that is unlike the others most, if any, where so many reruns leave room for it beside the strongest
    and one that judges. Predictions are made for what the others are."""
    room = min(few, len(norms)) > 2
    return int(norms.argmax()) if room and odd_ones(norms).any() else None


def to_rerun(sizes: Float[Tensor, " candidate"], few: int, odd: int | None = None) -> tuple[list[int], list[int]]:
    """Which candidates are rerun: half of so many the strongest, at least one; and the others, spread over the rest.

    Those spread tell how far the ones that are not rerun are off: of the strongest alone, errors came out at 0.3–0.5
    of that (tied language model, 24 batches, 2 to 8 reruns).

    odd: one that comes before the strongest.
    """
    order = sizes.argsort(descending=True, stable=True)
    if odd is not None:
        order = torch.cat([torch.tensor([odd]), order[order != odd]])
    few = min(few, len(order))
    top = max(few // 2, min(few, 1)) + (odd is not None and few > 2)
    rest, between = len(order) - top, few - top + 1
    return order[:top].tolist(), order[top + rest * torch.arange(1, between) // between].tolist()


def judging_in_words(ranking: xr.Dataset) -> tuple[str, str]:
    """Which reruns judge a ranking, and what that leaves open."""
    if ranking["named"]:
        return "that were named", " Those that were named are no sample of the others."
    return "spread over the ranking", ""


def common_factor(
    predicted: Float[Tensor, " rerun"], measured: Float[Tensor, " rerun"]
) -> tuple[float, Float[Tensor, " rerun"]]:
    """The factor that brings predictions to what reruns measured, and each prediction times the others' factor.

    It is the median ratio; one that would turn signs around calibrates nothing, and is 1.
    """

    def factor(known: Tensor) -> float:
        ratios = (measured / predicted)[known & predicted.isfinite() & (predicted != 0)]
        middle = float(ratios.quantile(0.5)) if len(ratios) else 1.0
        return middle if middle > 0 else 1.0

    each = torch.eye(len(predicted), dtype=torch.bool)
    held = torch.tensor([factor(~own) for own in each], dtype=torch.float64) * predicted
    return factor(torch.ones_like(predicted, dtype=torch.bool)), held


def relative_error(predicted: Float[Tensor, " rerun"], measured: Float[Tensor, " rerun"]) -> float:
    """Of reruns, in sum; NaN where there is none. A prediction that is no number is infinitely wrong."""
    known = measured.isfinite()
    if not known.any():
        return math.nan
    miss = (predicted - measured)[known].abs().nan_to_num(torch.inf).sum()
    return float(miss / measured[known].abs().sum().clamp(min=1e-300))
