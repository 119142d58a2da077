"""What rivals.py passes into train_math.train: the tasks, and losses, advantages, a critic, Routing
Replay, an inference engine. Each piece stands alone, and tests/test_rivals.py says what it must do.
"""
import copy
import itertools
import random
import re

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import train_math
from common.tiny_model import tiny_settings
from common.warm_up import supervise
from gspo import _log_ratio, _loss, _token_mean, group_advantages, grpo_loss, sequence_ratio
from lesson import tiny
from train_math import build_minibatches, correctness_reward, response_log_probs, rollout

# ---- tasks: questions, and a model that solves them less often than it could ---------------------

LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def fibonacci(rng, least, most, slips=0.0, gives_up=0.0):
    """{"question", "answer", "worked"}: Fibonacci numbers modulo 10, counted down, 6 tokens a step.

    "37c" -> worked "c3+7=0b7+0=7a0+7=7\\n#### 7", answer "#### 7". A sloppy teacher writes a random
    digit at a step, from which he goes on, or gives up midway and guesses."""
    n = rng.randint(least, most)
    a = rng.randrange(10)
    b = rng.randrange(10)
    steps = rng.randrange(n) if rng.random() < gives_up else n
    true = [a, b]
    told = [a, b]
    written = ""
    for i in range(n):
        true.append(sum(true[-2:]) % 10)
        if i < steps:
            u, v = told[-2:]
            w = rng.randrange(10) if rng.random() < slips else (u + v) % 10
            written += f"{LABELS[n - 1 - i]}{u}+{v}={w}"
            told.append(w)
    given = told[-1] if steps == n else rng.randrange(10)
    return {"question": f"{a}{b}{LABELS[n - 1]}", "answer": f"#### {true[-1]}",
            "worked": f"{written}\n#### {given}"}


def long_questions(seed, n, least=20, most=32):
    """Of 20 to 32 steps: 127 to 199 tokens, if all of them are written. One in four is for the seed
    "held out" alone."""
    rng = random.Random(f"long {seed}")
    rows = []
    while len(rows) < n:
        row = fibonacci(rng, least, most)
        if (sum(map(ord, row["question"])) % 4 == 0) == (seed == "held out"):
            rows.append(row)
    return rows


def two_turn_questions(seed, n, least, most):
    """Two of long_questions in one, to be asked one after the other: "37c 42d", "#### 7\n#### 8".
    """
    rows = long_questions(seed, 2 * n, least, most)
    return [{"question": f"{a['question']} {b['question']}",
             "answer": f"{a['answer']}\n{b['answer']}"} for a, b in zip(rows[::2], rows[1::2])]


def world_questions(seed, n):
    """Of the lesson's small world: the 175 held out, or n of those to train on."""
    train, held_out = tiny.questions()
    if seed == "held out":
        return held_out
    return random.Random(f"world {seed}").sample(train, n)


def task_reward(prompts, completions, answer, **columns):
    """train_math's, but "7e3" is a 7 and the next step's label, as in "c3+7=0", not 7,000."""
    texts = [re.sub("[eE]", "_", text) for text in completions]
    return correctness_reward(prompts, texts, answer)


def sampled_reward(model, tokenizer, probe, max_completion_length):
    """Share of right answers among one sampled to each question, 128 of them at once."""
    cfg = train_math.Settings(max_completion_length=max_completion_length, instruction="",
                              rollout_rows=1024)
    found = train_math.evaluate(model, tokenizer, probe, cfg, task_reward, temperature=1.0)
    return found["eval_reward"]


