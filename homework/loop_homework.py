"""The second homework: train_math.py with four blanks, its tests, and the grades of a class.

    python -m homework.loop_homework FOLDER                      the hand-out
    python -m homework.loop_homework --grade FILES > grades.csv  a row for each file
    python -m homework.loop_homework --grade FILES --json        a JSON object on each line

In FOLDER/train_math.py, MicroBatch.__init__, response_log_probs, and phases 3 and 4 of train_step
are still to be written. A few lines of MicroBatch.__init__ are given, because they are not the
point of the exercise. FOLDER/test_loop.py has the tests, and says how to start and how to print a
grade. gspo.py, grading.py and the folder support/ are needed by these two. Nothing is overwritten.
Be careful: gspo.py is the solution of the first homework, so hand out this homework after it.

The four blanks count alike. A blank has all of its points if all of its tests pass, and otherwise
at most a third of them, in proportion to the tests that pass. If all four blanks are correct, the
whole step counts as a fifth part. If a blank is wrong, the whole step may fail because of it, and
does not count. `python test_gspo.py --help` explains the remarks, and what the grader cannot see. A
file takes about ten seconds.
"""
import argparse
import ast
import re
import sys
from pathlib import Path

from homework.class_grades import Homework, grade_class

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS = ("MicroBatch", "ResponseLogProbs", "Phase3Remember", "Phase4Update", "WholeStep")
HINTS = {
    "MicroBatch.__init__": """
        # self.indices: the list of indices.
        # self.ids (b, L): prompt, then response, padded on the right.
        # self.mask (b, L - 1), bool: is ids[:, 1:] a token of the response that the model sampled?
        # rollout.is_sampled[i] has the answer for each token of response i.
        # self.advantages (b,): of these responses.
        # ids, mask and advantages are on `device`. The other attributes are given below.""",
    "response_log_probs": """
    # Start with the three lines of the docstring. The result is 0 where batch.mask is 0. You do not
    # need to save memory.""",
    "phase 3": """
    # Make `minibatches` with parts.build_minibatches(rollout, advantages, cfg). Give each of their
    # micro-batches its old_log_probs, without a gradient, by parts.response_log_probs(model, batch,
    # temperature). Set its is_on_policy to True, which the metrics need. You do not need to support
    # old log-probs that a part of a user has set.""",
    "phase 4": """
    # Of phase 3, use only `minibatches`. algorithm.loss(log_probs, old_log_probs, advantages, mask,
    # eps_low, eps_high, denominator, **batch.extra) is what one micro-batch adds to the loss of its
    # minibatch. build_minibatches has left out the responses of advantage 0: what, then, is the
    # denominator?
    # The gradient is clipped to norm 1. cfg.clip_range() is (eps_low, eps_high). The backward pass
    # may be put into `with tf32_matmuls():`, which makes it faster on CUDA.
    # The metrics need two lists with an entry per optimizer step. An entry of `updates` is a list
    # of (micro-batch, detached log-probs, loss as a number), and an entry of `grad_norms` is the
    # gradient norm before clipping.""",
}
# The lines of MicroBatch.__init__ that are not the point of the exercise, and stay:
GIVEN = re.compile("log_probs|extra|for i in indices|prompt, response")


def is_end(node):
    """Whether this statement of train_step is the first one after phase 4."""
    return isinstance(node, ast.Return) or "check_finite" in ast.unparse(node)


def statements(source):
    """{what is to be written: the statements that answer it}, in the order of the hints."""
    lines = source.splitlines()
    functions = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, node.body)
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    functions[f"{node.name}.{method.name}"] = method.body
    remember, update = (
        next(i for i, line in enumerate(lines, 1) if line.startswith(start))
        for start in ("    # 3 REMEMBER", "    # 4 UPDATE"))
    step = functions["train_step"]
    end = next(node.lineno for node in step if is_end(node))
    return {
        "MicroBatch.__init__": without_docstring(functions["MicroBatch.__init__"]),
        "response_log_probs": without_docstring(functions["response_log_probs"]),
        "phase 3": [node for node in step if remember < node.lineno < update],
        "phase 4": [node for node in step if update < node.lineno < end],
    }


def without_docstring(body):
    first = body[0]
    has_one = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if has_one else body


def homework():
    return Homework(
        tests=HERE / "test_loop.py",
        variable="LOOP",
        reference=ROOT / "train_math.py",
        parts=PARTS,
        pieces=statements,
    )


def assignment():
    """train_math.py without these statements; docstrings, and the comments before them, stay.

    In MicroBatch.__init__, the lines that GIVEN finds stay, too."""
    source = (ROOT / "train_math.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    answers = statements(source)
    for name, body in sorted(answers.items(), key=lambda item: -item[1][0].lineno):
        indent = " " * body[0].col_offset
        blank = slice(body[0].lineno - 1, body[-1].end_lineno)
        given = filter(GIVEN.search, lines[blank]) if name == "MicroBatch.__init__" else []
        lines[blank] = [
            *HINTS[name].splitlines()[1:],
            f'{indent}raise NotImplementedError("{name} is still to be written")',
            *given]
    return "\n".join(lines) + "\n"


def hand_out(folder):
    files = {"train_math.py": assignment()}
    for path in (HERE / "test_loop.py", HERE / "grading.py", ROOT / "gspo.py"):
        files[path.name] = path.read_text(encoding="utf-8")
    for path in (ROOT / "support").glob("*.py"):
        files[f"support/{path.name}"] = path.read_text(encoding="utf-8")
    for name in files:
        if (folder / name).exists():
            print(f"{folder / name} exists already, so nothing was written", file=sys.stderr)
            sys.exit(2)
    (folder / "support").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m homework.loop_homework", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER")
    parser.add_argument("--grade", type=Path, nargs="+", metavar="FILE", help="grade these files")
    parser.add_argument("--json", action="store_true", help="print JSON instead of CSV")
    flags = parser.parse_args()
    if flags.grade:
        grade_class(homework(), flags.grade, flags.json)
    elif flags.folder:
        hand_out(flags.folder)
    else:
        parser.error("give a FOLDER for the hand-out, or --grade and the files")


if __name__ == "__main__":
    main()
