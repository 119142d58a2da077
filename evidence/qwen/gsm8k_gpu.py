"""Makes the table and the picture of the GSM8K runs on one H100 from their logs.

    python -m evidence.qwen.gsm8k_gpu

This reads metrics.jsonl (four runs) and answers.jsonl (the graded answers of the models, without
texts) in evidence/results/qwen/gsm8k_gpu, and writes table.md and curves.png there. The page
about these runs, real_models.md, has the commands that made the logs.
"""
from pathlib import Path

import matplotlib

from tools.logs import paired, read, read_packed
from train_math import wilson

RESULTS = Path(__file__).parents[1] / "results" / "qwen" / "gsm8k_gpu"
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
    "clip_fraction": "clipped tokens\n(fraction)",
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


def draw_accuracy(axis, evaluations):
    """The accuracy on all test questions: each trained model beside the pre-trained one, which was
    evaluated at the same precision."""
    shown = [row for row in evaluations if row["questions"] == "test"]
    before = {row["precision"]: row for row in shown if row["model"] not in RUNS}
    after = [row for row in shown if row["model"] in RUNS]
    for place, row in enumerate(after):
        _, color, _ = RUNS[row["model"]]
        for side, evaluation, shade in (-1, before[row["precision"]], "#666666"), (1, row, color):
            rewards = evaluation["reward"]
            accuracy = 100 * sum(rewards) / len(rewards)
            interval = [100 * x for x in wilson(sum(rewards), len(rewards))]
            x = place + 0.1 * side
            axis.plot([x, x], interval, "_-", color=shade)
            axis.plot(x, accuracy, "o" if side > 0 else "s", color=shade)
            axis.annotate(f"{accuracy:.1f}", (x, accuracy), (6 * side, 0), va="center",
                          ha="left" if side > 0 else "right", textcoords="offset points")
    names = [row["model"].replace("_", " ").replace("g", "G", 1) for row in after]
    names = [f"{name[:4].upper()}{name[4:]}" for name in names]
    axis.set(title="greedy accuracy on the 1,319\ntest questions (%)", xlim=(-0.6, 2.6),
             xlabel="squares: before training; circles: after")
    axis.set_xticks(range(len(after)), names)
    axis.grid(alpha=0.3, axis="y")


def draw(logs, evaluations, path):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, grid = plt.subplots(2, 3, figsize=(13, 7.6), layout="constrained")
    first, *axes = grid.flat
    draw_accuracy(first, evaluations)
    for name, (label, color, style) in RUNS.items():
        rows = [row for row in logs[name] if "reward" in row]
        steps = [row["step"] for row in rows]
        for axis, key in zip(axes, PANELS):
            values = smoothed([row[key] for row in rows])
            axis.plot(steps, values, style, color=color, linewidth=2, label=label)
    for axis, title in zip(axes, PANELS.values()):
        axis.set(title=title, xlabel="step (one rollout and four updates)")
        axis.grid(alpha=0.3)
    figure.suptitle("The test accuracy rises most with GSPO at 1e-6 (first panel). "
                    "GRPO's entropy falls faster than GSPO's.")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  title=f"one run each; first panel: 95% intervals; curves: each point is the mean "
                        f"of {WINDOW} steps", handlelength=4)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    evaluations = read(RESULTS / "answers.jsonl")
    text = table(evaluations)
    (RESULTS / "table.md").write_text(text, encoding="utf-8")
    draw(read_packed(RESULTS / "metrics.jsonl"), evaluations, RESULTS / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
