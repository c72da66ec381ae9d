"""The paper's two CIFAR-10 networks, by PyTorch's default initialization."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


def network(kind: str) -> nn.Sequential:
    """MLP–GELU with 855,050 parameters or CNN–ReLU with 94,538, of images `[image, 3, 32, 32]`."""
    return _mlp() if kind == "mlp" else _cnn()


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, CLASSES)
    )


def _cnn() -> nn.Sequential:
    """3×3 convolutions with ReLU; 2×2 max-pooling after the first two, the mean over the image after the third."""
    return nn.Sequential(
        ChannelsLast(),
        Convolution(3, 32), nn.ReLU(), Halve(),
        Convolution(32, 64), nn.ReLU(), Halve(),
        Convolution(64, 128), nn.ReLU(), Average(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


class ChannelsLast(nn.Module):
    def forward(self, x: Float[Tensor, "image c y x"]) -> Float[Tensor, "image y x c"]:
        return x.permute(0, 2, 3, 1)


class Convolution(nn.Conv2d):
    """3×3, padded, as a product of matrices: cuDNN's own in float64 is several times slower.

    Rows of weights are then a batch of products.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: Float[Tensor, "image y x i"]) -> Float[Tensor, "image y x o"]:
        patches = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
        return F.linear(patches.flatten(3), self.weight.flatten(1), self.bias)


class Halve(nn.Module):
    """2×2 max-pooling."""

    def forward(self, x: Float[Tensor, "image y x c"]) -> Float[Tensor, "image y/2 x/2 c"]:
        return F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


class Average(nn.Module):
    def forward(self, x: Float[Tensor, "image y x c"]) -> Float[Tensor, "image c"]:
        return x.mean((1, 2))
