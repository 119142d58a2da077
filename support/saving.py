"""The rows and files of a run of train_math.py: saving, reporting and resuming."""
import contextlib
import json
import os
import zlib
from pathlib import Path
from statistics import fmean

import torch
from filelock import FileLock, Timeout

from support.metrics import outcome
from support.models import check_trainable, note, show
from support.questions import check_rows
from support.rewards import TAKEN

MAY_CHANGE = {"dataset", "output_dir", "device", "max_steps", "micro_batch_tokens",
              "rollout_rows", "save_steps", "eval_steps", "eval_size"}
SHOWN = ("reward", "response_length", "cut", "equal_reward_groups", "clip_fraction",
         "log_ratio_std", "seconds", "eval_reward", "eval_last_number", "eval_best_constant")


def locked(folder):
    """A `with` block that keeps other processes out of this folder. ValueError: one is in it."""
    if not folder:
        return contextlib.nullcontext()
    os.makedirs(folder, exist_ok=True)
    lock = FileLock(Path(folder, "lock").absolute(), timeout=0, is_singleton=True)
    try:
        return lock.acquire()  # the same thread may lock it again
    except Timeout:
        raise ValueError(f"{folder} is in use by another process") from None


class Run:
    """The rows of a run, one dict per step, and its files. It has none without an output_dir."""

    def __init__(self, cfg, model, tokenizer, optimizer, questions, state=None, user_state=None):
        """state: from load_state. ValueError: these arguments cannot be used for training."""
        if not questions:
            raise ValueError("there are no questions to train on")
        check_rows(questions)
        check_trainable(model)
        torch.set_float32_matmul_precision("highest")  # some Docker images switch TF32 on
        self.folder = Path(cfg.output_dir).absolute() if cfg.output_dir else None
        files = os.listdir(self.folder) if self.folder else []
        found = {"metrics.jsonl", "state.pt", "model"}.intersection(files)
        if found and not state:
            raise ValueError(f"{cfg.output_dir} holds {min(found)}. Choose another output_dir, or "
                             "resume the run with state=load_state(cfg, questions)")
        self.model = model
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        self.user_state = {} if user_state is None else user_state
        self.settings = fingerprint(cfg, questions)
        self.rows = state["rows"] if state else []
        self.results = state["results"] if state else []  # of the evaluation of the last row
        if state:
            model.load_state_dict(state.pop("model"))
            optimizer.load_state_dict(state.pop("optimizer"))
            self.user_state.clear()
            self.user_state |= state.pop("user_state")
        if state and self.folder:
            self.report()

    def add(self, row, results, is_saved):
        """Add the row of the next step and the results of its evaluation, and report them."""
        self.rows.append(plain(row))
        self.results = plain(results)
        if self.folder:
            if is_saved:
                self.save()
            self.report()

    def finish(self):
        """Write the model, and say what the run has changed."""
        if self.folder:
            steps = [row["step"] for row in self.rows if "eval_reward" in row]
            files = [self.folder / f"eval_{step}.jsonl" for step in (*steps[:1], *steps[-1:])]
            if len(steps) > 1 and files[0].exists():
                before, after = ([*map(json.loads, file.open(encoding="utf-8"))] for file in files)
                show(f"eval_reward (greedy, held-out questions), steps {steps[0]} and {steps[-1]}: "
                     f"{outcome(before, after)}. The responses are in {files[1]}")
            self.model.save_pretrained(self.folder / "model")
            self.tokenizer.save_pretrained(self.folder / "model")
            show(f"{self.folder}/model is the model after step {self.rows[-1]['step']}")

    def save(self):
        """Write state.pt, from which a run is resumed. The old one stays until this is complete.
        OSError: it cannot be written. ValueError: the user_state could not be read again."""
        state = {"rows": self.rows, "results": self.results, "model": self.model.state_dict(),
                 "optimizer": self.optimizer.state_dict(), "user_state": self.user_state}
        partial = self.folder / "partial"
        try:
            torch.save(state, partial)
            torch.load(partial, map_location="cpu", mmap=True)
        except (OSError, RuntimeError):
            raise OSError(f"{partial} cannot be written (is the disk full?)") from None
        except Exception as error:  # torch.load raises many kinds
            raise ValueError("user_state may hold only tensors, numbers, texts, and lists, tuples "
                             f"and dicts of them ({type(error).__name__})") from None
        os.replace(partial, partial.with_name("state.pt"))

    def report(self):
        """Print the last row, and write metrics.jsonl and the results of its evaluation, if any."""
        row = self.rows[-1]
        write_lines(self.rows, self.folder / "metrics.jsonl")
        if self.results:
            write_lines(self.results, self.folder / f"eval_{row['step']}.jsonl")
        note("reward is that of the responses sampled in a step, before its updates; eval_reward "
             "is that of greedy ones to held-out questions, after them")
        shown = [f"step {row['step']}/{self.settings['max_steps']}"]
        own = [name for name in row if name.removeprefix("eval_") not in TAKEN]  # of log_metric
        for name in (*SHOWN, *own):
            value = row.get(name)
            if name == "eval_last_number" and value == row.get("eval_reward"):
                continue
            values = value if isinstance(value, list) else [value]
            if values and all(isinstance(item, (int, float)) for item in values):
                shown.append(f"{name} {fmean(values):.3g}")
            if f"{name}_interval" in row:
                shown.append("(95% CI {:.3g} to {:.3g})".format(*row[f"{name}_interval"]))
        show("  ".join(shown))
        for result in self.results[:2]:
            show(f"  {result['question']} -> {result['response']!r}: reward {result['reward']:g}")
        for text in row.get("notes", ()):
            show(f"note: {text}")


def fingerprint(cfg, questions):
    """The settings of a run and the hash of its questions, which must not change on resuming."""
    low, high = cfg.clip_range()
    crc = zlib.crc32(repr(questions).encode())
    # A log may be moved, so output_dir is left out.
    return vars(cfg) | {"output_dir": None, "eps_low": low, "eps_high": high, "questions": crc}


def load_state(cfg, questions):
    """The state of the run in output_dir, or None. ValueError: it does not fit these settings."""
    path = Path(cfg.output_dir, "state.pt")
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu")
        begun_with = state["rows"][0]["settings"]
    except Exception as error:  # torch.load raises many kinds
        raise ValueError(f"state.pt cannot be read ({error!r:.200}). Use another folder") from None
    now = plain(fingerprint(cfg, questions))
    changed = [name for name, value in begun_with.items()
               if name not in MAY_CHANGE and value != now.get(name, "no such setting")]
    if changed:
        raise ValueError(f"the run that is saved there has other values of {', '.join(changed)}. "
                         "Choose another --output_dir. (questions may change with --eval_size)")
    show(f"resuming a run that was begun with --max_steps {begun_with['max_steps']} "
         "(with another value, the learning rate jumps)")
    if state["rows"][-1]["step"] >= cfg.max_steps:
        show("note: this run is complete. For a new one, choose another --output_dir")
    return state


def plain(value):
    """As JSON has it: a number of numpy or torch is a number, and any other object is a text."""
    def as_json(other):
        return other.item() if getattr(other, "ndim", None) == 0 else str(other)

    return json.loads(json.dumps(value, default=as_json))


def write_lines(rows, path):
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
