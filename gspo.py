r"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071): the maths only.

Pure functions on tensors, which need torch alone: copy this file anywhere. train_math.py uses it.
`python gspo.py` prints an example that can be checked with a pencil.

The idea: the policy gradient raises the probability of a response whose reward is above the mean
of its group, and lowers that of a response below it. Several updates are made on one rollout. Each
response therefore has an importance ratio s, which compares the current policy with the policy
that sampled it. Clipping removes a response from the gradient once s has moved beyond the clip
range in the direction that its advantage favours. It does not keep s inside the range.

Shapes: B responses, of which each `group_size` adjacent ones answer one prompt; T tokens, padded;
V words in the vocabulary. `log_probs` and `old_log_probs` (B, T) are log \pi_\theta(y_{i,t} | x,
y_{i,<t}) under the current policy and under the policy that sampled. `mask` (B, T) is 1 on response
tokens, including the end token, and 0 elsewhere. Equation numbers are those of arXiv v2.

Whoever pastes these functions can rely on this:
  - They compute in float32 or higher. (bfloat16 cannot even represent 1 + 3e-4.)
  - Padding may hold any value, also NaN, and any id. (token_log_probs needs finite logits there.)
  - Log-probs below -1e6, such as -inf, count as -1e6, and ratios above exp(80) count as exp(80).
  - `old_log_probs` never gets a gradient. A response without tokens has loss 0 and gradient 0.
  - A loss is a sum over responses divided by `denominator` (default: B). Micro-batches, gradient
    accumulation and data parallelism are exact if every call gets the same denominator: the number
    of responses in the optimizer step, divided by the number of ranks if gradients are averaged.
  - Shapes or values that do not fit raise a ValueError, which names such shapes. (A mask on a GPU
    is not checked, because the CPU would have to wait. There, any value but 1 counts as padding.)
