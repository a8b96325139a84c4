"""The one tree of exceptions: what happened, to whom, and what to do about it."""

from __future__ import annotations


class Error(Exception):
    """Whatever Deuteron raises is one of these."""


class InvalidError(Error, ValueError):
    """The caller did something wrong; everything else goes on."""


class NotInitializedError(InvalidError):
    """A call needs ``init()`` first."""


class UnavailableError(Error, NotImplementedError):
    """Part of a compatible interface that is not there yet."""


class DataError(Error):
    """Data is missing, broken, or not what it should be; the message names the file and the column."""


class CollectiveError(Error, RuntimeError):
    """An operation among ranks failed. Horovod's scripts know it as ``HorovodInternalError``."""


class MismatchError(CollectiveError):
    """Ranks called different operations, or the same one with other shapes, types or roots."""


class TimedOutError(CollectiveError, TimeoutError):
    """A time limit has passed."""


class PeerLostError(CollectiveError):
    """A rank exited, was killed, stopped, or can no longer be reached."""

    def __init__(self, message: str, rank: int = -1, host: str = "", generation: int = 0) -> None:
        super().__init__(message)
        #: The lost rank.
        self.rank = rank
        #: Its host.
        self.host = host
        #: Attempt number of the gang.
        self.generation = generation


class AbortedError(CollectiveError):
    """A rank ended the group on purpose."""

    def __init__(self, message: str, rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        #: The rank that ended it.
        self.rank = rank
        #: Its host.
        self.host = host


class GangEndedError(CollectiveError):
    """Another task failed, or whoever started the gang is gone."""


class LaunchError(Error, RuntimeError):
    """The gang did not start: nothing of the user's has run."""


class RemoteTraceback(Exception):
    """The traceback of a task, as the cause of the exception that reports it."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]) if self.args else ""


class TaskFailedError(Error, RuntimeError):
    """A task failed, and with it the gang."""

    def __init__(
        self, message: str, rank: int = -1, host: str = "", generation: int = 0, ending: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        #: The first that failed.
        self.rank = rank
        #: Where it ran.
        self.host = host
        #: Attempt number of the gang.
        self.generation = generation
        #: How it ended: "exited with status 1", "was killed by signal 9".
        self.ending = ending
        #: Its traceback if it told one, else its last lines.
        self.traceback = traceback
        if traceback:
            self.__cause__ = RemoteTraceback(traceback)

    def __str__(self) -> str:
        # Who reads one line only is to see what was raised.
        message = super().__str__()
        told = self.traceback.startswith("Traceback ")
        return f"{message}: {self.traceback.splitlines()[-1]}" if told else message

    def __reduce__(self) -> tuple[object, ...]:
        details = (self.rank, self.host, self.generation, self.ending, self.traceback)
        return type(self), (*self.args, *details)
