"""Memory that is planned against memory that is measured: by watching every operation, and by torch's own profiler."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import aftershock as ak
from aftershock import theory
from aftershock.api import contributions, examples, ranking
from aftershock.core import sweep_plans
from aftershock.core.changes import ControlGradient
from aftershock.core.exact_rows import ExactRows
from aftershock.core.footprint import Curvature, Footprint, measured
from aftershock.core.graphs import GradientGraph
from aftershock.core.memory import budget, readable
from aftershock.core.noise import noise_floor
from aftershock.core.path_plans import plan_states
from aftershock.core.planning import Work, pass_bytes, plan_responses
from aftershock.core.responses import ANSWERS, Pass, respond
from aftershock.core.rows import Sharing
from aftershock.core.trajectory import Trajectory
from aftershock.errors import OutOfMemory
from aftershock.recorder.reruns import Run, run_again

from .cases import Case, advised, cross_entropy, make, mlp, next_token

WITHIN = 0.2
CPU = torch.device("cpu")
TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])


class CNN(nn.Module):
    """About 0.3 million weights."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 128, 192)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.max_pool2d(F.relu(layer(x)), 2)
        return self.head(x.flatten(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class LM(nn.Module):
    """About 0.3 million weights, two thirds of them in the embeddings."""

    def __init__(self, vocabulary: int = 1000, width: int = 96) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.block = Block(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


def images(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(*shape), torch.randint(0, 10, shape[:1]))


class Unused(nn.Module):
    """A layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.SiLU(), nn.Conv2d(32, 8, 3), nn.Flatten(), nn.Linear(1152, 10)
        )
        self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@functools.cache
def built(name: str) -> tuple[ak.TrainingPoint, list, list, object]:
    """A point, the batches of a path, three others, and a probe; the check of its Hessian is made once."""
    torch.manual_seed(0)
    models = {
        "mlp": (mlp(512, 512, 256, 10), cross_entropy, images(16, 512)),
        "cnn": (CNN(), cross_entropy, images(4, 3, 16, 16)),
        "lm": (LM(), next_token, lambda: torch.randint(0, 1000, (2, 33))),
    }
    model, loss_fn, batch = models[name]
    case = Case(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, batch)
    case.train(case.batches(1))
    return case.point(), case.batches(4), case.batches(3), case.batch()


def ready(name: str, together: bool, **options: object) -> tuple[ak.Path, list, object]:
    """A path, batches to replace its own, and a probe, where nothing but the work itself is left to measure."""
    point, batches, others, probe = built(name)
    path = point.follow(batches, **options)
    point.loss.sharing = Sharing(together)
    path.check()
    Curvature.of(path.trajectory)
    return path, others, probe


def profiled(work: Callable[[], object]) -> int:
    """The peak of what torch's allocator handed out meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    now = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def assert_close(estimated: int, real: int, what: object) -> None:
    assert abs(estimated - real) <= WITHIN * real, f"{what}: {readable(estimated)} for {readable(real)}"


@pytest.mark.parametrize(
    ("name", "keep", "together"),
    [
        *itertools.product(["mlp"], ["states", "checkpoints"], [False, True]),
        *((name, *rest) for name in ("cnn", "lm") for rest in (("states", True), ("checkpoints", False))),
    ],
)
def test_estimates_are_what_is_used(name: str, keep: str, together: bool) -> None:
    path, others, probe = ready(name, together, keep=keep)
    assert (path.trajectory.kept(1) is None) == (keep == "checkpoints")
    vector = Footprint.of(path.trajectory).vector
    change = path.replace(others, at=1)
    for answers in (*((answer,) for answer in ANSWERS), ANSWERS):
        options = {"answers": answers, "horizon": 2, "scales": [1.0] if name == "mlp" else [0.5, 1.0]}
        real, _ = measured(lambda: change.response(probe, **options))  # noqa: B023
        assert real > 10 * vector
        assert_close(change.estimate(probe, **options).memory, real, answers)


def test_gradients_of_changes_in_rows_are_counted_where_exact_rows_run_alone() -> None:
    """As of a transformer of torch's modules: its gradients at several θ do not map, those of several batches do."""
    path, pool, probe = with_pool("conv", 1)
    path.point.loss.sharing = Sharing(True)
    path.point.loss.sharing.settle("gradient", agreed=False)
    path = path.point.follow([step.batch for step in path.steps])
    change, f = path.replace(pool, at=1), Footprint.of(path.trajectory)
    assert not f.together
    assert f.pooled is not None
    change.response(probe, answers=("exact",), horizon=2)
    real, _ = measured(lambda: change.response(probe, answers=("exact",), horizon=2))
    assert real > 10 * f.gradient
    assert_close(change.estimate(probe, answers=("exact",), horizon=2).memory, real, "exact")


def test_estimates_are_of_the_largest_batch_of_a_path() -> None:
    """Whichever step it is: the first was measured, and said a fifth of what the others took."""
    torch.manual_seed(0)
    model, few, many = mlp(64, 256, 256, 8), images(16, 64)(), images(4096, 64)()
    few, many = ((x, y % 8) for x, y in (few, many))
    point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-3), cross_entropy)
    path = point.follow([few, many, many])
    change = path.replace([few, few], at=0)
    for answers in (("exact",), ("tangent",), ANSWERS):
        change.response(few, answers=answers)
        real, _ = measured(lambda: change.response(few, answers=answers))  # noqa: B023
        assert_close(change.estimate(few, answers=answers).memory, real, answers)


def test_estimates_are_of_the_probe_that_is_read() -> None:
    """Whatever its size: passes of the path were measured alone, and said a third of what a larger probe took."""
    torch.manual_seed(0)
    model, few, many = mlp(64, 256, 256, 8), images(16, 64)(), images(4096, 64)()
    few, many = ((x, y % 8) for x, y in (few, many))
    point = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-3), cross_entropy)
    path = point.follow([few] * 4)
    change = path.perturb(torch.full((2, point.loss.layout.size), 1e-3), at=0)
    for answers in (("exact",), ("semilinear",), ("tangent",), ANSWERS):
        change.response(many, answers=answers)
        real, _ = measured(lambda: change.response(many, answers=answers))  # noqa: B023
        assert_close(change.estimate(many, answers=answers).memory, real, answers)
    real, _ = measured(lambda: path.rank([few, (few[0] + 1, few[1])], many, verify=1))
    assert_close(path.estimate_rank([few, few], many, verify=1).memory, real, "rank")
    real, _ = measured(lambda: path.explain(many, verify=1))
    assert_close(path.estimate_explain(many, verify=1).memory, real, "explain")


