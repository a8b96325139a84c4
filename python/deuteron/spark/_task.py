"""What a task of the barrier stage does: starts an agent, holds its standard input, and waits until it has left.

There is almost nothing here on purpose. Whatever can go wrong with ranks is the agent's and the supervisor's to see.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from deuteron.launch import _START

#: Before whatever a task of the stage raises, so that the driver finds it in what Spark tells.
MARK = "deuteron on Spark: "

#: What the executor's Python workers have for themselves.
_PRIVATE = (
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_PORT",
    "PYTHON_WORKER_FACTORY_SOCK_PATH",
    "PYTHON_WORKER_FACTORY_SOCK_DIR",
    "PYTHON_UNIX_DOMAIN_ENABLED",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
)


@dataclass(frozen=True)
class Plan:
    """What the driver tells every task of the stage."""

    version: str
    tasks: int
    #: By partition. Each is the key to the job, and travels as Spark's closures do.
    invitations: list[str] | None = None
    #: Without invitations: what the first task starts a supervisor with.
    supervisor: bytes | None = None
    executable: str | None = None
    #: The kind of accelerator that was asked for.
    accelerator: str | None = None
    #: The schema of a partition without rows, as Arrow writes it; ``None`` if ranks get no rows.
    schema: bytes | None = None
    #: Whether what comes are not the rows that ranks are to see, of which there are none.
    is_empty: bool = False
    #: Whether what ranks print goes to the executor's log too.
    echo: bool = True
    #: More for the environment of agent and rank.
    environment: dict[str, str] = field(default_factory=dict)


def stage(plan: Plan) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """What Spark is to map partitions with.

    It is sent by value: it must be able to say that this package is missing, or another one.
    """
    version, mark = plan.version, MARK
    words = {name: getattr(plan, name) for name in plan.__dataclass_fields__}

    def serve(batches: Iterable[Any]) -> Iterator[Any]:
        import os
        import sys

        where = f"on {os.uname().nodename} ({sys.executable})"
        try:
            import deuteron
        except ImportError as error:
            raise RuntimeError(
                f"{mark}deuteron cannot be imported {where}: {error}; install deuteron {version}"
            ) from None
        if deuteron.__version__ != version:
            raise RuntimeError(
                f"{mark}the driver has deuteron {version}, and there is {deuteron.__version__} {where}: install "
                "the same"
            )
        from deuteron.spark import _task

        yield from _task.serve(_task.Plan(**words), batches)

    return serve


def serve(plan: Plan, batches: Iterable[Any]) -> Iterator[Any]:
    """Runs one agent, and yields one row about it."""
    import pyarrow  # type: ignore[import-untyped]

    context, partition, addresses = _placed(plan)
    environment = _initial_environment()
    spool = None
    if plan.schema is not None:
        from deuteron.spark._spool import Spool

        spool = Spool(environment.get("SPARK_LOCAL_DIRS", "").split(","))
        environment.update(spool.environment)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environment["DEUTERON_SPARK_PYTHON"] = plan.executable or sys.executable
    if plan.executable and shutil.which(plan.executable, path=environment.get("PATH")) is None:
        _refuse(f"there is no executable {plan.executable!r} on {os.uname().nodename}: install it, or name another")
    environment["DEUTERON_SPARK_START"] = _START
    if plan.echo:
        environment["DEUTERON_AGENT_ECHO"] = "1"
    if plan.accelerator is not None:
        assigned = {"name": plan.accelerator, "addresses": addresses}
        environment["DEUTERON_AGENT_ACCELERATORS"] = json.dumps(assigned)
    environment.update(plan.environment)
    report = failure = None
    with contextlib.ExitStack() as stack:
        if spool is not None:
            stack.callback(spool.close)
        supervisor = None
        if plan.supervisor is not None and partition == 0:
            supervisor = stack.enter_context(Supervisor(plan, environment))
        if plan.invitations is not None:
            invitations = plan.invitations
        else:
            # The one message that goes through Spark; it takes about a second.
            told = context.allGather(json.dumps(supervisor.invitations) if supervisor is not None else "")
            invitations = json.loads(told[0])
        agent = Agent(invitations[partition], environment, () if spool is None else spool.descriptors)
        with agent:
            # The rank starts meanwhile.
            if spool is None or plan.schema is None:
                for _ in batches:
                    pass
            else:
                schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(plan.schema))
                failure = spool.write(() if plan.is_empty else batches, schema, lambda: agent.is_running)
            agent.wait()
        if failure is not None:
            _refuse(failure)
        if supervisor is not None:
            report = supervisor.report()
    row = {"partition": [partition], "host": [os.uname().nodename], "report": [report]}
    yield pyarrow.RecordBatch.from_pydict(row, pyarrow.schema(_schema(pyarrow)))


def _schema(pyarrow: Any) -> list[tuple[str, Any]]:
    return [("partition", pyarrow.int64()), ("host", pyarrow.string()), ("report", pyarrow.binary())]


def _placed(plan: Plan) -> tuple[Any, int, list[str]]:
    """Spark's context, the number of this partition, and the addresses of accelerators that Spark gives it."""
    from pyspark import BarrierTaskContext

    try:
        context = BarrierTaskContext.get()
        tasks = len(context.getTaskInfos())
        partition: int = context.partitionId()
    except Exception as error:
        _refuse(
            "this engine has accepted a barrier stage and runs its tasks one by one: use Apache Spark, where tasks of "
            f"a barrier stage start together ({type(error).__name__}: {error})"
        )
    if tasks != plan.tasks:
        _refuse(wrong_number(plan.tasks, tasks))
    resource = context.resources().get(plan.accelerator) if plan.accelerator is not None else None
    return context, partition, [] if resource is None else list(resource.addresses)


