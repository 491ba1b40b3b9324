"""Records in the ledger which policy is in effect, and what differs from the one before."""

from __future__ import annotations

from hashlib import blake2b

from gpukeeper.config.load import Loaded
from gpukeeper.config.show import rows
from gpukeeper.ledger.policy_record import record_policy
from gpukeeper.wiring.session import Session

NOT_RECORDED = ("notify", "fleet")  # commands and addresses: only that they differ


async def record_policy_change(session: Session) -> None:
    loaded, now = session.loaded, session.keeper.clock.now()
    await record_policy(session.ledger, loaded.policy.digest, loaded.source, _values(loaded), now)


def _values(loaded: Loaded) -> dict[str, str]:
    return {
        one.setting: f"value {_digest(one.text)}" if one.setting.startswith(NOT_RECORDED) else one.text
        for one in rows(loaded)
    }


def _digest(words: str) -> str:
    return blake2b(words.encode(errors="surrogateescape"), digest_size=6).hexdigest()
