r"""Hand-outs and grades of the first two homeworks: the maths (gspo.py), the loop (train_math.py).

    python -m homework.grade maths --handout FOLDER        my_gspo.py, its tests, a sheet
    python -m homework.grade loop --handout FOLDER         train_math.py with four blanks, the same
    python -m homework.grade maths --grade FILES           the grades of a class: a row per file
    python -m homework.grade loop --grade FILES --json     the same, with a JSON object per line
    python -m homework.grade maths --handout FOLDER gspo_loss    a short form: one blank function,
    python -m homework.grade maths --grade FILES gspo_loss       which alone counts

`python test_gspo.py ...` is the same as `python -m homework.grade maths ...`. In FILES, a folder
stands for each .py file below it that has my_gspo (or train_math) in its name. A hand-out
overwrites nothing. The table goes to stdout, and the progress to stderr.

The maths: eight functions, which count alike. Of 100 points of a function, 90 are for the tests of
the maths. The other 10 are for the tests of the promises, which concern unusual input: half
precision, NaN in the padding, responses without tokens, micro-batches and invalid arguments. Each
of these two kinds of tests gives all of its points if all of its tests pass, and otherwise at most
a third, in proportion to the tests that pass. A mistake in sequence_ratio or clipped_objective
costs no points in the losses that call it. Three mistakes cost points only in the first loss that
has them: a wrong sign, a sum that is not divided, and a mean over the tokens of all responses. A
mistake in another function costs points in every function that calls it. A short form contains the
private _helpers of gspo.py, and the functions that its solutions call. The whole assignment does
not.

The loop: MicroBatch.__init__, response_log_probs, and phases 3 and 4 of train_step are blank. These
four parts count alike, by the same rule. If all four are correct, the whole step counts as a fifth
part. Hand out this homework after the first one, because its folder contains the solution, gspo.py.

The table shows the grade in percent, and for each part how many tests have passed. This is a row of
--json, in which a pair is [tests passed, number of tests]:

    {"file": "ann.py", "grade": 88.8, "gspo_loss maths": [17, 17], "gspo_loss promises": [4, 12],
     ..., "total maths": [80, 97], "total promises": [31, 65], "remark": "..."}

The remarks on a file are separated by //. They say what to look at first, with the maths before the
promises, and why a file has no points. If a test ends the process, or does not end, its part loses
its points, and the other parts are tested in a new process.

A file runs with your rights, so use a container if you do not trust its author. One remark names
words that an honest solution does not need, such as open or pytest. Another one names code that,
apart from names and docstrings, is the same as in the solution or in an earlier file of the class.
The grader cannot recognise rewritten code, an answer by somebody else, or forged results.
"""
import argparse
import ast
import builtins
import csv
import itertools
import json
import keyword
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MINUTES = 15                       # limit of time for one process; most files take ten seconds
BYTES = 4 * 2 ** 30                # limit of its memory
COPIED = "the same code as in"
WORDS = {  # an honest solution needs none of these, so a teacher should read a file that uses them
    "__import__", "_getframe", "_pytest", "ctypes", "environ", "eval", "exec", "gc", "importlib",
    "inspect", "kill", "modules", "open", "pytest", "read_bytes", "read_text", "runpy",
    "subprocess", "system",
}
SHEET = """# Homework: {title}

{task}

Run this command here until all tests pass. It stops at the first failure, and explains it:

    {variable}={blank} python -m pytest -x {tests}

This command runs all tests and prints your grade:

    {variable}={blank} python -m pytest -q --tb=no -rN {tests}

In PowerShell, leave out `{variable}={blank}`, and first run `$env:{variable}="{blank}"`.

- Hand in {blank} alone. You may add to its name, as in doe_{blank}.
- Your teacher has other copies of all other files, so a change of these files has no effect.
- You may add functions of your own. The tests see only what your functions return.
- You get all points of a part if all of its tests pass, and otherwise at most a third.
- Be ready to explain what breaks without each of your lines.
"""


@dataclass
class Homework:
    solution: Path                 # a file that has full marks
    tests: Path
    variable: str                  # the environment variable that names the file under test
    blank: str                     # the name of a student's file in the hand-out
    copies: dict                   # what else is in the hand-out: {name: path}
    parts: tuple                   # the columns of the table
    title: str                     # of the sheet for students
    task: str                      # what the sheet asks for
    pieces: Callable               # from source text to {what a student writes: its syntax trees}
    assignment: Callable           # makes the text of the blank file
    select: str = ""               # of a short form: the -k of pytest that selects its tests


