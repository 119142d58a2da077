"""What train_math.py logs: the metrics of a step and of an evaluation, and notes for the user.

A new metric goes into the dict that one of these functions returns, and a new note into `notes`.
"""
import itertools

import torch

from gspo import clip_fraction
from support.rewards import gold_answer


def rollout_metrics(rollout, minibatches, advantages, cfg):
    """The metrics of the sampled responses, before any update."""
    lengths = [len(response) for response in rollout.responses]
    groups = advantages.view(len(lengths) // cfg.group_size, -1)
    has_equal_rewards = (groups == 0).all(1)
    gaps = []  # the sampler's log-probs minus those of the update
    for batch in itertools.chain(*minibatches):
        sampled = [rollout.log_probs[i, :lengths[i]] for i in batch.indices]
        old = batch.old_log_probs[batch.mask]
        gaps.append(torch.cat(sampled) - old)
    return {
        "response_length": sum(lengths) / len(lengths),  # in tokens, the end token included
        "cut": lengths.count(cfg.max_completion_length) / len(lengths),  # share at the limit
        "equal_reward_groups": has_equal_rewards.float().mean().item(),  # they have no gradient
        "entropy": -rollout.log_probs.sum().item() / sum(lengths),  # nats per token, estimated
        # Mean absolute difference between the sampler's log-probs and the old log-probs, in nats.
        "sampler_gap": torch.cat(gaps).abs().mean().item() if gaps else None,
    }


def update_metrics(updates, grad_norms, ratio, clip_range):
    """The metrics of the updates.

    updates: for each optimizer step, a list of (micro-batch, log-probs, loss). ratio: "sequence" or
    "token", the importance ratio that is clipped to clip_range = (eps_low, eps_high)."""
    log_s = []  # for each optimizer step: the logs of the responses' importance ratios
    clipped_tokens = 0
    all_tokens = 0
    total_loss = 0
    for update in updates:
        log_s.append([])
        for batch, log_probs, loss in update:
            lengths = batch.mask.sum(1)
            token_log_ratio = log_probs - batch.old_log_probs  # 0 outside of the mask
            sequence_log_ratio = token_log_ratio.sum(1) / lengths
            log_s[-1].append(sequence_log_ratio)
            log_ratio = sequence_log_ratio if ratio == "sequence" else token_log_ratio
            share = clip_fraction(log_ratio.exp(), batch.advantages, batch.mask, *clip_range)
            clipped_tokens += (share * lengths.sum()).item()
            all_tokens += lengths.sum().item()
            total_loss += loss
    later = list(itertools.chain(*log_s[1:]))
    n = max(1, len(updates))
    return {
        "loss": total_loss / n,  # a value close to 0 is normal
        "grad_norm": sum(grad_norms) / n,  # before it is clipped to 1
        # The share of the response tokens. Responses with advantage 0 are not in the minibatches.
        "clip_fraction": clipped_tokens / max(1, all_tokens),
        # The largest |log s| before the first optimizer step, which must be 0, and the standard
        # deviation of log s after it. Both are per response, for every algorithm.
        "log_ratio_first_max": torch.cat(log_s[0]).abs().max().item() if log_s else None,
        "log_ratio_std": torch.cat(later).std().item() if sum(map(len, later)) > 1 else None,
    }


def evaluation_metrics(questions, rollout, scores, own_metrics):
    """The metrics of an evaluation, and "eval_results" with a dict for each question.

    scores: {name: rewards (B,)}; a mean of zeros and ones has Wilson's 95% interval. own_metrics:
    what the reward has reported."""
    results = []
    for question, text, response in zip(questions, rollout.texts, rollout.responses):
        answer = question.get("answer")
        results.append({
            "question": question["question"],
            "gold": gold_answer(answer) or answer,
            "response": text,
            "tokens": len(response),
        })
    row = {"eval_questions": len(questions)}
    for name, value in own_metrics.items():
        row[f"eval_{name}"] = value
    for name, values in scores.items():
        values = values.tolist()
        row[f"eval_{name}"] = sum(values) / len(values)
        if set(values) <= {0, 1}:
            row[f"eval_{name}_interval"] = wilson(sum(values), len(values))
        for result, value in zip(results, values):
            result[name] = value
    return row | {"eval_results": results}


def wilson(successes, n):
    """Wilson's 95% interval for the share successes / n, as (low, high)."""
    z2 = 1.96**2
    centre = successes + z2 / 2
    half = (z2 * (successes * (n - successes) / n + z2 / 4)) ** 0.5
    return (centre - half) / (n + z2), (centre + half) / (n + z2)


def notes(rows):
    """{"notes": [...]} if the metrics show something that the user should know, else {}."""
    row = rows[-1]
    found = []
    settings = row.get("settings", {"algorithm": ""})
    if settings["algorithm"].startswith("gspo") and 0.1 <= settings["eps_low"] < 1:
        found.append("--eps_low is wide for GSPO's ratio. The paper uses 3e-4")
    if row.get("log_ratio_first_max"):
        found.append("log_ratio_first_max is not 0. The old log-probs are wrong, or the "
                     "two forward passes round differently")
    if row["step"] == 3 and all(row["equal_reward_groups"] == 1 for row in rows[1:]):
        found.append("no gradient in three steps, because the rewards within each group are equal "
                     f"(mean {row['reward']:.3g}; {row['cut']:.0%} of the responses are cut). Try "
                     "easier questions, a longer --max_completion_length, a larger --group_size, "
                     "or supervised fine-tuning on a few answers first")
    return {"notes": found} if found else {}
