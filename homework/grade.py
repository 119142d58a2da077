r"""Hand-outs and grades of the first two homeworks: the maths (gspo.py), the loop (train_math.py).

    python -m homework.grade maths --handout FOLDER        my_gspo.py, its tests, a sheet
    python -m homework.grade loop --handout FOLDER         train_math.py with four blanks, the same
    python -m homework.grade maths --grade FILES           the grades of a class: a row per file
    python -m homework.grade loop --grade FILES --json     the same, with a JSON object per line
    python -m homework.grade maths --handout FOLDER gspo_loss    a smaller one: one blank function
    python -m homework.grade maths > my_gspo.py                  the assignment alone

`python test_gspo.py ...` is the same as `python -m homework.grade maths ...`. In FILES, a folder
stands for each my_gspo.py (or train_math.py) below it. A hand-out overwrites nothing.

The maths: the whole assignment does not contain the private _helpers, because they are half of the
answer, and students may write their own. A smaller assignment keeps them. All eight functions count
alike: 90 of 100 points of a function are for the maths and 10 are for the promises. A function
earns all points for its maths if all of its tests of the maths pass, and otherwise at most a third
of them, in proportion to the tests that pass. The same rule holds for the promises. A mistake in
sequence_ratio or clipped_objective costs no points in the losses that call them. A wrong sign, a
sum that is not divided, and a mean over the tokens of all responses cost points only in the first
loss that has them. A mistake in a student's own helper costs points in every function that calls
it. If these functions fail with the same hint, the remark names the helper.

The loop: MicroBatch.__init__, response_log_probs, and phases 3 and 4 of train_step are blank. A few
lines of MicroBatch.__init__ are given, because they are not the point of the exercise. The folder
also has gspo.py, which is the solution of the maths, so hand out this homework after the first one.
The four blanks count alike, by the same rule. If all four are correct, the whole step counts as a
fifth part. If one is wrong, the whole step may fail because of it, and does not count.

The grade is in percent. Beside it, the table shows for each part how many tests have passed. This
is a row of --json, in which a pair is [tests passed, number of tests]:

    {"file": "ann.py", "grade": 88.8, "gspo_loss maths": [17, 17], "gspo_loss promises": [4, 12],
     ..., "total maths": [80, 97], "total promises": [31, 65], "remark": "..."}

A remark says what to look at first, and why a file has no points. All files are read before the
first one runs. The tests of a file run in a separate process group, which is killed at the end. If
a test ends the process, or does not end, the part that it tests loses its points, and the tests of
the other parts are run in a new process. A file takes about ten seconds.

The grader does not protect you from a malicious file. A file runs with your rights, and in at most
4 GB of memory if the system can limit that. Use a container if this matters. The grader does not
prove that a file is honest, either. A remark names words that an honest solution does not need,
such as open or pytest, and code that is the same as in the solution or in an earlier file of the
class, apart from names and docstrings. The grader cannot recognise code that was rewritten, words
that are put together while the file runs, an answer that somebody else wrote, or forged results.
"""
import argparse
import ast
import copy
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MINUTES = 15                       # limit of wall-clock time for one process
CPU_MINUTES = 5                    # limit of CPU time; most files take a few seconds
BYTES = 4 * 2 ** 30
COPIED = "the same code as in"
WORDS = {  # an honest solution needs none of these, so a teacher should read a file that uses them
    "__import__", "_getframe", "_pytest", "ctypes", "environ", "eval", "exec", "gc", "importlib",
    "inspect", "kill", "modules", "open", "pytest", "read_bytes", "read_text", "runpy",
    "subprocess", "system",
}
SHEET = """# Homework: {title}

{task}

Run this command until all tests pass. It stops at the first failure and says what to look at:

    {variable}={blank} python -m pytest -x {tests}

This command prints your grade:

    {variable}={blank} python -m pytest -q --tb=no -rN {tests}

In PowerShell, leave out `{variable}={blank}`, and first run `$env:{variable}="{blank}"`.

- Hand in {blank} alone. You are graded with other copies of {tests} and grader.py, so a
  change of these files has no effect.
- You may add functions of your own. The tests see only what your functions return.
- You get all points of a part if all of its tests pass, and otherwise at most a third.
- Be ready to explain what breaks without each of your lines.
"""
MATHS = """\
Write the bodies of the functions in my_gspo.py. Their docstrings say what each function returns,
and name the equations of the paper (arXiv:2507.18071, version 2). You need only torch. First come
the tests of the maths (90% of the points), and then those of the promises at the top of the file.
The file mentions gspo.py and train_math.py, which you do not have."""
LOOP = """\
Fill in the blanks of train_math.py: MicroBatch.__init__, response_log_probs, and phases 3 and 4 of
train_step. The comments in the blanks say what is needed. gspo.py is the solution of the maths,
which you may use."""
FILES = ("gspo.py", "train_math.py", "test_gspo.py", "test_loop.py", "grader.py")


