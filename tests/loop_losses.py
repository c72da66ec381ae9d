"""What strangers train on: batches, losses and probes."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, SIZE, TOKENS = 4, 3, 6, 9
DEVICE = torch.device(os.environ.get("AFTERSHOCK_LOOPS", "cpu"))  # where the loops run

# --- batches


def classes(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, Tensor]]:
    features = shape or (WIDTH,)
    return lambda: (torch.randn(SIZE, *features).to(dtype), torch.randint(0, CLASSES, (SIZE,)))


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, TOKENS, (3, 6))
    return ids[:, :-1], ids[:, 1:]


def sizes(*counts: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches of these sizes in turn: the last of an epoch is smaller."""
    made = [0]

    def draw() -> tuple[Tensor, Tensor]:
        made[0] += 1
        size = counts[made[0] % len(counts)]
        return torch.randn(size, WIDTH), torch.randint(0, CLASSES, (size,))

    return draw


@dataclasses.dataclass
class Labelled:
    x: Tensor
    y: Tensor


# --- losses


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy((out.logits if hasattr(out, "logits") else out).flatten(0, 1), batch[1].flatten())


def smoothed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def penalized(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A gradient penalty on the inputs."""
    x = batch[0].clone().requires_grad_()
    loss = F.cross_entropy(model(x), batch[1])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * slope.square().sum()


def branching(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Control flow that depends on the data."""
    loss = cross_entropy(model, batch)
    return loss * 2 if loss.item() > 1.1 else loss


def submodules_only(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The model itself is never called."""
    return F.cross_entropy(model[3](torch.relu(model[0](batch[0]))), batch[1])  # type: ignore[index]


def writing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Masks its own batch in place."""
    batch[0][:, 0] += 0.5
    return cross_entropy(model, batch)


def pseudo_labels(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Labels from the model in eval mode."""
    model.eval()
    with torch.no_grad():
        labels = model(batch[0]).argmax(-1)
    model.train()
    return cross_entropy(model, batch) + 0.1 * F.cross_entropy(model(batch[0]), labels)


def autocast_inside(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Noise from torch's own generator."""
    return cross_entropy(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))


def mixed_up(draw: Callable[[], float], chance: float = 1.0) -> Callable[[nn.Module, Any], Tensor]:
    """Mixup whose coefficient is drawn outside torch, now and then."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if draw() > chance:
            return cross_entropy(model, batch)
        share = draw()
        out = model(share * x + (1 - share) * x.flip(0))
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))

    return loss_fn


numpy_mixup = mixed_up(lambda: np.random.rand())  # noqa: NPY002 - as users write it
random_mixup = mixed_up(random.random)
rare_mixup = mixed_up(random.random, chance=0.3)


def quantized(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss + model.commitment  # type: ignore[operator]


def distilled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model, batch) + (model(batch[0]) - model.teacher(batch[0])).square().mean()  # type: ignore


def encodings() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding(dictionaries())


def labelled() -> Labelled:
    return Labelled(*classes()())


def by_field(model: nn.Module, batch: Labelled) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def by_key(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def dictionaries() -> dict[str, Tensor]:
    return dict(zip(("x", "y"), classes()()))


def eval_probe(model: nn.Module) -> Tensor:
    """As users write it: eval mode, and not back."""
    model.eval()
    torch.manual_seed(3)
    x, y = torch.randn(8, 4, device=DEVICE), torch.randint(0, 3, (8,), device=DEVICE)
    return F.cross_entropy(model(x), y)


def accuracy(model: nn.Module) -> Tensor:
    """No derivative."""
    x, y = held_out(40)
    return (model(x).argmax(-1) == y).float().mean()


def penalty_probe(model: nn.Module) -> Tensor:
    """A probe that differentiates: gradients must be enabled."""
    return penalized(model, held_out())


def held_out(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(3)
    with torch.device("cpu"):
        x, y = (
            torch.randn(count, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (count,), generator=generator),
        )
    return x.to(DEVICE), y.to(DEVICE)


def freezing_probe(model: nn.Module) -> Tensor:
    """Freezes what it is given, and does not undo it."""
    return cross_entropy(model.requires_grad_(False), held_out())


def tempering_probe(model: nn.Module) -> Tensor:
    """Sets an attribute, and does not undo it."""
    model.temperature = 3.0
    return cross_entropy(model, held_out())


@torch.no_grad()
def writing_probe(model: nn.Module) -> Tensor:
    """Prunes the weights that it is given in place."""
    for p in model.parameters():
        p.mul_(p.abs() > 0.1)
    return cross_entropy(model, held_out())
