"""What loss_fn uses beside the model it is given: constants are followed, the live model and what moves is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import (
    InvalidLoss,
    UnsupportedModel,
)

from .cases import Case, classes, cross_entropy, make, mlp
from .test_live_loop import follows, trained

# --- what loss_fn reaches


NET = mlp(4, 5, 3)


class Trainer:
    """Holds everything, as trainers do; only some of its losses use what they should not."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.penalized = model[0].weight
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def right(self, model: nn.Module, batch: Any) -> Tensor:
        return self.criterion(model(batch[0]), batch[1]) + self.small(model)

    def small(self, model: nn.Module) -> Tensor:
        return 1e-3 * model[0].weight.square().sum()

    def stale(self, model: nn.Module, batch: Any) -> Tensor:
        return self.criterion(model(batch[0]), batch[1]) + 1e-3 * self.penalty()

    def penalty(self) -> Tensor:
        return self.penalized.square().sum()

    def whole(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(self.model, batch)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + sum(p.sum() for p in self.model.parameters())


def uses_global(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch) + helper()


def helper() -> Tensor:
    return NET[0].weight.sum()


def _in_a_list(model: nn.Module) -> Any:
    held = list(model.parameters())
    return lambda m, b: cross_entropy(m, b) + sum(p.square().sum() for p in held)


def _in_a_view(model: nn.Module) -> Any:
    view = {"w": [model[2].weight.data.view(-1)]}
    return lambda m, b: cross_entropy(m, b) + view["w"][0].sum()


LIVE: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "closure": (lambda model: lambda m, b: cross_entropy(model, b), "live model through `model`"),
    "part": (lambda model: lambda m, b: cross_entropy(m, b) + model[0].bias.sum(), "through `model`"),
    "nested": (lambda model: lambda m, b: (lambda x: model(x))(b[0]).sum(), "live model through `model`"),
    "global": (lambda model: uses_global, "live model through `NET`"),
    "default": (lambda model: lambda m, b, net=model: cross_entropy(net, b), "live model through `net`"),
    "partial": (lambda model: functools.partial(lambda net, m, b: cross_entropy(net, b), model), "an argument of"),
    "method": (lambda model: Trainer(model).whole, "live model through `self.model`"),
    "tensor of a method's method": (lambda model: Trainer(model).stale, "tensor of the live model through `self.pen"),
    "callable": (Trainer, "live model through `self.model`"),
    "list": (_in_a_list, "tensor of the live model through `held"),
    "view": (_in_a_view, "tensor of the live model through `view"),
}


@pytest.mark.parametrize("kind", LIVE)
def test_a_loss_that_holds_the_live_model_is_refused_by_name(kind: str) -> None:
    make_loss, words = LIVE[kind]
    optimizer = torch.optim.AdamW(NET.parameters())
    with pytest.raises(InvalidLoss, match=words):
        ak.capture(NET, optimizer, make_loss(NET))


def test_a_probe_that_holds_the_live_model_is_refused_by_name() -> None:
    case = make("tanh_mlp")
    model, start = case.model, case.model[0].weight.detach().clone()
    change = case.path(2).skip(0)
    with pytest.raises(InvalidLoss, match="the probe uses the live model through `model`"):
        change.response(lambda m: model[0].weight.sum())
    moved = change.response(lambda m: (m[0].weight - start).square().sum(), answers=("exact",))
    assert moved.exact.values.any()


def test_a_trainer_that_merely_owns_the_model_is_followed() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    trainer = Trainer(model)
    case = Case("trainer", model, trainer.optimizer, trainer.right, classes((4,)))
    case.train(case.batches(2))
    follows(case)
    model.smoothing = 0.1  # an attribute that is no tensor may be read
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=model.smoothing)  # noqa: E731
    follows(Case("attribute", model, trainer.optimizer, loss, classes((4,))))


def distilled(teacher: nn.Module) -> Any:
    return lambda m, b: cross_entropy(m, b) + F.mse_loss(m(b[0]), teacher(b[0]))


def test_a_frozen_teacher_is_a_constant() -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).eval().requires_grad_(False)
    follows(trained(mlp(4, 5, 3), distilled(teacher)))


def _ema(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).requires_grad_(False)


def _in_training(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)


BESIDE: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "average": (_ema, "it is a moving average"),
    "target": (lambda model: copy.deepcopy(model).requires_grad_(False), "the model's own shapes"),
    "critic": (lambda model: nn.Linear(4, 3), "need gradients"),
    "statistics": (_in_training, "batch normalization is in training mode"),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_a_module_that_may_move_is_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    make_other, words = BESIDE[kind]
    other = make_other(model)
    case = trained(model, distilled(other), steps=2)
    with pytest.raises(InvalidLoss, match=f"`teacher`.*{words}"):
        case.point()
    if kind == "target":
        follows(case, said={"constant": [other]})


@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
def test_a_constant_that_moves_after_all_is_refused(how: str) -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    teacher = copy.deepcopy(model).requires_grad_(False)
    point = trained(model, distilled(teacher)).point(constant=[teacher])
    batches = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(2)]
    path = point.follow(batches)
    for p, q in zip(teacher.parameters(), model.parameters()):
        if how == "in place":
            p.lerp_(q, 0.1)
        elif how == "data":
            p.data.mul_(0.9).add_(q.data, alpha=0.1)  # autograd's version counter does not see it
        else:
            p.data = q.detach().clone()
    with pytest.raises(InvalidLoss, match="`teacher`, which has changed since capture"):
        point.follow(batches)
    with pytest.raises(InvalidLoss, match="changed since capture"):
        path.skip(0).response(batches[0])


class Momentum(nn.Module):
    """A momentum encoder, moved in the forward pass: MoCo's."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 3)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters()):
                key.data.mul_(0.9).add_(query.data, alpha=0.1)
        return self.query(x) * self.key(x)


def test_a_frozen_parameter_that_a_pass_moves_is_refused() -> None:
    torch.manual_seed(0)
    case = trained(Momentum())
    with pytest.raises(UnsupportedModel, match=r"writes to its frozen parameter 'key\.weight'"):
        case.point().follow(case.batches(2))
