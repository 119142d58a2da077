"""Do the tests notice mistakes in gspo.py, train_math.py and support/?

    python -m tests.mutations [--list tests/mutations.jsonl]

The list has 100 deleted statements and 40 changed operators. Each entry names a function, one of
its statements and, for a changed operator, the expression in it. It is caught if a test fails, and
gone if the code no longer has the statement. "before" is the result for commit 98f96c1.
"""
import argparse
import ast
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = ["test_gspo.py", *(f"tests/test_{name}.py" for name in (
    "train_math", "rollout", "runs", "answers", "data", "pages"))]
FIRST = {"gspo.py": TESTS[0], "sampling.py": TESTS[2], "runs.py": TESTS[3], "task.py": TESTS[4]}
LIMIT = 900  # seconds for the tests of one mutation
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or, BitAnd BitOr"
SWAPPED = {}
for pair in PAIRS.split(", "):
    one, other = (getattr(ast, name) for name in pair.split())
    SWAPPED |= {one: other, other: one}


def mutate(source, entry, is_elsewhere):
    """The source with this mutation, or None if it has no such statement in this function or, if
    is_elsewhere, in any other function."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        has_name = getattr(function, "name", None) == entry["function"]
        if not isinstance(function, ast.FunctionDef) or has_name == is_elsewhere:
            continue
        for node in filter(lambda node: isinstance(node, ast.stmt), ast.walk(function)):
            text = ast.unparse(node)
            if "operator" not in entry and text == entry["statement"]:
                lines = source.splitlines()
                lines[node.lineno - 1:node.end_lineno] = [" " * node.col_offset + "pass"]
                return "\n".join(lines)
            is_here = text.partition("\n")[0] == entry["statement"]
            if is_here and swap(node, entry.get("operator")):
                return ast.unparse(tree)
    return None


def swap(statement, expression):
    """Change the operator of this expression in the statement. False: it is not there."""
    for node in ast.walk(statement):
        if isinstance(node, ast.expr) and ast.unparse(node) == expression:
            if isinstance(node, ast.Compare):
                node.ops[0] = SWAPPED[type(node.ops[0])]()
            else:
                node.op = SWAPPED[type(node.op)]()
            return True
    return False


def is_caught(file, source):
    """Whether a test fails if this file has this source."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__")
        shutil.copytree(".", folder, ignore=ignored, dirs_exist_ok=True)
        Path(folder, file).write_text(source, encoding="utf-8")
        tests = dict.fromkeys([FIRST.get(file.name, TESTS[1]), *TESTS])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *tests]
        try:
            result = subprocess.run(command, timeout=LIMIT, cwd=folder, capture_output=True)
            return result.returncode != 0
        except subprocess.TimeoutExpired:
            return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", default="tests/mutations.jsonl")
    args = parser.parse_args()
    files = [Path("gspo.py"), Path("train_math.py"), *sorted(Path("support").glob("*.py"))]
    for line in Path(args.list).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        now = "gone"
        for is_elsewhere, file in itertools.product((False, True), files):
            changed = mutate(file.read_text(encoding="utf-8"), entry, is_elsewhere)
            if changed:
                now = "caught" if is_caught(file, changed) else "survived"
                break
        text = entry.get("operator", entry["statement"]).partition("\n")[0]
        print(entry["before"], "before, now", now, entry["function"], text, flush=True)


if __name__ == "__main__":
    main()
