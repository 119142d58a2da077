"""The answers that train_math.py reads from texts, and the reward that it computes from them."""

import datetime

import pytest

from train_math import correctness_reward, extract_answer, gold_answer


def last_number(text):
    return extract_answer(text, strict=False)


RESPONSES = {  # answer: texts
    "18": [
        "####18", "####   18\n", "#### 17\nNo.\n#### 18", "3 * 6 = 18\n#### **$18.00**",
        r"\boxed {18}", r"\boxed{17}, no: \boxed{18}", r"#### 17 \boxed{18}", r"\boxed{17} #### 18",
        r"#### Answer: \boxed{18}", r"<think>\boxed{17}</think> #### 18",
        r"it is \boxed{17}</think> #### 18", "[THINK]17[/THINK] #### 18", "17</Thought> #### 18",
    ],
    None: [
        "", "18", "#### ", "#### 18\n####", "### 18", "boxed{18}", r"18 \boxed{}",
        r"#### 5 \boxed{}", r"\boxed{5} ####", r"\boxed{18", r"\boxed{\text{18}",
        r"\boxed{18} \boxed{1", r"\boxed{18\}", r"<think>\boxed{17}</think>", "17</Thought>",
    ],
}
LAST_NUMBERS = {
    "4": ["3 and 4"], "1200": ["it is $1,200."], "6": ["#### 5, not 6"],
    "18": ["20-18", "20 - 18", "(20) – 18", "5% - 18", "it is...18", "a,18", "so €18",
           "<think>17</think> 18"],
    "-18": ["x = -18", "20\n- 18", r"- \text{18}"],
    "-5": ["-$5"], "0.5": [".5"], "5.6": ["1,234 and 5.60 %"], "1234": [r"1\,234", "1{,}234"],
    None: ["none", "", "1\u202f234", "1'234", "7 and 1_234"],
}
GOLD = {
    "42": [42, 42.0, " 42\n", "$42.00", "6 * 7\n#### 42", r"so \boxed{42}"],
    "1234": ["1,234"], "-5": ["-5"], "0.5": [".5"], "50": ["50%"],
    None: ["B) 12", "12 boxes", "one", "", 1e-05, None, True, [1], datetime.date(2024, 1, 31)],
}
FRAMES = "#### {}", r"So \boxed{{{}}}."
SPELLINGS = {  # of one number, in both frames
    "18": [
        "$18", "**18**", "18.0", "18.00.", "+18", "018", "18%", "18, I think", "18=9*2", "18eggs",
        r"\$18", r"18 \text{ cm}", r"18\%", r"\text{18}", " 18 ", r"\mathbf{18}", r"\textrm{18}",
        r"\boldsymbol{18}", "{18}", r"\boxed{18}", r"\displaystyle 18", r"\,18", r"18\!", "(18)",
        r"\left(18\right)", r"\(18\)", "$18$", r"18\;\text{cm}", r"18\quad\text{cm}",
        r"18 \mathrm{~cm}", r"18\mbox{ cm}", "18 元", r"18~\text{kg}", r"18 \text{ m}",
        r"18 \text{ cm}^2", "18 km²", "18 m³", r"18^\circ", r"18^{\circ}", "18 °C", r"18\degree",
        "18 €", "£18.00", "¥18", "US$18", "USD 18", "18¢", "18 km/h", "$18/hour", "18 sq. ft.",
        "18 ice-creams", "18 of them", "18 apples and pears", "18 percent", "18 eggs!",
        "18 (eggs)", "18 Tom's eggs", "１８", "١٨", "__18__", "`18`", '"18"', "**18 eggs**.",
        "18 = (20 - 2)",
    ],
    "1234.5": ["$1,234.50"],
    "1234": [r"\$1,234", r"1{,}234", r"1\,234", r"1,\!234"],
    "1000000": ["1,000,000"],
    "12345678901234567890": ["12345678901234567890"],
    "0.5": [".5"],
    "0": ["0", "-0.0"],
    "100": ["100"],
}
MULTIPLIERS = [
    "million", "billions", "thousand", "hundred", "dozen eggs", "k", "K", "M", "bn", "mn", "lakh",
    "crore", "grand", "Millionen", "Mio.", "万", "千円", "halves", "thirds", "quarters", "tenths",
    "hundred thousand", "mil", "mille",
]
SEPARATORS = [  # of thousands, which are unknown
    " ", "\u00a0", "\u2009", "\u202f", "'", "’", "，", "_", "~", "{ }", r"\ ", "٬", "·", "{}",
]
NO_ANSWERS = [  # in no frame
    # A part of a term:
    "3x+2", "1/x", "5 - y", "3 x", "2i", "5ab", "3 m", "18 * width", "18, x", r"18 \cdot x",
    r"18\%x", "2π", "3√2", r"18 \sqrt{2}", r"2^{10}", "18^2", "18²", "18 squared", "18_{8}",
    "18 base ten", "7!", "18½", r"6 \div 2", "18 mod 5", "18 < x", "<18", r"\approx 18",
    r"18 \pm 2", "x = 18", "18 = x", "18 = -19", "18e-5", r"1.5 \times 10^3", "18th", "2**3",
    "--18", "18-", "18+", "x 18", r"18\pi", r"\frac{3}{4}", r"3\frac{1}{2}",
    # Beside a second number:
    "1 8", "12,34", "0,123", "18/2", "18:30", "1.18.2", "18 or nineteen", "18 and 19",
    "18, 19, 20", "18; 19", "18 (19)", "18 | 19", r"18 \text{ or } 19", r"18 \quad 19", "18 & 19",
    r"\{18, 19\}", "2h30", "5'11", "3 feet and two inches", "18 and a half", "3-5", "3–5",
    "5:30 pm", "7/8 cup", "2024-01-31", "18 March", "18 out of 20", "18 eggs, since 9*2=18",
    *(f"1{sign}234" for sign in SEPARATORS),
    # Before a word that multiplies:
    *(f"5{space}{word}" for word in MULTIPLIERS for space in ("", " ", "-")),
    *(rf"\$5{space}\text{{{word}}}" for word in MULTIPLIERS for space in ("", " ", "-")),
]


