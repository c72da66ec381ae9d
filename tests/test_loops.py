"""Strangers' loops: each is followed to the bit, or within a stated rounding, or refused by name, or noticed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

import aftershock as ak

from . import loop_parts as parts
from .loop_parts import adamw, loop, mlp, tokens, with_scheduler
from .loops import EQUAL, NOTICED, REFUSED, Loop, judge


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Loop]
    allowed: tuple[str, ...]
    culprit: str = ""  # a refusal must name it
    rounding: float = 0.0
    broken: str = ""  # why it fails today


def equal(name: str, build: Callable[[], Loop], rounding: float = 0.0, broken: str = "") -> Case:
    return Case(name, build, (EQUAL,), "", rounding, broken)


def refused(name: str, build: Callable[[], Loop], culprit: str, broken: str = "") -> Case:
    return Case(name, build, (REFUSED,), culprit, 0.0, broken)


def unseen(name: str, build: Callable[[], Loop], broken: str = "") -> Case:
    """The loop does what nothing of the model and optimizer shows: only `path.matches` can notice."""
    return Case(name, build, (NOTICED,), "", 0.0, broken)


def honest(name: str, build: Callable[[], Loop], culprit: str, broken: str = "") -> Case:
    """Followed, refused by name or noticed: anything but a silent number."""
    return Case(name, build, (EQUAL, REFUSED, NOTICED), culprit, 0.0, broken)


# --- models


def norm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: mlp(extra=lambda: nn.BatchNorm1d(5, **options))


def evaluating(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: model().eval()


def normed(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = mlp()
        model[0] = wrap(model[0])
        return model

    return build


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def channels_last() -> nn.Module:
    return parts.cnn().to(memory_format=torch.channels_last)


def typed(dtype: torch.dtype) -> Callable[[], Loop]:
    return loop(lambda: mlp().to(dtype), adamw(eps=1e-4), draw=parts.classes(dtype=dtype))


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


MODELS = [
    equal("mlp", loop()),
    equal("before the first step", loop(warm=0)),
    equal("cnn", loop(parts.cnn, draw=parts.classes(2, 4, 4))),
    equal("channels_last", loop(channels_last, draw=parts.classes(2, 4, 4))),
    equal("batch norm", loop(norm())),
    equal("batch norm, cumulative average", loop(norm(momentum=None))),
    equal("batch norm without statistics", loop(norm(track_running_stats=False))),
    equal("batch norm in eval mode", loop(evaluating(norm()))),
    equal("one norm in eval mode", loop(parts.half_frozen_norm)),
    equal("group norm", loop(lambda: mlp(extra=lambda: nn.GroupNorm(1, 5)))),
    equal("dropout", loop(lambda: mlp(extra=lambda: nn.Dropout(0.3)))),
    equal("transformer", loop(parts.Transformer, loss_fn=parts.next_token, draw=tokens)),
    equal(
        "transformer, tied, dropout, checkpointed",
        loop(lambda: parts.Transformer(dropout=0.2, tied=True, checkpointed=True), loss_fn=parts.next_token, draw=tokens),
    ),
    equal("lstm", loop(lambda: parts.Recurrent(nn.LSTM), loss_fn=parts.next_token, draw=tokens)),
    equal("gru", loop(lambda: parts.Recurrent(nn.GRU), loss_fn=parts.next_token, draw=tokens)),
    equal("gpt-2 with dropout", loop(gpt2, loss_fn=parts.next_token, draw=tokens)),
    equal("llama", loop(llama, loss_fn=parts.next_token, draw=tokens)),
    equal("frozen part", loop(frozen)),
    equal("frozen part in the optimizer", loop(frozen, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))),
    equal("weight_norm as a hook", loop(normed(nn.utils.weight_norm))),
    equal("weight_norm as a parametrization", loop(normed(parametrizations.weight_norm))),
    equal("spectral_norm as a hook", loop(normed(nn.utils.spectral_norm))),
    equal("spectral_norm as a parametrization", loop(normed(parametrizations.spectral_norm))),
    equal("orthogonal parametrization", loop(normed(parametrizations.orthogonal))),
    equal("top-k experts", loop(parts.Experts)),
    equal("vector quantization", loop(parts.Quantized, loss_fn=parts.quantized)),
    equal("an unused head", loop(parts.OneHead)),
    equal("heads chosen by the batch", loop(parts.Heads)),
    equal("bfloat16", typed(torch.bfloat16)),
    equal("float16 without a scaler", typed(torch.float16)),
    equal("float64", typed(torch.float64)),
    equal("mixed dtypes", loop(parts.MixedTypes)),
    equal("complex inside", loop(parts.Spectral)),
    equal("torch.compile wrapper", loop(lambda: torch.compile(mlp(), backend="eager"))),  # type: ignore[arg-type]
    equal("DataParallel wrapper", loop(lambda: nn.DataParallel(mlp()))),
    honest("embedding with max_norm", loop(parts.BoundedTokens, loss_fn=parts.next_token, draw=tokens), "max_norm"),
    honest("a counter in the model", loop(parts.Counting), "calls"),
    honest("the model's own generator", loop(parts.OwnGenerator), "generator|random"),
    honest("weight average in the loss", loop(parts.Averaging, loss_fn=parts.distilled, after=lambda l: averaged(l)), ""),
    refused(
        "sparse embedding",
        loop(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9)), parts.adamw(),
             parts.next_token, tokens, warm=0),
        "sparse",
    ),
    refused("parameters of no group", loop(optimizer=lambda m: torch.optim.AdamW(m[0].parameters())), "3.weight"),
    refused("nothing to train", loop(lambda: mlp().requires_grad_(False), lambda m: torch.optim.AdamW(m.parameters()), warm=0), "gradient"),
]  # fmt: skip


# --- optimizers


def averaged(made: Loop) -> None:
    with torch.no_grad():
        for slow, p in zip(made.model.teacher.parameters(), made.model.student.parameters()):  # type: ignore
            slow.lerp_(p, 0.1)


def lbfgs(made: Loop, batch: Any) -> torch.Tensor:
    def closure() -> torch.Tensor:
        made.optimizer.zero_grad()
        loss = made.loss_fn(made.model, batch)
        loss.backward()
        return loss

    return made.optimizer.step(closure).detach()


OPTIMIZERS = [
    equal("Adam, coupled decay", loop(optimizer=adamw(torch.optim.Adam))),
    equal("AdamW without decay", loop(optimizer=adamw(weight_decay=0.0))),
    equal("maximize", loop(optimizer=adamw(maximize=True))),
    equal("fused", loop(optimizer=adamw(fused=True))),
    equal("foreach", loop(optimizer=adamw(foreach=True))),
    equal("one tensor at a time", loop(optimizer=adamw(foreach=False))),
    equal("tensor lr", loop(optimizer=adamw(lr=torch.tensor(1e-2)))),
    equal("tensor lr, fused", loop(optimizer=adamw(lr=torch.tensor(1e-2), fused=True))),
    equal("groups of different everything", loop(optimizer=parts.grouped)),
    equal("a subclass that adds nothing", loop(optimizer=adamw(parts.Renamed))),
    refused("amsgrad", loop(optimizer=adamw(amsgrad=True)), "amsgrad"),
    refused("a subclass that does more", loop(optimizer=adamw(parts.Shrinking)), "Shrinking"),
    refused("the same in disguise", loop(optimizer=adamw(parts.Disguised)), "Disguised|step"),
    refused("step patched on the instance", loop(optimizer=parts.patched), "step"),
    refused("step pre-hook", loop(optimizer=parts.hooked("pre")), "hook"),
    refused("step post-hook", loop(optimizer=parts.hooked("post")), "hook"),
    refused("Lookahead", loop(optimizer=lambda m: parts.Lookahead(adamw()(m))), "Lookahead"),
    refused("SGD", loop(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), "SGD"),
    refused("L-BFGS", loop(optimizer=lambda m: torch.optim.LBFGS(m.parameters()), update=lbfgs), "LBFGS"),
]


# --- schedules


def decaying(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20, cycle_momentum=True)


class HyperSchedule(lr_scheduler.LRScheduler):
    """Moves another hyperparameter than the learning rate."""

    def __init__(self, optimizer: Any, name: str) -> None:
        self.name = name
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            if self.name == "betas":
                group["betas"] = (0.9 - 0.05 * (self.last_epoch % 5), 0.999 - 0.01 * (self.last_epoch % 7))
            else:
                group[self.name] = {"weight_decay": 0.1, "eps": 1e-3}[self.name] * (1 + self.last_epoch)


def following(make: Callable[[Any], Any], told: bool = True) -> Callable[[], Loop]:
    rest = {"told": parts.told_scheduler} if told else {}
    return loop(prepare=with_scheduler(make), after=parts.scheduled, **rest)


def by_hand(name: str) -> Callable[[], Loop]:
    """The user's loop moves a hyperparameter itself."""

    def after(made: Loop) -> None:
        for group in made.optimizer.param_groups:
            group[name] = (0.9 - 0.1 * made.taken, 0.999) if name == "betas" else group[name] * 1.5

    return loop(after=after)


