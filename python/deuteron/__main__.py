"""The ``deuteron`` command."""

import sys

from deuteron import _core


def main() -> int:
    """Runs it with this process's arguments."""
    return _core.main([sys.executable, "-m", "deuteron"], ["deuteron", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
