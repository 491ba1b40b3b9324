"""Is this the expected machine, and can it be tested? Reads counts, versions and limits; runs nothing.

Expected GPUs that are missing are the one fault that every other check overlooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpukeeper.acceptance.check import Check, CheckContext, CheckRun, CheckSize, RunMode
from gpukeeper.acceptance.checks.health import links_expected
from gpukeeper.acceptance.judging.replies import FAILURE_KINDS, classify
from gpukeeper.acceptance.record import Finding, Machine, Remedy
from gpukeeper.model.gpu import Fact, Grade
from gpukeeper.model.unknown import Unknown

NAME = "environment"
LEAST_SHM = 1 << 30  # NCCL takes some MiB for each pair of ranks, loaders of data more
UNIFORM = (("vbios", "VBIOS"), ("firmware", "GSP firmware"), ("inforom", "InfoROM"))


def interpret(trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    machine = context.machine
    found = [*_torch(machine), *_limits(machine)] if context.wish.device == "cpu" else _of_gpus(machine, context)
    judged = any(one.verdict is not Grade.SKIPPED for one in found)
    return tuple(found) if judged else (*found, _ok(machine))


def _of_gpus(machine: Machine, context: CheckContext) -> list[Finding]:
    return [
        *_none(machine),
        *_count(machine, context),
        *_bus(machine),
        *_torch(machine),
        *_uniform(machine),
        *_limits(machine),
        *_fabric(machine),
    ]


def _ok(machine: Machine) -> Finding:
    count = 0 if isinstance(machine.gpus, Unknown) else len(machine.gpus)
    versions = ", ".join(
        f"{name} {fact}"
        for name in ("driver", "cuda", "torch", "nccl")
        if isinstance(fact := machine.environment.get(name), str)
    )
    return _finding(Grade.PASS, "ok", f"{count} GPU{'' if count == 1 else 's'}, {versions or 'versions unknown'}")


def _none(machine: Machine) -> Iterator[Finding]:
    """No GPU is no success (C17.2): it used to end in exit 0."""
    if isinstance(machine.gpus, Unknown):
        kind = classify(machine.gpus.why)
        lesson = FAILURE_KINDS[kind if kind in ("driver_mismatch", "lost_gpu", "fabric") else "no_gpu"]
        words = f"{lesson.sentence} {lesson.advice} Driver output: {machine.gpus.why}"
        yield _finding(lesson.grade, "no-gpu", words, lesson.remedy)
    elif not machine.gpus:
        lesson = FAILURE_KINDS["no_gpu"]
        yield _finding(Grade.INCONCLUSIVE, "no-gpu", f"{lesson.sentence} {lesson.advice}", lesson.remedy)


def _count(machine: Machine, context: CheckContext) -> Iterator[Finding]:
    expected = context.wish.expected
    if isinstance(machine.gpus, Unknown):
        return
    whole = len({gpu.part_of or gpu.uuid for gpu in machine.gpus})
    if expected is None:
        if machine.gpus:
            words = f"--expect is not set; {whole} GPUs found. Set it to detect a missing GPU"
            yield _finding(Grade.SKIPPED, "count-not-expected", f"{words}: --expect {whole}")
    elif whole < expected:
        words = (
            f"{whole} of {expected} expected GPUs found. Check the kernel log and lspci for the missing ones; reseat"
        )
        yield _finding(Grade.FAIL, "gpus-missing", f"{words}, or fix --expect", Remedy.RESEAT_OR_CABLE, value=whole)
    elif whole > expected:
        words = f"{whole} GPUs found, {expected} were expected. Fix --expect, or check the additional GPUs"
        yield _finding(Grade.WARN, "gpus-more", words, Remedy.CHECK_CONFIG, value=whole)


def _bus(machine: Machine) -> Iterator[Finding]:
    for why in machine.silent:
        words = f"a GPU is present and does not respond: {why}. Reboot; if it happens again, reseat or replace it"
        yield _finding(Grade.FAIL, "gpu-silent", words, Remedy.REBOOT)
    if isinstance(machine.on_bus, Unknown) or isinstance(machine.gpus, Unknown):
        return
    named = len({gpu.part_of or gpu.uuid for gpu in machine.gpus}) + len(machine.silent)
    if machine.on_bus > named:
        words = f"the PCI bus shows {machine.on_bus} GPUs, the driver lists {named}. Check dmesg for the others; reboot"
        yield _finding(Grade.FAIL, "gpu-unnamed", f"{words}, then reseat", Remedy.REBOOT, value=named)


def _torch(machine: Machine) -> Iterator[Finding]:
    """Not installed, or not able to use this GPU: reported before anything else is tried (C1.9)."""
    torch, why = machine.environment.get("torch", Unknown("not checked")), machine.environment.get("torch_why")
    reason = why if isinstance(why, str) else torch.why if isinstance(torch, Unknown) else ""
    if isinstance(torch, str) and not reason:
        return
    kind = classify(reason)
    if kind == "failed" and not isinstance(torch, str):
        kind = "no_torch"
    lesson = FAILURE_KINDS[kind]
    quoted = f" Output: {reason}" if reason else ""
    words = f"{lesson.sentence} {lesson.advice}{quoted}"
    yield _finding(lesson.grade, kind.replace("_", "-"), words, lesson.remedy)


def _uniform(machine: Machine) -> Iterator[Finding]:
    gpus = () if isinstance(machine.gpus, Unknown) else machine.gpus
    for fact, what in UNIFORM:
        for name in sorted({gpu.name for gpu in gpus if isinstance(gpu.name, str)}):
            seen = Counter(str(gpu.facts[fact]) for gpu in gpus if gpu.name == name and _is_known(gpu.facts.get(fact)))
            if len(seen) > 1:
                odd = ", ".join(f"{count}× {version}" for version, count in seen.most_common())
                words = f"{what} of {name} differs between GPUs ({odd}). Update them to one version"
                yield _finding(Grade.WARN, f"{fact}-mixed", words, Remedy.CHECK_CONFIG)
    models = sorted({gpu.name for gpu in gpus if isinstance(gpu.name, str)})
    if len(models) > 1:
        yield _finding(
            Grade.WARN, "models-mixed", f"different GPU models in one machine: {', '.join(models)}", Remedy.WATCH
        )


def _limits(machine: Machine) -> Iterator[Finding]:
    shm = machine.environment.get("shm_bytes")
    if isinstance(shm, int) and shm < LEAST_SHM:
        words = (
            f"shared memory is {shm >> 20} MiB, so NCCL and data loaders may fail. Set it to 16 GiB: --shm-size=16g or"
        )
        yield _finding(
            Grade.WARN, "shm-small", f"{words} --ipc=host (a memory-backed volume in a pod)", Remedy.CHECK_CONFIG
        )
    locked = machine.environment.get("memlock")
    several = not isinstance(machine.gpus, Unknown) and len(machine.gpus) > 1  # one GPU has no peer to reach over RDMA
    if isinstance(locked, int) and several:
        words = (
            f"only {locked >> 10} KiB of memory can be locked, so RDMA and pinned copies may fail. Remove the limit:"
        )
        yield _finding(
            Grade.WARN, "memlock-low", f"{words} --ulimit memlock=-1, or ulimit -l unlimited", Remedy.CHECK_CONFIG
        )


def _fabric(machine: Machine) -> Iterator[Finding]:
    """Only a machine whose GPUs meet at a switch needs it, and only there it is missed."""
    gpus = () if isinstance(machine.gpus, Unknown) else machine.gpus
    switched = len(gpus) >= 8 and any(links_expected(gpu) for gpu in gpus)
    if machine.environment.get("fabric_manager") is False and switched:
        words = "the fabric manager is not running, so NVLink does not work. Start the version that matches the driver:"
        yield _finding(
            Grade.WARN, "fabric-manager", f"{words} systemctl start nvidia-fabricmanager", Remedy.CHECK_CONFIG
        )


def _is_known(fact: Fact) -> bool:
    return fact is not None and not isinstance(fact, Unknown)


def _finding(
    grade: Grade, code: str, words: str, remedy: Remedy = Remedy.NONE, *, value: float | None = None
) -> Finding:
    return Finding(
        check=NAME,
        metric=code.replace("-", "_"),
        verdict=grade,
        code=code if code in PLAIN else f"{NAME}-{code}",
        message=f"{words[:1].upper()}{words[1:].rstrip('.')}.",
        action=remedy,
        value=value,
    )


# What people search for: the codes of acceptance/judging/replies.py, and the count.
PLAIN = frozenset(
    {*(kind.replace("_", "-") for kind in FAILURE_KINDS), "gpus-missing", "gpus-more", "gpu-silent", "gpu-unnamed"}
)

CHECK = Check(
    name=NAME,
    title="Environment",
    proves="The expected GPUs are present, the driver lists all GPUs on the PCI bus, and PyTorch can use them.",
    cannot="Runs nothing on a GPU, and without --expect cannot detect a missing GPU.",
    how=RunMode.LOOK,
    servings=(CheckSize(depth=0, seconds=0.5, worth=100, what="counts, versions, limits"),),
    interpret=interpret,
)
