"""Wrong inputs of a user. Each ends the program with one line that says what to look at.

A row of the table is the input, a function that prepares it in an empty folder and returns flags,
and the words that the line must contain.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import support.saving
import train_math
from gspo import gspo_loss
from tests.conftest import (
    at_call,
    names_in,
    one_line,
    parity_reward,
    refused,
    settings,
    sums,
    train,
    write_jsonl,
)
from tools import save_model
from tools.warm_up import tiny_model, tiny_tokenizer


def old_setting(folder):
    """A run that was saved by a version which had another setting."""
    cfg = settings(output_dir=str(folder / "run"))
    rows = [{"step": 0, "settings": support.saving.fingerprint(cfg, []) | {"old_flag": 1}}]
    torch.save({"rows": rows, "results": []}, folder / "run" / "state.pt")
    return []


def state_of_another_program(folder):
    torch.save([1, 2, 3], folder / "run" / "state.pt")
    return []


def half_a_state(folder):
    (folder / "run" / "state.pt").write_bytes(b"PK")
    return []


def two_files_of_one_part(folder):
    write_jsonl(folder / "train.jsonl", sums(9))
    (folder / "train.csv").write_text("question,answer\n1+1?,2\n")
    return ["--dataset", str(folder)]


def flag(name, value):
    return lambda folder: [f"--{name}", value]


def dataset(name, content, encoding="utf-8"):
    """A dataset file with this content."""

    def prepare(folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding=encoding)
        return ["--dataset", str(path if path.parent == folder else path.parent)]

    return prepare


def rows(*changed):
    return "".join(json.dumps(row) + "\n" for row in [*sums(3), *changed])


def full_disk(folder):
    (folder / "run" / "partial").symlink_to("/dev/full")
    return []


def no_tokenizer(folder):
    tiny_model(tiny_tokenizer(), 0).save_pretrained(folder / "model")
    return ["--model", str(folder / "model")]


def only_a_template(folder):
    flags = no_tokenizer(folder)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    return flags


def model_with(change):
    """The tiny model with a change of its weights."""

    def prepare(folder):
        tokenizer = tiny_tokenizer()
        for part in tiny_model(tokenizer, 0), tokenizer:
            part.save_pretrained(folder / "model")
        weights = load_file(folder / "model" / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
        return ["--model", str(folder / "model")]

    return prepare


def long_question(folder):
    questions = [*sums(3), {"question": "How many figs" + "?" * 493, "answer": "1"}, *sums(3)]
    return ["--dataset", write_jsonl(folder / "q.jsonl", questions)]


BAD_INPUTS = {
    "a device that this machine lacks": (flag("device", "mps"), ["--device mps"]),
    "a dataset file that is not there": (
        flag("dataset", "nowhere.csv"), ["nowhere.csv", "no such file"]),
    "a folder without a train file": (
        dataset("data/test.jsonl", rows()), ["there is no train part with rows", "{'test': 3}"]),
    "a line that is not JSON": (
        dataset("q.jsonl", rows() + "{'question': 1}\n" + rows()), ["q.jsonl", "line 4"]),
    "a file in another encoding": (
        dataset("q.csv", "question,answer\nWie groß?,1\n", "latin-1"),
        ["q.csv", "not in UTF-8. Save it as 'CSV UTF-8'"]),
    "a file with semicolons": (
        dataset("q.csv", "question;answer\nWie, was?;1\n"), ["q.csv", "Save it with commas"]),
    "a file of another kind": (dataset("q.txt", rows()), ["must end in .jsonl, .json, .csv"]),
    "a number instead of a row": (
        dataset("q.jsonl", '{"question": "?", "answer": "1"}\n5\n'), ["row 2", "5"]),
    "other names of columns": (
        dataset("q.jsonl", '{"problem": "?", "solution": "1"}\n'), ["row 1 needs a question"]),
    "a list of numbers": (dataset("q.json", "[1, 2]"), ["q.json", "form"]),
    "a csv row with a cell too many": (
        dataset("q.csv", "question,answer\nHow many, then?,1\nWho?,2\n"), ["row 1", "form"]),
    "a csv row with a cell too few": (
        dataset("q.csv", "question,topic,answer\nHow many?,1\n"), ["row 1", "form"]),
    "rows with other columns": (
        dataset("q.jsonl", rows({"question": "?", "answer": "1", "level": 2})),
        ["row 4 has other columns than row 1", "level"]),
    "two files of one part": (two_files_of_one_part, ["train.csv", "train.jsonl"]),
    "a state of another version": (old_setting, ["old_flag"]),
    "a state of another program": (state_of_another_program, ["state.pt cannot be read"]),
    "a damaged state": (half_a_state, ["--output_dir", "state.pt cannot be read"]),
    "an empty cell": (
        dataset("q.csv", "question,answer\nHow many?,1\n,2\nWho?,3\n"),
        ["row 2", "needs a question"]),
    "a parquet file that is none": (dataset("q.parquet", "text"), ["q.parquet", "arquet"]),
    "a prompt that is too long": (long_question, ["up to 513 tokens", "How many figs"]),
    "a model folder that is not there": (flag("model", "no/where"), ["--model no/where "]),
    "a file as output_dir": (flag("output_dir", __file__), ["--output_dir", "bad_inputs.py: "]),
    "a model without its tokenizer": (no_tokenizer, ["chat_template"]),
    "a model with a chat template and no tokenizer": (
        only_a_template, ["tokenizer files are missing"]),
    "a missing weight": (
        model_with(lambda weights: weights.pop("model.norm.weight")),
        ["--model", "1 weights are missing", "model.norm.weight"]),
    "a weight that is NaN": (
        model_with(lambda weights: weights["model.norm.weight"].fill_(float("nan"))),
        ["--model", "not finite"]),
    "a full disk": (full_disk, ["partial", "is the disk full?"]),
}

BAD_ANSWERS = {  # for the default reward
    "a fraction": (dataset("q.jsonl", rows({"question": "?", "answer": "1/2"})), ["row 4 "]),
}
BAD_PARTS = {
    "a list of rewards": ({"reward": [parity_reward]}, ["list", "callable"]),
    "one response too few": (
        {"generate": lambda *arguments: [part[:-1] for part in train_math.generate(*arguments)]},
        ["the sampler must return 1 responses to each of 2 questions", "'responses': 1"]),
    "no network": (
        {"load": at_call(1, None, ConnectionError("Couldn't reach the Hub"))},
        ["Couldn't reach the Hub", "Without a network, use --model FOLDER and --dataset FILE"]),
    "too little memory": (
        {"generate": at_call(1, None, torch.OutOfMemoryError("CUDA out of memory."))},
        ["CUDA out of memory", "--micro_batch_tokens", "--rollout_rows"]),
}


@pytest.mark.parametrize("name", [*BAD_INPUTS, *BAD_ANSWERS, *BAD_PARTS])
def test_bad_input_or_a_bad_part_ends_in_one_line(command, tmp_path, monkeypatch, name):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    prepare, words = {**BAD_INPUTS, **BAD_ANSWERS, **BAD_PARTS}[name]
    parts = {"reward": train_math.correctness_reward if name in BAD_ANSWERS else parity_reward}
    flags = []
    if name in BAD_PARTS:
        parts |= prepare
    else:
        flags = prepare(tmp_path)
    line = refused(command, tmp_path / "run", *flags, **parts)
    for word in words:
        assert word in line


def test_a_wrong_name_of_a_part_is_answered_with_the_right_ones(command, fresh):
    words = "no part loss. The parts are reward, load, .*A loss is an entry of ALGORITHMS"
    with pytest.raises(TypeError, match=words):
        train_math.main(command, loss=parity_reward)
    with pytest.raises(TypeError, match=words):
        train(fresh, loss=parity_reward)


def mean_of_micro_batch(log_probs, old, advantages, mask, low, high, denominator):
    return gspo_loss(log_probs, old, advantages, mask, low, high)


def partly_divided(*arguments):
    return gspo_loss(*arguments) - 0.1 * arguments[0].mean()


def twice_divided(*arguments):
    return gspo_loss(*arguments) / arguments[-1]


HALF = "with twice the denominator, it is not half"


@pytest.mark.parametrize("loss, error, words", [
    (lambda log_probs, *rest: log_probs.sum(1), SystemExit, "the loss must be one number"),
    (lambda log_probs, old, advantages, mask, *rest: -log_probs.mean(), SystemExit, HALF),
    (mean_of_micro_batch, SystemExit, HALF),
    (partly_divided, SystemExit, HALF),
    (twice_divided, SystemExit, HALF),
    (lambda log_probs, *rest: log_probs.my_name, AttributeError, "my_name"),
])
def test_a_wrong_loss_is_noticed_before_any_step(
    command, tmp_path, own_loss, loss, error, words
):
    """An error in the user's own code keeps its traceback."""
    own_loss(loss)
    with pytest.raises(error, match=words):
        train_math.main([*command, "--output_dir", str(tmp_path / "run")], parity_reward)
    assert names_in(tmp_path / "run") == {"lock"}


