"""Wrong inputs of a user. Each ends the program with one line that says what to look at.

A row of the table is the input, a function that prepares it in an empty folder and returns flags,
and the words that the line must contain.
"""

import json

import pytest
from transformers import T5Config, T5ForConditionalGeneration

import train_math
from common.logs import read
from common.tiny_model import tiny_model, tiny_tokenizer
from tests.conftest import one_line, parity_reward, run, sums, write_jsonl


def flag(name, value):
    return lambda folder: [f"--{name}", value]


def dataset(name, content, encoding="utf-8"):
    """A dataset file with this content."""

    def prepare(folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding=encoding)
        return ["--dataset", str(path if path.parent == folder else path.parent)]

    return prepare


def rows(*changed):
    return "".join(json.dumps(row) + "\n" for row in [*sums(3), *changed])


def full_disk(folder):
    (folder / "run" / "partial").symlink_to("/dev/full")
    return []


def no_tokenizer(folder):
    tiny_model(tiny_tokenizer(), 0).save_pretrained(folder / "model")
    return ["--model", str(folder / "model")]


def encoder_decoder(folder):
    config = T5Config(vocab_size=80, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return ["--model", str(folder / "model")]


def a_file_as_model(folder):
    return ["--model", write_jsonl(folder / "m.jsonl", sums(3))]


def long_question(folder):
    questions = [*sums(3), {"question": "How many figs" + "?" * 600, "answer": "1"}, *sums(3)]
    return ["--dataset", write_jsonl(folder / "q.jsonl", questions)]


BAD_INPUTS = {
    "a device that this machine lacks": (flag("device", "mps"), ["--device mps"]),
    "a dataset file that is not there": (
        flag("dataset", "nowhere.csv"),
        ["nowhere.csv", "no such file"],
    ),
    "a dataset folder that is not there": (flag("dataset", "no/such/folder"), ["no/such/folder"]),
    "a folder without a train file": (
        dataset("data/test.jsonl", rows()),
        ["there is no train part with rows, only test"],
    ),
    "a line that is not JSON": (
        dataset("q.jsonl", rows() + "{'question': 1}\n" + rows()),
        ["q.jsonl", "line 4"],
    ),
    "a file in another encoding": (
        dataset("q.csv", "question,answer\nWie groß?,1\n", "latin-1"), ["q.csv", "utf"],
    ),
    "a file of another kind": (dataset("q.txt", rows()), ["must end in .jsonl, .json, .csv"]),
    "an empty file": (dataset("q.csv", ""), ["q.csv"]),
    "a header without rows": (
        dataset("q.csv", "question,answer\n"),
        ["q.csv", "no train part with rows"],
    ),
    "an empty cell": (
        dataset("q.csv", "question,answer\nHow many?,1\n,2\nWho?,3\n"),
        ["row 2", "needs a question"],
    ),
    "a parquet file that is none": (dataset("q.parquet", "text"), ["q.parquet", "arquet"]),
    "a column with the name of an argument": (
        dataset("q.jsonl", "".join(json.dumps(row | {"completions": 1}) + "\n" for row in sums(9))),
        ["completions"],
    ),
    "a prompt that is too long": (long_question, ["512", "How many figs"]),
    "a file as the model": (a_file_as_model, ["--model", "m.jsonl"]),
    "a model without its tokenizer": (no_tokenizer, ["--model", "okenizer"]),
    "an encoder and decoder": (encoder_decoder, ["--model", "T5Config"]),
    "a full disk": (full_disk, ["partial", "is the disk full?"]),
}

BAD_PARTS = {
    "a list of rewards": ({"reward": [parity_reward]}, ["list", "callable"]),
    "a wrong name of a part": ({"rewards": parity_reward}, ["rewards"]),
}


def line(command, tmp_path, flags, **parts):
    output_dir = [] if "--output_dir" in flags else ["--output_dir", tmp_path / "run"]
    parts = {"reward": parity_reward} | parts
    return one_line(train_math.main, *command, *output_dir, *flags, **parts)


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_ends_in_one_line(command, tmp_path, monkeypatch, name):
    prepare, words = BAD_INPUTS[name]
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    found = line(command, tmp_path, prepare(tmp_path))
    for word in words:
        assert word in found


@pytest.mark.parametrize("name", BAD_PARTS)
def test_bad_part_ends_in_one_line(command, tmp_path, name):
    parts, words = BAD_PARTS[name]
    found = line(command, tmp_path, [], **parts)
    for word in words:
        assert word in found


def test_held_out_questions_that_are_trained_on_are_left_out_and_counted(command, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", sums(6))
    held_out = [*sums(2), {"question": "new?", "answer": "1"}, {"question": "?", "answer": "2"}]
    write_jsonl(tmp_path / "data" / "test.jsonl", held_out)
    flags = ["--max_steps", "1", "--eval_size", "1"]
    run(command, tmp_path / "run", "--dataset", str(tmp_path / "data"), *flags)
    assert "2 held-out questions are left out" in capsys.readouterr().out
    asked = [row["question"] for row in read(tmp_path / "run" / "eval_1.jsonl")]
    assert asked == ["new?"]
