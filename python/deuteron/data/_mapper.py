"""What each process of ``map_batches`` does: calls the function with one batch after the other."""

from __future__ import annotations

import io
import pickle
import socket
import sys
from typing import Any

from deuteron._worker import _describe, _main_module, _share_globals
from deuteron.data import maps


def main() -> int:
    channel = socket.socket(fileno=int(sys.argv[1]))
    message = maps.receive(channel)
    if message is None:
        return 0
    try:
        stream = io.BytesIO(maps.take_bytes(message.descriptor))
        described = pickle.load(stream)
        sys.path[:], sys.argv[:] = described["path"], described["argv"]
        module = _main_module(described)
        fn, (setup,), _ = pickle.load(stream)
        _share_globals(module, fn)
        more = () if setup is None else (setup(),)
    except BaseException as error:
        maps.send(channel, maps.FAILURE, -1, maps.put_bytes(_describe(error).encode()))
        return 1
    while (message := maps.receive(channel)) is not None:
        try:
            (batch,) = maps.take(message.descriptor)
            results = _batches(fn(batch, *more))
            answer = maps.RESULT, message.number, maps.put(results, results[0].schema)
        except BaseException as error:
            answer = maps.FAILURE, message.number, maps.put_bytes(_describe(error).encode())
        try:
            maps.send(channel, *answer)
        except (BrokenPipeError, ConnectionResetError):
            return 0
    return 0


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
