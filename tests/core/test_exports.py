"""Public names: what ``__all__`` says, what importing costs, and the examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import regard

ROOT = Path(regard.__file__).parent
EVERYTHING = sorted(
    info.name
    for info in pkgutil.walk_packages(regard.__path__, "regard.")
    if not info.name.endswith(("__main__", "._native"))  # _native: a library in plain C, no module of Python
)
PUBLIC = [
    "regard",
    *(name for name in EVERYTHING if not any(part.startswith("_") for part in name.split("."))),
]
WITH_ALL = [name for name in PUBLIC if hasattr(importlib.import_module(name), "__all__")]


def defined(module: ModuleType) -> set[str]:
    """Public classes and functions that are written in a module itself, and annotated names of types."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }


def test_the_rooms_of_the_language_name_what_they_offer() -> None:
    rooms = {"scores", "normalizers", "masks", "biases", "variants", "nn", "compat", "look"}
    assert {f"regard.{room}" for room in rooms} | {"regard"} <= set(WITH_ALL)


@pytest.mark.parametrize("name", WITH_ALL)
def test_every_name_in_all_is_there_and_is_told(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for each in module.__all__:
        value = getattr(module, each)
        assert not each.startswith("_")
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{each} has no docstring"
    assert module.__doc__


@pytest.mark.parametrize("name", [name for name in WITH_ALL if (ROOT / f"{name.split('.')[-1]}.py").exists()])
def test_all_is_what_a_user_is_meant_to_call(name: str) -> None:
    """What a room of the language defines beyond ``__all__`` is plumbing of the library, and is used by it."""
    module = importlib.import_module(name)
    rest = defined(module) - set(module.__all__)
    text = "".join(path.read_text() for path in ROOT.rglob("*.py"))
    for plumbing in rest:
        assert text.count(plumbing) > 1, f"{name}.{plumbing} is neither public nor used"


def _bound(path: Path) -> set[str]:
    """The public names that a package's ``__init__`` binds."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If):
            node.body and names.update(
                alias.asname or alias.name
                for inner in node.body
                if isinstance(inner, ast.ImportFrom)
                for alias in inner.names
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regard"):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("room", ["", "variants", "nn", "compat", "look"])
def test_a_package_exports_what_it_imports_and_no_more(room: str) -> None:
    module = importlib.import_module(f"regard.{room}".rstrip("."))
    assert _bound(ROOT / room / "__init__.py") == set(module.__all__)


def test_the_top_level_is_the_one_that_is_designed() -> None:
    functions = (
        "attention attention_weights attention_with_lse observe merge varlen_attention plan watch Mechanism"
    )
    modules = {"scores", "normalizers", "masks", "biases", "variants", "nn", "compat", "look"}
    assert set(regard.__all__) == set(functions.split()) | {"Observation"} | modules
    assert set(regard.__all__) <= set(dir(regard))
    with pytest.raises(AttributeError, match="'attentoin'"):
        regard.attentoin  # noqa: B018


# ------------------------------------------------------------------ importing

HEAVY = (
    "transformers",
    "rich",
    "typer",
    "matplotlib",
    "safetensors",
    "tokenizers",
    "playwright",
    "PIL",
    "pandas",
)
CHECK = """
import sys
import torch
before = set(sys.modules)
{work}
loaded = set(sys.modules) - before
print(*sorted(name for name in {heavy!r} if name in sys.modules))
print(*sorted(name for name in loaded if name.startswith("regard.")))
"""


def _loaded_by(work: str) -> tuple[list[str], list[str]]:
    code = CHECK.format(work=work, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    heavy, own = done.stdout.split("\n")[:2]
    return heavy.split(), own.split()


def test_importing_and_attending_load_nothing_heavy() -> None:
    work = "import regard; q = torch.ones(1, 1, 3, 2); regard.attention(q, q, q); regard.plan(q, q, q)"
    heavy, own = _loaded_by(work)
    assert heavy == []
    assert "regard._attention" in own
    assert not {"regard.look", "regard.nn", "regard.compat", "regard.cli"} & set(own)


def test_the_rooms_are_there_when_they_are_asked_for() -> None:
    heavy, own = _loaded_by(
        "import regard; regard.nn; regard.compat; regard.variants; from regard import watch"
    )
    assert {"regard.nn", "regard.compat", "regard.variants", "regard.look"} <= set(own)
    assert "transformers" not in heavy and "matplotlib" not in heavy


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_module_can_be_imported_first(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


# ------------------------------------------------------------------ docstrings


def _with_examples() -> list[str]:
    found = []
    for name in ["regard", *EVERYTHING]:
        tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
        if any(not example.options.get(doctest.SKIP) for test in tests for example in test.examples):
            found.append(name)
    return found


@pytest.mark.parametrize("name", _with_examples())
def test_the_examples_in_docstrings_are_right(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert outcome.attempted > 0 and outcome.failed == 0


def test_there_are_examples() -> None:
    assert "regard.mechanism" in _with_examples()
