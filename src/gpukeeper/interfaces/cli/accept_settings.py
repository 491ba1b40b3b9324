"""From flags and variables to the requested run: every problem is reported before anything runs. Pure.

The variables are those of the older acceptance kits and of training launchers. Flags override variables. Every
variable that is used is reported; an unsupported value is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gpukeeper.acceptance.check import ALWAYS, Check, CheckContext, RunRequest
from gpukeeper.acceptance.record import Machine, Thresholds
from gpukeeper.config.problems import did_you_mean
from gpukeeper.config.units import read_span
from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Gpu

LONGER = "5m"  # what QUICK=0 requested: the older kit's full run took minutes
_DIGITS = re.compile(r"[0-9]{1,9}")
YES = {"1", "true", "yes", "on"}
NO = {"0", "false", "no", "off"}
ADDRESS = ("MASTER_ADDR", "K8S_MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
GROUP = ("GPUKEEPER_GROUP_SIZE", "GPUKEEPER_GROUP_INDEX")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT")
PET = ("PET_NNODES", "PET_NODE_RANK")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    check_timeout: Annotated[
        str | None,
        typer.Option(
            "--check-timeout",
            metavar="DURATION",
            help="Deadline of each check, for example 300s. Default: its own, see `gpukeeper check show`.",
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


def read_variables(environ: Mapping[str, str], *, together: bool = False) -> EnvironmentSettings:
    """`together`: this machine is also tested as one of several nodes, and then their number is read elsewhere."""
    if not together:
        _refuse_several_nodes(environ)
    environment = EnvironmentSettings(python=environ.get("GPUKEEPER_PYTHON") or None)
    _length_variable(environ, environment)
    _training(environ, environment)
    _expected(environ, environment)
    if _switch(environ, "VERBOSE"):
        environment.verbose = True
        environment.notes.append("VERBOSE=1 means --verbose")
    if folder := environ.get("REPORT_DIR"):
        environment.report_dir = folder
        environment.notes.append(f"REPORT_DIR means --report-dir {folder}")
    _launched(environ, environment, together=together)
    return environment


def _length_variable(environ: Mapping[str, str], environment: EnvironmentSettings) -> None:
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
    """One node of several, or one rank of several: a verdict about it alone would be read as one about the network
    between the nodes. A launcher that tests each node alone says so with GPUKEEPER_GROUP_SIZE=1."""
    size = _count(environ, "GPUKEEPER_GROUP_SIZE")
    if size == 1 or (size is None and not _is_one_of_several(environ)):
        return
    names = [name for name in (*GROUP, *LAUNCHED, *PET, *ADDRESS) if environ.get(name)]
    where = "; ".join(f"{name}={environ[name]}" for name in names)
    here = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE") is not None and _nodes(environ) <= 1
    advice = (
        "gpukeeper starts one rank per GPU itself: start it once, without the launcher."
        if here
        else "Test the nodes as one run: add --together on every node. Or test each node alone: set"
        " GPUKEEPER_GROUP_SIZE=1."
    )
    raise UsageError(
        f"The variables are those of one node of several ({where}), and --together is missing, so only this node would"
        f" be tested. Nothing was run. {advice}"
    )


def _is_one_of_several(environ: Mapping[str, str]) -> bool:
    sizes = [_count(environ, name, least=0) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE")]
    known = [size for size in sizes if size is not None] + ([_nodes(environ)] if environ.get("PET_NNODES") else [])
    later = any(_count(environ, name, least=0) for name in ("RANK", "GROUP_RANK", "PET_NODE_RANK"))
    if known or later:
        return later or max(known) > 1
    # An address where nodes meet, and nothing that says how many.
    return any(_machine(environ.get(name, "")) not in ("", *LOOPBACK) for name in ADDRESS)


def _machine(address: str) -> str:
    """Of HOST, HOST:PORT, [IPv6]:PORT or a bare IPv6 address."""
    bare = address.count(":") != 1
    return (address if bare else address.partition(":")[0]).partition("]")[0].lstrip("[")


def _launched(environ: Mapping[str, str], environment: EnvironmentSettings, *, together: bool) -> None:
    """Its variables are understood and change nothing."""
    names = [name for name in (*LAUNCHED, "POD_NAMESPACE", *ADDRESS) if environ.get(name)]
    names += sorted(name for name in environ if name.startswith("PET_") and name not in names)
    if names and environ.get("RANK", environ.get("PET_NNODES")) is not None:
        what = _share_of_job(environ, together=together)
        environment.notes.append(f"{', '.join(names)}: {what}; gpukeeper starts the ranks itself")
    backend = environ.get("BACKEND", "").lower()
    if backend and backend not in ("nccl", "gloo"):
        raise UsageError(
            f"BACKEND={backend}: not supported. Checks use nccl (GPUs) or gloo (--device cpu). Unset BACKEND."
        )
    if backend:
        environment.notes.append(f"BACKEND={backend}: ignored; GPUs use nccl, --device cpu uses gloo")


def _share_of_job(environ: Mapping[str, str], *, together: bool) -> str:
    if (_count(environ, "WORLD_SIZE", least=0) or 1) <= 1 and _nodes(environ) <= 1:
        return "a job with one node"
    return "one node of a run over several" if together else "this node is tested alone (without --together)"


def _nodes(environ: Mapping[str, str]) -> int:
    """`4`, or `2:4` of an elastic job: the most."""
    words = environ.get("PET_NNODES", "")
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


DEVICES = ("cuda", "cpu", "simulated")
QUICK_S = 60.0
FULL = "30m"
SHORTEST_S = 20.0  # programs have to start
LARGEST_CPUS = 64
MOST_GPUS = 1024  # in one machine; more is a slip of the finger
NOTHING = "Nothing was run."


def run_request(options: RunOptions, checks: Sequence[Check]) -> RunRequest:
    """Raises UsageError with every problem, a line each."""
    problems: list[str] = []
    profile, within_s = _length(options, problems)
    names = [one.name for one in checks]
    only, skip = _words(options.check), _words(options.skip)
    _unknown_checks(only, skip, names, problems)
    _device(options, problems)
    expected = options.expect
    if expected is not None and not 1 <= expected <= MOST_GPUS:
        problems.append(f"--expect {expected} is not a valid number of GPUs (1 to {MOST_GPUS}).")
    params = _params(options.set_ or (), checks, problems)
    timeout_s = _check_timeout(options.check_timeout, problems)
    if problems:
        raise UsageError("\n".join([*problems, NOTHING]))
    wish = RunRequest(
        device=options.device,
        expected=expected,
        gpus=tuple(_words(options.gpus)),
        within_s=within_s,
        check_timeout_s=timeout_s,
        profile=profile,
        only=tuple(only),
        skip=tuple(skip),
        params=params,
    )
    refuse_impossible(wish, checks)
    return wish


def refuse_impossible(wish: RunRequest, checks: Sequence[Check]) -> None:
    """A check knows which of its parameters can never pass: its request for an example machine is built."""
    gpus = tuple(Gpu(uuid=f"gpu-{number}", index=number) for number in range(max(wish.expected or 2, 2)))
    machine = Machine(node="here", gpus=gpus)
    context = CheckContext(wish=wish, machine=machine, gpus=gpus, limits=lambda *_: Thresholds())
    problems: dict[str, None] = {}
    for check in checks:
        if check.request is None or check.name not in wish.params:
            continue
        for serving in check.servings:
            try:
                check.request(serving, context)
            except (UsageError, ValueError) as problem:
                words = str(problem).removesuffix(NOTHING).rstrip().removeprefix(f"{check.name}: ")
                problems[f"--set {check.name}: {words}"] = None
    if problems:
        raise UsageError("\n".join([*problems, NOTHING]))


def _length(options: RunOptions, problems: list[str]) -> tuple[str, float]:
    lengths = [word for word, given in (("--quick", options.quick), ("--full", options.full)) if given]
    lengths += ["--within"] if options.within is not None else []
    if len(lengths) > 1:
        problems.append(f"{' and '.join(lengths)} cannot be combined.")
    words = options.within or (FULL if options.full else None)
    if words is None:
        return "quick", QUICK_S
    try:
        seconds = read_span(words).total_seconds()
    except ValueError as problem:
        problems.append(f"--within: {problem}")
        return words, QUICK_S
    if seconds < SHORTEST_S:
        problems.append(f"--within {words} is too short for any check. Use {SHORTEST_S:.0f}s or more.")
    return words, seconds


def _check_timeout(words: str | None, problems: list[str]) -> float | None:
    if words is None:
        return None
    try:
        seconds = read_span(words).total_seconds()
    except ValueError as problem:
        problems.append(f"--check-timeout: {problem}")
        return None
    if seconds < 1:
        problems.append(f"--check-timeout {words} is too short for any check. Use for example 300s.")
    return seconds


def _device(options: RunOptions, problems: list[str]) -> None:
    if options.device not in DEVICES:
        problems.append(f'--device "{options.device}" is not a valid value. Use cuda for GPUs, or cpu or simulated.')
    if options.ranks is not None and options.device == "cuda":
        problems.append("--ranks needs --device cpu or simulated: on GPUs there is one rank per GPU.")
    if options.ranks is not None and not 1 <= options.ranks <= LARGEST_CPUS:
        problems.append(f"--ranks {options.ranks} is not between 1 and {LARGEST_CPUS}.")


def _unknown_checks(only: Sequence[str], skip: Sequence[str], names: Sequence[str], problems: list[str]) -> None:
    if always := [one for one in skip if one in ALWAYS]:
        problems.append(
            f"--skip {', '.join(always)}: always runs. It takes no time, and checks that all GPUs are present and"
            " healthy."
        )
    for flag, given in (("--check", only), ("--skip", skip)):
        problems += [
            f'{flag}: unknown check "{one}". {did_you_mean(one, names)} To list all: gpukeeper check list'
            for one in given
            if one not in names
        ]
    both = [one for one in only if one in skip]
    if both:
        problems.append(f"{', '.join(both)}: both selected (--check) and skipped (--skip).")


def _params(words: Sequence[str], checks: Sequence[Check], problems: list[str]) -> dict[str, dict[str, Any]]:
    """`check.param=value`, of the kind that its default is of. The last one counts."""
    found: dict[str, dict[str, Any]] = {}
    for one in words:
        try:
            check, param, value = _setting(one, checks)
        except ValueError as problem:
            problems.append(f"--set {one}: {problem}")
        else:
            found.setdefault(check, {})[param] = value
    return found


def _setting(words: str, checks: Sequence[Check]) -> tuple[str, str, Any]:
    key, equals, text = words.partition("=")
    name, dot, param = key.partition(".")
    if not (equals and dot and name and param):
        raise ValueError("write it like training.epochs=3.")
    check = next((one for one in checks if one.name == name), None)
    if check is None:
        raise ValueError(f'unknown check "{name}". {did_you_mean(name, [one.name for one in checks])}')
    known = defaults_of(check)
    if param not in known:
        others = did_you_mean(param, sorted(known)) if known else "It has no parameters."
        raise ValueError(f'{name} has no parameter "{param}". {others}')
    return name, param, _value(text, known[param])


def defaults_of(check: Check) -> dict[str, Any]:
    """Everything that can be set, as in the deepest serving that has it."""
    found: dict[str, Any] = {}
    for serving in check.servings:
        found |= {**serving.small, **serving.params}
    return found


def _value(text: str, default: object) -> Any:
    """Read as the default is. Lists are written with commas: bf16,fp8."""
    match default:
        case bool():
            if text.lower() not in ("true", "false"):
                raise ValueError(f'"{text}" is neither true nor false.')
            return text.lower() == "true"
        case int() | float():
            return _number(text)
        case list() | tuple():
            parts = [part for part in text.strip("[]").split(",") if part.strip()]
            numbers = bool(default) and all(isinstance(one, int | float) for one in default)
            return [_number(part) if numbers else part.strip().strip("\"'") for part in parts]
        case None:
            return _plain(text)
        case Mapping():
            raise ValueError("this parameter is a mapping and cannot be set here.")
        case _:
            return text


def _number(text: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a number.') from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text} is not a finite number of 0 or more.")
    return int(value) if value.is_integer() and "." not in text else value


def _plain(text: str) -> Any:
    """A default of none does not define the kind: a number if it looks like one."""
    try:
        return _number(text)
    except ValueError:
        return {"null": None, "none": None, "true": True, "false": False}.get(text.lower(), text)


def _words(given: Sequence[str] | None) -> list[str]:
    """Repeated, or with commas."""
    return [word.strip() for one in given or () for word in one.split(",") if word.strip()]
