"""The specification of the loop: what goes through the model, what is remembered, the update.

    LOOP=train_math.py python -m pytest -x test_loop.py    work on your own file
    LOOP=train_math.py python -m pytest test_loop.py       end with a line for each blank

The tests are in the order of the blanks. The first line of a failure says what to look at, and the
numbers follow. Phases 3 and 4 of train_step are tested separately. The tests provide what the other
phase would do, so a mistake in one blank costs nothing in another. They find the phases by the
comments "# 3 REMEMBER" and "# 4 UPDATE". Instead of a language model, they use a table of six
weights, whose gradient fits on one line.
"""
import itertools
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
FOLDER = HERE if (HERE / "train_math.py").exists() else HERE.parent
sys.path.insert(0, str(FOLDER))    # gspo.py, support/ and test_gspo.py are there
from test_gspo import Report, fail, load  # noqa: E402

PATH = Path(os.environ.get("LOOP", FOLDER / "train_math.py")).resolve()
loop = load(PATH)
END = 1       # the token that ends a response, and in these tests also the one that pads
WORDS = 6     # 0 to 5


@pytest.fixture(scope="session", autouse=True)
def report(request):
    if "LOOP" in os.environ:
        request.config.pluginmanager.register(Report())


def check(got, expected, hint, tolerance=1e-5, mistakes=()):
    """The test fails with the hint, unless the shapes are equal and each element within tolerance.

    mistakes: pairs of a wrong result, which its numbers do not explain, and what to say instead."""
    got = torch.as_tensor(got).detach().double()

    def is_found(value):
        value = torch.as_tensor(value).detach().double()
        return got.shape == value.shape and bool(((got - value).abs() <= tolerance).all())

    if not is_found(expected):
        known = [look_at for value, look_at in mistakes if is_found(value)]
        expected = torch.as_tensor(expected).tolist()
        fail([*known, hint][0], f"got      {got.tolist()}", f"expected {expected}")


# ---- the phases of train_step --------------------------------------------------------------------


def phase(number):
    """train_step up to the end of phase 3 or 4, as a function that returns its local variables.

    For phase 4, phase 3 is not run, and the tests provide `minibatches` instead. Empty lines stand
    for what is left out, so that the line numbers are those of the file."""
    source = PATH.read_text(encoding="utf-8")
    phases = "^(def train_step.*?)^(    # 3 REMEMBER.*?)^(    # 4 UPDATE.*?)^    "
    found = re.search(phases + "(return|check_finite)", source, re.DOTALL | re.MULTILINE)
    if not found:
        fail('keep the comments "# 3 REMEMBER" and "# 4 UPDATE" in train_step')
    before, remember, update, _ = found.groups()
    if number == 4:
        given = "    minibatches = the_tests_make_them(rollout, advantages, cfg)"
        remember = given + "\n" * remember.count("\n") + update
    above = "\n" * source.count("\n", 0, found.start())
    names = dict(vars(loop))
    exec(compile(f"{above}{before}{remember}\n    return locals()\n", str(PATH), "exec"), names)
    return names["train_step"]


# ---- the data of the tests -----------------------------------------------------------------------


def tokens(words):
    """tokens("23. 4.") is [[2, 3, END], [4, END]]."""
    return [[END if letter == "." else int(letter) for letter in word] for word in words.split()]


PROMPTS = [prompt for prompt in tokens("2 33 444 5555") for _ in range(4)]
RESPONSES = tokens("23. 4. 550. . 0. 34. 2. 503. 44. . 025. 3. 5. 20. . 433.")
ADVANTAGES = torch.tensor([3, -1, -1, -1, 2, 2, -2, -2]).repeat(2) / 4
TOKENS = torch.tensor([(response + [0, 0, 0])[:4] for response in RESPONSES])
MASK = torch.arange(4) < torch.tensor([[len(response)] for response in RESPONSES])
QUESTIONS = [{"question": ""}] * 4
SIZE = {"group_size": 4, "prompts_per_step": 4, "minibatches": 2, "max_steps": 1}
TABLE = torch.linspace(-1, 1, WORDS)  # a policy: the logit of each word, whatever came before it


def rollout_of(prompts, responses):
    n = len(responses)
    return loop.Rollout(
        questions=[{"question": ""} for _ in range(n)], prompts=prompts, responses=responses,
        log_probs=torch.zeros(n, 4), texts=[""] * n,
        is_sampled=[[True] * len(response) for response in responses])


