"""``deuteron.run``: a function on processes of this machine."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, TypeVar

from deuteron import _core
from deuteron.errors import Error, InvalidError, TaskFailedError, TimedOutError

if TYPE_CHECKING:
    from deuteron._worker import Setup

Result = TypeVar("Result")

#: How soon Ctrl-C is seen.
_GLANCE = 0.1
#: After it: how long tasks may take to end before the user is told that they are waited for.
_PATIENCE = 0.5

_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_start.py")

#: Settings of ``deuteron run`` that have another name here.
_NAMES = {"tasks": "num_proc", "timestamps": "prefix_output_with_timestamp"}


def run(
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    accelerator: str | None = None,
    per_task: int | None = None,
    memory: int | str | None = None,
    required: bool = True,
    discovery_script: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    restarts: int | None = None,
    start_timeout: float | None = None,
    timeout: float | None = None,
    grace: float | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    output: str | os.PathLike[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    verbose: bool | int = False,
    executable: str | os.PathLike[str] | None = None,
) -> list[Result]:
    """Calls ``fn(*args, **kwargs)`` in ``num_proc`` processes of this machine; returns what each has returned, by rank.

    All start together. What they print appears as it comes, with its rank before it. If one fails all are ended, and
    ``TaskFailedError`` says which it was, where, and with its traceback. Ctrl-C ends all of them. The function may be
    defined anywhere: in a script, at the prompt, in a notebook.

    What is not said here is taken from the settings of ``deuteron run``: from the environment
    (``DEUTERON_RESTARTS``), a file (``DEUTERON_CONFIG``) or their defaults.

    :param num_proc: how many; if not said, one for each core or, if there is an ``accelerator``, as many as these are
        enough for
    :param accelerator: what kind each process gets: ``/gpu``, ``/gpu/h200``
    :param per_task: how many of them each process gets, 1 if not said
    :param memory: the least memory of each, in bytes or as in ``"80GB"``
    :param required: whether there must be enough of them; else processes run without
    :param discovery_script: a program that lists them, as Spark's does, instead of NVML
    :param env: more environment variables for the processes, which inherit this one's
    :param restarts: how often all are started again after one has failed
    :param start_timeout: seconds that they may take to start
    :param timeout: seconds that everything may take; then all are ended and ``TimedOutError`` is raised
    :param grace: seconds between the signal to end (SIGTERM) and the kill
    :param stdout: where their standard output is written to, ``sys.stdout`` if not said
    :param stderr: the same for standard error
    :param output: a folder for what each process prints: ``rank.N/stdout`` and ``rank.N/stderr``
    :param prefix_output_with_timestamp: put the time (UTC) before every line
    :param verbose: say where each process runs; as a number, from Horovod's 2 on
    :param executable: the Python to use, this one if not said
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise InvalidError(
            "a child of multiprocessing has come to deuteron.run while it was importing the main module: put the call "
            'under if __name__ == "__main__":'
        )
    deadline = None if timeout is None else time.monotonic() + _seconds("timeout", timeout)
    words = _settings(
        num_proc, accelerator, per_task, memory, required, discovery_script, env, restarts, start_timeout, grace, output
    )
    if prefix_output_with_timestamp:
        words.append("--timestamps")
    if verbose is True or verbose > 1:
        words.append("--verbose")
    python = _python(executable)
    screen = _Screen(stdout, stderr)
    # A task prints its failure if it may be tried again: the exception tells the last one only.
    payload = _payload(fn, args, kwargs, show_failures=bool(restarts))
    try:
        job = _core.Job(
            words, [*python, "task"], [*python, "agent"], payload, screen.stdout_is_terminal, screen.stderr_width
        )
    except InvalidError as error:
        raise InvalidError(_in_words_of_python(str(error))) from None
    del payload
    return _results(_supervise(job, screen, deadline, timeout))