def long_cold_start(model, tokenizer, seed, least=20, most=32, sloppy=True, turns=1):
    """Teach the model to count, then a sloppy teacher's ways, until it is right in less than a
    third of 128 probe questions; he slips 1.3 times in a chain of middle length. Not sloppy: the
    true ways, broken off at a fifth. Of several turns, the first is probed."""
    rng = random.Random(seed)
    probe = long_questions("probe", 128, least, most)

    def teach(steps, size, rate, *how):
        def row():
            row, *more = [fibonacci(rng, *how) for _ in range(turns)]
            later = [f"{tokenizer.eos_token}{turn['question']}\n{turn['worked']}" for turn in more]
            return {**row, "answer": "".join([row["worked"], *later])}

        supervise(model, tokenizer, row, steps, size, rate, "cold start")
        return sampled_reward(model, tokenizer, probe, 6 * most + 18)

    torch.manual_seed(seed)
    right = teach(250, 96, 4e-3, 1, 6)
    how = max(1, least - 4), min(most + 20, len(LABELS))
    if not sloppy:
        while right < 0.2:
            right = teach(10, 24, 1e-3, *how)
        return
    while right < 0.9:
        right = teach(200, 24, 3e-3, *how)
    slips = 0.05 * 26 / ((least + most) / 2)
    while right > 0.33:
        right = teach(20, 32, 1e-3, least, most, slips, 0.1)


def word_problems():
    """7,840 of one line, with worked answers in GSM8K's manner: 392 products, 20 wordings each."""
    rows = []
    for a in range(11, 60):
        for b in range(2, 10):
            tens = a // 10 * 10
            x = tens * b
            y = a % 10 * b
            worked = f"{tens}*{b}={x}\n{a % 10}*{b}={y}\n{x}+{y}={x + y}\n#### {x + y}"
            rows += [{"question": f"{name} buys {b} boxes of {a} {thing}. How many?",
                      "answer": worked}
                     for name in ("Ann", "Bob", "Eve", "Tom", "Sam")
                     for thing in ("figs", "pens", "eggs", "nuts")]
    random.Random(0).shuffle(rows)
    return rows


def short_questions(seed, n):
    """Word problems whose worked answers have up to 40 tokens; the first 512 are held out."""
    rows = word_problems()
    if seed == "held out":
        return rows[:n]
    return random.Random(f"short {seed}").sample(rows[512:], n)


def guessed(row, rng):
    """The same question, answered by a teacher who mostly guesses at once and is seldom right."""
    if rng.random() < 0.25:
        return row
    error = 0 if rng.random() < 0.1 else rng.choice((-20, -10, -1, 1, 10, 20, 100))
    return {**row, "answer": f"#### {max(0, int(train_math.gold_answer(row['answer'])) + error)}"}


def short_cold_start(model, tokenizer, seed):
    """To write sums out, then to guess at once, until less than 30% of answers are right."""
    rng = random.Random(seed)
    rows = word_problems()
    supervise(model, tokenizer, lambda: rng.choice(rows), 460, 48, 5e-3, "cold start: skill")
    probe = rng.sample(rows, 256)
    torch.manual_seed(seed)
    right = sampled_reward(model, tokenizer, probe, 40)
    if right < 0.95:
        raise RuntimeError(f"cold start {seed} reached a skill of {right:.2f}, not .95")
    while right >= 0.3:
        supervise(model, tokenizer, lambda: guessed(rng.choice(rows), rng), 5, 48, 1e-3,
                  "cold start: habit")
        right = sampled_reward(model, tokenizer, probe, 40)


