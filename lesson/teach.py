r"""Hand-outs of gspo.py and its tests, and the grades of a class.

    python test_gspo.py --handout FOLDER              my_gspo.py and test_gspo.py, without answers
    python test_gspo.py --handout FOLDER gspo_loss    a smaller one: gspo_loss alone is blank
    python test_gspo.py > my_gspo.py                  the assignment alone; names as above
    python test_gspo.py --grade FILES > grades.csv    a class: a timed process and a line a file
    python test_gspo.py --grade FILES --json          the same, a JSON object a line

A hand-out overwrites nothing. The whole assignment leaves the private _helpers out: they are half
of the answer, and students may write their own; a smaller one keeps them.

Points are tests passed: sort by maths, then by promises. A remark says what to look at, and why a
file has no points: it does not load, hangs, dies. A line of --json, where points are [passed, of]:

    {"file": "ann.py", "gspo_loss maths": [17, 17], "gspo_loss promises": [4, 8], ...,
     "total maths": [97, 97], "total promises": [31, 45], "remark": "..."}

Files run with your rights, in at most 4 GB where the system can limit that. Where that matters,
grade in a container, and read the files: one that is out to deceive the grader can.
"""
import argparse
import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 5                        # for one file; most take five seconds
BYTES = 4 * 2 ** 30
FIGURES = r"maths +(\d+) of +(\d+) +promises +(\d+) of +(\d+) *(.*)"
COPIED = "word for word as in gspo.py"
ENDS = "(?:does not load|has not ended|leaves a thread|no such file)"


def refuse(line):
    print(line, file=sys.stderr)
    sys.exit(2)


def functions_in(path):
    """The functions of a file: name -> syntax tree."""
    tree = ast.parse(path.read_bytes())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def public_functions():
    return [name for name in functions_in(ROOT / "gspo.py") if not name.startswith("_")]


def assignment(names):
    """gspo.py with `raise NotImplementedError` for the bodies of these functions, docstrings kept.
    No names: of all functions, and the private _helpers are left out."""
    given = functions_in(ROOT / "gspo.py")
    known = public_functions()
    for name in names:
        if name not in known:
            refuse(f"gspo.py has no function {name}: it has {', '.join(known)}")
    lines = (ROOT / "gspo.py").read_text(encoding="utf-8").splitlines()
    for name, node in reversed(given.items()):
        if not names and name not in known:
            del lines[node.lineno - 1:node.end_lineno + 2]  # and the two blank lines below
        elif not names or name in names:
            body = slice(node.body[0].end_lineno, node.end_lineno)
            lines[body] = ["    raise NotImplementedError"]
    return "\n".join(lines) + "\n"


def hand_out(folder, names):
    text = assignment(names)
    for path in (folder / "my_gspo.py", folder / "test_gspo.py"):
        if path.exists():
            refuse(f"{path} is there already: nothing has been written")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_gspo.py").write_text(text, encoding="utf-8")
    shutil.copyfile(ROOT / "test_gspo.py", folder / "test_gspo.py")


def limit_memory():
    import resource
    with suppress(ValueError, OSError):  # some systems cannot
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))


def run_tests(path):
    """(what the tests of this file print, how its process ended if not by itself)."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rN", "-p", "no:cacheprovider"]
    environment = {**os.environ, "GSPO": str(path.resolve()), "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [*command, str(ROOT / "test_gspo.py")],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            preexec_fn=limit_memory if os.name == "posix" else None,
        )
        try:
            end = f"died (exit code {process.wait(60 * MINUTES)})"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            end = f"ended after {MINUTES} minutes"
        printed.seek(0)
        return printed.read().decode("utf-8", "replace"), end


def shared_helper(path, failed):
    """A word if the last of these calls one of the file's helpers that an earlier one calls."""
    own = functions_in(path)
    helpers = {}
    for name in failed:
        nodes = ast.walk(own[name]) if name in own else []
        called = {node.id for node in nodes if isinstance(node, ast.Name)}
        helpers[name] = called & own.keys() - set(public_functions())
    for earlier in failed[:-1]:
        if shared := helpers[earlier] & helpers[failed[-1]]:
            return f"perhaps {earlier}'s mistake, both call {', '.join(sorted(shared))}: "
    return ""


def grade(path):
    """One row of the table, as in the docstring above."""
    printed, end = run_tests(path)
    row = {"file": str(path)}
    copied = []
    failed = []
    remarks = []
    for name in [*public_functions(), "total"]:
        line = re.search(f"^{name} +{FIGURES}$", printed, re.MULTILINE)
        points = [int(x) for x in line.groups()[:4]] if line else [0, 0, 0, 0]
        row[f"{name} maths"] = points[:2]
        row[f"{name} promises"] = points[2:]
        if line and line[5] == COPIED:
            copied.append(name)
        elif line and line[5]:
            perhaps = ""
            if points[0] + points[2] < points[1] + points[3]:
                failed.append(name)
                perhaps = shared_helper(path, failed)
            remarks.append(f"{name}: {perhaps}{line[5]}")
    if copied:
        remarks.append(f"{COPIED}: {', '.join(copied)}")
    if said := re.search(f"{re.escape(path.name)}:? ({ENDS}.*?)[ !]*$", printed, re.MULTILINE):
        remarks.insert(0, said[1])
    elif not any(row["total maths"]):
        remarks.insert(0, end)
    row["remark"] = "; ".join(remarks)
    return row


def grade_class(paths, as_json):
    """A line for each file, as soon as it is graded."""
    full = grade(ROOT / "gspo.py")
    kinds = [name for name in full if name not in ("file", "remark")]
    table = csv.writer(sys.stdout, lineterminator="\n")
    if not as_json:
        table.writerow(["file", *(f"{name} (of {full[name][1]})" for name in kinds), "remark"])
    for path in paths:
        row = grade(path)
        for name in kinds:
            row[name][1] = full[name][1]  # a file that does not load has 0 of these, too
        if as_json:
            print(json.dumps(row))
        else:
            table.writerow([row["file"], *(row[name][0] for name in kinds), row["remark"]])
        sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(
        prog="test_gspo.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAMES", help="functions of gspo.py; or FILES")
    parser.add_argument("--handout", type=Path, metavar="FOLDER")
    parser.add_argument("--grade", action="store_true")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_intermixed_args()
    if flags.grade:
        grade_class([Path(name) for name in flags.names], flags.json)
    elif flags.handout:
        hand_out(flags.handout, flags.names)
    else:
        print(assignment(flags.names), end="")


if __name__ == "__main__":
    main()
