"""lesson/explorer.html: its formulas and its data agree with gspo.py."""
import base64
import html
import json
import re
import shutil
import subprocess
import zlib

import pytest
import torch

import gspo
from tests.conftest import TOP

UPDATES = 32
SETTINGS = {  # of the runs: algorithm, eps_low, eps_high
    "grpo": ("grpo", 0.2, 0.27),
    "gspo": ("gspo", 0.01, 0.0133),
    "none": ("gspo", 1.0, 1e9),
}
NODE = shutil.which("node")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
               None)


@pytest.fixture(scope="module")
def text():
    return (TOP / "lesson" / "explorer.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(text):
    """The numbers that are embedded in the page."""
    return json.loads(re.search(r"^const D = (.*);$", text, re.MULTILINE)[1])


def unpacked(text, dtype):
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=dtype).float()


def log_s_of(run):
    return unpacked(run["log_s"], torch.int16).reshape(UPDATES, 256) / 4000


def clipped_in_fact(log_ratio, advantage, name):
    """The fraction of clipped tokens of one response, from its log-ratios, by gspo.py."""
    algorithm, low, high = SETTINGS[name]
    log_ratio = log_ratio[None]
    mask = torch.ones_like(log_ratio)
    ratio = log_ratio.exp()
    if algorithm == "gspo":
        ratio = gspo.sequence_ratio(log_ratio, torch.zeros_like(log_ratio), mask)
    return gspo.clip_fraction(ratio, torch.tensor([advantage]), mask, low, high).item()


def test_works_offline_and_stays_small(text, data):
    assert not re.search(r"https?:|\bsrc=|<link|@import|\bimport\(|fetch\(", text)
    assert len(text.encode()) < 400_000
    lines = [line for line in text.splitlines() if not line.startswith("const D = ")]
    assert len(lines) <= 470 and max(map(len, lines)) <= 100
    words = re.sub(r"<.*?>", "", " ".join(re.findall(r"<p.*?</p>", text, re.DOTALL))).split()
    words += " ".join(hint for *_, hint in data["presets"].values()).split()
    assert 50 < len(words) <= 360


def test_the_pencil_example_is_that_of_gspo_py(data):
    before, now = map(torch.tensor, data["presets"]["Pencil example"][:2])
    assert torch.equal(before, torch.full((4,), 0.25))
    assert (now / before).tolist() == [2, 1, 1, 1]
    assert max(len(before) for before, *_ in data["presets"].values()) <= 8
    assert data["moments"] == [1, 8, 16, 32]
    assert data["ranges"] == {"GRPO’s": [0.2, 0.27], "GSPO’s": [3e-4, 4e-4],
                              "GSPO’s in panel 3": [0.01, 0.0133]}


def test_spreads_with_the_length_as_sums_of_random_numbers_do(data):
    shape = len(data["noises"]), len(data["lengths"]), 3, 5
    spread = torch.tensor(data["spread"], dtype=torch.float64).reshape(shape)
    noise = torch.tensor(data["noises"], dtype=torch.float64)[:, None]
    root = torch.tensor(data["lengths"], dtype=torch.float64).sqrt()
    low, high = spread[..., :2].log().unbind(-1)
    half = 1.645 * noise * torch.ones_like(root)
    for kind, wanted in enumerate((half, half / root, half * root)):
        assert torch.allclose(high[:, :, kind], wanted, rtol=0.1), kind
        assert torch.allclose(low[:, :, kind], -wanted, rtol=0.1), kind
    outside = spread[3, 6, :, 2:]  # noise 0.1, 100 tokens: s never leaves GRPO's range, and
    assert outside[1, 0] == 0 and outside[0, 1] > 0.99  # nearly all token ratios leave GSPO's