def _supervise(
    job: _core.Job, screen: _Screen, deadline: float | None, timeout: float | None
) -> Iterable[bytes | None]:
    """Shows what happens until the job is over; whatever interrupts that ends the job first."""
    timed_out = False
    try:
        while (pieces := job.output(_GLANCE)) is not None:
            screen.show(pieces)
            if deadline is not None and not timed_out and time.monotonic() > deadline:
                timed_out = True
                job.end(f"its time limit of {timeout} s")
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        job.end("SIGINT" if interrupted else f"{type(error).__name__} in the process that started it")
        since, told = time.monotonic(), False
        while (pieces := job.output(_GLANCE)) is not None:
            if interrupted:
                screen.show(pieces)
            if interrupted and not told and time.monotonic() - since > _PATIENCE:
                told = True
                job.note("SIGINT: ending the tasks; once more returns without waiting for them")
        raise
    if not timed_out:
        return job.finish()
    try:
        return job.finish()
    except KeyboardInterrupt:
        raise TimedOutError(f"the job did not end within {timeout} s (timeout), and was ended") from None


def _results(messages: Iterable[bytes | None]) -> list[Any]:
    results = []
    for rank, message in enumerate(messages):
        if message is None:
            host = os.uname().nodename
            ending = "ended without returning: os._exit, or another program in its place"
            raise TaskFailedError(f"rank {rank} on {host} {ending}", rank, host, ending=ending)
        try:
            results.append(pickle.loads(message))
        except Exception as error:
            raise Error(
                f"what rank {rank} has returned cannot be unpickled here: {type(error).__name__}: {error}"
            ) from error
    return results


