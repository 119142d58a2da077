"""experiments/qwen/sums.py: questions, reward, arithmetic, and that nothing is done twice."""
import functools
import shutil
from pathlib import Path

import pytest

from common import logs as jsonl
from common.intervals import accuracy_text, gain_text
from common.logs import read, write
from experiments.qwen import sums, sums_range
from tests.conftest import one_line

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results" / "qwen" / "sums"
PAGE = (RESULTS / "table.md").read_text(encoding="utf-8")


class TestQuestions:
    def test_held_out_products_are_in_no_training_question(self):
        questions, held_out = sums.make_questions()
        assert len(held_out) == 256
        train = {frozenset(row["factors"]) for row in questions}
        test = {frozenset(row["factors"]) for row in held_out}
        assert not train & test
        assert len(train) + len(test) == len(questions) + 256, "no product occurs twice"

    def test_the_answer_is_the_product_of_the_numbers_in_the_question(self):
        for row in sums.make_questions()[1]:
            a, b = row["factors"]
            assert int(a) * int(b) == int(row["answer"])
            assert f" {a} boxes of {b} " in row["question"]


@pytest.mark.parametrize("text, reward", [
    ("3 * 17 = 51", 1.0),
    ("3 * 17 = 51.0 books.", 1.0),
    ("51 = 3 * 17", 0.0),
    ("3 * 17 = 52", 0.0),
    ("", 0.0)])
def test_only_the_last_number_is_rewarded(text, reward):
    assert sums.last_number_reward(None, [text], ["51"], factors=[["3", "17"]]) == [reward]


def log(folder, **settings):
    """Writes the log of a training run with one rollout."""
    (folder / "training").mkdir(parents=True, exist_ok=True)
    write(folder / "training" / "metrics.jsonl", [
        {"step": 0, "settings": settings}, {"step": 1, "reward": 0.5, "seconds": 90}])


def logs(folder, before, after, seed=0):
    """Writes the logs of a run. before, after: {temperature: accuracy on 4 held-out questions}."""
    log(folder, algorithm="gspo", seed=seed, eps_low=0.03)
    for when, shares in (("before", before), ("after", after)):
        rows = []
        for temperature, share in shares.items():
            for i in range(4):
                row = {"temperature": temperature, "tokens": 9, "response": "5", "question": i}
                rows.append(row | {"reward": float(i < 4 * share)})
        write(folder / f"{when}.jsonl", rows)
    return folder


def contents(folder):
    """{path: bytes} of all files in the folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


BEFORE = {0.0: 0.25, 0.3: 0.5, 0.6: 0.25, 1.0: 0.0}


class TestShow:
    def test_compares_with_the_pre_trained_model_at_its_best_temperature(self, tmp_path, capsys):
        logs(tmp_path, BEFORE, {0.0: 0.75, 1.0: 0.5})
        sums.main(["--show", str(tmp_path)])
        text = capsys.readouterr().out
        assert (tmp_path / "table.md").read_text().strip() == text.strip()
        assert "after at 0.0 minus before at 0.0: +50.0%" in text
        assert "after at 0.0 minus before at 0.3: +25.0%" in text
        assert "after at 1.0 minus before at 1.0: +50.0%" in text
        assert "after at 1.0 minus before at 0.3: +0.0%" in text
        assert "after | greedy | 75.0%" in text
        assert "1 rollouts, 2 minutes" in text
        assert (tmp_path / "sums.png").stat().st_size > 5000

    def test_of_several_runs_writes_only_a_picture_beside_them(self, tmp_path, capsys):
        runs = [
            logs(tmp_path / "gspo_0", BEFORE, {0.0: 0.75, 1.0: 0.5}),
            logs(tmp_path / "gspo_1", BEFORE, {0.0: 1.0, 1.0: 0.0}, seed=1),
            logs(tmp_path / "unfinished", BEFORE, {}, seed=2),
        ]
        before = contents(tmp_path)
        sums.main(["--show", *map(str, runs)])
        after = contents(tmp_path)
        assert len(after.pop(tmp_path / "compared.png")) > 5000
        assert after == before
        lines = capsys.readouterr().out.strip().split("\n")
        assert lines[-1] == "mean of 2 | gspo 0.03 | - | 25.0% | 87.5% | 25.0% | - | - | -"

    def test_with_another_dataset_is_one_clear_line(self):
        assert "makes its own questions" in one_line(sums.main, "--dataset", "my.jsonl")


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A folder with one folder of logs per published run."""
    folder = tmp_path_factory.mktemp("logged")
    jsonl.unpack(RESULTS / "logs.jsonl", folder)
    return folder


