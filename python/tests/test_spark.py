"""deuteron.spark on real clusters: a standalone one of this suite's own, local-cluster, and the pyspark shell."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deuteron
import pytest
from deuteron.errors import InvalidError, LaunchError, TaskFailedError
from ranks import until

if os.environ.get("CI") != "true":
    pytest.importorskip("pyspark")
    pytest.importorskip("pyarrow")

import deuteron.spark
import horovod
import pyspark
from pyspark.sql import SparkSession

#: A test may have to start a cluster first, of up to four JVMs, or sixteen imports of PyTorch, on however few cores.
SLOW = 300
pytestmark = pytest.mark.timeout(SLOW)

#: Spark before 4.
BEFORE = Path(sys.prefix, "spark-3.5")
needs_spark_before = pytest.mark.skipif(
    not BEFORE.exists() and os.environ.get("CI") != "true", reason="Spark 3.5 is not installed: scripts/setup.sh peers"
)

HOST = os.uname().nodename
#: From what happens to the driver's exception.
SOON = 3.0
HOME = Path(pyspark.__file__).parent
#: Where the packages are: beside each other if they are installed.
PACKAGES = dict.fromkeys(str(Path(module.__file__ or "").parent.parent) for module in (deuteron, horovod))


def environment(mark: str) -> dict[str, str]:
    """What every process of Spark's gets here."""
    path = [*PACKAGES, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "DEUTERON_TEST_MARK": mark,
    }


def marked(mark: str, *words: str) -> list[int]:
    """Processes that have inherited a mark and whose command line has all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
                inherited = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"DEUTERON_TEST_MARK={mark}".encode() in inherited and all(word.encode() in line for word in words):
                found.append(int(entry.name))
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Cluster:
    """A master and two workers, each a JVM of its own, with four cores and four devices each."""

    def __init__(self, folder: Path) -> None:
        self.mark = str(uuid.uuid4())
        self.environment = environment(self.mark)
        self.url = f"spark://127.0.0.1:{free_port()}"
        self._children: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        port = self.url.rpartition(":")[2]
        self._start("master", "master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", "0")
        for worker in range(2):
            first = 4 * worker
            addresses = [str(address) for address in range(first, first + 4)]
            script = folder / f"devices-{worker}.sh"
            script.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': addresses})}'\n")
            script.chmod(0o755)
            settings = folder / f"worker-{worker}.conf"
            settings.write_text(
                f"spark.worker.resource.gpu.amount 4\nspark.worker.resource.gpu.discoveryScript {script}\n"
            )
            words = ["-c", "4", "-m", "4g", "-d", str(folder / f"work-{worker}"), "--webui-port", "0"]
            self._start(
                f"worker-{worker}",
                "worker.Worker",
                *words,
                "--properties-file",
                str(settings),
                "--host",
                "127.0.0.1",
                self.url,
            )

    def _start(self, name: str, program: str, *words: str) -> None:
        log = (self._folder / f"{name}.log").open("wb")
        self._children.append(
            subprocess.Popen(
                [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}", *words],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )

    def executors(self) -> list[int]:
        return marked(self.mark, "CoarseGrainedExecutorBackend", "--worker-url")

    def logs(self) -> list[Path]:
        """What executors have written to standard error."""
        return list(self._folder.glob("work-*/app-*/*/stderr"))

    def stop(self) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.wait(20)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("spark"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def session(cluster: Cluster) -> Iterator[Any]:
    """Two executors with two cores and two devices each; as much is left for other applications."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    settings = {
        "spark.cores.max": "4",
        "spark.executor.cores": "2",
        "spark.executor.memory": "512m",
        "spark.executor.resource.gpu.amount": "2",
        "spark.deploy.spreadOut": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(cluster.url).appName("test")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def idle(session: Any, seconds: float) -> None:
    """Waits until no task of Spark's runs, so that all slots are free."""
    tracker = session.sparkContext._jsc.sc().statusTracker()

    def found() -> bool:
        executors = tracker.getExecutorInfos()
        return not tracker.getActiveStageIds() and not any(one.numRunningTasks() for one in executors)

    until(found, seconds)


