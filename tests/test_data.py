"""Data sets as people have them: which are read or refused, and which questions are held out."""

import io
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import support.questions
import train_math
from tests.conftest import parity_reward, refused, settings, sums

ROWS = sums(15)
HELD_OUT = (6, 12, 13)  # of 15 rows in one file
SPLIT = [row for i, row in enumerate(ROWS) if i not in HELD_OUT], [ROWS[i] for i in HELD_OUT]
PARTS = ROWS[:12], ROWS[12:]  # of a folder


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(rows):
    cells = [f"{row['question']},{row['answer']}\n" for row in rows]
    return "question,answer\n" + "".join(cells)


def parquet(rows, *doubled):
    """doubled: columns that are in it twice."""
    table = pyarrow.Table.from_pylist(rows)
    for name in doubled:
        table = table.append_column(name, table[name])
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def write(folder, files):
    """The path of the data: that of a file q.*, or that of the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path if path.name.startswith("q") else folder


def load(path, reward=None, **changes):
    return train_math.load_questions(settings(dataset=str(path), **changes), reward)


TRAIN = lines(ROWS[:12])
TEST = lines(ROWS[12:])
ACCEPTED = {  # a file, or a folder with a train part and a test part
    "lines": {"q.jsonl": "\ufeff" + lines(ROWS) + "\n  \n"},
    "lines in .json": {"q.json": lines(ROWS)},
    "a list": {"q.json": "\ufeff\r\n " + json.dumps(ROWS, indent=2)},
    "commas": {"q[0].CSV": "\ufeff" + csv(ROWS)},
    "a table": {"q.parquet": parquet(ROWS)},
    "metadata and hidden files": {
        "train.jsonl": TRAIN, "test.jsonl": TEST, "dataset_infos.json": "{}",
        "._train.jsonl": b"\0\5"},
    "the name of the data": {"sums_train.jsonl": TRAIN, "sums-test.jsonl": TEST},
    "two kinds": {"train.csv": csv(ROWS[:12]), "validation.parquet": parquet(ROWS[12:])},
    "test and validation": {"train.jsonl": TRAIN, "test.jsonl": TEST, "dev.jsonl": TRAIN},
    "other names of the parts": {"Training.JSONL": TRAIN, "valid.jsonl": TEST},
    "shards from the hub": {
        "data/train-00000-of-00002.parquet": parquet(ROWS[:6]),
        "data/train-00001-of-00002.parquet": parquet(ROWS[6:12]),
        "data/test-00000-of-00001.parquet": parquet(ROWS[12:])},
}
REFUSED = {  # with the default reward: the files, and the words of the line
    "no train file": ({"test.jsonl": TEST}, ["there is no train part with rows", "['test']"]),
    "several data sets": (
        {"main/train.jsonl": TRAIN, "socratic/train.jsonl": TRAIN},
        ["Add one of these folders: ['main', 'socratic']"]),
    "two files of one part": (
        {"dev.jsonl": TRAIN, "val.csv": TRAIN}, ["dev.jsonl and val.csv are the same part"]),
    "a damaged file": ({"train.parquet": "no"}, ["train.parquet", "arquet file"]),
    "a test row without an answer": (
        {"train.jsonl": TRAIN, "test.jsonl": TEST + lines([{"question": "?", "answer": "x"}])},
        ["test: row 4 needs a question"]),
    "a line that is not JSON": (
        {"train.jsonl": TRAIN, "test.jsonl": TEST + "{\n"}, ["test.jsonl: line 4", "on one line"]),
    "another encoding": (
        {"q.csv": csv([{"question": "Wie groß?", "answer": 1}]).encode("latin-1")},
        ["q.csv", "not in UTF-8. Save it as 'CSV UTF-8'"]),
    "semicolons": ({"q.csv": "question;answer\nWie, was?;1\n"}, ["q.csv", "Save it with commas"]),
    "another kind": ({"q.txt": TRAIN}, ["must end in .jsonl, .json, .csv"]),
    "other names of columns": (
        {"q.jsonl": '{"problem": "?", "solution": "1"}\n'}, ["row 1 needs a question"]),
    "a list of numbers": ({"q.json": "[1, 2]"}, ["q.json: row 1", "form"]),
    "a cell too many": ({"q.csv": csv(ROWS[:2]) + "How many, then?,1\n"}, ["row 3", "form"]),
    "a cell too few": ({"q.csv": "question,topic,answer\nHow many?,1\n"}, ["row 1", "form"]),
    "an empty cell": ({"q.csv": csv(ROWS[:1]) + ",2\n"}, ["row 2 needs a question"]),
    "rows with other columns": (
        {"q.jsonl": TEST + lines([ROWS[0] | {"level": 2}])},
        ["row 4 has other columns than row 1", "level"]),
    "a column twice": ({"q.csv": "question,answer,answer\n1+1?,2,3\n"}, ["have one name"]),
    "a column twice in a line": (
        {"q.jsonl": TEST + '{"question": "?", "answer": "2", "answer": "3"}\n'},
        ["q.jsonl: line 4: two columns have one name"]),
    "a column twice in a list": (
        {"q.json": '[{"question": "?", "answer": "2", "answer": "3"}]'},
        ["q.json: two columns have one name"]),
    "a column twice in a table": (
        {"q.parquet": parquet(ROWS, "answer")}, ["two columns have one name"]),
    **{f"a column {name}": (
        {"q.jsonl": lines([row | {name: 1} for row in ROWS])}, [f"rename the columns ['{name}']"])
       for name in ("cut", "completions", "prompts", "completion_ids", "step")},
}


class TestData:
    @pytest.mark.parametrize("files", ACCEPTED.values(), ids=ACCEPTED)
    def test_in_a_file_or_folder_are_read(self, tmp_path, files):
        path = write(tmp_path, files)
        assert load(path, eval_size=3) == (SPLIT if path.is_file() else PARTS)

    def test_of_save_to_disk_are_read(self, tmp_path):
        whole, train, test = map(datasets.Dataset.from_list, (ROWS, *PARTS))
        whole.save_to_disk(tmp_path / "one")
        datasets.DatasetDict(train=train, validation=test).save_to_disk(tmp_path / "both")
        assert load(tmp_path / "one", eval_size=3) == SPLIT
        assert load(tmp_path / "both") == PARTS

    @pytest.mark.parametrize("name, asked", [
        ({}, ("openai/gsm8k", "main")), ({"dataset": "some/maths"}, ("some/maths",))])
    def test_on_the_hub_are_asked_for_by_their_name(self, monkeypatch, name, asked):
        """No test asks the hub itself."""
        hub = {asked: {"train": ROWS[:12], "test": ROWS[12:]}}
        monkeypatch.setattr(support.questions, "load_dataset", lambda *what: hub[what])
        found = train_math.load_questions(settings(eval_size=2, **name))
        assert found == (ROWS[:12], ROWS[12:14])

    @pytest.mark.parametrize("files, words", REFUSED.values(), ids=REFUSED)
    def test_are_refused_with_the_place_and_the_remedy(self, command, tmp_path, files, words):
        (tmp_path / "data").mkdir()
        path = write(tmp_path / "data", files)
        line = refused(command, tmp_path / "run", "--dataset", path,
                       reward=train_math.correctness_reward)
        assert all(word in line for word in words), line

    @pytest.mark.parametrize("name, kind", [("q.jsonl", lines), ("q.csv", csv)])
    def test_keep_answers_as_they_are_written(self, tmp_path, name, kind):
        answers = ["26", "007", "NA", "TRUE", "null", "2024-01-02", ""]
        rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        path = write(tmp_path, {name: kind(rows)})
        assert load(path, parity_reward, eval_size=0) == (rows, [])


class TestHeldOutQuestions:
    def test_of_a_sorted_file_have_all_answers_and_are_the_same_for_each_seed_and_size(
            self, tmp_path):
        answers = ["login"] * 30 + ["refund"] * 30 + ["other"] * 30
        rows = [{"question": f"Ticket {i}?", "answer": answer} for i, answer in enumerate(answers)]
        path = write(tmp_path, {"q.csv": csv(rows)})
        questions, held_out = load(path, parity_reward, eval_size=512)
        assert len(held_out) == len(rows) // 5
        assert sorted(questions + held_out, key=rows.index) == rows, "each row is used once"
        assert {row["answer"] for row in held_out} == set(answers)
        assert load(path, parity_reward, eval_size=512, seed=7) == (questions, held_out)
        for size in 0, 1, 5:
            more, few = load(path, parity_reward, eval_size=size)
            assert len(few) == size and len(more) == len(rows) - size
            assert all(row in held_out for row in few)

    @pytest.mark.parametrize("answers, words", [
        (["delivery"] * 90, "'delivery' is the answer to 100% of them"),
        (["Yes", "yes ", "no"] * 30, "'yes' is the answer to"),
        (["login", "refund", "other"] * 20, "note: 12 questions are held out\n"),
        (["login", "refund", "other"] * 19, "11 questions are held out. So few show little"),
        (["login"] * 8, "1 questions are held out. So few"),  # one answer is always common
    ])
    def test_are_counted_and_a_common_answer_or_a_small_number_is_noted(
            self, tmp_path, capsys, answers, words):
        rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        load(write(tmp_path, {"q.csv": csv(rows)}), parity_reward, eval_size=512)
        assert words in capsys.readouterr().out

    def test_that_are_trained_on_are_left_out_and_counted(self, tmp_path, capsys):
        held_out = [*sums(2), {"question": "new?", "answer": "1"}, {"question": "?", "answer": "2"}]
        held_out[0]["question"] += " "
        parts = {"train": sums(6), "test": held_out, "dev": held_out}
        write(tmp_path, {f"{name}.jsonl": lines(rows) for name, rows in parts.items()})
        assert load(tmp_path, eval_size=1) == (sums(6), [{"question": "new?", "answer": "1"}])
        shown = capsys.readouterr().out
        assert "2 held-out questions are left out" in shown
        assert "these parts of the data are not used: validation" in shown

    def test_that_are_missing_in_a_test_file_are_noted(self, tmp_path, capsys):
        path = write(tmp_path, {"train.jsonl": TRAIN, "test.csv": "question,answer\n"})
        assert load(path) == (ROWS[:12], [])
        assert "note: 0 questions are held out, so nothing is evaluated" in capsys.readouterr().out
