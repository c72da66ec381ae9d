"""Global-norm clipping, in torch's own arithmetic, and its Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .reductions import each_with, total_norm

TORCH_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6


@dataclass(frozen=True)
class Clip:
    """What clipping did to one gradient: n = ‖ĝ‖ and the factor c = min(1, max_norm / (n + 1e-6)). eq:clip_factor"""

    norm: float
    factor: float

    @property
    def binds(self) -> bool:
        return self.factor < 1.0


def global_norm(grads: Sequence[Tensor | None], order: Sequence[int]) -> Tensor:
    """n = ‖ĝ‖, summed in the order of `model.parameters()`: another order gives other bits."""
    return total_norm([grad for i in order if (grad := grads[i]) is not None])


def clip_(grads: Sequence[Tensor | None], norm: Tensor, max_norm: float | None) -> Clip:
    """Clip gradients in place as `torch.nn.utils.clip_grad_norm_` does, to the bit."""
    return Clip(float(norm), float(scale_(grads, norm, max_norm)))


def scale_(grads: Sequence[Tensor | None], norm: Tensor, max_norm: float | None) -> Tensor | float:
    """The same, without waiting for the factor c, which it returns."""
    if max_norm is None:
        return 1.0
    factor = torch.clamp(max_norm / (norm + TORCH_EPSILON), max=1.0)
    torch._foreach_mul_([grad for grad in grads if grad is not None], factor)
    return factor


def clip_jacobian(
    clip: Clip, raw: Float[Tensor, " param"], xi: Float[Tensor, "*rows param"]
) -> Float[Tensor, "*rows param"]:
    """J ξ, with J = c (I − ĝĝᵀ / (n (n + 1e-6))) where clipping binds and J = I where not. eq:clip_jacobian

    J is symmetric, so this is also Jᵀ. It jumps where the norm meets the threshold: the response
    reports whether a change switched clipping on or off.
    """
    if not clip.binds:
        return xi
    along = each_with(xi, raw) / (clip.norm * (clip.norm + TORCH_EPSILON))
    return clip.factor * (xi - along[..., None] * raw)
