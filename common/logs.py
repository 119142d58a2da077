"""Logs as .jsonl files: one JSON object per line."""
import json
from pathlib import Path


def read(path):
    """The rows of a .jsonl file. A last line that was cut short by a kill is left out."""
    path = Path(path)
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                pass
    return rows


def append(path, row):
    """Adds one row to the file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write(path, rows):
    """Writes a new .jsonl file. If the write is interrupted, the old file stays as it was."""
    aside = path.with_suffix(".partial")
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.replace(path)
