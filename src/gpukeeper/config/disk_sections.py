"""The sections of a policy file about files and about what a container engine keeps."""

from __future__ import annotations

from pydantic import Field

from gpukeeper.config import fields as f
from gpukeeper.config.section import Section, about
from gpukeeper.model import policy as model
from gpukeeper.platforms.ray.settings import RaySettings

_T = model.Temporary(root="/tmp", names=())  # noqa: S108  (only its defaults are used)


class Temporary(Section):
    root: f.Root = Field(description="Directory. Nothing outside it is deleted, and links are not followed.")
    names: list[f.NamePattern] = Field(description="Names of trees directly below the root. Shell patterns.")
    above: f.Size = about(_T.above, "Delete only if all matching trees below the root together are larger than this.")
    older_than: f.Span = about(_T.older_than, "Minimum time without use.")
    under_pressure: f.Span = about(_T.under_pressure, "The same while the disk is too full; see `disk`.")
    keep: list[f.NamePattern] = about(list(_T.keep), "Names that are never deleted. Shell patterns.")


_DM = model.DiskMarks()


class Disk(Section):
    high: f.Share = about(
        _DM.high, "A disk above this share of bytes or inodes is too full: `under_pressure` applies ..."
    )
    low: f.Share = about(_DM.low, "... until it is below this share.")
    unreadable: list[str] = about(
        list(_DM.unreadable),
        "Programs of root whose open files even root cannot read, by their name in /proc/PID/comm, and that use no "
        "trees that may be deleted. Any other unreadable process keeps every tree.",
    )


_O = model.Reports()


class Reports(Section):
    roots: list[f.Root] = about(list(_O.roots), "Directories; each entry directly below one is a report.")
    older_than: f.Limit = about(
        _O.older_than, "Delete a report if its newest file is older than this. `none`: only report."
    )
    keep: list[f.NamePattern] = about(list(_O.keep), "Names that are never deleted. Shell patterns.")
    keep_last: f.CountOrZero = about(_O.keep_last, "Number of newest reports per root that are never deleted.")
    archive: bool = about(_O.archive, "Save a report as evidence before deleting it, so that `restore` can restore it.")


_Y = RaySettings()


class Ray(Section):
    workers: list[str] = about(
        list(_Y.workers), "Containers that are Ray nodes: names, or labels as `key=value`. Shell patterns."
    )
    dashboard: f.Address = about(_Y.dashboard, "URL of Ray's dashboard. Default: as reported by the cluster.")
    roots: list[f.Root] = about(list(_Y.roots), "Directories of temporary files, as seen by each node.")
    names: list[f.NamePattern] = about(list(_Y.names), "Names of trees directly below a root. Shell patterns.")
    keep: list[f.NamePattern] = about(list(_Y.keep), "Names that are never deleted. Shell patterns.")
    above: f.Size = about(
        _Y.above, "Delete only if all matching trees of a node, in all its roots, together are larger than this."
    )
    above_counts: f.CountedWord = about(
        _Y.above_counts, "`all`: compare `above` with everything in the roots, not only with trees that may be deleted."
    )
    older_than: f.Span = about(_Y.older_than, "Minimum time without use, on a node that Ray reports as idle.")
    under_pressure: f.Span = about(_Y.under_pressure, "The same while the disk is too full; see `disk`.")
    cpu: f.Percent = about(
        _Y.cpu,
        "A node above this CPU usage is busy in any case: percent of one core, without Ray's processes.",
    )
    window: f.Interval = about(_Y.window, "Minimum window of the CPU measurement.")
    sessions: f.Limit = about(
        _Y.sessions, "Delete dead sessions after this time without use; at least 1h. `none`: only report."
    )
    logs: f.Limit = about(
        _Y.logs, "The same for logs of ended processes of a live session, with a resolution of one hour."
    )


_I = model.Images()


class Images(Section):
    unused: f.Limit = about(_I.unused, "Remove after this time without observed use. `none`: only report.")
    under_pressure: f.Limit = about(
        _I.under_pressure,
        "The same while the disk of the engine's data root is too full; see `disk`. `none`: no sooner.",
    )
    above: f.Size | None = about(
        _I.above,
        "If unused images together are larger than this, remove the least recently used of them after `under_pressure` "
        "(default: 1d), until they are not.",
    )
    keep: list[str] = about(list(_I.keep), "Names of images that are never removed. Shell patterns.")


_BC = model.BuildCache()


class BuildCache(Section):
    unused: f.Limit = about(_BC.unused, "Remove if no build used it for this time. `none`: only report.")


_V = model.Volumes()


class Volumes(Section):
    anonymous_unused: f.Limit = about(
        _V.anonymous_unused,
        "Remove a volume without a name after this time without a container. Its files are lost. `none`: only report. "
        "Volumes with a name are only reported.",
    )


_NW = model.Networks()


class Networks(Section):
    unused: f.Limit = about(_NW.unused, "Remove after this time without a container. `none`: only report.")
