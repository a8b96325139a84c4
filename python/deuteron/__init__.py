"""Process data, train on it in parallel and predict with the model, on the cluster you already have."""

from deuteron._core import __version__

__all__ = ["__version__"]
