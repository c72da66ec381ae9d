"""What was found out about an event, as the facts that an explanation states."""

from __future__ import annotations

import math

from .choice import page_name
from .event import BARS
from .facts import BlameFacts, EventFacts, Facts, InstrumentFacts, RecordingFacts, ReplayFacts, SettingFacts
from .findings import AFTER, Findings
from .quantity import seen
from .treatments import Outcome
from .trials import NO_TRIAL


def facts(f: Findings) -> Facts:
    return Facts(_event(f), _recording(f), _replay(f), _blame(f), _settings(f), _instruments(f))


def _event(f: Findings) -> EventFacts:
    event, numbers = f.event, [record.step for record in f.replayed.records]
    return EventFacts(
        kind=f.kind,
        quantity=event.quantity,
        asked=f.asked,
        explained=f.explained,
        value=event.values[event.step],
        value_spread=f.value_spread,
        usual=event.usual,
        sigma=event.sigma,
        peak=event.peak,
        peak_spread=f.scatter.spread(event.height),
        gone=event.gone,
        highest=numbers[event.highest],
        onset=numbers[event.onset],
        end=numbers[event.last],
        tail=event.after(dict(enumerate(event.values))),
        tail_spread=f.scatter.spread(event.after),
        rise=None if f.rise is None else f.rise[0],
        rose_before=f.rose_before,
        apart=tuple(numbers[i] for i in sorted(event.apart)),
        over=event.over,
        norm_first=f.norm_first,
        loss_usual=f.by_loss.usual,
        loss_sigma=f.by_loss.sigma,
    )


def _recording(f: Findings) -> RecordingFacts:
    recorded, first = f.flight.records, f.replayed.records[0].step
    fewer = f.replayed.last < f.flight.run["window"]
    return RecordingFacts(
        run=f.flight.run["id"],
        page=page_name(f.flight, f.asked, f.event.quantity),
        reason=f.flight.reason,
        which=f.which,
        nothing_seen=f.nothing_seen,
        after=f.event.last - f.event.step,
        after_wanted=max(1, min(AFTER, f.flight.run.get("after", AFTER))),
        after_ends=_ends(f),
        not_finite=next((n for n, r in sorted(recorded.items()) if n > f.explained and not r.finite), None),
        more_recorded=first > min(recorded) and fewer,
        starts_here=first == min(recorded) and fewer,
        missing=tuple(f.flight.missing),
        asked_batches=recorded[f.asked].indices,
    )


def _ends(f: Findings) -> str:
    """Why no step after the event's last one belongs to it: that is not finite or ran in another way, the window was
    closed, or it still records."""
    last = f.replayed.records[-1]
    following = f.flight.records.get(last.step + 1)
    if following is not None and not following.finite:
        return "not finite"
    if following is not None and following.forward != last.forward:
        return "other forward"
    return "open" if f.flight.trigger is None or f.flight.folder.name == "ring" else "closed"


def _replay(f: Findings) -> ReplayFacts:
    again = [{i: seen(f.event.quantity, step) for i, step in enumerate(steps)} for steps in f.replayed.again]
    with_clip = "" if f.clip is None else f" That is with clip={f.clip:g}, which explain() was told."
    return ReplayFacts(
        replay=f"{f.replayed}{with_clip}",
        replayed=f.replayed.proved,
        replay_deviation=f.replayed.deviation,
        replays=len(again) + 1 if again else 0,
        replays_with_it=sum(f.event.left(run) > BARS.half for run in again) + f.event.is_one if again else 0,
        lost_in_scatter=f.lost_in_scatter,
    )


