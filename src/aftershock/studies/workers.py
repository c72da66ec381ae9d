"""Where a study runs: local processes, or the workers of a Dask cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput, StudyStopped
from ..extras import install

PATIENCE = 8  # seconds until a scheduler that does not answer is given up


@dataclass(frozen=True)
class Workers:
    """Somewhere to run: an executor, how many units it can run at once, and where that is, in words."""

    executor: Executor
    slots: Callable[[], int]
    place: str


@contextlib.contextmanager
def local(workers: int | None, units: int) -> Iterator[Workers]:
    """A process per core; none of them outlives this process, however it ends."""
    count = min(workers or _cores(), units)
    context = multiprocessing.get_context("spawn")  # forked children of a process with torch threads can hang
    before = set(multiprocessing.active_children())
    executor = _QuietPool(count, mp_context=context, initializer=_end_with_parent)
    try:
        yield Workers(executor, lambda: count, "this machine")
    except BaseException:  # Ctrl-C among them: nobody waits for units whose results nobody wants
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
            process.join()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


class _QuietPool(ProcessPoolExecutor):
    """Workers that Ctrl-C does not reach: the coordinator ends them, and they print no tracebacks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not hasattr(signal, "pthread_sigmask"):  # Windows
            return super().submit(fn, *args, **kwargs)
        # Workers start inside submit and inherit what is blocked, from their first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    """Without this a worker whose coordinator is killed waits for its next unit forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def dask(address: str) -> Iterator[Workers]:
    """The workers of a running Dask scheduler."""
    try:
        from distributed import Client
        from distributed.utils import silence_logging_cmgr
    except ImportError as error:
        raise InvalidInput(f"--cluster needs Dask: {install('cluster')}") from error
    try:
        with ThreadPoolExecutor(1) as beside:  # a notebook's thread has a loop of its own, which asyncio.run refuses
            beside.submit(asyncio.run, _knock(address)).result()
        client = Client(address, timeout=PATIENCE)
    except Exception as error:  # whatever a foreign server answers
        raise StudyStopped(
            f"no Dask scheduler answers at {address} ({str(error) or f'nothing in {PATIENCE} s'}); "
            "start one with `dask scheduler`, or leave out --cluster"
        ) from error
    with silence_logging_cmgr(logging.CRITICAL), client:  # what goes wrong is said once, in our words
        _check_workers(client, address)
        executor = client.get_executor(pure=False)
        try:
            yield Workers(executor, lambda: sum(client.nthreads().values()), f"the cluster at {address}")
        finally:
            executor.shutdown(wait=False)


async def _knock(address: str) -> None:
    """Shake hands within PATIENCE: Client itself waits forever for a port that is open and says nothing."""
    from distributed import Security
    from distributed.comm import connect

    comm = await asyncio.wait_for(connect(address, **Security().get_connection_args("client")), PATIENCE)
    await comm.close()


def _check_workers(client: Any, address: str) -> None:
    """Every worker has the aftershock that sent the work."""
    from .. import __version__

    def version() -> str:  # nested, so that it travels by value: aftershock may not be there to be imported
        import aftershock

        return aftershock.__version__

    for worker, found in client.run(version, on_error="return").items():
        if isinstance(found, ImportError):
            raise StudyStopped(f"worker {worker} of {address} has no aftershock ({found}): install it there")
        if found != __version__:
            raise StudyStopped(f"worker {worker} of {address} has aftershock {found}, and here is {__version__}")