def on_a_plateau(made: Loop) -> None:
    made.box.scheduler.step(1.0)


SCHEDULES = [
    equal("LambdaLR", following(decaying)),
    equal("one cycle, momentum too", following(one_cycle)),
    equal("cosine", following(lambda o: lr_scheduler.CosineAnnealingLR(o, 6))),
    equal("warmup then decay", following(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.8)], [5]
        )
    )),
    equal("scheduled weight decay", following(lambda o: HyperSchedule(o, "weight_decay"))),
    equal("scheduled betas", following(lambda o: HyperSchedule(o, "betas"))),
    equal("scheduled eps", following(lambda o: HyperSchedule(o, "eps"))),
    honest("a scheduler that is not told", following(decaying, told=False), "schedul"),
    refused(
        "ReduceLROnPlateau",
        loop(prepare=with_scheduler(lr_scheduler.ReduceLROnPlateau), after=on_a_plateau, told=parts.told_scheduler),
        "ReduceLROnPlateau",
    ),
    equal("rates as a list", loop(
        after=lambda l: l.optimizer.param_groups[0].update(lr=1e-2 / (l.taken + 2)),
        told=lambda l: {"lr": [1e-2 / (t + 1) for t in range(l.taken, l.taken + 5)]},
    )),
    unseen("lr moved by the loop", by_hand("lr")),
    unseen("weight decay moved by the loop", by_hand("weight_decay")),
    unseen("betas moved by the loop", by_hand("betas")),
    unseen("eps moved by the loop", loop(after=by_hand("eps")().after, optimizer=adamw(eps=1e-3))),
]  # fmt: skip


