r"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071): the maths, and nothing else.

Pure functions on tensors; no model, no tokenizer, no config. Copy this file and it works. What it does NOT do:
sample, score, shard or train (train_math.py trains), and add a KL penalty (the paper leaves it out for brevity).

The idea: a response that earns more than its group's mean becomes likelier, one that earns less becomes less likely,
and each response's one ratio s of now to then, clipped, says how far before new ones are sampled.

Words: B responses, the `group_size` responses to one prompt side by side; T the padded response length; V the
vocabulary. `log_probs` and `old_log_probs` (B, T) hold log \pi_\theta(y_{i,t} | x, y_{i,<t}) as it is now and as it
was when the responses were sampled; `mask` (B, T) is 1 on response tokens, the end token included, 0 elsewhere.
On response tokens log-probs are finite, and differ by less than 88, where a float32 ratio overflows.
Equations have their numbers in arXiv v2, and names, since other versions may number differently.

Promises:
  - every function computes in float32 or better whatever it is given (bfloat16 cannot even hold 1 + 3e-4);
  - where there is a mask, padding may hold anything, NaN and -inf included: neither value nor gradient sees it;
  - in a loss, a response without tokens has value 0 and gradient 0, and still counts in the mean over responses;
  - `old_log_probs` never gets a gradient;
  - a loss is a sum over responses divided by `denominator` (default: the B given). Micro-batches, gradient
    accumulation and data parallelism are exact when every call gets the same denominator: the responses in the
    whole optimizer step (divided by the number of ranks where gradients are averaged over ranks);
  - shapes that do not fit raise a ValueError that names them.
"""
import torch


def _float(x):
    """x in float32, or in float64 if it came so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _require(fits, **tensors):
    """ValueError with the shape of each tensor unless `fits`."""
    if not fits:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"shapes do not fit: {shapes}")


