"""Whom an inquiry blames, on runs that are made up: which steps remove how much of an event is written down here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.spike_truth import Event as TrueEvent

import aftershock as ak
from aftershock.core import exact_rows
from aftershock.core.batches import Accumulated
from aftershock.core.dynamics import Step
from aftershock.core.rows import row_gradients
from aftershock.recorder import candidates, groups, reruns, stated, suspects, trials
from aftershock.recorder.event import Event
from aftershock.recorder.findings import Findings
from aftershock.recorder.hyperparameters import HyperChange
from aftershock.recorder.neighbours import Likeness
from aftershock.recorder.reruns import Run, run_again
from aftershock.recorder.scatter import Scatter
from aftershock.recorder.suspects import inquire
from aftershock.recorder.trials import Inquiry, Trial
from aftershock.recorder.verdict import _cleared, _hyperparameter, _not_special, _placebos, _rest, several

from .test_agreement import plain, running, squares

QUIET, SPIKE, STEP = 20, 4.0, 20  # usual losses before the spike, its height, its place
LOSSES = [1.0 + 0.01 * (i % 3) for i in range(QUIET)] + [1.0 + SPIKE] + [1.0] * 8
OTHERWISE = [*LOSSES[:STEP], 1.0 + 1.1 * SPIKE, *LOSSES[STEP + 1 :]]  # a replay of a run that does not repeat itself
EVENT = Event.of(LOSSES, STEP)
Left = Callable[[frozenset[int]], float]


def test_the_largest_loss_of_an_event_may_come_after_the_explained_one() -> None:
    assert EVENT.highest == STEP
    later = [*LOSSES[:STEP], 1.5, 1.4, 9.0, *LOSSES[STEP:]]
    assert Event.of(later, STEP).highest == STEP + 2


class Runs:
    """Stands in for `run_again`: a run's spike is what `left` says of the steps that it leaves out, or `instead` of
    those that it gives other batches, or `again` where it starts a rounding away; two steps later where `moves` says
    so."""

    def __init__(
        self, left: Left, instead: Left, moves: Callable[[frozenset[int]], bool], again: Left | None = None
    ) -> None:
        self.left, self.instead, self.moves, self.again = left, instead, moves, again
        self.twice = list[frozenset[int]]()
        self.ends = dict[frozenset[int], str]()

    def __call__(
        self, trajectory: Any, runs: Sequence[Run], last: int, tick: Any, done: Callable[..., bool], quantity: str
    ) -> list[dict[int, float]]:
        self.ends |= {run.left_out: done.__name__ for run in runs}
        return [self._losses(run) for run in runs]

    def _losses(self, run: Run) -> dict[int, float]:
        left = self.left(run.left_out) if run.left_out else self.instead(frozenset(run.steps))
        if run.jittered:
            assert self.again is not None, "a run that repeats itself is run once"
            self.twice.append(frozenset(run.steps))
            left = self.again(frozenset(run.steps))
        high = STEP + 2 * self.moves(run.left_out)
        return {i: 1.0 + SPIKE * left if i == high else min(LOSSES[i], 1.02) for i in range(run.at, len(LOSSES))}


def asked_of(
    left: Left,
    suspected: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    instead: Left = lambda steps: 1.0,
    *,
    moves: Callable[[frozenset[int]], bool] = lambda out: False,
    rare: Sequence[int] = (),
    again: Left | None = None,
    **options: Any,
) -> Inquiry:
    """instead: what is left with batches like their own in place of some. rare: steps with another kind of data. again:
    what is left in a second run, of one that does not repeat itself."""
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(64, 3, generator=draw) * torch.tensor([1.0, 1.0, 9.0 if i in rare else 1.0]) for i in range(29)
    ]
    steps = [Step(i, x, None, (), None) for i, x in enumerate(inputs)]  # type: ignore[arg-type]
    trajectory: Any = SimpleNamespace(steps=steps)
    monkeypatch.setattr(trials, "run_again", Runs(left, instead, moves, again))
    scatter = Scatter() if again is None else Scatter(tuple(dict(enumerate(values)) for values in (LOSSES, OTHERWISE)))
    return inquire(trajectory, EVENT, suspected, **{"placebos": 8, "seed": 0, "scatter": scatter} | options)


def test_three_that_only_together_do_it_are_found_and_an_innocent_one_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guilty = frozenset((5, 6, 7))

    def left(out: frozenset[int]) -> float:
        return 0.1 if guilty <= out else 0.9 - 0.05 * len(out & guilty) - 0.2 * (9 in out)

    found = asked_of(left, [5, 6, 7, 9, STEP], monkeypatch)
    assert found.group is not None
    assert found.group.steps == (5, 6, 7)
    assert found.blamed == (5, 6, 7)
    assert len(found.group_placebos) == 8


def test_of_several_that_each_remove_it_none_did_it_where_as_many_others_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a run that has only begun, whose early steps all matter: any three of them are worth as much."""
    guilty = frozenset((2, 5, 7))

    def left(out: frozenset[int]) -> float:
        return 0.15 if out & guilty else 0.9

    each = asked_of(left, [2, 5, 7, 9], monkeypatch, left)
    assert sorted(each.blamed) == [2, 5, 7]
    assert len(each.several) >= 4
    nobody = asked_of(lambda out: 0.3 if len(out) == 3 else left(out), [2, 5, 7, 9], monkeypatch)
    assert (nobody.blamed, nobody.acquitted) == ((), True)
    told: Any = SimpleNamespace(several_acquitted=True, several=len(nobody.several), several_change=2)
    assert f"too, in 2 of {len(nobody.several)} cases: none of them is special." in several(told)
    told.several_acquitted = False
    assert several(told) == ""


