"""Which batch did this: every contribution against a second run by hand, and the verdict in words."""

from __future__ import annotations

import copy
import html
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import aftershock as ak
from aftershock.api.contributions import EDITS
from aftershock.core import kicks, path_plans
from aftershock.core.contributions import BentReadout, contributions
from aftershock.core.scores import adjoint
from aftershock.core.state import pair, stack
from aftershock.errors import AftershockError, InvalidInput, Nondeterministic, ReplayMismatch, UnsupportedClipping
from aftershock.recorder import opening
from aftershock.recorder import replay as replaying
from aftershock.recorder.event import BARS
from aftershock.recorder.examples import example_shares
from aftershock.recorder.neighbours import neighbours
from aftershock.recorder.other_runs import other_runs
from aftershock.recorder.replay import Replay
from aftershock.recorder.words import LESS_OWN

from .cases import TinyTransformer, cross_entropy, make, mlp, next_token
from .explained import with_facts

WARM = 400  # steps before the recording: by then v remembers more than the last batch
CULPRIT, SPIKE = WARM + 24, WARM + 28


@dataclass
class Run:
    """A recorded run, and its batches for running it again by hand."""

    directory: Path
    model: nn.Module
    recorder: ak.FlightRecorder
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: list[Any] = field(default_factory=list)
    states: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    randoms: list[Tensor] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    clip: float | None = None

    def again(self, start: int, stop: int, change: Callable[[int, nn.Module, Any], bool]) -> float:
        """The loss of step `stop` in a plain torch loop from `start`; `change` may do a step in its own way."""
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters())
        model.load_state_dict(self.states[start][0])
        optimizer.load_state_dict(copy.deepcopy(self.states[start][1]))
        for step in range(start, stop):
            torch.set_rng_state(self.randoms[step])
            optimizer.param_groups[0]["lr"] = self.lrs[step]
            optimizer.zero_grad()
            if change(step, model, optimizer):
                continue
            self.loss_fn(model, self.batches[step]).backward()
            self.finish(model, optimizer)
        torch.set_rng_state(self.randoms[stop])
        return float(self.loss_fn(model, self.batches[stop]).detach())

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()


