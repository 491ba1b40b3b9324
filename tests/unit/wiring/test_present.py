"""The machine as of now has several readers: none of them takes a change away from another."""

from __future__ import annotations

from pathlib import Path

from gpukeeper.model.series import Sample, Signal
from tests.unit.interfaces.web.sites import dashboard


def test_what_one_reader_has_seen_is_still_new_for_another(tmp_path: Path) -> None:
    with dashboard(tmp_path) as site:
        present, keeper = site.session.present, site.session.keeper
        delta, seen, whole = site.call(lambda: present.changes(0))
        assert whole
        (tile,) = [one for one in delta.gpus if one.key]

        async def measured() -> None:
            keeper.live.measured([Sample(tile.key, Signal.GPU, tile.device, keeper.clock.now(), 40.0)])

        site.call(measured)
        (scraped,) = [one for one in site.call(present.gpus) if one.key]
        assert scraped.history[-1] == 40.0
        later, _, whole = site.call(lambda: present.changes(seen))
        assert (later.gpus, later.workloads, whole) == ((scraped,), (), False)