def _log_ratio(log_probs, old_log_probs, mask):
    r"""log(\pi_\theta / \pi_{old}) of each token, (B, T); 0 on padding, and no gradient to the old policy."""
    _require(mask.dim() == 2 and log_probs.shape == old_log_probs.shape == mask.shape,
             log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    return (_float(log_probs) - _float(old_log_probs.detach())).masked_fill(~mask.bool(), 0)


def _per_token(name, x, mask):
    """(B,) or (B, T) -> (B, T), 0 on padding."""
    _require(mask.dim() == 2 and x.shape in (mask.shape, mask.shape[:1]), **{name: x, "mask": mask})
    return _float(x if x.dim() == 2 else x[:, None]).expand(mask.shape).masked_fill(~mask.bool(), 0)


def _token_mean(x, mask):
    """The mean of x (B, T) over each response's tokens, (B,); 0 for a response without tokens."""
    return x.masked_fill(~mask.bool(), 0).sum(dim=1) / mask.bool().sum(dim=1).clamp(min=1)


def _loss(objective, denominator):
    """Minus the sum of the responses' objectives (B,), for descent to maximise them, over the denominator or B."""
    return -objective.sum() / (len(objective) if denominator is None else denominator)


def group_advantages(rewards, group_size, std_eps=1e-4):
    r"""Eq. 6, group-normalised advantages: A_i = (r_i - mean(r)) / (std(r) + std_eps), over response i's own group.

    rewards (B,), each run of `group_size` belonging to one prompt -> (B,). The standard deviation is the sample one
    (n - 1), as in torch, TRL and verl; std_eps is in units of reward. A group of equal rewards gives exactly 0.
    ValueError: rewards not (B,), group_size < 2, group_size does not divide B, a reward that is not finite."""
    _require(rewards.dim() == 1, rewards=rewards)
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size {group_size} must be at least 2 and divide the {len(rewards)} rewards")
    if not rewards.isfinite().all():
        raise ValueError("rewards must be finite: there is a NaN or an infinity among them")
    groups = _float(rewards).reshape(-1, group_size)
    groups = groups - groups[:, :1]  # equal rewards become 0 before a mean can round them; no advantage changes
    centred = groups - groups.mean(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + std_eps)
    return advantages.masked_fill(centred == 0, 0).flatten()  # catches the other half, 0 / 0 where std_eps = 0


def token_log_probs(logits, tokens, temperature=1.0):
    r"""log \pi_\theta(y_{i,t} | x, y_{i,<t}) = log softmax(logits / temperature)[y_{i,t}].

    logits (B, T, V), tokens (B, T) integers -> (B, T), float32 from half precision. logits[:, t] already predict
    tokens[:, t]: shift the model's output by one first. `temperature` is the one the tokens were sampled at.
    ValueError: logits and tokens differ in (B, T), temperature not above 0."""
    _require(logits.dim() == 3 and logits.shape[:2] == tokens.shape, logits=logits, tokens=tokens)
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be above 0")
    return torch.log_softmax(_float(logits) / temperature, dim=-1).gather(-1, tokens[..., None]).squeeze(-1)


def sequence_ratio(log_probs, old_log_probs, mask):
    r"""Eq. 7, the sequence's importance ratio: s_i = (\pi_\theta(y_i|x) / \pi_{old}(y_i|x))^{1/|y_i|}, that is, the
    geometric mean of its tokens' ratios.

    log_probs, old_log_probs, mask (B, T) -> (B,); 1 for a response without tokens. ValueError: shapes that
    differ."""
    return _token_mean(_log_ratio(log_probs, old_log_probs, mask), mask).exp()


def clipped_objective(ratio, advantages, eps_low, eps_high):
    r"""min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), to be maximised: the one line that PPO (Eq. 1), GRPO
    (Eq. 2), GSPO (Eq. 5) and GSPO-token (Eq. 13) share.

    Elementwise: ratio and advantages of one shape, or 1 where the other has more, as (B, 1) beside (B, T), or one
    advantage for all. Where the clip holds, the gradient is 0. ValueError: others (a (B,) is never laid along T)."""
    fits = all(m == n or 1 in (m, n) for m, n in zip(ratio.shape, advantages.shape))
    _require(fits and advantages.dim() in (0, ratio.dim()), ratio=ratio, advantages=advantages)
    ratio, advantages = _float(ratio), _float(advantages)
    return torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)


def gspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4, denominator=None):
    r"""Eq. 5, GSPO: -1/denominator \sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i), s_i as in Eq. 7.

    log_probs, old_log_probs, mask (B, T), advantages (B,) -> scalar. Its gradient is Eq. 10's with the sign turned:
    every token of a response weighs s_i A_i / |y_i|, or nothing where the clip holds. ValueError: shapes that do
    not fit."""
    _require(advantages.shape == mask.shape[:1], advantages=advantages, mask=mask)
    ratio = sequence_ratio(log_probs, old_log_probs, mask)
    objective = clipped_objective(ratio, advantages, eps_low, eps_high)
    return _loss(objective.where(mask.bool().any(dim=1), 0), denominator)  # an empty response: s = 1 would earn A


def gspo_token_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4, denominator=None):
    r"""Eq. 13, GSPO-token, GSPO with an advantage for each token: -1/denominator \sum_i 1/|y_i| \sum_t
    min(s_{i,t} A_{i,t}, clip(s_{i,t}, 1 - eps_low, 1 + eps_high) A_{i,t}) where, Eq. 14, s_{i,t} = sg[s_i]
    \pi_\theta(y_{i,t}) / sg[\pi_\theta(y_{i,t})]: worth s_i, with token t's gradient alone (sg stops gradients).

    log_probs, old_log_probs, mask (B, T), advantages (B,) or (B, T) -> scalar. Its gradient is Eq. 17's with the
    sign turned: token t weighs s_i A_{i,t} / |y_i|, or nothing where the clip holds. Advantages that are equal
    within each response give gspo_loss's value and gradient. ValueError: shapes that do not fit."""
    own = _log_ratio(log_probs, log_probs, mask)  # log(\pi / sg[\pi]): the second is detached, so 0, with a gradient
    ratio = sequence_ratio(log_probs, old_log_probs, mask).detach()[:, None] * own.exp()
    objective = clipped_objective(ratio, _per_token("advantages", advantages, mask), eps_low, eps_high)
    return _loss(_token_mean(objective, mask), denominator)