def read_text(path):
    """The text of this file, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- the first homework: the maths ---------------------------------------------------------------

FUNCTIONS = ("group_advantages", "token_log_probs", "sequence_ratio", "clipped_objective",
             "gspo_loss", "gspo_token_loss", "grpo_loss", "clip_fraction")


def named(nodes):
    """The functions and classes among these statements, {name: syntax tree}."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node for node in nodes if isinstance(node, kinds)}


def maths_pieces(source):
    """{function that a student writes: its syntax trees}."""
    functions = named(ast.parse(source).body)
    return {name: [functions[name]] for name in FUNCTIONS if name in functions}


def maths_assignment(blanks=FUNCTIONS):
    """gspo.py with `raise NotImplementedError` for the bodies of these functions, docstrings kept.

    A short form has no other loss, from which a blank one would follow in one line."""
    source = read_text(MATHS.solution)
    functions = named(ast.parse(source).body)
    given = set()
    if blanks != FUNCTIONS:
        source = source.partition("\n\n\nif __name__")[0]  # an example that calls other functions
        solutions = ast.Module([functions[name] for name in blanks], [])
        given = functions.keys() - set(FUNCTIONS) | names_in(solutions)
    lines = source.splitlines()
    for name, node in reversed(functions.items()):
        if name in blanks:
            body = slice(node.body[0].end_lineno, node.end_lineno)
            lines[body] = ["    raise NotImplementedError"]
        elif name not in given:
            del lines[node.lineno - 1:node.end_lineno + 2]  # and the two blank lines below
    return "\n".join(lines) + "\n"


ALL_FUNCTIONS = """\
To work on one function first, for example on sequence_ratio, add `-k SequenceRatio` to a command.

If sequence_ratio or clipped_objective is wrong, your teacher's grade can be higher than yours: your
teacher's grader tests the losses with correct versions of these two functions."""
MATHS = Homework(
    solution=ROOT / "gspo.py",
    tests=ROOT / "test_gspo.py",
    variable="GSPO",
    blank="my_gspo.py",
    copies={"grader.py": HERE / "grader.py"},
    parts=FUNCTIONS,
    title="the maths of GSPO",
    task=f"""\
Write the bodies of the functions in my_gspo.py. Each docstring says what its function returns, and
names the equations of the paper (arXiv:2507.18071, version 2). You need torch and pytest. Each
function has two parts. The maths gives 90% of the points, and its tests come first. The promises
give 10%. They are the guarantees in the list at the top of the file, and the errors in the
docstrings. You do not have gspo.py and train_math.py, which the file mentions.

{ALL_FUNCTIONS}""",
    pieces=maths_pieces,
    assignment=maths_assignment,
)


def short_form(blanks):
    """The homework of the maths in which only these functions are blank, and count."""
    task = MATHS.task.removesuffix(ALL_FUNCTIONS).rstrip()
    return replace(
        MATHS, parts=blanks, assignment=lambda: maths_assignment(blanks),
        task=task.replace("bodies of the functions", f"body of {' and of '.join(blanks)}"),
        select=" or ".join(name.title().replace("_", "") for name in blanks))


# ---- the second homework: the loop ---------------------------------------------------------------

BLANKS = ("MicroBatch", "ResponseLogProbs", "Phase3Remember", "Phase4Update", "WholeStep")
HINTS = {
    "MicroBatch.__init__": """
        # self.indices: the list of indices.
        # self.ids (b, L): prompt, then response, padded on the right.
        # self.mask (b, L - 1), bool: is ids[:, 1:] a token of the response that the model sampled?
        # rollout.is_sampled[i] has the answer for each token of response i.
        # self.advantages (b,): the advantages of these responses.
        # ids, mask and advantages are on `device`. The other attributes are given below.""",
    "response_log_probs": """
    # model(batch.ids).logits are (b, L, V). Which of them predict batch.ids[:, 1:]? The result is 0
    # where batch.mask is 0. You do not need to save memory.""",
    "phase 3": """
    # Make `minibatches` with parts.build_minibatches(rollout, advantages, cfg). In each micro-batch
    # of each minibatch, set old_log_probs to parts.response_log_probs(model, batch, temperature),
    # without a gradient. Set is_on_policy to True, which the metrics need. You do not need to keep
    # old log-probs that a user's own part has set.""",
    "phase 4": """
    # Of phase 3, use only `minibatches`. algorithm.loss(log_probs, old_log_probs, advantages, mask,
    # eps_low, eps_high, denominator, **batch.extra) is what one micro-batch adds to the loss of its
    # minibatch. build_minibatches has left out the responses whose advantage is 0. What does this
    # mean for the denominator?
    # parts.clip_gradients(model) clips the gradient to norm 1, and returns its norm before that.
    # Write eps_low, eps_high = cfg.clip_range(): the code after the blank needs these two names.
    # You may put the backward pass into `with tf32_matmuls():`, which makes it faster on CUDA.
    # The metrics need two lists with an entry per optimizer step. An entry of `updates` is a list
    # of (micro-batch, detached log-probs, loss as a number), and an entry of `grad_norms` is the
    # gradient norm before clipping.""",
}
# The lines of MicroBatch.__init__ that are not the point of the exercise, and stay:
GIVEN = re.compile("log_probs|is_on_policy|extra|for i in indices|prompt, response")