def test_results_come_by_rank_with_right_places(
    session: Any, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def who(number: int, add: int = 0) -> Any:
        context = deuteron.context()
        context.barrier()
        print(f"I am {context.rank}")
        hosts = [info.host for info in context.task_infos()]
        return context.rank, context.size, context.local_rank, context.local_size, hosts, number + add

    results = deuteron.spark.run(who, args=(40,), kwargs={"add": 2})
    assert results == [(rank, 4, rank, 4, [HOST] * 4, 42) for rank in range(4)]
    shown = capfd.readouterr().out
    assert shown.startswith("Running 4 processes...\n")
    assert sorted(shown.splitlines()[1:]) == [f"[{rank}] I am {rank}" for rank in range(4)]
    logs = "".join(log.read_text() for log in cluster.logs())
    assert all(logs.count(f"I am {rank}\n") == 1 for rank in range(4))


def test_horovods_words_are_the_same_and_executors_share_memory(session: Any) -> None:
    import horovod.spark

    def work(magic: int) -> Any:
        import horovod.torch as hvd
        import torch

        hvd.init()
        total = hvd.allreduce(torch.ones(1000), op=hvd.Sum)
        is_shared = "/memfd:deuteron" in Path("/proc/self/maps").read_text()
        executor = os.getppid()
        while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{executor}/cmdline").read_bytes():
            executor = int(Path(f"/proc/{executor}/stat").read_text().rpartition(")")[2].split()[1])
        return (hvd.rank(), hvd.size(), magic, total[0].item(), is_shared), executor

    # More than one executor takes.
    results = horovod.spark.run(work, args=(42,), num_proc=3, verbose=0)
    assert [result for result, _ in results] == [(rank, 3, 42, 3.0, True) for rank in range(3)]
    assert len({executor for _, executor in results}) == 2


def test_ranks_have_the_executors_first_environment_and_ours(session: Any) -> None:
    def change(batches: Iterator[Any]) -> Iterator[Any]:
        os.environ["LEFT_BY_ANOTHER_JOB"] = "1"
        yield from batches

    session.range(8, numPartitions=4).mapInArrow(change, "id long").collect()

    def look() -> Any:
        names = ("LEFT_BY_ANOTHER_JOB", "PYTHON_WORKER_FACTORY_SECRET", "MINE", "OMP_NUM_THREADS", "DEUTERON_TEST_MARK")
        return [os.environ.get(name) for name in names]

    mark = os.environ.get("DEUTERON_TEST_MARK")
    for found in deuteron.spark.run(look, env={"MINE": "yes"}, verbose=0):
        assert found[:4] == [None, None, "yes", "1"] and found[4] != mark


def test_a_rank_that_raises_is_named_with_its_traceback(session: Any, tmp_path: Path) -> None:
    def work() -> None:
        # The last of them has to be killed.
        if deuteron.context().rank == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deuteron.context().barrier()
        if deuteron.context().rank == 1:
            (tmp_path / "time").write_text(str(time.monotonic()))
            raise ValueError("no luck today")
        time.sleep(60)

    with pytest.raises(TaskFailedError, match=f"rank 1 on {HOST} exited with status 1: ValueError: no luck") as raised:
        deuteron.spark.run(work, num_proc=3, verbose=0)
    assert time.monotonic() - float((tmp_path / "time").read_text()) < SOON
    assert "in work" in raised.value.traceback
    idle(session, 2)


def test_a_rank_that_exits_or_is_killed_is_named(session: Any) -> None:
    def leave() -> None:
        if deuteron.context().rank == 1:
            os._exit(7)
        time.sleep(60)

    with pytest.raises(TaskFailedError, match=f"rank 1 on {HOST} exited with status 7"):
        deuteron.spark.run(leave, num_proc=2, verbose=0)

    def die() -> None:
        if deuteron.context().rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(TaskFailedError, match=f"rank 0 on {HOST} was killed by signal 9"):
        deuteron.spark.run(die, num_proc=2, verbose=0)
    idle(session, 2)


def test_programs_are_ranks_too(session: Any) -> None:
    out = io.StringIO()
    words = ["/bin/sh", "-c", "echo rank $DEUTERON_RANK of $DEUTERON_SIZE $MINE"]
    deuteron.spark.run_command(words, num_proc=2, stdout=out, env={"MINE": "too"}, verbose=0)
    assert sorted(out.getvalue().splitlines()) == ["[0] rank 0 of 2 too", "[1] rank 1 of 2 too"]
    with pytest.raises(TaskFailedError, match="exited with status 3"):
        deuteron.spark.run_command(["/bin/sh", "-c", "exit 3"], num_proc=2, verbose=0)
    with pytest.raises(TaskFailedError, match="exited with status 127"):
        deuteron.spark.run_command(["/no-such-program"], num_proc=2, verbose=0)


def count(partition: Any) -> Any:
    rows = [row for batch in partition for row in batch["id"].to_pylist()]
    again = [row for batch in partition for row in batch["id"].to_pylist()]
    assert rows == again and len(rows) == partition.num_rows == partition.to_table().num_rows
    assert "/proc/self/fd/" in os.environ["DEUTERON_PARTITION"]
    context = deuteron.context()
    context.barrier()
    return context.rank, rows, partition.schema.to_string()


def test_rows_go_to_ranks_whatever_their_number(session: Any) -> None:
    frame = session.range(1000).selectExpr("id", "cast(id as string) as text", "current_timestamp() as time")
    for rows, tasks in ((frame, 3), (frame.where("id < 2"), 4), (frame.where("id < 0"), 2), (frame.limit(0), 2)):
        expected = sorted(row.id for row in rows.collect())
        results = deuteron.spark.barrier(rows, tasks).map_partitions(count, verbose=0)
        assert [rank for rank, _, _ in results] == list(range(tasks))
        assert sorted(row for _, own, _ in results for row in own) == expected
        assert len({schema for _, _, schema in results}) == 1


def test_adaptive_execution_and_skew_change_nothing(session: Any) -> None:
    assert session.conf.get("spark.sql.adaptive.enabled") == "true"
    frame = session.range(2000).selectExpr("if(id < 1990, 0, id) as id").groupBy("id").count()
    results = deuteron.spark.barrier(frame, 4).map_partitions(count, verbose=0)
    assert sorted(row for _, own, _ in results for row in own) == [0, *range(1990, 2000)]


def test_a_gigabyte_needs_little_memory(session: Any) -> None:
    def measure(partition: Any) -> Any:
        def memory(process: int | str, name: str) -> int:
            text = Path(f"/proc/{process}/status").read_text()
            return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]

        before = memory("self", "RssAnon")
        size = 0
        for _ in range(2):
            size = sum(batch.nbytes for batch in partition)
        # The agent's parent is Spark's Python worker, which has written the file.
        agent = Path(f"/proc/{os.getppid()}/stat").read_text()
        worker = int(agent.rpartition(")")[2].split()[1])
        return size, memory("self", "RssAnon") - before, memory(worker, "VmHWM")

    rows = session.range(1_000_000).selectExpr("cast(repeat('x', 1024) as binary) as tensor")
    ((size, grown, worker),) = deuteron.spark.barrier(rows, 1).map_partitions(measure, verbose=0)
    assert size > 1_000_000_000
    assert grown < 100_000_000 and worker < 400_000_000, (grown, worker)