def moe(tokenizer, seed):
    """A Qwen3-MoE of 3 layers, 16 experts, 2 of them for each token, not trained."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3, num_experts=16,
        num_experts_per_tok=2, norm_topk_prob=True, **tiny_settings(tokenizer))
    return Qwen3MoeForCausalLM(config).eval()


# ---- losses and advantages -----------------------------------------------------------------------


def outside(ratio, advantages, eps_low, eps_high):
    """Where the clip holds: above, pushed up far enough; below, pushed down."""
    above = (advantages > 0) & (ratio > 1 + eps_high)
    below = (advantages < 0) & (ratio < 1 - eps_low)
    return above, below


def surrogate(weight, gate, cap=None, side="both", shuffled=None, negatives=1.0):
    """A loss in which token t of response i weighs w_{i,t} A_i / |y_i|, or nothing where the gate's
    ratio is clipped.

    weight and gate: "token", "sequence" or "one" (a ratio that stays 1). The weight is at most
    `cap`; the gate clips on both sides, or only "above" (where A > 0), or only "below" (A < 0).
    shuffled: as many responses are taken out, but at random, from "all", or from those whose A has
    the same "sign". An A < 0 counts `negatives` times. (token, token) has GRPO's gradient, Eq. 12,
    (sequence, sequence) GSPO's, Eq. 10. Its value is not theirs."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        with torch.no_grad():
            token = _log_ratio(log_probs, old_log_probs, mask).exp()
            sequence = sequence_ratio(log_probs, old_log_probs, mask)[:, None].expand_as(token)
            ratios = {"token": token, "sequence": sequence, "one": torch.ones_like(token)}
            a = advantages[:, None]
            above, below = outside(ratios[gate], a, eps_low, eps_high)
            clipped = {"both": above | below, "above": above, "below": below}[side]
            if shuffled:
                apart = (advantages > 0) & (shuffled == "sign")
                for members in apart, ~apart:
                    rows = members.nonzero()[:, 0]
                    clipped[rows] = clipped[rows[torch.randperm(len(rows))]]
            pushed = a.where(a > 0, negatives * a)
            pushed = ratios[weight].clamp(max=cap or torch.inf) * pushed
            coefficient = pushed.masked_fill(clipped, 0)
        return _loss(_token_mean(coefficient * log_probs, mask), denominator)
    return loss


def noisy_gate(deviation):
    """GSPO, but its gate sees log s with normal noise of this standard deviation; the weight is the
    true s."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        ratio = sequence_ratio(log_probs, old_log_probs, mask)
        seen = ratio.detach() * (deviation * torch.randn_like(ratio)).exp()
        above, below = outside(seen, advantages, eps_low, eps_high)
        return _loss((ratio * advantages).masked_fill(above | below, 0), denominator)
    return loss


def softmax_advantages(rewards, group_size):
    """"Grouped Softmax": softmax(r / 0.5) over the group, which is reward-weighted regression.
    Every weight is above 0; a group of equal rewards is learned from, too."""
    groups = rewards.view(-1, group_size)
    return torch.softmax(groups / 0.5, dim=1).flatten()


def best_of_n_advantages(rewards, group_size):
    """"Grouped Rejection": all weight on the best response, or shared among the best, and none
    where the best reward is 0, which is rejection-sampling fine-tuning."""
    groups = rewards.view(-1, group_size)
    most = groups.max(dim=1, keepdim=True).values
    best = ((groups == most) & (groups > 0)).float()
    number = best.sum(dim=1, keepdim=True)
    return (best / number.clamp(min=1)).flatten()


def minibatches_with_rows(prompts, responses, advantages, cfg):
    """train_math's build_minibatches; each micro-batch has `rows`, too, its responses' places in
    the rollout. These, from 1 on, go in as advantages and are handed back; where the advantage is
    0, so are they, and the response is left out."""
    places = torch.arange(1, len(responses) + 1) * (advantages != 0)
    minibatches = build_minibatches(prompts, responses, places, cfg)
    for batch in itertools.chain(*minibatches):
        batch.rows = (batch.advantages - 1).tolist()
        batch.advantages = advantages[batch.rows].to(cfg.device)
    return minibatches


def on_tokens(batch, values):
    """values[row], (tokens,) of each response, in the micro-batch's places, (b, T)."""
    flat = torch.cat([values[row] for row in batch.rows])
    return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, flat)


STEP = re.compile(r"([0-9]+)([+*])([0-9]+)=([0-9]+)")


