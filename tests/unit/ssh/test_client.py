"""What a host may send: an endless reply ends that request and nothing else."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gpukeeper.clients import ssh as ssh_module
from gpukeeper.clients.ssh import Envelope, Host, HostError, Program, Settings, SshClient

ENDLESS = "import os\nwhile True: os.write({to}, b'x' * 65536)"
MANY_WORDS = (
    "import os\nfor _ in range(100): os.write(2, b'x' * 65536)\nos.write(2, b'\\nno route to host')\nos._exit(255)"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_module, "REPLY_MAX", 1024 * 1024)


def request(tmp_path: Path, program: str) -> HostError:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!{sys.executable} -IS\n{program}\n")
    ssh.chmod(0o700)
    sends = SshClient(Settings(program=str(ssh)), Program(b"", b"mark"))
    with pytest.raises(HostError) as refused:
        asyncio.run(sends.request(Host("gpu1", "gpu1"), Envelope, "look"))
    return refused.value


def test_a_reply_without_end_is_not_read_any_further(tmp_path: Path) -> None:
    error = request(tmp_path, ENDLESS.format(to=1))
    assert (error.code, str(error)) == ("refused", "gpu1 sent more than 1.0 MiB; its reply was not read")


def test_of_many_error_messages_the_last_is_reported(tmp_path: Path) -> None:
    error = request(tmp_path, MANY_WORDS)
    assert error.code == "unreachable"
    assert str(error).endswith("no route to host")