# --- what loops do


def sharpness_aware(made: Loop, batch: Any) -> torch.Tensor:
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
        parts.cross_entropy(model, batch) + 0.1 * sum(p.square().sum() for p in made.model.parameters())
    )


def over_the_live_model_alone(made: Loop) -> None:
    made.loss_fn = lambda model, batch: parts.cross_entropy(made.model, batch)


def target_network(made: Loop) -> None:
    made.box.target = copy.deepcopy(made.model).requires_grad_(False)
    made.loss_fn = lambda model, batch: (
        parts.cross_entropy(model, batch) + (model(batch[0]) - made.box.target(batch[0])).square().mean()
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
        made.model.append(nn.Linear(parts.CLASSES, parts.CLASSES))  # type: ignore[operator]
        made.optimizer.add_param_group({"params": list(made.model[-1].parameters())})  # type: ignore[index]


def scaled_sum(made: Loop) -> None:
    """Micro-batches' gradients are summed, and the sum divided."""
    for p in made.model.parameters():
        p.grad.div_(3)  # type: ignore[union-attr]


def summed(made: Loop, batch: Any) -> torch.Tensor:
    made.optimizer.zero_grad()
    losses = [made.loss_fn(made.model, part) for part in batch.batches]
    for loss in losses:
        loss.backward()
    scaled_sum(made)
    made.optimizer.step()
    return sum(loss.detach() for loss in losses) / 3  # type: ignore[return-value]


def clipped_in_groups_order(made: Loop) -> None:
    nn.utils.clip_grad_norm_([p for g in made.optimizer.param_groups for p in g["params"]], 0.5)


def hook(register: str, change: Callable[..., Any]) -> Callable[[Loop], None]:
    def prepare(made: Loop) -> None:
        getattr(made.model[0], register)(change)  # type: ignore[index]

    return prepare


def parameter_hook(made: Loop) -> None:
    made.model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))  # type: ignore[index]


