"""The specification of the loop: what goes through the model, what is remembered, the update.

    LOOP=train_math.py python -m pytest -x test_loop.py               the student's loop
    LOOP=train_math.py python -m pytest -q --tb=no -rN test_loop.py   the grade: a line a blank
    $env:LOOP="train_math.py"                                         PowerShell, on a line before

Tests stand in the order of the blanks; the first line of a failure says what to look at, then come
the numbers. Phases 3 and 4 are tested on a table of six weights in place of a model, where a
gradient fits on a line, and with the tests' own parts: a mistake in one blank costs no points in
another. Only the whole step needs all four.
"""
import importlib.util
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
FOLDER = HERE if (HERE / "train_math.py").exists() else HERE.parent
PATH = Path(os.environ.get("LOOP") or FOLDER / "train_math.py").resolve()
END = 1       # the token that ends a response, and in these tests also the one that pads
WORDS = 6     # 0 to 5
BLANKS = "MicroBatch", "ResponseLogProbs", "Phase3Remember", "Phase4Update", "WholeStep"


# ---- the grader ----------------------------------------------------------------------------------


def fail(hint, *numbers):
    pytest.fail("\n  ".join([hint, *numbers]), pytrace=False)


def check(got, expected, hint, tolerance=1e-5):
    """One shape, and each element within tolerance, or the test fails with the hint."""
    got = torch.as_tensor(got).detach().double()
    expected = torch.as_tensor(expected).detach().double()
    if got.shape != expected.shape or not ((got - expected).abs() <= tolerance).all():
        fail(hint, f"got      {got.tolist()}", f"expected {expected.tolist()}")


class Grade:
    """Prints a line a blank: tests passed, and what to look at first."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter):
        yield
        terminalreporter.section(f"grade of {PATH.name}: tests passed, and what to look at first")
        reports = [report for report in itertools.chain(*terminalreporter.stats.values())
                   if getattr(report, "when", "") == "call"]
        for blank in BLANKS:
            own = [report for report in reports if f"::Test{blank}::" in report.nodeid]
            missed = [report for report in own if not report.passed]
            line = f"{blank:18}{len(own) - len(missed):3} of {len(own)}"
            for report in missed[:1]:
                crash = getattr(report.longrepr, "reprcrash", None)  # a skipped test has none
                hint = crash.message if crash else "skipped, which is not passed"
                line += "  " + hint.partition("\n")[0].removeprefix("Failed: ")
            terminalreporter.line(line)


@pytest.fixture(scope="module", autouse=True)
def loaded(request):
    """Loads the file under test; where it does not load, the run ends with one line."""
    global loop
    sys.path[:0] = [str(PATH.parent), str(FOLDER)]  # where its gspo.py is
    spec = importlib.util.spec_from_file_location("loop_under_test", PATH)
    loop = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loop
    try:
        spec.loader.exec_module(loop)
    except (Exception, SystemExit) as error:
        pytest.exit(f"{PATH.name} does not load: {error!r}", returncode=2)
    if "LOOP" in os.environ:
        request.config.pluginmanager.register(Grade())


# ---- what the tests run it on --------------------------------------------------------------------


def tiny_qwen():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
        tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).eval()


def tokens(words):
    """ "23. 4." is [[2, 3, END], [4, END]]."""
    return [[END if letter == "." else int(letter) for letter in word] for word in words.split()]


PROMPTS = tokens("2 33 444 5555")
RESPONSES = tokens("23. 4. 550. . 0. 34. 2. 503. 44. . 025. 3. 5. 20. . 433.")  # four to each
ADVANTAGES = torch.tensor([3, -1, -1, -1, 2, 2, -2, -2]).repeat(2) / 4
TOKENS = torch.tensor([(response + [0, 0, 0])[:4] for response in RESPONSES])
MASK = torch.arange(4) < torch.tensor([[len(response)] for response in RESPONSES])
TABLE = torch.linspace(-1, 1, WORDS)  # a policy: the weight of each word, whatever stands before


def train_step(model, optimizer, rewards, parts, **settings):
    """The file's own train_step on these responses, rewards and parts."""
    sampled = PROMPTS, RESPONSES, [""] * 16, torch.zeros(16, 4)
    questions = [{"question": ""}] * 4
    cfg = loop.Settings(device="cpu", group_size=4, prompts_per_step=4, minibatches=2, max_steps=1,
                        **settings)

    def reward(**columns):
        return rewards.tolist()

    with mock.patch.object(loop, "sample", return_value=sampled):
        return loop.train_step(model, None, optimizer, questions, 1, cfg, reward, **parts)


