"""Errors of an engine, as sentences."""

from __future__ import annotations

from gpukeeper.model.errors import PlatformError

NOT_FOUND, FORBIDDEN, CONFLICT, NOT_MODIFIED = 404, 403, 409, 304


class EngineError(PlatformError):
    """The engine responded with an error status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"the engine responded with status {status}: {words}")
        self.status, self.words = status, words

    @property
    def is_gone(self) -> bool:
        """The engine's own message for it. Any other 404 (an unknown path, a proxy) proves nothing."""
        message = self.words.lower()
        return self.status == NOT_FOUND and ("no such" in message or "not known" in message)


class EngineSilent(PlatformError):
    """The engine did not answer, or not in time. The request may have been executed."""


def cannot_connect(address: str, why: str) -> EngineSilent:
    hint = ""
    if "Permission denied" in why or "Errno 13" in why:
        hint = "; run as root, or as a member of the socket's group"
    elif "No such file" in why or "Connection refused" in why:
        hint = "; is it running? If it is on another address, set DOCKER_HOST"
    return EngineSilent(f"the engine at {address} cannot be reached: {why}{hint}")
