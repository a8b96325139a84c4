"""``DistributedOptimizer``: the user's own optimizer, with the gradients of all ranks."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import InvalidError, UnavailableError
from deuteron.torch.compression import Compression
from deuteron.torch.gradients import Gradients, OrderError, Rules
from deuteron.torch.ops import Adasum, Average, allreduce
from deuteron.torch.process_sets import ProcessSet, global_process_set

_STATE = "_deuteron"


class _State:
    """What the optimizer knows beyond the user's; one attribute, so that no name of the user's is taken."""

    def __init__(self, gradients: Gradients | None, rules: Rules, original: torch.optim.Optimizer | None) -> None:
        #: Nothing where there is nobody to reduce with.
        self.gradients = gradients
        self.rules = rules
        #: Whom a scheduler watches that was made before.
        self.original = original
        self.passes = 1
        #: Whether ``step`` waits for gradients.
        self.synchronizes = True
        #: Whether ``synchronize`` was called since the last step.
        self.synchronized = False


class DistributedOptimizerBase(torch.optim.Optimizer):
    """What ``DistributedOptimizer`` adds to the user's class. It is never made directly."""

    _deuteron: _State

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As PyTorch's."""
        gradients = self._deuteron.gradients if _STATE in self.__dict__ else None
        # A gradient scaler looks for infinities, and scales, before it steps: by then gradients are those of all ranks,
        # so that all ranks find the same. It gets to them through here.
        if gradients is not None and gradients.is_touched() and self._deuteron.synchronizes:
            reader = sys._getframe(1).f_globals.get("__name__")
            if reader == "torch.amp.grad_scaler":
                self.synchronize()
        found: list[dict[str, Any]] = self.__dict__["param_groups"]
        return found

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes there are before each step."""
        return self._deuteron.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes there are before each step."""
        _check_passes(passes)
        if self._deuteron.gradients is not None:
            self._deuteron.gradients.set_passes(passes)
        self._deuteron.passes = passes

    def synchronize(self) -> None:
        """Waits until every gradient is that of all ranks; ``step`` does it if nobody else has.

        A parameter that has no gradient on this rank takes part with zeros.
        """
        state = self._deuteron
        gradients = _usable(state)
        if gradients is not None:
            gradients.synchronize()
        state.synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step`` leaves gradients as they are: ``synchronize`` was called before."""
        self._deuteron.synchronizes = False
        try:
            yield
        finally:
            self._deuteron.synchronizes = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's. Zeroing instead of dropping zeroes whole buckets at once."""
        gradients = _usable(self._deuteron)
        if gradients is None:
            super().zero_grad(set_to_none)
            return
        if gradients.is_touched():
            raise OrderError(
                "zero_grad() was called after backward() and before step() or synchronize(), while other ranks count "
                "on these gradients"
            )
        self._deuteron.synchronized = False
        if set_to_none:
            super().zero_grad(set_to_none=True)
        else:
            gradients.zero(parameter for group in self.param_groups for parameter in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch's; all ranks add the same."""
        super().add_param_group(param_group)
        if self._deuteron.gradients is not None:
            group = self.param_groups[-1]
            self._deuteron.gradients.add(_default_names(len(self.param_groups) - 1, group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As PyTorch's."""
        gradients = self._deuteron.gradients
        if gradients is not None and not gradients.is_on_its_way():
            gradients.reset()
        super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or what comes out of a pickle, is the user's own optimizer: it may be in another process."""
        base = type(self).__mro__[2]
        plain: object = object.__new__(base)
        plain.__dict__.update(_attributes(self))
        reduced: tuple[Any, ...] = plain.__reduce_ex__(protocol)  # type: ignore[assignment]
        function, arguments, *rest = reduced
        # Pickle insists that an object made by that function is of the class of the one that was asked.
        function = _new if function is copyreg.__newobj__ else function  # type: ignore[attr-defined]
        return function, arguments, *rest


def _new(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def _usable(state: _State) -> Gradients | None:
    if state.gradients is not None:
        state.gradients.check()
    return state.gradients


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All but ours, and but the step that a scheduler has wrapped, which is bound to that very optimizer."""
    return {name: value for name, value in optimizer.__dict__.items() if name not in (_STATE, "step")}


def _before_step(state: _State, optimizer: DistributedOptimizerBase) -> None:
    gradients = _usable(state)
    if gradients is not None:
        if not state.synchronizes:
            if gradients.is_touched():
                raise OrderError("step() was called within skip_synchronize(), but synchronize() was not before it")
        elif not state.synchronized or gradients.is_touched():
            optimizer.synchronize()
    state.synchronized = False
    if state.original is not None:
        # A scheduler that was made for it warns if it was never stepped.
        state.original._opt_called = True  # type: ignore[attr-defined]


def _class_for(base: type[torch.optim.Optimizer]) -> type[DistributedOptimizerBase]:
    """The user's class with ours in front."""

    # It has the signature of the user's own, which gradient scalers look at, and its mark that says that profiling
    # and step hooks are taken care of: the user's own step does that.
    @functools.wraps(base.step)
    def step(
        self: DistributedOptimizerBase, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        state = self._deuteron
        if closure is None:
            _before_step(state, self)
            return base.step(self, None, *args, **kwargs) if args else base.step(self, **kwargs)
        if state.gradients is not None and state.gradients.is_touched():
            self.synchronize()
        if state.original is not None:
            state.original._opt_called = True  # type: ignore[attr-defined]
        try:
            return base.step(self, _of_all_ranks(self, closure), *args, **kwargs)
        finally:
            state.synchronized = False

    return type(base.__name__, (DistributedOptimizerBase, base), {"step": step, "__module__": base.__module__})


def _of_all_ranks(optimizer: DistributedOptimizerBase, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure whose gradients and loss are those of all ranks.

    Optimizers that call it several times decide by the loss how to go on, and all ranks must decide the same.
    """
    state = optimizer._deuteron

    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        if state.gradients is None or not state.synchronizes:
            return loss
        optimizer.synchronize()
        if not isinstance(loss, (Tensor, float, int)):
            return loss
        own = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
        rules = state.rules
        mean = allreduce(own, name="DistributedOptimizer.loss", op=rules.op, process_set=rules.process_set)
        return mean if isinstance(loss, Tensor) else mean.item()

    return evaluate


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, with gradients that are averaged over all ranks during the backward pass.

    All ranks make it alike. What comes back is of the optimizer's own class and shares its parameters and state; it is
    used like the optimizer was. See ``docs/guide/pytorch.md``.

    Args:
        optimizer: Any optimizer of PyTorch, or the user's own.
        named_parameters: Names for the parameters, usually ``model.named_parameters()``.
        compression: Of ``Compression``, or any class with ``compress`` and ``decompress``.
        backward_passes_per_step: Gradients of so many backward passes are added up before they are reduced. They are
            not divided by their number, just as PyTorch does not: divide the loss.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        gradient_predivide_factor: An average divides by it before the sum, and by the rest after it.
        num_groups: Deprecated for ``groups``.
        groups: What is reduced together: a number of groups, or lists of parameters.
        sparse_as_dense: Makes sparse gradients dense. Otherwise they are not available yet.
        process_set: Who takes part.

    >>> import torch, deuteron.torch as hvd
    >>> hvd.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> optimizer.step()
    >>> isinstance(optimizer, torch.optim.SGD)
    True
    """
    if isinstance(optimizer, DistributedOptimizerBase):
        raise InvalidError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidError(f"an optimizer of PyTorch was expected, not {type(optimizer).__name__}")
    if op == Adasum:
        raise UnavailableError("op=Adasum is not available yet: use Average")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise InvalidError("gradient_predivide_factor is for op=Average only")
    _check_passes(backward_passes_per_step)
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: pass groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    chosen = _check_groups(groups, parameters)
    named = _names(optimizer, named_parameters)
    rules = Rules(process_set, compression, op, gradient_predivide_factor, sparse_as_dense)
    gradients = None
    if process_set.included() and process_set.size() > 1:
        gradients = Gradients(rules, backward_passes_per_step)
        gradients.add(named, chosen)
    made = object.__new__(_class_for(type(optimizer)))
    made.__dict__.update(_attributes(optimizer))
    made._deuteron = _State(gradients, rules, optimizer if "step" in optimizer.__dict__ else None)
    made._deuteron.passes = backward_passes_per_step
    if gradients is not None:
        weakref.finalize(made, gradients.detach).atexit = False
    return made


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise InvalidError(f"backward_passes_per_step must be greater than 0, not {passes}")


def _check_groups(groups: Any, parameters: Sequence[Tensor]) -> int | list[list[Tensor]]:
    if groups is None:
        return 0
    if isinstance(groups, int) and groups >= 0:
        return groups
    wanted = "groups is a number of groups, at least 0, or a list of lists of parameters"
    if not isinstance(groups, Sequence):
        raise InvalidError(wanted)
    known, seen, lists = {id(parameter) for parameter in parameters}, set(), []
    for group in groups:
        if isinstance(group, Tensor) or not isinstance(group, Iterable):
            raise InvalidError(wanted)
        members = list(group)
        for parameter in members:
            if not isinstance(parameter, Tensor):
                raise InvalidError(f"{wanted}: {type(parameter).__name__} is no parameter")
            if id(parameter) in seen:
                raise InvalidError("a parameter can be in one of the groups, and once")
            if id(parameter) not in known:
                raise InvalidError("a parameter in groups is not one of the optimizer's")
            seen.add(id(parameter))
        lists.append(members)
    return lists


def _default_names(number: int, group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Those that the optimizer knows, or numbers."""
    names = group.get("param_names") or [f"noname.{number}.{index}" for index in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters in their order, with their names."""
    defaults = [pair for number, group in enumerate(optimizer.param_groups) for pair in _default_names(number, group)]
    if named_parameters is None:
        return defaults
    given = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        raise InvalidError(
            "named_parameters is a sequence of pairs of a name and a parameter, such as model.named_parameters()"
        )
    names = [name for name, _ in given]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InvalidError(f"names in named_parameters must be unique, and these are not: {', '.join(twice)}")
    known = {id(parameter): name for name, parameter in reversed(given)}
    unnamed = [name for name, parameter in defaults if id(parameter) not in known]
    if unnamed:
        raise InvalidError(
            f"named_parameters has no name for {len(unnamed)} of the optimizer's parameters: {', '.join(unnamed)}"
        )
    return [(known[id(parameter)], parameter) for _, parameter in defaults]
