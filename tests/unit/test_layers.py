"""Structure: a table says what each group of files may import, and all are held to it; no circles, no large files."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for pattern in ("*.py", "wrappers/**/*.py", "a3c_mp/**/*.py", "bench/**/*.py", "tests/**/*.py")
    for path in ROOT.glob(pattern)
)

GROUND = {"a3c_mp", "errors", "seeds"}
TABLE = {
    "a3c_mp": {"_bootstrap", "errors", "api"},  # the latter is loaded when it is used
    "_bootstrap": set(),
    "errors": set(),
    "seeds": set(),
    "setup": set(),
    "wrappers": set(),
    "maths": set(),
    "config": GROUND,
    "cli": GROUND | {"config", "wrappers", "nets"},
    "nets": GROUND | {"wrappers"},
    "processes": GROUND | {"_bootstrap"},
    "replay": GROUND | {"processes", "wrappers"},
    "data": GROUND | {"config", "wrappers", "nets", "processes", "replay"},
    "task": GROUND | {"config", "processes"},
    "run": GROUND | {"_bootstrap", "config", "wrappers", "maths", "nets", "processes", "replay", "data"},
}
TABLE["cluster"] = TABLE["task"] | {"_bootstrap", "replay"}
TABLE["algorithms"] = TABLE["run"] - {"_bootstrap"} | {"run", "task", "cluster"}
TABLE["population"] = TABLE["algorithms"] - {"task", "cluster"} | {"algorithms", "_bootstrap", "cli"}
TABLE["chapter"] = {"cli", "processes", "run"}
TABLE["chapters"] = TABLE["plot"] = TABLE["algorithms"] | {"algorithms", "population", "cli", "chapter"}
TABLE["api"] = TABLE["chapters"] | {"_bootstrap"}
TABLE["play"] = TABLE["chapters"] | {"api"}
TABLE["bench"] = TABLE["chapters"] | {"chapters", "api"}  # they measure the chapters' own losses, and play
"""group -> groups of this project that its files may import, besides their own"""

MODULES_OF_RL = ("gymnasium", "gym", "ale_py")
PROCESS_MODULES = ("multiprocessing", "torch.multiprocessing", "torch.distributed", "subprocess")
FORBIDDEN = {
    "processes": MODULES_OF_RL,
    "task": (*MODULES_OF_RL, "pickle", "marshal", "shelve"),
    "cluster.session": MODULES_OF_RL,
    "cluster.node": MODULES_OF_RL,
    "cluster.fleet": MODULES_OF_RL,
    "cluster.ray_worker": MODULES_OF_RL,
    "cluster.parameters": MODULES_OF_RL,
    "maths": (*MODULES_OF_RL, *PROCESS_MODULES, "numpy"),
    "nets": PROCESS_MODULES,
    "population.evolution": (*MODULES_OF_RL, "torch", "multiprocessing"),
    "population.growth": (*MODULES_OF_RL, *PROCESS_MODULES),
}
"""group, or one of its files -> packages from elsewhere that it does without"""


def group_of(module: str) -> str | None:
    """The group that a dotted name of this project belongs to; None for other packages."""
    first, *rest = module.split(".")
    if first.startswith("train_"):
        return "chapters"
    if first != "a3c_mp":
        return first if first in TABLE else None
    return rest[0] if rest and rest[0] in TABLE else "a3c_mp"


def imports(source: str, package: str = "", *, top_level: bool = False) -> set[str]:
    """Dotted names that a source file imports, anywhere in it or at its top level; `from a import b` gives a.b."""
    found, tree = set(), ast.parse(source)
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package if node.level else "", node.module]))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"a3c_mp.{name}" if name.startswith("wrappers.") else name  # a3c_mp/wrappers is a link


def test_what_is_forbidden_names_groups_and_files_that_there_are():
    assert set(FORBIDDEN) <= TABLE.keys() | {module_of(path).removeprefix("a3c_mp.") for path in FILES}


@pytest.mark.parametrize("path", [f for f in FILES if f.parts[-2] != "tests" and "tests" not in f.parts], ids=module_of)
def test_every_file_imports_only_what_its_group_may(path):
    module = module_of(path)
    group = group_of(module)
    assert group is not None, "the file belongs to no group: add it to the table"
    names = imports(path.read_text(), module.rpartition(".")[0])
    foreign = {name for name in names if (other := group_of(name)) and other != group and other not in TABLE[group]}
    assert not foreign, f"{group} may import {sorted(TABLE[group])}"
    forbidden = [*FORBIDDEN.get(group, ()), *FORBIDDEN.get(module.removeprefix("a3c_mp."), ())]
    assert not {name for name in names for bad in forbidden if f"{name}.".startswith(f"{bad}.")}


def test_only_the_cluster_imports_ray():
    for path in FILES:
        another_library = path.parent.name == "peers"
        if group_of(module_of(path)) not in ("cluster", None) and not another_library:
            assert not any(name.split(".")[0] == "ray" for name in imports(path.read_text())), path


def test_the_library_imports_no_test():
    for path in FILES:
        if "tests" not in path.parts:
            tops = {name.split(".")[0] for name in imports(path.read_text())}
            assert not tops & {"tests", "harness", "inline", "envs"}, path


def test_no_module_imports_itself_by_way_of_others():
    """At its top level; the root package is left out, since every import of a module runs it first."""
    modules = {module_of(path).removesuffix(".__init__"): path for path in FILES if "tests" not in path.parts}
    graph = {}
    for name, path in modules.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        found = imports(path.read_text(), package, top_level=True)
        found = {other if other in modules else other.rpartition(".")[0] for other in found}
        graph[name] = (found & modules.keys()) - {name, "a3c_mp"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


LIBRARY = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("a3c_mp", "wrappers")]


@pytest.mark.parametrize("path", LIBRARY, ids=module_of)
def test_no_file_has_more_than_300_lines_and_no_class_more_than_200(path):
    lines = (source := path.read_text()).count("\n")
    assert lines <= 300
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    assert not {node.name for node in classes if node.end_lineno - node.lineno + 1 > 200}


def test_the_root_of_the_library_is_short():
    assert len(list((ROOT / "a3c_mp").glob("*.py"))) <= 6
