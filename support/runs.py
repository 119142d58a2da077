"""The rows and files of a run of train_math.py: saving, reporting and resuming.

What is to be saved or printed goes into Run. Settings that may differ when a run is resumed go into
MAY_CHANGE.
"""
import itertools
import json
import os
import zlib
from pathlib import Path

import torch
from tqdm.auto import tqdm

from support.metrics import notes
from support.models import check_weights_can_be_trained
from support.program import exits_with
from support.questions import shuffled

# The questions are compared by their hash. If the held-out questions are cut from the training
# part, the hash changes with eval_size.
MAY_CHANGE = {"dataset", "output_dir", "device", "max_steps", "micro_batch_tokens",
              "rollout_rows", "save_steps", "eval_steps", "eval_size"}
SHOWN = ("reward", "response_length", "cut", "clip_fraction", "log_ratio_std", "seconds",
         "eval_reward", "eval_last_number")


class Run:
    """The rows of a run, one dict per step, and its files. Without an output_dir, it has no files,
    and nothing is printed.

    If a `with` block ends before the rows are saved, they are saved then: at the end of the run,
    and also after an error, unless the optimizer has changed the weights since the last row."""

    def __init__(self, cfg, model, tokenizer, optimizer, questions, state=None):
        """state: from load_state, and then model and optimizer continue from it. ValueError: these
        arguments cannot be used for training."""
        check_arguments(cfg, model, questions, state)
        self.cfg = cfg
        self.folder = Path(cfg.output_dir).absolute() if cfg.output_dir else None
        self.questions = questions
        self.model = model
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        self.settings = fingerprint(cfg, questions)
        self.rows = []
        self.results = []  # of the last row's evaluation: a dict for each question
        if state:
            self.rows = state["rows"]
            model.load_state_dict(state.pop("model"))
            optimizer.load_state_dict(state.pop("optimizer"))
        self.is_saved = True
        self.has_moved = False  # whether the weights have changed since the last row
        self.hook = optimizer.register_step_post_hook(self.after_optimizer_step)

    def after_optimizer_step(self, *arguments):
        self.has_moved = True

    def unused_questions(self):
        """The questions in their random order, without end, after those of the steps so far."""
        used = max(0, len(self.rows) - 1) * self.cfg.prompts_per_step
        return itertools.islice(shuffled(self.questions, self.cfg.seed), used, None)

    def add(self, row):
        """Begin with the results of the next step."""
        self.rows.append(row)
        row |= notes(self.rows)
        self.results = []
        self.is_saved = False
        self.has_moved = False

    def save(self):
        """Write state.pt, from which a run is resumed. The old one stays until this is complete."""
        self.is_saved = True
        if self.folder:
            state = {
                "rows": plain(self.rows),
                "results": plain(self.results),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            partial = self.folder / "partial"
            with exits_with(f"{partial} cannot be written (is the disk full?)"):
                torch.save(state, partial)
            os.replace(partial, partial.with_name("state.pt"))

    def report(self):
        if self.folder:
            report(self.rows, self.results, self.folder, self.cfg.max_steps)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.hook.remove()
        is_complete = kind is None
        if not self.is_saved and (is_complete or isinstance(error, Exception)):
            if not self.has_moved:
                self.save()
        if self.folder and is_complete:
            self.model.save_pretrained(self.folder / "model")
            self.tokenizer.save_pretrained(self.folder / "model")
            tqdm.write(f"{self.folder}/model is the model after step {self.rows[-1]['step']}")


def check_arguments(cfg, model, questions, state):
    """ValueError if train() cannot work with these arguments."""
    if not questions:
        raise ValueError("there are no questions to train on")
    check_weights_can_be_trained(model)
    if cfg.output_dir:
        os.makedirs(cfg.output_dir, exist_ok=True)
        found = {"metrics.jsonl", "state.pt", "model"} & set(os.listdir(cfg.output_dir))
        if found and not state:
            raise ValueError(f"{cfg.output_dir} holds {min(found)}. Choose another output_dir, or "
                             "resume the run with state=load_state(cfg, questions)")


def fingerprint(cfg, questions):
    """The settings of a run and the hash of its questions, which must not change on resuming."""
    eps_low, eps_high = cfg.clip_range()
    crc = zlib.crc32(repr(questions).encode())
    more = {"output_dir": None, "eps_low": eps_low, "eps_high": eps_high, "questions": crc}
    return vars(cfg) | more  # without output_dir, because a log may be moved


def load_state(cfg, questions):
    """The state of the run in output_dir, or None. ValueError: the saved run has other settings.
    SystemExit: state.pt cannot be read."""
    path = Path(cfg.output_dir, "state.pt")
    if not path.exists():
        return None
    with exits_with(f"--output_dir {cfg.output_dir}: state.pt cannot be read, so choose another"):
        state = torch.load(path, map_location="cpu")
        begun_with = state["rows"][0]["settings"]
    now = fingerprint(cfg, questions)
    changed = []
    for name, value in begun_with.items():
        if name not in MAY_CHANGE and value != now.get(name, "no such setting"):
            changed.append(name)
    if changed:
        hint = " (they also change with --eval_size)" if "questions" in changed else ""
        raise ValueError(f"the run that is saved there has other values of {', '.join(changed)}"
                         f"{hint}. Choose another --output_dir")
    tqdm.write(f"resuming a run that was begun with --max_steps {begun_with['max_steps']} "
               "(with another value, the learning rate jumps)")
    report(state["rows"], state["results"], path.parent, cfg.max_steps)
    return state


def report(rows, results, folder, max_steps):
    """Print the last row, and write metrics.jsonl and the results of the evaluation, if any."""
    row = rows[-1]
    write_lines(rows, folder / "metrics.jsonl")
    if results:
        write_lines(results, folder / f"eval_{row['step']}.jsonl")
    shown = [f"step {row['step']}/{max_steps}"]
    for name in SHOWN:
        if row.get(name) is not None:
            shown.append(f"{name} {row[name]:.3g}")
        if f"{name}_interval" in row:
            shown.append("(95% CI {:.3g} to {:.3g})".format(*row[f"{name}_interval"]))
    tqdm.write("  ".join(shown))
    for result in results[:2]:
        tqdm.write(f"    {result['question']} -> {result['response']!r}: {result['reward']:g}")
    for note in row.get("notes", ()):
        tqdm.write(f"note: {note}")


def as_json(value):
    """A value that JSON does not know: a number of numpy or torch as a number, others as a text."""
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)


def plain(rows):
    """These dicts as torch.load and JSON can read them, whatever columns the questions have."""
    return json.loads(json.dumps(rows, default=as_json))


def write_lines(rows, path):
    lines = [json.dumps(row, ensure_ascii=False, default=as_json) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
