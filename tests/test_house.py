"""The rules of the house: who may import whom, how long a file may be, and what never stands in
it.
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.optim import METHODS
from shoal.optim.rl.losses import LOSSES

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("optim", "swarm", "verification", "node")
MAY_IMPORT = {
    "optim": {"optim"},
    "verification": {"verification"},
    "swarm": {"swarm", "optim"},
    "node": set(TOPS),
}
# Which packages a package may import from the same top-level folder: everywhere in it, inside
# functions and for type checkers too. A package may import its own modules, and every package may
# use the modules in FREE.
PACKAGES = {
    "optim": {
        "codecs": set(),
        "schedule": set(),
        "rl": set(),
        "rollout_selection": set(),
        "weight_patch": set(),
        "exchange": {"codecs"},
        "layers": set(),
        "outer": {"codecs", "exchange", "layers", "schedule"},
        "ranks": {"codecs", "exchange", "outer", "schedule"},
        "inner": {"layers", "outer", "ranks"},
        "methods": {"codecs", "exchange", "outer"},
        "rules": {"codecs", "exchange", "methods", "outer", "schedule"},
        "experimental": {"codecs", "exchange", "methods", "outer", "rules", "schedule"},
        "public": {
            "codecs",
            "exchange",
            "experimental",
            "inner",
            "layers",
            "methods",
            "outer",
            "ranks",
            "rules",
            "schedule",
        },
    },
    "verification": {
        "fingerprints": set(),
        "calibration": {"fingerprints"},
        "calibration_file": {"calibration", "fingerprints"},
        "consensus": set(),
        "martingale": set(),
        "sequential": {"calibration", "fingerprints", "martingale"},
    },
    "swarm": {
        "wire": set(),
        "access": {"wire"},
        "settings": {"wire"},
        "manifest": {"settings", "wire"},
        "changes": {"manifest", "settings", "wire"},
        "pacing": set(),
        "p2p": {"access", "pacing", "wire"},
        "seed": {"manifest", "p2p", "pacing", "wire"},
        "gossip": {"access", "p2p", "wire"},
        "membership": {
            "access",
            "changes",
            "gossip",
            "manifest",
            "p2p",
            "pacing",
            "settings",
            "wire",
        },
        "exchange": {"p2p", "pacing", "wire"},
        "exchange.pair": {"exchange", "p2p", "wire"},
        "exchange.group": {"exchange", "p2p", "pacing", "wire"},
        "topics": {"gossip", "membership", "p2p", "wire"},
        "state": {"exchange", "membership", "p2p", "pacing", "wire"},
        "training": {
            "access",
            "changes",
            "exchange",
            "exchange.group",
            "exchange.pair",
            "manifest",
            "membership",
            "p2p",
            "settings",
            "state",
            "topics",
            "wire",
        },
    },
    "node": {
        "config": set(),
        "data": set(),
        "training": {"config"},
        "watch": set(),
        "integrations": {"checkpoint", "config", "metrics", "training"},
        "tasks": {"data", "training"},
        "checkpoint": {"tasks"},
        "metrics": {"config"},
        "rl": {"config", "tasks", "training"},
        "verify": {"config", "rl"},
        "parallel": {"config", "training"},
        "runtime": {
            "checkpoint",
            "config",
            "data",
            "metrics",
            "parallel",
            "plan",
            "rl",
            "tasks",
            "training",
            "verify",
        },
        "plan": set(),
        "tune": {"config", "runtime", "tasks", "training"},
        "commands": {"checkpoint", "config", "data", "doctor", "plan", "runtime", "tasks", "tune"},
        "doctor": {"config", "data", "runtime", "tasks"},
        "demo": {"checkpoint", "config", "data", "metrics", "rl", "runtime", "tasks", "verify"},
        "cli": {
            "checkpoint",
            "commands",
            "config",
            "demo",
            "doctor",
            "parallel",
            "runtime",
            "training",
            "verify",
            "watch",
        },
    },
}
FREE = {
    "swarm": {
        "errors",
        "figures",
        "file_lock",
        "identity",
        "internal_errors",
        "refusals",
        "repeats",
    },
    "node": {
        "batch_contents",
        "batches",
        "console",
        "exit_code",
        "free_memory",
        "home",
        "inner_tensors",
        "listen_address",
        "logs",
        "lost_output",
        "packages",
        "task",
        "user_code",
    },
    "optim": {"device", "parameters"},
    "verification": set(),
}
# Packages that show the public names of their modules; every other `__init__.py` is a docstring.
FACES = {"shoal", "shoal.optim"}
MAX_FILES, MAX_LINES = 40, 800
MAX_EXAMPLE_LINES = 140
MAX_DOCSTRING_WORDS = 150
MAX_BRANCHES = 20
MAX_NAME_WORDS = 10

PRODUCT = sorted(
    [*(file for top in TOPS for file in (ROOT / top).rglob("*.py")), *(ROOT / "shoal").glob("*.py")]
)
TEMPLATES = [file for file in PRODUCT if "templates" in file.parts]
SHOWN = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "bench").rglob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
EVERYTHING = [*PRODUCT, *SHOWN, *TESTS]
# The changelog also says how things were imported before.
PAGES = [
    file
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    if file.name != "CHANGELOG.md"
]

UNPICKLE = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
    "joblib",
}
EVALUATE = {"eval", "exec", "compile", "__import__"}
LOADERS = {
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("yaml", "load"),
    ("os", "system"),
    ("os", "popen"),
}
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.Try,
    ast.IfExp,
    ast.BoolOp,
    ast.comprehension,
    ast.ExceptHandler,
    ast.Match,
)
DEFINED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OURS = f"(?:{'|'.join(TOPS)})"
BARE = re.compile(
    rf"\bfrom {OURS}(?:\.\w+)* import\b|(?<!from shoal )\bimport {OURS}\b(?=[.;\n\"'\\]| as )|-m "
    rf"{OURS}\b"
)


def relative(file):
    return str(file.relative_to(ROOT))


def each(files):
    """Turn a check of one file into a test of all of them that names every file at fault."""

    def decorate(check):
        def test():
            faults = []
            for file in files:
                try:
                    check(file)
                except AssertionError as fault:
                    faults.append(f"{relative(file)}: {fault}")
            assert not faults, "\n".join(faults)

        test.__doc__ = check.__doc__
        return test

    return decorate


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    name = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(name if name[0] == "shoal" else ("shoal", *name))


MODULES = {module_name(file): file for file in PRODUCT}


@functools.cache
def tree(file):
    return ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 11))


@functools.cache
def imported(file):
    """Every module that ``file`` imports, inside functions and for type checkers too.

    Only absolute imports are in use here.
    """
    found = set()
    for item in ast.walk(tree(file)):
        if isinstance(item, ast.Import):
            found |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom):
            assert item.level == 0, f"{relative(file)}:{item.lineno} imports relatively"
            found |= {f"{item.module}.{alias.name}" for alias in item.names} | {item.module}
    return frozenset(found)


def package_of(name):
    """Return the top-level folder and package of our module, as ("swarm", "exchange.pair"); a
    module beside them is its own.
    """
    parts = MODULES[name].relative_to(ROOT).with_suffix("").parts
    return parts[0], ".".join(parts[1:-1]) or parts[-1]


def arrows(top):
    """Each import from one package of ``top`` into another: (from, to, module)."""
    found = set()
    for name, file in MODULES.items():
        if package_of(name)[0] != top or file in TEMPLATES or name == f"shoal.{top}":
            continue
        for other in imported(file) & set(MODULES):
            if (
                package_of(other)[0] == top
                and other != f"shoal.{top}"
                and package_of(other) != package_of(name)
            ):
                # `import shoal.swarm.wire.messages` also names the packages above it.
                if MODULES[other].name == "__init__.py" and any(
                    deeper.startswith(f"{other}.") for deeper in imported(file)
                ):
                    continue
                found.add((package_of(name)[1], package_of(other)[1], name))
    return found


def on_a_ring(graph):
    """What is left of a graph (node -> set of nodes) when all that lead to no ring have been taken
    away.
    """
    left = {name: set(others) & set(graph) for name, others in graph.items()}
    while ends := {name for name, others in left.items() if not others}:
        left = {name: others - ends for name, others in left.items() if name not in ends}
    return left


@each([file for file in PRODUCT if file.relative_to(ROOT).parts[0] in TOPS])
def test_import_direction(file):
    ours = {name.split(".")[1] for name in imported(file) if name.startswith("shoal.")} & set(TOPS)
    assert ours <= MAY_IMPORT[file.relative_to(ROOT).parts[0]]
    assert (
        not {name for name in imported(file) if re.fullmatch(r"shoal(\.[A-Z]\w+)?", name)}
        - {"shoal"}
        or file in TEMPLATES
    )


@pytest.mark.parametrize("top", TOPS)
def test_packages_import_only_what_the_table_allows(top):
    table, free = PACKAGES[top], FREE[top]
    for package, other, module in sorted(arrows(top)):
        if package in free or package == "__main__":
            assert other in free or package == "__main__", (
                f"{module} is used by every package, and imports {other}"
            )
        else:
            assert other in table[package] | free, (
                f"{module} imports {other}: {package} may import {sorted(table[package] | free)}"
            )
    packages = {
        package_of(name)[1]
        for name, file in MODULES.items()
        if package_of(name)[0] == top and file not in TEMPLATES
    }
    assert packages - free - {"__init__"} == set(table)


@pytest.mark.parametrize("top", TOPS)
def test_the_table_has_no_ring(top):
    assert not on_a_ring(PACKAGES[top])


def test_no_import_cycles():
    # A module's own package is loaded before it; the faces only show what others define.
    graph = {
        name: (imported(file) & set(MODULES)) - {name} - FACES for name, file in MODULES.items()
    }
    assert not on_a_ring(graph)
    assert on_a_ring({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == {
        "a": {"b"},
        "b": {"a"},
        "c": {"a"},
    }


@each(PRODUCT)
def test_product_imports_no_tests_benchmarks_or_examples(file):
    assert not {name.split(".")[0] for name in imported(file)} & {
        "tests",
        "bench",
        "examples",
        "pytest",
        "hypothesis",
        "psutil",
    }


def test_our_packages_are_imported_as_part_of_shoal():
    bare = {
        (relative(file), name)
        for file in EVERYTHING
        for name in imported(file)
        if name.split(".")[0] in TOPS
    }
    assert not bare


def test_programs_in_strings_and_pages_import_them_so_too():
    files = {
        *EVERYTHING,
        *PAGES,
        *(ROOT / name for name in ("pyproject.toml", "Makefile", "mkdocs.yml")),
    }
    found = {
        relative(file): BARE.findall(file.read_text(encoding="utf-8"))
        for file in files - {Path(__file__).resolve()}
    }
    assert not {file: programs for file, programs in found.items() if programs}


def test_a_bare_import_would_be_found():
    bare = [
        '"import swarm; run()"',
        "from optim.codecs import Codec\n",
        "import node.task as task\n",
        "python -m node.cli",
    ]
    right = [
        "from shoal.swarm.wire import pair\n",
        "from shoal import optim\n",
        "from swarm to swarm",
        "import nodes\n",
    ]
    assert [bool(BARE.search(text)) for text in [*bare, *right]] == [True] * 4 + [False] * 4


def test_inner_packages_are_a_docstring():
    inner = [
        file for file in PRODUCT if file.name == "__init__.py" and module_name(file) not in FACES
    ]
    assert not [relative(file) for file in inner if len(tree(file).body) != 1]


def test_no_folder_holds_too_many_files():
    counts = Counter(relative(file.parent) for file in PRODUCT)
    assert max(counts.values()) <= MAX_FILES, counts.most_common(3)


@each([*SHOWN, *TESTS])
def test_helpers_are_imported_from_support(file):
    """Only the simulator, and helpers beside the tests of one folder, live elsewhere; programs in
    strings count too.
    """
    text = file.read_text(encoding="utf-8")
    for name in re.findall(r"\bfrom (tests(?:\.\w+)+) import\b", text):
        place = ROOT.joinpath(*name.split("."))
        last = place.name
        assert place.is_dir() or place.with_suffix(".py").is_file(), f"there is no {name}"
        assert not last.startswith("test_"), f"{name} is a test: move the helper to tests/support"
        assert last != "conftest", f"{name} is for fixtures: move the helper to tests/support"
        beside = place.parent == ROOT / "tests" or file.is_relative_to(place.parent)
        shared = place.is_relative_to(ROOT / "tests/support")
        simulator = place.is_relative_to(ROOT / "tests/sim")
        assert beside or shared or simulator, (
            f"{name} is another folder's: move it to tests/support"
        )
    for name in imported(file):
        assert not re.match(r"tests\..*\btest_", name), f"{name} is of a test: move it so, too"


@each([*PRODUCT, *SHOWN, *TESTS])
def test_length(file):
    longest = MAX_EXAMPLE_LINES if file.parent.name == "examples" else MAX_LINES
    assert len(file.read_text(encoding="utf-8").splitlines()) <= longest


@each([*PRODUCT, *SHOWN])
def test_module_docstring(file):
    assert ast.get_docstring(tree(file))


@each([*PRODUCT, *SHOWN])
def test_syntax_of_the_oldest_python(file):
    assert tree(file)


@each(PRODUCT)
def test_a_name_is_given_once(file):
    """Else a second constant of a module would silently hold for the first one's users."""
    given = Counter()
    for item in tree(file).body:
        targets = (
            item.targets
            if isinstance(item, ast.Assign)
            else [item.target]
            if isinstance(item, ast.AnnAssign)
            else []
        )
        given.update(
            name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
        )
    assert not [name for name, times in given.items() if times > 1]


