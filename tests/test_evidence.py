"""evidence/: the tables follow from the logs, the losses have the gradients of their formulas, and
no run is made twice."""
import itertools
import json
import math
import re
import statistics
from collections import Counter

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from evidence import compare, lesson_seeds, sums, tables, tasks
from gspo import clip_fraction, sequence_ratio
from lesson import tiny
from tests.conftest import TOP, one_line
from tools.logs import read, write

# ---- tables and pictures -------------------------------------------------------------------------


def test_the_command_makes_the_page_from_the_logs_byte_for_byte(tmp_path, monkeypatch):
    page = tables.HERE / "tables.md"
    monkeypatch.setattr(tables, "HERE", tmp_path)
    monkeypatch.setattr("sys.argv", ["tables.py"])
    tables.main()
    assert (tmp_path / "tables.md").read_bytes() == page.read_bytes()


def test_the_picture_of_the_front_page_can_be_drawn_from_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_seeds, "PICTURE", tmp_path / "collapse.png")
    lesson_seeds.draw_collapse()
    assert lesson_seeds.PICTURE.stat().st_size > 10_000


def test_statistics_of_the_tables():
    """A run that ends below its own start has collapsed. The second number counts greedy accuracies
    below 35%, which a start can have, too."""
    ends = [(-0.01, 0.5), (0.01, 0.34), (0.0, 0.35), (None, 0.1), (-0.5, None)]
    assert tables.counted(ends) == ["2 of 4", "2 of 4"]
    assert tables.counted([(None, 0.1)]) == ["-", "1 of 1"]
    # By hand: variances of the means 1/3 and 2/3, 4.9 degrees of freedom, t 2.776.
    assert tables.welch([0.01, 0.02, 0.03], [0.0, 0.02, 0.04, 0.02]) == "+0.0 ± 2.8"


def test_what_is_chosen_depends_on_the_validation_questions_alone():
    found = {}
    for name, rate in tables.GRID:
        best = 0.5 + 0.1 * (rate == 2e-4)
        validation = {"1.0": best, "0.7": best + 0.2, "0.5": best}
        held_out = {"1.0": 1 - best, "0.7": 0.0, "0.5": 1.0, "0.0": 1.0}
        found[name, rate] = [{"validation": validation, "held out": held_out}]
    for name in tables.RATES:
        assert tables.choice(found, name) == (2e-4, "0.7")


# ---- comparisons on tiny models ------------------------------------------------------------------


# The objectives of one response with the token ratios r (n,) and the advantage a:


def clipped(ratio, a, low, high):
    return torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def geometric_mean(r):
    return r.log().mean().exp()


def gspo(r, a, low, high):
    return clipped(geometric_mean(r), a, low, high)


def capped(r, a, low, high):
    return r.detach().clamp(max=1 + high) * a * r.log()


def sapo(r, a, low, high):
    tau = high if a > 0 else low
    return (4 / tau * (tau * (r - 1)).sigmoid() * a).mean()


def gmpo(r, a, low, high):
    return a * geometric_mean(r.clamp(max=math.exp(high)) if a > 0 else r.clamp(math.exp(-low)))


def fspo(r, a, low, high):
    root = len(r) ** 0.5
    return clipped(r.prod(), a, 1 - math.exp(-low * root), math.exp(high * root) - 1)


