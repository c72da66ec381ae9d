"""Every result is a file of its data: saved whole or not at all, loaded by its kind, shown in a notebook."""

from __future__ import annotations

import dataclasses
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import aftershock as ak
from aftershock import theory
from aftershock.errors import InvalidFile
from aftershock.results.labelled import LabelledResult
from aftershock.results.provenance import provenance

from .cases import make


class Toy(LabelledResult):
    kind = "toy"
    wanted = ("score", "by")

    def __str__(self) -> str:
        return f"best by {self.data['by'].item()}: <{self.data['change'].values[0]}>"


def toy() -> Toy:
    scores = np.array([-0.0, np.inf, np.nan])
    return Toy(
        xr.Dataset(
            {"score": ("change", scores), "nothing": ("change", [-0.0] * 3), "by": "peak", "note": "", "n": 3},
            {"change": ["a", "b & c", "ü"]},
            {"torch": "2.7"},
        )
    )


def test_a_subclass_is_saved_loaded_and_shown(tmp_path: Path) -> None:
    toy().save(tmp_path / "deep" / "toy")
    found = Toy.load(str(tmp_path / "deep" / "toy"))
    assert type(found) is Toy
    xr.testing.assert_identical(found.data, toy().data)
    assert np.signbit(found.data["nothing"].values).all()  # a chunk of zeros keeps its bits
    found.save(tmp_path / "again")
    xr.testing.assert_identical(Toy.load(tmp_path / "again").data, toy().data)
    assert found._repr_html_() == "<pre>best by peak: &lt;a&gt;</pre>"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.data = toy().data  # type: ignore[misc]


def test_another_kind_of_file_is_refused_by_name(tmp_path: Path) -> None:
    toy().save(tmp_path / "toy")
    with pytest.raises(InvalidFile, match=r"toy is not a saved response of this version .* it has no 'response'"):
        ak.Response.load(tmp_path / "toy")
    with pytest.raises(InvalidFile, match="there is no saved toy at"):
        Toy.load(tmp_path / "nothing")
    (tmp_path / "toy" / "score" / "zarr.json").write_text("{")
    with pytest.raises(InvalidFile, match="damaged or not a saved toy"):
        Toy.load(tmp_path / "toy")


def test_a_file_that_has_lost_numbers_is_damaged(tmp_path: Path) -> None:
    """Of a chunk that is not there zarr makes zeros."""
    toy().save(tmp_path / "toy")
    shutil.rmtree(tmp_path / "toy" / "score" / "c")
    with pytest.raises(InvalidFile, match="its digest does not match"):
        Toy.load(tmp_path / "toy")


