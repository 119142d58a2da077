"""The tasks of the comparisons, and the parts that their variants replace in train_math.py: losses,
advantages, a critic, Routing Replay, and an inference engine. tests/test_comparisons.py tests each
part.

In the code and the logs of these experiments, a gate is the clipping rule: it decides which tokens
or responses are clipped.
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

# ---- tasks: questions, and the supervised training of a model before RL --------------------------

LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def fibonacci(rng, least, most, slips=0.0, gives_up=0.0):
    """{"question", "answer", "worked"}: Fibonacci numbers modulo 10, with 6 tokens per step.

    "37c" has the worked answer "c3+7=0b7+0=7a0+7=7\\n#### 7" and the answer "#### 7". With the
    probability `slips`, a step has a random digit as its result, and later steps use this digit.
    With the probability `gives_up`, the steps end early, and a random digit is the answer."""
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
    """n questions of 20 to 32 steps, whose worked answers have 127 to 199 tokens. One question in
    four is held out: only the seed "held out" gives these."""
    rng = random.Random(f"long {seed}")
    rows = []
    while len(rows) < n:
        row = fibonacci(rng, least, most)
        if (sum(map(ord, row["question"])) % 4 == 0) == (seed == "held out"):
            rows.append(row)
    return rows


def two_turn_questions(seed, n, least, most):
    """Pairs of long_questions, asked one after the other, as "37c 42d" with "#### 7\\n#### 8"."""
    rows = long_questions(seed, 2 * n, least, most)
    return [{"question": f"{a['question']} {b['question']}",
             "answer": f"{a['answer']}\n{b['answer']}"} for a, b in zip(rows[::2], rows[1::2])]


def world_questions(seed, n):
    """Questions of the lesson's small world: the 175 held-out ones, or n of the others."""
    train, held_out = tiny.questions()
    if seed == "held out":
        return held_out
    return random.Random(f"world {seed}").sample(train, n)


def task_reward(prompts, completions, answer, **columns):
    """The reward of train_math.py, except that "7e3" is not 7,000: the e is the label of the next
    step, as the c in "c3+7=0"."""
    texts = [re.sub("[eE]", "_", text) for text in completions]
    return correctness_reward(prompts, texts, answer)


def sampled_reward(model, tokenizer, probe, max_completion_length):
    """The accuracy of one sampled answer per question, with 128 answers at once."""
    cfg = train_math.Settings(max_completion_length=max_completion_length, instruction="",
                              rollout_rows=128)
    found = train_math.evaluate(model, tokenizer, probe, cfg, 1.0, reward=task_reward)
    return found["eval_reward"]


def long_cold_start(model, tokenizer, seed, least=20, most=32, sloppy=True, turns=1):
    """Supervised training before RL. First the model learns the task from worked answers. Then it
    is fine-tuned on answers with mistakes, 1.3 in a chain of middle length, until its accuracy on
    128 probe questions is below a third. If not `sloppy`, it is trained on correct answers only,
    until its accuracy is a fifth. If there are several turns, the accuracy is that of the first."""
    rng = random.Random(seed)
    probe = long_questions("probe", 128, least, most)

    def teach(steps, size, rate, *how):
        def row():
            row, *more = [fibonacci(rng, *how) for _ in range(turns)]
            later = [f"{tokenizer.eos_token}{turn['question']}\n{turn['worked']}" for turn in more]
            return {**row, "answer": "".join([row["worked"], *later])}

        supervise(model, tokenizer, row, steps, size, rate, "warm-up")
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
    """7,840 one-line questions, with worked answers as in GSM8K: 392 products in 20 wordings."""
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
    """Word problems whose worked answers have up to 40 tokens. The first 512 are held out."""
    rows = word_problems()
    if seed == "held out":
        return rows[:n]
    return random.Random(f"short {seed}").sample(rows[512:], n)


