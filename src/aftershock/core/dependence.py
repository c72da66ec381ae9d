"""Which tensors depend on the parameters, whether or not a gradient flows through them.

`requires_grad` ends at detach(), .data and no_grad; what is chosen by such a number switches with the parameters
all the same. Memory is marked instead of tensors: views, .data and in-place writes share it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

# made in the shape of a tensor, whatever its values
BLANK = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
BLANK |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}


class Dependence:
    """The floating-point tensors of one pass that the parameters have reached.

    Integers and truths are not followed: where they depend on parameters, a gate has made them, and it is held.
    """

    def __init__(self, model: nn.Module) -> None:
        # a weak reference keeps an address from being given to other memory
        self._reached: dict[int, StorageWeakRef] = {}
        self.mark(*(p for p in model.parameters() if p.requires_grad))

    def among(self, *values: Any) -> bool:
        return any(isinstance(leaf, Tensor) and self._has(leaf) for leaf in tree_leaves(values))

    def mark(self, *values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and _continuous(leaf) and _has_storage(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._reached:
                    self._reached[storage._cdata] = StorageWeakRef(storage)

    def after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Mark what an aten operation with a marked input has made or written to."""
        if func.overloadpacket.__name__ in BLANK:
            return
        self.mark(result)
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.mark(args[i] if i < len(args) else kwargs.get(argument.name))

    def _has(self, x: Tensor) -> bool:
        if not _continuous(x):
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        return x.requires_grad or not _has_storage(x) or x.untyped_storage()._cdata in self._reached


def _continuous(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _has_storage(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta
