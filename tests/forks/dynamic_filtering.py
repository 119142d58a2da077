"""Dynamic sampling as in DAPO: groups of equal rewards are replaced by those of other questions."""
import torch

import train_math


def filtering(spare, reward, attempts=4):
    """A `sample` that asks spare questions until all groups have different rewards."""

    def sample(model, tokenizer, questions, group_size, temperature, cfg, **parts):
        def draw(some):
            return train_math.sample(
                model, tokenizer, some, group_size, temperature, cfg, **parts)

        if group_size == 1:  # an evaluation
            return draw(questions)
        rollout = draw(questions)._replace(questions=list(questions))
        for _ in range(attempts):
            rewards, _ = train_math.score_rollout(reward, rollout.questions, rollout, cfg)
            groups = rewards.view(-1, group_size)
            equal = groups.amax(dim=1) == groups.amin(dim=1)  # std() of equal numbers may be 1e-8
            for i in equal.nonzero().flatten().tolist():
                other = [spare[torch.randint(len(spare), ())]]
                new = draw(other)
                rows = slice(i * group_size, (i + 1) * group_size)
                rollout.questions[i:i + 1] = other
                rollout.prompts[i:i + 1] = new.prompts
                rollout.responses[rows] = new.responses
                rollout.texts[rows] = new.texts
                rollout.log_probs[rows] = new.log_probs
        return rollout

    return sample
