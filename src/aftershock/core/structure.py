"""The tensors inside a batch, whatever holds them: what pytrees know, and objects with named fields besides.

Tokenizers' `BatchEncoding` (a `UserDict`) and the user's own dataclasses are opened, and made again with other tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map


def flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a batch, and the structure that makes one of others (`structure.unflatten`).

    Opening goes through a batch twice more, and most hold nothing to open: on a small model that is a part of a pass.
    """
    leaves, spec = tree_flatten(batch)
    return (leaves, spec) if all(fields_of(leaf) is None for leaf in leaves) else tree_flatten(_opened(batch))


def map_leaves(change: Callable[[Any], Any], batch: Any) -> Any:
    """The same batch with every leaf changed."""
    return tree_map(change, _opened(batch))


def fields_of(x: Any) -> dict[str, Any] | None:
    """What an object with named fields holds; None for everything else, and for an accumulated batch, which is ours."""
    if type(x).__module__.startswith(__name__.split(".")[0] + "."):
        return None
    if isinstance(x, UserDict):
        return dict(x.data)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return None


@dataclass(frozen=True)
class _Kind:
    """Two objects are alike where their class and their fields are."""

    cls: type
    names: tuple[Any, ...]
    example: Any = field(compare=False, repr=False)

    def made_of(self, values: Any) -> Any:
        made, found = copy.copy(self.example), dict(zip(self.names, values))
        if isinstance(made, UserDict):
            made.data = found
        else:
            for name, value in found.items():
                object.__setattr__(made, name, value)  # a frozen dataclass too: it is a copy
        return made


@dataclass(frozen=True)
class _Opened:
    values: list[Any]
    kind: _Kind


register_pytree_node(_Opened, lambda x: (x.values, x.kind), lambda values, kind: kind.made_of(values))


def _opened(batch: Any) -> Any:
    def open_leaf(x: Any) -> Any:
        found = fields_of(x)
        if found is None:
            return x
        return _Opened([_opened(value) for value in found.values()], _Kind(type(x), tuple(found), x))

    return tree_map(open_leaf, batch)
