"""One run, one flight; whatever is wrong with a file is said, and never another answer is given."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import faults

import aftershock as ak
from aftershock.errors import AftershockError, InvalidFile, InvalidInput
from aftershock.recorder.records import check
from aftershock.recorder.runs import claim, in_use, release
from aftershock.recorder.store import open_flight, write_json
from aftershock.recorder.triggers import AtStep
from aftershock.results.files import read_tensors, write_tensors

from .test_recorder_windows import Live


def recorded(directory: Path, steps: int, trigger: int | None = None, seed: int = 0) -> ak.FlightRecorder:
    live = Live(directory, after=2, triggers=() if trigger is None else [AtStep(trigger)])
    torch.manual_seed(seed)
    with live.recorder:
        live.step(steps)
    return live.recorder


def test_a_second_run_has_a_flight_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = recorded(tmp_path, 14, trigger=9)
    before = {path: path.read_bytes() for path in tmp_path.glob("step-*/*")}
    assert before
    capfd.readouterr()
    second = recorded(tmp_path, 6, seed=1)
    assert "holds the flight of another run; this one records into" in capfd.readouterr().err
    assert (first.directory, second.directory) == (tmp_path, tmp_path / "run-2")
    assert all(path.read_bytes() == data for path, data in before.items())
    # a recorder answers from its own run, a folder from the newest, unless an older one alone has the step
    assert ak.explain(second, verify=0, references=0).facts.event.explained == 5
    assert ak.explain(first, verify=0, references=0).facts.event.explained == 9
    assert open_flight(tmp_path).run["id"] == second.run
    assert open_flight(tmp_path, 3).run["id"] == second.run
    assert open_flight(tmp_path, 11).run["id"] == first.run
    with pytest.raises(InvalidInput, match="step 11 was not recorded"):
        ak.explain(second, step=11)
    third = recorded(tmp_path, 6, trigger=4)
    assert third.directory.name == "run-2"  # the second kept no window: nothing of it is left
    assert open_flight(tmp_path).trigger == 4


def test_a_step_is_explained_of_the_run_that_has_kept_a_window_for_it(tmp_path: Path) -> None:
    """The first run said how to explain step 9, and its command must not answer from a later run, which went on."""
    folder = tmp_path / "flight"
    first = recorded(folder, 14, trigger=9)
    second = recorded(folder, 14, trigger=6, seed=1)
    live = Live(folder, after=2, triggers=())
    with live.recorder:
        live.step(12)
        live.recorder.wait()
        for step, run, others in [
            (9, first, ["flight/run-3/ring"]),
            (6, second, ["flight/run-3/ring", "flight/step-000009"]),
            (10, live.recorder, ["flight/step-000009"]),
            (11, live.recorder, ["flight/step-000009"]),
        ]:
            found = open_flight(folder, step)
            assert (found.run["id"], list(found.elsewhere)) == (run.run, others)
            assert open_flight(tmp_path / others[0], step).run["id"] != run.run  # it can be named
        said = ak.explain(folder, 9, model=live.model, loss_fn=live.recorder.loss_fn, verify=0, references=0)
        assert "Run 1 of 3 in flight. Another run has a step 9, too: that is in flight/run-3/ring." in str(said)
        assert live.recorder.recording
    assert ak.explain(folder / "run-3" / "ring", 9, verify=0, references=0).facts.recording.run == live.recorder.run


def test_two_recorders_at_once(tmp_path: Path) -> None:
    one, other = Live(tmp_path), Live(tmp_path)
    with one.recorder, other.recorder:
        assert in_use(tmp_path)
        one.step(3)
        other.step(5)
    assert not in_use(tmp_path)
    assert ak.explain(one.recorder, verify=0, references=0).facts.event.explained == 2
    assert open_flight(one.recorder.directory, 2, run=one.recorder.run).last == 2
    with pytest.raises(InvalidFile, match="another run"):
        open_flight(one.recorder.directory, 2, run=other.recorder.run)
    with pytest.raises(InvalidInput, match="recorded nothing"):
        ak.explain(Live(tmp_path).recorder)
    assert open_flight(other.recorder.directory).last == 4
    assert other.recorder.directory == tmp_path / "run-2"


def test_the_same_recorder_twice_is_two_runs(tmp_path: Path) -> None:
    live = Live(tmp_path)
    for last in (2, 5):
        with live.recorder:
            live.step(3)
        assert open_flight(live.recorder.directory).last == last
    assert live.recorder.directory == tmp_path  # the first kept no window: nothing of it is left


def disk(folder: Path) -> int:
    return sum({path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}.values())


def test_disk_does_not_grow_with_runs_that_keep_no_window(tmp_path: Path) -> None:
    sizes = []
    for _ in range(4):
        recorded(tmp_path, 14)
        sizes.append(disk(tmp_path))
    assert max(sizes) < 1.2 * min(sizes)
    assert open_flight(tmp_path).last == 13


def test_the_ring_of_a_run_that_is_over_goes_and_what_it_kept_stays(tmp_path: Path) -> None:
    first = recorded(tmp_path, 14, trigger=9)  # the window of step 9 ends at step 11
    alive = Live(tmp_path, after=2, triggers=())
    with alive.recorder:
        alive.step(6)
        alive.recorder.wait()
        assert not list(tmp_path.glob("ring/s*"))
        third = recorded(tmp_path, 4)
        assert len(list(alive.recorder.directory.glob("ring/step-*"))) == 6  # its lock says that it is alive
    assert [r.directory.name for r in (alive.recorder, third)] == ["run-2", "run-3"]
    assert open_flight(tmp_path, 11).run["id"] == first.run
    assert ak.explain(first, verify=0, references=0).facts.event.explained == 9
    with pytest.raises(InvalidInput, match=r"step 13 was not recorded, or was dropped \(of runs that are over"):
        open_flight(tmp_path, 13)
    fourth = recorded(tmp_path, 5, trigger=3)  # where the third was, which kept nothing
    assert fourth.directory == third.directory
    with pytest.raises(InvalidFile, match="by another run than the one that is asked for, which kept no window"):
        ak.explain(third)
    with pytest.raises(InvalidFile, match="or by a run which kept no window"):
        ak.explain(alive.recorder)
    assert (open_flight(tmp_path).number, open_flight(tmp_path).runs) == (3, 3)


def test_a_ring_in_which_a_trigger_waits_is_kept(tmp_path: Path) -> None:
    recorded(tmp_path, 6)
    write_json(tmp_path / "ring" / "trigger.json", {"step": 4, "reason": "a spike", "height": "1.0"})
    second = recorded(tmp_path, 3)
    assert second.directory == tmp_path / "run-2"
    assert open_flight(tmp_path, 5).trigger == 4


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    def lock(**owner: Any) -> None:
        (tmp_path / "lock.json").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **owner}))

    lock()
    assert in_use(tmp_path)
    lock(host="elsewhere", pid=1)
    assert in_use(tmp_path)
    lock(namespace="pid:[1]", pid=dead_process())  # of another container on a machine of the same name
    assert in_use(tmp_path)
    for wrong in ({"pid": dead_process()}, {"pid": "x"}, {"pid": 10**30}, {"pid": None}):
        lock(**wrong)
        assert not in_use(tmp_path)
    (tmp_path / "lock.json").write_text("{")
    assert not in_use(tmp_path)
    folder, run = claim(tmp_path)  # nothing was recorded there
    assert folder == tmp_path
    assert claim(tmp_path)[0] == tmp_path / "run-2"
    assert json.loads((tmp_path / "lock.json").read_text())["run"] == run
    release(tmp_path)
    assert not in_use(tmp_path)


WITH_A_WORKER = """
import os, sys, time
from pathlib import Path
from aftershock.recorder.runs import claim
claim(Path(sys.argv[1]))
if not os.fork():
    print(os.getpid(), flush=True)  # told by the worker itself: by now it has let go of its parent's locks
