"""Training that is not what `follow` computes: followed to the bit, or refused by name. Never a silent number."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import lr_scheduler as rates

import aftershock as ak
from aftershock.errors import (
    AftershockError,
    InvalidInput,
    InvalidLoss,
    UnsupportedModel,
    UnsupportedOptimizer,
    WrongHessian,
)

from .cases import Case, classes, cross_entropy, make, mlp
from .test_path import assert_same_bits

STEPS = 5


def follows(case: Case, steps: int = STEPS, said: dict[str, Any] | None = None, **options: Any) -> ak.Path:
    """A path, once it is seen to be equal to the bit to the live run's next steps."""
    batches = case.batches(steps)
    path = case.point(**(said or {})).follow(batches, clip=case.clip, **options)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(steps))
    return path


# --- hooks of modules


def halve_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def shift_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] + 0.25,)


def scale_gradient(module: nn.Module, grad_input: tuple[Tensor | None, ...], grad_output: Any) -> Any:
    return tuple(None if g is None else g * 0.25 for g in grad_input)


def clamp_gradient(module: nn.Module, grad_output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(g.clamp(-0.02, 0.02) for g in grad_output)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook, halve_output": lambda m: m[0].register_forward_hook(halve_output),
    "forward pre-hook, shift_input": lambda m: m[2].register_forward_pre_hook(shift_input),
    "full backward hook, scale_gradient": lambda m: m[2].register_full_backward_hook(scale_gradient),
    "full backward pre-hook, clamp_gradient": lambda m: m[2].register_full_backward_pre_hook(clamp_gradient),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_refused_by_name_or_runs_to_the_bit(kind: str) -> None:
    case = make("tanh_mlp")
    plain = case.point()
    batches = case.batches(1)
    HOOKS[kind](case.model)
    with pytest.raises(UnsupportedModel, match=kind) as refusal:
        case.point()
    assert 'hooks="run"' in str(refusal.value)
    assert 'hooks="ignore"' in str(refusal.value)
    run, ignored = (case.point(hooks=word).follow(batches) for word in ("run", "ignore"))
    without = plain.follow(batches)
    assert ignored.losses == without.losses
    moved = [p.trajectory.state(1).theta for p in (run, without)]
    assert not torch.equal(*moved), "the hook does nothing here: the test would prove nothing"
    follows(case, said={"hooks": "run"})


@pytest.mark.parametrize("kind", HOOKS)
def test_predictions_through_hooks_are_right_or_refused(kind: str) -> None:
    case = make("tanh_mlp")
    HOOKS[kind](case.model)
    change = case.point(hooks="run").follow(case.batches(3)).replace([case.batch()])
    change.response(case.batch(), answers=("exact",))
    if "backward" in kind:
        with pytest.raises(WrongHessian, match=kind):
            change.response(case.batch())
    else:
        found = change.response(case.batch(), scales=[1e-4])
        exact, tangent = found.data["response"].sel(answer="exact"), found.data["response"].sel(answer="tangent")
        # float64; a change of 1e-4 of a batch's gradient is linear to a few parts in a thousand
        assert float(abs(exact - tangent).max() / abs(exact).max()) < 1e-2


@pytest.fixture
def everywhere() -> Iterator[None]:
    handle = modules.register_module_forward_hook(lambda m, _, out: out * 0.9 if isinstance(m, nn.Linear) else None)
    yield
    handle.remove()


def test_global_hooks(everywhere: None) -> None:
    case = make("tanh_mlp")
    for said in ({}, {"hooks": "ignore"}):
        with pytest.raises(UnsupportedModel, match="every module has a forward hook, everywhere"):
            case.point(**said)
    follows(case, said={"hooks": "run"})


class Gated(nn.Module):
    """Its hook is a method of a part of the model: the copy's must use the copy's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.first.register_forward_hook(self.gated)

    def gated(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.gate(output).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def trained(model: nn.Module, loss_fn: Any = cross_entropy, steps: int = 3, **flags: Any) -> Case:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **flags)
    case = Case("own", model, optimizer, loss_fn, classes((4,)))
    case.train(case.batches(steps))
    return case


def test_a_method_as_a_hook_belongs_to_the_copy() -> None:
    torch.manual_seed(0)
    follows(trained(Gated()), said={"hooks": "run"})


def test_a_hook_or_forward_that_holds_the_live_model_is_refused() -> None:
    torch.manual_seed(0)
    case = trained(mlp(4, 5, 3))
    model = case.model
    handle = model[0].register_forward_hook(lambda m, _, out: out + model[0].bias)
    with pytest.raises(InvalidLoss, match="live model through `model`"):
        case.point(hooks="run")
    handle.remove()
    whole = model.forward
    model.forward = lambda x: whole(x) * 2
    with pytest.raises(InvalidLoss, match="live model through `whole`"):
        case.point()


def test_torchs_own_and_known_hooks_need_no_word(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    case = trained(model)
    with ak.FlightRecorder(model, case.optimizer, cross_entropy, tmp_path / "flight", triggers=()):
        follows(case)


# --- the optimizer


class Decaying(torch.optim.AdamW):
    """A step of its own, hidden by functools.wraps."""

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.99)
        return out


class Lookahead:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


class WrappedAdamW(torch.optim.AdamW):
    """A wrapper that is an optimizer itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer = optimizer


class Renamed(torch.optim.AdamW):
    """Nothing of its own."""


def patched(optimizer: torch.optim.Optimizer, wraps: bool) -> torch.optim.Optimizer:
    before = optimizer.step

    def shrinking(*arguments: Any) -> Any:
        return before(*arguments)

    optimizer.step = functools.wraps(before)(shrinking) if wraps else shrinking  # type: ignore[method-assign]
    return optimizer


def noisy(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Changes gradients just before they are used."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.5)


def hooked(optimizer: torch.optim.Optimizer, when: str) -> torch.optim.Optimizer:
    getattr(optimizer, f"register_step_{when}_hook")(noisy)
    return optimizer


STEPPERS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "pre-hook": (lambda o: hooked(o, "pre"), "step pre-hook, noisy"),
    "post-hook": (lambda o: hooked(o, "post"), "step post-hook, noisy"),
    "patched": (lambda o: patched(o, False), "the optimizer object is patched.<locals>.shrinking"),
    "patched and wrapped": (lambda o: patched(o, True), "the optimizer object is .*step of tests"),
    "scheduled, then patched": (lambda o: patched(rates.StepLR(o, 3).optimizer, False), "shrinking"),
    "subclass": (lambda o: Decaying(o.param_groups), "class Decaying is .*step of tests"),
    "wrapper": (Lookahead, "a Lookahead around a AdamW"),
    "wrapper of a kind": (WrappedAdamW, "a WrappedAdamW around a AdamW"),
}


@pytest.mark.parametrize("kind", STEPPERS)
def test_a_step_that_is_not_torchs_is_refused_by_name(kind: str) -> None:
    case = make("tanh_mlp")
    change, words = STEPPERS[kind]
    other = change(case.optimizer)
    with pytest.raises(UnsupportedOptimizer, match=words):
        ak.capture(case.model, other, case.loss_fn)
    with pytest.raises(UnsupportedOptimizer, match=words):
        ak.FlightRecorder(case.model, other, case.loss_fn)


def test_optimizers_that_only_look_different_are_followed() -> None:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    optimizer = Renamed(model.parameters(), lr=1e-2)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    case = Case("renamed", model, optimizer, cross_entropy, classes((4,)))
    case.train(case.batches(2))
    with pytest.raises(UnsupportedOptimizer, match="<lambda>"):
        case.point(hooks="run")
    follows(case, said={"hooks": "ignore"})
    assert len(seen) == 2 + STEPS


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


# --- schedules of every hyperparameter


class MovesEverything(rates.LRScheduler):
    """What users write to anneal weight decay: lr, weight decay and eps move."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.3 / (1 + self.last_epoch)
            group["eps"] = 1e-3 / (1 + self.last_epoch)
        return [base * 0.9**self.last_epoch for base in self.base_lrs]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: rates.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=True),
    "cyclic": lambda o: rates.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, cycle_momentum=True),
    "everything": MovesEverything,
    "lambda": lambda o: rates.LambdaLR(o, [lambda i: 0.8**i, lambda i: 1 / (1 + i)]),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o, 0.2, 3), rates.ExponentialLR(o, 0.8)], [3]),
    "chained": lambda o: rates.ChainedScheduler([rates.ConstantLR(o, 0.2, 3), rates.ExponentialLR(o, 0.8)]),
    "two of them": lambda o: [rates.ExponentialLR(o, 0.8), MovesEverything(o)],
}
FOLLOWED = ("lr", "betas", "weight_decay", "eps")


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_is_followed_in_all_it_moves(kind: str) -> None:
    case = make("two_groups")
    scheduler = SCHEDULERS[kind](case.optimizer)
    each = scheduler if isinstance(scheduler, list) else [scheduler]

    def train(batches: list[Any]) -> list[tuple[Any, ...]]:
        seen = []
        for batch in batches:
            seen.append(tuple(case.optimizer.param_groups[0][name] for name in FOLLOWED))
            case.train([batch])
            for one in each:
                one.step()
        return seen

    train(case.batches(2))
    batches = case.batches(STEPS)
    with pytest.raises(InvalidInput, match=r"a scheduler is attached.*lr=scheduler"):
        case.point().follow(batches)
    path = case.point().follow(batches, clip=case.clip, lr=scheduler)
    constant = case.point().follow(batches, clip=case.clip, lr="constant")
    seen = train(batches)
    assert len(set(seen)) > 2, "nothing moves: the test would prove nothing"
    assert_same_bits(case, path, path.trajectory.state(STEPS))
    assert path.losses != constant.losses


VALUES: dict[str, list[Any]] = {
    "weight_decay": [0.5, 0.1, 0.0, 0.3, 0.2],
    "eps": [1e-2, 1e-3, 1e-4, 1e-8, 1e-1],
    "betas": [(0.5, 0.9), (0.9, 0.99), (0.0, 0.5), (0.95, 0.999), (0.8, 0.9)],
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("form", ["one", "list", "function", "per group"])
def test_other_hyperparameters_by_hand(name: str, form: str) -> None:
    case = make("two_groups")
    values = [VALUES[name][0]] * STEPS if form == "one" else VALUES[name]
    second = list(reversed(values)) if form == "per group" else values
    given = {
        "one": values[0],
        "list": values,
        "function": lambda i: values[i],
        "per group": [list(pair) for pair in zip(values, second)],
    }[form]
    batches = case.batches(STEPS)
    path = case.point().follow(batches, clip=case.clip, **{name: given})
    for batch, *each in zip(batches, values, second):
        for group, value in zip(case.optimizer.param_groups, each):
            group[name] = value
        case.train([batch])
    assert_same_bits(case, path, path.trajectory.state(STEPS))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "plateau": ({"lr": "plateau"}, "needs a metric"),
    "word": ({"lr": "cosine"}, "lr is 'cosine'.*\"constant\""),
    "mixture": ({"lr": "mixture"}, "schedulers and a float"),
    "betas": ({"betas": 0.9}, "betas is 0.9"),
    "beta": ({"betas": (0.9, 1.0)}, "below 1"),
    "negative": ({"weight_decay": -0.1}, "zero or positive"),
    "too few": ({"eps": [1e-8]}, "1 values of eps for 2"),
    "groups": ({"weight_decay": [[0.1], [0.1]]}, "the optimizer has 2 groups"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_schedules_that_do_not_fit(kind: str) -> None:
    case = make("two_groups")
    options, words = WRONG[kind]
    if kind == "plateau":
        options = {"lr": rates.ReduceLROnPlateau(case.optimizer)}
    elif kind == "mixture":
        options = {"lr": [rates.ExponentialLR(case.optimizer, 0.9), 0.1]}
    with pytest.raises(InvalidInput, match=words):
        case.point().follow(case.batches(2), **options)


def test_a_checkpoint_remembers_its_scheduler() -> None:
    case = make("tanh_mlp")
    rates.ExponentialLR(case.optimizer, 0.9)
    saved = case.model.state_dict(), case.optimizer.state_dict()
    fresh = make("tanh_mlp")
    point = ak.from_checkpoint(fresh.model, fresh.optimizer, fresh.loss_fn, *saved)
    with pytest.raises(InvalidInput, match="a scheduler is attached"):
        point.follow(case.batches(1))


# --- zero_grad(set_to_none=False)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 5), nn.ModuleList(nn.Linear(5, 1) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).tanh())


def head_loss(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
    return model(*batch).square().mean() + model(*batch).sum().cos()


def head_batch(head: int) -> tuple[Tensor, int]:
    return torch.randn(6, 4), head


class Zeroing(Case):
    """The loop of a user who keeps gradients allocated."""

    def train(self, batches: list[Any]) -> list[float]:
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=False)
            self.loss_fn(self.model, batch).backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        return []


def heads(kind: type[Case], first: list[int], **flags: Any) -> Case:
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3, **flags)
    case = kind("heads", model, optimizer, head_loss, lambda: None, clip=0.5)
    case.train([head_batch(head) for head in first])
    return case


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kept", ["states", "graphs"])
@pytest.mark.parametrize("said", [{}, {"unused": "zero"}])
def test_zeros_move_an_unused_head(flags: dict[str, Any], kept: Any, said: dict[str, Any]) -> None:
    case = heads(Zeroing, [0, 1, 0], **flags)
    if not said:
        case.optimizer.zero_grad(set_to_none=False)  # where the live gradients show it
    batches = [head_batch(head) for head in (1, 0, 0, 1)]
    path = case.point(**said).follow(batches, clip=case.clip, keep=kept)
    skipping = case.point(unused="skip").follow(batches, clip=case.clip)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(4))
    assert not torch.equal(path.trajectory.state(4).theta, skipping.trajectory.state(4).theta)
    # a change of nothing is exactly nothing, and the tangent of a small one is the small one
    assert not path.replace([batches[1]], at=1).response(batches[0]).exact.values.any()


def test_predictions_with_zeros_are_right() -> None:
    case = heads(Zeroing, [0, 1, 0])
    model = case.model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    case = Zeroing("heads", model, optimizer, head_loss, lambda: None)
    inputs = [(torch.randn(6, 4, dtype=torch.float64), head) for head in (0, 1, 2, 0, 1, 2, 0, 1)]
    case.train(inputs[:3])
    path = case.point(unused="zero").follow(inputs[3:7])
    found = path.replace([inputs[7]], at=0).response(inputs[0], scales=[1e-4]).data["response"]
    exact, tangent = found.sel(answer="exact"), found.sel(answer="tangent")
    assert float(abs(exact - tangent).max() / abs(exact).max()) < 1e-2  # linear to a few parts in a thousand


def test_dropped_gradients_are_seen_as_dropped() -> None:
    case = heads(Case, [0, 1, 0])  # head 1 has been stepped and has no gradient
    batches = [head_batch(head) for head in (1, 0, 0, 1)]
    path = case.point().follow(batches, clip=case.clip)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(4))


def test_an_unused_head_is_asked_about_where_nothing_tells(tmp_path: Any) -> None:
    case = heads(Zeroing, [0, 0])
    batches = [head_batch(head) for head in (0, 1, 0)]
    with pytest.raises(UnsupportedModel, match=r"does not use parameter 'heads.0.weight'.*unused=\"skip\""):
        case.point().follow(batches)
    with pytest.raises(UnsupportedModel, match="first used in the path"):
        case.point(unused="zero").follow(batches)
    case.point(unused="skip").follow(batches)
    case.train(batches)
    point = case.point(unused="zero")  # after its first use
    point.save(tmp_path / "point")
    loaded = ak.load_point(tmp_path / "point", Heads(), head_loss)
    batches = [head_batch(0), head_batch(1), head_batch(0)]
    path = loaded.follow(batches, clip=case.clip)
    case.train(batches)
    assert_same_bits(case, path, path.trajectory.state(3))


# --- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_outside_of_which_capture_was_called(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp(8, 16, 3)

    class Autocast(Case):
        def train(self, batches: list[Any]) -> list[float]:
            for batch in batches:
                self.optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    loss = self.loss_fn(self.model, batch)
                loss.backward()
                self.optimizer.step()
            return []

    case = Autocast("autocast", model, torch.optim.AdamW(model.parameters(), lr=1e-2), cross_entropy, classes((8,)))
    case.train(case.batches(2))
    with pytest.raises(InvalidInput, match=f"computed in {dtype}.*autocast={dtype}"):
        case.point().follow(case.batches(2))
    case.point(autocast=False).follow(case.batches(2))
    follows(case, said={"autocast": dtype})
    with pytest.raises(InvalidInput, match="autocast is a dtype"):
        case.point(autocast="bf16")


def test_short_gradients_by_nature_are_no_evidence_of_autocast() -> None:
    """A float32 loop whose gradients are whole numbers: the path's own are, too."""
    model = nn.Linear(6, 4, bias=False)
    batch = lambda: torch.randint(-3, 4, (5, 6)).float()  # noqa: E731
    case = Case("whole", model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b).sum(), batch)
    case.train(case.batches(2))
    follows(case)


