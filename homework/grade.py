"""Grades the files of a class in homework 1 (maths) or 2 (loop), and prints a table as CSV.

    python -m homework.grade maths FILES > grades.csv    (or: python test_gspo.py --grade FILES)
    python -m homework.grade maths FILES --gradescope results.json

In FILES, a folder stands for the .py files in it that have my_gspo (or train_math) in their names.
Each file runs in a process of its own, but with your rights. If a test hangs, or ends the process,
the function that it tests has no points. The maths gives 90% of a function's points, and the
promises 10%. If a test of one of these two fails, at most a third of its points remain.
"""
import argparse
import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOMEWORKS = {  # the variable that names a file, a part of its name, the tests, and the solution
    "maths": ("GSPO", "my_gspo", ROOT / "test_gspo.py", ROOT / "gspo.py"),
    "loop": ("LOOP", "train_math", ROOT / "homework" / "test_loop.py", ROOT / "train_math.py")}
OPTIONS = "-m pytest -v -rN --tb=line --color=no -o addopts= -p no:cacheprovider".split()
SECONDS = 40  # a test hangs if pytest prints nothing for so long
SAYS = {"import of gspo halted; None in sys.modules": "the file imports the solution",
        "pytest: reading from stdin while output is captured!  Consider using `-s`.": "input()"}


def report_of(homework, path, broken):
    """(what pytest prints about this file without the broken parts, its exit code or None)"""
    variable, _, tests, _ = HOMEWORKS[homework]
    others = " and ".join("not " + part.replace("_", "") for part in broken)
    environment = os.environ | {
        variable: str(path.resolve()), "GRADE_BROKEN": " ".join(broken), "PYTEST_ADDOPTS": "",
        "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as report:
        process = subprocess.Popen(
            [sys.executable, *OPTIONS, "-k", others, str(tests)], env=environment,
            cwd=folder, stdin=subprocess.DEVNULL, stdout=report, stderr=subprocess.DEVNULL)
        size = -1
        while process.poll() is None and os.fstat(report.fileno()).st_size > size:
            size = os.fstat(report.fileno()).st_size
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
        code = process.poll()
        process.kill()
        process.wait()
        report.seek(0)
        text = report.read().decode(errors="replace")
    for message, cause in SAYS.items():
        text = text.replace(message, cause)
    return text, code


def results_of(homework, path):
    """({part: its line of the report}, remarks on what has no report)"""
    broken = {}                    # part: why
    while True:
        text, code = report_of(homework, path, broken)
        why = f"ends the process (exit code {code})"
        if code is None:
            why = "hangs: is there an endless loop?"
        lines = dict(re.findall(r"^(\w+) (\d+ of .*)$", text, re.MULTILINE))
        loading = re.findall(rf"^{re.escape(path.name)} (does not load: .*)$", text, re.MULTILINE)
        tests = re.findall(r"::Test(?:MathsOf|PromisesOf|)(\w+)::", text)
        part = re.sub("(?<=[a-z])(?=[A-Z])", "_", tests[-1]).lower() if tests else None
        if (lines and code in (0, 1, None)) or not tests or part in broken:
            remarks = [f"{name} {how}" for name, how in broken.items()] + loading
            return lines, remarks or [f"the file {why}"] * (not lines)
        broken[part] = why


def row_of(homework, path, full):
    """A row of the table. full: {part: its line in the report of the solution}"""
    lines, remarks = results_of(homework, path)
    source = path.read_bytes()
    remarks += ["begins with a byte order mark (BOM)"] * source.startswith(b"\xef\xbb\xbf")
    remarks += ["prints when it is loaded"] * bool(re.search(rb"^print\(", source, re.MULTILINE))
    row = {"file": str(path), "grade (%)": 0}
    for part, best in full.items():
        row[part], _, hint = lines.get(part, re.sub(r"\d+ of", "0 of", best)).partition(": ")
        remarks += [f"{part}: {hint}"] * bool(hint)
        kinds = re.findall(r"(\d+) of (\d+)", row[part])
        weights = (90, 10) if len(kinds) == 2 else (100,)
        for weight, (passed, of) in zip(weights, kinds):
            share = int(passed) / int(of)
            row["grade (%)"] += weight / len(full) * (1 if share == 1 else share / 3)
    row["grade (%)"] = round(row["grade (%)"], 1)
    return row | {"remark": " // ".join(remarks)}


def files_of(path, part):
    """This file, or the .py files in this folder that have this part in their names."""
    files = [file for file in sorted(path.rglob("[!.]*")) if file.suffix.lower() == ".py"]
    letters = part.replace("_", "")
    own = [file for file in files if letters in re.sub("[^a-z]", "", file.name.lower())]
    return [path] if path.is_file() else own


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("homework", choices=HOMEWORKS)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILES")
    parser.add_argument("--gradescope", type=Path, help="where to write results.json")
    args = parser.parse_args(argv)
    _, part, _, solution = HOMEWORKS[args.homework]
    files = sum([files_of(path, part) for path in args.files], [])
    full, problem = results_of(args.homework, solution)
    if problem or any(": " in line for line in full.values()):
        sys.exit(f"the tests of {solution.name} itself fail: {problem or full}")
    full.pop("total")
    columns = ["file", "grade (%)", *full, "remark"]
    table = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    table.writeheader()
    row = {"grade (%)": 0, "remark": f"there is no .py file with {part} in its name"}
    for path in files or [None]:
        print(path or "nothing to grade", file=sys.stderr)
        row = row_of(args.homework, path, full) if path else row
        table.writerow(row)
    if args.gradescope:
        tests = [{"name": part, "output": row.get(part, "")} for part in full]
        results = {"score": row["grade (%)"], "output": row["remark"], "tests": tests}
        args.gradescope.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
