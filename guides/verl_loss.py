"""verl 0.9.1's loss with the arguments of gspo.gspo_loss, so that test_gspo.py can test it.
The environment variables LOSS_MODE and LOSS_AGG_MODE are its settings of the same names."""
import os

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig


def gspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4,
              denominator=None):
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
                         clip_ratio_low=eps_low, clip_ratio_high=eps_high)
    if denominator is not None:
        config.global_batch_info.update(dp_size=1, global_batch_size=denominator)
    mode = os.environ.get("LOSS_MODE", "gspo")
    mean = os.environ.get("LOSS_AGG_MODE", "seq-mean-token-mean")
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=old_log_probs, log_prob=log_probs, response_mask=mask, config=config,
        advantages=advantages[:, None].expand(mask.shape), loss_agg_mode=mean)
    return loss