def guessed(row, rng):
    """The same question. In three of four cases, its answer is a guess, which is rarely correct."""
    if rng.random() < 0.25:
        return row
    error = 0 if rng.random() < 0.1 else rng.choice((-20, -10, -1, 1, 10, 20, 100))
    return {**row, "answer": f"#### {max(0, int(train_math.gold_answer(row['answer'])) + error)}"}


def short_cold_start(model, tokenizer, seed):
    """Supervised training before RL: first on worked answers, and then on a mixture with guesses,
    until the accuracy is below 30%."""
    rng = random.Random(seed)
    rows = word_problems()
    supervise(model, tokenizer, lambda: rng.choice(rows), 460, 48, 5e-3, "worked answers")
    probe = rng.sample(rows, 256)
    torch.manual_seed(seed)
    right = sampled_reward(model, tokenizer, probe, 40)
    if right < 0.95:
        raise RuntimeError(f"the supervised training with seed {seed} must reach an accuracy of "
                           f"0.95, but it reached {right:.2f}")
    while right >= 0.3:
        supervise(model, tokenizer, lambda: guessed(rng.choice(rows), rng), 5, 48, 1e-3,
                  "guesses")
        right = sampled_reward(model, tokenizer, probe, 40)


def moe(tokenizer, seed):
    """A Qwen3-MoE with random weights: 3 layers and 16 experts, of which each token uses 2."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3, num_experts=16,
        num_experts_per_tok=2, norm_topk_prob=True, **tiny_settings(tokenizer))
    return Qwen3MoeForCausalLM(config).eval()


# ---- losses and advantages -----------------------------------------------------------------------


def outside(ratio, advantages, eps_low, eps_high):
    """Where the clip is active: (above the range with A > 0, below the range with A < 0)."""
    above = (advantages > 0) & (ratio > 1 + eps_high)
    below = (advantages < 0) & (ratio < 1 - eps_low)
    return above, below


def surrogate(weight, gate, cap=None, side="both", shuffled=None, negatives=1.0):
    """A loss that separates the two roles of the importance ratio: the weight, which multiplies a
    token's gradient, and the gate, which decides whether the token is clipped.

    The gradient of token t of response i is multiplied by w_{i,t} A_i / |y_i|, or by 0 if the ratio
    of the gate is outside the clip range. weight and gate are "token", "sequence" or "one" (a ratio
    that is always 1). (token, token) has GRPO's gradient (Eq. 12), and (sequence, sequence) has
    GSPO's (Eq. 10). The values of the losses differ from theirs.
    cap: the largest weight. side: the gate clips on "both" sides, or only "above" (A > 0) or
    "below" (A < 0). shuffled: the same number of responses is clipped, but at random, among "all"
    or among those whose A has the same "sign". negatives: a factor for every A < 0."""
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
    """GSPO, but normal noise with this standard deviation is added to log s when it is decided
    whether a response is clipped. The weight is s without noise."""
    def loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator=None):
        ratio = sequence_ratio(log_probs, old_log_probs, mask)
        seen = ratio.detach() * (deviation * torch.randn_like(ratio)).exp()
        above, below = outside(seen, advantages, eps_low, eps_high)
        return _loss((ratio * advantages).masked_fill(above | below, 0), denominator)
    return loss


def softmax_advantages(rewards, group_size):
    """"Grouped Softmax": softmax(r / 0.5) over the group, which is reward-weighted regression.
    Every weight is above 0, so a group of equal rewards also has a gradient."""
    groups = rewards.view(-1, group_size)
    return torch.softmax(groups / 0.5, dim=1).flatten()


def best_of_n_advantages(rewards, group_size):
    """"Grouped Rejection": a weight of 1 is divided among the best responses of the group. All
    weights are 0 if the best reward is 0. This is rejection-sampling fine-tuning."""
    groups = rewards.view(-1, group_size)
    most = groups.max(dim=1, keepdim=True).values
    best = ((groups == most) & (groups > 0)).float()
    number = best.sum(dim=1, keepdim=True)
    return (best / number.clamp(min=1)).flatten()


def on_tokens(batch, values):
    """(b, T): the values[i] (tokens,) of each response i, at the positions of its tokens."""
    flat = torch.cat([values[i] for i in batch.indices])
    return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, flat)


STEP = re.compile(r"([0-9]+)([+*])([0-9]+)=([0-9]+)")


def step_rewards(text, reward, modulo):
    """[(end, reward)] of the steps of a response, where `end` is the character where a step ends. A
    step has the reward 1 if its own arithmetic is correct. The rest of the text has the reward of
    the response."""
    parts = []
    for step in STEP.finditer(text):
        a, b, given = (int(step[i]) for i in (1, 3, 4))
        truth = a + b if step[2] == "+" else a * b
        if modulo:
            truth %= modulo
        parts.append((step.end(), float(given == truth)))
    return parts + [(len(text), reward)]


class StepAdvantages:
    """Advantages (B, T) for GSPO-token. The reward of a step is 1 if its own arithmetic is correct.
    With `both`, the reward of the response is added. The rewards are normalised over the tokens of
    the group.

    group_advantages and build_minibatches replace train_math's functions of the same names. A token
    must be a character."""

    def __init__(self, tokenizer, modulo=None, both=False):
        self.tokenizer = tokenizer
        self.modulo = modulo
        self.both = both

    def group_advantages(self, rewards, group_size):
        self.rewards = rewards.tolist()
        self.group_size = group_size
        return torch.ones_like(rewards)  # keeps every group, because its steps may differ

    def token_rewards(self, response, reward):
        """The reward of each token's step, (tokens,)."""
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
        minibatches = build_minibatches(prompts, responses, advantages, cfg)
        for batch in itertools.chain(*minibatches):
            batch.advantages = on_tokens(batch, credit)
        return minibatches


