"""Training with DistributedDataParallel: in processes of its own for tests/test_integrations.py, in one on a GPU."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from aftershock.integrations.distributed import recorder_for

STEPS, MICRO = 10, 2
MODES = ("plain", "recorded", "broken")  # without a recorder; with one; and one whose sixth step cannot be recorded


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Unwritable:
    """What the recorder cannot write down."""


def work(rank: int, ranks: int, folder: Path) -> None:
    """One process: all modes, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    for mode in MODES:
        train(rank, folder, mode)
    gc.collect()  # a model in a cycle would outlive the group that it sends to
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, folder: Path, mode: str, device: str = "cpu", recorder_of: Any = recorder_for) -> None:
    model = DistributedDataParallel(made().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = None
    if mode != "plain":
        recorder = recorder_of(model, optimizer, loss_of, folder / mode, clip=0.5, window=8, triggers=())
        recorder.__enter__()
    torch.manual_seed(rank)  # every rank draws its own masks
    data = torch.Generator().manual_seed(100 + rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(STEPS):
            for i in range(MICRO):
                x = torch.randn(3 + rank, 4, generator=data, dtype=torch.float64).to(device)  # shards differ in size
                batch = (x, x[:, :1] * (1 + rank))
                loss = loss_of(model, batch) / MICRO
                loss.backward()
                if recorder and i < MICRO - 1:
                    recorder.micro(batch, loss)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if recorder:
                unwritable = mode == "broken" and rank == 1 and step == 5
                recorder.step(Unwritable() if unwritable else batch, loss, norm=norm)
    if recorder:
        recorder.__exit__(None, None, None)
    stopped = [str(w.message) for w in said if "flight recorder" in str(w.message)]
    torch.save({**model.module.state_dict(), "said": stopped}, folder / f"{mode}-{rank}.pt")
