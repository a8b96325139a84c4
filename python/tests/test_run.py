"""``deuteron.run`` with real processes: from scripts, at a prompt, and everything that can go wrong."""

from __future__ import annotations

import functools
import gzip
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deuteron
import pytest
from deuteron.errors import Error, InvalidError, LaunchError, RemoteTraceback, TaskFailedError, TimedOutError
from ranks import devices, until

pytestmark = pytest.mark.timeout(60)

HOST = os.uname().nodename
#: A rank that has been killed is named within a second; this machine may be busy.
SOON = 3.0


class Marked:
    """Processes that inherit a mark from the environment, wherever they go."""

    def __init__(self) -> None:
        self.variable = f"DEUTERON_TEST_MARK={uuid.uuid4()}"

    @property
    def environment(self) -> dict[str, str]:
        name, value = self.variable.split("=")
        return {**os.environ, name: value}

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.variable.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    pass
        return found

    def gone(self, seconds: float = 10) -> None:
        until(lambda: not self.processes(), seconds)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """Nothing of what a test starts is left behind."""
    mark = Marked()
    name, value = mark.variable.split("=")
    monkeypatch.setenv(name, value)
    yield mark
    mark.gone()


class Driver:
    """A script in a process of its own."""

    def __init__(self, folder: Path, source: str, marked: Marked, *words: str, **options: Any) -> None:
        script = folder / "driver.py"
        script.write_text(textwrap.dedent(source))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": marked.environment}
        self.process = subprocess.Popen([sys.executable, str(script), *words], cwd=folder, **{**pipes, **options})

    def line(self, start: str) -> str:
        """Reads on until there is such a line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if start in line:
                return str(line)
        raise AssertionError(f"no line with {start!r}")

    def end(self, seconds: float = 40) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


def script(folder: Path, source: str, marked: Marked, *words: str) -> str:
    """Runs it, and returns what it has printed."""
    status, out, err = Driver(folder, source, marked, *words).end()
    assert status == 0, out + err
    return out


def failure(fn: Callable[..., Any], *args: Any, num_proc: int = 2, **options: Any) -> TaskFailedError:
    with pytest.raises(TaskFailedError) as raised:
        deuteron.run(fn, args, num_proc=num_proc, **options)
    return raised.value


def rank_times(number: int, plus: int = 0) -> int:
    return deuteron.context().rank * number + plus


def test_results_come_by_rank(marked: Marked) -> None:
    assert deuteron.run(rank_times, (10,), {"plus": 1}, num_proc=3) == [1, 11, 21]
    assert deuteron.run(functools.partial(rank_times, plus=2), [5], num_proc=2) == [2, 7]
    assert deuteron.run(lambda: None, num_proc=1) == [None]
    assert deuteron.run(len, ("four",), num_proc=1) == [4]


def test_one_for_each_core(marked: Marked) -> None:
    cores = len(os.sched_getaffinity(0))
    assert deuteron.run(lambda: deuteron.context().size) == [cores] * cores


def test_classes_come_back_as_they_are(marked: Marked) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self) -> Point:
            return Point(self.x + deuteron.context().rank)

    results = deuteron.run(Point(5).moved, num_proc=2)
    assert [type(result) for result in results] == [Point, Point]
    assert [result.x for result in results] == [5, 6]


def test_output_is_live_and_prefixed(marked: Marked, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    go = tmp_path / "go"

    def talk() -> None:
        context = deuteron.context()
        print("first")
        print("warning", file=sys.stderr)
        end = time.monotonic() + 20
        while not go.exists() and time.monotonic() < end:
            time.sleep(0.01)
        print(f"last of {context.size}: é", end="")

    class Live(io.StringIO):
        """Lets the tasks go on once both have said something."""

        def write(self, text: str) -> int:
            written = super().write(text)
            if self.getvalue().count("first") == 2:
                go.touch()
            return written

    out, err = Live(), io.StringIO()
    deuteron.run(talk, num_proc=2, stdout=out, stderr=err)
    assert go.exists()
    lines = out.getvalue().splitlines()
    assert sorted(lines[:2]) == ["[0] first", "[1] first"]
    assert sorted(lines[2:]) == ["[0] last of 2: é", "[1] last of 2: é"]
    assert sorted(err.getvalue().splitlines()) == ["[0] warning", "[1] warning"]
    assert capsys.readouterr() == ("", "")


def test_output_goes_to_the_streams_of_the_moment(marked: Marked, capsys: pytest.CaptureFixture[str]) -> None:
    deuteron.run(print, ("to the notebook",), num_proc=1)
    assert capsys.readouterr() == ("[0] to the notebook\n", "")


def test_bytes_timestamps_files_and_places(marked: Marked, tmp_path: Path) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    options: dict[str, Any] = {"stdout": out, "stderr": err, "prefix_output_with_timestamp": True, "verbose": True}
    deuteron.run(print, ("x",), num_proc=2, output=tmp_path / "logs", **options)
    for line in out.getvalue().decode().splitlines():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[[01]\] x", line)
    assert f"rank 1 is on {HOST}" in err.getvalue().decode()
    assert (tmp_path / "logs/rank.1/stdout").read_text().endswith(" x\n")


def test_much_output_is_whole(marked: Marked) -> None:
    def much() -> None:
        for number in range(20_000):
            print(f"{number:06}" + "x" * 494)

    out = io.StringIO()
    deuteron.run(much, num_proc=2, stdout=out)
    numbers: list[list[int]] = [[], []]
    for line in out.getvalue().splitlines():
        numbers[int(line[1])].append(int(line[4:10]))
    assert numbers == [list(range(20_000))] * 2


def test_a_failure_has_rank_host_and_traceback(marked: Marked, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        context = deuteron.context()
        if context.rank == 1:
            raise ValueError("no such column: é")
        context.barrier()

    start = time.monotonic()
    error = failure(fails, num_proc=3)
    assert time.monotonic() - start < 10
    assert (error.rank, error.host, error.generation, error.ending) == (1, HOST, 0, "exited with status 1")
    assert str(error) == f"rank 1 on {HOST} exited with status 1: ValueError: no such column: é"
    lines = error.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert re.fullmatch(r'  File ".*test_run.py", line \d+, in fails', lines[1])
    assert 'raise ValueError("no such column: é")' in lines[2]
    assert lines[-1] == "ValueError: no such column: é"
    assert isinstance(error.__cause__, RemoteTraceback)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, Error)
    # The exception has it; the terminal need not.
    assert "Traceback" not in capsys.readouterr().err


def test_causes_and_notes_are_told(marked: Marked) -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

        def __reduce__(self) -> Any:
            raise TypeError("nobody pickles this")

    def fails() -> None:
        try:
            dict[str, int]()["missing"]
        except KeyError as error:
            error.add_note("a note")
            raise Odd(1, 2) from error

    told = failure(fails).traceback
    assert "KeyError: 'missing'\na note\n" in told
    assert "The above exception was the direct cause" in told
    assert told.endswith("Odd: 1 and 2")


def test_an_exception_that_cannot_be_shown_is_named(marked: Marked) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("I say nothing")

    def fails() -> None:
        raise Mute

    assert "Mute" in failure(fails).traceback


@pytest.mark.parametrize("code", [3, "out of data", True])
def test_exit_is_a_failure_with_its_status(marked: Marked, code: Any) -> None:
    def leaves() -> None:
        sys.exit(code)

    err = io.StringIO()
    error = failure(leaves, num_proc=1, stderr=err)
    assert error.ending == f"exited with status {code if isinstance(code, int) else 1:d}"
    assert f"SystemExit: {code}" in str(error)
    assert ("out of data" in err.getvalue()) == isinstance(code, str)


def test_exit_without_a_status_is_none(marked: Marked) -> None:
    assert deuteron.run(sys.exit, num_proc=2) == [None, None]


def test_what_python_does_at_exit_is_done(marked: Marked, tmp_path: Path) -> None:
    def work() -> None:
        import atexit
        import ctypes

        open_files = [(tmp_path / "text").open("w"), gzip.open(tmp_path / "packed", "wt")]  # noqa: SIM115
        for file in open_files:
            file.write("written")
        # Somebody has them until the end.
        sys.modules["held"] = open_files  # type: ignore[assignment]
        atexit.register((tmp_path / "atexit").touch)
        threading.Thread(target=lambda: (time.sleep(0.5), (tmp_path / "thread").touch())).start()
        reading, _ = os.pipe()
        threading.Thread(target=os.fdopen(reading).read, daemon=True).start()
        ctypes.CDLL(None).puts(b"from a library")
        print("from Python", end="")

    out = io.StringIO()
    assert deuteron.run(work, num_proc=1, stdout=out) == [None]
    assert "from a library" in out.getvalue() and "from Python" in out.getvalue()
    assert (tmp_path / "text").read_text() == "written"
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"written"
    assert (tmp_path / "atexit").exists() and (tmp_path / "thread").exists()


def test_a_process_that_leaves_without_python(marked: Marked) -> None:
    def leaves(status: int) -> str:
        if deuteron.context().rank == 1:
            print("last words", file=sys.stderr, flush=True)
            os._exit(status)
        return "here"

    error = failure(leaves, 7)
    assert (error.rank, error.ending, error.traceback) == (1, "exited with status 7", "last words")
    assert str(error) == f"rank 1 on {HOST} exited with status 7"
    error = failure(leaves, 0)
    assert (error.rank, error.host) == (1, HOST)
    assert "ended without returning" in str(error)


def test_a_crash_shows_where(marked: Marked) -> None:
    def crashes() -> None:
        import faulthandler

        assert faulthandler.is_enabled()
        os.kill(os.getpid(), signal.SIGSEGV)

    error = failure(crashes, num_proc=1)
    assert error.ending == "was killed by signal 11"
    assert "in crashes" in error.traceback


def test_a_killed_rank_is_named_at_once(marked: Marked, tmp_path: Path) -> None:
    def waits() -> None:
        context = deuteron.context()
        (tmp_path / f"{context.rank}").write_text(str(os.getpid()))
        context.barrier()
        if context.rank == 2:
            time.sleep(60)
        context.barrier()

    killed: list[float] = []

    def kill() -> None:
        files = [tmp_path / str(rank) for rank in range(3)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        time.sleep(0.3)
        killed.append(time.monotonic())
        os.kill(int(files[2].read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    error = failure(waits, num_proc=3)
    took = time.monotonic() - killed[0]
    killer.join()
    assert (error.rank, error.host, error.ending) == (2, HOST, "was killed by signal 9")
    assert took < SOON


def test_the_cause_is_named_not_who_waited_for_it(marked: Marked) -> None:
    def fails() -> None:
        context = deuteron.context()
        if context.rank == 1:
            # A child that holds its streams open makes the end of this process known later.
            if os.fork() == 0:
                time.sleep(0.2)
                os._exit(0)
            os._exit(5)
        context.barrier()

    for _ in range(3):
        error = failure(fails)
        assert (error.rank, error.ending) == (1, "exited with status 5")


def test_a_rank_killed_in_a_reduction_is_named(marked: Marked) -> None:
    def train() -> None:
        import array

        from deuteron._context import task

        engine = task().engine()
        numbers = array.array("f", [1.0] * 1000)
        tensor = (numbers.buffer_info()[0], 8, [1000])
        for step in range(1_000_000):
            if step == 50 and engine.rank == 1:
                # Like a data loader's worker: it holds what its parent has open.
                if os.fork() == 0:
                    time.sleep(1)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            engine.all_reduce("gradient", [tensor]).wait()

    start = time.monotonic()
    error = failure(train, num_proc=3)
    assert (error.rank, error.ending) == (1, "was killed by signal 9")
    assert time.monotonic() - start < 10


def test_an_agent_that_is_killed_is_named(marked: Marked) -> None:
    def kills() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    error = failure(kills, num_proc=1)
    assert (error.rank, error.host) == (0, HOST)
    assert error.ending == "was lost: its agent was killed by signal 9"


def test_interrupt_ends_everything(marked: Marked, tmp_path: Path) -> None:
    driver = Driver(
        tmp_path,
        """
        import os, subprocess, sys, time
        import deuteron

        def wait():
            subprocess.Popen(["sleep", "60"])
            print("READY", flush=True)
            time.sleep(60)

        try:
            deuteron.run(wait, num_proc=2)
        except KeyboardInterrupt:
            print("INTERRUPTED", os.environ["DEUTERON_TEST_MARK"])
            raise
        """,
        marked,
    )
    driver.line("READY")
    driver.line("READY")
    assert len(marked.processes()) >= 6
    start = time.monotonic()
    driver.process.send_signal(signal.SIGINT)
    line = driver.line("INTERRUPTED")
    # When it is raised, nothing is left but the driver.
    assert marked.processes() in ([driver.process.pid], [])
    assert time.monotonic() - start < 2 * SOON, line
    status, _, err = driver.end()
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in err


def test_on_a_terminal_ranks_have_colours_and_a_key_ends_everything(marked: Marked, tmp_path: Path) -> None:
    import pty

    source = """
        import time
        import deuteron

        def wait():
            print("READY", flush=True)
            time.sleep(60)

        deuteron.run(wait, num_proc=2)
        """
    (tmp_path / "driver.py").write_text(textwrap.dedent(source))
    near, far = pty.openpty()
    # A new session, whose terminal becomes the one that it opens first.
    command = ["setsid", "--ctty", "--wait", sys.executable, "driver.py"]
    environment = {**marked.environment, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, cwd=tmp_path, stdin=far, stdout=far, stderr=far, env=environment)
    os.close(far)
    shown = b""

    def read() -> bool:
        nonlocal shown
        shown += os.read(near, 65536)
        return shown.count(b"READY") == 2

    until(read)
    assert b"\x1b[36m[0]\x1b[0m READY" in shown
    assert b"\x1b[33m[1]\x1b[0m READY" in shown
    os.write(near, b"\x03")
    while True:
        try:
            shown += os.read(near, 65536) or b""
        except OSError:
            break
    process.wait(10)
    os.close(near)
    assert b"KeyboardInterrupt" in shown


def test_interrupt_kills_those_that_do_not_listen(marked: Marked, tmp_path: Path) -> None:
    driver = Driver(
        tmp_path,
        """
        import signal, time
        import deuteron

        def wait():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("READY", flush=True)
            time.sleep(60)

        deuteron.run(wait, num_proc=1, grace=1.5)
        """,
        marked,
    )
    driver.line("READY")
    driver.process.send_signal(signal.SIGINT)
    status, _, err = driver.end(10)
    assert status == -signal.SIGINT
    assert "deuteron: SIGINT: ending the tasks; once more returns without waiting" in err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_driver(marked: Marked, tmp_path: Path, how: signal.Signals) -> None:
    driver = Driver(
        tmp_path,
        """
        import subprocess, time
        import deuteron

        def wait():
            subprocess.Popen(["sleep", "60"])
            print("READY", flush=True)
            time.sleep(60)

        deuteron.run(wait, num_proc=2)
        """,
        marked,
    )
    driver.line("READY")
    driver.line("READY")
    driver.process.send_signal(how)
    driver.process.wait(10)
    marked.gone(5)
    driver.end()


def test_functions_of_a_script(marked: Marked, tmp_path: Path) -> None:
    out = script(
        tmp_path,
        """
        import pickle, sys
        import deuteron

        class Model:
            def __init__(self, number): self.number = number

        OFFSET = 100

        def helper(number): return number + OFFSET

        def train():
            # What plain pickle finds only by name.
            again = pickle.loads(pickle.dumps(Model(helper(deuteron.context().rank))))
            return again, sys.argv[1:], sys.modules["__main__"].__file__

        models, words, files = zip(*deuteron.run(train, num_proc=2))
        assert all(type(model) is Model for model in models)
        print([model.number for model in models], words, set(files) == {__file__})
        """,
        marked,
        "--epochs",
    )
    assert out == "[100, 101] (['--epochs'], ['--epochs']) True\n"


def test_modules_next_to_the_script(marked: Marked, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    (elsewhere / "far.py").write_text("def triple(x):\n    return 3 * x\n")
    # Modules of the current folder that are no part of it must not get in the way.
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "pickle.py").write_text("raise RuntimeError('the wrong module')\n")
    source = f"""
        import os, sys
        sys.path.append({str(elsewhere)!r})
        os.chdir("cwd")
        import deuteron, neighbour, far

        def both(x): return neighbour.double(x), far.triple(x), os.path.basename(os.getcwd())

        print(deuteron.run(neighbour.double, (21,), num_proc=1), deuteron.run(both, (1,), num_proc=1))
        """
    assert script(tmp_path, source, marked) == "[42] [(2, 3, 'cwd')]\n"


def test_a_package_that_only_the_driver_has_on_its_path(marked: Marked, tmp_path: Path) -> None:
    package = Path(deuteron.__file__).parent.parent
    source = f"""
        import os, sys
        os.environ.pop("PYTHONPATH", None)
        sys.path.insert(0, {str(package)!r})
        import deuteron
        print(deuteron.run(lambda: deuteron.__file__, num_proc=1) == [deuteron.__file__])
        """
    assert script(tmp_path, source, marked) == "True\n"


@pytest.mark.parametrize("flags", [["-i"], []])
def test_at_the_prompt(marked: Marked, flags: list[str]) -> None:
    source = textwrap.dedent(
        """
        import deuteron
        BASE = 40
        def add(x):
            context = deuteron.context()
            print("in task", context.rank)
            return BASE + x + context.rank

        print("RESULT", deuteron.run(add, (1,), num_proc=2))
        print("AGAIN", deuteron.run(lambda: BASE, num_proc=1))
        """
    )
    command = [sys.executable, *flags]
    ended = subprocess.run(command, input=source, capture_output=True, text=True, timeout=50, env=marked.environment)
    assert ended.returncode == 0, ended.stderr
    assert "RESULT [41, 42]" in ended.stdout, ended.stderr
    assert "AGAIN [40]" in ended.stdout
    assert "[1] in task 1" in ended.stdout


def test_in_a_notebook(marked: Marked) -> None:
    # What IPython does with a cell: it is run in a main module that has no file.
    source = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import deuteron\\ndef cell(x): return x + deuteron.context().rank")
shell.run_cell("print('RESULT', deuteron.run(cell, (1,), num_proc=2))")
"""
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=marked.environment)
    assert "RESULT [1, 2]" in ended.stdout, ended.stderr


