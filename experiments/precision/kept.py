"""What does a 16-bit copy of the weights keep of a small change of the weights?

    OMP_NUM_THREADS=1 python -m experiments.precision.kept --model FOLDER --dataset GSM8K
    python -m experiments.precision.kept --show      # only the tables again, from the log

The first command takes about half an hour on one core. FOLDER is Qwen2.5-Coder-0.5B-Instruct, and
GSM8K is a folder with GSM8K's test.jsonl. The published weights are bf16 numbers. This script
changes them a little, and computes the log-probs of some responses before and after the change,
first with the float32 weights and then with a copy that is rounded to bf16 or to float16.
`kept` is the slope of a regression through the origin, over the tokens of the responses: the change
of the copy's log-probs against the change of the float32 model's log-probs. 1 means that the copy
follows the float32 weights, and 0 means that it does not move. Only the weights are rounded, and
all products are computed in float32.

The responses are six responses that an earlier run of the same model sampled at temperature 1
(results/qwen/gsm8k/as_downloaded.jsonl). They answer two questions. Of each question, the first
correct response and the first two wrong ones are used. The gradients are those of GSPO's loss on
the responses of one of the two questions. The changes are

    AdamW, question 1    the first update of AdamW with the gradient of question 1
    AdamW, question 2    the same with question 2
    with noise           AdamW, question 2, plus Gaussian noise, which imitates the sum of many
                         updates with different minibatches

Each change is scaled to the sizes in SIZES, which are root mean squares over all weights. Each
result is a line of results/precision/kept.jsonl. A change that the log has is not measured again,
so an interrupted command can simply be given again. The tables go to results/precision/kept.md.
"""
import argparse
import statistics
from pathlib import Path

import torch
from tqdm import tqdm

import train_math
from common.logs import append, read
from gspo import group_advantages, gspo_loss

RESULTS = Path(__file__).parents[1] / "results"
ANSWERS = RESULTS / "qwen" / "gsm8k" / "as_downloaded.jsonl"
LOG = RESULTS / "precision" / "kept.jsonl"
QUESTIONS = "Travis had 61 apps", "Bill starts on the 3rd floor"  # how the two questions begin
FORMATS = {"bf16": torch.bfloat16, "float16": torch.float16}
SIZES = {  # root mean square of the change: (learning rate, steps that are done, planned steps)
    2.3e-6: (1e-6, 1, 90),
    1.2e-5: (1e-6, 90, 90),
    3.5e-5: (2e-6, 200, 200),
}
SHARE = 0.3  # of the AdamW update in the change "with noise"; the rest is noise
DIRECTIONS = {  # name: (kind, question)
    "AdamW, question 1": ("adamw", 0),
    "AdamW, question 2": ("adamw", 1),
    "with noise": ("noise", 1),
}
EPS_LOW, EPS_HIGH = 3e-4, 4e-4  # without an effect, because all importance ratios are 1


# ---- responses -----------------------------------------------------------------------------------


def picked(answers):
    """(responses, rewards) of one question: the first correct answer, and the first two wrong ones.

    answers: rows of the log with a `response` and a `gold` answer."""
    correct = []
    wrong = []
    for row in answers:
        is_correct = train_math.extract_answer(row["response"], strict=False) == row["gold"]
        (correct if is_correct else wrong).append(row["response"])
    return correct[:1] + wrong[:2], torch.tensor([1.0, 0.0, 0.0])


def load_batches(tokenizer, dataset):
    """One micro-batch for each of the two questions, with three responses and their advantages."""
    sampled = [row for row in read(ANSWERS) if row["temperature"] == 1.0]
    asked = read(Path(dataset) / "test.jsonl")
    cfg = train_math.parse_settings(["--device", "cpu"])
    batches = []
    for start in QUESTIONS:
        question, = [row for row in asked if row["question"].startswith(start)]
        gold = train_math.gold_answer(question["answer"])
        texts, rewards = picked([row for row in sampled if row["gold"] == gold])
        prompts = train_math.encode_prompts(tokenizer, [question] * len(texts), cfg)
        responses = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts).input_ids]
        advantages = group_advantages(rewards, len(texts))
        indices = range(len(texts))
        batches.append(train_math.MicroBatch(prompts, responses, indices, "cpu", advantages))
    return batches


# ---- changes of the weights ----------------------------------------------------------------------


def gradient(model, batch):
    """GSPO's gradient for one micro-batch at the present weights, one tensor per parameter. Its
    norm is at most 1."""
    model.zero_grad()
    log_probs = train_math.response_log_probs(model, batch, 1.0)
    loss = gspo_loss(log_probs, log_probs.detach(), batch.advantages, batch.mask, EPS_LOW, EPS_HIGH,
                     denominator=len(batch.indices))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def root_mean_square(tensors):
    total = sum(x.double().square().sum().item() for x in tensors)
    return (total / sum(x.numel() for x in tensors)) ** 0.5


