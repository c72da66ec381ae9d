"""Two processes train together; rank 0 records every rank's batch, and the step replays on one device.

torchrun --nproc-per-node 2 examples/with_ddp.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from letters import NAMES, PROSE, LetterModel, draw, loss_fn, misread
from torch.nn.parallel import DistributedDataParallel

import aftershock as ak
from aftershock.integrations.distributed import recorder_for
from aftershock.recorder.explanation import FlightExplanation

BAD = 90  # and only rank 1 reads it wrong


def main(folder: Path = Path("flight"), **options: Any) -> FlightExplanation | None:
    """What every rank runs; rank 0 returns what it found."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(LetterModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    generator = torch.Generator().manual_seed(rank)  # every rank has a shard of its own
    with recorder_for(model, optimizer, loss_fn, folder, clip=1.0, window=24, after=6) as recorder:
        for step in range(100):
            batch = draw(NAMES if step % 8 == 2 else PROSE, generator, size=64)
            if step == BAD and rank == 1:
                batch = misread(batch)
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()  # gradients are the mean over ranks from here on
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recorder.step(batch, loss.detach(), norm=norm)  # on every rank
    if rank != 0:
        return None
    found = ak.explain(folder, model=LetterModel(), loss_fn=loss_fn, **options)
    print(found)
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()
    dist.destroy_process_group()
