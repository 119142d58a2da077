"""All published tables and pictures follow from the committed logs."""
from evidence import tables
from evidence.speed import bench_vs_trl


def test_tables_follow_from_the_logs_byte_for_byte():
    found = tables.tables()
    assert len(found) == 12
    for path, text in found.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_each_picture_can_be_drawn_from_the_logs(monkeypatch):
    drawn = set()
    monkeypatch.setattr("matplotlib.figure.Figure.savefig",
                        lambda figure, path, **settings: drawn.add(path))
    tables.draw_pictures()
    assert set(tables.RESULTS.rglob("*.png")) <= drawn


def test_the_command_writes_them(tmp_path, monkeypatch, capsys):
    path = tables.GSM8K / "table.md"
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "a" / "b")
    target = tmp_path / "table.md"
    monkeypatch.setattr(tables, "tables", lambda: {target: path.read_text(encoding="utf-8")})
    tables.main([])
    assert target.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
    assert capsys.readouterr().out == "table.md\n"


def test_each_word_of_the_comparison_with_trl_is_one_token():
    """Otherwise the prompts are longer than planned, and a minibatch has two micro-batches."""
    tokenizer = bench_vs_trl.make_tokenizer(512)
    assert tokenizer("w12 w3 w100").input_ids == [12, 3, 100]
