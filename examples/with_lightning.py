"""The same run under Lightning: a callback records it, and explain names the batch that was misread.

pip install "aftershock[lightning]"; python examples/with_lightning.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from letters import NAMES, PROSE, LetterModel, draw, loss_fn, misread
from torch import Tensor

import aftershock as ak
from aftershock.integrations.lightning import FlightCallback, training_loss
from aftershock.recorder.explanation import FlightExplanation

BAD = 90


class Letters(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LetterModel()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_fn(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-2)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [draw(NAMES if step % 8 == 2 else PROSE, generator) for step in range(110)]
    found[BAD] = misread(found[BAD])
    return found


def main(folder: Path = Path("flight"), **options: Any) -> FlightExplanation:
    torch.manual_seed(0)
    flight = FlightCallback(folder, window=24, after=6)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=1.0,  # the callback reads it, with accumulation, schedulers and precision
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[flight],
    )
    trainer.fit(Letters(), torch.utils.data.DataLoader(batches(), batch_size=None))

    # in another process, days later, the module as training builds it is enough
    found = ak.explain(folder, model=Letters(), loss_fn=training_loss, **options)
    print(found)
    print("batches to skip:", json.loads(found.save_skip_list(folder / "skip.json").read_text()))
    return found


if __name__ == "__main__":
    main()