def micro_batches(advantages):
    """Two minibatches of eight responses, in micro-batches of up to three. Responses whose
    advantage is 0 are left out, and so is a minibatch that has only such responses."""
    minibatches = []
    for minibatch in torch.arange(16).split(8):
        minibatches.append([])
        for rows in filter(len, minibatch[advantages[minibatch] != 0].split(3)):
            first = torch.tensor([[PROMPTS[i][-1]] for i in rows.tolist()])
            minibatches[-1].append(SimpleNamespace(
                indices=rows.tolist(), ids=torch.cat([first, TOKENS[rows]], dim=1),
                mask=MASK[rows], advantages=advantages[rows], old_log_probs=None, extra={}))
    return [minibatch for minibatch in minibatches if minibatch]


def old_log_probs_of(batch):
    """These belong to no policy, so that the tests of phase 4 can recognise them."""
    return -0.5 * batch.mask * (1 + torch.tensor(batch.indices)[:, None])


def log_probs_of(weights, batch, temperature=1.0):
    return (weights / temperature).log_softmax(dim=0)[batch.ids[:, 1:]] * batch.mask


class Table(torch.nn.Module):
    """A policy of six weights."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(TABLE.clone())
        self.device = self.weights.device


class Run:
    """Runs one phase of the file on the table, with parts that the tests provide, and records what
    happens."""

    def __init__(self, number, advantages=ADVANTAGES, **settings):
        self.policy = Table()
        self.built = micro_batches(advantages)
        self.given = None    # what build_minibatches got
        self.asked = []      # (micro-batch, temperature) of each forward
        self.losses = []     # the arguments of each loss
        self.weights = []    # before each optimizer step
        self.gradients = []  # in each optimizer step
        if number == 4:
            for batch in itertools.chain(*self.built):
                batch.old_log_probs = old_log_probs_of(batch)
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=1.0)
        optimizer.register_step_pre_hook(self.before_step)
        cfg = loop.Settings(device="cpu", **SIZE, **settings)
        self.rollout = rollout_of(PROMPTS, RESPONSES)
        algorithm = loop.ALGORITHMS["gspo"]._replace(
            loss=self.loss, advantages=lambda *_: advantages)
        stubs = {"build_minibatches": self.build, "response_log_probs": self.log_probs}
        parts = loop.Parts(
            sample=lambda *_: self.rollout, reward=lambda **columns: [0.0] * 16, **stubs)
        try:
            with (mock.patch.multiple(loop, create=True, the_tests_make_them=self.build, **stubs),
                  mock.patch.dict(loop.ALGORITHMS, gspo=algorithm)):
                self.locals = phase(number)(
                    self.policy, None, optimizer, QUESTIONS, 1, cfg, parts)
        except NameError as error:
            fail(f"{error} (phase 4 may use only `minibatches` of phase 3)")
        if self.given is None:
            fail("phase 3 must call build_minibatches, which makes the minibatches")

    def value(self, name):
        if name not in self.locals:
            fail(f"the lines below this phase need the variable {name}")
        return self.locals[name]

    def build(self, rollout, advantages, cfg, keeps_all=False):
        self.given = rollout, advantages
        return self.built

    def log_probs(self, model, batch, temperature):
        self.asked.append((batch, temperature))
        return log_probs_of(model.weights, batch, temperature)

    def loss(self, log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        """The loss of REINFORCE. It has no ratio, so old log-probs do not change its gradient."""
        eps = eps_low, eps_high
        self.losses.append(SimpleNamespace(
            log_probs=log_probs, old=old_log_probs, advantages=advantages, mask=mask, eps=eps))
        mean = (log_probs * mask).sum(dim=1) / mask.sum(dim=1)
        return -(advantages * mean).sum() / (denominator or len(advantages))

    def before_step(self, *_):
        weights = self.policy.weights
        self.gradients.append(torch.zeros(WORDS) if weights.grad is None else weights.grad.clone())
        self.weights.append(weights.detach().clone())

    def by_hand(self, step, minibatch):
        """The gradient of optimizer step 0, 1, ...: minus the sum of A / 8 times (the frequency of
        each word in the response, minus its probability), at the weights before the step."""
        total = torch.zeros(WORDS)
        for batch in minibatch:
            for i, advantage in zip(batch.indices, batch.advantages):
                frequency = torch.eye(WORDS)[RESPONSES[i]].mean(dim=0)
                total -= advantage / 8 * (frequency - self.weights[step].softmax(dim=0))
        return total

    def check_gradient(self, step, hint):
        """Checks the gradient of this optimizer step, and recognises known mistakes."""
        if len(self.gradients) <= step:
            fail(f"optimizer step {step + 1} is missing")
        minibatch = self.built[step]
        right = self.by_hand(step, minibatch)
        sizes = [len(batch.indices) for batch in minibatch]
        by_its_size = [self.by_hand(step, [b]) * 8 / size for b, size in zip(minibatch, sizes)]
        known = [
            (torch.zeros(WORDS), "the gradient is 0: loss.backward() must come before the step"),
            (-right, "the sign of the gradient is wrong: minimise the loss as it is"),
            (self.by_hand(step, minibatch[-1:]), "only the last micro-batch has an effect: call "
             "backward for each one, and zero_grad only after the step"),
            (right * 8 / sum(sizes), "the denominator must count responses of advantage 0, too"),
            (right * 8 / 16, "the denominator must count one minibatch, not the whole rollout"),
            (sum(by_its_size), "the denominator must count the minibatch, not the micro-batch"),
        ]
        if step > 0:
            known.append((right + self.gradients[step - 1], "call zero_grad after each step"))
        check(self.gradients[step], right, hint, mistakes=known)


def tiny_qwen():
    """A tiny model, always with the same random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.5,
        tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).eval()


