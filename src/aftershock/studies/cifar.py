"""Experiments 1 and 2 on the CIFAR-10 networks: a recipe over the public calls, one system at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from .. import analysis
from ..analysis.matching import Matched
from ..api.change import Change
from ..api.path import Path as Run
from ..api.point import TrainingPoint, capture
from ..core.batches import Accumulated, Batch, accumulate
from ..errors import InvalidFile, InvalidInput
from .cifar_data import CLASSES, Cifar, load_cifar
from .study import Study, System, systems_of

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

SYSTEMS_PER_SEED = 4
RATE, DECAY = 2e-4, 0.01
FAMILIES = ("natural", "matched")
PREDICTIONS = ("tangent", "endpoint", "semilinear")
PRESENT = ("exact_one_step", "gradient_norm", "write_norm")
# a fixed budget: how changes are grouped, and so the last bits, must not depend on what happens to be free
MEMORY = "2GiB"


@dataclass(frozen=True)
class Protocol:
    """The paper's numbers (app:exp1_neural_details, app:exp2_predictability); `QUICK` has smaller ones."""

    burn_in: int = 100
    references: int = 4
    candidates: int = 12
    horizon: int = 12
    batch: int = 128
    probe: int = 256
    scales: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 1.0)
    hybrids: int = 3  # candidates whose channels and persistence are followed: 3 of 32 systems are the paper's 96
    beta1: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95, 0.99)
    beta2: tuple[float, ...] = (0.9, 0.99, 0.999, 0.9999)
    permutations: int = 100
    futures: int = 32
    futures_per_piece: int = 8
    sampled: int = 4  # futures behind the sampled-future score: eight rank a little better and cost twice

    @property
    def seen(self) -> int:
        """Images that training has seen, or holds, at the time of the shock."""
        return (self.burn_in + self.references + self.candidates) * self.batch

    @property
    def images(self) -> int:
        return self.seen + (self.horizon - 1) * self.batch


FULL = Protocol()
QUICK = Protocol(
    references=2, candidates=4, horizon=5, batch=16, probe=32, scales=(0.0625, 0.125, 0.25, 1.0), hybrids=2,
    beta1=(0.5, 0.99), beta2=(0.9, 0.9999), futures=4, futures_per_piece=4, sampled=2,
)  # fmt: skip


