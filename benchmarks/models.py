"""The two networks of the paper on CIFAR-shaped data, trained a little and captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import aftershock as ak

BATCH_SIZE = 64
CLASSES = 10
PIXELS = (3, 32, 32)
BURN_IN = 60  # steps before the capture, so that m and v are a real run's: younger, most writes are stiff
MLP_PARAMETERS = 855_050
CNN_PARAMETERS = 94_538
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """MLP–GELU, 3072–256–256–10."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3072, 256), nn.GELU(),
        nn.Linear(256, 256), nn.GELU(),
        nn.Linear(256, CLASSES),
    )  # fmt: skip


def cnn(width: int = 32) -> nn.Module:
    """CNN–ReLU, 3×3 convolutions 3→32→64→128 at the paper's width."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES),
    )  # fmt: skip


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


@dataclass(frozen=True)
class System:
    """A plain model for the reference times, the point captured from it, and batches in a cycle."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    point: ak.TrainingPoint
    device: torch.device
    data: Sequence[Batch]
    parameters: tuple[nn.Parameter, ...]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def batches(self, count: int, start: int = 0) -> list[Batch]:
        return [self.data[i % len(self.data)] for i in range(start, start + count)]

    @property
    def probe(self) -> Batch:
        return self.data[-1]

    def gradient(self, i: int) -> tuple[Tensor, ...]:
        """g: one plain gradient of a batch, without aftershock."""
        return torch.autograd.grad(loss_fn(self.model, self.data[i % len(self.data)]), self.parameters)

    def gradient_graph(self, i: int) -> tuple[Tensor, ...]:
        """The same with a graph, for products by double backward."""
        loss = loss_fn(self.model, self.data[i % len(self.data)])
        return torch.autograd.grad(loss, self.parameters, create_graph=True)

    def forward(self, i: int) -> Tensor:
        with torch.no_grad():
            return loss_fn(self.model, self.data[i % len(self.data)])


def mlp_system(device: torch.device) -> System:
    model = mlp()
    assert count_parameters(model) == MLP_PARAMETERS
    return prepare("MLP–GELU", model, device)


def cnn_system(device: torch.device, width: int = 32) -> System:
    model = cnn(width)
    assert width != 32 or count_parameters(model) == CNN_PARAMETERS
    return prepare("CNN–ReLU" if width == 32 else f"CNN–ReLU width {width}", model, device)


def prepare(name: str, model: nn.Module, device: torch.device, distinct: int = 48) -> System:
    """Train for a few steps and capture. 48 batches are 38 MB: they do not stay in a core's cache."""
    initialize(model, device)
    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(BATCH_SIZE, *PIXELS, generator=generator).to(device),
            torch.randint(CLASSES, (BATCH_SIZE,), generator=generator).to(device),
        )
        for _ in range(distinct)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for batch in (data * 2)[:BURN_IN]:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    point = ak.capture(model, optimizer, loss_fn)
    return System(name, model, optimizer, point, device, data, tuple(model.parameters()))


def initialize(model: nn.Module, device: torch.device) -> None:
    """PyTorch's default initialization from a seed, so that a row does not depend on those before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    model.to(device)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
