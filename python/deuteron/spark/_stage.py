"""The barrier stage of one attempt: submitted from a thread of its own, watched, and cancelled by its tag."""

from __future__ import annotations

import contextlib
import inspect
import threading
import uuid
from typing import Any

from deuteron.spark._session import Cluster
from deuteron.spark._task import MARK, Plan, stage, wrong_number

_SCHEMA = "partition bigint, host string, report binary"


class Stage:
    """Tasks of Spark that start agents."""

    def __init__(self, cluster: Cluster, rows: Any, plan: Plan, description: str) -> None:
        self._session = cluster.session
        self._tag = f"deuteron-{uuid.uuid4()}"
        self._description = description
        options: dict[str, Any] = {"barrier": True}
        if cluster.profile is not None:
            options["profile"] = cluster.profile
        self._frame = rows.mapInArrow(stage(plan), _SCHEMA, **options)
        self._tasks = plan.tasks
        self._is_connect = cluster.is_connect
        #: What the supervisor in the first task tells.
        self.report: bytes | None = None
        self._over = threading.Event()
        #: Why it failed.
        self.error: Exception | None = None

        from pyspark import InheritableThread

        # So that it has the user's pool, properties and tags; Spark 3.5 asks for no session.
        takes_session = "session" in inspect.signature(InheritableThread.__init__).parameters
        options = {"session": self._session} if self._is_connect and takes_session else {}
        self._thread = InheritableThread(target=self._submit, daemon=True, **options)
        self._thread.start()

    def _submit(self) -> None:
        try:
            if self._is_connect:
                self._session.addTag(self._tag)
            else:
                context = self._session.sparkContext
                context.addJobTag(self._tag)
                context.setLocalProperty("spark.job.description", self._description)
            rows = self._frame.collect()
            if len(rows) != self._tasks:
                raise RuntimeError(MARK + wrong_number(self._tasks, len(rows)))
            reports = [bytes(row.report) for row in rows if row.report is not None]
            self.report = reports[0] if reports else None
        except Exception as error:
            self.error = error
        finally:
            self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it is over by then."""
        return self._over.wait(seconds)

    def cancel(self) -> None:
        """Ends its tasks, so that their slots are free."""
        # A session that has been stopped has no tasks either.
        with contextlib.suppress(Exception):
            if self._is_connect:
                self._session.interruptTag(self._tag)
            else:
                self._session.sparkContext.cancelJobsWithTag(self._tag)

    @property
    def reason(self) -> str | None:
        """What a task of ours had to say, if that is why it failed."""
        text = str(self.error) if self.error is not None else ""
        _, found, said = text.partition(MARK)
        return said.splitlines()[0] if found else None

    @property
    def is_wrong_number(self) -> bool:
        """Whether it failed because Spark made another number of tasks."""
        return (self.reason or "").startswith(wrong_number(self._tasks, 0)[:-1])
