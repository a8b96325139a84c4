"""Models, optimizers and objects, from one rank to others."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from deuteron.errors import CollectiveError, InvalidError
from deuteron.torch.handles import Pending
from deuteron.torch.operations import gather, spread_in_place
from deuteron.torch.process_sets import ProcessSet, global_process_set

Named = Mapping[str, Any] | Iterable[Any]


def broadcast_parameters(params: Named, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Gives every rank the root's parameters, in place.

    ``params`` is a ``state_dict()``, ``named_parameters()``, any other names with their tensors, or just tensors in
    the same order on all ranks.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    spread_all(_named(params), root_rank, process_set)


def _named(params: Named) -> list[tuple[str | None, Tensor]]:
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise InvalidError(f"parameters are named tensors, not {type(params).__name__}")
    items = params.items() if isinstance(params, Mapping) else params
    named: list[tuple[str | None, Tensor]] = []
    for item in items:
        name, tensor = item if isinstance(item, tuple) else (None, item)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidError(f"parameter {name!r} is not a tensor but {type(tensor).__name__}: use broadcast_object")
        named.append((name, tensor))
    return named


def spread_all(named: Iterable[tuple[str | None, Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcasts tensors in place, all at once."""
    started: list[Pending[Tensor]] = []
    try:
        for name, tensor in named:
            started.append(spread_in_place(tensor, root_rank, name, process_set))
    finally:
        # Also if one was refused: the others have begun to write.
        failed = _finish(started)
    if failed is not None:
        raise failed


def _finish(started: Iterable[Pending[Tensor]]) -> Exception | None:
    failed = None
    for pending in started:
        try:
            pending.result()
        except CollectiveError as error:
            failed = failed or error
    return failed


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's optimizer state: hyperparameters, and whatever its steps have left so far.

    Other ranks need no state of their own, so the root alone may have loaded a checkpoint. Nothing is asked of the
    optimizer but ``state_dict`` and ``load_state_dict``. ``model`` is not needed.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> optimizer = torch.optim.Adam(torch.nn.Linear(2, 1).parameters())
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    is_root = process_set.rank() == process_set.index(root_rank)
    state = _broadcast_tree(optimizer.state_dict() if is_root else None, root_rank, device, process_set)
    if is_root:
        return
    optimizer.load_state_dict(state)
    # Loading makes every number as wide as its parameter, and spoils words in lists; the root has neither.
    for index, values in state["state"].items():
        if isinstance(index, int) and index < len(parameters) and isinstance(values, dict):
            parameter = parameters[index]
            if optimizer.state[parameter].keys() == values.keys():
                optimizer.state[parameter] = _placed(values, parameter.device)


def _placed(tree: Any, device: torch.device) -> Any:
    """What belongs to a parameter beside it; what the root kept in host memory stays there."""
    if isinstance(tree, Tensor):
        return tree if tree.is_cpu else tree.to(device)
    if isinstance(tree, dict):
        return {key: _placed(value, device) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_placed(value, device) for value in tree)
    return tree


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves tensors out, and remembers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    """Puts them in again."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _broadcast_tree(tree: Any, root_rank: int, device: torch.device, process_set: ProcessSet) -> Any:
    """An object whose tensors travel by themselves, without being pickled; those of a device arrive on ``device``."""
    tensors: list[Tensor] = []
    head = None
    if process_set.rank() == process_set.index(root_rank):
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(tree)
        tensors = pickler.tensors
        kinds = [(tensor.dtype, tuple(tensor.shape), tensor.is_cpu) for tensor in tensors]
        head = file.getvalue(), kinds
    sent = broadcast_object(head, root_rank, process_set=process_set)
    if head is not None:
        spread_all([(None, tensor) for tensor in tensors], root_rank, process_set)
        return tree
    structure, kinds = sent
    tensors = [torch.empty(shape, dtype=dtype, device="cpu" if is_cpu else device) for dtype, shape, is_cpu in kinds]
    spread_all([(None, tensor) for tensor in tensors], root_rank, process_set)
    return _Unpickler(io.BytesIO(structure), tensors).load()


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on every rank. It is pickled, and may have any size.

    >>> import deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
    {'epoch': 3}
    """
    is_root = process_set.rank() == process_set.index(root_rank)
    failure: Exception | None = None
    payload = torch.empty(0, dtype=torch.uint8)
    # Length, and whether it is a pickle; else it says why there is none.
    head = torch.zeros(2, dtype=torch.int64)
    if is_root:
        try:
            pickled = cloudpickle.dumps(obj)
        except Exception as error:
            failure = error
            pickled = repr(error).encode()
        payload = _bytes(pickled)
        head = torch.tensor([len(pickled), failure is None])
    spread_in_place(head, root_rank, _part(name, "size"), process_set, now=True).result()
    length, whole = head.tolist()
    if not is_root:
        payload = torch.empty(length, dtype=torch.uint8)
    spread_in_place(payload, root_rank, _part(name, "object"), process_set, now=True).result()
    if failure is not None:
        raise failure
    if is_root:
        return obj
    if not whole:
        raise CollectiveError(f"rank {root_rank} could not pickle its object: {bytes(payload.numpy()).decode()}")
    return cloudpickle.loads(payload.numpy())


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that broadcasts an object.

    >>> import deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.broadcast_object_fn()("hello")
    'hello'
    """

    def function(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return function


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """All ranks' objects in the order of ranks, on every rank. They are pickled, and may have any size.

    >>> import deuteron.torch as hvd
    >>> hvd.init()
    >>> hvd.allgather_object("hello")
    ['hello']
    """
    failure: Exception | None = None
    try:
        # The first byte says whether it is a pickle, or why there is none.
        pickled = b"\1" + cloudpickle.dumps(obj)
    except Exception as error:
        failure = error
        pickled = b"\0" + repr(error).encode()
    tensor, lengths = gather("allgather", (_bytes(pickled),), _part(name, "object"), process_set, now=True).result()[0]
    if failure is not None:
        raise failure
    data = memoryview(cast(bytes, tensor.numpy()))
    objects = []
    for rank, length in zip(process_set.ranks, lengths, strict=True):
        part, data = data[:length], data[length:]
        if part[0] == 0:
            raise CollectiveError(f"rank {rank} could not pickle its object: {bytes(part[1:]).decode()}")
        objects.append(cloudpickle.loads(part[1:]))
    return objects
