"""From rows to tensors without rows: mini-batches of files and of whatever speaks Arrow."""

from deuteron.data.loader import Column, Loader
from deuteron.data.maps import Mapped, map_batches
from deuteron.data.stage import Barrier, barrier
from deuteron.partition import Partition

__all__ = ["Barrier", "Column", "Loader", "Mapped", "Partition", "barrier", "map_batches"]