@TOGETHER
def test_estimates_of_other_work(together: bool) -> None:
    """One change, several scales, binding clipping, each step's own loss, and changes that are no gradients."""
    path, others, probe = ready("mlp", together, clip=0.01)
    assert path.steps[0].clip.binds
    for change, scales in (
        (path.replace(others[:1], at=0), [1.0]),
        (path.replace(others[:2], at=0), [0.25, 0.5, 1.0]),
        (path.set(0, lr=0.1), [0.5, 1.0]),
    ):
        for answers, watched in ((("exact",), ak.own_loss), (("tangent",), probe), (ANSWERS, probe)):
            options = {"scales": scales, "answers": answers, "horizon": 2}
            real, _ = measured(lambda: change.response(watched, **options))  # noqa: B023
            assert_close(change.estimate(watched, **options).memory, real, (change, scales, answers))


@TOGETHER
def test_estimates_of_changes_without_a_gradient(together: bool) -> None:
    """Between states that are kept, and past one; the row of rounding starts beside the control's step."""
    point, batches, _, probe = built("mlp")
    path = point.follow(3 * batches, keep="checkpoints")
    point.loss.sharing = Sharing(together)
    assert path.trajectory.kept(1) is None
    assert path.trajectory.kept(2) is None
    for change, scales, horizon in (
        (path.skip(1), [1.0], 1),
        (path.set(1, lr=0.01), [0.5, 1.0], 1),
        (path.skip(1), [1.0], 4),
    ):
        options = {"scales": scales, "answers": ("exact",), "horizon": horizon}
        change.estimate(probe, **options)
        real, _ = measured(lambda: change.response(probe, **options))  # noqa: B023
        assert real <= 1.1 * change.estimate(probe, **options).memory


@pytest.mark.parametrize("name", ["mlp", "cnn", "lm"])
def test_an_independent_measure(name: str) -> None:
    """torch's profiler sees every allocation: the meter and the estimates agree with it."""
    path, others, probe = ready(name, together=name == "lm")
    change = path.replace(others[:2])
    for answers in (("exact",), ANSWERS):
        truth = profiled(lambda: change.response(probe, answers=answers, horizon=2))  # noqa: B023
        metered, _ = measured(lambda: change.response(probe, answers=answers, horizon=2))  # noqa: B023
        assert metered == pytest.approx(truth, rel=0.05)
        assert_close(change.estimate(probe, answers=answers).memory, truth, answers)


# --- budgets


@pytest.mark.parametrize(("name", "together"), [("mlp", False), ("mlp", True), ("lm", True)])
def test_work_is_cut_to_fit(name: str, together: bool) -> None:
    path, others, probe = ready(name, together)
    change = path.replace(others)
    whole = change.response(probe, horizon=2).data["response"].values
    estimate = change.estimate(probe)
    assert estimate.chunks == 1
    single = [change.estimate(probe, answers=(answer,)).memory for answer in ANSWERS]
    one = [path.replace(others[:1]).estimate(probe, answers=(answer,)).memory for answer in ANSWERS]
    chunks = set()
    for limit in (estimate.memory - 1, max(single), max(one)):
        planned = change.estimate(probe, memory=limit)
        assert planned.memory <= limit
        chunks.add(planned.chunks)
        found: list[ak.Response] = []
        real, _ = measured(lambda: found.append(change.response(probe, memory=limit, horizon=2)))  # noqa: B023
        assert real <= (1 + WITHIN) * limit
        values = found[0].data["response"].values
        if not together:
            np.testing.assert_array_equal(values[0], whole[0])
        np.testing.assert_allclose(values, whole, rtol=1e-3, atol=1e-4 * np.abs(whole).max())
    assert together or min(chunks) > 1  # in rows, the gradients of the changes leave their rows first
    assert len(chunks) > 1
    assert max(chunks) > 3  # answers by themselves


