"""Every Python that gpukeeper starts ignores the current directory: root may work where any user can leave `json.py`.
Modules of gpukeeper get no other variables than processes.environment passes on.

A test for each of the two finds every place that starts one another way; the others plant such a place and expect it to
be found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest

from tests.architecture.tree import ROOT, lines, modules, name_of, parsed, refuse

SAFE = {"-P", "-I"}
ADVICE = "use processes.module_command, or -I for a program of its own"
STARTS = {"Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec", "subprocess_exec", "running"}
# PyTorch is started by other Pythons, which may be too old for -P: by PYTHONSAFEPATH, and in the root directory.
OTHER_PYTHONS = {"src/gpukeeper/acceptance/bench/probing.py"}
# Where the Python that runs us is named, or a program beside it is started: one with a first line of its own.
ONLY_NAMED = {
    *("src/gpukeeper/acceptance/bench/probing.py", "src/gpukeeper/interfaces/cli/setup.py"),
    *("src/gpukeeper/backtest/workers.py", "src/gpukeeper/rollout/ray_pass_program.py"),
    *("src/gpukeeper/acceptance/launchers/ray_driver_program.py", "deploy/sbom/write.py"),
}
# multiprocessing starts its children with -c; posix_spawn starts any program, and shells read text.
STARTERS = re.compile(
    r"multiprocessing(?:\..*)?|ProcessPoolExecutor|runpy|set_executable|create_subprocess_shell|subprocess_shell|pty"
    r"|os\.(?:exec\w+|spawn\w+|posix_spawnp?|system|popen)|getoutput|getstatusoutput"
)
EXCUSED = {
    "src/gpukeeper/backtest/workers.py": "sets PYTHONSAFEPATH",
    "src/gpukeeper/platforms/host/tidy.py": "starts the command of an admin",
}
_IN_TEXT = re.compile(r"""python\S*(?: \}\}\S*)?,? +["']?-[cm]\b""", re.IGNORECASE)
_TEXTS = {".tpl", ".sh", ".yml", ".yaml", ".service", ".timer", ".toml", ""}


def test_a_python_is_started_without_the_current_directory() -> None:
    files = [*modules(), *(ROOT / "deploy").rglob("*.py")]
    refuse(((path, line, what) for path in files for line, what in unsafe(parsed(path), name_of(path))), ADVICE)


def test_a_module_of_ours_is_started_with_a_small_environment_in_the_root_directory() -> None:
    places = [(path, found) for path in modules() if (found := list(starts(parsed(path))))]
    assert len(places) == 5, "driver, disk, web, apprise, demo"
    bare = ((path, line, "a module of ours with another environment") for path, found in places for line in bad(found))
    refuse(bare, "env=environment(), cwd=DIRECTORY of processes")


@pytest.mark.parametrize(
    ("options", "is_fine"),
    [
        ("env=environment(), cwd=DIRECTORY", True),
        ("cwd=DIRECTORY, env={**environment(), 'HOME': HOME}, stdin=none", True),
        ("cwd=DIRECTORY", False),
        ("env=environment()", False),
        ("env=os.environ, cwd=DIRECTORY", False),
        ("env={**os.environ, **environment()}, cwd=DIRECTORY", False),
        ("env=environment(os.environ | more), cwd=DIRECTORY", False),
        ("**options", False),
    ],
)
def test_a_start_with_another_environment_is_found(options: str, is_fine: bool) -> None:
    code = f"from gpukeeper.processes import module_command\nprocess = subprocess.Popen(command, {options})"
    assert (not list(bad(starts(ast.parse(code))))) is is_fine


def test_scripts_units_and_manifests_start_it_so_too() -> None:
    files = (path for folder in ("deploy", "examples") for path in (ROOT / folder).rglob("*") if path.is_file())
    found = (
        (path, number, line.strip())
        for path in files
        if path.suffix in _TEXTS
        for number, line in enumerate(lines(path), start=1)
        if unsafe_text(line)
    )
    refuse(found, "write -I before -m or -c")


def test_nobody_is_excused_who_needs_no_excuse() -> None:
    for name in OTHER_PYTHONS | ONLY_NAMED | EXCUSED.keys():
        assert list(unsafe(parsed(ROOT / name))), name


