"""How loops are built from their parts, and what strangers do around a step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .loop_losses import CLASSES, DEVICE, classes, cross_entropy, sizes
from .loop_models import mlp
from .loop_optimizers import adamw
from .loops import STEPS, Loop, plain_update


def loop(
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], Any] = adamw(),  # noqa: B008 - a function that makes one
    loss_fn: Callable[[nn.Module, Any], Any] = cross_entropy,
    draw: Callable[[], Any] = classes(),  # noqa: B008
    prepare: Callable[[Loop], None] = lambda made: None,
    **rest: Any,
) -> Callable[[], Loop]:
    """How to build a loop from its parts; `prepare` has the last word."""

    def build() -> Loop:
        module = model()
        made = Loop(module, optimizer(module), loss_fn, draw, **rest)
        prepare(made)
        return made

    return build


def with_scheduler(make: Callable[[Any], Any]) -> Callable[[Loop], None]:
    def prepare(made: Loop) -> None:
        made.box.scheduler = make(made.optimizer)

    return prepare


# --- what loops do


def clipped(loop: Loop, max_norm: float = 0.5) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), max_norm)


def clipped_by_value(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.02)


def edited(loop: Loop) -> None:
    next(p.grad for p in loop.model.parameters() if p.grad is not None).mul_(0.5)


def gradient_noise(loop: Loop) -> None:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.add_(0.01 * torch.randn_like(p))


def scheduled(loop: Loop) -> None:
    loop.box.scheduler.step()


def told_scheduler(loop: Loop) -> dict[str, Any]:
    return {"lr": loop.box.scheduler}


def told_clip(loop: Loop) -> dict[str, Any]:
    return {"clip": 0.5}


@contextlib.contextmanager
def bfloat16() -> Any:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        yield


def averaged(made: Loop) -> None:
    with torch.no_grad():
        for slow, p in zip(made.model.teacher.parameters(), made.model.student.parameters()):  # type: ignore
            slow.lerp_(p, 0.1)


def following(
    make: Callable[[Any], Any], told: bool = True, advance: Callable[[Loop], None] = scheduled
) -> Callable[[], Loop]:
    """A loop with a scheduler."""
    rest = {"told": told_scheduler} if told else {}
    return loop(prepare=with_scheduler(make), after=advance, **rest)


def by_hand(name: str, **options: Any) -> Callable[[], Loop]:
    """The user's loop moves a hyperparameter itself."""

    def after(made: Loop) -> None:
        for group in made.optimizer.param_groups:
            group[name] = (0.9 - 0.1 * made.taken, 0.999) if name == "betas" else group[name] * 1.5

    return loop(optimizer=adamw(**options), after=after)


def listed_rates() -> Loop:
    """The loop sets its rates, and tells them as a list."""

    def rates(made: Loop) -> list[float]:
        return [1e-2 / (taken + 1) for taken in range(made.taken, made.taken + STEPS + 1)]

    return loop(
        optimizer=adamw(lr=1e-2),
        after=lambda made: made.optimizer.param_groups[0].update(lr=rates(made)[1]),
        told=lambda made: {"lr": rates(made)[:STEPS]},
    )()


def on_a_plateau(made: Loop) -> None:
    made.box.scheduler.step(1.0)


def sharpness_aware(made: Loop, batch: Any) -> Tensor:
    """SAM: the gradient at a point uphill."""
    params = list(made.model.parameters())
    first = torch.autograd.grad(made.loss_fn(made.model, batch), params)
    with torch.no_grad():
        for p, slope in zip(params, first):
            p.add_(0.05 * slope)
    made.optimizer.zero_grad()
    loss = made.loss_fn(made.model, batch)
    loss.backward()
    with torch.no_grad():
        for p, slope in zip(params, first):
            p.sub_(0.05 * slope)
    made.optimizer.step()
    return loss.detach()


def over_the_live_model(made: Loop) -> None:
    made.loss_fn = lambda model, batch: (
        cross_entropy(model, batch) + 0.1 * sum(p.square().sum() for p in made.model.parameters())
    )


def over_the_live_model_alone(made: Loop) -> None:
    made.loss_fn = lambda model, batch: cross_entropy(made.model, batch)


def target_network(made: Loop) -> None:
    made.box.target = copy.deepcopy(made.model).requires_grad_(False)
    made.loss_fn = lambda model, batch: (
        cross_entropy(model, batch) + (model(batch[0]) - made.box.target(batch[0])).square().mean()
    )


def move_target(made: Loop) -> None:
    with torch.no_grad():
        for slow, p in zip(made.box.target.parameters(), made.model.parameters()):
            slow.lerp_(p, 0.5)


def unfreeze_later(made: Loop) -> None:
    made.model[0].requires_grad_(made.taken >= 4)  # type: ignore[index]


