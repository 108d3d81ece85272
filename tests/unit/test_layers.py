"""Directions of imports: chapters stand on the library, and no part of the library on what is above or beside it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "a3c_mp").rglob("*.py"))
WRAPPERS = sorted((ROOT / "wrappers").rglob("*.py"))
CHAPTERS = sorted(ROOT.glob("train_*.py"))
SCRIPTS = sorted(set(ROOT.glob("*.py")) | set((ROOT / "bench").rglob("*.py")))

MATHS = ["returns", "losses", "schedules"]
PROCESSES = ["memory", "slots", "weights", "children", "workers", "learners"]
RL = ["returns", "losses", "nets", "rollout", "actor_critic", "impala", "run"]
ENVIRONMENTS = ["gymnasium", "gym", "ale_py", "wrappers"]


def imports(source: str, package: str = "") -> set[str]:
    """Dotted names that a source file imports, anywhere in it; `from a import b` gives both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package if node.level else "", node.module]))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    return imports(path.read_text(), ".".join(path.relative_to(ROOT).parts[:-1]))


def reached_from(module: str) -> set[str]:
    """What a module of the library imports, itself or through other modules of the library."""
    reached, todo = set(), [f"a3c_mp.{module}"]
    while todo:
        path = ROOT / todo.pop().replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():  # else it is a name inside a module
                new = imports_of(file) - reached
                reached |= new
                todo += [name for name in new if name.startswith("a3c_mp.")]
    return reached


def offenders(names: set[str], forbidden: list[str]) -> list[str]:
    """The names that are one of `forbidden`, or inside it."""
    return sorted(name for name in names for bad in forbidden if name == bad or name.startswith(bad + "."))


def in_library(modules: list[str]) -> list[str]:
    return [f"a3c_mp.{module}" for module in modules]


def test_imports_are_found_wherever_and_however_they_are_written():
    source = """
import a.b as c
from d import e as f, g
from . import h
from .i import j
def later():
    from k.l import m
"""
    found = imports(source, package="p")
    assert found == {"a.b", "d", "d.e", "d.g", "p", "p.h", "p.i", "p.i.j", "k.l", "k.l.m"}
    assert offenders(found, ["k", "d.e", "a.bc"]) == ["d.e", "k.l", "k.l.m"]


def test_imports_are_followed_through_the_library():
    reached = reached_from("actor_critic")
    assert {"a3c_mp.rollout", "a3c_mp.slots", "gymnasium"} <= reached, "the last two by way of the first"


@pytest.mark.parametrize("path", WRAPPERS, ids=lambda path: path.name)
def test_wrappers_know_nothing_of_the_library(path):
    assert not offenders(imports_of(path), ["a3c_mp"])


@pytest.mark.parametrize("module", MATHS)
def test_maths_know_neither_environments_nor_processes(module):
    forbidden = [*ENVIRONMENTS, "multiprocessing", "torch.multiprocessing", *in_library(PROCESSES)]
    assert not offenders(reached_from(module), forbidden)


def test_nets_know_spaces_but_neither_wrappers_nor_processes():
    forbidden = ["wrappers", "ale_py", "multiprocessing", "torch.multiprocessing", *in_library(PROCESSES)]
    reached = reached_from("nets")
    assert not offenders(reached, forbidden)
    assert not offenders(reached, ["gymnasium.make", "gymnasium.vector", "gymnasium.envs"])


@pytest.mark.parametrize("module", PROCESSES)
def test_processes_know_no_reinforcement_learning(module):
    assert not offenders(reached_from(module), [*in_library(RL), *ENVIRONMENTS])


@pytest.mark.parametrize("path", [*LIBRARY, *WRAPPERS, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_a_chapter(path):
    assert CHAPTERS
    assert not offenders(imports_of(path), [chapter.stem for chapter in CHAPTERS])


@pytest.mark.parametrize("path", [*LIBRARY, *WRAPPERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_imports_no_script(path):
    assert not offenders(imports_of(path), ["play", "plot", "bench", "tests"])
