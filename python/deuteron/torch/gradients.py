"""Gradients that lie in buckets of the engine and are reduced while the backward pass still runs.

- GRADIENT-1: from the first step on a gradient on the CPU *is* a part of a bucket (a registered buffer): ``.grad`` is a
  view of it, and the reduction happens in place. A gradient that autograd has made elsewhere, because ``.grad`` was
  ``None``, is copied in once and ``.grad`` points to the bucket again.
- GRADIENT-2: parameters lie in a bucket in the opposite of their order, in which a backward pass makes their gradients
  ready, side by side without gaps. So the engine reduces neighbours as one. Small neighbours are one parcel: one
  operation, which begins when the last of them is ready.
- GRADIENT-3: every parameter takes part in every round, with zeros where a rank has no gradient for it: which
  parameters a rank uses need not be the same on all ranks.
- GRADIENT-4: no backward pass waits for other ranks. Between it and ``synchronize`` gradients are on their way, and
  whoever changes them then is told so; nothing is reduced twice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
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

#: Smaller gradients share an operation, in bytes, until they are so many together.
SMALL, TOGETHER = 64 << 10, 256 << 10


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

    #: Whether the gradient lives there.
    resident = False

    def __init__(self, name: str, parameter: Tensor, rules: Rules) -> None:
        self.name = name
        self.parameter = parameter
        self.rules = rules
        #: Number among all of the optimizer.
        self.index = 0
        #: With what it is reduced.
        self.parcel: Parcel

    def bytes(self) -> int:
        """How many it has to send, if that is known."""
        raise NotImplementedError

    def take(self) -> None:
        """Brings the gradient, or zeros, to where it is reduced."""
        raise NotImplementedError

    def blank(self) -> None:
        """Takes part with zeros, without a gradient."""
        raise NotImplementedError

    def finish(self) -> None:
        """Brings the result, which is there, to where the optimizer finds it."""

    def is_changed(self) -> bool:
        """Whether somebody has changed the gradient since it was taken."""
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


class Parcel:
    """Places that are reduced together, as soon as all of them are ready."""

    def __init__(self, members: list[Place], wanted: bool = False) -> None:
        self.members = members
        #: Whether the user has asked for it.
        self.wanted = wanted
        #: Number among all of the optimizer.
        self.index = 0
        #: How many are not ready, as a list that hooks can change without looking up an attribute.
        self.left = [len(members)]
        #: Those whose gradients are not in the bucket yet.
        self.loose: list[_Resident] = []
        #: What begins the reduction.
        self.starts: list[Callable[[], None]] = []
        #: If it is one place: copies a tensor from an address and begins.
        self.fill: Callable[[int], None]

    def send(self) -> None:
        """Begins the reduction; the gradients are where they are reduced, or loose."""
        if self.loose:
            torch._foreach_copy_(
                [place.part for place in self.loose], [place.dense(place.held) for place in self.loose]
            )
            for place in self.loose:
                place.parameter.grad = place.held = place.part
                place.version = place.part._version
            self.loose.clear()
        for start in self.starts:
            start()

    def reset(self) -> None:
        """Nobody is ready."""
        self.left[0] = len(self.members)
        for place in self.loose:
            place.held = place.part
        self.loose.clear()


class _Slot(Place):
    """A place that is a part of a bucket."""

    def __init__(self, name: str, parameter: Tensor, rules: Rules, wire: torch.dtype) -> None:
        super().__init__(name, parameter, rules)
        self.wire = wire
        #: The part of the bucket, as a tensor like the parameter.
        self.part: Tensor

    def bytes(self) -> int:
        return self.parameter.numel() * self.wire.itemsize

    def lay(self, memory: _core.Memory, offset: int) -> None:
        """Finds its part of the bucket."""
        with torch.no_grad():
            flat = torch.frombuffer(memory, dtype=self.wire, count=self.parameter.numel(), offset=offset)
            shape, strides = self.parameter.shape, self.parameter.stride()
            part = flat.as_strided(shape, strides) if is_dense(shape, strides) else flat.view(shape)
            # Apart from the flat one: a tensor of its own with a version of its own.
            self.part = part.data

    def blank(self) -> None:
        self.part.zero_()


class _Resident(_Slot):
    """The gradient lives here."""

    resident = True
    #: The gradient, in the bucket or not yet, and what it looked like when it was ready.
    held: Tensor
    version = 0

    def lay(self, memory: _core.Memory, offset: int) -> None:
        super().lay(memory, offset)
        self.held = self.part

    def take(self) -> None:
        gradient, part = self.parameter.grad, self.part
        if gradient is not part:
            if gradient is None:
                part.zero_()
            else:
                part.copy_(self.dense(gradient))
            self.parameter.grad = part
        self.version = part._version

    def blank(self) -> None:
        if self.parameter.grad is self.part:
            self.parameter.grad = self.part.clone()
        self.part.zero_()
        self.version = self.part._version

    def is_changed(self) -> bool:
        gradient = self.parameter.grad
        return gradient is not None and (gradient is not self.held or gradient._version != self.version)


class _Apart(Place):
    """The gradient lives elsewhere."""

    taken: tuple[weakref.ref[Tensor], int] | None = None

    def remember(self) -> None:
        """So that a change is seen."""
        gradient = self.parameter.grad
        self.taken = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def is_changed(self) -> bool:
        gradient = self.parameter.grad
        if gradient is None or self.taken is None:
            return False
        taken, version = self.taken
        return gradient is not taken() or gradient._version != version

    def result(self) -> Tensor:
        """Where the result goes."""
        self.taken = None
        gradient = self.parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            gradient = self.parameter.grad = torch.empty_like(self.parameter)
        return gradient


class _Staged(_Apart, _Slot):
    """The gradient is on a device or of another type; here is the form in which it travels."""

    def take(self) -> None:
        gradient = self.parameter.grad
        if gradient is None:
            self.part.zero_()
        else:
            self.part.copy_(self.dense(gradient))
        self.remember()

    def finish(self) -> None:
        self.result().copy_(self.part)


class _Compressed(_Apart):
    """Only the user's own class knows the form in which the gradient travels."""

    def __init__(self, name: str, parameter: Tensor, rules: Rules) -> None:
        super().__init__(name, parameter, rules)
        self.handle = 0
        self.context: Any = None

    def bytes(self) -> int:
        return self.parameter.numel() * self.parameter.dtype.itemsize

    def take(self) -> None:
        gradient = self.parameter.grad
        self.parameter.grad = torch.zeros_like(self.parameter) if gradient is None else self.dense(gradient)
        self.remember()

    def blank(self) -> None:
        self.take()

    def send(self) -> None:
        """Compresses the gradient and begins its reduction."""
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
        self.parcels: list[Parcel] = []
        #: Parameters that need no gradient now; they get a place as soon as they do.
        self.frozen: list[tuple[str, Tensor]] = []
        self.slots: list[_core.Slots] = []
        #: Buckets that gradients live in, and the gradients in them.
        self.flats: list[Tensor] = []
        self.parts: set[int] = set()
        #: Places whose results have to be brought back.
        self.apart: list[Place] = []
        #: How many backward passes each place has seen in this round.
        self.seen: list[int] = []
        #: For each parcel whether its reduction has begun.
        self.sent = bytearray()
        self.handles: list[RemovableHandle] = []
        self.detached = False

    # Making places

    def add(self, named: Sequence[tuple[str, Tensor]], groups: int | Sequence[Sequence[Tensor]] = 0) -> None:
        """Gives parameters their places and hooks. All ranks call it alike."""
        self.frozen += [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad and parameter.numel() > 0]
        places = [self._make(name, parameter) for name, parameter in reversed(named)]
        parcels = make_parcels(places, groups)
        number = self._agree(places, parcels)
        if number > 0:
            # Another optimizer may have parameters of the same names.
            for place in places:
                place.name += f"#{number}"
        buckets: dict[tuple[torch.dtype, bool], list[tuple[Parcel, list[_Slot]]]] = {}
        for parcel in parcels:
            runs: dict[tuple[torch.dtype, bool], list[_Slot]] = {}
            for place in parcel.members:
                place.parcel = parcel
                if isinstance(place, _Slot):
                    runs.setdefault((place.wire, place.resident), []).append(place)
                elif isinstance(place, _Compressed):
                    parcel.starts.append(place.send)
            for kind, run in runs.items():
                buckets.setdefault(kind, []).append((parcel, run))
        for (wire, resident), content in buckets.items():
            self._lay(wire, content, resident)
        for parcel in parcels:
            parcel.index = len(self.parcels)
            self.parcels.append(parcel)
            self.sent.append(0)
            for place in parcel.members:
                place.index = len(self.places)
                self.places.append(place)
                self.seen.append(0)
                self._hook(place)
        self.apart += [place for place in places if not place.resident]
        self.parts |= {id(place.part) for place in places if isinstance(place, _Resident)}

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

    def _lay(self, wire: torch.dtype, content: Sequence[tuple[Parcel, list[_Slot]]], resident: bool) -> None:
        """Puts places side by side into a new bucket; what is of one parcel is one slot of it."""
        code = CODES[wire.to_real() if wire.is_complex else wire]
        offset, slots, places = 0, [], []
        for _, run in content:
            start = offset
            for place in run:
                places.append((place, offset))
                offset += place.bytes()
            more = f" and {len(run) - 1} more" if len(run) > 1 else ""
            count = (offset - start) // wire.itemsize
            shape = [count] if more else [*run[0].parameter.shape]
            slots.append((f"allreduce.{run[0].name}{more}", start, code, [*shape, *([2] if wire.is_complex else [])]))
        memory = self.engine.bucket(offset)
        made = _core.Slots(self.engine, memory, slots, self.rules.op, *self.rules.scales)
        for place, start in places:
            place.lay(memory, start)
        for slot, (parcel, _) in enumerate(content):
            parcel.starts.append(partial(made.submit, slot))
            if len(parcel.members) == 1:
                parcel.fill = partial(made.fill, slot)
        self.slots.append(made)
        if resident:
            self.flats.append(torch.frombuffer(memory, dtype=wire))

    def _agree(self, places: Sequence[Place], parcels: Sequence[Parcel]) -> int:
        """Compares what all ranks are about to lay out, and returns a number for it that is new on all of them."""
        global _layouts
        group = {
            id(place): number for number, parcel in enumerate(parcels) if parcel.wanted for place in parcel.members
        }
        lines = [self.rules.words(), *(_line(place, group.get(id(place))) for place in reversed(places))]
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
        hook = self._any_hook(place)
        if isinstance(place, _Resident) and self.passes == 1:
            hook = self._hook_alone(place) if len(place.parcel.members) == 1 else self._hook_together(place)
        owner = _owners.get(place.parameter)
        earlier = owner() if owner else None
        if earlier is not None and earlier is not self:
            earlier.detach()
        _owners[place.parameter] = weakref.ref(self)
        handle = place.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.handles.append(handle)

    # These run once for each parameter and step, so they look nothing up.

    def _hook_alone(self, place: _Resident) -> Callable[[Tensor], None]:
        """For a parcel of its own."""
        seen, sent, index, parcel, part = self.seen, self.sent, place.index, place.parcel.index, place.part
        (submit,), fill, dtype, strided = place.parcel.starts, place.parcel.fill, part.dtype, torch.strided
        contiguous, strides, simple = part.is_contiguous(), part.stride(), not part.is_complex()

        def hook(parameter: Tensor) -> None:
            if seen[index]:
                raise _once_more(place)
            gradient = parameter.grad
            place.version = part._version
            if gradient is part:
                seen[index] = sent[parcel] = 1
                submit()
            elif (
                simple
                and gradient is not None
                and gradient.dtype is dtype
                and gradient.layout is strided
                and (gradient.is_contiguous() if contiguous else gradient.stride() == strides)
                and not gradient.requires_grad
            ):
                seen[index] = sent[parcel] = 1
                fill(gradient.data_ptr())
                parameter.grad = part
            else:
                place.take()
                seen[index] = sent[parcel] = 1
                submit()

        return hook

    def _hook_together(self, place: _Resident) -> Callable[[Tensor], None]:
        """For one of several in a parcel."""
        seen, sent, index, parcel, part = self.seen, self.sent, place.index, place.parcel.index, place.part
        left, loose, send = place.parcel.left, place.parcel.loose, place.parcel.send

        def hook(parameter: Tensor) -> None:
            if seen[index]:
                raise _once_more(place)
            seen[index] = 1
            gradient = parameter.grad
            if gradient is part:
                place.version = part._version
            elif gradient is not None:
                place.held, place.version = gradient, gradient._version
                loose.append(place)
            else:
                place.take()
            left[0] -= 1
            if not left[0]:
                send()
                sent[parcel] = 1

        return hook

    def _any_hook(self, place: Place) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self.seen[place.index] >= self.passes:
                raise _once_more(place)
            self.seen[place.index] += 1
            last = self.seen[place.index] == self.passes
            if last or place.resident:
                place.take()
            if last:
                parcel = place.parcel
                parcel.left[0] -= 1
                if not parcel.left[0]:
                    parcel.send()
                    self.sent[parcel.index] = 1

        return hook

    def set_passes(self, passes: int) -> None:
        """From now on so many backward passes make one round."""
        if self.is_on_its_way():
            raise OrderError("set_backward_passes_per_step() was called after backward() and before step()")
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

    def _parcels(self, sent: int) -> Iterable[Parcel]:
        """Those whose reduction has begun, or has not."""
        at = -1
        while (at := self.sent.find(sent, at + 1)) >= 0:
            yield self.parcels[at]

    def _complete(self, parcel: Parcel) -> None:
        """Sends a parcel with what there is, and zeros (GRADIENT-3)."""
        for place in parcel.members:
            if self.seen[place.index] < self.passes:
                if place.parameter.requires_grad:
                    place.take()
                else:
                    place.blank()
        self.sent[parcel.index] = 1
        parcel.send()

    def is_on_its_way(self) -> bool:
        """Whether the engine works on gradients."""
        return 1 in self.sent

    def is_touched(self) -> bool:
        """Whether a backward pass has been here since the last round."""
        return any(self.seen)

    def synchronize(self) -> None:
        """Ends the round: afterwards every gradient is that of all ranks."""
        self.check()
        if self.frozen:
            self._thaw()
        seen, passes = self.seen, self.passes
        for place in self.places:
            if seen[place.index] == passes and place.is_changed():
                raise OrderError(
                    f"the gradient of {place.name!r} was changed after backward(), before it was that of all ranks: "
                    "call synchronize() before clipping, unscaling or whatever else changes gradients, and step() "
                    "within skip_synchronize()"
                )
        for parcel in self._parcels(0):
            # If all of it is frozen no rank has a gradient for it.
            if parcel.left[0] < len(parcel.members) or any(place.parameter.requires_grad for place in parcel.members):
                self._complete(parcel)
        for slots in self.slots:
            slots.wait()
        for place in self.apart:
            if self.sent[place.parcel.index]:
                place.finish()
        self.reset()

    def check(self) -> None:
        """Refuses to go on where nothing would come of it."""
        if self.detached:
            raise InvalidError("another DistributedOptimizer has taken over parameters of this one: use that one")
        if self.rules.process_set.engine() is not self.engine:
            raise InvalidError("this DistributedOptimizer was made before the last init(): make it anew")

    def _thaw(self) -> None:
        """Gives places to parameters that were frozen and need gradients now."""
        thawed = [(name, parameter) for name, parameter in self.frozen if parameter.requires_grad]
        if thawed:
            self.frozen = [(name, parameter) for name, parameter in self.frozen if not parameter.requires_grad]
            self.add(thawed)

    def reset(self) -> None:
        """The next round begins."""
        self.sent[:] = bytes(len(self.sent))
        self.seen[:] = itertools.repeat(0, len(self.seen))
        for parcel in self.parcels:
            parcel.reset()

    def zero(self, parameters: Iterable[Tensor]) -> None:
        """Zeroes the gradients of all these, whole buckets at once."""
        for flat in self.flats:
            flat.zero_()
        parts = self.parts
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or id(gradient) in parts:
                continue
            if gradient.grad_fn is not None:
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()


