"""Other people's loops on a GPU: recorded without a changed bit, and explained by `explain`'s defaults."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import aftershock as ak
from aftershock.integrations.distributed import RankRecorder, recorder_for
from aftershock.recorder.store import open_flight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from aftershock.integrations.lightning import FlightCallback as LightningCallback  # noqa: E402
from aftershock.integrations.lightning import training_loss  # noqa: E402
from aftershock.integrations.transformers import FlightCallback as TrainerFlight  # noqa: E402
from aftershock.integrations.transformers import model_loss  # noqa: E402
from aftershock.recorder.explanation import FlightExplanation  # noqa: E402

from . import ranks  # noqa: E402
from .test_integrations import Net, examples, fit, language_model, same, sentences, train  # noqa: E402

DEVICE, ACCELERATOR, BACKEND = "cuda", "gpu", "nccl"
STEPS, BAD = 96, 70  # of a run with a planted batch; the early steps of a run have little to be compared with
QUICK: dict[str, Any] = {"verify": 0, "placebos": 0, "treatments": False, "examples": 0}


def equal_where_it_repeats(run: Callable[[Any], nn.Module], callback: Any) -> None:
    """The recorded run has the weights of one that was not, where two of these have each other's."""
    plain, again, recorded = run(None), run(None), run(callback)
    assert next(plain.parameters()).device.type == DEVICE
    if not same(plain, again):
        pytest.skip("this run does not repeat itself to the bit on this machine")
    assert same(plain, recorded)


def names(found: FlightExplanation, step: int, batches: list[int]) -> None:
    """It is this step that is blamed, and nothing else is put on the skip list than its batches."""
    assert found.kind == "own batch", found.verdict
    assert found.blamed == (step,), found.verdict
    assert found.skip == batches, found.verdict


# --- Lightning

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulated", [True, False], ids=["accumulated and clipped", "plain"])
def test_lightning_is_equal_to_the_bit_and_replayed(precision: str, accumulated: bool, tmp_path: Path) -> None:
    loop = {} if accumulated else {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    callback = LightningCallback(tmp_path / "flight", window=8, triggers=())

    def run(callback: Any) -> nn.Module:
        return fit(tmp_path, callback, accelerator=ACCELERATOR, precision=precision, **loop).to(DEVICE)

    equal_where_it_repeats(run, callback)
    assert callback.recorder is not None
    last = callback.recorder.recent[-1].step
    assert last >= (5 if accumulated else 20), "a scaler skips its first steps"
    found = ak.explain(tmp_path / "flight", step=last, model=Net().to(DEVICE), loss_fn=training_loss, **QUICK)
    assert "to the bit" in str(found.certificate)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lightning_names_a_planted_batch(precision: str, tmp_path: Path) -> None:
    callback = LightningCallback(tmp_path / "flight")
    data = examples(4 * STEPS, bad=range(4 * BAD, 4 * BAD + 4))
    loop: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 1, "precision": precision}
    if precision == "16-mixed":  # with the scale that it begins with, this batch would have no finite gradient
        del loop["precision"]
        loop["plugins"] = [MixedPrecision(precision, DEVICE, scaler=torch.amp.GradScaler(DEVICE, init_scale=16.0))]
    fit(tmp_path, callback, Net(dropout=0.1, norm=False), data, accelerator=ACCELERATOR, **loop)
    assert callback.recorder is not None
    (record,) = [record for record in callback.recorder.recent if record.indices == (BAD,)]
    names(ak.explain(callback.recorder), record.step, [BAD])


# --- the Hugging Face Trainer

TRAINERS: dict[str, dict[str, Any]] = {
    "float32": {"gradient_accumulation_steps": 1},
    "bfloat16": {"gradient_accumulation_steps": 1, "bf16": True},
    "float16, scaled, accumulated, clipped": {"gradient_accumulation_steps": 2, "fp16": True, "max_grad_norm": 0.5},
}