def ignored(*_: Any) -> None:
    return None


class Seen:
    """A probe or loss that leaves its traces in the model it is given."""


def eval_probe(model: nn.Module) -> torch.Tensor:
    """As users write it: eval mode, and not back."""
    model.eval()
    torch.manual_seed(3)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    return F.cross_entropy(model(x), y)


def accuracy(model: nn.Module) -> torch.Tensor:
    """No derivative."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    return (model(x).argmax(-1) == y).float().mean()


def penalty_probe(model: nn.Module) -> torch.Tensor:
    """A probe that differentiates: gradients must be enabled."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    return parts.penalized(model, (x, y))


def dictionaries() -> dict[str, torch.Tensor]:
    return dict(zip(("x", "y"), parts.classes()()))


def encodings() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding(dictionaries())


def by_key(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def nan_batch(made: Loop) -> None:
    drawn = [0]

    def draw() -> Any:
        drawn[0] += 1
        x, y = parts.classes()()
        return (x * float("nan") if drawn[0] == 6 else x), y

    made.draw = draw


def gradual(made: Loop) -> None:
    made.draw = parts.sizes(6, 6, 2)


def generator_in_the_loop(made: Loop) -> None:
    generator = torch.Generator().manual_seed(7)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return parts.cross_entropy(model, (x + 0.1 * torch.randn(x.shape, generator=generator), y))

    made.loss_fn = loss_fn


def remembering(made: Loop) -> None:
    """A loss that keeps a running number outside the model: its scale, as some adversarial losses do."""
    made.box.scale = 1.0

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = parts.cross_entropy(model, batch)
        made.box.scale = 0.9 * made.box.scale + 0.1 * float(loss)
        return loss / made.box.scale

    made.loss_fn = loss_fn


def dropout() -> nn.Module:
    return mlp(extra=lambda: nn.Dropout(0.3))


LOOPS = [
    equal("zero_grad to zeros", loop(set_to_none=False)),
    honest("zero_grad to zeros, heads chosen by the batch", loop(parts.Heads, set_to_none=False), "grad"),
    equal("clipping, told", loop(edit=parts.clipped, told=parts.told_clip)),
    unseen("clipping, not told", loop(edit=parts.clipped)),
    unseen("clipping by value", loop(edit=parts.clipped_by_value)),
    # the norm of the same gradients summed in another order: a rounding of float32, 6e-8, a step
    equal("clipping in the groups' order", loop(optimizer=parts.grouped, edit=clipped_in_groups_order, told=parts.told_clip), 1e-5),
    equal("accumulation", loop(accumulate=3)),
    equal("accumulation with dropout and clipping", loop(dropout, accumulate=2, edit=parts.clipped, told=parts.told_clip)),
    # (a + b + c) / 3 against a/3 + b/3 + c/3: a rounding of float32 a step, which √v̂ near 0 makes larger
    equal("accumulation, divided at the end", loop(accumulate=3, update=summed), 1e-4),
    unseen("gradients edited in place", loop(edit=parts.edited)),
    unseen("gradient noise", loop(edit=parts.gradient_noise)),
    unseen("SAM", loop(update=sharpness_aware)),
    equal("autocast around everything", loop(around=parts.bfloat16, capture_within=parts.bfloat16)),
    equal("autocast inside loss_fn", loop(loss_fn=parts.autocast_inside)),
    unseen("autocast, but not at capture", loop(around=parts.bfloat16)),
    equal("noise from torch in loss_fn", loop(loss_fn=parts.noisy)),
    honest("mixup by numpy", loop(loss_fn=parts.numpy_mixup), "numpy|random"),
    honest("mixup by random", loop(loss_fn=parts.random_mixup), "random"),
    honest("mixup by random, now and then", loop(loss_fn=parts.rare_mixup), "random"),
    honest("loss_fn's own generator", loop(prepare=generator_in_the_loop), "generator|random|again"),
    honest("loss_fn with a memory", loop(prepare=remembering), "again|state|loss_fn"),
    honest("loss_fn also closes over the live model", loop(prepare=over_the_live_model), "model"),
    refused("loss_fn closes over the live model alone", loop(prepare=over_the_live_model_alone), "model it was given|model it is given"),
    honest("target network in loss_fn", loop(prepare=target_network, after=move_target), "target|loss_fn"),
    unseen("unfrozen later", loop(frozen, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), after=unfreeze_later)),
    unseen("frozen later", loop(after=freeze_later)),
    unseen("parameters added", loop(after=grow)),
    unseen("weights changed between steps", loop(after=lambda l: [p.data.mul_(0.99) for p in l.model.parameters()])),
    unseen("moments reset by the loop", loop(after=lambda l: l.optimizer.state.clear() if l.taken == 4 else None)),
    unseen("steps skipped by the loop", loop(update=lambda l, b: parts_skip(l, b))),
    equal("gradient penalty", loop(loss_fn=parts.penalized)),
    equal("label smoothing", loop(loss_fn=parts.smoothed)),
    equal("control flow by the data", loop(loss_fn=parts.branching)),
    refused("loss_fn returns a tuple", loop(loss_fn=lambda m, b: (parts.cross_entropy(m, b), 1), warm=0), "tuple"),
    refused("loss_fn returns a float", loop(loss_fn=lambda m, b: float(parts.cross_entropy(m, b)), warm=0), "float"),
    refused("a batch of NaN", loop(prepare=nan_batch), "step 2"),
    equal("a smaller last batch", loop(prepare=gradual)),
    equal("dictionaries as batches", loop(draw=dictionaries, loss_fn=by_key)),
    equal("BatchEncodings as batches", loop(draw=encodings, loss_fn=by_key)),
    equal("dataclasses as batches", loop(
        draw=lambda: parts.Labelled(*parts.classes()()), loss_fn=lambda m, b: F.cross_entropy(m(b.x), b.y)
    )),
]  # fmt: skip

