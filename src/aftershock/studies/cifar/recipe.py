"""Experiments 1 and 2 on the CIFAR-10 networks, one system at a time.

Linear answers are the public calls of the library on the system's training point; exact answers, thousands of runs
that differ in their first state only, run as rows (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ... import theory
from ...core.batches import Batch
from ...errors import InvalidInput
from ..quadratic.rows import HYBRIDS, hybrid_responses, persistent_responses, responses, with_control
from ..study import Study, System, systems_of
from .data import load_cifar
from .scene import FULL, MEMORY, QUICK, Protocol, Scene, prepare

if TYPE_CHECKING:
    import xarray as xr

SYSTEMS_PER_SEED = 4
FAMILIES = ["natural", "matched"]
MATCHED = ("matched_exact", "matched_first_step")  # variables of the matched family alone
PREDICTIONS = ("tangent", "endpoint", "semilinear")
PRESENT = ("exact_one_step", "gradient_norm", "write_norm")
PERSISTENCE_SCALE = 0.25


def cifar_study(data: Path | None, seed: int = 2026, quick: bool = False, device: str = "cpu") -> Study:
    """16 systems of the MLP, then 16 of the CNN; quick: one of each, with the smaller numbers of `QUICK`.

    One system costs about 12,000 gradients as rows, 9,000 of them the exact responses of Experiment 2, and 4,000
    Hessian products.
    """
    protocol = QUICK if quick else FULL
    _require_device(device)
    found = load_cifar(data)
    found.require(protocol.images, protocol.probe)
    each = [systems_of(kind, seed, SYSTEMS_PER_SEED)[: 1 if quick else None] for kind in ("mlp", "cnn")]
    attrs = {
        "seed": seed,
        "quick": quick,
        "device": device,
        "dtype": "float64",
        "data": found.digest,
        "train_images": len(found.train),
        "test_images": len(found.test),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(protocol).items()},
    }
    branches = range(protocol.futures // protocol.futures_per_piece)
    # the longest first, so that workers end together
    pieces = ("fidelity", "ranking", "present", *(f"futures-{k}" for k in branches), "memory")
    run = partial(run_piece, data=data, digest=found.digest, protocol=protocol, device=device)
    return Study("cifar", tuple(system for some in each for system in some), pieces, run, attrs)


def run_piece(
    system: System, piece: str, *, data: Path | None, digest: str, protocol: Protocol, device: str
) -> dict[str, xr.Dataset]:
    """One piece of one system; its setting is its architecture."""
    scene = prepare(system, data, digest, protocol, device)
    name, _, part = piece.partition("-")
    if name == "futures":
        return {system.kind: futures(scene, int(part))}
    recipes: dict[str, Callable[[Scene], xr.Dataset]] = {
        "fidelity": fidelity, "ranking": ranking, "memory": memory, "present": present,
    }  # fmt: skip
    return {system.kind: recipes[name](scene)}


def _require_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"device {device!r} cannot be used here ({reason}); take cpu, or cuda on a GPU") from error


def exact(scene: Scene, xi: Float[Tensor, "row d"], future: list[Batch]) -> Float[Tensor, "row horizon"]:
    """The exact response to every row along a future: one run of rows."""
    rows = with_control(scene.control, scene.after(xi))
    return responses(rows, scene.losses(future), [scene.probe], scene.hyper)[0].cpu()


# --- Experiment 1


def fidelity(scene: Scene) -> xr.Dataset:
    """The exact response and three predictions of it, at every scale.

    `identity_residual` is the largest ‖e − Σ parts‖ of the recursive error identity along the first candidate's
    exact pair at full scale. `switch_fraction` is counted on the batch of the step that follows each state; the
    last state has none.
    """
    import xarray as xr

    change, scales = scene.path.replace(scene.candidates), scene.protocol.scales
    predicted = change.response(scene.probe_batch, scales=scales, answers=PREDICTIONS).data["response"]
    scaled = torch.cat([scale * scene.natural for scale in scales])
    found = exact(scene, scaled, scene.future).unflatten(0, (len(scales), -1)).transpose(0, 1)
    parts = theory.decompose(change, index=0).data
    data = xr.Dataset(
        {
            "exact": (("change", "scale", "horizon"), found.numpy()),
            "predicted": predicted.sel({"answer": list(PREDICTIONS)}),
            "identity_residual": parts["identity_residual_absolute"].max(),
        }
    )
    if scene.system.kind == "cnn":
        data["switch_fraction"] = theory.switch_fraction(change, scales=scales, kinds=("relu",))
    return _numbered(data, "change")


def ranking(scene: Scene) -> xr.Dataset:
    """Every score of both families on the realized future, against the exact magnitude."""
    import xarray as xr

    path, draws = scene.path, scene.system.generator("permutations")
    tables = []
    for xi, accepted in _families(scene):
        table = theory.scores(path.perturb(xi), scene.probe_batch)
        response = exact(scene, xi, scene.future)
        magnitude = response.abs().amax(1).where(accepted, torch.nan).numpy()
        null = theory.readout_null(table, magnitude, generator=draws, permutations=scene.protocol.permutations)
        found = xr.Dataset(
            {
                "score": (("score_method", "change"), table["score"].values),
                "magnitude": ("change", magnitude),
                "first_step": ("change", response[:, 0].numpy()),
                "curves": (("change", "horizon"), response.numpy()),
                "null_correlation": ("permutation", null["spearman"].values),
            },
            {"score_method": table["answer"].values, "horizon": table["horizon"].values},
        )
        tables.append(found.assign(readout_cosine=("horizon", table["readout_cosine"].values)))
    cosine = tables[0]["readout_cosine"]
    joined = xr.concat([t.drop_vars("readout_cosine") for t in tables], dim="family").assign_coords(family=FAMILIES)
    data = joined.drop_vars("curves").assign(
        readout_cosine=cosine,
        matched_exact=joined["curves"].sel(family="matched", drop=True),
        accepted=("change", scene.equal_first_steps.accepted.numpy()),
    )
    return _numbered(_without_unmatched(data, scene), "change", "permutation")


def memory(scene: Scene) -> xr.Dataset:
    """Exact hybrids of θ, m and v, and how long m and v last under other β."""
    import xarray as xr

    protocol = scene.protocol
    xi, future = scene.natural[: protocol.hybrids], scene.losses(scene.future)
    run = (future, [scene.probe], scene.hyper)
    hybrids = hybrid_responses(scene.control, scene.after(xi), *run)[0]
    data = xr.Dataset(
        {"channel_exact": (("channel", "channel_change", "horizon"), hybrids.cpu().numpy())},
        {"channel": list(HYBRIDS), "horizon": range(1, protocol.horizon + 1)},
    )
    shocked = scene.after(PERSISTENCE_SCALE * xi)
    for channel, decays in (("m", protocol.beta1), ("v", protocol.beta2)):
        found = persistent_responses(scene.control, shocked, *run, channel, decays)[0].cpu().numpy()
        dims = (f"decay_{channel}", "persistence_change", "horizon")
        data = data.assign({f"persistence_{channel}": (dims, found)}).assign_coords({dims[0]: list(decays)})
    return _numbered(data, "channel_change", "persistence_change")


# --- Experiment 2


def present(scene: Scene) -> xr.Dataset:
    """Scores that see no future batch.

    `sampled_future` runs the exact response along futures resampled from images that training has already seen,
    and averages the peak: it shares no image with any future that it is judged by. As rows the exact run costs less
    than a linear one.
    """
    import xarray as xr

    seen, draws = scene.order[: scene.protocol.seen], scene.system.generator("sampled")
    sampled = [scene.resampled(seen, draws) for _ in range(scene.protocol.sampled)]
    scores = [_present_scores(scene, xi, sampled) for xi, _ in _families(scene)]
    data = xr.Dataset(
        {
            "present_score": (
                ("family", "present_method", "change"),
                torch.stack([torch.stack(list(each.values())) for each in scores]).numpy(),
            ),
            "matched_first_step": ("change", scene.equal_first_steps.first_step.numpy()),
        },
        {"family": FAMILIES, "present_method": list(scores[0])},
    )
    return _numbered(_without_unmatched(data, scene), "change")


def _present_scores(
    scene: Scene, xi: Float[Tensor, "change d"], sampled: list[list[Batch]]
) -> dict[str, Float[Tensor, " change"]]:
    common = (scene.point, scene.control_batch, lambda path: path.perturb(xi), scene.probe_batch)
    options: dict[str, Any] = {"horizon": scene.protocol.horizon, "memory": MEMORY}
    surrogate = theory.reference_surrogate(*common, references=scene.references, **options)
    moved = scene.after(xi).theta
    return {
        "exact_one_step": (scene.probe.value(moved) - scene.probe.value(scene.control.theta)).abs().cpu(),
        "gradient_norm": xi.norm(dim=1).cpu(),
        "write_norm": scene.written(xi).theta.norm(dim=1).cpu(),
        "present_frozen": torch.as_tensor(theory.present_frozen(*common, **options)["score"].values),
        "reference_surrogate": torch.as_tensor(surrogate["score"].values),
        "sampled_future": torch.stack([exact(scene, xi, future).abs().amax(1) for future in sampled]).mean(0),
    }


def futures(scene: Scene, part: int) -> xr.Dataset:
    """The exact response of both families under a part of the resampled futures, all in one run of rows each."""
    import xarray as xr

    each = scene.protocol.futures_per_piece
    own = range(part * each, (part + 1) * each)
    xi = torch.cat([rows for rows, _ in _families(scene)])
    found = torch.stack([exact(scene, xi, scene.branch(k)) for k in own], dim=1)
    data = xr.Dataset(
        {"future_response": (("family", "change", "future", "horizon"), found.unflatten(0, (2, -1)).numpy())},
        {"family": FAMILIES, "future": list(own), "horizon": range(1, scene.protocol.horizon + 1)},
    )
    return _numbered(_without_unmatched(data, scene), "change")


def _families(scene: Scene) -> list[tuple[Float[Tensor, "change d"], Bool[Tensor, " change"]]]:
    """The natural residuals and candidates of equal exact first response made of them, and which of them exist.

    A candidate that cannot be matched runs along as no perturbation, and `_without_unmatched` takes it out.
    """
    matched = scene.equal_first_steps
    xi = matched.xi.where(matched.accepted.to(matched.xi.device)[:, None], 0.0)
    return [(scene.natural, torch.ones_like(matched.accepted)), (xi, matched.accepted)]


def _without_unmatched(data: xr.Dataset, scene: Scene) -> xr.Dataset:
    """NaN for the matched candidates that do not exist."""
    import xarray as xr

    existing = [accepted.numpy() for _, accepted in _families(scene)]
    kept = xr.DataArray(existing, dims=("family", "change"), coords={"family": FAMILIES})
    return data.assign(
        {name: value.where(kept) for name, value in data.items() if {"family", "change"} <= set(value.dims)}
    ).assign({name: data[name].where(kept.sel(family="matched", drop=True)) for name in MATCHED if name in data})


def _numbered(data: xr.Dataset, *dims: str) -> xr.Dataset:
    """Candidates by their number, which every piece shares; attributes belong to the study."""
    return data.assign_coords({dim: range(data.sizes[dim]) for dim in dims}).drop_attrs()