def record(
    directory: Path,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    feed: Callable[[int], Any],
    *,
    steps: int = 34,
    lr: Callable[[int], float] = lambda step: 1e-2,
    clip: float | None = None,
    tell: bool = True,
    **options: Any,
) -> Run:
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = ak.FlightRecorder(
        model, optimizer, loss_fn, directory, clip=clip if tell else None, **{"window": 16, **options}
    )
    run = Run(directory, model, recorder, loss_fn, clip=clip)
    for step in range(WARM + steps):
        batch = feed(step)
        optimizer.param_groups[0]["lr"] = lr(step)
        if step == WARM:
            recorder.__enter__()
        run.states.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        run.randoms.append(torch.get_rng_state())
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        run.finish(model, optimizer)
        if step >= WARM:
            recorder.step(batch, loss)
        run.batches.append(batch)
        run.losses.append(float(loss.detach()))
        run.lrs.append(lr(step))
    recorder.__exit__(None, None, None)
    return run


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def regression(directory: Path, *, bad: int | None = CULPRIT, **options: Any) -> Run:
    """An MLP on a task it learns; at step `bad` two examples are far off."""
    torch.manual_seed(0)
    model = mlp(6, 16, 1, activation=nn.GELU).double()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(6, 1, generator=generator, dtype=torch.float64)

    def feed(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        y = torch.tanh(x @ weights)
        if step == bad:
            y[[3, 8]] += 40
        return x, y

    return record(directory, model, squares, feed, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return regression(tmp_path_factory.mktemp("flight"))


@pytest.fixture(scope="module")
def found(run: Run) -> Any:
    return ak.explain(run.recorder, step=SPIKE)


def test_measured_is_what_a_loop_without_the_step_gives(run: Run, found: Any) -> None:
    def without(step: int, model: nn.Module, optimizer: Any) -> bool:
        return step == CULPRIT

    assert abs(run.losses[SPIKE] - run.again(CULPRIT - 2, SPIKE, lambda *_: False)) < 1e-12
    expected = run.losses[SPIKE] - run.again(CULPRIT - 2, SPIKE, without)
    assert abs(expected) > 0.01
    assert float(found.data["measured"].sel(change="skip", step=CULPRIT)) == pytest.approx(expected, rel=1e-8)
    curve = found.data["emergence"].sel(step=CULPRIT).values
    for h in (1, 2):
        model_loss = run.again(CULPRIT - 2, CULPRIT + h, without)
        assert curve[h - 1] == pytest.approx(run.losses[CULPRIT + h] - model_loss, rel=1e-8)


def test_treatments_are_what_a_loop_with_them_gives(run: Run) -> None:
    """Half the rate, Adam anew, another β2, clipping and bounded updates, each by a plain torch loop."""
    found = ak.explain(run.recorder, step=SPIKE, verify=0)  # nobody is blamed, so that all of them are tried
    data, first, last = found.data, found.facts.event.onset, found.facts.event.end
    outcome = dict(zip(data["treatment"].values.tolist(), data["treatment_value"].sel(place=SPIKE).values))

    def halved(step: int, model: nn.Module, optimizer: Any) -> bool:
        optimizer.param_groups[0]["lr"] = run.lrs[step] / (2 if first - 2 <= step < first else 1)
        return False

    def anew(step: int, model: nn.Module, optimizer: Any) -> bool:
        if step == first - 8:
            optimizer.state.clear()
        return False

    def another(step: int, model: nn.Module, optimizer: Any) -> bool:
        optimizer.param_groups[0]["betas"] = (0.9, 0.95 if step >= first - 8 else 0.999)
        return False

    def bounded(step: int, model: nn.Module, optimizer: Any) -> bool:
        """StableAdamW's rule, tensor by tensor, after torch's own update of v."""
        if step < first - 8:
            return False
        squares(model, run.batches[step]).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for p, was in zip(model.parameters(), before):
            state = optimizer.state[p]
            v = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
            size = float((p.grad**2 / v.clamp(min=1e-16)).mean().sqrt())
            p.data.copy_(was + (p.data - was) / max(1.0, size))
        return True

    names = {
        f"half the learning rate at steps {first - 2}–{first - 1}, 2 before it": halved,
        f"Adam restarted at step {first - 8}, 8 before it (m, v and count)": anew,
        f"β2 = 0.95 at steps {first - 8}–{last}, from 8 before it": another,
        f"updates bounded by their RMS (StableAdamW) at steps {first - 8}–{last}, from 8 before it": bounded,
    }
    for name, change in names.items():
        assert outcome[name] == pytest.approx(run.again(first - 8, SPIKE, change), rel=1e-6), name
        assert outcome[name] != pytest.approx(run.losses[SPIKE], rel=1e-3), name


def test_the_culprit_is_named_beside_its_placebos(run: Run, found: Any) -> None:
    best = found.culprits[0]
    assert (found.kind, found.blamed) == ("batch", (CULPRIT,))
    assert (best.step, best.delay, best.batches) == (CULPRIT, SPIKE - CULPRIT, (CULPRIT - WARM,))
    assert found.verdict.startswith(f"Step {CULPRIT} did it: there is no spike without it, and without any of 8 other")
    assert "to the bit" in str(found.certificate)
    placebos = [c for c in found.culprits if c.role == "placebo"]
    assert len(placebos) == 8
    for one in placebos[:2]:
        again = run.again(WARM, SPIKE, lambda step, *_, one=one: step == one.step)
        assert one.measured == pytest.approx(run.losses[SPIKE] - again, rel=1e-6, abs=1e-10)


def test_batches_that_stand_in_for_the_culprits_are_said(found: Any) -> None:
    given = {"replaced": (CULPRIT,), "replaced_left": (0.43,), "replaced_left_spread": (math.nan,)}
    given["replaced_after"], given["replaced_after_spread"] = (0.5,), (math.nan,)
    replaced = with_facts(found, **given, replaced_placebos=8, replaced_placebos_change=1)
    said = replaced.verdict
    assert said.startswith(
        f"Step {CULPRIT} did it: with batches like its own in place of step {CULPRIT}'s, 43% of the spike is left "
        f"({found.culprits[0].left:.0%} without any batch there); and it stays with such batches in place of those of "
        f"7 of 8 other steps. It raised the loss at step {SPIKE} by "
    )
    event = found.facts.event
    assert said.endswith(
        f"The event is the spike of {event.peak:.3g} (steps {event.onset}–{event.end}, usual loss {event.usual:.3g})."
    )
    said = with_facts(replaced, kin=True, cleared=(CULPRIT - 4, CULPRIT - 8)).verdict
    assert (
        "those of 7 of 8 other steps of the same kind of data, and without any of 8 other steps it stays. With" in said
    )
    assert f"Without steps {CULPRIT - 4} and {CULPRIT - 8} half of it would be gone, too, but not with batches" in said


def test_a_blame_leaves_few_treatments_to_try_and_the_mildest_come_first(run: Run, found: Any) -> None:
    every = ak.explain(run.recorder, step=SPIKE, verify=0).data["treatment"].values.tolist()
    tried = found.data["treatment"].values.tolist()
    assert 0 < len(tried) < len(every)
    assert tried == every[: len(tried)]
    untried = f"{len(every) - len(tried)} treatments were not tried"
    assert untried in str(found)
    assert untried in found._repr_html_()


def test_a_blame_needs_placebos(run: Run) -> None:
    alone = ak.explain(run.recorder, step=SPIKE, placebos=0, treatments=False)
    assert alone.blamed == ()
    assert alone.skip == []
    assert "Only 0 placebos were asked for" in str(alone)


def test_a_blame_beside_few_placebos_says_so(run: Run, found: Any) -> None:
    few = ak.explain(run.recorder, step=SPIKE, placebos=2, treatments=False)
    assert few.blamed == found.blamed
    (finding,) = [finding for finding in few.certificate.findings if finding.subject == "placebos"]
    assert (finding.level, finding.value, finding.threshold) == ("care", 2, 8)
    assert "Only 2 placebos were asked for" in str(few)
    assert "asked for" not in str(found.certificate)


def test_how_many_placebos_were_tried_of_those_asked_for(found: Any) -> None:
    """In a run that anything changes the first few decide it."""
    facts = {"kind": "instability", "blamed": (), "placebos": 3, "placebos_change": 3}
    said = "Leaving out 3 of the 3 tried of 8 steps that nobody suspects removes the spike"
    assert said in with_facts(found, **facts, placebos_asked=8).verdict
    assert "Leaving out 3 of 3 steps" in with_facts(found, **facts, placebos_asked=3).verdict


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, None),  # more lie before the event
        ({"kind": "group", "group": (CULPRIT, CULPRIT + 1), "group_placebos": 8}, None),
        ({"kind": "group", "group": (CULPRIT, CULPRIT + 1), "group_placebos": 4}, "Only 4 other groups of 2 steps are"),
        ({"kind": "group", "replaced": (CULPRIT,), "replaced_placebos": 8}, None),
        ({"kind": "group", "replaced": (CULPRIT,), "replaced_placebos": 4}, "Only 4 other steps were given batches"),
    ],
)
def test_how_few_others_there_are_is_said_of_those_that_a_blame_rests_on(
    found: Any, facts: dict[str, Any], said: str | None
) -> None:
    """Of a group other groups, beside which half of the placebos are left out one by one."""
    if "replaced" in facts:
        facts = facts | dict.fromkeys(("replaced_left", "replaced_left_spread"), (0.1,))
        facts = facts | dict.fromkeys(("replaced_after", "replaced_after_spread"), (0.1,))
    one = with_facts(found, **({"blamed": (CULPRIT, CULPRIT + 1), "placebos": 4, "placebos_asked": 8} | facts))
    sentences = [finding.sentence for finding in one.certificate.findings if finding.subject == "placebos"]
    assert [sentence[: len(said or "")] for sentence in sentences] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"window": -3}, "window= is a number of steps, a whole number from 1 on; got -3"),
        ({"window": 2.5}, "window= is a number of steps, a whole number from 1 on; got 2.5"),
        ({"placebos": -1}, "placebos= is a number of steps, a whole number from 0 on; got -1"),
        ({"references": 2.5}, "references= is a number of neighbours, a whole number from 0 on; got 2.5"),
        ({"examples": -1}, "examples= is a number of steps, a whole number from 0 on; got -1"),
        ({"step": float(SPIKE)}, f"step= is the number of an update, a whole number; got {SPIKE}.0"),
        ({"step": str(SPIKE)}, f"step= is the number of an update, a whole number; got '{SPIKE}'"),
        ({"clip": -1}, "clip= is the max_norm of torch.nn.utils.clip_grad_norm_ over all parameters, .*; got -1"),
        ({"clip": "norm"}, "clip= is the max_norm"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(run: Run, asked: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidInput, UnsupportedClipping), match=f"^{said}"):
        ak.explain(run.recorder, **({"step": SPIKE} | asked))


