"""What each side says every step of a window did to the outcome, judged by exact leave-one-out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.stats import spearmanr
from torch import Tensor

import aftershock as ak

from ..timing import Work, cycled, interleave, quiet
from .magic import bergson_magic
from .tracin import captum_checkpoints, captum_own_states, dattri_dvemb, dattri_tracin
from .window import Window, leave_one_out


def ours_unverified(window: Window) -> Tensor:
    """`explain` by one adjoint sweep, no reruns."""
    return _explained(window, 0)


def ours_verified(window: Window) -> Tensor:
    """`explain` as it is called: five exact reruns choose readout and factor, and stand where they were made."""
    return _explained(window, 5)


def _explained(window: Window, verify: int) -> Tensor:
    point = ak.capture(window.model, window.optimizer, window.loss_fn)
    found = point.follow(window.batches).explain(window.probe, verify=verify)
    return torch.from_numpy(found.data["measured"].fillna(found.total).values.copy())


def gradient_norm(window: Window) -> Tensor:
    """What a rule sees that skips steps with large gradients."""
    live, norms = window.fresh(), []
    for at in range(len(window.batches)):
        window.step(live, at)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in live[0].parameters()]))
    return torch.stack(norms).double()


@dataclass(frozen=True)
class Side:
    """`sizes`: its scores are meant as changes of the loss, not only as an order."""

    name: str
    package: str
    scores: Callable[[Window], Tensor]
    sizes: bool = True


SIDES = (
    Side("exact leave-one-out", "torch", leave_one_out),
    Side("aftershock explain, 5 reruns", "aftershock", ours_verified),
    Side("aftershock explain, no reruns", "aftershock", ours_unverified),
    Side("bergson MAGIC", "bergson", bergson_magic),
    Side("dattri DVEmb", "dattri", dattri_dvemb),
    Side("dattri TracIn, own states", "dattri", dattri_tracin),
    Side("captum TracInCP, own states", "captum", captum_own_states),
    Side("captum TracInCP, 4 states", "captum", captum_checkpoints),
    Side("gradient norm", "torch", gradient_norm, sizes=False),
)


@dataclass(frozen=True)
class Judged:
    """One side on one window."""

    window: str
    side: str
    rank: float  # Spearman's, with exact leave-one-out
    size_rank: float  # the same of absolute values
    top: bool  # its first step is the one that raised the outcome most
    error: float  # Σ|score − truth| / Σ|truth|
    gradients: float  # time, in plain gradients
    scores: list[float]
    failed: str = ""  # why it gave no scores


def judge(window: Window, sides: list[Side]) -> list[Judged]:
    """The first side is the truth; what another raises is kept as its reason."""
    exact, *others = sides
    truth, gradients = _timed(window, exact)
    found = [_judged(window, exact, truth, gradients, truth)]
    for side in others:
        try:
            found.append(_judged(window, side, *_timed(window, side), truth))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            nan = math.nan
            found.append(Judged(window.name, side.name, nan, nan, False, nan, nan, [], reason))
    return found


def _judged(window: Window, side: Side, scores: Tensor, gradients: float, truth: Tensor) -> Judged:
    error = float((scores - truth).abs().sum() / truth.abs().sum()) if side.sizes else math.nan
    top = bool(scores.argmax() == truth.argmax())
    ranks = _rho(scores, truth), _rho(scores.abs(), truth.abs())
    return Judged(window.name, side.name, *ranks, top, error, gradients, scores.tolist())


def _timed(window: Window, side: Side) -> tuple[Tensor, float]:
    """Scores, and their cost in plain gradients timed right before; a first call, on two steps, is not counted."""
    with quiet():
        side.scores(dataclasses.replace(window, batches=window.batches[:2]))
    kept: list[Tensor] = []
    works = {
        "g": Work(cycled(window.gradient, len(window.batches)), len(window.batches)),
        "side": Work(lambda: kept.append(side.scores(window))),
    }
    times = interleave(works, 1, torch.device("cpu"), warm=False)
    return kept[0], times.ratio(lambda t: t["side"] / t["g"])


def _rho(scores: Tensor, truth: Tensor) -> float:
    """NaN where a score is not a number."""
    return float(spearmanr(scores.numpy(), truth.numpy()).statistic)
