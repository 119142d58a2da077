"""From REINFORCE to GSPO in five small changes: python -m lesson.grow (ten seconds on a CPU).

A response has T letters, which the policy draws from one distribution over A, B and C. Its three
logits are all that is trained. The reward is 1 if the first letter is A, so the expected reward is
the probability of A, and its gradient is known. All other letters are noise to the learner. A batch
is a group of eight responses. For each stage, the program prints the changed lines and a table:

  bias      the angle in degrees between the mean of many estimates and the true gradient, and,
            after +-, the angle that sampling alone would give
  noise     the standard deviation of the estimate from one batch, divided by the size of the mean
  fresh     the policy is still the one that sampled; moved: it has changed since then
  reward    the expected reward after 64 updates on one batch (mean of 400 batches); it was 0.5
  ruined    the fraction of these batches after which the expected reward is below 0.25
  training  the expected reward after 10 new batches with 64 updates each (mean of 100 runs)

The size of an update is such that the first one has the same mean length in all stages."""
import difflib
import inspect

import torch

GROUP = 8
FRESH, MOVED = torch.tensor([[0.5, 0.3, 0.2], [0.55, 0.2, 0.25]]).double()
EPS_LOW = EPS_HIGH = 0.1
BATCHES = 320_000  # divided by T: for bias and noise
HEADER = "stage      T  fresh: bias   noise   moved: bias   noise   reward  ruined  training"


# The gradient of the log-prob of a response, multiplied by its reward. With fresh responses it has
# no bias. What remains: the estimate is noisy.
def reinforce(log_probs, old_log_probs, rewards, mask):
    log_prob = log_probs.where(mask, 0).sum(1)
    return -(rewards * log_prob).mean()


# The expected reward, 0.5, is subtracted. This lowers the noise and adds no bias. What remains: the
# expected reward is usually unknown, and nothing ends the push on a wrong response (A < 0).
def baseline(log_probs, old_log_probs, rewards, mask):
    advantages = rewards - 0.5
    log_prob = log_probs.where(mask, 0).sum(1)
    return -(advantages * log_prob).mean()


# The mean of the group replaces the expected reward, and the division by the standard deviation
# removes the unit of the reward. What remains: after the policy has moved, the estimate still has
# the direction of the policy that sampled.
def group(log_probs, old_log_probs, rewards, mask):
    groups = rewards.reshape(-1, GROUP)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    advantages = ((groups - mean) / (std + 1e-4)).flatten()
    log_prob = log_probs.where(mask, 0).sum(1)
    return -(advantages * log_prob).mean()


# A response that is now twice as likely counts twice. This removes the bias of the moved policy.
# What remains: the ratio is a product of T factors, so the noise grows quickly with T.
def ratio(log_probs, old_log_probs, rewards, mask):
    groups = rewards.reshape(-1, GROUP)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    advantages = ((groups - mean) / (std + 1e-4)).flatten()
    log_ratio = (log_probs - old_log_probs).where(mask, 0).sum(1)
    ratio = log_ratio.exp()
    return -(advantages * ratio).mean()


# The root makes the ratio a geometric mean over the tokens. The noise is that of the group stage
# again, and most of its bias is back. What remains: 64 updates on one batch also learn what is
# chance in this batch, and ruin some policies.
def root(log_probs, old_log_probs, rewards, mask):
    groups = rewards.reshape(-1, GROUP)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    advantages = ((groups - mean) / (std + 1e-4)).flatten()
    log_ratio = (log_probs - old_log_probs).where(mask, 0).sum(1)
    lengths = mask.sum(1)
    ratio = (log_ratio / lengths).exp()
    return -(advantages * ratio).mean()


# GSPO: a response whose ratio has left the range in the direction of its advantage has no gradient.
# Hardly any batch ruins a policy now. The price: a good batch teaches less, too, so training is
# slower on this task. The bias is larger: the clip is a limit, and not a better estimate.
def clip(log_probs, old_log_probs, rewards, mask):
    groups = rewards.reshape(-1, GROUP)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    advantages = ((groups - mean) / (std + 1e-4)).flatten()
    log_ratio = (log_probs - old_log_probs).where(mask, 0).sum(1)
    lengths = mask.sum(1)
    ratio = (log_ratio / lengths).exp()
    clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
    objective = torch.minimum(advantages * ratio, advantages * clipped)
    return -objective.mean()


def rollout(logits, length):
    """A batch for each policy: letters, rewards and log-probs. logits: (policies, 3)."""
    letters = torch.multinomial(logits.softmax(1), GROUP * length, replacement=True)
    log_probs = logits.log_softmax(1).gather(1, letters).view(-1, length)
    return letters, (letters.view(-1, length)[:, 0] == 0).double(), log_probs


def estimate(stage, logits, letters, rewards, old_log_probs):
    """The gradient (policies, 3) that this stage estimates from the batch of each policy."""
    logits = logits.detach().requires_grad_()
    log_probs = logits.log_softmax(1).gather(1, letters).view(old_log_probs.shape)
    mask = torch.ones_like(old_log_probs, dtype=torch.bool)
    loss = stage(log_probs, old_log_probs, rewards, mask) * len(logits)
    return -torch.autograd.grad(loss, logits)[0]


def row(stage, length):
    """A line of the table."""
    torch.manual_seed(0)
    text = f"{stage.__name__:9}{length:3}"
    start = FRESH.log().repeat(BATCHES // length, 1)
    batch = rollout(start, length)
    for policy in FRESH, MOVED:
        found = estimate(stage, policy.log().expand_as(start), *batch)
        true = policy[0] * (torch.eye(3)[0] - policy)
        noise = found.var(0).sum().sqrt() / found.mean(0).norm()
        cosine = torch.cosine_similarity(found.mean(0), true, dim=0).clamp(max=1)
        error = (noise / len(start) ** 0.5).rad2deg()
        text += f"{cosine.acos().rad2deg():8.1f} +- {error:3.1f}{noise:7.2f}"
    for policies, batches in (400, 1), (100, 10):
        logits = start[:policies]
        rate = 0.3 / estimate(stage, logits, *rollout(logits, length)).norm(dim=1).mean()
        for _ in range(batches):
            batch = rollout(logits, length)
            for _ in range(64):
                logits = logits + rate * estimate(stage, logits, *batch)
        reward = logits.softmax(1)[:, 0]
        text += f"{reward.mean():9.3f}"
        text += f"{(reward < 0.25).double().mean():8.1%}" if batches == 1 else ""
    return text


def main():
    torch.set_num_threads(1)  # on tensors this small, several threads mostly wait for each other
    print(__doc__.partition("\n\n")[2])
    before, rows = [], []
    for stage in (reinforce, baseline, group, ratio, root, clip):
        source = inspect.getsource(stage).replace(stage.__name__, "loss", 1).splitlines()
        changes = difflib.unified_diff(before, source, n=99, lineterm="")
        print(f"\n==== {stage.__name__} ====", *list(changes)[3:], "", sep="\n")
        print(inspect.getcomments(stage).replace("# ", ""))
        rows = rows[-2:] + [row(stage, length) for length in (4, 32)]
        print(HEADER, *rows, sep="\n")
        before = source


if __name__ == "__main__":
    main()