def _once_more(place: Place) -> OrderError:
    return OrderError(
        f"the gradient of {place.name!r} was computed more than backward_passes_per_step times before step(): increase "
        "backward_passes_per_step to accumulate gradients locally"
    )


def _line(place: Place, group: int | None) -> str:
    """What ranks compare of a place."""
    parameter = place.parameter
    dtype = str(parameter.dtype).removeprefix("torch.")
    order = "" if parameter.is_contiguous() else f", strides {list(parameter.stride())}"
    grouped = "" if group is None else f", group {group}"
    return f"{place.name!r} ({dtype}, {list(parameter.shape)}{order}{grouped})"


def make_parcels(places: Sequence[Place], groups: int | Sequence[Sequence[Tensor]]) -> list[Parcel]:
    """What is reduced together, in the order in which it becomes ready: what the user wants, and small neighbours."""
    if not isinstance(groups, int):
        of = {id(parameter): number for number, group in enumerate(groups) for parameter in group}
        wanted: dict[int, list[Place]] = {}
        for place in places:
            if id(place.parameter) in of:
                wanted.setdefault(of[id(place.parameter)], []).append(place)
        free = [place for place in places if id(place.parameter) not in of]
        return [*(Parcel(members, wanted=True) for members in wanted.values()), *_with_neighbours(free)]
    if groups > 0:
        size, rest = divmod(len(places), groups)
        ends = [number * size + min(number, rest) for number in range(groups + 1)]
        return [Parcel(list(places[start:end]), wanted=True) for start, end in itertools.pairwise(ends) if start < end]
    return _with_neighbours(places)


def _with_neighbours(places: Sequence[Place]) -> list[Parcel]:
    """Small ones together, as long as nothing large has to wait for them."""
    parcels: list[Parcel] = []
    open_ones: dict[tuple[object, ...], list[Place]] = {}
    for place in places:
        if place.bytes() >= SMALL:
            parcels.append(Parcel([place]))
            between = place.bytes()
        else:
            between = 0
            kind = (type(place), getattr(place, "wire", None))
            members = open_ones.setdefault(kind, [])
            members.append(place)
            if sum(member.bytes() for member in members) >= TOGETHER:
                parcels.append(Parcel(open_ones.pop(kind)))
        if between >= TOGETHER:
            parcels += map(Parcel, open_ones.values())
            open_ones.clear()
    return parcels + list(map(Parcel, open_ones.values()))
