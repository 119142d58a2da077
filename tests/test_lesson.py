"""lesson/: the programs, the notebook, and the formulas and the data of the explorer."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageChops, ImageStat

import gspo
import train_math
from guides.losses import cispo_loss, sapo_loss
from lesson import grow, loop, pictures, tiny
from tests.conftest import SMALL, TOP, rollout_of, settings, spy, sums, weights_of
from tools.logs import read


def test_the_last_stage_is_gspo_loss():
    """Some responses are clipped, the padding is NaN, and the last group has equal rewards."""
    torch.manual_seed(0)
    mask = torch.arange(9) < torch.randint(1, 10, (64, 1))
    old = torch.randn(64, 9).double().where(mask, torch.nan)
    new = (old + 0.3 * torch.randn(64, 9).double()).requires_grad_()
    rewards = torch.rand(64).double()
    rewards[-grow.GROUP:] = 0.5
    advantages = gspo.group_advantages(rewards, grow.GROUP)
    losses = (grow.clip(new, old, rewards, mask),
              gspo.gspo_loss(new, old, advantages, mask, grow.EPS_LOW, grow.EPS_HIGH))
    found, expected = ((loss, *torch.autograd.grad(loss, new)) for loss in losses)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert 8 < (expected[1] == 0).all(1).sum() < 40, "equal rewards, or clipped"


@pytest.mark.slow
def test_each_stage_repairs_what_it_says(monkeypatch, capsys):
    monkeypatch.setattr(grow, "BATCHES", 64_000)
    grow.main()
    printed = capsys.readouterr().out
    columns = "bias error noise bias_moved error_moved noise_moved reward ruined training".split()
    rows = {}
    for name, length, cells in re.findall(r"^(\w+) +(4|32) +(\d.*)$", printed, re.MULTILINE):
        cells = [float(cell.strip("%")) for cell in cells.replace("+-", "").split()]
        rows[name, int(length)] = dict(zip(columns, cells, strict=True))
    assert all(row["bias"] < 3 * row["error"] for row in rows.values()), "none is biased at first"
    assert rows["baseline", 4]["noise"] < rows["reinforce", 4]["noise"]
    assert rows["ratio", 4]["bias_moved"] < 2 < 8 < rows["group", 4]["bias_moved"]
    assert rows["ratio", 32]["noise_moved"] > 2 * rows["root", 32]["noise_moved"]
    assert rows["root", 32]["ruined"] > 10 > 2 > rows["clip", 32]["ruined"]
    assert rows["clip", 4]["bias_moved"] > rows["root", 4]["bias_moved"], "the price of the clip"


def test_the_loop_makes_the_updates_of_train_step(world, tmp_path, monkeypatch):
    """The checkpoint has two end tokens, of which one pads, and settings that must not count."""
    folder = shutil.copytree(world / "model", tmp_path / "model")
    names = json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = {"eos_token_id": [1, 10], "pad_token_id": 1, "top_k": 1, "temperature": 0.01}
    (folder / "generation_config.json").write_text(json.dumps(config))
    for name, value in {"MODEL": folder, "ROWS": sums(8), "QUESTIONS": 8, "GROUP_SIZE": 4,
                        "MINIBATCHES": 2, "MAX_TOKENS": 40, "LEARNING_RATE": 0.03,
                        "reward": lambda text, answer: float(len(text) % 7)}.items():
        monkeypatch.setattr(loop, name, value)
    monkeypatch.setattr(loop, "print", None, raising=False)  # the run ends after one step
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)  # each error has its true size
    sampled, losses = [], []
    monkeypatch.setattr(loop, "sample", spy(loop.sample, sampled))
    monkeypatch.setattr(loop, "gspo_loss", spy(loop.gspo_loss, losses))
    with pytest.raises(TypeError, match="NoneType"):
        loop.main()
    (((trained, *_), _, (ids, mask, _)),) = sampled
    starts = mask.int().argmax(1) + 1
    prompts = [row[:start].tolist() for row, start in zip(ids, starts)]
    responses = [row[1:][own].tolist() for row, own in zip(ids, mask)]
    for prompt, (*before, last) in zip(prompts, responses):
        assert not {1, 10} & {*prompt, *before} and (last in (1, 10) or len(before) == 39)
    model, tokenizer = train_math.load(folder, "cpu")
    logits = model(ids).logits[:, :-1]
    ranks = (logits > logits.gather(-1, ids[:, 1:, None])).sum(-1)
    assert ranks[mask].max() >= 50, "generate takes 50 tokens by default"
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rollout = replace(rollout_of(prompts, responses), texts=texts)
    parts = train_math.Parts(reward=lambda completions, **_: [len(x) % 7 for x in completions],
                             sample=lambda *arguments: rollout)
    cfg = settings(prompts_per_step=8, minibatches=2, eps_low=loop.EPS_LOW, eps_high=loop.EPS_HIGH,
                   max_completion_length=40, learning_rate=0.03)
    optimizer = torch.optim.SGD(model.parameters())
    train_math.train_step(model, tokenizer, optimizer, [None] * 8, 1, cfg, parts)
    torch.testing.assert_close(weights_of(trained), weights_of(model), rtol=0, atol=1e-6)
    is_one = [torch.equal(log_probs, old) for (log_probs, old, *_), *_ in losses]
    assert is_one == [True, False], "the importance ratio is 1 in the first update only"


@pytest.mark.slow
def test_the_loop_learns(capsys):
    loop.main()
    first, *_, last = re.findall(r"^step \d: reward (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert float(first) < 0.25 and float(last) > 0.85


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_weights_in_the_picture_are_the_gradients_of_the_losses(advantage):
    ratio = torch.linspace(0.305, 2.205, 191).double()  # none of them is the end of a range
    old = torch.full((191, 3), -1.0).double()
    for label, loss, low, high in (
            ("GSPO (3e-4, 4e-4)", gspo.gspo_loss, 3e-4, 4e-4),
            ("PPO, GRPO (0.2, 0.27)", gspo.grpo_loss, 0.2, 0.27),
            ("no clip", gspo.gspo_loss, 1, 1e9),
            ("CISPO (ratio at most 1.28)", cispo_loss, 1, 0.28),
            ("SAPO (1 and 1.05)", sapo_loss, 1.05, 1.0)):
        new = (old + ratio.log()[:, None]).requires_grad_()
        rest = torch.full((191,), advantage).double(), torch.ones(191, 3), low, high
        gradient = torch.autograd.grad(-191 * loss(new, old, *rest), new)[0].sum(1) / advantage
        weight = pictures.weight(pictures.CURVES[label][0], ratio, advantage)
        torch.testing.assert_close(weight, gradient, rtol=1e-5, atol=1e-5)


def test_draws_its_pictures(tmp_path):
    """Each differs from the published one by little, because other fonts may be installed."""
    for name, draw in pictures.PICTURES.items():
        draw(tmp_path / name)
        found, published = (Image.open(folder / name) for folder in (tmp_path, TOP / "lesson"))
        difference = ImageChops.difference(found.convert("L"), published.convert("L"))
        assert ImageStat.Stat(difference).mean[0] < 5


def test_has_correct_sums_and_mistakes_if_asked_for():
    assert tiny.rabbits((3, 7), 3)["worked"] == "c3+7=0b7+0=7a0+7=7\n#### 7"
    slipped = tiny.rabbits((3, 7), 16, random.Random(0), slips=1.0)
    assert slipped["answer"] == tiny.rabbits((3, 7), 16)["answer"], "the gold answer is correct"
    steps = re.findall(r"[a-z](\d)\+(\d)=(\d)", slipped["worked"])
    assert all(step[1] == before[2] for before, step in zip(steps, steps[1:])), "they go on from it"
    assert sum((int(a) + int(b)) % 10 == int(c) for a, b, c in steps) < 8


def test_world_0_has_a_quarter_of_all_questions_held_out_and_starts_as_start_json_says():
    train, held_out = tiny.questions()
    assert len(train) == 525 and len({row["question"] for row in train + held_out}) == 700
    there = read(tiny.world(0) / "questions" / "test.jsonl")
    assert there == [{key: row[key] for key in ("question", "answer")} for row in held_out]
    model, tokenizer = train_math.load(tiny.world(0) / "model", "cpu")
    start = json.loads((tiny.world(0) / "start.json").read_text())
    for temperature in 0.0, 1.0:
        share = tiny.accuracy(model, tokenizer, held_out, temperature)
        assert share == pytest.approx(start[str(temperature)], abs=0.03)  # CPUs round differently


def test_makes_a_world_once_and_never_an_incomplete_one(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(tiny, "warm_up", lambda model, tokenizer, seed: made.append(seed))
    monkeypatch.setattr(tiny, "accuracy", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.world(3, tmp_path)
    monkeypatch.setattr(tiny, "accuracy", lambda *arguments: 0.5)
    folders = [tiny.world(seed, tmp_path) for seed in (3, 3, 4)]
    assert made == [3, 3, 4], "the first call left nothing, and the third found a world"
    first, _, other = [(f / "model" / "model.safetensors").read_bytes() for f in folders]
    assert first != other


def test_passes_flags_on_and_draws_a_picture(tmp_path, capsys):
    small = SMALL | {"max_steps": 1, "minibatches": 4, "output_dir": tmp_path}
    flags = ["--algorithm", "grpo", "--eps_low", "0.3"]
    tiny.main([f"--{name}={value}" for name, value in small.items()] + flags)
    settings = read(tmp_path / "metrics.jsonl")[0]["settings"]
    assert (settings["group_size"], settings["eps_low"], settings["eps_high"]) == (4, 0.3, 0.267)
    assert (tmp_path / "metrics.png").read_bytes()[1:4] == b"PNG"
    shown = capsys.readouterr().out
    assert "held-out accuracy before RL" in shown and "a picture of the run: " in shown
    assert "the same run without" not in shown, "it would have other settings than this run"


@pytest.mark.slow
def test_the_notebook_runs_from_the_first_cell_to_the_last():
    """In one process that starts in the folder of the lesson, with one rollout per run."""
    cells = json.loads((TOP / "lesson" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    program = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], capture_output=True, text=True,
        cwd=TOP / "lesson", env=os.environ | {"NOTEBOOK_STEPS": "1"})
    assert done.returncode == 0, done.stderr
    assert "[1.5, -0.5, -0.5, -0.5]\n[0.0, 0.0, 0.0, 0.0]\n" in done.stdout
    assert "grpo_loss  A = +1  [0.0, 1.0, 1.0, 1.0]" in done.stdout
    for name in ("loss", "gradient norm"):
        ours, tested = re.search(rf"^{name} +(\S+)  (\S+)$", done.stdout, re.MULTILINE).groups()
        assert ours == tested and float(tested) != 0
    runs = re.findall(r"^(.*\S) +held-out accuracy 9.7% -> ", done.stdout, re.MULTILINE)
    assert runs == ["GSPO", "no clipping", "GRPO"]
    assert done.stdout.count("a picture: ") == 2


def test_the_explorer_works_offline_with_the_formulas_and_data_that_were_checked():
    """Their checksums stand for older tests: those of commit afe8728 compare the formulas with
    gspo.py through Node, and those of 8547286 the data."""
    page = (TOP / "lesson" / "explorer.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|\bsrc=|<link|@import|\bimport\(|fetch\(", page)
    formulas = re.search(r"// ---- the formulas .*?\n(.*?)\n// ---- ", page, re.DOTALL)[1]
    data = re.search(r"^const D = (.*);$", page, re.MULTILINE)[1]
    assert zlib.crc32(formulas.encode()) == 4170557628
    assert zlib.crc32(data.encode()) == 2555110257
