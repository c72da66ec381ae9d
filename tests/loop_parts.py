"""What strangers' loops are made of: models, losses, batches, optimizers and the things that loops do beside them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .loops import Loop

WIDTH, CLASSES, SIZE, TOKENS = 4, 3, 6, 9

# --- batches


def classes(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, Tensor]]:
    features = shape or (WIDTH,)
    return lambda: (torch.randn(SIZE, *features).to(dtype), torch.randint(0, CLASSES, (SIZE,)))


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, TOKENS, (3, 6))
    return ids[:, :-1], ids[:, 1:]


def sizes(*counts: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches of these sizes in turn: the last of an epoch is smaller."""
    made = [0]

    def draw() -> tuple[Tensor, Tensor]:
        made[0] += 1
        size = counts[made[0] % len(counts)]
        return torch.randn(size, WIDTH), torch.randint(0, CLASSES, (size,))

    return draw


@dataclasses.dataclass
class Labelled:
    x: Tensor
    y: Tensor


# --- losses


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy((out.logits if hasattr(out, "logits") else out).flatten(0, 1), batch[1].flatten())


def smoothed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def penalized(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A gradient penalty on the inputs."""
    x = batch[0].clone().requires_grad_()
    loss = F.cross_entropy(model(x), batch[1])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * slope.square().sum()


def branching(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Control flow that depends on the data."""
    loss = cross_entropy(model, batch)
    return loss * 2 if loss.item() > 1.1 else loss


def autocast_inside(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Noise from torch's own generator."""
    return cross_entropy(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))


def mixed_up(draw: Callable[[], float], chance: float = 1.0) -> Callable[[nn.Module, Any], Tensor]:
    """Mixup whose coefficient is drawn outside torch, now and then."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if draw() > chance:
            return cross_entropy(model, batch)
        share = draw()
        out = model(share * x + (1 - share) * x.flip(0))
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))

    return loss_fn


numpy_mixup = mixed_up(lambda: np.random.rand())  # noqa: NPY002 - as users write it
random_mixup = mixed_up(random.random)
rare_mixup = mixed_up(random.random, chance=0.3)


# --- models


def mlp(activation: type[nn.Module] = nn.Tanh, extra: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 5), extra(), activation(), nn.Linear(5, CLASSES))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def half_frozen_norm() -> nn.Sequential:
    model = mlp(extra=lambda: nn.BatchNorm1d(5))
    model[1].eval()
    return model


class Transformer(nn.Module):
    def __init__(self, *, dropout: float = 0.0, tied: bool = False, checkpointed: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(width, 2, 12, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embed(ids)
        x = checkpoint(self.block, x, mask, use_reentrant=False) if self.checkpointed else self.block(x, mask)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.core, self.head = nn.Embedding(TOKENS, 5), kind(5, 6, batch_first=True), nn.Linear(6, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.core(self.embed(ids))[0])


class Experts(nn.Module):
    """Top-k routing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.gate(x).softmax(-1).topk(2)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return (weight[..., None] * out.gather(1, which[..., None].expand(-1, -1, CLASSES))).sum(1)


class Quantized(nn.Module):
    """Vector quantization with a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.codes, self.out = nn.Linear(WIDTH, 3), nn.Embedding(5, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inp(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        self.commitment = (z - code.detach()).square().mean() + (z.detach() - code).square().mean()
        return self.out(z + (code - z).detach())


def quantized(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss + model.commitment  # type: ignore[operator]


class Heads(nn.Module):
    """Two heads, of which the batch says which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(WIDTH, 5), nn.ModuleList([nn.Linear(5, CLASSES) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x.sum() > 0)](torch.tanh(self.body(x)))


class OneHead(Heads):
    """The second head is never used."""

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](torch.tanh(self.body(x)))


class Spectral(nn.Module):
    """Complex numbers inside, real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.filter, self.out = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(5)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(self.inp(x)) * self.filter, n=8).tanh())


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)).to(torch.bfloat16)).float()


class Counting(nn.Module):
    """A Python attribute that moves with each call and changes the output: a warm-up of the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x) * (1 + 0.1 * self.calls)


class OwnGenerator(nn.Module):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.generator = mlp(), torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * torch.randn(x.shape, generator=self.generator))


class Averaging(nn.Module):
    """A student and the average of its weights, which the loop moves and the loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def distilled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model, batch) + (model(batch[0]) - model.teacher(batch[0])).square().mean()  # type: ignore


class BoundedTokens(nn.Module):
    """An embedding that rescales its rows in place as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 4, max_norm=1.0), nn.Linear(4, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


# --- optimizers


def adamw(cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Callable[[nn.Module], Any]:
    settings = {"lr": 1e-2, "weight_decay": 0.1, **options}
    return lambda model: cls((p for p in model.parameters() if p.requires_grad), **settings)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Decay for matrices only, and everything else different too."""
    wide = [p for p in model.parameters() if p.ndim > 1]
    thin = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": thin, "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
            {"params": wide, "lr": 1e-2, "weight_decay": 0.2},
        ]
    )


class Shrinking(torch.optim.AdamW):
    """A subclass that does more than its parent."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)


class Disguised(torch.optim.AdamW):
    """The same, and it says that it is its parent's step."""

    @functools.wraps(torch.optim.AdamW.step)
    def step(self, *args: Any, **options: Any) -> None:  # type: ignore[override]
        super().step(*args, **options)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)


class Renamed(torch.optim.AdamW):
    """A subclass that does nothing else than its parent."""


class Lookahead:
    """Slow weights around another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.taken = optimizer, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.taken += 1
        if self.taken % 2 == 0:
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"])):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def patched(model: nn.Module) -> torch.optim.Optimizer:
    """`step` replaced on the instance, as some libraries do."""
    optimizer = adamw()(model)
    original = optimizer.step

    def step(*args: Any, **options: Any) -> Any:
        for p in model.parameters():
            p.grad.sign_()  # type: ignore[union-attr]
        return original(*args, **options)

    optimizer.step = step
    return optimizer


def hooked(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A hook around the optimizer's step that changes gradients (pre) or weights (post)."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw()(model)

        @torch.no_grad()
        def change(*_: Any) -> None:
            for p in model.parameters():
                (p.grad if kind == "pre" else p).mul_(0.9)  # type: ignore[union-attr]

        getattr(optimizer, f"register_step_{kind}_hook")(change)
        return optimizer

    return make


# --- what loops do


def clipped(loop: Loop, max_norm: float = 0.5) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), max_norm)


def clipped_by_value(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.02)


def edited(loop: Loop) -> None:
    next(loop.core.parameters()).grad.mul_(0.5)  # type: ignore[union-attr]


def gradient_noise(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.grad.add_(0.01 * torch.randn_like(p))  # type: ignore[union-attr]


def scheduled(loop: Loop) -> None:
    loop.box.scheduler.step()


def told_scheduler(loop: Loop) -> dict[str, Any]:
    return {"lr": loop.box.scheduler}


def told_clip(loop: Loop) -> dict[str, Any]:
    return {"clip": 0.5}


@contextlib.contextmanager
def bfloat16() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


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
