"""The program around train_math.py: flags, a lock, signals, and one line for a refused input."""
import contextlib
import difflib
import os
import shutil
import signal
import sys
import threading
from dataclasses import field, fields, replace

import torch
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from gspo import clipped_objective
from support.models import micro_batch_tokens, note
from support.rewards import RewardError
from support.saving import locked

LEAST = {"group_size": 2, "eval_size": 0}  # others must be above 0, or 0 if that is their default


def flag(default, meaning, **more):
    """A field of Settings, which is a flag of the command line. `meaning` is shown by --help."""
    return field(default=default, metadata={"help": meaning, **more})


def check_values(cfg, algorithms):
    """ValueError: a setting is out of range, or its algorithm (a row of ALGORITHMS) is unusable."""
    if cfg.algorithm not in algorithms:
        raise ValueError(f"--algorithm {cfg.algorithm} is none of {', '.join(algorithms)}")
    for name, value in vars(cfg).items():
        if isinstance(value, os.PathLike):
            setattr(cfg, name, os.fspath(value))
        elif hasattr(value, "item"):  # a number of numpy or torch, which the logs cannot hold
            setattr(cfg, name, value.item())
    if cfg.micro_batch_tokens is None:
        cfg.micro_batch_tokens = micro_batch_tokens(cfg.device)
    for setting in fields(cfg):
        value = getattr(cfg, setting.name)
        least = LEAST.get(setting.name, 0 if setting.default == 0 else 1e-12)
        if type(value) in (int, float) and not least <= value < 2**31:
            raise ValueError(f"--{setting.name} {value} is out of range")
    if cfg.prompts_per_step % cfg.minibatches:
        raise ValueError("--prompts_per_step must be a multiple of --minibatches")
    clipped_objective(torch.ones(1), torch.ones(1), *cfg.clip_range())  # checks the clip range


def replace_parts(parts, replaced):
    """`parts` with these functions, by their names. TypeError: there is no part with this name."""
    for name in replaced.keys() - vars(parts).keys():
        raise TypeError(f"there is no part {name}. The parts are {', '.join(vars(parts))}. A loss "
                        "is an entry of ALGORITHMS")
    return replace(parts, **replaced)


def parse(settings, argv=None):
    """The command line, or argv, as an object of this dataclass. A wrong flag ends the program."""
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(settings, usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    with exits_with("settings"):
        cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        if unknown:
            flags = [f"--{setting.name}" for setting in fields(settings)]
            nearest = difflib.get_close_matches(unknown[0], flags, 1) or ["--help"]
            raise ValueError(f"there is no flag {unknown[0]}; see {nearest[0]}")
    if not torch.cuda.is_available() and not any(word.startswith("--device") for word in argv):
        found = "no CUDA GPU was found"
        if shutil.which("nvidia-smi"):
            found = "this PyTorch cannot use your NVIDIA GPU (see README.md)"
        note(f"{found}. On a CPU, a step takes many minutes with the default model and settings; "
             "`python -m lesson.tiny` is made for a CPU")
    return cfg


@contextlib.contextmanager
def exits_with(what, errors=Exception):
    """If one of these errors is raised in this block, the program ends with one line."""
    try:
        yield
    except errors as error:
        reason = error if isinstance(error, RewardError) else error.__cause__ or error
        is_offline = isinstance(error, OSError) and "couldn't" in str(error).lower()
        hint = ". Without a network, use --model FOLDER and --dataset FILE" if is_offline else ""
        sys.exit(f"train_math.py: {what}: {reason!r:.400}{hint}")


@contextlib.contextmanager
def guarded_run(cfg):
    """What the script needs around a run: a lock, signals, and one line for an error.

    Yields a list that stays empty until the first signal. Then the run should end after its step,
    and this block ends the program as the signal would."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # some consoles cannot show every character
    stopped = []
    handlers = {}

    def stop(number, frame):
        stopped.append(number)
        for other, handler in handlers.items():
            signal.signal(other, handler)
        tqdm.write("This step will be finished and saved. A second signal stops at once.")

    with exits_with(f"--output_dir {cfg.output_dir}"):
        cfg.output_dir = os.path.abspath(cfg.output_dir)  # a reward may change the directory
        found = set(os.listdir(cfg.output_dir)) if os.path.exists(cfg.output_dir) else set()
        if "state.pt" not in found and found - {"lock", "partial"}:
            raise ValueError("the folder is not empty and holds no run that can be resumed")
        lock = locked(cfg.output_dir)
    if threading.current_thread() is threading.main_thread():
        for number in signal.SIGINT, signal.SIGTERM:
            handlers[number] = signal.signal(number, stop)
    try:
        with lock:
            yield stopped
    except torch.OutOfMemoryError as error:
        sys.exit(f"train_math.py: {error!r}. What was saved is intact. Run the same command with a "
                 "lower --micro_batch_tokens or --rollout_rows")
    except (KeyboardInterrupt, FloatingPointError, OSError, RewardError) as error:
        sys.exit(f"train_math.py: {error!r}. What was saved is intact")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if stopped:
        sys.exit(128 + stopped[0])  # as after any signal