"""
# From "GSPO in one file of PyTorch", MIT License, copyright 2026 the authors of that repository.
import torch

__version__ = "1.0.0"  # a pasted copy has no package metadata that could tell its version


def group_advantages(rewards, group_size, std_eps=1e-4):
    r"""Eq. 6, group-normalised advantages: A_i = (r_i - mean(r)) / (std(r) + std_eps), where the
    mean and the standard deviation are those of the group of response i.

    rewards (B,), where each `group_size` adjacent ones belong to one prompt -> (B,). The standard
    deviation is that of a sample (n - 1), as in torch, TRL and verl. std_eps has the unit of the
    rewards. It is not in the paper, and avoids a division by 0. Equal rewards give exactly 0.
    ValueError: rewards that are no finite tensor (B,); a group_size below 2 or not dividing B."""
    if not torch.is_tensor(rewards):
        raise ValueError(f"rewards must be a tensor, not a {type(rewards).__name__}")
    _require(rewards.dim() == 1, rewards=rewards)
    n = len(rewards)
    if group_size < 2 or n % group_size:
        raise ValueError(f"group_size {group_size} must be at least 2 and divide the {n} rewards")
    if not rewards.isfinite().all():
        raise ValueError("rewards must be finite, but there is a NaN or an infinity among them")
    groups = _float(rewards).reshape(-1, group_size)
    # Subtracting the first reward changes no advantage, but it makes equal rewards exactly 0.
    groups = groups - groups[:, :1]
    centred = groups - groups.mean(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + std_eps)
    return advantages.masked_fill(centred == 0, 0).flatten()  # not 0 / 0 if std_eps=0


def token_log_probs(logits, tokens, temperature=1.0):
    r"""log \pi_\theta(y_{i,t} | x, y_{i,<t}) = log softmax(logits / temperature)[y_{i,t}].

    logits (B, T, V), integer tokens (B, T) -> (B, T), in float32 if the logits are in half
    precision. logits[:, t] must be those that predict tokens[:, t], so shift the model's output by
    one position first. `temperature` is the sampling temperature. An id outside the vocabulary,
    such as -100, gives NaN. ValueError: other shapes, or a temperature that is not above 0."""
    _require(logits.dim() == 3 and logits.shape[:2] == tokens.shape, logits=logits, tokens=tokens)
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, but it is {temperature}")
    known = tokens.clamp(0, logits.size(-1) - 1)
    log_probs = torch.log_softmax(_float(logits) / temperature, dim=-1).gather(-1, known[..., None])
    return log_probs.squeeze(-1).masked_fill(known != tokens, torch.nan)


def sequence_ratio(log_probs, old_log_probs, mask):
    r"""Eq. 7, the importance ratio of a response: the geometric mean of its tokens' ratios,
    s_i = (\pi_\theta(y_i|x) / \pi_{old}(y_i|x))^{1/|y_i|}.

    log_probs, old_log_probs, mask (B, T) -> (B,). It is 1 for a response without tokens.
    ValueError: shapes that differ; a mask on the CPU with other values than 0 and 1."""
    mask = _boolean(mask)
    return _exp(_token_mean(_log_ratio(log_probs, old_log_probs, mask), mask))


def clipped_objective(ratio, advantages, eps_low, eps_high):
    r"""min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), which is to be maximised. PPO (Eq. 1), GRPO
    (Eq. 2), GSPO (Eq. 5) and GSPO-token (Eq. 13) share this line.

    ratio and advantages have one shape, or size 1 where the other has more, such as (B, 1) and
    (B, T); a 0-dim advantages tensor serves all ratios. Where the clip is active, the gradient is
    0. eps_low in (0, 1] and eps_high > 0 are distances from 1, not bounds; eps_low=1, eps_high=1e9
    switches the clip off. ValueError: other shapes (a (B,) tensor is never broadcast along T), or
    another clip range; also 0.9 <= eps_low < 1 and 1 < eps_high <= 1.1, which look like bounds."""
    match = all(m == n or 1 in (m, n) for m, n in zip(ratio.shape, advantages.shape))
    _require(match and advantages.dim() in (0, ratio.dim()), ratio=ratio, advantages=advantages)
    _check_clip_range(eps_low, eps_high)
    ratio = _float(ratio)
    advantages = _float(advantages)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def gspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4,
              denominator=None):
    r"""Eq. 5, GSPO:
    -1/denominator \sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i), s_i as in Eq. 7.

    log_probs, old_log_probs, mask (B, T), advantages (B,) -> scalar. The gradient is that of Eq.
    10 with the opposite sign: log s_i is the mean of |y_i| log-ratios, so ds_i = s_i d(log s_i) =
    s_i / |y_i| \sum_t d log \pi_\theta(y_{i,t}), and each token's log-prob has the derivative
    -s_i A_i / (|y_i| denominator), or 0 where the clip is active.
    ValueError: shapes that do not match, or a mask, clip range or denominator out of range."""
    _require(advantages.shape == mask.shape[:1], advantages=advantages, mask=mask)
    mask = _boolean(mask)
    ratio = sequence_ratio(log_probs, old_log_probs, mask)
    objective = clipped_objective(ratio, advantages, eps_low, eps_high)
    # A response without tokens has s = 1, so it would add A.
    return _loss(objective.where(mask.any(dim=1), 0), denominator)


def gspo_token_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, eps_high=4e-4,
                    denominator=None):
    r"""Eq. 13, GSPO-token, which is GSPO with an advantage for each token: -1/denominator \sum_i
    1/|y_i| \sum_t min(s_{i,t} A_{i,t}, clip(s_{i,t}, 1 - eps_low, 1 + eps_high) A_{i,t}), with
    Eq. 14: s_{i,t} = sg[s_i] \pi_\theta(y_{i,t}) / sg[\pi_\theta(y_{i,t})]. sg stops gradients, so
    s_{i,t} has the value of s_i, and only token t's log-prob gets its gradient.

    log_probs, old_log_probs, mask (B, T), advantages (B,) or (B, T) -> scalar. The gradient is that
    of Eq. 17 with the opposite sign: -s_i A_{i,t} / (|y_i| denominator) for token t, or 0 where the
    clip is active. If the advantages are equal within each response, value and gradient are those
    of gspo_loss. ValueError: as in gspo_loss."""
    mask = _boolean(mask)
    own = _log_ratio(log_probs, log_probs.detach(), mask)  # 0, but with a gradient
    ratio = sequence_ratio(log_probs, old_log_probs, mask).detach()[:, None] * own.exp()
    advantages = _per_token("advantages", advantages, mask)
    objective = clipped_objective(ratio, advantages, eps_low, eps_high)
    return _loss(_token_mean(objective, mask), denominator)


def grpo_loss(log_probs, old_log_probs, advantages, mask, eps_low=0.2, eps_high=0.27,
              denominator=None):
    r"""Eq. 2, GRPO: -1/denominator \sum_i 1/|y_i| \sum_t min(w_{i,t} A_i, clip(w_{i,t},
    1 - eps_low, 1 + eps_high) A_i), where each token has an importance ratio of its own,
    w_{i,t} = \pi_\theta(y_{i,t}) / \pi_{old}(y_{i,t}).

    log_probs, old_log_probs, mask (B, T), advantages (B,) or (B, T) -> scalar: the mean over each
    response's tokens, then over responses. The gradient is that of Eq. 12 with the opposite sign:
    -w_{i,t} A_i / (|y_i| denominator) for token t, or 0 where the clip is active. With a critic's
    advantages (B, T), this is PPO's clipped objective (Eq. 1). ValueError: as in gspo_loss."""
    mask = _boolean(mask)
    ratio = _exp(_log_ratio(log_probs, old_log_probs, mask))
    advantages = _per_token("advantages", advantages, mask)
    objective = clipped_objective(ratio, advantages, eps_low, eps_high)
    return _loss(_token_mean(objective, mask), denominator)


