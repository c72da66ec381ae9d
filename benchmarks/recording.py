"""What a recorder costs a training loop, and what explaining a window costs beside training it."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import aftershock as ak

from .models import System, cnn_system, loss_fn, mlp_system
from .table import Row

WINDOW = 64
SENTENCES, TOKENS = 16, 1024
OVERHEAD_BAR, EXPLAIN_BAR = 1.03, 5.0
PARTS = {
    "_before_forward": "before the forward pass",
    "_after_optimizer": "after the optimizer's step",
    "_feed": "the batch",
    "finish": "its numbers",
}  # what the recorder does in the loop, by the method that does it


def recording(device: torch.device, full: bool) -> list[Row]:
    """Steps of two twins in turn, one of them recorded; then the window explained without references and proofs."""
    if device.type == "cuda":
        return [_language_overhead(device, 8 if full else 4), _loop_thread(device), _explain(cnn_system(device))]
    explained = [_explain(cnn_system(device)), _explain(mlp_system(device))]
    return [_overhead(cnn_system(device), 4 * WINDOW if full else WINDOW), _loop_thread(device), *explained]


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


class Language(torch.nn.Module):
    """A transformer of GPT-2's making; by default of its width and depth: 124 million parameters."""

    def __init__(
        self, width: int = 768, layers: int = 12, words: int = 50257, places: int = TOKENS, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(words, width), torch.nn.Embedding(places, width)
        for table in (self.words, self.places):
            torch.nn.init.normal_(table.weight, std=0.02)  # the words' table is the head, too
        heads = max(1, width // 64)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        norm = torch.nn.LayerNorm(width)
        self.layers = torch.nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.layers(x, mask=mask, is_causal=True) @ self.words.weight.T


def next_token(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _language_overhead(device: torch.device, rounds: int) -> Row:
    """Windows of steps with and without a recorder in turn, each to its end on the GPU; no step reads a number."""
    model = Language().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = [torch.randint(0, 50257, (SENTENCES, TOKENS), device=device) for _ in range(8)]

    def window(recorder: ak.FlightRecorder | None) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(WINDOW):
            batch = tokens[i % len(tokens)]
            with torch.autocast("cuda", torch.bfloat16):
                loss = next_token(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None:
                recorder.step(batch, loss)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    window(None)
    with tempfile.TemporaryDirectory() as folder:
        pairs = []
        for _ in range(rounds):
            plain = window(None)
            with ak.FlightRecorder(model, optimizer, next_token, folder) as recorder:
                recorder.wait()
                window(recorder)  # the first takes pinned memory from the system
                pairs.append((plain, window(recorder)))
                assert recorder.recording, "the recorder stopped"
    ratio = statistics.median(recorded / plain for plain, recorded in pairs)
    usual = statistics.median(plain for plain, _ in pairs) / WINDOW
    note = f"steps of {1e3 * usual:.0f} ms, bfloat16, a state per {WINDOW} steps included"
    return Row("recording, GPT-2 124M", ratio, OVERHEAD_BAR, "× a step without it", "a norm and a batch per step", note)


def _loop_thread(device: torch.device) -> Row:
    """What a step costs the loop's own thread: its CPU time in each call of the recorder, the median over steps.

    Of a transformer with 292 parameters that are so small that their arithmetic is nothing: calls are all.
    """
    model = Language(width=8, layers=24, words=64, places=16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = [torch.randint(0, 64, (2, 16), device=device) for _ in range(8)]
    parts = {name: [0.0] * (3 * WINDOW) for name in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        recorder = ak.FlightRecorder(model, optimizer, next_token, folder, window=WINDOW)
        step = 0

        def timed(name: str, work: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                began = time.thread_time()
                try:
                    return work(*arguments)
                finally:
                    parts[name][step] += time.thread_time() - began

            return call

        for name in PARTS:
            setattr(recorder, name, timed(name, getattr(recorder, name)))
        with recorder:
            for step in range(3 * WINDOW):
                batch = tokens[step % len(tokens)]
                loss = next_token(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(batch, loss)
            assert recorder.recording, "the recorder stopped"
    cost = {said: 1e3 * statistics.median(parts[name][WINDOW:]) for name, said in PARTS.items()}
    note = ", ".join(f"{said} {value:.2f}" for said, value in cost.items())
    grows = "parameters, for a norm of each; calls"
    return Row("recording, of the loop's own thread", sum(cost.values()), None, "ms a step", grows, note)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _explain(system: System) -> Row:
    """CPU time of `explain` against that of the steps it explains, which were timed as they were recorded.

    Of the second call: with the first result of a process xarray loads, and dask where it is installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"window": WINDOW, "triggers": []}
        with ak.FlightRecorder(system.model, system.optimizer, loss_fn, folder, **options) as recorder:
            began = time.process_time()
            for i in range(WINDOW + 1):
                batch = system.data[i % len(system.data)]
                recorder.step(batch, _step(system.model, system.optimizer, batch))
            trained = (time.process_time() - began) * WINDOW / (WINDOW + 1)
        calls = []
        for _ in range(2):
            began = time.process_time()
            ak.explain(recorder, references=0, verify=0, examples=0)
            calls.append(time.process_time() - began)
    grows, note = "a replay, a sweep of 2–3 g per step", f"the first call of the process: {calls[0] / trained:.1f} ×"
    work = f"explaining {WINDOW} steps, {system.name}"
    return Row(work, calls[1] / trained, EXPLAIN_BAR, "× training them", grows, note)