def test_a_failing_rank_is_started_again_with_the_same_rows(session: Any, tmp_path: Path) -> None:
    def work(partition: Any) -> Any:
        context = deuteron.context()
        rows = sorted(row for batch in partition for row in batch["id"].to_pylist())
        (tmp_path / f"{context.generation}-{context.rank}").write_text(json.dumps(rows))
        context.barrier()
        if context.generation < 2 and context.rank == 1:
            raise ValueError("not yet")
        context.barrier()
        return context.generation, rows

    errors = io.StringIO()
    frame = session.range(100).repartition(7).withColumn("noise", pyspark.sql.functions.rand())
    results = deuteron.spark.barrier(frame, 2).map_partitions(work, restarts=2, stderr=errors, verbose=0)
    assert [generation for generation, _ in results] == [2, 2]
    for rank, (_, rows) in enumerate(results):
        for generation in range(3):
            assert json.loads((tmp_path / f"{generation}-{rank}").read_text()) == rows
    assert "ValueError: not yet; restart 1 of 2 follows in 1.0 s" in errors.getvalue()


def test_accelerators_are_sparks_and_each_ranks_own(session: Any) -> None:
    def devices() -> Any:
        own = deuteron.context().accelerators()
        return [device.index for device in own], os.environ.get("CUDA_VISIBLE_DEVICES")

    results = deuteron.spark.run(devices, accelerators="/gpu", verbose=0)
    assert len(results) == 4
    numbers = [own[0] for own, _ in results]
    assert numbers == sorted(set(numbers)) and all(shown == str(own[0]) for own, shown in results)

    pairs = deuteron.spark.run(devices, accelerators="/gpu", per_task=2, verbose=0)
    assert len(pairs) == 2 and all(len(own) == 2 for own, _ in pairs)
    assert len({number for own, _ in pairs for number in own}) == 4

    with pytest.raises(LaunchError, match=rf"/gpu/h200.*{HOST} has .* slots? and 0 . /gpu/h200"):
        deuteron.spark.run(devices, num_proc=2, accelerators="/gpu/h200", verbose=0)
    errors = io.StringIO()
    bare = deuteron.spark.run(
        devices, num_proc=2, accelerators="/gpu/h200", required=False, stderr=errors, verbose=1, stdout=io.StringIO()
    )
    assert bare == [([], ""), ([], "")]
    assert "2 of 2 tasks found no" in errors.getvalue() and "run without" in errors.getvalue()
    with pytest.raises(InvalidError, match=r"spark.executor.resource.fpga.amount is nothing: set it"):
        deuteron.spark.run(devices, accelerators="/fpga", verbose=0)


