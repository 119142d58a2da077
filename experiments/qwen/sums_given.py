"""How much of what sums.py teaches is to set the calculation up?

    python -m experiments.qwen.sums_given RUN --model MODEL

The untrained MODEL answers RUN's held-out questions greedily again, but each answer is begun for
it with the calculation, '26 * 26 =', as results/sums/gspo_0 writes it. Its answers go to RUN's
before_given.jsonl, once; what is said of them is printed.
"""
import argparse
from pathlib import Path

import torch

import train_math
from common.logs import read, write
from experiments.qwen import sums


def begun_answers(model, tokenizer, rows, cfg):
    """The greedy answers to rows, with the beginning that each is given."""
    begun = ["{} * {} =".format(*row["factors"]) for row in rows]
    prompts = train_math.encode_prompts(tokenizer, rows, cfg.instruction)
    tokens = tokenizer(begun, add_special_tokens=False).input_ids
    ends = torch.tensor([tokenizer.eos_token_id])
    responses, _ = train_math.rollout(
        model, [p + t for p, t in zip(prompts, tokens)], 1, 12, 0.0, ends)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [start + text for start, text in zip(begun, texts)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", required=True)
    a = parser.parse_args()
    path = a.run / "before_given.jsonl"
    if not path.exists():
        cfg = train_math.parse_settings(sums.SETTINGS)
        model, tokenizer = train_math.load(a.model, "cpu")
        _, rows = sums.make_questions()
        texts = begun_answers(model, tokenizer, rows, cfg)
        right = train_math.score(sums.last_number_reward, rows, texts).tolist()
        write(path, [{"temperature": 0.0, **row, "response": texts[i], "right": right[i]}
                     for i, row in enumerate(rows)])
    given = read(path)
    before, after = ([row for row in read(a.run / f"{when}.jsonl") if row["temperature"] == 0]
                     for when in ("before", "after"))
    print(f"right with the calculation given: {sums.told(given)}")
    print(f"given minus before: {sums.gain(before, given)}")
    print(f"after minus given: {sums.gain(given, after)}")


if __name__ == "__main__":
    main()
