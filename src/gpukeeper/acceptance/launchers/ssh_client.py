"""The client of acceptance runs over ssh: it sends programs/host.py."""

from __future__ import annotations

from gpukeeper.acceptance.launchers.programs import host as host_program
from gpukeeper.ssh import client
from gpukeeper.ssh.client import Program, Settings


class SshClient(client.SshClient):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Program.of(host_program.__file__, host_program.MARK))