def test_rows_that_are_cut_go_without_the_control() -> None:
    """Where the path keeps its first state alone: the control is read before, and its place is a row's."""
    path, others, probe = ready("mlp", together=False)
    point, batches = path.point, [step.batch for step in path.steps]
    short = ak.Path(point, point.follow(batches, memory=point.captured.state.nbytes).trajectory, None)
    assert list(short.trajectory._states) == [0]
    change = short.replace([*others, batches[0]])
    whole = change.response(probe, answers=("exact",))
    limit = short.replace(others[:1]).estimate(probe, answers=("exact",)).memory  # a change, rounding and the control
    planned = change.estimate(probe, answers=("exact",), memory=limit)
    assert planned.chunks == 3  # of five rows, where beside the control one by one would fit
    found: list[ak.Response] = []
    real, _ = measured(lambda: found.append(change.response(probe, answers=("exact",), memory=limit)))
    assert_close(planned.memory, real, "rows in chunks")
    np.testing.assert_array_equal(found[0].exact.values, whole.exact.values)
    assert not found[0].exact.values[-1].any()  # a batch of the control's own is no change
    np.testing.assert_array_equal(found[0].data["noise_floor"], whole.data["noise_floor"])


def test_the_controls_gradient_is_computed_once_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for it; where there is not, once for each, with the same answers."""
    path, others, probe = ready("mlp", together=False)
    change, vector = path.replace(others[:3]), Footprint.of(path.trajectory).vector
    computed, of = [], ControlGradient.of
    monkeypatch.setattr(ControlGradient, "of", lambda *given: computed.append(1) or of(*given))
    watch, found = path.watch(0, probe), list[Tensor]()
    one = pass_bytes(Work(watch, 3, 1), Pass(("tangent",), 1))
    held = pass_bytes(Work(watch, 3, 1), Pass(("tangent",), 1, holds_gradient=True))
    assert 0 < held - one <= vector
    for limit, times in ((held, 1), (held - 1, 3)):
        computed.clear()
        found.append(change.numbers(watch, "tangent", memory=limit))
        assert len(computed) == times
    assert torch.equal(*found)


def test_separate_passes_give_the_same_answers() -> None:
    case = make("two_groups")
    path = case.path(4)
    edits, watch = path.replace(case.batches(3)).edits, path.watch(0, case.batch())
    whole = respond(watch, edits, [0.5, 1.0], [Pass(ANSWERS, 3)])
    for passes in ([Pass(("exact",), 2), Pass(("semilinear", "tangent"), 1)], [Pass((a,), 2) for a in ANSWERS]):
        apart = respond(watch, edits, [0.5, 1.0], passes)
        for answer in ANSWERS:
            assert torch.equal(apart.values[answer], whole.values[answer]), answer
        assert torch.equal(apart.control, whole.control)
        assert torch.equal(apart.clip_switched, whole.clip_switched)
        assert apart.zero_v == whole.zero_v
        assert apart.xi_norm == whole.xi_norm


def test_a_budget_for_nothing_says_what_would_fit() -> None:
    path, others, probe = ready("mlp", together=False)
    change = path.replace(others)
    with pytest.raises(
        OutOfMemory, match=r"needs .* beside the model and the path, and 100\.0 KiB may be used"
    ) as small:
        change.response(probe, memory="100KiB")
    assert "answers=" not in str(small.value)
    enough = advised(small)
    change.response(probe, memory=enough, horizon=1)
    scales = [0.25, 0.5, 1.0]
    need = {a: path.replace([probe]).estimate(probe, answers=(a,), scales=scales).memory for a in ANSWERS}
    with pytest.raises(OutOfMemory) as large:
        change.response(probe, scales=scales, memory=need["exact"])
    assert need["tangent"] <= need["exact"] < need["semilinear"]
    assert "answers=['exact', 'tangent']" in str(large.value)
    assert "one scale at a time (now 3)" in str(large.value)
    change.response(probe, scales=scales, answers=["exact", "tangent"], memory=need["exact"], horizon=1)
    change.response(probe, memory=need["exact"], horizon=1)


def test_rows_wait_in_host_memory_only_where_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    path, others, probe = ready("mlp", together=False)
    work = Work(path.watch(0, probe), changes=2, scales=6)
    one = path.replace(others[:1]).estimate(probe, answers=("exact",), scales=[0.1] * 6).memory
    plan = plan_responses(work, ("exact",), one)
    assert plan.passes == (Pass(("exact",), 1, holds_gradient=True),)
    assert plan.chunks == 2
    with pytest.raises(OutOfMemory):
        plan_responses(work, ("exact",), one - 1)
    monkeypatch.setattr(Trajectory, "device", torch.device("cuda"))
    plan = plan_responses(work, ("exact",), one - 1)
    assert plan.passes == (Pass(("exact",), 1, parked=True, holds_gradient=True),)
    assert plan.peak <= one - 12 * Footprint.of(path.trajectory).vector  # five states of six wait elsewhere


# --- how a path is kept


@pytest.mark.parametrize("steps", [1, 2, 9, 30, 100, 1000])
def test_states_are_kept_as_memory_allows(steps: int) -> None:
    state = 1000

    def kept(keep: str, spacing: int) -> int:
        """States that a path holds: the first, one of every `spacing`, and the last where it has any."""
        if keep == "states":
            return steps + 1
        return 1 + math.ceil(steps / spacing) if spacing <= steps else 1

    for states in (1, 2, 3, 5, 11, 40, 101, 2004):
        memory = 4 * state * states  # a quarter of it is for the path
        keep, spacing = plan_states(steps, state, None, memory, CPU)
        assert (keep == "states") == (steps + 1 <= states)
        assert kept(keep, spacing) <= states
        if keep == "checkpoints":
            root = math.isqrt(steps)
            assert spacing >= root
            if kept("checkpoints", root) <= states:
                assert spacing == root
            elif spacing <= steps:  # no more than needed is given up
                assert kept("checkpoints", spacing - 1) > states
    assert plan_states(steps, state, "states", 1, CPU) == ("states", 1)
    assert plan_states(steps, state, "graphs", 1, CPU) == ("graphs", 1)
    assert plan_states(steps, state, "checkpoints", 10**9, CPU) == ("checkpoints", math.isqrt(steps))


@pytest.mark.parametrize("states", [1, 2, 3, 5, 9])
def test_a_path_holds_no_more_than_planned(states: int) -> None:
    """The kept states, and those that a sweep makes on its way back, each fit into their quarter of the memory."""
    case = make("quadratic")
    point, batch = case.point(), case.batch()
    size = point.captured.state.nbytes
    path = point.follow([batch] * 40, memory=4 * states * size)
    assert path.trajectory.keep == "checkpoints"
    assert len(path.trajectory._states) <= states
    whole = point.follow([batch] * 40, keep="states")
    sweep = path.trajectory.backward(0, 40)
    made: list[list] = []
    peak, _ = measured(lambda: made.append([(step.index, state.theta.clone()) for step, state in sweep]))
    copies = 40 * size // 3
    assert peak - copies <= (max(states, 2) + math.log2(40) + 2) * size
    assert [index for index, _ in made[0]] == list(range(39, -1, -1))
    for index, theta in made[0]:
        assert torch.equal(theta, whole.trajectory.state(index).theta)
    assert budget(path.memory, CPU) == 4 * states * size


# --- an estimate is of what a response does


def test_an_estimate_chooses_answers_as_a_response_does() -> None:
    """Where only exact answers exist: a probe in eval mode after BatchNorm, and one without a derivative."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 10))
    case = Case("", model, torch.optim.AdamW(model.parameters(), lr=1e-3), cross_entropy, images(16, 512))
    case.train(case.batches(2))
    path, (x, y) = case.path(4), case.batch()
    change = path.replace(case.batches(3))
    for probe in (ak.Probe(batch=(x, y), evaluating=True), lambda model: (model(x).argmax(1) == y).float().mean()):
        assert list(change.response(probe).data["answer"].values) == ["exact"]
        real, _ = measured(lambda: change.response(probe))  # noqa: B023
        assert change.estimate(probe) == change.estimate(probe, answers=("exact",))
        assert_close(change.estimate(probe).memory, real, probe)


