"""Files and folders that are whole or not there.

They are written under another name first, which begins with a dot, names the process and ends with ``.partial``. What a
process that was killed has left under such a name, the next one that writes there removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write in that takes its name only when all is written; what had the name before is replaced."""
    partial = _partial(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            # Half of what was there must not keep the name either.
            old = partial.with_name(f".{folder.name}.{os.getpid()}-old.partial")
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """A file with this content."""
    partial = _partial(path)
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """The name until all is written, after what others have left is removed."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        if not _runs(left.name.split(".")[-2].split("-")[0]):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _runs(process: str) -> bool:
    """Whether another process has this number; one that had our own is gone."""
    return process != str(os.getpid()) and Path("/proc", process).exists()
