"""The repository: imports point in one direction, it stays small, and CONTRIBUTING.md names all
files.

No new feature raises a limit of size. The list of imports keeps machinery out of train_math.py.
"""
import ast
import io
import re
import subprocess
import sys
import tokenize

import pytest

from tests.conftest import TOP

PAGE = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = "support", "tools", "lesson", "homework", "guides", "evidence"
MAY_IMPORT = {
    "copy", "itertools", "time", "dataclasses", "typing", "torch", "tqdm", "transformers", "gspo",
    "support"}
MAY_SUPPORT_IMPORT = {"torch", "tqdm", "transformers", "datasets", "filelock"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}
LINES = {"gspo.py": 270, "train_math.py": 400, "sampling.py": 230}  # and 200 of others in support/
SUPPORT_LINES = 730
ALL_LINES = 1400
TOKENS = 11  # per code line, on average
WHOLE = {"files": 75, "lines of Python": 9200, "words of the pages": 27_000}


def source_of(path):
    return (TOP / path).read_text(encoding="utf-8")


def python_files(*folders):
    """The paths of the .py files at the top and in these folders, from the top."""
    paths = [*TOP.glob("*.py")]
    for folder in folders:
        paths += (TOP / folder).rglob("*.py")
    return [path.relative_to(TOP) for path in paths]


def imported_by(source):
    """The full names of everything that a file imports, also inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return names


def packages(source):
    return {name.split(".")[0] for name in imported_by(source)}


def density(source):
    """Tokens per code line. Comments and docstrings have none."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    docstrings = {node.body[0].lineno for node in ast.walk(ast.parse(source))
                  if isinstance(node, kinds) and ast.get_docstring(node)}
    code_lines = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in NO_CODE and not is_docstring:
            code_lines.append(token.start[0])
    return len(code_lines) / len(set(code_lines))


def test_the_tree_of_the_page_names_each_file_once_and_imports_point_upwards_in_it():
    """So there is no cycle between files or folders. Only tests import tests."""
    tree = []
    for line in re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1].splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        if name.endswith(".py"):
            tree.append(folder * line.startswith(" ") + name)
    found = [str(path) for path in python_files(*FOLDERS)
             if path.name != "__init__.py" and not path.name.startswith("my_")]
    assert sorted(tree) == sorted(found)
    modules = [path.removesuffix(".py").replace("/", ".") for path in tree]
    for i, path in enumerate(tree):
        names = imported_by(source_of(path))
        assert not names & set(modules[i + 1:]), path
        assert not any(name.split(".")[0] == "tests" for name in names), path


def test_the_core_is_small_and_imports_no_machinery():
    assert density("x = 0" + " + 0" * 10 + "  # no tokens") == 23
    assert packages(source_of("train_math.py")) <= MAY_IMPORT
    support = [str(path) for path in python_files("support") if path.parent.name == "support"]
    lines = {}
    for path in ["gspo.py", "train_math.py", *support]:
        source = source_of(path)
        name = path.rpartition("/")[2]
        lines[name] = len(source.splitlines())
        assert lines[name] <= LINES.get(name, 200), path
        assert max(map(len, source.splitlines()), default=0) <= 100, path
        if lines[name] and name != "gspo.py":
            assert density(source) <= TOKENS, path
        if path in support:
            others = packages(source) - sys.stdlib_module_names - {"gspo", "support"}
            assert others <= MAY_SUPPORT_IMPORT, path
    in_support = sum(lines.values()) - lines["gspo.py"] - lines["train_math.py"]
    assert len(support) > 4 and in_support <= SUPPORT_LINES and sum(lines.values()) <= ALL_LINES


@pytest.mark.skipif(not (TOP / ".git").exists(), reason="there is no git repository")
def test_the_whole_is_small():
    names = subprocess.check_output(["git", "ls-files"], cwd=TOP, text=True).split()
    data = "lesson/world/", "evidence/logs/", "evidence/plans/"
    counted = [name for name in names if not name.startswith(data) and not name.endswith(".png")]
    python, pages = ([source_of(name) for name in counted if name.endswith(ending)]
                     for ending in (".py", ".md"))
    words = sum(len(text.split()) for text in pages)
    words -= len(source_of("evidence/tables.md").split())
    lines = sum(len(text.splitlines()) for text in python)
    found = {"files": len(counted), "lines of Python": lines, "words of the pages": words}
    assert all(found[what] <= WHOLE[what] for what in WHOLE), found