def test_exec_in_a_main_module_without_a_file(marked: Marked) -> None:
    source = (
        "cell = 'import deuteron\\ndef f(x): return x + deuteron.context().rank\\n"
        "print(deuteron.run(f, (1,), num_proc=2))'\nexec(compile(cell, '<cell 1>', 'exec'), globals())"
    )
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, env=marked.environment)
    assert ended.stdout == "[1, 2]\n", ended.stderr


def test_children_of_multiprocessing_find_the_main_module(marked: Marked, tmp_path: Path) -> None:
    source = """
        import multiprocessing
        import deuteron

        def square(x): return x * x

        def pooled():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return pool.map(square, [1, 2, 3])

        if __name__ == "__main__":
            print(deuteron.run(pooled, num_proc=1))
        """
    assert script(tmp_path, source, marked) == "[[1, 4, 9]]\n"


def test_a_script_without_a_guard_does_not_multiply(marked: Marked, tmp_path: Path) -> None:
    driver = Driver(
        tmp_path,
        """
        import multiprocessing
        import deuteron

        def nothing(): pass

        def starts():
            child = multiprocessing.get_context("spawn").Process(target=nothing)
            child.start()
            child.join()
            return child.exitcode

        print(deuteron.run(starts, num_proc=1))
        """,
        marked,
    )
    status, out, err = driver.end()
    assert status == 0, err
    assert "put the call under if __name__" in err
    assert out.endswith("[1]\n")