@pytest.mark.parametrize(
    "options",
    [{"answers": ("endpoint",)}, {"answers": ()}, {"scales": ()}, {"scales": (0.0,)}, {"horizon": 99}],
    ids=str,
)
def test_an_estimate_refuses_what_a_response_refuses(options: dict) -> None:
    case = make("tanh_mlp")
    change, probe = case.path(3).replace(case.batches(1)), case.batch()
    with pytest.raises(ak.AftershockError) as refused:
        change.response(probe, **options)
    with pytest.raises(type(refused.value), match=re.escape(str(refused.value))):
        change.estimate(probe, **options)
    with pytest.raises(ak.AftershockError, match="no scale"):
        case.path(3).skip().estimate(probe, scales=(0.5,))


def test_a_path_that_replays_says_that_one_that_does_not_would_fit() -> None:
    """And only where it would."""
    point, batches, others, probe = built("mlp")
    paths = {keep: point.follow(3 * batches, keep=keep) for keep in ("states", "checkpoints")}
    point.loss.sharing = Sharing(False)
    exact = {keep: path.replace(others[:1], 1).estimate(probe, answers=("exact",)) for keep, path in paths.items()}
    need = {keep: estimate.memory for keep, estimate in exact.items()}
    assert need["states"] < need["checkpoints"]
    told = []
    for limit in (need["states"], need["states"] - 1):
        with pytest.raises(OutOfMemory) as small:
            paths["checkpoints"].replace(others, 1).response(probe, answers=("exact",), memory=limit)
        told.append('keep="states"' in str(small.value))
    assert told == [True, False]
    paths["states"].replace(others, 1).response(probe, answers=("exact",), memory=need["states"], horizon=1)


# --- rankings


def with_pool(name: str, trained: int, keep: str = "states") -> tuple[ak.Path, list, object]:
    """A path whose passes were measured, a pool, and a probe. Early in training hardly a coordinate has a curve."""
    torch.manual_seed(0)
    with torch.random.fork_rng():
        # fewer weights than the pieces that AdamW's arithmetic goes through at once, and little else
        small = mlp(256, 200, 64), cross_entropy, images(16, 256)
    model, loss_fn, batch = {
        "small": small,
        "mlp": (mlp(512, 512, 256, 10), cross_entropy, images(16, 512)),
        "lm": (LM(), next_token, lambda: torch.randint(0, 1000, (2, 33))),
        # few weights: what a pass keeps is nearly all
        "conv": (
            nn.Sequential(
                nn.Conv2d(3, 32, 3), nn.SiLU(), nn.Conv2d(32, 32, 3), nn.SiLU(), nn.Flatten(), nn.Linear(4608, 10)
            ),
            cross_entropy,
            images(16, 3, 16, 16),
        ),
    }[name]
    case = Case(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, batch)
    case.train(case.batches(trained))
    path, pool, probe = case.point().follow(case.batches(4), keep=keep), case.batches(12), case.batch()
    path.estimate_rank(pool, probe)
    return path, pool, probe