@dataclass
class Homework:
    solution: Path                 # a file that has full marks
    tests: Path
    variable: str                  # the environment variable that names the file under test
    blank: str                     # the name of a student's file in the hand-out
    copies: dict                   # what else is in the hand-out: {name: path}
    parts: tuple                   # the columns of the table
    title: str                     # of the sheet for students, and what it asks for:
    task: str
    pieces: Callable               # from source text to {what a student writes: its syntax trees}
    assignment: Callable           # from the names of functions (none: all) to the blank file


def refuse(line):
    print(line, file=sys.stderr)
    sys.exit(2)


def read_text(path):
    return path.read_text(encoding="utf-8")


# ---- the first homework: the maths ---------------------------------------------------------------

FUNCTIONS = (
    "group_advantages",
    "token_log_probs",
    "sequence_ratio",
    "clipped_objective",
    "gspo_loss",
    "gspo_token_loss",
    "grpo_loss",
    "clip_fraction",
)


def functions_of(source):
    """The functions of a source text, {name: syntax tree}."""
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def maths_pieces(source):
    """{function that a student writes: its syntax trees}."""
    return {name: [node] for name, node in functions_of(source).items() if name in FUNCTIONS}


def maths_assignment(names):
    """gspo.py with `raise NotImplementedError` for the bodies of these functions, docstrings kept.

    Without names, all functions in FUNCTIONS are blank, and all other functions are left out."""
    for name in names:
        if name not in FUNCTIONS:
            refuse(f"there is no blank {name}; the blanks are {', '.join(FUNCTIONS)}")
    source = read_text(ROOT / "gspo.py")
    lines = source.splitlines()
    for name, node in reversed(functions_of(source).items()):
        if not names and name not in FUNCTIONS:
            del lines[node.lineno - 1:node.end_lineno + 2]  # and the two blank lines below
        elif not names or name in names:
            body = slice(node.body[0].end_lineno, node.end_lineno)
            lines[body] = ["    raise NotImplementedError"]
    return "\n".join(lines) + "\n"


# ---- the second homework: the loop ---------------------------------------------------------------

BLANKS = ("MicroBatch", "ResponseLogProbs", "Phase3Remember", "Phase4Update", "WholeStep")
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
    # parts.clip_gradients(model) clips the gradient to norm 1, and returns its norm before.
    # cfg.clip_range() is (eps_low, eps_high). The backward pass may be put into
    # `with tf32_matmuls():`, which makes it faster on CUDA.
    # The metrics need two lists with an entry per optimizer step. An entry of `updates` is a list
    # of (micro-batch, detached log-probs, loss as a number), and an entry of `grad_norms` is the
    # gradient norm before clipping.""",
}
# The lines of MicroBatch.__init__ that are not the point of the exercise, and stay:
GIVEN = re.compile("log_probs|is_on_policy|extra|for i in indices|prompt, response")


def is_end(node):
    """Whether this statement of train_step is the first one after phase 4."""
    return isinstance(node, ast.Return) or "check_finite" in ast.unparse(node)


def loop_pieces(source):
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


