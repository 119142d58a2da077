"""Do the tests notice mistakes in gspo.py, train_math.py and support/?

    python -m tests.mutations [--count 100] [--seed 0] [--files FILE ...]

Each mutation changes one operator, number, condition or keyword, or leaves out one statement. It is
caught if a test fails, or takes longer than LIMIT. Texts stay, because most of them are messages.
"""
import argparse
import ast
import difflib
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = ["gspo.py", "train_math.py", *map(str, sorted(Path("support").glob("*.py")))]
TESTS = ["test_gspo.py", *(f"tests/test_{name}.py" for name in (
    "answers", "data", "rollout", "train_math", "runs", "pages"))]
LIMIT = 900  # seconds for the tests of one mutation
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or, BitAnd BitOr"
SWAPPED = {}
for pair in PAIRS.split(", "):
    one, other = (getattr(ast, name) for name in pair.split())
    SWAPPED |= {one: other, other: one}
STATEMENTS = ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Delete, ast.If


def mutate(source, rng):
    """The source with one change at a random place, or None if that place allows none."""
    tree = ast.parse(source)
    node = rng.choice(list(ast.walk(tree)))
    if isinstance(getattr(node, "value", None), ast.Constant):  # a docstring, for example
        return None
    operator = getattr(node, "ops", [getattr(node, "op", None)])[0]
    if type(operator) in SWAPPED:
        swapped = SWAPPED[type(operator)]()
        if isinstance(node, ast.Compare):
            node.ops[0] = swapped
        else:
            node.op = swapped
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        node.value = not node.value if isinstance(node.value, bool) else node.value * 2 or 1
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and rng.random() < 0.5:
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Call) and node.keywords:
        del node.keywords[rng.randrange(len(node.keywords))]
    elif isinstance(node, STATEMENTS):
        for parent in ast.walk(tree):
            for block in vars(parent).values():
                if isinstance(block, list) and node in block:
                    block[block.index(node)] = ast.Pass()
    changed = ast.unparse(ast.fix_missing_locations(tree))
    return changed if changed != ast.unparse(ast.parse(source)) else None


def is_caught(file, source):
    """Whether a test fails if this file has this source. None: the script cannot be imported."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__")
        shutil.copytree(".", folder, ignore=ignored, dirs_exist_ok=True)
        Path(folder, file).write_text(source, encoding="utf-8")
        quiet = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if subprocess.run([sys.executable, "-c", "import train_math"], **quiet).returncode:
            return None
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *TESTS]
        try:
            return subprocess.run(command, timeout=LIMIT, **quiet).returncode != 0
        except subprocess.TimeoutExpired:
            return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", default=FILES, help="the files to change")
    args = parser.parse_args()
    sources = {file: Path(file).read_text(encoding="utf-8") for file in args.files}
    sizes = [len(source) for source in sources.values()]
    rng = random.Random(args.seed)
    caught = []
    while len(caught) < args.count:
        (file,) = rng.choices(list(sources), sizes)
        changed = mutate(sources[file], rng)
        found = None if changed is None else is_caught(file, changed)
        if found is not None:
            caught.append(found)
            before = ast.unparse(ast.parse(sources[file])).split("\n")
            lines = [x for x in difflib.ndiff(before, changed.split("\n")) if x[0] in "+-"]
            print("caught" if found else "survived", file, *lines, sep="\n", flush=True)
    print(f"{sum(caught)} of {len(caught)} are caught")


if __name__ == "__main__":
    main()
