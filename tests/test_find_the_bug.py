"""The third homework: logs of silent bugs, and the exercise for a class that is made from them."""
import json
import re

import pytest

from homework import find_the_bug
from tests.conftest import TOP
from tools.logs import read


def signatures(rows):
    """The bugs whose signature all these rollouts have. A bug is named by its first words."""
    shown = {
        "advantages over": lambda row: row["equal_reward_groups"] == 0,
        "advantages do": lambda row: row["reward"] < 0.27 and row["grad_norm"] < 0.6,
        "zero_grad": lambda row: 1 < row["grad_norm"] < 2 and row["loss"] ** 2 > 1e-12,
        "GRPO": lambda row: row["clip_fraction"] < 0.21,
        "the ratio": lambda row: abs(row["loss"]) < 1e-7,
        "no root": lambda row: row["grad_norm"] > 2}
    return [start for start, is_shown in shown.items() if all(map(is_shown, rows))]


def check_signatures(logs, answers):
    """Each log has the signature of its bug, and of no other. answers: {letter: bug}."""
    assert list(answers) == list(find_the_bug.LETTERS)
    for letter, name in answers.items():
        rows = logs[letter][1:]
        assert [row["step"] for row in rows] == list(range(1, 9))
        found = signatures(rows)
        assert len(found) == (name != "nothing"), name
        assert name.startswith("".join(found)), name


class TestPublished:
    def test_gives_nothing_away_in_the_settings(self):
        """The first rows are the same: settings, and the accuracy before training."""
        firsts = {json.dumps(rows[0]) for rows in find_the_bug.published().values()}
        assert len(firsts) == 1
        line = firsts.pop()
        assert not re.search("eps_|/|temperature|seed", line)

    def test_shows_each_bug_where_the_answers_say(self):
        check_signatures(find_the_bug.published(), find_the_bug.answers())

    def test_has_its_answers_in_the_page(self):
        page = (TOP / "homework" / "find_the_bug.md").read_text(encoding="utf-8")
        exercise, answers = page.split("<details><summary>Answers")
        for letter, name in list(find_the_bug.answers().items())[:7]:
            assert f"| {name} | |" in exercise
            assert f"| {letter} | {name} |" in answers
        explained = re.findall(r"^- \*\*(.)\*\*", answers, re.MULTILINE)
        assert explained[:6] == list("acdefg")  # b is right


@pytest.mark.slow
def test_each_bug_changes_the_metrics_of_a_short_run(tmp_path, monkeypatch):
    short = {"max_steps": 2, "prompts_per_step": 4, "group_size": 8, "minibatches": 4, "epochs": 2,
             "micro_batch_tokens": 512, "eval_size": 0}
    flags = [f"--{name}={value}" for name, value in short.items()]
    monkeypatch.setattr(find_the_bug, "FLAGS", [*find_the_bug.FLAGS, *flags])
    world = find_the_bug.tiny.world(0).resolve()
    monkeypatch.setattr(find_the_bug.tiny, "world", lambda seed: world)
    monkeypatch.chdir(tmp_path)
    rows = {name: map(find_the_bug.shown, find_the_bug.run(name)[1:]) for name in find_the_bug.BUGS}
    metrics = {name: list(shown) for name, shown in rows.items()}
    assert [name for name in metrics if metrics[name] == metrics["nothing"]] == ["nothing"]


def key_of(path):
    """{letter: bug} of a key."""
    return dict(re.findall(r"^\| ([a-h]) \| ([^|]*) \|", path.read_text(), re.MULTILINE))


@pytest.fixture
def no_picture(monkeypatch):
    """The picture, which takes seconds, is an empty file."""
    monkeypatch.setattr(find_the_bug, "draw", lambda logs, path: path.write_bytes(b""))


@pytest.mark.usefixtures("no_picture")
class TestHandOut:
    def test_shuffles_the_letters_and_keeps_the_answers_beside_it(self, tmp_path, capsys):
        keys = []
        for shuffle in "1", "2":
            folder = tmp_path / f"class{shuffle}"
            find_the_bug.main(["--handout", str(folder), "--shuffle", shuffle])
            assert str(folder) in capsys.readouterr().out
            logs = {f"{letter}.jsonl" for letter in find_the_bug.LETTERS}
            assert {path.name for path in folder.iterdir()} == {"exercise.md", "logs.png"} | logs
            key = key_of(tmp_path / f"class{shuffle}-key.md")
            keys.append(key)
            assert list(key.values()).count("nothing") == 2
            check_signatures({letter: read(folder / f"{letter}.jsonl") for letter in key}, key)
        assert keys[0] != keys[1]
        text = (folder / "exercise.md").read_text()
        for name in find_the_bug.answers().values():
            assert f"| {name} | | |" in text
        for metric, why in find_the_bug.REASONS.values():
            assert why not in text and f"| {metric} |" not in text

    def test_overwrites_nothing(self, tmp_path, capsys):
        flags = ["--handout", str(tmp_path / "class"), "--shuffle", "1"]
        (tmp_path / "class-key.md").write_text("mine")
        with pytest.raises(SystemExit) as stop:
            find_the_bug.main(flags)
        assert stop.value.code == 2 and "class-key.md exists already" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["class-key.md"]

    def test_makes_new_runs_with_a_seed_each(self, tmp_path, monkeypatch):
        """Each run is replaced by a published log whose loss is set to the seed."""
        made = []

        def run(name, seed):
            made.append((name, seed))
            rows = find_the_bug.published()["b"]
            for row in rows[1:]:
                row["loss"] = float(seed)
            rows[0]["settings"] |= {"seed": seed, "eps_high": 0.27}
            return rows

        monkeypatch.setattr(find_the_bug, "run", run)
        key = find_the_bug.hand_out(tmp_path / "class", 4, seed=11)
        assert [seed for _, seed in made] == list(range(11, 19))
        for letter, name in key_of(key).items():
            rows = read(tmp_path / "class" / f"{letter}.jsonl")
            assert (name, rows[1]["loss"]) in made
            assert not re.search("seed|eps_", json.dumps(rows[0]))
