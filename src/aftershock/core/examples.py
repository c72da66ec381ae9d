"""Examples inside a batch: each one's loss and its share of a score, without per-example gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import AftershockError, ExamplesCouple
from .batches import Batch, example_count, take_examples
from .changes import ControlStep
from .derivatives import first_line
from .loss import LossFunction
from .mapping import mapped_over
from .randomness import RandomState
from .structure import flatten

TESTED = 8  # examples on which independence is tested
EXAMPLES_AT_ONCE = 1024  # half as many take 6 % longer each on the benchmarks' MLP, and 1 % on their CNN


def example_scores(
    control: ControlStep,
    direction: Float[Tensor, " param"],
    batch: Batch,
    where: str,
    chunk: int = EXAMPLES_AT_ONCE,
) -> Float[Tensor, " example"]:
    """Each example's share of its batch's score ⟨∂F/∂ĝ, g⟩, without per-example gradients.

    The shares of a batch sum to the score of its gradient. About three forward passes.
    """
    loss, step, before = control.dynamics.loss, control.step, control.before
    _, slopes = example_derivatives(loss, before.theta, before.buffers, batch, step.random, direction, where, chunk)
    return slopes


def example_weight(control: ControlStep, batch: Batch) -> float | None:
    """1 where a batch's loss is the sum of its examples' losses, None where it is their mean.

    Raises `ExamplesCouple` where it is neither.
    """
    loss, step, before = control.dynamics.loss, control.step, control.before
    some = take_examples(batch, slice(0, TESTED))
    zero = loss.layout.zeros()
    losses, _ = example_derivatives(loss, before.theta, before.buffers, some, step.random, zero, "the pool")
    whole = loss.value(before.theta, before.buffers, some, step.random, "the pool").loss
    close = 1e-3 if whole.dtype != torch.float64 else 1e-9
    if torch.isclose(losses.mean(), whole, rtol=close):
        return None
    if torch.isclose(losses.sum(), whole, rtol=close):
        return 1.0
    raise ExamplesCouple(
        f"the loss of {example_count(some)} examples together ({float(whole):.4g}) is neither the mean nor the sum "
        f"of their losses alone ({float(losses.mean()):.4g}, {float(losses.sum()):.4g}): the examples of a batch "
        "depend on each other (batch normalization in training mode, contrastive losses, token-weighted means); "
        "rank whole batches"
    )


def example_derivatives(
    function: LossFunction,
    theta: Float[Tensor, " param"],
    buffers: Mapping[str, Tensor],
    batch: Batch,
    random: RandomState,
    direction: Float[Tensor, " param"],
    where: str,
    chunk: int | None = None,
) -> tuple[Float[Tensor, " example"], Float[Tensor, " example"]]:
    """Each example's loss, and its derivative along `direction`, in one forward-mode pass.

    Every example runs as a batch of one under `vmap`: about three forward passes in all, and no
    per-example gradient. Raises `ExamplesCouple` where examples do not stand alone.
    """
    batch = function.place(batch)
    leaves, tangents = function.layout.typed_views(theta), function.layout.typed_views(direction)
    leaves_of, spec = flatten(batch)
    size = example_count(batch)
    dims = [0 if isinstance(x, Tensor) and x.ndim and x.shape[0] == size else None for x in leaves_of]

    def program(model: nn.Module) -> tuple[Tensor, Tensor]:
        def one(*pieces: Any) -> tuple[Tensor, Tensor]:
            example = spec.unflatten([x if dim is None else x.unsqueeze(0) for x, dim in zip(pieces, dims)])

            def loss_at(parameters: list[Tensor]) -> Tensor:
                inside = dict(zip(function.layout.names, parameters))
                with function.forward(), function.places.holding(inside):
                    return function.loss_fn(model, example).reshape(())

            loss, slope = torch.func.jvp(loss_at, (leaves,), (tangents,))  # type: ignore[misc]
            return loss, slope

        found: tuple[Tensor, Tensor] = mapped_over(tuple(dims), one, randomness="error", chunk=chunk)(*leaves_of)
        return found

    try:
        (losses, slopes), _, _ = function.call(leaves, buffers, random, program, derivative=True)
    except (AftershockError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ExamplesCouple(
            f"the examples of {where} cannot be told apart: {first_line(error)}. Batch normalization in "
            "training mode couples examples, and dropout draws one mask per batch; rank whole batches, "
            "or rank with those layers in eval mode"
        ) from error
    return losses, slopes
