"""The code on the pages runs and prints what the pages show."""

import importlib.util
import re

import pytest
import torch

from gspo import group_advantages, gspo_loss
from tests.conftest import SMOLLM2, TOP, run_code

FOUND = [path.relative_to(TOP) for kind in ("md", "ipynb") for path in TOP.rglob(f"*.{kind}")]
FOUND = [path for path in FOUND if not path.parts[0].startswith((".", "runs"))]
# Plans are not tested: they are kept as they were, with the links and commands of their day.
FOUND = [path for path in FOUND if path.parent.name != "plans"]
PAGES = sorted(str(path) for path in FOUND if path.suffix == ".md")
LINKING = sorted(map(str, FOUND))
# A block that needs one of these packages may be skipped.
OPTIONAL = ("trl", "verl", "peft", "wandb", "tensorboard", "math_verify")


def text_of(page):
    return (TOP / page).read_text(encoding="utf-8")


def blocks_of(page):
    """(code, printed text or '') of each ```python block and of the ```text block after it."""
    return re.findall(r"```python\n(.*?)```\n(?:\s*```text\n(.*?)```)?", text_of(page), re.DOTALL)


def is_missing(module, code):
    """Whether the code imports this optional module although it is not installed."""
    spec = importlib.util.find_spec(module)
    is_installed = spec is not None and spec.origin is not None
    return not is_installed and re.search(rf"(import|from) .*\b{module}\b", code)


def anchors(page):
    """The anchors that GitHub makes from the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading.lower())
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_to_files_and_headings(page):
    """Relative links, also those to pictures. Addresses on the web are not tested."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)", text_of(page)):
        name, _, anchor = link.partition("#")
        target = (TOP / page).parent / name if name else TOP / page
        if not link.startswith(("http", "mailto:")):
            is_page = target.suffix == ".md" and anchor
            if not target.exists() or is_page and anchor not in anchors(target):
                missing.append(link)
    assert not missing


class TestReadme:
    @pytest.mark.parametrize("page", PAGES)
    def test_blocks_print_what_they_say(self, page, command, whole, chat_model, tmp_path):
        """Each block runs beside gspo.py, unless it needs a package that is not installed. A block
        that calls train_math.main gets flags, here those of one step of the tiny model, and of the
        algorithm that it adds. A block that reads the run runs/math reads one of the tiny model. A
        block that loads SmolLM2 loads the tiny model, and its numbers are not on the page."""
        for i, (code, output) in enumerate(blocks_of(page)):
            if any(is_missing(module, code) for module in OPTIONAL):
                continue
            flags = []
            if "train_math.main(" in code:
                flags = [*command, "--max_steps", "1", "--output_dir", str(tmp_path / str(i))]
                for algorithm in re.findall(r'ALGORITHMS\["(\w+)"\] =', code):
                    flags += ["--algorithm", algorithm]
            is_printing_numbers = flags or "runs/math/" in code or SMOLLM2 in code
            code = code.replace("runs/math/", f"{whole.as_posix()}/")
            code = code.replace(SMOLLM2, chat_model.as_posix())
            code = code.replace("runs/sft", (tmp_path / "sft").as_posix())
            status, printed, errors = run_code(code, *flags)
            assert status == 0, f"{code}\n{errors}"
            if output or not is_printing_numbers:
                assert printed.strip() == output.strip(), code

    @pytest.mark.parametrize("page", ["README.md", "lesson/README.md"])
    def test_six_lines_are_gspo_loss(self, page):
        """The function on the page equals gspo_loss on a batch without NaN and without empty
        responses."""
        code = re.search(r"```python\n(.*?def gspo\(.*?)```", text_of(page), re.DOTALL)
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
            more = () if loss is gspo_loss else (8,)  # that of the page also needs the group size
            value = loss(new, old, paid, mask, *more, eps_low=3e-4, eps_high=4e-4)
            value.backward()
            found.append((value.detach(), new.grad))
        (value, gradient), (its_value, its_gradient) = found
        assert torch.allclose(value, its_value, atol=1e-6) and gradient.abs().max() > 1e-3
        assert torch.allclose(gradient, its_gradient, atol=1e-6)

    def test_pencil_rows_are_the_example_s(self):
        _, printed, _ = run_code(text_of("gspo.py"))
        table = re.search(r"```text\n(advantage .*?)```", text_of("lesson/README.md"), re.DOTALL)
        assert set(table[1].splitlines()) <= set(printed.splitlines())
