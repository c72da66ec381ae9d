"""Every dataset and labelled array that the theory returns is saved and loaded one way, to the bit.

What else is there is left alone.
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xarray as xr

from aftershock import theory
from aftershock.errors import AftershockError, InvalidFile, InvalidInput
from aftershock.results.files import MARK
from aftershock.results.provenance import provenance

from .cases import make

pytestmark = pytest.mark.filterwarnings("ignore:The data type:UserWarning", "ignore:.*Zarr V3 specification")


@functools.cache
def scene() -> SimpleNamespace:
    case = make("relu_cnn")
    point, batches, probe = case.point(), case.batches(4), case.batch()
    path, others = point.follow(batches), case.batches(3)
    change = path.replace(others, 1)
    exact = change.response(probe, scales=[0.5, 1.0], answers=("exact", "tangent")).data["response"]
    by_system = xr.concat([exact, 2 * exact, 3 * exact], dim="system")
    frozen = theory.FrozenMemory.of(path, 1, 0)
    futures = [batches[1:3], batches[2:4]]
    return SimpleNamespace(**locals())


def futures_of(s: SimpleNamespace) -> xr.Dataset:
    return theory.repeated_futures(s.point, s.batches[0], s.others, s.futures, s.probe)


def of_system(s: SimpleNamespace) -> xr.DataArray:
    """One number by system and answer, some of them missing."""
    values = s.by_system.isel(change=0, scale=1, horizon=0)
    return values.where(values["answer"] != "tangent")


TABLES: dict[str, Callable[[SimpleNamespace], xr.Dataset]] = {
    "FrozenMemory.amplification": lambda s: s.frozen.amplification(),
    "FrozenMemory.bounds": lambda s: s.frozen.bounds(3),
    "FrozenMemory.data": lambda s: s.frozen.data,
    "FrozenMemory.modes": lambda s: s.frozen.modes(),
    "FrozenMemory.peak": lambda s: s.frozen.peak(3),
    "activation_margin": lambda s: theory.activation_margin(s.change, step=2),
    "aggregate": lambda s: theory.aggregate(s.by_system),
    "channel_responses": lambda s: theory.channel_responses(s.change, s.probe),
    "compare_scores": lambda s: theory.compare_scores(of_system(s).rename(answer="score"), "exact"),
    "error_bounds": lambda s: theory.error_bounds(s.change, horizon=2, probe=s.probe),
    "error_exponents": lambda s: theory.error_exponents(*(s.exact.sel(answer=a) for a in ("exact", "tangent")), 1.0),
    "error_shares": lambda s: theory.error_shares(s.change, s.probe),
    "logit_tangent": lambda s: theory.logit_tangent(s.change, s.probe, lambda model, b: (model(b[0]), b[1])),
    "median_interval": lambda s: theory.median_interval(of_system(s)),
    "persistence": lambda s: theory.persistence(s.change, s.probe, beta1=[0.5, 0.9]),
    "present_frozen": lambda s: theory.present_frozen(s.point, s.batches[0], s.others, s.probe, horizon=3),
    "prospective_structure": lambda s: theory.prospective_structure(futures_of(s)["response"].isel(answer=0)),
    "readout_null": lambda s: theory.readout_null(theory.scores(s.change, s.probe), permutations=4),
    "reference_surrogate": lambda s: theory.reference_surrogate(s.point, s.batches[0], s.others, s.probe, horizon=3),
    "repeated_futures": futures_of,
    "sampled_future": lambda s: theory.sampled_future(
        s.point, s.batches[0], s.others, s.batches, s.probe, horizon=3, samples=2
    ),
    "scores": lambda s: theory.scores(s.change, s.probe),
    "second_order": lambda s: theory.second_order(s.change, s.probe, scales=[0.5, 1.0]),
    "spearman": lambda s: theory.spearman(*(s.exact.sel(answer=a) for a in ("exact", "tangent"))),
    "summarize": lambda s: theory.summarize(s.exact),
    "write_in_bound": lambda s: theory.write_in_bound(s.change),
    "write_paths": lambda s: theory.write_paths(s.change, s.probe),
}
ARRAYS: dict[str, Callable[[SimpleNamespace], xr.DataArray]] = {
    "FrozenMemory.loop_gains": lambda s: s.frozen.loop_gains,
    "FrozenMemory.loop_signs": lambda s: s.frozen.loop_signs(),
    "FrozenMemory.response": lambda s: s.frozen.response(3),
    "FrozenMemory.short_response": lambda s: s.frozen.short_response(),
    "FrozenMemory.transfer": lambda s: s.frozen.transfer(2.0),
    "switch_fraction": lambda s: theory.switch_fraction(s.change, scales=[0.5, 1.0]),
}


def returning_datasets() -> set[str]:
    """Every public function and method of the theory that says that it returns a dataset."""
    functions: dict[str, Any] = {}
    for name in theory.__all__:
        thing = getattr(theory, name)
        parts = vars(thing) if inspect.isclass(thing) else {}
        own = {f"{name}.{part}": member for part, member in parts.items() if not part.startswith("_")}
        functions |= own if parts else {name: thing}
    said = {name: getattr(f, "fget", getattr(f, "__func__", f)) for name, f in functions.items()}
    return {name for name, f in said.items() if inspect.isfunction(f) and "xr.Dataset" in f.__annotations__["return"]}


def assert_same(found: xr.Dataset, made: xr.Dataset) -> None:
    """The same values to the bit, labels, kinds, attributes, and all in the same order."""
    xr.testing.assert_identical(found, made)
    assert (list(found.data_vars), list(found.coords)) == (list(made.data_vars), list(made.coords))
    assert {name: type(value) for name, value in found.attrs.items()} == {
        name: str if isinstance(value, str) else type(value) for name, value in made.attrs.items()
    }
    for name, variable in made.variables.items():
        same = found.variables[name]
        assert (same.dims, same.dtype, same.encoding) == (variable.dims, variable.dtype, {}), name
        assert same.values.tobytes() == variable.values.tobytes(), name


@pytest.mark.parametrize("name", TABLES)
def test_a_table_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    made = TABLES[name](scene())
    assert made.data_vars
    theory.save(made, tmp_path / "table")
    assert_same(theory.load(str(tmp_path / "table")), made)
    theory.save(theory.load(tmp_path / "table"), tmp_path / "table")  # again, over itself
    assert_same(theory.load(tmp_path / "table"), made)
    assert [p.name for p in tmp_path.iterdir()] == ["table"]


def test_every_function_that_returns_a_dataset_is_among_them() -> None:
    assert returning_datasets() - {"load"} == set(TABLES)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_labelled_array_comes_back_to_the_bit_as_one(name: str, tmp_path: Path) -> None:
    made = ARRAYS[name](scene())
    theory.save(made, tmp_path / "table")
    found = theory.load(tmp_path / "table")
    assert isinstance(found, xr.DataArray)
    assert found.name == made.name
    assert_same(found.to_dataset(), made.to_dataset())
    theory.save(found, tmp_path / "table")  # again, over itself
    assert found.identical(theory.load(tmp_path / "table"))  # type: ignore[arg-type]
    theory.save(made.to_dataset(), tmp_path / "table")
    assert isinstance(theory.load(tmp_path / "table"), xr.Dataset)


def test_what_is_made_from_a_path_says_so() -> None:
    """Tables, and arrays, of numbers that were given have nothing to tell."""
    for name in ("activation_margin", "error_shares", "FrozenMemory.amplification", "FrozenMemory.bounds",
                 "FrozenMemory.modes", "FrozenMemory.peak"):  # fmt: skip
        assert TABLES[name](scene()).attrs == provenance(scene().path.trajectory), name
    for name, made in ARRAYS.items():
        assert made(scene()).attrs == provenance(scene().path.trajectory), name
    given = theory.FrozenMemory(**scene().frozen.coefficients)
    assert given == scene().frozen
    assert not given.response(3).attrs
    assert not given.peak(3).attrs


def odd() -> xr.Dataset:
    """What numbers, texts and labels may look like."""
    bits = np.array([0x7FF8000000000123, 0x8000000000000000, 0x0000000000000001], dtype=np.uint64)
    return xr.Dataset(
        {
            "zeros": ("change", [-0.0] * 3),
            "bits": ("change", bits.view(np.float64)),  # a NaN with a payload, -0.0, the smallest number
            "narrow": ("change", np.array([np.inf, -np.inf, np.nan], dtype=np.float32)),
            "poles": ("change", np.array([1 + 2j, complex(np.nan, -0.0), -0.0])),
            "yes": (("change", "step"), np.ones((3, 2), dtype=bool)),
            "reason": ("change", ["", "ü < 3", "a\nb"], {"meaning": "why"}),
            "nothing": ("layer", np.zeros(0)),
            "by": "",
            "count": 3,
        },
        {"change": ["b", "a", "ü"], "step": [7, 5], "place": ("change", [0.5, 0.1, 0.2]), "at": 1, "example": [3, 4]},
        {"torch": "2.7", "lr": 1e-3, "parameters": 12, "clip": float("inf"), "note": ""},
    )


def test_odd_values_and_labels_come_back_to_the_bit(tmp_path: Path) -> None:
    theory.save(odd(), tmp_path / "deep" / "odd")
    assert_same(theory.load(tmp_path / "deep" / "odd"), odd())
    elsewhere = xr.open_zarr(tmp_path / "deep" / "odd", chunks=None, consolidated=False)  # as other programs read it
    assert elsewhere.drop_attrs(deep=False).identical(odd().drop_attrs(deep=False))


# --- what is not a saved table


def chunk(table: Path) -> Path:
    return next(file for file in sorted((table / "bits").rglob("*")) if file.is_file() and file.name != "zarr.json")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def other_lr(table: Path) -> None:
    header = json.loads((table / "zarr.json").read_text())
    header["attributes"]["lr"] = 1.0
    (table / "zarr.json").write_text(json.dumps(header))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a chunk is missing": lambda table: chunk(table).unlink(),
    "a chunk is empty": lambda table: chunk(table).write_bytes(b""),
    "a bit": lambda table: flip(chunk(table)),
    "a variable is missing": lambda table: shutil.rmtree(table / "bits"),
    "a variable's header": lambda table: (table / "bits" / "zarr.json").write_text("{"),
    "no header": lambda table: (table / "zarr.json").unlink(),
    "half a header": lambda table: (table / "zarr.json").write_text((table / "zarr.json").read_text()[:99]),
    "another header": lambda table: (table / "zarr.json").write_text("[]"),
    "another number": other_lr,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_an_invalid_file(damage: str, tmp_path: Path) -> None:
    theory.save(odd(), tmp_path / "table")
    DAMAGE[damage](tmp_path / "table")
    with pytest.raises(InvalidFile, match="is damaged"):
        theory.load(tmp_path / "table")


def test_whatever_else_is_there_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="there is no saved table at"):
        theory.load(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty"):
        with pytest.raises(InvalidFile, match=f"{name} is damaged or not a saved table"):
            theory.load(tmp_path / name)
    odd().to_zarr(tmp_path / "foreign", consolidated=False)
    with pytest.raises(InvalidFile, match="foreign is not a saved table of this version of aftershock"):
        theory.load(tmp_path / "foreign")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_nothing_of_the_users_is_replaced(tmp_path: Path) -> None:
    """A folder of files, a file, a zarr store of their own, and a result beside which they have written."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    odd().to_zarr(tmp_path / "measured", consolidated=False)
    theory.save(odd(), tmp_path / "with_notes")
    (tmp_path / "with_notes" / "notes.txt").write_text("what I think of it")
    before = contents(tmp_path)
    for name in ("thesis", "file", "measured", "with_notes"):
        with pytest.raises(InvalidFile, match=f"{name} exists and is not a saved result"):
            theory.save(odd(), tmp_path / name)
    with pytest.raises(InvalidFile, match="nothing can be saved at"):
        theory.save(odd(), tmp_path / "file" / "table")
    assert contents(tmp_path) == before