@pytest.mark.parametrize(
    "asked", [{"window": 1}, {"after": None}, {"after": -1}, {"keep": 0}, {"every": 0}, {"clip": 0}, {"clip": math.nan}]
)
def test_a_recorder_refuses_by_name_too(tmp_path: Path, asked: dict[str, Any]) -> None:
    model = mlp(6, 16, 1)
    with pytest.raises((InvalidInput, UnsupportedClipping), match=f"^{next(iter(asked))}= is "):
        ak.FlightRecorder(model, torch.optim.AdamW(model.parameters()), squares, tmp_path, **asked)


def test_steps_that_are_asked_for_are_verified(run: Run) -> None:
    asked = ak.explain(run.recorder, step=SPIKE, verify=[CULPRIT - 3, CULPRIT], treatments=False)
    assert {c.step for c in asked.culprits if c.role == "suspect"} == {CULPRIT - 3, CULPRIT}
    with pytest.raises(InvalidInput, match="not among the steps"):
        ak.explain(run.recorder, step=SPIKE, verify=[3])
    with pytest.raises(InvalidInput, match="verify names different recorded steps"):
        ak.explain(run.recorder, step=SPIKE, verify=[CULPRIT, CULPRIT])


def test_contributions_agree_with_the_engine_and_add_up(run: Run, found: Any) -> None:
    """The same skipped steps by the engine, from a point made by hand."""
    start = int(found.data["step"].values[0])
    model = copy.deepcopy(run.model)
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(run.states[start][0])
    optimizer.load_state_dict(copy.deepcopy(run.states[start][1]))
    path = ak.capture(model, optimizer, squares).follow(run.batches[start : SPIKE + 1])
    watch = path.watch(0, ak.own_loss)
    straight, edits = BentReadout.of(watch, directions=0), {"skip": EDITS["skip"]}
    parts = contributions(path.trajectory, watch.last, straight, lambda step: edits, torch.device("cpu"))
    wanted = parts["skip"].sum(-1).numpy()
    assert np.abs(wanted).max() > 1e-4
    np.testing.assert_allclose(found.data["contribution"].sel(change="skip"), wanted, rtol=1e-8, atol=1e-12)
    by_layer = found.data["layer_contribution"].sum("layer")
    np.testing.assert_allclose(by_layer, found.data["contribution"].sum("channel"), rtol=1e-9, atol=1e-13)
    assert list(found.data["layer"].values) == ["0", "2"]


