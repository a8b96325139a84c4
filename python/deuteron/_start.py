"""A script that starts an agent, a supervisor or what a task runs, out of the very package that its driver imported.

It is run by its path and without a folder of its own on ``sys.path``: neither the current folder nor this one may hide
a module of the user's or of Python's.
"""

import os
import sys
from importlib.machinery import PathFinder


def _find_package() -> None:
    package = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("deuteron")
    if spec is None or spec.origin is None or os.path.dirname(os.path.abspath(spec.origin)) != package:
        sys.path.insert(0, os.path.dirname(package))


if __name__ == "__main__":
    _find_package()
    if sys.argv[1:] == ["agent"]:
        from deuteron.__main__ import main
    elif sys.argv[1:] == ["supervisor"]:
        from deuteron.spark._supervisor import main
    else:
        from deuteron._worker import leave, main

        leave(main())
    sys.exit(main())
