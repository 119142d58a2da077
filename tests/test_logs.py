"""common/logs.py: logs are read, written and packed without losses."""
import pytest

from common import logs
from tests.conftest import write_jsonl


def test_a_compressed_log_has_the_same_rows(tmp_path):
    path = tmp_path / "log.jsonl.gz"
    rows = [{"step": 0, "word": "−5"}, {"step": 1}]
    logs.write(path, rows)
    logs.append(path, {"step": 2})
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert logs.read(path) == [*rows, {"step": 2}]
    path.write_bytes(path.read_bytes()[:-12])  # killed while it wrote the last row
    assert logs.read(path)[:2] == rows


def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path):
    assert logs.read(tmp_path / "none.jsonl") == []
    path = tmp_path / "log.jsonl"
    rows = [{"step": 0}, {"step": 1, "reward": 0.5}]
    write_jsonl(path, rows)
    logs.append(path, {"step": 2, "word": "−5"})
    with open(path, "ab") as file:
        file.write('{"step": 3, "word": "−'.encode()[:-1])
    assert logs.read(path) == [*rows, {"step": 2, "word": "−5"}]
    logs.append(path, {"step": 4})
    assert logs.read(path) == [*rows, {"step": 2, "word": "−5"}, {"step": 4}]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    logs.write(path, [{"step": 0}])

    def interrupt(row, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(logs.json, "dumps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        logs.write(path, [{"step": 1}])
    assert path.read_text() == '{"step": 0}\n'


@pytest.fixture
def folder(tmp_path):
    """Three logs, two of which are equal."""
    folder = tmp_path / "runs"
    same = [{"step": 0, "word": "−5"}, {"step": 1}]
    for name, rows in ("a/before", same), ("a/eps_0.02", [{"step": 7}]), ("b/before", same):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        logs.write(path, rows)
    return folder


def test_packed_logs_come_out_as_they_went_in(folder, tmp_path):
    """The packed file is readable, and holds equal logs once."""
    packed = tmp_path / "all.jsonl"
    logs.main(["pack", str(folder), str(packed)])
    assert logs.read(packed) == [
        {"log": "a/before", "step": 0, "word": "−5"},
        {"log": "a/before", "step": 1},
        {"log": "a/eps_0.02", "step": 7},
        {"log": "b/before", "same_as": "a/before"},
    ]
    logs.main(["unpack", str(packed), str(tmp_path / "out")])
    contents = []
    for top in folder, tmp_path / "out":
        files = top.rglob("*.jsonl")
        contents.append({path.relative_to(top): path.read_bytes() for path in files})
    assert len(contents[0]) == 3
    assert contents[0] == contents[1]


def test_a_missing_file_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        logs.main(["unpack", str(tmp_path / "none.jsonl"), str(tmp_path / "out")])
    assert "none.jsonl does not exist" in capsys.readouterr().err
