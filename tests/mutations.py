"""Do the tests notice mistakes in train_math.py?

    python -m tests.mutations [--count 100] [--seed 0] [--results FILE] [--again]

Each mutation changes one place of the syntax tree: an operator, a number, a condition, the order of
two arguments, a keyword or a whole statement. Texts stay, because most of them are messages. Then
the tests of train_math.py run until one fails or until they take too long; both count as caught. A
mutation with which the file cannot be imported is skipped, and another one is drawn. An interrupted
run can be continued. --again tests the survivors in the results file again.
"""
import argparse
import ast
import importlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from pathlib import Path

import pytest

from common import logs

TOP = Path(__file__).resolve().parents[1]
TESTS = ("test_train_math", "test_rollout", "test_own_task", "test_answers", "test_script")
CANNOT_BE_IMPORTED = 99
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And}  # fmt: skip
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Delete, ast.If)
# Survivors that are no fault of the tests: the statement after the mutation, and the reason.
EXPLAINED = {}


def kinds_of(node):
    """The kinds of mutation that this node allows."""
    if isinstance(node, (ast.Compare, ast.BinOp, ast.BoolOp)):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        return ["operator"] * (type(operator) in SWAPPED)
    if isinstance(node, ast.Constant):
        return ["constant"] * isinstance(node.value, (int, float))
    kinds = []
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        kinds.append("condition")
    if isinstance(node, ast.UnaryOp):
        kinds.append("unary operator")
    if isinstance(node, ast.Call):
        kinds += ["arguments"] * (len(node.args) > 1)
        kinds += [f"keyword {i}" for i in range(len(node.keywords))]
    value = getattr(node, "value", None)
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return kinds + ["statement"] * (isinstance(node, DROPPED) and not is_text)


def mutate(node, kind):
    """The node after the mutation."""
    if kind == "statement":
        return ast.Pass()
    if kind == "unary operator":
        return node.operand
    if kind == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "arguments":
        node.args[:2] = reversed(node.args[:2])
    elif kind.startswith("keyword"):
        del node.keywords[int(kind.split()[1])]
    elif kind == "constant":
        is_bool = isinstance(node.value, bool)
        node.value = not node.value if is_bool else node.value * 2 or 1
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    else:
        node.op = SWAPPED[type(node.op)]()
    return node


class At(ast.NodeTransformer):
    """Mutates one node of a tree."""

    def __init__(self, target, kind):
        self.target = target
        self.kind = kind

    def visit(self, node):
        return mutate(node, self.kind) if node is self.target else self.generic_visit(node)


def mutations(source, seed):
    """All mutations of the source in a random order, as (what has changed, new source)."""
    nodes = enumerate(ast.walk(ast.parse(source)))
    places = [(number, kind) for number, node in nodes for kind in kinds_of(node)]
    before = ast.unparse(ast.parse(source)).split("\n")
    for number, kind in random.Random(seed).sample(places, len(places)):
        tree = ast.parse(source)
        target = list(ast.walk(tree))[number]
        after = ast.unparse(At(target, kind).visit(tree)).split("\n")
        for i, (line, new_line) in enumerate(zip(before, after)):
            if line != new_line:
                yield f"{i}: {line.strip()}  ->  {new_line.strip()}", "\n".join(after)
                break


def run_tests(folder, log):
    """Run the tests in this process, which ends with them, on the train_math.py of the folder."""
    os.setsid()
    for stream in 1, 2:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    for name in list(sys.modules):
        if name.startswith(("train_math", "tests.test_", "tests.conftest", "common")):
            del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        importlib.import_module("train_math")
    except BaseException:
        os._exit(CANNOT_BE_IMPORTED)
    files = [str(TOP / "tests" / f"{name}.py") for name in TESTS]
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={folder}/files"]
    os._exit(pytest.main([*files, *options]))


def outcome(source, limit=None):
    """("survived", "caught" or "skipped", the test that failed)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train_math.py").write_text(source, encoding="utf-8")
        log = Path(folder, "log")
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, log))
        process.start()
        process.join(limit)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return "caught", "they took too long"
        failed = [line for line in log.read_text().split("\n") if line.startswith("FAILED")]
        words = {0: "survived", CANNOT_BE_IMPORTED: "skipped"}
        return words.get(process.exitcode, "caught"), "".join(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("runs/mutations.jsonl"))
    parser.add_argument("--again", action="store_true", help="test the survivors again")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    source = (TOP / "train_math.py").read_text(encoding="utf-8")
    crc = zlib.crc32(source.encode())
    known = {row["change"]: row for row in logs.read(args.results) if row["crc"] == crc}
    for name in TESTS:
        importlib.import_module(f"tests.{name}")  # so that the imports take their time only once
    start = time.perf_counter()
    if outcome(source)[0] != "survived":
        sys.exit("the tests fail without any mutation")
    limit = 60 + 3 * (time.perf_counter() - start)
    counts = {"caught": 0, "survived": 0, "explained": 0, "skipped": 0}
    for change, mutated in mutations(source, args.seed):
        row = known.get(change)
        if not row or (args.again and row["outcome"] == "survived"):
            word, test = outcome(mutated, limit)
            row = {"crc": crc, "change": change, "outcome": word, "test": test}
            logs.append(args.results, row)
        survived = row["outcome"] == "survived"
        reason = EXPLAINED.get(change.split("  ->  ")[1], "") if survived else ""
        counts["explained" if reason else row["outcome"]] += 1
        if survived:
            print(f"survived: {change}   {reason}", flush=True)
        if sum(counts.values()) - counts["skipped"] == args.count:
            break
    print(counts)


if __name__ == "__main__":
    main()
