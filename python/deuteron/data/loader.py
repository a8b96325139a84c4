"""Mini-batches of one rank, made in the background by threads that know nothing of Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from deuteron import _core
from deuteron.errors import InvalidError

Value = bool | int | float | str
#: Column, comparison, and what it is compared with: several values for ``in``.
Filter = tuple[str, str, Value | Sequence[Value]]
Batch = dict[str, Any]

_OF_THE_ORDER = ("seed", "shuffle", "buffer", "rows", "rest")


class Column(NamedTuple):
    """What a column is in every mini-batch."""

    #: As NumPy and PyTorch spell it.
    dtype: str
    #: Of one row's value; empty for one element.
    shape: tuple[int, ...]
    #: What a date or time counts: ``"day"``, ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
    unit: str | None
    #: Of a column of strings, in the order of their numbers.
    categories: list[str] | None


class Loader:
    """The mini-batches of this rank, as dicts from column names to tensors.

    ``source`` is a file or folder of Parquet, Arrow or CSV files, several of them, or whatever speaks the Arrow stream
    interface: tables of pyarrow, Polars, DuckDB, DataFusion and pandas, Spark's DataFrames, a partition. Such a stream
    is read once, here.

    Every rank has the same number of steps. ``batch_size`` is the number of rows of this rank at a step; what does not
    fill a step of all ranks is dropped (``rest="drop"``), or the step is filled with rows that were already there
    (``rest="pad"``).

    ``shuffle="full"`` mixes all rows with each other: what all ranks together see at a step is the same for any number
    of ranks, if ``batch_size`` times ``size`` is. ``shuffle="buffer"`` mixes row groups, and then the rows within
    ``buffer`` at a time. Without, ranks see stretches of the rows in their order. The order depends on ``seed`` and
    epoch alone.

    Numbers and truth values keep their types, unless ``columns`` is a mapping from names to types. Dates and times are
    whole numbers of the unit that ``Loader.columns`` states. Strings are the numbers of their categories: those of
    ``categories``, or all that there are, sorted. Lists of a fixed size have a second dimension. What the bytes of a
    binary column are says ``tensors={"image": ("uint8", (28, 28))}``. A null is an error unless ``fill`` names what
    stands in for it; that also stands in for a string that is no category. NaN is a value like any other, or an error
    with ``nan="error"``. ``filters`` are conditions that all rows satisfy, such as ``("sales", ">", 0)``; a null or NaN
    satisfies none.

    ``groups`` makes matrices of columns that have one type: ``groups={"weather": ["wind", "rain"]}`` puts a tensor
    ``weather`` with two columns in the place of both, which is what a network wants and faster than many tensors.

    ``transform`` is called with every mini-batch, and what it returns is handed out. Mini-batches are tensors of
    PyTorch, or NumPy's arrays where PyTorch is not installed or ``library="numpy"``: memory of their own, without a
    copy.

    ``prefetch`` mini-batches are made in advance by up to ``threads`` threads. All rows that are mixed, and those of a
    stream, are kept in memory if they take no more than ``memory`` bytes; more lie in the folder ``spool``, by default
    that of temporary files, in a file without a name.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int = 1024,
        *,
        columns: Sequence[str] | Mapping[str, str | None] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        filters: Sequence[Filter] = (),
        shuffle: Literal["full", "buffer"] | None = None,
        buffer: int = 65_536,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
        rest: Literal["drop", "pad"] = "drop",
        fill: Mapping[str, Value] | None = None,
        categories: Mapping[str, Sequence[str]] | None = None,
        tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None,
        nan: Literal["keep", "error"] = "keep",
        transform: Callable[[Batch], Any] | None = None,
        library: Literal["torch", "numpy"] | None = None,
        prefetch: int = 4,
        threads: int | None = None,
        memory: int = 256 << 20,
        spool: str | os.PathLike[str] | None = None,
    ) -> None:
        if (rank is None) != (size is None):
            raise InvalidError("rank and size come together, or neither")
        if rank is None or size is None:
            rank, size = _own_rank()
        _check(batch_size=batch_size, size=size, prefetch=prefetch, buffer=buffer)
        if not 0 <= rank < size:
            raise InvalidError(f"there is no rank {rank} among {size}")
        if threads is not None:
            _check(threads=threads)
        if memory < 0:
            raise InvalidError(f"memory must be at least 0 bytes, not {memory}")
        if nan not in ("keep", "error"):
            raise InvalidError(f'nan is "keep" or "error", not {nan!r}')
        if isinstance(columns, str):
            raise InvalidError(f"columns is a list: [{columns!r}]")
        paths, stream = _opened(source)
        self._library = _library(library)
        self._transform = transform
        mixed = buffer if shuffle == "buffer" else None
        self._order = {"seed": seed, "shuffle": shuffle, "buffer": mixed, "rest": rest}
        self._batch_size, self._rank, self._size = batch_size, rank, size
        self._data = _core.Dataset(
            paths,
            stream,
            batch_size=batch_size,
            rank=rank,
            size=size,
            shuffle=shuffle,
            buffer=buffer,
            # Any number, also a negative one.
            seed=seed % 2**64,
            rest=rest,
            columns=None if columns is None else list(columns),
            described=_described(columns, fill or {}, categories or {}, tensors or {}),
            groups=[(name, list(members)) for name, members in (groups or {}).items()],
            filters=[_filter(condition) for condition in filters],
            refuse_nan=nan == "error",
            prefetch=prefetch,
            threads=threads,
            memory=memory,
            spool=None if spool is None else os.fspath(spool),
        )
        about = self._data.columns
        self._columns = {name: Column(dtype, tuple(shape), unit, names) for name, dtype, shape, unit, names in about}
        self._tensors = [(name, dtype, (batch_size, *shape)) for name, dtype, shape in self._data.tensors]
        self._epoch = 0
        #: Where the iteration that began last is, and where the next begins.
        self._step = 0
        self._resume = 0

    @property
    def columns(self) -> dict[str, Column]:
        """What the columns of every mini-batch are."""
        return dict(self._columns)

    @property
    def rows(self) -> int:
        """Rows of all ranks."""
        return self._data.rows

    def __len__(self) -> int:
        """Steps of an epoch, the same for every rank."""
        return self._data.steps

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration has; it goes up when one comes to its end."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        if epoch < 0:
            raise InvalidError(f"there is no epoch {epoch}")
        if epoch != self._epoch:
            self._epoch, self._step, self._resume = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: after the mini-batch that was handed out last."""
        state = {**self._order, "rows": self.rows, "batch_size": self._batch_size, "size": self._size}
        return {**state, "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration begin where that of ``state`` was.

        The number of ranks may be another one if all rows are mixed with each other and ``batch_size`` times ``size``
        is the same.
        """
        own = self.state_dict()
        missing = [name for name in own if name not in state]
        if missing:
            raise InvalidError(f"this is no state of a loader: it has no {missing[0]}")
        for name in _OF_THE_ORDER:
            if state[name] != own[name]:
                raise InvalidError(
                    f"the state is of another order: its {name} is {state[name]!r}, here it is {own[name]!r}"
                )
        then, now = ((it["batch_size"], it["size"]) for it in (state, own))
        same = then[0] * then[1] == now[0] * now[1] if own["shuffle"] == "full" else then == now
        if not same:
            ranks = f"{then[1]} ranks with {then[0]} rows each, here it is {now[1]} with {now[0]}"
            raise InvalidError(f"the state is of another order: that of {ranks}")
        if state["epoch"] < 0 or not 0 <= state["step"] <= len(self):
            raise InvalidError(f"there is no step {state['step']} of {len(self)} in epoch {state['epoch']}")
        self._epoch, self._step = state["epoch"], state["step"]
        self._resume = self._step

    def __iter__(self) -> Iterator[Any]:
        epoch, start, self._resume = self._epoch, self._resume, 0
        batches = self._data.epoch(epoch, start)
        self._step = start
        names = [name for name, *_ in self._tensors]
        transform = self._transform
        made = self._torch(batches) if self._library == "torch" else self._numpy(batches)
        for step, tensors in enumerate(made, start + 1):
            self._step = step
            batch = dict(zip(names, tensors, strict=True))
            yield batch if transform is None else transform(batch)
        # Whoever has set another one meanwhile means it.
        if self._epoch == epoch:
            self._epoch, self._step = epoch + 1, 0

    def _torch(self, batches: _core.Batches) -> Iterator[Iterator[Any]]:
        from torch.utils.dlpack import from_dlpack

        while (capsules := batches.capsules()) is not None:
            yield map(from_dlpack, capsules)

    def _numpy(self, batches: _core.Batches) -> Iterator[Iterator[Any]]:
        import numpy

        while (buffers := batches.buffers()) is not None:
            # That they are buffers, types can tell from Python 3.12 on only.
            tensors: Iterator[tuple[Any, tuple[str, str, tuple[int, ...]]]] = zip(buffers, self._tensors, strict=True)
            yield (numpy.frombuffer(buffer, dtype).reshape(shape) for buffer, (_, dtype, shape) in tensors)

    def __repr__(self) -> str:
        place = f"rank {self._rank} of {self._size}"
        return f"Loader({self.rows} rows of {list(self._columns)}, {len(self)} steps of {self._batch_size}, {place})"