def cifar_study(data: Path | None, seed: int = 2026, quick: bool = False, device: str = "cpu") -> Study:
    """16 systems of the MLP, then 16 of the CNN; quick: one of each, with the smaller numbers of `QUICK`.

    A system costs about 11,000 gradients, as many passes of the probe and 4,500 Hessian products; three quarters of
    the gradients are the exact responses of Experiment 2. On a GPU this is bound by launches: several workers that
    share it (under NVIDIA's MPS) are many times faster than one.
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
    pieces = ("fidelity", "ranking", "memory", "present", *(f"futures-{k}" for k in branches))
    run = partial(run_piece, data=data, digest=found.digest, protocol=protocol, device=device)
    return Study("cifar", tuple(system for some in each for system in some), pieces, run, attrs)


def run_piece(
    system: System, piece: str, *, data: Path | None, digest: str, protocol: Protocol, device: str
) -> dict[str, xr.Dataset]:
    """One piece of one system; its setting is its architecture."""
    # the usual choice of the fastest convolution depends on timing, and with it the bits
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        scene = prepare(system, data, digest, protocol, device)
        name, _, part = piece.partition("-")
        if name == "futures":
            return {system.kind: futures(scene, int(part))}
        recipes: dict[str, Callable[[Scene], xr.Dataset]] = {
            "fidelity": fidelity, "ranking": ranking, "memory": memory, "present": present,
        }  # fmt: skip
        return {system.kind: recipes[name](scene)}


# --- a system at the time of the shock


def build(kind: str, generator_seed: int) -> nn.Module:
    """MLP–GELU with 855,050 parameters or CNN–ReLU with 94,538, by PyTorch's default initialization, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_seed)
        if kind == "mlp":
            layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 32 * 32, 256), nn.GELU(), nn.Linear(256, 256)]
            layers += [nn.GELU(), nn.Linear(256, CLASSES)]
        else:
            layers = [Convolution(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            layers += [Convolution(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            layers += [Convolution(64, 128, 3, padding=1), nn.ReLU()]
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)]
        return nn.Sequential(*layers).double()


class Convolution(nn.Conv2d):
    """A 3×3 convolution with padding 1 as one matrix product: float64 convolutions have no fast kernel on a GPU."""

    def forward(self, x: Float[Tensor, "n input row column"]) -> Float[Tensor, "n output row column"]:
        n, channels, rows, columns = x.shape
        windows = nn.functional.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        patches = windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, 9 * channels)
        out = nn.functional.linear(patches, self.weight.flatten(1), self.bias)
        return out.view(n, rows, columns, -1).permute(0, 3, 1, 2)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


@dataclass(frozen=True)
class Scene:
    """One system up to the shock: the state after the burn-in, and every image's part.

    `order` is one permutation of the training images: burn-in, references, candidates and the realized future
    take theirs from its front, in this order.
    """

    system: System
    data: Cifar
    protocol: Protocol
    device: torch.device
    order: Int64[Tensor, " image"]
    point: TrainingPoint
    probe: Batch

    def batches(self, first: int, count: int) -> list[Batch]:
        """Batches first … first + count − 1 of the order."""
        size = self.protocol.batch
        return self.cut(self.order[first * size : (first + count) * size])

    def cut(self, index: Int64[Tensor, " image"]) -> list[Batch]:
        return [self.data.train.batch(part, self.device) for part in index.split(self.protocol.batch)]

    @cached_property
    def references(self) -> list[Batch]:
        return self.batches(self.protocol.burn_in, self.protocol.references)

    @cached_property
    def control(self) -> Accumulated:
        """Its gradient is ḡ, the mean of the references'."""
        return accumulate(self.references)

    @cached_property
    def candidates(self) -> list[Batch]:
        return self.batches(self.protocol.burn_in + self.protocol.references, self.protocol.candidates)

    @property
    def future(self) -> list[Batch]:
        """The realized future of Experiment 1."""
        size = self.protocol.batch
        return self.batches(self.protocol.seen // size, self.protocol.horizon - 1)

    @property
    def path(self) -> Run:
        return self.point.follow([self.control, *self.future], memory=MEMORY)

    def resampled(self, pool: Int64[Tensor, " image"], generator: torch.Generator) -> list[Batch]:
        """One future of images of the pool, none of them twice."""
        needed = (self.protocol.horizon - 1) * self.protocol.batch
        return self.cut(pool[torch.randperm(len(pool), generator=generator)[:needed]])

    def branch(self, k: int) -> list[Batch]:
        """Future k of Experiment 2, of images that training has not seen. Its draw depends on k alone."""
        return self.resampled(self.order[self.protocol.seen :], generator(self.system, f"future {k}"))

    @cached_property
    def families(self) -> Families:
        """The natural residuals, and candidates of equal exact first response made of them."""
        short = self.point.follow([self.control], memory=MEMORY)
        natural = analysis.residuals(short.replace(self.candidates))
        return Families.of(natural, analysis.match_first_step(short, natural, self.probe))


@dataclass(frozen=True)
class Families:
    """Natural and matched candidates as rows of ξ. A candidate that could not be matched has no row."""

    xi: Float[Tensor, "row d"]
    family: list[int]
    change: list[int]
    matched: Matched

    @classmethod
    def of(cls, natural: Float[Tensor, "change d"], matched: Matched) -> Families:
        kept = [int(i) for i in matched.accepted.values.nonzero()[0]]
        xi = torch.cat([natural, matched.xi[kept]])
        every = list(range(len(natural)))
        return cls(xi, [0] * len(every) + [1] * len(kept), every + kept, matched)

    def __call__(self, path: Run) -> Change:
        """All rows as one change of a path's first step."""
        return path.perturb(self.xi)

    def grid(self, values: np.ndarray, dims: Sequence[str] = ()) -> tuple[tuple[str, ...], np.ndarray]:
        """Rows of numbers as a variable (family, change, …), NaN where there is no row."""
        import numpy as np

        out = np.full((len(FAMILIES), max(self.change) + 1, *values.shape[1:]), np.nan)
        out[self.family, self.change] = values
        return ("family", "change", *dims), out

    def rows(self, family: int) -> list[int]:
        return [row for row, own in enumerate(self.family) if own == family]


@lru_cache(maxsize=1)
def prepare(system: System, data: Path | None, digest: str, protocol: Protocol, device: str) -> Scene:
    """The system after its burn-in: 100 g. Kept for the next piece of the same system in this process."""
    found, place = load_cifar(data), torch.device(device)
    if found.digest != digest:
        raise InvalidFile(f"the data at {data} is not what the study was started with; start it anew with --out")
    order = torch.randperm(len(found.train), generator=generator(system, "order"))
    watched = torch.randperm(len(found.test), generator=generator(system, "probe"))[: protocol.probe]
    model = build(system.kind, system.entropy("weights")).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    for index in order[: protocol.burn_in * protocol.batch].split(protocol.batch):
        optimizer.zero_grad()
        cross_entropy(model, found.train.batch(index, place)).backward()
        optimizer.step()
    point = capture(model, optimizer, cross_entropy)
    return Scene(system, found, protocol, place, order, point, found.test.batch(watched, place))


def generator(system: System, stream: str) -> torch.Generator:
    return torch.Generator().manual_seed(system.entropy(stream))


def _require_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"device {device!r} cannot be used here ({reason}); take cpu, or cuda on a GPU") from error


# --- the pieces


def fidelity(scene: Scene) -> xr.Dataset:
    """Experiment 1: the exact response and three predictions of it, at every scale.

    `identity_residual` is the largest ‖e − Σ parts‖ of the recursive error identity along the first candidate's
    exact pair at full scale. `switch_fraction` is counted on the batch of the step that follows each state; the
    last state has none.
    """
    import xarray as xr

    change, scales = scene.path.replace(scene.candidates), scene.protocol.scales
    found = change.response(scene.probe, scales=scales, methods=("exact", *PREDICTIONS)).data["response"]
    parts = analysis.decompose(change, index=0).data
    data = xr.Dataset(
        {
            "exact": found.sel({"method": "exact"}, drop=True),
            "predicted": found.sel({"method": list(PREDICTIONS)}),
            "identity_residual": parts["identity_residual_absolute"].max(),
        }
    )
    if scene.system.kind == "cnn":
        data["switch_fraction"] = analysis.switch_fraction(change, scales=scales, kinds=("relu",))
    return _numbered(data, "change")


def ranking(scene: Scene) -> xr.Dataset:
    """Experiment 1: every score of both families on the realized future, against the exact magnitude."""
    import numpy as np
    import xarray as xr

    path, families = scene.path, scene.families
    change = families(path)
    table = analysis.scores(change, scene.probe)
    exact = change.response(scene.probe, methods=("exact",)).exact.isel(scale=0)
    magnitude = abs(exact).max("horizon")
    draws = generator(scene.system, "permutations")
    nulls = np.full((len(FAMILIES), scene.protocol.permutations), np.nan)
    for family, null in enumerate(nulls):
        rows = families.rows(family)
        if len(rows) > 1:  # else there is nothing to rank: too few could be matched, as `accepted` says
            own, target = table.isel(change=rows), magnitude.isel(change=rows)
            null[:] = analysis.readout_null(own, target, generator=draws, permutations=len(null))["spearman"]
    dims, score = families.grid(table["score"].transpose("change", "method").values, ["score_method"])
    _, curves = families.grid(exact.values, ["horizon"])
    matched = families.matched
    data = xr.Dataset(
        {
            "score": (dims, score),
            "magnitude": families.grid(magnitude.values),
            "first_step": families.grid(exact.isel(horizon=0).values),
            "null_correlation": (("family", "permutation"), nulls),
            "readout_cosine": ("horizon", table["readout_cosine"].values),
            "accepted": ("change", matched.accepted.values),
            "matched_exact": (("change", "horizon"), curves[FAMILIES.index("matched")]),
        },
        coords={
            "family": list(FAMILIES),
            "score_method": table["method"].values,
            "permutation": np.arange(scene.protocol.permutations),
            "horizon": table["horizon"].values,
        },
    )
    return _numbered(data.transpose("family", "score_method", ...), "change")


def memory(scene: Scene) -> xr.Dataset:
    """Experiment 1: exact hybrids of θ, m and v, and how long m and v last under other β."""
    import xarray as xr

    protocol = scene.protocol
    change = scene.path.replace(scene.candidates[: protocol.hybrids])
    hybrids = analysis.channel_responses(change, scene.probe, methods=("exact",))["response"].isel(method=0, drop=True)
    parts = [set(str(name).split("+")) for name in hybrids["channel"].values]
    bits = ["".join(str(int(block in part)) for block in ("theta", "m", "v")) for part in parts]
    data = {"channel_exact": hybrids.assign_coords(channel=bits).rename(change="channel_change")}
    lasting = {
        "m": analysis.persistence(change, scene.probe, beta1=protocol.beta1),
        "v": analysis.persistence(change, scene.probe, beta2=protocol.beta2),
    }
    for channel, beta in (("m", "beta1"), ("v", "beta2")):
        response = lasting[channel]["response"].swap_dims(system=beta).drop_vars("system")
        data[f"persistence_{channel}"] = response.rename({beta: f"decay_{channel}", "change": "persistence_change"})
    return _numbered(xr.Dataset(data), "channel_change", "persistence_change")


def present(scene: Scene) -> xr.Dataset:
    """Experiment 2: scores that see no future batch.

    `sampled_future` runs the exact response along futures resampled from images that training has already seen,
    and averages the peak: it shares no image with any future that it is judged by. With a dozen candidates the
    exact run costs no more than a linear one.
    """
    import numpy as np
    import xarray as xr

    families, protocol = scene.families, scene.protocol
    common = (scene.point, scene.control, families)
    options: dict[str, Any] = {"horizon": protocol.horizon, "memory": MEMORY}
    now = scene.point.follow([scene.control], memory=MEMORY)
    table = analysis.scores(families(now), scene.probe)["score"].sel({"method": list(PRESENT)})
    seen = scene.order[: protocol.seen]
    later = {
        "present_frozen": analysis.present_frozen(*common, scene.probe, **options),
        "reference_surrogate": analysis.reference_surrogate(
            *common, scene.probe, references=scene.references, **options
        ),
        "sampled_future": analysis.sampled_future(
            *common, lambda length, draws: scene.resampled(seen, draws), scene.probe, samples=protocol.sampled,
            method="exact", generator=generator(scene.system, "sampled"), **options,
        ),
    }  # fmt: skip
    columns = [*table.values, *(data["score"].values for data in later.values())]
    dims, score = families.grid(np.stack(columns, axis=1), ["present_method"])
    data = xr.Dataset(
        {"present_score": (dims, score), "matched_first_step": ("change", families.matched.first_step.values)},
        coords={"family": list(FAMILIES), "present_method": [*PRESENT, *later]},
    )
    return _numbered(data.transpose("family", "present_method", ...), "change")


def futures(scene: Scene, part: int) -> xr.Dataset:
    """Experiment 2: the exact response of both families under a part of the resampled futures."""
    import xarray as xr

    each = scene.protocol.futures_per_piece
    own = range(part * each, (part + 1) * each)
    branches = [scene.branch(k) for k in own]
    families = scene.families
    data = analysis.repeated_futures(scene.point, scene.control, families, branches, scene.probe, memory=MEMORY)
    found = data["response"].isel(method=0)
    grid = families.grid(found.transpose("change", "future", "horizon").values, ["future", "horizon"])
    coords = {"family": list(FAMILIES), "future": list(own), "horizon": found["horizon"].values}
    return _numbered(xr.Dataset({"future_response": grid}, coords=coords), "change")


def _numbered(data: xr.Dataset, *dims: str) -> xr.Dataset:
    """Candidates by their number, which every piece shares; attributes belong to the study."""
    return data.assign_coords({dim: range(data.sizes[dim]) for dim in dims}).drop_attrs()
