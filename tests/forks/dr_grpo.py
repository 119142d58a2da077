"""Dr. GRPO: no division by the standard deviation, and by the length limit for each response."""
import train_math
from gspo import clipped_objective


def centred(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def dr_grpo_loss(log_probs, old_log_probs, advantages, mask, eps_low, eps_high, denominator,
                 batch, cfg):
    ratio = ((log_probs - old_log_probs) * mask).exp()
    objective = clipped_objective(ratio, advantages[:, None], eps_low, eps_high)
    return -(objective * mask).sum() / (denominator * cfg.max_completion_length)


train_math.ALGORITHMS["dr_grpo"] = train_math.Algorithm(
    dr_grpo_loss, 0.2, 0.2, ratio="token", advantages=centred, needs_batch=True)

if __name__ == "__main__":
    train_math.main()