@pytest.mark.parametrize("name", ["q.csv", "q.jsonl"])
def test_a_file_may_have_the_byte_order_mark_of_windows_and_blank_lines(tmp_path, name):
    text = "question,answer\n1+1?,2\n" if name == "q.csv" else rows() + "\n  \n"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    questions, _ = train_math.load_questions(settings(dataset=str(tmp_path / name), eval_size=0))
    assert questions == ([{"question": "1+1?", "answer": "2"}] if name == "q.csv" else sums(3))


def test_held_out_questions_that_are_trained_on_are_left_out_and_counted(tmp_path, capsys):
    held_out = [*sums(2), {"question": "new?", "answer": "1"}, {"question": "?", "answer": "2"}]
    held_out[0]["question"] += " "
    for name, part in ("train", sums(6)), ("test", held_out), ("dev", held_out):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    found = train_math.load_questions(settings(dataset=str(tmp_path), eval_size=1))
    assert found == (sums(6), [{"question": "new?", "answer": "1"}])
    shown = capsys.readouterr().out
    assert "2 held-out questions are left out" in shown
    assert "these parts of the data are not used: validation" in shown


# ---- folders of models ---------------------------------------------------------------------------


def killed_run(folder):
    (folder / "runs" / "k").mkdir(parents=True)
    (folder / "runs" / "k" / "state.pt").touch()


