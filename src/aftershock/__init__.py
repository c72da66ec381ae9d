"""aftershock shows what one minibatch does to a training run after the step that saw it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api.change import Change
from .api.path import Path
from .api.point import TrainingPoint, capture, from_checkpoint, load_point
from .api.response import Response, load_response
from .core.batches import accumulate
from .core.probe import Probe, own_loss
from .errors import AftershockError
from .version import __version__ as __version__

if TYPE_CHECKING:
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

_LATER = {"FlightRecorder": ".recorder.recorder", "explain": ".recorder.explain"}


def __getattr__(name: str) -> Any:
    """The recorder sits above the package's other names, and loads when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_LATER[name], __name__), name)
    globals()[name] = found
    return found
