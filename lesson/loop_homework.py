"""The second homework: train_math.py with four blanks, and its tests.

    python lesson/loop_homework.py FOLDER

writes FOLDER/train_math.py, where MicroBatch.__init__, response_log_probs, and phases 3 and 4 of
train_step are still to be written, FOLDER/test_loop.py, which says how to start and to grade, and
FOLDER/gspo.py, without which nothing runs. Careful: gspo.py answers the first homework, so hand
this one out after it. Nothing is overwritten.
"""
import argparse
import ast
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HINTS = {
    "MicroBatch.__init__": """
        # self.ids (b, L): prompt, then response, padded on the right.
        # self.mask (b, L - 1), bool: is ids[:, 1:] a token of the response?
        # self.advantages (b,): of these rows; None where none are given.""",
    "response_log_probs": """
    # Begin with the three lines of the docstring, and 0 where batch.mask is 0. Memory can wait.""",
    "phase 3": """
    # For the lines below: minibatches, from build_minibatches, which takes a prompt for each
    # response; and in each of their micro-batches old_log_probs, without a gradient.""",
    "phase 4": """
    # loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=...) is what
    # one micro-batch adds to its minibatch's loss. build_minibatches has left out the responses of
    # advantage 0: what, then, is the denominator? The gradient is clipped to norm 1.
    # For the metrics: seen, a (batch, detached log-probs, loss as a number) for each loss, and
    # grad_norms, one for each optimizer step, before the clipping."""}


def statements(lines):
    """{what is to be written: the statements that answer it}, in the order of the file."""
    functions = {node.name: node.body for node in ast.walk(ast.parse("\n".join(lines)))
                 if isinstance(node, ast.FunctionDef)}
    remember, update = (next(i for i, line in enumerate(lines, 1) if line.startswith(start))
                        for start in ("    # 3 REMEMBER", "    # 4 UPDATE"))
    step = functions["train_step"]
    end = max(node.lineno for node in step if isinstance(node, ast.For))
    return {"MicroBatch.__init__": functions["__init__"],
            "response_log_probs": functions["response_log_probs"][1:],
            "phase 3": [node for node in step if remember < node.lineno < update],
            "phase 4": [node for node in step if update < node.lineno <= end]}


def assignment():
    """train_math.py without these statements; docstrings, and the comments before them, stay."""
    lines = (HERE.parent / "train_math.py").read_text(encoding="utf-8").splitlines()
    for name, body in reversed(statements(lines).items()):
        indent = " " * body[0].col_offset
        lines[body[0].lineno - 1:body[-1].end_lineno] = [
            *HINTS[name].splitlines()[1:],
            f'{indent}raise NotImplementedError("{name} is still to be written")']
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    files = {"train_math.py": assignment(),
             "test_loop.py": (HERE / "test_loop.py").read_text(encoding="utf-8"),
             "gspo.py": (HERE.parent / "gspo.py").read_text(encoding="utf-8")}
    for name in files:
        if (folder / name).exists():
            print(f"{folder / name} is there already: nothing has been written", file=sys.stderr)
            sys.exit(2)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
