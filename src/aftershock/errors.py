"""What aftershock says when it cannot go on: what happened, in the user's words, and what to do."""


class AftershockError(Exception):
    """Every error that aftershock raises on purpose. Nothing of the user's has been changed.

    >>> try:
    ...     path.skip(at=9)
    ... except ak.AftershockError as error:
    ...     print(error)
    step 9 is not on this path of 4 steps
    """


class UnsupportedOptimizer(AftershockError):
    """The optimizer does something that the equations of AdamW do not describe."""


class UnsupportedModel(AftershockError):
    """The model holds something that cannot be copied or differentiated."""


class UnsupportedClipping(AftershockError):
    """Gradients are clipped in another way than by their global norm."""


class UnsupportedAttention(AftershockError):
    """The attention kernel has no second derivative."""


class InvalidLoss(AftershockError):
    """loss_fn failed, or returned something that is not one finite number with a gradient."""


class NoDerivative(InvalidLoss):
    """The loss or probe has no gradient, so nothing can be predicted of it; exact answers exist for a probe."""


class NotFinite(AftershockError):
    """A NaN or an infinity appeared; the message names the step and the batch."""


class InvalidInput(AftershockError):
    """An argument does not fit: an empty path, a wrong shape, a horizon past the end."""


class MixedDevices(AftershockError):
    """Tensors that must be together are on different devices."""


class OutOfMemory(AftershockError):
    """The work does not fit into memory, not even in its smallest pieces; the message says what would."""


class WrongHessian(AftershockError):
    """A Hessian product disagrees with a central difference of the gradient."""


class Nondeterministic(AftershockError):
    """The same step gives another gradient when it is run again."""


class ExamplesCouple(AftershockError):
    """An example's loss depends on the other examples of its batch."""


class HiddenState(AftershockError):
    """The loss depends on state outside (θ, m, v): buffers that training moves, or what Python code remembers."""


class InvalidFile(AftershockError):
    """A saved point or response is missing, damaged, or belongs to another model."""


class UnfrozenGate(AftershockError):
    """A kink of the network cannot be recorded and replayed; the message names the operation and the module."""


class ReplayMismatch(AftershockError):
    """A recorded run does not repeat itself: the message says at which step, by how much, and why it may be."""


class MissingPackage(AftershockError, ImportError):
    """A package of an extra is not installed; the message says which extra brings it."""


class StudyStopped(AftershockError):
    """A study could not go on (workers, their scheduler, the disk); the systems that were finished are kept."""