def test_the_first_task_can_supervise(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEUTERON_SPARK_SUPERVISOR", "task")
    assert deuteron.spark.run(int, args=("42",), num_proc=3, verbose=0) == [42, 42, 42]
    with pytest.raises(TaskFailedError, match="ValueError: invalid literal") as raised:
        deuteron.spark.run(int, args=("many",), num_proc=2, restarts=1, verbose=0, stderr=io.StringIO())
    assert raised.value.generation == 1


# Three and three do not fit, and wait for each other.
@pytest.mark.parametrize("tasks", [2, 3])
def test_two_jobs_at_once(session: Any, tasks: int) -> None:
    def name(job: int) -> tuple[int, int]:
        context = deuteron.context()
        context.barrier()
        time.sleep(0.5)
        return job, context.rank

    results: dict[int, Any] = {}

    def job(number: int) -> None:
        results[number] = deuteron.spark.run(name, args=(number,), num_proc=tasks, verbose=0)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [(number, rank) for rank in range(tasks)] for number in range(2)}


def test_what_can_never_be_is_refused_at_once(session: Any) -> None:
    with pytest.raises(
        InvalidError, match=r"5 tasks are asked for.*never run more than 4 at once: spark.cores.max is 4"
    ):
        deuteron.spark.run(len, num_proc=5)
    with pytest.raises(InvalidError, match="num_proc=0"):
        deuteron.spark.run(len, num_proc=0)
    with pytest.raises(InvalidError, match="which cannot be called"):
        deuteron.spark.barrier(session.range(1)).map_partitions(42)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="give a DataFrame of Spark's"):
        deuteron.spark.barrier([1, 2])


def test_what_is_misspelt_or_missing_is_named(session: Any) -> None:
    with pytest.raises(TypeError, match=r"map_partitions\(\) got an unexpected keyword argument 'verbos'"):
        deuteron.spark.barrier(session.range(4), 2).map_partitions(len, verbos=0)
    with pytest.raises(LaunchError, match="there is no executable 'no-such-python' on"):
        deuteron.spark.run(int, num_proc=2, executable="no-such-python", verbose=0)


def test_executors_that_do_not_come_are_waited_for(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A mock: how long executors are on their way is up to a cluster manager.
    monkeypatch.setattr("deuteron.spark._session.Cluster.slots", lambda cluster: 1)
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "3")
    errors = io.StringIO()
    with pytest.raises(LaunchError, match=r"Spark has 1 of 2 slots after 3 s \(start_timeout\): start more executors"):
        deuteron.spark.run(os.getpid, num_proc=2, stdout=io.StringIO(), stderr=errors)
    assert errors.getvalue() == "deuteron: waiting for Spark: 1 of 2 slots are there\n"


