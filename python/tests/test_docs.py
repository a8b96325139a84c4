"""Examples in documents run: ``python`` blocks as scripts, ``python ranks=N`` blocks on so many ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "python/horovod/README.md"]
BLOCK = re.compile(r"^```python(?: ranks=(\d+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[object]:
    """Every block, named after its page and line."""
    found: list[object] = []
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            found.append(pytest.param(block[2], block[1], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("source", "ranks"), examples())
def test_example(source: str, ranks: str | None, tmp_path: Path) -> None:
    """It ends well."""
    script = tmp_path / "example.py"
    script.write_text(source)
    command = [sys.executable, str(script)]
    if ranks:
        command = [sys.executable, "-m", "deuteron", "run", "-n", ranks, "--", *command]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
