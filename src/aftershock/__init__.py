"""aftershock shows what one minibatch does to a training run after the step that saw it.

Examples in docstrings start from the names of one tiny run (`model`, `point`, `path`, `change`, `probe`, …), which
docs/snippets/tiny_run.py makes and the reference page explains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import AftershockError
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .api.change import Change
    from .api.path import Path
    from .api.point import TrainingPoint, capture, from_checkpoint, load_point
    from .api.response import Response, load_response
    from .core.batches import accumulate
    from .core.probe import Probe, own_loss
    from .recorder.explain import explain
    from .recorder.recorder import FlightRecorder

__all__ = [
    "AftershockError",
    "Change",
    "FlightRecorder",
    "Path",
    "Probe",
    "Response",
    "TrainingPoint",
    "accumulate",
    "capture",
    "explain",
    "from_checkpoint",
    "load_point",
    "load_response",
    "own_loss",
]

_HOMES = {
    "Change": "api.change",
    "FlightRecorder": "recorder.recorder",
    "Path": "api.path",
    "Probe": "core.probe",
    "Response": "api.response",
    "TrainingPoint": "api.point",
    "accumulate": "core.batches",
    "capture": "api.point",
    "explain": "recorder.explain",
    "from_checkpoint": "api.point",
    "load_point": "api.point",
    "load_response": "api.response",
    "own_loss": "core.probe",
}


def __getattr__(name: str) -> Any:
    """A name's module loads when the name is first asked for, so that the import itself costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