class Update:
    """A train_step on the table, with parts of the tests' own, and what it did with them."""

    def __init__(self, advantages=ADVANTAGES, **settings):
        self.policy = torch.nn.ParameterList([TABLE.clone()])
        self.asked = []      # (micro-batch, temperature) of each forward
        self.losses = []     # what the loss was given, and how many optimizer steps before
        self.weights = []    # before each optimizer step, and the gradient that it met
        self.gradients = []
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=1.0)
        optimizer.register_step_pre_hook(self.before_step)
        parts = {
            "group_advantages": lambda *_: advantages,
            "build_minibatches": self.build,
            "response_log_probs": self.log_probs,
            "loss": self.loss}
        with mock.patch.object(loop, "metrics", return_value={}) as metrics:
            train_step(self.policy, optimizer, advantages, parts, learning_rate=0.5, **settings)
        self.grad_norms = metrics.call_args.args[4]

    def build(self, prompts, responses, advantages, cfg):
        """Minibatches of eight responses, in micro-batches of up to three; A = 0 is left out."""
        self.prompts = prompts
        self.built = []
        for minibatch in torch.arange(16).split(8):
            parts = minibatch[advantages[minibatch] != 0].split(3)
            self.built.append([
                SimpleNamespace(
                    rows=rows,
                    tokens=TOKENS[rows],
                    mask=MASK[rows],
                    advantages=advantages[rows])
                for rows in parts])
        return [minibatch for minibatch in self.built if minibatch]

    def log_probs(self, model, batch, temperature):
        self.asked.append((batch, temperature))
        return (model[0] / temperature).log_softmax(dim=0)[batch.tokens] * batch.mask

    def loss(self, log_probs, old, advantages, mask, eps_low, eps_high, denominator=None):
        """REINFORCE's: without any ratio, so that old log-probs do not matter here."""
        self.losses.append((old, advantages, eps_low, eps_high, len(self.gradients)))
        mean = (log_probs * mask).sum(dim=1) / mask.sum(dim=1)
        return -(advantages * mean).sum() / (denominator or len(advantages))

    def before_step(self, *_):
        gradient = self.policy[0].grad
        if gradient is None:
            gradient = torch.zeros(WORDS)
        self.gradients.append(gradient.clone())
        self.weights.append(self.policy[0].detach().clone())

    def by_hand(self, step):
        """The gradient of optimizer step 0, 1, ...: minus the sum of A / 8 times (the share of
        each word in the response, minus its probability), at the weights as they were."""
        total = torch.zeros(WORDS)
        for batch in self.built[step % 2]:
            for i, advantage in zip(batch.rows, batch.advantages):
                share = torch.eye(WORDS)[RESPONSES[i]].mean(dim=0)
                total -= advantage / 8 * (share - self.weights[step].softmax(dim=0))
        return total


# ---- the four blanks, and all together -----------------------------------------------------------


class TestMicroBatch:
    PROMPTS = tokens("22 3 4444")
    ANSWERS = tokens("50. 555 .")  # the second was cut: it has no end token

    def made(self, rows, advantages=None):
        return loop.MicroBatch(self.PROMPTS, self.ANSWERS, rows, "cpu", advantages)

    def test_mask_is_1_on_the_response_as_predicted_a_column_earlier(self):
        mask = self.made([0, 1, 2]).mask
        expected = tokens("0111 1110 0001")
        check(mask, expected, "mask (b, L - 1) is about ids[:, 1:]: 1 on response tokens alone")

    def test_mask_keeps_the_end_token_where_it_is_the_pad_token(self):
        mask = self.made([0, 2]).mask
        check(mask.sum(dim=1), [3, 1], "the end token belongs to the response: take lengths, "
              "not `ids != pad`, since a model's pad token may be its end token")

    def test_ids_and_advantages_are_of_the_rows_asked_for_in_this_order(self):
        batch = self.made([1, 0], torch.tensor([0.5, -1.0, 2.0]))
        first, second = tokens("3555 2250.")
        check(batch.ids[0, :4], first, "ids: prompt, then response, padded on the right")
        check(batch.ids[1], second, "ids: prompt, then response, of the rows asked for")
        check(batch.advantages, [-1.0, 0.5], "advantages[rows]: each response keeps its own")


class TestResponseLogProbs:
    BATCH = SimpleNamespace(
        ids=torch.tensor(tokens("2250. 354.. 4444.")),
        mask=torch.tensor(tokens("0111 1110 0001")).bool())

    def token_by_token(self, model, batch, temperature):
        """Each response token from a forward of its own, over what stands before it."""
        expected = torch.zeros(3, 4)
        for i, t in batch.mask.nonzero().tolist():
            logits = model(batch.ids[i:i + 1, :t + 1]).logits[0, -1]
            expected[i, t] = (logits / temperature).log_softmax(dim=0)[batch.ids[i, t + 1]]
        return expected

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_equals_a_forward_for_each_token(self, temperature):
        got = loop.response_log_probs(tiny_qwen(), self.BATCH, temperature)
        expected = self.token_by_token(tiny_qwen(), self.BATCH, temperature)
        check(got, expected, "log softmax(logits / temperature) at the token, where logits[:, t] "
              f"predict ids[:, t + 1]; 0 off the mask (temperature {temperature})", 1e-4)

    def test_carries_the_gradient_to_the_model(self):
        gradients = []
        for log_probs in loop.response_log_probs, self.token_by_token:
            model = tiny_qwen()
            log_probs(model, self.BATCH, 1.0).sum().backward()
            gradients.append(model.get_input_embeddings().weight.grad)
        check(*gradients, "the gradient is that of the log-probs, all the way down", 1e-3)


