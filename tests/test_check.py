"""`check` finds every known silent error of Hessian products, and passes honest models."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import aftershock as ak
from aftershock.errors import Nondeterministic, UnsupportedAttention, UnsupportedModel, WrongHessian

from .cases import CASES, classes, cross_entropy, make, mlp


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_honest_models_pass(name: str, dtype: torch.dtype) -> None:
    case = make(name, dtype)
    found = case.point().check(case.batch())
    assert found.error < 1e-4
    assert found.asymmetry < 1e-9
    assert found.replay_noise == 0
    assert "central differences" in str(found)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h * (1 + 0.3 * torch.sigmoid(h).detach()))


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h + (h.tanh().round() - h).detach())


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.generator = nn.Linear(4, 3), torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x * torch.rand(x.shape, generator=self.generator).to(x))


class NumpyNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x * float(np.random.rand()))  # noqa: NPY002  (what users write)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def new_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (Detached, WrongHessian),
        (StraightThrough, WrongHessian),
        (OwnGenerator, Nondeterministic),
        (NumpyNoise, Nondeterministic),
        (old_weight_norm, WrongHessian),
        (new_weight_norm, WrongHessian),
        (spectral, WrongHessian),
    ],
)
def test_silent_errors_are_found(build, error) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    model = build()
    make_batch = classes((4,))
    point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cross_entropy)
    with pytest.raises(error):
        point.check(make_batch())
    with pytest.raises(error):  # and no answer is given without the check
        point.follow([make_batch(), make_batch()]).skip(0).response(make_batch())


def test_attention_that_is_forced_is_named() -> None:
    case = make("transformer", torch.float32)

    def flash(m: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.cross_entropy(m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    point = ak.capture(case.model, case.optimizer, flash)
    with pytest.raises(UnsupportedAttention, match=r"SDPBackend\.MATH"):
        point.check(case.batch())


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * ctx.saved_tensors[0].cos()


def test_a_custom_function_that_is_differentiable_once_is_found() -> None:
    model = mlp(4, 5, 3)
    point = ak.capture(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda m, b: F.cross_entropy(OnceOnly.apply(m(b[0])), b[1]),
    )
    with pytest.raises((UnsupportedModel, WrongHessian), match="custom autograd function"):
        point.check(classes((4,))())


def test_a_linear_loss_has_no_curvature() -> None:
    model = nn.Linear(4, 1, bias=False)
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b).mean())
    assert point.check(torch.randn(5, 4)).error == 0
    path = point.follow([torch.randn(5, 4) for _ in range(3)])
    response = path.replace([torch.randn(5, 4)]).response(torch.randn(5, 4), scales=[0.1])
    assert float(response.certificate.errors["nrmse"].sel({"method": "endpoint"}).max()) < 0.2
