"""bergson's MAGIC as scores of a window's steps: the outcome's derivative by a weight on each batch."""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn

from ..models import Batch
from .unrolled import math_attention, moments
from .window import Window

EPS_ROOT = 1e-17  # bergson's own default, added under the root so that v = 0 has a derivative


def bergson_magic(window: Window) -> Tensor:
    """Its own training with √H checkpoints on disk, then its backward pass through them."""
    import torchopt
    from bergson.magic import BackwardState, Trainer
    from torchopt.pytree import tree_iter

    model, optimizer = window.fresh()
    m, v, counts = (dict(zip(_names(model), part)) for part in moments(model, optimizer))
    weighted = _Weighted(model, window)
    trainer, state = Trainer.initialize(weighted, torchopt.adamw(**window.options, eps_root=EPS_ROOT))
    first, *rest = state.opt_state
    order = sorted(m)  # torchopt flattens a dictionary by its keys
    mu, nu, count = ([part[name].detach() for name in order] for part in (m, v, counts))
    state.opt_state = (first._replace(mu=mu, nu=nu, count=count), *rest)
    stream = _Stream(window)
    with tempfile.TemporaryDirectory() as folder, math_attention():
        state = trainer.train(state, stream, inplace=True, save_dir=folder)
        with state.activate(weighted) as parameters:
            loss = window.loss_fn(model, window.probe)
            grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))
        state.detach_()
        moved = [torch.zeros_like(x) for x in tree_iter(state.opt_state) if x.is_floating_point()]
        found = trainer.backward(
            folder, stream, BackwardState(grads, moved, torch.zeros_like(stream.weights)), state, inplace=True
        )
    return found.weight_grads.detach().double()


def _names(model: nn.Module) -> list[str]:
    return [f"model.{name}" for name, _ in model.named_parameters()]


class _Weighted(nn.Module):
    def __init__(self, model: nn.Module, window: Window) -> None:
        super().__init__()
        self.model, self.window = model, window

    def forward(self, input_ids: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return weight * self.window.loss_fn(self.model, (input_ids, targets))


class _Stream:
    """What bergson's trainer reads of its data: batches, with a weight each."""

    device = torch.device("cpu")

    def __init__(self, window: Window) -> None:
        self.batches: tuple[Batch, ...] = window.batches
        self.weights = nn.Parameter(torch.ones(len(self.batches)))

    @property
    def requires_grad(self) -> bool:
        return self.weights.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.weights.requires_grad = value

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        inputs, targets = self.batches[at]
        return {"input_ids": inputs, "targets": targets, "weight": self.weights[at]}