def adapter(folder, base="Qwen/Qwen2.5-0.5B-Instruct"):
    (folder / "adapter").mkdir()
    text = json.dumps({"base_model_name_or_path": base})
    (folder / "adapter" / "adapter_config.json").write_text(text)


@pytest.mark.parametrize("name, prepare, words", [
    ("{}/nowhere/model", None, ["there is no folder", "nowhere/model"]),
    ("./model", None, ["there is no folder ./model"]),
    ("runs/mine/model", None, ["there is no folder runs/mine/model"]),
    ("~/model", None, ["there is no folder ~/model"]),
    ("runs/k/model", killed_run, ["ended before it wrote its model", "tools.save_model runs/k"]),
    ("runs/k", killed_run, ["ended before it wrote its model", "tools.save_model runs/k"]),
    ("{}/runs/k", killed_run, ["tools.save_model {}/runs/k"]),
    ("runs", killed_run, ["has no config.json", "in its folder `model`"]),
    ("adapter", adapter, ["LoRA adapter", "peft"]),
])
def test_a_folder_without_a_model_is_refused_for_what_it_is(
        command, tmp_path, monkeypatch, name, prepare, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    if prepare:
        prepare(tmp_path)
    line = refused(command, tmp_path / "run", "--model", name.format(tmp_path))
    for word in words:
        assert word.format(tmp_path) in line
    assert line.startswith("train_math.py: --model ")


def test_an_adapter_names_its_base_that_is_not_there(command, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    adapter(tmp_path, "lesson/another/model")
    line = refused(command, tmp_path / "run", "--model", str(tmp_path / "adapter"))
    assert "there is no folder lesson/another/model" in line


def test_several_processes_are_refused_with_the_recipe(command, tmp_path, monkeypatch):
    for number in "1", "":
        monkeypatch.setenv("WORLD_SIZE", number)
        folder = str(tmp_path / f"x{number}")
        train_math.main([*command, "--max_steps", "1", "--output_dir", folder])
    for number in "2", "16":
        monkeypatch.setenv("WORLD_SIZE", number)
        assert "'Several processes' in guides/recipes.md" in refused(command, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- the model of a killed run -------------------------------------------------------------------


def test_the_model_of_the_last_save_of_a_killed_run_can_be_written(command, whole, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    shutil.copy(whole / "state.pt", folder)
    save_model.main([str(folder)])
    for path in (whole / "model").iterdir():
        assert (folder / "model" / path.name).read_bytes() == path.read_bytes()
    assert "no such" in str(one_line(save_model.main, tmp_path / "none")).lower()
    state = torch.load(folder / "state.pt")
    state["model"]["lora_A"] = state["model"].pop("model.norm.weight")
    torch.save(state, folder / "state.pt")
    assert "do not fit the model" in one_line(save_model.main, folder)
