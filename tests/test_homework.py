"""The second homework, the loop with four blanks.

    python -m pytest tests/test_homework.py           two minutes on a CPU
"""
import ast
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lesson import class_grades, loop_homework, test_loop

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (ROOT / "train_math.py").read_text(encoding="utf-8")
BLANKS = list(loop_homework.PARTS)


def hand_out(*arguments):
    command = [sys.executable, "-m", "lesson.loop_homework", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "homework"
    done = hand_out(folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def run_tests(folder, name, *flags):
    """Runs the tests of the hand-out on a student's file."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *flags, "test_loop.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "LOOP": name, "PYTHONPATH": ""})


def grade(folder, text, name="train_math.py"):
    """{blank: (tests passed, number of tests, what to look at first)} for a file with this text."""
    (folder / name).write_text(text, encoding="utf-8")
    done = run_tests(folder, name, "-q", "--tb=no", "-rN", "-p", "no:cacheprovider")
    lines = re.findall(r"^(\w+) +tests +(\d+) of +(\d+) *(.*)$", done.stdout, re.MULTILINE)
    rows = {blank: (int(passed), int(of), hint) for blank, passed, of, hint in lines}
    del rows["total"]
    return rows


def written(tree):
    """All statements in the tree."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)}


class TestHandOut:
    def test_has_four_blanks_that_say_so(self, folder):
        text = (folder / "train_math.py").read_text(encoding="utf-8")
        said = re.findall(r'raise NotImplementedError\("(.*) is still to be written"\)', text)
        assert sorted(said) == sorted(loop_homework.HINTS)
        bodies = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                bodies[node.name] = node.body
        assert len(loop_homework.without_docstring(bodies["__init__"])) == 1
        assert len(loop_homework.without_docstring(bodies["response_log_probs"])) == 1
        for node in bodies["train_step"]:
            assert not isinstance(node, (ast.For, ast.With))

    def test_differs_only_in_the_blanks(self, folder):
        """All other lines, including docstrings, are those of train_math.py in their order."""
        lines = (folder / "train_math.py").read_text(encoding="utf-8").splitlines()
        answered = set()
        for body in loop_homework.statements(SOURCE).values():
            answered.update(range(body[0].lineno, body[-1].end_lineno + 1))
        given = iter(lines)
        for number, line in enumerate(SOURCE.splitlines(), 1):
            assert number in answered or line in given, line
        for hint in loop_homework.HINTS.values():
            assert set(hint.splitlines()[1:]) <= set(lines)

    def test_has_no_answer(self, folder):
        """The tests contain no statement that is left out."""
        handed_out = set()
        for name in "test_loop.py", "grading.py":
            text = (folder / name).read_text(encoding="utf-8")
            handed_out |= written(ast.parse(text))
        answers = set()
        for body in loop_homework.statements(SOURCE).values():
            for node in body:
                answers |= written(node)
        assert len(answers) > 20
        assert not handed_out & answers

    def test_overwrites_nothing(self, tmp_path):
        (tmp_path / "gspo.py").write_text("mine")
        done = hand_out(tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        there = tmp_path / "gspo.py"
        assert done.stderr == f"{there} exists already, so nothing was written\n"
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


class TestGrade:
    def test_of_the_hand_out_is_zero_and_names_the_blanks(self, folder):
        text = (folder / "train_math.py").read_text(encoding="utf-8")
        got = grade(folder, text)
        assert list(got) == BLANKS
        assert all(passed == 0 for passed, _, _ in got.values())
        *hints, whole = [hint for _, _, hint in got.values()]
        assert all("is still to be written" in hint for hint in hints)
        assert whole.startswith("not counted")

    def test_of_train_math_is_full_also_on_a_machine_with_a_gpu(self, folder):
        """On a GPU machine, the default of --device differs. Here it is a device without values."""
        default = '"cuda" if torch.cuda.is_available() else "cpu"'
        assert SOURCE.count(default) == 1
        got = grade(folder, SOURCE.replace(default, '"meta"'), "right.py")
        assert list(got) == BLANKS
        assert all(passed == of > 0 and not hint for passed, of, hint in got.values())

    def test_of_a_file_that_does_not_load_is_one_line(self, folder):
        (folder / "broken.py").write_text("import nothing_of_this_name")
        done = run_tests(folder, "broken.py", "-q")
        assert done.returncode == 2
        assert "broken.py does not load: ModuleNotFoundError" in done.stdout

    @pytest.mark.parametrize("line, code", [
        ("os._exit(0)", 2), ("__import__('pytest').skip(allow_module_level=True)", 2)])
    def test_of_a_file_that_ends_early_is_no_success(self, folder, line, code):
        (folder / "early.py").write_text(f"{SOURCE}\n{line}\n", encoding="utf-8")
        assert run_tests(folder, "early.py", "-q").returncode == code

    def test_of_a_skipped_test_is_no_success(self, folder):
        text = SOURCE.replace("    hidden = model.get_decoder()",
                              "    __import__('pytest').skip()\n    hidden = model.get_decoder()")
        (folder / "skips.py").write_text(text, encoding="utf-8")
        done = run_tests(folder, "skips.py", "-q", "-k", "ResponseLogProbs")
        assert done.returncode == 1 and "the test was skipped, so it has not passed" in done.stdout

    def test_of_a_class(self, tmp_path):
        """A crash in one blank and an endless loop in another cost only the points of these two."""
        text = changed(
            ("    denominator = len(", "    while True:\n        pass\n    denominator = len("),
            ("        self.indices = list(indices)",
             "        os.kill(os.getpid(), signal.SIGSEGV)"))
        path = tmp_path / "ann.py"
        path.write_text(text, encoding="utf-8")
        done = hand_out("--grade", path)
        assert (done.returncode, done.stderr) == (0, "")
        row, = csv.DictReader(done.stdout.splitlines())
        points = {name.split()[0]: value for name, value in row.items() if "tests" in name}
        assert points == {"MicroBatch": "0", "ResponseLogProbs": "6", "Phase3Remember": "7",
                          "Phase4Update": "0", "WholeStep": "0", "total": "13"}
        assert row["grade (%)"] == "50.0"
        assert "WholeStep: not counted, because it needs the parts" in row["remark"]
        assert "MicroBatch: ends the process (SIGSEGV)" in row["remark"]
        loop = "Phase4Update: is there an endless loop? The test was ended after 5 seconds"
        assert loop in row["remark"]
        assert "the same code as in train_math.py: response_log_probs, phase 3;" in row["remark"]
        assert "mentions kill: read the file" in row["remark"]

    @pytest.mark.parametrize("change, points, said", [
        (("is_response[1:]", "is_response[:-1]"), 3 + 4 / 6 / 3, "a column too late"),
        (("rewards.mean().item(),", "rewards.mean().item() / 0,"), 4,
         r"WholeStep: ZeroDivisionError: .* \(line \d+\)"),
    ])
    def test_of_the_whole_step_counts_if_all_blanks_are_correct(self, change, points, said):
        """A mistake in a blank does not cost the points of the whole step, too. A mistake outside
        the blanks costs only the points of the whole step."""
        row = class_grades.grade(loop_homework.homework(), "ann.py", changed(change))
        assert row["WholeStep tests"] == [0, 1]
        assert row["grade"] == pytest.approx(100 * points / (4 if points < 4 else 5), abs=0.05)
        assert re.search(said, row["remark"])


def changed(*changes):
    """train_math.py with these changes, which are pairs (old text, new text)."""
    text = SOURCE
    for right, wrong in changes:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    return text


NO_REPEAT = ("[prompt for prompt in rollout.prompts for _ in range(cfg.group_size)]",
             "rollout.prompts")
OLD = "            batch.old_log_probs = parts.response_log_probs(model, batch, cfg.temperature)"
NEW = "            log_probs = parts.response_log_probs(model, batch, cfg.temperature)"
LOOPS = """    for minibatch in minibatches * cfg.epochs:
"""
SWAPPED = """    for minibatch in [m for m in minibatches for _ in range(cfg.epochs)]:
"""
UPDATE = "            update.append((batch, log_probs.detach(), loss.item()))\n"
NORM = """        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
"""
STEP = "        optimizer.step()\n        optimizer.zero_grad()\n"
DENOMINATOR = "denominator=denominator)\n            with"
MISTAKES = [  # (the only blank that loses points, apart from the whole step; the change; the hint)
    ("MicroBatch", ("is_response[1:]", "is_response[:-1]"), "a column too late"),
    ("MicroBatch", ("is_response[1:]", "is_response"), "has L - 1 columns"),
    ("MicroBatch", ("[True] * len(responses[i])", "[t != 1 for t in responses[i]]"), "end token"),
    ("MicroBatch", ("[True] * len(responses[i])", "[t != 0 for t in responses[i]]"), "may be 0"),
    ("MicroBatch", ("[True] * len(responses[i])", "[True] * (len(responses[i]) - 1) + [False]"),
     "the last token of each response belongs to it"),
    ("MicroBatch", ("is_response[1:]", "is_response[2:] + [False]"), "a column too early"),
    ("MicroBatch", ("advantages[self.indices]", "advantages[:len(ids)]"), "those of `indices`"),
    ("MicroBatch", ("[False] * len(prompts[i])", "[True] * len(prompts[i])"), "on the prompt"),
    ("MicroBatch", ("torch.tensor(is_response[1:])", "torch.tensor(is_response[1:]).long()"),
     "a boolean tensor"),
    ("MicroBatch", ("prompts[i] + responses[i])", "responses[i] + prompts[i])"), "comes before"),
    ("MicroBatch", ("advantages[self.indices]", "advantages"), "only those of `indices`"),
    ("MicroBatch", ("pad_sequence(mask, batch_first=True).to(device)",
                    "pad_sequence(mask, batch_first=True)"), ".to(device)"),
    ("ResponseLogProbs", ("hidden[:, :-1][batch.mask]", "hidden[:, 1:][batch.mask]"), "too late"),
    ("ResponseLogProbs", ("batch.ids[:, 1:][batch.mask]", "batch.ids[:, :-1][batch.mask]"),
     "take ids[:, 1:]"),
    ("ResponseLogProbs", ("tokens[None], temperature)[0]", "tokens[None])[0]"), "has no effect"),
    ("ResponseLogProbs", ("tokens[None], temperature)[0]", "tokens[None], 1 / temperature)[0]"),
     "divide by the temperature"),
    ("ResponseLogProbs", ("token_log_probs(logits, tokens[None], temperature)[0]",
                          "logits[0].gather(-1, tokens[:, None])[:, 0] / temperature"),
     "log_softmax is missing"),
    ("ResponseLogProbs", ("tokens[None], temperature)[0]", "tokens[None], temperature)[0].exp()"),
     "take its log"),
    ("ResponseLogProbs", ("log_probs.new_zeros(", "log_probs.new_ones("), "0 on the prompt"),
    ("ResponseLogProbs", ("use_cache=False).last_hidden_state",
                          "use_cache=False).last_hidden_state.detach()"), "all the way down"),
    ("Phase3Remember", NO_REPEAT, "a prompt for each response, here 16, not 4"),
    ("Phase3Remember", (NO_REPEAT[0], "rollout.prompts * cfg.group_size"), "not all in turn"),
    ("Phase3Remember", ("    with torch.no_grad():\n        for batch in",
                        "    with contextlib.nullcontext():\n        for batch in"), "no_grad"),
    ("Phase3Remember", (OLD, OLD.replace("cfg.temperature", "1.0")), "at cfg.temperature"),
    ("Phase3Remember", (OLD, OLD.replace("parts.", "0 * parts.")), "of the policy"),
    ("Phase3Remember", ("        for batch in itertools.chain(*minibatches):\n" + OLD,
                        "        for batch in minibatches[0] if minibatches else []:\n" + OLD),
     "has no old_log_probs"),
    ("Phase3Remember", (OLD, OLD + "\n    minibatches = parts.build_minibatches(prompts, "
                        "rollout.responses, advantages, cfg)"), "has no old_log_probs"),
    ("Phase3Remember", (OLD, OLD + "\n    1 / 0"), "ZeroDivisionError"),
    ("Phase3Remember", (OLD, OLD + "\n    raise NotImplementedError"), "to be written"),
    ("Phase4Update", ("    updates = []", "    1 / 0\n    updates = []"), "ZeroDivisionError"),
    ("Phase4Update", ("    updates = []", "    raise NotImplementedError\n    updates = []"),
     "to be written"),
    ("Phase4Update", (STEP, "        optimizer.step()\n"), "zero_grad"),
    ("Phase4Update", (STEP, "        optimizer.zero_grad()\n"), "step() is never called"),
    ("Phase4Update", ("                loss.backward()\n", "                pass\n"),
     "loss.backward() must come before"),
    ("Phase4Update", ("                loss.backward()\n", "                (-loss).backward()\n"),
     "the sign of the gradient"),
    ("Phase4Update", (DENOMINATOR, DENOMINATOR.replace("=denominator", "=len(batch.indices)")),
     "not those of the micro-batch"),
    ("Phase4Update", (DENOMINATOR, DENOMINATOR.replace("denominator=denominator", "")),
     "not those of the micro-batch"),
    ("Phase4Update", ("len(rollout.responses) // cfg.minibatches", "len(rollout.responses)"),
     "not those of the whole rollout"),
    ("Phase4Update", (DENOMINATOR, DENOMINATOR.replace(
        "=denominator", "=sum(len(b.indices) for b in minibatch)")), "must count responses of"),
    ("Phase4Update", (LOOPS, SWAPPED), "epochs are the outer loop"),
    ("Phase4Update", (LOOPS, LOOPS.replace(" * cfg.epochs", "")), "not one"),
    ("Phase4Update", (UPDATE + NORM + STEP, UPDATE + (NORM + STEP).replace("        ", " " * 12)),
     "not one for each micro-batch"),
    ("Phase4Update", (UPDATE, UPDATE + "            if batch is not minibatch[-1]:\n"
                      "                optimizer.zero_grad()\n"), "only the last micro-batch"),
    ("Phase4Update", ("                loss.backward()\n",
                      "                if batch is minibatch[-1]:\n"
                      "                    loss.backward()\n"), "only the last micro-batch"),
    ("Phase4Update", (STEP, STEP + "        with torch.no_grad():\n"
                      "            for batch in minibatch:\n"
                      "                batch.old_log_probs = parts.response_log_probs(\n"
                      "                    model, batch, cfg.temperature)\n"),
     "24 forwards of 6 micro-batches in 2 epochs"),
    ("Phase4Update", (NEW, NEW + "\n            batch.old_log_probs = log_probs.detach()"),
     "the ratio would always be 1"),
    ("Phase4Update", (NORM, NORM.replace("1.0", "1e9")), "not clipped to norm 1"),
    ("Phase4Update", (NORM + STEP, "        optimizer.step()\n" + NORM
                      + "        optimizer.zero_grad()\n"), "before the step"),
    ("Phase4Update", ("loss_function(log_probs, batch.old_log_probs,",
                      "loss_function(log_probs, log_probs.detach(),"), "the ratio would always be"),
    ("Phase4Update", ("                                 eps_low, eps_high, denominator",
                      "                                 eps_high, eps_low, denominator"),
     "eps_low comes before eps_high"),
    ("Phase4Update", ("    eps_low, eps_high = cfg.clip_range()\n    denominator",
                      "    eps_low, eps_high = cfg.eps_low, cfg.eps_high\n    denominator"),
     "may be None"),
    ("Phase4Update", (NEW, NEW.replace("cfg.temperature", "1.0")), "at cfg.temperature"),
    ("Phase4Update", (UPDATE, UPDATE.replace(".detach()", "")), "detach the log-probs"),
    ("Phase4Update", (UPDATE, UPDATE.replace("loss.item()", "loss.detach()")), "by its .item"),
    ("Phase4Update", ("batch.advantages, batch.mask,\n                                 eps_low",
                      "batch.advantages, batch.mask | True,\n                                 "
                      "eps_low"), "the mask of the loss"),
    ("Phase4Update", ("    updates = []", "    minibatches[0]\n    updates = []"), "IndexError"),
]


def first_hints(path, monkeypatch):
    """{blank: the first line of the first failure} of this file, in this process.

    The whole step, which needs all blanks, is left out."""
    monkeypatch.setattr(test_loop, "PATH", path)
    monkeypatch.setattr(test_loop, "loop", test_loop.load(), raising=False)
    found = {}
    for blank in BLANKS[:-1]:
        tests = getattr(test_loop, f"Test{blank}")()
        for name in vars(type(tests)):
            if not name.startswith("test_") or blank in found:
                continue
            try:
                getattr(tests, name)()
            except (Exception, pytest.fail.Exception) as error:
                found[blank] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


class TestMistakes:
    @pytest.mark.parametrize("i", range(len(MISTAKES)))
    def test_cost_points_in_their_own_blank_and_say_where(self, i, tmp_path, monkeypatch):
        blank, change, hint = MISTAKES[i]
        path = tmp_path / "wrong.py"
        path.write_text(changed(change), encoding="utf-8")
        found = first_hints(path, monkeypatch)
        assert [*found] == [blank], found
        assert hint in found[blank]

    def test_are_not_found_in_another_correct_file(self, tmp_path, monkeypatch):
        """A correct file that is written in another way: with the module's own functions, a loop
        over indices, detached old log-probs, and gradients that are set to None first."""
        path = tmp_path / "other.py"
        path.write_text(changed(
            ("parts.build_minibatches(prompts, rollout", "build_minibatches(prompts, rollout"),
            ("    with torch.no_grad():\n        for batch in itertools.chain(*minibatches):\n"
             + OLD, "    for minibatch in minibatches:\n        for k in range(len(minibatch)):\n"
             "            minibatch[k].old_log_probs = response_log_probs(\n"
             "                model, minibatch[k], cfg.temperature).detach()"),
            (LOOPS, "    for number in range(cfg.epochs * len(minibatches)):\n"
             "        minibatch = minibatches[number % len(minibatches)]\n"
             "        optimizer.zero_grad(set_to_none=True)\n"),
            (NEW, NEW.replace("parts.", "")),
            (STEP, "        optimizer.step()\n"),
            ("            with tf32_matmuls():\n                loss.backward()\n",
             "            loss.backward()\n"),
            ("    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False)"
             ".last_hidden_state\n", """    logits = model(batch.ids).logits[:, :-1] / temperature
    own = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]
    return own.masked_fill(~batch.mask, 0)
    hidden = model.get_decoder()(batch.ids).last_hidden_state
"""),
        ), encoding="utf-8")
        assert first_hints(path, monkeypatch) == {}


def test_the_third_blank_is_recognised_by_its_comment(tmp_path, monkeypatch):
    path = tmp_path / "no_comment.py"
    path.write_text(SOURCE.replace("    # 3 REMEMBER", "    # third"), encoding="utf-8")
    found = first_hints(path, monkeypatch)
    assert set(found) == {"Phase3Remember", "Phase4Update"}
    assert 'keep the comment "# 3 REMEMBER"' in found["Phase3Remember"]


def test_pieces_of_a_copy_are_recognised():
    own = SOURCE.replace("is_response", "mine").replace("grad_norms", "norms")
    homework = loop_homework.homework()
    same = class_grades.fingerprints(homework, SOURCE)
    assert list(same) == list(loop_homework.HINTS)
    own = class_grades.fingerprints(homework, own)
    assert own["MicroBatch.__init__"] == same["MicroBatch.__init__"]
    assert own["phase 4"] == same["phase 4"]
