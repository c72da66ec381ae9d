"""aftershock shows what one minibatch does to a training run after the step that saw it."""

__version__ = "0.1.0"

from .api.change import Change
from .api.path import Path
from .api.point import TrainingPoint, capture, from_checkpoint, load_point
from .api.response import Response, load_response
from .core.batches import accumulate
from .core.probe import Probe, own_loss
from .errors import AftershockError
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