@pytest.mark.parametrize(
    ("name", "trained", "keep"),
    [
        ("mlp", 1, "states"),
        ("mlp", 40, "states"),
        ("lm", 1, "states"),
        ("lm", 40, "states"),
        ("mlp", 40, "checkpoints"),
        ("conv", 1, "states"),
        ("small", 1, "states"),
        ("small", 40, "states"),
    ],
)
def test_a_ranking_takes_what_its_estimate_says(name: str, trained: int, keep: str) -> None:
    path, pool, probe = with_pool(name, trained, keep)
    for count, by in ((3, "peak"), (12, "peak"), (12, "response")):
        real, _ = measured(lambda: path.rank(pool[:count], probe, by=by, verify=2))  # noqa: B023
        assert_close(path.estimate_rank(pool[:count], probe, by=by, verify=2).memory, real, (count, by))


def test_a_ranking_is_cut_to_fit() -> None:
    path, pool, probe = with_pool("mlp", 1)
    whole = path.rank(pool, probe, verify=2)
    one = path.estimate_rank(pool[:1], probe, verify=2).memory
    for limit in (one, (one + path.estimate_rank(pool, probe, verify=2).memory) // 2):
        planned = path.estimate_rank(pool, probe, verify=2, memory=limit)
        assert planned.memory <= limit
        assert planned.chunks > 1
        found: list[ak.Ranking] = []
        real, _ = measured(lambda: found.append(path.rank(pool, probe, verify=2, memory=limit)))  # noqa: B023
        assert real <= (1 + WITHIN) * limit
        for key in ("predicted", "measured"):
            values, expected = (ranking.data[key].sel(change=whole.order).values for ranking in (found[0], whole))
            np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-4 * np.nanmax(np.abs(expected)))


def test_pairs_that_wait_stay_within_the_budget_and_are_no_more_than_can_come() -> None:
    path, _, probe = with_pool("mlp", 1, "checkpoints")
    watch, waiting = path.watch(0, probe), list[int]()
    assert path.trajectory.spacing > 1
    for memory in ("64MiB", "128MiB", "512MiB", "8GiB"):
        plan = sweep_plans.plan_ranking(watch, [4], 12, memory)
        needs, count = sweep_plans._Needs(watch, plan.place), plan.at_once.gradients
        held = needs.held([4], count) + needs.gradients(count)
        assert held + plan.at_once.waiting * needs.per_pair([4]) <= budget(memory, CPU), memory
        waiting.append(plan.at_once.waiting)
    assert waiting == sorted(waiting)
    assert waiting[-1] == 12 * path.point.loss.layout.size


@pytest.mark.parametrize(("name", "trained"), [("conv", 1), ("mlp", 40), ("lm", 1)])
def test_sweeps_in_rows_take_what_their_estimates_say(name: str, trained: int) -> None:
    """Products of all outcomes and gradients of the pool are computed together there."""
    path, pool, probe = with_pool(name, trained)
    path.point.loss.sharing = Sharing(True)
    path = path.point.follow([step.batch for step in path.steps])
    path.rank(pool, probe, verify=0)
    for count, by in ((3, "peak"), (12, "peak"), (12, "response")):
        real, _ = measured(lambda: path.rank(pool[:count], probe, by=by, verify=2))  # noqa: B023
        assert_close(path.estimate_rank(pool[:count], probe, by=by, verify=2).memory, real, (count, by))
    for count in (3, 12):
        real, _ = measured(lambda: path.rank_examples(pool[:count], probe, verify=2))  # noqa: B023
        assert_close(path.estimate_rank_examples(pool[:count], probe, verify=2).memory, real, count)
    real, _ = measured(lambda: path.explain(probe, verify=1))
    assert_close(path.estimate_explain(probe, verify=1).memory, real, "explain")