HOOKS = [
    honest("forward hook that changes the output", loop(prepare=hook("register_forward_hook", lambda m, a, out: out * 2)), "hook"),
    honest("forward pre-hook that changes the input", loop(prepare=hook("register_forward_pre_hook", lambda m, a: (a[0] * 2,))), "hook"),
    honest("backward hook that changes the gradient", loop(
        lambda: nn.Sequential(nn.Identity(), mlp())[1], prepare=lambda l: l.model[3].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    ), "hook"),
    equal("forward hook that looks on", loop(prepare=hook("register_forward_hook", ignored))),
    refused("gradient hook on a parameter", loop(prepare=parameter_hook), "0.weight"),
]  # fmt: skip

PROBES = [
    equal("probe that calls eval()", loop(dropout, probe=eval_probe)),
    equal("probe that calls eval(), batch norm", loop(norm(), probe=eval_probe)),
    equal("accuracy as a probe", loop(probe=accuracy)),
    equal("gradient penalty as a probe", loop(probe=penalty_probe)),
    equal("accuracy under weight_norm", loop(normed(nn.utils.weight_norm), probe=accuracy)),
]

TABLE = [*MODELS, *OPTIMIZERS, *SCHEDULES, *LOOPS, *HOOKS, *PROBES]


def parts_skip(made: Loop, batch: Any) -> torch.Tensor:
    """A loop that leaves out the step where the loss is high."""
    made.optimizer.zero_grad()
    loss = made.loss_fn(made.model, batch)
    loss.backward()
    if loss.item() < 1.1:
        made.optimizer.step()
    return loss.detach()


def parameter(case: Case) -> Any:
    marks = []
    if case.broken:
        marks.append(pytest.mark.xfail(strict=True, reason=case.broken))
    elif NOTICED in case.allowed and not hasattr(ak.Path, "matches"):
        marks.append(pytest.mark.xfail(strict=False, reason="Path.matches does not exist yet"))
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", map(parameter, TABLE))
def test_the_table(case: Case) -> None:
    verdict = judge(case.build, rounding=case.rounding)
    assert verdict.outcome in case.allowed, f"{verdict.outcome}: {verdict.detail}"
    if verdict.outcome == REFUSED:
        assert re.search(case.culprit, verdict.detail), f"the refusal does not name {case.culprit!r}: {verdict.detail}"


def test_the_table_is_a_table() -> None:
    names = [case.name for case in TABLE]
    assert len(set(names)) == len(names) >= 60
