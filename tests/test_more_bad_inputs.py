"""Twenty further wrong inputs, written down before the code that answers them.

Each ends in one clear line, or in an exception whose message is one clear line. The last class has
inputs that were changed or lost silently.
"""

import datetime
import json
import os
from unittest import mock

import pytest
import torch

import gspo
import support.runs
import train_math
from common.logs import read
from support.rewards import RewardError
from tests.conftest import one_line, parity_reward, run, settings, sums, write_jsonl


def table(name, text):
    def write(folder):
        (folder / name).write_text(text, encoding="utf-8")
        return ["--dataset", str(folder / name)]

    return write


def old_setting(folder):
    """A run that was saved by a version which had another setting."""
    path = folder / "run" / "state.pt"
    cfg = settings(output_dir=str(folder / "run"))
    rows = [{"step": 0, "settings": support.runs.fingerprint(cfg, []) | {"old_flag": 1}}]
    torch.save({"rows": rows, "results": []}, path)
    return []


def state_of_another_program(folder):
    torch.save([1, 2, 3], folder / "run" / "state.pt")
    return []


def many_processes(folder):
    os.environ["WORLD_SIZE"] = "2"
    return []


LINES = {  # input: (what prepares it and returns flags, words of the one line)
    "an empty jsonl file": (table("q.jsonl", ""), ["q.jsonl", "no train part"]),
    "an empty file with brackets in its name": (table("q[1].jsonl", ""), ["no train part"]),
    "a number instead of a row": (
        table("q.jsonl", '{"question": "?", "answer": "1"}\n5\n'), ["row 2", "5"]),
    "a list of numbers": (table("q.json", "[1, 2]"), ["q.json", "form"]),
    "a csv row with a cell too many": (
        table("q.csv", "question,answer\nHow many, then?,1\nWho?,2\n"), ["row 1", "form"]),
    "a line that is not JSON": (table("q.jsonl", "question: 1"), ["line 1 is not JSON"]),
    "a folder without any data": (lambda folder: ["--dataset", str(folder / "run")], ["--dataset"]),
    "a state of another version": (old_setting, ["old_flag"]),
    "a state of another program": (state_of_another_program, ["state.pt cannot be read"]),
    "two processes": (many_processes, ["several GPUs are not supported"]),
}


def loss_that_raises(*arguments, **more):
    raise KeyError("my_name")


PARTS = {  # a part: (the part, words of the one line)
    "a loss that raises": ({"loss": loss_that_raises}, ["the loss was tried", "my_name"]),
    "a loss for each response": (
        {"loss": lambda log_probs, *rest, **more: log_probs.sum(1)}, ["the loss", "one number"]),
    "advantages that raise": (
        {"group_advantages": loss_that_raises}, ["group_advantages was tried", "my_name"]),
    "advantages of a whole group": (
        {"group_advantages": lambda rewards, size: rewards[:1]}, ["group_advantages", "(1,)"]),
    "a set of rewards": (
        {"reward": lambda completions, **columns: {0.0, 1.0}}, ["the reward", "{0.0, 1.0}"]),
}


@pytest.mark.parametrize("name", LINES)
def test_ends_in_one_line(command, tmp_path, name):
    prepare, words = LINES[name]
    (tmp_path / "run").mkdir()
    with mock.patch.dict(os.environ):
        flags = ["--output_dir", tmp_path / "run", *prepare(tmp_path)]
        if name == "a folder without any data":
            flags[1] = tmp_path / "other"
        line = one_line(train_math.main, *command, *flags, reward=parity_reward)
    for word in words:
        assert word in line