def clip_fraction(ratio, advantages, mask, eps_low, eps_high):
    r"""The fraction (0 to 1) of response tokens that clipping removes from the gradient: those with
    r > 1 + eps_high and A > 0, and those with r < 1 - eps_low and A < 0. A ratio that is beyond the
    range on the other side keeps its gradient because of the min, so it does not count.

    ratio (B,) of responses or (B, T) of tokens, advantages (B,) or (B, T), mask (B, T) -> scalar.
    If a ratio (B,) is clipped, all tokens of its response count. ValueError: shapes that do not
    match, or a mask or clip range out of range."""
    _check_clip_range(eps_low, eps_high)
    mask = _boolean(mask)
    ratio = _per_token("ratio", ratio, mask)
    advantages = _per_token("advantages", advantages, mask)
    above = (advantages > 0) & (ratio > 1 + eps_high)
    below = (advantages < 0) & (ratio < 1 - eps_low)
    return (above | below).sum() / mask.sum().clamp(min=1)


# ---- helpers: precision, shapes, masks, and means ------------------------------------------------


def _float(x):
    """x in float32, or in float64 if it is float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _require(shapes_match, **tensors):
    """Raises a ValueError with the shape of each tensor unless `shapes_match`."""
    if not shapes_match:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"these shapes do not match: {shapes}")


def _boolean(mask):
    """The mask as booleans. Values are read only if the mask is on the CPU and not boolean yet."""
    if mask.dtype == torch.bool:
        return mask
    if mask.device.type == "cpu":
        wrong = mask[(mask != 0) & (mask != 1)]
        if len(wrong) > 0:
            raise ValueError(f"mask must hold only 0 and 1, but it holds {wrong[0].item()}; if 0 "
                             "marks the tokens, as in an additive mask, pass mask == 0")
    return mask == 1


def _check_clip_range(eps_low, eps_high):
    """ValueError unless 0 < eps_low <= 1 and 0 < eps_high, or if a distance looks like a bound."""
    looks_like_bound = 0.9 <= eps_low < 1 or 1 < eps_high <= 1.1
    if looks_like_bound or not (0 < eps_low <= 1 and eps_high > 0):
        raise ValueError(f"eps_low {eps_low} must be above 0 and at most 1, and eps_high "
                         f"{eps_high} must be above 0. They are distances from 1, not bounds: "
                         "instead of 0.9997 and 1.0004, pass 0.0003 and 0.0004")


def _log_ratio(log_probs, old_log_probs, mask):
    r"""log(\pi_\theta / \pi_{old}) of each token, (B, T); 0 on padding, no gradient to the old."""
    match = mask.dim() == 2 and log_probs.shape == old_log_probs.shape == mask.shape
    _require(match, log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    new, old = (_float(x).clamp(min=-1e6) for x in (log_probs, old_log_probs.detach()))
    return (new - old).masked_fill(~mask, 0)


def _exp(log_ratio):
    """exp, at most exp(80), because 0 times infinity is NaN. A clamp would remove the gradient."""
    return (log_ratio - (log_ratio.detach() - 80).clamp(min=0)).exp()


def _per_token(name, x, mask):
    """x (B,) or (B, T) as (B, T), with 0 on padding."""
    _require(mask.dim() == 2 and x.shape in (mask.shape, mask.shape[:1]), **{name: x, "mask": mask})
    x = x if x.dim() == 2 else x[:, None]
    return _float(x).expand(mask.shape).masked_fill(~mask, 0)


def _token_mean(x, mask):
    """The mean of x (B, T) over each response's tokens, (B,); 0 for a response without tokens."""
    return x.masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def _loss(objective, denominator):
    """Minus the sum of the objectives (B,) over the denominator: descent maximises them."""
    if denominator is None:
        denominator = len(objective)
    if not denominator > 0:
        raise ValueError(f"denominator must be above 0, but it is {denominator}")
    return -objective.sum() / denominator


