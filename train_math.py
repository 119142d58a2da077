r"""Fine-tune a small language model with GSPO on questions whose answers can be checked.

    python train_math.py              Qwen2.5-0.5B-Instruct on GSM8K, on one CUDA GPU
    python -m lesson.tiny             the same script on a tiny model: any CPU, one or two minutes

Read it from top to bottom: settings; prompts and responses; minibatches and log-probs; the step,
which is the algorithm; evaluation and the training loop. The maths is in gspo.py, and support/ has
what surrounds the algorithm. For a task of your own, write a reward function:
`train_math.main(reward=my_reward)`. For a loss of your own, add an entry to ALGORITHMS. To use a
model that you have loaded yourself, call `train(...)`.

In this file a *step* is one rollout with all its updates. (In TRL and Hugging Face, a step is one
optimizer step.) log s is the logarithm of a response's importance ratio. Some choices are fixed:
AdamW without weight decay, a gradient norm of at most 1, a learning rate that falls linearly to a
tenth, and the same minibatches in every epoch. This script does not support several GPUs, a KL
penalty, an inference engine or a learning rate warm-up.
"""
import itertools
import time
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from gspo import group_advantages, grpo_loss, gspo_loss, gspo_token_loss, token_log_probs
from support.metrics import evaluation_metrics, rollout_metrics, update_metrics
from support.models import check_weights, load, tf32_matmuls
from support.program import check_values, exits_with, flag, parse, program
from support.questions import load_questions
from support.rewards import correctness_reward, extract_answer, gold_answer, score, score_rollout
from support.runs import Run, load_state
from support.sampling import end_tokens, rollout
from support.trial import try_parts


class Algorithm(NamedTuple):
    """What distinguishes one algorithm from another. A new algorithm is a row of ALGORITHMS."""
    loss: Callable  # called like gspo_loss
    eps_low: float  # default clip range
    eps_high: float
    ratio: str  # which importance ratio is clipped, for clip_fraction: "sequence" or "token"
    advantages: Callable = group_advantages  # called with rewards (B,) and group_size
    keeps_all: bool = False  # also responses with advantage 0, for a KL or entropy term in the loss
    needs_batch: bool = False  # whether the loss also gets batch=MicroBatch and cfg=Settings


ALGORITHMS = {
    "gspo": Algorithm(gspo_loss, 3e-4, 4e-4, ratio="sequence"),
    "gspo_token": Algorithm(gspo_token_loss, 3e-4, 4e-4, ratio="sequence"),
    "grpo": Algorithm(grpo_loss, 0.2, 0.27, ratio="token"),
}


# ---- settings ------------------------------------------------------------------------------------


@dataclass
class Settings:
    model: str = flag("Qwen/Qwen2.5-0.5B-Instruct", "hub id or folder")
    dataset: str = flag(
        "openai/gsm8k",
        "hub id, folder with train and test files, or one .jsonl, .json, .csv or .parquet file; "
        "each row has a question and an answer, '42' or '... #### 42'")
    output_dir: str = flag("runs/math", "a run that is saved there is resumed")
    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu")
    seed: int = flag(0, "seed of the order of the questions and of the sampling")
    instruction: str = flag(
        r"Please reason step by step, and put your final answer within \boxed{}.",
        "text after each question, on a new line; Qwen models were trained with this one")
    system: str | None = flag(None, "system prompt; default: that of the chat template, if any")
    # The algorithm
    algorithm: str = flag("gspo", "the loss", choices=ALGORITHMS)
    eps_low: float | None = flag(None, "lower clip range; default: the algorithm's (gspo 3e-4)")
    eps_high: float | None = flag(None, "upper clip range; default: the algorithm's (gspo 4e-4)")
    group_size: int = flag(8, "responses per prompt; their mean reward is the baseline")
    prompts_per_step: int = flag(32, "prompts per rollout")
    minibatches: int = flag(4, "optimizer steps per epoch")
    epochs: int = flag(1, "passes over each rollout")
    learning_rate: float = flag(1e-6, "of AdamW; decreases linearly to a tenth at max_steps")
    max_steps: int = flag(200, "number of rollouts")
    temperature: float = flag(1.0, "sampling temperature; log-probs are computed at it, too")
    max_completion_length: int = flag(512, "tokens per response; a longer response is cut")
    # Memory and evaluation
    micro_batch_tokens: int = flag(1024, "tokens per forward pass in the update; with the default "
                                   "model, 1024 need 12 GiB, and 8192 need 36 GiB and less time")
    rollout_rows: int = flag(256, "responses sampled at once")
    save_steps: int = flag(25, "rollouts between two saves of the run")
    eval_steps: int | None = flag(None, "rollouts between two evaluations; default: save_steps")
    eval_size: int = flag(512, "held-out questions, at most a fifth of a file; 0: no evaluation")

    def __post_init__(self):
        check_values(self, ALGORITHMS)

    def clip_range(self):
        """(eps_low, eps_high): the flags, or else the defaults of the algorithm."""
        algorithm = ALGORITHMS[self.algorithm]
        return self.eps_low or algorithm.eps_low, self.eps_high or algorithm.eps_high


