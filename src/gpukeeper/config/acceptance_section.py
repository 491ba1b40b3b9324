"""The section `acceptance` of a policy file."""

from __future__ import annotations

from gpukeeper.config import fields as f
from gpukeeper.config.section import Section, about
from gpukeeper.model import policy as model

_M = model.MarkSettings()


class Marks(Section):
    taint: bool = about(_M.taint, "Taint nodes that failed, as `accept mark --taint` does. `false`: only label them.")
    max_out: f.AmountValue = about(
        _M.max_out,
        "GPU nodes of a cluster that may be out at the same time. `{count: 5, share: 10%}`: the smaller applies.",
    )
    breaker: f.Share = about(
        _M.breaker,
        "If more than this share of the tested nodes failed, or of the GPU nodes is out, no node is taken out.",
    )
    ignored_taints: list[str] = about(
        list(_M.ignored_taints), "Keys of taints that are there for good: a node that has one is not out."
    )
    repeats: f.Count = about(_M.repeats, "Report a GPU or a machine that was taken out this often ...")
    repeats_within: f.Interval = about(_M.repeats_within, "... within this time.")


class Acceptance(Section):
    marks: Marks = about(Marks(), "Marks on nodes of a cluster: `accept mark`, `node quarantine`.")