@each([file for file in PRODUCT if file.relative_to(ROOT).parts[0] == "optim"])
def test_no_exchange_is_asked_what_it_is(file):
    """What one cannot do is an attribute or a method of ``Exchange`` that does nothing, so that all
    are started in one way.
    """
    asked = re.search(
        r"\b(isinstance|hasattr|getattr)\(self\._?(exchange|real)\b",
        file.read_text(encoding="utf-8"),
    )
    assert not asked, asked


@functools.cache
def words(file):
    """The string constants of ``file``, but for docstrings and what stands alone, as the text under
    a field.
    """
    texts = {id(item.value) for item in ast.walk(tree(file)) if isinstance(item, ast.Expr)}
    constants = (
        item
        for item in ast.walk(tree(file))
        if isinstance(item, ast.Constant) and id(item) not in texts
    )
    return frozenset(item.value for item in constants if isinstance(item.value, str))


@pytest.mark.parametrize("name", sorted({*METHODS, *LOSSES} - {"none", "local"}))
def test_method_and_loss_are_named_once(name):
    """What depends on one follows from its row or its function. ("local" and "none" are other words
    too.)
    """
    named = [relative(file) for file in PRODUCT if name in words(file)]
    assert len(named) <= 2, named


@each(PRODUCT)
def test_nothing_is_unpickled_or_evaluated(file):
    assert not {name.split(".")[0] for name in imported(file)} & UNPICKLE
    for item in ast.walk(tree(file)):
        if not isinstance(item, ast.Call):
            continue
        where = f"{relative(file)}:{item.lineno}"
        called = item.func
        if isinstance(called, ast.Name):
            assert called.id not in EVALUATE, where
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            assert (called.value.id, called.attr) not in LOADERS, where
        for keyword in item.keywords:
            allowed = (
                keyword.arg not in ("shell", "allow_pickle")
                or getattr(keyword.value, "value", None) is False
            )
            assert allowed, f"{where} says {keyword.arg}="