TOLD = {  # where a docstring of train_math.py tells an answer: what the hand-out says instead
    r"In three lines, since p(osition t\n    predicts token t \+ 1):.*?again\.": r"P\1.",
    r", but train_step\n    counts them in the denominator\.": ".\n   ",
}


def loop_pieces(source):
    """{what is to be written: the statements that answer it}, in the order of the hints.

    Empty, if a function or a comment is missing by which these statements are found."""
    found = named(ast.parse(source).body)
    marks = "    # 3 REMEMBER", "    # 4 UPDATE"
    with suppress(KeyError, StopIteration, ValueError):
        step = found["train_step"].body
        remember, update = [
            i for i, line in enumerate(source.splitlines(), 1) if line.startswith(marks)]
        end = next(node.lineno for node in step
                   if isinstance(node, ast.Return) or "check_finite" in ast.unparse(node))
        return {
            "MicroBatch.__init__": body_of(named(found["MicroBatch"].body)["__init__"]),
            "response_log_probs": body_of(found["response_log_probs"]),
            "phase 3": [node for node in step if remember < node.lineno < update],
            "phase 4": [node for node in step if update < node.lineno < end],
        }
    return {}


def body_of(function):
    """The statements of a function, without its docstring."""
    return function.body[ast.get_docstring(function) is not None:]


def loop_assignment():
    """train_math.py without these statements, and without the answers in TOLD. The comments before
    the statements, and in MicroBatch.__init__ the lines that GIVEN finds, stay."""
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
    text = "\n".join(lines) + "\n"
    for told, instead in TOLD.items():
        text = re.sub(told, instead, text, flags=re.DOTALL)
    return text


LOOP = Homework(
    solution=ROOT / "train_math.py",
    tests=HERE / "test_loop.py",
    variable="LOOP",
    blank="train_math.py",
    copies={
        "grader.py": HERE / "grader.py",
        "gspo.py": ROOT / "gspo.py",
        "requirements.txt": ROOT / "requirements.txt",
        **{f"support/{path.name}": path for path in (ROOT / "support").glob("*.py")},
    },
    parts=BLANKS,
    title="the training loop",
    task="""\
Fill in the blanks of train_math.py: MicroBatch.__init__, response_log_probs, and phases 3 and 4 of
train_step. These are the parts. The comments in the blanks say what is needed. You may use gspo.py,
the solution of the maths. First run `pip install -r requirements.txt`.""",
    pieces=loop_pieces,
    assignment=loop_assignment,
)


# ---- hand-outs -----------------------------------------------------------------------------------


def hand_out(homework, folder):
    copies = {**homework.copies, homework.tests.name: homework.tests}
    files = {name: read_text(path) for name, path in copies.items()}
    files[homework.blank] = homework.assignment()
    files["README.md"] = SHEET.format(**vars(homework) | {"tests": homework.tests.name})
    if homework.select:
        files["pytest.ini"] = f'[pytest]\naddopts = -k "{homework.select}"\n'
    for name in files:
        if (folder / name).exists():
            sys.exit(f"{folder / name} exists already, so nothing was written")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    print(f"wrote {folder / 'README.md'} (the sheet), {folder / homework.blank} and its tests")


# ---- the tests of one file -----------------------------------------------------------------------