def test_batches_are_described_and_a_describe_that_fails_loses_nothing(run: Run) -> None:
    def shown(batch: Any) -> str:
        if torch.equal(batch[0], run.batches[SPIKE][0]):
            raise ValueError("no picture")
        return f"largest target {float(batch[1].max()):.3f}"

    found = ak.explain(run.recorder, step=SPIKE, verify=[CULPRIT], treatments=False, describe=shown)
    assert found.descriptions == {
        CULPRIT: f"largest target {float(run.batches[CULPRIT][1].max()):.3f}",
        SPIKE: "describe() failed on this batch: ValueError: no picture",
    }


def test_the_skip_list_is_lightnings(tmp_path: Path, found: Any) -> None:
    path = found.save_skip_list(tmp_path / "skip_batches.json")
    assert json.loads(path.read_text()) == [CULPRIT - WARM]


def test_a_batch_that_did_it_in_several_epochs_is_on_the_skip_list_once(found: Any) -> None:
    several = with_facts(found, blamed=(CULPRIT, CULPRIT + 1, CULPRIT + 2))
    assert several.skip == [CULPRIT - WARM, CULPRIT + 1 - WARM, CULPRIT + 2 - WARM]
    index = found.data["batch_index"].copy()
    index[index["place"] == CULPRIT + 2] = CULPRIT - WARM  # the same batch, in a later epoch
    again = type(found)(several.data.assign(batch_index=index))
    assert again.skip == [CULPRIT - WARM, CULPRIT + 1 - WARM]
    nan = with_facts(found, kind="not a number", batch_is_bad=True, asked_batches=(4, 4))
    assert nan.skip == [4]


def test_where_sound_batches_are_missed_no_other_batch_is_called_sound(found: Any) -> None:
    """Whether the explained one is bad by itself may not be known: two sentences on said that."""
    said = with_facts(found, kind="unknown", blamed=(), cleared=(CULPRIT,)).verdict
    assert f"is not known: without step {CULPRIT} half of it would be gone, but not with batches like its own" in said
    assert "no batch is bad" not in said


