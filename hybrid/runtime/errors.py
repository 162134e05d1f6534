"""Errors that end one rank's work, or all ranks' alike, where ranks compute together."""


class SharedError(RuntimeError):
    """An error that all ranks that run a task raise alike at its end; they go on with other tasks."""


class UserCodeError(Exception):
    """Raised from an error of user code, or by a signal, on this rank alone; the other ranks know that its task has
    ended."""
