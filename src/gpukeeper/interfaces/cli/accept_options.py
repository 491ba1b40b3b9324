"""The options of `gpukeeper accept`: as typed, and as variables of the older kits and of training launchers say them.

Flags override variables. Every variable that is used is reported; an unsupported value is refused. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.model.errors import UsageError

LONGER = "5m"  # what QUICK=0 requested: the older kit's full run took minutes
_DIGITS = re.compile(r"[0-9]{1,9}")
YES = {"1", "true", "yes", "on"}
NO = {"0", "false", "no", "off"}
ADDRESS = ("MASTER_ADDR", "K8S_MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "POD_NAMESPACE")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a test run."""

    quick: Annotated[bool, typer.Option("--quick", help="Run for about a minute (default).")] = False
    full: Annotated[bool, typer.Option("--full", help="Same as --within 30m.")] = False
    within: Annotated[
        str | None,
        typer.Option(
            "--within", metavar="DURATION", help="Time limit: run as many checks as fit into 5m, 30m, 4h, 24h, …"
        ),
    ] = None
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", metavar="GPU,…", help="Only these GPUs: index, UUID or serial number. Default: all."),
    ] = None
    expect: Annotated[
        int | None, typer.Option("--expect", min=1, metavar="N", help="Expected number of GPUs; fewer is a FAIL.")
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="cuda; or cpu or simulated, for a trial run that accepts no GPU."
        ),
    ] = "cuda"
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="With cpu or simulated: number of devices to use instead of GPUs."),
    ] = None
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            metavar="CHECK,…",
            help="Only these checks; see `gpukeeper check list`.",
            autocompletion=completion.checks,
        ),
    ] = None
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="CHECK,…", help="Skip these checks.", autocompletion=completion.checks),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="CHECK.PARAM=VALUE", help="Override a check parameter; see `gpukeeper check show`."
        ),
    ] = None
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE", help="File with your own floors and ceilings, YAML or JSON."),
    ] = None
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="EXE", help="Python interpreter with PyTorch. Default: found automatically."),
    ] = None
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
    ] = None
    report_name: Annotated[
        str, typer.Option("--report-name", metavar="NAME", help="With --legacy: file name of the summary.")
    ] = "summary.json"
    keep: Annotated[bool, typer.Option("--keep", help="Exclude this report from automatic deletion.")] = False
    legacy: Annotated[
        bool, typer.Option("--legacy", help="Also write the files of the older test kits, directly in --report-dir.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 on WARN, too.")] = False
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Inject faults and verify that each is detected. Tests no GPU.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all findings and skipped checks.")] = False
    json: o.Json = False
    together: Annotated[
        bool, typer.Option("--together", help="Also test several nodes as one run: with --on all of them.")
    ] = False
    report_to_log: Annotated[
        str | None,
        typer.Option(
            "--report-to-log",
            metavar="RUN",
            help="As one node of a run over many: print the report as lines of the log.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of a run over many nodes. Those of a test run are forwarded to each node."""

    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ENGINE", help="Test many nodes: docker, kubernetes, ray, ssh or simulated."),
    ] = None
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="NODES", help="With --on: all, NAME,NAME or a label selector.")
    ] = None
    as_: Annotated[
        str | None,
        typer.Option("--as", metavar="FORM", help="With --on kubernetes: job, daemonset, indexed-job, statefulset, …"),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", min=1, metavar="N", help="With --on: GPUs to request on each node; also --expect."
        ),
    ] = None
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="With --on: the image to run.")] = None
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="With --on: deadline of the run. Default: 1h.")
    ] = None
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="With --on kubernetes: the namespace.")
    ] = None
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="With --on: an option of the engine.")
    ] = None
    owner: Annotated[
        str | None,
        typer.Option("--owner", metavar="NAME", help="With --on: owner of the run. Default: your user name."),
    ] = None
    render: Annotated[
        bool, typer.Option("--render", help="With --on: print what would be started, and start nothing.")
    ] = False
    keep_objects: Annotated[bool, typer.Option("--keep-objects", help="With --on: do not remove what was started.")] = (
        False
    )


@dataclass
class EnvironmentSettings:
    """What the variables request. None: nothing."""

    within: str | None = None
    verbose: bool = False
    report_dir: str | None = None
    expect: int | None = None
    python: str | None = None
    settings: list[str] = field(default_factory=list)  # as --set writes them
    notes: list[str] = field(default_factory=list)  # a sentence each: what was understood

    def below(self, options: RunOptions) -> RunOptions:
        """The options, with what the variables request where no flag does."""
        timed = options.quick or options.full or options.within
        options = replace(
            options,
            within=options.within if timed else self.within or options.within,
            expect=self.expect if options.expect is None else options.expect,
            set_=[*self.settings, *(options.set_ or ())],
            python=options.python or self.python,
            verbose=options.verbose or self.verbose,
        )
        if options.report_dir is not None or not self.report_dir:
            return options
        # Users who set REPORT_DIR read the files of the older kits.
        return replace(options, report_dir=Path(self.report_dir), legacy=True)