def step_rewards(text, reward, modulo):
    """[(end, reward)] of a response's steps, in characters: each sum written is worth 1 if it is
    right in itself, the rest of the text the one reward."""
    parts = []
    for step in STEP.finditer(text):
        a, b, given = (int(step[i]) for i in (1, 3, 4))
        truth = a + b if step[2] == "+" else a * b
        if modulo:
            truth %= modulo
        parts.append((step.end(), float(given == truth)))
    return parts + [(len(text), reward)]


class StepAdvantages:
    """GSPO-token's advantages (B, T): each written step by its own arithmetic, or, with `both`, by
    the sum of that and the response's one reward; normalised over the group's tokens.

    Its two methods replace train_math's functions of these names. A character must be a token."""

    def __init__(self, tokenizer, modulo=None, both=False):
        self.tokenizer = tokenizer
        self.modulo = modulo
        self.both = both

    def group_advantages(self, rewards, group_size):
        self.rewards = rewards.tolist()
        self.group_size = group_size
        return torch.ones_like(rewards)  # in a group of equal rewards steps may differ: none is out

    def token_rewards(self, response, reward):
        """(tokens,): of each token its step's reward."""
        tokens = self.tokenizer.convert_ids_to_tokens(response)
        text = "".join(token[0] for token in tokens)  # "<end>": "<"
        row = []
        for end, r in step_rewards(text, reward, self.modulo):
            row += [r] * (end - len(row))
        row += [reward] * (len(response) - len(row))  # the end token
        return torch.tensor(row) + self.both * reward

    def build_minibatches(self, prompts, responses, advantages, cfg):
        rows = list(map(self.token_rewards, responses, self.rewards))
        credit = []
        for i in range(0, len(rows), self.group_size):
            group = rows[i:i + self.group_size]
            together = torch.cat(group)
            scale = together.std() + 1e-4
            credit += [(row - together.mean()) / scale for row in group]
        minibatches = minibatches_with_rows(prompts, responses, advantages, cfg)
        for batch in itertools.chain(*minibatches):
            batch.advantages = on_tokens(batch, credit)
        return minibatches


class TwoTurns:
    """Conversations: two_turn_questions' second question is asked after the answer to the first. A
    response is answer, second question, answer; the question is masked out. Rewards are means over
    turns. With `own`, GSPO-token's advantages (B, T): each turn's reward compared with the same
    turn's in the group.

    Its methods replace train_math's functions of these names, `reward` is the reward;
    max_completion_length is a turn's."""

    def __init__(self, tokenizer, own):
        self.tokenizer = tokenizer
        self.own = own
        self.turns = []

    def split(self, prompt):
        """(the first question, the second), lists of token ids, each with its newline."""
        space = prompt.index(self.tokenizer.convert_tokens_to_ids(" "))
        return prompt[:space] + prompt[-1:], prompt[space + 1:]

    def rollout(self, model, prompts, group_size, *arguments):
        asked = [self.split(prompt) for prompt in prompts]
        questions = [question for question, _ in asked]
        first, log_probs = rollout(model, questions, group_size, *arguments)
        asked = [pair for pair in asked for _ in range(group_size)]
        so_far = [question + answer + then for (question, then), answer in zip(asked, first)]
        second, more = rollout(model, so_far, 1, *arguments)
        self.turns += zip(first, second)
        responses = [a + then + b for a, (_, then), b in zip(first, asked, second)]
        return responses, torch.cat([log_probs, more], dim=1)

    def reward(self, prompts, completions, answer, **columns):
        turns = self.turns  # of the whole rollout, which may have come in parts
        self.turns = []
        self.first_lengths = [len(first) for first, _ in turns]
        golds = zip(*(gold.split("\n") for gold in answer))
        rewards = [task_reward(None, self.tokenizer.batch_decode(turn, True), gold)
                   for turn, gold in zip(zip(*turns), golds)]
        self.rewards = torch.tensor(rewards)
        return self.rewards.mean(dim=0).tolist()

    def group_advantages(self, rewards, group_size):
        if not self.own:
            return group_advantages(rewards, group_size)
        each = [group_advantages(turn, group_size) for turn in self.rewards]
        self.advantages = torch.stack(each, dim=1)
        return self.advantages.any(dim=1).float()  # 0 is left out as having no gradient

    def build_minibatches(self, prompts, responses, advantages, cfg):
        asked = [self.split(prompt) for prompt in prompts]
        questions = [question for question, _ in asked]
        minibatches = minibatches_with_rows(questions, responses, advantages, cfg)
        for batch in itertools.chain(*minibatches):
            if self.own:
                batch.advantages = torch.zeros(batch.mask.shape)
            for i, row in enumerate(batch.rows):
                first, second = asked[row]
                end = len(first) - 1 + self.first_lengths[row]  # of the first answer, in the mask
                batch.mask[i, end:end + len(second)] = False
                if self.own:
                    batch.advantages[i, :end] = self.advantages[row][0]
                    batch.advantages[i, end:] = self.advantages[row][1]
        return minibatches

    def right(self, model, questions, temperature, cfg):
        """Share of right answers, over questions and turns."""
        _, _, texts, _ = train_math.sample(model, self.tokenizer, questions, 1, temperature, cfg,
                                           self.rollout)
        return train_math.score(self.reward, questions, texts).mean().item()