@pytest.mark.parametrize("name", SETTINGS)
def test_log_s_and_clipping_agree_with_the_ratios_of_the_tokens(data, name):
    run, step = data["log"][name], data["log"]["step"]
    lengths = [len(response) for response in step["responses"]]
    codes = unpacked(run["tokens"], torch.int8).reshape(5, sum(lengths))
    log_ratios = 0.01 * (codes / 16).sinh()
    log_s = torch.cat([torch.zeros(1, 256), log_s_of(run)])
    levels = ["0" * 256, *run["clipped"]]
    for moment, row in enumerate(log_ratios):
        for i, log_ratio in enumerate(row.split(lengths)):
            update = data["moments"][moment - 1] if moment else i // 32
            rounding = 0.035 * log_ratio.abs().mean().item() + 1e-3
            s = gspo.sequence_ratio(log_ratio[None], torch.zeros(1, len(log_ratio)),
                                    torch.ones(1, len(log_ratio)))
            assert s.log().item() == pytest.approx(log_s[update, i].item(), abs=rounding)
            advantage = step["advantages"][i]
            if name == "gspo":  # from log s of the log, because codes are too coarse for its range
                log_ratio = log_s[update, i:i + 1]
                if min(abs(log_ratio - end) for end in torch.tensor([0.99, 1.0133]).log()) < 2e-4:
                    continue
            fraction = clipped_in_fact(log_ratio, advantage, name)
            level = "0" if fraction == 0 else "1" if fraction <= 0.5 else "2"
            assert level == levels[update][i], (update, i)


