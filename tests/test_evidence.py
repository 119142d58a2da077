"""evidence/: the tables follow from the logs, and the pages show their numbers."""
import re
import statistics
from collections import Counter

import pytest

from evidence import lesson_seeds, rounding, sums, table
from lesson import tiny
from tests.conftest import TOP, one_line
from tools.logs import read

TABLES = table.PAGE.read_text(encoding="utf-8")

def test_the_tables_follow_from_the_logs_byte_for_byte():
    assert table.page(TABLES) == TABLES
    changed = TABLES.replace("| GSPO | 97.2 / 92.5 |", "| GSPO | 97.3 / 92.5 |")
    assert changed != TABLES == table.page(changed)


def test_the_picture_of_the_front_page_can_be_drawn_from_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_seeds, "PICTURE", tmp_path / "collapse.png")
    lesson_seeds.draw_collapse()
    assert lesson_seeds.PICTURE.stat().st_size > 10_000


def test_statistics_of_the_tables():
    ends = [(-0.01, 0.5), (0.01, 0.34), (0.0, 0.35), (None, 0.1), (-0.5, None)]
    assert table.counted(ends) == ["2 of 4", "2 of 4"]
    # By hand: variances of the means 1/3 and 2/3, 4.9 degrees of freedom, t 2.776.
    assert table.welch([0.01, 0.02, 0.03], [0.0, 0.02, 0.04, 0.02]) == "+0.0 ± 2.8"
    # A standard deviation of 1 point: 4.303 / sqrt(3).
    assert table.mean_difference([0.51, 0.52, 0.53], [0.5] * 3) == "+2.0 ± 2.5"
    assert table.mean_difference([0.51, 0.52, 0.53], [0.5] * 3, narrowest=6) == "+2.0 ± 6.0*"
    # 3 gained and 1 lost of 4: twice (1 + 4) / 16.
    assert table.mcnemar([0, 0, 0, 1, 1], [1, 1, 1, 0, 1]) == "0.62"


def test_the_answers_of_the_pages_are_those_of_the_tables():
    """The tables have some of these differences as GRPO minus GSPO."""
    swapped = TABLES.translate(str.maketrans("+-", "-+"))
    rows = sorted(table.logs("measurements")["stale"], key=lambda row: row["world"])
    found = table.by([row | {"clip": tuple(row["clip"][:2])} for row in rows], "age", "clip")
    ends = {key: table.column(own, "accuracy") for key, own in found.items()}
    stale = {(age, clip): table.mean_difference(ends[age, clip], ends[age, ("grpo", 0.2)])
             for age, clip in ends if clip[0] == "gspo"}
    tuned = table.by(table.logs("learning_rates")["runs"], "task", "algorithm", "learning_rate")
    free, grpo = ([row["held out"]["1.0"] for row in tuned["long", name, rate]]
                  for name, rate in (("no clip", 1e-4), ("GRPO", 2e-4)))
    others = [stale[age, ("gspo", 3e-4)] for age in (0, 4)] + [table.mean_difference(free, grpo)]
    for name, head in (("evidence", r"\| models \|\n"), ("lesson", r"\| case \|.*GSPO minus")):
        page = (TOP / name / "README.md").read_text(encoding="utf-8")
        answers = re.split(head, page)[1].partition("\n\n")[0]
        shown = re.findall(r"[+-][\d.]+ ± [\d.]+\*?", answers)
        assert len(shown) >= 4
        for text in shown:
            assert text in others or f"| {text} |" in TABLES + swapped, text
    assert "| +2.8 (+0.2 to +5.4) |" in TABLES, "both pages have it as GSPO minus GRPO"


def test_held_out_products_are_in_no_training_question():
    questions, held_out = sums.make_questions()
    train, test = ({frozenset(row["factors"]) for row in rows} for rows in (questions, held_out))
    assert len(held_out) == 256 and not train & test
    assert len(train) + len(test) == len(questions) + 256, "no product occurs twice"
    for row in held_out:
        a, b = row["factors"]
        assert int(a) * int(b) == int(row["answer"])
        assert f" {a} boxes of {b} " in row["question"]


