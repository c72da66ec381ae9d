"""`Path`: the run from a point on, where changes are made and steps are ranked and explained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.agreement import Match, compare, read_live, steps_made
from ..core.batches import Batch, alike
from ..core.changes import ControlStep, Edit, Perturb, Replace, Reset, SetHyper, Skip, Zero
from ..core.dynamics import Step
from ..core.given import whole
from ..core.guards import Check, hidden_buffers, moved_buffers
from ..core.operators import Propagator, ResponseOperator, Transition, WriteIn
from ..core.probe import Watch
from ..core.responses import first_lost
from ..core.trajectory import Trajectory
from ..errors import (
    AftershockError,
    HiddenState,
    InvalidInput,
    Nondeterministic,
    UnsupportedAttention,
    UnsupportedModel,
    WrongHessian,
)
from .change import Change
from .contributions import Contributions, explain
from .contributions import estimate as estimate_explain
from .examples import ExampleRanking, rank_examples
from .examples import estimate as estimate_rank_examples
from .progress import Estimate
from .ranking import Ranking, estimate, rank
from .reruns import VERIFY
from .schedule import values_of

if TYPE_CHECKING:
    from .point import TrainingPoint

SUSPECTS = 3  # steps that are checked where an exact run and its prediction have parted
SETTABLE = ("lr", "beta1", "beta2", "eps", "weight_decay")
CHANNEL_NAMES: Mapping[str, tuple[str, ...]] = {"m": ("m",), "v": ("v",), "mv": ("m", "v")}


class Path:
    """Every step from a training point on, made by `point.follow`. The batch at a changed step is the control.

    A change is made with `replace`, `perturb`, `skip`, `zero`, `set` or `reset`; it costs nothing until it is asked for
    its response.

    >>> path
    Path(4 steps from step 40, loss 0.5006 → 0.5741, keeps states)
    >>> path.losses[3] == path.steps[3].loss, path.end.step
    (True, 44)
    """

    def __init__(self, point: TrainingPoint, trajectory: Trajectory, memory: str | int | None) -> None:
        self.point = point
        self.trajectory = trajectory
        self.memory = trajectory.memory = memory
        self._proofs: dict[int, Check | AftershockError] = {}
        self._equal_until: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # steps that `matches` has proved

    def __len__(self) -> int:
        return len(self.trajectory)

    def __repr__(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return (
            f"Path({len(self)} steps from step {self.point.step}, loss {first.loss:.4g} → {last.loss:.4g}, "
            f"keeps {self.trajectory.keep})"
        )

    @property
    def steps(self) -> list[Step]:
        """Each step with its batch, learning rates, loss, gradient norm and clip factor.

        >>> [round(step.clip.norm, 3) for step in path.steps]
        [0.393, 0.518, 0.394, 0.2]
        """
        return self.trajectory.steps

    @property
    def losses(self) -> list[float]:
        """The training loss of each step, on its own batch.

        >>> [round(loss, 3) for loss in path.losses]
        [0.501, 0.641, 0.464, 0.574]
        """
        return [step.loss for step in self.steps]

    @property
    def end(self) -> TrainingPoint:
        """The training point after the last step.

        >>> path.point.step, path.end.step
        (40, 44)
        """
        from .point import TrainingPoint

        captured = self.point.captured
        state = self.trajectory.state(len(self))
        return TrainingPoint(replace(captured, state=state, random=self.trajectory.random_after))

    def matches(self, model: nn.Module, optimizer: Optimizer) -> Match:
        """Is the live run, after its first k ≤ len(path) steps on the path's batches, equal to the path to the bit?

        `model` and `optimizer` are those that were captured; k is read from their step counts. Weights, moments,
        counts, buffers, hyperparameters and, where a step draws numbers, the random state are compared. Where they
        differ, the result names the step, the parameter, the quantity and the likely cause. Called after every step it
        names the first; called once at the end, it tells less. Costs a comparison of every number, and a few gradients
        where they differ.

        >>> for batch in batches[:4]:
        ...     loss = train_step(batch)
        >>> print(path.matches(model, optimizer))
        The live run and the path are equal to the bit after 4 step(s).
        """
        live = read_live(model, optimizer, self.trajectory)
        made = steps_made(self.trajectory, live)
        since = min(self._equal_until.get(model, 0), made - 1)
        found = compare(self.trajectory, live, made, since)
        if found:
            self._equal_until[model] = made
        return found

    def check(self) -> Check:
        """Prove that Hessian products of this model are right; made by itself before the first predicted answer.

        It looks at the first, a middle and the last step, each with its own batch, state and random state. At the first
        a product is compared with a difference of gradients and with its transpose, and a gradient with itself run
        again: about 8 gradients; at the others, with the difference alone: about 4. A path is checked once, and a check
        that failed is not repeated.

        >>> path.check().error < 1e-6, path.check().steps
        (True, (0, 1, 3))
        """
        return self._checked

    def check_before(self, at: int, outcome: int | None) -> None:
        """The same check at the last few steps before state `outcome`, where the response to a change at step `at` and
        its prediction disagree: one of their Hessians may be wrong. Nothing where `outcome` is None.

        >>> path.check_before(at=0, outcome=3)  # steps 1 and 2; what is wrong is raised
        """
        for step in range(max(at + 1, outcome - SUSPECTS), outcome) if outcome is not None else ():
            self._check_step(step)

    def check_after(self, at: int, outcome: int) -> None:
        """The same at the first steps after a change at step `at` whose prediction was wrong at state `outcome`.

        >>> path.check_after(at=0, outcome=4)
        """
        self.check_before(at, min(at + 1 + SUSPECTS, outcome))

    def check_lost(
        self, at: int, predicted: Float[Tensor, "row horizon"], horizon: Sequence[int] | None = None
    ) -> None:
        """The same at the steps that a prediction of a change at step `at` first passes to be not finite. Nothing where
        all are.

        horizon: where the predictions are read; default: at 1, 2, 3, …

        >>> path.check_lost(0, torch.tensor([[0.1, torch.nan]]))  # step 1; what is wrong is raised
        """
        lost, read = first_lost(predicted), [1, *(horizon or range(1, predicted.shape[1] + 1))]
        for step in range(at + read[lost - 1], at + read[lost]) if lost is not None else ():
            self._check_step(step)

    def watch(self, at: int, probe: Any, horizon: int | None = None) -> Watch:
        """Where a probe is read after a change at step `at`.

        >>> watch = path.watch(1, probe)
        >>> watch.range, watch.probe.name
        ([1, 2, 3], 'a fixed batch')
        """
        watch = Watch.of(self.trajectory, self.index(at), probe, horizon)
        self.point.captured.loop.refuse_live(watch.probe.function)
        self.point.captured.loop.refuse_moved(self.point.loss)
        return watch

    def require_linear(self, watch: Watch) -> None:
        """Check Hessian products, and refuse predictions where a loss depends on buffers that training moves.

        >>> path.require_linear(path.watch(0, probe))  # nothing is wrong here, or it would be raised
        """
        hidden = self.check().hidden or watch.hidden()
        if hidden:
            raise HiddenState(
                f"the loss of the path or probe depends on buffers that training moves ({', '.join(hidden[:2])}…), "
                "which are state outside (θ, m, v), so predictions would be wrong; probe in training mode, or use "
                "change.response(..., answers=('exact',))"
            )

    def proof(self, answers: Iterable[str]) -> str:
        """What stands behind these answers: predictions need the check, exact runs do not.

        >>> path.proof(["exact"]), path.proof(["exact", "tangent"]) == str(path.check())
        ('', True)
        """
        return "" if set(answers) == {"exact"} else str(self.check())

    @cached_property
    def _checked(self) -> Check:
        last = len(self) - 1
        return Check.joined({step: self._check_step(step) for step in sorted({0, last // 2, last})})

    def _check_step(self, step: int) -> Check:
        if step not in self._proofs:
            try:
                self._proofs[step] = self._prove(step)
            except (WrongHessian, Nondeterministic, UnsupportedModel, UnsupportedAttention) as error:
                self._proofs[step] = type(error)(
                    f"at step {step} of the path {error}. Exact runs, answers=('exact',), need no Hessian"
                )
        found = self._proofs[step]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    def _prove(self, step: int) -> Check:
        """The check from the state before a step, and whether buffers moved until then matter to it."""
        taken, start = self.steps[step], self.point.captured.state
        if step == 0:
            return self.point.check(taken.batch, self.memory)
        here = replace(self.point.captured, state=self.trajectory.state(step), random=taken.random)
        found = type(self.point)(here).check_later(taken.batch, self._check_step(0), self.memory)
        earlier = moved_buffers(here.state.buffers, start.buffers)
        hidden = hidden_buffers(here.loss, here.state, earlier, taken.batch, taken.random)
        return replace(found, hidden=tuple(dict.fromkeys((*found.hidden, *hidden))))

    # --- changes

    def replace(self, batches: Batch | Sequence[Batch], at: int = 0) -> Change:
        """Another batch at step `at`; a list is one change each. The step's own batch is the reference.

        A list whose entries are like those of the step's own batch (as data loaders make them, or as many sequences of
        their own lengths) is one batch.

        >>> path.replace([batches[4], batches[5]], at=0)
        Change(replace at step 0, 2 change(s))
        """
        own = self.steps[self.index(at)].batch
        many = batches if isinstance(batches, list) and not alike(batches, own) else [batches]
        if not many:
            raise InvalidInput("replace() needs at least one batch")
        return self._change("replace", at, [Replace(batch) for batch in many])

    def perturb(self, xi: Any, at: int = 0) -> Change:
        """ξ added to the raw gradient of step `at`.

        xi: a vector of d coordinates, a matrix [change, d], a mapping from parameter names to tensors, or
        a list of these. `-path.control(at).raw` takes the step's own gradient away.

        >>> xi = {"2.bias": torch.tensor([0.1, -0.1])}
        >>> path.perturb(xi, at=0).response(probe, horizon=1).verdict
        "'perturb' at step 0 lowers the loss most in the first state after it: 0.5083 → 0.5082 (-0.000134)."
        """
        return self._change("perturb", at, [Perturb(row) for row in self.point.loss.layout.vectors(xi)])

    def skip(self, at: int = 0) -> Change:
        """Step `at` is not taken: weights, moments and the step count stay as they were.

        >>> path.skip(at=1).response(probe, horizon=1).verdict
        "'skip' at step 1 raises the loss most in the first state after it: 0.5028 → 0.5083 (+0.00551)."
        """
        return self._change("skip", at, [Skip()])

    def zero(self, at: int = 0) -> Change:
        """Step `at` is taken with a zero gradient: the moments and the weights decay.

        >>> path.zero(at=1).response(probe, horizon=1).verdict
        "'zero' at step 1 lowers the loss most in the first state after it: 0.5028 → 0.5025 (-0.0003)."
        """
        return self._change("zero", at, [Zero()])

    def set(self, at: int = 0, **values: float | Sequence[float]) -> Change:
        """Other hyperparameters at step `at` alone.

        values: lr, beta1, beta2, eps, weight_decay, each a number, or lists of one length: one change per entry.

        >>> path.set(at=0, lr=[0.0, 0.1]).response(probe).order
        ['set lr=0.1', 'set lr=0']
        """
        unknown = sorted(set(values) - set(SETTABLE))
        if unknown or not values:
            named = f"{unknown[0]!r} is not a hyperparameter" if unknown else "set() needs a hyperparameter"
            raise InvalidInput(f"{named}; choose from {', '.join(SETTABLE)}")
        given = {name: values_of(name, value) for name, value in values.items()}
        lengths = {len(many) for many in given.values() if isinstance(many, list)}
        if len(lengths) > 1 or 0 in lengths:
            raise InvalidInput("lists given to set() must have the same length, of one or more")
        rows = [
            {name: v[i] if isinstance(v, list) else v for name, v in given.items()}
            for i in range(max(lengths, default=1))
        ]
        return self._change("set", at, [SetHyper(row) for row in rows])

    def reset(self, at: int = 0, moments: str = "m") -> Change:
        """The moments ("m", "v" or "mv") set to zero just before step `at`.

        >>> path.reset(at=1, moments="m").response(probe, horizon=1).verdict
        "'reset m' at step 1 raises the loss most in the first state after it: 0.5028 → 0.5086 (+0.00579)."
        """
        if moments not in CHANNEL_NAMES:
            raise InvalidInput(f'reset() takes "m", "v" or "mv"; got {moments!r}')
        return self._change(f"reset {moments}", at, [Reset(CHANNEL_NAMES[moments])])

    def _change(self, kind: str, at: int, edits: Sequence[Edit]) -> Change:
        return Change(self, self.index(at), kind, tuple(edits))

    def index(self, step: int) -> int:
        """The place of a step, counted from the first; one below 0 counts from the end.

        >>> path.index(2), path.index(-1)
        (2, 3)
        """
        step = whole(step, "a step is given by its place on the path")
        if not -len(self) <= step < len(self):
            raise InvalidInput(f"step {step} is not on this path of {len(self)} steps")
        return step % len(self)

    # --- operators

    def control(self, step: int) -> ControlStep:
        """The control at a step: states before and after, raw gradient, linearization. One gradient.

        >>> control = path.control(0)
        >>> abs(float(control.raw.norm()) - control.step.clip.norm) < 1e-12
        True
        """
        return ControlStep.of(self.trajectory, self.index(step))

    def write_in(self, at: int = 0) -> WriteIn:
        """B at step `at`, from ξ to δx right after it: δm = (1−β1) J ξ, δv = 2(1−β2) g⊙J ξ, δθ = M δm + V δv.

        One gradient; then an elementwise pass per ξ.

        >>> path.write_in(0).as_matrix().shape
        torch.Size([66, 22])
        """
        return WriteIn(self.control(at).linear)

    def transition(self, step: int) -> Transition:
        """A = K + B H P_θ at a step, from δx before the step to δx after it.

        About 1.2 gradients; then a Hessian product per δx. `as_matrix()` is for small models.

        >>> path.transition(1).as_matrix().shape
        torch.Size([66, 66])
        """
        step = self.index(step)
        return Transition(self.trajectory.linearize(self.steps[step], self.trajectory.state(step)))

    def propagate(self, start: int, stop: int) -> Propagator:
        """Φ = A_{stop−1} … A_start, from the state before step `start` to the state before step `stop`.

        A Hessian product per δx and step.

        >>> first, second = (path.transition(step).as_matrix() for step in (1, 2))
        >>> torch.allclose(path.propagate(1, 3).as_matrix(), second @ first)
        True
        """
        if not 0 <= start <= stop <= len(self):
            raise InvalidInput(f"propagate({start}, {stop}) leaves this path of {len(self)} steps")
        return Propagator(self.trajectory, start, stop)

    def response_operator(self, probe: Any, at: int = 0, horizon: int | None = None) -> ResponseOperator:
        """G = c̄ᵀ P_θ Φ B, from ξ at step `at` to the linear response at horizons 1 … `horizon` (default: all).

        One gradient per horizon; then a Hessian product per ξ, or per outcome, and step.

        >>> predicted = path.response_operator(probe).as_matrix() @ theory.residuals(change)[1]
        >>> bool(abs(predicted.numpy() - response.tangent.values[1, 0]).max() < 1e-12)
        True
        """
        watch = self.watch(at, probe, horizon)
        return ResponseOperator(self.trajectory, self.write_in(at), watch.at, watch.range, watch.slopes())

    # --- ranking and explaining

    def rank(
        self,
        pool: Iterable[Batch],
        probe: Any,
        *,
        at: int = 0,
        horizon: int | None = None,
        by: str = "peak",
        verify: int | Sequence[int] = VERIFY,
        labels: Sequence[str] | None = None,
        memory: str | int | None = None,
    ) -> Ranking:
        """Score any number of batches in the place of step `at`'s by one adjoint sweep.

        A batch's response is predicted by its gradient times the adjoint. Two things are not linearized at the control:
        AdamW's step where v is small, which is exact, and the probe's slope, which is read half way along the mean
        displacement of the batches. A few batches are rerun exactly: what the reruns add in the mean is added to every
        prediction, and the certificate says how well that predicts a rerun that was left out. Costs a gradient per
        batch (less in rows on a GPU), a sweep, and `verify` reruns.

        pool: batches, any number.
        probe: what is watched: a batch, `ak.own_loss`, a function of the model.
        at: the step whose batch they replace.
        horizon: how many states after the step; default: to the end of the path.
        by: what to sort by: a summary over horizons (peak, max_increase, max_decrease, total_abs, total_increase,
            total_decrease), or "response", the signed response at `horizon` alone, which needs one outcome only.
        verify: how many are rerun exactly: half of them the strongest (at least one), the others spread over the rest,
            which tell how large the error is; of three or more, one is the batch with several times the usual gradient,
            where there is one. Or which, by their places in the pool, and then all of them tell.
        labels: names of the batches in the result.
        memory: a budget such as "8GiB"; default: the path's own, or what is free.

        >>> ranking = path.rank(batches, probe, verify=2)
        >>> ranking.order[0], ranking.verified
        ('batch 5', ['batch 5', 'batch 3'])
        """
        return rank(self, pool, probe, at=at, horizon=horizon, by=by, verify=verify, labels=labels, memory=memory)

    def estimate_rank(
        self,
        pool: Iterable[Batch],
        probe: Any,
        *,
        at: int = 0,
        horizon: int | None = None,
        by: str = "peak",
        verify: int | Sequence[int] = VERIFY,
        memory: str | int | None = None,
    ) -> Estimate:
        """What `rank` will cost, before any of it is done: gradients, seconds, peak memory. The arguments are its own.

        The first one measures a few passes of the model and makes the path's check, which `rank` then finds done.

        >>> estimate = path.estimate_rank(batches, probe)
        >>> round(estimate.gradients), estimate.chunks
        (76, 1)
        """
        return estimate(self, pool, probe, at=at, horizon=horizon, by=by, verify=verify, memory=memory)

    def rank_examples(
        self,
        pool: Iterable[Batch],
        probe: Any,
        *,
        at: int = 0,
        horizon: int | None = None,
        verify: int | Sequence[int] = VERIFY,
        memory: str | int | None = None,
    ) -> ExampleRanking:
        """Score every single example of a pool at one outcome (`horizon`, default the last).

        An example's share is what its part of the batch's mean gradient would add to the response. All shares come from
        one forward-mode pass over the pool. Examples that depend on each other, as in training BatchNorm, are refused.

        verify: for how many the part is added in an exact rerun, chosen as in `rank`; or for which, by their places in
            the pool, counted through its batches. The reruns calibrate the rest.
        memory: a budget such as "8GiB"; default: the path's own, or what is free. It decides how many examples
            go in one pass, too.

        >>> ranking = path.rank_examples(batches, probe, verify=2)
        >>> ranking.data.sizes["example"], [int(batch) for batch in ranking.data["batch"][:3]]
        (48, [5, 5, 1])
        """
        return rank_examples(self, pool, probe, at=at, horizon=horizon, verify=verify, memory=memory)

    def estimate_rank_examples(
        self,
        pool: Iterable[Batch],
        probe: Any,
        *,
        at: int = 0,
        horizon: int | None = None,
        verify: int | Sequence[int] = VERIFY,
        memory: str | int | None = None,
    ) -> Estimate:
        """What `rank_examples` will cost, before any of it is done: gradients, seconds, peak memory. The arguments are
        its own.

        A few passes of the model are measured, and the first one makes the path's check, which `rank_examples` then
        finds done.

        >>> estimate = path.estimate_rank_examples(batches, probe, verify=2)
        >>> round(estimate.gradients), estimate.chunks
        (37, 1)
        """
        return estimate_rank_examples(self, pool, probe, at=at, horizon=horizon, verify=verify, memory=memory)

    def explain(
        self,
        probe: Any,
        *,
        outcome: int | None = None,
        change: str = "zero",
        verify: int | Sequence[int] = VERIFY,
        memory: str | int | None = None,
    ) -> Contributions:
        """Each step's contribution to the probe's loss at state `outcome` (default: the last), by channel.

        A contribution is the outcome as it is, less the outcome with `change` made at that step. Channels say where
        the step's effect lies right after it, in θ, m or v; they add up to the whole. Costs one adjoint sweep of two
        rows, 3–5 gradients a step, and `verify` reruns. The reruns decide how the probe is read (as a straight line, or
        with its curvature) and give a common factor; the certificate says how well they predict each other.

        change: what the step is compared with: "zero" its gradient, "skip" it, "reset m" or "reset v" before it. A
            reset of v is too large a change to be predicted: it is only measured, at `verify` steps along the path.
        verify: how many steps are rerun exactly: half of them the strongest (at least one), the others along the path
            from its first step on, since predictions hold the less the further back a step lies; or their numbers.
        memory: a budget such as "8GiB"; default: the path's own, or what is free.

        >>> found = path.explain(probe, verify=2)
        >>> [f"{total:+.4f}" for total in found.total.values]
        ['-0.0018', '+0.0008', '-0.0004', '-0.0002']
        """
        return explain(self, probe, outcome=outcome, change=change, verify=verify, memory=memory)

    def estimate_explain(
        self,
        probe: Any,
        *,
        outcome: int | None = None,
        change: str = "zero",
        verify: int | Sequence[int] = VERIFY,
        memory: str | int | None = None,
    ) -> Estimate:
        """What `explain` will cost, before any of it is done: gradients, seconds, peak memory. The arguments are its
        own.

        The first one measures a few passes of the model and makes the path's check, which `explain` then finds done.

        >>> round(path.estimate_explain(probe, verify=2).gradients)
        37
        """
        return estimate_explain(self, probe, outcome=outcome, change=change, verify=verify, memory=memory)