class TwoTurns:
    """Conversations: the second question of two_turn_questions is asked after the answer to the
    first. A response holds the tokens of both answers. Its reward is the mean over the turns. With
    `own`, the advantages are (B, T), for GSPO-token: the reward of each turn is compared with the
    rewards of the same turn in the group.

    The methods replace train_math's functions of the same names. max_completion_length limits each
    turn."""

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
        first, first_log_probs = rollout(model, questions, group_size, *arguments)
        asked = [pair for pair in asked for _ in range(group_size)]
        so_far = [question + answer + then for (question, then), answer in zip(asked, first)]
        second, second_log_probs = rollout(model, so_far, 1, *arguments)
        self.turns += zip(first, second)
        responses = [a + b for a, b in zip(first, second)]
        log_probs = torch.cat([first_log_probs, torch.zeros_like(second_log_probs)], dim=1)
        for i, (a, b) in enumerate(zip(first, second)):
            log_probs[i, len(a):len(a) + len(b)] = second_log_probs[i, :len(b)]
        return responses, log_probs

    def reward(self, prompts, completions, answer, **columns):
        turns = self.turns  # of the whole rollout, which may have been sampled in several calls
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
        return self.advantages.any(dim=1).float()  # a response with 0 has no gradient: left out

    def build_minibatches(self, prompts, responses, advantages, cfg):
        """Puts the second question between the two answers, and masks it out."""
        asked = [self.split(prompt) for prompt in prompts]
        questions = [question for question, _ in asked]
        whole = []
        for response, (_, then), n in zip(responses, asked, self.first_lengths):
            whole.append(response[:n] + then + response[n:])
        minibatches = build_minibatches(questions, whole, advantages, cfg)
        for batch in itertools.chain(*minibatches):
            if self.own:
                batch.advantages = torch.zeros(batch.mask.shape)
            for place, i in enumerate(batch.indices):
                first, second = asked[i]
                end = len(first) - 1 + self.first_lengths[i]  # where the first answer ends in mask
                batch.mask[place, end:end + len(second)] = False
                if self.own:
                    batch.advantages[place, :end] = self.advantages[i][0]
                    batch.advantages[place, end:] = self.advantages[i][1]
        return minibatches

    def right(self, model, questions, temperature, cfg):
        """The accuracy over all questions and turns."""
        sampled = train_math.sample(
            model, self.tokenizer, questions, 1, temperature, cfg, rollout=self.rollout)
        return train_math.score(self.reward, questions, sampled.texts).mean().item()


