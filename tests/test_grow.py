"""lesson/grow.py: its last stage is gspo_loss, and each stage repairs what the page says."""
import difflib
import inspect
import re

import torch

import gspo
from lesson import grow

STAGES = [grow.reinforce, grow.baseline, grow.group, grow.ratio, grow.root, grow.clip]


def batch():
    """Some responses are clipped, the padding is NaN, and the last group has equal rewards."""
    torch.manual_seed(0)
    mask = torch.arange(9) < torch.randint(1, 10, (64, 1))
    old = torch.randn(64, 9).double().where(mask, torch.nan)
    new = old + 0.3 * torch.randn(64, 9).double()
    rewards = torch.rand(64).double()
    rewards[-grow.GROUP:] = 0.5
    return new.requires_grad_(), old, rewards, mask


def of_gspo(new, old, rewards, mask):
    advantages = gspo.group_advantages(rewards, grow.GROUP)
    return gspo.gspo_loss(new, old, advantages, mask, grow.EPS_LOW, grow.EPS_HIGH)


def test_the_last_stage_is_gspo_loss():
    found = []
    for loss in grow.clip, of_gspo:
        new, *others = batch()
        value = loss(new, *others)
        value.backward()
        found.append((value, new.grad))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    has_none = (new.grad == 0).all(1)
    assert 8 < has_none.sum() < 40, "a group of equal rewards, and the clipped responses"


def test_each_stage_is_a_small_change():
    sources = [inspect.getsource(stage).splitlines()[1:] for stage in STAGES]
    for before, after in zip(sources, sources[1:]):
        changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        assert 3 <= len(changed) <= 9


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
