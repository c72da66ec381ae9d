"""The window that every side is given: a trained model, its next steps, a held-out batch, and what each step did to it.

Nothing here uses aftershock, so that the truth comes from outside.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models import Batch, cnn, loss_fn, mlp
from ..truth_models import LETTERS, Data, LanguageModel, Recipe, VisionTransformer, fit, next_token, untrained

STEPS = 24
WINDOW_SEED, BAD_SEED = 2, 3


def letter_transformer() -> nn.Module:
    return LanguageModel(tied=False, length=48, vocabulary=LETTERS)


RECIPES = (
    Recipe("MLP–GELU", mlp, loss_fn, Data.pictures, 100, lr=2e-4),
    Recipe("CNN–ReLU", cnn, loss_fn, Data.pictures, 100),
    Recipe("transformer on letters", letter_transformer, next_token, Data.letters, 300),
    Recipe("ViT", VisionTransformer, loss_fn, Data.pictures, 200, weight_decay=0.1),
)

Live = tuple[nn.Module, torch.optim.AdamW]


@dataclass(frozen=True)
class Window:
    """A model and its optimizer before the first step (neither is ever changed), and the steps that follow."""

    name: str
    model: nn.Module
    optimizer: torch.optim.AdamW
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    batches: tuple[Batch, ...]
    probe: Batch

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's, by torch's names."""
        group = self.optimizer.param_groups[0]
        return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def fresh(self) -> Live:
        """A model and an optimizer of one's own, before the first step."""
        return copy.deepcopy((self.model, self.optimizer))

    def step(self, live: Live, at: int, *, weight: float = 1.0) -> None:
        """Step `at` of the window, in place; with weight 0 its gradient is zero."""
        model, optimizer = live
        optimizer.zero_grad()
        (weight * self.loss_fn(model, self.batches[at])).backward()
        optimizer.step()

    def states(self) -> list[nn.Module]:
        """The model before each step, and after the last."""
        live, found = self.fresh(), []
        for at in range(len(self.batches)):
            found.append(copy.deepcopy(live[0]))
            self.step(live, at)
        return [*found, live[0]]

    def outcome(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self.loss_fn(model, self.probe))

    def gradient(self, at: int) -> tuple[Tensor, ...]:
        """g: one plain gradient, the unit of cost."""
        return torch.autograd.grad(self.loss_fn(self.model, self.batches[at]), tuple(self.model.parameters()))


def leave_one_out(window: Window) -> Tensor:
    """[step] The outcome, less that of the run in which the step's gradient is zero: positive, the step raised it.

    Plain torch, H²/2 gradients.
    """
    live, without = window.fresh(), []
    for at in range(len(window.batches)):
        rerun = copy.deepcopy(live)
        window.step(rerun, at, weight=0.0)
        for later in range(at + 1, len(window.batches)):
            window.step(rerun, later)
        without.append(window.outcome(rerun[0]))
        window.step(live, at)
    return window.outcome(live[0]) - torch.tensor(without, dtype=torch.float64)


def prepare(recipe: Recipe, data: Data, steps: int = STEPS) -> Window:
    """The recipe's model, trained, and its next steps."""
    model = untrained(recipe)
    optimizer = fit(recipe, data, model, torch.device("cpu"))
    source, generator = recipe.source(data), torch.Generator().manual_seed(WINDOW_SEED)
    batches = tuple(source.batch(generator) for _ in range(steps))
    return Window(recipe.name, model, optimizer, recipe.loss_fn, batches, source.batch(generator, held_out=True))


def with_bad_batch(window: Window) -> Window:
    """The same window with the labels of one batch shuffled, a third of the way through it."""
    at = len(window.batches) // 3
    inputs, labels = window.batches[at]
    order = torch.randperm(labels.numel(), generator=torch.Generator().manual_seed(BAD_SEED))
    bad = (inputs, labels.flatten()[order].reshape(labels.shape))
    batches = (*window.batches[:at], bad, *window.batches[at + 1 :])
    return dataclasses.replace(window, name=f"{window.name}, one batch mislabelled", batches=batches)