@each([*PRODUCT, *SHOWN, *TESTS])
def test_nothing_is_left_undone(file):
    if file == Path(__file__).resolve():
        return
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert not re.search(r"pytest\.mark\.(xfail|flaky)|pytest\.xfail", text)
    for item in ast.walk(tree(file)):
        if (
            isinstance(item, ast.ExceptHandler)
            and len(item.body) == 1
            and isinstance(item.body[0], ast.Pass)
        ):
            broad = item.type is None or getattr(item.type, "id", "") in (
                "Exception",
                "BaseException",
            )
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
        "up",
        "join",
        "demo",
        "merge",
        "status",
        "peers",
        "seed",
        "id",
        "verify",
        "pull",
        "watch",
        "invite",
        "change",
        "end",
        "doctor",
        "init",
        "link",
        "plan",
        "swarms",
        "sample",
        "tune",
    }
    assert set(cli.commands) == expected
    assert all(re.search(rf"^  {name} ", shown, re.M) for name in cli.commands)


@each(TESTS)
def test_a_slow_test_says_why(file):
    found = list(ast.walk(tree(file)))
    reasons = {
        id(call.func): [keyword.arg for keyword in call.keywords]
        for call in found
        if isinstance(call, ast.Call)
    }
    for item in found:
        if (
            isinstance(item, ast.Attribute)
            and item.attr == "slow"
            and ast.unparse(item.value) == "pytest.mark"
        ):
            assert reasons.get(id(item)) == ["reason"], (
                f"{relative(file)}:{item.lineno}: pytest.mark.slow needs a reason"
            )


