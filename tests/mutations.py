"""Do the tests notice mistakes in gspo.py, train_math.py and support/?

    python -m tests.mutations [--count 100] [--seed 0] [--files FILE ...]

The mutations are drawn from all files together, so that a longer file gets more of them. Each one
changes one operator, number, condition, keyword, order of arguments or statement. Texts stay,
because most of them are messages. A mutation is caught if a test fails, or takes longer than LIMIT.
If train_math.py cannot be imported, another mutation is drawn.
"""
import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = ["gspo.py", "train_math.py", *map(str, sorted(Path("support").glob("*.py")))]
TESTS = ["test_gspo.py", *(f"tests/test_{name}.py" for name in (
    "answers", "data", "bad_inputs", "rollout", "train_math", "runs", "pages"))]
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or, BitAnd BitOr"
SWAPPED = {ast.Mod: ast.Mult, ast.FloorDiv: ast.Div, ast.Pow: ast.Mult}
for pair in PAIRS.split(", "):
    one, other = (getattr(ast, name) for name in pair.split())
    SWAPPED |= {one: other, other: one}
LIMIT = 900  # seconds for the tests of one mutation
KINDS = {
    "constant": ast.Constant,
    "condition": (ast.If, ast.IfExp, ast.While),
    "unary operator": ast.UnaryOp,
    "statement": (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Delete, ast.If),
}


def kinds_of(node):
    """The kinds of mutation that this node allows."""
    value = getattr(node, "value", 0)
    if value is None or isinstance(getattr(value, "value", value), str):
        return []  # None or a text
    kinds = [kind for kind, nodes in KINDS.items() if isinstance(node, nodes)]
    operator = getattr(node, "ops", [getattr(node, "op", None)])[0]
    if type(operator) in SWAPPED and not isinstance(node, ast.AugAssign):
        kinds.append("operator")
    if isinstance(node, ast.Call):
        kinds += ["arguments"] * (len(node.args) > 1)
        kinds += [f"keyword {i}" for i in range(len(node.keywords))]
    return kinds


def mutate(tree, number, kind):
    """Change the node that has this number in ast.walk."""
    node = list(ast.walk(tree))[number]
    if kind == "statement":
        for parent in ast.walk(tree):
            for block in vars(parent).values():
                if isinstance(block, list) and node in block:
                    block[block.index(node)] = ast.Pass()
    elif kind == "unary operator":
        node.operand = ast.UnaryOp(node.op, node.operand)
    elif kind == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "arguments":
        node.args[:2] = reversed(node.args[:2])
    elif kind == "constant":
        node.value = not node.value if isinstance(node.value, bool) else node.value * 2 or 1
    elif kind == "operator" and isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif kind == "operator":
        node.op = SWAPPED[type(node.op)]()
    else:
        del node.keywords[int(kind.split()[1])]


def mutations(sources, seed):
    """All mutations of the files in a random order, as (file, what has changed, new source)."""
    places = []
    for file, source in sources.items():
        for number, node in enumerate(ast.walk(ast.parse(source))):
            places += [(file, number, kind) for kind in kinds_of(node)]
    for file, number, kind in random.Random(seed).sample(places, len(places)):
        tree = ast.parse(sources[file])
        before = ast.unparse(tree).split("\n")
        mutate(tree, number, kind)
        after = ast.unparse(tree).split("\n")
        if after != before:
            i, a, b = next((i, a, b) for i, (a, b) in enumerate(zip(before, after)) if a != b)
            yield file, f"{file} {i}: {a.strip()}  ->  {b.strip()}", "\n".join(after)


def outcome(file, source):
    """"survived", "caught" or "skipped" if this file has this source."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__")
        shutil.copytree(".", folder, ignore=ignored, dirs_exist_ok=True)
        Path(folder, file).write_text(source, encoding="utf-8")
        command = [sys.executable, "-c", "import train_math"]
        started = subprocess.run(command, cwd=folder, stderr=subprocess.DEVNULL)
        if started.returncode:
            return "skipped"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *TESTS]
        try:
            tests = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return "caught"
        return "caught" if tests.returncode else "survived"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", default=FILES, help="the files to change")
    args = parser.parse_args()
    sources = {file: Path(file).read_text(encoding="utf-8") for file in args.files}
    if outcome(*next(iter(sources.items()))) != "survived":
        sys.exit("the tests fail without any mutation")
    counts = {"caught": 0, "survived": 0, "skipped": 0}
    for file, change, mutated in mutations(sources, args.seed):
        found = outcome(file, mutated)
        counts[found] += 1
        print(found, change, flush=True)
        if counts["caught"] + counts["survived"] == args.count:
            break
    print(counts)


if __name__ == "__main__":
    main()
