"""From rows to tensors without rows: mini-batches of files and of whatever speaks Arrow."""

from deuteron.data.loader import Column, Loader
from deuteron.data.maps import Mapped, map_batches
from deuteron.data.partition import Partition
from deuteron.data.stage import Barrier, barrier

__all__ = ["Barrier", "Column", "Loader", "Mapped", "Partition", "barrier", "map_batches"]