def parse_settings(argv=None):
    """The command line, or argv, as Settings. A wrong flag or value ends the program."""
    return parse(Settings, argv)


# ---- prompts and responses -----------------------------------------------------------------------


def encode_prompts(tokenizer, questions, cfg):
    """The token ids of each question in the chat template (for Qwen3: without thinking)."""
    chats = []
    for row in questions:
        chat = [{"role": "user", "content": f"{row['question']}\n{cfg.instruction}"}]
        if cfg.system:
            chat.insert(0, {"role": "system", "content": cfg.system})
        chats.append(chat)
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, enable_thinking=False,
                                         return_dict=True).input_ids


class Rollout(NamedTuple):
    """The B = len(prompts) * group_size responses to some prompts, group by group."""
    prompts: list  # token ids of each prompt
    responses: list  # token ids of each response, the end token included
    texts: list  # each response as a text, without the end token
    log_probs: torch.Tensor  # (B, max_completion_length): the sampler's log-probs, 0 after the end
    questions: list | None = None  # if a `sample` of your own has answered other questions
    columns: dict | None = None  # for the reward: {name: a list with a value for each response}


def sample(model, tokenizer, questions, group_size, temperature, cfg,
           encode_prompts=encode_prompts, rollout=rollout, **unused):
    """Sample `group_size` responses to each question (temperature 0: greedy). Returns a Rollout."""
    prompts = encode_prompts(tokenizer, questions, cfg)
    end_ids = end_tokens(model, tokenizer)
    prompts_at_once = max(1, cfg.rollout_rows // group_size)
    responses = []
    log_probs = []
    for i in range(0, len(prompts), prompts_at_once):
        some_responses, some_log_probs = rollout(
            model, prompts[i:i + prompts_at_once], group_size, cfg.max_completion_length,
            temperature, end_ids)
        responses += some_responses
        log_probs.append(some_log_probs)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return Rollout(prompts, responses, texts, torch.cat(log_probs))


# ---- minibatches and log-probs -------------------------------------------------------------------


class MicroBatch:
    """Some responses of a rollout, with their prompts, that go through the model at once."""

    def __init__(self, prompts, responses, indices, device, advantages=None):
        """indices: which responses; prompts: the prompt of each response; advantages: (B,), or
        (B, n) if a build_minibatches of your own turns them into advantages per token."""
        ids = []
        mask = []
        for i in indices:
            ids.append(torch.tensor(prompts[i] + responses[i]))
            # The mask is made from lengths. If it were made from pad tokens, it would miss the end
            # token of a model that uses the same token for padding and for the end.
            is_response = [False] * len(prompts[i]) + [True] * len(responses[i])
            mask.append(torch.tensor(is_response[1:]))  # position t predicts token t + 1
        self.indices = list(indices)
        self.ids = pad_sequence(ids, batch_first=True).to(device)  # (b, L), padded on the right
        self.mask = pad_sequence(mask, batch_first=True).to(device)  # (b, L - 1), for ids[:, 1:]
        self.advantages = None  # (b,), or (b, L - 1) for losses with an advantage per token
        if advantages is not None:
            self.advantages = advantages[self.indices].to(device)
        self.old_log_probs = None  # (b, L - 1), computed before the first update


def build_minibatches(prompts, responses, advantages, cfg):
    """Split a rollout into minibatches, one per optimizer step: lists of micro-batches.

    A micro-batch holds at most micro_batch_tokens, or a single response. The micro-batches are
    built once and serve for the old and the new log-probs. With other padding or other neighbours,
    the same log-probs would be rounded differently, and GSPO's clip range is so narrow that this
    would matter. Responses with advantage 0 have no gradient. They are left out here, but
    train_step counts them in the denominator. A minibatch without any gradient is left out, too."""
    keeps_all = ALGORITHMS[cfg.algorithm].keeps_all
    minibatches = []
    size = len(responses) // cfg.minibatches
    for start in range(0, len(responses), size):
        indices = [i for i in range(start, start + size) if keeps_all or advantages[i].any()]
        lengths = {i: len(prompts[i]) + len(responses[i]) for i in indices}
        groups = []
        for i in sorted(indices, key=lengths.get):  # similar lengths together need little padding
            if not groups or (len(groups[-1]) + 1) * lengths[i] > cfg.micro_batch_tokens:
                groups.append([])
            groups[-1].append(i)
        if groups:
            minibatches.append([
                MicroBatch(prompts, responses, group, cfg.device, advantages) for group in groups])
    return minibatches


def response_log_probs(model, batch, temperature):
    """The log-probs (b, L - 1) of the response tokens; 0 elsewhere.

    In three lines, since position t predicts token t + 1:

        logits = model(batch.ids).logits[:, :-1]
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        return log_probs.gather(-1, batch.ids[:, 1:, None])[..., 0] * batch.mask

    But with a vocabulary of 151,936 tokens, the logits would need more memory than anything else.
    Therefore only response tokens go through the head, in chunks, and the chunks are computed again
    in the backward pass."""
    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
    hidden = hidden[:, :-1][batch.mask]
    tokens = batch.ids[:, 1:][batch.mask]
    head = model.get_output_embeddings()

    def log_probs_of(hidden, tokens):
        logits = head(hidden)[None]
        return token_log_probs(logits, tokens[None], temperature)[0]

    chunk_size = max(256, 2**22 // len(head.weight))
    chunks = []
    for chunk in zip(hidden.split(chunk_size), tokens.split(chunk_size)):
        chunks.append(checkpoint(log_probs_of, *chunk, use_reentrant=False,
                                 preserve_rng_state=False))
    log_probs = torch.cat(chunks)
    return log_probs.new_zeros(batch.mask.shape).masked_scatter(batch.mask, log_probs)


@dataclass
class Parts:
    """The functions that main(), train(), train_step() and evaluate() let you replace by name."""
    reward: Callable = correctness_reward
    sample: Callable = sample
    encode_prompts: Callable = encode_prompts
    rollout: Callable = rollout
    group_advantages: Callable | None = None  # None: the one of the algorithm
    build_minibatches: Callable = build_minibatches
    response_log_probs: Callable = response_log_probs
    loss: Callable | None = None  # None: the one of the algorithm

    def completed(self, algorithm):
        """These parts, with the loss and the advantages of the algorithm where they are None."""
        self.loss = self.loss or algorithm.loss
        self.group_advantages = self.group_advantages or algorithm.advantages
        return self


# ---- the algorithm -------------------------------------------------------------------------------


def train_step(model, tokenizer, optimizer, questions, step, cfg, **replaced):
    """One rollout on these questions and all updates on it. Returns the metrics of the step.

    replaced: functions to use in place of the default ones, by their names in Parts."""
    algorithm = ALGORITHMS[cfg.algorithm]
    parts = Parts(**replaced).completed(algorithm)
    torch.manual_seed(cfg.seed * 1_000_003 + step)  # a resumed run draws the same numbers
    progress = (step - 1) / max(1, cfg.max_steps - 1)
    optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - 0.9 * progress)
    start = time.perf_counter()

    # 1 SAMPLE group_size responses to each question from the current policy.
    rollout = parts.sample(
        model, tokenizer, questions, cfg.group_size, cfg.temperature, cfg, **vars(parts))
    seconds_rollout = time.perf_counter() - start

    # 2 SCORE the responses, and compare each reward with the others of its group.
    rewards, own_metrics = score_rollout(parts.reward, rollout.questions or questions, rollout, cfg)
    advantages = parts.group_advantages(rewards, cfg.group_size)

    # 3 REMEMBER the old log-probs. They are computed by the forward pass of the update, on the same
    # micro-batches, and not by the sampler. The sampler rounds differently, and this difference
    # can be as large as GSPO's clip range. This way, only a change of the weights moves the ratio.
    prompts = [prompt for prompt in rollout.prompts for _ in range(cfg.group_size)]
    minibatches = parts.build_minibatches(prompts, rollout.responses, advantages, cfg)
    with torch.no_grad():
        for batch in itertools.chain(*minibatches):
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
    for minibatch in minibatches * cfg.epochs:
        update = []
        for batch in minibatch:
            log_probs = parts.response_log_probs(model, batch, cfg.temperature)
            more = {"batch": batch, "cfg": cfg} if algorithm.needs_batch else {}
            loss = parts.loss(log_probs, batch.old_log_probs, batch.advantages, batch.mask,
                              eps_low, eps_high, denominator=denominator, **more)
            with tf32_matmuls():
                loss.backward()
            update.append((batch, log_probs.detach(), loss.item()))
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        updates.append(update)

    check_weights(model, step)  # FloatingPointError: they are not finite
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
    """The mean reward of one response to each question; greedy decoding by default.

    With the default reward, eval_last_number is the accuracy if the last number of a response
    counts as its answer, whatever its format. eval_results has a dict for each question."""
    parts = Parts(**replaced)
    rollout = parts.sample(model, tokenizer, questions, 1, temperature, cfg, **vars(parts))
    rewards, own_metrics = score_rollout(parts.reward, questions, rollout, cfg)
    scores = {"reward": rewards}
    if parts.reward is correctness_reward:
        scores["last_number"] = score(parts.reward, questions, rollout.texts, strict=False)
    return evaluation_metrics(questions, rollout, scores, own_metrics)


def train(cfg, model, tokenizer, questions, held_out=(), state=None, stopped=(), on_step=None,
          optimizer=None, **replaced):
    """Train for max_steps rollouts, from the beginning or from a saved state.

    questions, held_out: lists of dicts with a "question" and the columns that the reward needs.
    state: from load_state. on_step: called with the metrics of each step, such as wandb.log.
    replaced: functions to use in place of the default ones, by their names in Parts, such as
    reward=f. Once `stopped` is not empty, the run ends after its step. If output_dir is None,
    nothing is printed or written. Returns the metrics, one dict per step; step 0 is only an
    evaluation. ValueError: no questions, weights that cannot be trained, a folder with a run."""
    model.eval()  # without dropout, which would give each forward pass other log-probs
    questions = list(questions)
    optimizer = optimizer or torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    optimizer.zero_grad()  # a gradient may be left over from an earlier use of the model
    with Run(cfg, model, tokenizer, optimizer, questions, state) as run:
        stream = run.unused_questions()
        for step in tqdm(range(len(run.rows), cfg.max_steps + 1), cfg.algorithm):
            if step == 0:
                row = {"step": 0, "settings": run.settings}
            else:
                picked = list(itertools.islice(stream, cfg.prompts_per_step))
                row = train_step(model, tokenizer, optimizer, picked, step, cfg, **replaced)
            run.add(row)
            is_last = step == cfg.max_steps
            if held_out and (is_last or step % (cfg.eval_steps or cfg.save_steps) == 0):
                row |= evaluate(model, tokenizer, held_out, cfg, **replaced)
                run.results = row.pop("eval_results")
            if is_last or step % cfg.save_steps == 0 or stopped:
                run.save()
            run.report()
            if on_step:
                on_step(dict(row))
            if stopped:
                break
    return run.rows


def check_model(model, tokenizer, questions, cfg, **replaced):
    """Try the parts on two short responses before the long work begins.

    ValueError: the model or a part cannot be used. RewardError: as in score."""
    algorithm = ALGORITHMS[cfg.algorithm]
    try_parts(model, tokenizer, questions, cfg, Parts(**replaced), algorithm, MicroBatch)


def main(argv=None, reward=correctness_reward, on_step=None, **replaced):
    """The script. The keywords are those of train(), such as a reward function of your own."""
    cfg = parse_settings(argv)
    replaced["reward"] = reward
    with program(cfg) as stopped:
        with exits_with(f"--dataset {cfg.dataset}"):
            questions, held_out = load_questions(cfg, reward)
        with exits_with(f"--output_dir {cfg.output_dir}"):
            state = load_state(cfg, questions)
        with exits_with(f"--model {cfg.model} --device {cfg.device}"):
            model, tokenizer = load(cfg.model, cfg.device)
            check_model(model, tokenizer, questions + held_out, cfg, **replaced)
        tqdm.write(f"{cfg.model}: {model.num_parameters():,} parameters on {cfg.device}; "
                   f"{len(questions):,} questions and {len(held_out):,} held-out ones")
        train(cfg, model, tokenizer, questions, held_out, state, stopped, on_step, **replaced)


if __name__ == "__main__":
    main()
