"""A reward that subtracts a little for each token, and more for a response without an end."""
import train_math


def reward(prompts, completions, completion_ids, cut, log_metric, **columns):
    digits = [sum(letter.isdigit() for letter in text) for text in completions]
    lengths = [len(ids) for ids in completion_ids]
    log_metric("digits", sum(digits) / len(digits))
    rewards = []
    for n, length, is_cut in zip(digits, lengths, cut):
        rewards.append(float(n % 2) - 0.01 * length - 0.5 * is_cut)
    return rewards


if __name__ == "__main__":
    train_math.main(reward=reward)
