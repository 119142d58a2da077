r"""Fine-tune a small language model with GSPO on questions whose answers can be checked.

    python train_math.py              Qwen2.5-0.5B-Instruct on GSM8K, on one CUDA GPU
    python -m lesson.tiny             the same script on a tiny model: any CPU, one or two minutes

What other trainers have, and this script leaves out:
  1. A KL penalty and a reference model. Only the clip responds to how far the policy has moved.
  2. An inference engine. Our own sampler uses the trained weights (on CUDA, a float16 copy).
  3. Sharding, mixed precision and LoRA. There is one process, one GPU, and float32 weights.
  4. Schedules but one: the learning rate falls linearly to a tenth. The gradient norm is at most 1.

In this file a *step* is one rollout with all its updates. (In TRL and Hugging Face, a step is one
optimizer step.) log s is the logarithm of a response's importance ratio.
"""
import itertools
import time
from dataclasses import dataclass, field, replace
from typing import Callable, NamedTuple

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm
from transformers import HfArgumentParser

import gspo
from gspo import group_advantages, grpo_loss, gspo_loss, gspo_token_loss, token_log_probs
from support import models
from support.metrics import evaluation_metrics, notes, rollout_metrics, update_metrics
from support.models import adamw, clip_gradients, load, tf32_matmuls
from support.runs import Run, locked, stops_at_signal, unused_questions
from support.sampling import check_rollout, dynamic_rollout, end_tokens, generate
from support.task import Refused, correctness_reward, extract_answer, load_questions, score


class Algorithm(NamedTuple):
    """What distinguishes one algorithm from another. A new algorithm is a row of ALGORITHMS."""
    loss: Callable  # called like gspo_loss, and with what is in MicroBatch.extra
    eps_low: float  # default clip range
    eps_high: float
    ratio: str  # which importance ratio is clipped, for clip_fraction: "sequence" or "token"
    advantages: Callable = group_advantages  # called with rewards (B,) and group_size


ALGORITHMS = {
    "gspo": Algorithm(gspo_loss, 3e-4, 4e-4, ratio="sequence"),
    "gspo_token": Algorithm(gspo_token_loss, 3e-4, 4e-4, ratio="sequence"),
    "grpo": Algorithm(grpo_loss, 0.2, 0.27, ratio="token"),
}


def flag(default, meaning, **more):
    """A field of Settings, which is a flag of the command line. `meaning` is shown by --help."""
    return field(default=default, metadata={"help": meaning, **more})


@dataclass
class Settings:
    model: str = flag("Qwen/Qwen2.5-0.5B-Instruct", "hub id or folder")
    dataset: str = flag("openai/gsm8k", "hub id, folder with train and test files, or one file")
    output_dir: str = flag("runs/math", "a run that is saved there is resumed")
    device: str | None = flag(None, "cuda or cpu; default: cuda if there is a GPU")
    seed: int = flag(0, "seed of the order of the questions and of the sampling")
    instruction: str = flag(
        r"Please reason step by step, and put your final answer within \boxed{}.",
        "text after each question, on a new line; Qwen models were trained with this one")
    system: str | None = flag(None, "system prompt; default: that of the chat template, if any")
    algorithm: str = flag("gspo", "the loss", choices=ALGORITHMS)
    eps_low: float | None = flag(None, "lower clip range; default: the algorithm's (gspo 3e-4)")
    eps_high: float | None = flag(None, "upper clip range; default: the algorithm's (gspo 4e-4)")
    group_size: int = flag(8, "responses per prompt; their mean reward is the baseline")
    prompts_per_step: int = flag(32, "prompts per rollout")
    minibatches: int = flag(4, "optimizer steps per epoch")
    epochs: int = flag(1, "passes over each rollout")
    learning_rate: float = flag(1e-6, "of AdamW; decreases linearly to a tenth at max_steps")
    max_steps: int = flag(200, "rollouts; with more of them, a resumed run has a higher rate again")
    temperature: float = flag(1.0, "sampling temperature; log-probs are computed at it, too")
    max_completion_length: int = flag(512, "tokens per response; a longer response is cut")
    micro_batch_tokens: int | None = flag(None, "tokens per forward pass; default: by GPU memory")
    rollout_rows: int = flag(256, "responses sampled at once; half as many if greedy")
    save_steps: int = flag(25, "rollouts between two saves of the run")
    eval_steps: int | None = flag(None, "rollouts between two evaluations; default: save_steps")
    eval_size: int = flag(512, "the first test questions, or at most a fifth of a file; 0: none")

    def __post_init__(self):
        if min(self.minibatches, self.epochs, self.save_steps, self.eval_size + 1) < 1:
            raise ValueError("--minibatches, --epochs and --save_steps must be above 0")
        if self.prompts_per_step % self.minibatches:
            raise ValueError("--prompts_per_step must be a multiple of --minibatches")
        group_advantages(torch.zeros(self.group_size), self.group_size)  # checks the size
        gspo.clipped_objective(torch.ones(1), torch.ones(1), *self.clip_range())  # checks the range
        models.complete(self)

    def clip_range(self):
        """(eps_low, eps_high): the flags, or else the defaults of the algorithm."""
        algorithm = ALGORITHMS[self.algorithm]
        low = algorithm.eps_low if self.eps_low is None else self.eps_low
        high = algorithm.eps_high if self.eps_high is None else self.eps_high
        return low, high


