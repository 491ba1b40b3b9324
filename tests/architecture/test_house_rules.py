"""House rules, each with its advice in the message."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, SOURCE, identifiers, modules, name_of, parsed

DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
CLOCKS = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
CLOCKS |= {("time", "time"), ("time", "monotonic"), ("time", "sleep")}
# The words of one platform. Elsewhere we say workload.
PLATFORM_WORDS = {"pod", "pods", "container", "containers", "actor", "actors"}
# Edges that speak a platform's language: what /proc says of a holder, the event names of the export, an adapter.
MAY_SAY_CONTAINER = {
    "src/gpukeeper/devices/holders.py",
    "src/gpukeeper/ledger/export.py",
    "src/gpukeeper/wiring/cluster_api.py",
    "src/gpukeeper/wiring/docker_api.py",
    "src/gpukeeper/wiring/ray_jobs.py",
}
_TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".cfg", ".sh", ""}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_opens_with_what_it_is(path: Path) -> None:
    if path.name == "__init__.py" and not path.read_text().strip():
        pytest.skip("an empty package file")
    assert ast.get_docstring(parsed(path)), f"{name_of(path)}: say in one to five lines what it is and what it is not"


def test_every_directory_with_code_shows_what_it_is() -> None:
    packages = [path for path in modules() if path.name == "__init__.py" and len(list(path.parent.rglob("*.py"))) > 1]
    silent = [name_of(path) for path in packages if not ast.get_docstring(parsed(path))]
    assert not silent, f"one line of docstring each: {silent}"


def test_there_is_no_drawer() -> None:
    drawers = [name_of(path) for path in modules() if path.stem in DRAWERS or path.parent.name in DRAWERS]
    assert not drawers, f"name the thing instead: {drawers}"


def test_the_core_and_the_engine_read_no_clock() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules("model", "lifecycle", "engine")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in CLOCKS
    ]
    assert not found, f"`now` is an argument, or the Clock port is asked: {found}"


def test_platform_words_stay_below_platforms() -> None:
    found = [
        f"{name_of(path)}:{line} {name}"
        for path in modules()
        if not {SOURCE / "platforms", SOURCE / "acceptance" / "launchers"}.intersection(path.parents)
        if name_of(path) not in MAY_SAY_CONTAINER
        for line, name in identifiers(path)
        if PLATFORM_WORDS.intersection(_words(name))
    ]
    assert not found, f"say workload: {found}"


# In the core not even in comments and messages. Names of platforms are values there, never words.
CORE_WORDS = re.compile(
    r"\b(?:pods?|containers?|actors?|kubernetes|kubectl|kubelets?|docker|podman|ray|raylets?|finalizers?|gitops|jobsets?"
    r"|trainjobs?|rayjobs?|annotations?|helm)\b",
    re.IGNORECASE,
)
# Keys of the policy file that a message names, as documented.
POLICY_KEYS = ("kubernetes.release",)


def test_the_core_says_no_word_of_a_platform() -> None:
    found = []
    for path in modules("model", "lifecycle"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            said = line.replace("from __future__ import annotations", "")
            for key in POLICY_KEYS:
                said = said.replace(key, "")
            found += [f"{name_of(path)}:{number} {word}" for word in CORE_WORDS.findall(said)]
    assert not found, f"a neutral name, or a value that the platform supplies: {found}"


def test_there_is_one_http_client() -> None:
    """And the one that lightkube needs, in the folder of its platform: ADR 40."""
    other = re.compile(r"^\s*(?:from|import) (?:aiohttp|httpx2?|requests|urllib3|urllib\.request|http\.client)\b")
    cluster = SOURCE / "platforms" / "kubernetes"
    found = [
        f"{name_of(path)}:{n}"
        for path, n, line in _source_lines()
        if other.search(line) and cluster not in path.parents
    ]
    assert not found, f"use gpukeeper/http_client.py: {found}"


def test_a_todo_has_an_issue_number() -> None:
    todo = re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))")
    found = [f"{name_of(path)}:{n}" for path, n, line in _source_lines() if todo.search(line)]
    assert not found, f"write TODO(#12), or do it: {found}"


def test_no_path_of_a_users_machine_is_in_the_tree() -> None:
    home = re.compile(r"(?<![\w.<])/(?:home|Users)/(?!\*|\$|<|ann\b|bob\b|eve\b)\w+|/root/\w")
    found = [f"{name_of(path)}:{n}" for path, n, line in _tracked_lines() if home.search(line)]
    assert not found, f"absolute home paths: {found}"


def test_no_package_index_is_named() -> None:
    """Where packages come from is up to those who install: a mirror must do, without a change of a file."""
    host = re.compile(r"https?://[\w.-]*(?:pypi|pythonhosted|npmjs|golang|debian)\.")
    found = [f"{name_of(path)}:{n}" for path, n, line in _tracked_lines() if host.search(line)]
    assert not found, f"package indexes: {found}"


def _words(name: str) -> set[str]:
    """The words of an identifier: snake_case and CamelCase."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _source_lines() -> list[tuple[Path, int, str]]:
    return [(path, n, line) for path in modules() for n, line in enumerate(path.read_text().splitlines(), start=1)]


