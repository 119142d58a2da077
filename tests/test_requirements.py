"""requirements.txt lists what is imported, and .ci/constraints.txt the tested versions of it."""

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TOP = Path(__file__).resolve().parents[1]
FOLDERS = "common", "lesson", "experiments", "tests"
OWN = {path.stem for path in TOP.glob("*.py")} | set(FOLDERS)
WITH_ANOTHER = {"tokenizers": "transformers"}  # is a part of it
OPTIONAL = {"trl", "verl", "peft", "packaging"}  # only some comparisons and this test need these


def listed(name):
    lines = (TOP / name).read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and line[0] != "#"]
    return {requirement.name: requirement.specifier for requirement in requirements}


def imported():
    """All packages that are imported anywhere, except those of Python and of this project."""
    paths = list(TOP.glob("*.py"))
    for folder in FOLDERS:
        paths += (TOP / folder).rglob("*.py")
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names


def test_requirements_are_what_is_imported():
    needed = imported() - sys.stdlib_module_names - OWN - OPTIONAL
    needed = {WITH_ANOTHER.get(name, name) for name in needed}
    assert set(listed("requirements.txt")) == needed


def test_tested_versions_are_allowed_and_exact():
    allowed = listed("requirements.txt")
    tested = listed(".ci/constraints.txt")
    assert set(tested) == set(allowed)
    for name, specifier in tested.items():
        (exact,) = specifier
        assert exact.operator == "=="
        assert allowed[name].contains(exact.version), name


@pytest.mark.parametrize("name", sorted(listed("requirements.txt")))
def test_this_environment_has_an_allowed_version(name):
    version = importlib.metadata.version(name)
    assert listed("requirements.txt")[name].contains(version, prereleases=True)
