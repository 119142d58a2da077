"""CONTRIBUTING.md: its tree names all files, and its example runs."""
import re
import subprocess
import sys
from pathlib import Path

from common.logs import read

TOP = Path(__file__).resolve().parents[1]
PAGE = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = "common", "lesson", "experiments"


def tree():
    """The paths of the .py files in the page's tree, in its order."""
    block = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    paths = []
    folder = ""
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        if name.endswith(".py"):
            paths.append(folder * line.startswith(" ") + name)
    return paths


def test_the_tree_names_each_file_once():
    found = [path.name for path in TOP.glob("*.py") if not path.name.startswith("my_")]
    for folder in FOLDERS:
        found += [str(path.relative_to(TOP)) for path in (TOP / folder).rglob("*.py")
                  if path.name != "__init__.py"]
    assert sorted(tree()) == sorted(found)


def test_imports_point_upwards_in_the_tree():
    from tests.test_imports import import_graph, module_name

    paths = [Path(path) for path in tree()]
    sources = {path: (TOP / path).read_text(encoding="utf-8") for path in paths}
    graph = import_graph(sources)
    places = {module_name(path): i for i, path in enumerate(paths)}
    for module, imported in graph.items():
        below = [name for name in imported if places[name] > places[module]]
        assert not below, f"{module} imports {below}, listed below it"


def test_the_example_adds_an_algorithm(command, tmp_path):
    code, = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "main()" in code
    flags = ["--algorithm", "cispo", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", code, *command, *flags], cwd=TOP,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    start, step = read(tmp_path / "run" / "metrics.jsonl")
    settings = start["settings"]
    assert settings["algorithm"] == "cispo"
    assert (settings["eps_low"], settings["eps_high"]) == (1.0, 4.0)
    assert step["step"] == 1
