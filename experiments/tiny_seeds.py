"""`train_math.py --tiny` on three seeds with GSPO and with GRPO, in one picture: rewards, and clip fractions
beside them.

    python experiments/tiny_seeds.py      about six minutes on a CPU; what was cut off goes on when started again

Writes experiments/results/tiny_seeds/: each run's metrics.jsonl and eval.jsonl, table.md, and tiny_seeds.png.
"""
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_math

RESULTS = Path(__file__).resolve().parent / "results" / "tiny_seeds"
SEEDS, COLOURS = (0, 1, 2), {"gspo": "tab:blue", "grpo": "tab:orange"}


def draw(runs):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    panels = {"reward": "mean reward", "response_length": "response length (tokens)",
              "clip_fraction": "clip fraction (share of tokens)"}
    for axis, (name, label) in zip(axes, panels.items()):
        for (algorithm, seed), rows in runs.items():
            axis.plot([row["step"] for row in rows], [row[name] for row in rows], color=COLOURS[algorithm],
                      alpha=0.8,
                      marker=".", label=algorithm.upper() if seed == SEEDS[0] else None)
        axis.set(xlabel="step (128 responses each)", title=label, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    figure.suptitle("--tiny, three seeds each: reward and length climb together; GSPO (clip range .03, .04) "
                    "clips more tokens than GRPO (.2, .27)", fontsize=11)
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    RESULTS.mkdir(parents=True, exist_ok=True)
    runs, table = {}, ["| algorithm | seed | first reward | last reward | held out before | after | mean clip fraction "
                       "| max log_ratio_first_max |", "|---|---|---|---|---|---|---|---|"]
    for algorithm in COLOURS:
        for seed in SEEDS:
            output = Path("runs/tiny_seeds") / f"{algorithm}-{seed}"
            train_math.main(["--tiny", "--algorithm", algorithm, "--seed", str(seed), "--output_dir", str(output),
                             "--resume"])
            for name in ("metrics", "eval"):
                shutil.copy(output / f"{name}.jsonl", RESULTS / f"{algorithm}-{seed}.{name}.jsonl")
            rows = runs[algorithm, seed] = train_math.read(output / "metrics.jsonl")
            before, *_, after = (row["strict"] for row in train_math.read(output / "eval.jsonl"))
            clipped = sum(row["clip_fraction"] for row in rows) / len(rows)
            first_max = max(row["log_ratio_first_max"] or 0 for row in rows)
            table.append(f"| {algorithm} | {seed} | {rows[0]['reward']:.3f} | {rows[-1]['reward']:.3f} | {before:.3f} "
                         f"| {after:.3f} | {clipped:.2%} | {first_max} |")
    (RESULTS / "table.md").write_text("\n".join(table) + "\n")
    draw(runs)
    print("\n".join(table))
