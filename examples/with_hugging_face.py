"""A GPT-2 of two layers under the Hugging Face Trainer: a callback records it, and explain names a batch of noise.

pip install "aftershock[transformers]"; python examples/with_hugging_face.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from letters import CONTEXT, PROSE, draw, letters
from torch import Tensor

import aftershock as ak
from aftershock.integrations.transformers import FlightCallback, model_loss
from aftershock.recorder.explanation import FlightExplanation

SIZE, STEPS, BAD = 16, 80, 66


def language_model() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(letters),
        n_positions=CONTEXT + 1,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,  # as the Trainer sets it: a replay needs the same model
    )
    return transformers.GPT2LMHeadModel(config)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = [draw(PROSE, generator, SIZE) for _ in range(STEPS)]
    batches[BAD] = torch.randint(len(letters), batches[BAD].shape, generator=generator)  # a damaged file
    return [{"input_ids": row, "labels": row.clone()} for batch in batches for row in batch]


def main(folder: Path = Path("flight"), **options: Any) -> FlightExplanation:
    flight = FlightCallback(folder, window=24, after=6)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=SIZE,
        learning_rate=1e-2,
        warmup_steps=10,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
    )
    trainer = transformers.Trainer(model=language_model(), args=arguments, train_dataset=rows(), callbacks=[flight])
    trainer.train()

    found = ak.explain(folder, model=language_model(), loss_fn=model_loss, **options)
    print(found)
    return found


if __name__ == "__main__":
    main()
