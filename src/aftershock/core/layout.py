"""Where each parameter lives in the flat vector.

θ, m and v are each one vector, parameters in the order of their groups. Every parameter starts at a
multiple of 512 bytes, as torch's own allocations do, so that kernels take the same path and give the
same bits. The padding is zero and stays zero; nobody outside this file sees it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..errors import InvalidInput

ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class Layout:
    """The map between named parameters and one flat vector.

    `dtype` is the type of the flat vector: the widest of the parameters' own `dtypes` and at least
    float32, so that every value fits without rounding and a tangent of a bfloat16 model keeps its digits.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    groups: tuple[int, ...]
    model_order: tuple[int, ...]  # the same parameters as model.parameters() gives them
    device: torch.device

    @cached_property
    def dtype(self) -> torch.dtype:
        widest = torch.float32
        for dtype in self.dtypes:
            widest = torch.promote_types(widest, dtype)
        return widest

    @cached_property
    def uniform(self) -> bool:
        """Every parameter has the dtype of the flat vector, so that its views need no casting."""
        return all(dtype == self.dtype for dtype in self.dtypes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def padded_sizes(self) -> tuple[int, ...]:
        unit = ALIGNMENT_BYTES // self.dtype.itemsize
        return tuple(-(-size // unit) * unit for size in self.sizes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        starts, at = [], 0
        for size in self.padded_sizes:
            starts.append(at)
            at += size
        return tuple(starts)

    @cached_property
    def size(self) -> int:
        """d: how many parameters there are, without padding."""
        return sum(self.sizes)

    @cached_property
    def padded_size(self) -> int:
        return sum(self.padded_sizes)

    @cached_property
    def index(self) -> Tensor:
        """Positions of the real coordinates in the padded vector."""
        pieces = [torch.arange(start, start + size) for start, size in zip(self.starts, self.sizes)]
        return torch.cat(pieces).to(self.device)

    def parameter_of(self, where: Int64[Tensor, " coordinate"]) -> Int64[Tensor, " coordinate"]:
        """Which parameter each coordinate of the padded vector belongs to."""
        return torch.searchsorted(torch.tensor(self.starts, device=where.device), where, right=True) - 1

    def inside(self, where: slice) -> list[tuple[int, slice]]:
        """The parameters in a stretch of the padded vector, each with its place in it."""
        found = []
        for i in range(bisect.bisect_right(self.starts, where.start) - 1, len(self.starts)):
            begin, end = self.starts[i] - where.start, self.starts[i] + self.padded_sizes[i] - where.start
            if begin >= where.stop - where.start:
                break
            found.append((i, slice(max(begin, 0), min(end, where.stop - where.start))))
        return found

    def zeros(self, *rows: int) -> Float[Tensor, "*rows param"]:
        return torch.zeros(*rows, self.padded_size, dtype=self.dtype, device=self.device)

    def blank(self) -> Float[Tensor, " param"]:
        """A vector to be written to: only its padding is zero already."""
        flat = torch.empty(self.padded_size, dtype=self.dtype, device=self.device)
        return flat.index_fill_(-1, self._padding, 0.0)

    @cached_property
    def _padding(self) -> Int64[Tensor, " coordinate"]:
        """Positions of the padding."""
        stops = (*self.starts[1:], self.padded_size)
        ends = zip(self.starts, self.sizes, stops)
        return torch.cat([torch.arange(start + size, stop) for start, size, stop in ends]).to(self.device)

    @cached_property
    def _pieces(self) -> list[Tensor] | None:
        """Parameters and padding as tensors without memory, in turns; None where one has a memory format of its own."""
        if any(torch.empty(s, device="meta").stride() != stride for s, stride in zip(self.shapes, self.strides)):
            return None
        shapes = zip(self.shapes, self.sizes, self.padded_sizes)
        return [torch.empty(x, device="meta") for shape, size, whole in shapes for x in (shape, (whole - size,))]

    def views(self, flat: Float[Tensor, " param"]) -> list[Tensor]:
        """Each parameter as a view of the flat vector, in its own shape and memory format."""
        if self._pieces is not None and 0 not in self.sizes:
            return list(torch._utils._unflatten_dense_tensors(flat, self._pieces)[::2])
        pieces = flat.split(self.padded_sizes)
        return [piece.as_strided(shape, stride) for piece, shape, stride in zip(pieces, self.shapes, self.strides)]

    def row_views(self, rows: Float[Tensor, "row param"]) -> list[Tensor]:
        """Each parameter of every row, `[row, *shape]`, as views in the parameter's own memory format."""
        step = rows.stride(0)
        return [
            rows.as_strided((len(rows), *shape), (step, *stride), rows.storage_offset() + start)
            for shape, stride, start in zip(self.shapes, self.strides, self.starts)
        ]

    @cached_property
    def example(self) -> Float[Tensor, " param"]:
        """A vector without memory, for the shapes and strides of its views."""
        return torch.empty(self.padded_size, dtype=self.dtype, device="meta")

    def typed_views(self, flat: Float[Tensor, " param"]) -> list[Tensor]:
        """The same in each parameter's own dtype: a view where it is the flat one, else a copy."""
        views = self.views(flat)
        return views if self.uniform else [view.to(dtype) for view, dtype in zip(views, self.dtypes)]

    def whole(self, tensors: Sequence[Tensor | None]) -> Float[Tensor, " param"] | None:
        """The flat vector of which all these tensors are the views; None where they are not."""
        places = zip(tensors, self.starts, self.strides)
        there = [(x, start, stride) for x, start, stride in places if x is not None]
        if not there or not self.uniform:
            return None
        first, start, _ = there[0]
        offset, width = first.storage_offset() - start, self.dtype.itemsize
        base = first.data_ptr() - start * width
        fits = offset >= 0 and first.untyped_storage().nbytes() >= (offset + self.padded_size) * width
        if not fits or any(x.data_ptr() != base + at * width or x.stride() != stride for x, at, stride in there):
            return None
        return first.as_strided((self.padded_size,), (1,), offset)

    def write(self, flat: Float[Tensor, " param"], tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors into the flat vector; `None` leaves its place as it is."""
        pairs = [(view, tensor) for view, tensor in zip(self.views(flat), tensors) if tensor is not None]
        if pairs:
            views, values = zip(*pairs)
            torch._foreach_copy_(list(views), list(values))

    def join(self, tensors: Sequence[Tensor | None]) -> Float[Tensor, " param"]:
        """A new flat vector from one tensor per parameter; `None` counts as zero."""
        flat = self.zeros() if any(tensor is None for tensor in tensors) else self.blank()
        self.write(flat, tensors)
        return flat

    def by_name(self, flat: Float[Tensor, " param"]) -> dict[str, Tensor]:
        return dict(zip(self.names, self.views(flat)))

    def compact(self, flat: Float[Tensor, "*rows param"]) -> Float[Tensor, "*rows d"]:
        """Without the padding."""
        return flat.index_select(-1, self.index)

    def expand(self, values: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows param"]:
        """The inverse of `compact`."""
        flat = self.zeros(*values.shape[:-1])
        return flat.index_copy_(-1, self.index, values.to(self.dtype))

    def vectors(self, values: object) -> Float[Tensor, "change param"]:
        """Gradient-shaped input of a user as rows of flat vectors.

        Takes a vector of length d, a matrix [change, d], a mapping from parameter name to tensor, a
        sequence of one tensor per parameter, or a list of any of these; a flat vector as it is, such as `control.raw`.
        """
        if isinstance(values, Tensor):
            if values.shape == (self.padded_size,) and values.device == self.device:
                return values.detach().to(self.dtype)[None]
            if values.shape[-1:] != (self.size,) or values.ndim > 2:
                raise InvalidInput(
                    f"a gradient of this model has {self.size} coordinates; got shape {tuple(values.shape)}"
                )
            return self.expand(values.detach().to(self.device)).reshape(-1, self.padded_size)
        if isinstance(values, Mapping):
            unknown = sorted(set(values) - set(self.names))
            if unknown:
                raise InvalidInput(f"{unknown[0]!r} is not a trainable parameter of this model")
            return self._checked([values.get(name) for name in self.names])[None]
        if isinstance(values, Sequence) and not isinstance(values, str) and values:
            per_parameter = len(values) == len(self.names) and all(
                isinstance(value, Tensor) and value.shape == shape for value, shape in zip(values, self.shapes)
            )
            if per_parameter:
                return self._checked(list(values))[None]
            return torch.cat([self.vectors(value) for value in values])
        raise InvalidInput(
            "a perturbation is a vector of d coordinates, a mapping from parameter names to tensors, "
            f"or a list of these; got {type(values).__name__}"
        )

    def _checked(self, tensors: list[Tensor | None]) -> Float[Tensor, " param"]:
        for name, shape, tensor in zip(self.names, self.shapes, tensors):
            if tensor is not None and tensor.shape != shape:
                raise InvalidInput(f"parameter {name!r} has shape {tuple(shape)}; got {tuple(tensor.shape)}")
        return self.join([None if tensor is None else tensor.detach() for tensor in tensors])
