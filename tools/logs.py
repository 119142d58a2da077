"""Logs as .jsonl files, one JSON object per line; 95% confidence intervals; tables in Markdown.

    python -m tools.logs pack FOLDER FILE      all .jsonl files below FOLDER, in one FILE
    python -m tools.logs unpack FILE FOLDER    the files again

A file whose name ends in .gz is compressed; `zcat FILE` shows it.

In a packed file the first key of each row, "log", is the path of the file that it comes from,
without .jsonl. A row with the key "same_as" stands for all rows of another log, which it names.
"""
import argparse
import gzip
import json
import math
import statistics
import sys
import zlib
from pathlib import Path

from support.metrics import wilson

STUDENT = {  # number of values: the t of a 95% interval
    2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306}


def contents(path):
    """The bytes of a file, b"" if it does not exist. A .gz file is decompressed, apart from an end
    that is incomplete."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    found = b""
    while data:
        member = zlib.decompressobj(wbits=31)
        found += member.decompress(data)
        data = member.unused_data
    return found


def read(path):
    """The rows of a .jsonl file. A line that is incomplete, because its writer was killed, is left
    out."""
    rows = []
    for line in contents(Path(path)).decode("utf-8", errors="replace").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            pass
    return rows


def append(path, row):
    """Adds one row to the file, on a line of its own even if the last line is incomplete."""
    path = Path(path)
    written = contents(path)
    is_incomplete = written and not written.endswith(b"\n")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "at", encoding="utf-8") as file:
        if is_incomplete:
            file.write("\n")
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def make_writable(path):
    """Makes the folder of an output file, and tries to write there, so that a command notices a
    wrong path before its work. SystemExit: the file cannot be written."""
    path = Path(path)
    aside = path.with_name(path.name + ".partial")  # as in `write`
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            open(path, "ab").close()
        aside.touch()
        aside.unlink()
    except OSError as error:
        sys.exit(f"{path} cannot be written ({error.strerror or error}). Choose another path")


def write(path, rows):
    """Writes a new .jsonl file. If the write is interrupted, the old file stays as it was."""
    aside = path.with_name(path.name + ".partial")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    data = "".join(lines).encode("utf-8")
    aside.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    aside.replace(path)


def read_packed(path):
    """The logs of a packed file, {name of a log: its rows}."""
    logs = {}
    for row in read(path):
        name = row.pop("log")
        if "same_as" in row:
            logs[name] = logs[row["same_as"]]
        else:
            logs.setdefault(name, []).append(row)
    return logs


def write_packed(path, logs):
    """Writes {name of a log: its rows} into one file. A log without rows is left out."""
    write(path, [{"log": name, **row} for name, rows in logs.items() for row in rows])


# ---- intervals and tables ------------------------------------------------------------------------

# `mean_text` and `paired` take lists of values, one for each question: 1 (or True) for a correct
# answer, otherwise 0 (or False). `mean_difference` takes accuracies, one for each starting model.


def mean_text(values, form=".1%"):
    """The mean of these values with its 95% interval, such as "73.8% (68.1% to 78.8%)".

    It is Wilson's interval if all values are 0 or 1, and otherwise the normal approximation."""
    n = len(values)
    mean = sum(values) / n
    if set(values) <= {0, 1}:
        low, high = wilson(sum(values), n)
    elif n == 1:
        return f"{mean:{form}}"
    else:
        half = 1.96 * statistics.stdev(values) / math.sqrt(n)
        low, high = mean - half, mean + half
        if 0 <= min(values) and max(values) <= 1:
            low, high = max(0, low), min(1, high)
    return f"{mean:{form}} ({low:{form}} to {high:{form}})"


def paired(before, after):
    """Compares the values of two models at the same questions.

    Returns the difference of the two means, its 95% interval (normal approximation), and the
    p-value of McNemar's exact test, which is meant for values that are 0 or 1. This is the
    probability of a split between gained and lost answers that is at least as uneven as the
    observed one, if both were equally likely."""
    differences = [y - x for x, y in zip(before, after, strict=True)]
    n = len(differences)
    total = sum(differences)
    difference = total / n
    squares = sum(d * d for d in differences)
    half = 1.96 * math.sqrt(max(0, squares - total**2 / n)) / n
    gained = sum(d > 0 for d in differences)
    lost = sum(d < 0 for d in differences)
    changed = gained + lost
    fewer = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    p = min(1, 2 * fewer / 2**changed)
    return difference, (difference - half, difference + half), p


def mean_difference(accuracies, others, narrowest=0):
    """The mean paired difference of two variants' accuracies, in points, with the half width of
    Student's 95% interval: "+5.1 ± 4.6". An interval that was widened to `narrowest` has a star."""
    values = [100 * (a - b) for a, b in zip(accuracies, others, strict=True)]
    text = f"{statistics.fmean(values):+.1f}"
    if len(values) in STUDENT:
        half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
        text += f" ± {max(half, narrowest):.1f}" + "*" * (half < narrowest)
    return text


def markdown(titles, rows):
    """A table. Each row has a cell for each title."""
    lines = [f"| {' | '.join(map(str, row))} |\n" for row in (titles, *rows)]
    lines.insert(1, "|---" * len(titles) + "|\n")
    return "".join(lines)


# ---- the command ---------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path, help="pack: a folder of logs; unpack: a packed file")
    parser.add_argument("target", type=Path, help="pack: the packed file; unpack: a folder")
    args = parser.parse_args(argv)
    if not args.source.exists():
        parser.error(f"{args.source} does not exist")
    if args.what == "pack":
        files = sorted(args.source.rglob("*.jsonl"))
        if not files:
            parser.error(f"{args.source} is no folder with .jsonl files")
        make_writable(args.target)
        names = [str(file.relative_to(args.source).with_suffix("")) for file in files]
        write_packed(args.target, dict(zip(names, map(read, files))))
    elif not args.source.is_file() or not all("log" in row for row in read(args.source)):
        parser.error(f"{args.source} is no packed file")
    else:
        for name, rows in read_packed(args.source).items():
            make_writable(args.target / f"{name}.jsonl")
            write(args.target / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
