"""The version, below everything that writes it into a result."""

__version__ = "0.2.0.dev0"
