"""Logs as .jsonl files, with one JSON object per line.

A file whose name ends in .gz is compressed; `zcat FILE` shows it. The files in evidence/logs hold
many logs each: the key "log" of a row is the name of its log.
"""
import gzip
import json
import sys
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
    """The rows of a file. An incomplete line, whose writer was interrupted, is left out."""
    rows = []
    for line in contents(Path(path)).decode("utf-8", errors="replace").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            pass
    return rows


def read_packed(path):
    """{name of a log: its rows}"""
    logs = {}
    for row in read(path):
        logs.setdefault(row.pop("log"), []).append(row)
    return logs


def lines_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def append(path, *rows):
    """Adds rows to the file. They begin on a new line, even if the last line is incomplete."""
    opened = gzip.open if path.suffix == ".gz" else open
    is_incomplete = contents(path)[-1:] not in (b"", b"\n")
    with opened(path, "ab") as file:
        file.write(b"\n" * is_incomplete + lines_of(rows))


def write(path, rows):
    """Writes a new file. If the write is interrupted, the old file stays as it was."""
    aside = path.with_name(path.name + ".partial")
    data = lines_of(rows)
    aside.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    aside.replace(path)


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
