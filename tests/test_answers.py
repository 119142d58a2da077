"""The answers that train_math.py reads from texts, and the reward that it computes from them."""

import datetime

import pytest

import train_math


class TestAnswers:
    @pytest.mark.parametrize("text", [
        "####18", "#### 18", "#### $18", "#### **18**", "#### 18.", "#### 18.0", "#### 18.00.",
        "#### +18", "#### 018", "#### 18 dollars", "#### 18%", "####   18\n", "#### $ 18",
        "#### 17\nNo.\n#### 18", "#### 18, I think", "#### 18=9*2",
        "3 * 6 = 18\n#### **$18.00**", "#### 18eggs", r"\boxed{18}", r"So \boxed{18}.",
        r"$\boxed{18}$", r"\boxed{\$18}", r"\boxed{18 \text{ cm}}", r"\boxed{18\%}",
        r"\boxed{\text{18}}", r"\boxed{18.00}", r"\boxed {18}", r"\boxed{ 18 }",
        r"\boxed{17}, no: \boxed{18}", r"#### 17 \boxed{18}", r"\boxed{17} #### 18",
    ])
    def test_reads_18(self, text):
        assert train_math.extract_answer(text) == "18"

    @pytest.mark.parametrize("text", [
        "", "18", "#### 1 8", "#### ", "####", "#### x 18", "#### 18\n####", "#### 18/2",
        "#### 1,8", "#### 18.5", "#### -18", "#### 118", "#### 180", "### 18", "#### 18:30",
        "#### 1.18.2", "#### 18e-5", "#### 18^2", "boxed{18}", r"\boxed{x = 18}",
        r"18 \boxed{}", r"\boxed{18} or \boxed{19}", r"\boxed{18\pi}", r"\boxed{18\frac{1}{2}}",
        r"\boxed{18 \pi}",
    ])
    def test_does_not_read_18(self, text):
        assert train_math.extract_answer(text) != "18"

    @pytest.mark.parametrize("text", [
        r"\boxed{\frac{3}{4}}", r"\boxed{3\frac{1}{2}}", r"\boxed{2\pi}", r"\boxed{3/4}",
        r"#### 5 \boxed{}", r"\boxed{5} ####",
    ])
    def test_reads_nothing(self, text):
        assert train_math.extract_answer(text) is None

    @pytest.mark.parametrize("text, answer", [
        ("#### $1,234.50", "1234.5"), ("#### -5", "-5"), ("#### −5", "-5"), ("#### -$5", "-5"),
        ("#### $-5", "-5"), ("#### 1,000,000", "1000000"), ("#### .5", "0.5"), ("#### 0", "0"),
        ("#### -0.0", "0"), ("#### 0.10", "0.1"), ("#### 100", "100"),
        ("#### 12345678901234567890", "12345678901234567890"), (r"\boxed{42}", "42"),
        (r"\boxed{\$1,234}", "1234"), (r"\boxed{1{,}234}", "1234"), (r"\boxed{1\,234}", "1234"),
        (r"\boxed{1,\!234}", "1234"), (r"\boxed{42\%}", "42"), (r"\boxed{-5}", "-5"),
    ])
    def test_gives_one_canonical_number(self, text, answer):
        assert train_math.extract_answer(text) == answer

    @pytest.mark.parametrize("text, answer", [
        ("3 and 4", "4"), ("it is $1,200.", "1200"), ("#### 5, not 6", "6"), ("none", None),
        ("5-3=2", "2"), ("20-18", "18"), ("x = -18", "-18"), ("so 18.", "18"), ("", None),
        ("it is...18", "18"), ("-$5", "-5"), (".5", "0.5"), ("a,18", "18"),
        ("1,234 and 5.60 %", "5.6"),
    ])
    def test_takes_the_last_number_when_not_strict(self, text, answer):
        assert train_math.extract_answer(text, strict=False) == answer

    @pytest.mark.parametrize("piece", [
        "1", "1,", "111,", "#", "####", "#### ", "-", "$", " ", "*", ".", "1.", "1/", ",111",
        "−", "+$1", "\\boxed{", "\\boxed", "\\text{", "{,}", "\\,", "1\\",
    ])
    @pytest.mark.parametrize("frame", ["{}x", "#### {}", "#### 1{}x", "{}####"])
    def test_of_endless_texts_are_read_in_linear_time(self, piece, frame):
        """This is not timed: with a quadratic pattern, some of them would take minutes."""
        text = frame.format(piece * (150_000 // len(piece)))
        train_math.extract_answer(text)
        train_math.extract_answer(text, strict=False)
        train_math.gold_answer(text)

    @pytest.mark.parametrize("answer, gold", [
        (42, "42"), (42.0, "42"), ("42", "42"), (" 42\n", "42"), ("1,234", "1234"),
        ("-5", "-5"), ("$42.00", "42"), (".5", "0.5"), ("50%", "50"), ("6 * 7\n#### 42", "42"),
        (r"so \boxed{42}", "42"),
    ])
    def test_of_a_dataset_are_numbers(self, answer, gold):
        assert train_math.gold_answer(answer) == gold

    @pytest.mark.parametrize("answer", [
        "1/2", "3:30", r"\frac{3}{4}", "B) 12", "(2, 3)", 1e-05, None, True, "", "one",
        "12 boxes", [1], "1,2", "#### 1/2", "2024-01-31", datetime.date(2024, 1, 31),
    ])
    def test_of_a_dataset_are_nothing_else(self, answer):
        assert train_math.gold_answer(answer) is None

    def test_are_rewarded_with_trls_signature(self):
        chat = [{"role": "assistant", "content": f"So #### {n}"} for n in (40, 41, 42)]
        completions = ["#### 42", r"\boxed{42}", "#### 41", "42", chat, None, "#### 4"]
        columns = {"prompts": ["?"] * 7, "answer": ["6 * 7\n#### 42"] * 7, "level": [1] * 7}
        reward = train_math.correctness_reward
        assert reward(completions=completions, **columns) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
        assert reward(completions=completions, strict=False, **columns)[2:4] == [0.0, 1.0]
        assert reward(["?"] * 3, ["#### 42"] * 3, [42, "42.0", "1/2"]) == [1.0, 1.0, 0.0]
        assert reward(["?"], ["none"], ["none"]) == [0.0], "neither of them is a number"
