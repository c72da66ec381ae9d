"""The CIFAR-10 study on tiny made-up images: against torch.optim by hand, and what bad data gets."""

from __future__ import annotations

import io
import json
import pickle
import sys
import tarfile
import types
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aftershock import theory
from aftershock.errors import InvalidFile, InvalidInput
from aftershock.studies.cifar import recipe as cifar
from aftershock.studies.cifar.data import load_cifar
from aftershock.studies.cifar.networks import network
from aftershock.studies.cifar.recipe import WHOLE, cifar_study, run_piece
from aftershock.studies.cifar.scene import FULL, QUICK, Protocol, Scene, build, prepare
from aftershock.studies.results import merge_pieces
from aftershock.studies.study import System

MLP, CNN = System("mlp", 2026, 0), System("cnn", 2026, 1)
TINY = Protocol(
    burn_in=3, references=2, candidates=3, horizon=3, batch=8, probe=8, scales=(0.5, 1.0), sources_at=0.5, hybrids=1,
    beta1=(0.5, 0.9), beta2=(0.9, 0.999), permutations=4, futures=2, futures_per_piece=1, sampled=1,
)  # fmt: skip
PARTS = ("write_in", "smooth", "switching")
PIECES = ("fidelity", "sources", "ranking", "memory", "present", "futures-0", "futures-1")


def arrays(train: int = 120, test: int = 20) -> dict[str, np.ndarray]:
    """Noise whose brightness says its class."""
    draws = np.random.default_rng(0)
    out = {}
    for kind, count in (("train", train), ("test", test)):
        labels = draws.integers(0, 10, count).astype(np.uint8)
        noise = draws.integers(0, 100, (count, 32, 32, 3))
        out[f"x_{kind}"], out[f"y_{kind}"] = (noise + 15 * labels[:, None, None, None]).astype(np.uint8), labels
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cifar") / "cifar10.npz"
    np.savez(path, **arrays())
    return path


def scene(data: Path, system: System = MLP) -> Scene:
    return prepare(system, data, load_cifar(data).digest, TINY, "cpu")


@cache
def piece(data: Path, name: str, system: System = MLP) -> xr.Dataset:
    found = run_piece(system, name, data=data, digest=load_cifar(data).digest, protocol=TINY, device="cpu")
    assert list(found) == [system.kind]
    return found[system.kind]


# --- the numbers, by hand


def plain(system: System) -> nn.Sequential:
    """The paper's networks from torch's own layers, with the weights of ours."""
    if system.kind == "mlp":
        layers = [nn.Flatten(), nn.Linear(3072, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)]
    else:
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers).double()
    model.load_state_dict(dict(zip(model.state_dict(), build(system).state_dict().values())))
    return model


class ByHand:
    """The run of a scene with torch alone: its own model, torch's plain AdamW, ordinary loops."""

    def __init__(self, own: Scene) -> None:
        self.scene = own
        self.model = plain(own.system)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=2e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
        )
        for k in range(TINY.burn_in):
            self.step([self.images(k)])

    def images(self, k: int) -> tuple[Tensor, Tensor]:
        """Batch k of the order, from the arrays as they were written."""
        return self.pick(self.scene.order[k * TINY.batch : (k + 1) * TINY.batch])

    def pick(self, index: Tensor) -> tuple[Tensor, Tensor]:
        stored = arrays()
        mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
        x = (stored["x_train"][index.numpy()] / 255.0 - mean) / deviation
        return torch.from_numpy(x.transpose(0, 3, 1, 2)), torch.from_numpy(stored["y_train"][index.numpy()]).long()

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """One update by the mean gradient of some batches."""
        self.optimizer.zero_grad()
        for images, labels in batches:
            (cross_entropy(self.model(images), labels) / len(batches)).backward()
        self.optimizer.step()

    def run(self, first: list[tuple[Tensor, Tensor]], future: list[tuple[Tensor, Tensor]]) -> list[float]:
        """The probe's loss at h = 1 … after a first step and a future."""
        losses = []
        for batches in (first, *([batch] for batch in future)):
            self.step(batches)
            with torch.no_grad():
                images, labels = self.scene.probe
                losses.append(float(cross_entropy(self.model(images), labels)))
        return losses