def _payload(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    show_failures: bool,
    elsewhere: bool = False,
) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    if not callable(fn):
        raise InvalidError(f"fn is a {type(fn).__name__}, which cannot be called")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidError(f"args is a {type(args).__name__}: give a tuple, as in args=(1,)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise InvalidError("kwargs: give a dictionary of arguments by name")
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    setup: Setup = {
        "path": [entry for entry in sys.path if isinstance(entry, str) and not (elsewhere and _is_installed(entry))],
        "argv": list(sys.argv),
        "main_file": os.path.abspath(file) if file and os.path.isfile(file) else None,
        "main_name": getattr(getattr(main, "__spec__", None), "name", None),
        "show_failures": show_failures,
        "elsewhere": elsewhere,
    }
    stream = io.BytesIO()
    pickle.dump(setup, stream)
    with _whole_module(cloudpickle, fn):
        try:
            # All in one, so that what they share stays shared.
            cloudpickle.dump((fn, tuple(args), dict(kwargs or {})), stream)
        except Exception as error:
            culprit = next(_unpicklable(cloudpickle.dumps, fn, args, kwargs or {}), "the function with its arguments")
            raise InvalidError(
                f"{culprit} cannot be pickled and sent to the tasks: {type(error).__name__}: {error}"
            ) from error
    return stream.getvalue()


def _is_installed(entry: str) -> bool:
    """Whether a folder of ``sys.path`` belongs to this Python, so that another machine has its own."""
    return os.path.abspath(entry).startswith((sys.prefix + os.sep, sys.base_prefix + os.sep))


@contextlib.contextmanager
def _whole_module(cloudpickle: Any, fn: Callable[..., Any]) -> Iterator[None]:
    """Sends the function's module along if tasks could not import it: one that a test runner or a tool has loaded."""
    function: Any = fn
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    known = module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if module is None or known or module.__name__ == "__main__" or _can_be_imported(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(module: ModuleType) -> bool:
    """Whether another process with the same ``sys.path`` would find it, and not another one of that name."""
    path = None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(name, path) for find in finders if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    return file is None or spec is None or spec.origin is None or os.path.abspath(spec.origin) == os.path.abspath(file)


def _unpicklable(
    dumps: Callable[[Any], bytes], fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    named: list[tuple[str, Any]] = [("fn", fn)]
    named += [(f"args[{index}]", value) for index, value in enumerate(args)]
    named += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    for name, value in named:
        try:
            dumps(value)
        except Exception:
            yield name


def _settings(
    num_proc: int | None,
    accelerator: str | None,
    per_task: int | None,
    memory: int | str | None,
    required: bool,
    discovery_script: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    restarts: int | None,
    start_timeout: float | None,
    grace: float | None,
    output: str | os.PathLike[str] | None,
) -> list[str]:
    """The words of ``deuteron run`` for what was said."""
    words = []
    if num_proc is not None:
        words += ["--tasks", str(_count("num_proc", num_proc, 1))]
    if accelerator is not None:
        words += ["--accelerator", accelerator]
    if per_task is not None:
        words += ["--per-task", str(_count("per_task", per_task, 1))]
    if memory is not None:
        words += ["--memory", memory if isinstance(memory, str) else str(_count("memory", memory, 0))]
    if not required:
        words.append("--optional")
    if discovery_script is not None:
        words += ["--discovery-script", os.fspath(discovery_script)]
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidError(f"env: {name!r}: {value!r}: names and values are texts")
        if not name or "=" in name or "\0" in name + value:
            raise InvalidError(f"env: {name!r} cannot be the name of a variable, or its value holds a zero byte")
        words += ["--env", f"{name}={value}"]
    if restarts is not None:
        words += ["--restarts", str(_count("restarts", restarts, 0))]
    if start_timeout is not None:
        words += ["--start-timeout", f"{_seconds('start_timeout', start_timeout):f}s"]
    if grace is not None:
        words += ["--grace", f"{_seconds('grace', grace):f}s"]
    if output is not None:
        words += ["--output", os.fspath(output)]
    return words


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidError(f"{name}={value!r}: give a whole number")
    if value < least:
        raise InvalidError(f"{name}={value!r}: it must be at least {least}")
    return value


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InvalidError(f"{name}={value!r}: give a number of seconds")
    return float(value)


def _python(executable: str | os.PathLike[str] | None) -> list[str]:
    """What starts a process of this package."""
    program = os.fspath(executable) if executable is not None else sys.executable
    if not program:
        raise InvalidError("Python does not know its own program here: name it with executable=")
    found = shutil.which(program)
    if found is None:
        raise InvalidError(f"executable={program!r}: there is no such program")
    return [os.path.abspath(found), *_interpreter_flags(), "-P", _START]


def _interpreter_flags() -> list[str]:
    """What Python was told on its command line, as ``multiprocessing`` passes it on."""
    flags: Callable[[], list[str]] = getattr(subprocess, "_args_from_interpreter_flags", list)
    return [flag for flag in flags() if flag != "-P"]


def _in_words_of_python(text: str) -> str:
    """An error of the settings with the names that are used here."""

    def name(flag: re.Match[str]) -> str:
        return _NAMES.get(flag[1], flag[1].replace("-", "_"))

    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", name, text)


class _Screen:
    """Where the user looks: streams of this process, which may be those of a notebook."""

    def __init__(self, stdout: IO[Any] | None, stderr: IO[Any] | None) -> None:
        # At the time of the call: a notebook or a test puts its own in their place.
        self._streams = (sys.stdout if stdout is None else stdout, sys.stderr if stderr is None else stderr)
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            if stream is not None and not hasattr(stream, "write"):
                raise InvalidError(f"{name} is a {type(stream).__name__}: give a stream to write to")
        self.stdout_is_terminal = _is_terminal(self._streams[0])
        self.stderr_width = _width(self._streams[1]) if _is_terminal(self._streams[1]) else None

    def show(self, pieces: Iterable[tuple[bool, bytes]]) -> None:
        for is_error, text in pieces:
            stream = self._streams[is_error]
            # Python has none where it was started without.
            if stream is not None:
                _write(stream, text)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _width(stream: IO[Any]) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def _write(stream: IO[Any], text: bytes) -> None:
    if isinstance(stream, (io.RawIOBase, io.BufferedIOBase)):
        stream.write(text)
    else:
        decoded = text.decode(errors="replace")
        try:
            stream.write(decoded)
        except UnicodeEncodeError as error:
            stream.write(decoded.encode(error.encoding, "backslashreplace").decode(error.encoding))
    with contextlib.suppress(AttributeError):
        stream.flush()
