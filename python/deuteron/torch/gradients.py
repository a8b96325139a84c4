"""Gradients that lie in buckets of the engine and are reduced while the backward pass still runs.

- GRADIENT-1: from the first step on a gradient on the CPU *is* a part of a bucket (a registered buffer): ``.grad`` is a
  view of it, and the reduction happens in place. A gradient that autograd has made elsewhere, because ``.grad`` was
  ``None``, is copied in once and ``.grad`` points to the bucket again.
- GRADIENT-2: parameters lie in a bucket in the opposite of their order, in which a backward pass makes their gradients
  ready, side by side without gaps. So the engine reduces neighbours as one.
- GRADIENT-3: every parameter takes part in every round, with zeros where a rank has no gradient for it: which
  parameters a rank uses need not be the same on all ranks.
- GRADIENT-4: when a backward pass ends and every parameter has taken part, the reductions are waited for. What reads or
  changes gradients after that, such as clipping or a gradient scaler, has those of all ranks. Otherwise they are on
  their way until ``synchronize``, and a change in between is an error.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from deuteron import _core
from deuteron.errors import InvalidError, MismatchError, UnavailableError
from deuteron.torch.compression import Compressor, wire_type
from deuteron.torch.handles import synchronize
from deuteron.torch.ops import Average, allreduce_async_
from deuteron.torch.process_sets import ProcessSet
from deuteron.torch.tensors import CODES, refuse


class OrderError(InvalidError, AssertionError):
    """Backward, synchronize, zero_grad and step were called in an order that means nothing."""


@dataclass(frozen=True)
class Rules:
    """How gradients are reduced; the same on all ranks."""

    process_set: ProcessSet
    compression: Compressor
    op: int
    predivide: float
    sparse_as_dense: bool

    @property
    def scales(self) -> tuple[float, float]:
        """Before and after the reduction."""
        return (1 / self.predivide, self.predivide) if self.op == Average else (1.0, 1.0)

    def words(self) -> str:
        """For the comparison among ranks."""
        chosen = getattr(self.compression, "__name__", type(self.compression).__name__)
        return (
            f"op={self.op}, compression={chosen}, gradient_predivide_factor={self.predivide}, "
            f"sparse_as_dense={self.sparse_as_dense}"
        )


class Place:
    """Where the gradient of one parameter is reduced."""

    #: The view that ``.grad`` is, if gradients lie where they are reduced.
    view: Tensor | None = None

    def __init__(self, name: str, parameter: Tensor, rules: Rules) -> None:
        self.name = name
        self.parameter = parameter
        self.rules = rules
        #: Number among all of the optimizer.
        self.index = 0
        #: Passes since the last round.
        self.passes = 0
        #: What is reduced together with it.
        self.group: Group | None = None

    def take(self) -> None:
        """Brings the gradient, or zeros, to where it is reduced."""
        raise NotImplementedError

    def send(self) -> None:
        """Begins the reduction."""
        raise NotImplementedError

    def finish(self) -> None:
        """Brings the result, which is there, to where the optimizer finds it."""

    def is_kept(self) -> bool:
        """Whether ``.grad`` is still what the last round has made."""
        raise NotImplementedError

    def dense(self, gradient: Tensor) -> Tensor:
        """The gradient, if it can be reduced."""
        if gradient.requires_grad:
            raise InvalidError(
                f"the gradient of {self.name!r} has a graph of its own (create_graph=True): it cannot be reduced"
            )
        if gradient.layout is torch.strided:
            return gradient
        if not self.rules.sparse_as_dense:
            raise UnavailableError(
                f"the gradient of {self.name!r} is sparse, and sparse reductions are not available yet: pass "
                "sparse_as_dense=True to DistributedOptimizer"
            )
        return gradient.to_dense()


@dataclass
class Group:
    """Places that are reduced together."""

    members: list[Place] = field(default_factory=list)
    #: How many of them are ready.
    ready: int = 0


class _Slot(Place):
    """A place that is a part of a bucket."""

    def __init__(self, name: str, parameter: Tensor, rules: Rules, wire: torch.dtype) -> None:
        super().__init__(name, parameter, rules)
        self.wire = wire
        self.slots: _core.Slots
        self.slot = 0
        #: The part of the bucket, as a tensor like the parameter.
        self.part: Tensor

    def lay(self, memory: _core.Memory, offset: int) -> None:
        """Finds its part of the bucket."""
        with torch.no_grad():
            flat = torch.frombuffer(memory, dtype=self.wire, count=self.parameter.numel(), offset=offset)
            shape, strides = self.parameter.shape, self.parameter.stride()
            part = flat.as_strided(shape, strides) if is_dense(shape, strides) else flat.view(shape)
            # Apart from the flat one: a tensor of its own with a version of its own.
            self.part = part.data

    def send(self) -> None:
        self.slots.submit(self.slot)


class _Resident(_Slot):
    """The gradient lives here."""

    def lay(self, memory: _core.Memory, offset: int) -> None:
        super().lay(memory, offset)
        self.view = self.part

    def take(self) -> None:
        gradient, part = self.parameter.grad, self.part
        if gradient is part:
            return
        if gradient is None:
            part.zero_()
        else:
            part.copy_(self.dense(gradient))
        self.parameter.grad = part

    def is_kept(self) -> bool:
        return self.parameter.grad is self.part


class _Apart(Place):
    """The gradient lives elsewhere."""

    last: weakref.ref[Tensor] | None = None

    def is_kept(self) -> bool:
        return self.last is not None and self.parameter.grad is self.last()

    def result(self) -> Tensor:
        """Where the result goes."""
        gradient = self.parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            gradient = self.parameter.grad = torch.empty_like(self.parameter)
        self.last = weakref.ref(gradient)
        return gradient


class _Staged(_Apart, _Slot):
    """The gradient is on a device or of another type; here is the form in which it travels."""

    def take(self) -> None:
        gradient = self.parameter.grad
        if gradient is None:
            self.part.zero_()
        else:
            self.part.copy_(self.dense(gradient))

    def finish(self) -> None:
        self.result().copy_(self.part)


class _Compressed(_Apart):
    """Only the user's own class knows the form in which the gradient travels."""

    def __init__(self, name: str, parameter: Tensor, rules: Rules) -> None:
        super().__init__(name, parameter, rules)
        self.handle = 0
        self.context: Any = None

    def take(self) -> None:
        gradient = self.parameter.grad
        self.parameter.grad = torch.zeros_like(self.parameter) if gradient is None else self.dense(gradient)

    def send(self) -> None:
        rules, (prescale, postscale) = self.rules, self.rules.scales
        assert self.parameter.grad is not None
        tensor, self.context = rules.compression.compress(self.parameter.grad)
        self.handle = allreduce_async_(
            tensor,
            name=self.name,
            op=rules.op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=rules.process_set,
        )

    def finish(self) -> None:
        result = self.rules.compression.decompress(synchronize(self.handle), self.context)
        self.context = None
        gradient = self.result()
        if result is not gradient:
            gradient.copy_(result)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in whatever order of its dimensions.

    >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (6, 2))
    (True, False)
    """
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


#: Who reduces a parameter's gradient: the last optimizer that it was given to.
_owners: MutableMapping[Tensor, weakref.ref[Gradients]] = WeakIdKeyDictionary()
#: Given up while the engine worked on them, so their memory stays.
_abandoned: list[Gradients] = []
#: How many times this process has laid out gradients.
_layouts = 0


class Gradients:
    """The gradients of one optimizer."""

    def __init__(self, rules: Rules, passes: int) -> None:
        self.rules = rules
        self.engine = rules.process_set.engine()
        self.passes = passes
        self.places: list[Place] = []
        #: Parameters that need no gradient now; they get a place as soon as they do.
        self.frozen: list[tuple[str, Tensor]] = []
        self.slots: list[_core.Slots] = []
        #: Buckets that gradients live in.
        self.flats: list[Tensor] = []
        #: Places whose results have to be brought back.
        self.apart: list[Place] = []
        #: For each place whether its reduction has begun.
        self.sent = bytearray()
        #: Whether all that has begun is over.
        self.over = False
        #: Whether a backward pass runs, as a list that hooks can look at without looking up an attribute.
        self.running: list[bool] = []
        #: What gradients on their way looked like when the backward pass ended.
        self.versions: dict[int, tuple[int, int]] = {}
        self.handles: list[RemovableHandle] = []
        self.detached = False

    # Making places

    def add(self, named: Sequence[tuple[str, Tensor]], groups: int | Sequence[Sequence[Tensor]] = 0) -> None:
        """Gives parameters their places and hooks. All ranks call it alike."""
        self.frozen += [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad and parameter.numel() > 0]
        places = [self._make(name, parameter) for name, parameter in reversed(named)]
        places = _in_groups(places, groups)
        number = self._agree(places)
        if number > 0:
            # Another optimizer may have parameters of the same names.
            for place in places:
                place.name += f"#{number}"
        buckets: dict[tuple[torch.dtype, type[Place]], list[_Slot]] = {}
        for place in places:
            if isinstance(place, _Slot):
                buckets.setdefault((place.wire, type(place)), []).append(place)
        for (wire, kind), members in buckets.items():
            self._lay(wire, members, resident=kind is _Resident)
        self.apart += [place for place in places if not isinstance(place, _Resident)]
        for place in places:
            place.index = len(self.places)
            self.places.append(place)
            self.sent.append(0)
            self._hook(place)

    def _make(self, name: str, parameter: Tensor) -> Place:
        dtype = parameter.dtype
        wire = wire_type(self.rules.compression, dtype)
        if wire is None:
            return _Compressed(name, parameter, self.rules)
        if wire not in CODES and not wire.is_complex:
            raise InvalidError(f"parameter {name!r} is of {dtype}: its gradient cannot be reduced")
        refuse(wire, self.rules.op)
        here = wire is dtype and parameter.device.type == "cpu"
        return (_Resident if here else _Staged)(name, parameter, self.rules, wire)

    def _lay(self, wire: torch.dtype, places: Sequence[_Slot], resident: bool) -> None:
        """Puts places side by side into a new bucket."""
        real = wire.to_real() if wire.is_complex else wire
        code, offset, slots = CODES[real], 0, []
        for place in places:
            shape = [*place.parameter.shape, *([2] if wire.is_complex else [])]
            slots.append((f"allreduce.{place.name}", offset, code, shape))
            offset += place.parameter.numel() * wire.itemsize
        memory = self.engine.bucket(offset)
        made = _core.Slots(self.engine, memory, slots, self.rules.op, *self.rules.scales)
        for index, (place, slot) in enumerate(zip(places, slots, strict=True)):
            place.slots, place.slot = made, index
            place.lay(memory, slot[1])
        self.slots.append(made)
        if resident:
            self.flats.append(torch.frombuffer(memory, dtype=wire))

    def _agree(self, places: Sequence[Place]) -> int:
        """Compares what all ranks are about to lay out, and returns a number for it that is new on all of them."""
        global _layouts
        lines = [self.rules.words(), *map(_line, reversed(places))]
        text = "\n".join(lines).encode()
        own = hashlib.sha256(text).digest() + _layouts.to_bytes(8, "little")
        gathered = self._gather(own)
        _layouts = 1 + max(int.from_bytes(each[32:], "little") for each in gathered)
        if all(each[:32] == own[:32] for each in gathered):
            return _layouts - 1
        ranks = self.rules.process_set.ranks
        first, *others = (json.loads(each) for each in self._gather(json.dumps(lines).encode()))
        for rank, other in zip(ranks[1:], others, strict=True):
            pairs = list(zip(first, other, strict=False))
            at = next((at for at, (one, another) in enumerate(pairs) if one != another), len(pairs))
            if at == len(pairs) and len(first) == len(other):
                continue
            one, another = (lines[at] if at < len(lines) else "nothing more" for lines in (first, other))
            raise MismatchError(
                f"DistributedOptimizer is not the same on all ranks: rank {ranks[0]} has {one}, where rank {rank} has "
                f"{another}; parameters must have the same names, types, shapes and order everywhere"
            )
        raise MismatchError("DistributedOptimizer is not the same on all ranks")

    def _gather(self, own: bytes) -> list[bytes]:
        """What each rank has given."""
        tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        operation = self.engine.all_gather("DistributedOptimizer", [(tensor.data_ptr(), 1, [len(own)])])
        (memory,) = operation.wait()
        data, at, parts = bytes(torch.frombuffer(memory, dtype=torch.uint8).tolist()), 0, []
        for count in memory.counts:
            parts.append(data[at : at + count])
            at += count
        return parts

    # Hooks

    def _hook(self, place: Place) -> None:
        if isinstance(place, _Resident) and self.passes == 1 and place.group is None:
            hook = self._quick_hook(place)
        else:
            hook = self._any_hook(place)
        owner = _owners.get(place.parameter)
        earlier = owner() if owner else None
        if earlier is not None and earlier is not self:
            earlier.detach()
        _owners[place.parameter] = weakref.ref(self)
        handle = place.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.handles.append(handle)

    def _quick_hook(self, place: _Resident) -> Callable[[Tensor], None]:
        """For the common case. It runs once for each parameter and step, so it looks nothing up."""
        sent, running, begin, again = self.sent, self.running, self._begin, self._again
        index, slot, part = place.index, place.slot, place.part
        submit, fill, dtype, strided = place.slots.submit, place.slots.fill, part.dtype, torch.strided
        contiguous, strides, simple = part.is_contiguous(), part.stride(), not part.is_complex()

        def hook(parameter: Tensor) -> None:
            if sent[index]:
                again(place)
            if not running:
                begin()
            gradient = parameter.grad
            if gradient is part:
                sent[index] = 1
                submit(slot)
            elif (
                simple
                and gradient is not None
                and gradient.dtype is dtype
                and gradient.layout is strided
                and (gradient.is_contiguous() if contiguous else gradient.stride() == strides)
                and not gradient.requires_grad
            ):
                sent[index] = 1
                fill(slot, gradient.data_ptr())
                parameter.grad = part
            else:
                place.take()
                sent[index] = 1
                submit(slot)

        return hook

    def _any_hook(self, place: Place) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if place.passes >= self.passes:
                self._again(place)
            if not self.running:
                self._begin()
            place.passes += 1
            last = place.passes == self.passes
            if last or place.view is not None:
                place.take()
            if last:
                self._ready(place)

        return hook

    def _ready(self, place: Place) -> None:
        group = place.group
        if group is None:
            self.sent[place.index] = 1
            place.send()
            return
        group.ready += 1
        if group.ready == len(group.members):
            for member in group.members:
                self.sent[member.index] = 1
                member.send()

    def set_passes(self, passes: int) -> None:
        """From now on so many backward passes make one round."""
        if self.is_on_its_way():
            raise OrderError("set_backward_passes_per_step() was called between backward() and step()")
        self.reset()
        self.passes = passes
        self._unhook()
        for place in self.places:
            self._hook(place)

    def _unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def detach(self) -> None:
        """Leaves the parameters alone; their gradients stay where they are."""
        self._unhook()
        self.detached = True
        if self.is_on_its_way():
            _abandoned.append(self)

    # Rounds

    def _again(self, place: Place) -> None:
        """A gradient comes once more than expected.

        That is all right if there was no step but the last gradients were dropped, which a scaler that has found
        infinities and ``model.zero_grad()`` do.
        """
        if not self.over or place.is_kept():
            raise OrderError(
                f"the gradient of {place.name!r} was computed more than backward_passes_per_step times before step(): "
                "increase backward_passes_per_step to accumulate gradients locally, or call zero_grad() to drop them"
            )
        self.reset()

    def _begin(self) -> None:
        self.running.append(True)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """A backward pass is over (GRADIENT-4)."""
        self.running.clear()
        if 1 not in self.sent:
            return
        if not any(place.parameter.requires_grad for place in self._places(0)):
            self._wait()
            return
        for place in self._places(1):
            gradient = place.parameter.grad
            if gradient is not None:
                self.versions[place.index] = (id(gradient), gradient._version)

    def _places(self, sent: int) -> Iterable[Place]:
        """Those whose reduction has begun, or has not."""
        at = -1
        while (at := self.sent.find(sent, at + 1)) >= 0:
            yield self.places[at]

    def _wait(self) -> None:
        for slots in self.slots:
            slots.wait()
        for place in self.apart:
            if self.sent[place.index]:
                place.finish()
        self.over = True

    def is_on_its_way(self) -> bool:
        """Whether the engine works on gradients."""
        return 1 in self.sent and not self.over

    def is_touched(self) -> bool:
        """Whether a backward pass has been here since the last round."""
        return 1 in self.sent or any(place.passes for place in self.places)

    def synchronize(self) -> None:
        """Ends the round: afterwards every gradient is that of all ranks."""
        if self.frozen:
            self._thaw()
        if not self.over:
            self._check_versions()
        for place in self._places(0):
            ready = place.group is not None and place.passes == self.passes
            if not ready:
                # Frozen since, so no rank has a gradient for it.
                if not place.parameter.requires_grad:
                    continue
                place.take()
            self.over = False
            self.sent[place.index] = 1
            place.send()
        if not self.over:
            self._wait()
        self.reset()

    def _check_versions(self) -> None:
        for index, seen in self.versions.items():
            gradient = self.places[index].parameter.grad
            if gradient is not None and (id(gradient), gradient._version) != seen:
                raise OrderError(
                    f"the gradient of {self.places[index].name!r} was changed while it was being reduced, because "
                    "other parameters had no gradient in this backward pass: call optimizer.synchronize() before "
                    "clipping, unscaling or whatever else changes gradients"
                )

    def _thaw(self) -> None:
        """Gives places to parameters that were frozen and need gradients now."""
        thawed = [(name, parameter) for name, parameter in self.frozen if parameter.requires_grad]
        if thawed:
            self.frozen = [(name, parameter) for name, parameter in self.frozen if not parameter.requires_grad]
            self.add(thawed)

    def reset(self) -> None:
        """The next round begins."""
        self.sent[:] = bytes(len(self.sent))
        self.over = False
        self.running.clear()
        self.versions.clear()
        if self.passes > 1 or self.apart or any(place.group for place in self.places):
            for place in self.places:
                place.passes = 0
                if place.group is not None:
                    place.group.ready = 0

    def zero(self, parameters: Iterable[Tensor]) -> None:
        """Zeroes the gradients of all these, whole buckets at once."""
        for flat in self.flats:
            flat.zero_()
        views = {id(place.view) for place in self.places}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or id(gradient) in views:
                continue
            if gradient.grad_fn is not None:
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()


def _line(place: Place) -> str:
    """What ranks compare of a place."""
    parameter = place.parameter
    dtype = str(parameter.dtype).removeprefix("torch.")
    order = "" if parameter.is_contiguous() else f", strides {list(parameter.stride())}"
    grouped = "" if place.group is None else f", in a group of {len(place.group.members)}"
    return f"{place.name!r} ({dtype}, {list(parameter.shape)}{order}{grouped})"


def _in_groups(places: list[Place], groups: int | Sequence[Sequence[Tensor]]) -> list[Place]:
    """Marks what is reduced together, and puts it side by side."""
    if isinstance(groups, int):
        if groups == 0:
            return places
        size, rest = divmod(len(places), groups)
        ends = [number * size + min(number, rest) for number in range(groups + 1)]
        wanted = [places[start:end] for start, end in itertools.pairwise(ends)]
    else:
        of = {id(parameter): number for number, group in enumerate(groups) for parameter in group}
        wanted = [[] for _ in groups]
        for place in places:
            if id(place.parameter) in of:
                wanted[of[id(place.parameter)]].append(place)
    for members in wanted:
        group = Group(members)
        for place in members:
            place.group = group
    ordered: dict[int, Place] = {}
    for place in places:
        for member in place.group.members if place.group else [place]:
            ordered.setdefault(id(member), member)
    return list(ordered.values())
