"""A script that starts an agent, a supervisor or what a task runs, out of the very package that its driver imported.

It is run by its path and without a folder of its own on ``sys.path``: neither the current folder nor this one may hide
a module of the user's or of Python's.
"""

import os
import sys
from importlib.machinery import PathFinder

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


def _find_package() -> None:
    spec = PathFinder.find_spec("deuteron")
    if spec is None or spec.origin is None or os.path.dirname(os.path.abspath(spec.origin)) != _PACKAGE:
        sys.path.insert(0, os.path.dirname(_PACKAGE))


def _agent() -> int:
    """An agent needs nothing of the package but its core, and starts in a quarter of the time without the rest."""
    sys.path.insert(0, _PACKAGE)
    import _core  # type: ignore[import-not-found]

    sys.path.remove(_PACKAGE)
    status: int = _core.main([sys.executable, "-m", "deuteron"], ["deuteron", "agent"])
    return status


if __name__ == "__main__":
    if sys.argv[1:] == ["agent"]:
        sys.exit(_agent())
    _find_package()
    if sys.argv[1:] == ["supervisor"]:
        from deuteron.spark._supervisor import main

        sys.exit(main())
    from deuteron._worker import leave, main

    leave(main())
