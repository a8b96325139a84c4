"""A line between two processes, over which batches go in memory that both have.

- Whoever writes a stretch of memory owns it, and writes it again when the other has dropped the last batch in it: the
  system clears no pages for the next batch.
- A message is small and whole; what it tells lies in a stretch. The first time it brings that along as a descriptor.
- Batches are read where they lie, unless the reader keeps many: each stretch is a mapping and a descriptor.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

#: Kind, number of the batch, stretch, bytes in it.
_HEADER = struct.Struct("<cqqq")
_PLACE = struct.Struct("<q")
#: Stretches that a message gives back, at most; others wait for the next.
_BACK = 1000
#: Stretches of the other side that a reader may keep; what lies in more is copied.
_KEPT = 32


class Message(NamedTuple):
    kind: bytes
    number: int
    content: memoryview | bytes

    def batches(self) -> list[Any]:
        """The batches that it brings."""
        import pyarrow  # type: ignore[import-untyped]

        with pyarrow.ipc.open_stream(pyarrow.py_buffer(self.content)) as reader:
            return list(reader)


class Line:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._own: list[mmap.mmap] = []
        #: Of these, those that nobody looks at; the last was in use last.
        self._idle: list[int] = []
        self._theirs: dict[int, mmap.mmap] = {}
        self._dropped: deque[int] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send_bytes(self, kind: bytes, number: int, data: bytes) -> None:
        def write(stretch: mmap.mmap) -> None:
            stretch[: len(data)] = data

        self._send(kind, number, len(data), write)

    def send_batches(self, kind: bytes, number: int, batches: Sequence[Any]) -> None:
        """Sends batches of one schema, at least one."""
        import pyarrow

        def write_to(sink: Any) -> None:
            with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)

        counter = pyarrow.MockOutputStream()
        write_to(counter)
        size = counter.size()
        self._send(
            kind, number, size, lambda stretch: write_to(pyarrow.FixedSizeBufferWriter(pyarrow.py_buffer(stretch)))
        )

    def _send(self, kind: bytes, number: int, size: int, write: Callable[[mmap.mmap], None]) -> None:
        place, descriptor = self._place(size)
        write(self._own[place])
        back = [self._dropped.popleft() for _ in range(min(len(self._dropped), _BACK))]
        data = _HEADER.pack(kind, number, place, size) + b"".join(map(_PLACE.pack, back))
        try:
            socket.send_fds(self._end, [data], [] if descriptor is None else [descriptor])
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _place(self, size: int) -> tuple[int, int | None]:
        """A stretch for so many bytes, and its descriptor if the other does not have it yet."""
        for index in reversed(range(len(self._idle))):
            if len(self._own[self._idle[index]]) >= size:
                return self._idle.pop(index), None
        # Pages that are not written cost nothing, and the next batch may be a little larger.
        room = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
        descriptor = os.memfd_create("deuteron-batch")
        os.ftruncate(descriptor, room)
        memory = mmap.mmap(descriptor, room)
        if self._idle:
            # In place of one that is too small.
            place = self._idle.pop()
            self._own[place] = memory
        else:
            place = len(self._own)
            self._own.append(memory)
        return place, descriptor

    def receive(self) -> Message | None:
        """Waits for a message; ``None`` if the other side is gone."""
        most = _HEADER.size + _BACK * _PLACE.size
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, most, 1)
        except ConnectionResetError:
            # Told once, to whoever had sent what nobody read; what the other has sent is still there.
            data, descriptors, _, _ = socket.recv_fds(self._end, most, 1)
        if len(data) < _HEADER.size:
            return None
        kind, number, place, size = _HEADER.unpack_from(data)
        for (back,) in _PLACE.iter_unpack(data[_HEADER.size :]):
            self._idle.append(back)
        for descriptor in descriptors:
            self._theirs[place] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            os.close(descriptor)
        content = memoryview(self._theirs[place])[:size]
        if place >= _KEPT:
            self._dropped.append(place)
            return Message(kind, number, bytes(content))
        # When the last that looks at it is gone.
        weakref.finalize(content, self._dropped.append, place).atexit = False
        return Message(kind, number, content)