# ---- the four blanks -----------------------------------------------------------------------------


class TestMicroBatch:
    PROMPTS = tokens("22 3 4444")
    ANSWERS = tokens("50. 555 .")  # the second was cut: it has no end token

    def made(self, rows, is_second_sampled=True):
        rollout = rollout_of(self.PROMPTS, self.ANSWERS)
        rollout.is_sampled[0][1] = is_second_sampled
        return loop.MicroBatch(rollout, torch.tensor([0.5, -1.0, 2.0]), rows, "cpu")

    def test_ids_are_the_prompt_then_the_response(self):
        batch = self.made([1, 0])
        hint = ("ids (b, L) hold the prompt and then the response of each index, in the order of "
                "`indices`, padded on the right")
        if batch.ids.shape != (2, 5):
            fail(hint, f"got      the shape {tuple(batch.ids.shape)}", "expected (2, 5)")
        first, second = tokens("3555 2250.")
        check(batch.ids[0, :4], first, hint)
        check(batch.ids[1], second, hint)
        if not 0 <= batch.ids[0, 4] < WORDS:
            fail("padding goes through the model, too: use an id of the vocabulary, such as 0")

    def test_mask_is_1_on_the_response_as_predicted_a_column_earlier(self):
        hint = ("the mask (b, L - 1) belongs to ids[:, 1:], because position t predicts t + 1. It "
                "is 1 on the response, including its end token and tokens 0, and 0 on the prompt "
                "and on padding")
        check(self.made([0, 1, 2]).mask, tokens("0111 1110 0001"), hint)

    def test_mask_is_0_on_a_token_that_the_model_did_not_sample(self):
        """A tool has written the second token of the first response."""
        mask = self.made([0, 1], is_second_sampled=False).mask
        hint = "the mask must be 0 on tokens that the model did not sample: use rollout.is_sampled"
        check(mask, tokens("0101 1110"), hint)

    def test_mask_is_boolean(self):
        mask = self.made([0, 2]).mask
        if mask.dtype != torch.bool:
            fail(f"the mask must be a boolean tensor, because it is an index; it is {mask.dtype}")

    def test_advantages_are_of_the_rows_asked_for_in_this_order(self):
        hint = "advantages (b,) hold those of `indices`, in their order"
        check(self.made([1, 0]).advantages, [-1.0, 0.5], hint)


