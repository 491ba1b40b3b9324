"""Names, labels and annotations of the objects of a run: how it is found again, from any machine. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.model import reading

RUN = "gpukeeper.io/run"
ACCEPTANCE = "gpukeeper.io/acceptance"
OWNER = "gpukeeper.io/owner"
SPEC = "gpukeeper.io/spec"
TARGETS = "gpukeeper.io/targets"
NODE = "gpukeeper.io/node"
OF_RUNS = f"{ACCEPTANCE}=run"
# Which app label the older kit had for a form; the reclaimer recognises them, too.
APPS = {"job": "gpu-acceptance-test", "daemonset": "gpu-accept-daemon"}
ONE_RUN = "gpu-accept-ddp"
NAME_MAX = 46  # a StatefulSet, a JobSet and an indexed Job append to it, and a label value has 63 characters
_HASH = 8


def labels(spec: RunSpec) -> dict[str, str]:
    return {"app": APPS.get(spec.form, ONE_RUN), ACCEPTANCE: "run", RUN: spec.run}


def selector(run: str) -> str:
    return f"{OF_RUNS},{RUN}={run}"


def run_of(labels: Mapping[str, str] | None) -> str:
    return (labels or {}).get(RUN, "")


def described(spec: RunSpec, targets: Sequence[Target], *, whole: bool) -> dict[str, str]:
    """`whole`: with the names of all nodes. Not on every object: 512 of them with 512 names each are megabytes."""
    kept = spec if whole else msgspec.structs.replace(spec, nodes=())
    found = {OWNER: spec.owner, SPEC: msgspec.json.encode(kept).decode()}
    return found | ({TARGETS: msgspec.json.encode(list(targets)).decode()} if whole else {})


def of_pods(spec: RunSpec) -> dict[str, str]:
    return {OWNER: spec.owner}


def spec_of(annotations: Mapping[str, str] | None) -> RunSpec | None:
    """None: it is none of ours, or cannot be read."""
    try:
        return reading.decode((annotations or {}).get(SPEC, ""), RunSpec)
    except ValueError:
        return None


def targets_of(annotations: Mapping[str, str] | None) -> tuple[Target, ...]:
    try:
        return tuple(reading.decode((annotations or {}).get(TARGETS, "[]"), list[Target]))
    except ValueError:
        return ()


def name(run: str, node: str = "") -> str:
    """Of an object. The same for the same run and node, and another one for every other pair: where letters are
    replaced or cut off, a checksum follows."""
    said = f"accept-{run}-{node}" if node else f"accept-{run}"
    slug = re.sub(r"[^a-z0-9]+", "-", said.lower()).strip("-")
    if slug == said and len(slug) <= NAME_MAX:
        return slug
    digest = hashlib.sha256(f"{run}\0{node}".encode()).hexdigest()[:_HASH]
    return f"{slug[: NAME_MAX - _HASH - 1].rstrip('-')}-{digest}"