# --- ordinary loops


def test_what_is_said_reaches_the_recorder_and_its_replay(tmp_path: Any) -> None:
    torch.manual_seed(0)
    case = trained(mlp(4, 5, 3))
    case.model[0].register_forward_hook(halve_output)
    with (
        pytest.raises(UnsupportedModel, match="halve_output"),
        ak.FlightRecorder(case.model, case.optimizer, cross_entropy, tmp_path / "none"),
    ):
        pass
    said = {"hooks": "run", "window": 8, "triggers": ()}
    with ak.FlightRecorder(case.model, case.optimizer, cross_entropy, tmp_path / "flight", **said) as recorder:
        for batch in case.batches(8):
            (loss,) = case.train([batch])
            recorder.step(batch, loss)
    found = ak.explain(tmp_path / "flight", step=10, verify=0, references=0)
    assert "replayed" in str(found.certificate)


def test_accelerate_is_followed() -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = rates.ExponentialLR(optimizer, 0.8)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    make_batch = classes((4,))

    def train(batches: list[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model, batch))
            optimizer.step()
            scheduler.step()

    train([make_batch() for _ in range(3)])
    batches = [make_batch() for _ in range(STEPS)]
    path = ak.capture(model, optimizer, cross_entropy).follow(batches, lr=scheduler)
    train(batches)
    assert_same_bits(types.SimpleNamespace(model=model, optimizer=optimizer), path, path.trajectory.state(STEPS))


def test_words_that_mean_nothing_are_refused() -> None:
    case = make("tanh_mlp")
    for said in ({"hooks": "keep"}, {"unused": "none"}):
        with pytest.raises(AftershockError, match="got"):
            case.point(**said)