def _own_rank() -> tuple[int, int]:
    if "DEUTERON_TASK" not in os.environ:
        return 0, 1
    from deuteron._context import task

    own = task()
    return own.rank, own.size


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise InvalidError(f"{name} must be at least 1, not {number}")


def _opened(source: Any) -> tuple[list[str], object | None]:
    """Paths, or the capsule of a stream."""
    if isinstance(source, str | os.PathLike):
        return [os.fspath(source)], None
    if hasattr(source, "__arrow_c_stream__"):
        return [], source.__arrow_c_stream__()
    if isinstance(source, Sequence) and source and all(isinstance(path, str | os.PathLike) for path in source):
        return [os.fspath(path) for path in source], None
    wanted = "a path, several, or something with __arrow_c_stream__, such as a pyarrow.Table"
    raise InvalidError(f"{type(source).__name__} is no source of rows: give {wanted}")


def _library(wanted: str | None) -> str:
    if wanted not in (None, "torch", "numpy"):
        raise InvalidError(f'library is "torch" or "numpy", not {wanted!r}')
    if wanted is None:
        from importlib.util import find_spec

        wanted = "numpy" if find_spec("torch") is None else "torch"
    return wanted


_Described = tuple[str, str | None, tuple[str, list[int]] | None, Value | None, list[str] | None]