time.sleep(120)
"""


def test_a_run_killed_in_another_container_is_over_and_one_that_lives_there_is_not(tmp_path: Path) -> None:
    """Its machine's name and process numbers mean nothing here; a loader's worker that outlives it records nothing."""
    process = subprocess.Popen([sys.executable, "-c", WITH_A_WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        owner = json.loads((tmp_path / "lock.json").read_text())
        (tmp_path / "lock.json").write_text(json.dumps({**owner, "host": "a5c", "namespace": "pid:[1]", "pid": 1}))
        assert in_use(tmp_path)
        assert claim(tmp_path)[0] == tmp_path / "run-2"
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it lives
        assert not in_use(tmp_path)
        release(tmp_path / "run-2")
    finally:
        process.kill()
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


def test_leftovers_of_a_killed_run_are_cleared_by_the_next(tmp_path: Path) -> None:
    recorded(tmp_path, 6)
    (tmp_path / "lock.json").write_text(json.dumps({"host": socket.gethostname(), "pid": dead_process()}))
    (tmp_path / ".flight-abc").mkdir()
    (tmp_path / ".flight-abc" / "step-00000001.safetensors").write_bytes(b"x")
    part = tmp_path / "ring" / ".step-00000006.safetensors.abc"
    part.write_bytes(b"x")
    (tmp_path / ".mine").write_text("not ours")
    recorded(tmp_path, 2)
    assert not part.exists()
    assert not (tmp_path / ".flight-abc").exists()
    assert (tmp_path / ".mine").exists()
    assert open_flight(tmp_path).last == 1


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()  # windows and ring share their bytes
    path.write_bytes(data)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    rewrite(path, bytes(data))


def test_a_trigger_that_cannot_be_read_blocks_nothing(tmp_path: Path) -> None:
    live = Live(tmp_path, after=2, triggers=[AtStep(9)])
    with live.recorder:
        live.step(20)
    trigger = tmp_path / "ring" / "trigger.json"
    trigger.write_text("{")
    worst = open_flight(tmp_path)
    assert (worst.trigger, "trigger.json cannot be read" in worst.damaged[0]) == (9, True)
    write_json(trigger, {"step": [], "reason": "x"})  # of another type
    assert "does not say which step it was kept for" in open_flight(tmp_path).damaged[0]
    asked = open_flight(tmp_path, 18)
    assert (asked.folder.name, asked.trigger, len(asked.damaged)) == ("ring", None, 1)
    (tmp_path / "step-000009" / "flight.json").write_text("{")
    with pytest.raises(InvalidFile, match=r"flight.json cannot be read.*; step= may still explain .* \(\d+–19\)"):
        open_flight(tmp_path)


def test_a_hole_is_said(tmp_path: Path) -> None:
    recorded(tmp_path, 12)
    flip(tmp_path / "ring" / "step-00000005.safetensors")
    flight = open_flight(tmp_path)
    assert sorted(flight.records) == [8, 9, 10, 11]  # 6 and 7 have no state before them
    assert flight.missing == (3, 4, 5, 6, 7)  # of the eight before the last
    early = open_flight(tmp_path, 3)
    assert sorted(early.records) == [0, 1, 2, 3, 4]
    assert early.missing == (5,)
    with pytest.raises(InvalidFile, match=r"step-00000005.safetensors was changed"):
        open_flight(tmp_path, 5)
    with pytest.raises(InvalidFile, match=r"step 6 .*cannot be replayed: .*step-00000005.safetensors was changed"):
        open_flight(tmp_path, 6)


def test_a_lost_state_is_said(tmp_path: Path) -> None:
    recorded(tmp_path, 12)
    ring = tmp_path / "ring"
    rewrite(ring / "state-00000000.safetensors", (ring / "state-00000004.safetensors").read_bytes())
    flight = open_flight(tmp_path)
    assert (sorted(flight.states), flight.missing) == ([4, 8], (3,))


def test_a_damaged_window_does_not_block_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(tmp_path, after=2, triggers=[AtStep(9), AtStep(30)])
    with live.recorder:
        live.step(34)
    flip(tmp_path / "step-000030" / "step-00000027.safetensors")
    assert open_flight(tmp_path, 9).trigger == 9
    passed_over = open_flight(tmp_path)
    assert (passed_over.trigger, passed_over.others) == (9, ())
    assert "step-00000027" in passed_over.damaged[0]
    (tmp_path / "step-000030" / "flight.json").write_text("[1]")
    assert (open_flight(tmp_path).trigger, len(open_flight(tmp_path).damaged)) == (9, 1)
    found = ak.explain(live.recorder, verify=0, references=0)
    assert found.facts.event.explained == 9
    assert f"Damaged, and passed over: {tmp_path / 'step-000030' / 'flight.json'} is not a descr" in str(found)
    assert open_flight(tmp_path, 9).trigger == 9
    assert open_flight(tmp_path, 30).folder.name == "ring"  # the same steps of the same run
    reads: list[Path] = []

    def counted(path: Path, what: str, format: str) -> Any:
        reads.append(path)
        return read_tensors(path, what, format)

    monkeypatch.setattr("aftershock.recorder.record_files.read_tensors", counted)
    flight = open_flight(tmp_path, 9)
    assert {path.parent.name for path in reads} == {"step-000009"}
    assert len(reads) == len(set(reads)) == len(flight.records)


def hostile(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A step whose header was changed by somebody who knows how to make the digest right."""

    def write(folder: Path) -> None:
        path = folder / "ring" / "step-00000011.safetensors"
        tensors, header = read_tensors(path, "recorded step", "aftershock-step-2")
        change(header)
        write_tensors(path, tensors, header)

    return write


