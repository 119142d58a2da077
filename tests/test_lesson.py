"""lesson/: the programs, the notebook, and the formulas and the data of the explorer."""
import difflib
import html
import inspect
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import zlib

import pytest
import torch
from PIL import Image, ImageChops, ImageStat

import gspo
import train_math
from guides.losses import cispo_loss, sapo_loss
from lesson import grow, pictures, tiny
from tests.conftest import SMALL, TOP
from tools.logs import read

# ---- grow.py: its last stage is gspo_loss, and each stage repairs what the page says -------------

STAGES = [grow.reinforce, grow.baseline, grow.group, grow.ratio, grow.root, grow.clip]


def test_the_last_stage_is_gspo_loss():
    """Some responses are clipped, the padding is NaN, and the last group has equal rewards."""
    torch.manual_seed(0)
    mask = torch.arange(9) < torch.randint(1, 10, (64, 1))
    old = torch.randn(64, 9).double().where(mask, torch.nan)
    new = (old + 0.3 * torch.randn(64, 9).double()).requires_grad_()
    rewards = torch.rand(64).double()
    rewards[-grow.GROUP:] = 0.5
    advantages = gspo.group_advantages(rewards, grow.GROUP)
    found = []
    for loss in (grow.clip(new, old, rewards, mask),
                 gspo.gspo_loss(new, old, advantages, mask, grow.EPS_LOW, grow.EPS_HIGH)):
        found.append((loss, torch.autograd.grad(loss, new)[0]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    has_none = (found[0][1] == 0).all(1)
    assert 8 < has_none.sum() < 40, "a group of equal rewards, and the clipped responses"


def test_each_stage_is_a_small_change():
    sources = [inspect.getsource(stage).splitlines()[1:] for stage in STAGES]
    for before, after in zip(sources, sources[1:]):
        changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        assert 3 <= len(changed) <= 9


@pytest.mark.slow
def test_each_stage_repairs_what_it_says(monkeypatch, capsys):
    monkeypatch.setattr(grow, "BATCHES", 64_000)
    grow.main()
    printed = capsys.readouterr().out
    rows = {}
    for name, length, cells in re.findall(r"^(\w+) +(4|32) +(\d.*)$", printed, re.MULTILINE):
        cells = [float(cell.strip("%")) for cell in cells.replace("+-", "").split()]
        rows[name, int(length)] = dict(zip(
            ("bias", "error", "noise", "bias_moved", "error_moved", "noise_moved", "reward",
             "ruined", "training"), cells, strict=True))
    assert all(row["bias"] < 3 * row["error"] for row in rows.values()), "none is biased at first"
    assert rows["baseline", 4]["noise"] < rows["reinforce", 4]["noise"]
    assert rows["ratio", 4]["bias_moved"] < 2 < 8 < rows["group", 4]["bias_moved"]
    assert rows["ratio", 32]["noise_moved"] > 2 * rows["root", 32]["noise_moved"]
    assert rows["root", 32]["ruined"] > 10 > 2 > rows["clip", 32]["ruined"]
    assert rows["clip", 4]["bias_moved"] > rows["root", 4]["bias_moved"], "the price of the clip"


# ---- pictures.py: the curves are those of the losses ---------------------------------------------

LOSSES = {
    "GSPO (3e-4, 4e-4)": (gspo.gspo_loss, 3e-4, 4e-4),
    "PPO, GRPO (0.2, 0.27)": (gspo.grpo_loss, 0.2, 0.27),
    "no clip": (gspo.gspo_loss, 1, 1e9),
    "CISPO (ratio at most 1.28)": (cispo_loss, 1, 0.28),
    "SAPO (1 and 1.05)": (sapo_loss, 1.05, 1.0)}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_weights_in_the_picture_are_the_gradients_of_the_losses(advantage):
    """One response for each ratio, whose three tokens all have this ratio."""
    ratio = torch.linspace(0.305, 2.205, 191).double()  # none of them is the end of a range
    old = torch.full((191, 3), -1.0).double()
    assert pictures.CURVES.keys() == LOSSES.keys()
    for label, (loss, low, high) in LOSSES.items():
        new = (old + ratio.log()[:, None]).requires_grad_()
        rest = torch.full((191,), advantage).double(), torch.ones(191, 3), low, high
        gradient = torch.autograd.grad(-191 * loss(new, old, *rest), new)[0].sum(1) / advantage
        weight = pictures.weight(pictures.CURVES[label][0], ratio, advantage)
        torch.testing.assert_close(weight, gradient, rtol=1e-5, atol=1e-5)


def test_draws_its_pictures(tmp_path):
    """Each differs from the published one by little, because other fonts may be installed."""
    for name, draw in (("clip.png", pictures.draw_clip), ("weights.png", pictures.draw_weights),
                       ("rollout.png", pictures.draw_rollout)):
        draw(tmp_path / name)
        found, published = (Image.open(folder / name) for folder in (tmp_path, TOP / "lesson"))
        assert found.mode == "P", "it has few colours, so the file is small"
        difference = ImageChops.difference(found.convert("L"), published.convert("L"))
        assert ImageStat.Stat(difference).mean[0] < 5


# ---- tiny.py: the small world --------------------------------------------------------------------

def test_has_correct_sums_and_mistakes_if_asked_for():
    assert tiny.rabbits((3, 7), 3) == {
        "question": "Rabbits: 3, then 7. In c months?", "worked": "c3+7=0b7+0=7a0+7=7\n#### 7",
        "answer": "#### 7"}
    page = (TOP / "lesson" / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ +\d+ +(k\S+=\d) +(\d) +(\d) ", page, re.MULTILINE)
    assert len(shown) == 2
    for response, answer, reward in shown:  # in the group that the lesson shows
        is_correct = tiny.rabbits((5, 1), 11)["worked"] == f"{response}\n#### {answer}"
        assert is_correct == (reward == "1")
    slipped = tiny.rabbits((3, 7), 16, random.Random(0), slips=1.0)
    assert slipped["answer"] == tiny.rabbits((3, 7), 16)["answer"], "the gold answer is correct"
    steps = re.findall(r"[a-z](\d)\+(\d)=(\d)", slipped["worked"])
    assert all(step[1] == before[2] for before, step in zip(steps, steps[1:])), "they go on from it"
    assert sum((int(a) + int(b)) % 10 != int(c) for a, b, c in steps) > len(steps) / 2


def test_holds_a_quarter_of_all_questions_out():
    train, held_out = tiny.questions()
    assert len(held_out) == 175 and len(train) == 525
    assert len({row["question"] for row in train + held_out}) == 700
    for name, rows in ("train", train), ("test", held_out):
        there = read(tiny.world(0) / "questions" / f"{name}.jsonl")
        assert [row["answer"] for row in there] == [row["answer"] for row in rows]


def test_world_0_starts_as_start_json_says():
    model, tokenizer = train_math.load(tiny.world(0) / "model", "cpu")
    start = json.loads((tiny.world(0) / "start.json").read_text())
    assert max(start.values()) < 0.35, "no temperature helps"
    _, held_out = tiny.questions()
    for temperature in 0.0, 1.0:
        share = tiny.accuracy(model, tokenizer, held_out, temperature)
        assert share == pytest.approx(start[str(temperature)], abs=0.03)  # CPUs round differently


def test_makes_a_world_once_and_never_an_incomplete_one(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(tiny, "warm_up", lambda model, tokenizer, seed: made.append(seed))
    monkeypatch.setattr(tiny, "accuracy", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.world(3, tmp_path)
    assert not (tmp_path / "world-3").exists()
    monkeypatch.setattr(tiny, "accuracy", lambda *arguments: 0.5)
    folders = [tiny.world(seed, tmp_path) for seed in (3, 3, 4)]
    assert made == [3, 3, 4], "the first call left nothing, and the third found a world"
    first, again, other = [(f / "model" / "model.safetensors").read_bytes() for f in folders]
    assert first == again != other, "another seed, another world"


@pytest.mark.parametrize("flags, clip_range", [
    (["--algorithm", "grpo", "--eps_high", "1e9"], (0.2, 1e9)),  # the flag comes last
    (["--minibatches", "1"], (0.01, 0.0133))])
def test_passes_flags_on_and_draws_a_picture(tmp_path, capsys, flags, clip_range):
    folder = tmp_path / "run"
    small = SMALL | {"max_steps": 1, "minibatches": 4, "output_dir": folder}
    tiny.main([f"--{name}={value}" for name, value in small.items()] + flags)
    start, step = read(folder / "metrics.jsonl")
    settings = start["settings"]
    assert settings["group_size"] == 4
    assert (settings["eps_low"], settings["eps_high"]) == clip_range
    assert (folder / "metrics.png").read_bytes()[1:4] == b"PNG"
    shown, bar = capsys.readouterr()
    assert "100%" in bar
    assert "held-out accuracy before RL" in shown and "a picture of the run: " in shown
    assert "the same run without" not in shown, "it would have other settings than this run"


# ---- notebook.ipynb: its code cells run in order, without Jupyter --------------------------------

CELLS = json.loads((TOP / "lesson" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def execute(cells, folder):
    """Runs these cells in one process that starts in this folder, with one rollout per run."""
    program = "import json, sys\nnames = {}\n"
    program += "for cell in json.load(sys.stdin):\n    exec(cell, names)\n"
    return subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(cells), capture_output=True, text=True,
        cwd=folder, env=os.environ | {"NOTEBOOK_STEPS": "1"})


@pytest.mark.slow
def test_runs_from_the_first_cell_to_the_last():
    done = execute(CODE, TOP / "lesson")
    assert done.returncode == 0, done.stderr
    assert "[1.5, -0.5, -0.5, -0.5]\n[0.0, 0.0, 0.0, 0.0]\n" in done.stdout
    assert "gspo_loss  A = +1  [0.0, 0.0, 0.0, 0.0]" in done.stdout
    assert "grpo_loss  A = +1  [0.0, 1.0, 1.0, 1.0]" in done.stdout
    for name in ("loss", "gradient norm"):
        ours, tested = re.search(rf"^{name} +(\S+)  (\S+)$", done.stdout, re.MULTILINE).groups()
        assert ours == tested and float(tested) != 0
    assert len(re.findall(r"^step 1/1 ", done.stdout, re.MULTILINE)) == 3
    found = re.findall(r"^(.*\S) +held-out accuracy 9.7% -> (\S+)%", done.stdout, re.MULTILINE)
    assert [name for name, _ in found] == ["GSPO", "no clipping", "GRPO"]
    assert done.stdout.count("a picture: ") == 2


def test_holds_no_output_and_says_how_to_shorten_it():
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
    assert "NOTEBOOK_STEPS" in CODE[0] and "OMP_NUM_THREADS" in CODE[0]


def test_clones_the_repository_if_it_is_not_in_one(tmp_path):
    source, here = tmp_path / "source", tmp_path / "here"
    source.mkdir()
    here.mkdir()
    for name in "train_math.py", "requirements.txt":
        (source / name).touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in ("init", "-q"), ("add", "."), ("commit", "-qm", "first"):
        subprocess.run([*git, *command], cwd=source, check=True)
    assert "Put its address into REPOSITORY" in execute(CODE[:1], here).stderr
    cell = CODE[0].replace('REPOSITORY = ""', f"REPOSITORY = {source.as_uri()!r}")
    for _ in range(2):  # the second time, the clone is found
        done = execute([cell, "print(os.getcwd())"], here)
        assert done.stdout.splitlines()[-1] == str(here / "gspo"), done.stderr


# ---- explorer.html: its data and its formulas agree with gspo.py ---------------------------------

NODE = shutil.which("node")
BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
BROWSER = next(filter(None, BROWSERS), None)
TEXT = (TOP / "lesson" / "explorer.html").read_text(encoding="utf-8")
DATA = json.loads(re.search(r"^const D = (.*);$", TEXT, re.MULTILINE)[1])


def test_works_offline_and_stays_small():
    assert not re.search(r"https?:|\bsrc=|<link|@import|\bimport\(|fetch\(", TEXT)
    assert len(TEXT.encode()) < 400_000
    lines = [line for line in TEXT.splitlines() if not line.startswith("const D = ")]
    assert len(lines) <= 470 and max(map(len, lines)) <= 100
    paragraphs = re.findall(r"<p.*?</p>", TEXT, re.DOTALL)
    hints = [hint for *_, hint in DATA["presets"].values()]
    assert 50 < len(re.sub(r"<.*?>", "", " ".join(paragraphs + hints)).split()) <= 360


def test_the_pencil_example_and_the_ranges_are_those_of_the_pages():
    before, now = map(torch.tensor, DATA["presets"]["Pencil example"][:2])
    assert torch.equal(before, torch.full((4,), 0.25))
    assert (now / before).tolist() == [2, 1, 1, 1]
    assert DATA["moments"] == [1, 8, 16, 32]
    assert DATA["ranges"] == {"GRPO’s": [0.2, 0.27], "GSPO’s": [3e-4, 4e-4],
                              "GSPO’s in panel 3": [0.01, 0.0133]}


@pytest.mark.parametrize("part, checksum", [("log", 1553252922), ("spread", 369871606)])
def test_the_numbers_are_those_that_were_checked(part, checksum):
    """They were computed once. The tests of commit 8547286 compare them with gspo.py."""
    assert zlib.crc32(json.dumps(DATA[part]).encode()) == checksum


def one_response(old, new, low, high, advantage):
    """What the first panel shows, by gspo.py: the ratios, the number of tokens that GRPO clips and
    whether GSPO clips, and |y| times the gradient of each token with both."""
    old = torch.tensor([old], dtype=torch.float64).log()
    new = torch.tensor([new], dtype=torch.float64).log().requires_grad_()
    advantage = torch.tensor([advantage])
    mask = torch.ones_like(old)
    ratios, s = (new - old).exp(), gspo.sequence_ratio(new, old, mask)
    numbers = [*ratios[0].tolist(), s.item(), ratios.prod().item()]
    for ratio, scale in (ratios, len(old[0])), (s, 1):
        fraction = gspo.clip_fraction(ratio, advantage, mask, low, high)
        numbers.append(round(scale * fraction.item()))
    for loss in gspo.grpo_loss, gspo.gspo_loss:
        value = loss(new, old, advantage, mask, low, high)
        numbers += (-len(old[0]) * torch.autograd.grad(value, new)[0][0]).tolist()
    return numbers


def random_cases(n):
    """The arguments of one_response, with many ratios near the ends of the ranges."""
    rng = random.Random(0)
    for i in range(n):
        old = [rng.uniform(0.05, 0.95) for _ in range(1 + i % 8)]
        new = [p * math.exp(rng.gauss(0, 10.0 ** -(i % 4))) for p in old]
        width = 10 ** rng.uniform(-3, 0)
        advantage = (-1) ** i * (i % 5) / 2
        yield old, [min(p, 0.999) for p in new], 0.2 * width, 0.27 * width, advantage


ONE_RESPONSE = """
console.log(JSON.stringify(CASES.map(([old, now, low, high, A]) => {
  const ratios = tokenRatios(old, now), s = sequenceRatio(ratios), range = [low, high];
  return [...ratios, s, product(ratios),
    ratios.filter(w => isClipped(w, A, range)).length, isClipped(s, A, range) ? 1 : 0,
    ...ratios.map(w => gradient(w, A, range)), ...ratios.map(() => gradient(s, A, range))];
})));
"""
CLICKS = """
const errors = [];
window.onerror = message => errors.push(message);
setTimeout(() => {
  $("presets").children[1].click();
  $("early").click();
  const shown = {errors, updates: {}};
  shown.early = [u, chosen, document.querySelectorAll(".tokens").length];
  const press = key => $("c-gspo").dispatchEvent(new KeyboardEvent("keydown", {key}));
  press("ArrowLeft");
  shown.left = chosen;
  go(8, 5);
  press("ArrowUp");
  const levels = [...Array(32).keys()].map(i => sOf("gspo", i, 8));
  shown.up = [chosen >> 5, levels[chosen] > levels[5],
    levels.filter(s => s > levels[5] && s < levels[chosen]).length];
  shown.clipped = document.querySelectorAll("#rows em").length;
  shown.rows = document.querySelectorAll("#spread td").length;
  for (const k of [0, 8, 32]) {
    go(k);
    shown.updates[k] = Object.keys(NAMES).map(a =>
      document.querySelectorAll(`#c-${a} .some, #c-${a} .most`).length);
  }
  document.title = JSON.stringify(shown);
}, 1000);
"""


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_the_formulas_agree_with_gspo_py():
    formulas = re.search(r"// ---- the formulas .*?\n(.*?)// ---- ", TEXT, re.DOTALL)[1]
    cases = [*random_cases(300)]
    program = f"{formulas}\nconst CASES = {json.dumps(cases)};\n{ONE_RESPONSE}"
    done = subprocess.run(
        [NODE, "-"], input=program, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    for case, found in zip(cases, json.loads(done.stdout), strict=True):
        assert found == pytest.approx(one_response(*case), rel=1e-9, abs=1e-9)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_in_a_browser(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f"{TEXT}<script>{CLICKS}</script>", encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=180)
    shown = json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))
    assert shown["errors"] == []
    assert shown["clipped"] == 1 + 4, "the pencil example: a token of GRPO, all tokens of GSPO"
    assert shown["rows"] == 3 * 4
    first = DATA["log"]["early"][0]
    assert shown["early"] == [first // 32, first, 3]
    assert shown["left"] == (first - 32) % 256, "the same place in another minibatch"
    assert shown["up"] == [0, True, 0], "the next larger s of this minibatch"
    for update, clipped in shown["updates"].items():
        counts = [DATA["log"][name]["counts"][int(update)] for name in ("grpo", "gspo", "none")]
        assert clipped == [count[1] + count[2] for count in counts]