def response_by_hand(own: Scene, candidate: int, future: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    first = TINY.burn_in + TINY.references
    references = [ByHand(own).images(k) for k in range(TINY.burn_in, first)]
    shocked = ByHand(own).run([ByHand(own).images(first + candidate)], future)
    return np.array(shocked) - np.array(ByHand(own).run(references, future))


@pytest.mark.parametrize("system", [MLP, CNN], ids=["mlp", "cnn"])
def test_exact_responses_are_two_runs_of_torch(data: Path, system: System) -> None:
    own = scene(data, system)
    first = TINY.burn_in + TINY.references + TINY.candidates
    realized = [ByHand(own).images(first + h) for h in range(TINY.horizon - 1)]
    exact = piece(data, "fidelity", system)["exact"].sel(scale=1.0)
    np.testing.assert_allclose(exact.sel(change=1), response_by_hand(own, 1, realized), rtol=1e-6)
    futures = piece(data, "futures-1", system)["future_response"].sel(family="natural", future=1)
    np.testing.assert_allclose(futures.sel(change=2), response_by_hand(own, 2, own.branch(1)), rtol=1e-6)
    assert abs(exact).min() > 1e-6  # far above rounding


def test_switched_gates_are_those_of_the_next_step(data: Path) -> None:
    own = scene(data, CNN)
    share = piece(data, "fidelity", CNN)["switch_fraction"]
    assert share.isel(horizon=-1).isnull().all()
    first = TINY.burn_in + TINY.references
    start = {}
    for name, batches in (("control", range(TINY.burn_in, first)), ("shocked", [first])):
        hand = ByHand(own)
        hand.step([hand.images(k) for k in batches])
        images, gates = hand.images(first + TINY.candidates)[0], []
        for layer in hand.model:
            images = layer(images)
            if isinstance(layer, nn.ReLU):
                gates.append((images > 0).flatten())
        start[name] = torch.cat(gates)
    expected = float((start["control"] != start["shocked"]).double().mean())
    assert expected > 0
    assert float(share.sel(change=0, scale=1.0, horizon=1)) == pytest.approx(expected, rel=1e-9)


def assert_sources_sum_to_the_error(found: xr.Dataset, curves: xr.Dataset) -> None:
    """The parts, each propagated by itself, against the exact response less the tangent of another piece."""
    error = curves["exact"] - curves["predicted"].sel({"answer": "tangent"})
    assert abs(error).max() > 1e-5  # of losses near 2: eleven digits above rounding
    np.testing.assert_allclose(sum(found[f"output_from_{part}"] for part in PARTS), error, atol=1e-14)
    np.testing.assert_allclose(sum(found[f"state_share_{part}"] for part in PARTS), 1, rtol=1e-9)
    np.testing.assert_array_equal(found["state_share_write_in"].sel(horizon=1), 1)
    assert found["identity_residual"].max() < 1e-14


def test_switched_gates_have_their_part_of_every_candidates_error(data: Path) -> None:
    found, curves = piece(data, "sources", CNN), piece(data, "fidelity", CNN)
    assert_sources_sum_to_the_error(found, curves.sel(scale=TINY.sources_at))
    assert abs(found["output_from_switching"]).max() > 1e-9
    own = scene(data, CNN)
    one = theory.decompose(own.path.replace(own.candidates), scale=TINY.sources_at, index=2).data
    for part in PARTS:
        name = f"state_share_{part}"
        np.testing.assert_allclose(found[name].isel(change=2), one[name], rtol=1e-9, atol=1e-12)


def test_a_system_has_every_variable_of_its_rows(data: Path) -> None:
    merged = merge_pieces([{"mlp": piece(data, name)} for name in PIECES])["mlp"]
    xr.testing.assert_identical(piece(data, WHOLE), merged)
    expected = {
        "exact": ("change", "scale", "horizon"),
        "predicted": ("answer", "change", "scale", "horizon"),
        "identity_residual": ("change",),
        "sources_scale": (),
        "output_error": ("change", "horizon"),
        **{f"output_from_{part}": ("change", "horizon") for part in PARTS},
        **{f"state_share_{part}": ("change", "horizon") for part in PARTS},
        "score": ("family", "score_method", "change"),
        "magnitude": ("family", "change"),
        "first_step": ("family", "change"),
        "null_correlation": ("family", "permutation"),
        "readout_cosine": ("horizon",),
        "accepted": ("change",),
        "matched_exact": ("change", "horizon"),
        "channel_exact": ("channel", "channel_change", "horizon"),
        "persistence_m": ("decay_m", "persistence_change", "horizon"),
        "persistence_v": ("decay_v", "persistence_change", "horizon"),
        "frozen_memory": ("coefficient",),
        "future_response": ("family", "change", "future", "horizon"),
        "present_score": ("family", "present_method", "change"),
        "matched_first_step": ("change",),
    }
    assert {str(name): variable.dims for name, variable in merged.data_vars.items()} == expected
    assert all(bool(variable.notnull().all()) for variable in merged.data_vars.values())
    assert merged["future"].values.tolist() == [0, 1]
    assert merged["accepted"].all()
    assert_sources_sum_to_the_error(merged, merged.sel(scale=TINY.sources_at))
    assert (merged["output_from_switching"] == 0).all()  # GELU has no gates
    # what two pieces know in two ways
    full = merged.sel(scale=1.0)
    np.testing.assert_allclose(merged["magnitude"].sel(family="natural"), abs(full["exact"]).max("horizon"), rtol=1e-9)
    np.testing.assert_allclose(merged["channel_exact"].sel(channel="111"), full["exact"][:1], rtol=1e-9)
    np.testing.assert_allclose(
        merged["score"].sel(family="natural", score_method="full_iso"),
        abs(full["predicted"].sel({"answer": "tangent"})).max("horizon"), rtol=1e-9,
    )  # fmt: skip
    one_step = merged["present_score"].sel(family="natural", present_method="exact_one_step")
    np.testing.assert_allclose(one_step, abs(full["exact"].sel(horizon=1)), rtol=1e-9)
    # equal first responses of alternating sign, whatever the future
    first = merged["future_response"].sel(family="matched", horizon=1)
    np.testing.assert_allclose(first, merged["matched_first_step"].broadcast_like(first), rtol=1e-6)
    np.testing.assert_allclose(merged["matched_first_step"] / abs(merged["matched_first_step"][0]), [1, -1, 1])


def test_a_candidate_that_cannot_be_matched_is_left_out(data: Path) -> None:
    own = replace(scene(data))
    found, kept = own.matched, torch.tensor([True, False, True])
    data = found.data.assign(accepted=("change", kept.numpy()))
    own.__dict__["matched"] = replace(found, data=data.assign(xi=data["xi"].where(data["accepted"])))
    for recipe in (cifar.ranking, cifar.present, lambda s: cifar.futures(s, 0)):
        made = recipe(own)
        for name, value in made.items():
            if {"family", "change"} <= set(value.dims):
                gone = value.sel(family="matched").isel(change=1)
                rest = value.sel(family="matched").isel(change=[0, 2])
                assert gone.isnull().all(), name
                assert rest.notnull().all(), name
                assert value.sel(family="natural").notnull().all(), name


@pytest.mark.parametrize("system", [MLP, CNN], ids=["mlp", "cnn"])
def test_rows_together_are_rows_alone(data: Path, system: System) -> None:
    """On a GPU rows share their calls: the networks can be mapped over, and nothing else changes."""
    own = scene(data, system)
    change = own.path.perturb(own.natural)
    alone = change.response(own.probe).data["response"]
    matched = own.matched.xi
    sharing = own.point.loss.sharing
    sharing.wanted = True
    try:
        together = change.response(own.probe).data["response"]
        again = theory.match_first_step(own.path, own.natural, own.probe).xi
        assert sharing._agreed == dict.fromkeys(sharing._agreed, True)
        assert {"gradient", "value", "product"} <= set(sharing._agreed)
    finally:
        sharing.wanted = False
    np.testing.assert_allclose(together, alone, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(again, matched, rtol=1e-6, atol=1e-12, equal_nan=True)


def test_the_same_piece_has_the_same_bits(data: Path) -> None:
    once = piece(data, "futures-0")
    prepare.cache_clear()
    assert piece.__wrapped__(data, "futures-0").identical(once)
    other = run_piece(
        System("mlp", 2026, 1), "futures-0", data=data, digest=load_cifar(data).digest, protocol=TINY, device="cpu"
    )["mlp"]
    assert not other.equals(once)


# --- images and their parts


def test_futures_share_no_image_with_what_was_seen(data: Path) -> None:
    own = scene(data)

    def names(batches: list[tuple[Tensor, Tensor]]) -> list[bytes]:
        return [image.numpy().tobytes() for images, _ in batches for image in images]

    seen = set(names(own.batches(0, TINY.burn_in + TINY.references + TINY.candidates)))
    assert len(seen) == TINY.seen  # made-up images are all different
    branches = [names(own.branch(k)) for k in range(TINY.futures)]
    for branch in [*branches, names(own.future)]:
        assert len(branch) == len(set(branch)) == (TINY.horizon - 1) * TINY.batch
        assert not seen & set(branch)
    assert branches[0] != branches[1]
    draws = torch.Generator().manual_seed(0)
    assert set(names(own.resampled(own.order[: TINY.seen], draws))) < seen


def test_the_papers_networks_and_needs() -> None:
    for system, count in ((MLP, 855_050), (CNN, 94_538)):
        ours, theirs = build(system), plain(system)
        assert sum(p.numel() for p in ours.parameters()) == count
        images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-13, atol=1e-13)
    torch.manual_seed(5)
    layers = [nn.Linear(3072, 256), nn.Linear(256, 256), nn.Linear(256, 10)]  # torch's own initialization
    torch.manual_seed(5)
    drawn = network("mlp")
    assert all(torch.equal(p, q) for p, q in zip(nn.ModuleList(layers).parameters(), drawn.parameters()))
    assert FULL.images == 127 * 128
    assert FULL.images <= 17_408
    before = torch.get_rng_state()
    twice = [torch.cat([p.flatten() for p in build(MLP).parameters()]) for _ in range(2)]
    assert torch.equal(*twice)
    assert torch.equal(before, torch.get_rng_state())


def test_a_study_names_its_systems_and_what_made_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **arrays(train=QUICK.images, test=QUICK.probe))
    quick = cifar_study(tmp_path, seed=11, quick=True)
    assert [system.name for system in quick.systems] == ["mlp-11-0", "cnn-11-0"]
    assert json.loads(json.dumps(quick.attrs)) == quick.attrs
    assert quick.attrs["horizon"] == QUICK.horizon
    assert pickle.loads(pickle.dumps(quick)).pieces == quick.pieces
    with pytest.raises(InvalidFile, match=f"{QUICK.images:,} training images and one system needs 16,256"):
        cifar_study(tmp_path)
    with pytest.raises(InvalidInput, match="device 'warp'"):
        cifar_study(tmp_path, quick=True, device="warp")
    with pytest.raises(InvalidFile, match="not what the study was started with"):
        prepare(MLP, tmp_path, "another digest", TINY, "cpu")


