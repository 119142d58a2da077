"""Logs as .jsonl files: one JSON object per line.

    python -m common.logs pack FOLDER FILE      all .jsonl files below FOLDER, in one FILE
    python -m common.logs unpack FILE FOLDER    the files again

A file whose name ends in .gz is compressed; `zcat FILE` shows it.

In a packed file the first key of each row, "log", is the path of the file that it comes from,
without .jsonl. If two files are equal, the second one is a single row: {"log": ..., "same_as": ...}
"""
import argparse
import gzip
import json
import zlib
from pathlib import Path


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


def write(path, rows):
    """Writes a new .jsonl file. If the write is interrupted, the old file stays as it was."""
    aside = path.with_suffix(".partial")
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
    rows = []
    first = {}  # content of a log: the name of the first log with this content
    for name, log in logs.items():
        same = first.setdefault(json.dumps(log), name)
        if same == name:
            rows += [{"log": name, **row} for row in log]
        else:
            rows.append({"log": name, "same_as": same})
    write(path, rows)


def pack(folder, path):
    files = sorted(folder.rglob("*.jsonl"))
    names = [str(file.relative_to(folder).with_suffix("")) for file in files]
    write_packed(path, {name: read(file) for name, file in zip(names, files)})


def unpack(path, folder):
    for name, rows in read_packed(path).items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path, help="pack: a folder of logs; unpack: a packed file")
    parser.add_argument("target", type=Path, help="pack: the packed file; unpack: a folder")
    args = parser.parse_args(argv)
    if not args.source.exists():
        parser.error(f"{args.source} does not exist")
    if args.what == "pack":
        pack(args.source, args.target)
    else:
        unpack(args.source, args.target)


if __name__ == "__main__":
    main()
