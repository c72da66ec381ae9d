"""A CIFAR-10 system at the time of the shock: its data, its trained state, its candidates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ... import theory
from ...api.path import Path as Run
from ...api.point import TrainingPoint, capture
from ...core.batches import Accumulated, Batch, accumulate
from ...errors import InvalidFile
from ...theory.matching import Matched
from ..study import System
from .data import Cifar, load_cifar
from .networks import network

RATE, DECAY = 2e-4, 0.01
# a fixed budget: how changes are grouped, and so the last bits, must not depend on what happens to be free
MEMORY = {"cpu": "2GiB", "cuda": "8GiB"}  # a GPU is faster with more rows at once: 0.7 of the CNN's time


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
    sources_at: float = 0.25  # the scale at which the error is split: the largest that the exponents are fitted over
    hybrids: int = 3  # candidates whose channels and persistence are followed: 3 of 32 systems are the paper's 96
    beta1: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95, 0.99)
    beta2: tuple[float, ...] = (0.9, 0.99, 0.999, 0.9999)
    permutations: int = 100
    futures: int = 32
    futures_per_piece: int = 8
    sampled: int = 8  # futures behind the sampled-future score

    @property
    def seen(self) -> int:
        """Images that training has seen, or holds, at the time of the shock."""
        return (self.burn_in + self.references + self.candidates) * self.batch

    @property
    def images(self) -> int:
        return self.seen + (self.horizon - 1) * self.batch


FULL = Protocol()
QUICK = Protocol(
    burn_in=60, references=2, candidates=3, horizon=4, batch=8, probe=16, scales=(0.125, 0.25, 1.0), hybrids=2,
    beta1=(0.5, 0.99), beta2=(0.9, 0.9999), futures=4, futures_per_piece=4, sampled=2,
)  # fmt: skip


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


@dataclass(frozen=True)
class Scene:
    """One system up to the shock: the training point after the burn-in, and every image's part.

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

    @property
    def memory(self) -> str:
        return MEMORY[self.device.type]

    @cached_property
    def references(self) -> list[Batch]:
        return self.batches(self.protocol.burn_in, self.protocol.references)

    @cached_property
    def control_batch(self) -> Accumulated:
        """Its gradient is ḡ, the mean of the references'."""
        return accumulate(self.references)

    @cached_property
    def candidates(self) -> list[Batch]:
        return self.batches(self.protocol.burn_in + self.protocol.references, self.protocol.candidates)

    @cached_property
    def future(self) -> list[Batch]:
        """The realized future of Experiment 1."""
        size = self.protocol.batch
        return self.batches(self.protocol.seen // size, self.protocol.horizon - 1)

    @cached_property
    def path(self) -> Run:
        """The control along the realized future."""
        return self.point.follow([self.control_batch, *self.future], memory=self.memory)

    def resampled(self, pool: Int64[Tensor, " image"], generator: torch.Generator) -> list[Batch]:
        """One future of images of the pool, none of them twice."""
        needed = (self.protocol.horizon - 1) * self.protocol.batch
        return self.cut(pool[torch.randperm(len(pool), generator=generator)[:needed]])

    def branch(self, k: int) -> list[Batch]:
        """Future k of Experiment 2, of images that training has not seen. Its draw depends on k alone."""
        return self.resampled(self.order[self.protocol.seen :], self.system.generator(f"future {k}"))

    @cached_property
    def natural(self) -> Float[Tensor, "change d"]:
        """ξ_i = g_i − ḡ."""
        return theory.residuals(self.path.replace(self.candidates))

    @cached_property
    def matched(self) -> Matched:
        """Candidates of equal exact first response, made of the natural ones."""
        return theory.match_first_step(self.path, self.natural, self.probe)

    @cached_property
    def families(self) -> Float[Tensor, "change d"]:
        """The natural candidates, then the matched ones. One that cannot be matched is no perturbation."""
        accepted = torch.as_tensor(self.matched.accepted.values)
        return torch.cat([self.natural, self.matched.xi.where(accepted[:, None], 0.0).to(self.natural)])


@lru_cache(maxsize=1)
def prepare(system: System, data: Path | None, digest: str, protocol: Protocol, device: str) -> Scene:
    """The system after its burn-in: 100 g. Kept for the next piece of the same system in this process."""
    found, place = load_cifar(data), torch.device(device)
    if found.digest != digest:
        raise InvalidFile(f"the data at {data} is not what the study was started with; start it anew with --out")
    order = torch.randperm(len(found.train), generator=system.generator("order"))
    watched = torch.randperm(len(found.test), generator=system.generator("probe"))[: protocol.probe]
    model = build(system).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    for index in order[: protocol.burn_in * protocol.batch].split(protocol.batch):
        optimizer.zero_grad()
        cross_entropy(model, found.train.batch(index, place)).backward()
        optimizer.step()
    point = capture(model, optimizer, cross_entropy)
    return Scene(system, found, protocol, place, order, point, found.test.batch(watched, place))


def build(system: System) -> nn.Sequential:
    """The system's network in float64, its weights drawn by PyTorch's default initialization."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(system.entropy("weights"))
        return network(system.kind).double()