def test_run_within_run(marked: Marked) -> None:
    def inner() -> int:
        return deuteron.context().size

    def outer() -> tuple[int, list[int], int]:
        context = deuteron.context()
        sizes = deuteron.run(inner, num_proc=3)
        context.barrier()
        return context.rank, sizes, context.size

    assert deuteron.run(outer, num_proc=2) == [(0, [3, 3, 3], 2), (1, [3, 3, 3], 2)]


def test_run_from_a_thread(marked: Marked) -> None:
    results: dict[int, list[int]] = {}

    def work(number: int) -> None:
        results[number] = deuteron.run(rank_times, (number,), num_proc=2)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [0, 1], 2: [0, 2]}


def test_what_cannot_be_pickled(marked: Marked) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidError, match=r"args\[1\] cannot be pickled and sent to the tasks: TypeError"):
        deuteron.run(print, (1, lock), num_proc=1)
    with pytest.raises(InvalidError, match=r"kwargs\['end'\] cannot be pickled"):
        deuteron.run(print, (1,), {"end": lock}, num_proc=1)
    with pytest.raises(InvalidError, match="fn cannot be pickled"):
        deuteron.run(lambda: lock, num_proc=1)
    error = failure(threading.Lock, num_proc=1)
    assert "its result, a _thread.lock, cannot be pickled and sent to the driver" in error.traceback
    assert "TypeError" in error.traceback


