"""`FlightExplanation`: the ranked culprits of one loss, labelled, in words and as a skip list."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..results.files import write_whole
from . import verdict as words

if TYPE_CHECKING:
    import xarray as xr

    from ..results.certificate import Certificate

SHOWN = 10


@dataclass(frozen=True)
class Culprit:
    """One earlier step, and what it did to the loss that is explained. Positive: it raised the loss."""

    step: int
    delay: int
    predicted: float
    measured: float  # by running again without it; NaN where that was not done
    channels: dict[str, float]  # the predicted contribution by where it waited: θ, m, v
    batches: tuple[int, ...]  # indices of its batches in the data
    examples: tuple[tuple[int, float], ...]  # (place in the batch, share), largest first


@dataclass(frozen=True)
class FlightExplanation:
    """What each step of a window adds to one loss. `data` is labelled; nothing else is kept."""

    data: xr.Dataset

    @property
    def size(self) -> float:
        """How far the loss is above the median of the window before it."""
        return float(self.data.attrs["loss"] - self.data.attrs["baseline"])

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """Every step, the verified ones first by their measured contribution, then by the predicted one."""
        attrs, main = self.data.attrs, self.data.attrs["ranked_by"]
        predicted = self.data["contribution"].sel(change=main)
        totals = predicted.sum("channel")
        verified = [int(step) for step in attrs["order"]]
        rest = [int(s) for s in totals["step"].values[np.argsort(-totals.values)] if int(s) not in verified]
        return tuple(self._culprit(step, predicted, main) for step in [*verified, *rest])

    def _culprit(self, step: int, predicted: xr.DataArray, main: str) -> Culprit:
        row = predicted.sel(step=step)
        shares = self.data["example_share"].sel(step=step).values
        order = [int(i) for i in np.argsort(-shares) if math.isfinite(shares[i])]
        return Culprit(
            step=step,
            delay=int(self.data.attrs["step"]) - step,
            predicted=float(row.sum()),
            measured=float(self.data["measured"].sel(change=main, step=step)),
            channels={str(name): float(row.sel(channel=name)) for name in row["channel"].values},
            batches=tuple(self.data.attrs["batches"][str(step)]),
            examples=tuple((i, float(shares[i])) for i in order),
        )

    @property
    def verdict(self) -> str:
        """What happened, in words; every number in it is measured or predicted here."""
        return words.verdict(self)

    @property
    def certificate(self) -> Certificate:
        """How far to trust it: findings with their levels."""
        return words.certificate(self)

    @property
    def skip(self) -> list[int]:
        """Indices of the batches to leave out: those of a verified culprit, or of the step itself."""
        return words.guilty_batches(self)

    def save_skip_list(self, path: str | Path) -> Path:
        """Write `skip` as the JSON list of batch indices that Lightning's SpikeDetection writes and loaders read."""
        path = Path(path)
        write_whole(path, lambda part: Path(part).write_text(json.dumps(self.skip, indent=4)))
        return path

    def to_tensorboard(self, writer: Any, tag: str = "aftershock") -> None:
        """Contributions as scalars: predicted at each step of the window, measured where it was run again."""
        for culprit in self.culprits:
            writer.add_scalar(f"{tag}/contribution", culprit.predicted, culprit.step)
            if math.isfinite(culprit.measured):
                writer.add_scalar(f"{tag}/measured", culprit.measured, culprit.step)

    def __str__(self) -> str:
        attrs = self.data.attrs
        lines = [
            self.verdict,
            "",
            f"Contribution of earlier steps to the loss {attrs['loss']:.4g} of step {attrs['step']} (usual before it: "
            f"{attrs['baseline']:.4g}), largest first; against '{attrs['ranked_by']}':",
            f"{'step':>8}  {'delay':>5}  {'predicted':>10}  {'measured':>10}  {'in θ':>9}  {'in m':>9}  {'in v':>9}",
        ]
        for c in self.culprits[:SHOWN]:
            measured = f"{c.measured:>+10.3g}" if math.isfinite(c.measured) else f"{'':>10}"
            parts = "  ".join(f"{value:>+9.2g}" for value in c.channels.values())
            lines.append(f"{c.step:>8}  {c.delay:>5}  {c.predicted:>+10.3g}  {measured}  {parts}")
        return "\n".join([*lines, "", "How far to trust this:", str(self.certificate)])
