"""Exceptions that scripts catch."""

from deuteron.errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError"]