class LoadsOnlyInThisProcess:
    """Cannot be unpickled elsewhere."""

    def __reduce__(self) -> Any:
        return check_process, (os.getpid(),)


def check_process(number: int) -> int:
    if number != os.getpid():
        raise ImportError("this is another process")
    return number


def test_what_cannot_be_unpickled(marked: Marked) -> None:
    error = failure(print, LoadsOnlyInThisProcess())
    assert "ImportError: this is another process" in error.traceback
    assert "where a task loads the function and its arguments" in error.traceback
    with pytest.raises(Error, match="what rank 0 has returned cannot be unpickled here: ImportError"):
        deuteron.run(LoadsOnlyInThisProcess, num_proc=1)


@pytest.mark.timeout(120)
def test_large_arguments_and_results(marked: Marked) -> None:
    import hashlib

    data = os.urandom(1 << 20) * 120

    def reverse(data: bytes) -> bytes:
        return data[::-1]

    digest = hashlib.sha256(data[::-1]).digest()
    results = deuteron.run(reverse, (data,), num_proc=2)
    assert [hashlib.sha256(result).digest() for result in results] == [digest, digest]


def test_restarts(marked: Marked) -> None:
    def later() -> tuple[int, int]:
        context = deuteron.context()
        if context.generation < 1 and context.rank == 1:
            raise RuntimeError("too early")
        context.barrier()
        return context.rank, context.generation

    err = io.StringIO()
    assert deuteron.run(later, num_proc=2, restarts=2, stderr=err) == [(0, 1), (1, 1)]
    told = err.getvalue()
    assert "[1] RuntimeError: too early" in told
    assert f"deuteron: rank 1 on {HOST} exited with status 1; restart 1 of 2 follows" in told

    def never() -> None:
        raise RuntimeError(f"generation {deuteron.context().generation}")

    error = failure(never, num_proc=1, restarts=1, stderr=io.StringIO())
    assert error.generation == 1
    assert error.traceback.endswith("RuntimeError: generation 1")


