"""Two hundred loops drawn at random: no silent mismatch, and most of them equal to the bit."""

from __future__ import annotations

import warnings

import pytest
from benchmarks.fuzz import TRAPS, Judged, draw, run

from .loops import EQUAL

DRAWS = 200


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(run(range(DRAWS)))


def test_no_silent_mismatch(judged: list[Judged]) -> None:
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
