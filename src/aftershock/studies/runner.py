"""Running a study: (system, piece) by (system, piece), resuming what is there. Where it runs: `workers.py`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from ..api.progress import progress
from ..core.memory import keep_freed
from ..errors import AftershockError, InvalidInput, StudyStopped
from .results import ResultStore, Store, SystemResults, join_systems, merge_pieces
from .study import Study, System
from .workers import Workers, dask, local

if TYPE_CHECKING:
    import xarray as xr

AHEAD = 16  # units handed out at least, so that a cluster that grows by demand sees some


@dataclass(frozen=True)
class Output:
    """What a piece gave, and where it ran."""

    settings: Mapping[str, xr.Dataset]
    machine: Mapping[str, Any]


def run_study(
    study: Study,
    out: Path,
    systems: Sequence[System] | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    kept: Callable[[Path, Study], Store] = ResultStore,
) -> dict[str, xr.Dataset]:
    """The study's results by setting, with a leading `system`; systems that `out` already holds are not run again.

    Every system's results are written whole as soon as its last piece is in. Bits depend neither on the order nor
    on the number or kind of workers, on one kind of machine.

    workers: local processes, one torch thread each; as many as this process may use cores unless told.
    cluster: address of a running Dask scheduler; its workers then do the work.
    kept: how systems are kept in `out`; `carried.CarriedStore` needs no zarr.
    """
    if workers is not None and cluster is not None:
        raise InvalidInput("--workers counts local processes and --cluster uses a cluster's: leave one of them out")
    wanted = study.systems if systems is None else tuple(systems)
    store = kept(out, study)
    store.prepare()
    there = set(store.finished())
    results = {system.name: store.load(system.name) for system in wanted if system.name in there}
    missing = [system for system in wanted if system.name not in there]
    if missing:
        with local(workers, len(missing) * len(study.pieces)) if cluster is None else dask(cluster) as place:
            results |= _run(study, missing, store, place, done_before=len(results))
    return join_systems(study, results)


def select(study: Study, text: str) -> tuple[System, ...]:
    """Systems from words: `3` (the first three), `mlp`, `mlp:2` (its first two), a system's name; commas between."""
    chosen: set[System] = set()
    for word in (part.strip() for part in text.split(",")):
        kind, colon, count = ("", "", word) if word.isdecimal() else word.partition(":")
        having = [system for system in study.systems if kind in ("", system.kind, system.name)]
        number = int(count) if count.isdecimal() else 0 if colon else len(having)
        if not word or not 1 <= number <= len(having):
            raise InvalidInput(f"there is no {word!r} in --systems: {_choices(study)}")
        chosen |= set(having[:number])
    return tuple(system for system in study.systems if system in chosen)


def _choices(study: Study) -> str:
    kinds = list(dict.fromkeys(system.kind for system in study.systems))
    counted = ", ".join(f"{sum(s.kind == kind for s in study.systems)} {kind}" for kind in kinds)
    return (
        f"the {study.name} study has {counted}; write a number (the first so many), a kind ({', '.join(kinds)}), "
        f"{kinds[0]}:2 (its first two) or a name ({study.systems[0].name} … {study.systems[-1].name})"
    )


def work(run: Callable[[System, str], Mapping[str, xr.Dataset]], system: System, piece: str) -> Output:
    """One unit, on whatever machine: one torch thread, because a sum's bits may depend on their number."""
    torch.set_num_threads(1)
    keep_freed()
    with _said_plainly():
        return Output(run(system, piece), this_machine())


@contextlib.contextmanager
def _said_plainly() -> Iterator[None]:
    """Warnings to the user as a line of words: where in the source they come from is no help to who runs a study."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def say(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
            if issubclass(category, UserWarning):
                print(f"aftershock: {message}", file=sys.stderr, flush=True)
            else:
                show(message, category, *rest, **options)

        warnings.showwarning = say
        yield


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def this_machine() -> dict[str, Any]:
    """What the bits of a result may depend on, and how many cores there were."""
    from .. import __version__

    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
        "torch": torch.__version__,
        "aftershock": __version__,
    }


def machine_kinds(results: Mapping[str, xr.Dataset]) -> list[str]:
    """The different kinds of machine in results, in words: between two of them bits may differ."""
    kinds = set()
    for data in results.values():
        for machine in data.attrs["machines"]:
            words = (machine["machine"], machine["processor"], machine["gpu"], f"torch {machine['torch']}")
            kinds.add(", ".join(word for word in words if word))
    return sorted(kinds)


def _run(
    study: Study, systems: Sequence[System], store: Store, workers: Workers, done_before: int
) -> dict[str, SystemResults]:
    """Write each system as its last piece comes in."""
    outputs: dict[System, dict[str, Output]] = {system: {} for system in systems}
    results: dict[str, SystemResults] = {}
    total = done_before + len(systems)
    with progress(study.name, len(systems) * len(study.pieces)) as tick:
        for system, piece, output in _outputs(study, systems, workers):
            outputs[system][piece] = output
            if len(outputs[system]) < len(study.pieces):
                tick()
                continue
            results[system.name] = _complete(study, outputs.pop(system))
            store.save(system.name, results[system.name])
            tick(f"system {done_before + len(results)} of {total} done")
    return results


def _outputs(study: Study, systems: Sequence[System], workers: Workers) -> Iterator[tuple[System, str, Output]]:
    """What the units give, as it comes.

    They are handed out in the order of the systems and a window at a time, so that early systems are complete
    early and results do not pile up.
    """
    queue = iter([(system, piece) for system in systems for piece in study.pieces])
    running: dict[Future[Output], tuple[System, str]] = {}
    # Ctrl-C inside `futures.wait` can leave a future's lock taken, and the executor then never ends
    done: SimpleQueue[Future[Output]] = SimpleQueue()
    while True:
        with _explained("the next unit", workers):
            room = max(AHEAD, 2 * workers.slots()) - len(running)
            for system, piece in itertools.islice(queue, max(0, room)):
                future = workers.executor.submit(work, study.run, system, piece)
                running[future] = (system, piece)
                future.add_done_callback(done.put)
        if not running:
            return
        future = done.get()
        system, piece = running.pop(future)
        with _explained(system.name if len(study.pieces) == 1 else f"{system.name}, {piece}", workers):
            output = future.result()
        yield system, piece, output


def _complete(study: Study, outputs: Mapping[str, Output]) -> SystemResults:
    ordered = [outputs[piece] for piece in study.pieces]
    machines: list[Mapping[str, Any]] = []
    for output in ordered:
        if output.machine not in machines:
            machines.append(output.machine)
    return SystemResults(merge_pieces([output.settings for output in ordered]), tuple(machines))


@contextlib.contextmanager
def _explained(unit: str, workers: Workers) -> Iterator[None]:
    """A unit's failure in the user's words; a bug of the study keeps its own traceback."""
    kept = "finished systems are kept: run the same command again to go on"
    try:
        yield
    except BrokenProcessPool as error:
        raise StudyStopped(f"{unit}: a worker process died (was it killed, or out of memory?); {kept}") from error
    except CancelledError as error:
        raise StudyStopped(f"{unit}: {workers.place} was lost; {kept}") from error
    except OSError as error:  # a file that a worker lacks, or a connection: never the results, which are written here
        raise StudyStopped(f"{unit}: {error}; {kept}") from error
    except AftershockError as error:
        raise type(error)(f"{unit}: {error}") from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # of distributed, which is there only with a cluster
            raise StudyStopped(f"{unit}: every worker that tried it died; {kept}") from error
        error.add_note(f"{unit}; {kept}")
        raise
