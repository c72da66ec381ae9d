"""Two hundred loops drawn at random: no silent mismatch, and most of them equal to the bit."""

from __future__ import annotations

import warnings

import pytest
from benchmarks.fuzz import SEQUENCES, TRAPS, Judged, draw, run

from .loops import EQUAL

DRAWS = 200

# parts that are answered wrongly today; a fix takes its line away
BROKEN = {"scheduled weight_decay", "scheduled eps"}
BROKEN_TRAPS = set(TRAPS) - {"amsgrad", "subclass step", "looking hook", "nothing for unused heads"}
BROKEN_MODELS = set(SEQUENCES)  # the last horizon is read without gradients, by other kernels


def is_known(found: Judged) -> bool:
    return bool(BROKEN & set(found.draw.parts) or found.draw.trap in BROKEN_TRAPS or found.draw.model in BROKEN_MODELS)


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(run(range(DRAWS)))


def test_no_silent_mismatch(judged: list[Judged]) -> None:
    failed = [f"{found.draw}: {found.verdict}" for found in judged if found.failed and not is_known(found)]
    assert not failed, "\n".join(failed)


@pytest.mark.xfail(strict=True, reason="the parts listed above are still answered wrongly")
def test_no_part_is_still_answered_wrongly(judged: list[Judged]) -> None:
    failed = [f"{found.draw}: {found.verdict}" for found in judged if found.failed]
    assert not failed, "\n".join(failed)


def test_most_draws_are_equal(judged: list[Judged]) -> None:
    assert sum(found.verdict.outcome == EQUAL for found in judged) > DRAWS / 2


def test_traps_are_drawn(judged: list[Judged]) -> None:
    """Nearly every trap, and yet more draws without one."""
    drawn = {found.draw.trap for found in judged} - {""}
    assert len(drawn) > 0.8 * len(TRAPS)
    assert sum(not found.draw.trap for found in judged) > DRAWS / 2


def test_a_draw_is_its_seed() -> None:
    assert draw(7) == draw(7)
    assert len({str(draw(seed)) for seed in range(50)}) == 50
