"""train_math.py with a reward, an algorithm or a training loop of the user's own."""

import copy
import dataclasses
import datetime
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch

import gspo
import support.saving
import train_math
from support.rewards import RewardError
from support.sampling import check_rollout
from tests.conftest import (
    assert_same,
    at_call,
    block,
    check,
    constant_reward,
    contents,
    names_in,
    parity_reward,
    refused,
    rollout_of,
    run,
    settings,
    sums,
    train,
    weights_of,
    without_clocks,
    write_jsonl,
)
from tools.logs import read


class TestScore:
    @pytest.mark.parametrize("returned", [
        (1, 2.5), torch.tensor([1, 2.5]), torch.tensor([1, 2.5]).numpy(), map(float, (1, 2.5))])
    def test_gives_a_reward_copies_of_all_columns_and_takes_any_sequence_of_numbers(
            self, returned):
        rows = [{"question": "a?", "tags": [1]}, {"question": "b?", "tags": [2]}]

        def reward(prompts, completions, tags, **columns):
            assert (prompts, completions, tags) == (["a?", "b?"], ["x", "y"], [[1], [2]])
            assert columns == {"question": prompts}
            tags[0].clear()
            return returned

        rewards = train_math.score(reward, rows, ["x", "y"])
        assert rewards.tolist() == [1, 2.5] and rewards.dtype == torch.float32
        assert rows[0]["tags"] == [1]


def a_reward_that_raises(prompts, completions, **columns):
    return json.loads("no JSON")  # raises in json, but this line is named


FAULTY_REWARDS = (
    None, [None, None], 1.0, [1.0], [1.0] * 3, [0.0, math.nan], [-math.inf, 0.0], [[1.0], [1.0]],
    ["good", "good"], "01", {0: 1.0, 1: 0.0}, {0.0, 1.0})
RAISES = a_reward_that_raises.__code__


class TestAFaultyReward:
    @pytest.mark.parametrize("value", FAULTY_REWARDS, ids=repr)
    def test_ends_in_one_line_before_the_first_rollout(self, command, tmp_path, value):
        """The trial has two texts."""
        def faulty_reward(**columns):
            return value

        line = self.line(command, tmp_path, faulty_reward)
        assert f"faulty_reward returned {value!r}" in line and "2 finite numbers" in line

    @pytest.mark.parametrize("reward, said", [
        (a_reward_that_raises, f"in {__file__}, line {RAISES.co_firstlineno + 1}"),
        (a_reward_that_raises, "the reward function a_reward_that_raises raised JSONDecodeError("),
        (lambda prompts, answers: [0.0], "unexpected keyword argument"),
    ])
    def test_that_raises_is_named_too(self, command, tmp_path, reward, said):
        assert said in self.line(command, tmp_path, reward)

    @pytest.mark.parametrize("name", ["reward", "step", "entropy", "notes", "eval_mine"])
    def test_that_logs_a_metric_with_a_name_that_is_taken_is_refused(self, command, tmp_path, name):
        def reward(prompts, completions, log_metric, **columns):
            log_metric(name, 1)
            return parity_reward(prompts, completions)

        assert f"the name {name} is taken" in self.line(command, tmp_path, reward)

    def line(self, command, tmp_path, reward):
        def generate(model, prompts, group_size, max_length, *rest):
            assert len(prompts) == 2 and max_length == 8, "the long work has begun"
            return train_math.generate(model, prompts, group_size, max_length, *rest)

        line = refused(command, tmp_path / "a", reward=reward, generate=generate)
        assert names_in(tmp_path / "a") == {"lock"}
        return line

    def test_in_a_later_step_is_shown_and_the_run_can_be_resumed_from_its_last_save(
            self, command, whole, tmp_path):
        """In step 4 of 6, after two calls for evaluations and one for the trial. The last save was
        after step 2."""
        reward = at_call(7, parity_reward, OSError("HTTP 503"))
        line = refused(command, tmp_path / "a", reward=reward)
        assert "raised OSError('HTTP 503') in " in line and "What was saved is intact" in line
        state = torch.load(tmp_path / "a" / "state.pt")
        assert [row["step"] for row in state["rows"]] == [0, 1, 2]
        run(command, tmp_path / "a")
        assert_same(whole, tmp_path / "a")


OWN_ALGORITHM = block("CONTRIBUTING.md", "cispo").replace("train_math.main()", "import os") + """

def reward(prompts, completions, level, **columns):
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    digits = [sum(c.isdigit() for c in text) for text in completions]
    return [float((d + n) % 2) for d, n in zip(digits, level)]


train_math.main(reward=reward)
"""


