"""`doctor`: what of a model and its optimizer is supported, how exactly, and what recording it would cost."""

from __future__ import annotations

import contextlib
import copy
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..api.point import TrainingPoint, capture
from ..core.capture import unwrapped
from ..core.kinks import is_rough
from ..core.memory import readable
from ..core.randomness import restored_random
from ..errors import AftershockError, UnsupportedOptimizer
from ..recorder.draws import REMEDY, drawn_before_the_model
from ..recorder.recorder import FlightRecorder
from ..recorder.records import encode
from ..recorder.replay import replay
from ..recorder.store import open_flight
from .building import Built
from .findings import Finding

STEPS = 8  # recorded, and as many without a recorder before and after them
PATIENCE = 2.0  # seconds: a model whose step takes longer is run for fewer steps
FEW_STEPS = 3
LOW = {torch.float16, torch.bfloat16}
NORMALIZATIONS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
RANDOM = ("native_dropout", "_fused_dropout", "bernoulli", "rrelu_with_noise")


def examine(built: Built) -> list[Finding]:
    """Run the model on private copies and say what is supported, approximated and refused.

    The model, the optimizer, the batch and torch's random state stay as they are. Costs about 10 gradients for the
    check, and up to 24 training steps.
    """
    device = next((p.device for p in built.model.parameters()), torch.device("cpu"))
    with restored_random(device):
        said: dict[str, Finding] = {}
        for finding in _examined(built):
            said.setdefault(finding.text, finding)
        return list(said.values())


def _examined(built: Built) -> list[Finding]:
    assert built.optimizer is not None
    try:
        point = capture(built.model, built.optimizer, built.loss_fn, constant=built.constant)
    except UnsupportedOptimizer as error:
        return [Finding("optimizer", "refused", str(error)), *_with_adamw(built)]
    except AftershockError as error:
        return [Finding("model and optimizer", "refused", str(error)), *_model(built)]
    return [*_optimizer(point, built), *_model(built), *_looked_at(point, built)]


def _with_adamw(built: Built) -> list[Finding]:
    """What else there is to say of a model whose optimizer is refused."""
    if isinstance(built.optimizer, torch.optim.AdamW):
        return list(_model(built))  # one of its options is refused: nothing can stand in its place
    instead = torch.optim.AdamW([p for p in built.model.parameters() if p.requires_grad])
    rest = [found for found in _examined(replace(built, optimizer=instead)) if found.subject != "optimizer"]
    return [Finding("in its place", "note", "AdamW with its own defaults was taken, to look at the rest"), *rest]


def _looked_at(point: TrainingPoint, built: Built) -> Iterator[Finding]:
    """What running it shows; one thing that is refused does not hide the next."""
    looks: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("model", lambda: _operations(point, built.batch)),
        ("Hessian products", lambda: [_hessian(point, built.batch)]),
        ("recording", lambda: _recording(point, built)),
    )
    for subject, look in looks:
        try:
            yield from look()
        except AftershockError as error:
            yield Finding(subject, "refused", str(error))


# --- what can be read off


def _optimizer(point: TrainingPoint, built: Built) -> Iterator[Finding]:
    hypers = point.captured.hypers
    kinds = {"AdamW" if h.decoupled else "Adam with coupled decay" if h.weight_decay else "Adam" for h in hypers}
    flags = [name for name in ("fused", "foreach", "capturable", "maximize") if any(getattr(h, name) for h in hypers)]
    numbers = [f"lr {float(h.lr):g}, β {h.beta1:g} and {h.beta2:g}, decay {h.weight_decay:g}" for h in hypers[:3]]
    text = f"{' and '.join(sorted(kinds))} in {len(hypers)} group(s): {'; '.join(numbers)}"
    yield Finding("optimizer", "supported", text + (f" ({', '.join(flags)})" if flags else ""))
    if built.train_step is None:
        yield Finding(
            "clipping",
            "note",
            "cannot be seen from here: where the loop clips by the global norm, tell the recorder clip=max_norm; "
            "clipping by value is refused",
        )


def _model(built: Built) -> Iterator[Finding]:
    model = built.model
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in model.modules()):
        yield Finding(
            "torch.compile", "approximated", "the analysis runs the model uncompiled, whose kernels round differently"
        )
    names = Counter(id(p) for _, p in unwrapped(model).named_parameters(remove_duplicate=False))
    tied = sum(count > 1 for count in names.values())
    if tied:
        yield Finding("tied weights", "supported", f"{tied} parameter(s) are used under several names")
    if not model.training:
        yield Finding("mode", "note", "the model is in eval mode; call model.train() in build() if training does")
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind not in (None, "eager", "sdpa"):
        yield Finding("attention", "refused", f'attn_implementation="{kind}" has no second derivative: set "eager"')


class _Asked(TorchFunctionMode):
    """Is attention asked for? Its math backend is made of ordinary operations, and leaves no name below."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention |= func is torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _Seen(TorchDispatchMode):
    """The operations of one forward pass: names, kinks, and low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.kinks: Counter[str] = Counter()
        self.low: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        self.names[name] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors and is_rough(name, args, kwargs or {}):
            self.kinks[name] += 1
        self.low |= LOW & {tensor.dtype for tensor in tensors}
        return func(*args, **(kwargs or {}))


