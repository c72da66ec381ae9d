"""What a recorder costs a training loop, and what explaining a window costs beside training it."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import aftershock as ak

from .models import System, cnn_system, loss_fn
from .table import Row

WINDOW = 64
OVERHEAD_BAR, EXPLAIN_BAR = 1.03, 5.0


def recording(device: torch.device, full: bool) -> list[Row]:
    """Steps of two twins in turn, one of them recorded; then the window explained without references and proofs."""
    return [_overhead(cnn_system(device), 4 * WINDOW if full else WINDOW), _explain(cnn_system(device))]


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple) -> torch.Tensor:
    loss = loss_fn(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _overhead(system: System, steps: int) -> Row:
    """Wall time, because the recorder writes from a thread of its own; the median over steps of a pair's ratio."""
    twins = [copy.deepcopy((system.model, system.optimizer)) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder, ak.FlightRecorder(*twins[1], loss_fn, folder) as recorder:
        pairs = []
        for i in range(steps):
            batch = system.data[i % len(system.data)]
            plain = _timed(lambda batch=batch: _step(*twins[0], batch))
            recorded = _timed(lambda batch=batch: recorder.step(batch, _step(*twins[1], batch)))
            pairs.append((plain, recorded))
        assert recorder.recording, "the recorder stopped"
    ratio = statistics.median(recorded / plain for plain, recorded in pairs)
    usual = statistics.median(plain for plain, _ in pairs)
    total = sum(recorded for _, recorded in pairs) / sum(plain for plain, _ in pairs)
    note = f"steps of {1e3 * usual:.0f} ms; {total:.2f} over all, states included"
    grows = "a batch and a norm per step, a state per window"
    return Row("recording, CNN–ReLU", ratio, OVERHEAD_BAR, "× a step without it", grows, note)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _explain(system: System) -> Row:
    """CPU time of `explain` against that of the steps it explains, which were timed as they were recorded."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"window": WINDOW, "triggers": []}
        with ak.FlightRecorder(system.model, system.optimizer, loss_fn, folder, **options) as recorder:
            began = time.process_time()
            for i in range(WINDOW + 1):
                batch = system.data[i % len(system.data)]
                recorder.step(batch, _step(system.model, system.optimizer, batch))
            trained = (time.process_time() - began) * WINDOW / (WINDOW + 1)
        began = time.process_time()
        ak.explain(recorder, references=0, verify=0, examples=0)
        spent = time.process_time() - began
    grows = "a replay, a sweep of 2–3 g per step"
    return Row(f"explaining {WINDOW} steps, CNN–ReLU", spent / trained, EXPLAIN_BAR, "× training them", grows)
