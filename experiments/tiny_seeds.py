"""`train_math.py --tiny` on three seeds with GSPO and with GRPO, in one picture: rewards, and clip fractions
beside them.

    python experiments/tiny_seeds.py      about three minutes on a CPU; what was cut off goes on when started again

Writes experiments/results/tiny_seeds/: each run's metrics.jsonl and table.md; and tiny_seeds.png.
"""
import math
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_math
from plot import PANELS, draw, read

RESULTS = Path(__file__).resolve().parent / "results" / "tiny_seeds"
GAP = dict.fromkeys(("step", *PANELS), math.nan)  # so that no line goes from one seed to the next

if __name__ == "__main__":
    RESULTS.mkdir(parents=True, exist_ok=True)
    runs, table = {}, ["| algorithm | seed | first reward | last reward | held out before | after | mean clip fraction "
                       "| max log_ratio_first_max |", "|---|---|---|---|---|---|---|---|"]
    for algorithm in ("gspo", "grpo"):
        for seed in range(3):
            output = Path("runs/tiny_seeds", f"{algorithm}-{seed}")
            train_math.main(["--tiny", "--algorithm", algorithm, "--seed", str(seed), "--output_dir", str(output),
                             "--resume"])
            shutil.copy(output / "metrics.jsonl", RESULTS / f"{algorithm}-{seed}.metrics.jsonl")
            before, *rows = read(output / "metrics.jsonl")
            runs.setdefault(f"{algorithm.upper()}, three seeds", []).extend([before, *rows, GAP])
            clipped = sum(row["clip_fraction"] for row in rows) / len(rows)
            first_max = max(row["log_ratio_first_max"] or 0 for row in rows)
            table.append(f"| {algorithm} | {seed} | {rows[0]['reward']:.3f} | {rows[-1]['reward']:.3f} | "
                         f"{before['eval_strict']:.3f} | {rows[-1]['eval_strict']:.3f} | {clipped:.2%} | {first_max} |")
    (RESULTS / "table.md").write_text("\n".join(table) + "\n")
    draw(runs, RESULTS.with_suffix(".png"), eps_high=0.04)
    print("\n".join(table))
