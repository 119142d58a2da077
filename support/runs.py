"""A run of train_math.py: the order of its questions, its files, and how it is resumed."""
import contextlib
import itertools
import json
import os
import random
import signal
import threading
import zlib
from pathlib import Path

import torch
from tqdm.auto import tqdm

MAY_CHANGE = {"dataset", "output_dir", "device", "max_steps", "micro_batch_tokens",
              "rollout_rows", "save_steps", "eval_steps", "eval_size"}
NOT_SHOWN = {"step", "entropy", "sampler_gap", "loss", "grad_norm", "log_ratio_first_max",
             "log_ratio_mean", "seconds_rollout", "eval_questions"}


class Run:
    """The rows of a run, one dict per step, and its files. It has none without an output_dir.

    metrics.jsonl and eval_STEP.jsonl are for the reader. state.pt has all that is needed to resume:
    it is replaced only when the new one is complete, so the run may be killed at any time."""

    def __init__(self, cfg, model, tokenizer, optimizer, questions):
        """Resumes the run in cfg.output_dir, if any. ValueError: it has other settings."""
        self.model = model
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        low, high = cfg.clip_range()
        self.settings = vars(cfg) | {"eps_low": low, "eps_high": high}
        self.settings["questions"] = checksum(questions)
        self.max_steps = cfg.max_steps
        self.rows = []
        self.folder = Path(cfg.output_dir).absolute() if cfg.output_dir else None
        if self.folder and (self.folder / "state.pt").exists():
            self.resume(torch.load(self.folder / "state.pt", map_location="cpu"))
        elif self.folder and (self.folder / "model").exists():
            raise ValueError(f"{self.folder} has a model, but no state.pt. Use another output_dir")

    def resume(self, state):
        self.rows = json.loads(state["rows"])
        now = json.loads(as_json(self.settings))
        changed = [name for name, value in self.rows[0]["settings"].items()
                   if name not in MAY_CHANGE and value != now.get(name)]
        if changed:
            raise ValueError(f"the run in {self.folder} has other values of {', '.join(changed)}. "
                             "Use another output_dir")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        write_lines(self.rows, self.folder / "metrics.jsonl")  # without the rows after the save
        tqdm.write(f"resuming the run in {self.folder} after step {self.rows[-1]['step']}")

    def add(self, row, results, is_saved):
        """Add the row of the next step and the results of its evaluation, and print the row."""
        self.rows.append(row)
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_lines(self.rows, self.folder / "metrics.jsonl")
            if results:
                write_lines(results, self.folder / f"eval_{row['step']}.jsonl")
            if is_saved:
                self.save()
            self.show(row, results)

    def save(self):
        state = {"rows": as_json(self.rows), "model": self.model.state_dict(),
                 "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.folder / "partial")
        os.replace(self.folder / "partial", self.folder / "state.pt")

    def show(self, row, results):
        shown = [f"step {row['step']}/{self.max_steps}"]
        for name, value in row.items():
            if isinstance(value, (int, float)) and name not in NOT_SHOWN:
                shown.append(f"{name} {value:.3g}")
            if f"{name}_interval" in row:
                shown.append("(95% CI {:.3g} to {:.3g})".format(*row[f"{name}_interval"]))
        tqdm.write("  ".join(shown))
        for result in results[:2]:
            tqdm.write("  {question} -> {response!r}: reward {reward:g}".format(**result))
        for note in row.get("notes", ()):
            tqdm.write(f"note: {note}")

    def finish(self):
        """Write the model, which any other program can load."""
        if self.folder:
            self.model.save_pretrained(self.folder / "model")
            self.tokenizer.save_pretrained(self.folder / "model")
            tqdm.write(f"{self.folder}/model is the model after step {self.rows[-1]['step']}")


@contextlib.contextmanager
def stops_at_signal():
    """An Event, which the first SIGINT (Ctrl+C) or SIGTERM sets. The second one acts as usual."""
    stop = threading.Event()
    before = {}

    def request(number, frame):
        tqdm.write("This step will be finished and saved. A second signal ends the run at once.")
        stop.set()
        for other, handler in before.items():
            signal.signal(other, handler)

    if threading.current_thread() is threading.main_thread():  # Python allows no other thread
        for number in signal.SIGINT, signal.SIGTERM:
            before[number] = signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unused_questions(questions, cfg, steps):
    """The questions in one random order after the other, from the step after `steps` steps on."""
    orders = (random.Random(f"{cfg.seed} {epoch}") for epoch in itertools.count())
    stream = itertools.chain.from_iterable(rng.sample(questions, len(questions)) for rng in orders)
    return itertools.islice(stream, steps * cfg.prompts_per_step, None)


def checksum(questions):
    return zlib.crc32(repr(questions).encode())


def as_json(value):
    """Tensors and numbers of numpy become numbers or lists, and any other object a text."""
    return json.dumps(value, ensure_ascii=False,
                      default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))


def write_lines(rows, path):
    path.write_text("".join(as_json(row) + "\n" for row in rows), encoding="utf-8")
