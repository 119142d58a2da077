"""Imports point in one direction: no cycle between files, and none between folders."""
import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
FOLDERS = "common", "lesson", "experiments", "tests"


def module_name(path):
    """The name by which a file is imported: common/logs.py is common.logs."""
    return ".".join(path.with_suffix("").parts)


def imported_by(source):
    """The full names of everything that a file imports, also inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names |= {f"{node.module}.{name.name}" for name in node.names}
    return names


def import_graph(sources):
    """{module: the modules of the project that it imports}. sources: {path: source}."""
    modules = {module_name(path) for path in sources}
    graph = {}
    for path, source in sources.items():
        graph[module_name(path)] = modules & imported_by(source)
    return graph


def folder_graph(graph):
    """The same graph between folders. A file at the top counts as a folder of its own."""
    folders = {}
    for module, imported in graph.items():
        folder = module.split(".")[0]
        others = {name.split(".")[0] for name in imported}
        folders.setdefault(folder, set()).update(others - {folder})
    return folders


@pytest.fixture(scope="module")
def graph():
    paths = list(TOP.glob("*.py"))
    for folder in FOLDERS:
        paths += (TOP / folder).rglob("*.py")
    sources = {path.relative_to(TOP): path.read_text(encoding="utf-8") for path in paths}
    return import_graph(sources)


def check(graph):
    TopologicalSorter(graph).prepare()


def test_no_cycle_between_files(graph):
    assert "gspo" in graph["train_math"]
    check(graph)


def test_no_cycle_between_folders(graph):
    folders = folder_graph(graph)
    assert "common" in folders["lesson"]
    assert "common" in folders["experiments"]
    check(folders)


def test_the_folders_below_do_not_know_those_above(graph):
    folders = folder_graph(graph)
    assert folders["gspo"] == set()
    assert folders["train_math"] == {"gspo"}
    assert not folders["common"] & {"lesson", "experiments"}
    assert "experiments" not in folders["lesson"]


def test_a_cycle_between_folders_is_found():
    sources = {
        Path("a/one.py"): "def f():\n    from b import two\n",
        Path("b/two.py"): "import json\n",
        Path("b/three.py"): "from a.four import g\n",
        Path("a/four.py"): "",
    }
    graph = import_graph(sources)
    check(graph)
    with pytest.raises(CycleError):
        check(folder_graph(graph))


def test_a_cycle_between_files_is_found():
    sources = {Path("a/one.py"): "import a.two\n", Path("a/two.py"): "from a import one\n"}
    with pytest.raises(CycleError):
        check(import_graph(sources))