def grpo_loss(log_probs, old_log_probs, advantages, mask, eps_low=0.2, eps_high=0.27, denominator=None):
    r"""Eq. 2, GRPO: -1/denominator \sum_i 1/|y_i| \sum_t min(w_{i,t} A_i, clip(w_{i,t}, 1 - eps_low, 1 + eps_high)
    A_i), where each token has its own ratio, w_{i,t} = \pi_\theta(y_{i,t}) / \pi_{old}(y_{i,t}).

    log_probs, old_log_probs, mask (B, T), advantages (B,) or (B, T) -> scalar: the mean over a response's tokens,
    then over responses. Its gradient is Eq. 12's with the sign turned: token t weighs w_{i,t} A_i / |y_i|, or
    nothing where the clip holds. With a critic's (B, T) advantages it is PPO's clipped objective (Eq. 1).
    ValueError: shapes that do not fit."""
    ratio = _log_ratio(log_probs, old_log_probs, mask).exp()
    objective = clipped_objective(ratio, _per_token("advantages", advantages, mask), eps_low, eps_high)
    return _loss(_token_mean(objective, mask), denominator)


def clip_fraction(ratio, advantages, mask, eps_low, eps_high):
    r"""The share, 0 to 1, of response tokens that the clip takes out of the gradient: r > 1 + eps_high where A > 0,
    r < 1 - eps_low where A < 0. Beyond the range on the other side the min keeps the gradient: that is not clipped.

    ratio (B,) of sequences or (B, T) of tokens, advantages (B,) or (B, T), mask (B, T) -> scalar. A clipped (B,)
    ratio takes out all tokens of its response. ValueError: shapes that do not fit."""
    ratio = _per_token("ratio", ratio, mask)
    advantages = _per_token("advantages", advantages, mask)
    clipped = ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))
    return clipped.sum() / mask.bool().sum().clamp(min=1)


if __name__ == "__main__":  # a worked example to check with a pencil
    advantages = group_advantages(torch.tensor([0.8, 0.4, 0.6]), group_size=3)
    print("Rewards 0.8 0.4 0.6: mean 0.6, standard deviation 0.2 -> advantages", *(f"{a:+.2f}" for a in advantages))

    # Three responses of four tokens, each of probability 1/4; then the first token of each becomes twice as likely.
    old_log_probs = torch.full((3, 4), 0.25).log()
    log_probs = (old_log_probs + torch.tensor([2.0, 1.0, 1.0, 1.0]).log()).requires_grad_()
    mask = torch.ones(3, 4)
    ratio = sequence_ratio(log_probs, old_log_probs, mask)[0]
    print(f"A response of 4 tokens whose probability doubles: s = 2^(1/4) = {ratio:.3f}, not 2\n")

    print("What each token's log-prob weighs in the gradient, times |y| = 4 (0: clipped, or A = 0)")
    print("advantage  token ratio  GRPO (0.2, 0.27)  GSPO (3e-4, 4e-4)")
    weight = {}
    for loss in (grpo_loss, gspo_loss):
        value = loss(log_probs, old_log_probs, advantages, mask, denominator=1)
        weight[loss] = -4 * torch.autograd.grad(value, log_probs)[0] + 0
    for i in range(3):
        for t in range(4):
            print(f"{advantages[i]:+9.2f} {2 if t == 0 else 1:12d} "
                  f"{weight[grpo_loss][i, t]:+17.2f} {weight[gspo_loss][i, t]:+18.2f}")
    print("\nGRPO: each token weighs its own ratio and is clipped alone. GSPO: all weigh s and are clipped as one.")