def test_a_time_limit_for_everything(marked: Marked) -> None:
    start = time.monotonic()
    with pytest.raises(TimedOutError, match=r"did not end within 1.5 s \(timeout\)") as raised:
        deuteron.run(time.sleep, (60,), num_proc=2, timeout=1.5)
    assert isinstance(raised.value, TimeoutError)
    assert 1.5 <= time.monotonic() - start < 1.5 + 2 * SOON
    assert deuteron.run(rank_times, (1,), num_proc=1, timeout=60) == [0]


def test_a_time_limit_for_the_start(marked: Marked, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(LaunchError, match=r"after 0.5 s no agent has joined from localhost"):
        deuteron.run(print, num_proc=1, start_timeout=0.5, executable=slow)
    with pytest.raises(TimedOutError, match=r"did not end within 0.2 s"):
        deuteron.run(print, num_proc=1, timeout=0.2, executable=slow)


def test_what_starts_nothing(marked: Marked, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 4\n")
    broken.chmod(0o755)
    with pytest.raises(LaunchError, match=r"exited with status 4: it is broken"):
        deuteron.run(print, num_proc=1, executable=broken, stderr=io.StringIO())


def test_environment(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> None:
    def variables() -> tuple[str | None, ...]:
        return tuple(os.environ.get(name) for name in ("ONE", "TWO", "PYTHONUNBUFFERED", "DEUTERON_BUCKET_SIZE"))

    monkeypatch.setenv("ONE", "inherited")
    monkeypatch.setenv("DEUTERON_BUCKET_SIZE", "1MiB")
    found = deuteron.run(variables, num_proc=1, env={"TWO": "a b,c=d"})
    assert found == [("inherited", "a b,c=d", "1", "1048576")]
    assert deuteron.run(variables, num_proc=1, env={"ONE": "", "PYTHONUNBUFFERED": "2"})[0][:3] == ("", None, "2")


def test_settings_come_from_the_environment(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEUTERON_TASKS", "2")
    monkeypatch.setenv("DEUTERON_HOSTS", "nowhere.invalid:8")
    assert deuteron.run(lambda: deuteron.context().size) == [2, 2]
    monkeypatch.setenv("DEUTERON_RESTARTS", "many")
    with pytest.raises(InvalidError, match='DEUTERON_RESTARTS=many: "many" is not a number'):
        deuteron.run(print, num_proc=1)


def test_accelerators(marked: Marked, tmp_path: Path) -> None:
    def mine() -> tuple[list[int], str | None]:
        indices = [device.index for device in deuteron.context().accelerators()]
        return indices, os.environ.get("CUDA_VISIBLE_DEVICES")

    options: dict[str, Any] = {"accelerator": "/gpu", "discovery_script": devices(tmp_path, 4)}
    assert deuteron.run(mine, per_task=2, **options) == [([0, 1], "0,1"), ([2, 3], "2,3")]
    assert deuteron.run(mine, num_proc=1, **options) == [([0], "0")]
    with pytest.raises(LaunchError, match="5 tasks"):
        deuteron.run(mine, num_proc=5, **options)
    err = io.StringIO()
    found = deuteron.run(mine, num_proc=5, required=False, stderr=err, **options)
    assert [len(indices) for indices, _ in found] == [1, 1, 1, 1, 0]
    assert "1 of 5 tasks found no" in err.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 5}, "fn is a int, which cannot be called"),
        ({"args": 5}, r"args is a int: give a tuple, as in args=\(1,\)"),
        ({"args": "text"}, "args is a str: give a tuple"),
        ({"kwargs": [1]}, "kwargs: give a dictionary"),
        ({"num_proc": 0}, "num_proc=0: it must be at least 1"),
        ({"num_proc": 1.5}, "num_proc=1.5: give a whole number"),
        ({"num_proc": True}, "num_proc=True: give a whole number"),
        ({"num_proc": 5_000_000_000}, "num_proc 5000000000: this is too much"),
        ({"accelerator": "gpu"}, 'accelerator gpu: accelerator "gpu" does not start with a slash'),
        ({"per_task": 2}, "per_task 2: this says nothing without accelerator, as in accelerator /gpu"),
        ({"accelerator": "/gpu", "memory": "much"}, "memory much"),
        ({"accelerator": "/gpu", "memory": -1}, "memory=-1: it must be at least 0"),
        ({"required": False}, "optional: this says nothing without accelerator"),
        ({"env": {"A": 1}}, "env: 'A': 1: names and values are texts"),
        ({"env": {"A=B": "1"}}, "env: 'A=B' cannot be the name of a variable"),
        ({"restarts": -1}, "restarts=-1: it must be at least 0"),
        ({"timeout": -1}, "timeout=-1: give a number of seconds"),
        ({"start_timeout": "1"}, "start_timeout='1': give a number of seconds"),
        ({"grace": float("nan")}, "grace=nan: give a number of seconds"),
        ({"executable": "/no/such/python"}, "executable='/no/such/python': there is no such program"),
        ({"stdout": "out.txt"}, "stdout is a str: give a stream to write to"),
        ({"output": "/proc/nowhere"}, "output /proc/nowhere"),
    ],
)
def test_what_makes_no_sense_starts_nothing(marked: Marked, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError, match=f"^{message}") as raised:
        deuteron.run(**{"fn": print, "num_proc": 1, **arguments})
    assert isinstance(raised.value, ValueError)
    assert not [process for process in marked.processes() if process != os.getpid()]


