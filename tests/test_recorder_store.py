"""A flight on disk: cut off anywhere it opens to its last whole step; changed, it is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import aftershock as ak
from aftershock.errors import InvalidFile
from aftershock.recorder.store import open_flight
from aftershock.recorder.triggers import AtStep
from aftershock.results.files import digest_of, read_tensors, write_tensors

from .cases import cross_entropy, mlp


def recorded(directory: Path, steps: int = 12) -> ak.FlightRecorder:
    torch.manual_seed(0)
    model = mlp(4, 5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = ak.FlightRecorder(
        model, optimizer, cross_entropy, directory, window=8, every=4, after=0, triggers=[AtStep(9)]
    )
    with recorder:
        for _ in range(steps):
            batch = torch.randn(6, 4), torch.randint(0, 3, (6,))
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
            recorder.step(batch, loss)
    return recorder


def test_cut_at_any_byte_it_opens_to_the_last_whole_step(tmp_path: Path) -> None:
    recorded(tmp_path)
    last = tmp_path / "ring" / "step-00000011.safetensors"
    whole = last.read_bytes()
    for size in [0, 1, 7, 8, 9, *range(10, len(whole), 97), len(whole) - 1]:
        last.write_bytes(whole[:size])
        assert open_flight(tmp_path, 10).last == 10
    (tmp_path / "ring" / ".step-00000011.safetensors.abc").write_bytes(whole[:50])  # what a kill leaves behind
    last.unlink()
    assert open_flight(tmp_path, 10).last == 10
    for name in ("state-00000012", "step-00000006"):
        path = tmp_path / "ring" / f"{name}.safetensors"
        data = path.read_bytes()
        path.unlink()  # frozen windows hold the same bytes under another name
        path.write_bytes(data[:-1])
    assert sorted(open_flight(tmp_path / "step-000009").records) == list(range(10))
    flight = open_flight(tmp_path, 10)
    assert (flight.folder.name, sorted(flight.records), sorted(flight.states)) == ("ring", [8, 9, 10], [8])


def test_a_changed_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    recorder = recorded(tmp_path)
    frozen = tmp_path / "step-000009"
    victim = frozen / "step-00000005.safetensors"
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.unlink()  # the ring has the same bytes under another name
    victim.write_bytes(data)
    with pytest.raises(InvalidFile, match=r"step-00000005.safetensors was changed after it was written"):
        open_flight(frozen)
    victim.write_bytes((frozen / "step-00000006.safetensors").read_bytes())  # whole, and another step's
    with pytest.raises(InvalidFile, match=r"does not match flight.json"):
        open_flight(frozen)
    victim.unlink()
    with pytest.raises(InvalidFile, match=r"incomplete: step-00000005.safetensors is missing"):
        open_flight(frozen)
    ring = tmp_path / "ring" / "step-00000010.safetensors"
    data = bytearray(ring.read_bytes())
    data[-3] ^= 1
    ring.write_bytes(data)
    for path in frozen.iterdir():
        path.unlink()
    with pytest.raises(InvalidFile, match="digest does not match"):
        ak.explain(recorder, step=11)


def test_a_damaged_window_that_the_ring_answers_for_is_told(tmp_path: Path) -> None:
    recorder = recorded(tmp_path)
    victim = tmp_path / "step-000009" / "step-00000007.safetensors"
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.unlink()  # the ring has the same bytes under another name
    victim.write_bytes(data)
    flight = open_flight(tmp_path, 9)
    assert (flight.folder.name, len(flight.damaged)) == ("ring", 1)
    which = ak.explain(recorder, step=9, treatments=False).facts.recording.which
    assert which.startswith("Damaged, and passed over: ")
    assert "step-000009/step-00000007.safetensors was changed after it was written" in which


def test_another_version_or_no_flight_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path)
    manifest = tmp_path / "step-000009" / "flight.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "aftershock-flight-9"}))
    with pytest.raises(InvalidFile, match=r"not a flight of this version .*; read it with the version of afte"):
        open_flight(tmp_path)
    manifest.write_text("{")
    with pytest.raises(InvalidFile, match="cannot be read"):
        open_flight(tmp_path)
    with pytest.raises(InvalidFile, match="there is no flight"):
        open_flight(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidFile, match="nothing was recorded"):
        open_flight(tmp_path / "empty")


def test_files_are_safetensors_that_prove_themselves(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3).bfloat16(),
        "wide": torch.randn(2, 3, dtype=torch.float64).mT,
        "one": torch.tensor(7),
        "none": torch.zeros(0, 4),
    }
    digest = write_tensors(tmp_path / "x.safetensors", tensors, {"format": "f", "text": "0" * 64})
    assert digest == digest_of(tmp_path / "x.safetensors")
    plain = load_file(tmp_path / "x.safetensors")
    ours, header = read_tensors(tmp_path / "x.safetensors", "thing", "f")
    assert header["text"] == "0" * 64
    for name, tensor in tensors.items():
        assert torch.equal(plain[name], tensor)
        assert torch.equal(ours[name], tensor)
        assert ours[name].dtype == tensor.dtype


SCRIPT = """
import sys, torch
from torch import nn
import aftershock as ak
torch.manual_seed(0)
model = nn.Linear(200, 200)
optimizer = torch.optim.AdamW(model.parameters())
loss_fn = lambda m, x: m(x).square().mean()
with ak.FlightRecorder(model, optimizer, loss_fn, sys.argv[1], window=8) as recorder:
    for step in range(100_000):
        x = torch.randn(8, 200)
        optimizer.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()
        recorder.step(x, loss)
        print(step, flush=True)
"""


def test_a_killed_run_opens_and_explains(tmp_path: Path) -> None:
    flight = tmp_path / "flight"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(flight)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    began = time.monotonic()
    while int(process.stdout.readline()) < 40:
        assert time.monotonic() - began < 60
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    last = open_flight(flight).last
    assert last > 20
    found = ak.explain(
        flight, step=last, model=nn.Linear(200, 200), loss_fn=lambda m, x: m(x).square().mean(), verify=1, window=4
    )
    assert "to the bit" in str(found.certificate)
