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

    @pytest.mark.parametrize("text", [
        r"\boxed{3x+2}", r"\boxed{1/x}", r"\boxed{5 - y}", r"\boxed{5/n}", "#### 3x", "#### 3 x",
        "#### 2i", "#### 3xy", "#### 5ab", "#### 3 m", "#### 18*x", "#### 18 * width", "#### 18, x",
        r"\boxed{18 \cdot x}", r"\boxed{18\%x}", "#### 2π", "#### 3√2", r"\boxed{18 \sqrt{2}}",
        r"\boxed{2^{10}}", "#### 18²", "#### 18 squared", r"\boxed{18_{8}}", "#### 18 base ten",
        "#### 7!", "#### 18½", "#### 3+4i", "#### 6×2", r"\boxed{6 \div 2}", "#### 18 mod 5",
        "#### 18 < x", "#### <18", "#### 3 ≥ x", r"\boxed{\approx 18}", r"\boxed{18 \pm 2}",
        "#### x = 18", "#### 18 = x", "#### 18 = 19", "#### 18 = -19", "#### 1e5", "#### 1.5E+3",
        r"\boxed{1.5 \times 10^3}", "#### 18th", "#### 2**3", "#### --18", "#### 18-", "#### 18+",
    ])
    def test_are_not_read_from_a_term(self, text):
        assert train_math.extract_answer(text) is None
        assert train_math.gold_answer(text) is None

    @pytest.mark.parametrize("sign", [
        " ", "\u00a0", "\u2009", "\u202f", "'", "’", "，", "_", "~", "{ }", r"\ ", "٬", "·", "{}",
    ])
    def test_are_not_read_with_an_unknown_separator_of_thousands(self, sign):
        for text in f"#### 1{sign}234", rf"\boxed{{1{sign}234}}", f"1{sign}234":
            assert train_math.gold_answer(text) is None
        assert train_math.extract_answer(f"#### 1{sign}234") is None
        assert train_math.extract_answer("#### 12,34") is None, "groups have three digits"
        assert train_math.extract_answer("#### 0,123") is None, "a decimal comma"

    @pytest.mark.parametrize("words", [
        "million", "billions", "thousand", "hundred", "dozen eggs", "k", "K", "M", "bn", "mn",
        "lakh",
        "crore", "grand", "Millionen", "Mio.", "万", "千円", "halves", "thirds", "quarters",
        "tenths",
        "hundred thousand", "million dollars", "mil", "mille",
    ])
    @pytest.mark.parametrize("space", ["", " ", "-"])
    def test_are_not_read_before_a_word_that_multiplies(self, words, space):
        for text in f"#### 5{space}{words}", rf"\boxed{{\$5{space}\text{{{words}}}}}":
            assert train_math.extract_answer(text) is None
            assert train_math.gold_answer(text) is None

    @pytest.mark.parametrize("text", [
        "18 or 19", "18 or nineteen", "18, or 19", "18 and 19", "18, 19, 20", "18; 19", "18 (19)",
        "18 | 19", "(18, 19)", r"18 \text{ or } 19", r"18 \quad 19", "18 & 19", r"\{18, 19\}",
        "2 hours 30 minutes", "2h30", "5 feet 11 inches", "5'11", "3 feet and two inches",
        "18 dollars and 50 cents", "18 and a half", "3-5", "3–5", "3 to 5", "3 - 5", "3:4",
        "5:30 pm",
        "1/2", "1 1/2", "7/8 cup", "2024-01-31", "18 March", "18 out of 20",
        "18 eggs, since 9*2=18",
    ])
    def test_are_not_read_beside_a_second_number(self, text):
        for marked in f"#### {text}", rf"\boxed{{{text}}}":
            assert train_math.extract_answer(marked) is None
            assert train_math.gold_answer(marked) is None

    @pytest.mark.parametrize("text", [
        r"\mathrm{18}", r"\mathbf{18}", r"\textrm{18}", r"\boldsymbol{18}", "{18}", r"\boxed{18}",
        r"\displaystyle 18", r"\,18", r"18\!", "(18)", r"\left(18\right)", r"\(18\)", "$18$",
        r"\$18",
        r"18\;\text{cm}", r"18\quad\text{cm}", r"18 \mathrm{~cm}", r"18\mbox{ cm}", r"18~\text{kg}",
        r"18 \text{ m}", r"18 \text{ cm}^2", "18 km²", "18 m³", r"18^\circ", r"18^{\circ}", "18 °C",
        r"18\degree", r"18\%", "€18", "18 €", "£18.00", "¥18", "US$18", "USD 18", "18 USD", "18¢",
        "18 km/h", "$18/hour", "18 sq. ft.", "18 dollars per hour", "18 ice-creams", "18 of them",
        "18 is the answer", "18 apples and pears", "18 years old.", "18 percent", "18 eggs!",
        "18 元",
        "18 (eggs)", "18 Tom's eggs", "１８", "١٨", "*18*", "__18__", "`18`", "**18** eggs", '"18"',
        "**18 eggs**.", "18 = 9 * 2", "18 = (20 - 2)",
    ])
    def test_are_read_in_other_spellings(self, text):
        assert train_math.extract_answer(f"#### {text}") == "18"
        assert train_math.extract_answer(rf"So \boxed{{{text}}}.") == "18"

    @pytest.mark.parametrize("minus", ["-", "−", "–", "‐", "‑", "－", "- ", "– ", "−$", "- $", "-€",
                                       "$-", "USD -", r"-\,", "-~", "{-}", r"-\$", r"\text{-}"])
    def test_keep_their_sign(self, minus):
        for text in f"#### {minus}18", rf"\boxed{{{minus}18}}":
            assert train_math.extract_answer(text) == "-18"
        for text in f"{minus}18", f"it is {minus}18.":
            assert train_math.extract_answer(text, strict=False) == "-18"
        for text in f"#### {minus}18", f"**#### {minus}18**":
            assert train_math.gold_answer(text) == "-18"

    @pytest.mark.parametrize("text, answer", [
        ("20 - 18", "18"), ("(20) – 18", "18"), ("5% - 18", "18"), ("20\n- 18", "-18"),
        ("1\u202f234", None), ("1'234", None), ("7 and 1_234", None), ("1\\,234", "1234"),
        ("1{,}234", "1234"), (r"- \text{18}", "-18"), ("so €18", "18"),
    ])
    def test_by_the_last_number_keep_their_sign_and_their_thousands(self, text, answer):
        assert train_math.extract_answer(text, strict=False) == answer

    @pytest.mark.parametrize("heading", [
        "#### 2. Check", "##### 2. Check", "#### 2) Check", "#### (2) Check", "#### 2: Check",
        "#### **2. Check**", "#### **2.** Check", "#### 1.2. Check", "#### Step 3", "#### Check",
        "  #### Step 3: add 4", "#### 2. 检查",
    ])
    def test_are_not_read_from_headings(self, heading):
        assert train_math.extract_answer(f"{heading}\nIt fits.") is None
        assert train_math.extract_answer(f"\\boxed{{42}}\n\n{heading}\n\n6*7 = 42") == "42"
        assert train_math.extract_answer(f"{heading}\n6*7 = 42\n#### 42") == "42"

    def test_in_the_line_of_a_heading_are_read_from_a_box(self):
        assert train_math.extract_answer(r"#### Answer: \boxed{42}") == "42"

    @pytest.mark.parametrize("start", ["<think>", "<THINKING>", "[THINK]", "<seed:think>",
                                       "<thought>",
                                       "<reasoning>", "<think>a</think><think>"])
    def test_are_not_read_from_an_unfinished_thought(self, start):
        thought = start + r"9 * 2, that gives \boxed{18}. But #### 18"
        assert train_math.extract_answer(thought) is None
        assert train_math.extract_answer(thought, strict=False) is None

    @pytest.mark.parametrize("thought", [
        r"<think>\boxed{17}</think>", r"it is \boxed{17}</think>", "[THINK]17[/THINK]",
        "17</Thought>",
    ])
    def test_after_a_thought_count(self, thought):
        assert train_math.extract_answer(thought + " #### 18") == "18"
        assert train_math.extract_answer(thought) is None
        assert train_math.extract_answer(thought + " 18", strict=False) == "18"

    @pytest.mark.parametrize("text", [r"\boxed{18", r"\boxed{\text{18}", r"\boxed{18} \boxed{1",
                                      r"\boxed{18\}", r"\boxed{{18}"])
    def test_are_not_read_from_an_unclosed_box(self, text):
        assert train_math.extract_answer(text) is None

    @pytest.mark.parametrize("text, answer", [
        ("3 and 4", "4"), ("it is $1,200.", "1200"), ("#### 5, not 6", "6"), ("none", None),
        ("5-3=2", "2"), ("20-18", "18"), ("x = -18", "-18"), ("so 18.", "18"), ("", None),
        ("it is...18", "18"), ("-$5", "-5"), (".5", "0.5"), ("a,18", "18"),
        ("1,234 and 5.60 %", "5.6"),
    ])
    def test_takes_the_last_number_when_not_strict(self, text, answer):
        assert train_math.extract_answer(text, strict=False) == answer

    @pytest.mark.slow
    @pytest.mark.parametrize("piece", [
        "1", "1,", "111,", "#", "####", "#### ", "-", "$", " ", "*", ".", "1.", "1/", ",111",
        "−", "+$1", "\\boxed{", "\\boxed", "\\text{", "{,}", "\\,", "1\\",
        "_", "*a", "a", "a-", "abc ", "or ", "ill", "(", "=", "1+", "ab^2", "<a:", "<think>", "{",
        "\n",
        "\n#### 1. a", "٣", "万", "1_", "1\u202f", "\u00a0",
    ])
    @pytest.mark.parametrize("frame", ["{}x", "#### {}", "#### 1{}x", "{}####", "#### 1 abc{}!x",
                                       "#### 1=1{}x", "\\boxed{{1{}}}"])
    def test_of_endless_texts_are_read_in_linear_time(self, piece, frame):
        """This is not timed: with a quadratic pattern, some of them would take minutes."""
        text = frame.format(piece * (60_000 // len(piece)))
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