def test_a_result_of_an_earlier_build_is_replaced(tmp_path: Path) -> None:
    """It has its provenance, and no mark yet."""
    response = scene().change.response(scene().probe, answers=("exact",))
    response.data.to_zarr(tmp_path / "old", consolidated=False)
    assert type(response).load(tmp_path / "old").data.identical(response.data)
    theory.save(odd(), tmp_path / "old")
    assert_same(theory.load(tmp_path / "old"), odd())


@pytest.mark.parametrize("what", [{"a": 1}, [1, 2], lambda: 0], ids=["dict", "list", "function"])
def test_what_no_file_can_hold_is_refused_and_the_old_table_stays(what: object, tmp_path: Path) -> None:
    theory.save(odd(), tmp_path / "table")
    held = np.empty(1, dtype=object)
    held[0] = what
    with pytest.raises(InvalidInput, match="holds something that no file"):
        theory.save(xr.Dataset({"x": ("change", held)}), tmp_path / "table")
    with pytest.raises(AftershockError):
        theory.save(xr.Dataset(attrs={"x": what if callable(what) else object()}), tmp_path / "table")
    assert [p.name for p in tmp_path.iterdir()] == ["table"]
    assert_same(theory.load(tmp_path / "table"), odd())


def test_what_is_no_table_is_told_how_it_is_saved(tmp_path: Path) -> None:
    found = theory.switch_fraction(scene().change)
    with pytest.raises(InvalidInput, match=r"got ndarray\. A result that is a class has a save of its own"):
        theory.save(found.values, tmp_path / "table")  # type: ignore[arg-type]
    for name in (None, "", 3):
        with pytest.raises(InvalidInput, match=r"saved under its name, and this one has none: array\.rename"):
            theory.save(found.rename(name), tmp_path / "table")
    with pytest.raises(InvalidInput, match=r"the name 'switched/all' is one of a folder"):
        theory.save(found.rename("switched/all"), tmp_path / "table")
    theory.save(found.to_dataset(name="fraction"), tmp_path / "table")
    assert theory.load(tmp_path / "table")["fraction"].equals(found)
    assert MARK not in theory.load(tmp_path / "table").attrs
