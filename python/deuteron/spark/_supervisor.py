"""A supervisor as a process of its own, beside the first task of the stage, for drivers that executors cannot reach.

It reads what to run from its standard input, whose end ends it, and writes a line of invitations and then a report.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import threading
from collections import defaultdict, deque

from deuteron import _core
from deuteron.errors import InvalidError
from deuteron.launch import _GLANCE, _in_words_of_python
from deuteron.spark._gang import invited

#: Lines of each rank that are told.
_LAST = 100
_RANK = re.compile(rb"^(?:\S+ )?\[([0-9]+)\] ")

#: What is to be shown, and whether it goes to standard error.
Pieces = list[tuple[bool, bytes]]


def main() -> int:
    """Returns the exit status."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What Python or a library prints is for the log.
    os.dup2(2, 1)
    words, command, payload, generation = pickle.loads(stdin.read(int.from_bytes(stdin.read(8), "little")))
    threading.Thread(target=_leave_at_end, daemon=True).start()
    tasks = int(words[words.index("--tasks") + 1])
    job = _core.Job(words, command, ["agent"], payload, invited=generation)
    stdout.write(json.dumps(invited(job, tasks)).encode() + b"\n")
    stdout.flush()
    kept: dict[bytes, deque[tuple[bool, bytes]]] = defaultdict(lambda: deque(maxlen=_LAST))
    while (pieces := job.output(_GLANCE)) is not None:
        _keep(kept, pieces)
    results: list[bytes | None] = []
    error: Exception | None = None
    try:
        results = job.finish()
    except InvalidError as failure:
        error = InvalidError(_in_words_of_python(str(failure)))
    except Exception as failure:
        error = failure
    printed: Pieces = [line for rank in sorted(kept) for line in kept[rank]]
    stdout.write(pickle.dumps((results, error, printed)))
    stdout.close()
    return 0


def _keep(kept: dict[bytes, deque[tuple[bool, bytes]]], pieces: Pieces) -> None:
    for is_error, text in pieces:
        for line in text.splitlines(keepends=True):
            found = _RANK.match(line)
            kept[found[1].rjust(9) if found else b""].append((is_error, line))


def _leave_at_end() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    # Whoever reads the report is gone, or has read it.
    os._exit(1)
