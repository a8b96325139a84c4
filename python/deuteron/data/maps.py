"""A function over the batches of an Arrow stream, in several processes.

- A batch lies in shared memory without a name while it goes from one process to another: it is written once, and read
  where it lies.
- Results come in the order of the batches. Only a few batches per process are on their way at a time, and the stream is
  read no faster than results are taken.
- A process ends when whoever started it is gone.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from deuteron.errors import InvalidError, TaskFailedError

#: Kind, and number of the batch.
_HEADER = struct.Struct("<cq")
FUNCTION, BATCH, RESULT, FAILURE = b"f", b"b", b"r", b"e"
#: Batches that a process has: the one that it works on, and the next.
_AHEAD = 2


class Message(NamedTuple):
    kind: bytes
    number: int
    #: Of the memory that came with it.
    descriptor: int


def send(channel: socket.socket, kind: bytes, number: int, descriptor: int) -> None:
    """Sends memory, which the sender need not keep."""
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        channel.sendmsg([_HEADER.pack(kind, number)], rights)
    finally:
        os.close(descriptor)


def receive(channel: socket.socket) -> Message | None:
    """Waits for a message; ``None`` if the other side is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, 1)
    except ConnectionResetError:
        return None
    if len(data) < _HEADER.size or not descriptors:
        return None
    kind, number = _HEADER.unpack(data)
    return Message(kind, number, descriptors[0])


def put(batches: Iterable[Any], schema: Any) -> int:
    """The descriptor of memory that holds these batches."""
    import pyarrow  # type: ignore[import-untyped]

    descriptor = os.memfd_create("deuteron-batch")
    try:
        with (
            pyarrow.OSFile(f"/proc/self/fd/{descriptor}", "wb") as file,
            pyarrow.ipc.new_stream(file, schema) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def put_bytes(data: bytes) -> int:
    descriptor = os.memfd_create("deuteron-bytes")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def take(descriptor: int) -> list[Any]:
    """The batches in this memory, where they lie; it stays as long as they do."""
    import pyarrow

    try:
        with pyarrow.ipc.open_stream(pyarrow.memory_map(f"/proc/self/fd/{descriptor}")) as reader:
            return list(reader)
    finally:
        os.close(descriptor)


def take_bytes(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def map_batches(
    fn: Callable[..., Any],
    data: Any,
    num_proc: int | None = None,
    *,
    setup: Callable[[], Any] | None = None,
    batch_size: int = 65_536,
) -> Mapped:
    """Calls ``fn`` with every batch of ``data`` in ``num_proc`` processes; what it returns comes in the order of the
    batches.

    ``data`` is whatever speaks the Arrow stream interface. ``fn`` gets a ``pyarrow.RecordBatch`` of at most
    ``batch_size`` rows and returns one, a table, or several in a list. ``setup`` is called once in each process, and
    what it returns is the second argument of ``fn``: a model that is loaded once, for instance.

    If ``fn`` raises, or a process ends, ``TaskFailedError`` says at which batch, with the traceback. Iterate over the
    result, or give it to whatever takes an Arrow stream: once.
    """
    from deuteron.launch import _payload

    if num_proc is None:
        num_proc = len(os.sched_getaffinity(0))
    if num_proc < 1 or batch_size < 1:
        raise InvalidError("num_proc and batch_size must be at least 1")
    if not hasattr(data, "__arrow_c_stream__"):
        wanted = "something with __arrow_c_stream__, such as a pyarrow.Table"
        raise InvalidError(f"{type(data).__name__} is no stream of batches: give {wanted}")
    payload = _payload(fn, (setup,), None, show_failures=False)
    return Mapped(_mapped(payload, data, num_proc, batch_size))


class Mapped:
    """What ``map_batches`` gives: ``pyarrow.RecordBatch``es, or an Arrow stream, once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        import pyarrow

        first = next(self._batches, None)
        if first is None:
            raise InvalidError("there is no batch, and so no schema of results")

        def all_of_them() -> Iterator[Any]:
            yield first
            yield from self._batches

        reader = pyarrow.RecordBatchReader.from_batches(first.schema, all_of_them())
        return reader.__arrow_c_stream__(requested_schema)


class _Mapper:
    """A process that maps batches."""

    def __init__(self, payload: bytes) -> None:
        self.channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "deuteron.data._mapper", str(other.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        with other:
            # Its own group, so that Ctrl-C reaches only whoever asked for the results.
            self.process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, process_group=0)
        self.numbers: list[int] = []
        send(self.channel, FUNCTION, 0, put_bytes(payload))

    def give(self, number: int, batch: Any) -> bool:
        self.numbers.append(number)
        try:
            send(self.channel, BATCH, number, put([batch], batch.schema))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


def _parts(data: Any, most: int) -> Iterator[Any]:
    import pyarrow

    for batch in pyarrow.RecordBatchReader.from_stream(data):
        for start in range(0, batch.num_rows, most):
            yield batch.slice(start, most)


def _mapped(payload: bytes, data: Any, num_proc: int, batch_size: int) -> Iterator[Any]:
    parts = enumerate(_parts(data, batch_size))
    mappers: list[_Mapper] = []
    done: dict[int, list[Any]] = {}
    given = taken = 0
    more = True
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                # What is done and not taken counts too: the stream is read no faster than results are.
                while more and given - taken < _AHEAD * num_proc:
                    part = next(parts, None)
                    if part is None:
                        more = False
                        break
                    if len(mappers) < num_proc:
                        mappers.append(_Mapper(payload))
                        selector.register(mappers[-1].channel, selectors.EVENT_READ, (len(mappers) - 1, mappers[-1]))
                    given += 1
                    rank, idlest = min(enumerate(mappers), key=lambda one: len(one[1].numbers))
                    if not idlest.give(*part):
                        raise _lost(rank, idlest)
                while taken in done:
                    yield from done.pop(taken)
                    taken += 1
                if taken == given:
                    if not more:
                        return
                    continue
                for key, _ in selector.select():
                    rank, mapper = key.data
                    message = receive(mapper.channel)
                    if message is None:
                        raise _lost(rank, mapper)
                    if message.kind == FAILURE:
                        raise _failed(rank, message.number, take_bytes(message.descriptor).decode())
                    mapper.numbers.remove(message.number)
                    done[message.number] = take(message.descriptor)
        finally:
            for mapper in mappers:
                mapper.end()


def _failed(rank: int, number: int, traceback: str) -> TaskFailedError:
    where = f"batch {number} failed in process {rank}" if number >= 0 else f"process {rank} could not be set up"
    return TaskFailedError(where, rank, os.uname().nodename, 0, "failed", traceback)


def _lost(rank: int, mapper: _Mapper) -> TaskFailedError:
    status = mapper.process.wait()
    ending = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    numbers = " and ".join(map(str, mapper.numbers)) or "none"
    message = f"process {rank} {ending}; it had batches {numbers}"
    return TaskFailedError(message, rank, os.uname().nodename, 0, ending)
