"""The paper's two CIFAR-10 networks on rows of parameters: one call for the losses of many weight vectors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
WIDTHS = {"mlp": (3 * 32 * 32, 256, 256, CLASSES), "cnn": (3, 32, 64, 128)}
# Activations of one network and batch take up to 100 MB a row in float64.
ROWS_AT_ONCE = 16


class Network(nn.Module):
    """MLP–GELU with 855,050 parameters or CNN–ReLU with 94,538, by PyTorch's default initialization.

    Convolutions are written as products of matrices: cuDNN's own in float64 are several times slower, and rows of
    weights are then a batch of products.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        widths = WIDTHS[kind]
        pairs = itertools.pairwise(widths)
        if kind == "mlp":
            layers: list[nn.Module] = [nn.Linear(a, b) for a, b in pairs]
        else:
            layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairs] + [nn.Linear(widths[-1], CLASSES)]
        self.layers = nn.ModuleList(layers)

    def forward(self, images: Float[Tensor, "image 3 32 32"]) -> Float[Tensor, "image 10"]:
        return logits(self.kind, [p[None] for p in self.parameters()], images)[0]

    @property
    def shapes(self) -> list[torch.Size]:
        return [p.shape for p in self.parameters()]


def logits(
    kind: str, parameters: Sequence[Tensor], images: Float[Tensor, "image 3 32 32"]
) -> Float[Tensor, "row image 10"]:
    """The network at every row of its parameters, `[row, *shape]` each, in the order of `Network.parameters()`."""
    return (_mlp if kind == "mlp" else _cnn)(parameters, images)


def _mlp(parameters: Sequence[Tensor], images: Tensor) -> Tensor:
    w1, b1, w2, b2, w3, b3 = parameters
    x = images.flatten(1).expand(len(w1), -1, -1)
    x = F.gelu(_linear(x, w1, b1))
    x = F.gelu(_linear(x, w2, b2))
    return _linear(x, w3, b3)


def _cnn(parameters: Sequence[Tensor], images: Tensor) -> Tensor:
    """3×3 convolutions with ReLU; 2×2 max-pooling after the first two, the mean over the image after the third."""
    w1, b1, w2, b2, w3, b3, w4, b4 = parameters
    x = images.permute(0, 2, 3, 1).expand(len(w1), *(-1 for _ in range(4)))
    x = _halve(F.relu(_convolution(x, w1, b1)))
    x = _halve(F.relu(_convolution(x, w2, b2)))
    x = F.relu(_convolution(x, w3, b3))
    return _linear(x.mean((2, 3)), w4, b4)


def _linear(x: Float[Tensor, "row n i"], w: Float[Tensor, "row o i"], b: Float[Tensor, "row o"]) -> Tensor:
    # w from the left: its gradient then lies in memory as w does, and is not transposed into place
    return torch.baddbmm(b[:, :, None], w, x.mT).mT


def _convolution(
    x: Float[Tensor, "row image y x i"], w: Float[Tensor, "row o i 3 3"], b: Float[Tensor, "row o"]
) -> Float[Tensor, "row image y x o"]:
    patches = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    # the patches from the left: the next layer reads channels last
    out = torch.baddbmm(b[:, None], patches.flatten(4).flatten(1, 3), w.flatten(2).mT)
    return out.unflatten(1, x.shape[1:4])


def _halve(x: Float[Tensor, "row image y x c"]) -> Float[Tensor, "row image y/2 x/2 c"]:
    pooled = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), 2)
    return pooled.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


@dataclass(frozen=True)
class NetworkLoss:
    """Cross-entropy of a network on one batch of images, as a function of rows of its flat parameters."""

    kind: str
    shapes: Sequence[torch.Size]
    images: Float[Tensor, "image 3 32 32"]
    labels: Int64[Tensor, " image"]

    def value(self, theta: Float[Tensor, "row d"]) -> Float[Tensor, " row"]:
        with torch.no_grad():
            return torch.cat([self._losses(self._split(rows)) for rows in theta.split(ROWS_AT_ONCE)])

    def gradient(self, theta: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        """Every row's own gradient: the rows' losses are summed, and no row sees another."""
        out = torch.empty_like(theta)
        for rows, place in zip(theta.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE)):
            parameters = [part.detach().requires_grad_() for part in self._split(rows)]
            found = torch.autograd.grad(self._losses(parameters).sum(), parameters)
            for part, grad in zip(self._split(place), found):
                part.copy_(grad)
        return out

    def _split(self, theta: Float[Tensor, "row d"]) -> list[Tensor]:
        pieces = theta.split([shape.numel() for shape in self.shapes], dim=1)
        return [piece.unflatten(1, shape) for piece, shape in zip(pieces, self.shapes)]

    def _losses(self, parameters: Sequence[Tensor]) -> Float[Tensor, " row"]:
        found = logits(self.kind, parameters, self.images)
        labels = self.labels.expand(len(found), -1)
        return F.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).mean(1)
