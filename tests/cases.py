"""Small systems on which everything is tested: float64, a few dozen parameters, warm moments."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aftershock as ak
from aftershock.core.batches import Accumulated

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Case:
    """A live run: model, optimizer, loss, a source of batches, and how it clips."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Loss
    batch: Callable[[], Any]
    clip: float | None = None
    warm_steps: int = 5
    smooth: bool = True

    def train(self, batches: list[Any]) -> list[float]:
        """The training loop that a user would write."""
        losses = []
        for batch in batches:
            self.optimizer.zero_grad()
            if isinstance(batch, Accumulated):
                parts = []
                for micro in batch.batches:
                    loss = self.loss_fn(self.model, micro) / len(batch.batches)
                    loss.backward()
                    parts.append(float(loss.detach()))
                losses.append(sum(parts))
            else:
                loss = self.loss_fn(self.model, batch)
                loss.backward()
                losses.append(float(loss.detach()))
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        return losses

    def batches(self, count: int) -> list[Any]:
        return [self.batch() for _ in range(count)]

    def point(self, **options: Any) -> ak.TrainingPoint:
        return ak.capture(self.model, self.optimizer, self.loss_fn, **options)

    def path(self, steps: int = 4, **options: Any) -> ak.Path:
        return self.point().follow(self.batches(steps), clip=self.clip, **options)

    def twin(self) -> Case:
        """An independent copy of the live run, as a second process would have it."""
        memo: dict[int, Any] = {}
        model = copy.deepcopy(self.model, memo)
        optimizer = copy.deepcopy(self.optimizer, memo)
        return Case(self.name, model, optimizer, self.loss_fn, self.batch, self.clip)


def advised(refused: Any) -> str:
    """The memory= that an error says would fit; `refused` is what `pytest.raises` gives."""
    found = re.search(r'memory="([^"]+)"', str(refused.value))
    assert found, refused.value
    return found[1]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def classes(features: tuple[int, ...], count: int = 3, size: int = 6) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(size, *features), torch.randint(0, count, (size,)))


class Quadratic(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(size))

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        d, u, q = batch
        return 0.5 * (d * self.theta**2).sum() + 0.5 * (u.mT @ self.theta).square().mean() + q @ self.theta


class TinyCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        return self.head(F.relu(self.b(x)).mean((2, 3)))


class Tied(nn.Module):
    """Input and output embedding share one parameter; rows of unseen tokens never get a gradient."""

    def __init__(self, tied: bool = True, vocabulary: int = 6, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class Block(nn.Module):
    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)))


class TinyTransformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(4, dropout), Block(4, dropout)])
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Sometimes(nn.Module):
    """The second branch is used by some batches only, so its gradient is None in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, use_both: bool) -> Tensor:
        y = torch.tanh(self.a(x))
        return y + torch.tanh(self.b(x)) if use_both else y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda z: self.b(torch.tanh(self.a(z))), x, use_reentrant=False)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT


def mlp(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


def _adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4, **options})


def quadratic() -> Case:
    model = Quadratic()
    return Case(
        "quadratic",
        model,
        _adamw(model),
        lambda m, b: m(b),
        lambda: (torch.rand(8) + 0.1, torch.randn(8, 3), torch.randn(8)),
    )


def tanh_mlp() -> Case:
    model = mlp(4, 5, 3)
    return Case("tanh_mlp", model, _adamw(model), cross_entropy, classes((4,)))


def adam_coupled() -> Case:
    model = mlp(4, 5, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.3, eps=1e-4)
    return Case("adam_coupled", model, optimizer, cross_entropy, classes((4,)))


def maximize() -> Case:
    model = mlp(4, 4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.3, maximize=True)
    return Case("maximize", model, optimizer, lambda m, b: -cross_entropy(m, b), classes((4,)))


def relu_cnn() -> Case:
    model = TinyCNN()
    return Case("relu_cnn", model, _adamw(model), cross_entropy, classes((1, 6, 6)), smooth=False)


def tied() -> Case:
    model = Tied()
    return Case("tied", model, _adamw(model), next_token, lambda: torch.randint(0, 6, (4, 6)))


def two_groups() -> Case:
    model = mlp(4, 5, 3)
    groups = [
        {"params": [model[2].weight, model[0].bias], "lr": 3e-2, "betas": (0.8, 0.95), "weight_decay": 0.0},
        {"params": [model[0].weight, model[2].bias], "lr": 5e-3, "betas": (0.9, 0.99), "eps": 1e-3},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.2)
    return Case("two_groups", model, optimizer, cross_entropy, classes((4,)), clip=0.5)


def clipped() -> Case:
    model = mlp(4, 5, 3)
    return Case("clipped", model, _adamw(model), cross_entropy, classes((4,)), clip=0.05)


def untouched_rows() -> Case:
    """Tokens 4 and 5 never occur: their embedding rows keep v = 0."""
    model = Tied(tied=False)
    return Case(
        "untouched_rows",
        model,
        _adamw(model, eps=1e-3),
        next_token,
        lambda: torch.randint(0, 4, (4, 6)),
    )


def dropout() -> Case:
    model = TinyTransformer(dropout=0.3)
    return Case("dropout", model, _adamw(model), next_token, lambda: torch.randint(0, 5, (3, 5)), clip=0.5)


def transformer() -> Case:
    model = TinyTransformer()
    return Case("transformer", model, _adamw(model), next_token, lambda: torch.randint(0, 5, (3, 5)))


def batch_norm() -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    return Case("batch_norm", model, _adamw(model), cross_entropy, classes((4,)))


def unused_parameters() -> Case:
    model = Sometimes()
    turns = iter(range(10_000))

    def batch() -> tuple[Tensor, bool]:
        return torch.randn(5, 3), next(turns) % 2 == 0

    def loss_fn(m: nn.Module, b: tuple[Tensor, bool]) -> Tensor:
        return m(*b).square().mean() + m(*b).sum().cos()

    return Case("unused_parameters", model, _adamw(model), loss_fn, batch)


def checkpointed() -> Case:
    model = Checkpointed()
    return Case("checkpointed", model, _adamw(model), cross_entropy, classes((3,)))


def lora() -> Case:
    model = LoRA()
    return Case("lora", model, _adamw(model), cross_entropy, classes((4,)))


def accumulated() -> Case:
    model = mlp(4, 5, 3)
    make = classes((4,))
    return Case(
        "accumulated",
        model,
        _adamw(model),
        cross_entropy,
        lambda: ak.accumulate([make() for _ in range(3)]),
        clip=0.1,
    )


CASES = {
    build.__name__: build
    for build in (
        quadratic,
        tanh_mlp,
        adam_coupled,
        maximize,
        relu_cnn,
        tied,
        two_groups,
        clipped,
        untouched_rows,
        dropout,
        transformer,
        batch_norm,
        unused_parameters,
        checkpointed,
        lora,
        accumulated,
    )
}


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """A case with warm moments, made in `dtype` from `seed`."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        case = CASES[name]()
        case.train(case.batches(case.warm_steps))
        batch = case.batch

        def typed_batch() -> Any:
            torch.set_default_dtype(dtype)
            try:
                return batch()
            finally:
                torch.set_default_dtype(before)

        case.batch = typed_batch
        return case
    finally:
        torch.set_default_dtype(before)
