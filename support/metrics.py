"""What train_math.py logs: the metrics of a step and of an evaluation, and notes for the user."""
import itertools
from collections import Counter
from statistics import fmean, pstdev

import torch

from gspo import clip_fraction
from support.task import gold_answer


def rollout_metrics(rollout, minibatches, advantages, cfg):
    """The metrics of the sampled responses, before any update."""
    lengths = [sum(is_sampled) for is_sampled in rollout.is_sampled]
    is_cut = [len(response) == cfg.max_completion_length for response in rollout.responses]
    has_equal_rewards = (advantages.view(len(lengths) // cfg.group_size, -1) == 0).all(1)
    gaps = []  # the sampler's log-probs minus those of the update
    for batch in itertools.chain(*minibatches):
        gaps.append((batch.sampler_log_probs - batch.old_log_probs)[batch.mask])
    return {
        "response_length": sum(lengths) / len(lengths),
        "cut": sum(is_cut) / len(is_cut),  # share at the limit
        "equal_reward_groups": has_equal_rewards.float().mean().item(),  # they have no gradient
        "entropy": -rollout.log_probs.sum().item() / sum(lengths),  # nats per token, estimated
        "sampler_gap": torch.cat(gaps).abs().mean().item() if gaps else None,  # nats
    }


def update_metrics(updates, grad_norms, ratio, clip_range):
    """The metrics of the updates, each of which is a list of (micro-batch, log-probs, loss). ratio:
    "sequence" or "token", the importance ratio that is clipped to clip_range."""
    first = []  # log s of the responses in the first optimizer step
    later = []  # log s in all later ones
    clipped_tokens = 0
    all_tokens = 0
    total_loss = 0
    for i, update in enumerate(updates):
        for batch, log_probs, loss in update:
            lengths = batch.mask.sum(1).clamp(min=1)
            token_log_ratio = log_probs - batch.old_log_probs  # 0 outside of the mask
            sequence_log_ratio = token_log_ratio.sum(1) / lengths
            if i > 0:
                later.append(sequence_log_ratio)
            elif batch.is_on_policy:
                first.append(sequence_log_ratio)
            log_ratio = {"sequence": sequence_log_ratio, "token": token_log_ratio}[ratio]
            share = clip_fraction(log_ratio.exp(), batch.advantages, batch.mask, *clip_range)
            clipped_tokens += (share * batch.mask.sum()).item()
            all_tokens += batch.mask.sum().item()
            total_loss += loss
    n = max(1, len(updates))
    later = torch.cat(later) if later else torch.zeros(0)
    return {
        "loss": total_loss / n,  # a value close to 0 is normal
        "grad_norm": sum(grad_norms) / n,  # before it is clipped to 1
        "clip_fraction": clipped_tokens / max(1, all_tokens),
        # Of log s: the largest size in the first update, which must be 0, and then of later ones
        "log_ratio_first_max": torch.cat(first).abs().max().item() if first else None,
        "log_ratio_mean": later.mean().item() if len(later) > 0 else None,
        "log_ratio_std": later.std().item() if len(later) > 1 else None,
    }


def evaluation_metrics(rollout, scores, own_metrics):
    """The metrics of an evaluation, and "eval_results" with a dict for each response. scores:
    {name: rewards (B,)}; own_metrics: what the reward has reported."""
    golds = [row.get("answer") for row in rollout.questions]
    if "last_number" in scores:  # the default reward compares numbers
        golds = [gold_answer(gold) for gold in golds]
    results = []
    for i, text in enumerate(rollout.texts):
        question = rollout.questions[i]["question"]
        results.append({"question": question, "gold": golds[i], "response": text,
                        "tokens": len(rollout.responses[i])})
    row = {f"eval_{name}": value for name, value in own_metrics.items()}
    row["eval_questions"] = len(results)
    for name, values in scores.items():
        values = values.tolist()
        for result, value in zip(results, values):
            result[name] = value
        row[f"eval_{name}"] = sum(values) / len(values)
        if set(values) <= {0, 1}:
            row[f"eval_{name}_interval"] = wilson(sum(values), len(values))
    if None not in golds:  # the accuracy of always giving the same answer
        row["eval_best_constant"] = max(Counter(map(str, golds)).values()) / len(golds)
    return row | {"eval_results": results}


def wilson(successes, n):
    """Wilson's 95% interval for the share successes / n, as [low, high]."""
    z2 = 1.96**2
    centre = successes + z2 / 2
    half = (z2 * (successes * (n - successes) / n + z2 / 4)) ** 0.5
    return [(centre - half) / (n + z2), (centre + half) / (n + z2)]


def outcome(before, after):
    """What a run has changed, in words. before, after: the results of two evaluations."""
    last = {result["question"]: result["reward"] for result in after}
    pairs = [(x["reward"], last[x["question"]]) for x in before if x["question"] in last]
    differences = [y - x for x, y in pairs]
    half = 1.96 * pstdev(differences) / len(pairs) ** 0.5  # paired, normal approximation
    change = fmean(differences)
    first, final = map(fmean, zip(*pairs))
    return (f"{first:.3g} before and {final:.3g} after on {len(pairs)} questions, {change:+.3g} "
            f"(paired 95% CI {change - half:+.3g} to {change + half:+.3g})")


def notes(rows, results):
    """{"notes": [...]} if the user should know something about the last row or its results."""
    row = rows[-1]
    found = []
    responses = Counter(result["response"] for result in results)
    for text, count in responses.most_common(1):
        if 1 < count >= len(results) / 2:
            found.append(f"{count} of {len(results)} responses in this evaluation are {text!r:.99}")
    if row.get("log_ratio_first_max"):
        found.append("log_ratio_first_max is not 0. Two equal forward passes round differently")
    if (row.get("sampler_gap") or 0) > 0.1:
        found.append("sampler_gap is above 0.1. Has the sampler other weights than the model?")
    if row["step"] >= 3 and all(row["equal_reward_groups"] == 1 for row in rows[-3:]):
        found.append("no gradient in three steps, because the rewards within each group are equal")
    return {"notes": found} if found else {}