# ---- PPO's critic --------------------------------------------------------------------------------


def gae(values, rewards, mask, lam):
    """Generalised advantage estimation (Schulman et al. 2016) without discount: (b, T), the reward
    (b,) at the end.

    values (b, T): of the state before each token. A_t = sum_k lam^k delta_{t+k}, delta_t = V_{t+1}
    - V_t, and at the last token r - V_t."""
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    after = torch.zeros_like(rewards)
    value_after = rewards.clone()
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        after = torch.where(here, value_after - values[:, t] + lam * after, after)
        value_after = torch.where(here, values[:, t], value_after)
        advantages[:, t] = after * here
    return advantages


class Critic:
    """PPO: a linear value head on the policy's hidden states, GAE, and grpo_loss with (B, T)
    advantages as its clipped objective; a tenth of the value's squared error is added to the loss.

    Its methods replace train_math's functions of these names. A minibatch must be one micro-batch,
    as advantages are normalised over it."""

    def __init__(self, model, lam):
        self.lam = lam
        model.value_head = torch.nn.Linear(model.config.hidden_size, 1)
        for p in model.value_head.parameters():
            torch.nn.init.zeros_(p)
        model.get_decoder().register_forward_hook(self.keep_hidden)

    def keep_hidden(self, module, args, output):
        self.hidden = output.last_hidden_state

    def group_advantages(self, rewards, group_size):
        return rewards - 0.5  # no groups here; and not 0, which would be left out

    def response_log_probs(self, model, batch, temperature):
        log_probs = response_log_probs(model, batch, temperature)
        values = model.value_head(self.hidden[:, :-1])[..., 0]
        if torch.is_grad_enabled():
            self.error = _token_mean((values - batch.returns) ** 2, batch.mask).mean()
            return log_probs
        advantages = gae(values, batch.advantages, batch.mask, self.lam)  # the old policy's pass
        batch.returns = advantages + values
        flat = advantages[batch.mask]
        advantages = (advantages - flat.mean()) / (flat.std() + 1e-4)
        batch.advantages = advantages.masked_fill(~batch.mask, 0)
        return log_probs

    def loss(self, *arguments, **more):
        return grpo_loss(*arguments, **more) + 0.1 * self.error


# ---- Routing Replay ------------------------------------------------------------------------------


