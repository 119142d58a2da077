"""The grades of a class: the common part of the graders of the two homeworks.

All files are read before the first one runs. The tests of a file run in a separate process group,
which is killed at the end. If a test ends the process, the function that it tests loses its points,
and the tests of the other functions are run in a new process.
"""
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

MINUTES = 15                       # limit of wall-clock time for one process
CPU_MINUTES = 5                    # limit of CPU time; most files take a few seconds
BYTES = 4 * 2 ** 30
COPIED = "the same code as in"
WORDS = {  # an honest solution needs none of these, so a teacher should read a file that uses them
    "__import__", "_getframe", "_pytest", "ctypes", "environ", "eval", "exec", "gc", "importlib",
    "inspect", "kill", "modules", "open", "pytest", "read_bytes", "read_text", "runpy",
    "subprocess", "system",
}
FILES = ("gspo.py", "train_math.py", "test_gspo.py", "test_loop.py", "grading.py")


@dataclass
class Homework:
    tests: Path                    # the test file
    variable: str                  # the environment variable that names the file under test
    reference: Path                # a file that has full marks
    parts: tuple                   # the columns of the table
    pieces: Callable               # from source text to {what a student writes: its syntax trees}


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
    """The entries that homework/grading.py has written. Any other line is left out."""
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


def functions_of(source):
    """The functions of a source text, {name: syntax tree}."""
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


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
    reference = homework.reference.read_text(encoding="utf-8")
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
        remarks.append(f"{COPIED} {homework.reference.name}: {', '.join(same)}")
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
    for part in homework.parts:
        note = results["parts"][part][1]
        if note:
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
    """Prints a row for each file as soon as it is graded. full: the row of the reference."""
    sources = [(str(path), source_of(path)) for path in paths]  # before the first one runs
    if full is None:
        full = grade(homework, homework.reference.name, source_of(homework.reference))
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