def defined(file, kinds=DEFINED):
    """Yield ``(place, item)`` for what ``file`` defines, the place as "swarm/identity.py load"."""
    for item in ast.walk(tree(file)):
        if isinstance(item, kinds):
            yield f"{relative(file)} {item.name}", item


def docstring_words(file):
    yield relative(file), len((ast.get_docstring(tree(file)) or "").split())
    for place, item in defined(file):
        yield place, len((ast.get_docstring(item) or "").split())


def branches(file):
    for place, function in defined(file, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield place, sum(isinstance(item, BRANCHES) for item in ast.walk(function))


def name_words(file):
    """How many words the names of the tests of ``file`` have, without the first, "test"."""
    for place, function in defined(file, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if function.name.startswith("test_"):
            yield place, function.name.count("_")


def above(most, count, files):
    """Return what of ``files`` has more than ``most``, by its place."""
    return {place: number for file in files for place, number in count(file) if number > most}


def test_docstrings_are_short():
    assert not above(MAX_DOCSTRING_WORDS, docstring_words, PRODUCT)


def test_functions_have_few_branches():
    assert not above(MAX_BRANCHES, branches, PRODUCT)


def test_test_names_are_short():
    assert not above(MAX_NAME_WORDS, name_words, TESTS)


def test_measures_of_a_file(tmp_path, monkeypatch):
    """What is counted of a small file, by hand."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "small.py"
    file.write_text(
        '"""Two words."""\n'
        "async def test_one_two(a):\n"
        '    """And three words."""\n'
        "    while a or None:\n"
        "        def inner(): return [1 if b else 2 for b in a]\n"
        "    return a\n"
    )
    assert dict(docstring_words(file)) == {
        "small.py": 2,
        "small.py test_one_two": 3,
        "small.py inner": 0,
    }
    assert dict(branches(file)) == {"small.py test_one_two": 4, "small.py inner": 2}
    assert dict(name_words(file)) == {"small.py test_one_two": 2}