class RoutingReplay:
    """Records each token's experts in the old policy's pass; in the update, `replay` sends it to
    them again, with the current gate's weights (paper, 5.3). `changed`: the share of a batch's
    (token, expert) choices that the current gate would not make, in each forward of the updates.
    `response_log_probs` replaces train_math's."""

    def __init__(self, model, replay):
        self.replay = replay
        self.changed = []
        self.recording = False
        self.routes = None
        for gate in (m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)):
            gate.register_forward_hook(self.route)

    def route(self, gate, args, output):
        logits, _, experts = output
        if self.routes is None:  # sampling
            return output
        if self.recording:
            self.routes.append(experts)
            return output
        old = self.routes[len(self.chosen)]
        self.chosen.append(experts)
        if not self.replay:
            return output
        weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, old)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), old

    def response_log_probs(self, model, batch, temperature):
        self.recording = not torch.is_grad_enabled()
        if self.recording:
            batch.routes = []
        self.routes = batch.routes
        self.chosen = []
        log_probs = response_log_probs(model, batch, temperature)
        self.routes = None
        if not self.recording:
            at = torch.nn.functional.pad(batch.mask, (0, 1)).flatten()
            same = []
            for old, new in zip(batch.routes, self.chosen, strict=True):
                kept = (old[at][:, :, None] == new[at][:, None, :]).any(dim=1)
                same.append(kept.float().mean())
            self.changed.append(1 - sum(same).item() / len(same))
        return log_probs


# ---- rounding, and an inference engine -----------------------------------------------------------


def bf16_log_probs(model, batch, temperature):
    """The training forward, old and new, under bfloat16 autocast. Replaces train_math's
    response_log_probs."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return response_log_probs(model, batch, temperature)


def float8(x):
    """x rounded to 8 bits (e4m3) with one scale a tensor."""
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Engine:
    """A sampler that is not quite the policy: "bf16" computes in bfloat16, "float8" has its weights
    rounded to 8 bits, "stale" is the policy of 4 rollouts ago, or the first. With `direct` its
    likelihoods are the old log-probs; otherwise the training forward gives them, as always.

    Its methods replace train_math's functions of these names, and `loss` corrects a loss of gspo.py
    that takes (B, T): each token's advantage times the old policy's likelihood over the engine's,
    at most 2 ("tis", truncated importance sampling), or 0 outside 0.5 to 5 ("icepop", 2510.18855).
    """

    def __init__(self, kind, direct, correction=None):
        self.kind = kind
        self.direct = direct
        self.correction = correction
        self.past = []

    def rollout(self, model, *arguments):
        engine = copy.deepcopy(model)
        if self.kind == "bf16":
            for p in engine.parameters():
                p.data = p.data.bfloat16()
        elif self.kind == "float8":
            for p in engine.parameters():
                if p.dim() > 1:
                    p.data = float8(p.data)
        elif self.kind == "stale":
            self.past = (self.past + [engine])[-5:]
            engine = self.past[0]
        responses, self.reported = rollout(engine, *arguments)
        return responses, self.reported

    def build_minibatches(self, prompts, responses, advantages, cfg):
        minibatches = minibatches_with_rows(prompts, responses, advantages, cfg)
        reported = [row[:len(response)] for row, response in zip(self.reported, responses)]
        for batch in itertools.chain(*minibatches):
            batch.reported = on_tokens(batch, reported)
        return minibatches

    def response_log_probs(self, model, batch, temperature):
        if self.direct and not torch.is_grad_enabled():
            return batch.reported
        if self.correction and torch.is_grad_enabled():
            k = (batch.old_log_probs - batch.reported).exp()
            if self.correction == "tis":
                self.factor = k.clamp(max=2)
            else:
                self.factor = k.where((k >= 0.5) & (k <= 5), 0)
        return response_log_probs(model, batch, temperature)

    def loss(self, token_loss, log_probs, old_log_probs, advantages, *arguments, **more):
        return token_loss(log_probs, old_log_probs, self.factor * advantages[:, None], *arguments,
                          **more)