def still() -> Any:
    """Without dropout."""
    return language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def unsure(rows: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """One word in five is noise, so that a model never becomes sure, as of real text."""
    generator = torch.Generator().manual_seed(4)
    for row in rows:
        words = row["input_ids"]
        noise = torch.randint(17, words.shape, generator=generator)
        words[:] = torch.where(torch.rand(words.shape, generator=generator) < 0.2, noise, words)
        row["labels"] = words.where(row["labels"] != -100, -100)
    return rows


@pytest.mark.parametrize("name", TRAINERS)
def test_the_trainer_is_equal_to_the_bit_and_replayed(name: str, tmp_path: Path) -> None:
    callback = TrainerFlight(tmp_path / "flight", window=8, triggers=())

    def run(callback: Any) -> nn.Module:
        model = language_model(attn_implementation="eager")  # with dropout; fused attention need not repeat itself
        return train(tmp_path, model, sentences(96), callback, use_cpu=False, **TRAINERS[name])

    equal_where_it_repeats(run, callback)
    assert callback.recorder is not None
    micro = TRAINERS[name]["gradient_accumulation_steps"]
    assert {len(record.fed) for record in callback.recorder.recent} == {micro}
    last = callback.recorder.recent[-1].step
    found = ak.explain(callback.recorder, step=last, **QUICK)
    assert "to the bit" in str(found.certificate)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_trainer_names_a_planted_batch(name: str, tmp_path: Path) -> None:
    micro = TRAINERS[name]["gradient_accumulation_steps"]
    size = 32 * micro  # of an update
    callback = TrainerFlight(tmp_path / "flight")
    rows = unsure(sentences(size * STEPS, bad=range(size * BAD, size * (BAD + 1))))
    options: dict[str, Any] = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 32,
        "train_sampling_strategy": "sequential",
        "eval_strategy": "no",
        "lr_scheduler_type": "constant_with_warmup",
    }
    train(tmp_path, still(), rows, callback, use_cpu=False, **{**options, **TRAINERS[name]})
    assert callback.recorder is not None
    bad = list(range(micro * BAD, micro * (BAD + 1)))
    (record,) = [record for record in callback.recorder.recent if record.indices == tuple(bad)]
    names(ak.explain(callback.recorder), record.step, bad)
    if name == "float32":  # else accelerate puts autocast into the live model
        again = ak.explain(tmp_path / "flight", model=still().to(DEVICE), loss_fn=model_loss)
        names(again, record.step, bad)


# --- DistributedDataParallel

RECORDERS: dict[str, Callable[..., Any]] = {"FlightRecorder": recorder_for, "RankRecorder": RankRecorder}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the only one of a group."""
    meeting = tmp_path_factory.mktemp("alone") / "meeting"
    torch.distributed.init_process_group(BACKEND, init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    gc.collect()  # a model in a cycle would outlive the group that it sends to
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", RECORDERS)
@pytest.mark.usefixtures("alone")
def test_a_rank_is_recorded_to_the_bit(kind: str, tmp_path: Path) -> None:
    for mode in ("plain", "recorded"):
        ranks.train(0, tmp_path, mode, DEVICE, RECORDERS[kind])
    plain, recorded = (torch.load(tmp_path / f"{mode}-0.pt") for mode in ("plain", "recorded"))
    assert (plain.pop("said"), recorded.pop("said")) == ([], [])
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)
    flight = open_flight(tmp_path / "recorded")
    assert [len(record.fed) for record in flight.records.values()] == [ranks.MICRO] * ranks.STEPS
    found = ak.explain(tmp_path / "recorded", model=ranks.made().to(DEVICE), loss_fn=ranks.loss_of, **QUICK)
    assert "to the bit" in str(found.certificate)


@pytest.mark.parametrize("kind", RECORDERS)
@pytest.mark.usefixtures("alone")
def test_a_rank_names_a_planted_batch(kind: str, tmp_path: Path) -> None:
    """A loop in bfloat16 whose batches come from pinned memory."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)).to(DEVICE)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = DistributedDataParallel(made())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rows = examples(32 * STEPS, bad=range(32 * BAD, 32 * (BAD + 1)))
    loader = torch.utils.data.DataLoader(rows, batch_size=32, pin_memory=DEVICE == "cuda")  # type: ignore[arg-type]
    with RECORDERS[kind](model, optimizer, loss_fn, tmp_path / "flight", clip=1.0) as recorder:
        for step, batch in enumerate(loader):
            x, y = (part.to(DEVICE, non_blocking=True) for part in batch)
            loss = loss_fn(model, (x, y))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step((x, y), loss, index=1000 + step, norm=norm)
    names(ak.explain(tmp_path / "flight", model=made(), loss_fn=loss_fn), BAD, [1000 + BAD])
