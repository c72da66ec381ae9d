"""Randomness is one argument everywhere: `generator=`, a `torch.Generator` or an integer seed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import aftershock as ak
from aftershock import theory
from aftershock.core.randomness import generator_of, seed_of
from aftershock.errors import InvalidInput
from aftershock.theory.freezing import Place, sampled_diagonal

from .cases import make

PATH = make("quadratic").path()
TABLE = xr.Dataset(
    {
        "full_iso": ("change", np.random.default_rng(0).random(3)),
        "alignment": (("change", "horizon", "readout_horizon"), np.random.default_rng(1).random((3, 4, 4))),
    },
    coords={"change": range(3), "horizon": range(1, 5)},
)
VALUES = xr.DataArray(np.random.default_rng(2).random(9), dims="system")
PAST = [torch.tensor(float(i)) for i in range(50)]
PROCESS = theory.fit_process([torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(5)])
DRAWS: dict[str, Callable[[Any], Any]] = {
    "sample_futures": lambda generator: torch.tensor(theory.sample_futures(PAST, 2, 3, generator=generator)),
    "FittedProcess": lambda generator: torch.stack(PROCESS(2, generator=generator)),
    "readout_null": lambda generator: theory.readout_null(TABLE, generator=generator)["order"].values,
    "estimate": lambda generator: (
        theory.FrozenMemory.estimate(PATH, 1, slice(0, 2), samples=1, generator=generator).matrix
    ),
    "sampled_diagonal": lambda generator: Place.of(PATH, 1, slice(0, 2), sampled_diagonal(1, generator)).curvature,
    "median_interval": lambda generator: theory.median_interval(VALUES, generator=generator)["low"].values,
    "operator_norm": lambda generator: theory.operator_norm(PATH.transition(1), generator=generator)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_and_a_generator_both_do_and_repeat_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftershock.theory.envelopes.DENSE", 0)  # a small operator needs no draws
    draw = DRAWS[name]
    for given in (lambda: 3, lambda: torch.Generator().manual_seed(3)):
        assert np.array_equal(np.asarray(draw(given())), np.asarray(draw(given())))
    with pytest.raises(InvalidInput, match=r"torch\.Generator or an integer seed; got Generator\(PCG64\)"):
        draw(np.random.default_rng(3))


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_neither_is_refused_where_nothing_need_be_drawn_too(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"torch\.Generator or an integer seed; got 1\.5"):
        DRAWS[name](1.5)


@pytest.mark.parametrize("name", ["sample_futures", "FittedProcess", "readout_null"])
def test_a_seed_is_a_generator_with_this_seed(name: str) -> None:
    draw = DRAWS[name]
    assert np.array_equal(np.asarray(draw(3)), np.asarray(draw(torch.Generator().manual_seed(3))))
    assert not np.array_equal(np.asarray(draw(3)), np.asarray(draw(4)))


def test_a_generator_moves_on_and_a_seed_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    assert seed_of(generator) != seed_of(generator)
    assert generator_of(generator) is generator
    assert [seed_of(5), seed_of(np.int64(5)), generator_of(5).initial_seed()] == [5, 5, 5]


def test_no_public_function_has_another_name_for_it() -> None:
    recorder, forecast = ak.FlightRecorder, importlib.import_module("aftershock.recorder.forecast").forecast
    public = [ak.explain, recorder.forecast, forecast, *(getattr(theory, name) for name in theory.__all__)]
    public += [getattr(kind, name) for kind in (theory.FrozenMemory, recorder) for name in dir(kind) if name[0] != "_"]
    named = {f: inspect.signature(f).parameters for f in public if callable(f)}
    assert not [f for f, parameters in named.items() if {"seed", "rng", "random_state"} & set(parameters)]
    types = {str(p["generator"].annotation) for p in named.values() if "generator" in p}
    assert types == {"Randomness"}
    assert sum("generator" in parameters for parameters in named.values()) >= 8
