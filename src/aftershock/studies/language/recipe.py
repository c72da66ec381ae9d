"""The language stage of Experiment 1, one model on one text at a time: public calls of the library on its point."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ... import theory
from ...core.memory import begin_peak, peak_held, ran_out
from ...core.noise import noise_floor
from ...core.state import CHANNELS
from ...errors import AftershockError, InvalidFile, InvalidInput, OutOfMemory
from ..study import Study, System, require_device
from .candidates import DROWNED, lost_in_noise
from .models import ModelSource, find_model
from .scene import DTYPES, FULL, QUICK, Protocol, Scene, collect, logits_of, prepare
from .text import TextSource, find_text, require_text

if TYPE_CHECKING:
    import xarray as xr

PIECE = "all"
SETTING = "language"
HYBRID = 0  # the candidate whose hybrids are run; the paper does not say which
PREDICTIONS = ("semilinear", "tangent")
ANSWERS = ("exact", *PREDICTIONS)

Grid = Mapping[str, tuple[ModelSource, TextSource, str]]  # by the kind of system: model, text, dtype


def language_study(
    models: Sequence[str],
    texts: Sequence[str],
    *,
    tokenizer: Path | None = None,
    fresh: bool = False,
    seed: int = 2026,
    quick: bool = False,
    device: str = "cpu",
    dtypes: Sequence[str] = ("float32",),
) -> Study:
    """Every model on every text in every dtype.

    One system costs 500 gradients of continuation, 13 reruns of 8 steps for each of 8 candidates, and 8·7·6 Hessian
    products.
    """
    if not models or not texts:
        raise InvalidInput("the language study needs models and texts: --model NAME_OR_PATH --text FILE_OR_DATASET")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise InvalidInput(f"dtype is one of {', '.join(DTYPES)}; got {dtype!r}")
    require_device(device)
    protocol = QUICK if quick else FULL
    grid = {
        f"{model.name}-{text.name}-{dtype}": (model, text, dtype)
        for model in (find_model(word, fresh=fresh) for word in models)
        for dtype in dict.fromkeys(dtypes)  # a file is read once for its texts, in each dtype
        for text in map(find_text, texts)
    }
    if len(grid) < len(models) * len(texts) * len(set(dtypes)):
        raise InvalidInput("two models or two texts have the same name; name them: --model NAME=PATH, --text NAME=FILE")
    for text in {text.place: text for _, text, _ in grid.values()}.values():
        require_text(text)  # told now, and not after the first systems are paid for
    systems = tuple(System(kind, seed, 0) for kind in grid)
    run = partial(run_piece, grid=grid, tokenizer=tokenizer, protocol=protocol, device=device)
    return Study("language", systems, (PIECE,), run, attributes(protocol, seed, quick))


def require_same_sources(study: Study, results: Mapping[str, xr.Dataset]) -> None:
    """Refuse finished systems of another text, or of other weights, under the names of this study's."""
    data = results[SETTING]
    for system in study.systems:
        if system.name not in data["system"].values:
            continue
        model, text, _ = study.run.keywords["grid"][system.kind]  # type: ignore[attr-defined]
        for variable, wanted in (("weights", model.weights), ("text_digest", text.digest or text.place)):
            there = str(data[variable].sel(system=system.name).values)
            if there != wanted:
                raise InvalidFile(
                    f"the results of {system.name} were made with another source: {variable} is {there} there and "
                    f"{wanted} here; choose another folder with --out, or other names with --model NAME=… --text NAME=…"
                )


def attributes(protocol: Protocol, seed: int, quick: bool) -> dict[str, object]:
    """What systems of one study share; which model, text and dtype each is stands in its results."""
    numbers = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(protocol).items()}
    return {"seed": seed, "quick": quick, "attention": "eager", **numbers}


def run_piece(
    system: System,
    piece: str,
    *,
    grid: Grid,
    tokenizer: Path | None,
    protocol: Protocol,
    device: str,
) -> dict[str, xr.Dataset]:
    """Everything about one system."""
    collect(torch.device(device))
    if device == "cuda":
        begin_peak(torch.device(device))
    try:
        return {SETTING: measured(prepare(system, *grid[system.kind], tokenizer, protocol, device))}
    except Exception as error:
        if isinstance(error, AftershockError) or not ran_out(error):  # ours says what would fit
            raise
        raise OutOfMemory(
            f"{system.kind} does not fit on {device} ({str(error).splitlines()[0]}). What would fit: a smaller model, "
            "a device with more memory, or this one while nothing else runs on it"
        ) from error


