"""The ``horovodrun`` command."""

import sys

from deuteron import _core


def run_commandline() -> int:
    """Runs ``deuteron run``, which knows Horovod's flags, with this process's arguments."""
    return _core.main([sys.executable, "-m", "deuteron"], ["deuteron", "run", *sys.argv[1:]])
