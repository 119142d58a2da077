"""Makes the table and the picture of the GSM8K runs on one H100 from their logs.

    python -m experiments.qwen.gsm8k_gpu

This reads metrics.jsonl (four runs) and answers.jsonl (the graded answers of the models, without
texts) in experiments/results/gsm8k_gpu, and writes table.md and curves.png there. The page about
these runs, gsm8k_gpu.md, has the commands that made the logs.
"""
from pathlib import Path

import matplotlib

from common.intervals import paired
from common.logs import read, read_packed
from train_math import wilson

RESULTS = Path(__file__).parents[1] / "results" / "gsm8k_gpu"
RUNS = {  # log: label, colour, line style; GSPO is blue and GRPO orange, as in every picture
    "gspo_1e-6": ("GSPO, clip range 3e-4, learning rate 1e-6", "#0072B2", "-"),
    "gspo_5e-6": ("GSPO, clip range 3e-3, learning rate 5e-6", "#56B4E9", "--"),
    "grpo_1e-6": ("GRPO, clip range 0.2, learning rate 1e-6", "#E69F00", "-."),
    "grpo_5e-6": ("GRPO, clip range 0.2, learning rate 5e-6", "#8F6200", ":"),
}
PANELS = {
    "reward": "mean reward of the\nsampled responses",
    "response_length": "response length\n(tokens)",
    "cut": "fraction of responses\ncut at 512 tokens",
    "entropy": "entropy\n(nats per token)",
    "clip_fraction": "clip fraction\n(of all tokens)",
}
WINDOW = 5  # steps that each point of a curve averages


def percent(fraction):
    return f"{100 * fraction:.1f}%"


def points(difference):
    return f"{100 * difference:+.1f}"


def table_row(evaluation, baseline):
    """One line of the table. baseline: the pre-trained model on the same questions, at the same
    precision."""
    rewards = evaluation["reward"]
    n = len(rewards)
    low, high = wilson(sum(rewards), n)
    cut = sum(tokens == 512 for tokens in evaluation["tokens"])
    cells = [
        evaluation["model"], f"{n} {evaluation['questions']}", evaluation["precision"],
        f"{percent(sum(rewards) / n)} ({percent(low)} to {percent(high)})",
        percent(sum(evaluation["last_number"]) / n), str(n - sum(evaluation["boxed"])), str(cut)]
    if baseline is evaluation:
        cells += ["", ""]
    else:
        difference, (low, high), p = paired(baseline["reward"], rewards)
        cells += [f"{points(difference)} ({points(low)} to {points(high)})", f"{p:.2g}"]
    return f"| {' | '.join(cells)} |"


def table(evaluations):
    lines = [
        "| model | questions | precision | accuracy, boxed answer (95% CI) | last number "
        "| no box | cut at 512 | difference in points (95% CI) | exact McNemar p |",
        "|---|---|---|---|---|---|---|---|---|"]
    baselines = {}
    for evaluation in evaluations:
        key = evaluation["questions"], evaluation["precision"]
        baseline = baselines.setdefault(key, evaluation)  # the pre-trained model comes first
        lines.append(table_row(evaluation, baseline))
    return "\n".join(lines) + "\n"


def smoothed(values):
    means = []
    for i in range(len(values)):
        window = values[max(0, i - WINDOW + 1):i + 1]
        means.append(sum(window) / len(window))
    return means


def draw(logs, path):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(PANELS), figsize=(16, 3.8), layout="constrained")
    for name, (label, color, style) in RUNS.items():
        rows = [row for row in logs[name] if "reward" in row]
        steps = [row["step"] for row in rows]
        for axis, key in zip(axes, PANELS):
            values = smoothed([row[key] for row in rows])
            axis.plot(steps, values, style, color=color, linewidth=2, label=label)
    for axis, title in zip(axes, PANELS.values()):
        axis.set(title=title, xlabel="step (one rollout and four updates)")
        axis.grid(alpha=0.3)
    figure.suptitle("At both learning rates, GRPO's entropy falls faster than GSPO's, and GRPO "
                    "ends with more responses cut")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(RUNS),
                  title=f"one run each; each point is the mean of {WINDOW} steps", handlelength=4)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    text = table(read(RESULTS / "answers.jsonl"))
    (RESULTS / "table.md").write_text(text, encoding="utf-8")
    draw(read_packed(RESULTS / "metrics.jsonl"), RESULTS / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