def test_only_results_are_replaced(tmp_path: Path) -> None:
    """A mistyped path must not cost the user a folder."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    for name in ("thesis", "file"):
        with pytest.raises(InvalidFile, match=f"{name} exists and is not a saved result"):
            toy().save(tmp_path / name)
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "more work"
    (tmp_path / "empty").mkdir()
    toy().save(tmp_path / "empty")
    xr.testing.assert_identical(Toy.load(tmp_path / "empty").data, toy().data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "thesis"]


def test_a_move_that_fails_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy().save(tmp_path / "r")
    move = Path.rename

    def last_move_fails(self: Path, target: Path) -> Path:
        if target == tmp_path / "r" and ".old." not in str(self):
            raise OSError("no")
        return move(self, target)

    monkeypatch.setattr(Path, "rename", last_move_fails)
    with pytest.raises(OSError, match="no"):
        Toy(toy().data.assign(by="total")).save(tmp_path / "r")
    assert [p.name for p in tmp_path.iterdir()] == ["r"]
    xr.testing.assert_identical(Toy.load(tmp_path / "r").data, toy().data)


def test_others_may_read_a_result_as_any_folder(tmp_path: Path) -> None:
    toy().save(tmp_path / "r")
    (tmp_path / "plain").mkdir()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("r", "plain")}
    assert len(modes) == 1


def test_data_of_results_are_variables_and_attributes_say_what_made_them(tmp_path: Path) -> None:
    case = make("tanh_mlp")
    path, probe, pool = case.path(4), case.batch(), case.batches(2)
    change = path.replace(pool, 1)
    response = change.response(probe)
    data = response.data
    assert (data["at"].item(), data["kind"].item(), data["refused"].item()) == (1, "replace", "")
    for found in (response, path.rank(pool, probe), path.rank_examples(pool, probe), path.explain(probe)):
        assert found.data["probe"].item() == "a fixed batch"
        assert set(found.data.attrs) == PROVENANCE
        assert found.data["check"].item() == str(path.check())
        found.save(tmp_path / found.kind)
        assert type(found).load(tmp_path / found.kind).data["check"].item() == str(path.check())
    for found in (change.response(probe, answers=("exact",)), path.explain(probe, change="reset v")):
        assert found.data["check"].item() == ""


PROVENANCE = {
    "aftershock", "torch", "python", "device", "dtype", "parameters", "training_step", "path_steps", "clip", "lr",
    "attention",
}  # fmt: skip


def test_data_of_the_theory_are_variables_too() -> None:
    case = make("tanh_mlp")
    path, probe = case.path(4), case.batch()
    change = path.replace(case.batches(3), 1)
    found = {
        "scores": theory.scores(change, probe),
        "error_shares": theory.error_shares(change, probe, scale=0.5),
        "channel_responses": theory.channel_responses(change, probe),
        "persistence": theory.persistence(change, probe, beta1=[0.5, 0.9]),
        "second_order": theory.second_order(change, probe),
        "write_paths": theory.write_paths(change, probe),
        "match_first_step": theory.match_first_step(path, theory.residuals(change), probe, 1).data,
        "decompose": theory.decompose(change, probe=probe).data,
    }
    for name, data in found.items():
        assert (data["at"].item(), data["probe"].item()) == (1, "a fixed batch"), name
        assert set(data.attrs) == PROVENANCE, name
    assert (found["persistence"]["scale"].item(), found["error_shares"]["scale"].item()) == (0.25, 0.5)
    assert found["decompose"]["scale"].item() == 1.0
    bounds = theory.error_bounds(change, horizon=2, probe=probe), theory.write_in_bound(change)
    for data in bounds:
        assert set(data.attrs) == PROVENANCE
    how = {"norms_by", "smooth_constant_by", "switching_constant_by", "probe_constant_by"}
    assert all(bounds[0][name].item() for name in how)
    assert bounds[1]["kappa_by"].item() == "enclosed by interval arithmetic"
    others = {
        "activation_margin": theory.activation_margin(change, step=2),
        "prospective_structure": theory.prospective_structure(
            found["scores"][["full_iso_response", "semilinear_response"]].to_dataarray("future")
        ),
        "modes": theory.FrozenMemory.of(path, 1, 0).modes(),
    }
    for name, data in others.items():
        assert set(data.attrs) == (PROVENANCE if name != "prospective_structure" else set()), name
    assert (others["activation_margin"]["step"].item(), others["activation_margin"]["reason"].item()) == (2, "")
    assert others["prospective_structure"]["summary"].item() == "peak"


@pytest.mark.parametrize("horizon", [1, 3])
def test_results_of_the_theory_are_results_as_others(tmp_path: Path, horizon: int) -> None:
    case = make("relu_cnn")
    change = case.path(4).replace(case.batches(2), 0)
    parts = theory.decompose(change, index=1, horizon=horizon)
    matched = theory.match_first_step(change.path, theory.residuals(change), case.batch())
    frozen = theory.FrozenMemory.of(change.path, 1, 0)
    for made in (parts, matched, frozen):
        made.save(tmp_path / made.kind)
        found = type(made).load(tmp_path / made.kind)
        assert str(found) == str(made)
        assert found.data.attrs == made.data.attrs == provenance(change.path.trajectory)
        assert made._repr_html_().startswith("<pre>")
        for name, values in made.data.variables.items():
            np.testing.assert_array_equal(found.data[name].values, values.values)
    assert torch.equal(type(matched).load(tmp_path / "match").xi.nan_to_num(), matched.xi.nan_to_num())
    assert theory.FrozenMemory.load(tmp_path / frozen.kind) == frozen
    for kind in (parts, frozen):
        with pytest.raises(InvalidFile, match=f"match is not a saved {kind.kind}"):
            type(kind).load(tmp_path / "match")
