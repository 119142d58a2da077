"""support/task.py: the answers that are read from texts, the reward that is computed from them, and
the data sets that are read or refused."""
import json

import pytest

import support.task
import train_math
from support.task import Refused, correctness_reward, extract_answer, gold_answer
from tests.conftest import parity_reward, settings, sums

ROWS = sums(15)
HELD_OUT = (6, 12, 13)  # of 15 rows in one file
SPLIT = [row for i, row in enumerate(ROWS) if i not in HELD_OUT], [ROWS[i] for i in HELD_OUT]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(rows):
    cells = [f"{row['question']},{row['answer']}\n" for row in rows]
    return "question,answer\n" + "".join(cells)


def load(path, reward=correctness_reward, **changes):
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
    for reward in correctness_reward, *[parity_reward] * (not is_number):
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


def last_number(text):
    return extract_answer(text, strict=False)


RESPONSES = {  # answer: texts
    "18": [
        "####18", "####   18\n", "#### 17\nNo.\n#### 18", "3 * 6 = 18\n#### **$18.00**",
        r"\boxed {18}", r"\boxed{17}, no: \boxed{18}", r"#### 17 \boxed{18}", "#### 018",
        r"#### Answer: \boxed{18}", r"<think>\boxed{17}</think> #### 18",
        "\\boxed{18}\n#### 2. Check\nIt fits.",
    ],
    "-18": ["#### -18", "#### −18", "#### -$18", r"\boxed{-18}", r"\boxed{-\$18}", r"\boxed{–18}"],
    "1234.5": ["#### $1,234.50", r"\boxed{1\,234.5}", r"\boxed{1{,}234.5}"],
    "0.5": ["#### .5"], "0": ["#### 0", "#### -0.0"], "1000000": ["#### 1,000,000"],
    "1" + 30 * "0" + "1": ["#### 1" + 30 * "0" + "1"],
    None: [
        "", "18", "#### ", "#### 18\n####", "### 18", "boxed{18}", r"18 \boxed{}", "#### v4",
        r"\boxed{18", "#### 3/4", r"\boxed{\frac{3}{4}}", "#### 18 or 19", r"\boxed{2^{10}}",
        "#### 3-5", "#### 2*9", "#### 18:30", "#### 2 * 9 = 18", "#### 1 234", "#### 1,5",
        r"\boxed{3,4}", "#### 0x10", "#### 1e5", "#### 12,50", "#### 0,123", "#### 1,2345",
        "#### 1234,567",
        r"\boxed{2.5 \times 10^3}", r"\boxed{18} \boxed{\frac{1}{2}}", "<think>#### 18",
    ],
}
UNITS = ["18 eggs", "18%", r"18\%", "18 €", r"18 \text{ cm}", r"\text{18}", "**18**", "(18)",
         r"\(18\)", "$18$", r"18^\circ", "18 apples and pears.", "the 18", r"\mathbf{18}",
         "18小时", r"18^{\circ}"]
LAST_NUMBERS = {
    "4": ["3 and 4"], "1200": ["it is $1,200."], "6": ["#### 5, not 6"], "-18": ["x = -18"],
    "18": ["20-18", "20 - 18", "so €18", "2*18", "18 0x10", "18 v4", "18 or 1e5", "18 or 4.5e3",
           "17,18"],
    "5.6": ["1,234 and 5.60 %"], None: ["none", ""],
}
GOLD = {
    "42": [42, 42.0, " 42\n", "$42.00", "6 * 7\n#### 42", r"so \boxed{42}"],
    "1234": ["1,234", "#### 1,234", "€ 1,234"], "-5": ["-5"], "0.5": [".5"], "50": ["50%"],
    None: ["one", "", 1e-05, None, True, "He has 3.\nSo 5", "42 boxes", "1.5 million", "3x+2",
           "1/2", "12,50", "3-5", "#### 42 boxes", "1e5", "0x10", "1 234"],
}


@pytest.mark.parametrize("read, text, answer", [
    (read, text, answer)
    for read, table in ((extract_answer, RESPONSES), (last_number, LAST_NUMBERS),
                        (gold_answer, GOLD))
    for answer, texts in table.items() for text in texts])
def test_an_answer_is_read_from_a_text(read, text, answer):
    assert read(text) == answer


@pytest.mark.parametrize("text", UNITS)
def test_an_answer_is_read_among_words_and_units(text):
    assert extract_answer(f"#### {text}") == extract_answer(f"So \\boxed{{{text}}}.") == "18"


def test_answers_are_rewarded_with_trls_signature():
    chat = [{"role": "assistant", "content": f"So #### {n}"} for n in (40, 41, 42)]
    completions = ["#### 42", r"\boxed{42}", "#### 41", "42", chat, None, "#### 4"]
    columns = {"prompts": ["?"] * 7, "answer": ["6 * 7\n#### 42"] * 7, "level": [1] * 7}
    reward = correctness_reward
    assert reward(completions=completions, **columns) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert reward(completions=completions, strict=False, **columns)[2:4] == [0.0, 1.0]
    assert reward(["?"] * 3, ["#### 42"] * 3, [42, "42.0", 4.2]) == [1.0, 1.0, 0.0]
    for gold in "one", None, "3/4":
        with pytest.raises(ValueError, match="is not a number"):
            reward(["?"] * 2, ["none", "#### 42"], [42, gold])
