"""The program around train_math.py: flags, a lock, signals, and one line for each error.

A new check of a setting goes into check_values, and a new safeguard into `program`.
"""
import contextlib
import os
import signal
import sys
import threading
from dataclasses import field
from pathlib import Path

import torch
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from gspo import clipped_objective
from support.rewards import RewardError, place_of


def flag(default, meaning, **more):
    """A field of Settings, which is a flag of the command line. `meaning` is shown by --help."""
    return field(default=default, metadata={"help": meaning, **more})


def check_values(cfg, algorithms):
    """ValueError: a setting is out of range, or its algorithm (a row of ALGORITHMS) is unusable."""
    algorithm = algorithms.get(cfg.algorithm)
    if algorithm is None:
        raise ValueError(f"--algorithm {cfg.algorithm} is none of {', '.join(algorithms)}")
    if algorithm.ratio not in ("sequence", "token"):
        raise ValueError(f'the ratio of an algorithm is "sequence" or "token", not '
                         f"{algorithm.ratio!r}")
    for name, value in vars(cfg).items():
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif hasattr(value, "item"):  # a number of numpy or torch, which the logs cannot hold
            value = value.item()
        setattr(cfg, name, value)
        least = {"seed": 0, "eval_size": 0, "group_size": 2}.get(name, 1e-12)
        if type(value) in (int, float) and not least <= value < 2**31:
            raise ValueError(f"--{name} {value} is out of range")
    if cfg.prompts_per_step % cfg.minibatches:
        raise ValueError("--prompts_per_step must be a multiple of --minibatches")
    one = torch.ones(1)
    clipped_objective(one, one, *cfg.clip_range())  # raises if the range cannot be one


def parse(settings, argv=None):
    """The command line, or argv, as an object of this dataclass. A wrong flag ends the program."""
    parser = HfArgumentParser(settings, usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    with exits_with("settings"):
        return parser.parse_args_into_dataclasses(argv)[0]


@contextlib.contextmanager
def exits_with(what):
    """If anything fails in this block, the program ends with one line that names the reason."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # `program` says what helps
    except Exception as error:  # libraries raise many kinds
        tried = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        reason = error if isinstance(error, RewardError) else error.__cause__ or error
        sys.exit(f"train_math.py: {what}{tried}: {reason!r:.400}")


@contextlib.contextmanager
def tried(what):
    """If anything fails in this block, the message says that this was tried."""
    try:
        yield
    except Exception as error:
        error.add_note(f"when {what} was tried{place_of(error)}")
        raise


@contextlib.contextmanager
def program(cfg):
    """What the script needs around a run: a lock, signals, and one line for an error.

    Yields a list that stays empty until the first signal. Then the run should end after its step,
    and this block ends the program as the signal would."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # some consoles cannot show every character
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # set by torchrun
        sys.exit("train_math.py: several GPUs are not supported, so start it without torchrun. TRL "
                 "and verl can use several GPUs")
    if cfg.output_dir:
        cfg.output_dir = os.path.abspath(cfg.output_dir)  # a reward may change the directory
    with exits_with(f"--output_dir {cfg.output_dir}"):
        os.makedirs(cfg.output_dir, exist_ok=True)
        found = set(os.listdir(cfg.output_dir))
        if "state.pt" not in found and found - {"lock", "partial"}:
            raise ValueError("the folder is not empty and holds no run that can be resumed")
        lock = FileLock(Path(cfg.output_dir, "lock"))
    with exits_with(f"--output_dir {cfg.output_dir} is in use by another process"):
        lock.acquire(timeout=0)
    stopped = []
    handlers = {}

    def stop(number, frame):
        stopped.append(number)
        for other, handler in handlers.items():
            signal.signal(other, handler)
        tqdm.write("This step will be finished and saved. A second signal stops at once.")

    if threading.current_thread() is threading.main_thread():
        for number in signal.SIGINT, signal.SIGTERM:
            handlers[number] = signal.signal(number, stop)
    try:
        yield stopped
    except RewardError:
        tqdm.write("What was saved is intact. Correct the reward function, and run the same "
                   "command again to resume the run.")
        raise
    except torch.OutOfMemoryError as error:
        sys.exit(f"train_math.py: {error!r}. What was saved is intact. Run the same command with a "
                 "lower --micro_batch_tokens or --rollout_rows")
    except (KeyboardInterrupt, FloatingPointError) as error:
        sys.exit(f"train_math.py: {error!r}. What was saved is intact")
    finally:
        lock.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if stopped:
        sys.exit(128 + stopped[0])  # as after any signal
