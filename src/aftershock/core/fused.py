"""AdamW's part of predicted steps on CUDA in one pass over memory each, as Triton kernels.

The same arithmetic as in `LinearStep`, which is what runs where Triton is missing (a CPU, Windows, no C compiler).
Every kernel reads the control once per coordinate and goes through all rows there.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from .adamw import Run
    from .linear_step import LinearStep
    from .state import Cotangent, Tangent

BLOCK = 1024
WARPS = 8


def available(rows: Tensor) -> bool:
    """Whether these rows can go through a kernel."""
    return rows.is_cuda and rows.ndim <= 2 and rows.dtype in (torch.float32, torch.float64) and _works()


@cache
def _works() -> bool:
    """Triton is there and can compile, found out once by running it."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from . import kernels

        one = torch.ones(1, 1, device="cuda")
        kernels.scale[(1,)](one, BLOCK=16)
        return bool(one == 2)
    except Exception:  # no compiler, an unknown card: the plain arithmetic does it
        return False


def absorb_(at: LinearStep, run: Run, dx: Tangent, u: Float[Tensor, "change param"]) -> None:
    """`LinearStep.absorb_` on one run."""
    from . import kernels

    _launch(kernels.tangent, at, run, [dx.theta, dx.m, dx.v, u])


def absorb_exactly_(
    at: LinearStep,
    run: Run,
    dx: Tangent,
    xi: Float[Tensor, "change param"],
    factors: Float[Tensor, " change"],
    changes: Float[Tensor, " change"],
) -> None:
    """`LinearStep.absorb_exactly_` on one run; `factors` are the clip factors of the rows, `changes` those less the
    control's."""
    from . import kernels

    _launch(kernels.semilinear, at, run, [dx.theta, dx.m, dx.v, xi], factors.contiguous(), changes.contiguous())


def absorb_transposed_(at: LinearStep, run: Run, c: Cotangent, w: Float[Tensor, "outcome param"]) -> None:
    """`LinearStep.absorb_transposed_` on one run; writes the dual of u into `w`."""
    from . import kernels

    _launch(kernels.adjoint, at, run, [c.theta, c.m, c.v, w])


def _launch(kernel: Any, at: LinearStep, run: Run, rows: list[Tensor], *more: Tensor) -> None:
    raw, before = at.raw, at.before
    control = [x[run.where] for x in (raw, before.theta, before.m, before.v)]
    moving = [(x if x.ndim == 2 else x[None])[:, run.where] for x in rows]
    count, size = moving[0].shape
    numbers = (
        run.sign * at.clip.factor, run.coupled, 1 - run.beta1, run.beta2, 1 - run.beta2, run.bias2, run.eps,
        -run.lr / run.bias1, run.lr / (2 * run.bias1 * run.bias2), run.shrink, run.sign,
    )  # fmt: skip
    scalars = torch.tensor(numbers, dtype=raw.dtype, device=raw.device)
    grid = (-(-size // BLOCK),)
    strides = [x.stride(0) for x in moving]
    with torch.cuda.device(raw.device):
        kernel[grid](*control, *moving, *more, scalars, size, count, *strides, BLOCK=BLOCK, num_warps=WARPS)