def _tracked_lines() -> list[tuple[Path, int, str]]:
    """Of every text file that is, or may come, under version control."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [path for name in names if (path := ROOT / name).is_file() and path.suffix in _TEXT]
    here = Path(__file__).resolve()
    return [
        (path, n, line)
        for path in paths
        if path != here
        for n, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
    ]


READERS = {"src/gpukeeper/model/reading.py"}
# Programs of ours that import nothing.
OWN_FOLDERS = (
    "src/gpukeeper/acceptance/launchers/programs/",
    "src/gpukeeper/rollout/programs/",
    "src/gpukeeper/rayjobs/entry.py",
    "src/gpukeeper/acceptance/probes/",
    "src/gpukeeper/platforms/simulated/",
    "src/gpukeeper/disk/worker",
)


def test_foreign_json_and_times_are_read_in_one_place() -> None:
    """msgspec lets UnicodeDecodeError and RecursionError through, and the calendar raises OverflowError."""
    direct = re.compile(r"msgspec\.json\.(?:decode|Decoder)\(|json\.loads?\(|\bdurationpy\b")
    found = [
        f"{name_of(path)}:{n}"
        for path, n, line in _source_lines()
        if direct.search(line) and name_of(path) not in READERS and not name_of(path).startswith(OWN_FOLDERS)
    ]
    assert not found, f"read it with model/reading.py: {found}"


CONSTANTS = {("lease.py", "_PATH"), ("pod_counters.py", "words")}


def test_no_text_is_a_template() -> None:
    """A name with braces in it must not be read as a format: write an f-string. Only constants are formatted."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"format", "format_map"}
        and not _is_constant(node.func.value)
        and (path.name, ast.unparse(node.func.value)) not in CONSTANTS
        and ast.unparse(node.func.value) != "msgspec.json"
    ]
    assert not found, f"put it together with an f-string: {found}"


def _is_constant(node: ast.expr) -> bool:
    """Words, or words marked as HTML, whose format escapes what it inserts."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Markup" and len(node.args) == 1:
        node = node.args[0]
    return isinstance(node, ast.Constant)


def test_a_platform_is_never_checked_for_its_class() -> None:
    """What one platform can do and another cannot belongs into the Protocol, with an answer of each."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"isinstance", "issubclass", "type"}
        and any(name.endswith("Platform") for arg in node.args for name in _names_in(arg))
    ]
    found += [
        f"{name_of(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.MatchClass) and any(name.endswith("Platform") for name in _names_in(node.cls))
    ]
    assert not found, f"give engine/ports.py:Platform a member for it: {found}"


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
    }


def test_outside_kinds_the_kubernetes_adapter_asks_a_kind_and_knows_none() -> None:
    """But for pods, of which all the others are made."""
    package = SOURCE / "platforms" / "kubernetes"
    shared = {"catalog", "controller", "ending", "kind", "pod", "ttl"}
    assert {path.stem for path in (package / "kinds").glob("*.py")} > shared
    for path in package.glob("*.py"):
        used = set(re.findall(r"kubernetes\.kinds\.(\w+) import", path.read_text()))
        assert used <= shared, f"{path.name} knows {', '.join(used - shared)}: let the kind answer, see add-a-kind.md"


# Extras, what only one option needs, and what takes long and is not needed for help and completion.
IMPORT_IN_FUNCTIONS = {
    "demo/command.py",
    *(f"cli/{name}.py" for name in ("accept", "explain", "plan", "policy", "top")),
    *(f"terminal/{name}.py" for name in ("completion", "on_ray", "session")),
    *("daemon/metrics.py", "operator/command.py"),
}


def test_interfaces_import_at_the_top() -> None:
    """A command is loaded when it is used (interfaces/cli/lazy.py), so its module need not defer its imports."""
    found = {
        path.relative_to(SOURCE / "interfaces").as_posix()
        for path in modules("interfaces")
        for function in ast.walk(parsed(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))
    }
    assert found == IMPORT_IN_FUNCTIONS, "import at the top, or name the file here and state the reason there"