def test_examples_that_were_ranked_and_are_not_told_are_not_said_to_be_not_ranked(found: Any) -> None:
    """How they were found was said to be the reason: each put alone into the batch of the step before."""
    data = found.data
    culprit, steps, channels = data["step"] == CULPRIT, data["contribution"]["step"], data.sizes["channel"]
    parts = data["contribution"].copy()
    parts[:, (steps == CULPRIT).values] = found.culprits[0].measured / channels
    parts[:, (steps != CULPRIT).values] = -found.size / channels  # and that is wrong
    shares = np.where(culprit.values[:, None], [[0.3, 0.1, 0.1, 0.1]], math.nan)
    ranked = data.drop_vars("example_share").assign(contribution=parts, example_share=(("step", "example"), shares))
    ranked["example_note"] = data["example_note"].where(~culprit, "each put alone into the batch of the step before")
    one = type(found)(ranked)
    assert not one.sizes_hold
    said = "Its examples are not told: its prediction was right, and those of other steps are not to be trusted."
    assert said in one.verdict
    assert "each put alone" not in one.verdict


def test_what_a_share_is_of_is_said_where_a_step_of_the_event_itself_was_left_out(tmp_path: Path, found: Any) -> None:
    """Two causes of one stretch: without the one that is its peak 14% of that was left, and 84% was said."""
    pair = (CULPRIT, CULPRIT + 1)
    group = {"kind": "group", "blamed": pair, "group": pair, "group_left": 0.4, "group_placebos": 8, "gone": 0.0}
    assert LESS_OWN not in with_facts(found, **group).verdict
    inside = with_facts(found, **group, onset=CULPRIT)
    assert LESS_OWN in inside.verdict
    assert str(inside).count(LESS_OWN) == 2  # beside the table, too
    assert LESS_OWN in html.unescape(inside.report(tmp_path / "page.html").read_text())
    nothing = with_facts(found, **{**group, "gone": 1.0}, onset=CULPRIT)  # of all that is left of the event
    assert LESS_OWN not in str(nothing)


def test_that_no_batch_did_it_is_said_only_where_that_was_seen(found: Any) -> None:
    """A treatment that prevents it does not show it, and a step without which it is gone is not passed over."""
    nobody = {"kind": "instability", "blamed": ()}
    said = with_facts(found, **nobody).verdict
    assert said.startswith(f"No batch is known to have done this: without step {CULPRIT} ")
    assert "of it stays, and nothing shows that this is special." in said
    missed = with_facts(found, **nobody, cleared=(CULPRIT,)).verdict
    assert missed.startswith(f"No batch is known to have done this: without step {CULPRIT} half of it would be gone")
    assert with_facts(found, **nobody, placebos_change=3).verdict.startswith("No batch did this. Leaving out 3 of 8")
    acquitted = with_facts(found, **nobody, several=8, several_change=3, several_acquitted=True).verdict
    assert acquitted.startswith("No batch did this. Each of several steps removes it alone")


def test_no_skip_list_is_written_where_nobody_is_blamed(tmp_path: Path, found: Any) -> None:
    nobody = with_facts(found, blamed=(), kind="instability")
    assert nobody.skip == []
    path = tmp_path / "skip.json"
    with pytest.raises(InvalidInput, match=r"no batch is to blame \(instability\), so no skip list is written; f"):
        nobody.save_skip_list(path)
    assert not path.exists()
    found.save_skip_list(path)
    with pytest.raises(InvalidInput, match=r"skip.json stays as it was"):
        nobody.save_skip_list(path)
    assert json.loads(path.read_text()) == [CULPRIT - WARM]


def test_tensorboard_gets_scalars(found: Any) -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.seen.append((tag, value, step))

    writer = Writer()
    found.to_tensorboard(writer)
    assert ("aftershock/measured", found.culprits[0].measured, CULPRIT) in writer.seen


def test_a_learning_rate_that_rose(tmp_path: Path) -> None:
    run = regression(tmp_path, bad=None, lr=lambda step: 1e-2 if step < WARM + 20 else 0.5)
    found = ak.explain(run.recorder, step=SPIKE)

    def held(step: int, model: nn.Module, optimizer: Any) -> bool:
        optimizer.param_groups[0]["lr"] = 1e-2
        return False

    assert (found.kind, found.hyperparameter, found.skip) == ("hyperparameter", "lr", [])
    assert f"lr changed from 0.01 to 0.5 at step {WARM + 20}" in found.verdict
    assert "No batch is to blame" in found.verdict
    with_old_rate = float(found.data["treatment_value"].isel(treatment=0).sel(place=SPIKE))
    assert with_old_rate == pytest.approx(run.again(WARM + 20, SPIKE, held), rel=1e-8)