def wrong_number(wanted: int, made: int) -> str:
    """What to say if Spark has made another number of tasks than it was asked for."""
    return f"{wanted} tasks were asked for, and Spark has made a barrier stage of {made}"


def _refuse(reason: str) -> NoReturn:
    raise RuntimeError(MARK + reason)


def _initial_environment() -> dict[str, str]:
    """What the executor has given its Python workers; jobs before this one may have changed the worker's own."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs if name and name not in _PRIVATE}


class Supervisor:
    """The supervisor as a child of the first task, where the driver cannot be reached."""

    def __init__(self, plan: Plan, environment: dict[str, str]) -> None:
        assert plan.supervisor is not None
        self._process = subprocess.Popen(
            [sys.executable, "-P", _START, "supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(len(plan.supervisor).to_bytes(8, "little") + plan.supervisor)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            _refuse(f"the supervisor on {os.uname().nodename} did not start: see the executor's log")
        #: By agent.
        self.invitations: list[str] = json.loads(line)

    def report(self) -> bytes:
        """How the job ended, as ``deuteron.spark._supervisor`` writes it."""
        assert self._process.stdout is not None
        return self._process.stdout.read()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)


class Agent:
    """An agent as a child of this task, which ends when the task does."""

    def __init__(self, invitation: str, environment: dict[str, str], descriptors: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", _START, "agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=descriptors,
            # Spark kills the worker's group; the agent is to end its ranks first, when its standard input ends.
            process_group=0,
        )
        assert self._process.stdin is not None and self._process.stderr is not None
        self._last: deque[bytes] = deque(maxlen=20)
        self._reader = threading.Thread(target=_relay, args=(self._process.stderr, self._last), daemon=True)
        self._reader.start()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(invitation.encode())
            self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it has left, which it is to do well."""
        status = self._process.wait()
        self._reader.join(1)
        if status != 0:
            said = b"".join(self._last).decode(errors="replace").strip().replace("\n", " | ")
            _refuse(f"the agent on {os.uname().nodename} ended with status {status}: {said or 'it said nothing'}")

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a child by the end of its standard input, and waits for it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def _relay(stream: IO[bytes], last: deque[bytes]) -> None:
    """Passes what the agent and its rank print on to the executor's log."""
    for line in stream:
        last.append(line)
        with contextlib.suppress(OSError):
            os.write(2, line)
