"""What each task of ``deuteron.run`` does: fetches the function, calls it, and sends back what it returns."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import io
import os
import pickle
import stat
import sys
import threading
import time
import traceback
from importlib.machinery import ModuleSpec
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, NoReturn, TypedDict

from deuteron import _context, _core
from deuteron.errors import CollectiveError, MismatchError, TimedOutError

#: How long a task whose operation failed because of another one lets that one be told first.
_PRECEDENCE = 1.0


class Setup(TypedDict):
    """What makes a task look like its driver; it comes before the function, which may need it to be loaded."""

    path: list[str]
    argv: list[str]
    main_file: str | None
    main_name: str | None
    show_failures: bool
    #: Whether the driver is on another machine, whose folders may not be here.
    elsewhere: bool


def main() -> int:
    """Returns the exit status of the task."""
    # Without a standard error there is nowhere to tell of a crash.
    with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):
        faulthandler.enable()
    task = _context.task()
    stream = io.BytesIO(task.payload())
    setup: Setup = pickle.load(stream)
    if setup["elsewhere"]:
        sys.path += [entry for entry in setup["path"] if entry not in sys.path and os.path.isdir(entry)]
    else:
        sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    main_module = _main_module(setup)
    try:
        function, args, kwargs = pickle.load(stream)
    except BaseException as error:
        error.add_note("This is where a task loads the function and its arguments: what they need must be there too.")
        return _fail(task, setup, error)
    stream.close()
    _share_globals(main_module, function)
    try:
        result = function(*args, **kwargs)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            result = None
        else:
            return _fail(task, setup, error, _exit_status(error))
    except BaseException as error:
        return _fail(task, setup, error)
    try:
        import cloudpickle  # type: ignore[import-untyped]

        message = cloudpickle.dumps(result)
    except BaseException as error:
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        error.add_note(f"The function has returned; its result, a {kind}, cannot be pickled and sent to the driver.")
        return _fail(task, setup, error)
    task.set_result(message)
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process as Python does, but does not take modules apart: with PyTorch's that takes half a second.

    Threads are waited for, exit functions run, and what was written to files that are still open is in them.
    """
    import ctypes

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _context.forget()
    _close_files()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            # Python's own word for it.
            status = status or 120
    # What libraries in C have printed.
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def _close_files() -> None:
    """Only regular files: others may keep whoever closes them waiting."""
    base = io.IOBase.__mro__[1]
    # By type: what stands for another object may do anything when it is asked what it is.
    streams: list[Any] = [thing for thing in gc.get_objects() if issubclass(type(thing), base)]
    own = (io.BufferedWriter, io.BufferedRandom)
    # Who writes through another comes first.
    streams.sort(key=lambda stream: 2 if type(stream) in own else 0 if isinstance(stream, io.TextIOBase) else 1)
    for stream in streams:
        with contextlib.suppress(Exception):
            if isinstance(stream, io.RawIOBase) or stream.closed or not stream.writable():
                continue
            descriptor = stream.fileno()
            if descriptor > 2 and stat.S_ISREG(os.fstat(descriptor).st_mode):
                stream.close()


def _main_module(setup: Setup) -> ModuleType:
    """Stands for the driver's own main module: where ``multiprocessing`` starts children from, and where classes that
    were made there are looked for when something is pickled.
    """
    module = ModuleType("__main__")
    module.__spec__ = ModuleSpec(setup["main_name"], None) if setup["main_name"] else None
    if setup["main_file"] and (not setup["elsewhere"] or os.path.isfile(setup["main_file"])):
        module.__file__ = setup["main_file"]
    sys.modules["__main__"] = module
    return module


def _share_globals(main_module: ModuleType, function: object) -> None:
    """Makes what the function uses of the driver's main module be found in this one's."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    if isinstance(function, FunctionType) and function.__module__ == "__main__":
        known = vars(main_module)
        names = {name: value for name, value in function.__globals__.items() if name not in known}
        known.update(names)
        known.setdefault(function.__name__, function)


def _exit_status(error: SystemExit) -> int:
    if isinstance(error.code, int):
        return error.code & 0xFF or 1
    print(error.code, file=sys.stderr)
    return 1


def _fail(task: _core.Task, setup: Setup, error: BaseException, status: int = 1) -> int:
    """Tells why this task fails."""
    text = _describe(error)
    if setup["show_failures"]:
        print(text, file=sys.stderr, flush=True)
    if _may_follow(error):
        # The gang is being ended for what the other task did; only if it is not, this is the failure to tell.
        time.sleep(_PRECEDENCE)
    task.set_failure(text)
    return status


def _may_follow(error: BaseException | None) -> bool:
    """Whether another task's failure may be behind it."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CollectiveError) and not isinstance(error, (MismatchError, TimedOutError)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _describe(error: BaseException) -> str:
    """The traceback, from the user's function on."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    except Exception as other:
        kind = type(error)
        return f"{kind.__module__}.{kind.__qualname__}, whose traceback cannot be shown: {type(other).__name__}"
