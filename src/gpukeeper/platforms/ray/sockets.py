"""Whether a process listens behind a session's sockets. By connecting, which works in any network namespace."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

from gpukeeper.disk import kernel
from gpukeeper.model.unknown import Unknown

FOLDER = "sockets"
PATIENCE = 2.0  # seconds
NO_LISTENER = frozenset({errno.ECONNREFUSED, errno.ENOENT})


def listener(session: int) -> str | Unknown | None:
    """Of the session that is open as this descriptor: a sentence, or None if every socket in it is dead. By descriptor,
    so that neither the current name of the session nor the length of its path matters.
    """
    try:
        directory = kernel.open_inside(session, FOLDER)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Unknown(f"its sockets could not be read: {error.strerror}")
    try:
        names = sorted(name for name in os.listdir(directory) if _is_socket(directory, name))  # noqa: PTH208
        answers = [answer for name in names if (answer := _connect_error(directory, name)) is not None]
    except OSError as error:
        return Unknown(f"its sockets could not be read: {error.strerror}")
    finally:
        os.close(directory)
    return next((one for one in answers if isinstance(one, str)), next(iter(answers), None))


def _connect_error(directory: int, name: str) -> str | Unknown | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(PATIENCE)
            client.connect(f"/proc/self/fd/{directory}/{name}")
            pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    except OSError as error:
        if error.errno in NO_LISTENER:
            return None
        return Unknown(f"whether a process listens on its socket {name} is unknown: {error.strerror or error}")
    return f"pid {pid} listens on its socket {name}"


def _is_socket(directory: int, name: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
