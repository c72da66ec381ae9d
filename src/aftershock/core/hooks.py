"""The user's hooks: found by name, and refused unless the user says what they are.

A hook may be part of the computation (it changes an output or a gradient) or only look. Nobody can tell from the
outside, so a hook that is not of a library known to look must be spoken for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as calling
from torch.optim import optimizer as stepping

from ..errors import InvalidInput, UnsupportedModel, UnsupportedOptimizer

Hooks = Literal["run", "ignore"]
KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "full backward pre-hook",
    "_backward_hooks": "full backward hook",
}
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
# what these register looks on, or belongs to a wrapper that is taken off
LOOKING = (
    "aftershock", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "wandb",
    "torch.profiler", "torch.autograd.profiler", "torch.distributed", "torch.nn.parallel", "torch.optim",
)  # fmt: skip


class Hook(NamedTuple):
    """A hook of the user's and where it hangs."""

    hook: Any
    kind: str  # the attribute that holds it
    where: str

    def __str__(self) -> str:
        return f"{self.where} has a {KINDS[self.kind]}, {name_of(self.hook)}"


def origin(function: Any) -> str:
    """The Python module in which a function or callable was written; `functools.wraps` does not hide it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    own = getattr(function, "__globals__", {}).get("__name__")
    return str(own or getattr(function, "__module__", None) or type(function).__module__)


def name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_torchs_own(hook: Any) -> bool:
    """One by which torch itself computes weights: weight_norm, spectral_norm, pruning and kinds of it."""
    return any(within(kind.__module__, ("torch.nn.utils",)) for kind in type(hook).__mro__)


def is_users(hook: Any) -> bool:
    return not is_torchs_own(hook) and not within(origin(hook), LOOKING)


def kept(hooks: Mapping[int, Any], word: Hooks | None) -> dict[int, Any]:
    """Those of a module's hooks that its private copy runs."""
    return {key: hook for key, hook in hooks.items() if is_torchs_own(hook) or (word == "run" and is_users(hook))}


def users_hooks(model: nn.Module) -> Iterator[Hook]:
    """The user's hooks on any module of the model."""
    for name, module in model.named_modules():
        for kind in KINDS:
            for hook in getattr(module, kind).values():
                if is_users(hook):
                    yield Hook(hook, kind, f"module {name!r}" if name else "the model")


def global_hooks() -> Iterator[Hook]:
    """The user's hooks on every module there is, private copies too."""
    for kind in KINDS:
        for hook in getattr(calling, f"_global{kind}").values():
            if is_users(hook):
                yield Hook(hook, kind, "every module")


def gradient_hook(model: nn.Module, word: Hooks | None) -> Hook | None:
    """A hook that runs in backward passes and may change gradients."""
    found = chain(users_hooks(model), global_hooks()) if word == "run" else ()
    return next((hook for hook in found if hook.kind in BACKWARD), None)


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Is there a hook on a parameter that may change its gradient? Those of a recorder look on; nobody else's are known
    to."""
    found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(not within(origin(hook), ("aftershock",)) for hooks in found for hook in (hooks or {}).values())


def refuse_unspoken(model: nn.Module, word: Hooks | None) -> None:
    """Refuse hooks about which the user has said nothing."""
    if word not in (None, "run", "ignore"):
        raise InvalidInput(f'hooks is "run" or "ignore"; got {word!r}')
    found = next(users_hooks(model), None)
    if found is not None and word is None:
        raise UnsupportedModel(
            f'{found}, which may be part of the computation. Say hooks="run" to run such hooks in every pass, or '
            'hooks="ignore" where they only look; or remove it'
        )
    found = next(global_hooks(), None)
    if found is not None and word != "run":
        raise UnsupportedModel(
            f"{found}, registered by torch.nn.modules.module.register_module_…_hook: it runs in private copies of the "
            'model too. Remove it, or say hooks="run" where it is part of the computation'
        )


def refuse_step_hooks(optimizer: torch.optim.Optimizer, word: Hooks | None) -> None:
    """Refuse hooks of the optimizer's step, which a path does not run."""
    held = (
        (optimizer._optimizer_step_pre_hooks, "pre"),
        (stepping._global_optimizer_pre_hooks, "pre"),
        (optimizer._optimizer_step_post_hooks, "post"),
        (stepping._global_optimizer_post_hooks, "post"),
    )
    for hooks, when in held:
        for hook in hooks.values():
            if is_users(hook) and word != "ignore":
                raise UnsupportedOptimizer(
                    f"the optimizer has a step {when}-hook, {name_of(hook)}, which may change gradients or parameters "
                    "and is not part of the steps that aftershock takes. Remove it, or say "
                    'hooks="ignore" where it only looks'
                )