def test_a_sweep_in_rows_is_cut_to_fit() -> None:
    """As many of a step's products at once as fit, and as many of the sample that the midpoint is of."""
    path, pool, probe = with_pool("conv", 1)
    path.point.loss.sharing = Sharing(True)
    path = path.point.follow(4 * [step.batch for step in path.steps])
    for batches in (pool[:1], pool):
        whole = path.rank(batches, probe, verify=0)
        need = path.estimate_rank(batches, probe, verify=0).memory
        with pytest.raises(OutOfMemory) as refused:
            path.rank(batches, probe, verify=0, memory="1KiB")
        least = budget(advised(refused), CPU)
        assert least < 0.7 * need
        for limit in (least, (least + need) // 2):
            assert path.estimate_rank(batches, probe, verify=0, memory=limit).memory <= limit
            found: list[ak.Ranking] = []
            real, _ = measured(lambda: found.append(path.rank(batches, probe, verify=0, memory=limit)))  # noqa: B023
            assert real <= (1 + WITHIN) * limit, (len(batches), limit / need)
            again = found[0].data["predicted"].sel(change=whole.order).values
            expected = whole.data["predicted"].sel(change=whole.order).values
            np.testing.assert_allclose(again, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_a_pool_is_counted_as_it_runs() -> None:
    """In rows beside steps that are made of micro-batches; alone where the batches leave a parameter unused."""
    path, pool, probe = with_pool("conv", 1)
    steps = [ak.accumulate([step.batch, step.batch]) for step in path.steps]
    point = path.point
    point.loss.sharing = Sharing(True)
    accumulated = point.follow(steps)
    model = Unused()
    case = Case("unused", model, torch.optim.AdamW(model.parameters(), lr=1e-3), cross_entropy, images(16, 3, 16, 16))
    case.train(case.batches(1))
    unused = case.point()
    unused.loss.sharing = Sharing(True)
    for made in (accumulated, unused.follow(case.batches(4))):
        made.rank(pool, probe, verify=0)
        real, _ = measured(lambda: made.rank(pool, probe, verify=2))  # noqa: B023
        assert_close(made.estimate_rank(pool, probe, verify=2).memory, real, made)


@pytest.mark.parametrize("share", [60, 120])
@pytest.mark.parametrize("what", ["switch_fraction", "error_shares"])
def test_gates_of_rows_stay_within_the_budget(what: str, share: int) -> None:
    """Every row's choices of a step are there at once: changes are followed a few at a time, with the same numbers."""
    path, others, probe = ready("cnn", together=False)
    change = path.replace(8 * others)
    options = {"scales": [0.5, 1.0]} if what == "switch_fraction" else {"probe": probe}
    whole, limit = getattr(theory, what)(change, **options), share * Footprint.of(path.trajectory).vector
    found: list = []
    all_at_once, _ = measured(lambda: getattr(theory, what)(change, **options))
    real, _ = measured(lambda: found.append(getattr(theory, what)(change, memory=limit, **options)))
    assert real <= (1 + WITHIN) * limit < all_at_once
    xr.testing.assert_allclose(found[0], whole, rtol=1e-4, atol=1e-6)


BETAS = [0.5, 0.8]
MEASURED: dict[str, Callable[..., Any]] = {  # of some changes and a probe, within a budget
    "scores": theory.scores,
    "channel_responses": theory.channel_responses,
    "error_shares": theory.error_shares,
    "switch_fraction": lambda change, probe, **given: theory.switch_fraction(change, **given).to_dataset(name="share"),
    "persistence": functools.partial(theory.persistence, beta1=BETAS),
}


@pytest.mark.parametrize("what", MEASURED)
def test_measures_of_changes_stay_within_the_budget_or_refuse_it(what: str) -> None:
    """What one change needs is told, and enough: within it every change goes alone, with the same numbers."""
    path, others, probe = ready("mlp", together=False)
    change, work = path.replace(others), MEASURED[what]
    with pytest.raises(OutOfMemory, match=r"needs .* and 4\.0 MiB may be used. What would fit: memory=") as refused:
        work(change, probe, memory="4 MiB")
    least = advised(refused)
    whole, found = work(change, probe), list[xr.Dataset]()
    real, _ = measured(lambda: found.append(work(change, probe, memory=least)))
    limit = budget(least, CPU)
    assert 0.6 * limit <= real <= limit, f"{readable(real)} of {readable(limit)}"
    xr.testing.assert_allclose(found[0], whole, rtol=1e-4, atol=1e-6)


def nothing_fits(*work: object) -> int:
    raise OutOfMemory("no rerun")


def test_a_ranking_that_does_not_fit_says_so_before_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    path, pool, probe = with_pool("mlp", 1)
    last = path.estimate_rank(pool[:1], probe, by="response", verify=0).memory
    monkeypatch.setattr(ranking, "adjoint", None)
    with pytest.raises(OutOfMemory, match=r'What would fit: .*one outcome \(by="response"\)') as small:
        path.rank(pool, probe, verify=0, memory=last)
    monkeypatch.undo()
    path.rank(pool, probe, verify=0, by="response", memory=last)
    horizon = int(re.search(r"horizon=(\d) \(now 4\)", str(small.value))[1])
    path.rank(pool, probe, verify=0, horizon=horizon, memory=last)
    with pytest.raises(OutOfMemory):
        path.rank(pool, probe, verify=0, horizon=horizon + 1, memory=last)
    enough = advised(small)
    path.rank(pool, probe, verify=0, memory=enough)
    monkeypatch.setattr(sweep_plans, "plan_reruns", nothing_fits)
    monkeypatch.setattr(ranking, "adjoint", None)
    with pytest.raises(OutOfMemory, match="no rerun"):
        path.rank(pool, probe)


@pytest.mark.parametrize(
    ("name", "trained", "keep"),
    [("mlp", 1, "states"), ("lm", 40, "states"), ("mlp", 40, "checkpoints"), ("conv", 1, "states")],
)
def test_a_ranking_of_examples_takes_what_its_estimate_says(name: str, trained: int, keep: str) -> None:
    path, pool, probe = with_pool(name, trained, keep)
    for count, verify in ((1, 0), (3, 2), (12, 2), (12, 8)):
        real, _ = measured(lambda: path.rank_examples(pool[:count], probe, verify=verify))  # noqa: B023
        estimate = path.estimate_rank_examples(pool[:count], probe, verify=verify)
        assert_close(estimate.memory, real, (count, verify))


def test_what_examples_hold_is_measured_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    path, pool, probe = with_pool("mlp", 1)
    path.rank_examples(pool, probe, verify=0)
    seen, work = list[int](), sweep_plans.example_derivatives
    monkeypatch.setattr(sweep_plans, "example_derivatives", lambda *given: (seen.append(1), work(*given))[1])
    path.rank_examples(pool[3:], probe, verify=0)
    assert not seen
    path.rank_examples([(x[:4], y[:4]) for x, y in pool[3:]], probe, verify=0)  # fewer than are looked at
    assert len(seen) == 2


def test_a_ranking_of_examples_is_cut_to_fit() -> None:
    path, pool, probe = with_pool("conv", 1)
    whole, need = (f(pool, probe, verify=2) for f in (path.rank_examples, path.estimate_rank_examples))
    limit = path.estimate_rank_examples(pool[:3], probe, verify=2).memory
    planned = path.estimate_rank_examples(pool, probe, verify=2, memory=limit)
    assert (need.chunks, planned.chunks > 3, planned.memory <= limit < need.memory // 2) == (1, True, True)
    found: list[ak.api.examples.ExampleRanking] = []
    real, _ = measured(lambda: found.append(path.rank_examples(pool, probe, verify=2, memory=limit)))
    assert real <= (1 + WITHIN) * limit
    for key in ("predicted", "measured"):
        one, other = (ranking.data.sortby(["batch", "index"])[key].values for ranking in (found[0], whole))
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.nanmax(np.abs(other)))
    with pytest.raises(OutOfMemory, match="What would fit"):
        path.estimate_rank_examples(pool, probe, memory="1KiB")


def test_gradients_of_examples_that_are_rerun_are_counted_before_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many take more than the sweep; what is free does not hold them when it is asked for."""
    path, pool, probe = with_pool("conv", 1)
    with pytest.raises(OutOfMemory, match="rerunning 60 examples, whose gradients are there at once, needs") as refused:
        path.estimate_rank_examples(pool, probe, verify=60, memory="1KiB")
    limit = budget(advised(refused), CPU)
    real, _ = measured(lambda: path.rank_examples(pool, probe, verify=60, memory=limit))
    assert 0.6 * limit <= real <= (1 + WITHIN) * limit
    monkeypatch.setattr("aftershock.core.memory.free", lambda device: limit)
    with pytest.raises(OutOfMemory, match="rerunning 60 examples"):
        path.estimate_rank_examples(pool, probe, verify=60)


@pytest.mark.parametrize("name", ["mlp", "lm"])
def test_an_explanation_fits_or_says_so(name: str) -> None:
    path, pool, probe = with_pool(name, 1)
    planned = sweep_plans.plan_explanation(path.watch(0, probe), 2, None).peak
    found: list = []
    real, _ = measured(lambda: found.append(path.explain(probe, verify=1, memory=planned)))
    assert_close(planned, real, name)
    with pytest.raises(OutOfMemory, match=r"What would fit: outcome=3 \(now 4\), memory="):
        path.explain(probe, verify=1, memory=planned - 1)
    path.explain(probe, verify=1, outcome=3, memory=planned - 1)
    with pytest.raises(OutOfMemory, match="ranking 8 batches at a time needs"):
        path.rank_examples(pool, probe, memory="1MiB")
    # kicks of few pairs at a time
    few = sweep_plans.plan_explanation(path.watch(0, probe), 2, None).elsewhere()
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr(contributions, "plan_explanation", lambda *work: few)
        again = path.explain(probe, verify=1)
    np.testing.assert_allclose(again.total.values, found[0].total.values, rtol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_an_explanation_takes_what_its_estimate_says(name: str) -> None:
    path, _, probe = with_pool(name, 1)
    for options in ({"verify": 1}, {"verify": 1, "outcome": 2}):
        real, _ = measured(lambda: path.explain(probe, **options))  # noqa: B023
        assert_close(path.estimate_explain(probe, **options).memory, real, options)
    real, _ = measured(lambda: path.explain(probe, verify=2, change="reset v"))  # a rerun without a gradient of its own
    assert real <= 1.1 * path.estimate_explain(probe, verify=2, change="reset v").memory
    assert path.estimate_explain(probe, verify=0, change="reset v").gradients == 0
    with pytest.raises(OutOfMemory, match="What would fit"):
        path.estimate_explain(probe, memory="1KiB")


class Failing:
    """A function that runs out of memory as long as the size that it is given is too large."""

    def __init__(self, work: Callable, size: Callable[..., int], limit: int) -> None:
        self.work, self.size, self.limit, self.seen = work, size, limit, list[int]()

    def __call__(self, *given: object, **named: object) -> object:
        self.seen.append(self.size(*given, **named))
        if self.seen[-1] > self.limit:
            raise torch.OutOfMemoryError("no memory")
        return self.work(*given, **named)


def test_memory_that_runs_out_in_spite_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    path, pool, probe = case.path(4), case.batches(6), case.batch()
    whole = path.rank(pool, probe, verify=1).data["predicted"]
    for limit in (1, 0):
        held = Failing(ranking.pool_scores, lambda *given: given[4].gradients, limit)
        monkeypatch.setattr(ranking, "pool_scores", held)
        if limit:
            again = path.rank(pool, probe, verify=1).data["predicted"].sel(change=whole["change"])
            np.testing.assert_allclose(again.values, whole.values, rtol=1e-9, atol=1e-15)
        else:
            with pytest.raises(OutOfMemory, match=r"gradients of the pool ran out .* 6 gradients of the pool at once"):
                path.rank(pool, probe, verify=1)
        assert held.seen == [6, 3, 1]
        monkeypatch.undo()
    scored = Failing(examples.example_scores, lambda *given, **named: given[4], 10)
    shares = path.rank_examples(pool, probe, verify=1).data["predicted"].values
    monkeypatch.setattr(examples, "example_scores", scored)
    np.testing.assert_allclose(path.rank_examples(pool, probe, verify=1).data["predicted"].values, shares, rtol=1e-9)
    assert scored.seen == [36, 18, 9]
    monkeypatch.setattr(GradientGraph, "add_products_", Failing(None, lambda *given: 1, 0))
    for work in (path.rank, path.rank_examples, lambda pool, probe: path.explain(probe)):
        with pytest.raises(OutOfMemory, match="the adjoint sweep ran out of memory in spite of the plan"):
            work(pool, probe)


RERUN = {
    **MEASURED,
    "decompose": lambda change, probe: theory.decompose(change, probe=probe).data,
    "logit_tangent": lambda change, probe: theory.logit_tangent(change, probe, lambda model, b: (model(b[0]), b[1])),
}


@pytest.mark.parametrize("what", RERUN)
def test_measures_that_run_out_of_memory_take_fewer_rows_or_say_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tanh_mlp")
    change, probe, work, advance = case.path(4).replace(case.batches(5)), case.batch(), RERUN[what], ExactRows.advance
    expected = work(change, probe)
    for most in (4, -1):

        def failing(rows: ExactRows, *given: Any, most: int = most) -> None:
            if len(rows) > most:
                raise torch.OutOfMemoryError("no memory")
            advance(rows, *given)

        monkeypatch.setattr(ExactRows, "advance", failing)
        if most > 0:
            xr.testing.assert_allclose(work(change, probe), expected, rtol=1e-9, atol=1e-15)
        elif what != "scores":  # carries no exact rows, though its rollout has them
            with pytest.raises(OutOfMemory, match="ran out of memory in spite of the plan"):
                work(change, probe)


def test_what_is_measured_beside_responses_holds_no_state_twice() -> None:
    """On a path that keeps its first state: the noise floor carries a row and the control, and a hybrid runs beside the
    two states that it is made of."""
    path, others, probe = ready("mlp", together=False)
    point, batches = path.point, [step.batch for step in path.steps]
    short = ak.Path(point, point.follow(batches, memory=point.captured.state.nbytes).trajectory, None)
    watch, f = short.watch(0, probe), Footprint.of(short.trajectory)
    control = torch.zeros(watch.horizons, dtype=torch.float64)
    noise_floor(watch, control)
    held, _ = measured(lambda: noise_floor(watch, control))
    assert held <= 6.1 * f.vector + f.step  # and single numbers
    change, limit = short.replace(others[:1]), 15 * f.vector  # of one hybrid at a time
    held, _ = measured(lambda: theory.channel_responses(change, probe, answers=("exact",), memory=limit))
    assert held <= 9.1 * f.vector + f.step


def test_examples_of_a_small_model_pass_by_thousands_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the memory goes; a CPU takes as many as its cache holds. What is found is the same."""
    path, others, probe = ready("cnn", together=False, keep="states")
    pool, seen, scores = 300 * others, list[int](), examples.example_scores

    def counted(control: object, direction: Tensor, batch: tuple[Tensor, Tensor], *others: Any, **named: Any) -> Tensor:
        seen.append(len(batch[1]))
        return scores(control, direction, batch, *others, **named)

    monkeypatch.setattr(examples, "example_scores", counted)
    alone = path.rank_examples(pool, probe, verify=0).data["predicted"].values
    assert max(seen) == 1024
    path.point.loss.sharing.wanted = True
    seen.clear()
    together = path.rank_examples(pool, probe, verify=0).data["predicted"].values
    assert seen == [3600]
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-3 * np.abs(alone).max())
    control, direction = path.control(0), path.point.loss.layout.zeros()

    def held(count: int) -> int:
        batch = torch.randn(count, 3, 16, 16), torch.zeros(count, dtype=torch.long)
        return measured(lambda: scores(control, direction, batch, "", count, weight=None, tested=examples.SPREAD))[0]

    limit = 2000 * (held(600) - held(300)) // 300  # of two thousand of them
    each = sweep_plans.ExampleFootprint.of(path.trajectory, others[0])
    assert 1024 <= sweep_plans.examples_at_once(path.trajectory, each, 3600, limit) <= 2000


def test_reruns_of_a_recorded_run_that_do_not_fit_together_go_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case, advance = make("tanh_mlp"), ExactRows.advance
    trajectory = case.path(4).trajectory
    runs = [Run(1, {place: None}) for place in (1, 2, 3)]
    expected, most = run_again(trajectory, runs, 3), 1

    def failing(rows: ExactRows, *given: Any) -> None:
        if len(rows) > most:
            raise torch.OutOfMemoryError("no memory")
        advance(rows, *given)

    monkeypatch.setattr(ExactRows, "advance", failing)
    for found, values in zip(run_again(trajectory, runs, 3), expected, strict=True):
        assert found == pytest.approx(values)
    most = -1
    with pytest.raises(OutOfMemory, match="reruns of the recorded run ran out of memory"):
        run_again(trajectory, runs, 3)
