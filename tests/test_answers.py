"""The answers that train_math.py reads from texts, and the reward that it computes from them."""

import pytest

from support.task import correctness_reward, extract_answer, gold_answer


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
