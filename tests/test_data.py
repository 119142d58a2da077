"""Data sets: which are read or refused, and which questions are held out."""

import json

import pytest

import support.task
import train_math
from support.task import Refused
from tests.conftest import parity_reward, settings, sums

ROWS = sums(15)
HELD_OUT = (6, 12, 13)  # of 15 rows in one file
SPLIT = [row for i, row in enumerate(ROWS) if i not in HELD_OUT], [ROWS[i] for i in HELD_OUT]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(rows):
    cells = [f"{row['question']},{row['answer']}\n" for row in rows]
    return "question,answer\n" + "".join(cells)


def load(path, reward=train_math.correctness_reward, **changes):
    return train_math.load_questions(settings(dataset=str(path), **changes), reward)


@pytest.mark.parametrize("name, text", [
    ("q.jsonl", "\ufeff" + lines(ROWS) + "\n  \n"), ("q.json", json.dumps(ROWS, indent=2)),
    ("q.csv", "\ufeff" + csv(ROWS))])
def test_a_file_is_read_and_a_fifth_of_it_is_held_out(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    for seed in 0, 7:
        assert load(tmp_path / name, eval_size=512, seed=seed) == SPLIT
    questions, held_out = load(tmp_path / name, eval_size=1)
    assert len(held_out) == 1 and sorted(questions + held_out, key=ROWS.index) == ROWS


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_a_folder_has_parts_and_test_questions_that_are_trained_on_are_left_out(tmp_path, held_out):
    (tmp_path / "train.csv").write_text(csv(ROWS[:12]))
    (tmp_path / f"{held_out}.jsonl").write_text(lines(ROWS[11:]))
    assert load(tmp_path) == (ROWS[:12], ROWS[12:])
    assert load(tmp_path, eval_size=2) == (ROWS[:12], ROWS[12:14])


def test_without_an_evaluation_test_questions_need_no_answer(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    (tmp_path / "test.jsonl").write_text(lines([{"question": "?", "answer": ""}]))
    assert load(tmp_path, eval_size=0) == (ROWS, [])


@pytest.mark.parametrize("name, asked", [
    ({}, ("openai/gsm8k", "main")), ({"dataset": "some/maths"}, ("some/maths",))])
def test_a_data_set_of_the_hub_is_asked_for_by_its_name(monkeypatch, name, asked):
    """No test asks the hub itself."""
    hub = {asked: {"train": ROWS[:12], "test": ROWS[12:]}}
    monkeypatch.setattr(support.task, "load_dataset", lambda *what: hub[what])
    assert train_math.load_questions(settings(eval_size=2, **name)) == (ROWS[:12], ROWS[12:14])


@pytest.mark.parametrize("row", [
    {"question": "?"}, {"question": "?", "answer": "one"}, {"question": "", "answer": "1"},
    {"question": " ", "answer": "1"}, {"question": 3, "answer": "1"}, {"answer": "1"}, "1+1?",
    {"question": "?", "answer": "1", "level": 2}, {"question": "?", "answer": ""},
    {"question": "?", "answer": None}])
def test_a_row_that_cannot_be_used_is_shown(tmp_path, row):
    """All but the second one are refused with a reward of the user's own, too."""
    (tmp_path / "q.jsonl").write_text(lines([*ROWS, row]))
    is_number = row == {"question": "?", "answer": "one"}
    for reward in train_math.correctness_reward, *[parity_reward] * (not is_number):
        with pytest.raises(Refused, match="'42' or '... #### 42'") as error:
            load(tmp_path / "q.jsonl", reward)
        assert str(row) in str(error.value)


@pytest.mark.parametrize("name, text, words", [
    ("q.csv", "question,answer\n1+1?,2\nHow many, then?,3\n", "'How many', ' then\\?', '3'"),
    ("q.csv", "question,topic,answer\n1+1?,2\n", "a row is .'1\\+1\\?', '2'"),
    ("q.csv", "question,answer,answer\n1+1?,2,3\n", "read: the columns are .*'answer', 'answer'"),
    ("q.csv", 'question,answer\n1+1?,2\n"1+2?,3\n', "q.csv cannot be read: unexpected end of data"),
    ("q.csv", "question;answer\n1+1?;2\n", "'question;answer': '1\\+1\\?;2'"),
    ("q.csv", "question,answer\n", "has no rows to train on"), ("q.csv", "", "has no rows"),
    ("q.jsonl", "", "has no rows"), ("test.jsonl", lines(ROWS), "no rows .* splits: .'test'"),
    ("q.jsonl", lines(ROWS[:2]) + "{\n", "q.jsonl cannot be read: Expecting"),
    ("q.json", "[1, 2]", "cannot be used: 1")])
def test_a_damaged_or_empty_file_is_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(Refused, match=words):
        load(tmp_path if name == "test.jsonl" else tmp_path / name)


def test_a_file_in_another_encoding_or_place_is_refused(tmp_path):
    (tmp_path / "q.csv").write_bytes("question,answer\nWie groß?,1\n".encode("latin-1"))
    for name, words in ("q.csv", "q.csv cannot be read: 'utf-8'"), ("no.csv", "No such .*no.csv"):
        with pytest.raises(SystemExit, match=words):
            train_math.main(["--dataset", str(tmp_path / name)])


@pytest.mark.parametrize("name, kind", [("q.jsonl", lines), ("q.csv", csv)])
def test_answers_stay_as_they_are_written(tmp_path, name, kind):
    answers = ["26", "007", "NA", "TRUE", "null", "2024-01-02"]
    rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    (tmp_path / name).write_text(kind(rows))
    assert load(tmp_path / name, parity_reward, eval_size=0) == (rows, [])