class TestResponseLogProbs:
    ONE = SimpleNamespace(ids=torch.tensor([[2, 3]]), mask=torch.tensor([[True]]))
    BATCH = SimpleNamespace(
        ids=torch.tensor(tokens("2250. 354.. 4444.")),
        mask=torch.tensor(tokens("0111 1110 0001")).bool())

    def got(self, batch, temperature=1.0):
        log_probs = loop.response_log_probs(tiny_qwen(), batch, temperature)
        if not isinstance(log_probs, torch.Tensor) or log_probs.shape != batch.mask.shape:
            fail(f"its shape must be the mask's: {tuple(batch.mask.shape)}", f"got {log_probs}")
        return log_probs

    @staticmethod
    def expected(batch, temperature=1.0, model=None):
        """For each response token, a separate forward over the tokens before it."""
        model = model or tiny_qwen()
        expected = torch.zeros(batch.mask.shape)
        for i, t in batch.mask.nonzero().tolist():
            logits = model(batch.ids[i:i + 1, :t + 1]).logits[0, -1]
            expected[i, t] = (logits / temperature).log_softmax(dim=0)[batch.ids[i, t + 1]]
        return expected

    def test_of_one_token_is_its_log_probability(self):
        logits = tiny_qwen()(self.ONE.ids).logits[0].detach()
        before, at = logits.log_softmax(dim=-1)
        hint = "take log softmax of the logits, at the token that follows"
        check(self.got(self.ONE), self.expected(self.ONE), hint, 1e-4, mistakes=[
            ([[logits[0, 3]]], "this is the logit: log_softmax is missing"),
            ([[before[3].exp()]], "this is the probability: take its log"),
            ([[-before[3]]], "the sign is wrong: a log-prob is not above 0"),
            ([[at[3]]], "logits[:, t] predict ids[:, t + 1]: these logits are a position too late"),
            ([[before[2]]], "this is the log-prob of the token itself: take ids[:, 1:]")])

    def test_divides_the_logits_by_the_temperature(self):
        hint = "divide the logits by the temperature, and then take log softmax"
        check(self.got(self.ONE, 0.5), self.expected(self.ONE, 0.5), hint, 1e-4)

    def test_is_0_off_the_mask(self):
        off = self.got(self.BATCH)[~self.BATCH.mask]
        check(off, torch.zeros_like(off), "the result must be 0 on the prompt and on padding", 0)

    def test_is_that_of_each_row(self):
        hint = "each log-prob must be in its row and column: logits[:, :-1] belong to ids[:, 1:]"
        check(self.got(self.BATCH), self.expected(self.BATCH), hint, 1e-4)

    def test_carries_the_gradient_to_the_model(self):
        model = tiny_qwen()
        first_layer = model.get_input_embeddings().weight
        got = loop.response_log_probs(model, self.BATCH, 1.0).sum()
        if got.requires_grad:
            got.backward()
        if first_layer.grad is None:
            fail("no gradient reaches the model's first layer: is something detached on the way?")
        expected = self.expected(self.BATCH, model=model).sum()
        hint = "the gradient must go all the way down: is something detached?"
        check(first_layer.grad, *torch.autograd.grad(expected, first_layer), hint, 1e-3)


class TestPhaseRemember:
    def test_build_minibatches_gets_the_rollout_and_its_advantages(self):
        run = Run(3)
        if run.given[0] is not run.rollout:
            fail("build_minibatches takes the rollout, and not only its prompts or responses")
        check(run.given[1], ADVANTAGES, "it takes the advantages of phase 2, not the rewards", 0)

    def test_minibatches_are_those_of_build_minibatches(self):
        run = Run(3)
        minibatches = run.value("minibatches")
        if [[*map(id, part)] for part in minibatches] != [[*map(id, part)] for part in run.built]:
            fail("`minibatches` must be what build_minibatches returned")

    def test_each_micro_batch_has_old_log_probs_of_the_policy_that_sampled(self):
        run = Run(3)
        for k, batch in enumerate(itertools.chain(*run.built)):
            if batch.old_log_probs is None:
                fail(f"micro-batch {k + 1} of {sum(map(len, run.built))} has no old_log_probs")
            hint = "old_log_probs are response_log_probs of the policy"
            check(batch.old_log_probs, log_probs_of(TABLE, batch), hint, 0)

    def test_each_micro_batch_is_on_policy_and_has_no_gradient(self):
        for batch in itertools.chain(*Run(3).built):
            if batch.old_log_probs is None or batch.old_log_probs.requires_grad:
                fail("old log-probs must not have a gradient: compute them in torch.no_grad()")
            if not getattr(batch, "is_on_policy", False):
                fail("is_on_policy must be True for the metrics")

    def test_old_log_probs_are_at_the_temperature_of_the_sampling(self):
        got = [temperature for _, temperature in Run(3, temperature=0.8).asked]
        check(got, [0.8] * 6, "each micro-batch (here 6) needs one forward, at cfg.temperature")

    def test_changes_no_weight(self):
        check(Run(3).policy.weights, TABLE, "phase 3 must not change the weights", 0)


