"""Random numbers that loss_fn draws before it calls the model: noise, masks, times.

A recorder reads the random state when the model is called, and so cannot replay them unless the loop says where loss_fn
begins.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.batches import Batch
from ..core.loss import LossFunction
from ..core.randomness import RandomState
from ..core.uses import closure_of

REMEDY = (
    "call recorder.before_forward() in the loop, right before loss_fn, or draw these numbers where the batch is made, "
    "and let them be a part of it"
)
COMPILED = (
    "torch.compile draws dropout masks in its own way, which no replay repeats; with "
    "torch._inductor.config.fallback_random = True before the first step it draws them as the plain model does"
)
NAMES = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "multinomial", "normal", "normal_", "uniform", "uniform_", "exponential_", "random", "random_", "randrange",
    "choice", "choices", "sample", "rsample", "shuffle", "permutation", "gauss", "beta", "dirichlet", "gumbel_softmax",
    "dropout",
}  # fmt: skip
DEPTH = 3  # calls in each other


def may_draw(function: Any, depth: int = DEPTH) -> bool:
    """Does the function's own code, or that of functions and methods it calls by name, name something that draws?"""
    while isinstance(function, functools.partial):
        function = function.func
    owner, function = getattr(function, "__self__", None), inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType) or depth == 0:
        return False
    names = list(_names(function.__code__))
    around = function.__globals__ | closure_of(function)
    called = [around.get(name) for name in names] + [getattr(type(owner), name, None) for name in names]
    return not NAMES.isdisjoint(names) or any(may_draw(one, depth - 1) for one in called if inspect.isfunction(one))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def draws_compiled(model: nn.Module) -> bool:
    """May compiled code draw dropout masks in its own way, as inductor does unless it is told otherwise?"""
    config = sys.modules.get("torch._inductor.config")
    parts = list(model.modules())
    compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts)
    drops = any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training for part in parts)
    return compiled and drops and not getattr(config, "fallback_random", False)


class _Called(BaseException):
    """The model was called, and nothing more is asked; no `except Exception` of the user's takes it."""


def drawn_before_the_model(
    loss: LossFunction, parameters: Sequence[Tensor], buffers: Mapping[str, Tensor], batch: Batch, random: RandomState
) -> bool:
    """Does loss_fn move a random state before it calls the model or a part of it? Runs it up to that call only."""
    seen: list[RandomState] = []

    def look(*_: Any) -> None:
        seen.append(RandomState.now(loss.layout.device))
        raise _Called

    loss = copy.copy(loss)
    loss._tried = True  # no copies of frozen weights, which may be most of a GPU's memory: nothing is run with them
    handles: list[RemovableHandle] = []
    try:
        handles += [part.register_forward_pre_hook(look) for part in loss.model.modules()]
        loss.call(parameters, buffers, random, lambda model: loss.raw(model, batch, "the first call of the model"))
    except _Called:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return bool(seen) and not seen[0].same(random)