# --- loading


def records(x: np.ndarray, y: np.ndarray) -> bytes:
    return b"".join(bytes([label]) + image.transpose(2, 0, 1).tobytes() for image, label in zip(x, y))


def test_every_source_gives_the_same_images(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = arrays()
    files = {
        "data_batch_1.bin": records(stored["x_train"][:70], stored["y_train"][:70]),
        "data_batch_2.bin": records(stored["x_train"][70:], stored["y_train"][70:]),
        "test_batch.bin": records(stored["x_test"], stored["y_test"]),
    }
    extracted = tmp_path / "all" / "cifar-10-batches-bin"
    extracted.mkdir(parents=True)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            (extracted / name).write_bytes(content)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    splits = {
        kind: {"img": list(stored[f"x_{kind}"]), "label": list(stored[f"y_{kind}"])} for kind in ("train", "test")
    }
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda name: splits))
    load_cifar.cache_clear()
    sources = [data, data.parent, extracted, extracted.parent, tmp_path, tmp_path / "cifar-10-binary.tar.gz", None]
    found = [load_cifar(source) for source in sources]
    load_cifar.cache_clear()  # the made-up hub must not outlive this test
    assert len({each.digest for each in found}) == 1
    images, labels = found[0].train.batch(torch.tensor([5]), torch.device("cpu"))
    assert labels.tolist() == [int(stored["y_train"][5])]
    pixel = stored["x_train"][5, 3, 4] / 255
    np.testing.assert_allclose(images[0, :, 3, 4], (pixel - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616])


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in arrays().items() if key != name}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (without("y_test"), "no array 'y_test'"),
        (arrays() | {"x_train": arrays()["x_train"][:, :28, :28]}, "x_train is uint8 of shape"),
        (arrays() | {"x_test": arrays()["x_test"] / 255.0}, "x_test is float64"),
        (arrays() | {"y_train": arrays()["y_train"][:-1]}, "120 train images have 119 labels"),
        (arrays() | {"y_train": arrays()["y_train"] + np.uint8(3)}, "they go from 0 to 9"),
        (arrays() | {"x_test": np.array([object()])}, "pickle"),
    ],
)
def test_a_file_that_is_not_cifar_says_why(changed: dict[str, np.ndarray], reason: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **changed)
    with pytest.raises(InvalidFile, match=reason):
        load_cifar(tmp_path / "cifar10.npz")


def test_files_that_cannot_be_read_name_the_three_ways(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = data.read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "cut.tar.gz").write_bytes(b"\x1f\x8b\x08\x00 and no more")
    (tmp_path / "images.zip").write_bytes(content)
    (tmp_path / "empty").mkdir()
    for name in ("cut.npz", "text.npz", "cut.tar.gz", "images.zip", "empty", "nowhere"):
        with pytest.raises(InvalidFile, match=r"cifar10\.npz.*cifar-10-binary\.tar\.gz.*Hugging Face"):
            load_cifar(tmp_path / name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInput, match=r"datasets is not installed.*cifar-10-binary"):
        load_cifar(None)


def test_pickles_are_never_opened_and_cut_records_are_seen(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({}))
    with pytest.raises(InvalidFile, match="pickles are never opened"):
        load_cifar(tmp_path)
    stored = arrays()
    whole = records(stored["x_test"], stored["y_test"])
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "data_batch_1.bin").write_bytes(whole[:-5])
    (binary / "test_batch.bin").write_bytes(whole)
    with pytest.raises(InvalidFile, match=r"data_batch_1\.bin .* is cut off"):
        load_cifar(binary)
