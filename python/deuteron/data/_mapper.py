"""What each process of ``map_batches`` does: calls the function with one batch after the other."""

from __future__ import annotations

import io
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any

from deuteron._worker import _describe, _main_module, _share_globals
from deuteron.data import maps
from deuteron.data._line import Line


def main() -> int:
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    message = line.receive()
    if message is None:
        return 0
    try:
        stream = io.BytesIO(message.content)
        described = pickle.load(stream)
        sys.path[:], sys.argv[:] = described["path"], described["argv"]
        module = _main_module(described)
        fn, (setup,), _ = pickle.load(stream)
        _share_globals(module, fn)
        more = () if setup is None else (setup(),)
    except BaseException as error:
        line.send_bytes(maps.FAILURE, -1, _describe(error).encode())
        return 1
    del message, stream
    try:
        while _answer(line, fn, more):
            pass
    except (BrokenPipeError, ConnectionResetError):
        pass
    return 0


def _answer(line: Line, fn: Callable[..., Any], more: tuple[Any, ...]) -> bool:
    """Answers one message; whether there was one."""
    message = line.receive()
    if message is None:
        return False
    number = message.number
    try:
        (batch,) = message.batches()
        del message
        results = _batches(fn(batch, *more))
        # Its memory goes back with the answer.
        del batch
    except BaseException as error:
        line.send_bytes(maps.FAILURE, number, _describe(error).encode())
    else:
        line.send_batches(maps.RESULT, number, results)
    return True


def _batches(result: Any) -> list[Any]:
    """What the function returned, as batches."""
    import pyarrow  # type: ignore[import-untyped]

    if isinstance(result, pyarrow.RecordBatch):
        return [result]
    if isinstance(result, list | tuple) and result:
        return [batch for part in result for batch in _batches(part)]
    if hasattr(result, "__arrow_c_stream__"):
        table = pyarrow.table(result)
        return table.to_batches() or [pyarrow.RecordBatch.from_pylist([], table.schema)]
    wanted = "a pyarrow.RecordBatch, a table, or a list of them"
    raise TypeError(f"the function returned a {type(result).__name__}: return {wanted}")


if __name__ == "__main__":
    sys.exit(main())