# ---- PPO's critic --------------------------------------------------------------------------------


def gae(values, rewards, mask, lam):
    """Generalised advantage estimation (Schulman et al. 2016) without discount -> (b, T).

    values (b, T): the value of the state before each token. rewards (b,): given at the last token.
    A_t = sum_k lam^k delta_{t+k}, where delta_t = V_{t+1} - V_t, and r - V_t at the last token."""
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
    """PPO: a linear value head on the policy's hidden states, GAE, and grpo_loss with advantages
    (B, T) as the clipped objective. A tenth of the value's squared error is added to the loss.

    The methods replace train_math's functions of the same names. A minibatch must be one
    micro-batch, because the advantages are normalised over it."""

    def __init__(self, model, lam):
        self.lam = lam
        model.value_head = torch.nn.Linear(model.config.hidden_size, 1)
        for p in model.value_head.parameters():
            torch.nn.init.zeros_(p)
        model.get_decoder().register_forward_hook(self.keep_hidden)

    def keep_hidden(self, module, args, output):
        self.hidden = output.last_hidden_state

    def group_advantages(self, rewards, group_size):
        return rewards - 0.5  # there are no groups; a response with 0 would be left out

    def response_log_probs(self, model, batch, temperature):
        log_probs = response_log_probs(model, batch, temperature)
        values = model.value_head(self.hidden[:, :-1])[..., 0]
        if torch.is_grad_enabled():
            self.error = _token_mean((values - batch.returns) ** 2, batch.mask).mean()
            return log_probs
        # Without gradients, this is the forward of the old policy.
        advantages = gae(values, batch.advantages, batch.mask, self.lam)
        batch.returns = advantages + values
        flat = advantages[batch.mask]
        advantages = (advantages - flat.mean()) / (flat.std() + 1e-4)
        batch.advantages = advantages.masked_fill(~batch.mask, 0)
        return log_probs

    def loss(self, *arguments, **more):
        return grpo_loss(*arguments, **more) + 0.1 * self.error


# ---- Routing Replay ------------------------------------------------------------------------------


class RoutingReplay:
    """Records the experts of each token in the forward of the old policy. With `replay`, the
    updates send the token to the same experts again, weighted by the current router (GSPO's paper,
    section 5.3).

    changed: for each forward of the updates, the fraction of (token, expert) choices that the
    current router would not make. `response_log_probs` replaces train_math's."""

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
    """Replaces train_math's response_log_probs. All forwards are under bfloat16 autocast."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return response_log_probs(model, batch, temperature)


def float8(x):
    """x, rounded to 8 bits (e4m3) with one scale per tensor."""
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Engine:
    """A sampler that differs a little from the policy: "bf16" computes in bfloat16, "float8" has
    weights rounded to 8 bits, and "stale" is the policy of 4 rollouts ago, or the first one. With
    `direct`, its log-probs serve as the old log-probs. Otherwise the training forward computes
    them, as usual.

    The methods replace train_math's functions of the same names. `loss` corrects a loss of gspo.py
    that takes advantages (B, T). The advantage of each token is multiplied by its probability under
    the old policy, divided by its probability under the sampler. This factor is truncated to 2
    ("tis", truncated importance sampling), or set to 0 outside of 0.5 to 5 ("icepop",
    arXiv:2510.18855)."""

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
        minibatches = build_minibatches(prompts, responses, advantages, cfg)
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