class TestPhaseUpdate:
    def test_takes_one_optimizer_step_for_each_minibatch_of_each_epoch(self):
        run = Run(4, epochs=3)
        check(len(run.gradients), 6, "one optimizer step for each minibatch of each epoch: 2 x 3")

    def test_takes_all_minibatches_and_then_all_again(self):
        run = Run(4, epochs=2)
        numbers = {id(batch): i for i, batch in enumerate(itertools.chain(*run.built))}
        got = [numbers.get(id(batch), -1) for batch, _ in run.asked]
        hint = "each epoch takes all minibatches, with one forward for each micro-batch"
        check(got, 2 * [0, 1, 2, 3, 4, 5], hint)

    def test_has_new_log_probs_at_the_temperature_of_the_sampling(self):
        got = [temperature for _, temperature in Run(4, temperature=0.8).asked]
        check(got, [0.8] * 6, "each micro-batch (here 6) needs one forward, at cfg.temperature")

    def test_gives_the_loss_what_it_asks_for(self):
        run = Run(4, eps_low=0.01, eps_high=0.02)
        batches = list(itertools.chain(*run.built))
        check(len(run.losses), len(batches), "compute one loss for each micro-batch (here 6)")
        for got, batch in zip(run.losses, batches):
            if not got.log_probs.requires_grad:
                fail("the first argument of the loss must be the new log-probs, with gradient")
            check(got.old, old_log_probs_of(batch), "pass batch.old_log_probs of phase 3", 0)
            check(got.advantages, batch.advantages, "pass batch.advantages", 0)
            check(got.mask, batch.mask, "pass batch.mask", 0)
            check(got.eps, (0.01, 0.02), "pass the clip range of cfg.clip_range()")
        for name in "eps_low", "eps_high":
            run.value(name)
        if None in Run(4).losses[0].eps:
            fail("cfg.eps_low and cfg.eps_high may be None: cfg.clip_range() has the values")

    def test_sums_micro_batches_to_reinforces_gradient(self):
        run = Run(4)
        run.check_gradient(0, "with the denominator 16 // 2 = 8, micro-batches must add up")

    def test_counts_responses_without_gradient_in_the_denominator(self):
        run = Run(4, ADVANTAGES.where(torch.arange(16) % 8 > 3, 0))
        run.check_gradient(0, "four of eight responses are left out, but the denominator is 8")

    def test_starts_each_step_from_a_gradient_of_zero(self):
        run = Run(4)
        run.check_gradient(1, "the second step must use only the gradient of its own minibatch")

    def test_clips_a_gradient_to_norm_1_before_the_step(self):
        run = Run(4, 100 * ADVANTAGES)
        if not run.gradients:
            fail("optimizer.step() is never called")
        hint = "a gradient whose norm is above 1 must be scaled to norm 1 before the step"
        check(run.gradients[0].norm(), 1.0, hint, 1e-4)
        hint = "grad_norms must hold the norm before clipping, not after it"
        check(run.value("grad_norms")[0], run.by_hand(0, run.built[0]).norm(), hint, 1e-2)

    def test_keeps_the_updates_for_the_metrics(self):
        run = Run(4, epochs=2)
        updates = run.value("updates")
        check([len(update) for update in updates], [3] * 4,
              "updates: a list for each optimizer step, with an entry for each micro-batch")
        entries = list(itertools.chain(*updates))
        for (batch, log_probs, value), given in zip(entries, 2 * sum(run.built, [])):
            if batch is not given:
                fail("updates: the entries are (micro-batch, log-probs, loss), in order")
            if log_probs.requires_grad:
                fail("updates: detach the log-probs, or their graphs fill the memory")
            if not isinstance(value, float):
                fail("updates: keep the loss as a number, by its .item()")
        norms = run.value("grad_norms")
        if len(norms) != 4 or not all(isinstance(norm, float) for norm in norms):
            fail("grad_norms must hold 4 numbers, one for each step: use .item()", f"got {norms}")
