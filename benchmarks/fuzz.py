"""`python -m benchmarks.fuzz`: loops drawn at random, each followed by aftershock and run by plain torch.

A draw is equal to the bit, refused by name, or noticed by `path.matches`; anything else is printed with the seed that
makes it again. Traps are what a loop does without telling aftershock; most draws have none and must be equal.

`AFTERSHOCK_LOOPS=cuda` runs the loops on a GPU, with kernels that repeat themselves; `--recorded` plays every pass back
there, as those of large models are.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tests import loop_losses as losses
from tests import loop_models as models
from tests import loop_tricks as tricks
from tests.loop_losses import DEVICE
from tests.loop_optimizers import Disguised, Lookahead, Shrinking
from tests.loops import EQUAL, NOTICED, REFUSED, Loop, Verdict, judge
from torch import nn
from torch.optim import lr_scheduler

from aftershock.core import playback

TRAPPED = 0.35  # the share of draws with a trap
CLIP = 0.5

Build = Callable[[], nn.Module]
VECTORS: dict[str, Build] = {
    "mlp": models.mlp,
    "relu": lambda: models.mlp(nn.ReLU),
    "dropout": models.dropout,
    "batch norm": models.norm(),
    "cumulative batch norm": models.norm(momentum=None),
    "norm in eval mode": models.half_frozen_norm,
    "group norm": lambda: models.mlp(extra=lambda: nn.GroupNorm(1, 5)),
    "layer norm": lambda: models.mlp(extra=lambda: nn.LayerNorm(5)),
    "unused head": models.OneHead,
    "experts": models.Experts,
    "spectral norm": models.normed(nn.utils.parametrizations.spectral_norm),
}
SEQUENCES: dict[str, Build] = {
    "tied transformer": lambda: models.Transformer(0.2, tied=True),
    "checkpointed transformer": lambda: models.Transformer(checkpointed=True),
    "lstm": lambda: models.Recurrent(nn.LSTM),
}
HEADS = "heads by batch"  # a batch does not use them all, which a loop's zero_grad takes one way or the other
TRAPS = (
    "untold clipping", "clipping by value", "gradient noise", "edited gradients", "weights shrunk", "moments reset",
    "untold schedule", "weight decay by hand", "lr by hand", "autocast outside capture", "forward hook",
    "backward hook", "step pre-hook", "step post-hook", "disguised step", "subclass step", "Lookahead", "amsgrad",
    "random in loss_fn", "numpy in loss_fn", "loader draws", "validation before capture",
    "zeros for unused heads", "nothing for unused heads", "looking hook",
)  # fmt: skip


class Schedule(lr_scheduler.LRScheduler):
    """Moves any of the hyperparameters."""

    def __init__(self, optimizer: Any, moved: tuple[str, ...]) -> None:
        self.moved = moved
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        factor = 1 / (1 + 0.2 * self.last_epoch) if "lr" in self.moved else 1.0
        return [base * factor for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            if "weight_decay" in self.moved:
                group["weight_decay"] = 0.05 * (1 + self.last_epoch % 4)
            if "eps" in self.moved:
                group["eps"] = 1e-6 * 2 ** (self.last_epoch % 6)
            if "betas" in self.moved:
                group["betas"] = (0.9 - 0.05 * (self.last_epoch % 3), 0.999 - 0.004 * (self.last_epoch % 5))


@dataclass
class Draw:
    """What was drawn: plain data, from which the same loop can be built as often as it is needed."""

    seed: int
    model: str
    dtype: torch.dtype
    options: dict[str, Any]  # of the optimizer
    groups: list[dict[str, Any]]
    frozen: float
    coupled: bool
    moved: tuple[str, ...]
    clip: bool
    accumulate: int
    set_to_none: bool
    autocast: str
    loss: str
    wrapped: bool
    warm: int
    trap: str
    parts: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"seed {self.seed}: {', '.join(self.parts)}"


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    chance = rng.random
    model = rng.choice([*VECTORS, *VECTORS, *SEQUENCES])
    trap = rng.choice(TRAPS) if chance() < TRAPPED else ""
    dtypes = [torch.float32, torch.float32, torch.float64]
    made = Draw(
        seed=seed,
        model=model,
        dtype=rng.choice([*dtypes, torch.bfloat16] if model in ("mlp", "relu", "dropout") else dtypes),
        options=_optimizer_options(rng),
        groups=[_hypers(rng) for _ in range(rng.choice([1, 1, 2, 3]))],
        frozen=rng.choice([0, 0, 0, 0.3]),
        coupled=chance() < 0.3,
        moved=tuple(n for n in ("lr", "weight_decay", "eps", "betas") if chance() < 0.4) if chance() < 0.4 else (),
        clip=chance() < 0.35,
        accumulate=rng.choice([1, 1, 1, 2, 3]),
        set_to_none=chance() < 0.75,
        autocast=rng.choice(["", "", "", "inside", "around"]),
        loss=rng.choice(["", "", "noisy", "smoothed", "branching"]),
        wrapped=chance() < 0.15,
        warm=rng.choice([0, 1, 3]),
        trap=trap,
    )
    _reconcile(made)
    made.parts = _words(made)
    return made


def _optimizer_options(rng: random.Random) -> dict[str, Any]:
    options = rng.choice([{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
    return {**options, "maximize": rng.random() < 0.15, "tensor": rng.random() < 0.15 and "foreach" not in options}


def _hypers(rng: random.Random) -> dict[str, Any]:
    return {
        "lr": rng.choice([1e-3, 1e-2]),
        "weight_decay": rng.choice([0.0, 0.01, 0.2]),
        "betas": (rng.choice([0.8, 0.9]), rng.choice([0.95, 0.999])),
        "eps": rng.choice([1e-8, 1e-5]),
    }


def _reconcile(made: Draw) -> None:
    """Parts that cannot stand together in plain torch, or a trap that would not be one."""
    if made.trap in ("zeros for unused heads", "nothing for unused heads"):
        made.model, made.set_to_none = HEADS, made.trap.startswith("nothing")
    if made.model in (HEADS, "unused head"):
        made.frozen = 0  # a batch might use frozen parameters only
    if made.model in SEQUENCES:
        made.loss = ""
    if made.dtype != torch.float32 or made.trap == "autocast outside capture":
        made.autocast = ""
    if made.trap == "autocast outside capture":
        made.dtype = torch.float32
    if made.autocast == "inside":
        made.loss = ""
    if made.trap in ("untold clipping", "clipping by value"):
        made.clip = False
    if made.trap == "untold schedule":
        made.moved = made.moved or ("lr",)
    if made.trap in ("lr by hand", "weight decay by hand", "Lookahead"):
        made.moved = ()
    if made.trap in ("random in loss_fn", "numpy in loss_fn", "forward hook", "backward hook"):
        made.model, made.loss = "mlp", ""
    if made.trap in ("loader draws", "validation before capture"):
        made.model = "dropout"
    if made.trap == "validation before capture":
        made.warm = 3
    if made.trap in ("lr by hand", "Lookahead"):
        made.options["tensor"] = False


def _words(made: Draw) -> list[str]:
    options = [name if value is True else f"{name}={value}" for name, value in made.options.items() if value]
    return [
        made.model, str(made.dtype).removeprefix("torch."), "Adam" if made.coupled else "AdamW", *options,
        *([f"{len(made.groups)} groups"] if len(made.groups) > 1 else []),
        *(["frozen part"] if made.frozen else []), *[f"scheduled {name}" for name in made.moved],
        *(["clipped"] if made.clip else []), *([f"{made.accumulate} micro-batches"] if made.accumulate > 1 else []),
        *([] if made.set_to_none else ["zero_grad to zeros"]),
        *([f"autocast {made.autocast}"] if made.autocast else []), *([made.loss] if made.loss else []),
        *(["DataParallel"] if made.wrapped else []),
        f"{made.warm} warm steps", *([f"TRAP {made.trap}"] if made.trap else []),
    ]  # fmt: skip


# --- from a draw to a loop


def build(made: Draw) -> Loop:
    sequence = made.model in SEQUENCES
    model = {**SEQUENCES, **VECTORS, HEADS: models.Heads}[made.model]().to(made.dtype)
    _freeze(model, made)
    around = tricks.bfloat16 if made.autocast == "around" or made.trap == "autocast outside capture" else None
    within = tricks.bfloat16 if made.autocast == "around" else None
    loop = Loop(
        nn.DataParallel(model) if made.wrapped else model,
        _optimizer(model, made),
        _loss(made),
        losses.tokens if sequence else losses.classes(dtype=made.dtype),
        set_to_none=made.set_to_none,
        accumulate=made.accumulate,
        warm=made.warm,
        **({"around": around} if around else {}),
        **({"capture_within": within} if within else {}),
    )
    if made.moved:
        loop.box.scheduler = Schedule(loop.optimizer, made.moved)
    _set(loop, made)
    return loop


def _freeze(model: nn.Module, made: Draw) -> None:
    rng = random.Random(made.seed)
    parameters = list(model.parameters())
    for p in parameters[:-2]:  # the last layer always trains
        p.requires_grad_(rng.random() >= made.frozen)


def _optimizer(model: nn.Module, made: Draw) -> Any:
    rng = random.Random(made.seed)
    kept = [p for p in model.parameters() if p.requires_grad or rng.random() < 0.5]
    places = [rng.randrange(len(made.groups)) for _ in kept]
    options = {name: value for name, value in made.options.items() if name != "tensor"}
    groups = []
    for i, hypers in enumerate(made.groups):
        members = [p for p, place in zip(kept, places) if place == i]
        lr = torch.tensor(hypers["lr"]) if made.options["tensor"] else hypers["lr"]
        groups += [{**hypers, "params": members, "lr": lr}] if members else []
    cls: Any = torch.optim.Adam if made.coupled else torch.optim.AdamW
    cls = {"disguised step": Disguised, "subclass step": Shrinking}.get(made.trap, cls)
    optimizer = cls(groups, amsgrad=made.trap == "amsgrad", **options)
    if made.trap in ("step pre-hook", "step post-hook"):
        _register(optimizer, made.trap)
    return Lookahead(optimizer) if made.trap == "Lookahead" else optimizer


def _register(optimizer: torch.optim.Optimizer, trap: str) -> None:
    @torch.no_grad()
    def change(*_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                target = p.grad if trap == "step pre-hook" else p
                if target is not None:
                    target.mul_(0.9)

    getattr(optimizer, f"register_{trap.replace(' ', '_').replace('-', '_')}")(change)


def _loss(made: Draw) -> Callable[[nn.Module, Any], Any]:
    if made.trap == "random in loss_fn":
        return losses.rare_mixup
    if made.trap == "numpy in loss_fn":
        return losses.numpy_mixup
    plain: Any = losses.next_token if made.model in SEQUENCES else losses.cross_entropy
    if made.autocast == "inside":
        return lambda model, batch: _under_autocast(plain, model, batch)
    return {"": plain, "noisy": losses.noisy, "smoothed": losses.smoothed, "branching": losses.branching}[made.loss]


def _under_autocast(loss_fn: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
    with tricks.bfloat16():
        return loss_fn(model, batch)


def _set(loop: Loop, made: Draw) -> None:
    """What the loop does around its steps, and what of it aftershock is told."""
    edits: dict[str, Callable[[Loop], None]] = {
        "untold clipping": lambda x: tricks.clipped(x, 0.05),
        "clipping by value": tricks.clipped_by_value,
        "gradient noise": tricks.gradient_noise,
        "edited gradients": tricks.edited,
    }
    afters: dict[str, Callable[[Loop], None]] = {
        "weights shrunk": tricks.shrink,
        "moments reset": tricks.forget,
        "weight decay by hand": lambda x: _by_hand(x, "weight_decay", 0.1),
        "lr by hand": lambda x: _by_hand(x, "lr", 1e-3),
        "loader draws": tricks.loader_draws,
        "validation before capture": tricks.after_validation,
    }
    edit, after = edits.get(made.trap), afters.get(made.trap)
    clip, scheduled = made.clip, bool(made.moved)

    def edit_all(x: Loop) -> None:
        _ = edit and edit(x)
        _ = clip and tricks.clipped(x, CLIP)

    def after_all(x: Loop) -> None:
        _ = scheduled and x.box.scheduler.step()
        _ = after and after(x)

    loop.edit, loop.after = edit_all, after_all
    told_schedule = scheduled and made.trap != "untold schedule"
    loop.told = lambda x: {**({"clip": CLIP} if clip else {}), **({"lr": x.box.scheduler} if told_schedule else {})}
    if made.trap == "validation before capture":
        loop.update = tricks.training_mode
    if made.trap == "looking hook":
        next(loop.core.children()).register_forward_hook(tricks.ignored)
    if made.trap in ("forward hook", "backward hook"):
        kind = {"forward hook": "forward_pre_hook", "backward hook": "full_backward_hook"}[made.trap]
        getattr(loop.core[3], f"register_{kind}")(tricks.doubled)  # type: ignore[index]


def _by_hand(loop: Loop, name: str, more: float) -> None:
    for group in loop.optimizer.param_groups:
        group[name] = group[name] + more


# --- judging


@dataclass(frozen=True)
class Judged:
    draw: Draw
    verdict: Verdict

    @property
    def failed(self) -> bool:
        """A draw without a trap must be equal, not merely refused."""
        return self.verdict.outcome not in (EQUAL, REFUSED, NOTICED) or (
            not self.draw.trap and self.verdict.outcome != EQUAL
        )


def run(seeds: Iterable[int]) -> Iterator[Judged]:
    """Judge the draws of these seeds."""
    for seed in seeds:
        made = draw(seed)
        yield Judged(made, judge(lambda made=made: build(made)))  # type: ignore[misc]


def shares(judged: list[Judged]) -> Table:
    table = Table(title=f"{len(judged)} draws", title_justify="left")
    kinds = sorted({j.verdict.outcome for j in judged})
    for name in ("trap", *kinds):
        table.add_column(name, justify="left" if name == "trap" else "right")
    counts = Counter((j.draw.trap, j.verdict.outcome) for j in judged)
    for trap in sorted({j.draw.trap for j in judged}):
        table.add_row(trap or "none", *[str(counts[trap, kind] or "") for kind in kinds])
    totals = Counter(j.verdict.outcome for j in judged)
    table.add_row("share of all", *[f"{totals[kind] / len(judged):.1%}" for kind in kinds])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw; the others count on from it")
    parser.add_argument("--recorded", action="store_true", help="play back the passes of every model, however small")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(DEVICE.type == "cuda", warn_only=True)  # else two plain runs differ
    if options.recorded:
        playback.LARGE = 0
    warnings.simplefilter("ignore")
    console = Console() if sys.stdout.isatty() else Console(width=160)
    began, judged = time.perf_counter(), []
    for found in run(range(options.seed, options.seed + options.draws)):
        judged.append(found)
        if found.failed:
            console.print(f"{found.draw}\n    {found.verdict.outcome}: {found.verdict.detail}", markup=False)
            console.print(f"    again: python -m benchmarks.fuzz --draws 1 --seed {found.draw.seed}", markup=False)
    console.print(shares(judged))
    failures = sum(found.failed for found in judged)
    console.print(f"{failures} failed; {time.perf_counter() - began:.0f} s, torch {torch.__version__}, {DEVICE}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