class TestAnAnswer:
    @pytest.mark.parametrize("read, text, answer", [
        (read, text, answer)
        for read, table in ((extract_answer, RESPONSES), (last_number, LAST_NUMBERS),
                            (gold_answer, GOLD))
        for answer, texts in table.items() for text in texts])
    def test_is_read_from_a_text(self, read, text, answer):
        assert read(text) == answer

    @pytest.mark.parametrize("text, answer", [
        (text, answer) for answer, texts in SPELLINGS.items() for text in texts])
    def test_is_read_in_each_spelling(self, text, answer):
        for frame in FRAMES:
            assert extract_answer(frame.format(text)) == answer

    @pytest.mark.parametrize("minus", ["-", "−", "–", "‐", "‑", "－", "- ", "−$", "-€", "$-",
                                       "USD -", r"-\,", "-~", "{-}", r"-\$", r"\text{-}"])
    def test_keeps_its_sign(self, minus):
        for frame in FRAMES:
            assert extract_answer(frame.format(f"{minus}18")) == "-18"
        assert last_number(f"it is {minus}18.") == "-18"
        assert gold_answer(f"**#### {minus}18**") == "-18"

    @pytest.mark.parametrize("text", NO_ANSWERS)
    def test_is_not_read_from_a_term_or_beside_a_second_number(self, text):
        for each in text, *(frame.format(text) for frame in FRAMES):
            assert extract_answer(each) is gold_answer(each) is None

    @pytest.mark.parametrize("heading", [
        "#### 2. Check", "##### 2. Check", "#### 2) Check", "#### (2) Check", "#### 2: Check",
        "#### **2. Check**", "#### **2.** Check", "#### 1.2. Check", "#### Check",
        "  #### Step 3: add 4", "#### 2. 检查",
    ])
    def test_is_not_read_from_a_heading(self, heading):
        assert extract_answer(f"{heading}\nIt fits.") is None
        assert extract_answer(f"\\boxed{{42}}\n\n{heading}\n\n6*7 = 42") == "42"
        assert extract_answer(f"{heading}\n6*7 = 42\n#### 42") == "42"

    @pytest.mark.parametrize("start", ["<think>", "<THINKING>", "[THINK]", "<seed:think>",
                                       "<thought>", "<reasoning>", "<think>a</think><think>"])
    def test_is_not_read_from_an_unfinished_thought(self, start):
        for read in extract_answer, last_number:
            assert read(start + r"9 * 2, that gives \boxed{18}. But #### 18") is None

    @pytest.mark.slow
    @pytest.mark.parametrize("piece", [
        "1", "1,", "111,", "#", "####", "#### ", "-", "$", " ", "*", ".", "1.", "1/", ",111", "−",
        "+$1", "\\boxed{", "\\boxed", "\\text{", "{,}", "\\,", "1\\", "_", "*a", "a", "a-", "abc ",
        "or ", "ill", "(", "=", "1+", "ab^2", "<a:", "<think>", "{", "\n", "\n#### 1. a", "٣",
        "万", "1_", "1\u202f", "\u00a0",
    ])
    @pytest.mark.parametrize("frame", ["{}x", "#### {}", "#### 1{}x", "{}####", "#### 1 abc{}!x",
                                       "#### 1=1{}x", "\\boxed{{1{}}}"])
    def test_of_an_endless_text_is_read_in_linear_time(self, piece, frame):
        """This is not timed: with a quadratic pattern, some of them would take minutes."""
        text = frame.format(piece * (60_000 // len(piece)))
        for read in extract_answer, last_number, gold_answer:
            read(text)


def test_answers_are_rewarded_with_trls_signature():
    chat = [{"role": "assistant", "content": f"So #### {n}"} for n in (40, 41, 42)]
    completions = ["#### 42", r"\boxed{42}", "#### 41", "42", chat, None, "#### 4"]
    columns = {"prompts": ["?"] * 7, "answer": ["6 * 7\n#### 42"] * 7, "level": [1] * 7}
    reward = correctness_reward
    assert reward(completions=completions, **columns) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert reward(completions=completions, strict=False, **columns)[2:4] == [0.0, 1.0]
    assert reward(["?"] * 3, ["#### 42"] * 3, [42, "42.0", 4.2]) == [1.0, 1.0, 0.0]
    assert reward(["?"], ["#### 100,000,000,000"], [1e11]) == [1.0]
    for gold in "1/2", "none", None, 0.1 + 0.2:
        with pytest.raises(ValueError, match="is not a number"):
            reward(["?"] * 2, ["none", "#### 42"], [42, gold])
