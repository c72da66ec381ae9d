"""`check` finds every known silent error of Hessian products, and passes honest models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

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


def test_a_wide_network_with_kinks_passes() -> None:
    """Half a million ReLUs: a step of 1e-5 crosses kinks, whose jumps do not shrink with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1000), nn.ReLU(), nn.Linear(1000, 300), nn.ReLU(), nn.Linear(300, 3))
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), cross_entropy)
    assert point.check(classes((16,), size=400)()).error < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_lie_on_a_kink_are_checked_beside_it(dtype: torch.dtype) -> None:
    """Biases of zero and empty inputs: each ReLU of these rows sits on its kink, and a difference crosses it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    inputs = torch.randn(8, 4, dtype=dtype)
    inputs[:3] = 0
    point = ak.capture(model, torch.optim.AdamW(model.parameters()), cross_entropy)
    found = point.check((inputs, torch.arange(8) // 3))
    assert found.beside
    assert "lie on a kink" in str(found)
    assert not point.check((torch.randn(8, 4, dtype=dtype), torch.arange(8) // 3)).beside


def test_a_wrong_product_of_a_smooth_model_is_wrong_although_it_is_right_elsewhere() -> None:
    """Away from these weights z⁴ is all that counts, and detach() cannot be seen there; no kink is near them."""
    model = nn.Linear(400, 1, bias=False).double()
    with torch.no_grad():
        model.weight[0, ::2], model.weight[0, 1::2] = 1.0, -1.0

    def loss_fn(m: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return 1e-3 * (m.weight.detach() * m.weight).mean() + (m.weight * x).sum() ** 4

    point = ak.capture(model, torch.optim.AdamW(model.parameters()), loss_fn)
    with pytest.raises(WrongHessian):
        point.check(torch.ones(400, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["a teacher", "weights of classes", "a network after the model"])
def test_constants_of_the_loss_in_float32_do_not_blur_the_check(kind: str) -> None:
    """The student is near its teacher: gradients are small differences, of which float32 leaves few digits."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).requires_grad_(False)
    after, weights = nn.Linear(3, 5).requires_grad_(False), torch.tensor([1.0, 2.0, 0.5])
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model.load_state_dict({name: p + 1e-3 * torch.randn_like(p) for name, p in teacher.state_dict().items()})

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        if kind == "a teacher":
            with torch.no_grad():
                soft = teacher(x).softmax(-1)
            return F.kl_div(model(x).log_softmax(-1), soft, reduction="batchmean")
        if kind == "weights of classes":
            return F.cross_entropy(model(x), y, weight=weights)
        return after(model(x)).square().mean()

    point = ak.capture(model, torch.optim.AdamW(model.parameters()), loss_fn, constant=[teacher, after])
    found = point.check((torch.randn(32, 6), torch.randint(3, (32,))))
    assert found.dtype == torch.float64
    assert found.error < 1e-6
    assert {p.dtype for p in (*teacher.parameters(), *after.parameters(), weights)} == {torch.float32}


@pytest.mark.parametrize("cast", [torch.Tensor.float, lambda x: x.to(torch.float32)], ids=["float()", "to()"])
def test_a_cast_to_float32_does_not_blur_the_check_of_a_model_with_kinks(cast: Callable) -> None:
    """Its rounding needs a large step, on which kinks are crossed: an ordinary network was refused."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3)]
    model = nn.Sequential(
        *layers, nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)
    )
    optimizer, labels = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.arange(32) % 5
    batch = (torch.randn(5, 3, 8, 8)[labels] + 0.7 * torch.randn(32, 3, 8, 8), labels)

    def loss_fn(m: nn.Module, b: tuple) -> torch.Tensor:
        return F.cross_entropy(cast(m(b[0])), b[1])

    for _ in range(20):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    found = ak.capture(model, optimizer, loss_fn).check(batch)
    assert found.dtype == torch.float64
    assert found.error < 1e-3


def test_a_wrong_product_is_wrong_behind_a_cast() -> None:
    model = Detached()
    point = ak.capture(
        model, torch.optim.AdamW(model.parameters()), lambda m, b: F.cross_entropy(m(b[0]).float(), b[1])
    )
    with pytest.raises(WrongHessian):
        point.check(classes((4,))())


def test_autocast_does_not_blur_the_check() -> None:
    """The gradients of an autocast model are too noisy to difference; in float64 autocast has no effect."""
    torch.manual_seed(0)
    model = mlp(8, 32, 3)

    def inside(m: nn.Module, b: tuple) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(m, b)

    batch = classes((8,))()
    optimizer = torch.optim.AdamW(model.parameters())
    assert ak.capture(model, optimizer, inside).check(batch).error < 1e-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = ak.capture(model, optimizer, cross_entropy)
    assert around.check(batch).error < 1e-6


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


class SystemNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x * (1 + os.urandom(1)[0]))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def new_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


silent_errors = pytest.mark.parametrize(
    ("build", "error"),
    [
        (Detached, WrongHessian),
        (StraightThrough, WrongHessian),
        (OwnGenerator, Nondeterministic),
        (SystemNoise, Nondeterministic),
        (old_weight_norm, WrongHessian),
        (new_weight_norm, WrongHessian),
        (spectral, WrongHessian),
    ],
)


@silent_errors
def test_silent_errors_are_found(build, error) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    model = build()
    make_batch = classes((4,))
    point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cross_entropy)
    with pytest.raises(error):
        point.check(make_batch())
    with pytest.raises(error):  # and no answer is given without the check
        point.follow([make_batch(), make_batch()]).skip(0).response(make_batch())


class Late(nn.Module):
    """An honest network, beside which another one is used by batches that say so."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.honest, self.other = mlp(4, 5, 3), other

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        return self.honest(x) + (self.other(x) if late else 0)


@silent_errors
def test_silent_errors_of_a_later_batch_are_found(build, error) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    model = Late(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    point = ak.capture(model, optimizer, lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1]))
    draw = classes((4,))
    batches = [(*draw(), step > 2) for step in range(7)]
    point.follow(batches[:3]).check()
    with pytest.raises(error):
        point.follow(batches).check()


def test_a_later_step_takes_a_product_and_two_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first step gradients run again, too: to see whether they repeat themselves, there and with their graph."""
    case = make("tanh_mlp")
    path = case.path(5)
    real, ran = F.cross_entropy, list[torch.Tensor]()
    monkeypatch.setattr(F, "cross_entropy", lambda x, labels: (ran.append(labels), real(x, labels))[1])
    path.check()
    assert [sum(torch.equal(step.batch[1], labels) for labels in ran) for step in path.steps] == [7, 0, 3, 0, 3]


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
    assert float(response.certificate.errors["nrmse"].sel({"answer": "semilinear"}).max()) < 0.2


def test_a_batch_is_checked_once_however_many_paths_start_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    point, batch, other = ak.capture(case.model, case.optimizer, case.loss_fn), case.batch(), case.batch()
    real, asked = ak.TrainingPoint._check_lifted, []
    monkeypatch.setattr(ak.TrainingPoint, "_check_lifted", lambda self, b, m: (asked.append(b), real(self, b, m))[1])
    for _ in range(3):
        point.follow([batch]).check()
    point.check(other)
    assert [[b is x for x in (batch, other)] for b in asked] == [[True, False], [False, True]]
