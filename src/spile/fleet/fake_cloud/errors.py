"""What the API answers instead."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["ApiError"]


class ApiError(Exception):
    """What the API answers instead: an HTTP status, a status word and a message."""

    WORDS: ClassVar[dict[int, str]] = {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        409: "ALREADY_EXISTS",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
    }

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        word = self.WORDS.get(self.status, "UNKNOWN")
        return {"error": {"code": self.status, "message": self.message, "status": word}}
