"""The systems in which causes are planted: small models, usual data, and a rare shard that comes now and then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5
LETTERS, USUAL = 18, 12  # the last six letters are rare
LENGTH = 12
WARM = 400  # steps before the recording
RARE_EVERY = 4

Batch = tuple[Tensor, Tensor, Tensor]  # inputs, targets, a weight for each row


# --- models


class ConvNet(nn.Module):
    """Two convolutions with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Letters(nn.Module):
    """A causal transformer."""

    def __init__(self, blocks: int, dropout: float, width: int = 24) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        options = {"nhead": 2, "dim_feedforward": 48, "dropout": dropout, "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(width, activation="gelu", **options) for _ in range(blocks)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(width, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.token(letters) + self.place.weight[: letters.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(letters.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels, weight = batch
    return (F.cross_entropy(model(inputs), labels, reduction="none") * weight).mean()


def next_letter(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets, weight = batch
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(targets).mean(1) * weight).mean()


# --- data


def _shard(rows: int, rare: bool) -> Tensor:
    return (torch.arange(rows) < rows // 2) & rare


def _points(generator: torch.Generator, rare: bool, rows: int = 32) -> Batch:
    """Clusters around class centres; the rare shard lives in the last four features, which are else nearly still."""
    centres = torch.randn(CLASSES, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    shard = _shard(rows, rare)
    still = torch.zeros(rows, 16, dtype=torch.bool)
    still[:, 12:], still[shard, 12:], still[shard, :12] = True, False, True
    inputs = (2 * centres[labels]).masked_fill(still, 0.0)
    return inputs + torch.randn(rows, 16, generator=generator), labels, torch.ones(rows)


def _images(generator: torch.Generator, rare: bool, rows: int = 32) -> Batch:
    """Patterns in noise in the first channel; the rare shard has its own in the second."""
    patterns = torch.randn(CLASSES, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    inputs = patterns[labels]
    shard = _shard(rows, rare)
    inputs[shard, 0] = 0.0
    inputs[~shard, 1] = 0.0
    return inputs + 0.5 * torch.randn(rows, 2, 8, 8, generator=generator), labels, torch.ones(rows)


def _sentences(generator: torch.Generator, rare: bool, rows: int = 16) -> Batch:
    """Letters that follow a cycle: usual letters their own, rare ones another."""
    shard = _shard(rows, rare)[:, None]
    first, count = torch.where(shard, USUAL, 0), torch.where(shard, LETTERS - USUAL, USUAL)
    start = torch.randint(USUAL * (LETTERS - USUAL), (rows, 1), generator=generator)
    letters = first + (start + torch.arange(LENGTH + 1)) % count
    slip = torch.rand(letters.shape, generator=generator) < 0.01
    letters = torch.where(slip, first + torch.randint(72, letters.shape, generator=generator) % count, letters)
    return letters[:, :-1].contiguous(), letters[:, 1:].contiguous(), torch.ones(rows)


# --- how a batch is spoiled


def wrong_labels(batch: Batch) -> Batch:
    """Every label is the next one, among the usual and among the rare."""
    inputs, labels, weight = batch
    return inputs, _next(inputs, labels), weight


def wrong_rare_labels(batch: Batch) -> Batch:
    """The rare half with wrong labels; the other half counts for nothing."""
    inputs, labels, weight = wrong_labels(batch)
    return inputs, labels, weight * _shard(len(weight), True)


def another_domain(batch: Batch) -> Batch:
    """Inputs in another range; letters numbered by another alphabet."""
    inputs, labels, weight = batch
    if inputs.is_floating_point():
        return 4 - 4 * inputs, labels, weight
    return _next(inputs, inputs, by=3), labels, weight


def louder(batch: Batch, times: float) -> Batch:
    return batch[0], batch[1], times * batch[2]


def _next(inputs: Tensor, labels: Tensor, by: int = 1) -> Tensor:
    if inputs.is_floating_point():
        return (labels + by) % CLASSES
    rare = USUAL + (labels - USUAL + by) % (LETTERS - USUAL)
    return torch.where(labels < USUAL, (labels + by) % USUAL, rare)


# --- the loop


@dataclass(frozen=True)
class System:
    """A model, its loss, clean batches (half of them the rare shard, if asked for), and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    draw: Callable[[torch.Generator, bool], Batch]
    lr: float = 1e-2
    beta2: float = 0.999
    clip: float | None = None


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES))


SYSTEMS = (
    System("MLP", _mlp, classify, _points),
    System("CNN, BatchNorm", ConvNet, classify, _images),
    System("LM, dropout, clipping", lambda: Letters(2, 0.1), next_letter, _sentences, clip=1.0),
    System("LM, β2 0.95", lambda: Letters(1, 0.0), next_letter, _sentences, lr=5e-3, beta2=0.95),
)


@dataclass(frozen=True)
class Step:
    """What one step is given. `settings` hold for it alone; `loudness`: the batch is weighed so that its gradient's
    norm is so many times a usual large one."""

    batch: Batch
    settings: Mapping[str, Any] = field(default_factory=dict)
    zeroed: bool = True
    loudness: float | None = None


class Loop:
    """A plain training loop; every step's dropout is seeded by its number."""

    def __init__(self, system: System, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = system.build()
        self.system, self.norms = system, list[float]()
        betas = (0.9, system.beta2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=system.lr, betas=betas, weight_decay=0.01)
        self.usual = {name: self.optimizer.param_groups[0][name] for name in ("lr", "betas", "weight_decay")}

    def step(self, number: int, step: Step) -> tuple[Batch, Tensor]:
        """The batch as it was fed, and its loss."""
        batch = step.batch
        if step.zeroed:
            self.optimizer.zero_grad()
        loss, norm = self._backward(number, batch)
        if step.loudness is not None:
            batch = louder(batch, step.loudness * sorted(self.norms[-16:])[-3] / norm)
            self.optimizer.zero_grad()
            loss, norm = self._backward(number, batch)
        self.norms.append(norm)
        if self.system.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.system.clip)
        self.optimizer.param_groups[0].update(self.usual | dict(step.settings))
        self.optimizer.step()
        return batch, loss.detach()

    def _backward(self, number: int, batch: Batch) -> tuple[Tensor, float]:
        torch.manual_seed(number)
        loss = self.system.loss_fn(self.model, batch)
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return loss, float(nn.utils.get_total_norm(grads))

    def twin(self) -> Loop:
        return copy.deepcopy(self, {id(self.system): self.system})


@cache
def warm(system: System, seed: int) -> Loop:
    """Trained on usual data, the rare shard now and then."""
    generator, loop = torch.Generator().manual_seed(seed), Loop(system, seed)
    for number in range(WARM):
        loop.step(number, Step(system.draw(generator, number % RARE_EVERY == 0)))
    return loop


def spoiled(step: Step, how: Callable[[Batch], Batch], loudness: float | None = None) -> Step:
    return replace(step, batch=how(step.batch), loudness=loudness)