def loop_assignment(names):
    """train_math.py without these statements; docstrings, and the comments before them, stay.

    In MicroBatch.__init__, the lines that GIVEN finds stay, too."""
    if names:
        refuse(f"{' '.join(names)}: a folder needs --handout, and files need --grade")
    source = read_text(ROOT / "train_math.py")
    lines = source.splitlines()
    answers = loop_pieces(source)
    for name, body in sorted(answers.items(), key=lambda item: -item[1][0].lineno):
        indent = " " * body[0].col_offset
        blank = slice(body[0].lineno - 1, body[-1].end_lineno)
        given = filter(GIVEN.search, lines[blank]) if name == "MicroBatch.__init__" else []
        lines[blank] = [
            *HINTS[name].splitlines()[1:],
            f'{indent}raise NotImplementedError("{name} is still to be written")',
            *given]
    return "\n".join(lines) + "\n"


# ---- hand-outs -----------------------------------------------------------------------------------


def homeworks():
    grader = {"grader.py": HERE / "grader.py"}
    support = {f"support/{path.name}": path for path in (ROOT / "support").glob("*.py")}
    return {
        "maths": Homework(
            solution=ROOT / "gspo.py",
            tests=ROOT / "test_gspo.py",
            variable="GSPO",
            blank="my_gspo.py",
            title="the maths of GSPO",
            task=MATHS,
            copies=grader,
            parts=FUNCTIONS,
            pieces=maths_pieces,
            assignment=maths_assignment,
        ),
        "loop": Homework(
            solution=ROOT / "train_math.py",
            tests=HERE / "test_loop.py",
            variable="LOOP",
            blank="train_math.py",
            title="the training loop",
            task=LOOP,
            copies=grader | support | {"gspo.py": ROOT / "gspo.py"},
            parts=BLANKS,
            pieces=loop_pieces,
            assignment=loop_assignment,
        ),
    }


def hand_out(homework, folder, names=()):
    copies = {**homework.copies, homework.tests.name: homework.tests}
    files = {name: read_text(path) for name, path in copies.items()}
    files[homework.blank] = homework.assignment(names)
    files["README.md"] = SHEET.format(**vars(homework) | {"tests": homework.tests.name})
    for name in files:
        if (folder / name).exists():
            refuse(f"{folder / name} exists already, so nothing was written")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


# ---- the tests of one file -----------------------------------------------------------------------


def run_tests(homework, path, log):
    """(what the tests of this file print, the exit code or None if the time limit was reached)."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rN", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        homework.variable: str(path),
        "GRADE_LOG": str(log),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [*command, str(homework.tests)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=limit_resources if os.name == "posix" else None,
        )
        try:
            code = process.wait(60 * MINUTES)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        printed.seek(0)
        return printed.read().decode("utf-8", "replace"), code


def limit_resources():
    import resource
    limits = {resource.RLIMIT_DATA: BYTES, resource.RLIMIT_CPU: 60 * CPU_MINUTES}
    for what, most in limits.items():
        with suppress(ValueError, OSError):  # some systems cannot limit this
            resource.setrlimit(what, (most, most))


def end_group(process):
    """Kills the process and all processes that it has started."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def how_it_ended(printed, code):
    if code is None:
        return f"has not ended after {MINUTES} minutes"
    if "KeyboardInterrupt" in printed:
        return "ends the run (KeyboardInterrupt)"
    if code < 0:
        return f"ends the process ({signal.Signals(-code).name})"
    return f"ends the process (exit code {code})"


def read_log(log):
    """The entries that homework/grader.py has written. Any other line is left out."""
    entries = []
    if log.exists():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                entries.append(json.loads(line))
    return [entry for entry in entries if isinstance(entry, dict)]


def results_of(homework, path, log):
    """(the last entry of the log if all tests have a result, how the file failed, other remarks).

    If the tests end early, they are started again without the part that ended them."""
    for _ in range(len(homework.parts) + 1):
        printed, code = run_tests(homework, path, log)
        said = re.search(rf"{re.escape(path.name)} (does not load: .*?)[ !]*$", printed, re.M)
        if said:
            return None, said[1], []
        entries = read_log(log)
        running = None
        for entry in entries:
            running = entry.get("start", running)
            if running in (entry.get("test"), entry.get("dead")):
                running = None
        if entries and "parts" in entries[-1] or (entries and entries[-1].get("thread")):
            break
        if running is None and not any("dead" in entry for entry in entries[-1:]):
            return None, how_it_ended(printed, code), []
        if running is not None:
            entry = {"dead": running, "why": how_it_ended(printed, code)}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
    remarks = []
    if any(entry.get("thread") for entry in entries):
        remarks.append("leaves a thread running")
    results = [entry for entry in entries if "parts" in entry]
    if not results:
        return None, how_it_ended(printed, code), remarks
    right = all(passed == of for passed, of in results[-1]["total"].values())
    if code != (0 if right else 1):
        remarks.append(f"its tests ended with the exit code {code}: read the file")
    for name in results[-1]["state"]:
        remarks.append(f"changes torch's {name}, which was set back before each test")
    return results[-1], None, remarks


