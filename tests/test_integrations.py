"""Adapters: other people's loops, recorded without a changed bit, replayed to the bit, and explained."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aftershock as ak
from aftershock.errors import InvalidInput, UnsupportedClipping

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from aftershock.integrations.lightning import FlightCallback as LightningCallback  # noqa: E402
from aftershock.integrations.lightning import training_loss  # noqa: E402
from aftershock.integrations.transformers import FlightCallback as TrainerFlight  # noqa: E402
from aftershock.integrations.transformers import model_loss  # noqa: E402
from aftershock.recorder.store import open_flight  # noqa: E402
from aftershock.recorder.triggers import AtStep  # noqa: E402

from . import ranks  # noqa: E402

BAD = 30  # the batch that is planted


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def examples(count: int, bad: range | None = None) -> list[tuple[Tensor, Tensor]]:
    """A linear rule; the targets of those in `bad` are far too large."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    y = x[:, :1] - x[:, 1:2]
    for i in bad or ():
        y[i] = 30
    return list(zip(x, y))


# --- Lightning


class Net(lightning.LightningModule):
    """Calls its layers, not itself: no hook on the module sees the forward pass."""

    def __init__(self, dropout: float = 0.2, norm: bool = True) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 16), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss * (1 + 0.01 * batch_idx)  # the index is part of what is replayed

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.layers(batch[0] + torch.rand(1, device=self.device))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(folder: Path, callback: Any = None, module: Any = None, data: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    module = Net() if module is None else module
    loader = torch.utils.data.DataLoader(examples(56) if data is None else data, batch_size=4)
    held_out = torch.utils.data.DataLoader(examples(8), batch_size=4)
    options = {"accelerator": "cpu", "max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, val_check_interval=5,
            callbacks=callback, **options,
        )  # fmt: skip
        trainer.fit(module, loader, held_out)
    return module


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 1, "gradient_clip_val": None}, {"precision": "bf16-mixed"}],
    ids=["accumulated and clipped", "plain", "autocast"],
)
def test_lightning_is_equal_to_the_bit_and_replayed(options: dict[str, Any], tmp_path: Path) -> None:
    plain = fit(tmp_path, **options)
    after = torch.rand(2)
    callback = LightningCallback(tmp_path / "flight", window=8, triggers=())
    module = fit(tmp_path, callback, **options)
    assert torch.equal(after, torch.rand(2))
    assert same(plain, module)
    # 14 batches an epoch in threes: the fifth update of each has two, divided by three all the same
    steps = 10 if options.get("accumulate_grad_batches", 3) == 3 else 28
    assert callback.recorder is not None
    assert [len(r.fed) for r in callback.recorder.recent] == ([3, 3, 3, 3, 2] * 2 if steps == 10 else [1] * 28)[-8:]
    found = ak.explain(tmp_path / "flight", step=steps - 1, verify=0, references=0)
    assert "to the bit" in str(found.certificate)
    again = ak.explain(tmp_path / "flight", step=steps - 1, verify=0, references=0, model=Net(), loss_fn=training_loss)
    assert again.data.equals(found.data)


class Loosening(lightning.Callback):
    """Clips at 0.5, then not at all, then at 0.1."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.gradient_clip_val = (0.5, None, 0.1)[batch_idx // 5]


def scaled() -> list[Any]:
    """What precision="16-mixed" is on a GPU: a loss that is multiplied before it goes backward."""
    return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]


def test_lightning_scales_no_recorded_loss(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    callback = LightningCallback(tmp_path / "flight", triggers=())
    plain, module = (fit(tmp_path, some, plugins=scaled(), **options) for some in (None, callback))
    assert same(plain, module)
    assert callback.recorder is not None
    assert 0.1 < callback.recorder.recent[-1].loss < 2
    found = ak.explain(tmp_path / "flight", step=callback.recorder.recent[-1].step, verify=0, references=0)
    assert "to the bit" in str(found.certificate)


def test_lightning_records_a_clip_that_changes(tmp_path: Path) -> None:
    callback = LightningCallback(tmp_path / "flight", triggers=())
    data, options = examples(4 * 14), {"max_epochs": 1, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    fit(tmp_path, [Loosening(), callback], data=data, **options)
    assert callback.recorder is not None
    assert [record.clip for record in callback.recorder.recent] == [0.5] * 5 + [None] * 5 + [0.1] * 4
    found = ak.explain(tmp_path / "flight", step=13, verify=0, references=0)
    assert "to the bit" in str(found.certificate)


def test_lightning_finds_a_planted_batch(tmp_path: Path) -> None:
    data = examples(4 * 40, bad=range(4 * BAD, 4 * BAD + 4))
    callback = LightningCallback(tmp_path / "flight", window=32, triggers=[AtStep(BAD + 3)])
    options = {"max_epochs": 1, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    fit(tmp_path, callback, Net(dropout=0, norm=False), data, **options)
    found = ak.explain(tmp_path / "flight", model=Net(dropout=0, norm=False), loss_fn=training_loss)
    assert found.culprits[0].step == BAD
    assert found.culprits[0].batches == (BAD,)


def test_lightning_says_what_it_cannot_record(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedClipping, match="by value"):
        fit(tmp_path, LightningCallback(tmp_path / "flight"), gradient_clip_algorithm="value")
    manual = Net()
    manual.automatic_optimization = False
    with pytest.raises(InvalidInput, match="manual optimization"):
        fit(tmp_path, LightningCallback(tmp_path / "f"), manual, accumulate_grad_batches=1, gradient_clip_val=None)


OLDER_NAME = """
import sys
sys.modules["lightning"] = None  # not installed
import pytorch_lightning, torch
from aftershock.integrations.lightning import FlightCallback