def freeze_later(made: Loop) -> None:
    made.model[0].requires_grad_(made.taken < 4)  # type: ignore[index]


def grow(made: Loop) -> None:
    if made.taken == 4:
        made.model.append(nn.Linear(CLASSES, CLASSES, device=DEVICE))  # type: ignore[operator]
        made.optimizer.add_param_group({"params": list(made.model[-1].parameters())})  # type: ignore[index]


def summed(made: Loop, batch: Any) -> Tensor:
    """Micro-batches' gradients are summed, and the sum divided."""
    made.optimizer.zero_grad()
    losses = [made.loss_fn(made.model, part) for part in batch.batches]
    for loss in losses:
        loss.backward()
    for p in made.model.parameters():
        p.grad.div_(3)  # type: ignore[union-attr]
    made.optimizer.step()
    return sum(loss.detach() for loss in losses) / 3  # type: ignore[return-value]


def clipped_in_groups_order(made: Loop) -> None:
    nn.utils.clip_grad_norm_([p for g in made.optimizer.param_groups for p in g["params"]], 0.5)


def hook(layer: int, kind: str, change: Callable[..., Any]) -> Callable[[Loop], None]:
    """Prepares a loop with a hook on one layer of its model."""

    def prepare(made: Loop) -> None:
        getattr(made.model[layer], f"register_{kind}")(change)  # type: ignore[index]

    return prepare


def parameter_hook(made: Loop) -> None:
    made.model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))  # type: ignore[index]


def doubled(module: nn.Module, values: tuple[Tensor, ...], *_: Any) -> tuple[Tensor, ...]:
    return (None if values[0] is None else values[0] * 2,)


def doubled_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def ignored(*_: Any) -> None:
    return None


def nan_batch(made: Loop) -> None:
    drawn = [0]

    def draw() -> Any:
        drawn[0] += 1
        x, y = classes()()
        return (x * float("nan") if drawn[0] == 6 else x), y

    made.draw = draw


def both_heads(made: Loop) -> None:
    """Micro-batches of every step use both heads; the batch in the place of one uses the second alone."""
    drawn, pairs = [0], made.warm + STEPS

    def draw() -> Any:
        drawn[0] += 1
        x, y = classes()()
        return (x.abs() if drawn[0] % 2 or drawn[0] > 2 * pairs else -x.abs()), y

    made.draw = draw


def uneven(made: Loop) -> None:
    made.draw = sizes(6, 6, 2)


def generator_in_the_loop(made: Loop) -> None:
    generator = torch.Generator(DEVICE).manual_seed(7)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cross_entropy(model, (x + 0.1 * torch.randn(x.shape, generator=generator, device=DEVICE), y))

    made.loss_fn = loss_fn


def remembering(made: Loop) -> None:
    """A loss that keeps a running number outside the model: its scale, as some adversarial losses do."""
    made.box.scale = 1.0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        made.box.scale = 0.9 * made.box.scale + 0.1 * float(loss)
        return loss / made.box.scale

    made.loss_fn = loss_fn


def skipping(made: Loop, batch: Any) -> Tensor:
    """A loop that leaves out the step where the loss is high."""
    made.optimizer.zero_grad()
    loss = made.loss_fn(made.model, batch)
    loss.backward()
    if loss.item() < 1.1:
        made.optimizer.step()
    return loss.detach()


def after_validation(made: Loop) -> None:
    """The loop validates after each step, and train mode comes back with the next."""
    made.model.eval()


def training_mode(made: Loop, batch: Any) -> Tensor:
    made.model.train()
    return plain_update(made, batch)


def loader_draws(made: Loop) -> None:
    """An augmentation draws from torch's generator between steps."""
    torch.rand(3, device=DEVICE)


def scaled_loss(made: Loop, batch: Any) -> Tensor:
    """Loss scaling by a power of two, as a gradient scaler does: no rounding."""
    made.optimizer.zero_grad()
    loss = made.loss_fn(made.model, batch)
    (loss * 1024).backward()
    for p in made.model.parameters():
        p.grad.div_(1024)  # type: ignore[union-attr]
    made.optimizer.step()
    return loss.detach()


def clipped_in_part(made: Loop) -> None:
    nn.utils.clip_grad_norm_(next(made.model.parameters()), 0.05)


def clipped_by_largest(made: Loop) -> None:
    nn.utils.clip_grad_norm_(made.model.parameters(), 0.05, norm_type=float("inf"))


@torch.no_grad()
def shrink(made: Loop) -> None:
    for p in made.model.parameters():
        p.mul_(0.99)


def forget(made: Loop) -> None:
    if made.taken == 4:
        made.optimizer.state.clear()