@pytest.fixture(scope="module")
def flags(world):
    """The flags of a run with one small step, on the model with random weights."""
    return ["--model", str(world / "model"), "--max_steps", "1", "--max_completion_length", "2"]


@pytest.fixture(scope="module")
def run(flags, tmp_path_factory):
    """The folder of this run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    sums.main([*flags, "--output_dir", str(folder)])
    return folder


def test_a_run_is_resumed_and_no_question_is_asked_twice(tmp_path, monkeypatch, flags):
    asked = []
    trained = []

    def load(name, device):
        asked.append(str(name))
        return None, None

    def sample(model, tokenizer, questions, group_size, temperature, cfg, **replaced):
        asked.append(temperature)
        if temperature == 0.6 and len(asked) < 5:
            raise KeyboardInterrupt
        n = len(questions)
        return sums.train_math.Rollout(None, [[1, 2]] * n, ["3 * 17 = 51"] * n, None)

    def train(argv, reward):
        trained.append(sums.train_math.parse_settings(argv))
        log(tmp_path, **vars(trained[-1]))

    monkeypatch.setattr(sums.train_math, "load", load)
    ask = functools.partial(sums.train_math.evaluate, sample=sample)
    monkeypatch.setattr(sums.train_math, "evaluate", ask)
    monkeypatch.setattr(sums.train_math, "main", train)
    command = [*flags, "--output_dir", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        sums.main(command)
    sums.main(command)
    trained_model = str(tmp_path / "training" / "model")
    model = flags[1]
    assert asked == [model, 0.0, 0.3, 0.6, model, 0.6, 1.0, trained_model, 0.0, 1.0]
    assert len(trained) == 2, "the run was resumed, and nothing was left to do"
    sums.main(command)
    assert len(asked) == 10
    assert len(trained) == 2
    assert trained[0].eps_low == 3e-2
    assert trained[0].max_steps == 1
    assert trained[0].dataset == str(tmp_path / "data")
    assert trained[0].output_dir == str(tmp_path / "training")
    assert len((tmp_path / "before.jsonl").read_text().splitlines()) == 4 * 256


class TestFolder:
    def test_has_all_answers_of_both_models(self, run):
        for when, temperatures in sums.TEMPERATURES.items():
            answers = read(run / f"{when}.jsonl")
            assert [row["temperature"] for row in answers] == [
                temperature for temperature in temperatures for _ in range(256)]
        assert (run / "table.md").exists()

    @pytest.mark.parametrize("name, value", [
        ("model", "another"), ("seed", "1"), ("algorithm", "grpo"), ("max_steps", "2")])
    def test_of_a_run_with_another_setting_is_refused(self, run, flags, name, value):
        before = contents(run)
        line = one_line(sums.main, *flags, "--output_dir", run, f"--{name}", value)
        assert f"{run} has another {name}" in line
        assert contents(run) == before

    def test_with_a_copied_before_only_needs_the_answers_after(
            self, run, tmp_path, monkeypatch, flags, capsys):
        shutil.copy(run / "before.jsonl", tmp_path)
        sums.main([*flags, "--output_dir", str(tmp_path), "--seed", "1"])
        out = capsys.readouterr().out
        assert "after, temperature 1.0" in out and "before, temperature" not in out
        assert (tmp_path / "before.jsonl").read_bytes() == (run / "before.jsonl").read_bytes()

    @pytest.mark.parametrize("wrong", [
        ["--max_step", "2"], ["--minibatches", "5"], ["--model", "no/such/model"]])
    def test_is_not_made_for_bad_flags(self, tmp_path, flags, wrong):
        one_line(sums.main, *flags, "--output_dir", tmp_path / "run", *wrong)
        assert not list(tmp_path.iterdir())


def test_grpo_keeps_its_own_range(tmp_path, monkeypatch, flags):
    seen = []
    monkeypatch.setattr(sums.evaluate, "ask", lambda *arguments, **more: seen.append(arguments[4]))
    monkeypatch.setattr(sums.train_math, "main", lambda argv, reward: None)
    monkeypatch.setattr(sums, "show", lambda folders: None)
    sums.main([*flags, "--output_dir", str(tmp_path), "--algorithm", "grpo"])
    assert seen[0].clip_range()[0] == 0.2


def test_the_page_has_a_line_for_each_run(logged):
    """The line has the greedy accuracy, its difference from the pre-trained model, without and with
    the calculation given, and the sampled accuracy."""
    names = [f"gspo_wide_{seed}" for seed in range(6)]
    names += [f"{algorithm}_{seed}" for algorithm in ("grpo", "gspo") for seed in range(3)]
    for name in names:
        _, _, answers = sums.load_run(logged / name)
        after = sums.correct(answers["after", 0.0])
        sampled, *_ = accuracy_text(sums.correct(answers["after", 1.0])).split(" ")
        figures = [accuracy_text(after), f"| {sampled} |"]
        for before in answers["before", 0.0], read(logged / name / "before_given.jsonl"):
            change, _ = gain_text(sums.correct(before), after).split(", p = ")
            figures.append(change.replace("95%: ", "").replace("%", ""))
        found = [line for line in PAGE.splitlines() if f"`{name}` |" in line]
        for figure in figures:
            assert figure in found[0]


class TestRange:
    @pytest.fixture
    def trained(self, monkeypatch):
        """The arguments with which train() is called."""
        calls = []

        def train(cfg, model, tokenizer, questions, held_out, reward):
            calls.append((cfg, questions, held_out, reward))
            start = {"settings": vars(cfg), "eval_reward": 0.25, "eval_reward_interval": (0.2, 0.3)}
            step = {"reward": 0.5, "log_ratio_std": 0.1, "clip_fraction": 0.2, "seconds": 60}
            return [start, step, start | step]

        monkeypatch.setattr(sums.train_math, "load", lambda name, device: (name, None))
        monkeypatch.setattr(sums.train_math, "train", train)
        return calls

    def call(self, monkeypatch, *argv):
        monkeypatch.setattr("sys.argv", ["sums_range.py", *map(str, argv)])
        sums_range.main()

    def test_reported_questions_are_neither_trained_on_nor_asked(self, trained):
        sums_range.run(("gspo", 3e-3, 4e-3, 1e-6), "MODEL", 3)
        cfg, questions, held_out, reward = trained[0]
        assert reward is sums.last_number_reward
        assert cfg.output_dir is None
        assert cfg.seed == 3
        factors = [{frozenset(row["factors"]) for row in rows}
                   for rows in (questions, held_out, sums.make_questions()[1])]
        assert len(held_out) == cfg.eval_size == 256
        assert sum(map(len, factors)) == len(set.union(*factors)), "no question is in two sets"

    def test_a_variant_is_run_once(self, trained, tmp_path, monkeypatch):
        self.call(monkeypatch, "--model", "MODEL", "--output_dir", tmp_path)
        arms = [(cfg.algorithm, cfg.eps_low, cfg.eps_high, cfg.learning_rate)
                for cfg, *_ in trained]
        assert arms == list(sums_range.ARMS.values())
        (tmp_path / "grpo_0.2.jsonl").unlink()
        self.call(monkeypatch, "--model", "MODEL", "--output_dir", tmp_path)
        assert len(trained) == len(arms) + 1
        assert trained[-1][0].algorithm == "grpo"

    def test_the_page_has_the_table_of_the_logs(self, logged):
        assert sums_range.table(logged / "range") in PAGE

    def test_of_another_model_or_seed_is_refused(self, trained, tmp_path, monkeypatch):
        self.call(monkeypatch, "--model", "MODEL", "--output_dir", tmp_path)
        before = contents(tmp_path)
        for flag, value in ("--model", "ANOTHER"), ("--seed", "4"):
            with pytest.raises(SystemExit, match="another --model or --seed"):
                self.call(monkeypatch, "--model", "MODEL", "--output_dir", tmp_path, flag, value)
        assert contents(tmp_path) == before