def _described(
    columns: Sequence[str] | Mapping[str, str | None] | None,
    fill: Mapping[str, Value],
    categories: Mapping[str, Sequence[str]],
    tensors: Mapping[str, tuple[str, Sequence[int]]],
) -> list[_Described]:
    types = columns if isinstance(columns, Mapping) else {}
    described: list[_Described] = []
    for name in dict.fromkeys([*types, *fill, *categories, *tensors]):
        dtype = types.get(name)
        # PyTorch's and NumPy's own types have such names.
        dtype = None if dtype is None else _type(dtype)
        tensor = (_type(tensors[name][0]), list(tensors[name][1])) if name in tensors else None
        known = list(categories[name]) if name in categories else None
        described.append((name, dtype, tensor, fill.get(name), known))
    return described


def _type(dtype: Any) -> str:
    """The name of a type, also of PyTorch's and NumPy's."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    return name.removeprefix("torch.")


def _filter(condition: Filter) -> tuple[str, str, list[Value]]:
    if not (isinstance(condition, tuple | list) and len(condition) == 3):
        raise InvalidError(f'a filter is (column, comparison, value), such as ("sales", ">", 0), not {condition!r}')
    column, comparison, value = condition
    several = not isinstance(value, str) and isinstance(value, Sequence | set | frozenset)
    values: list[Any] = list(value) if isinstance(value, Sequence | set | frozenset) and several else [value]
    # Dates are written as text.
    return column, comparison, [each if isinstance(each, bool | int | float) else str(each) for each in values]
