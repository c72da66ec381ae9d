"""Running studies: the same bits however the work was interrupted or spread, and what bad luck gets."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures._base import _AcquireFutures  # type: ignore[attr-defined]
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from typer.testing import CliRunner

from aftershock import studies
from aftershock.api import progress as progress_module
from aftershock.api.progress import progress
from aftershock.commands import cli
from aftershock.errors import AftershockError, InvalidFile, InvalidInput, NotFinite, StudyStopped
from aftershock.studies import runner, workers
from aftershock.studies.carried import CarriedStore, bring_in
from aftershock.studies.results import ResultStore, digest, load_results, merge_pieces
from aftershock.studies.runner import machine_kinds, run_study, select
from aftershock.studies.study import System
from aftershock.studies.workers import Workers

from . import toy_study

ROOT = Path(__file__).parent.parent


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Units in this process: quick, where processes are not the subject."""

    @contextlib.contextmanager
    def local(workers: int | None, units: int) -> Iterator[Workers]:
        with ThreadPoolExecutor(1) as executor:
            try:
                yield Workers(executor, lambda: 1, "this machine")
            finally:
                executor.shutdown(cancel_futures=True)

    threads = torch.get_num_threads()
    monkeypatch.setattr(runner, "local", local)
    yield
    torch.set_num_threads(threads)


def bits(results: dict[str, xr.Dataset]) -> dict[str, str]:
    return {setting: digest(data) for setting, data in results.items()}