@pytest.mark.parametrize("name", PARTS)
def test_a_part_ends_in_one_line_before_any_step(command, tmp_path, name):
    parts, words = PARTS[name]
    parts = {"reward": parity_reward} | parts
    line = one_line(train_math.main, *command, "--output_dir", tmp_path / "run", **parts)
    for word in words:
        assert word in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class TestPython:
    def test_settings_with_an_unknown_algorithm(self):
        with pytest.raises(ValueError, match="GSPO is none of gspo, "):
            train_math.Settings(algorithm="GSPO")

    def test_an_algorithm_with_an_unknown_ratio(self, monkeypatch):
        mine = train_math.Algorithm(gspo.gspo_loss, 1e-3, 1e-3, ratio="seq")
        monkeypatch.setitem(train_math.ALGORITHMS, "mine", mine)
        with pytest.raises(ValueError, match="'seq'"):
            train_math.Settings(algorithm="mine")

    def test_a_model_whose_weights_are_frozen(self, fresh):
        fresh[0].requires_grad_(False)
        for function in train_math.train, train_math.check_model:
            arguments = [settings(), *fresh, sums(8)]
            if function is train_math.check_model:
                arguments = [*fresh, sums(8), settings()]
            with pytest.raises(ValueError, match="frozen"):
                function(*arguments, reward=parity_reward)

    @pytest.mark.parametrize("eps_high", [1.0004, 1.1])
    def test_an_upper_bound_instead_of_a_distance(self, eps_high):
        ones = torch.ones(2)
        with pytest.raises(ValueError, match="not the bound"):
            gspo.clipped_objective(ones, ones, 0.2, eps_high)
        gspo.clipped_objective(ones, ones, 0.2, 1.0)
        gspo.clipped_objective(ones, ones, 0.2, 1.2)

    @pytest.mark.parametrize("loss", [gspo.gspo_loss, gspo.gspo_token_loss, gspo.grpo_loss])
    def test_no_responses(self, loss):
        nothing = torch.zeros(0, 3)
        with pytest.raises(ValueError, match="denominator"):
            loss(nothing, nothing, torch.zeros(0), nothing)
        assert loss(nothing, nothing, torch.zeros(0), nothing, denominator=4) == 0


