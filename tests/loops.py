"""Training loops as strangers write them, and the judge who compares aftershock with them from outside.

The truth is the loop itself, built again from the same seed and run by plain torch: aftershock never sees that run.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.core.batches import Accumulated

from .loop_losses import DEVICE

WARM, STEPS, AT = 3, 5, 1  # updates before capture, updates followed, and the one of them that is changed
# of the largest loss: rows that run together on a GPU round otherwise than alone
ROWS = 0.0 if DEVICE.type == "cpu" else 1e-3
LOUD = 10.0  # the replacement batch is this much larger: its response must be far above rounding

# what may come of a loop; the last three are failures wherever they occur
EQUAL, REFUSED, NOTICED = "equal", "refused", "noticed"
SILENT, DISTURBED, CRASHED = "silent mismatch", "the live run was disturbed", "crashed"


@dataclass
class Loop:
    """A live run: what a user has, the loop that they wrote, and what they tell aftershock about it."""

    model: nn.Module
    optimizer: Any  # what is handed to capture
    loss_fn: Callable[[nn.Module, Any], Any]
    draw: Callable[[], Any]
    edit: Callable[[Loop], None] = lambda loop: None  # between backward and step
    after: Callable[[Loop], None] = lambda loop: None  # after step
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # forward pass
    capture_within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    update: Callable[[Loop, Any], Tensor] | None = None  # another loop than the plain one
    capturing: dict[str, Any] = field(default_factory=dict)  # options of capture
    told: Callable[[Loop], dict[str, Any]] = lambda loop: {}  # options of follow
    probe: Callable[[nn.Module], Any] | None = None
    set_to_none: bool = True
    accumulate: int = 1
    warm: int = WARM
    box: SimpleNamespace = field(default_factory=SimpleNamespace)  # schedulers, averages, counters of the user's
    taken: int = 0

    @property
    def core(self) -> nn.Module:
        """The module inside wrappers, by whose names parameters are known."""
        model = self.model
        while isinstance(model, nn.DataParallel) or hasattr(model, "_orig_mod"):
            model = model.module if isinstance(model, nn.DataParallel) else model._orig_mod
        return model

    def batch(self) -> Any:
        many = [self.draw() for _ in range(self.accumulate)]
        return many[0] if self.accumulate == 1 else ak.accumulate(many)

    def train_step(self, batch: Any) -> float:
        loss = (self.update or plain_update)(self, batch)
        self.after(self)
        self.taken += 1
        return float(loss)


def plain_update(loop: Loop, batch: Any) -> Tensor:
    """zero_grad, forward, backward, step, with micro-batches where there are some."""
    loop.optimizer.zero_grad(set_to_none=loop.set_to_none)
    micro = batch.batches if isinstance(batch, Accumulated) else (batch,)
    total: Tensor | None = None
    for part in micro:
        with loop.around():
            loss = loop.loss_fn(loop.model, part)
        loss = loss / len(micro) if len(micro) > 1 else loss
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    loop.edit(loop)
    loop.optimizer.step()
    assert total is not None
    return total


# --- running


@dataclass(frozen=True)
class Moment:
    """Everything of a plain run after one step."""

    loss: float
    theta: dict[str, Tensor]
    m: dict[str, Tensor | None]
    v: dict[str, Tensor | None]
    counts: dict[str, int]
    buffers: dict[str, Tensor]
    probe: float


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator that users' loops draw from


def begin(build: Callable[[], Loop]) -> tuple[Loop, list[Any], Any]:
    """A warm run, the batches that come next, and a loud batch for the place of one of them."""
    seed_all(0)
    with DEVICE:
        loop = build()
        warm, batches, other = [[loop.batch() for _ in range(n)] for n in (loop.warm, STEPS, 1)]
    for batch in warm:
        loop.train_step(batch)
    seed_all(1)
    return loop, batches, _louder(other[0])


def train(loop: Loop, batches: Sequence[Any]) -> list[Moment]:
    start = _random_state()
    return [_moment(loop, loop.train_step(batch), start) for batch in batches]


def _moment(loop: Loop, loss: float, start: tuple[Any, ...]) -> Moment:
    named = dict(loop.core.named_parameters())
    inner = getattr(loop.optimizer, "optimizer", loop.optimizer)
    states = {name: inner.state.get(p, {}) for name, p in named.items()}

    def moments(key: str) -> dict[str, Tensor | None]:
        return {n: None if key not in state else state[key].detach().clone() for n, state in states.items()}

    return Moment(
        loss,
        {n: p.detach().clone() for n, p in named.items()},
        moments("exp_avg"),
        moments("exp_avg_sq"),
        {n: int(state.get("step", 0)) for n, state in states.items()},
        {n: b.detach().clone() for n, b in loop.core.named_buffers()},
        _read(loop, start),
    )


def _read(loop: Loop, start: tuple[Any, ...]) -> float:
    """The probe by hand, on a copy, with the random state that the run had at capture."""
    if loop.probe is None:
        return 0.0
    for module in loop.model.modules():  # weight_norm leaves a tensor with a graph, which cannot be copied
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())
    now = _random_state()
    _install(start)
    found = float(loop.probe(copy.deepcopy(loop.model)))
    _install(now)
    return found


def _random_state() -> tuple[Any, ...]:
    drawn = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else [])]
    return drawn, random.getstate(), np.random.get_state()  # noqa: NPY002


def _install(state: tuple[Any, ...]) -> None:
    for install, drawn in zip((torch.set_rng_state, torch.cuda.set_rng_state), state[0]):
        install(drawn)
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002


def _louder(batch: Any) -> Any:
    """The same batch with its floating-point tensors scaled, where it is made of tensors."""
    if isinstance(batch, Accumulated):
        return ak.accumulate([_louder(part) for part in batch.batches])
    if isinstance(batch, tuple):
        return tuple(_louder(part) for part in batch)
    if isinstance(batch, Tensor):
        return batch * LOUD if batch.is_floating_point() else batch
    return batch


# --- the judge


@dataclass(frozen=True)
class Verdict:
    outcome: str
    detail: str = ""


def judge(build: Callable[[], Loop], *, rounding: float = 0.0) -> Verdict:
    """What came of a loop. `rounding`: how far, relative to each tensor's largest entry, a run may be from the truth.

    A loop counts as equal only where follow gave the run's own numbers step by step, an exact response is the
    difference of two plain runs, a change of nothing has no response at all, and following twice gives the same.
    """
    live, batches, other = begin(build)
    before = _random_state()
    try:
        with live.capture_within():
            point = ak.capture(live.model, live.optimizer, live.loss_fn, **live.capturing)
        path = point.follow(batches, **live.told(live))
    except ak.AftershockError as error:
        return Verdict(REFUSED, f"{type(error).__name__}: {error}")
    except Exception as error:
        return Verdict(CRASHED, f"{type(error).__name__}: {error}")
    moved = not _same_random(before, _random_state())
    seen = train(live, batches)
    matched, said = _matches(path, live)
    truth = train(*begin(build)[:2])
    if moved or _first_difference(seen, truth):
        where = "its random state moved" if moved else _first_difference(seen, truth)
        return Verdict(DISTURBED, str(where))
    try:
        parted = _path_difference(path, truth, rounding)
        parted = parted or _response_difference(path, build, other, truth, max(rounding, ROWS))
    except ak.AftershockError as error:
        return Verdict(REFUSED, f"only after follow: {type(error).__name__}: {error}")
    except Exception as error:
        return Verdict(CRASHED, f"{type(error).__name__}: {error}")
    again = begin(build)[0]
    parted = parted or (
        "" if point.follow(batches, **again.told(again)).losses == path.losses else "following twice differs"
    )
    if not parted:
        return Verdict(SILENT, f"false alarm: {said}") if matched is False and not rounding else Verdict(EQUAL)
    return Verdict(NOTICED, f"{parted}; {said}") if matched is False else Verdict(SILENT, parted)


def _matches(path: ak.Path, live: Loop) -> tuple[bool | None, str]:
    """What `path.matches` says of the live run right after its steps; None where it does not exist yet."""
    if not hasattr(path, "matches"):
        return None, ""
    try:
        found = path.matches(live.model, live.optimizer)
    except ak.AftershockError as error:  # it cannot compare, and says why
        return False, f"{type(error).__name__}: {error}"
    return bool(found), str(found)


def _same_random(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(map(torch.equal, a[0], b[0])) and a[1] == b[1] and all(np.array_equal(x, y) for x, y in zip(a[2], b[2]))


def _first_difference(a: list[Moment], b: list[Moment]) -> str:
    for step, (x, y) in enumerate(zip(a, b)):
        if (x.loss, x.probe, x.counts) != (y.loss, y.probe, y.counts):
            return f"step {step}: loss {x.loss} and {y.loss}"
        for part in ("theta", "m", "v", "buffers"):
            for name, tensor in getattr(x, part).items():
                found = _apart(tensor, getattr(y, part)[name])
                if found:
                    return f"step {step}: {part} of {name} {found}"
    return ""


def _apart(a: Tensor | None, b: Tensor | None, rounding: float = 0.0) -> str:
    """How two tensors differ, in words; empty where they do not."""
    if a is None and b is None:
        return ""
    a, b = (torch.zeros_like(a if b is None else b) if x is None else x for x in (a, b))
    if a.shape != b.shape or torch.equal(a.to(b.dtype), b):
        return "" if a.shape == b.shape else f"has shape {tuple(a.shape)}, not {tuple(b.shape)}"
    gap, size = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
    return "" if gap <= rounding * size else f"differs by {gap:.3g} of {size:.3g}"


def _path_difference(path: ak.Path, truth: list[Moment], rounding: float) -> str:
    """The first step and quantity at which a path is not the plain run."""
    layout, constants = path.point.loss.layout, path.point.loss.constants
    for step, moment in enumerate(truth):
        if abs(path.losses[step] - moment.loss) > rounding * abs(moment.loss):
            return f"step {step}: loss {path.losses[step]!r} instead of {moment.loss!r}"
        state = path.trajectory.state(step + 1)
        views = {part: layout.by_name(getattr(state, part)) for part in ("theta", "m", "v")}
        counts = dict(zip(layout.names, state.counts))
        for name, theta in moment.theta.items():
            if name not in views["theta"]:
                found = _apart(constants[name], theta) if name in constants else "is new"
                if found:
                    return f"step {step}: constant {name} {found}"
                continue
            for part, expected in (("theta", theta), ("m", moment.m[name]), ("v", moment.v[name])):
                found = _apart(views[part][name], expected, rounding)
                if found:
                    return f"step {step}: {part} of {name} {found}"
            if counts[name] != moment.counts[name]:
                return f"step {step}: {name} was stepped {counts[name]} times instead of {moment.counts[name]}"
        for name, buffer in moment.buffers.items():
            found = _apart(state.buffers[name], buffer, rounding)
            if found:
                return f"step {step}: buffer {name} {found}"
    return ""


def _response_difference(
    path: ak.Path, build: Callable[[], Loop], other: Any, truth: list[Moment], rounding: float
) -> str:
    """Exact responses against a second plain run, and of changes of nothing."""
    loop, batches, loud = begin(build)
    second = train(loop, [*batches[:AT], loud, *batches[AT + 1 :]])
    probes: list[tuple[Any, str]] = [(ak.own_loss, "loss")] if loop.probe is None else [(loop.probe, "probe")]
    for probe, read in [*probes, (ak.own_loss, "loss")]:  # the second asking finds what the first has left behind
        found = path.replace([other], at=AT).response(probe, answers=("exact",)).exact.values.reshape(-1).tolist()
        first = AT if read == "probe" else AT + 1
        wanted = [getattr(x, read) - getattr(y, read) for x, y in zip(second[first:], truth[first:])]
        # each of the four losses may be off by its rounding where the path is within rounding only
        allowed = 4 * rounding * max(abs(getattr(x, read)) for x in (*second, *truth))
        if any(abs(a - b) > allowed for a, b in zip(found, wanted)):
            return f"the exact response of the {read} is {found} instead of {wanted}"
    nothing = [path.replace([path.steps[AT].batch], at=AT)]
    rates = {float(hyper.lr) for hyper in path.steps[AT].hypers}
    nothing += [path.set(AT, lr=rates.pop())] if len(rates) == 1 else []
    for change in nothing:
        if change.response(probes[0][0], answers=("exact",)).exact.values.any():
            return f"a change of nothing ({change.kind}) has a response"
    return ""