@pytest.mark.parametrize("name", SETTINGS)
def test_counts_are_those_of_the_log(data, name):
    run = data["log"][name]
    advantages = torch.tensor(data["log"]["step"]["advantages"])
    log_s = log_s_of(run)
    assert len(run["counts"]) == 1 + UPDATES
    for update in range(1, 1 + UPDATES):
        row = run["clipped"][update - 1]
        part, good, bad, median_good, median_bad = run["counts"][update]
        assert part == run["clipped_tokens"][update - 1]
        assert good + bad == 256 - row.count("0")
        assert good == sum(x != "0" and a > 0 for x, a in zip(row, advantages))
        if name == "gspo":  # all tokens of a response, or none
            lengths = [len(response) for response in data["log"]["step"]["responses"]]
            tokens = sum(n for n, x in zip(lengths, row) if x != "0")
            assert part == pytest.approx(tokens / sum(lengths), abs=1e-4)
        for median, chosen in ((median_good, advantages > 0), (median_bad, advantages < 0)):
            wanted = log_s[update - 1][chosen].exp().median().item()
            assert median == pytest.approx(wanted, rel=0.01)
    if name == "none":
        assert set("".join(run["clipped"])) == {"0"}
    if name == "gspo":
        early = [i for i in range(32, 256) if run["clipped"][i // 32 - 1][i] != "0"]
        assert sorted(data["log"]["early"]) == early and len(early) > 10


def test_the_runs_differ_only_from_the_step_that_is_shown(data):
    gspo_rewards, *others = (data["log"][name]["rewards"] for name in ("gspo", "none", "grpo"))
    for rewards in others:
        assert len(rewards) == 16
        assert rewards[:data["step"]] == gspo_rewards[:data["step"]]
        assert rewards[data["step"]:] != gspo_rewards[data["step"]:]


# ---- the script of the page ----------------------------------------------------------------------


def one_response(old, new, ranges, advantage):
    """What the first panel shows, by gspo.py: the ratios, the number of tokens that GRPO and GSPO
    clip, and |y| times the gradient of each token."""
    old = torch.tensor([old], dtype=torch.float64).log()
    new = torch.tensor([new], dtype=torch.float64).log().requires_grad_()
    mask = torch.ones_like(old)
    numbers = [*(new - old).exp()[0].tolist(), gspo.sequence_ratio(new, old, mask).item(),
               (new - old).sum().exp().item()]
    for ratio, (low, high) in zip(((new - old).exp(), gspo.sequence_ratio(new, old, mask)), ranges):
        fraction = gspo.clip_fraction(ratio, torch.tensor([advantage]), mask, low, high)
        numbers.append(round(len(old[0]) * fraction.item()))
    for loss, (low, high) in zip((gspo.grpo_loss, gspo.gspo_loss, gspo.gspo_loss), ranges):
        value = loss(new, old, torch.tensor([advantage]), mask, low, high)
        numbers += (-len(old[0]) * torch.autograd.grad(value, new)[0][0]).tolist()
    return numbers


def random_cases(n):
    """Random responses with the numbers of gspo.py, many of them near the ends of the ranges."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for i in range(n):
        size = 1 + i % 8
        old = 0.05 + 0.9 * torch.rand(size, dtype=torch.float64, generator=generator)
        change = torch.randn(size, dtype=torch.float64, generator=generator) * 10.0 ** -(i % 4)
        new = (old * change.exp()).clamp(0.001, 0.999).tolist()
        scale = (10 ** (-3 * torch.rand(2, generator=generator))).tolist()
        ranges = [[0.2 * scale[0], 0.27 * scale[0]], [0.3 * scale[1], 0.4 * scale[1]], [1, 1e9]]
        advantage = (-1) ** i * (i % 5) / 2
        wanted = one_response(old.tolist(), new, ranges, advantage)
        cases.append([old.tolist(), new, ranges, advantage, wanted])
    return cases


DIFFERENCES = """
const worst = CASES.map(([old, now, ranges, A, wanted]) => {
  const ratios = tokenRatios(old, now), s = sequenceRatio(ratios);
  const [grpo, gspo, none] = ranges;
  const found = [...ratios, s, product(ratios),
    ratios.filter(w => isClipped(w, A, grpo)).length, isClipped(s, A, gspo) ? ratios.length : 0,
    ...ratios.map(w => gradient(w, A, grpo)),
    ...ratios.map(() => gradient(s, A, gspo)), ...ratios.map(() => gradient(s, A, none))];
  if (found.length != wanted.length) return 1;
  return Math.max(...found.map((x, i) => Math.abs(x - wanted[i]) / Math.max(1, Math.abs(x))));
});
"""
CLICKS = """
const errors = [];
window.onerror = message => errors.push(message);
setTimeout(() => {
  $("presets").children[1].click();
  $("early").click();
  const shown = {cases: worst.length, worst: Math.max(...worst), errors, updates: {}};
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
def test_the_formulas_agree_with_gspo_py(text):
    formulas = re.search(r"// ---- the formulas .*?\n(.*?)// ---- ", text, re.DOTALL)[1]
    cases = f"const CASES = {json.dumps(random_cases(300))};"
    end = "console.log(JSON.stringify([worst.length, Math.max(...worst)]));"
    done = subprocess.run([NODE, "-"], input="\n".join([formulas, cases, DIFFERENCES, end]),
                          capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    number, worst = json.loads(done.stdout)
    assert number == 300 and worst < 1e-9


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_in_a_browser(text, data, tmp_path):
    page = tmp_path / "page.html"
    script = DIFFERENCES.replace("CASES", json.dumps(random_cases(300))) + CLICKS
    page.write_text(f"{text}<script>{script}</script>", encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=180)
    shown = json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))
    assert shown["errors"] == []
    assert shown["cases"] == 300 and shown["worst"] < 1e-9
    assert shown["clipped"] == 1 + 4, "the pencil example: a token of GRPO, all tokens of GSPO"
    assert shown["rows"] == 3 * 4
    first = data["log"]["early"][0]
    assert shown["early"] == [first // 32, first, 3]
    assert shown["left"] == (first - 32) % 256, "the same place in another minibatch"
    assert shown["up"] == [0, True, 0], "the next larger s of this minibatch"
    for update, clipped in shown["updates"].items():
        counts = [data["log"][name]["counts"][int(update)] for name in ("grpo", "gspo", "none")]
        assert clipped == [count[1] + count[2] for count in counts]
