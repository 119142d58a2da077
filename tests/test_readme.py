"""What the pages print is what happens."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gspo import group_advantages, gspo_loss

TOP = Path(__file__).resolve().parents[1]
LAB = sorted(str(page.relative_to(TOP)) for page in TOP.glob("experiments/*.md"))
PAGES = ["README.md", "lesson/README.md", *LAB]


def text_of(page):
    return (TOP / page).read_text(encoding="utf-8")


def blocks_of(page):
    """(code, what is printed or '') of each ```python block, with the ```text that follows it."""
    return re.findall(r"```python\n(.*?)```\n(?:\s*```text\n(.*?)```)?", text_of(page), re.DOTALL)


def installed(engine):
    spec = importlib.util.find_spec(engine)
    return spec is not None and spec.origin is not None


class TestReadme:
    def test_shows_python(self):
        assert blocks_of("README.md")

    @pytest.mark.parametrize("page", PAGES)
    def test_blocks_print_what_they_say(self, page, command, tmp_path):
        """Each runs beside gspo.py, unless it is for an engine that is not installed. One that
        calls train_math.main takes its flags, here those of one step of a tiny model."""
        flags = [*command, "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
        for code, output in blocks_of(page):
            engines = [engine for engine in ("trl", "verl", "peft") if f"from {engine}" in code]
            if not all(map(installed, engines)):
                continue
            flags_of = flags if "train_math.main(" in code else []
            done = subprocess.run(
                [sys.executable, "-c", code, *flags_of], cwd=TOP, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{code}\n{done.stderr}"
            if not flags_of or output:
                assert done.stdout.strip() == output.strip(), code

    def test_six_lines_are_gspo_loss(self):
        """The front page's gspo, on a batch without NaN and without empty responses."""
        code = re.search(r"```python\n(.*?def gspo\(.*?)```", text_of("README.md"), re.DOTALL)
        names = {}
        exec(code[1], names)
        torch.manual_seed(0)
        old = -torch.rand(32, 9)
        start = old + 1e-3 * torch.randn(32, 9)
        rewards = torch.rand(32)
        mask = torch.arange(9) < torch.randint(1, 10, (32, 1))
        found = []
        for loss, paid in (gspo_loss, group_advantages(rewards, 8)), (names["gspo"], rewards):
            new = start.clone().requires_grad_()
            more = () if loss is gspo_loss else (8,)
            value = loss(new, old, paid, mask, *more, eps_low=3e-4, eps_high=4e-4)
            value.backward()
            found.append((value.detach(), new.grad))
        (value, gradient), (its_value, its_gradient) = found
        assert torch.allclose(value, its_value, atol=1e-6) and gradient.abs().max() > 1e-3
        assert torch.allclose(gradient, its_gradient, atol=1e-6)

    def test_pencil_rows_are_the_example_s(self):
        done = subprocess.run([sys.executable, TOP / "gspo.py"], capture_output=True, text=True)
        table = re.search(r"```text\n(advantage .*?)```", text_of("lesson/README.md"), re.DOTALL)
        assert set(table[1].splitlines()) <= set(done.stdout.splitlines())