def test_a_rate_that_is_held_is_named_for_as_long_as_it_is(tmp_path: Path) -> None:
    """A slow fall ends where the rate jumps: "held from its first step on" was said of a run that jumped with it."""
    run = regression(tmp_path, bad=None, lr=lambda step: 1e-2 * 0.9 ** max(0, step - WARM) if step < WARM + 26 else 0.5)
    names = ak.explain(run.recorder, step=SPIKE, verify=0).data["treatment"].values.tolist()
    held = [name for name in names if "held" in name]
    assert f"lr held at its former value from step {WARM + 26} on" in held
    (fall,) = (name for name in held if name.startswith("lr held at its former value at steps "))
    assert fall.endswith(f"–{WARM + 25}")


def test_a_weight_decay_of_one_step(tmp_path: Path) -> None:
    """Told by its own name, though the batch of that step is innocent."""
    torch.manual_seed(0)
    model = mlp(6, 16, 1, activation=nn.GELU).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(6, 1, generator=draw, dtype=torch.float64)
    with ak.FlightRecorder(model, optimizer, squares, tmp_path, window=24) as recorder:
        for step in range(140):
            x = torch.randn(16, 6, generator=draw, dtype=torch.float64)
            optimizer.param_groups[0]["weight_decay"] = 60.0 if step == 110 else 0.01
            optimizer.zero_grad()
            loss = squares(model, (x, torch.tanh(x @ weights)))
            loss.backward()
            optimizer.step()
            recorder.step((x, torch.tanh(x @ weights)), loss)
    found = ak.explain(recorder, step=112)
    assert (found.kind, found.hyperparameter, found.skip) == ("hyperparameter", "weight_decay", [])


def test_a_batch_that_is_itself_the_spike(run: Run) -> None:
    found = ak.explain(run.recorder, step=CULPRIT)
    assert found.kind in ("own batch", "batch")
    assert found.blamed == (CULPRIT,)
    assert found.skip == [CULPRIT - WARM]
    end = found.facts.event.end
    losses = [
        run.again(CULPRIT, last, lambda step, *_: step == CULPRIT) for last in range(end - BARS.tail + 1, end + 1)
    ]
    (without, *_) = other_runs(found)
    assert without.name == f"the batch of step {CULPRIT} left out"
    assert without.after == pytest.approx(sum(losses) / BARS.tail, rel=1e-9)


