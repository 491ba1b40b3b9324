"""From options to the requested run: every problem is reported before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpukeeper.acceptance.check import ALWAYS, Check, CheckContext, RunRequest
from gpukeeper.acceptance.record import Machine, Thresholds
from gpukeeper.config.problems import did_you_mean
from gpukeeper.config.units import read_span
from gpukeeper.interfaces.cli.accept_options import RunOptions
from gpukeeper.model.errors import UsageError
from gpukeeper.model.gpu import Gpu

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
    if problems:
        raise UsageError("\n".join([*problems, NOTHING]))
    wish = RunRequest(
        device=options.device,
        expected=expected,
        gpus=tuple(_words(options.gpus)),
        within_s=within_s,
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