class TestAnAlgorithm:
    @pytest.mark.slow
    def test_in_a_script_from_outside_trains_with_its_own_clip_range(self, command, tmp_path):
        """The user's file runs as a script, with its own reward and algorithm, beside copies of
        train_math.py and what it needs, and on a console that cannot show every character. The
        reward changes the directory."""
        for module in train_math, gspo:
            shutil.copy(module.__file__, tmp_path)
        ignored = shutil.ignore_patterns("__pycache__")
        folder = os.path.dirname(support.saving.__file__)
        shutil.copytree(folder, tmp_path / "support", ignore=ignored)
        (tmp_path / "own.py").write_text(OWN_ALGORITHM)
        rows = [{"question": f"有 {i}?", "level": i} for i in range(10)]
        data = write_jsonl(tmp_path / "own.jsonl", rows)
        flags = ["--dataset", data, "--max_steps", "2", "--learning_rate", "0.01", "--algorithm",
                 "cispo", "--output_dir", "runs/own"]
        done = subprocess.run(
            [sys.executable, "own.py", *command, *flags], cwd=tmp_path, capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": "cp1252"})
        assert done.returncode == 0, done.stderr
        assert b"8 questions and 2 held-out ones" in done.stdout and b"? -> " in done.stdout
        assert b"model is the model after step 2" in done.stdout
        assert b"Traceback" not in done.stderr
        rows = read(tmp_path / "runs" / "own" / "metrics.jsonl")
        assert [rows[0]["settings"][name] for name in ("eps_low", "eps_high")] == [1.0, 4.0]
        assert len(rows) == 3 and rows[2]["eval_questions"] == 2
        assert "eval_reward_interval" in rows[2] and "eval_last_number" not in rows[2]
        assert rows[2]["log_ratio_std"] > 0
        evaluation = tmp_path / "runs" / "own" / "eval_0.jsonl"
        assert "有 9?" in evaluation.read_text(encoding="utf-8"), "other alphabets stay readable"

    def test_with_a_wrong_clip_range_or_name_is_refused(self, monkeypatch):
        row = train_math.ALGORITHMS["gspo"]._replace(eps_low=1.5)
        monkeypatch.setitem(train_math.ALGORITHMS, "own", row)
        with pytest.raises(ValueError, match="eps_low 1.5"):
            settings(algorithm="own")
        with pytest.raises(ValueError, match="GSPO is none of gspo, "):
            settings(algorithm="GSPO")

    @pytest.mark.parametrize("ratio", ["tokens", "Token", "", None, "geometric"])
    def test_with_another_ratio_is_refused(self, monkeypatch, ratio):
        row = train_math.Algorithm(gspo.gspo_loss, 0.1, 0.1, ratio=ratio)
        monkeypatch.setitem(train_math.ALGORITHMS, "own", row)
        with pytest.raises(ValueError, match=f"ratio={ratio!r}.*'sequence' or 'token'"):
            settings(algorithm="own")


class TestTrain:
    def test_a_model_whose_weights_are_frozen_is_refused(self, fresh):
        fresh[0].requires_grad_(False)
        with pytest.raises(ValueError, match="frozen"):
            train(fresh)
        with pytest.raises(ValueError, match="frozen"):
            check(*fresh)

    def test_without_questions_is_refused(self, fresh):
        with pytest.raises(ValueError, match="no questions"):
            train(fresh, [])

    def test_with_numbers_of_numpy_and_paths_can_be_resumed(self, fresh, tmp_path):
        number = torch.tensor(1e-3, dtype=torch.float64).numpy()[()]
        cfg = settings(output_dir=tmp_path, model=tmp_path, learning_rate=number, max_steps=1)
        train_math.train(cfg, *fresh, sums(8), reward=parity_reward)
        assert len(train_math.load_state(cfg, sums(8))["rows"]) == 2

    def test_into_the_folder_of_another_run_is_refused(self, fresh, tmp_path):
        changes = {"output_dir": str(tmp_path), "max_steps": 1}
        train(fresh, held_out=2, **changes)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="holds (metrics.jsonl|state.pt|model). Choose"):
            train(fresh, **changes)
        assert contents(tmp_path) == before
        for name in "state.pt", "metrics.jsonl":
            (tmp_path / name).unlink()
        with pytest.raises(ValueError, match="holds model"):
            train(fresh, **changes)

    def test_gives_on_step_every_row_to_add_to_and_writes_nothing_without_a_folder(
            self, fresh, tmp_path, monkeypatch, capsys):
        seen = []

        def on_step(row):
            seen.append(dict(row))
            row["added"] = torch.tensor(row["step"])

        def reward(prompts, completions, log_metric, **columns):
            log_metric("mine", 8)
            return constant_reward(prompts, completions)

        monkeypatch.chdir(tmp_path)
        rows = train(fresh, held_out=2, reward=reward, on_step=on_step)
        assert not names_in(tmp_path) and not capsys.readouterr().out
        assert [row.pop("added") for row in rows] == list(range(7))
        assert seen == rows and [row["step"] for row in rows] == list(range(7))
        assert all(row["mine"] == 8 for row in rows[1:])
        assert [row["step"] for row in rows if "notes" in row] == [3, 4, 5, 6]
        assert all("eval_results" not in row for row in rows)

    @pytest.mark.parametrize("answer, steps", [
        (True, 3), (None, 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            (torch.tensor(True).numpy()[()], 3), (1, 6), (1.0, 6), ("", 6)])])
    def test_ends_saves_and_can_be_resumed_if_on_step_returns_true(
            self, fresh, tmp_path, answer, steps):
        def on_step(row):
            called.append(row["step"])
            row["mine"] = row["step"]
            return answer if row["step"] == 3 else False

        called = []
        changes = {"output_dir": tmp_path, "save_steps": 5}
        whole = train((copy.deepcopy(fresh[0]), fresh[1]))
        rows = train(fresh, on_step=on_step, **changes)
        assert len(rows) == steps + 1 and (tmp_path / "model").exists()
        state = train_math.load_state(settings(**changes), sums(8))
        assert [row["mine"] for row in state["rows"]] == list(range(steps + 1))
        train(fresh, on_step=on_step, state=state, **changes)
        assert called == list(range(7))
        added = read(tmp_path / "metrics.jsonl")
        assert [row.pop("mine") for row in added] == list(range(7))
        assert without_clocks(added)[1:] == without_clocks(whole)[1:]

    def test_clips_with_a_part_of_the_user(self, fresh):
        """Without clipping, the norm is the same, and plain SGD moves the weights by more."""
        def clip_gradients(model):
            gradients = [parameter.grad.flatten() for parameter in model.parameters()]
            return torch.linalg.vector_norm(torch.cat(gradients))

        before = weights_of(fresh[0])
        moves = []
        for parts in {}, {"clip_gradients": clip_gradients}:
            model = copy.deepcopy(fresh[0])
            _, row = train((model, fresh[1]), max_steps=1, minibatches=1, learning_rate=1e-2,
                           make_optimizer=lambda m: torch.optim.SGD(m.parameters()), **parts)
            moves.append((weights_of(model) - before).norm() / row["grad_norm"])
        assert row["grad_norm"] > 2
        assert moves[1] == pytest.approx(1e-2, rel=1e-2) and moves[0] < 0.6e-2

    def test_main_returns_the_rows(self, command, tmp_path):
        rows = train_math.main([*command, "--output_dir", str(tmp_path)], parity_reward)
        assert json.loads(json.dumps(rows)) == read(tmp_path / "metrics.jsonl")

    @pytest.mark.parametrize("name", ["encode_prompts", "generate", "response_log_probs"])
    def test_main_tries_each_part_before_the_long_work(self, command, tmp_path, name):
        fails = {name: at_call(1, None, OSError("in the part"))}
        assert "in the part" in refused(command, tmp_path / "a", **fails)
        assert names_in(tmp_path / "a") == {"lock"}


