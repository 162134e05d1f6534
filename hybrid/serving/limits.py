"""Limits of the HTTP endpoint, and the paths of sessions."""

from dataclasses import dataclass

from hybrid.runtime.inputs import checked_number

SESSION_PATH = "/sessions/"  # before a session's name and the paths of requests that belong to it


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the HTTP endpoint. Raises ValueError for a value outside the range given below.

    Args:
        max_body_bytes: of a request; at least 1.
        timeout_s: seconds of a request, waiting included; above 0.
        requests_per_minute: of a client's address, also all at once; None: no limit.
        max_sessions: recorded at once; at least 1.
    """

    max_body_bytes: int = 16 * 2**20
    timeout_s: float = 600.0
    requests_per_minute: int | None = None
    max_sessions: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "requests_per_minute", "max_sessions"):
            if getattr(self, name) is not None or name != "requests_per_minute":
                checked_number(f"ServerLimits.{name}", getattr(self, name), int, lambda v: v >= 1, "at least 1")
        checked_number("ServerLimits.timeout_s", self.timeout_s, float, lambda v: 0 < v < 1e9, "above 0 and below 1e9")
