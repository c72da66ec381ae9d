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
        Convolution(3, 32), nn.ReLU(), Halve(),
        Convolution(32, 64), nn.ReLU(), Halve(),
        Convolution(64, 128), nn.ReLU(), Average(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


# Torch's own layers would do. These map over rows of weights, and over rows of Hessian products, which max_pool2d's
# second derivative does not; and cuDNN's own convolutions in float64 are several times slower than a product.


class Convolution(nn.Conv2d):
    """3×3, padded, as one product of matrices: the images lie one below another, a row of zeros under each.

    `F.unfold` starts a kernel for each image that it is given, and so gets one; nothing is transposed on the way.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: Float[Tensor, "image i y x"]) -> Float[Tensor, "image o y x"]:
        assert self.bias is not None
        apart = F.pad(x.transpose(0, 1), (0, 0, 0, 1))
        patches = F.unfold(apart.flatten(1, 2), 3, padding=1)
        found = (self.weight.flatten(1)[None] @ patches[None]).squeeze(0).unflatten(1, apart.shape[1:])
        return (found[:, :, :-1] + self.bias[:, None, None, None]).transpose(0, 1)


class Halve(nn.Module):
    """2×2 max-pooling: the places of the largest by torch's own kernel, then what lies there.

    Image and channel are swapped, as they lie in memory after `Convolution`: nothing is copied.
    """

    def forward(self, x: Float[Tensor, "image c y x"]) -> Float[Tensor, "image c y/2 x/2"]:
        planes = x.transpose(0, 1)
        _, places = F.max_pool2d(planes.detach(), 2, return_indices=True)
        largest = planes.flatten(2).gather(2, places.flatten(2))
        return largest.unflatten(2, places.shape[2:]).transpose(0, 1)


class Average(nn.Module):
    def forward(self, x: Float[Tensor, "image c y x"]) -> Float[Tensor, "image c"]:
        return x.mean((2, 3))
