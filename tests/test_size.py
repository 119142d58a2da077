"""The script stays small: limits of length, tokens and density, and what it may import.

No new feature raises a limit. What it needs goes into support/, into a recipe, or is left out.
CONTRIBUTING.md says where. Machinery needs os, json, re or signal, so the list of imports keeps it
out of train_math.py, whatever its length.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "copy", "itertools", "time", "dataclasses", "typing", "torch", "tqdm", "gspo", "support"}
MAY_SUPPORT_IMPORT = {"torch", "tqdm", "transformers", "datasets", "filelock", "pyarrow"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}
SUPPORT_LINES = 200  # of each file
MATHS_LINES = 270  # of gspo.py
ALL_LINES = 1730  # of gspo.py, train_math.py and support/
LIMITS = {"lines": 390, "tokens": 2700, "tokens per code line": 11, "columns": 100}


def tokens_of(source):
    """The tokens of the code, without comments and docstrings."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node):
                docstrings.add(node.body[0].lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in NO_CODE and not is_docstring:
            yield token


def sizes(source):
    tokens = list(tokens_of(source))
    code_lines = {token.start[0] for token in tokens}
    lines = source.splitlines()
    return {
        "lines": len(lines),
        "tokens": len(tokens),
        "tokens per code line": len(tokens) / len(code_lines),
        "columns": max(map(len, lines)),
    }


def too_large(source):
    """The names of the limits that this source of train_math.py breaks."""
    return [name for name, size in sizes(source).items() if size > LIMITS[name]]


def imported(source):
    """The packages that this source imports, also inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.fixture(scope="module")
def script():
    return (TOP / "train_math.py").read_text(encoding="utf-8")


def test_the_script_is_small(script):
    assert not too_large(script), sizes(script)


def test_the_script_imports_no_machinery(script):
    assert imported(script) <= MAY_IMPORT


def test_the_files_of_support_are_small():
    files = sorted((TOP / "support").glob("*.py"))
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lines) > 5 and max(lines.values()) <= SUPPORT_LINES, lines
    for path in files:
        if path.name != "__init__.py":
            density = sizes(path.read_text(encoding="utf-8"))["tokens per code line"]
            assert density <= LIMITS["tokens per code line"], path.name
    for name in "gspo.py", "train_math.py":
        lines[name] = len((TOP / name).read_text(encoding="utf-8").splitlines())
    assert lines["gspo.py"] <= MATHS_LINES and sum(lines.values()) <= ALL_LINES, lines


def test_support_needs_no_script():
    for path in (TOP / "support").glob("*.py"):
        names = imported(path.read_text(encoding="utf-8"))
        others = names - set(sys.stdlib_module_names) - {"gspo", "support"}
        assert others <= MAY_SUPPORT_IMPORT, path.name


@pytest.mark.parametrize("change, broken", [
    (lambda script: script + "\n" * 10 + "# a comment\n" * 50, ["lines"]),
    (lambda script: script + "\nx = 0" + " + 0" * 1500, ["tokens", "tokens per code line"]),
    (lambda script: script.replace("\nimport time", "\nimport time" + " " * 90), ["columns"]),
])
def test_each_limit_notices_a_script_that_breaks_it(script, change, broken):
    assert set(broken) <= set(too_large(change(script)))


@pytest.mark.parametrize("line", ["import os", "from json import dumps", "def f():\n    import re"])
def test_an_import_of_machinery_is_noticed(script, line):
    assert not imported(script + "\n" + line) <= MAY_IMPORT