def read_variables(environ: Mapping[str, str], *, of_many: bool = False) -> EnvironmentSettings:
    """`of_many`: of a run over many nodes, in which each is tested alone first, whatever started it."""
    if not of_many:
        _refuse_several_nodes(environ)
    environment = EnvironmentSettings(python=environ.get("GPUKEEPER_PYTHON") or None)
    _length(environ, environment)
    _training(environ, environment)
    _expected(environ, environment)
    if _switch(environ, "VERBOSE"):
        environment.verbose = True
        environment.notes.append("VERBOSE=1 means --verbose")
    if folder := environ.get("REPORT_DIR"):
        environment.report_dir = folder
        environment.notes.append(f"REPORT_DIR means --report-dir {folder}")
    _launched(environ, environment)
    return environment


def _length(environ: Mapping[str, str], environment: EnvironmentSettings) -> None:
    quick = _switch(environ, "QUICK")
    if quick:
        environment.notes.append("QUICK=1 is the default")
    elif quick is not None:
        environment.within = LONGER
        environment.notes.append(f"QUICK=0 means --within {LONGER}")


def _training(environ: Mapping[str, str], environment: EnvironmentSettings) -> None:
    smoke = _switch(environ, "TRAIN_SMOKE")
    epochs, steps = _count(environ, "EPOCHS"), _count(environ, "STEPS")
    if epochs is not None:
        if epochs < 2:
            raise UsageError(
                "EPOCHS=1 compares a loss with itself, so a training check could never pass. Nothing was run. "
                "Unset EPOCHS, or set it to 2 or more."
            )
        environment.settings += [f"training.epochs={epochs}", f"ddp.epochs={epochs}"]
        environment.notes.append(f"EPOCHS={epochs} means --set training.epochs={epochs} --set ddp.epochs={epochs}")
    if smoke:
        environment.within = LONGER
        environment.notes.append(f"TRAIN_SMOKE=1 means --within {LONGER}, which includes the check throughput")
    if steps is not None and smoke:
        environment.settings.append(f"throughput.steps={steps}")
        environment.notes.append(f"STEPS={steps} means --set throughput.steps={steps}")
    elif steps is not None:
        environment.notes.append(f"STEPS={steps} is ignored without TRAIN_SMOKE=1")


def _expected(environ: Mapping[str, str], environment: EnvironmentSettings) -> None:
    """Ours before the older kit's."""
    for name in ("GPUKEEPER_EXPECT", "GPUS_PER_NODE"):
        count = _count(environ, name)
        if count is not None:
            environment.expect = count
            environment.notes.append(f"{name}={count} means --expect {count}")
            return


def _refuse_several_nodes(environ: Mapping[str, str]) -> None:
    """A rank of a job of another launcher. Testing the node alone would look like a test of the job."""
    world = _count(environ, "WORLD_SIZE", least=0) or 1
    nodes = _nodes(environ.get("PET_NNODES", ""))
    if world <= 1 and nodes <= 1:
        return
    names = [name for name in (*LAUNCHED, "PET_NNODES", *ADDRESS) if name in environ]
    where = "; ".join(f"{name}={environ[name]}" for name in names)
    here = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE") and nodes <= 1
    advice = (
        "gpukeeper starts one rank per GPU itself: start it once, without the launcher."
        if here
        else "Runs over several nodes are not supported yet. Test each node alone:"
        f" env {' '.join(f'-u {name}' for name in names)} gpukeeper accept"
    )
    raise UsageError(f"This is one rank of a larger job ({where}). Nothing was run. {advice}")


def _launched(environ: Mapping[str, str], environment: EnvironmentSettings) -> None:
    """A job of one rank: its variables are understood and change nothing."""
    names = [name for name in (*LAUNCHED, *ADDRESS) if environ.get(name)]
    names += sorted(name for name in environ if name.startswith("PET_") and name not in names)
    if names and environ.get("RANK", environ.get("PET_NNODES")) is not None:
        environment.notes.append(f"{', '.join(names)}: a job with one node; gpukeeper starts the ranks itself")
    backend = environ.get("BACKEND", "").lower()
    if backend and backend not in ("nccl", "gloo"):
        raise UsageError(
            f"BACKEND={backend}: not supported. Checks use nccl (GPUs) or gloo (--device cpu). Unset BACKEND."
        )
    if backend:
        environment.notes.append(f"BACKEND={backend}: ignored; GPUs use nccl, --device cpu uses gloo")


def _nodes(words: str) -> int:
    """`4`, or `2:4` of an elastic job: the most."""
    last = words.rpartition(":")[2]
    if not words:
        return 1
    if not _DIGITS.fullmatch(last):
        raise UsageError(f'PET_NNODES="{words}" is not a number of nodes. Write it like 1 or 2:4, or unset it.')
    return int(last)


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    words = environ.get(name)
    if not words:
        return None
    if words.lower() not in YES | NO:
        raise UsageError(f'{name}="{words}" is neither 1 nor 0. Nothing was run.')
    return words.lower() in YES


def _count(environ: Mapping[str, str], name: str, least: int = 1) -> int | None:
    words = environ.get(name, "")
    if not words:
        return None
    if not _DIGITS.fullmatch(words) or int(words) < least:
        raise UsageError(
            f'{name}="{words}" is not a number of {least} or more. Nothing was run. Correct it, or unset it.'
        )
    return int(words)