class TestNothingIsLostOrChanged:
    @pytest.mark.parametrize("ending", ["jsonl", "csv"])
    def test_answers_stay_as_they_are_written(self, tmp_path, ending):
        answers = ["26", "007", "NA", "TRUE", "null", "2024-01-02", ""]
        path = tmp_path / f"q[0].{ending}"
        rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        if ending == "csv":
            lines = ["question,answer", *(f"{row['question']},{row['answer']}" for row in rows)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            write_jsonl(path, rows)
        cfg = settings(dataset=str(path), eval_size=0)
        assert train_math.load_questions(cfg, parity_reward)[0] == rows

    def test_a_run_with_answers_of_any_kind_is_resumed(self, fresh, tmp_path):
        questions = [row | {"answer": datetime.date(2024, 1, 2)} for row in sums(8)]
        held_out = [{"question": "?", "answer": torch.ones(2).numpy()},
                    {"question": "??", "answer": {1, 2}}]
        cfg = settings(output_dir=str(tmp_path), max_steps=1)
        rows = train_math.train(cfg, *fresh, questions, held_out, reward=parity_reward)
        state = train_math.load_state(cfg, questions)
        assert len(state["rows"]) == len(rows) == 2
        assert "[1. 1.]" in state["results"][0]["gold"]

    def test_a_reward_may_change_the_directory(self, command, tmp_path, monkeypatch):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)

        def reward(prompts, completions, **columns):
            os.chdir(tmp_path / "elsewhere")
            return parity_reward(prompts, completions)

        train_math.main([*command, "--output_dir", "runs/mine"], reward)
        assert (tmp_path / "runs" / "mine" / "state.pt").exists()
        assert not list((tmp_path / "elsewhere").iterdir())

    @pytest.mark.parametrize("part", ["on_step", "loss", "group_advantages", "rollout"])
    def test_what_was_trained_is_saved_if_a_part_raises(self, fresh, tmp_path, part):
        """Also between two saves. A loss raises in the first micro-batch of a step here."""
        calls = []
        original = {
            "on_step": lambda row: None,
            "loss": gspo.gspo_loss,
            "group_advantages": gspo.group_advantages,
            "rollout": train_math.rollout,
        }[part]

        def raises_later(*arguments, **more):
            calls.append(1)
            if len(calls) == 4:
                raise OSError("my disk")
            return original(*arguments, **more)

        cfg = settings(output_dir=str(tmp_path), save_steps=100, minibatches=1,
                       micro_batch_tokens=10**6)
        parts = {"reward": parity_reward, part: raises_later}
        with pytest.raises(OSError, match="my disk"):
            train_math.train(cfg, *fresh, sums(8), **parts)
        state = torch.load(tmp_path / "state.pt")
        assert state["rows"][-1]["step"] == 3
        for name, weight in fresh[0].state_dict().items():
            assert torch.equal(weight, state["model"][name])

    def test_half_a_step_is_not_saved(self, fresh, tmp_path):
        """The second minibatch of a step raises, when the weights have moved already."""
        calls = []

        def loss(*arguments, **more):
            calls.append(1)
            if len(calls) == 6:
                raise OSError("my disk")
            return gspo.gspo_loss(*arguments, **more)

        cfg = settings(output_dir=str(tmp_path), save_steps=1, micro_batch_tokens=10**6)
        with pytest.raises(OSError):
            train_math.train(cfg, *fresh, sums(8), reward=parity_reward, loss=loss)
        assert torch.load(tmp_path / "state.pt")["rows"][-1]["step"] < 2

    def test_a_run_may_be_saved_more_often_than_it_is_evaluated(self, command, tmp_path):
        rows = run(command, tmp_path / "a", "--save_steps", "1", "--eval_steps", "3")
        assert [row["step"] for row in rows if "eval_reward" in row] == [0, 3, 6]
        with mock.patch.object(support.runs.torch, "save", wraps=torch.save) as save:
            run(command, tmp_path / "b", "--save_steps", "1", "--eval_steps", "3")
        assert save.call_count == 7

    def test_a_reward_may_compute_gradients_in_the_trial(self, fresh):
        def reward(prompts, completions, **columns):
            weight = torch.ones(2, requires_grad=True)
            weight.sum().backward()
            return parity_reward(prompts, completions)

        train_math.check_model(*fresh, sums(4), settings(), reward=reward)

    def test_an_error_names_the_line_of_the_user(self):
        def reward(prompts, completions, **columns):
            return json.loads("no JSON")  # this line

        with pytest.raises(RewardError) as raised:
            train_math.score(reward, sums(1), ["x"])
        number = reward.__code__.co_firstlineno + 1
        assert f"{__file__}, line {number}" in str(raised.value)

    def test_a_dataset_of_the_library_can_be_trained_on(self, fresh):
        from datasets import Dataset

        questions = Dataset.from_list(sums(8))
        listed = train_math.train(settings(max_steps=1), *fresh, sums(8), reward=parity_reward)
        rows = train_math.train(settings(max_steps=1), *fresh, questions, reward=parity_reward)
        assert rows[0]["settings"]["questions"] == listed[0]["settings"]["questions"]

    def test_a_model_in_training_mode_passes_the_trial(self, fresh):
        train_math.check_model(fresh[0].train(), fresh[1], sums(4), settings(),
                               reward=parity_reward)
        assert not fresh[0].training

    def test_the_first_prompt_is_printed(self, command, tmp_path, capsys):
        rows = run(command, tmp_path / "a", "--instruction", "Count!")
        assert "has 0 figs?" in capsys.readouterr().out
        assert len(read(tmp_path / "a" / "metrics.jsonl")) == len(rows)

    def test_a_user_may_bring_an_optimizer(self, fresh):
        optimizer = torch.optim.SGD(fresh[0].parameters(), lr=1.0)
        train_math.train(settings(max_steps=2, learning_rate=0.5), *fresh, sums(8),
                         reward=parity_reward, optimizer=optimizer)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)

    def test_a_reward_cannot_overwrite_a_metric_of_the_step(self, fresh):
        def reward(prompts, completions, log_metric, **columns):
            log_metric("step", 7)
            log_metric("mine", 8)
            return parity_reward(prompts, completions)

        rows = train_math.train(settings(max_steps=1), *fresh, sums(8), reward=reward)
        assert (rows[1]["step"], rows[1]["mine"]) == (1, 8)

    @pytest.mark.parametrize("name", ["cut", "completion_ids", "completions"])
    def test_a_column_with_the_name_of_an_argument_is_named(self, fresh, name):
        questions = [row | {name: 1} for row in sums(4)]
        with pytest.raises(RewardError, match=f"rename the column {name} "):
            train_math.train(settings(max_steps=1), *fresh, questions, reward=parity_reward)

    def test_a_sample_of_the_user_gets_all_parts(self, fresh):
        got = []

        def sample(*arguments, **parts):
            got.append(parts["reward"])
            return train_math.sample(*arguments, **parts)

        train_math.train(settings(max_steps=1), *fresh, sums(8), sums(2), sample=sample)
        assert got == [train_math.correctness_reward] * 3