@pytest.mark.parametrize(
    ("placebos", "earlier", "blamed"),
    [
        (2.0, (), (STEP,)),  # which is how high it is on other weights
        (0.9, (), (STEP,)),
        (0.3, (), ()),  # as of a run that anything changes
        (2.0, (3, 5, 7), ()),  # several earlier ones remove it, too
    ],
)
def test_a_batch_that_is_high_by_itself_may_be_higher_without_others(
    placebos: float, earlier: Sequence[int], blamed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(out: frozenset[int]) -> float:
        return 0.0 if STEP in out else 0.1 if out & set(earlier) else placebos

    found = asked_of(left, [3, 5, 7, STEP], monkeypatch, own=(STEP,))
    assert found.by_itself == blamed
    if blamed:
        assert (len(found.placebos), found.removing) == (8, 0)
    assert asked_of(left, [3, 5, 7, STEP], monkeypatch).by_itself == ()


@pytest.mark.parametrize(("left", "own", "told"), [(0.48, 0.01, True), (0.48, 0.4, False), (0.2, 0.01, False)])
def test_where_much_is_left_without_the_blamed_the_explained_batch_is_told_too(
    left: float, own: float, told: bool
) -> None:
    facts: Any = {
        "event": SimpleNamespace(explained=99),
        "blame": SimpleNamespace(own_left=own),
        "instruments": SimpleNamespace(data_said="its loss is 121"),
    }
    said = _rest(SimpleNamespace(facts=SimpleNamespace(**facts)), left)  # type: ignore[arg-type]
    whole = ["Without step 99 itself 1% is left; its batch beside others: its loss is 121."]
    assert said == (whole if told else [])
    facts["blame"].own_left = math.nan  # of a batch that is not high elsewhere
    assert _rest(SimpleNamespace(facts=SimpleNamespace(**facts)), left) == []  # type: ignore[arg-type]


# --- where the run does not repeat itself


def lefts(found: Inquiry) -> dict[int, tuple[float, float, bool]]:
    return {t.steps[0]: (round(t.left, 2), round(t.left_spread, 2), t.lucky) for t in found.suspects}


def test_a_blame_that_holds_in_one_run_alone_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(out: frozenset[int]) -> float:
        return 0.1 if 7 in out else 0.9

    holds = asked_of(left, [7, 9], monkeypatch, again=lambda out: 0.25)
    assert holds.blamed == (7,)
    # the worse of both is told; what is left of replays of the unchanged run is 0.1 apart, and of the two runs 0.15
    assert lefts(holds) == {7: (0.25, 0.15, False), 9: (0.9, 0.1, False)}
    assert trials.run_again.twice == [{7}]  # type: ignore[attr-defined]  # what keeps the event is run once
    lucky = asked_of(left, [7, 9], monkeypatch, again=lambda out: 0.8, groups=False)
    assert lucky.blamed == ()
    assert lefts(lucky) == {7: (0.8, 0.7, True), 9: (0.9, 0.1, False)}
    alone = asked_of(left, [7, 9], monkeypatch)
    assert alone.blamed == (7,)
    assert math.isnan(alone.suspects[0].left_spread)


def test_a_placebo_that_removes_it_in_one_run_alone_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    placebo = asked_of(lambda out: 0.9, [7], monkeypatch).placebos[0].steps[0]

    def left(out: frozenset[int]) -> float:
        return 0.1 if placebo in out else 0.3 if 7 in out else 0.9

    assert placebo in asked_of(left, [7], monkeypatch, left).blamed
    found = asked_of(left, [7], monkeypatch, again=lambda out: 0.9 if placebo in out else 0.3, groups=False)
    assert found.blamed == (7,)
    assert lefts(found)[placebo] == (0.9, 0.8, True)


def test_a_group_and_batches_like_its_own_must_hold_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = frozenset((5, 6))

    def left(out: frozenset[int]) -> float:
        return 0.1 if guilty <= out else 0.8 - 0.05 * len(out & guilty)

    twice = asked_of(left, [5, 6, 9], monkeypatch, again=left)
    assert twice.blamed == (5, 6)
    assert twice.group is not None
    assert twice.group.left_spread == pytest.approx(0.1, abs=0.01)
    assert asked_of(left, [5, 6, 9], monkeypatch, again=lambda out: 0.8).blamed == ()

    def instead(steps: frozenset[int]) -> float:
        return 0.2 if 5 in steps else 0.95

    def without(out: frozenset[int]) -> float:
        return 0.7 if 5 in out else 0.9

    assert asked_of(without, [5, 9], monkeypatch, instead, again=instead, groups=False).blamed == (5,)
    assert asked_of(without, [5, 9], monkeypatch, instead, again=lambda steps: 0.9, groups=False).blamed == ()


def test_one_of_few_other_groups_acquits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run here takes the whole window, and four other groups are enough unless one of them changes the event."""
    asked = dict[frozenset[int], None]()

    def left(out: frozenset[int]) -> float:
        if len(out) == 1:
            return 0.15 if out & {2, 5, 7} else 0.9
        asked[out] = None
        return 0.3 if len(asked) == 1 else 0.9

    monkeypatch.setattr(trials, "MOST", 1)
    found = asked_of(left, [2, 5, 7, 9], monkeypatch, lambda steps: 0.15)
    assert (sorted(found.blamed), len(found.several)) == ([2, 5, 7], 8)


def test_of_several_that_each_remove_it_those_are_sound_whose_like_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only other batch of a rare kind, without which less of it is learnt: too few are there to see the kind."""

    def left(out: frozenset[int]) -> float:
        return 0.15 if out & {5, 7} else 0.9

    found = asked_of(left, [5, 7, 9], monkeypatch, lambda steps: 0.1 if 7 in steps else 0.95)
    assert (found.blamed, [t.steps for t in found.cleared]) == ((7,), [(5,)])


def test_what_is_left_with_one_of_a_group_back_is_of_the_group_that_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 and 7 do it, and 9 hardly anything: with 5 back and 9 in it still, more is left than with 5 back alone."""
    steps = {(5, 7, 9): 0.2, (7, 9): 0.95, (5, 9): 0.9, (5, 7): 0.25, (7,): 0.6, (5,): 0.55, (9,): 0.9}
    runs: Any = SimpleNamespace(accused=lambda out: Trial(out, {}, steps[out]))
    group, back = groups._needed(runs, Trial((5, 7, 9), {}, 0.2))
    assert (group.steps, back) == ((5, 7), 0.55)


def test_one_step_that_was_left_out_is_not_told_as_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 and 7 saw one batch, and 7 is not needed; 5 alone removes half, not clearly more than placebos do."""

    def left(out: frozenset[int]) -> float:
        return 0.46 if 5 in out else 0.9

    found = asked_of(left, [5, 7], monkeypatch, repeated=[(5, 7)])
    assert (found.blamed, found.replaced, found.group) == ((), [], None)


def test_each_round_asks_anew_who_does_most_beside_those_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone 9 and 3 do more than 7, which acts only beside 5; without all three of them nothing is left."""
    alone = {5: 0.6, 9: 0.65, 3: 0.7, 7: 0.95}

    def left(out: frozenset[int]) -> float:
        if {5, 7, 9} <= out:
            return 0.0
        return 0.3 if {5, 7} <= out else min((alone.get(i, 1.0) for i in out), default=1.0)

    found = asked_of(left, [3, 5, 7, 9], monkeypatch)
    assert found.blamed == (5, 7, 9)
    assert found.group_back == pytest.approx(0.3, abs=0.01)  # with 9 back
    anybody = asked_of(lambda out: 0.0 if len(out) > 2 else left(out), [3, 5, 7, 9], monkeypatch)
    assert anybody.blamed == ()  # any three would do


def test_groups_are_looked_for_where_one_that_removes_half_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rare kind of data: step 5 alone removes half, not clearly more than others do; 5, 8 and 11 remove all of it,
    and 11, which does nothing alone, is no suspect."""
    guilty = frozenset((5, 8, 11))

    def left(out: frozenset[int]) -> float:
        return {0: 0.95, 1: 0.49 if 5 in out else 0.95, 2: 0.3, 3: 0.0}[len(out & guilty)]

    found = asked_of(left, [5, 8], monkeypatch, lambda steps: 0.9, rare=RARE)
    assert found.blamed == (5, 8, 11)
    assert not {i for t in found.group_placebos for i in t.steps} & guilty


def test_the_explained_step_is_in_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loss is gone without it, whoever raised it."""

    def left(out: frozenset[int]) -> float:
        return 1.0 - 0.3 * len(out & {3, 4}) - 0.45 * (STEP in out)

    found = asked_of(left, [3, 4, STEP], monkeypatch)
    assert found.group is not None
    assert found.group.steps == (3, 4)


def test_suspects_are_hardly_asked_for_where_placebos_remove_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked_of(lambda out: 0.2, [1, 2, 3, 4, 5], monkeypatch)
    assert len(found.placebos) == 3  # more than a third of eight
    assert len(found.suspects) == suspects.LEAST
    assert found.blamed == ()
    assert len(asked_of(lambda out: 0.2, [1, 2, 3], monkeypatch, least=3).suspects) == 3


def test_as_many_placebos_acquit_as_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run in which one step in three changes the event, four had missed that with a probability of 0.2."""
    assert len(asked_of(lambda out: 1.0, [1], monkeypatch).placebos) == 8
    blamed = asked_of(lambda out: 0.1 if out == {1} else 1.0, [1], monkeypatch)
    assert (len(blamed.placebos), blamed.blamed) == (8, (1,))
    ends = trials.run_again.ends  # type: ignore[attr-defined]
    assert [ends[frozenset(t.steps)] for t in blamed.placebos] == ["decided"] * 8
    assert ends[frozenset({1})] == "stays"


def test_one_placebo_that_changes_it_asks_for_more_only_where_somebody_seems_guilty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = [t.steps[0] for t in asked_of(lambda out: 1.0, [1], monkeypatch, placebos=16).placebos]
    doubling = frozenset(drawn[:1])

    def left(out: frozenset[int], removes: float) -> float:
        return 3.0 if out == doubling else removes if out == {1} else 1.0

    assert len(asked_of(lambda out: left(out, 1.0), [1], monkeypatch).placebos) == 8
    found = asked_of(lambda out: left(out, 0.1), [1], monkeypatch)
    assert len(found.placebos) == 9
    assert found.blamed == (1,)


def test_a_close_verdict_asks_on_until_nobody_can_be_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    blame = asked_of(lambda out: 0.1 if out == {1} else 1.0, [1], monkeypatch, placebos=16)
    drawn = [t.steps[0] for t in blame.placebos]
    odd = {frozenset({i}) for i in (1, drawn[0], drawn[1], drawn[8])}
    found = asked_of(lambda out: 0.1 if out in odd else 1.0, [1], monkeypatch)
    assert len(found.placebos) == 9  # the third of them that removes it decides
    assert found.blamed == ()


def test_further_suspects_are_asked_where_one_is_not_clearly_special(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(out: frozenset[int]) -> float:
        return {frozenset({1}): 0.45, frozenset({2}): 0.2}.get(out, 0.8)

    assert asked_of(left, [1], monkeypatch).blamed == ()  # more than half of what placebos leave
    found = asked_of(left, [1], monkeypatch, reserve=[2, 3])
    assert found.blamed == (2,)
    assert {(2,), (3,)} <= {t.steps for t in found.suspects} | {t.steps for t in found.placebos}
    clear = asked_of(lambda out: 0.2 if out == {1} else 0.8, [1], monkeypatch, reserve=[2, 3])
    assert [t.steps for t in clear.suspects] == [(1,)]


def test_a_batch_that_came_several_times_is_left_out_wherever_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them alone does anything, so that no order of suspects would find them."""
    same = frozenset((4, 11, 13))

    def left(out: frozenset[int]) -> float:
        return 0.2 if same <= out else 1.0 - 0.01 * len(out - same)

    suspected = [1, 2, 3, 4, 5, 11, 13]
    assert asked_of(left, suspected, monkeypatch).blamed == ()
    found = asked_of(left, suspected, monkeypatch, repeated=[(4, 11, 13)])
    assert found.blamed == (4, 11, 13)
    needless = asked_of(lambda out: 0.2 if out >= {4, 13} else 1.0, suspected, monkeypatch, repeated=[(4, 11, 13)])
    assert needless.blamed == (4, 13)


def test_suspects_that_saw_one_batch_are_found_by_their_inputs() -> None:
    def record(value: int, label: int) -> Any:
        return SimpleNamespace(fed=[SimpleNamespace(tensors=(torch.tensor([label]), torch.full((3, 2), value)))])

    records = [record(value, label) for label, value in enumerate((7, 1, 7, 2, 1, 3, 3, 3, 3, 3))]
    assert candidates.one_batch(records, [0, 1, 2, 3]) == [(0, 2)]  # step 4 is no suspect
    assert candidates.one_batch(records, [1, 4, 0, 2]) == [(1, 4), (0, 2)]
    assert candidates.one_batch(records, [5, 6, 7, 8, 9]) == []  # too many to be blamed together


def test_a_step_whose_batch_is_missed_is_blamed_for_what_batches_like_it_do_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without step 3 most of the event stays, because nothing is learnt there; with batches like its own it is gone."""

    def left(out: frozenset[int]) -> float:
        return 1.0 - 0.3 * len(out & {3, 4})

    found = asked_of(left, [3, 4, 5], monkeypatch, lambda steps: 0.2 if steps == {3} else 0.9)
    assert found.blamed == found.blamed_by_replacing == (3,)
    assert [t.steps for t in found.replaced] == [(3,), (4,)]  # those that do more than any placebo
    assert len(found.replaced_placebos) == 8
    anybody = asked_of(left, [3, 4, 5], monkeypatch, lambda steps: 0.2)
    assert anybody.blamed_by_replacing == ()
    assert anybody.blamed == (3, 4)  # together
    once = asked_of(lambda out: 0.2 if out == {3} else left(out), [3, 4, 5], monkeypatch, lambda steps: 0.2)
    assert (once.blamed, once.replaced) == ((3,), [])


RARE = (2, 5, 8, 11, 14, 17)


def test_a_sound_step_of_a_rare_kind_of_data_is_not_blamed_for_what_its_kind_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without any step of the rare kind half is gone, because less of it is learnt; the batch of step 5 is bad."""

    def left(out: frozenset[int]) -> float:
        return 0.3 if out & set(RARE) else 1.0

    found = asked_of(left, [5, 8, 11], monkeypatch, lambda steps: 0.1 if steps == {5} else 1.0, rare=RARE)
    assert found.blamed == found.blamed_by_replacing == (5,)
    assert {(8,), (11,)} <= {t.steps for t in found.cleared}
    assert {t.steps[0] for t in found.replaced_placebos} <= set(RARE)
    nobody = asked_of(left, [5, 8, 11], monkeypatch, lambda steps: 1.0, rare=RARE)
    assert nobody.blamed == ()
    anybody = asked_of(left, [5, 8, 11], monkeypatch, lambda steps: 0.1, rare=RARE)
    assert anybody.blamed == ()  # so do batches like theirs in place of any of their kind


def test_a_group_of_a_rare_kind_holds_no_sound_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three left out together remove it; the own batch of the third, put back beside sound ones, adds nothing."""

    def left(out: frozenset[int]) -> float:
        return 0.3 if len(out & {2, 5, 8}) == 3 else 0.9 - 0.05 * len(out & {2, 5, 8})

    def instead(steps: frozenset[int]) -> float:
        return 1.0 - 0.4 * len(steps & {2, 5})

    found = asked_of(left, [2, 5, 8], monkeypatch, instead, rare=RARE)
    assert found.group is not None
    assert found.blamed == found.group.steps == (2, 5)
    assert {i for t in found.group_placebos for i in t.steps} <= set(RARE) - {2, 5}
    assert asked_of(left, [2, 5, 8], monkeypatch, lambda steps: 1.0, rare=RARE).blamed == ()
    assert asked_of(left, [2, 5, 8], monkeypatch, instead).blamed == (2, 5, 8)  # where data are of one kind


@pytest.mark.parametrize(("scale", "among", "wanted"), [(9.0, 20, 5), (1.0, 20, 0), (9.0, 9, 0)])
def test_kin_are_the_rarer_of_two_kinds(scale: float, among: int, wanted: int) -> None:
    draw = torch.Generator().manual_seed(1)
    rare = set(RARE) if among == 20 else {0, 1, 2, 3, 4}
    scales = [torch.tensor([1.0, scale if i in rare else 1.0, 1.0]) for i in range(20)]
    inputs = [torch.randn(64, 3, generator=draw) * one for one in scales]
    steps = [Step(i, x, None, (), None) for i, x in enumerate(inputs)]  # type: ignore[arg-type]
    found = Likeness(steps).kin(2, range(among))
    assert (len(found), set(found) <= rare - {2}) == (wanted, True)
    signs = [Step(i, 3.0 * (-1) ** (i % 4 == 0) + x, None, (), None) for i, x in enumerate(inputs)]  # type: ignore[arg-type]
    assert scale > 1 or set(Likeness(signs).kin(4, range(20))) == {0, 8, 12, 16}


def test_nobody_is_blamed_where_leaving_out_any_step_moves_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its height stays without the others, and so a height alone would let step 1 be blamed."""

    def left(out: frozenset[int]) -> float:
        return 0.1 if out == {1} else 1.0

    assert asked_of(left, [1], monkeypatch).blamed == (1,)
    found = asked_of(left, [1], monkeypatch, moves=lambda out: out != {1})
    assert (found.blamed, found.changing) == ((), len(found.placebos))


def test_a_step_whose_own_loss_is_the_peak_has_not_raised_the_explained_one() -> None:
    """Steps 19 and 21 are high; without step 19, 21 is as high as ever, and without 18 neither is."""
    event = Event.of([*LOSSES[:19], 1.0 + 3 * SPIKE, 1.5, 1.0 + SPIKE, *LOSSES[22:]], 21)
    assert (event.onset, event.highest) == (19, 19)
    usual = dict(enumerate(LOSSES))
    assert event.left({**usual, 20: 1.5, 21: 1.0 + SPIKE}, frozenset({19})) == pytest.approx(1.0)
    assert event.left({**usual, 20: 1.0, 21: 1.0 + SPIKE / 2}, frozenset({19})) == pytest.approx(0.5, abs=0.03)
    assert event.left({**usual, 20: 1.0, 21: 1.0}, frozenset({18})) < 0.05
    assert event.left({**usual, 19: 1.0 + 3 * SPIKE, 20: 1.5}, frozenset({21})) == pytest.approx(1.0)  # the explained


def test_an_event_that_came_sooner_is_not_gone() -> None:
    sooner = dict.fromkeys(range(5, len(LOSSES)), 1.0) | {STEP - 4: 1.0 + 0.8 * SPIKE}
    assert EVENT.left(sooner) == pytest.approx(0.8, abs=0.01)
    assert not EVENT.prevented(sooner)
    odd = Event.of([*LOSSES[: STEP - 4], 1.6, *LOSSES[STEP - 3 :]], STEP)  # a batch that is odd in the path, too
    assert odd.left(sooner) == 0.0


def test_a_hundredth_of_a_blow_up_is_no_end_of_it() -> None:
    """A share of the peak says nothing where the peak is 1e10: the run must stay within its own ordinary range."""
    blown = [*LOSSES[:STEP], 3e10, *[1e9] * 8]
    event = Event.of(blown, STEP)
    quiet = dict.fromkeys(range(5, len(blown)), 1.0)
    assert event.prevented(quiet)
    assert event.prevented(quiet | {STEP: 1.9})  # within twice the usual loss
    for high in (1e9, 2e7, 300.0, 2.5):
        run = quiet | {STEP: high}
        assert event.left_by_then(run) < 0.1
        assert not event.prevented(run)
        assert event.blows_up(run) == (high > 1e6)
    assert Trial((3,), {}, 0.03).removes
    assert not Trial((3,), {}, 0.03, blows_up=True).removes


def test_an_event_above_losses_of_zero_can_be_removed() -> None:
    """As of a hinge loss that every example satisfies: no rise above zero is a blow-up that is below the event."""
    event = Event.of([0.0] * STEP + [1.0, 0.5] + [0.0] * 8, STEP)
    quiet = dict.fromkeys(range(STEP - 1, len(event.values)), 0.0)
    assert event.prevented(quiet | {STEP: 1e-9})
    assert not event.prevented(quiet | {STEP: 0.1})
    for high in (1e-9, 0.1, 2.0):
        assert not event.blows_up(quiet | {STEP: high})
    assert event.blows_up(quiet | {STEP: 1e4})


@pytest.mark.parametrize("usual", [1e-8, 1e-4])
def test_what_a_model_has_learnt_may_be_lost_without_a_blow_up(usual: float) -> None:
    """From 1e-8 to one and back is a hundred million times the usual loss, and what a model that knows nothing has."""
    event = Event.of([usual * loss for loss in LOSSES[:STEP]] + [1.0, 0.5] + [usual] * 8, STEP)
    quiet = dict.fromkeys(range(STEP - 1, len(event.values)), usual)
    for high in (0.02, 0.4, 5.0):
        assert not event.blows_up(quiet | {STEP: high})
    assert not event.prevented(quiet | {STEP: 0.02})  # less of it, and not gone
    assert event.blows_up(quiet | {STEP: 2e3})
    assert event.blows_up(quiet | {STEP: math.inf})


def test_a_run_that_does_not_end_as_usual_has_not_prevented_the_event() -> None:
    bar = 0.2 * SPIKE
    rest = dict.fromkeys(range(5, len(LOSSES)), 1.0)
    assert EVENT.prevented(rest | {STEP: 1.0 + 0.9 * bar})
    assert not EVENT.prevented(rest | dict.fromkeys(range(STEP + 1, len(LOSSES)), 1.0 + 0.6 * bar))
    plain_rest = {n: rest.get(n, LOSSES[n]) for n in range(len(LOSSES))}
    truth = TrueEvent.of(dict(enumerate(LOSSES)), STEP)
    assert truth.prevented(plain_rest | {STEP: 1.0 + 0.9 * bar}, STEP)
    assert not truth.prevented(plain_rest | dict.fromkeys(range(STEP + 1, len(LOSSES)), 1.0 + 0.6 * bar), STEP)
    blown = TrueEvent.of(dict(enumerate([*LOSSES[:STEP], 3e10, *[1.0] * 8])), STEP)
    assert not blown.prevented(plain_rest | {STEP: 300.0}, STEP)


def test_the_judge_measures_an_event_without_area_by_its_peak() -> None:
    """A high loss after losses that scatter widely: it is within their spread, which is all that the judge knows."""
    path = dict(enumerate([*[0.6, 1.4] * 12, 2.2, *[1.0] * 8]))
    event = TrueEvent.of(path, 24)
    assert (event.area, event.onset) == (0.0, 24)
    assert event.peak > 1
    mended = path | {24: event.usual + 0.25 * event.peak}
    assert (event.left(path), event.left(mended)) == (1.0, pytest.approx(0.25))
    assert not event.prevented(path, 24), "nothing was done"
    assert event.prevented(mended, 24)


def test_usual_losses_are_seen_beside_a_path_that_blows_up() -> None:
    """As a difference from 1e26 a loss of 0.3 has no digits left."""
    rows = SimpleNamespace(
        together=False,
        own_losses=lambda time: [0.3, 2e25],
        by_row=lambda values, control: torch.tensor(values, dtype=torch.float64) - control,
    )
    moment: Any = SimpleNamespace(exact=rows, time=0, trajectory=SimpleNamespace(steps=[SimpleNamespace(loss=1e26)]))
    assert reruns._values(moment, "loss").tolist() == [0.3, pytest.approx(2e25)]


def test_batches_are_alike_by_their_inputs_not_by_their_labels() -> None:
    def step(index: int, inputs: torch.Tensor, label: int) -> Step:
        return Step(index, (inputs, torch.tensor([label] * 3)), None, (), None)  # type: ignore[arg-type]

    draw = torch.Generator().manual_seed(0)
    scale = torch.tensor([5.0, 5.0, 0.1, 0.1])
    rare = [torch.randn(3, 4, generator=draw) * scale for _ in range(3)]
    usual = [torch.randn(3, 4, generator=draw) * scale.flip(0) for _ in range(3)]
    steps = [step(i, x, i % 2) for i, x in enumerate([rare[0], *usual, rare[1], rare[2], rare[2]])]
    batch = Likeness(steps).stand_in(5, range(7)).batch  # step 6 saw the same inputs, and is none
    assert isinstance(batch, Accumulated)
    assert {id(part) for part in batch.batches} == {id(steps[0].batch), id(steps[4].batch)}
    letters = [step(i, torch.tensor([[0, 1, 2], [n, n, n], [n, 2, 1]]), 0) for i, n in enumerate((7, 3, 3, 7, 9, 7))]
    letters[3] = step(3, torch.tensor([[0, 1, 2], [7, 7, 7], [7, 1, 1]]), 1)
    letters[5] = step(5, torch.tensor([[0, 1, 1], [7, 7, 7], [7, 7, 1]]), 1)
    batch = Likeness(letters).stand_in(0, range(6)).batch
    assert isinstance(batch, Accumulated)
    assert {id(part) for part in batch.batches} == {id(letters[3].batch), id(letters[5].batch)}


def test_a_group_is_nothing_special_where_other_groups_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(out: frozenset[int]) -> float:
        return 0.3 if len(out) > 1 else 0.8 if out == {3} else 0.9

    found = asked_of(left, [3, 4], monkeypatch)
    assert found.group is not None
    assert len(found.group_placebos) == 2  # more than an eighth of eight
    assert found.blamed == ()
    assert asked_of(left, [3, 4], monkeypatch, groups=False).group is None
    nothing = asked_of(lambda out: 0.3 if len(out) > 1 else 0.9, [3, 4], monkeypatch)
    assert nothing.group is None  # no suspect does more than a placebo: nothing speaks for a group of them


def test_a_group_that_others_acquitted_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most pairs remove the event as 3 and 4 do; those that would be drawn the second time keep it."""
    asked = dict[frozenset[int], None]()

    def left(out: frozenset[int]) -> float:
        if len(out) == 1:
            return 0.8 if out & {3} else 0.9
        asked[out] = None
        return 0.05 if out == {3, 4} or len(asked) <= 3 else 0.9

    found = asked_of(left, [3, 4], monkeypatch)
    assert (found.blamed, found.group) == ((), None)


@pytest.mark.parametrize(("held", "group", "named"), [(0.48, 0.31, True), (0.48, 0.1, False), (0.3, 0.45, True)])
def test_a_setting_that_removes_half_gives_way_to_a_group_that_leaves_clearly_less(
    held: float, group: float, named: bool
) -> None:
    together = Trial((8, 28), {}, group)
    inquiry = Inquiry([], [], group=together, group_placebos=[Trial((1, 2), {}, 0.9)] * 8)
    change: Any = SimpleNamespace(kind="restart", brief=False, at=24)
    f: Any = SimpleNamespace(changes=[change], _removing=[(held, 0)], inquiry=inquiry, _guilty=inquiry.blamed)
    assert (Findings.hyperparameter(f, ("restart",)) == 0) is named


def rise(at: int, was: float, now: float, name: str = "lr", groups: tuple[int, ...] = (0,)) -> HyperChange:
    each = (was,) * len(groups), (now,) * len(groups)
    return HyperChange(name, "jump", at, len(LOSSES), (at, len(LOSSES) - 1), (at, at), groups, *each, now / was, 1.0, 2)


@pytest.mark.parametrize(
    ("later", "removes", "named"),
    [
        (rise(20, 0.03, 0.4), True, 1),
        (rise(20, 0.03, 0.4), False, 0),  # both of them together
        (rise(20, 0.03, 0.4, groups=(1,)), True, 0),  # which the first has nothing to do with
        (rise(20, 0.01, 0.1, name="weight_decay"), True, 0),
    ],
)
def test_of_changes_that_are_undone_together_that_is_named_which_did_it_alone(
    later: HyperChange, removes: bool, named: int
) -> None:
    """A rate that was held from the first, harmless rise on is not raised the second time either."""
    findings = found_of("weights", Inquiry([], []))
    held: Any = [SimpleNamespace(left=0.0, removes=True), SimpleNamespace(left=0.1, removes=removes)]
    findings.changes, findings.held = [rise(9, 0.01, 0.03), later], held
    assert findings.hyperparameter(("jump",)) == named
    assert findings.kind == "hyperparameter"
    findings.finite_with = [True, removes]  # of a step that is not a number
    assert findings.setting == named


# --- the explained step itself


@pytest.mark.parametrize(
    ("removing", "kind", "wanted"),
    [
        ((STEP,), "own batch", "own batch"),
        ((STEP,), "both", "unknown"),  # without it its loss is gone, whoever raised it
        ((STEP, 7), "own batch", "batch"),
        ((STEP, 7), "both", "batch"),
        ((7,), "weights", "batch"),
    ],
)
def test_the_explained_step_is_blamed_where_no_earlier_one_is_and_its_batch_is_bad_by_itself(
    removing: tuple[int, ...], kind: str, wanted: str
) -> None:
    kept = [Trial((i,), {}, 1.0) for i in range(8)]
    findings = found_of(kind, Inquiry([Trial((i,), {}, 0.1) for i in removing], kept))
    assert findings.kind == wanted
    assert findings.blamed == ({"own batch": (STEP,), "batch": (7,), "unknown": ()}[wanted])


@pytest.mark.parametrize(("data", "wanted"), [("both", "hyperparameter"), ("own batch", "own batch")])
def test_a_setting_gives_way_to_the_explained_step_only_where_its_batch_is_bad_by_itself(
    data: str, wanted: str
) -> None:
    """Without it its own loss is gone, whoever raised it."""
    kept = [Trial((i,), {}, 1.0) for i in range(8)]
    findings = found_of(data, Inquiry([Trial((STEP,), {}, 0.1)], kept))
    findings.changes, findings.held = [rise(9, 0.01, 0.03)], [SimpleNamespace(left=0.3, removes=True)]  # type: ignore[list-item]
    assert findings.kind == wanted


@pytest.mark.parametrize(("removing", "wanted"), [(3, "unknown"), (4, "instability")])
def test_more_steps_than_could_be_culprits_are_a_run_that_anything_changes(removing: int, wanted: str) -> None:
    """Each removes half of it, and not clearly more than placebos do, which leave 0.7 of it."""
    kept = [Trial((i,), {}, 0.7) for i in range(8, 16)]
    findings = found_of("weights", Inquiry([Trial((i,), {}, 0.45) for i in range(removing)], kept))
    assert (findings.kind, findings.blamed) == (wanted, ())


@pytest.mark.parametrize(("left", "wanted"), [(0.1, "own batch"), (0.4, "unknown")])
def test_several_batches_are_the_spike_only_where_little_is_left_without_them(left: float, wanted: str) -> None:
    """Without the three loudest values of an ordinary noisy stretch half of it is gone."""
    kept = [Trial((i,), {}, 1.0) for i in range(8)]
    own = Trial((STEP, STEP + 2), {}, left)
    findings = found_of("own batch", Inquiry([Trial((9,), {}, 0.9)], kept, own=own))
    assert (findings.kind, findings.blamed) == (wanted, own.steps if wanted == "own batch" else ())


@pytest.mark.parametrize(("kin", "changing", "blamed"), [(7, 1, (3,)), (6, 1, (3,)), (5, 1, ()), (8, 2, ())])
def test_one_of_a_few_of_a_rare_kind_that_changes_it_may_be_chance(
    kin: int, changing: int, blamed: tuple[int, ...]
) -> None:
    others = [Trial((10 + i,), {}, 1.0, departs=0.7 * (i < changing)) for i in range(kin)]
    found = Inquiry([Trial((3,), {}, 0.1)], [], [Trial((3,), {}, 0.1)], others, kin=True)
    assert found.blamed == blamed


def test_why_a_step_without_which_half_is_gone_is_not_blamed_is_said() -> None:
    def said(**blame: Any) -> str:
        facts = {"gone_with_others": (), "replaced_placebos": 0, "replaced_placebos_change": 0, "kin": True} | blame
        suspect, mild = (SimpleNamespace(step=i, role=r, left=x, left_so_far=True) for i, r, x in PAIR)
        found: Any = SimpleNamespace(facts=SimpleNamespace(blame=SimpleNamespace(**facts)), culprits=[suspect, mild])
        return _not_special(found, suspect)  # type: ignore[arg-type]

    PAIR = [(208, "suspect", 0.4), (190, "placebo", 0.9)]
    several = said(gone_with_others=(208,), replaced_placebos=7, replaced_placebos_change=2)
    assert "such batches at 2 of 7 other steps of its kind of data change it as well" in several
    alike = said(gone_with_others=(208,), replaced_placebos=8)
    assert "too, but more is left than half of what such batches leave at another step of its kind of data" in alike
    assert said(gone_with_others=(204,)) == "and nothing shows that this is special"
    PAIR[1] = (190, "placebo", 0.7)
    assert said() == "and without step 190, which nobody suspects, ≥ 70%"


def test_a_sound_batch_of_no_known_kind_is_not_said_to_be_of_a_kind() -> None:
    def said(kin: bool) -> str:
        return _cleared(SimpleNamespace(cleared=(5,), kin=kin))  # type: ignore[arg-type]

    assert "what is missed there is the kind of data, and the batch is sound" in said(True)
    assert "what is missed there is a step, or its kind of data, and the batch is sound" in said(False)


@pytest.mark.parametrize(("gone", "wanted"), [(0, "draw"), (1, "draw"), (2, "instability"), (8, "instability")])
def test_what_was_drawn_is_the_spike_only_where_other_runs_have_it_too(gone: int, wanted: str) -> None:
    placebos = [Trial((i,), {}, 0.1 if i < gone else 1.0) for i in range(8)]
    assert found_of("draw", Inquiry([Trial((9,), {}, 0.9)], placebos)).kind == wanted
    assert found_of("draw", Inquiry([Trial((9,), {}, 0.9)], [])).kind == "unknown"


def found_of(data: str, inquiry: Inquiry) -> Findings:
    replayed: Any = SimpleNamespace(
        last=STEP, records=[SimpleNamespace(step=i) for i in range(len(LOSSES))], runs=lambda quantity: [LOSSES]
    )
    kind: Any = SimpleNamespace(kind=data)
    return Findings(None, replayed, EVENT, None, STEP, EVENT, data=kind, inquiry=inquiry)  # type: ignore[arg-type]


# --- a run ends where it is decided


def stretch(*after: float) -> dict[int, float]:
    return dict(enumerate(after, start=STEP))


def test_a_run_is_decided_when_its_event_is_there_and_over() -> None:
    assert not EVENT.decided({STEP - 1: 9.0})  # the path's own spike is still to come
    assert not EVENT.decided(stretch(4.5))
    assert not EVENT.decided(stretch(4.5, 1.0, 1.0, 1.0))
    assert EVENT.decided(stretch(4.5, 1.0, 1.0, 1.0, 1.0))
    assert EVENT.decided(stretch(4.5, 6.5))  # twice as much in all
    assert not EVENT.decided(stretch(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0))  # it may still come
    assert EVENT.decided(stretch(1.0, 1.0, 4.5, 1.0, 1.0, 1.0, 1.0))  # and here it only moved


def test_a_run_that_has_half_of_the_event_cannot_remove_it() -> None:
    wide = Event.of([*LOSSES[:STEP], 1.0 + SPIKE, 1.0 + SPIKE, 1.0], STEP + 1)
    assert wide.onset == STEP
    assert not wide.stays({STEP: 1.0 + SPIKE})  # what it leaves of the explained loss is asked for, too
    assert wide.stays({STEP: 1.0 + SPIKE, STEP + 1: 1.0})
    assert EVENT.stays(stretch(1.0 + 0.6 * SPIKE))
    assert not EVENT.stays(stretch(1.0 + 0.4 * SPIKE))
    assert EVENT.stays(stretch(1.0, 1.0, 1.0 + 0.6 * SPIKE))  # it only moved
    assert not EVENT.stays(stretch(1.0), frozenset({STEP}))


def test_what_an_ended_run_leaves_is_of_the_event_up_to_there() -> None:
    later = Event.of([*LOSSES[: STEP + 1], 1.0, 1.0 + 2 * SPIKE, 1.0], STEP)
    ended = {STEP: 1.0 + 0.9 * SPIKE}
    assert later.left_by_then(ended) == pytest.approx(0.9, abs=0.01)
    assert later.left(ended) == pytest.approx(1.0, abs=0.05)  # from there on it is the path
    whole = {STEP: 1.0 + 0.9 * SPIKE, STEP + 1: 1.0, STEP + 2: 1.0, STEP + 3: 1.0}
    assert later.left_by_then(whole) == later.left(whole) == pytest.approx(0.45, abs=0.01)


def test_a_run_that_ends_early_is_the_beginning_of_the_whole_one() -> None:
    run = running(plain)
    path = ak.capture(run.model, run.optimizer, squares).follow(run.batches)
    runs = [Run(0, {0: None}), Run(0, {0: None, 1: None}), Run(2, {2: None})]
    whole = run_again(path.trajectory, runs, 4)
    ended = run_again(path.trajectory, runs, 4, done=lambda losses, out: len(losses) == 2 and len(out) == 1)
    assert [len(losses) for losses in ended] == [2, 5, 2]
    for some, every in zip(ended, whole):
        assert some == {i: every[i] for i in some}
    assert torch.tensor([losses[4] for losses in whole]).unique().numel() == 3  # the runs differ


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_start_one_rounding_away_is_another_one_in_any_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(dtype)
    batches = [(torch.randn(8, 6).to(dtype), torch.randn(8, 1).to(dtype)) for _ in range(4)]
    path = ak.capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), squares).follow(batches)
    plain_run, moved = run_again(path.trajectory, [Run(0), Run(0, jittered=True)], 3)
    away = max(abs(plain_run[i] / moved[i] - 1) for i in plain_run)
    assert 0 < away < 100 * torch.finfo(dtype).eps