LENGTH = 4.5  # the mean of 2 to 7 tokens
VARIANTS = [  # its parts, its two numbers, and the objective of one response
    ({}, [0.01, 0.02], gspo),
    ({"successor": "sapo"}, [5.0, 3.0], sapo),
    ({"successor": "gmpo"}, [0.1, 0.15], gmpo),
    ({"successor": "fspo"}, [0.1, 0.2], fspo),
    ({"successor": "luspo"}, [0.01, 0.02], lambda r, *more: len(r) * gspo(r, *more)),
    ({"successor": "dapo"}, [0.1, 0.2], lambda *numbers: clipped(*numbers).sum() / LENGTH),
    ({"successor": "dapo"}, [0.99, 0.2], lambda *numbers: clipped(*numbers).sum() / LENGTH),
    ({"successor": "dr_grpo"}, [0.1, 0.2], lambda *numbers: clipped(*numbers).sum() / 210),
    ({"successor": "cispo"}, [1.0, 0.2], lambda *numbers: capped(*numbers).sum() / LENGTH),
    ({"loss": ["token", "token", None]}, [0.1, 0.2], lambda *numbers: clipped(*numbers).mean()),
    ({"loss": ["sequence", "sequence", None]}, [0.01, 0.02], gspo),
    ({"loss": ["token", "sequence", None]}, [0.01, 0.02],
     lambda r, a, *eps: (r * a).mean() * (gspo(r, a, *eps) == geometric_mean(r) * a)),
    ({"loss": ["token", "one", 1.2]}, [0.99, 0.2], lambda *numbers: capped(*numbers).mean()),
    ({"loss": ["token", "token", None, None, None, 0.25]}, [0.1, 0.2],
     lambda r, a, *eps: clipped(r, a, *eps).mean() * (1 if a > 0 else 0.25)),
]


@pytest.mark.parametrize("pieces, eps, objective", VARIANTS)
def test_variants_have_the_gradient_of_their_objective_and_the_clip_fraction_of_their_own_clip(
        pieces, eps, objective):
    """On 6 responses of 2 to 7 tokens. Some ratios are beyond any clip range."""
    torch.manual_seed(0)
    old = -torch.rand(6, 7) * 3
    new = (old + 0.3 * torch.randn(6, 7)).requires_grad_()
    advantages = torch.randn(6)
    mask = torch.arange(7) < torch.arange(2, 8)[:, None]
    total = 0
    for i, a in enumerate(advantages):
        r = (new - old)[i, mask[i]].exp()
        total = total - objective(r, a, *eps).sum() / 6
    (expected,) = torch.autograd.grad(total, new)
    algorithm = compare.algorithm_of(tasks.variant("gspo", eps, **pieces))
    own = algorithm.eps_low, algorithm.eps_high
    padded = new.detach().masked_fill(~mask, math.nan).requires_grad_()
    algorithm.loss(padded, old, advantages, mask, *own, 6).backward()
    assert_close(padded.grad, expected)
    if pieces != {"successor": "fspo"}:  # its range depends on the length
        ratio = (new - old).exp()
        if algorithm.ratio == "sequence":
            ratio = sequence_ratio(new, old, mask)
        logged = clip_fraction(ratio, advantages, mask, *own)
        assert_close(logged, (expected[mask] == 0).float().mean())
        assert 0 < logged < 1 or algorithm.eps_low == 1, "only these may clip nothing"


def test_dr_grpo_does_not_divide_by_the_standard_deviation():
    algorithm = compare.algorithm_of(tasks.variant("gspo", 0.2, successor="dr_grpo"))
    centred = algorithm.advantages(tensor([3.0, 0, 0, 1, 1, 1]), 3)
    assert centred.tolist() == [2, -1, -1, 0, 0, 0]


@pytest.mark.parametrize("task", ["long", "short", "30 tokens", "world"])
def test_held_out_questions_are_not_trained_on(task):
    questions = tasks.TASKS[task].questions
    held_out = {row["question"] for row in questions("held out", 256)}
    assert len(held_out) > 50
    for seed in range(9):
        assert not held_out & {row["question"] for row in questions(seed, 192)}


PARTS = "algorithm", "loss", "successor", "minibatches"  # of a variant