@pytest.mark.slow
def test_a_run_has_all_answers_of_both_models_and_is_not_repeated(world, tmp_path):
    flags = ["--model", str(world / "model"), "--max_steps", "1", "--max_completion_length", "2",
             "--device", "cpu", "--output_dir", str(tmp_path)]
    sums.main(flags)
    asked = sums.TEMPERATURES | {"before_given": [0.0], "after_given": [0.0]}
    files = {tmp_path / f"{when}.jsonl": read(tmp_path / f"{when}.jsonl") for when in asked}
    for rows, temperatures in zip(files.values(), asked.values()):
        assert Counter(row["temperature"] for row in rows) == dict.fromkeys(temperatures, 256)
    (start, _) = read(tmp_path / "training" / "metrics.jsonl")
    assert start["settings"]["eps_low"] == 3e-2
    assert "was begun with {'seed': 0}" in one_line(sums.main, *flags, "--seed", "1")
    assert "makes its own questions" in one_line(sums.main, *flags, "--dataset", "my.jsonl")
    sums.main(flags)
    for path, rows in files.items():
        assert read(path) == rows


@pytest.mark.slow
def test_rounding_is_0_in_float32_and_not_in_bf16(world, tmp_path, monkeypatch):
    monkeypatch.setattr(rounding, "LENGTHS", (2, 6))
    monkeypatch.setattr(rounding, "LOG", tmp_path / "rounding.jsonl")
    monkeypatch.setattr("sys.argv", ["", "--dataset", str(world / "questions.jsonl"), "--model",
                                     str(world / "model")])
    rounding.main()
    rows = {row["setting"]: row["6"] for row in read(tmp_path / "rounding.jsonl")}
    largest = {setting: max(map(abs, rows[setting]["decode"])) for setting in rounding.SETTINGS}
    assert largest.pop("float32") < 1e-5 < min(largest.values())
    assert len(rows["float32"][rounding.STEP]) == 12


def test_the_first_command_of_the_lesson_has_the_settings_of_the_plan():
    assert tiny.FLAGS[tiny.FLAGS.index("--learning_rate") + 1] == lesson_seeds.LEARNING_RATE[1]
    for algorithm in "GSPO", "GRPO":
        assert lesson_seeds.VARIANTS[algorithm][2:] == tiny.RANGES[algorithm.lower()]


def test_the_lesson_shows_numbers_of_the_logged_runs():
    page = (TOP / "lesson" / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    runs = {name: rows for (name, _, seed), rows in lesson_seeds.runs_of("lesson").items()
            if seed == 0}
    columns = {
        "| step | `reward` | `response_length` | `eval_reward` | ": [
            ("GSPO", "reward"), ("GSPO", "response_length"), ("GSPO", "eval_reward")],
        "| step | `reward`, clip | `reward`, no clip | `eval_reward`, clip | ": [
            (name, metric) for metric in ("reward", "eval_reward") for name in ("GSPO", "no clip")]}
    for head, meaning in columns.items():
        cells = r" ([\d.]*)%? ?\|" * len(meaning)
        text = page.split(head)[1].partition("|  ")[0] + "|"
        shown = re.findall(rf"\| (before|\d+) \|{cells}", text)
        assert len(shown) >= 5
        for step, *values in shown:
            for (name, metric), value in zip(meaning, values):
                row = runs[name][0 if step == "before" else int(step)]
                times = 1 if metric == "response_length" else 100
                assert not value or f"{times * row[metric]:.1f}" == value, (name, step, metric)
    clipped = {name: statistics.mean(row["clip_fraction"] for row in rows[1:])
               for name, rows in runs.items()}
    for sentence in (
            f"after step 4, `eval_reward` is {runs['one update'][4]['eval_reward']:.1%}",
            f"in step 16, `reward` is {runs['one update'][16]['reward']:.1%}",
            f"`log_ratio_std` is {runs['GSPO'][1]['log_ratio_std']:.3f}",
            f"`log_ratio_std` is {runs['no clip'][1]['log_ratio_std']:.1f} instead of ",
            f"GSPO clips {clipped['GSPO']:.1%} of the tokens, and GRPO {clipped['GRPO']:.1%}"):
        assert sentence in page