if __name__ == "__main__":  # a worked example that can be checked with a pencil
    advantages = group_advantages(torch.tensor([0.8, 0.4, 0.6]), group_size=3)
    print("Three responses to one prompt have the rewards 0.8, 0.4 and 0.6: mean 0.6, standard")
    print("deviation 0.2. Their advantages are {:+.2f}, {:+.2f} and {:+.2f}.\n".format(*advantages))

    # Each response has four tokens of probability 1/4. Then the first token's probability doubles.
    old_log_probs = torch.full((3, 4), 0.25).log()
    log_probs = (old_log_probs + torch.tensor([2.0, 1.0, 1.0, 1.0]).log()).requires_grad_()
    mask = torch.ones(3, 4)
    ratio = sequence_ratio(log_probs, old_log_probs, mask)[0]
    print("The probability of each response of 4 tokens doubles, because that of its first token")
    print(f"doubles. The importance ratio of the response is s = 2^(1/4) = {ratio:.3f}, not 2.\n")

    print("The last two columns show the gradient of the objective with respect to each token's")
    print("log-prob, times |y| = 4. It is 0 if the token is clipped or the advantage is 0.")
    print("advantage  token ratio  GRPO (0.2, 0.27)  GSPO (3e-4, 4e-4)")
    gradients = []
    for loss in (grpo_loss, gspo_loss):
        value = loss(log_probs, old_log_probs, advantages, mask, denominator=1)
        gradients.append(-4 * torch.autograd.grad(value, log_probs)[0] + 0)
    for i, advantage in enumerate(advantages):
        for t, token_ratio in enumerate([2, 1, 1, 1]):
            grpo, gspo = (gradient[i, t] for gradient in gradients)
            print(f"{advantage:+9.2f} {token_ratio:12d} {grpo:+17.2f} {gspo:+18.2f}")
    print("\nIn GRPO, each token has its own importance ratio and is clipped on its own.")
    print("In GSPO, all tokens of a response share the ratio s and are clipped together.")
