"""House rules: one test each, which fails with every place that breaks the rule and what to do there."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpukeeper.lifecycle.decide import RULES
from tests.architecture.tree import ROOT, SOURCE, identifiers, lines, modules, name_of, nodes, parsed, refuse

Found = Iterator[tuple[Path, int, str]]
_TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".cfg", ".sh", ""}
DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
CLOCKS = {("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
CLOCKS |= {("time", "time"), ("time", "monotonic"), ("time", "sleep")}
# The words of one platform. Elsewhere we say workload.
PLATFORM_WORDS = {"pod", "pods", "container", "containers", "actor", "actors"}
PLATFORM_FOLDERS = {SOURCE / "platforms", SOURCE / "clients", SOURCE / "acceptance" / "launchers"}
# Edges that speak a platform's language: what /proc says of a holder, the event names of the export, an adapter.
MAY_SAY_CONTAINER = {
    "src/gpukeeper/devices/holders.py",
    "src/gpukeeper/ledger/lines.py",
    "src/gpukeeper/wiring/launch_hosts.py",
}
# In the core not even in comments and messages. Names of platforms are values there, never words.
CORE_WORDS = re.compile(
    r"\b(?:pods?|containers?|actors?|kubernetes|kubectl|kubelets?|docker|podman|ray|raylets?|finalizers?|gitops|jobsets?"
    r"|trainjobs?|rayjobs?|annotations?|helm)\b",
    re.IGNORECASE,
)
# What a line of the core may say: the import, keys of the policy file that a message names, as documented, and texts of
# settings for those who write that file.
NOT_SAID = re.compile(
    r"from __future__ import annotations|kubernetes\.release"
    r"|without a container\b|of a container engine\b|of images, containers and logs\b"
)
READERS = {"src/gpukeeper/model/reading.py"}
# Programs of ours that import nothing.
OWN_FOLDERS = (
    "src/gpukeeper/acceptance/launchers/host_program.py",
    "src/gpukeeper/acceptance/launchers/host_checks_program.py",
    "src/gpukeeper/acceptance/launchers/ray_driver_program.py",
    "src/gpukeeper/rollout/ray_pass_program.py",
    "src/gpukeeper/rollout/server_program.py",
    "src/gpukeeper/clients/ray.py",
    "src/gpukeeper/acceptance/probes/",
    "src/gpukeeper/platforms/simulated/",
    "src/gpukeeper/disk/worker",
)
# Templates that are constants.
CONSTANTS = {("lease.py", "_PATH"), ("meter.py", "words")}
KUBERNETES = SOURCE / "platforms" / "kubernetes"
# Modules of its kinds that the rest of the adapter may know.
SHARED_KINDS = {"catalog", "kind", "pod"}
# Extras, what only one option needs, and what takes long and is not needed for help and completion.
IMPORT_IN_FUNCTIONS = {
    "demo.py",
    *(f"cli/{name}.py" for name in ("accept", "explain", "plan", "policy", "top")),
    *(f"terminal/{name}.py" for name in ("completion", "pass_options", "session")),
    *("daemon/serve.py", "operator.py"),
}


def test_a_module_opens_with_what_it_is() -> None:
    """An empty package file is a case of the next rule."""
    silent = [path for path in modules() if not ast.get_docstring(parsed(path))]
    refuse(
        ((path, 1, "no docstring") for path in silent if path.name != "__init__.py" or parsed(path).body),
        "say in one to five lines what it is and what it is not",
    )


def test_every_directory_with_code_shows_what_it_is() -> None:
    packages = [path for path in modules() if path.name == "__init__.py" and len(list(path.parent.rglob("*.py"))) > 1]
    silent = [path for path in packages if not ast.get_docstring(parsed(path))]
    refuse(((path, 1, "a package without docstring") for path in silent), "say in one line what is in it")


def test_there_is_no_drawer() -> None:
    drawers = [path for path in modules() if DRAWERS.intersection((path.stem, path.parent.name))]
    refuse(((path, 1, "a name that says nothing") for path in drawers), "name the thing instead")


def test_the_core_and_the_engine_read_no_clock() -> None:
    found = (
        (path, node.lineno, f"{module}.{name}")
        for path, node in _nodes("model", "lifecycle", "engine")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (module := node.value.id, name := node.attr) in CLOCKS
    )
    refuse(found, "take `now` as an argument, or ask the Clock port")


def test_platform_words_stay_below_platforms() -> None:
    found = (
        (path, line, name)
        for path in modules()
        if not PLATFORM_FOLDERS.intersection(path.parents) and name_of(path) not in MAY_SAY_CONTAINER
        for line, name in identifiers(path)
        if PLATFORM_WORDS.intersection(_words(name))
    )
    refuse(found, "say workload")


def test_the_core_says_no_word_of_a_platform() -> None:
    found = (
        (path, number, word)
        for path in modules("model", "lifecycle")
        for number, line in enumerate(lines(path), start=1)
        for word in CORE_WORDS.findall(NOT_SAID.sub("", line))
    )
    refuse(found, "use a neutral name, or a value that the platform supplies")


def test_there_is_one_http_client() -> None:
    """And the one that lightkube needs, in the client of Kubernetes: ADR 16."""
    other = r"^\s*(?:from|import) (?:aiohttp|httpx2?|requests|urllib3|urllib\.request|http\.client)\b"
    elsewhere = (path for path in modules() if SOURCE / "clients" / "kubernetes" not in path.parents)
    refuse(_lines(other, elsewhere), "use gpukeeper/http_client.py")


def test_a_todo_has_an_issue_number() -> None:
    refuse(_lines(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))", modules()), "write TODO(#12), or do it")


def test_no_path_of_a_users_machine_is_in_the_tree() -> None:
    home = r"(?<![\w.<])/(?:home|Users)/(?!\*|\$|<|ann\b|bob\b|eve\b)\w+|/root/\w"
    refuse(_lines(home, _tracked()), "name no home directory: use a relative path or a variable")


def test_no_package_index_is_named() -> None:
    """Where packages come from is up to those who install: a mirror must do, without a change of a file."""
    host = r"https?://[\w.-]*(?:pypi|pythonhosted|npmjs|golang|debian)\."
    refuse(_lines(host, _tracked()), "name no package index: those who install choose it")


def test_foreign_json_and_times_are_read_in_one_place() -> None:
    """msgspec lets UnicodeDecodeError and RecursionError through, and the calendar raises OverflowError."""
    direct = r"msgspec\.json\.(?:decode|Decoder)\(|json\.loads?\(|\bdurationpy\b"
    others = (path for path in modules() if name_of(path) not in READERS and not name_of(path).startswith(OWN_FOLDERS))
    refuse(_lines(direct, others), "read it with model/reading.py")


def test_no_text_is_a_template() -> None:
    """A name with braces in it must not be read as a format: write an f-string. Only constants are formatted."""
    found = (
        (path, node.lineno, f"{text}.{node.func.attr}")
        for path, node in _nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in {"format", "format_map"} and not _is_constant(node.func.value)
        if (text := ast.unparse(node.func.value)) != "msgspec.json" and (path.name, text) not in CONSTANTS
    )
    refuse(found, "put it together with an f-string")


def test_a_platform_is_never_checked_for_its_class() -> None:
    """What one platform can do and another cannot belongs into the Protocol, with an answer of each."""
    found = (
        (path, node.lineno, name)
        for path, node in _nodes()
        for asked in _classes_asked_for(node)
        for name in sorted(_names_in(asked))
        if name.endswith("Platform")
    )
    refuse(found, "give engine/ports.py:Platform a member for it")


def test_outside_kinds_the_kubernetes_adapter_asks_a_kind_and_knows_none() -> None:
    """But for pods, of which all the others are made."""
    assert {path.stem for path in (KUBERNETES / "kinds").glob("*.py")} > SHARED_KINDS
    known = re.compile(r"kubernetes\.kinds\.(\w+) import")
    found = (
        (path, number, kind)
        for path in modules("platforms/kubernetes")
        if path.parent == KUBERNETES
        for number, line in enumerate(lines(path), start=1)
        for kind in known.findall(line)
        if kind not in SHARED_KINDS
    )
    refuse(found, "let the kind answer, see docs/how-to/add-a-kind.md")


def test_every_rule_is_registered_under_the_name_of_its_file() -> None:
    names = {rule.name for rule in RULES}
    files = [path for path in modules("lifecycle/rules") if path.name != "__init__.py"]
    found = ((path, 1, f"no rule {path.stem} is registered") for path in files if path.stem not in names)
    refuse(found, "name the rule like its file, and add it to RULES in lifecycle/decide.py")


def test_interfaces_import_at_the_top() -> None:
    """A command is loaded when it is used (interfaces/cli/main.py), so its module need not defer its imports."""
    found = {
        (path, node.lineno)
        for path, function in _nodes("interfaces")
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    excused = {SOURCE / "interfaces" / name for name in IMPORT_IN_FUNCTIONS}
    late = [(path, line, "an import in a function") for path, line in sorted(found) if path not in excused]
    stale = [(path, 1, "no import in a function") for path in sorted(excused - {path for path, _ in found})]
    refuse(
        late + stale, "import at the top, or add it to IMPORT_IN_FUNCTIONS with the reason in the file, or remove it"
    )


def _nodes(*below: str) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path in modules(*below) for node in nodes(path))


def _lines(pattern: str, paths: Iterable[Path]) -> Found:
    """Where it occurs in a line."""
    wanted = re.compile(pattern)
    for path in paths:
        for number, line in enumerate(lines(path), start=1):
            if found := wanted.search(line):
                yield path, number, found[0].strip()


def _tracked() -> Iterator[Path]:
    """Every text file that is, or may come, under version control; without the patterns here."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = (ROOT / name for name in names)
    return (path for path in paths if path.is_file() and path.suffix in _TEXT and path != Path(__file__).resolve())


def _words(name: str) -> set[str]:
    """The words of an identifier: snake_case and CamelCase."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _is_constant(node: ast.expr) -> bool:
    """Words, or words marked as HTML, whose format escapes what it inserts."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Markup" and len(node.args) == 1:
        node = node.args[0]
    return isinstance(node, ast.Constant)


def _classes_asked_for(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass" | "type"), args=asked):
            return asked
        case ast.MatchClass(cls=asked):
            return [asked]
    return []


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
    }
