"""Programs for containers of `py:1`: what people's work does with a GPU and with SIGTERM. Each prints `ready`."""

from __future__ import annotations

from collections.abc import Sequence

Program = list[str]


def holds(*paths: str) -> Program:
    """Has the devices open. SIGTERM ends it at once, as PID 1 too: it has a handler."""
    return _python(f"{_OPEN.format(paths=paths)}\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{_WAIT}")


def saves(path: str, to: str, seconds: float = 0) -> Program:
    """On SIGTERM it writes its checkpoint `to` this file, taking so many seconds, and ends with 0."""
    return _python(
        f"{_OPEN.format(paths=(path,))}\n"
        "def save(*_):\n"
        f"    time.sleep({seconds})\n"
        f"    open({to!r}, 'w').write('saved')\n"
        "    sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, save)\n{_WAIT}"
    )


def ignores_sigterm(path: str) -> Program:
    return _python(f"{_OPEN.format(paths=(path,))}\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{_WAIT}")


def forks_and_ends(path: str) -> Program:
    """The parent opens the device and ends; its child, which never used it, keeps it open. Not for PID 1."""
    return _python(f"{_OPEN.format(paths=(path,))}\nif os.fork():\n    os._exit(0)\nos.setsid()\n{_WAIT}")


def forks_and_waits(path: str, children: int = 2) -> Program:
    """A parent with workers that share its device, as a data loader does; SIGTERM reaches the parent only."""
    return _python(
        f"{_OPEN.format(paths=(path,))}\n"
        f"for _ in range({children}):\n"
        "    if not os.fork():\n"
        "        break\n"
        "else:\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"{_WAIT}"
    )


def works(path: str, share: float = 1.0) -> Program:
    """Has the device open and uses this share of a core."""
    return _python(
        f"{_OPEN.format(paths=(path,))}\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('ready')\n"
        "while True:\n"
        f"    end = time.monotonic() + {share} / 10\n"
        "    while time.monotonic() < end:\n"
        "        pass\n"
        f"    time.sleep({1 - share} / 10)\n"
    )


def serves(path: str, port: int = 8080) -> Program:
    """Has the device open and greets whoever connects."""
    return _python(
        f"{_OPEN.format(paths=(path,))}\nimport socket\n"
        f"server = socket.create_server(('0.0.0.0', {port}))\nprint('ready')\n"
        "while True:\n"
        "    guest, _ = server.accept()\n"
        "    guest.sendall(b'hello')\n"
        "    guest.close()\n"
    )


def shell(path: str, then: Sequence[str] = ("sleep", "1000000")) -> Program:
    """For `box:1`: a program that inherits the open device from its shell."""
    return ["sh", "-c", f'exec 3<"{path}"; exec "$@"', "sh", *then]


def trapping_shell() -> Program:
    """PID 1 of a dev container: a shell that leaves at once on SIGTERM and takes everyone with it."""
    return ["sh", "-c", 'trap "exit 0" 15; while sleep 1 & wait $!; do :; done']


_OPEN = "import os, signal, sys, time\nheld = [os.open(path, os.O_RDWR) for path in {paths!r}]"
_WAIT = "print('ready')\nwhile True:\n    signal.pause()"


def _python(text: str) -> Program:
    return ["python3", "-u", "-c", text]
