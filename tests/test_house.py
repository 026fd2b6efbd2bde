"""The rules of the house: who may import whom, how long a file may be, and what never stands in it."""

import ast
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("optim", "swarm", "verification", "node")
MAY_IMPORT = {
    "optim": {"optim"},
    "verification": {"verification"},
    "swarm": {"swarm", "optim", "verification"},
    "node": set(PACKAGES),
}
PRODUCT = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
SHOWN = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "bench").glob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))

UNPICKLE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
EVALUATE = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("yaml", "load"), ("os", "system"), ("os", "popen")}


def relative(file):
    return str(file.relative_to(ROOT))


def each(files):
    return pytest.mark.parametrize("file", files, ids=relative)


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file):
    """Every module that ``file`` imports, inside functions and for type checkers too. Only absolute imports are in use here."""
    found = set()
    for item in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(item, ast.Import):
            found |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom):
            assert item.level == 0, f"{relative(file)}:{item.lineno} imports relatively"
            found |= {item.module, *(f"{item.module}.{alias.name}" for alias in item.names)}
    return found


@each(PRODUCT)
def test_import_direction(file):
    room = file.relative_to(ROOT).parts[0]
    ours = {name.split(".")[0] for name in imported(file)} & set(PACKAGES)
    assert ours <= MAY_IMPORT[room]


@each(PRODUCT)
def test_product_imports_no_tests_benchmarks_or_examples(file):
    assert not {name.split(".")[0] for name in imported(file)} & {"tests", "bench", "examples", "pytest", "hypothesis", "psutil"}


def test_no_import_cycles():
    names = {module_name(file): file for file in PRODUCT}
    # A module's own package is loaded before it, and what `swarm/__init__.py` has of modules it gets only when it is asked for.
    graph = {name: sorted((imported(file) & set(names)) - {name, "swarm"}) for name, file in names.items()}
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in graph[name]:
                visit(other, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    assert done == set(names)


@each([*PRODUCT, *SHOWN, *TESTS])
def test_length(file):
    longest = 120 if file.parent.name == "examples" else 400
    assert len(file.read_text(encoding="utf-8").splitlines()) <= longest


@each([*PRODUCT, *SHOWN])
def test_module_docstring(file):
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))


@each([*PRODUCT, *SHOWN])
def test_syntax_of_the_oldest_python(file):
    ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 10))


@each(PRODUCT)
def test_nothing_is_unpickled_or_evaluated(file):
    assert not {name.split(".")[0] for name in imported(file)} & UNPICKLE
    for item in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(item, ast.Call):
            continue
        where = f"{relative(file)}:{item.lineno}"
        called = item.func
        if isinstance(called, ast.Name):
            assert called.id not in EVALUATE, where
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            assert (called.value.id, called.attr) not in LOADERS, where
        for keyword in item.keywords:
            allowed = keyword.arg not in ("shell", "allow_pickle") or getattr(keyword.value, "value", None) is False
            assert allowed, f"{where} says {keyword.arg}="


@each([*PRODUCT, *SHOWN, *TESTS])
def test_nothing_is_left_undone(file):
    if file == Path(__file__).resolve():
        return
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert not re.search(r"pytest\.mark\.(xfail|flaky)|pytest\.xfail", text)
    for item in ast.walk(ast.parse(text)):
        if isinstance(item, ast.ExceptHandler) and len(item.body) == 1 and isinstance(item.body[0], ast.Pass):
            broad = item.type is None or getattr(item.type, "id", "") in ("Exception", "BaseException")
            assert not broad, f"{relative(file)}:{item.lineno} hides every error"


def commands(group=cli, path=("shoal",)):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        yield (*path, name), command


COMMANDS = [pytest.param(path, command, id=" ".join(path)) for path, command in commands()]


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_every_command_and_option_has_a_help_text(path, command):
    assert command.help, path
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{' '.join(path)} {parameter.opts[0]}"
    shown = CliRunner().invoke(cli, [*path[1:], "--help"])
    assert shown.exit_code == 0, shown.output
    assert "Usage: " in shown.output


def test_the_first_help_shows_exit_codes_and_every_command():
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert "Exit codes:" in shown
    expected = {
        "up", "join", "demo", "merge", "status", "peers", "seed", "id", "verify", "pull", "chaos", "watch", "invite",
        "doctor", "init", "sim",
    }  # fmt: skip
    assert set(cli.commands) == expected
    assert all(re.search(rf"^  {name} ", shown, re.M) for name in cli.commands)
