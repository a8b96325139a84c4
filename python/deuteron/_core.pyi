"""The native module: tasks, jobs and the engine of collective operations."""

import sys
from collections.abc import Sequence
from typing import final

__all__ = [
    "Accelerator",
    "Batches",
    "Bytes",
    "Dataset",
    "Engine",
    "Job",
    "Memory",
    "Operation",
    "Slots",
    "Task",
    "TaskInfo",
    "__version__",
    "main",
]

__version__: str

def main(program: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs the ``deuteron`` command and returns its exit code. ``program`` starts it again."""

@final
class Accelerator:
    """One device of a host."""

    @property
    def kind(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def uuid(self) -> str: ...
    @property
    def memory(self) -> int:
        """In bytes."""

@final
class TaskInfo:
    """What every task of a gang may know about each."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def accelerators(self) -> list[Accelerator]: ...

@final
class Task:
    """One member of a gang, seen from inside."""

    @staticmethod
    def from_environment() -> Task:
        """The task that this process is; ``InvalidError`` if no agent has started it."""
    @staticmethod
    def alone() -> Task:
        """A gang of one, for a process that nobody has started as a task."""
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def infos(self) -> list[TaskInfo]: ...
    def barrier(self, timeout: float | None = None) -> None: ...
    def all_gather(self, message: bytes, timeout: float | None = None) -> list[bytes]: ...
    def payload(self) -> bytes:
        """What whoever started the gang gives to every task."""
    def set_result(self, result: bytes) -> None: ...
    def set_failure(self, traceback: str) -> None: ...
    def engine(self) -> Engine:
        """Connects all tasks for named operations; all call it the same number of times."""
    def subengine(self, ranks: Sequence[int]) -> Engine | None:
        """The same for some of the tasks; all call it, and those that are not among them get ``None``."""

@final
class Job:
    """Tasks on this machine, on their way."""

    def __new__(
        cls,
        settings: Sequence[str],
        command: Sequence[str],
        agent: Sequence[str],
        payload: bytes,
        stdout_is_terminal: bool = False,
        stderr_width: int | None = None,
        invited: int | None = None,
    ) -> Job:
        """Starts what ``settings``, the words of ``deuteron run``, ask for: ``command`` in every task, with
        ``payload`` for all. ``InvalidError`` if they make no sense, before anything has started. With ``invited``,
        the number of the first attempt, agents come by themselves, one for each task."""
    def invitation(self, timeout: float) -> tuple[int, str] | None:
        """The next agent that is wanted, by its number, and the line that it has to find on its standard input, which
        then stays open; the line is the key to the job. ``None`` after a while without one."""
    def output(self, timeout: float) -> list[tuple[bool, bytes]] | None:
        """What is to be shown, and whether it goes to standard error: as soon as there is something, or after a while
        nothing. ``None`` when the job is over."""
    def end(self, reason: str) -> None:
        """Tasks are told to end, have their grace, and are killed."""
    def note(self, text: str) -> None:
        """Says something among what is shown."""
    def finish(self) -> list[bytes | None]:
        """Waits for the end and returns what each rank has returned, once; raises why it failed."""

@final
class Engine:
    """Named operations in any order from any thread, matched across ranks, fused and overlapped.

    Numbers stand for types and operations: types are 0 bool, 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64,
    6 float16, 7 bfloat16, 8 float32, 9 float64; reductions are Horovod's: 0 average, 1 sum, 3 min, 4 max,
    5 product. A tensor is its address, type and shape; whoever submits one keeps it alive and unused until the
    operation is done.
    """

    @property
    def rank(self) -> int:
        """Number within this engine's ranks."""
    @property
    def size(self) -> int: ...
    def all_reduce(
        self,
        name: str | None,
        tensors: Sequence[tuple[int, int, Sequence[int]]],
        reduction: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        now: bool = False,
    ) -> Operation:
        """In place. ``now``, here and below: the caller waits for it next, so nobody is woken to move it on."""
    def all_gather(
        self, name: str | None, tensors: Sequence[tuple[int, int, Sequence[int]]], now: bool = False
    ) -> Operation: ...
    def broadcast(
        self, name: str | None, tensors: Sequence[tuple[int, int, Sequence[int]]], root: int, now: bool = False
    ) -> Operation:
        """In place. ``root`` is a number within this engine's ranks."""
    def reduce_scatter(
        self,
        name: str | None,
        tensors: Sequence[tuple[int, int, Sequence[int]]],
        reduction: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        now: bool = False,
    ) -> Operation: ...
    def all_to_all(
        self,
        name: str | None,
        tensor: tuple[int, int, Sequence[int]],
        splits: Sequence[int] = ...,
        now: bool = False,
    ) -> Operation:
        """``splits`` are rows for each rank; none for equal shares."""
    def barrier(self, name: str | None = None, now: bool = False) -> Operation: ...
    def bucket(self, bytes: int) -> Memory:
        """Memory of the group, zeroed: what lies in it is reduced in place. All ranks call it alike."""
    def report(self) -> str:
        """Which operations wait for which ranks."""
    def start_timeline(self, path: str) -> None: ...
    def stop_timeline(self) -> None: ...
    def close(self) -> None:
        """Leaves. Operations on their way fail, here and elsewhere."""

@final
class Operation:
    """An operation on its way."""

    def done(self) -> bool:
        """Whether it is done or has failed."""
    def wait(self, timeout: float | None = None) -> list[Memory]:
        """Waits until it is done and returns what it has made, once; ``TimedOutError`` leaves it on its way."""

@final
class Memory:
    """Bytes of the native side, writable, for as long as anybody looks at them."""

    @property
    def address(self) -> int: ...
    @property
    def counts(self) -> list[int]:
        """How many elements are of each rank, if they were gathered."""
    def __len__(self) -> int:
        """In bytes."""
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Slots:
    """Tensors at fixed places in a bucket that are reduced again and again: gradients."""

    def __new__(
        cls,
        engine: Engine,
        memory: Memory,
        slots: Sequence[tuple[str, int, int, Sequence[int]]],
        reduction: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Slots:
        """A slot is a name, an offset in bytes, a type and a shape."""
    def submit(self, slot: int) -> None:
        """Reduces what lies in the slot."""
    def fill(self, slot: int, address: int) -> None:
        """Copies a tensor of the slot's type and shape from there, and reduces it."""
    def wait(self) -> None:
        """Waits for all that were submitted since the last wait."""
    def waiting(self) -> int:
        """How many were submitted since the last wait."""

@final
class Dataset:
    """A source, opened for one rank."""

    def __new__(
        cls,
        paths: Sequence[str],
        stream: object | None,
        *,
        batch_size: int,
        rank: int,
        size: int,
        shuffle: str | None,
        buffer: int,
        seed: int,
        rest: str,
        columns: Sequence[str] | None,
        described: Sequence[
            tuple[
                str,
                str | None,
                tuple[str, Sequence[int]] | None,
                bool | int | float | str | None,
                Sequence[str] | None,
            ]
        ],
        groups: Sequence[tuple[str, Sequence[str]]],
        filters: Sequence[tuple[str, str, Sequence[bool | int | float | str]]],
        refuse_nan: bool,
        prefetch: int,
        threads: int | None,
        memory: int,
        spool: str | None,
    ) -> Dataset: ...
    @property
    def rows(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def columns(self) -> list[tuple[str, str, list[int], str | None, list[str] | None]]:
        """Name, type, shape, unit and categories of each."""
    @property
    def tensors(self) -> list[tuple[str, str, list[int]]]:
        """Name, type and shape of each tensor of a mini-batch."""
    def epoch(self, epoch: int, step: int) -> Batches:
        """The mini-batches of an epoch, from a step on."""

@final
class Batches:
    """The mini-batches of an epoch, made by threads in the background."""

    def capsules(self) -> list[object] | None:
        """The tensors of the next as DLPack capsules; nothing after the last."""
    def buffers(self) -> list[Bytes] | None:
        """The tensors of the next as buffers of bytes; nothing after the last."""

@final
class Bytes:
    """A tensor of a mini-batch, writable, for as long as anybody looks at it."""

    def __len__(self) -> int: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
