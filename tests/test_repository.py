"""The repository: imports point in one direction, the script stays small, requirements.txt lists
what is imported, and CONTRIBUTING.md names all files.

No new feature raises a limit of size. What it needs goes into support/, into a recipe, or is left
out. CONTRIBUTING.md says where. Machinery needs os, json, re or signal, so the list of imports
keeps it out of train_math.py, whatever its length.
"""

import ast
import functools
import io
import re
import sys
import tokenize

import pytest
from packaging.requirements import Requirement

from tests.conftest import TOP

PAGE = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = "support", "tools", "lesson", "homework", "guides", "evidence"
MAY_IMPORT = {
    "copy", "itertools", "time", "dataclasses", "typing", "torch", "tqdm", "transformers", "gspo",
    "support"}
MAY_SUPPORT_IMPORT = {"torch", "tqdm", "transformers", "datasets", "filelock"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}
SUPPORT_LINES = {"all": 730, "sampling.py": 230}  # and 200 of each other file
MATHS_LINES = 270  # of gspo.py
ALL_LINES = 1400  # of gspo.py, train_math.py and support/
LIMITS = {"lines": 400, "tokens per code line": 11, "columns": 100}
WITH_ANOTHER = {  # is installed with it
    "safetensors": "transformers", "tokenizers": "transformers",
    "PIL": "matplotlib"}
# Only some comparisons, configurations and tests need these:
OPTIONAL = {"trl", "verl", "peft", "packaging", "yaml", "accelerate", "hydra", "omegaconf"}


def source_of(path):
    return (TOP / path).read_text(encoding="utf-8")


def python_files(*folders):
    """The paths of the .py files at the top and in these folders, from the top."""
    paths = [*TOP.glob("*.py")]
    for folder in folders:
        paths += (TOP / folder).rglob("*.py")
    return [path.relative_to(TOP) for path in paths]


@functools.cache
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


def packages(source):
    return {name.split(".")[0] for name in imported_by(source)}


def sizes(source):
    """The sizes of a file. Comments and docstrings have no tokens."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    docstrings = {node.body[0].lineno for node in ast.walk(ast.parse(source))
                  if isinstance(node, kinds) and ast.get_docstring(node)}
    code_lines = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in NO_CODE and not is_docstring:
            code_lines.append(token.start[0])
    lines = source.splitlines()
    return {
        "lines": len(lines),
        "tokens": len(code_lines),
        "tokens per code line": len(code_lines) / len(set(code_lines)),
        "columns": max(map(len, lines)),
    }


def listed(name):
    """{package: its versions} in a file of requirements."""
    lines = source_of(name).splitlines()
    requirements = [Requirement(line) for line in lines if line and line[0] != "#"]
    return {requirement.name: requirement.specifier for requirement in requirements}


@pytest.fixture(scope="module")
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


class TestTree:
    def test_names_each_file_once(self, tree):
        found = [str(path) for path in python_files(*FOLDERS)
                 if path.name != "__init__.py" and not path.name.startswith("my_")]
        assert sorted(tree) == sorted(found)

    def test_imports_point_upwards_in_it(self, tree):
        """So there is no cycle between files or folders. Only tests import tests."""
        modules = [path.removesuffix(".py").replace("/", ".") for path in tree]
        for i, path in enumerate(tree):
            names = imported_by(source_of(path))
            assert not names & set(modules[i + 1:]), path
            assert not any(name.split(".")[0] == "tests" for name in names), path


class TestSize:
    def test_of_the_script_is_small_and_it_imports_no_machinery(self):
        script = source_of("train_math.py")
        larger = script + "# a comment\n" * 50 + "x = 0" + " + 0" * 1500
        for source, expected in (script, []), (larger, list(LIMITS)):
            found = sizes(source)
            assert [name for name in LIMITS if found[name] > LIMITS[name]] == expected, found
        assert packages(script) <= MAY_IMPORT

    def test_of_the_files_of_support_is_small_and_they_import_no_script(self):
        lines = {}
        for path in (TOP / "support").glob("*.py"):
            source = source_of(path)
            lines[path.name] = len(source.splitlines())
            others = packages(source) - sys.stdlib_module_names - {"gspo", "support"}
            assert others <= MAY_SUPPORT_IMPORT, path.name
            if path.name != "__init__.py":
                density = sizes(source)["tokens per code line"]
                assert density <= LIMITS["tokens per code line"], path.name
        assert len(lines) > 4 and sum(lines.values()) <= SUPPORT_LINES["all"], lines
        assert all(n <= SUPPORT_LINES.get(name, 200) for name, n in lines.items()), lines
        for name in "gspo.py", "train_math.py":
            lines[name] = len(source_of(name).splitlines())
        assert lines["gspo.py"] <= MATHS_LINES and sum(lines.values()) <= ALL_LINES, lines

    def test_of_the_results_is_as_small_as_the_page_says(self):
        most, files = re.search(r"All files of evidence/ together .*? (\d+) MB and\s(\d+) files",
                                PAGE, re.DOTALL).groups()
        paths = [path for path in (TOP / "evidence").rglob("*") if path.is_file()]
        paths = [path for path in paths if path.parent.name != "__pycache__"]
        size = sum(path.stat().st_size for path in paths)
        assert 20 < len(paths) <= int(files) and 10**6 < size <= int(most) * 10**6


class TestRequirements:
    def test_are_what_is_imported(self):
        needed = set()
        for path in python_files(*FOLDERS, "tests"):
            needed |= packages(source_of(path))
        own = {path.stem for path in python_files("guides")} | {*FOLDERS, "tests"}
        needed -= sys.stdlib_module_names | own | OPTIONAL
        needed = {WITH_ANOTHER.get(name, name) for name in needed}
        assert set(listed("requirements.txt")) == needed

    def test_in_the_tested_versions_are_allowed_and_exact(self):
        allowed = listed("requirements.txt")
        tested = listed(".ci/constraints.txt")
        assert set(tested) == set(allowed)
        for name, specifier in tested.items():
            (exact,) = specifier
            assert exact.operator == "=="
            assert allowed[name].contains(exact.version), name