def by_hand(study: Any) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """variable -> array for each setting and system, without the runner."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for system in study.systems:
        pieces = [study.run(system, piece) for piece in study.pieces]
        kind = system.kind
        arrays = {name: array.values for name, array in pieces[0][kind].data_vars.items()}
        halves = [piece[kind]["future_response"].values for piece in pieces[1:]]
        arrays["future_response"] = np.concatenate(halves, axis=1)
        expected.setdefault(kind, {})[system.name] = arrays
        expected.setdefault(f"{kind}-rotating", {})[system.name] = {"exact": 2 * arrays["exact"]}
    torch.set_num_threads(threads)
    return expected


def assert_equal_bits(results: dict[str, xr.Dataset], study: Any) -> None:
    expected = by_hand(study)
    assert set(results) == set(expected)
    for setting, systems in expected.items():
        data = results[setting]
        assert list(data["system"].values) == list(systems)
        assert set(data.data_vars) == {name for arrays in systems.values() for name in arrays}
        for name, arrays in systems.items():
            for variable, values in arrays.items():
                found = data[variable]
                assert found.dims[0] == "system"
                assert found.dtype == values.dtype
                assert found.sel(system=name).values.tobytes() == values.tobytes()


# --- the ordinary way


def test_two_processes_give_the_bits_of_none_and_a_second_run_only_reads(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = toy_study.study(log)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # what a worker would take if nobody said one
    results = run_study(study, tmp_path / "out", workers=2)
    assert len(toy_study.units(log)) == 4 * 3
    assert os.getpid() not in {pid for *_, pid in toy_study.units(log)}
    assert_no_process({pid for *_, pid in toy_study.units(log)})
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in said] == [f"system {k} of 4 done" for k in (1, 2, 3, 4)]
    assert all(re.search(r", about \d+(\.\d)? s left$", line) for line in said[:-1])
    assert said[-1] == "system 4 of 4 done"
    assert_equal_bits(results, toy_study.study(log))
    for data in results.values():
        assert data.attrs["seed"] == 2026
        assert data.attrs["dtype"] == "float64"
        assert data.attrs["machines"] == [runner.this_machine()]

    before = len(toy_study.units(log))
    again = run_study(study, tmp_path / "out")
    assert len(toy_study.units(log)) == before
    assert capsys.readouterr().err == ""
    assert bits(again) == bits(results)
    for setting in results:
        xr.testing.assert_identical(again[setting], results[setting])
    # what is on disk is plain zarr
    stored = xr.open_zarr(tmp_path / "out/results.zarr", group="cnn-2026-1/cnn", consolidated=False)
    np.testing.assert_array_equal(stored["exact"], results["cnn"]["exact"].sel(system="cnn-2026-1"))
    assert sorted(zarr.open_group(tmp_path / "out/results.zarr").group_keys()) == sorted(s.name for s in study.systems)


@pytest.mark.usefixtures("in_threads")
def test_a_selection_is_run_in_order_and_completed_later(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = toy_study.study(log, systems=8)
    part = run_study(study, tmp_path, select(study, "cnn:1,1"))
    assert list(part) == ["mlp", "mlp-rotating", "cnn", "cnn-rotating"]
    assert part["cnn"].sizes["system"] == 1
    capsys.readouterr()
    whole = run_study(study, tmp_path)
    assert capsys.readouterr().err.startswith("system 3 of 16 done, about ")
    assert [(s, p) for s, p, _ in toy_study.units(log)] == [
        (system, piece)
        for system in ["mlp-2026-0", "cnn-2026-0"]
        + [f"{kind}-2026-{i}" for kind in ("mlp", "cnn") for i in range(1, 8)]
        for piece in study.pieces
    ]
    assert_equal_bits(whole, study)


def test_selections_in_words() -> None:
    study = toy_study.study(Path(), systems=3)

    def names(text: str) -> list[str]:
        return [system.name.replace("-2026-", "") for system in select(study, text)]

    assert names("4") == ["mlp0", "mlp1", "mlp2", "cnn0"]
    assert names("cnn") == ["cnn0", "cnn1", "cnn2"]
    assert names("cnn:2, mlp:1") == ["mlp0", "cnn0", "cnn1"]
    assert names("cnn-2026-2,1,1") == ["mlp0", "cnn2"]
    for wrong in ("", "0", "7", "mlp:4", "mlp:0", "mlp:", "mlp:x", "rnn", "mlp-2026-3", "-1", "1.5", "²"):
        for text in (wrong, f"mlp,{wrong}"):
            with pytest.raises(InvalidInput, match=r"3 mlp, 3 cnn; .*mlp:2 .*mlp-2026-0 … cnn-2026-2") as caught:
                select(study, text)
            assert f"there is no {wrong!r} in --systems" in str(caught.value)


# --- pieces


def test_a_warning_of_a_unit_is_words_without_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    def run(system: System, piece: str) -> dict[str, xr.Dataset]:
        warnings.warn("the response is near the noise", stacklevel=2)
        warnings.warn("for developers", DeprecationWarning, stacklevel=1)
        return {}

    with pytest.warns(DeprecationWarning, match="for developers"):  # others are shown as ever
        runner.work(run, System("mlp", 1, 0), "all")
    assert capsys.readouterr().err == "aftershock: the response is near the noise\n"


def test_pieces_that_do_not_fit_are_refused() -> None:
    half = {"s": xr.Dataset({"a": ("x", [1.0, 2.0])}, {"x": [0, 1]})}
    shifted = {"s": xr.Dataset({"b": ("x", [1.0, 2.0])}, {"x": [1, 2]})}
    with pytest.raises(ValueError, match=r"aligned|exact"):
        merge_pieces([half, shifted])
    contradicting = {"s": half["s"] + 1}
    with pytest.raises(ValueError):
        merge_pieces([half, contradicting])
    assert merge_pieces([half, half])["s"].identical(half["s"])


# --- what is on disk


@pytest.mark.usefixtures("in_threads")
def test_results_of_another_run_are_left_alone(tmp_path: Path, log: Path) -> None:
    first = run_study(toy_study.study(log), tmp_path, select(toy_study.study(log), "1"))
    other = toy_study.study(log, seed=7, data="abc")
    with pytest.raises(InvalidFile) as caught:
        run_study(other, tmp_path)
    message = str(caught.value)
    assert "seed" not in message  # the systems of several seeds may lie in one folder
    assert "data is None there and 'abc' here" in message
    assert "quick" not in message
    assert "another folder with --out" in message
    assert len(toy_study.units(log)) == 3
    same = run_study(toy_study.study(log, delay=0.01), tmp_path, select(toy_study.study(log), "1"))
    assert bits(same) == bits(first)


@pytest.mark.usefixtures("in_threads")
def test_systems_carried_from_a_machine_without_zarr_are_the_same_bits(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, home = tmp_path / "away", tmp_path / "home"
    first, second = toy_study.study(log), toy_study.study(log, seed=2030)
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "zarr", None)
        run_study(second, away, select(second, "3"), kept=CarriedStore)
        there = run_study(second, away, kept=CarriedStore)  # and goes on
    assert len(toy_study.units(log)) == 4 * 3
    run_study(first, home)  # another root seed in the same folder, one run each
    assert bring_in([away], home) == tuple(sorted(system.name for system in second.systems))
    assert bring_in([away / "mlp-2030-0.safetensors"], home) == ()  # it is there
    study, results = load_results(home)
    assert {system.seed for system in study.systems} == {2026, 2030}
    assert results["mlp"].sizes["system"] == 4
    for setting, data in there.items():
        xr.testing.assert_equal(results[setting].sel(system=data["system"]), data)
    assert results["mlp"].attrs["machines"] == [runner.this_machine()]


@pytest.mark.usefixtures("in_threads")
def test_carried_systems_that_do_not_belong_or_were_changed_are_refused(tmp_path: Path, log: Path) -> None:
    away, home = tmp_path / "away", tmp_path / "home"
    study = toy_study.study(log)
    run_study(study, away, select(study, "1"), kept=CarriedStore)
    other = toy_study.study(log, data="abc")
    run_study(other, home, select(other, "2"))
    with pytest.raises(InvalidFile, match="from another run: data is 'abc' there and None here"):
        bring_in([away], home)
    with pytest.raises(InvalidFile, match="from another run: data is None there and 'abc' here"):
        run_study(other, away, kept=CarriedStore)
    file = away / "mlp-2026-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(InvalidFile, match="changed after it was written"):
        bring_in([file], tmp_path / "new")
    with pytest.raises(InvalidInput, match=r"no \*\.safetensors"):
        bring_in([log], home)
    with pytest.raises(InvalidFile, match="holds no results of a study"):
        load_results(log)


def truncate(group: Path) -> None:
    chunk = next((group / "mlp/exact/c").rglob("0"))
    while chunk.is_dir():
        chunk = next(chunk.iterdir())
    chunk.write_bytes(chunk.read_bytes()[:-9])


def other_value(group: Path) -> None:
    data = zarr.open_group(group)["mlp/exact"]
    data[0, 0, 0] = 1.0


DAMAGES = {
    "truncated chunk": truncate,
    "missing chunk": lambda group: shutil.rmtree(group / "mlp/exact/c"),
    "missing array": lambda group: shutil.rmtree(group / "mlp/exact"),
    "missing setting": lambda group: shutil.rmtree(group / "mlp-rotating"),
    "another value": other_value,
    "no header": lambda group: (group / "zarr.json").unlink(),
    "half a header": lambda group: (group / "zarr.json").write_text((group / "zarr.json").read_text()[:99]),
    "foreign header": lambda group: (group / "zarr.json").write_text('{"attributes": {}}'),
}


@pytest.mark.usefixtures("in_threads")
def test_a_damaged_group_is_named_and_nothing_is_lost(tmp_path: Path, log: Path) -> None:
    study = toy_study.study(log, systems=1)
    whole = run_study(study, tmp_path)
    group, other = tmp_path / "results.zarr/mlp-2026-0", tmp_path / "results.zarr/cnn-2026-0"
    files = {path: path.read_bytes() for path in group.rglob("*") if path.is_file()}
    others = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    for damage in DAMAGES.values():
        damage(group)
        with pytest.raises(InvalidFile, match=f"{group} is damaged .*delete that folder and run"):
            run_study(study, tmp_path)
        assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == others
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    assert bits(run_study(study, tmp_path)) == bits(whole)
    assert len(toy_study.units(log)) == 6


@pytest.mark.usefixtures("in_threads")
def test_a_full_disk_keeps_what_was_finished(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, out = toy_study.study(log), tmp_path / "out"
    write, written = xr.Dataset.to_zarr, []

    def full(self: xr.Dataset, *words: Any, **options: Any) -> Any:
        written.append(write(self, *words, **options))
        if len(written) == 4:  # the second setting of the second system, half there
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", full)
    with pytest.raises(StudyStopped, match=r"no space is left for .*mlp-2026-1; the systems finished so far are kept"):
        run_study(study, out)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert [path.name for path in (out / "results.zarr").iterdir() if path.is_dir()] == ["mlp-2026-0"]
    assert ResultStore(out, study).load("mlp-2026-0").settings.keys() == {"mlp", "mlp-rotating"}


# --- killed


def assert_no_process(pids: set[int], seconds: float = 5.0) -> None:
    """None of these is alive, soon."""
    end = time.monotonic() + seconds
    while alive := {pid for pid in pids if running(pid)}:
        assert time.monotonic() < end, f"{alive} are still there"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def start(log: Path, out: Path, delay: float) -> subprocess.Popen[str]:
    """The command on the toy study, in a process group of its own as under a terminal: what a shell starts in the
    background ignores Ctrl-C, and so does what that starts."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from tests.toy_study import main; main()"
    command = [sys.executable, "-c", code, str(log), str(delay), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_units(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while len(toy_study.units(log)) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bits(tmp_path: Path, log: Path) -> None:
    draw, delay, out = random.Random(time.time_ns()), 0.15, tmp_path / "out"
    process = start(log, out, delay)
    wait_for_units(log, draw.randint(4, 9), process)
    time.sleep(draw.uniform(0, 2 * delay))
    process.kill()
    process.wait()
    assert_no_process({pid for *_, pid in toy_study.units(log)})
    left = out / "results.zarr/.cnn-2026-1.part"  # as if it had been writing
    (left / "cnn").mkdir(parents=True, exist_ok=True)
    started = len(toy_study.units(log))
    kept = ResultStore(out, toy_study.study(log)).finished()

    study = toy_study.study(log)
    results = run_study(study, out, workers=2)
    assert not left.exists()
    assert len(toy_study.units(log)) - started == 3 * (4 - len(kept))
    assert_equal_bits(results, study)
    assert_equal_bits(run_study(study, out), study)


def test_ctrl_c_says_what_is_kept_and_leaves_nobody_behind(tmp_path: Path, log: Path) -> None:
    (log / "hang cnn-2026-1 futures-1").touch()
    store = ResultStore(tmp_path / "out", toy_study.study(log))
    process = start(log, tmp_path / "out", delay=0)
    wait_for_units(log, 12, process)
    while len(store.finished()) < 3 and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert f"stopped; finished systems are kept in {tmp_path / 'out'}: run the same command again" in said
    assert_no_process({pid for *_, pid in toy_study.units(log)}, seconds=0.5)
    assert store.finished() == ("cnn-2026-0", "mlp-2026-0", "mlp-2026-1")
    assert not list((tmp_path / "out/results.zarr").glob(".*"))


@pytest.mark.usefixtures("in_threads")
def test_no_lock_of_a_unit_is_held_while_it_is_waited_for(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt inside `concurrent.futures.wait` can leave its locks taken: shutting down then never ended."""

    enter = _AcquireFutures.__enter__

    def taken(futures: _AcquireFutures) -> None:
        assert sys._getframe(2).f_globals["__name__"] != runner.__name__  # zarr waits so, for a pool of its own
        enter(futures)

    monkeypatch.setattr(_AcquireFutures, "__enter__", taken)
    study = toy_study.study(log, systems=1)
    assert_equal_bits(run_study(study, tmp_path / "out"), study)


def test_a_worker_that_dies_stops_the_study_and_keeps_the_rest(tmp_path: Path, log: Path) -> None:
    study = toy_study.study(log)
    (log / "die cnn-2026-0 futures-0").touch()
    with pytest.raises(StudyStopped, match=r"a worker process died .*run the same command again"):
        run_study(study, tmp_path / "out", workers=1)
    assert_no_process({pid for *_, pid in toy_study.units(log)})
    assert ResultStore(tmp_path / "out", study).finished() == ("mlp-2026-0", "mlp-2026-1")


@pytest.mark.usefixtures("in_threads")
def test_a_unit_that_fails_is_named(tmp_path: Path, log: Path) -> None:
    study = toy_study.study(log, systems=1)
    failures: dict[str, tuple[type[Exception], str]] = {
        "refuse": (NotFinite, "^cnn-2026-0, futures-1: the loss is NaN; lower the learning rate$"),
        "miss": (StudyStopped, "^cnn-2026-0, futures-1: .*no/such/data"),
        "crash": (ZeroDivisionError, "^a bug"),
    }
    for word, (kind, message) in failures.items():
        request = log / f"{word} cnn-2026-0 futures-1"
        request.touch()
        with pytest.raises(kind, match=message) as caught:
            run_study(study, tmp_path / "out")
        request.unlink()
    assert caught.value.__notes__[0].startswith("cnn-2026-0, futures-1; finished systems are kept")
    assert ResultStore(tmp_path / "out", study).finished() == ("mlp-2026-0",)
    assert_equal_bits(run_study(study, tmp_path / "out"), study)


# --- a cluster


def test_a_cluster_that_loses_a_worker_gives_the_same_bits(tmp_path: Path, log: Path) -> None:
    from distributed import Client, LocalCluster

    study, unlucky = toy_study.study(log), ("mlp-2026-1", "futures-0")
    request = log / f"hang {' '.join(unlucky)}"
    request.touch()
    with LocalCluster(
        processes=True, n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as cluster:
        with ThreadPoolExecutor(1) as beside:
            future = beside.submit(run_study, study, tmp_path / "out", cluster=cluster.scheduler_address)
            while not (held := [pid for *unit, pid in toy_study.units(log) if tuple(unit) == unlucky]):
                assert not future.done(), future.exception()
                time.sleep(0.01)
            request.unlink()
            os.kill(held[0], signal.SIGKILL)
            results = future.result(timeout=60)
        started = [(system, piece) for system, piece, _ in toy_study.units(log)]
        assert started.count(unlucky) == 2
        assert len(set(started)) == 12
        assert_equal_bits(results, toy_study.study(log))

        def forget() -> None:
            sys.modules["aftershock"] = None  # type: ignore[assignment]

        with Client(cluster) as client:
            client.run(forget)
        with pytest.raises(StudyStopped, match=r"has no aftershock .*install it there"):
            run_study(study, tmp_path / "fresh", cluster=cluster.scheduler_address)


def test_a_scheduler_that_does_not_answer(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = toy_study.study(log)
    assert workers.PATIENCE <= 10
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for address in (f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:1", "nowhere://x"):
            begin = time.monotonic()
            with pytest.raises(StudyStopped, match=f"no Dask scheduler answers at {address} .*leave out --cluster"):
                run_study(study, tmp_path, cluster=address)
            assert time.monotonic() - begin < 3  # where Dask's own client would wait forever for the first
    with pytest.raises(InvalidInput, match="leave one of them out"):
        run_study(study, tmp_path, workers=1, cluster="tcp://127.0.0.1:1")


# --- progress


def test_time_left_is_the_mean_over_what_was_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    with progress("work", 10) as tick:
        clock[0] += 60
        tick()
        tick("two")  # ended together with the first: 30 s each
        clock[0] += 600
        tick("three")
        for _ in range(7):
            tick("last")
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["two, about 4 min left", "three, about 26 min left"]
    assert said[-1] == "last"


def test_a_bar_where_a_person_is_watching(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with progress("toy", 3) as tick:
        tick("system 1 of 3 done")
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"toy: system 1 of 3 done ━+.* about .* left", drawn)


# --- the command


def reproduce(*words: object) -> Any:
    return CliRunner().invoke(cli.app, ["reproduce", *(str(word) for word in words)])


@pytest.fixture
def toy_command(log: Path, monkeypatch: pytest.MonkeyPatch, in_threads: None) -> dict[str, Any]:
    """`reproduce` on the toy study, with stand-ins that keep what tables and pages were given."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(cli, "_recipe", lambda name, seed, quick, *_: toy_study.study(log, seed=seed, quick=quick))
    tables = SimpleNamespace(
        build=lambda name, results: [name],
        write=lambda *words: given.update(tables=words),
        verdict=lambda cells: f"the verdict on {cells[0]}",
    )
    page = SimpleNamespace(write_study_page=lambda *words, library: given.update(page=words))
    figures = SimpleNamespace(write_figures=lambda *words: given.update(figures=words))
    monkeypatch.setattr(studies, "tables", tables, raising=False)
    monkeypatch.setitem(sys.modules, "aftershock.report.study_page", page)
    monkeypatch.setitem(sys.modules, "aftershock.report.study_files", figures)
    return given


def test_the_command_hands_results_on_and_sums_up(
    toy_command: dict[str, Any], tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = reproduce("quadratic", "--seed", 5, "--systems", "cnn:1", "--quick")
    assert result.exit_code == 0, result.output
    out = Path("reproduction/quadratic")
    assert [word for word in toy_command["tables"] if isinstance(word, Path)] == [out]
    assert toy_command["page"][-1] == out / "report.html"
    assert toy_command["figures"][-1] == out / "figures"
    results = toy_command["figures"][0]
    assert list(results["cnn"]["system"].values) == ["cnn-5-0"]
    assert "the verdict on toy" in result.stdout
    assert "partial: 1 of 4 systems" in result.stdout
    assert "partial: --quick" in result.stdout
    assert re.search(rf"took \d.* s on {re.escape(machine_kinds(results)[0])}\n$", result.stdout)
    assert "different machines" not in result.stderr

    header = out / "results.zarr/cnn-5-0/zarr.json"
    changed = json.loads(header.read_text())
    changed["attributes"]["machines"][0]["processor"] = "Another CPU"
    header.write_text(json.dumps(changed))
    result = reproduce("quadratic", "--seed", 5, "--quick")
    assert result.exit_code == 0
    assert "systems ran on different machines, so bits may differ: " in result.stderr
    assert "Another CPU" in result.stderr
    assert "of 4 systems" not in result.stdout


@pytest.mark.usefixtures("toy_command")
def test_the_command_refuses_in_words(tmp_path: Path, log: Path) -> None:
    def refused(*words: object) -> str:
        result = reproduce("quadratic", *words)
        assert result.exit_code == 1
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith("aftershock: ")
        assert result.stderr.count("\n") == 1
        return result.stderr

    blocked = tmp_path / "file"
    blocked.write_text("")
    assert f"{blocked} is a file; results need a folder" in refused("--out", blocked)
    assert f"cannot write to {blocked / 'x'}: " in refused("--out", blocked / "x")
    if Path("/proc/self").is_dir():  # a folder that even root cannot write to
        assert "cannot write to /proc/self: " in refused("--out", "/proc/self")
    assert "there is no 'rnn' in --systems" in refused("--out", tmp_path / "out", "--systems", "rnn")
    assert toy_study.units(log) == []
    for words in (("quadratic", "--seed", "abc"), ("nothing",), ("quadratic", "--workers", 0)):
        result = reproduce(*words)
        assert (result.exit_code, "Traceback" in result.stderr) == (2, False)
    assert "--seed" in reproduce("quadratic", "--seed", "abc").stderr


def test_options_of_the_other_study_are_refused() -> None:
    for device, data in ((cli.Device.cuda, None), (cli.Device.cpu, Path("x"))):
        with pytest.raises(AftershockError, match="do not belong to the quadratic study"):
            cli._recipe(cli.StudyName.quadratic, 2026, False, data, device)