# ---- checks of the source ------------------------------------------------------------------------


class Numbered(ast.NodeTransformer):
    """Numbers all names in the order in which they appear, and drops docstrings."""

    def __init__(self):
        self.numbers = {}

    def number(self, name):
        return str(self.numbers.setdefault(name, len(self.numbers)))

    def visit_Name(self, node):
        node.id = self.number(node.id)
        return node

    def visit_arg(self, node):
        node.arg = self.number(node.arg)
        node.annotation = None
        return node

    def visit_FunctionDef(self, node):
        if ast.get_docstring(node) is not None:
            del node.body[0]
        node.name = self.number(node.name)
        self.generic_visit(node)
        return node


def fingerprint(nodes):
    """The syntax trees as a text that does not depend on names, docstrings or layout."""
    tree = ast.Module(body=copy.deepcopy(list(nodes)), type_ignores=[])
    return ast.dump(Numbered().visit(tree))


def fingerprints(homework, source):
    with suppress(SyntaxError, ValueError, KeyError, StopIteration):
        return {name: fingerprint(nodes) for name, nodes in homework.pieces(source).items()}
    return {}


def whole_file(source):
    """The fingerprint of all functions and classes, or None."""
    with suppress(SyntaxError, ValueError):
        kinds = (ast.FunctionDef, ast.ClassDef)
        return fingerprint(node for node in ast.parse(source).body if isinstance(node, kinds))


