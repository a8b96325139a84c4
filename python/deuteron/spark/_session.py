"""What the user's Spark session is, and how many tasks it can run at once."""

from __future__ import annotations

import re
from typing import Any

from deuteron.errors import InvalidError


def active() -> Any:
    """The session of this thread, or the one that there is."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise InvalidError(f"Spark is not here ({error}): install deuteron[spark]") from None
    session = SparkSession.getActiveSession()
    if session is None:
        from pyspark import SparkContext

        if SparkContext._active_spark_context is None:
            raise InvalidError(
                "there is no active Spark session: make one with SparkSession.builder.getOrCreate(), or type this in "
                "pyspark"
            )
        session = SparkSession.builder.getOrCreate()
    return session


class Accelerators:
    """What each task asks for."""

    def __init__(self, path: str, per_task: int, memory: int | str | None, required: bool) -> None:
        parts = path.split("/")
        if len(parts) < 2 or parts[0] or not parts[1]:
            raise InvalidError(f"accelerators={path!r}: give a path, such as /gpu or /gpu/h200")
        if isinstance(per_task, bool) or not isinstance(per_task, int) or per_task < 1:
            raise InvalidError(f"per_task={per_task!r}: give a whole number, at least 1")
        self.path, self.kind = path, parts[1].lower()
        self.per_task, self.memory, self.required = per_task, memory, required


class Cluster:
    """What a session can be asked for."""

    def __init__(self, session: Any, accelerators: Accelerators | None) -> None:
        self.session = session
        self.is_connect = "connect" in type(session).__module__
        self.accelerators = accelerators
        self.note: str | None = None
        if self._flag("spark.dynamicAllocation.enabled"):
            raise InvalidError(
                "spark.dynamicAllocation.enabled is true, and Spark does not run barrier stages with it: set it to "
                "false, and spark.executor.instances to a number"
            )
        self.cpus = int(self.setting("spark.task.cpus", "1"))
        if self.accelerators is None:
            self.accelerators = self._configured()
        self.profile = self._profile()

    def setting(self, name: str, default: str = "") -> str:
        value = self.session.conf.get(name, default)
        return default if value is None else str(value)

    def _flag(self, name: str) -> bool:
        return self.setting(name, "false").lower() == "true"

    def _configured(self) -> Accelerators | None:
        """What the session gives to every task anyway."""
        amount = _whole(self.setting("spark.task.resource.gpu.amount"))
        return None if amount is None else Accelerators("/gpu", amount, None, True)

    def _profile(self) -> Any:
        """What a task of the stage asks Spark for, if it is not what every task of the session has."""
        wanted = self.accelerators
        if wanted is None:
            return None
        name = f"spark.executor.resource.{wanted.kind}.amount"
        of_executor = _whole(self.setting(name))
        if of_executor is None or of_executor < wanted.per_task:
            has = "nothing" if of_executor is None else of_executor
            if wanted.required:
                raise InvalidError(
                    f"{wanted.path} for each task is asked for, {wanted.per_task} of it, and {name} is {has}: set it "
                    f"and spark.executor.resource.{wanted.kind}.discoveryScript, or make the request optional"
                )
            self.note = f"{name} is {has}, so tasks run without {wanted.path}"
            return None
        if _whole(self.setting(f"spark.task.resource.{wanted.kind}.amount")) == wanted.per_task:
            return None
        import inspect

        from pyspark.sql import DataFrame

        if "profile" not in inspect.signature(DataFrame.mapInArrow).parameters:
            raise InvalidError(
                f"this Spark takes the accelerators of a task from the session alone: set "
                f"spark.task.resource.{wanted.kind}.amount to {wanted.per_task}, or use Spark 4"
            )
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        requests = TaskResourceRequests().cpus(self.cpus).resource(wanted.kind, wanted.per_task)
        return ResourceProfileBuilder().require(requests).build

    @property
    def has_logs(self) -> bool:
        """Whether executors write elsewhere than this process, which shows what ranks print anyway."""
        return self.is_connect or re.fullmatch(r"local(\[.*\])?", self.setting("spark.master")) is None

    @property
    def _uses_accelerators(self) -> bool:
        return self.accelerators is not None and self.note is None

    def slots(self) -> int | None:
        """How many tasks can run at once on the executors that are there now; ``None`` if only the server knows."""
        if self.is_connect:
            return None
        context = self.session.sparkContext._jsc.sc()
        manager = context.resourceProfileManager()
        if self.profile is None:
            profile = manager.defaultResourceProfile()
        else:
            profile = self.profile._java_resource_profile
            manager.addResourceProfile(profile)
        return int(context.maxNumConcurrentTasks(profile))

    def default_parallelism(self) -> int:
        """How many partitions Spark makes by itself, where it does not tell more."""
        rows = self.session.range(100_000).selectExpr("max(spark_partition_id()) + 1 as number").collect()
        return int(rows[0].number)

    def most(self) -> tuple[int, str] | None:
        """The most tasks that the configuration can ever give, and why; ``None`` if it does not say."""
        master = self.setting("spark.master")
        executors: int | None = None
        if match := re.fullmatch(r"local(?:\[([0-9]+|\*)(?:, *[0-9]+)?\])?", master):
            cores = self._local_cores(match[1] or "1")
            return cores // self.cpus, f"spark.master is {master}{self._each()}"
        if match := re.fullmatch(r"local-cluster\[ *([0-9]+) *, *([0-9]+) *, *[0-9]+ *\]", master):
            executors, cores = int(match[1]), int(match[2])
            why = f"spark.master is {master}"
        elif master.startswith("spark://"):
            total = _whole(self.setting("spark.cores.max"))
            if total is None:
                return None
            cores = _whole(self.setting("spark.executor.cores")) or total
            executors, why = max(total // cores, 1), f"spark.cores.max is {total}"
            if self._uses_accelerators and cores == total:
                return total // self.cpus, why + self._each()
        elif master.startswith("yarn") or master.startswith("k8s"):
            executors = _whole(self.setting("spark.executor.instances")) or 2
            cores = _whole(self.setting("spark.executor.cores")) or 1
            why = f"spark.executor.instances is {executors} and spark.executor.cores is {cores}"
        else:
            return None
        each = cores // self.cpus
        if self._uses_accelerators:
            assert self.accelerators is not None
            devices = _whole(self.setting(f"spark.executor.resource.{self.accelerators.kind}.amount")) or 0
            each = min(each, devices // self.accelerators.per_task)
            why += f", an executor has {devices} of {self.accelerators.kind}"
        return executors * each, why + self._each()

    def _each(self) -> str:
        return f" and spark.task.cpus is {self.cpus}" if self.cpus > 1 else ""

    def _local_cores(self, text: str) -> int:
        if text != "*":
            return int(text)
        if self.is_connect:
            import os

            return os.cpu_count() or 1
        return int(self.session.sparkContext._jvm.java.lang.Runtime.getRuntime().availableProcessors())


def _whole(text: str) -> int | None:
    """A number of the configuration, if it is one and not nothing."""
    try:
        number = int(float(text))
    except ValueError:
        return None
    return number if number > 0 else None
