"""What a batch would do, before it is applied: its response along futures drawn from the recorded past."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.batches import Batch
from ..core.randomness import Randomness
from ..errors import InvalidInput, NotFinite
from ..results.labelled import LabelledResult
from ..theory.futures import repeated_futures
from ..theory.samplers import sample_futures
from .neighbours import mean_batch

if TYPE_CHECKING:
    import xarray as xr

    from ..api.point import TrainingPoint
from ..api.schedule import LearningRate

REFERENCES = 4  # batches whose mean is the ordinary step
WATCHED = 8  # batches whose mean loss is watched


class Forecast(LabelledResult):
    """The mean response over sampled futures; positive means that the loss would go up.

    `data` is an `xarray.Dataset`:

    response[future, horizon]       exact along each future; not there where the run with the batch diverged
    largest_increase, peak_horizon  of the mean over futures, and after how many states

    >>> with ak.FlightRecorder(model, optimizer, loss_fn, "flight") as recorder:
    ...     for batch in batches[:4]:
    ...         recorder.step(batch, train_step(batch))
    ...     forecast = recorder.forecast(batches[5], horizon=3, futures=2)
    >>> forecast.harmful(threshold=0.001), forecast.peak_horizon, dict(forecast.response.sizes)
    (True, 3, {'future': 2, 'horizon': 3})
    >>> forecast.largest_increase == float(forecast.response.mean("future").max())
    True
    """

    kind = "forecast"
    wanted = ("largest_increase", "peak_horizon")

    @property
    def response(self) -> xr.DataArray | None:
        """By future and horizon; None where the run with the batch diverged."""
        return self.data.get("response")

    @property
    def largest_increase(self) -> float:
        return float(self.data["largest_increase"])

    @property
    def peak_horizon(self) -> int:
        """h*: how many states after the batch the loss would rise most."""
        return int(self.data["peak_horizon"])

    def harmful(self, threshold: float) -> bool:
        """Would it raise the loss by more than `threshold`?

        >>> import xarray as xr
        >>> Forecast(xr.Dataset({"largest_increase": 0.5, "peak_horizon": 3})).harmful(threshold=0.1)
        True
        """
        return self.largest_increase > threshold

    def __str__(self) -> str:
        if self.response is None:
            return "With this batch as the next step the run diverges: its loss is no longer finite."
        count, last = self.response.sizes["future"], int(self.response["horizon"].values[-1])
        return (
            f"As the next step, this batch would change the loss by at most {self.largest_increase:+.3g}, "
            f"{self.peak_horizon} state(s) after it (exact along {count} futures of {last} steps drawn from the "
            "recorded past)."
        )


def forecast(
    point: TrainingPoint,
    batch: Batch,
    past: Sequence[Batch],
    *,
    horizon: int,
    futures: int,
    clip: float | None,
    generator: Randomness,
    lr: LearningRate,
) -> Forecast:
    """The exact response of past batches' mean loss to `batch` in the place of an ordinary step.

    The ordinary step is the mean of the last recorded batches; what is watched is spread over all of them, because
    a batch may harm what comes but now and then; futures are drawn from all. Costs about 2·H·K gradients and
    2·H·K·8 forward passes for H horizons and K futures.
    """
    import xarray as xr

    if not past:
        raise InvalidInput("nothing is recorded yet: a forecast draws its futures from past batches")
    recent = mean_batch(past[-REFERENCES:])
    spread = sorted({round(i * (len(past) - 1) / (WATCHED - 1)) for i in range(WATCHED)})
    watched = mean_batch([past[i] for i in spread])
    drawn = sample_futures(list(past), futures, horizon - 1, generator)
    try:
        found = repeated_futures(point, recent, [batch], drawn, watched, clip=clip, lr=lr)
    except NotFinite:
        return Forecast(xr.Dataset({"largest_increase": math.inf, "peak_horizon": 1}))
    response = found["response"].isel({"answer": 0, "change": 0}, drop=True)
    mean = response.mean("future")
    peak = mean.isel(horizon=int(mean.argmax("horizon")))
    largest = {"largest_increase": float(peak), "peak_horizon": int(peak["horizon"])}
    return Forecast(xr.Dataset({"response": response, **largest}, attrs=found.attrs))