class TestWhatIsKept:
    def test_a_gradient_that_is_left_over_changes_nothing(self, fresh):
        model, tokenizer = fresh
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        for each in model, other:
            train((each, tokenizer), 4, max_steps=1)
        assert torch.equal(weights_of(model), weights_of(other))

    @pytest.mark.parametrize("ending", ["jsonl", "csv"])
    def test_answers_stay_as_they_are_written(self, tmp_path, ending):
        answers = ["26", "007", "NA", "TRUE", "null", "2024-01-02", ""]
        rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        path = tmp_path / f"q[0].{ending}"
        write_jsonl(path, rows)
        if ending == "csv":
            lines = [f"{row['question']},{row['answer']}\n" for row in rows]
            path.write_text("question,answer\n" + "".join(lines))
        cfg = settings(dataset=str(path), eval_size=0)
        assert train_math.load_questions(cfg, parity_reward) == (rows, [])

    def test_answers_of_any_kind_can_be_logged_and_the_run_resumed(self, fresh, tmp_path):
        answers = ["Paris", 7, "x #### 8", datetime.date(2025, 7, 24), torch.ones(2).numpy(), {1}]
        rows = [row | {"answer": answer} for row, answer in zip(sums(6), answers)]
        cfg = settings(output_dir=str(tmp_path), max_steps=1)
        train_math.train(cfg, *fresh, rows, rows, reward=parity_reward)
        found = [row["gold"] for row in read(tmp_path / "eval_0.jsonl")]
        assert found == ["Paris", "7", "8", "2025-07-24", "[1. 1.]", "{1}"]
        state = train_math.load_state(cfg, rows)
        assert [row["gold"] for row in state["results"]] == found and len(state["rows"]) == 2

    def test_half_a_step_is_not_saved(self, fresh, tmp_path, own_loss):
        """The second minibatch of step 2 raises, when the weights have moved already."""
        weights = []
        own_loss(at_call(6, gspo.gspo_loss, OSError("my disk")))
        with pytest.raises(OSError):
            train(fresh, on_step=lambda row: weights.append(weights_of(fresh[0])),
                  output_dir=tmp_path, save_steps=1, micro_batch_tokens=10**6)
        fresh[0].load_state_dict(torch.load(tmp_path / "state.pt")["model"])
        assert len(weights) == 2, "steps 0 and 1"
        assert torch.equal(weights_of(fresh[0]), weights[1])

    def test_a_run_may_be_saved_more_often_than_it_is_evaluated(self, fresh, tmp_path):
        with mock.patch.object(support.saving.torch, "save", wraps=torch.save) as save:
            rows = train(fresh, held_out=2, output_dir=tmp_path, save_steps=1, eval_steps=3)
        assert [row["step"] for row in rows if "eval_reward" in row] == [0, 3, 6]
        assert save.call_count == 7

    def test_a_dataset_of_the_library_can_be_trained_on(self, fresh):
        from datasets import Dataset

        rows = [train(fresh, questions, max_steps=1)[0]["settings"]["questions"]
                for questions in (sums(8), Dataset.from_list(sums(8)))]
        assert rows[0] == rows[1]

    def test_a_user_may_bring_an_optimizer_and_all_its_groups_get_the_rate(self, fresh):
        """The rate begins at learning_rate and falls to a tenth of it in the last step."""
        first, *others = fresh[0].parameters()
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}])
        rates = []
        optimizer.register_step_pre_hook(
            lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        train(fresh, max_steps=3, minibatches=1, make_optimizer=lambda model: optimizer)
        assert rates == [pytest.approx([rate] * 2) for rate in (1e-3, 0.55e-3, 1e-4)]

    @pytest.mark.parametrize("name", ["cut", "completion_ids", "completions", "step"])
    def test_a_column_with_the_name_of_an_argument_is_named(self, fresh, name):
        with pytest.raises(RewardError, match=f"rename the columns .*'{name}'"):
            train(fresh, [row | {name: 1} for row in sums(4)])


class TestAReward:
    def test_gets_the_step_or_none_in_the_trial_and_in_evaluations(self, command, tmp_path):
        steps = []

        def reward(prompts, completions, step, **columns):
            steps.append(step)
            return parity_reward(prompts, completions)

        train_math.main([*command, "--output_dir", str(tmp_path), "--max_steps", "3"], reward)
        assert steps == [None, None, 1, 2, None, 3, None]

    def test_may_keep_log_metric_for_a_loss_until_the_step_ends(self, fresh, own_loss):
        def reward(prompts, completions, log_metric, **columns):
            kept.append(log_metric)
            return parity_reward(prompts, completions)

        def loss(*arguments, **more):
            value = gspo.gspo_loss(*arguments, **more)
            values.append(value.item())
            kept[-1]("mean_loss", sum(values) / len(values))
            return value

        kept, values = [], []
        own_loss(loss)
        _, row = train(fresh, reward=reward, max_steps=1)
        assert row["mean_loss"] == sum(values) / len(values) and len(values) > 1


class TestOneRollout:
    """What a part of the user gets, may change, and may add on the way to the update."""

    def test_old_log_probs_of_the_user_are_kept_and_are_no_mistake(self, fresh):
        def build_minibatches(rollout, advantages, cfg):
            minibatches = train_math.build_minibatches(rollout, advantages, cfg)
            for batch in itertools.chain(*minibatches):
                batch.old_log_probs = batch.sampler_log_probs + 0.5 * batch.mask
            return minibatches

        _, row = train(fresh, 4, build_minibatches=build_minibatches, max_steps=1)
        assert row["sampler_gap"] == pytest.approx(0.5) and row["log_ratio_mean"] < -0.3
        assert row["log_ratio_first_max"] is None
        assert not any("log_ratio_first_max" in note for note in row["notes"])

    @pytest.mark.parametrize("temperature, is_noted", [(1.0, False), (0.3, True)])
    def test_a_sampler_at_another_temperature_is_noted(self, fresh, temperature, is_noted):
        def generate(model, prompts, group_size, max_length, given, end_ids):
            return train_math.generate(model, prompts, group_size, max_length, temperature, end_ids)

        def reward(completions, **columns):
            return [i % 2 for i in range(len(completions))]

        _, row = train(fresh, 4, reward=reward, generate=generate, max_steps=1)
        assert ("sampler_gap is above 0.1" in str(row.get("notes"))) is is_noted
        assert (row["sampler_gap"] > 0.1) is is_noted

    def test_a_sampler_that_loses_responses_later_is_named(self, fresh):
        """Four fewer could still be split into groups, but not into those of the prompts."""
        def generate(*arguments):
            return [part[:-4] for part in train_math.generate(*arguments)]

        with pytest.raises(ValueError, match="the sampler must return 4 responses to each of 4"):
            train(fresh, generate=generate)

    def test_mixed_groups_and_token_marks_of_another_length_are_refused(self):
        rollout = rollout_of([[1], [2]], [[3], [4, 5]])
        check_rollout(rollout, sums(2), 1)
        with pytest.raises(ValueError, match="side by side"):
            check_rollout(rollout, sums(1), 2)
        rollout.is_sampled[1] = [True]
        with pytest.raises(ValueError, match="each token of a response"):
            check_rollout(rollout, sums(2), 1)

    def test_a_reward_may_change_what_it_gets(self, fresh, tmp_path):
        """The run is the same, and can be resumed, although the trial calls the reward first. The
        reward may compute gradients, and the model may be in training mode before the trial."""
        questions = [row | {"tags": ["b", "a"]} for row in sums(8)]
        before = copy.deepcopy(questions)
        plain = train(copy.deepcopy(fresh), questions)

        def reward(prompts, completions, tags, completion_ids, **columns):
            rewards = parity_reward(prompts, completions)
            torch.ones(2, requires_grad=True).sum().backward()
            for each in [*tags, *completion_ids, prompts, completions]:
                each.clear()
            return rewards

        fresh[0].train()
        check(*fresh, questions, reward=reward)
        assert not fresh[0].training
        rows = train(fresh, questions, reward=reward, output_dir=tmp_path)
        assert without_clocks(rows) == without_clocks(plain) and questions == before
        state = train_math.load_state(settings(output_dir=tmp_path), before)
        assert len(state["rows"]) == len(rows)


class TestUserState:
    def test_that_could_not_be_read_again_is_refused_when_it_is_saved(self, fresh, tmp_path):
        user_state = {"rates": torch.zeros(3)}

        def on_step(row):
            if row["step"] == 2:
                user_state["rates"] = user_state["rates"].numpy()

        with pytest.raises(ValueError, match="user_state may hold only tensors, numbers"):
            train(fresh, on_step=on_step, user_state=user_state, output_dir=tmp_path, save_steps=1)
        assert len(torch.load(tmp_path / "state.pt")["rows"]) == 2, "the last good one"

    def test_and_rows_of_the_last_save_are_kept_after_an_error(self, fresh, tmp_path):
        """The weights and this state may have changed since then."""
        on_step = at_call(4, lambda row: None, OSError("my disk"))
        with pytest.raises(OSError, match="my disk"):
            train(fresh, on_step=on_step, user_state={"mine": 1}, output_dir=tmp_path)
        state = torch.load(tmp_path / "state.pt")
        assert len(state["rows"]) == 3 and state["user_state"] == {"mine": 1}


def test_a_new_flag_may_have_the_default_0():
    Own = dataclasses.make_dataclass(
        "Own", [("weight_decay", float, 0.0)], bases=(train_math.Settings,))
    assert Own().weight_decay == 0
    with pytest.raises(ValueError, match="--weight_decay -1 is out of range"):
        Own(weight_decay=-1)