def run_tests(homework, path, log, dead):
    """(what the tests of this file print, the exit code or None if the time limit was reached)."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rN", "-p", "no:cacheprovider"]
    environment = os.environ | {
        homework.variable: str(path), "GRADE_LOG": str(log), "GRADE_DEAD": json.dumps(dead),
        "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [*command, "-k", homework.select, str(homework.tests)], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=limit_memory if os.name == "posix" else None)
        try:
            code = process.wait(60 * MINUTES)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # The file may have started other processes. Windows has no groups of processes.
            with suppress(AttributeError, ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        printed.seek(0)
        return printed.read().decode("utf-8", "replace"), code


def limit_memory():
    import resource
    with suppress(ValueError, OSError):  # some systems cannot limit this
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))


def last_entry(log):
    """What homework/grader.py has written last: a part that it starts, or the grade."""
    with suppress(ValueError, IndexError):  # a file may write there, too
        entry = json.loads(read_text(log).splitlines()[-1])
        if isinstance(entry, dict):
            return entry
    return {}


def results_of(homework, path):
    """(the grader's last entry, None), or (None, why there are no results).

    If the tests end early, they are started again without the part that ended them."""
    dead = {}                      # part -> how it ended
    while True:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            printed, code = run_tests(homework, path, log, dead)
            entry = last_entry(log)
        said = re.search(rf"{re.escape(path.name)} (does not load: .*?)[ !]*$", printed, re.M)
        if said:
            return None, said[1]
        if "parts" in entry:
            right = all(passed == of for passed, of in entry["total"].values())
            as_expected = code == (0 if right else 1)
            return entry, None if as_expected else f"its tests ended with the exit code {code}"
        ended = f"ends the process (exit code {code})"
        if code is None:
            ended = f"has not ended after {MINUTES} minutes"
        if entry.get("start") not in homework.parts or entry["start"] in dead:
            return None, ended
        dead[entry["start"]] = ended


# ---- checks of the source ------------------------------------------------------------------------


def fingerprint(nodes):
    """The code of these syntax trees without comments, docstrings and layout, and with numbers in
    place of the names that its author could choose."""
    for node in ast.walk(ast.Module(nodes, [])):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            del node.body[0]
    code = "\n".join(map(ast.unparse, nodes))
    numbers = {}

    def number(name):
        if keyword.iskeyword(name[0]) or hasattr(builtins, name[0]):
            return name[0]
        return str(numbers.setdefault(name[0], len(numbers)))

    return re.sub(r"(?<![.\w])[^\W\d]\w*", number, code)


def fingerprints(homework, source):
    return {name: fingerprint(nodes) for name, nodes in homework.pieces(source).items()}


def names_in(tree):
    """The names, attributes and imports in the code."""
    fields = "id", "attr", "name", "module"
    return {getattr(node, field, None) for node in ast.walk(tree) for field in fields}


# ---- the table -----------------------------------------------------------------------------------


def remarks_on_results(results):
    """What the grader says, first of parts with a mistake in the maths. Parts share a remark."""
    said = {}                      # what is said: of which parts
    for is_right in False, True:
        for part, (counts, notes) in results["parts"].items():
            passed, of = next(iter(counts.values()))  # of the first kind of tests
            for note in notes if is_right == (passed == of) else []:
                note = "still to be written" if "is still to be written" in note else note
                said.setdefault(note, []).append(part)
    return [f"{', '.join(parts)}: {note}" for note, parts in said.items()]


def remarks_on_source(homework, name, source, seen):
    """What a teacher should read in this file, which can be parsed."""
    remarks = []
    reference = read_text(homework.solution)
    used = names_in(ast.parse(source)) & WORDS - names_in(ast.parse(reference))
    if used:
        remarks.append(f"mentions {', '.join(sorted(used))}: read the file")
    answers = fingerprints(homework, reference)
    own = fingerprints(homework, source)
    if own and "NotImplementedError" not in source:
        whole = fingerprint([*named(ast.parse(source).body).values()])
        if seen.setdefault(whole, name) != name:
            remarks.append(f"{COPIED} {seen[whole]}, except for names and docstrings")
    given = fingerprints(homework, homework.assignment())
    same = [piece for piece in own if own[piece] == answers[piece] != given.get(piece)]
    if same:
        remarks.append(f"{COPIED} {homework.solution.name}: {', '.join(same)}")
    return remarks


def points(results):
    """{column of the table: [tests passed, number of tests]} of what the grader has written."""
    found = {}
    for part, (counts, _) in results["parts"].items():
        found |= {f"{part} {kind}": pair for kind, pair in counts.items()}
    return found | {f"total {kind}": pair for kind, pair in results["total"].items()}


def grade(homework, name, source, seen):
    """One row of the table. seen: {fingerprint: name} of the files that were graded before."""
    row = {"file": name, "grade": 0.0}
    if not source.strip():
        return row | {"remark": "is empty or cannot be read"}
    if source.startswith("PK\x03"):
        return row | {"remark": "is a zip file: unpack it first"}
    if "\0" in source:
        return row | {"remark": "is not a text in UTF-8: save it as UTF-8"}
    if source.lstrip().startswith("{") and '"cells"' in source:
        return row | {"remark": "is a Jupyter notebook: export it as a Python script (.py) first"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, Path(name).name)
        path.write_text(source, encoding="utf-8")
        results, problem = results_of(homework, path)
    remarks = [problem] if problem else []
    remarks += remarks_on_results(results) if results else []
    with suppress(SyntaxError, ValueError):
        remarks += remarks_on_source(homework, name, source, seen)
    if results:
        row["grade"] = round(results["grade"], 1)
        row |= points(results)
    return row | {"remark": " // ".join(remarks)}


def grade_class(homework, paths, as_json, left_out=()):
    """Prints a row for each file as soon as it is graded, and one without a grade for each file or
    folder that is left out."""
    sources = [(str(path), read_text(path)) for path in paths]  # before the first one runs
    solved, problem = results_of(homework, homework.solution)
    if problem:
        sys.exit(f"the tests cannot be run: {homework.solution.name} {problem}")
    most = {column: of for column, (_, of) in points(solved).items()}
    table = csv.writer(sys.stdout, lineterminator="\n")
    if not as_json:
        head = [f"{column} (of {of})" for column, of in most.items()]
        table.writerow(["file", "grade (%)", *head, "remark"])
    seen = {}
    for number, (name, source) in enumerate(sources, 1):
        print(f"{number} of {len(sources)}: {name}", file=sys.stderr)
        row = grade(homework, name, source, seen)
        found = {column: row.get(column, [0, of]) for column, of in most.items()}
        if as_json:
            print(json.dumps(row | found))
        else:
            passed = [pair[0] for pair in found.values()]
            table.writerow([name, row["grade"], *passed, row["remark"]])
        sys.stdout.flush()
    remark = f"not graded: no .py file has {Path(homework.blank).stem} in its name"
    for path in left_out:
        print(f"{path}: {remark}", file=sys.stderr)
        if as_json:
            print(json.dumps({"file": str(path), "grade": None, "remark": remark}))
        else:
            table.writerow([path, "", *[""] * len(most), remark])


def files_of(homework, path):
    """(this file, or the .py files below this folder that have the hand-out's name in theirs; what
    else the folder holds)"""
    if path.is_file():
        return [path], []
    name = Path(homework.blank).stem
    found = [file for file in sorted(path.rglob("*"))
             if name in file.name.lower().replace("-", "_") and file.suffix.lower() == ".py"
             and not any(part[0] == "." for part in file.relative_to(path).parts)]
    if not found:
        sys.exit(f"no file matches {path}: no .py file there has {name} in its name")
    return found, [entry for entry in sorted(path.glob("[!._]*"))
                   if not any(entry in (file, *file.parents) for file in found)]


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m homework.grade", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("homework", choices=["maths", "loop"])
    parser.add_argument("names", nargs="*", metavar="NAMES", help="FILES, or blank functions")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--handout", type=Path, metavar="FOLDER", help="write a hand-out to FOLDER")
    what.add_argument("--grade", action="store_true", help="grade FILES")
    parser.add_argument("--json", action="store_true", help="print JSON instead of CSV")
    flags = parser.parse_intermixed_args(argv)
    homework = LOOP
    blanks = ()
    if flags.homework == "maths":
        blanks = tuple(name for name in FUNCTIONS if name in flags.names)
        homework = short_form(blanks) if 0 < len(blanks) < len(FUNCTIONS) else MATHS
    files = [name for name in flags.names if name not in blanks]
    if flags.handout:
        if files:
            sys.exit(f"no blank {files[0]} in {homework.title}. You can name these functions of "
                     f"the maths: {', '.join(FUNCTIONS)}")
        hand_out(homework, flags.handout)
    elif not files:
        sys.exit("--grade needs the files to grade, or their folder")
    else:
        found = [files_of(homework, Path(name)) for name in files]
        paths, left_out = (list(itertools.chain(*part)) for part in zip(*found))
        grade_class(homework, paths, flags.json, left_out)


if __name__ == "__main__":
    main()