def test_runs_whose_control_parts_in_rows_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 16-bit kernels round otherwise in rows, and a run amplifies that until its spike is another one."""
    run = running(plain)
    path = ak.capture(run.model, run.optimizer, squares).follow(run.batches)
    trajectory, sharing = path.trajectory, path.trajectory.dynamics.loss.sharing
    runs = [Run(0, {0: None}), Run(0, {1: None}), Run(0, {2: None})]
    alone = run_again(trajectory, runs, 4)
    sharing.wanted = True  # as on a GPU
    for values, other in zip(run_again(trajectory, runs, 4), alone):
        assert values == pytest.approx(other)
    assert trajectory.together("gradient", 4), "rows of this model run together"

    def coarse(*args: Any) -> list[Any]:
        found = row_gradients(*args)
        for each in found:
            each.loss.mul_(1.5)
            torch._foreach_mul_(each.grads, 0.5)
        return found

    monkeypatch.setattr(exact_rows, "row_gradients", coarse)
    for values, other in zip(run_again(trajectory, runs, 4), alone):
        assert values == pytest.approx(other)
    assert not trajectory.together("gradient", 4)


@pytest.mark.parametrize(("left", "mildest", "blamed"), [(0.49, 0.75, ()), (0.3, 0.75, (3, 6)), (0.49, 1.0, (3, 6))])
def test_a_group_leaves_clearly_less_than_any_other_group(left: float, mildest: float, blamed: tuple[int, ...]) -> None:
    """It was chosen among many, and the others by a draw: of an ordinary run's pairs, one in a hundred removes half."""
    others = [Trial((0, 1), {}, mildest), *(Trial((1, i), {}, 1.0) for i in range(7, 14))]
    assert Inquiry([], [], group=Trial((3, 6), {}, left), group_placebos=others).blamed == blamed