def test_slots_that_others_hold_are_waited_for(session: Any, tmp_path: Path) -> None:
    def hold(batches: Iterator[Any]) -> Iterator[Any]:
        (tmp_path / f"held-{os.getpid()}").touch()
        while not (tmp_path / "free").exists():
            time.sleep(0.1)
        yield from batches

    other = threading.Thread(target=session.range(4, numPartitions=4).mapInArrow(hold, "id long").collect)
    other.start()
    errors = io.StringIO()
    try:
        until(lambda: len(list(tmp_path.glob("held-*"))) == 4)
        text = r"Spark has not started all 2 tasks within 3 s \(start_timeout\): other jobs may hold its slots"
        with pytest.raises(LaunchError, match=text):
            deuteron.spark.run(os.getpid, num_proc=2, start_timeout=3, stdout=io.StringIO(), stderr=errors)
    finally:
        (tmp_path / "free").touch()
        other.join(60)
    assert re.fullmatch(r"deuteron: waiting for Spark: 0 of 2 tasks ready \(\d s\)\n", errors.getvalue())


def test_another_version_on_an_executor_is_named(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deuteron.spark._gang.__version__", "99.0.0")
    text = rf"the driver has deuteron 99.0.0, and there is {re.escape(deuteron.__version__)} on {HOST}"
    with pytest.raises(LaunchError, match=text):
        deuteron.spark.run(time.time, num_proc=2, verbose=0)
    idle(session, 5)


def test_an_interrupt_ends_everything(session: Any, cluster: Cluster) -> None:
    def work() -> None:
        time.sleep(60)

    def interrupt() -> None:
        until(lambda: len(marked(cluster.mark, "_start.py", "task")) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        deuteron.spark.run(work, num_proc=2, verbose=0)
    until(lambda: not marked(cluster.mark, "_start.py"), 3)
    idle(session, 3)


def test_a_killed_executor_is_known_at_once(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / str(deuteron.context().rank)).touch()
        time.sleep(60)

    killed: list[float] = []

    def kill() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 4)
        os.kill(cluster.executors()[0], signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Thread(target=kill).start()
    with pytest.raises(TaskFailedError, match=rf"rank \d on {HOST} was lost") as raised:
        deuteron.spark.run(work, num_proc=4, verbose=0)
    assert time.monotonic() - killed[0] < SOON, raised.value
    until(lambda: not marked(cluster.mark, "_start.py"), 10)
    assert deuteron.spark.run(os.getpid, num_proc=2, verbose=0)


def test_a_lost_executor_is_followed_by_the_next_generation(session: Any, cluster: Cluster, tmp_path: Path) -> None:
    def work() -> int:
        context = deuteron.context()
        if context.generation == 0:
            (tmp_path / str(context.rank)).touch()
            time.sleep(60)
        return context.generation

    def kill() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 4)
        os.kill(cluster.executors()[0], signal.SIGKILL)

    until(lambda: len(cluster.executors()) == 2)
    threading.Thread(target=kill).start()
    errors = io.StringIO()
    assert deuteron.spark.run(work, num_proc=4, restarts=1, verbose=0, stderr=errors) == [1, 1, 1, 1]
    assert "was lost" in errors.getvalue() and "restart 1 of 1 follows" in errors.getvalue()


DRIVER = """
    import time, sys
    from pyspark.sql import SparkSession
    import deuteron.spark

    builder = SparkSession.builder.master(sys.argv[1]).config("spark.cores.max", "2")
    builder = builder.config("spark.executor.cores", "2")
    spark = builder.config("spark.executor.memory", "512m").config("spark.ui.enabled", "false").getOrCreate()

    def work():
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        print("working", flush=True)
        time.sleep(1000)

    deuteron.spark.run(work)
"""


def test_a_killed_driver_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    before = set(marked(cluster.mark, "sleep"))
    words = [sys.executable, str(script), cluster.url]
    driver = subprocess.Popen(words, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout is not None
    seen = 0
    for line in driver.stdout:
        seen += b"working" in line
        if seen == 2:
            break
    until(lambda: len(set(marked(cluster.mark, "sleep", "1000")) - before) == 2)
    driver.kill()
    driver.wait()
    until(lambda: not marked(cluster.mark, "_start.py") and not marked(cluster.mark, "sleep", "1000"), 10)


def devices(folder: Path) -> str:
    """A script that finds four devices, as Spark runs them."""
    file = folder / "devices.sh"
    file.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': list('0123')})}'\n")
    file.chmod(0o755)
    return str(file)


#: Two ranks with two devices each on one worker with four cores and four devices.
TWO_DEVICES_EACH = """
    import deuteron.spark, os, pyspark, sys, time
    from deuteron.errors import InvalidError, TaskFailedError
    from pyspark.sql import SparkSession

    try:
        deuteron.spark.run(os.getpid)
    except InvalidError as error:
        print("REFUSED", error)
    print("VERSION", pyspark.__version__)
    builder = SparkSession.builder.master("local-cluster[1,4,1024]").config("spark.task.cpus", "2")
    for side in ("worker", "executor"):
        builder = builder.config(f"spark.{side}.resource.gpu.amount", "4")
        builder = builder.config(f"spark.{side}.resource.gpu.discoveryScript", sys.argv[1])
    if pyspark.__version__ < "4":
        builder = builder.config("spark.task.resource.gpu.amount", "2")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    wanted = {} if pyspark.__version__ < "4" else {"accelerators": "/gpu", "per_task": 2}

    def work():
        context = deuteron.context()
        context.barrier()
        own = [device.index for device in context.accelerators()]
        return context.rank, context.local_size, os.environ["OMP_NUM_THREADS"], own

    results = deuteron.spark.run(work, **wanted)
    print("RESULT", [result[:3] for result in results])
    print("DEVICES", [len(result[3]) for result in results], sorted(results[0][3] + results[1][3]))

    def fail():
        if deuteron.context().rank == 1:
            raise ValueError("no luck")
        time.sleep(60)

    try:
        deuteron.spark.run(fail, verbose=0)
    except TaskFailedError as error:
        print("FAILED", error)

    def count(partition):
        return sum(len(batch) for batch in partition)

    print("ROWS", sum(deuteron.spark.barrier(spark.range(1000), 2).map_partitions(count, verbose=0)))
    try:
        deuteron.spark.run(os.getpid, num_proc=3)
    except InvalidError as error:
        print("REFUSED", error)
    if pyspark.__version__ < "4":
        try:
            deuteron.spark.run(os.getpid, accelerators="/gpu", per_task=1)
        except InvalidError as error:
            print("REFUSED", error)
    spark.stop()
"""


def check_two_devices_each(lines: list[str]) -> None:
    assert lines[0].startswith("REFUSED there is no active Spark session: make one")
    assert lines[2:6] == [
        "RESULT [(0, 2, '2'), (1, 2, '2')]",
        "DEVICES [2, 2] [0, 1, 2, 3]",
        f"FAILED rank 1 on {HOST} exited with status 1: ValueError: no luck",
        "ROWS 1000",
    ]
    assert "never run more than 2 at once: spark.master is local-cluster[1,4,1024]" in lines[6]


def test_local_cluster_with_two_cores_and_two_devices_for_each_rank(tmp_path: Path) -> None:
    lines = script(tmp_path, TWO_DEVICES_EACH, "local", devices(tmp_path))
    check_two_devices_each(lines)
    assert lines[1] == f"VERSION {pyspark.__version__}" and len(lines) == 7


@needs_spark_before
def test_spark_3_5_takes_devices_from_the_session(tmp_path: Path) -> None:
    lines = script(tmp_path, TWO_DEVICES_EACH, "before", devices(tmp_path), before=True)
    check_two_devices_each(lines)
    assert lines[1].startswith("VERSION 3.5.")
    assert "set spark.task.resource.gpu.amount to 1, or use Spark 4" in lines[7]


@needs_spark_before
def test_an_engine_that_ignores_barrier_is_refused(tmp_path: Path) -> None:
    # Sail does not speak with clients of Spark 4.3 yet.
    lines = script(
        tmp_path,
        """
            import deuteron.spark, os
            from deuteron.errors import LaunchError
            from pysail.spark import SparkConnectServer
            from pyspark.sql import SparkSession

            server = SparkConnectServer("127.0.0.1", 0)
            server.start(background=True)
            address, port = server.listening_address
            spark = SparkSession.builder.remote(f"sc://{address}:{port}").getOrCreate()
            try:
                deuteron.spark.run(os.getpid, num_proc=2, verbose=0)
            except LaunchError as error:
                print("REFUSED", error)
            try:
                deuteron.spark.barrier(spark.range(10), 2).map_partitions(len, verbose=0)
            except LaunchError as error:
                print("REFUSED", error)
            spark.stop()
            server.stop()
        """,
        "sail",
        before=True,
    )
    assert len(lines) == 2
    for line in lines:
        assert "has accepted a barrier stage and runs its tasks one by one: use Apache Spark" in line


def test_dynamic_allocation_is_refused(tmp_path: Path) -> None:
    lines = script(
        tmp_path,
        """
            import deuteron.spark, os
            from deuteron.errors import InvalidError
            from pyspark.sql import SparkSession

            builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
            spark = builder.config("spark.dynamicAllocation.enabled", "true").getOrCreate()
            try:
                deuteron.spark.run(os.getpid)
            except InvalidError as error:
                print("REFUSED", error)
            spark.stop()
        """,
        "dynamic",
    )
    assert len(lines) == 1 and lines[0].startswith("REFUSED spark.dynamicAllocation.enabled is true")


def script(folder: Path, text: str, mark: str, *words: str, before: bool = False) -> list[str]:
    """Runs a script, and returns its lines that begin with a word in capitals; ``before``: with Spark 3.5."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(text))
    own = environment(mark)
    if before:
        own["PYTHONPATH"] = os.pathsep.join([str(BEFORE), own["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(file), *words], env=own, stdout=subprocess.PIPE, timeout=SLOW - 10, text=True
    )
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if re.match("[A-Z]{3,} ", line)]


def test_spark_with_authentication_and_encryption(tmp_path: Path) -> None:
    store = tmp_path / "store.p12"
    words = ["-genkeypair", "-alias", "spark", "-keyalg", "RSA", "-storetype", "PKCS12", "-dname", "CN=localhost"]
    words += ["-ext", "san=dns:localhost,ip:127.0.0.1", "-storepass", "changeit", "-keystore", str(store)]
    subprocess.run(["keytool", *words], check=True, capture_output=True)
    lines = script(
        tmp_path,
        """
            import deuteron.spark, sys
            from pyspark.sql import SparkSession

            settings = {"spark.authenticate.secret": "secret", "spark.ui.enabled": "false"}
            for name in ("authenticate", "io.encryption.enabled", "ssl.enabled", "ssl.rpc.enabled"):
                settings[f"spark.{name}"] = "true"
            for name in ("spark.ssl", "spark.ssl.rpc"):
                settings |= {f"{name}.{side}Store": sys.argv[1] for side in ("key", "trust")}
                settings |= {f"{name}.{side}Password": "changeit" for side in ("keyStore", "trustStore", "key")}
            builder = SparkSession.builder.master("local-cluster[1,2,1024]")
            for name, value in settings.items():
                builder = builder.config(name, value)
            spark = builder.getOrCreate()

            def count(partition):
                deuteron.context().barrier()
                return partition.num_rows

            print("ROWS", sum(deuteron.spark.barrier(spark.range(1000), 2).map_partitions(count, verbose=0)))
            spark.stop()
        """,
        "encrypted",
        str(store),
    )
    assert lines == ["ROWS 1000"]


def test_executors_with_another_python_are_told_apart(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    lines = script(
        tmp_path,
        """
            import deuteron.spark, os, sys
            from deuteron.errors import LaunchError
            from pyspark.sql import SparkSession

            os.environ.update(PYSPARK_PYTHON=sys.argv[1], PYTHONPATH="")
            SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
            try:
                deuteron.spark.run(int, num_proc=2, verbose=0)
            except LaunchError as error:
                print("REFUSED", error)
        """,
        "bare",
        str(tmp_path / "bare" / "bin" / "python"),
    )
    assert len(lines) == 1
    assert "No module named" in lines[0] and "have PYSPARK_PYTHON (or spark.pyspark.python) name one" in lines[0]


def test_connect(tmp_path: Path) -> None:
    lines = script(
        tmp_path,
        """
            import deuteron.spark, io, os, signal, threading, time
            from deuteron.errors import InvalidError, TaskFailedError
            from pyspark.sql import SparkSession

            builder = SparkSession.builder.master("local-cluster[2,2,1024]").config("spark.api.mode", "connect")
            spark = builder.config("spark.ui.enabled", "false").getOrCreate()
            print("KIND", type(spark).__module__)

            def work(number):
                context = deuteron.context()
                for line in range(150):
                    print(f"line {line}")
                context.barrier()
                return context.rank, number

            out = io.StringIO()
            print("RESULT", deuteron.spark.run(work, args=(42,), stdout=out, verbose=0))
            lines = out.getvalue().splitlines()
            print("LINES", len(lines), lines[0], lines[-1])

            def fail():
                if deuteron.context().rank == 1:
                    raise ValueError("no luck")
                time.sleep(60)

            begun = time.monotonic()
            try:
                deuteron.spark.run(fail, num_proc=2, verbose=0)
            except TaskFailedError as error:
                print("FAILED", error, "in fail" in error.traceback, time.monotonic() - begun < 10)

            def count(partition):
                return sum(len(batch) for batch in partition)

            print("ROWS", sum(deuteron.spark.barrier(spark.range(1000), 3).map_partitions(count, verbose=0)))
            try:
                deuteron.spark.run(work, num_proc=5)
            except InvalidError as error:
                print("REFUSED", error)

            threading.Timer(4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                deuteron.spark.run(time.sleep, args=(60,), num_proc=2, verbose=0)
            except KeyboardInterrupt:
                print("INTERRUPTED yes")
            spark.stop()
        """,
        "connect",
    )
    assert lines[0] == "KIND pyspark.sql.connect.session"
    assert lines[1] == "RESULT [(0, 42), (1, 42), (2, 42), (3, 42)]"
    assert lines[2] == "LINES 400 [0] line 50 [3] line 149"
    assert lines[3] == f"FAILED rank 1 on {HOST} exited with status 1: ValueError: no luck True True"
    assert lines[4] == "ROWS 1000"
    assert "never run more than 4 at once" in lines[5]
    assert lines[6] == "INTERRUPTED yes"


SEED = """\
def fn(magic_number):
  import horovod.torch as hvd
  hvd.init()
  print('Hello, rank = %d, local_rank = %d, size = %d, local_size = %d, magic_number = %d' % (hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), magic_number))
  return hvd.rank()

import horovod.spark
horovod.spark.run(fn, args=(42,))
"""  # noqa: E501


def test_the_session_in_the_pyspark_shell(tmp_path: Path) -> None:
    own = {**environment("shell"), "SPARK_HOME": str(HOME), "TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
    shell, terminal = pty.openpty()
    words = [str(HOME / "bin" / "pyspark"), "--master", "local[16]", "--conf", "spark.ui.enabled=false"]
    child = subprocess.Popen(
        words, env=own, cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    seen = b""

    def read_until(mark: bytes, seconds: float) -> bytes:
        nonlocal seen
        end = time.monotonic() + seconds
        while mark not in seen:
            assert time.monotonic() < end, seen.decode(errors="replace")
            if select.select([shell], [], [], 0.5)[0]:
                seen += os.read(shell, 65536)
        before, _, seen = seen.partition(mark)
        return before

    try:
        read_until(b">>> ", 90)
        for line in SEED.splitlines()[:6]:
            os.write(shell, line.encode() + b"\n")
        read_until(b">>> ", 20)
        for line in SEED.splitlines()[6:]:
            os.write(shell, line.encode() + b"\n")
        text = read_until(b"14, 15]", 180).decode()
        assert "Running 16 processes..." in text
        assert re.search(r"\[Stage 0:>.*/ 16\]", text)
        for rank in range(16):
            hello = f"Hello, rank = {rank}, local_rank = {rank}, size = 16, local_size = 16, magic_number = 42"
            assert text.count(hello) == 1
        assert text.rstrip().endswith("[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,")
        os.write(shell, b"exit()\n")
        child.wait(30)
    finally:
        child.kill()
        os.close(shell)