def test_a_stream_that_fails_ends_the_job(marked: Marked) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("nobody reads")

    def talks() -> None:
        print("something", flush=True)
        time.sleep(60)

    with pytest.raises(BrokenPipeError):
        deuteron.run(talks, num_proc=2, stdout=Broken())


def test_an_ascii_terminal_shows_everything(marked: Marked) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    deuteron.run(print, ("é",), num_proc=1, stdout=stream)
    assert raw.getvalue() == b"[0] \\xe9\n"


def test_import_loads_nothing_heavy(marked: Marked) -> None:
    heavy = ["torch", "numpy", "pyarrow", "pyspark", "pandas", "cloudpickle", "asyncio", "deuteron.data"]
    source = f"import sys, deuteron; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30)
    assert ended.stdout == "[]\n", ended.stderr
    assert all(hasattr(deuteron, name) for name in dir(deuteron))
    with pytest.raises(AttributeError, match="no attribute 'barier'"):
        deuteron.barier  # noqa: B018


def test_the_command(marked: Marked) -> None:
    command = [sys.executable, "-m", "deuteron"]
    ended = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30)
    assert ended.stdout == f"deuteron {deuteron.__version__}\n"
    words = ["run", "-n", "2", "--", sys.executable, "-c", "import deuteron; print(deuteron.context().rank)"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=30)
    assert sorted(ended.stdout.splitlines()) == ["[0] 0", "[1] 1"], ended.stderr
    assert subprocess.run([*command, "walk"], capture_output=True, timeout=30).returncode == 64


def test_the_script(marked: Marked) -> None:
    path = Path(sys.executable).with_name("deuteron")
    if not path.exists():
        pytest.skip("the package is not installed here")
    ended = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    assert ended.stdout == f"deuteron {deuteron.__version__}\n"