class TestPhase3Remember:
    def test_each_response_has_its_own_prompt(self):
        got = [PROMPTS.index(prompt) for prompt in Update().prompts]
        check(got, torch.arange(16) // 4, "build_minibatches takes a prompt for each response: "
              "each of them group_size times, side by side (here are their numbers)")

    def test_old_log_probs_are_of_the_policy_that_sampled_taken_once(self):
        update = Update(epochs=2)
        for (old, *_, steps), batch in zip(update.losses, 2 * sum(update.built, [])):
            before = TABLE.log_softmax(dim=0)[batch.tokens] * batch.mask
            check(old, before, "old log-probs: taken once, before any optimizer step "
                  f"({steps} before this loss)", 0)
            if old.requires_grad:
                fail("old log-probs are numbers: take them under torch.no_grad()")

    def test_old_and_new_log_probs_come_from_the_same_micro_batches(self):
        update = Update()
        built = sum(update.built, [])
        numbers = {id(batch): i for i, batch in enumerate(built)}
        got = [numbers.get(id(batch), -1) for batch, _ in update.asked]
        check(got, 2 * list(range(6)), "a forward of each micro-batch for old log-probs, one for "
              "new: other padding rounds otherwise (-1: build_minibatches has not made this one)")

    def test_old_and_new_log_probs_are_at_the_temperature_of_the_sampling(self):
        got = [temperature for _, temperature in Update(temperature=0.8).asked]
        check(got, [0.8] * len(got), "cfg.temperature, for old and for new log-probs")


class TestPhase4Update:
    def test_takes_one_optimizer_step_for_each_minibatch_of_each_epoch(self):
        check(len(Update(epochs=3).gradients), 6, "optimizer steps: minibatches x epochs, here 2 x "
              "3 (not one a micro-batch, not one a rollout)")

    def test_sums_micro_batches_to_reinforces_gradient(self):
        update = Update()
        check(update.gradients[0], update.by_hand(0), "the first gradient, by hand: micro-batches "
              "add up, each over the same denominator, responses // minibatches = 8")

    def test_counts_responses_without_gradient_in_the_denominator(self):
        update = Update(ADVANTAGES.where(torch.arange(16) > 3, 0))
        check(update.gradients[0], update.by_hand(0), "four of eight responses are left out of the "
              "forward: the denominator is 8 all the same")

    def test_starts_each_step_from_a_gradient_of_zero(self):
        update = Update(epochs=2)
        for step in range(1, len(update.gradients)):
            check(update.gradients[step], update.by_hand(step), f"step {step + 1} meets the "
                  "gradient of its own minibatch alone: zero_grad")

    def test_clips_a_gradient_to_norm_1_before_the_step(self):
        update = Update(100 * ADVANTAGES)
        norm = update.by_hand(0).norm()
        check(update.gradients[0], update.by_hand(0) / norm, "too long: scaled to norm 1", 1e-4)
        check(update.grad_norms[0], norm, "grad_norms: the norm before that", 1e-3)

    def test_gives_the_loss_log_probs_old_ones_advantages_and_the_clip_range(self):
        update = Update(eps_low=0.01, eps_high=0.02)
        for (_, advantages, low, high, _), batch in zip(update.losses, update.built[0]):
            check(advantages, batch.advantages, "the loss takes log-probs, old ones, advantages")
            check((low, high), (0.01, 0.02), "cfg.eps_low and cfg.eps_high")

    def test_changes_no_weight_where_all_rewards_of_a_group_are_equal(self):
        update = Update(0 * ADVANTAGES)
        check(update.policy[0], TABLE, "no advantages, no update", 0)


class TestWholeStep:
    def test_starts_from_ratios_of_exactly_1_and_learns(self):
        """Word 2 earns 1, word 3 costs 1."""
        rewards = torch.tensor([1.0 * r.count(2) - r.count(3) for r in RESPONSES])
        model = tiny_qwen()
        optimizer = torch.optim.SGD(model.parameters())
        row = train_step(model, optimizer, rewards, {}, learning_rate=0.1, epochs=2)
        if not isinstance(row["loss"], float):
            fail("seen: take the loss's .item(), and detach the log-probs, or memory fills up")
        check(row["log_ratio_first_max"], 0.0, "first minibatch: every ratio is exactly 1", 0)
        prompt = torch.tensor(PROMPTS[:1])
        before = tiny_qwen()(prompt).logits[0, -1].softmax(dim=-1)
        after = model(prompt).logits[0, -1].softmax(dim=-1)
        if not after[2] - after[3] > before[2] - before[3]:
            fail("after a step, word 2, which earns 1, is likelier, and 3, which costs 1, less")
