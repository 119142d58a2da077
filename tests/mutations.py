"""Do the tests notice mistakes in train_math.py and support/?

    python -m tests.mutations [--count 100] [--seed 0] [--results FILE] [--files FILE ...]

The mutations are drawn from all files together, so that a longer file gets more of them. Each one
changes one operator, number, condition, keyword, order of arguments or statement. The tests run
until one fails or until LIMIT; both count as caught. If the file cannot be imported, another
mutation is drawn. Texts stay, because most of them are messages. If the command is repeated with
the same results file, it tests only what was not caught before.
"""
import argparse
import ast
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

from tools import logs

FILES = ["train_math.py", *map(str, sorted(Path("support").glob("*.py")))]
TESTS = ("test_train_math", "test_rollout", "test_own_task", "test_answers", "test_bad_inputs",
         "test_cuda_graph", "test_guides", "test_recipes")
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or, BitAnd BitOr"
SWAPPED = {ast.Mod: ast.Mult, ast.FloorDiv: ast.Div, ast.Pow: ast.Mult}
for pair in PAIRS.split(", "):
    one, other = (getattr(ast, name) for name in pair.split())
    SWAPPED |= {one: other, other: one}
IMPORTED_ANEW = ("train_math", "support", "tests.test_", "tests.conftest", "tools")
LIMIT = 900  # seconds for the tests of one mutation
KINDS = {
    "constant": ast.Constant,
    "condition": (ast.If, ast.IfExp, ast.While),
    "unary operator": ast.UnaryOp,
    "statement": (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Delete, ast.If),
}
EXPLAINED = {  # the changed line of a survivor, and why the tests cannot notice the change
    "torch.manual_seed(cfg.seed * 2000006 + step)": "any large factor keeps the seeds apart",
    "uniform = 1 - torch.rand(len(probs), 1)": "only a GPU executes this line",
    "n = max(len(updates), 1)": "max has no order",
    "chunk_size = max(2 ** 22 // len(head.weight), 256)": "max has no order",
    "path.write_text(''.join(lines))": "on Linux, UTF-8 is the default",
    "logits = each(input_ids=ids, use_cache=False).logits": "only needs more memory",
    "return tokenizer.apply_chat_template(chats, add_generation_prompt=True, "
    "enable_thinking=False).input_ids": "in transformers 5, a dict is the default",
    "optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, "
    "fused=False)": "fused is only faster, and rounds differently",
    "for t in tqdm(range(max_length), 'sampling, tokens', leave=False, delay=2):":
        "only the progress bar changes",
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


def mutations(sources, seed):
    """All mutations of the files in a random order, as (file, what has changed, new source).

    sources: {file: its source}."""
    places = []
    for file, source in sources.items():
        tree = ast.parse(source)
        for number, node in enumerate(ast.walk(tree)):
            places += [(file, number, kind) for kind in kinds_of(node)]
    for file, number, kind in random.Random(seed).sample(places, len(places)):
        tree = ast.parse(sources[file])
        before = ast.unparse(tree).split("\n")
        mutate(tree, number, kind)
        after = ast.unparse(tree).split("\n")
        if after != before:
            i, a, b = next((i, a, b) for i, (a, b) in enumerate(zip(before, after)) if a != b)
            yield file, f"{file} {i}: {a.strip()}  ->  {b.strip()}", "\n".join(after)


def run_tests(folder, log):
    """Run the tests in this process, which ends with them, on the files of the folder."""
    os.setsid()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    for name in list(sys.modules):
        if name.startswith(IMPORTED_ANEW):
            del sys.modules[name]
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        importlib.import_module("train_math")
    except BaseException:
        os._exit(99)
    for name, module in list(sys.modules.items()):
        if name.startswith(("train_math", "support")):
            assert module.__file__.startswith(folder), f"{module.__file__} is not the changed one"
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={folder}/files"]
    os._exit(pytest.main([*options, *[f"tests/{name}.py" for name in TESTS]]))


def outcome(file, source):
    """("survived", "caught" or "skipped", the test that failed) if this file has this source."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy("train_math.py", folder)
        shutil.copytree("support", f"{folder}/support", ignore=shutil.ignore_patterns("*.pyc"))
        Path(folder, file).write_text(source, encoding="utf-8")
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
    parser.add_argument("--files", nargs="+", default=FILES, help="the files to change")
    args = parser.parse_args()
    sources = {file: Path(file).read_text(encoding="utf-8") for file in args.files}
    crc = zlib.crc32(repr(sources).encode())
    known = {row["change"]: row["outcome"] for row in logs.read(args.results) if row["crc"] == crc}
    for name in TESTS:
        importlib.import_module(f"tests.{name}")  # so that the imports take their time only once
    if outcome(*next(iter(sources.items())))[0] != "survived":
        sys.exit("the tests fail without any mutation")
    counts = {"caught": 0, "survived": 0, "skipped": 0}
    for file, change, mutated in mutations(sources, args.seed):
        found = known.get(change, "survived")
        if found == "survived":
            found, test = outcome(file, mutated)
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