def parse_settings(argv=None):
    """The command line, or the words of argv, as Settings. ValueError: they cannot be used."""
    parser = HfArgumentParser(Settings, usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)[0]


# ---- prompts and responses -----------------------------------------------------------------------

def encode_prompts(tokenizer, questions, cfg):
    """The token ids of each question in the chat template (for Qwen3: without thinking)."""
    system = [{"role": "system", "content": cfg.system}] if cfg.system is not None else []
    chats = []
    for row in questions:
        text = f"{row['question']}\n{cfg.instruction}"
        chats.append([*system, {"role": "user", "content": text}])
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, enable_thinking=False,
        date_string="26 Jul 2024").input_ids  # or else, Llama's prompts change from day to day


@dataclass
class Rollout:
    """B responses, group by group. Each field has one entry for each response."""
    questions: list  # the row of its question; the reward gets the columns of these rows
    prompts: list  # the token ids of its prompt
    responses: list  # its token ids, the end token included
    log_probs: torch.Tensor  # (B, max_completion_length): the sampler's, 0 where not sampled
    texts: list  # its text, without the end token
    is_sampled: list  # for each of its tokens: True, or False if a tool or a user wrote it


def sample(model, tokenizer, questions, group_size, temperature, cfg, parts):
    """Sample `group_size` responses to each question (temperature 0: greedy). Returns a Rollout."""
    prompts = parts.encode_prompts(tokenizer, questions, cfg)
    end_ids = end_tokens(model, tokenizer)
    prompts_at_once = max(1, cfg.rollout_rows // (group_size if temperature else 2 * group_size))
    generated = []
    for i in range(0, len(prompts), prompts_at_once):
        generated.append(parts.generate(model, prompts[i:i + prompts_at_once], group_size,
                                        cfg.max_completion_length, temperature, end_ids))
    responses, log_probs, *more = zip(*generated, strict=True)
    responses = list(itertools.chain(*responses))
    is_sampled = [[True] * len(response) for response in responses]
    if more:  # a `generate` of your own may return is_sampled, too
        is_sampled = list(itertools.chain(*more[0]))
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    questions = [row for row in questions for _ in range(group_size)]
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    return Rollout(questions, prompts, responses, torch.cat(log_probs).cpu(), texts, is_sampled)


# ---- minibatches and log-probs -------------------------------------------------------------------

class MicroBatch:
    """Those responses of a rollout, with their prompts, that go through the model at once."""

    def __init__(self, rollout, advantages, indices, device):
        ids = []
        mask = []
        log_probs = []
        for i in indices:
            prompt, response = rollout.prompts[i], rollout.responses[i]
            ids.append(torch.tensor(prompt + response))
            # A mask that is made from pad tokens would miss the end token of some models.
            mask.append(torch.tensor([False] * len(prompt) + rollout.is_sampled[i], dtype=bool))
            log_probs.append(pad(rollout.log_probs[i, :len(response)], (len(prompt), 0)))
        self.indices = list(indices)
        self.ids = pad_sequence(ids, batch_first=True).to(device)  # (b, L), padded on the right
        # Position t predicts token t + 1, so these are (b, L - 1), for ids[:, 1:].
        self.mask = pad_sequence(mask, batch_first=True)[:, 1:].to(device)
        self.sampler_log_probs = pad_sequence(log_probs, batch_first=True)[:, 1:].to(device)
        self.old_log_probs = None  # (b, L - 1), computed before the first update if still None
        self.is_on_policy = False  # True if they are computed then, with the weights that sampled
        self.advantages = advantages[self.indices].to(device)  # (b,), or (b, L - 1) for tokens
        self.extra = {}  # further arguments for a loss of your own, by their names


def build_minibatches(rollout, advantages, cfg, keeps_all=False):
    """Split a rollout into minibatches, one per optimizer step: lists of micro-batches, which hold
    at most micro_batch_tokens, or a single response. The old and the new log-probs use the same
    ones, because other padding or neighbours would round them differently. Responses with advantage
    0 have no gradient and are left out, unless keeps_all, but count in train_step's denominator."""
    n = len(rollout.responses)
    lengths = {i: len(rollout.prompts[i] + rollout.responses[i]) for i in range(n)}
    size = n // cfg.minibatches  # a multiple of group_size
    minibatches = []
    for start in range(0, n, size):
        indices = [i for i in range(start, start + size) if keeps_all or advantages[i].any()]
        splits = []
        for i in sorted(indices, key=lengths.get):  # similar lengths need little padding
            if not splits or (len(splits[-1]) + 1) * lengths[i] > cfg.micro_batch_tokens:
                splits.append([])
            splits[-1].append(i)
        if splits:
            minibatches.append([MicroBatch(rollout, advantages, s, cfg.device) for s in splits])
    return minibatches


def response_log_probs(model, batch, temperature):
    """The log-probs (b, L - 1) of the sampled tokens; 0 elsewhere. In three lines, since position t
    predicts token t + 1:

        logits = model(batch.ids).logits[:, :-1]
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        return log_probs.gather(-1, batch.ids[:, 1:, None])[..., 0] * batch.mask

    But with a vocabulary of 151,936 tokens, the logits would need most of the memory. Therefore
    only sampled tokens go through the head, in chunks that the backward pass computes again."""
    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
    hidden = hidden[:, :-1][batch.mask]
    tokens = batch.ids[:, 1:][batch.mask]
    head = model.get_output_embeddings()

    def log_probs_of(hidden, tokens):
        return token_log_probs(head(hidden)[None], tokens[None], temperature)[0]

    chunk_size = max(256, 2**22 // len(head.weight))
    chunks = []
    for chunk in zip(hidden.split(chunk_size), tokens.split(chunk_size)):
        chunks.append(checkpoint(log_probs_of, *chunk, use_reentrant=False,
                                 preserve_rng_state=False))
    log_probs = torch.cat(chunks)
    return log_probs.new_zeros(batch.mask.shape).masked_scatter(batch.mask, log_probs)


@dataclass
class Parts:
    """The functions that main(), train() and evaluate() let you replace: main(reward=my_reward)."""
    reward: Callable = correctness_reward
    load: Callable = load  # main() calls it with the name of the model and the device
    make_optimizer: Callable = adamw  # for a model, always a new one
    encode_prompts: Callable = encode_prompts
    generate: Callable = generate
    sample: Callable = sample
    build_minibatches: Callable = build_minibatches
    response_log_probs: Callable = response_log_probs
    clip_gradients: Callable = clip_gradients


# ---- the algorithm -------------------------------------------------------------------------------

def train_step(model, tokenizer, optimizer, questions, step, cfg, parts):
    """One rollout on these questions and all updates on it. Returns the metrics of the step."""
    algorithm = ALGORITHMS[cfg.algorithm]
    torch.manual_seed(cfg.seed * 1_000_003 + step)  # a resumed run draws the same numbers
    progress = (step - 1) / max(1, cfg.max_steps - 1)
    for parameters in optimizer.param_groups:
        parameters["lr"] = float(cfg.learning_rate * (1 - 0.9 * progress))
    start = time.perf_counter()

    # 1 SAMPLE group_size responses to each question from the current policy.
    rollout = parts.sample(model, tokenizer, questions, cfg.group_size, cfg.temperature, cfg, parts)
    check_rollout(rollout, len(questions) * cfg.group_size)
    seconds_rollout = time.perf_counter() - start

    # 2 SCORE the responses, and compare each reward with the others of its group.
    rewards, own_metrics = score(parts.reward, rollout, cfg, step)
    advantages = algorithm.advantages(rewards, cfg.group_size)

    # 3 REMEMBER the old log-probs. They are computed by the forward pass of the update, on the same
    # micro-batches, and not by the sampler. The sampler rounds differently, and this difference
    # can be as large as GSPO's clip range. This way, only a change of the weights moves the ratio.
    minibatches = parts.build_minibatches(rollout, advantages, cfg)
    with torch.no_grad():
        for batch in itertools.chain(*minibatches):
            if batch.old_log_probs is None:  # otherwise a part of yours has set them
                batch.is_on_policy = True
                batch.old_log_probs = parts.response_log_probs(model, batch, cfg.temperature)

    # 4 UPDATE. ONE ROLLOUT, SEVERAL OPTIMIZER STEPS: in the first minibatch, the weights are still
    # those of the old log-probs. Every importance ratio is exactly 1, and nothing can be clipped.
    # Only the later minibatches and epochs see a policy that has moved. With minibatches = epochs
    # = 1, the ratio is always 1, and GSPO is REINFORCE with group advantages, where each response
    # counts as the mean over its tokens.
    eps_low, eps_high = cfg.clip_range()
    denominator = len(rollout.responses) // cfg.minibatches  # includes responses without gradient
    updates = []  # for each optimizer step: a list of (micro-batch, log-probs, loss)
    grad_norms = []
    for minibatch in minibatches * cfg.epochs:  # the same ones in every epoch
        update = []
        for batch in minibatch:
            log_probs = parts.response_log_probs(model, batch, cfg.temperature)
            loss = algorithm.loss(log_probs, batch.old_log_probs, batch.advantages, batch.mask,
                                  eps_low, eps_high, denominator, **batch.extra)
            with tf32_matmuls():
                loss.backward()
            update.append((batch, log_probs.detach(), loss.item()))
        grad_norms.append(float(parts.clip_gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
        updates.append(update)

    return {
        **own_metrics,
        "step": step,
        "reward": rewards.mean().item(),
        **rollout_metrics(rollout, minibatches, advantages, cfg),
        **update_metrics(updates, grad_norms, algorithm.ratio, (eps_low, eps_high)),
        "seconds": time.perf_counter() - start,
        "seconds_rollout": seconds_rollout,
    }


# ---- evaluation, the training loop, and the script -----------------------------------------------

def evaluate(model, tokenizer, questions, cfg, temperature=0.0, **replaced):
    """Mean reward of one response to each question; greedy by default. For the default reward, also
    eval_last_number, the accuracy if the last number counts, whatever its format."""
    parts = Parts(**replaced)
    model.eval()  # without dropout
    rollout = parts.sample(model, tokenizer, questions, 1, temperature, cfg, parts)
    check_rollout(rollout, len(questions))
    rewards, own_metrics = score(parts.reward, rollout, cfg)
    scores = {"reward": rewards}
    if parts.reward is correctness_reward:
        scores["last_number"], _ = score(parts.reward, rollout, cfg, strict=False)
    return evaluation_metrics(rollout, scores, own_metrics)


def train(cfg, model, tokenizer, questions, held_out=(), on_step=None, **replaced):
    """Train for max_steps rollouts, from the beginning or from where the run in output_dir is.

    questions, held_out: dicts with a "question" and the columns that the reward needs. on_step:
    called with the row of each step, such as wandb.log; it may add to it, and ends the run if it
    returns True. replaced: functions in place of those in Parts, by their names. Without an
    output_dir, nothing is written or printed. Returns the rows. Refused: see Run in support/."""
    model.eval()  # without dropout, which would give each forward pass other log-probs
    torch.set_float32_matmul_precision("highest")  # some Docker images switch TF32 on
    questions, held_out = list(questions), list(held_out)
    parts = Parts(**replaced)
    optimizer = parts.make_optimizer(model)
    optimizer.zero_grad()  # a gradient may be left over from an earlier use of the model
    prompt = tokenizer.decode(parts.encode_prompts(tokenizer, questions[:1], cfg)[0])
    with locked(cfg.output_dir), stops_at_signal() as stop:
        run = Run(cfg, model, tokenizer, optimizer, questions, prompt)
        stream = unused_questions(questions, cfg, max(0, len(run.rows) - 1))
        for step in tqdm(range(len(run.rows), cfg.max_steps + 1), cfg.algorithm):
            row = {"step": 0, "settings": run.settings}
            if step > 0:
                picked = list(itertools.islice(stream, cfg.prompts_per_step))
                row = train_step(model, tokenizer, optimizer, picked, step, cfg, parts)
            is_last = step == cfg.max_steps
            if held_out and (is_last or step % (cfg.eval_steps or cfg.save_steps) == 0):
                row |= evaluate(model, tokenizer, held_out, cfg, **replaced)
            results = row.pop("eval_results", [])
            row |= notes([*run.rows, row], results)
            ends = (on_step and str(on_step(row)) == "True") or stop.is_set()  # or numpy's True
            run.add(row, results, is_saved=ends or is_last or step % cfg.save_steps == 0)
            if ends:
                break
        run.finish()
    return run.rows


def trial(model, tokenizer, questions, cfg, parts):
    """One short step at learning rate 0, so that a mistake in a part shows before the long work. On
    CUDA, also an update of full size. Refused: sampler and training disagree, or it cannot fit."""
    def with_gradient(rollout, advantages, cfg):  # equal rewards would leave nothing to update
        return parts.build_minibatches(rollout, torch.ones_like(advantages), cfg)

    prompts = parts.encode_prompts(tokenizer, questions, cfg)
    tqdm.write(f"the first prompt: {tokenizer.decode(prompts[0])!r}")
    model.eval()
    optimizer = parts.make_optimizer(model)  # its memory counts in fit_micro_batch
    short = replace(cfg, group_size=2, minibatches=1, epochs=1, learning_rate=0,
                    max_completion_length=8)
    row = train_step(model, tokenizer, optimizer, questions[:2], 0, short,
                     replace(parts, build_minibatches=with_gradient))
    limit = 0.02 if parts.generate is generate and parts.sample is sample else 0.5
    if not (row["sampler_gap"] or 0) <= limit:  # also if it is NaN
        raise Refused(f"sampler and training disagree by {row['sampler_gap']:.2g} nats per token. "
                      "Do they use the same weights, prompts and temperature?")
    models.fit_micro_batch(model, prompts, cfg, parts.response_log_probs)


def main(argv=None, reward=correctness_reward, on_step=None, **replaced):
    """The script. on_step and the functions that are replaced are those of train()."""
    parts = Parts(reward, **replaced)
    try:
        cfg = parse_settings(argv)
        questions, held_out = load_questions(cfg, reward)
        model, tokenizer = parts.load(cfg.model, cfg.device)
    except (OSError, ValueError) as error:
        raise SystemExit("train_math.py: " + " ".join(str(error).split())) from None
    tqdm.write(f"{len(questions)} questions and {len(held_out)} held-out ones")
    tokens = cfg.prompts_per_step * cfg.group_size * cfg.max_completion_length
    if cfg.device == "cpu" and tokens > 30_000:  # in each step
        tqdm.write("note: on a CPU, this can take hours; guides/own_task.md has smaller settings")
    try:
        trial(model, tokenizer, questions, cfg, parts)
        return train(cfg, model, tokenizer, questions, held_out, on_step, **vars(parts))
    except Refused as error:
        raise SystemExit(f"train_math.py: {error}") from None


if __name__ == "__main__":
    main()
