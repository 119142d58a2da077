"""TRL 1.16's loss with the arguments of gspo.gspo_loss, so that test_gspo.py can test it.
The environment variables LEVEL and LOSS_TYPE are its importance_sampling_level and loss_type."""
import os
from collections import defaultdict
from types import SimpleNamespace

from accelerate import Accelerator
from trl import GRPOTrainer


class Loss(GRPOTrainer):
    """A trainer without a model: _compute_loss gets the log-probs in the place of the model."""
    importance_sampling_level = os.environ.get("LEVEL", "sequence")
    loss_type = os.environ.get("LOSS_TYPE", "grpo")
    beta = 0.0
    top_entropy_quantile = 1.0
    off_policy_mask_threshold = None
    use_vllm = aux_loss_enabled = _entropy_bonus_enabled = False
    current_gradient_accumulation_steps = 1
    max_completion_length = 10  # of dr_grpo
    args = model = SimpleNamespace(delta=None, steps_per_generation=1, training=True)
    _metrics = {"train": defaultdict(list)}

    def __init__(self, eps_low, eps_high):
        self.epsilon_low = eps_low
        self.epsilon_high = eps_high
        self.accelerator = Accelerator(cpu=True)

    def _get_per_token_logps_and_entropies(self, log_probs, *others, **more):
        return log_probs, 0 * log_probs, None


def gspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4,
              denominator=None):
    ids = 0 * mask.long()
    loss = Loss(eps_low, eps_high)._compute_loss(log_probs, {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old_log_probs,
        "num_items_in_batch": mask.sum()})
    return loss if denominator is None else loss * len(mask) / denominator