STRUCTURE = {"list": [{"tensor": 0, "device": "cpu", "stride": [4, 1]}]}
HOSTILE: dict[str, Callable[[Path], None]] = {
    "step of another type": hostile(lambda h: h.update(step="eleven")),
    "no batches": hostile(lambda h: h.update(fed=[])),
    "batches of another type": hostile(lambda h: h.update(fed=3)),
    "more tensors than there are": hostile(lambda h: h["fed"][0].update(tensors=10**6)),
    "a huge stride": hostile(lambda h: h["fed"][0]["structure"]["tuple"][0].update(stride=[10**15, 1])),
    "a negative stride": hostile(lambda h: h["fed"][0]["structure"]["tuple"][0].update(stride=[-4, 1])),
    "an unknown kind": hostile(lambda h: h["fed"][0].update(structure={"pickle": "x"})),
    "no kind": hostile(lambda h: h["fed"][0].update(structure={})),
    "a key that is a list": hostile(lambda h: h["fed"][0].update(structure={"dict": [[{"list": []}, {"plain": 1}]]})),
    "a name that is no name": hostile(lambda h: h["fed"][0].update(structure={"named": [["a b", {"plain": 1}]]})),
    "a function for a dtype": hostile(lambda h: h["forward"].__setitem__(1, "load")),
    "hyperparameters of another optimizer": hostile(lambda h: h["hypers"][0].update(momentum=1)),
    "a loss that is no number": hostile(lambda h: h.update(loss="much")),
    "nothing": hostile(lambda h: [h.pop(key) for key in list(h) if key != "format"]),
    "run.json of another type": lambda f: write_json(f / "ring" / "run.json", {"id": 3, "began": 0, "window": 8}),
    "a window of a billion steps": lambda f: write_json(
        f / "ring" / "run.json", {"id": "x", "began": 0, "window": 10**9}
    ),
    "run.json is a list": lambda f: (f / "ring" / "run.json").write_text("[" * 5000) and None,
    "a file of the far future": lambda f: rewrite(
        (f / "ring" / "step-00000011.safetensors").rename(f / "ring" / "step-999999999999.safetensors"), b"x"
    ),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_malformed_file_is_an_invalid_file(name: str, tmp_path: Path) -> None:
    recorded(tmp_path, 12)
    HOSTILE[name](tmp_path)
    with pytest.raises(AftershockError):
        open_flight(tmp_path, 11)


@pytest.mark.parametrize("name", ["../../step-00000001.safetensors", "/etc/passwd", "step-²²²²²²²².safetensors", ""])
def test_hostile_names_in_a_window_are_refused(name: str, tmp_path: Path) -> None:
    recorded(tmp_path, 12, trigger=9)
    path = tmp_path / "step-000009" / "flight.json"
    values = json.loads(path.read_text())
    values.pop("digest")
    write_json(path, {**values, "files": {**values["files"], name: "0" * 64}})
    with pytest.raises(InvalidFile, match="which is no file of a flight"):
        open_flight(path.parent)
    (tmp_path / "ring" / "step-²².safetensors").write_text("")
    assert open_flight(tmp_path, 11).last == 11


def test_a_description_fits_its_tensors() -> None:
    x = torch.zeros(3, 4)
    check(STRUCTURE, [x])
    with pytest.raises(ValueError, match="stride"):
        check({"tensor": 0, "device": "cpu", "stride": [4, 2]}, [x])
    with pytest.raises(IndexError):
        check({"tensor": 1, "device": "cpu", "stride": [4, 1]}, [x])


@pytest.mark.parametrize(
    ("was", "now"), [('"step": 9', '"step": 8'), ("asked", "wanted"), ('"window": 8', '"window": 4')]
)
def test_a_description_that_was_edited_is_refused(was: str, now: str, tmp_path: Path) -> None:
    recorded(tmp_path, 12, trigger=9)
    path = tmp_path / "step-000009" / "flight.json"
    text = path.read_text()
    edited = text.replace(was, now)
    assert edited != text
    path.write_text(edited)
    with pytest.raises(InvalidFile, match="was changed after it was written"):
        open_flight(path.parent)


# --- faults for real; more by `python -m benchmarks.faults`


def test_damaged_bytes_are_refused_or_equal(tmp_path: Path) -> None:
    found = faults.mutations(40, tmp_path)
    assert found["refused"] > 10
    assert found["equal"] > 80


def test_killed_runs_leave_what_was_recorded(tmp_path: Path) -> None:
    found = faults.kills(4, tmp_path)  # twice each
    assert found["equal"] > 0


@pytest.mark.parametrize("fault", [faults.full_disk, faults.read_only])
def test_a_disk_that_cannot_be_written_stops_nobody(fault: Callable[[Path], str], tmp_path: Path) -> None:
    try:
        assert fault(tmp_path) in ("equal", "refused", "said")
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("no disk can be mounted here")


def test_a_run_that_was_killed_is_over_on_a_network_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There an exclusive lock needs a file that is open for writing, and some have no locks at all."""
    fcntl = pytest.importorskip("fcntl")
    code = f"import os, pathlib; from aftershock.recorder import runs; runs.claim(pathlib.Path({str(tmp_path)!r}))"
    code += "; os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    plain = fcntl.flock

    def network(descriptor: int, operation: int) -> None:
        read_only = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if operation & fcntl.LOCK_EX and read_only:
            raise OSError(errno.EBADF, "Bad file descriptor")
        plain(descriptor, operation)

    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for rule in (network, none):
        monkeypatch.setattr(fcntl, "flock", rule)
        assert not in_use(tmp_path)
