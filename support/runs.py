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
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from support.metrics import outcome
from support.task import Refused, load_rows

MAY_CHANGE = {"model", "dataset", "output_dir", "device", "max_steps", "micro_batch_tokens",
              "rollout_rows", "save_steps", "eval_steps", "eval_size"}
NOT_SHOWN = {"step", "entropy", "sampler_gap", "loss", "grad_norm", "log_ratio_first_max",
             "log_ratio_mean", "seconds_rollout", "eval_questions"}


class Run:
    """The rows of a run, one dict per step, and its files, if there is an output_dir: metrics.jsonl
    and eval_STEP.jsonl for the reader, and state.pt with all that is needed to resume. It is
    replaced only when the new one is complete, so the run may be killed at any time."""

    def __init__(self, cfg, model, tokenizer, optimizer, questions, prompt):
        """Resumes the run in cfg.output_dir, if any. prompt: the first one, as text. Refused: that
        run has other settings, prompts or questions, or the folder has other files."""
        self.model = model
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        low, high = cfg.clip_range()
        self.settings = as_json(vars(cfg) | {"eps_low": low, "eps_high": high, "output_dir": None,
                                           "questions": checksum(questions)})
        self.fingerprint = self.settings | {"prompt": prompt}
        self.rows = []
        self.results = []  # of the evaluation of the last row, if any
        self.folder = Path(cfg.output_dir) if cfg.output_dir else None
        if self.folder and (self.folder / "state.pt").exists():
            self.resume()
        elif self.folder and (others := set(os.listdir(self.folder)) - {"lock", "partial"}):
            raise Refused(f"{self.folder} has {min(others)}, but no run. Use another --output_dir")

    def resume(self):
        try:
            state = torch.load(self.folder / "state.pt", map_location="cpu")
            begun_with = state["settings"]
        except Exception as error:  # torch.load raises many kinds
            raise Refused(f"{self.folder}/state.pt is damaged or too old: {error!r:.99}") from error
        changed = {name: value for name, value in begun_with.items()
                   if name not in MAY_CHANGE and value != self.fingerprint.get(name)}
        if changed:
            raise Refused(f"the run in {self.folder} was begun with {changed!s:.500}. Use this, or "
                          "another --output_dir")
        self.rows, self.results = state["rows"], state["results"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        tqdm.write(f"resuming the run of {begun_with['model']} in {self.folder} after step "
                   f"{self.rows[-1]['step']}. Another model or reward needs another --output_dir")
        self.report()

    def add(self, row, results, is_saved):
        """Add the row of the next step and the results of its evaluation, and report them."""
        self.rows.append(as_json(row))
        self.results = as_json(results)
        if self.folder and is_saved:
            self.save()
        if self.folder:
            self.report()

    def save(self):
        state = {"settings": self.fingerprint, "rows": self.rows, "results": self.results,
                 "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.folder / "partial")
        os.replace(self.folder / "partial", self.folder / "state.pt")

    def report(self):
        """Write and print the last row and the results of its evaluation, if any."""
        row = self.rows[-1]
        write_lines(self.rows, self.folder / "metrics.jsonl")
        if self.results:
            write_lines(self.results, self.folder / f"eval_{row['step']}.jsonl")
        shown = [f"step {row['step']}/{self.settings['max_steps']}"]
        for name, value in row.items():
            if isinstance(value, (int, float)) and name not in NOT_SHOWN:
                shown.append(f"{name} {value:.3g}")
            if f"{name}_interval" in row:
                shown.append("(95% CI {:.3g} to {:.3g})".format(*row[f"{name}_interval"]))
        tqdm.write("  ".join(shown))
        for result in self.results[:2]:
            tqdm.write("  {question} -> {response!r}: reward {reward:g}".format(**result))
        for note in row.get("notes", ()):
            tqdm.write(f"note: {note}")

    def finish(self):
        """Write the model, which any other program can load, and say what the run has changed."""
        if not self.folder:
            return
        self.model.save_pretrained(self.folder / "model")
        self.tokenizer.save_pretrained(self.folder / "model")
        tqdm.write(f"{self.folder}/model is the model after step {self.rows[-1]['step']}")
        files = [f"eval_{row['step']}.jsonl" for row in self.rows if "eval_reward" in row]
        if len(files) > 1 and (self.folder / files[0]).exists():
            before, after = (load_rows(self.folder / name) for name in (files[0], files[-1]))
            tqdm.write(f"{files[0]} and {files[-1]}: reward {outcome(before, after)}")


def locked(folder):
    """A `with` block that keeps other processes out of this folder. Refused: one is in it."""
    if not folder:
        return contextlib.nullcontext()
    lock = FileLock(Path(folder, "lock"), timeout=0, is_singleton=True)
    try:
        return lock.acquire()  # the same thread may lock it again
    except Timeout:
        raise Refused(f"{folder} is in use by another process") from None


@contextlib.contextmanager
def stops_at_signal():
    """An Event, which SIGINT (Ctrl+C) or SIGTERM sets. A second signal raises KeyboardInterrupt."""
    stop = threading.Event()
    before = {}

    def request(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        tqdm.write("This step will be finished and saved. A second signal ends the run at once.")

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
    """Of the columns that are texts, numbers or None: a picture's repr may have its address."""
    kinds = str, int, float, type(None)
    kept = [{k: v for k, v in row.items() if isinstance(v, kinds)} for row in questions]
    return zlib.crc32(repr(kept).encode())


def as_json(value):
    """The value as JSON has it: tensors become numbers or lists, and other objects texts."""
    return json.loads(json.dumps(
        value, default=lambda other: other.tolist() if hasattr(other, "tolist") else str(other)))


def write_lines(rows, path):
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
