"""Is the first minibatch on-policy to the last bit? log_ratio_first_max of a few steps on any model, which
should be 0.

    python experiments/first_minibatch.py --model FOLDER_OR_HUB_ID [...] --gsm8k FOLDER_WITH_TRAIN_JSONL

The reward is whether a response has an odd number of letters e: every model gets it half of the time, so that
even random weights have groups to learn from. Writes experiments/results/first_minibatch.jsonl, a line a
step, after what is there.
"""
import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_math
from plot import append, read

RESULTS = Path(__file__).resolve().parent / "results" / "first_minibatch.jsonl"
FLAGS = """--prompts_per_step 4 --group_size 4 --minibatches 2 --max_completion_length 32 --max_steps 2 --eval_size 0
           --micro_batch_tokens 600 --learning_rate 1e-5""".split()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--gsm8k", type=Path, required=True, help="the folder with train.jsonl")
    args, more = parser.parse_known_args()
    train_math.correctness_reward = lambda prompts, completions, answer: [float(c.count("e") % 2) for c in completions]
    for name in args.model:
        with tempfile.TemporaryDirectory() as folder:
            train_math.main(["--model", name, "--dataset", str(args.gsm8k / "train.jsonl"), "--output_dir",
                             f"{folder}/run", *FLAGS, *more])
            for row in read(f"{folder}/run/metrics.jsonl")[1:]:
                row = {"model": Path(name).name, **row}
                append(RESULTS, row)
                print(f"{row['model']}, step {row['step']}: max |log s| of the first minibatch "
                      f"{row['log_ratio_first_max']}, std of log s later {row['log_ratio_std'] or 0:.1e}")