def scaled(tensors):
    """The tensors, divided in place by their common root mean square."""
    size = root_mean_square(tensors)
    for x in tensors:
        x /= size
    return tensors


@torch.no_grad()
def direction_of(gradients, kind):
    """A change of the weights with a root mean square of 1. The gradients are overwritten.

    kind: "adamw" or "noise". The first update of AdamW is -g / (|g| + 1e-8)."""
    for g in gradients:
        g.neg_()
        g /= g.abs() + 1e-8
    scaled(gradients)
    if kind == "noise":
        generator = torch.Generator().manual_seed(0)
        for g in gradients:
            noise = torch.randn(g.shape, generator=generator, dtype=g.dtype)
            g.mul_(SHARE).add_(noise, alpha=(1 - SHARE**2) ** 0.5)
        scaled(gradients)
    return gradients


def simulated_size(learning_rate, steps, max_steps, updates=4, weights=10_000):
    """The root mean square of the change of the weights by AdamW after some steps of a run.

    The optimizer and the schedule are those of train_math.py. The gradients are independent
    Gaussian numbers, and those of a real run are not."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(weights, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.95), weight_decay=0)
    for step in range(1, steps + 1):
        progress = (step - 1) / max(1, max_steps - 1)
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - 0.9 * progress)
        for _ in range(updates):
            weight.grad = torch.randn(weights, generator=generator, dtype=torch.float64)
            optimizer.step()
    return root_mean_square([weight.detach()])


# ---- measurements --------------------------------------------------------------------------------


@torch.no_grad()
def set_weights(model, start, direction=None, size=0.0, dtype=None):
    """Sets the weights to start + size * direction, rounded to dtype (None: not rounded).

    Returns the fraction of the weights that differ from those of `start` in the same format."""
    different = 0
    total = 0
    for i, p in enumerate(model.parameters()):
        before = start[i]
        after = before
        if direction is not None:
            after = before + size * direction[i]
        if dtype is not None:
            before = before.to(dtype)
            after = after.to(dtype)
        different += (before != after).sum().item()
        total += p.numel()
        p.copy_(after)
    return different / total


@torch.no_grad()
def log_probs(model, batches):
    """The log-probs of the response tokens of each micro-batch, float64 (n,)."""
    found = []
    for batch in batches:
        values = train_math.response_log_probs(model, batch, 1.0)
        found.append(values[batch.mask].double())
    return found


def log_probs_before(model, start, batches, formats=FORMATS):
    """{format: log_probs of the rounded copy of the unchanged weights}; None: not rounded."""
    found = {}
    for name, dtype in {None: None, **formats}.items():
        set_weights(model, start, dtype=dtype)
        found[name] = log_probs(model, batches)
    return found


def measure(model, start, direction, size, batches, before, formats=FORMATS):
    """What each format keeps of one change: a list of dicts, one for each format and micro-batch.

    batch: index of the micro-batch; kept: the slope of the regression; change: mean absolute change
    of the float32 model's log-probs; gap: mean absolute difference between the copy's log-probs and
    the float32 model's after the change, in nats per token; weights_changed: fraction of the copy's
    weights that changed."""
    set_weights(model, start, direction, size)
    exact = log_probs(model, batches)
    rows = []
    for name, dtype in formats.items():
        weights_changed = set_weights(model, start, direction, size, dtype)
        copied = log_probs(model, batches)
        for i in range(len(batches)):
            change = exact[i] - before[None][i]
            copied_change = copied[i] - before[name][i]
            rows.append({
                "format": name,
                "batch": i,
                "kept": (copied_change @ change / (change @ change)).item(),
                "change": change.abs().mean().item(),
                "gap": (copied[i] - exact[i]).abs().mean().item(),
                "weights_changed": weights_changed,
            })
    return rows


def largest_activations(model, batches):
    """{part of the model: the largest absolute input or output of its modules}, largest first.

    Not included are the attention scores, which are computed inside of one function."""
    largest = {}

    def remember(name, tensors):
        if not isinstance(tensors, tuple):
            tensors = tensors,
        for x in tensors:
            if torch.is_tensor(x) and x.is_floating_point():
                largest[name] = max(largest.get(name, 0.0), x.abs().max().item())

    def hook(name):
        def f(module, inputs, output):
            remember(f"input of {name}", inputs)
            remember(f"output of {name}", output)
        return f

    hooks = []
    for path, module in model.named_modules():
        name = path.split(".")[-1]
        if name:
            name = "a layer" if name.isdigit() else name
            hooks.append(module.register_forward_hook(hook(name)))
    log_probs(model, batches)
    for handle in hooks:
        handle.remove()
    return dict(sorted(largest.items(), key=lambda item: -item[1]))


def measure_all(args):
    """Measures what the log does not have yet, and appends it."""
    rows = read(args.log)
    done = {(row["direction"], row["size"]) for row in rows if row["kind"] == "kept"}
    tasks = [(name, size) for name in DIRECTIONS for size in SIZES if (name, size) not in done]
    if not any(row["kind"] == "size" for row in rows):
        for size, (learning_rate, steps, max_steps) in SIZES.items():
            append(args.log, {
                "kind": "size", "size": size, "learning_rate": learning_rate, "steps": steps,
                "max_steps": max_steps,
                "simulated": simulated_size(learning_rate, steps, max_steps)})
    if not tasks:
        return
    model, tokenizer = train_math.load(args.model, "cpu")
    batches = load_batches(tokenizer, args.dataset)
    start = [p.detach().clone() for p in model.parameters()]
    if not any(row["kind"] == "activations" for row in rows):
        append(args.log, {
            "kind": "activations",
            "largest": largest_activations(model, batches),
            "largest_weight": max(p.abs().max().item() for p in start),
            "weights": sum(p.numel() for p in start),
            "is_bf16": all(p.equal(p.bfloat16().float()) for p in start),
            "tokens": [batch.mask.sum(1).tolist() for batch in batches]})
    before = log_probs_before(model, start, batches)
    last = None
    for name, size in tqdm(tasks, "changes"):
        kind, question = DIRECTIONS[name]
        if name != last:
            set_weights(model, start)
            direction = direction_of(gradient(model, batches[question]), kind)
            last = name
        for row in measure(model, start, direction, size, batches, before):
            responses = "trained" if row.pop("batch") == question else "other"
            append(args.log, {"kind": "kept", "direction": name, "size": size,
                              "responses": responses, **row})


# ---- tables --------------------------------------------------------------------------------------


def range_text(values, digits=2):
    """The mean with the lowest and the highest value, for example "0.50 (0.41 to 0.62)"."""
    mean, low, high = (f"{value:.{digits}f}" for value in
                       (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def short(number):
    """For example "2.3e-6" and "1e-6"."""
    return f"{number:.2g}".replace("e-0", "e-")


def run_text(row):
    """The run to which a size corresponds. row: a line of the log of the kind "size"."""
    steps = "step" if row["steps"] == 1 else "steps"
    return f"{row['steps']} {steps} at {short(row['learning_rate'])}"


def summary(rows):
    """Markdown: mean, lowest and highest value over the changes, for each size and format."""
    lines = [
        "| size | about as after | format of the copy | weights of the copy that change "
        "| kept, other responses | kept, trained responses | gap, other responses (nats) |",
        "|---|---|---|---|---|---|---|"]
    kept = [row for row in rows if row["kind"] == "kept"]
    for size in [row for row in rows if row["kind"] == "size"]:
        for name in FORMATS:
            own = [row for row in kept if (row["size"], row["format"]) == (size["size"], name)]
            if not own:
                continue
            other = [row for row in own if row["responses"] == "other"]
            trained = [row for row in own if row["responses"] == "trained"]
            cells = [
                short(size["size"]), run_text(size), name,
                f"{100 * statistics.fmean(row['weights_changed'] for row in own):.0f}%",
                range_text([row["kept"] for row in other]),
                range_text([row["kept"] for row in trained]),
                range_text([row["gap"] for row in other], digits=4)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def all_changes(rows):
    """Markdown: one line for each change, size, format and kind of responses."""
    lines = [
        "| change | size (RMS) | format | responses | kept "
        "| change of the float32 log-probs (nats) | gap (nats) | weights of the copy that change |",
        "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["kind"] == "kept":
            cells = [
                row["direction"], short(row["size"]), row["format"], row["responses"],
                f"{row['kept']:.3f}", f"{row['change']:.4f}", f"{row['gap']:.4f}",
                f"{100 * row['weights_changed']:.1f}%"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def activations_text(rows):
    """Markdown: the largest absolute values in the forward pass, and AdamW's simulated changes."""
    text = ""
    for row in rows:
        if row["kind"] == "activations":
            text += "| part of the model | largest absolute value |\n|---|---|\n"
            for name, value in list(row["largest"].items())[:6]:
                text += f"| {name} | {value:,.0f} |\n"
            text += f"| weights | {row['largest_weight']:,.0f} |\n\n"
    text += "| size of the change (RMS) | run | RMS of simulated AdamW |\n|---|---|---|\n"
    for row in rows:
        if row["kind"] == "size":
            text += f"| {short(row['size'])} | {run_text(row)} | {short(row['simulated'])} |\n"
    return text


def tables(rows):
    """The text of kept.md, from the lines of the log."""
    return "\n".join([summary(rows), all_changes(rows), activations_text(rows)])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="the folder of the model")
    parser.add_argument("--dataset", help="the folder with GSM8K's test.jsonl")
    parser.add_argument("--log", type=Path, default=LOG, help="default: the committed log")
    parser.add_argument("--show", action="store_true", help="only make the tables from the log")
    args = parser.parse_args(argv)
    if not args.show:
        if not (args.model and args.dataset):
            parser.error("give --model and --dataset, or --show")
        args.log.parent.mkdir(parents=True, exist_ok=True)
        measure_all(args)
    text = tables(read(args.log))
    args.log.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
