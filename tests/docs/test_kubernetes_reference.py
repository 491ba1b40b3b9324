"""The page about Kubernetes names what the code knows; the how-to shows valid policies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

from gpukeeper.config.load import load_text
from gpukeeper.platforms.kubernetes import gpus, lease, marks, translate
from gpukeeper.platforms.kubernetes.capture import (
    ALL_BYTES,
    EVENTS,
    LOG_BYTES,
    LOG_LINES,
    MANIFEST,
    PODS,
    RESTORED_FROM,
    TREE,
    WAS_OWNED,
)
from gpukeeper.platforms.kubernetes.finalizers import FINALIZERS
from gpukeeper.platforms.kubernetes.kinds.catalog import KINDS
from gpukeeper.platforms.kubernetes.kinds.kind import TTL, Kind
from gpukeeper.platforms.kubernetes.kinds.pod import GATE
from gpukeeper.platforms.kubernetes.marks import ENVIRONMENT, RUN_APPS, RUN_ENDED
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "reference" / "kubernetes.md").read_text()
HOW_TO = (ROOT / "docs" / "how-to" / "keep-a-cluster-tidy.md").read_text()
MARKS = (
    *(TTL, marks.HOLD_UNTIL, marks.OWNER, marks.EXEMPT, marks.INFRASTRUCTURE, ENVIRONMENT),
    *(RUN_ENDED, translate.STOPPED, RESTORED_FROM, WAS_OWNED, GATE),
    *(marks.JANITOR_TTL, marks.JANITOR_EXPIRES, marks.TWIN_TTL, marks.KYVERNO_TTL, marks.EXCLUDE, marks.EXCLUDE_UNTIL),
    *(marks.MULTIKUEUE_ORIGIN, *(name for name, _value in marks.POD_HOLDS)),
)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section {title}"
    return found[1]


def test_every_kind_is_named_with_its_group_and_its_ends() -> None:
    wrong = [f"{kind.name}: {why}" for kind in KINDS for why in _missing(kind)]
    assert not wrong, f"correct the section Kinds of docs/reference/kubernetes.md: {wrong}"


def _missing(kind: Kind) -> Iterator[str]:
    rows = [row for row in section("Kinds").splitlines() if re.search(rf"\b{kind.kind}s?\b", row)]
    if not rows:
        yield "no row"
    ends = [f"`{end}`" for end in (*kind.succeeded, *kind.failed)]
    if kind.succeeded and not any(all(end in row for end in ends) for row in rows):
        yield f"no row with {', '.join(ends)}"
    version = f"{kind.group}/{kind.versions[0]}"
    if kind.group and kind.kind not in {"ReplicaSet", "DaemonSet"} and not any(version in row for row in rows):
        yield f"no row with {version}"


def test_every_mark_is_there() -> None:
    assert [mark for mark in MARKS if f"`{mark}" not in section("Marks")] == []


def test_every_resource_that_is_a_gpu_is_there() -> None:
    resources = sorted(gpus.WHOLE | gpus.SLICES | {f"{gpus.SLICE_PREFIX}*"})
    assert [resource for resource in resources if f"`{resource}`" not in section("Kinds")] == []


def test_every_label_of_an_acceptance_run_is_there() -> None:
    assert [label for label in sorted(RUN_APPS) if f"`{label}`" not in section("Acceptance runs")] == []


def test_the_finalizers_are_those_of_the_code() -> None:
    rows = [row.split(" | ")[0] for row in section("Finalizers").splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == set(FINALIZERS)


def test_the_files_of_the_evidence_and_its_limits() -> None:
    page = section("Evidence")
    assert all(f"`{name}`" in page for name in (MANIFEST, TREE, EVENTS))
    assert f"{LOG_BYTES >> 20} MiB and {LOG_LINES[0]:,} lines" in page
    assert f"All together {ALL_BYTES >> 20} MiB" in page
    assert f"{PODS} of them" in page


def test_the_numbers_of_the_lease() -> None:
    shown = ", ".join(f"{one // timedelta(seconds=1)} s" for one in (lease.DURATION, lease.RENEW_DEADLINE, lease.RETRY))
    assert shown in section("Numbers")


def test_the_policies_of_the_how_to_are_valid() -> None:
    """The first is whole; the others are added to it."""
    first, *more = re.findall(r"^```yaml\n(.*?)^```$", HOW_TO, re.MULTILINE | re.DOTALL)
    assert len(more) == 3
    for added in ("", *more):
        loaded = load_text(first + added, "keep-a-cluster-tidy.md")
        assert loaded.warnings == ()
        assert "kubernetes" in loaded.policy.scope
