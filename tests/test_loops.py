"""Strangers' loops: each is followed to the bit, or within a stated rounding, or refused by name, or noticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

from . import loop_losses as losses
from . import loop_models as models
from . import loop_optimizers as optimizers
from . import loop_tricks as tricks
from .loop_losses import classes, tokens
from .loop_models import dropout, mlp, norm, normed
from .loop_optimizers import HyperSchedule, adamw
from .loop_tricks import following, hook, loop
from .loops import EQUAL, NOTICED, REFUSED, Loop, judge


@dataclass(frozen=True)
class Case:
    """A loop and what may come of it."""

    name: str
    build: Callable[[], Loop]
    allowed: tuple[str, ...]
    culprit: str = ""  # a refusal must name it
    rounding: float = 0.0


def equal(name: str, build: Callable[[], Loop], *, rounding: float = 0.0) -> Case:
    return Case(name, build, (EQUAL,), "", rounding)


def refused(name: str, build: Callable[[], Loop], culprit: str) -> Case:
    return Case(name, build, (REFUSED,), culprit)


def known(name: str, build: Callable[[], Loop], culprit: str) -> Case:
    """The model and optimizer show it: followed or refused by name."""
    return Case(name, build, (EQUAL, REFUSED), culprit)


def unseen(name: str, build: Callable[[], Loop], culprit: str = "") -> Case:
    """The loop does what only `path.matches` can see, or what is refused by name before."""
    return Case(name, build, (REFUSED, NOTICED), culprit)


def harmless(name: str, build: Callable[[], Loop], culprit: str) -> Case:
    """Might be followed, may be refused or noticed: anything but a silent number."""
    return Case(name, build, (EQUAL, REFUSED, NOTICED), culprit)


def typed(dtype: torch.dtype) -> Callable[[], Loop]:
    return loop(lambda: mlp().to(dtype), adamw(eps=1e-4), draw=classes(dtype=dtype))


def language(model: Callable[[], nn.Module], **rest: Any) -> Callable[[], Loop]:
    return loop(model, loss_fn=losses.next_token, draw=tokens, **rest)


def everything(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


MODELS = [
    equal("mlp", loop()),
    equal("before the first step", loop(warm=0)),
    equal("cnn", loop(models.cnn, draw=classes(2, 4, 4))),
    equal("channels_last", loop(models.channels_last, draw=classes(2, 4, 4))),
    equal("batch norm", loop(norm())),
    equal("batch norm, cumulative average", loop(norm(momentum=None))),
    equal("batch norm without statistics", loop(norm(track_running_stats=False))),
    equal("batch norm in eval mode", loop(models.evaluating(norm()))),
    equal("one norm in eval mode", loop(models.half_frozen_norm)),
    equal("group norm", loop(lambda: mlp(extra=lambda: nn.GroupNorm(1, 5)))),
    equal("dropout", loop(dropout)),
    equal("transformer", language(models.Transformer)),
    equal("transformer in eval mode", language(models.evaluating(models.Transformer))),
    equal("transformer, tied, checkpointed", language(lambda: models.Transformer(0.2, tied=True, checkpointed=True))),
    equal("lstm", language(lambda: models.Recurrent(nn.LSTM))),
    equal("gru", language(lambda: models.Recurrent(nn.GRU))),
    equal("gpt-2 with dropout", language(models.gpt2)),
    equal("llama", language(models.llama)),
    equal("frozen part", loop(models.frozen)),
    equal("frozen part in the optimizer", loop(models.frozen, everything)),
    equal("weight_norm as a hook", loop(normed(nn.utils.weight_norm))),
    equal("weight_norm as a parametrization", loop(normed(parametrizations.weight_norm))),
    equal("spectral_norm as a hook", loop(normed(nn.utils.spectral_norm))),
    equal("spectral_norm as a parametrization", loop(normed(parametrizations.spectral_norm))),
    equal("orthogonal parametrization", loop(normed(parametrizations.orthogonal))),
    equal("top-k experts", loop(models.Experts)),
    equal("vector quantization", loop(models.Quantized, loss_fn=losses.quantized)),
    equal("an unused head", loop(models.OneHead)),
    equal("heads chosen by the batch", loop(models.Heads)),
    equal("bfloat16", typed(torch.bfloat16)),
    equal("float16 without a scaler", typed(torch.float16)),
    equal("float64", typed(torch.float64)),
    equal("mixed dtypes", loop(models.MixedTypes)),
    equal("complex inside", loop(models.Spectral)),
    equal("torch.compile wrapper", loop(lambda: torch.compile(mlp(), backend="eager"))),  # type: ignore[arg-type]
    equal("DataParallel wrapper", loop(lambda: nn.DataParallel(mlp()))),
    equal("buffers of every kind", loop(models.ManyBuffers)),
    equal("parameters of odd shapes", loop(models.OddParameters)),
    equal("parameters in one vector", loop(models.OneVector)),
    known("a buffer assigned anew", loop(models.AssignedBuffer), "mean"),
    known("parameters on one memory", language(models.OneMemory), "head.weight|embed.weight"),
    known("a buffer on a parameter's memory", loop(models.BufferOnParameter), "scale"),
    known("a lambda over the model", loop(models.Lambda), "rescale|scale"),
    known("embedding with max_norm", language(models.BoundedTokens), "max_norm"),
    known("a counter in the model", loop(models.Counting), "calls"),
    known("a hidden state carried on", loop(models.Carrying), "hidden"),
    known("a tensor assigned, no buffer", loop(lambda: models.AssignedBuffer(registered=False)), "mean"),
    known("a tensor written into, no buffer", loop(models.WrittenTensor), "mean"),
    known("the model's own generator", loop(models.OwnGenerator), "generator|random"),
    unseen("weight average in the loss", loop(models.Averaging, loss_fn=losses.distilled, after=tricks.averaged)),
    harmless("weight average beside the loss", loop(models.Averaging, after=tricks.averaged), "teacher"),
    refused("sparse embedding", language(models.sparse, warm=0), "sparse"),
    refused("parameters of no group", loop(optimizer=lambda m: torch.optim.AdamW(m[0].parameters())), "3.weight"),
    refused("nothing to train", loop(lambda: mlp().requires_grad_(False), everything, warm=0), "gradient"),
]  # fmt: skip

OPTIMIZERS = [
    equal("Adam, coupled decay", loop(optimizer=adamw(torch.optim.Adam))),
    equal("AdamW without decay", loop(optimizer=adamw(weight_decay=0.0))),
    equal("maximize", loop(optimizer=adamw(maximize=True))),
    equal("fused", loop(optimizer=adamw(fused=True))),
    equal("foreach", loop(optimizer=adamw(foreach=True))),
    equal("one tensor at a time", loop(optimizer=adamw(foreach=False))),
    equal("tensor lr", loop(optimizer=adamw(lr=torch.tensor(1e-2)))),
    equal("tensor lr, fused", loop(optimizer=adamw(lr=torch.tensor(1e-2), fused=True))),
    equal("groups of different everything", loop(optimizer=optimizers.grouped)),
    equal("a subclass that adds nothing", loop(optimizer=adamw(optimizers.Renamed))),
    equal("restored from a checkpoint", loop(optimizer=optimizers.restored)),
    known("step hook that looks on", loop(optimizer=optimizers.observed), "hook"),
    refused("amsgrad", loop(optimizer=adamw(amsgrad=True)), "amsgrad"),
    refused("a subclass that does more", loop(optimizer=adamw(optimizers.Shrinking)), "Shrinking"),
    refused("the same in disguise", loop(optimizer=adamw(optimizers.Disguised)), "Disguised|step"),
    refused("step patched on the instance", loop(optimizer=optimizers.patched), "step"),
    known("step pre-hook", loop(optimizer=optimizers.hooked("pre")), "hook"),
    known("step post-hook", loop(optimizer=optimizers.hooked("post")), "hook"),
    refused("Lookahead", loop(optimizer=lambda m: optimizers.Lookahead(adamw()(m))), "Lookahead"),
    refused("SGD", loop(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), "SGD"),
    refused("L-BFGS", loop(optimizer=lambda m: torch.optim.LBFGS(m.parameters()), update=optimizers.lbfgs), "LBFGS"),
    refused("an optimizer of two models", loop(optimizer=optimizers.with_another), "2, 2"),
]

SCHEDULES = [
    equal("LambdaLR", following(optimizers.decaying)),
    equal("one cycle, momentum too", following(optimizers.one_cycle)),
    equal("cosine", following(lambda o: lr_scheduler.CosineAnnealingLR(o, 6))),
    equal("warmup then decay", following(optimizers.warmup_then_decay)),
    equal("scheduled weight decay", following(lambda o: HyperSchedule(o, "weight_decay"))),
    equal("scheduled betas", following(lambda o: HyperSchedule(o, "betas"))),
    equal("scheduled eps", following(lambda o: HyperSchedule(o, "eps"))),
    unseen("a scheduler that is not told", following(optimizers.decaying, told=False), "schedul"),
    equal("rates as a list", tricks.listed_rates),
    refused("ReduceLROnPlateau", following(lr_scheduler.ReduceLROnPlateau, advance=tricks.on_a_plateau), "Plateau"),
    unseen("lr moved by the loop", tricks.by_hand("lr")),
    unseen("weight decay moved by the loop", tricks.by_hand("weight_decay")),
    unseen("betas moved by the loop", tricks.by_hand("betas")),
    unseen("eps moved by the loop", tricks.by_hand("eps", eps=1e-3)),
]  # fmt: skip

LOOPS = [
    equal("zero_grad to zeros", loop(set_to_none=False)),
    harmless("zero_grad to zeros, heads chosen by the batch", loop(models.Heads, set_to_none=False), "grad"),
    known(
        "zero_grad to zeros, another head in the change",
        loop(models.Heads, set_to_none=False, accumulate=2, prepare=tricks.both_heads),
        "grad|heads",
    ),
    equal("clipping, told", loop(edit=tricks.clipped, told=tricks.told_clip)),
    unseen("clipping, not told", loop(edit=tricks.clipped)),
    unseen("clipping by value", loop(edit=tricks.clipped_by_value)),
    unseen("clipping of one part", loop(edit=tricks.clipped_in_part)),
    unseen("clipping by the largest entry", loop(edit=tricks.clipped_by_largest)),
    # the norm of the same gradients summed in another order: a rounding of float32 (6e-8) a step, through √v̂
    equal(
        "clipping in the groups' order",
        loop(optimizer=optimizers.grouped, edit=tricks.clipped_in_groups_order, told=tricks.told_clip),
        rounding=1e-5,
    ),
    equal("accumulation", loop(accumulate=3)),
    equal("accumulation and clipping", loop(dropout, accumulate=2, edit=tricks.clipped, told=tricks.told_clip)),
    # (a + b + c) / 3 against a/3 + b/3 + c/3: a rounding of float32 a step, which coordinates with small v̂ enlarge
    equal("accumulation, divided at the end", loop(accumulate=3, update=tricks.summed), rounding=1e-4),
    equal("loss scaled by a power of two", loop(update=tricks.scaled_loss)),
    unseen("gradients edited in place", loop(edit=tricks.edited)),
    unseen("gradient noise", loop(edit=tricks.gradient_noise)),
    unseen("SAM", loop(update=tricks.sharpness_aware)),
    equal("autocast around everything", loop(around=tricks.bfloat16, capture_within=tricks.bfloat16)),
    equal(
        "autocast around a transformer",
        language(lambda: models.Transformer(0.2, tied=True), around=tricks.bfloat16, capture_within=tricks.bfloat16),
    ),
    equal("autocast inside loss_fn", loop(loss_fn=losses.autocast_inside)),
    unseen("autocast, but not at capture", loop(around=tricks.bfloat16)),
    unseen("captured after validation", loop(dropout, update=tricks.training_mode, after=tricks.after_validation)),
    unseen("a loader that draws from torch", loop(dropout, after=tricks.loader_draws)),
    equal("noise from torch in loss_fn", loop(loss_fn=losses.noisy)),
    known("mixup by numpy", loop(loss_fn=losses.numpy_mixup), "numpy|random"),
    known("mixup by random", loop(loss_fn=losses.random_mixup), "random"),
    known("mixup by random, now and then", loop(loss_fn=losses.rare_mixup), "random"),
    known("loss_fn's own generator", loop(prepare=tricks.generator_in_the_loop), "generator|random|again"),
    known("loss_fn with a memory", loop(prepare=tricks.remembering), "again|state|loss_fn"),
    known("loss_fn that writes to its batch", loop(loss_fn=losses.writing), "batch"),
    unseen("loss_fn also closes over the live model", loop(prepare=tricks.over_the_live_model), "model"),
    refused("loss_fn uses the live model alone", loop(prepare=tricks.over_the_live_model_alone), "live model|given"),
    unseen("target network in loss_fn", loop(prepare=tricks.target_network, after=tricks.move_target), "loss_fn"),
    unseen("unfrozen later", loop(models.frozen, everything, after=tricks.unfreeze_later)),
    unseen("frozen later", loop(after=tricks.freeze_later)),
    unseen("parameters added", loop(after=tricks.grow)),
    unseen("weights changed between steps", loop(after=tricks.shrink)),
    unseen("moments reset by the loop", loop(after=tricks.forget)),
    unseen("steps skipped by the loop", loop(update=tricks.skipping)),
    equal("loss_fn calls submodules only", loop(loss_fn=losses.submodules_only)),
    equal("pseudo labels in eval mode", loop(dropout, loss_fn=losses.pseudo_labels)),
    equal("gradient penalty", loop(loss_fn=losses.penalized)),
    equal("label smoothing", loop(loss_fn=losses.smoothed)),
    equal("control flow by the data", loop(loss_fn=losses.branching)),
    refused("loss_fn returns a tuple", loop(loss_fn=lambda m, b: (losses.cross_entropy(m, b), 1), warm=0), "tuple"),
    refused("loss_fn returns a float", loop(loss_fn=lambda m, b: float(losses.cross_entropy(m, b)), warm=0), "float"),
    refused("a batch of NaN", loop(prepare=tricks.nan_batch), "step 2"),
    equal("a smaller last batch", loop(prepare=tricks.uneven)),
    equal("dictionaries as batches", loop(draw=losses.dictionaries, loss_fn=losses.by_key)),
    equal("BatchEncodings as batches", loop(draw=losses.encodings, loss_fn=losses.by_key)),
    equal("dataclasses as batches", loop(draw=losses.labelled, loss_fn=losses.by_field)),
]  # fmt: skip

HOOKS = [
    known("forward hook that doubles", loop(prepare=hook(0, "forward_hook", tricks.doubled_output)), "hook"),
    known("forward pre-hook that doubles", loop(prepare=hook(0, "forward_pre_hook", tricks.doubled)), "hook"),
    known("backward hook that doubles", loop(prepare=hook(3, "full_backward_hook", tricks.doubled)), "hook"),
    known("backward pre-hook that doubles", loop(prepare=hook(3, "full_backward_pre_hook", tricks.doubled)), "hook"),
    known("forward hook that looks on", loop(prepare=hook(0, "forward_hook", tricks.ignored)), "hook"),
    refused("gradient hook on a parameter", loop(prepare=tricks.parameter_hook), "0.weight"),
]  # fmt: skip

PROBES = [
    equal("probe that calls eval()", loop(dropout, probe=losses.eval_probe)),
    equal("probe that calls eval(), batch norm", loop(norm(), probe=losses.eval_probe)),
    equal("probe that freezes the model", loop(probe=losses.freezing_probe)),
    equal("probe that sets an attribute", loop(models.Tempered, probe=losses.tempering_probe)),
    known("probe that changes the weights", loop(probe=losses.writing_probe), "writes into parameters"),
    equal("accuracy as a probe", loop(probe=losses.accuracy)),
    equal("accuracy under weight_norm", loop(normed(nn.utils.weight_norm), probe=losses.accuracy)),
    equal("gradient penalty as a probe", loop(probe=losses.penalty_probe)),
]

TABLE = [*MODELS, *OPTIMIZERS, *SCHEDULES, *LOOPS, *HOOKS, *PROBES]


@pytest.mark.parametrize("case", TABLE, ids=[case.name for case in TABLE])
def test_the_table(case: Case) -> None:
    verdict = judge(case.build, rounding=case.rounding)
    assert verdict.outcome in case.allowed, f"{verdict.outcome}: {verdict.detail}"
    if verdict.outcome == REFUSED:
        assert re.search(case.culprit, verdict.detail), f"the refusal does not name {case.culprit!r}: {verdict.detail}"


def test_the_table_is_a_table() -> None:
    names = [case.name for case in TABLE]
    assert len(set(names)) == len(names) >= 60
