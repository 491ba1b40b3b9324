"""Connections between GPUs, and MIG slices. Reported, and compared between equal pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode
from gpukeeper.acceptance.checks.health import links_expected
from gpukeeper.acceptance.record import Finding, Remedy
from gpukeeper.model.gpu import Gpu, Grade

NAME = "topology"
LINKED = "nvlink"
NOT_KNOWN = "not known"  # as the driver process reports it


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    if context.wish.device == "cpu" or not context.gpus:
        return (_finding(Grade.SKIPPED, "no-gpu", "there is no GPU"),)
    found = [*_slices(context), *_pairs(context), *_near(context)]
    wrong = [finding for finding in found if finding.verdict is not Grade.SKIPPED]
    return tuple(found) if wrong else (*found, _finding(Grade.PASS, "ok", _picture(context)))


def _slices(context: CheckContext) -> Iterator[Finding]:
    """Slices share their GPU: figures of the whole do not apply, and there is no P2P between them."""
    parts = [gpu for gpu in context.gpus if gpu.part_of is not None]
    for whole in dict.fromkeys(gpu.part_of for gpu in parts):
        mine = Counter(gpu.profile or "not known" for gpu in parts if gpu.part_of == whole)
        cut = ", ".join(f"{count}× {profile}" for profile, count in sorted(mine.items()))
        words = f"GPU {whole} is split into MIG slices ({cut}). Floors of a whole GPU do not apply to them"
        yield _finding(Grade.SKIPPED, "sliced", words)
    whole_ones = [gpu for gpu in context.gpus if gpu.part_of is None]
    if parts and whole_ones:
        words = "some GPUs are split into MIG slices and some are not. Split all or none, unless this is intended"
        yield _finding(Grade.WARN, "mixed-slices", words, Remedy.CHECK_CONFIG)


def _pairs(context: CheckContext) -> Iterator[Finding]:
    """Where NVLink is expected, every pair has it; elsewhere pairs of one model are reported if they differ."""
    unknown = [pair for pair in _of_equals(context) if links_expected(pair[0]) and not _way(*pair, context)]
    if unknown:
        names = ", ".join(f"{one.index} and {two.index}" for one, two in unknown[:4])
        words = f"the connection could not be read for {len(unknown)} pairs (GPU {names}). Run it again; check"
        yield _finding(Grade.INCONCLUSIVE, "not-known", f"{words} that nvidia-smi topo -m works", Remedy.RETEST)
    for one, two in _of_equals(context):
        way = _way(one, two, context)
        if way is None or way == LINKED or not links_expected(one):
            continue
        words = (
            f"GPU {one.index} and GPU {two.index} are connected over {way}, not over NVLink. Check nvidia-smi topo -m,"
        )
        yield _finding(
            Grade.FAIL,
            "no-nvlink",
            f"{words} the fabric manager and the boards' seating",
            Remedy.RESEAT_OR_CABLE,
            gpu=one.uuid,
            other=two.uuid,
        )


def _of_equals(context: CheckContext) -> Iterator[tuple[Gpu, Gpu]]:
    for one, two in combinations([gpu for gpu in context.gpus if gpu.part_of is None], 2):
        if one.name == two.name:
            yield one, two


def _way(one: Gpu, two: Gpu, context: CheckContext) -> str | None:
    """None: not known."""
    way = context.machine.topology.get(one.uuid, {}).get(two.uuid)
    return None if way == NOT_KNOWN else way


def _near(context: CheckContext) -> Iterator[Finding]:
    """A GPU that is far from every CPU explains slow copies from the host."""
    whole = [gpu for gpu in context.gpus if gpu.part_of is None]
    nodes = {gpu.uuid: gpu.facts.get("numa") for gpu in whole}
    homeless = [gpu for gpu in whole if nodes[gpu.uuid] is None]
    if homeless and len(homeless) < len(whole):
        names = ", ".join(f"GPU {gpu.index}" for gpu in homeless)
        words = f"{names} has no NUMA node, the others have one. Check the BIOS; copies from the host may be slow"
        yield _finding(Grade.WARN, "no-numa", words, Remedy.CHECK_CONFIG)


def _picture(context: CheckContext) -> str:
    ways = Counter(way for one, two in _of_equals(context) if (way := _way(one, two, context)))
    if not ways:
        return "one GPU, or the connections are unknown"
    return "pairs of GPUs: " + ", ".join(f"{count} over {way}" for way, count in ways.most_common())


def _finding(
    grade: Grade, code: str, words: str, remedy: Remedy = Remedy.NONE, *, gpu: str | None = None, other: str = ""
) -> Finding:
    return Finding(
        check=NAME,
        metric=code.replace("-", "_"),
        gpu=gpu,
        verdict=grade,
        code=f"{NAME}-{code}",
        message=f"{words[:1].upper()}{words[1:]}.",
        action=remedy,
        evidence={"with": other} if other else {},
    )


CHECK = Check(
    name=NAME,
    title="Topology",
    proves="Every pair of GPUs is connected as the model specifies; MIG slices are reported.",
    cannot="Reads the driver's view of the links; links and collectives test bandwidth and correctness.",
    how=RunMode.LOOK,
    servings=(CheckSize(depth=0, seconds=0.1, worth=50, what="links between all pairs, slices"),),
    interpret=interpret,
)