def measured(scene: Scene) -> xr.Dataset:
    """The exact responses first, with their noise: where they drown in it nothing else is run."""
    import xarray as xr

    clock, protocol = scene.clock, scene.protocol
    with clock.part("check"):
        scene.path.check()
    change = scene.path.replace(scene.candidates)
    with clock.part("exact"):
        found = theory.logit_tangent(
            change, scene.probe, logits_of, steps=protocol.steps, scales=protocol.scales, memory=scene.memory
        )
    with clock.part("noise"):
        watch = scene.path.watch(0, scene.probe)
        noise = noise_floor(watch, torch.as_tensor(found["control"].values))
    judge_noise(scene, found["exact"], xr.DataArray(noise.numpy(), dims="horizon"))
    predicted = {answer: _predicted(scene, answer) for answer in PREDICTIONS}
    with clock.part("hybrids"):
        channels = _hybrids(scene)
    response = xr.concat([found["exact"], *predicted.values()], dim="answer", coords="minimal", compat="override")
    data = xr.Dataset(
        {
            "response": response.assign_coords(answer=list(ANSWERS)).transpose("answer", "scale", "change", "horizon"),
            "fd_derivative": found["derivative"],
            "control_loss": found["control"],
            "gradient_norm": found["gradient_norm"],
            "write_norm": found["write_norm"],
            "channel_exact": channels,
            "hybrid_change": HYBRID,
            "noise_floor": ("horizon", noise.numpy()),
            **described(scene),
        }
    )
    return data.assign_coords(change=range(protocol.candidates)).drop_attrs()


def described(scene: Scene) -> dict[str, object]:
    """What the system is, and what it took."""
    import xarray as xr

    peak = peak_held(scene.device) if scene.device.type == "cuda" else 0
    return {
        "model": scene.model.name,
        "domain": scene.text.name,
        "parameters": scene.point.loss.layout.size,
        "weights": scene.model.weights,
        "dtype": scene.dtype,
        "note": scene.model.note,
        "text_digest": scene.text.digest or scene.text.place,
        "peak_bytes": peak,
        "seconds": xr.DataArray(list(scene.clock.seconds.values()), {"part": list(scene.clock.seconds)}, "part"),
    }


def _predicted(scene: Scene, answer: str) -> xr.DataArray:
    """One prediction at every scale; scale by scale, so that few rows are in memory at once. A tangent is linear in the
    scale."""
    import xarray as xr

    change, scales = scene.path.replace(scene.candidates), scene.protocol.scales
    watch = scene.path.watch(0, scene.probe)
    with scene.clock.part(answer):
        if answer == "semilinear":
            runs = [change.numbers(watch, answer, scale=scale, memory=scene.memory) for scale in scales]
        else:
            one = change.numbers(watch, answer, memory=scene.memory)
            runs = [scale * one for scale in scales]
    values = torch.stack(runs).numpy()
    return xr.DataArray(values, {"scale": list(scales), "horizon": watch.range}, ("scale", "change", "horizon"))


def _hybrids(scene: Scene) -> xr.DataArray:
    """Exact responses to the eight hybrids of one candidate; channels as bits of (θ, m, v)."""
    change = scene.path.replace([scene.candidates[HYBRID]])
    found = theory.channel_responses(change, scene.probe, answers=("exact",), memory=scene.memory)["response"]
    names = ["".join("01"[c in str(name).split("+")] for c in CHANNELS) for name in found["channel"].values]
    return found.isel({"answer": 0, "change": 0}, drop=True).assign_coords(channel=names)


def judge_noise(scene: Scene, exact: xr.DataArray, noise: xr.DataArray) -> None:
    """Warn where responses are near what rounding alone does, refuse where most are lost in it at the largest scale.

    exact: [scale, change, horizon]. noise: [horizon].
    """
    lost = lost_in_noise(exact, noise).transpose("scale", "change")
    largest = float(lost["scale"].max())
    if not lost.any():
        return
    size = float(abs(exact).sel(scale=largest).median())
    told = (
        f"rounding alone moves the probe's loss by {float(noise.median()):.1e} nats, and the exact responses are "
        f"{size:.1e}"
    )
    counts = {float(s): f"{int(lost.sel(scale=s).sum())} of {lost.sizes['change']}" for s in lost["scale"].values}
    if float(lost.sel(scale=largest).mean()) >= DROWNED:
        dtype = scene.point.loss.layout.dtypes[0]
        finer = "float32" if dtype == torch.bfloat16 else "float64"
        raise InvalidInput(
            f"{told}: {counts[largest]} candidates cannot be told from noise, so nothing can be said about them. These "
            f"weights are in {dtype}: run the study in {finer}"
        )
    listed = ", ".join(f"{count} at α = {s:g}" for s, count in counts.items() if lost.sel(scale=s).any())
    warnings.warn(
        f"{scene.system.name}: {told}: candidates that cannot be told from noise are {listed}; a scale where half of "
        "them are lost is left blank in the tables",
        stacklevel=2,
    )
