"""Examples inside a batch: each one's loss and its share of a score, without per-example gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..errors import AftershockError, ExamplesCouple
from .batches import Batch, example_count, take_examples
from .changes import ControlStep
from .derivatives import first_line
from .loss import LossFunction
from .mapping import mapped_over
from .memory import ran_out
from .randomness import RandomState
from .reductions import each_with, norm
from .structure import flatten

TESTED = 8  # examples on which independence is tested before anything is computed
SPREAD = 32  # and of every thousand further ones
EXAMPLES_AT_ONCE = 1024  # half as many take 6 % longer each on the benchmarks' MLP, and 1 % on their CNN
PARTS = 0.02  # of their sizes, by which slopes of examples may miss that of all: far above rounding
COUPLED = (
    "the examples of a batch depend on each other (batch normalization in training mode, contrastive losses, "
    "token-weighted means); rank whole batches"
)


def example_scores(
    control: ControlStep,
    direction: Float[Tensor, " param"],
    batch: Batch,
    where: str,
    chunk: int = EXAMPLES_AT_ONCE,
    *,
    weight: float | None,
    tested: int,
) -> Float[Tensor, " example"]:
    """Each example's share of its batch's score ⟨∂F/∂ĝ, g⟩, without per-example gradients.

    The shares of a batch sum to the score of its gradient, if its examples have the `weight` of others and stand alone:
    of `tested` of them, drawn from the batch, that is seen, else `ExamplesCouple` is raised. About three forward
    passes, and a gradient of those tested.
    """
    loss, step, before = control.dynamics.loss, control.step, control.before
    found = example_derivatives(loss, before.theta, before.buffers, batch, step.random, direction, where, chunk)
    some = _drawn(len(found[0]), min(tested, chunk)).to(found[0].device)
    losses, slopes, few = found[0][some], found[1][some], take_examples(batch, some)
    together = loss.gradient(before.theta, before.buffers, few, step.random, where)
    _weight_of(few, losses, together.loss, where, (weight,))
    score = float(each_with(loss.layout.join(together.grads), direction))
    alone, size = (float(x.sum() if weight else x.mean()) for x in (slopes, slopes.abs()))
    precision = loss.autocast.dtype if loss.autocast.enabled else together.loss.dtype
    rounding = torch.finfo(precision).eps * float(together.norm * norm(direction))
    if abs(score - alone) > PARTS * size + rounding:
        raise ExamplesCouple(
            f"the slopes of {example_count(few)} examples of {where} alone come to {alone:.4g}, and together they have "
            f"{score:.4g}: {COUPLED}"
        )
    return found[1]


def _drawn(count: int, wanted: int) -> Int64[Tensor, " few"]:
    """Some of so many examples, always the same ones: every n-th would miss weights that come back as regularly."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[: min(wanted, count)].sort().values


def example_weight(control: ControlStep, batch: Batch) -> float | None:
    """1 where a batch's loss is the sum of its examples' losses, None where it is their mean.

    Told from a few of them. Raises `ExamplesCouple` where it is neither.
    """
    loss, step, before = control.dynamics.loss, control.step, control.before
    some = take_examples(batch, slice(0, TESTED))
    zero = loss.layout.zeros()
    losses, _ = example_derivatives(loss, before.theta, before.buffers, some, step.random, zero, "the pool")
    whole = loss.value(before.theta, before.buffers, some, step.random, "the pool").loss
    return _weight_of(some, losses, whole, "the pool", (None, 1.0))


def _weight_of(
    some: Batch, losses: Float[Tensor, " example"], whole: Tensor, where: str, allowed: Sequence[float | None]
) -> float | None:
    """The weight that makes the losses of examples alone that of all together."""
    close = 1e-3 if whole.dtype != torch.float64 else 1e-9
    for weight in allowed:
        if torch.isclose(losses.mean() if weight is None else weight * losses.sum(), whole, rtol=close):
            return weight
    raise ExamplesCouple(
        f"the loss of {example_count(some)} examples of {where} together ({float(whole):.4g}) is neither the mean nor "
        f"the sum of their losses alone ({float(losses.mean()):.4g}, {float(losses.sum()):.4g}): {COUPLED}"
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
    except AftershockError:
        raise
    except Exception as error:
        if ran_out(error):
            raise
        layer = _coupling(function.model)
        eval_mode = ", or train and capture with that layer in eval mode" if layer else ""
        raise ExamplesCouple(
            f"the examples of {where} cannot be told apart: {layer or COUPLED}; rank whole batches (path.rank)"
            f"{eval_mode}. As single examples the model fails with: {first_line(error)}"
        ) from error
    return losses, slopes


def _coupling(model: nn.Module) -> str | None:
    """The first module because of which an example may be another one beside others, in words."""
    for name, module in model.named_modules():
        called = f"{name or 'the model'} is {type(module).__name__} in training mode"
        if module.training and isinstance(module, _BatchNorm):
            return f"{called}, which normalizes an example by the others of its batch"
        if module.training and isinstance(module, _DropoutNd) and module.p > 0:
            return f"{called}, which draws one mask for the whole batch"
    return None