class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

def fit(callbacks):
    torch.manual_seed(0)
    net, data = Net(), torch.randn(8, 2, 4)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    )
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=None))
    return net

callback = FlightCallback(sys.argv[1], triggers=())
assert torch.equal(fit([]).layer.weight, fit([callback]).layer.weight)
print(len(callback.recorder.recent), "recorded")
"""


def test_pytorch_lightning_by_itself_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    command = [sys.executable, "-W", "ignore", "-c", OLDER_NAME, str(tmp_path / "flight")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.splitlines()[-1:] == ["8 recorded"], found.stderr


# --- transformers


def language_model(**options: Any) -> Any:
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        use_cache=False, **options
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def sentences(count: int, bad: range | None = None) -> list[dict[str, Tensor]]:
    """Counting modulo 17; those in `bad` are noise, and shorter ones have labels of −100."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for i in range(count):
        words = (torch.randint(0, 17, (1,), generator=generator) + torch.arange(8)) % 17
        if i in (bad or ()):
            words = torch.randint(0, 17, (8,), generator=generator)
        labels = words.clone()
        labels[: i % 3] = -100
        out.append({"input_ids": words, "attention_mask": torch.ones(8, dtype=torch.long), "labels": labels})
    return out


class Classifier(nn.Module):
    """A model without **kwargs: the Trainer divides its loss by the number of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(17, 4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 17))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(input_ids), input_ids[:, 0])}


def train(folder: Path, model: nn.Module, data: Any, callback: Any = None, **options: Any) -> nn.Module:
    settings = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "learning_rate": 1e-2,
        "num_train_epochs": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "linear", "warmup_steps": 3,
        "eval_strategy": "steps", "use_cpu": True, **options,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], save_strategy="no", logging_strategy="no",
        eval_steps=4, disable_tqdm=True, seed=7, **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:4],
        callbacks=callback if isinstance(callback, list) else [callback] if callback else [],
    )  # fmt: skip
    trainer.train()
    return model


@pytest.mark.parametrize("kind", ["language", "classifier", "autocast"])
def test_the_trainer_is_equal_to_the_bit_and_replayed(kind: str, tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Classifier() if kind == "classifier" else language_model()

    options = {"bf16": True} if kind == "autocast" else {}
    plain = train(tmp_path, made(), sentences(56), **options)
    callback = TrainerFlight(tmp_path / "flight", window=8, triggers=())
    model = train(tmp_path, made(), sentences(56), callback, **options)
    assert same(plain, model)
    assert callback.recorder is not None
    assert [len(r.fed) for r in callback.recorder.recent] == [3, 3, 2, 3, 3, 3, 3, 2]
    assert len({r.lr for r in callback.recorder.recent}) > 4
    found = ak.explain(tmp_path / "flight", step=9, verify=0, references=0)
    assert "to the bit" in str(found.certificate)
    if kind != "autocast":  # which accelerate puts into the live model
        other = ak.explain(tmp_path / "flight", step=9, verify=0, references=0, model=made(), loss_fn=model_loss)
        assert other.data.equals(found.data)


class Tightening(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        args.max_grad_norm = 0.05


def test_the_trainer_records_a_clip_that_changes(tmp_path: Path) -> None:
    callback = TrainerFlight(tmp_path / "flight", triggers=())
    train(tmp_path, Classifier(), sentences(24), [Tightening(), callback], num_train_epochs=1)
    assert callback.recorder is not None
    assert [record.clip for record in callback.recorder.recent] == [0.5, 0.05]
    found = ak.explain(tmp_path / "flight", step=1, verify=0, references=0)
    assert "to the bit" in str(found.certificate)


def test_a_norm_that_the_trainer_clips_away_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, clip = [], transformers.Trainer._clip_grad_norm
    monkeypatch.setattr(transformers.Trainer, "_clip_grad_norm", lambda *some: told.append(clip(*some)) or told[-1])
    seen: list[Any] = []
    callback = TrainerFlight(tmp_path / "flight", window=16, on_trigger=seen.append)
    model = language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    train(
        tmp_path, model, sentences(640, bad=range(600, 608)), callback, eval_strategy="no",
        num_train_epochs=1, gradient_accumulation_steps=2, train_sampling_strategy="sequential", max_grad_norm=0.02,
    )  # fmt: skip
    assert callback.recorder is not None
    recent = callback.recorder.recent
    assert [record.raw_norm for record in recent] == [float(norm) for norm in told[-16:]]
    assert min(record.raw_norm for record in recent) > 0.02, "each is clipped"
    assert [one.step for one in seen if "the gradient norm is" in one.reason] == [75]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()), "hooks are taken off"


def test_a_norm_under_a_grad_scaler_is_that_of_the_gradient(tmp_path: Path) -> None:
    model, scaler = Classifier(), torch.amp.GradScaler("cpu", init_scale=2.0**10)  # the Trainer scales on a GPU only
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    callback = TrainerFlight(tmp_path / "flight", triggers=())
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, max_grad_norm=0.05)
    events: Any = (args, None, None)
    callback.on_train_begin(*events, model=model, optimizer=optimizer)
    batch = {name: torch.stack([row[name] for row in sentences(4)]) for name in ("input_ids", "attention_mask")}
    scaler.scale(model(**batch, labels=batch["input_ids"])["loss"]).backward()
    scaler.unscale_(optimizer)
    raw = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    callback.on_pre_optimizer_step(*events, optimizer=SimpleNamespace(scaler=scaler))
    scaler.step(optimizer)
    callback.on_step_end(*events)
    assert callback.recorder is not None
    assert callback.recorder.forecast({**batch, "labels": batch["input_ids"]}, horizon=2, futures=1), "our own hooks"
    callback.on_train_end(*events)
    assert callback.recorder.recent[0].raw_norm == pytest.approx(float(raw), rel=1e-5)
    assert float(raw) > 2 * 0.05


def test_the_trainer_says_that_a_whole_graph_cannot_be_looked_into(tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = Classifier()
        model.compile(backend="eager", fullgraph=True)
        return model

    plain = train(tmp_path, made(), sentences(12), num_train_epochs=1)
    callback = TrainerFlight(tmp_path / "flight", triggers=())
    with pytest.warns(RuntimeWarning, match="leave fullgraph out while you record"):
        assert same(plain, train(tmp_path, made(), sentences(12), callback, num_train_epochs=1))


def test_the_trainer_finds_a_planted_batch(tmp_path: Path) -> None:
    callback = TrainerFlight(tmp_path / "flight", window=16, triggers=[AtStep(12)])
    model = language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    train(
        tmp_path, model, sentences(64, bad=range(20, 24)), callback,
        num_train_epochs=1, gradient_accumulation_steps=1, train_sampling_strategy="sequential", warmup_steps=0,
    )  # fmt: skip
    found = ak.explain(tmp_path / "flight", references=4)
    parts = found.data["contribution"].sel(change="replace").sum("channel")[2:]  # the first steps of a new Adam apart
    assert int(parts["step"][int(parts.argmax("step"))]) == 5


# --- several ranks


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes trained together."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(ranks.work, (2, folder), nprocs=2)
    return folder


def ended(folder: Path, mode: str, rank: int) -> tuple[dict[str, Tensor], list[str]]:
    """A rank's weights, and what it was told."""
    found = torch.load(folder / f"{mode}-{rank}.pt")
    return found, found.pop("said")


def test_every_ranks_batch_is_part_of_the_step(together: Path) -> None:
    for rank in range(2):
        (plain, _), (recorded, said) = ended(together, "plain", rank), ended(together, "recorded", rank)
        assert all(torch.equal(plain[name], recorded[name]) for name in plain)
        assert said == []
    flight = open_flight(together / "recorded")
    assert [len(record.fed) for record in flight.records.values()] == [2 * ranks.MICRO] * ranks.STEPS
    assert [fed.tensors[0].shape[0] for fed in flight.records[3].fed] == [3, 4] * ranks.MICRO
    found = ak.explain(together / "recorded", model=ranks.made(), loss_fn=ranks.loss_of, verify=1)
    assert "to the bit" in str(found.certificate)
    assert math.isfinite(found.culprits[0].predicted)


def test_ranks_stop_recording_together(together: Path) -> None:
    for rank, reason in enumerate(["another rank", "Unwritable"]):
        (plain, _), (broken, said) = ended(together, "plain", rank), ended(together, "broken", rank)
        assert all(torch.equal(plain[name], broken[name]) for name in plain)
        assert len(said) == 1
        assert reason in said[0]
    assert open_flight(together / "broken").last == 4