class TestRuns:
    @pytest.mark.slow
    def test_of_all_experiments_work_and_each_part_has_an_effect(self, tmp_path, monkeypatch):
        """A run has two rollouts of 4 x 4 responses of a model with random weights. The reward is 1
        if the number of different letters is odd."""
        def reward(prompts, completions, answer, **columns):
            return [float(len(set(completion)) % 2) for completion in completions]

        own = dict(max_completion_length=8, learning_rate=1e-2)  # some ratios exceed 2
        questions = [{"question": "Eve?", "answer": "1"}] * 8
        task = tasks.Task(lambda *_: None, lambda *_: questions, own)
        monkeypatch.setattr(tasks, "TASKS", dict.fromkeys(tasks.TASKS, task))
        common = tasks.COMMON | dict(prompts_per_step=4, group_size=4, max_steps=2)
        monkeypatch.setattr(tasks, "COMMON", common)
        monkeypatch.setattr(compare, "COLD", tmp_path)
        monkeypatch.setattr(tasks, "task_reward", reward)
        gradients = {}
        names = [name for name in tasks.EXPERIMENTS if name not in tasks.RETIRED]
        for spec in itertools.chain(*map(tasks.variants_of, names)):
            kind = json.dumps({name: spec.get(name) for name in PARTS})
            if kind not in gradients:
                row = compare.run({"variant": {**spec, "max_steps": 2}, "cold": 0, "seed": 5})
                assert len(row["reward"]) == 2
                assert json.loads(json.dumps(row)) == row
                gradients[kind] = tuple(row["grad_norm"])
        assert len(set(gradients.values())) == len(gradients), "a part has no effect"

    def test_that_exist_are_not_repeated(self, tmp_path):
        path = tmp_path / "runs.jsonl.gz"
        jobs = compare.jobs_of("range_few", 2, 2)
        wanted = compare.missing(jobs + jobs, path)
        assert wanted == jobs and len(jobs) == 12, "each run once"
        another = jobs[-1] | {"variant": tasks.variant("grpo", 0.3)}  # of another experiment
        write(path, [{"log": "runs"} | job for job in [*jobs[:-1], another]])
        assert compare.missing(jobs, path) == jobs[-1:]
        tuned = compare.tuned_jobs(6)
        assert not compare.missing(tuned, tables.LOGS / "learning_rates.jsonl.gz")
        assert compare.missing(tuned, path.with_name("new")) == tuned


# ---- multiplication problems ---------------------------------------------------------------------


def test_held_out_products_are_in_no_training_question():
    questions, held_out = sums.make_questions()
    train, test = ({frozenset(row["factors"]) for row in rows} for rows in (questions, held_out))
    assert len(held_out) == 256 and not train & test
    assert len(train) + len(test) == len(questions) + 256, "no product occurs twice"
    for row in held_out:
        a, b = row["factors"]
        assert int(a) * int(b) == int(row["answer"])
        assert f" {a} boxes of {b} " in row["question"]


def test_only_the_last_number_is_rewarded():
    texts = ["3 * 17 = 51.0 books.", "51 = 3 * 17", ""]
    assert sums.last_number_reward(None, texts, ["51"] * 3) == [1, 0, 0]


@pytest.mark.slow
def test_a_run_has_all_answers_of_both_models_and_is_not_repeated(world, tmp_path, monkeypatch):
    """One small step of the model with random weights."""
    flags = ["--model", str(world / "model"), "--max_steps", "1", "--max_completion_length", "2",
             "--device", "cpu", "--output_dir", str(tmp_path)]
    sums.main(flags)
    asked = sums.TEMPERATURES | {"before_given": [0.0], "after_given": [0.0]}
    files = {tmp_path / f"{when}.jsonl": read(tmp_path / f"{when}.jsonl") for when in asked}
    for rows, temperatures in zip(files.values(), asked.values()):
        assert Counter(row["temperature"] for row in rows) == dict.fromkeys(temperatures, 256)
    (start, _) = read(tmp_path / "training" / "metrics.jsonl")
    assert start["settings"]["eps_low"] == 3e-2
    assert "other values of seed" in one_line(sums.main, *flags, "--seed", "1")
    assert "makes its own questions" in one_line(sums.main, *flags, "--dataset", "my.jsonl")
    monkeypatch.setattr(sums.evaluate.train_math, "evaluate", None)  # must not be called
    sums.main(flags)
    for path, rows in files.items():
        assert read(path) == rows


# ---- the small world of the lesson ---------------------------------------------------------------


