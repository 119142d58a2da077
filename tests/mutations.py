"""Do the tests notice mistakes in train_math.py?

    python -m tests.mutations [--count 100] [--seed 0] [--results FILE]

Each mutation changes one operator, number, condition, keyword, order of arguments or statement. The
tests run until one fails or until LIMIT; both count as caught. If the file cannot be imported,
another mutation is drawn. Texts stay, because most of them are messages. If the command is repeated
with the same results file, it tests only what was not caught before.
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
import zlib
from pathlib import Path

import pytest

from common import logs

TESTS = ("test_train_math", "test_rollout", "test_own_task", "test_answers", "test_script",
         "test_bad_inputs")
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
GPU = "only a GPU executes this line"
EXPLAINED = {  # the changed line of a survivor, and why the tests cannot notice the change
    "torch.manual_seed(cfg.seed * 2000006 + step)": "any large factor keeps the seeds apart",
    "if done != 1 and mask.is_cuda:": GPU,
    "decode()": GPU,
    "uniform = 1 - torch.rand(len(probs), 1)": GPU,
    "n = max(len(updates), 1)": "max has no order",
    "chunks.append(checkpoint(log_probs_of, *chunk, use_reentrant=False))":
        "nothing in the head is random, so the random state need not be kept",
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
    elif kind == "operator":
        if isinstance(node, ast.Compare):
            node.ops[0] = SWAPPED[type(node.ops[0])]()
        else:
            node.op = SWAPPED[type(node.op)]()
    else:
        del node.keywords[int(kind.split()[1])]


def mutations(source, seed):
    """All mutations of the source in a random order, as (what has changed, new source)."""
    nodes = enumerate(ast.walk(ast.parse(source)))
    places = [(number, kind) for number, node in nodes for kind in kinds_of(node)]
    before = ast.unparse(ast.parse(source)).split("\n")
    for number, kind in random.Random(seed).sample(places, len(places)):
        tree = ast.parse(source)
        mutate(tree, number, kind)
        after = ast.unparse(tree).split("\n")
        if after != before:
            i, a, b = next((i, a, b) for i, (a, b) in enumerate(zip(before, after)) if a != b)
            yield f"{i}: {a.strip()}  ->  {b.strip()}", "\n".join(after)


def run_tests(folder, log):
    """Run the tests in this process, which ends with them, on the train_math.py of the folder."""
    os.setsid()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    for name in list(sys.modules):
        if name.startswith(("train_math", "tests.test_", "tests.conftest", "common")):
            del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        importlib.import_module("train_math")
    except BaseException:
        os._exit(99)
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={folder}/files"]
    os._exit(pytest.main([*options, *[f"tests/{name}.py" for name in TESTS]]))


def outcome(source):
    """("survived", "caught" or "skipped", the test that failed)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train_math.py").write_text(source, encoding="utf-8")
        log = Path(folder, "log")
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, log))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        failed = [line for line in log.read_text().split("\n") if line.startswith("FAILED")]
        return {0: "survived", 99: "skipped"}.get(process.exitcode, "caught"), "".join(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("mutations.jsonl"))
    args = parser.parse_args()
    source = Path("train_math.py").read_text(encoding="utf-8")
    crc = zlib.crc32(source.encode())
    known = {row["change"]: row["outcome"] for row in logs.read(args.results) if row["crc"] == crc}
    for name in TESTS:
        importlib.import_module(f"tests.{name}")  # so that the imports take their time only once
    if outcome(source)[0] != "survived":
        sys.exit("the tests fail without any mutation")
    counts = {"caught": 0, "survived": 0, "skipped": 0}
    for change, mutated in mutations(source, args.seed):
        found = known.get(change, "survived")
        if found == "survived":
            found, test = outcome(mutated)
            row = {"crc": crc, "change": change, "outcome": found, "test": test}
            logs.append(args.results, row)
        if found == "survived":
            print(change, EXPLAINED.get(change.split("  ->  ")[1], ""), sep="\n    ", flush=True)
        counts[found] += 1
        if counts["caught"] + counts["survived"] == args.count:
            break
    print(counts)


if __name__ == "__main__":
    main()
