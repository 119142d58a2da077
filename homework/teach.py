r"""Hand-outs of gspo.py and its tests, and the grades of a class.

    python test_gspo.py --handout FOLDER              my_gspo.py and its tests, without answers
    python test_gspo.py --handout FOLDER gspo_loss    a smaller one: only gspo_loss is blank
    python test_gspo.py > my_gspo.py                  the assignment alone; names as above
    python test_gspo.py --grade FILES > grades.csv    the grades of a class: a row for each file
    python test_gspo.py --grade FILES --json          the same, with a JSON object on each line

A hand-out overwrites nothing. The whole assignment does not contain the private _helpers, because
they are half of the answer, and students may write their own. A smaller assignment keeps them.

The grade is in percent. All eight functions count alike: 90 of 100 points of a function are for the
maths and 10 are for the promises. A function earns all points for its maths if all of its tests of
the maths pass, and otherwise at most a third of them, in proportion to the tests that pass. The
same rule holds for the promises. Beside the grade, the table shows for each function how many tests
have passed. A mistake in sequence_ratio or clipped_objective costs no points in the losses that
call them. A wrong sign, a sum that is not divided, and a mean over the tokens of all responses cost
points only in the first loss that has them. A mistake in a student's own helper costs points in
every function that calls it. If these functions fail with the same hint, the remark names the
helper. This is a row of --json, in which a pair is [tests passed, number of tests]:

    {"file": "ann.py", "grade": 88.8, "gspo_loss maths": [17, 17], "gspo_loss promises": [4, 12],
     ..., "total maths": [80, 97], "total promises": [31, 65], "remark": "..."}

A remark says what to look at first, and why a file has no points. A function that ends the process,
or does not end, costs only its own points.

The grader does not protect you from a malicious file. A file runs with your rights, and in at most
4 GB of memory if the system can limit that. Use a container if this matters. The grader does not
prove that a file is honest, either. A remark names words that an honest solution does not need,
such as open or pytest, and code that is the same as in gspo.py or in an earlier file of the class,
apart from names and docstrings. The grader cannot recognise code that was rewritten, words that are
put together while the file runs, an answer that somebody else wrote, or forged test results.
"""
import argparse
import shutil
import sys
from pathlib import Path

from homework.class_grades import Homework, functions_of, grade_class

ROOT = Path(__file__).resolve().parents[1]
BLANKS = (
    "group_advantages",
    "token_log_probs",
    "sequence_ratio",
    "clipped_objective",
    "gspo_loss",
    "gspo_token_loss",
    "grpo_loss",
    "clip_fraction",
)


def refuse(line):
    print(line, file=sys.stderr)
    sys.exit(2)


def gspo_source():
    return (ROOT / "gspo.py").read_text(encoding="utf-8")


def pieces(source):
    """{function that a student writes: its syntax trees}."""
    return {name: [node] for name, node in functions_of(source).items() if name in BLANKS}


def homework():
    return Homework(
        tests=ROOT / "test_gspo.py",
        variable="GSPO",
        reference=ROOT / "gspo.py",
        parts=BLANKS,
        pieces=pieces,
    )


def assignment(names):
    """gspo.py with `raise NotImplementedError` for the bodies of these functions, docstrings kept.

    Without names, all functions in BLANKS are blank, and all other functions are left out."""
    for name in names:
        if name not in BLANKS:
            refuse(f"there is no blank {name}; the blanks are {', '.join(BLANKS)}")
    source = gspo_source()
    lines = source.splitlines()
    for name, node in reversed(functions_of(source).items()):
        if not names and name not in BLANKS:
            del lines[node.lineno - 1:node.end_lineno + 2]  # and the two blank lines below
        elif not names or name in names:
            body = slice(node.body[0].end_lineno, node.end_lineno)
            lines[body] = ["    raise NotImplementedError"]
    return "\n".join(lines) + "\n"


def hand_out(folder, names):
    text = assignment(names)
    copies = {"test_gspo.py": ROOT / "test_gspo.py", "grading.py": ROOT / "homework" / "grading.py"}
    for name in ("my_gspo.py", *copies):
        if (folder / name).exists():
            refuse(f"{folder / name} exists already, so nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_gspo.py").write_text(text, encoding="utf-8")
    for name, path in copies.items():
        shutil.copyfile(path, folder / name)


def main():
    parser = argparse.ArgumentParser(
        prog="test_gspo.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAMES",
                        help="blank functions of gspo.py (default: all), or FILES to grade")
    parser.add_argument("--handout", type=Path, metavar="FOLDER", help="write a hand-out to FOLDER")
    parser.add_argument("--grade", action="store_true", help="grade FILES")
    parser.add_argument("--json", action="store_true", help="print JSON instead of CSV")
    flags = parser.parse_intermixed_args()
    if flags.grade:
        grade_class(homework(), [Path(name) for name in flags.names], flags.json)
    elif flags.handout:
        hand_out(flags.handout, flags.names)
    else:
        print(assignment(flags.names), end="")


if __name__ == "__main__":
    main()