def test_the_first_command_of_the_lesson_has_the_settings_of_the_plan():
    assert tiny.FLAGS[tiny.FLAGS.index("--learning_rate") + 1] == lesson_seeds.LEARNING_RATE[1]
    for algorithm in lesson_seeds.RANGES:
        flags = lesson_seeds.clipped(algorithm, lesson_seeds.chosen_range(algorithm))
        assert flags[2:] == tiny.RANGES[algorithm.lower()]


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
        _, table = page.split(head)
        cells = r" ([\d.]*)%? ?\|" * len(meaning)
        shown = re.findall(rf"\| (before|\d+) \|{cells}", table.partition("|  ")[0] + "|")
        assert len(shown) >= 5
        for step, *values in shown:
            for (name, metric), value in zip(meaning, values):
                if value:
                    row = runs[name][0 if step == "before" else int(step)]
                    times = 1 if metric == "response_length" else 100
                    assert f"{times * row[metric]:.1f}" == value, (name, step, metric)
    gspo, one = runs["GSPO"], runs["one update"]
    clipped = {name: statistics.mean(row["clip_fraction"] for row in rows[1:])
               for name, rows in runs.items()}
    for sentence in (
            f"after step 4, `eval_reward` is {one[4]['eval_reward']:.1%}",
            f"in step 16, `reward` is {one[16]['reward']:.1%}",
            f"`log_ratio_std` is {gspo[1]['log_ratio_std']:.3f}",
            f"`log_ratio_std` is {runs['no clip'][1]['log_ratio_std']:.1f} instead of ",
            f"GSPO clips {clipped['GSPO']:.1%} of the tokens, and GRPO {clipped['GRPO']:.1%}"):
        assert sentence in page


def test_the_lesson_shows_where_gspo_helps_and_where_not():
    """The differences are those of tables.md, where some are GRPO minus GSPO. The differences with
    stale rollouts come from the log."""
    page = (TOP / "lesson" / "README.md").read_text(encoding="utf-8")
    section = page.partition("| case | models | GSPO minus GRPO |")[2]
    shown = re.findall(r"^\| .* \| ([+-]\d.*), \w+ \|$", section, re.MULTILINE)
    published = (tables.HERE / "tables.md").read_text(encoding="utf-8").splitlines()
    found = []
    for start, column, is_swapped in [
            ("long | 6 | sampled", 6, False), ("1 epoch, ranges chosen: GRPO", 2, True),
            ("world | 6 | sampled", 6, False),
            ("5e-6 | greedy, 1319 test questions", 2, True)]:
        (line,) = [line for line in published if line.startswith(f"| {start} | ")]
        text = line.strip("| ").split(" | ")[column]
        if is_swapped:
            text = text.translate(str.maketrans("+-", "-+"))
            text = re.sub(r"\((\S+) to (\S+)\)", r"(\2 to \1)", text)
        found.append(text)
    ends = {}
    for row in sorted(tables.logs("measurements")["stale"], key=lambda row: row["world"]):
        ends.setdefault((row["age"], *row["clip"][:2]), []).append(row["accuracy"])
    stale = {(age, low): tables.mean_difference(own, ends[age, "grpo", 0.2])
             for (age, name, low), own in ends.items() if name == "gspo"}
    found.insert(-1, stale[4, 3e-4])
    assert shown == found
    numbers = [tuple(map(float, text.split(" ± "))) for text in stale.values()]
    assert len(numbers) == 12 and all(mean < 0 for mean, _ in numbers)
    assert sum(mean + half < 0 for mean, half in numbers) == 6, "the page says how many"


def test_the_table_of_the_recipe_for_a_laptop_is_that_of_its_logs():
    page = (TOP / "guides" / "own_task.md").read_text(encoding="utf-8")
    logs = tables.logs("own_tasks")
    rows = [line.split(" | ") for line in tables.own_tasks(logs).splitlines()[2:]]
    assert len(rows) >= 5
    for task, solutions, learning_rate, *cells, _, minutes in rows:
        if solutions == "0":
            line = " | ".join([task, *cells, minutes])
        else:
            line = " | ".join([task, learning_rate, *cells[1:4], cells[5]])
        assert line in page
    before, after = ([row["reward"] for row in logs[f"reviews_0/eval_{step}"]] for step in (0, 20))
    assert f"rose from {sum(before) / 70:.1%} to {sum(after) / 70:.1%}" in page