def _blame(f: Findings) -> BlameFacts:
    inquiry, group = f.inquiry, f.group or NO_TRIAL
    numbers = [record.step for record in f.replayed.records]
    known = (*inquiry.suspects, *([inquiry.own] if inquiry.own else []))
    own = next((t for t in known if t.steps == (f.replayed.last,)), NO_TRIAL)
    blamed = inquiry.blamed_by_replacing if f.blamed else ()
    # a placebo that became a suspect and is not blamed: without it half is gone, which a blame of another must not hide
    turned = [t for t in inquiry.suspects if t.steps in inquiry.turned and t.steps[0] not in f.blamed]
    replaced = [t for t in inquiry.replaced if t.steps[0] in blamed]
    return BlameFacts(
        ranked_by=f.main,
        own_left=own.left,
        own_left_spread=own.left_spread,
        own_left_so_far=own.so_far,
        own_after=own.after,
        own_after_spread=own.after_spread,
        replaced_placebos=len(inquiry.replaced_placebos),
        replaced_placebos_change=sum(not t.keeps for t in inquiry.replaced_placebos),
        kin=inquiry.kin,
        group_left=group.left,
        group_left_spread=group.left_spread,
        group_after=group.after,
        group_after_spread=group.after_spread,
        group_back=inquiry.group_back,
        group_back_spread=f.scatter.spread(f.event.left),
        group_replaced=group is inquiry.group and inquiry.group_replaced,
        group_placebos=len(inquiry.group_placebos),
        group_placebos_change=sum(not t.keeps for t in inquiry.group_placebos),
        placebos=len(inquiry.placebos) + len(turned),
        placebos_change=inquiry.changing + sum(not t.keeps for t in turned),
        placebos_remove=inquiry.removing + len(turned),
        placebos_asked=inquiry.asked,
        several=len(inquiry.several),
        several_change=sum(not t.keeps for t in inquiry.several),
        several_acquitted=inquiry.acquitted,
        blamed=tuple(numbers[i] for i in f.blamed),
        replaced=tuple(numbers[t.steps[0]] for t in replaced),
        replaced_left=tuple(t.left for t in replaced),
        replaced_left_spread=tuple(t.left_spread for t in replaced),
        replaced_after=tuple(t.after for t in replaced),
        replaced_after_spread=tuple(t.after_spread for t in replaced),
        gone_with_others=tuple(numbers[t.steps[0]] for t in inquiry.replaced if t.removes and len(t.steps) == 1),
        cleared=tuple(numbers[t.steps[0]] for t in inquiry.cleared),
        group=tuple(numbers[i] for i in group.steps),
    )


def _settings(f: Findings) -> SettingFacts:
    count = len(f.changes)
    left = [o.left for o in f.held] or [math.nan] * count  # of none where it was not asked
    spread = [left_spread(f, o) for o in f.held] or [math.nan] * count
    return SettingFacts(
        hyperparameter=None if f.setting is None else f.changes[f.setting].name,
        condition=None if f.condition is None else f.changes[f.condition].sentence,
        condition_left=math.nan if f.condition is None else left[f.condition],
        condition_left_spread=math.nan if f.condition is None else spread[f.condition],
        untried=f.untried,
        settings=tuple(change.sentence for change in f.changes),
        setting_left=tuple(left),
        setting_left_spread=tuple(spread),
        setting_left_so_far=tuple([o.so_far for o in f.held] or [False] * count),
        setting_finite=tuple(f.finite_with or [False] * count),
    )


def left_spread(f: Findings, outcome: Outcome) -> float:
    """The ± of what a treatment leaves."""
    return max(f.scatter.spread(f.event.so_far, like=outcome.values), outcome.left_apart)  # NaN stays NaN


def _instruments(f: Findings) -> InstrumentFacts:
    before = max(f.event.onset - 1, 0)
    check = None if f.growth is None and f.refused is not None else f.replayed.path.check()
    return InstrumentFacts(
        data_said="" if f.data is None else f.data.sentence,
        kin_high=math.nan if f.data is None else f.data.kin_high,
        update_said="" if f.updates is None else f.updates.sentence(before),
        update_large=f.updates is not None and f.updates.large(before),
        growth=math.nan if f.growth is None else f.growth.growth,
        growth_steps=0 if f.growth is None else f.growth.stop - f.growth.start,
        sharpness=math.nan if f.sharp is None else f.sharp.value,
        sharpness_bar=math.nan if f.sharp is None else f.sharp.threshold,
        not_a_number_said="" if f.nan is None else f.nan.sentence,
        batch_is_bad=f.nan is not None and f.nan.kind in ("batch values", "batch"),
        overflows=f.nan is not None and f.nan.kind == "overflow",
        refused=f.refused or "",
        check="" if check is None else str(check),
        check_error=math.nan if check is None else check.error,
        check_tolerance=math.nan if check is None else check.tolerance,
    )
