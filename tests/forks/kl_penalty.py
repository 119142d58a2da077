"""A KL penalty (the k3 estimate): each token's log-prob stays close to that of the first model."""
import itertools

import torch

import train_math
from gspo import gspo_loss


def loss_with_kl(*arguments, denominator, batch, cfg):
    difference = (batch.reference_log_probs - arguments[0]) * batch.mask
    kl = ((difference.exp() - 1 - difference) * batch.mask).sum(1) / batch.mask.sum(1)
    return gspo_loss(*arguments, denominator=denominator) + 0.1 * kl.sum() / denominator


def with_reference(reference):
    """A build_minibatches that gives each micro-batch the log-probs of the reference model."""

    def build_minibatches(prompts, responses, advantages, cfg):
        minibatches = train_math.build_minibatches(prompts, responses, advantages, cfg)
        for batch in itertools.chain(*minibatches):
            with torch.no_grad():
                batch.reference_log_probs = train_math.response_log_probs(
                    reference, batch, cfg.temperature)
        return minibatches

    return build_minibatches


train_math.ALGORITHMS["gspo_kl"] = train_math.Algorithm(
    loss_with_kl, 3e-4, 4e-4, ratio="sequence", keeps_all=True, needs_batch=True)