def _operations(point: TrainingPoint, batch: Any) -> Iterator[Finding]:
    """What one gradient runs through."""
    seen, asked, state = _Seen(), _Asked(), point.captured.state

    @contextlib.contextmanager
    def watched(model: nn.Module) -> Iterator[None]:
        with seen, asked:
            yield

    loss = point.loss.within(watched)
    loss.gradient(state.theta, state.buffers, batch, point.captured.random, "the batch")
    fast = [name for name in seen.names if name.startswith("_scaled_dot_product_")]
    if asked.attention and not fast:
        yield Finding("attention", "supported", "scaled dot-product attention runs as math, which has all derivatives")
    if fast:
        backend = ", ".join(name.removeprefix("_scaled_dot_product_") for name in fast)
        yield Finding(
            "attention",
            "approximated",
            f"runs as {backend}; the replay too, to the bit. Hessian products run as math, which agrees to rounding "
            "(about 3e-7 in float32)",
        )
    if any(name in seen.names for name in RANDOM):
        yield Finding(
            "dropout",
            "supported",
            "masks are replayed from the recorded random state; explain tries examples of a batch one by one, "
            "rank_examples refuses",
        )
    if drawn_before_the_model(
        point.loss, point.loss.leaves(state.theta), state.buffers, copy.deepcopy(batch), point.captured.random
    ):
        yield Finding("random numbers", "supported", f"loss_fn draws them before it calls the model: {REMEDY}")
    if any(name in seen.names for name in NORMALIZATIONS) and point.loss.model.training:
        yield Finding(
            "batch normalization",
            "supported",
            "running statistics are carried exactly; examples depend on each other: explain tries those of a batch one "
            "by one, rank_examples refuses; linear answers for a probe in eval mode are refused",
        )
    if seen.kinks:
        listed = ", ".join(f"{name} ×{count}" for name, count in seen.kinks.most_common(4))
        yield Finding("kinks", "approximated", f"{listed}: a linear prediction holds until a unit switches")
    if seen.low:
        kinds = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in seen.low))
        yield Finding(
            "precision", "approximated", f"parts run in {kinds}: replays are exact, linear predictions rounded to it"
        )


def _hessian(point: TrainingPoint, batch: Any) -> Finding:
    """Hessian products against differences of the gradient, and the same gradient twice."""
    found = point.check(batch)
    return Finding("Hessian products", "supported" if found.replay_noise == 0 else "approximated", str(found))


# --- what must be tried


def _recording(point: TrainingPoint, built: Built) -> Iterator[Finding]:
    """Train a copy for a few steps, record it, replay it."""
    model, optimizer = copy.deepcopy((unwrapped(built.model), built.optimizer))
    assert optimizer is not None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if not torch.isfinite(built.loss_fn(model, copy.deepcopy(built.batch))).all():
                return  # that is said already, and a replay would blame the loop for it
            plain = _train(model, optimizer, built, FEW_STEPS)
            steps = STEPS if max(plain) < PATIENCE else FEW_STEPS
            plain = _train(model, optimizer, built, steps)
            start = time.perf_counter()
            with FlightRecorder(
                model, optimizer, built.loss_fn, folder, window=steps, triggers=(), constant=built.constant
            ) as recorder:
                recorder.wait()  # the first state is on disk
                saving = time.perf_counter() - start
                recorded = _train(model, optimizer, built, steps, recorder)
                whole = recorder.recording
            plain += _train(model, optimizer, built, steps)
        except AftershockError:
            raise
        except Exception as error:
            yield Finding("training", "refused", f"loss_fn or the optimizer failed: {type(error).__name__}: {error}")
            return
        stopped = [str(w.message) for w in said if "flight recorder" in str(w.message)]
        if not whole or stopped:
            yield Finding("recording", "refused", stopped[0] if stopped else "the recorder stopped")
            return
        yield _cost(point, built, plain, recorded, saving)
        yield _replayed(Path(folder), built)
    yield from _untouched(optimizer)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, built: Built, steps: int, recorder: FlightRecorder | None = None
) -> list[float]:
    """Seconds of each step."""
    times = []
    for _ in range(steps):
        batch = copy.deepcopy(built.batch)
        start = time.perf_counter()
        if recorder is not None:
            recorder.before_forward()
        loss = built.loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step(batch, loss)
        loss.item()  # on a GPU, the end of the step
        times.append(time.perf_counter() - start)
    return times


def _cost(point: TrainingPoint, built: Built, plain: list[float], recorded: list[float], saving: float) -> Finding:
    ring = sum(tensor.nbytes for tensor in encode(built.batch)[1])
    usual, with_recorder = statistics.median(plain), statistics.median(recorded)
    return Finding(
        "recording",
        "supported",
        f"a step takes {1e3 * usual:.1f} ms, recorded {1e3 * with_recorder:.1f} ms ({with_recorder / usual - 1:+.0%}, "
        f"medians of {len(plain)} and {len(recorded)} steps). On disk {readable(ring)} per batch and "
        f"{readable(point.captured.state.nbytes)} per state, written once a window in a thread ({1e3 * saving:.0f} ms)",
    )


def _replayed(folder: Path, built: Built) -> Finding:
    flight = open_flight(folder)
    records = list(flight.records.values())
    try:
        found = replay(records, len(records), flight.states, built.model, built.loss_fn)
    except AftershockError as error:
        return Finding("replay", "refused", str(error))
    return Finding("replay", "supported" if found.deviation == 0 else "approximated", str(found))


def _untouched(optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """Coordinates that no gradient has reached."""
    second = [state["exp_avg_sq"] for state in optimizer.state.values() if "exp_avg_sq" in state]
    total, zero = sum(v.numel() for v in second), sum(int((v == 0).sum()) for v in second)
    if zero:
        yield Finding(
            "v = 0",
            "approximated",
            f"{zero:,} of {total:,} coordinates ({zero / total:.1%}) got no gradient: the tangent there is right for "
            "tiny changes only; use the exact or semilinear answer",
        )