def one_sided(directory: Path, **options: Any) -> ak.FlightRecorder:
    """Noise of either sign in the targets; at step 60 of one sign, so that the gradient is large and the loss usual."""
    torch.manual_seed(0)
    model = mlp(6, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with ak.FlightRecorder(model, optimizer, squares, directory, window=40, **options) as recorder:
        for step in range(70):
            signs = torch.ones(64, 1) if step == 60 else torch.randint(2, (64, 1)) * 2.0 - 1
            batch = torch.randn(64, 6), 0.5 * signs + 0.02 * torch.randn(64, 1)
            optimizer.zero_grad()
            loss = squares(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    return recorder


def test_a_batch_whose_gradient_norm_alone_stands_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ak.explain(one_sided(tmp_path), treatments=False, verify=1, examples=0)
    assert "step 60: the gradient norm is" in capsys.readouterr().err
    assert (found.facts.event.explained, found.kind, found.blamed) == (60, "own batch", (60,))
    assert found.verdict.startswith("The gradient norm of step 60 stands out, ")
    assert "The batch of step 60 itself is the spike: its gradient norm is " in found.verdict


def test_where_nothing_was_seen_and_no_step_asked_for_that_is_said(tmp_path: Path) -> None:
    recorder = one_sided(tmp_path, triggers=())
    found = ak.explain(recorder)
    said = found.verdict
    assert "what each added" not in str(found)
    losses = {record.step: record.loss for record in recorder.recent}
    highest = max(losses, key=losses.__getitem__)
    assert said.startswith("Nothing triggered in this run. The highest of the last 40 losses is ")
    assert f"losses is {losses[highest]:.4g} at step {highest} (median" in said
    assert "a spike is told from 8 robust σ" in said


def frozen_on_the_way(folder: Path) -> ak.FlightRecorder:
    """A loop that freezes a layer at step 20, which stops the recorder, and has a bad batch at step 25."""
    torch.manual_seed(0)
    model = mlp(6, 16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ak.FlightRecorder(model, optimizer, squares, folder, window=16) as recorder:
        for step in range(30):
            next(model.parameters()).requires_grad_(step < 20)
            batch = torch.randn(16, 6), torch.randn(16, 1) * (50 if step == 25 else 1)
            optimizer.zero_grad()
            loss = squares(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    return recorder


def test_where_the_recorder_stopped_nobody_knows_what_came_in_the_rest_of_the_run(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="has stopped, training goes on.*frozen"):
        recorder = frozen_on_the_way(tmp_path)
    there = {"model": recorder.model, "loss_fn": squares}
    for said in (ak.explain(recorder).verdict, ak.explain(tmp_path, **there).verdict):
        assert said.startswith("Nothing triggered up to step 19, after which the recorder stopped (InvalidInput: param")
        assert "in this run" not in said


def test_the_last_step_is_explained_where_nothing_was_seen_and_it_stands_out(tmp_path: Path) -> None:
    run = regression(tmp_path, bad=WARM + 33, triggers=())
    said = ak.explain(run.recorder, verify=1, placebos=1, treatments=False).verdict
    assert said.startswith("Nothing triggered in this run. The highest of the last 16 losses is ")
    assert f"What follows is about the last step, {WARM + 33}. " in said


def test_a_last_step_that_no_trigger_would_tell_is_explained_only_if_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    heights = [1 + 0.1 * math.sin(i) for i in range(40)] + [1 + 0.1 * 5]  # of losses: the last is about 5 σ high

    def feed(step: int) -> Tensor:
        return torch.full((4, 1), heights[max(step - WARM, 0)] ** 0.5)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(0 * x) - x).square().mean()

    run = record(tmp_path, model, loss_fn, feed, steps=41, lr=lambda step: 1e-6)
    assert not run.recorder.flights
    found = ak.explain(run.recorder, treatments=False)
    assert (found.kind, found.blamed) == ("no spike", ())
    assert found.verdict.startswith("Nothing triggered in this run.")
    assert "What follows" not in found.verdict
    assert ak.explain(run.recorder, step=WARM + 40, treatments=False).kind != "no spike"


def test_an_ordinary_step_is_called_ordinary(run: Run) -> None:
    assert "is no spike" in ak.explain(run.recorder, step=WARM + 20, verify=1).verdict


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(6, 8, 3)

    def feed(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 6)
        return x * (math.nan if step == WARM + 20 else 1), torch.arange(8) % 3

    run = record(tmp_path, model, cross_entropy, feed, steps=23)
    assert [path.name for path in run.recorder.flights] == ["step-000420"]
    found = ak.explain(run.recorder, verify=1)
    assert found.facts.event.explained == WARM + 19
    assert found.kind == "not a number"
    assert found.verdict.startswith("The loss or gradient of step 420 is not finite; step 419 is the last finite one")
    assert "The batch itself holds values that are not finite" in found.verdict
    assert "what each added" not in str(found)
    assert found.skip == [20]
    with pytest.raises(InvalidInput, match="not recorded"):
        ak.explain(run.recorder, step=999)


def test_dropout_and_clipping_and_examples_that_couple(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyTransformer(dropout=0.2)
    cycle = torch.arange(6)

    def feed(step: int) -> Tensor:
        tokens = (cycle + torch.randint(0, 5, (8, 1))) % 5
        if step == CULPRIT:
            tokens[2] = torch.randint(0, 5, (6,))
        return tokens

    run = record(tmp_path, model, next_token, feed, clip=0.5, lr=lambda step: 3e-2)
    found = ak.explain(run.recorder, step=SPIKE)
    assert "to the bit" in str(found.certificate)
    tried = next(c for c in found.culprits if c.role == "suspect")
    again = run.again(tried.step, SPIKE, lambda step, *_: step == tried.step)
    assert run.losses[SPIKE] - again == pytest.approx(tried.measured, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["tanh_mlp", "batch_norm", "dropout"])
def test_an_examples_share_is_that_of_an_ordinary_batch_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """⟨λ, x(ordinary with it) − x(ordinary)⟩ from the path's own replaced batches, where examples couple too."""
    monkeypatch.setattr(kicks, "STIFF", math.inf)  # nowhere stiff: the linear pairing alone
    case = make(name)
    path = case.path(5)
    at, last = 1, 4
    control = path.control(at)
    watch = path.watch(at, ak.own_loss, last - at)
    swept = adjoint(watch, watch.slope, [last - at], torch.device("cpu"))
    batch, ordinary = path.steps[at].batch, path.steps[at - 1].batch
    shares, how = example_shares(control, path.trajectory, swept, batch, ordinary)
    assert shares is not None
    assert "put alone" in how

    def mixed(i: int) -> Any:
        found = tree_map(torch.clone, ordinary)
        for x, y in zip(tree_leaves(found), tree_leaves(batch)):
            x[i] = y[i]
        return found

    everything = path.replace([ordinary, *(mixed(i) for i in range(len(shares)))], at=at)
    paired = pair(swept.first, stack(everything.difference()))[0].double()
    assert torch.allclose(shares, paired[1:] - paired[0], rtol=1e-7, atol=1e-12)
    assert shares.abs().max() > 1e-6


def test_a_bad_batch_is_no_reference_for_the_steps_around_it() -> None:
    norms = [1.0, 1.1, 0.9, 1.0, 50.0, 1.05, 0.95, 1.0]
    assert neighbours(5, norms, 3) == [6, 3, 7]
    assert neighbours(4, norms, 3) == [3, 5, 2]
    assert neighbours(0, [1.0, 2.0, 90.0], 2) == [1, 2]  # too few are left without it


# --- what cannot be replayed is said


def test_untold_clipping_is_named(tmp_path: Path) -> None:
    run = regression(tmp_path, clip=0.05, tell=False)
    with pytest.raises(ReplayMismatch, match=r"a missing clip=0.05: the gradients of \d+ steps"):
        ak.explain(run.recorder, step=SPIKE)


def test_a_run_that_does_not_repeat_is_named(tmp_path: Path) -> None:
    run = regression(tmp_path)
    with pytest.raises(ReplayMismatch, match="part at step 400, 0 step"):
        ak.explain(run.recorder, step=SPIKE, loss_fn=lambda m, b: 2 * squares(m, b))
    noise = torch.Generator().manual_seed(0)

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0] + 0.1 * torch.randn(batch[0].shape, generator=noise)), batch[1])

    with pytest.raises(Nondeterministic, match="`noise`"):
        ak.explain(run.recorder, step=SPIKE, loss_fn=noisy)


def test_a_windows_states_are_kept_where_they_fit(run: Run, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replays, plain = list[Replay](), replaying.replay
    monkeypatch.setattr(opening, "replay", lambda *args: replays.append(plain(*args)) or replays[-1])

    def kept(memory: int | None) -> tuple[str, int]:
        again = ak.explain(
            run.recorder, step=SPIKE, verify=[CULPRIT], placebos=0, treatments=False, examples=0, memory=memory
        )
        best = next(c for c in again.culprits if c.step == CULPRIT)
        assert best.measured == pytest.approx(found.culprits[0].measured, rel=1e-12)  # the same either way
        path = replays[-1].trajectory
        in_memory = sum(path.kept(time) is not None for time in range(len(path) + 1))
        assert memory is None or in_memory * path.state(0).nbytes <= memory
        return path.keep, in_memory

    assert kept(None)[0] == "states"  # 1 GiB burdens nobody
    path = replays[-1].trajectory
    count, state, vector = len(path) + 1, path.state(0).nbytes, path.state(0).theta.nbytes
    needed = count * state + len(path) * vector
    assert kept(needed) == ("states", count)
    assert kept(needed - 1)[0] == "checkpoints"
    assert kept(count * state // 2)[1] <= count // 2
    monkeypatch.setattr(path_plans, "LEAST", 0)  # a model as large as others: three times what training holds
    mode, some = kept(None)
    assert mode == "checkpoints"
    assert some * state < 3 * (state + 20 * vector)


def test_a_sweep_that_does_not_fit_is_refused_and_the_proofs_stand(run: Run, found: Any) -> None:
    again = ak.explain(run.recorder, step=SPIKE, treatments=False, memory="40KiB")
    assert again.blamed == found.blamed
    assert all(math.isnan(c.predicted) for c in again.culprits)
    assert "Nothing is predicted: the sweep keeps" in str(again.certificate)
    assert "pass more, or a shorter window=" in str(again.certificate)
    with pytest.raises(InvalidInput, match="memory is a number of bytes"):
        ak.explain(run.recorder, step=SPIKE, memory="much")


def test_another_process_needs_the_code(tmp_path: Path, run: Run) -> None:
    elsewhere = tmp_path / "copied"
    import shutil

    shutil.copytree(run.directory, elsewhere)
    with pytest.raises(InvalidInput, match="--build module:function"):
        ak.explain(elsewhere, step=SPIKE)
    fresh = mlp(6, 16, 1, activation=nn.GELU).double()
    found = ak.explain(elsewhere, step=SPIKE, model=fresh, loss_fn=squares, verify=1)
    assert found.culprits[0].step == CULPRIT
    with pytest.raises(AftershockError, match="another model"):
        ak.explain(elsewhere, step=SPIKE, model=mlp(6, 16, 16, 1).double(), loss_fn=squares)
