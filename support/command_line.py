"""The program around train_math.py: flags, a lock, signals, and one line for a refused input."""
import contextlib
import difflib
import os
import shutil
import signal
import sys
import threading
from dataclasses import field, fields

import torch
from transformers import HfArgumentParser

from gspo import clipped_objective
from support.models import micro_batch_tokens, note, show
from support.rewards import RewardError
from support.saving import locked

ERRORS = KeyboardInterrupt, FloatingPointError, OSError, RewardError, torch.OutOfMemoryError
SIGNALS = {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"}  # that end a program
LEAST = {"group_size": 2, "eval_size": 0, "learning_rate": 0}  # others: above 0, or their default 0


def flag(default, meaning, **more):
    """A field of Settings, which is a flag of the command line. `meaning` is shown by --help."""
    return field(default=default, metadata={"help": meaning, **more})


def check_values(cfg, algorithms):
    """ValueError: a setting is out of range, or its algorithm (a row of ALGORITHMS) is unusable."""
    if cfg.algorithm not in algorithms:
        raise ValueError(f"--algorithm {cfg.algorithm} is none of {', '.join(algorithms)}")
    if (ratio := algorithms[cfg.algorithm].ratio) not in ("sequence", "token"):
        raise ValueError(f"Algorithm(ratio={ratio!r}) must be 'sequence' or 'token'")
    if cfg.micro_batch_tokens is None:
        cfg.micro_batch_tokens = micro_batch_tokens(cfg.device)
    for setting in fields(cfg):
        value = getattr(cfg, setting.name)
        least = LEAST.get(setting.name, 0 if setting.default == 0 else 1e-12)
        if type(value) in (int, float) and not least <= value < 2**31:
            raise ValueError(f"--{setting.name} {value} is out of range: the least is {least:g}")
    if cfg.prompts_per_step % cfg.minibatches:
        raise ValueError("--prompts_per_step must be a multiple of --minibatches")
    clipped_objective(torch.ones(1), torch.ones(1), *cfg.clip_range())  # checks the clip range


def parse(settings, argv=None):
    """The command line, or argv, as an object of this dataclass. A wrong flag ends the program."""
    parser = HfArgumentParser(settings, usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    with exits_with("settings"):
        if argv is None and "ipykernel" in sys.modules:  # sys.argv belongs to the notebook
            raise ValueError("in a notebook, pass a list of flags: main(['--max_steps', '100'])")
        argv = sys.argv[1:] if argv is None else argv
        cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        if unknown:
            flags = [f"--{setting.name}" for setting in fields(settings)]
            nearest = difflib.get_close_matches(unknown[0], flags, 1) or ["--help"]
            raise ValueError(f"there is no flag {unknown[0]}; see {nearest[0]}")
    if not torch.cuda.is_available() and not any(word.startswith("--device") for word in argv):
        if shutil.which("nvidia-smi"):
            note("this PyTorch cannot use your NVIDIA GPU (see README.md)")
        if cfg.model == settings.model:
            note("on a CPU, a step takes many minutes with this model. Try python -m lesson.tiny")
    return cfg


@contextlib.contextmanager
def exits_with(what, errors=Exception, hint=""):
    """If one of these errors is raised in this block, the program ends with one line."""
    try:
        yield
    except errors as error:
        reason = error if isinstance(error, RewardError) else error.__cause__ or error
        if isinstance(error, torch.OutOfMemoryError):
            hint += ". Use a lower --micro_batch_tokens or --rollout_rows"
        if isinstance(error, OSError) and "couldn't" in str(error).lower():
            hint += ". Without a network, use --model FOLDER and --dataset FILE"
        text = " ".join(str(reason).split())
        text = text if " " in text else repr(reason)  # a sentence, or else the kind of the error
        sys.exit(f"{os.path.basename(sys.argv[0]) or 'train_math.py'}: {what}: {text:.400}{hint}")


@contextlib.contextmanager
def guarded_run(cfg):
    """What the script needs around a run: a lock, one line for an error, and an Event, which a
    signal sets. After a signal, this block ends the program as the signal would."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # some consoles cannot show every character
    stop = threading.Event()
    received = []
    handlers = {}

    def request(number, frame):
        stop.set()
        received.append(number)
        for other in signal.SIGINT, signal.SIGTERM:
            signal.signal(other, handlers[other])
        show("This step will be finished and saved. A second SIGINT or SIGTERM stops at once.")

    with exits_with(f"--output_dir {cfg.output_dir}"):
        if os.environ.get("WORLD_SIZE", "") > "1":  # torchrun sets it
            raise ValueError("use one process, or read 'Several processes' in guides/recipes.md")
        cfg.output_dir = os.path.abspath(cfg.output_dir)  # a reward may change the directory
        found = set(os.listdir(cfg.output_dir)) if os.path.exists(cfg.output_dir) else set()
        if "state.pt" not in found and found - {"lock", "partial"}:
            raise ValueError("the folder is not empty and holds no run that can be resumed")
        lock = locked(cfg.output_dir)
    if threading.current_thread() is threading.main_thread():
        for name in SIGNALS & vars(signal).keys():  # Windows has only two of them
            number = getattr(signal, name)
            if name in ("SIGINT", "SIGTERM") or signal.getsignal(number) == signal.SIG_DFL:
                handlers[number] = signal.signal(number, request)  # nohup ignores SIGHUP
    try:
        with lock, exits_with("the run has ended", ERRORS, ". What was saved is intact"):
            yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])  # as after any signal
