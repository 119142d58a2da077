"""Writes the hand-out of a homework: a file with blanks, its tests, and a sheet for students.

    python -m homework.handout maths FOLDER    (or: python test_gspo.py --handout FOLDER)
    python -m homework.handout loop FOLDER     (contains gspo.py, the answers to the maths)
"""
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIES = {"maths": ["test_gspo.py"], "loop": [
    "test_gspo.py", "homework/test_loop.py", "gspo.py", "requirements.txt", "support/*.py"]}
BLANKS = {
    "MicroBatch.__init__": """\
        # self.ids (b, L): prompt, then response, padded on the right. self.mask (b, L - 1), bool:
        # has the model sampled ids[:, 1:]? rollout.is_sampled says it of each token of a response.
        # self.advantages (b,): those of these responses. All three are on `device`.""",
    "response_log_probs": """\
    # The log-probs (b, L - 1) of batch.ids[:, 1:], 0 where batch.mask is 0. model(batch.ids).logits
    # are (b, L, V). You do not need to save memory.""",
    "phase 3": """\
    # Set `minibatches` to parts.build_minibatches(rollout, advantages, cfg). For each micro-batch,
    # set old_log_probs to parts.response_log_probs(model, batch, temperature), without a gradient,
    # and is_on_policy to True.""",
    "phase 4": """\
    # Use only `minibatches` of phase 3. The responses whose advantage is 0 have been left out: what
    # does this mean for the denominator? algorithm.loss is called like gspo_loss, and with
    # **batch.extra. parts.clip_gradients(model) returns the norm before clipping. The lines below
    # need eps_low, eps_high = cfg.clip_range(), and for each optimizer step an entry of
    # `grad_norms` and of `updates`, [(micro-batch, detached log-probs, loss.item()), ...]."""}
GIVEN = "log_probs|is_on_policy|extra|self.indices =|for i in|prompt, response"  # lines that stay


def maths():
    """gspo.py without its helpers, and without the bodies of its functions."""
    source, _, _ = (ROOT / "gspo.py").read_text(encoding="utf-8").partition("\n\n\n# ---- helpers")
    source = re.sub(r"\n`python gspo.py` prints .*", "", source)
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            message = f"{node.name} is still to be written: read its docstring"
            body = slice(node.body[0].end_lineno, node.end_lineno)
            lines[body] = [f'    raise NotImplementedError("{message}")']
    return "my_gspo.py", "\n".join(lines) + "\n"


def loop():
    """train_math.py with four blanks, and without a sentence that tells an answer."""
    source = (ROOT / "train_math.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    body = {node.name: node.body for node in nodes}
    remember, update = [i for i, line in enumerate(lines) if re.match("    # [34] [A-Z]", line)]
    step = body["train_step"]
    end = max(node.lineno for node in step if isinstance(node, ast.For))
    phase_3 = [node for node in step if remember < node.lineno <= update]
    phase_4 = [node for node in step if update < node.lineno <= end]
    answers = body["__init__"], body["response_log_probs"], phase_3, phase_4
    for (name, hint), nodes in reversed([*zip(BLANKS.items(), answers)]):
        blank = slice(nodes[0].lineno - 1, nodes[-1].end_lineno)
        given = [line for line in lines[blank] if re.search(GIVEN, line) and "init" in name]
        indent = " " * nodes[0].col_offset
        lines[blank] = [hint, f'{indent}raise NotImplementedError("{name} is not written")', *given]
    text = "\n".join(lines) + "\n"
    return "train_math.py", text.replace(", but count in train_step's denominator", "")


def hand_out(homework, folder):
    """Writes the files of this homework into this folder. SystemExit: one is there already."""
    file, text = maths() if homework == "maths" else loop()
    page = (ROOT / "homework/README.md").read_text(encoding="utf-8")
    files = {file: text, "README.md": page[page.index("# For students"):]}
    for pattern in COPIES[homework]:
        for path in ROOT.glob(pattern):
            name = path.relative_to(ROOT).as_posix().removeprefix("homework/")
            files[name] = path.read_text(encoding="utf-8")
    for name in files:
        if (folder / name).exists():
            sys.exit(f"{folder / name} exists already, so nothing was written")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    print(f"wrote {folder / file}, its tests, and README.md for students")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in COPIES:
        sys.exit(__doc__)
    hand_out(sys.argv[1], Path(sys.argv[2]))