def test_a_placebo_that_removes_it_is_not_hidden_where_another_step_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without step 7 a tenth is left; without one placebo 45 %, which is half, and not clearly less than others leave
    (70 %): it is a suspect from then on, and acquitted."""
    calm = asked_of(lambda out: 0.1 if 7 in out else 0.7, [7, 9], monkeypatch)
    odd = calm.placebos[0].steps[0]
    found = asked_of(lambda out: 0.1 if 7 in out else 0.45 if odd in out else 0.7, [7, 9], monkeypatch)
    assert (found.blamed, found.turned) == ((7,), ((odd,),))
    for inquiry, said in (
        (calm, f"and without any of {len(calm.placebos)} other steps it stays"),
        (found, f"and without {len(found.placebos)} of {len(found.placebos) + 1} other steps it stays"),
    ):
        records = [SimpleNamespace(step=i) for i in range(len(LOSSES))]
        f: Any = SimpleNamespace(
            inquiry=inquiry,
            group=inquiry.group,
            blamed=inquiry.blamed,
            replayed=SimpleNamespace(records=records, last=STEP),
            event=EVENT,
            scatter=Scatter(),
            main="skip",
        )
        assert _placebos(stated._blame(f)) == said


def test_a_former_value_that_prevents_the_event_is_said_to_whatever_share_is_left_of_its_peak() -> None:
    """The table says that it prevents it; 21 % of a slight spike may be ordinary."""
    for prevents, said in ((True, "with the former value there is no spike"), (False, "21% of the spike is left")):
        flags = {"treatment_held": [True, False], "treatment_prevents": [prevents, False]}
        settings = SimpleNamespace(
            condition="weight_decay changed", condition_left=0.21, condition_left_spread=math.nan
        )
        facts = SimpleNamespace(settings=settings, event=SimpleNamespace(gone=0.2))
        found: Any = SimpleNamespace(facts=facts, data={name: torch.tensor(one) for name, one in flags.items()})
        assert said in _hyperparameter(found)
