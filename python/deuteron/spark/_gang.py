"""The driver's side of a gang on Spark: a supervisor in this process, and a barrier stage whose tasks start its agents.

- SPARK-1: whichever fails first, the gang or the stage, ends the other; the error of a rank wins over what Spark says.
- SPARK-2: an attempt is over when its stage is: nothing of it runs when the next begins, or when the caller goes on.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from deuteron import __version__, _core
from deuteron.errors import InvalidError, LaunchError, TaskFailedError
from deuteron.launch import _GLANCE, _count, _in_words_of_python, _Screen, _seconds, _settings
from deuteron.spark._session import Cluster
from deuteron.spark._stage import Stage
from deuteron.spark._task import Plan

#: Seconds that tasks have to end by themselves after the gang has, before Spark is told to end them.
_LEAVE = 2.0
#: Seconds that Spark has to say why tasks are gone.
_EXPLAIN = 2.0
#: Seconds between SIGTERM and SIGKILL, if not said: a failure is raised within 3 s, even if a rank ignores the first.
_GRACE = 1.5
#: Seconds after which an agent that cannot be reached has left: it looks every quarter of a second, and has its grace.
_LEASE = 6.0
#: Seconds between two lines about slots.
_TELL = 10.0
#: Where rows are computed first, nobody knows how long that takes.
_NO_LIMIT = 10 * 365 * 86400.0

#: What a supervisor says that has waited too long.
_NOT_JOINED = "no agent has joined"
#: What an agent says that cannot reach its supervisor.
_UNREACHABLE = "the supervisor cannot be reached"

#: Ranks run the Python of their executor.
TASK = ("/bin/sh", "-c", 'exec "$DEUTERON_SPARK_PYTHON" -P "$DEUTERON_SPARK_START" task')


class WrongNumberError(LaunchError):
    """Spark has made another number of tasks than it was asked for."""


@dataclass
class Options:
    """What the user has said about the run, not about the work."""

    num_proc: int | None = None
    start_timeout: float | None = None
    env: Mapping[str, str] | None = None
    stdout: IO[Any] | None = None
    stderr: IO[Any] | None = None
    verbose: bool | int = 1
    nics: str | Sequence[str] | None = None
    prefix_output_with_timestamp: bool = False
    executable: str | None = None
    restarts: int = 0
    grace: float | None = None
    output: str | os.PathLike[str] | None = None


@dataclass
class Work:
    """What ranks do."""

    name: str
    command: Sequence[str] = TASK
    payload: Callable[[], bytes] = bytes
    #: The frame whose rows they share.
    rows: Any = None
    #: The schema of a partition without rows.
    schema: bytes | None = None
    environment: dict[str, str] = field(default_factory=dict)


def run(cluster: Cluster, work: Work, options: Options) -> list[bytes | None]:
    """Runs the gang until it succeeds, or has failed once more often than it may be restarted."""
    restarts = _count("restarts", options.restarts, 0)
    limit = _start_timeout(options.start_timeout)
    screen = _Screen(options.stdout, options.stderr)
    begun = time.monotonic()
    tasks = _tasks(cluster, options.num_proc, begun + limit)
    words = _words(cluster, tasks, options, _NO_LIMIT if work.rows is not None else limit)
    payload = work.payload()
    if options.verbose:
        screen.show([(False, f"Running {tasks} processes...\n".encode())])
    rows = _nothing(cluster, tasks) if work.rows is None else _dealt(work.rows, tasks, bool(restarts))
    kept = work.rows is not None and restarts > 0
    if kept:
        from pyspark import StorageLevel

        # Every attempt is to see the same rows in the same partitions.
        rows = rows.persist(StorageLevel.DISK_ONLY)

    in_task = _supervisor_in_task(cluster)

    def attempt(rows: Any, generation: int, is_empty: bool = False) -> list[bytes | None]:
        nonlocal in_task
        terms = _Terms(cluster, work, options, words, payload, screen, tasks, generation, is_empty)
        if not in_task:
            try:
                return _Attempt(terms).run(rows)
            except LaunchError as error:
                if _UNREACHABLE not in str(error):
                    raise
                screen.show([(True, f"deuteron: {error}; the first task supervises instead\n".encode())])
                in_task = True
        return _RemoteAttempt(terms).run(rows)

    try:
        for generation in range(restarts + 1):
            _wait_for_slots(cluster, tasks, time.monotonic() + limit if generation else begun + limit, limit, screen)
            try:
                return attempt(rows, generation)
            except WrongNumberError:
                # The optimizer leaves out what has no rows, and the tasks with it.
                if work.rows is None or not work.rows.isEmpty():
                    raise
                return attempt(_nothing(cluster, tasks), generation, is_empty=True)
            except TaskFailedError as error:
                if generation == restarts:
                    raise
                lost = error.ending.startswith("was lost")
                pause = max(_LEASE, (options.grace or 0) + 1) if lost else min(2.0**generation, 60.0)
                note = f"deuteron: {error}; restart {generation + 1} of {restarts} follows in {pause:.1f} s\n"
                screen.show([(True, note.encode())])
                time.sleep(pause)
    finally:
        if kept:
            rows.unpersist()
    raise AssertionError("a loop that returns or raises")


def _nothing(cluster: Cluster, tasks: int) -> Any:
    """Rows that nobody looks at, for as many tasks."""
    return cluster.session.range(tasks, numPartitions=tasks)


def _dealt(rows: Any, tasks: int, is_kept: bool) -> Any:
    """The rows in as many equal shares; right before the stage, since adaptive execution merges other partitions."""
    # Before it deals rows out Spark sorts them, so that what is computed again is dealt out the same. That takes as
    # long as to deal them out; a stage whose rows are not kept is never computed again in part.
    if is_kept or not hasattr(rows, "repartitionById"):
        return rows.repartition(tasks)
    from pyspark.sql import functions

    # Each partition begins with another task.
    number = f"pmod(monotonically_increasing_id() + spark_partition_id(), {tasks})"
    return rows.repartitionById(tasks, functions.expr(f"cast({number} as int)"))


def _start_timeout(said: float | None) -> float:
    if said is not None:
        return _seconds("start_timeout", said)
    for name in ("DEUTERON_SPARK_START_TIMEOUT", "HOROVOD_SPARK_START_TIMEOUT"):
        if text := os.environ.get(name):
            try:
                return _seconds(name, float(text))
            except ValueError:
                raise InvalidError(f"{name}={text}: give a number of seconds") from None
    return 600.0


def _tasks(cluster: Cluster, said: int | None, deadline: float) -> int:
    """How many tasks: as many as said, or as there are slots."""
    most = cluster.most()
    if said is not None:
        tasks = _count("num_proc", said, 1)
        if most is not None and tasks > most[0]:
            raise InvalidError(
                f"{tasks} tasks are asked for, and this session can never run more than {most[0]} at once: {most[1]}. "
                "Ask for fewer, or start a session with more"
            )
        return tasks
    if most is not None:
        if most[0] == 0:
            raise InvalidError(f"this session can run no task: {most[1]}")
        # Executors may be on their way, and may never be as many.
        patience = min(deadline, time.monotonic() + 30)
        while (slots := cluster.slots()) is not None and slots < most[0] and time.monotonic() < patience:
            time.sleep(_GLANCE)
        return max(slots, 1) if slots is not None else most[0]
    settled, seen = time.monotonic(), 0
    while time.monotonic() < deadline:
        slots = cluster.slots()
        if slots is None:
            break
        if slots != seen:
            settled, seen = time.monotonic(), slots
        # They come one by one.
        if seen > 0 and time.monotonic() - settled > 1:
            return seen
        time.sleep(_GLANCE)
    if cluster.is_connect:
        return cluster.default_parallelism()
    raise LaunchError(
        "Spark has no executor yet: name the number of tasks with num_proc, or look at the cluster manager"
    )


def _wait_for_slots(cluster: Cluster, tasks: int, deadline: float, limit: float, screen: _Screen) -> None:
    """Spark itself would look again only every 15 s."""
    told = time.monotonic() - _TELL + 2
    while (slots := cluster.slots()) is not None and slots < tasks:
        now = time.monotonic()
        if now > deadline:
            raise LaunchError(
                f"Spark has {slots} of {tasks} slots after {limit:.0f} s (start_timeout): start more executors, or ask "
                "for fewer tasks"
            )
        if now - told > _TELL:
            told = now
            screen.show([(True, f"deuteron: waiting for Spark: {slots} of {tasks} slots are there\n".encode())])
        time.sleep(_GLANCE)


def _words(cluster: Cluster, tasks: int, options: Options, start_limit: float) -> list[str]:
    wanted = cluster.accelerators
    words = _settings(
        tasks,
        None if wanted is None else wanted.path,
        None if wanted is None else wanted.per_task,
        None if wanted is None else wanted.memory,
        wanted is None or wanted.required,
        None,
        options.env,
        0,
        start_limit,
        _grace(options),
        options.output,
    )
    if options.nics:
        words += ["--interface", options.nics if isinstance(options.nics, str) else next(iter(options.nics))]
    if options.prefix_output_with_timestamp:
        words.append("--timestamps")
    if not options.verbose:
        words.append("--quiet")
    elif options.verbose is not True and options.verbose > 1:
        words.append("--verbose")
    return words


def _grace(options: Options) -> float | None:
    """``None`` if the environment or a file may say it."""
    elsewhere = "DEUTERON_GRACE" in os.environ or "DEUTERON_CONFIG" in os.environ
    return options.grace if options.grace is not None or elsewhere else _GRACE


def _supervisor_in_task(cluster: Cluster) -> bool:
    """Whether the supervisor is in the first task: a client of Spark Connect may be anywhere."""
    where = os.environ.get("DEUTERON_SPARK_SUPERVISOR") or ("task" if cluster.is_connect else "driver")
    if where not in ("driver", "task"):
        raise InvalidError(f"DEUTERON_SPARK_SUPERVISOR={where}: give driver or task")
    return where == "task"


@dataclass
class _Terms:
    """What one generation of the gang is made of."""

    cluster: Cluster
    work: Work
    options: Options
    words: list[str]
    payload: bytes
    screen: _Screen
    tasks: int
    generation: int
    #: The frame has no rows, and others stand for them.
    is_empty: bool

    def plan(self, invitations: list[str] | None, supervisor: bytes | None) -> Plan:
        wanted = self.cluster.accelerators
        return Plan(
            version=__version__,
            tasks=self.tasks,
            invitations=invitations,
            supervisor=supervisor,
            executable=self.options.executable,
            accelerator=None if wanted is None else wanted.kind,
            schema=self.work.schema,
            is_empty=self.is_empty,
            echo=self.cluster.has_logs,
            environment=self.work.environment,
        )

    def stage(self, rows: Any, plan: Plan) -> Stage:
        return Stage(self.cluster, rows, plan, f"deuteron.spark: {self.work.name}")


class _Attempt:
    """One generation of the gang, supervised in this process."""

    def __init__(self, terms: _Terms) -> None:
        self._terms, self._screen = terms, terms.screen
        # No width: Spark draws its own progress on the same line.
        look = (terms.screen.stdout_is_terminal, None)
        try:
            self._job = _core.Job(terms.words, terms.work.command, ["agent"], terms.payload, *look, terms.generation)
        except InvalidError as error:
            raise InvalidError(_in_words_of_python(str(error))) from None

    def run(self, rows: Any) -> list[bytes | None]:
        job = self._job
        if self._terms.cluster.note:
            job.note(self._terms.cluster.note)
        stage = None
        try:
            stage = self._terms.stage(rows, self._plan())
            self._watch(stage)
            results = self._results(stage)
            if not stage.wait(5 * _LEAVE):
                stage.cancel()
            return results
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            job.end("SIGINT" if interrupted else f"{type(error).__name__} in the process that started it")
            # Spark may take long to see that an executor is lost.
            lost = isinstance(error, TaskFailedError) and error.ending.startswith("was lost")
            if stage is not None and not stage.wait(_GLANCE if lost else _LEAVE):
                stage.cancel()
                stage.wait(_EXPLAIN)
            raise

    def _plan(self) -> Plan:
        invitations = invited(self._job, self._terms.tasks)
        return self._terms.plan(invitations, None)

    def _watch(self, stage: Stage) -> None:
        """Shows what ranks print until the job is over; ends it if the stage is over first."""
        job, patience = self._job, None
        while (pieces := job.output(_GLANCE)) is not None:
            self._screen.show(pieces)
            if patience is None and stage.is_over:
                # The gang may know better why: it hears of a lost agent at about the same time, and ends its ranks.
                ending = _LEAVE / 2 if stage.reason is not None else _LEAVE / 2 + (self._terms.options.grace or _GRACE)
                patience = time.monotonic() + ending
            if patience is not None and time.monotonic() > patience:
                job.end("Spark")
                patience = float("inf")

    def _results(self, stage: Stage) -> list[bytes | None]:
        try:
            return self._job.finish()
        except TaskFailedError:
            raise
        except (LaunchError, KeyboardInterrupt) as error:
            stage.wait(_EXPLAIN)
            _raise_for(stage)
            if isinstance(error, LaunchError):
                if _NOT_JOINED in str(error):
                    raise LaunchError(self._not_started()) from None
                raise
            raise LaunchError("Spark has ended the tasks of the stage before their ranks had ended") from None

    def _not_started(self) -> str:
        limit = _start_timeout(self._terms.options.start_timeout)
        return (
            f"Spark has not started all {self._terms.tasks} tasks within {limit:.0f} s (start_timeout): other jobs may "
            "hold its slots, or executors cannot start Python: look at the stage in Spark's pages, and at the "
            "executors' logs"
        )


class _RemoteAttempt:
    """One generation of the gang, supervised in the first task of its stage."""

    def __init__(self, terms: _Terms) -> None:
        self._terms = terms

    def run(self, rows: Any) -> list[bytes | None]:
        terms = self._terms
        if terms.cluster.note:
            terms.screen.show([(True, f"deuteron: {terms.cluster.note}\n".encode())])
        supervisor = pickle.dumps((terms.words, list(terms.work.command), terms.payload, terms.generation))
        stage = terms.stage(rows, terms.plan(None, supervisor))
        try:
            while not stage.wait(_GLANCE):
                pass
        except BaseException:
            stage.cancel()
            stage.wait(_EXPLAIN)
            raise
        _raise_for(stage)
        if stage.report is None:
            raise LaunchError("the supervisor in the first task has told nothing")
        results, error, printed = pickle.loads(stage.report)
        terms.screen.show(printed)
        if error is not None:
            raise error
        found: list[bytes | None] = results
        return found


def invited(job: _core.Job, tasks: int) -> list[str]:
    """The invitations of a job that has just been started, by agent."""
    invitations = [""] * tasks
    for _ in range(tasks):
        one = job.invitation(10)
        if one is None:
            job.finish()
            raise LaunchError("the supervisor has not said how to reach it")
        invitations[one[0]] = one[1]
    return invitations


def _raise_for(stage: Stage) -> None:
    """Raises why Spark has ended the stage, if it did."""
    if stage.is_wrong_number:
        raise WrongNumberError(stage.reason) from None
    if stage.reason is not None:
        raise LaunchError(stage.reason) from None
    if stage.error is not None:
        raise LaunchError(f"Spark has ended the stage: {_reason(str(stage.error))}") from stage.error


def _reason(text: str) -> str:
    """The line that says why, of all that Spark tells about a failed stage: if there is one, that of its Python."""
    _, is_python, traceback = text.partition("Traceback (most recent call last):")
    lines = [line for line in (traceback if is_python else text).splitlines() if line and not line[0].isspace()]
    # The first is about a call of Py4J's, and the next begins with a colon.
    said = [line.removeprefix(": ") for line in lines if not line.startswith("An error occurred while calling")]
    reason = said[0] if said else "it does not say why, its log may"
    if is_python and ("ModuleNotFoundError" in reason or "PYTHON_VERSION_MISMATCH" in text):
        reason += (
            "; executors run another Python than this one: have PYSPARK_PYTHON (or spark.pyspark.python) name one of "
            "the same version that has deuteron and pyarrow"
        )
    return reason