@pytest.mark.parametrize(
    "code",
    [
        "run([sys.executable, '-m', 'json'])",
        "run([sys.executable, 'program.py'])",
        "run([sys.executable, *words])",
        "run((sys.executable, '-u', '-P', 'x'))",
        "run([python, '-c', 'import json'])",
        "run(['python3', 'program.py'])",
        "run(['/usr/bin/python3.11', '-m', 'json'])",
        "python = sys.executable",
        "run(f'{sys.executable} -m json')",
        "from sys import executable",
        "os.execv(sys.executable, words)",
        "os.execvp('python3', words)",
        "os.posix_spawn(program, words, os.environ)",
        "os.system('python3 -m json')",
        "run('python3 -m json', shell=True)",
        "asyncio.create_subprocess_shell('python3 -m json')",
        "asyncio.create_subprocess_exec(sys.executable, '-m', 'json')",
        "asyncio.create_subprocess_exec('python3', '-m', 'json')",
        "import multiprocessing",
        "from multiprocessing import get_context",
        "from multiprocessing.pool import Pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor(2)",
        "import runpy",
        "os.spawnv(os.P_WAIT, program, words)",
        "from os import execv",
    ],
)
def test_every_other_way_is_found(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "run([sys.executable, '-P', '-m', 'json'])",
        "run((sys.executable, '-I', '-S', program))",
        "asyncio.create_subprocess_exec(sys.executable, '-I', program)",
        "run(['sh', '-c', text])",
        "run(['stat', '-c', text])",
    ],
)
def test_the_safe_ways_are_not(code: str) -> None:
    assert not list(unsafe(ast.parse(code)))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ExecStart=/usr/bin/python3 -m gpukeeper serve", True),
        ('"$python" -m pip install x', True),
        ("command: [/opt/gpukeeper/bin/python, -c, x]", True),
        ('argv: ["{{ gpukeeper_python }}", -m, venv]', True),
        ("command: [/opt/gpukeeper/bin/python, -I, -c, x]", False),
        ('argv: ["{{ gpukeeper_python }}", -I, -m, venv]', False),
        ("# python3 -m pip explains", False),
    ],
)
def test_lines_of_scripts_are_told_apart(line: str, found: bool) -> None:
    assert unsafe_text(line) is found


def unsafe_text(line: str) -> bool:
    return not line.lstrip().startswith("#") and _IN_TEXT.search(line) is not None


def unsafe(tree: ast.AST, name: str = "") -> Iterator[tuple[int, str]]:
    """`name`: of the file, for what is excused there."""
    safe = set[int]()  # of the nodes that name the Python that runs us, those that an option follows
    for node in ast.walk(tree):  # a list comes before what is in it
        words = _words(node)
        for before, word in pairwise(words):
            if _value(word) in SAFE:
                safe.add(id(before))
        for at, word in enumerate(words):
            if name not in OTHER_PYTHONS and _is_unsafe(words, at, is_call=isinstance(node, ast.Call)):
                yield word.lineno, "a Python that imports from the current directory"
        if _is_our_python(node) and id(node) not in safe and name not in ONLY_NAMED:
            yield getattr(node, "lineno", 1), "the Python that runs us, without -P or -I"
        if (starter := _starter(node)) and name not in EXCUSED:
            yield getattr(node, "lineno", 1), starter


def starts(tree: ast.AST) -> Iterator[ast.Call]:
    """Of processes, in a file that starts modules of ours."""
    all_nodes = list(ast.walk(tree))
    imported = (node for node in all_nodes if isinstance(node, ast.ImportFrom | ast.Import))
    if any("module_command" in ast.unparse(node) for node in imported):
        for node in all_nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTS:
                yield node


def bad(calls: Iterable[ast.Call]) -> Iterator[int]:
    """The lines of those without our environment and directory."""
    for call in calls:
        options = {one.arg: ast.unparse(one.value) for one in call.keywords}
        environ = options.get("env", "")
        has_ours = "environment()" in environ and "os.environ" not in environ
        if not has_ours or options.get("cwd") != "DIRECTORY":
            yield call.lineno


def _words(node: ast.AST) -> list[ast.expr]:
    """Of a command."""
    match node:
        case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
            return words
    return []


def _is_unsafe(words: list[ast.expr], at: int, *, is_call: bool) -> bool:
    """Of a call only what looks like a command: "python3" may also be the value of an option."""
    value, before = _value(words[at]), words[at - 1] if at else None
    if at == 0 and len(words) > 1 and isinstance(value, str) and re.fullmatch(r"(?:.*/)?python[0-9.]*", value):
        after = _value(words[1])
        looks = not is_call or (isinstance(after, str) and (after.startswith("-") or after.endswith(".py")))
        return looks and after not in SAFE
    if value == "-m" and before is not None:
        return _value(before) not in SAFE
    return value == "-c" and at == 1 and not isinstance(before, ast.Constant)


def _is_our_python(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr="executable"):
            return True
        case ast.ImportFrom(module="sys", names=names):
            return any(one.name == "executable" for one in names)
    return False


def _starter(node: ast.AST) -> str | None:
    match node:
        case ast.Import(names=names):
            words = [one.name for one in names]
        case ast.ImportFrom(module=str(module), names=names):
            words = [module, *(one.name for one in names), *(f"{module}.{one.name}" for one in names)]
        case ast.Attribute():
            words = [ast.unparse(node), node.attr]
        case ast.keyword(arg="shell", value=value) if _value(value) is not False:
            return "a shell"
        case _:
            return None
    return next((word for word in words if STARTERS.fullmatch(word)), None)


def _value(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None
