"""What tests have in common lies beside them: ``ranks`` and ``cases``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ranks import on_ranks

__all__ = ["on_ranks"]
