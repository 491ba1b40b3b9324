"""The errors of gpukeeper, by who can fix them. Each class has its exit code.

    KeeperError              1
    ├── UsageError           2   the user's: unknown name, missing right
    ├── PolicyError         10   the user's: every problem of a policy file, at once
    ├── LedgerError          1   the ledger is damaged, foreign, full or cannot be opened
    ├── LeaseHeld           11   another pass runs at this place
    └── PlatformError        1   the world's: silent, refused; its workloads are unknown, never empty

A broken invariant is an AssertionError whose message calls it a bug.
"""

from __future__ import annotations

from collections.abc import Sequence


class KeeperError(Exception):
    exit_code = 1


class UsageError(KeeperError):
    exit_code = 2


class PolicyError(KeeperError):
    exit_code = 10

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(
            "\n".join((*self.problems, f"{count}. Nothing was changed. All settings: gpukeeper policy schema"))
        )


class LedgerError(KeeperError):
    pass


class LeaseHeld(KeeperError):
    exit_code = 11


class PlatformError(KeeperError):
    pass