def suspicious(source):
    """Words and file names in the code that an honest solution does not need."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, "id", None), getattr(node, "attr", None)]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.name.partition(".")[0] for alias in node.names]
            names += (getattr(node, "module", None) or "").split(".")
        found |= WORDS.intersection(names)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            found |= {name for name in FILES if name in node.value}
    return found


def what_it_is_not(source):
    """Why this source cannot have any points, or None."""
    if source is None:
        return "no such file"
    text = source.lstrip()
    if not text:
        return "is empty"
    if text.startswith("{") and '"cells"' in text:
        return "is a Jupyter notebook: export it as a Python script (.py) first"
    return None


def shared_helpers(homework, source, lost):
    """{part: a remark} for parts that fail like an earlier part, and share a helper with it.

    lost: {part that fails: its note}. Parts fail alike if their notes end with the same hint. A
    helper is not suspected if it is also called by a part that passes or fails with another
    hint."""
    functions = functions_of(source)
    helpers = {}
    for part in homework.parts:
        nodes = ast.walk(functions[part]) if part in functions else []
        called = {node.id for node in nodes if isinstance(node, ast.Name)}
        helpers[part] = called & functions.keys() - set(homework.parts)
    hints = {part: note.rpartition("; ")[2] for part, note in lost.items()}
    remarks = {}
    for part in lost:
        alike = [other for other in lost if hints[other] == hints[part]]
        others = set().union(*(helpers[name] for name in homework.parts if name not in alike))
        for earlier in alike[:alike.index(part)]:
            shared = helpers[earlier] & helpers[part] - others
            if shared and part not in remarks:
                both = ", ".join(sorted(shared))
                remarks[part] = (f"perhaps this is the same mistake as in {earlier}, because both "
                                 f"call {both}: ")
    return remarks


# ---- the table -----------------------------------------------------------------------------------


def grade(homework, name, source, seen=None):
    """One row of the table. seen: {fingerprints: name} of the files that were graded before."""
    row = {"file": name, "grade": 0.0}
    problem = what_it_is_not(source)
    if problem:
        return row | {"remark": problem}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as logs:
        path = Path(folder, Path(name).name)
        path.write_text(source, encoding="utf-8")
        results, problem, remarks = results_of(homework, path, Path(logs, "log"))
    reference = read_text(homework.solution)
    try:
        used = suspicious(source) - suspicious(reference)
    except (SyntaxError, ValueError):
        used = set()
    if used:
        remarks.insert(0, f"mentions {', '.join(sorted(used))}: read the file")
    own = fingerprints(homework, source)
    answers = fingerprints(homework, reference)
    same = [piece for piece in own if own[piece] == answers.get(piece)]
    if same:
        remarks.append(f"{COPIED} {homework.solution.name}: {', '.join(same)}")
    key = whole_file(source)
    if seen is not None and own and "NotImplementedError" not in source:
        if seen.setdefault(key, name) != name:
            remarks.insert(0, f"{COPIED} {seen[key]}, except for names and docstrings")
    if results is None:
        return row | {"remark": "; ".join([problem, *remarks])}
    row["grade"] = round(results["grade"], 1)
    lost = {}
    for part in homework.parts:
        counts, note = results["parts"][part]
        for kind, points in counts.items():
            row[f"{part} {kind}"] = points
        if any(passed < of for passed, of in counts.values()):
            lost[part] = note
    perhaps = shared_helpers(homework, source, lost)
    notes = {part: note for part, (_, note) in results["parts"].items() if note}
    blank = [part for part, note in notes.items() if "still to be written" in note]
    if len(blank) > 1:
        remarks.append(f"still to be written: {', '.join(blank)}")
        notes = {part: note for part, note in notes.items() if part not in blank}
    for part, note in notes.items():
        remarks.append(f"{part}: {perhaps.get(part, '')}{note}")
    for kind, points in results["total"].items():
        row[f"total {kind}"] = points
    return row | {"remark": "; ".join(remarks)}


def source_of(path):
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def grade_class(homework, paths, as_json, full=None):
    """Prints a row for each file as soon as it is graded. full: the row of the solution."""
    sources = [(str(path), source_of(path)) for path in paths]  # before the first one runs
    if full is None:
        full = grade(homework, homework.solution.name, source_of(homework.solution))
    columns = [name for name in full if name not in ("file", "grade", "remark")]
    table = csv.writer(sys.stdout, lineterminator="\n")
    if not as_json:
        head = [f"{name} (of {full[name][1]})" for name in columns]
        table.writerow(["file", "grade (%)", *head, "remark"])
    seen = {}
    for name, source in sources:
        row = grade(homework, name, source, seen)
        points = {column: row.get(column, [0, full[column][1]]) for column in columns}
        row = {"file": row["file"], "grade": row["grade"], **points, "remark": row["remark"]}
        if as_json:
            print(json.dumps(row))
        else:
            passed = [row[column][0] for column in columns]
            table.writerow([row["file"], row["grade"], *passed, row["remark"]])
        sys.stdout.flush()


def files_of(homework, names):
    """These files. A folder stands for all files below it that have the name of the hand-out."""
    paths = []
    for path in map(Path, names):
        found = sorted(path.rglob(homework.blank)) if path.is_dir() else [path]
        if not found:
            refuse(f"there is no {homework.blank} in the folder {path}: name the files to grade")
        paths += found
    return paths


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m homework.grade", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("homework", choices=["maths", "loop"])
    parser.add_argument("names", nargs="*", metavar="NAMES",
                        help="FILES to grade; without --grade, the blank functions of gspo.py")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--handout", type=Path, metavar="FOLDER", help="write a hand-out to FOLDER")
    what.add_argument("--grade", action="store_true", help="grade FILES")
    parser.add_argument("--json", action="store_true", help="print JSON instead of CSV")
    flags = parser.parse_intermixed_args(argv)
    homework = homeworks()[flags.homework]
    if flags.grade and not flags.names:
        refuse("--grade needs the files to grade, or their folder")
    if flags.grade:
        grade_class(homework, files_of(homework, flags.names), flags.json)
    elif flags.handout:
        try:
            hand_out(homework, flags.handout, flags.names)
        except OSError as error:
            refuse(f"the hand-out cannot be written: {error}")
    else:
        print(homework.assignment(flags.names), end="")


if __name__ == "__main__":
    main()
