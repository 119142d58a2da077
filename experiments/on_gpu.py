"""For the first one with a GPU: what our docs only estimate about it. This script has NEVER RUN ON A GPU yet.

    python experiments/on_gpu.py --model FOLDER_OR_HUB_ID [--gsm8k FOLDER] [--minutes 25]
    OMP_NUM_THREADS=1 python experiments/on_gpu.py --device cpu --toy      # tries the script itself, two minutes

One part after the other; what fails in one does not stop the next; after --minutes nothing new is begun.
(a) Which attention kernel float32 takes; is left padding exact; are gradients, whole runs and a resumed run the
    same to the last bit?
(b) Two steps of the default job, 32 prompts x 8 responses of up to 512 tokens, of the model and of random weights
    in Qwen3-0.6B's shape, in four precisions. (float16 without the loss scaling that training in it would need.)
(c) With GSM8K's train.jsonl and test.jsonl in a folder: a cold start, 100 steps, right answers before and after.
(d) What else to run.
Findings go to experiments/results/gpu/findings.jsonl, a line each, what is trained to runs/on_gpu-TIME. In (a) and
(b) a response is right if its number of characters is odd, so that any model has groups to learn from."""
import argparse
import functools
import gc
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import train_math
from experiments import cold_start
from experiments.plot import append, read

RANDOM = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
              num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
TOY = dict(vocab_size=3000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
           num_key_value_heads=2, head_dim=16)  # instead, with --toy
SMALL = dict(prompts_per_step=4, max_completion_length=8, max_steps=2, eval_size=4)  # settings of --toy
DTYPES = {"float32": None, "TF32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}  # of autocast

def odd(prompts, completions, **kwargs):
    return [float(len(text) % 2) for text in completions]

def words(flags):
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]

def find(a, part, **found):
    """Print a finding and keep it."""
    shown = (f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in found.items())
    print(f"({part})", ", ".join(shown), flush=True)
    append(a.results / "findings.jsonl", {"part": part, **a.machine, **found})

def attempt(a, part, function, *args):
    """function(a, *args), if there is time; what it raises is a finding, too."""
    what = " ".join([function.__name__, *args])
    try:
        if time.time() > a.deadline:
            raise TimeoutError("not begun: give it more --minutes")
        gc.collect()  # what was before leaves the GPU
        torch.cuda.empty_cache()
        function(a, *args)
    except (Exception, SystemExit) as error:  # whatever a GPU surprises us with
        find(a, part, what=what, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

def forwards(a):
    """The sampler pads on the left and goes token by token, the update pads on the right: the same log-probs?"""
    q, k = (torch.randn(2, heads, 64, 64, device=a.device) for heads in (14, 2))
    kernel = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True))
    find(a, "a", what="attention in float32, heads that share keys and values", kernel=kernel.name)
    model, tokenizer = train_math.load(a.model, a.device)
    texts = [" ".join(row["question"] for row in cold_start.tiny_questions(0)[:n]) for n in (1, 2, 4)]
    prompts = [train_math.encode_prompt(tokenizer, text) for text in texts]
    responses, sampled = train_math.rollout(model, prompts, 2, 32, 1.0, torch.tensor([-1], device=a.device))
    batch = train_math.micro_batch([p for p in prompts for _ in range(2)], responses, a.device)
    with torch.no_grad():
        old = train_math.response_log_probs(model, batch, 1.0)
    apart = max((row[on] - x).abs().max().item() for row, on, x in zip(old, batch.mask, sampled))
    find(a, "a", what="log-probs of sampler and update apart (below 1e-3: rounding)", apart=apart)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        log_probs = train_math.response_log_probs(model, batch, 1.0)
        log_probs.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    find(a, "a", what="one forward, without and with a graph", equal=torch.equal(old, log_probs.detach()))
    find(a, "a", what="gradients of one micro-batch, twice", equal=all(map(torch.equal, *gradients)))

def tiny_runs(a):
    """Steps of --tiny with its model untrained: a run, the same again, and stopped after two steps and resumed."""
    def run(name, *more, stop=lambda: False):
        flags = train_math.TINY | dict(
            model=a.tiny / "model", dataset=a.tiny / "questions.jsonl", device=a.device, output_dir=a.work / name,
            max_steps=4, save_steps=2, eval_size=32)
        s = train_math.parse_settings([*words(flags), *more])
        train_math.train(s, **train_math.prepare(s), stop=stop)
        return torch.load(a.work / name / "state.pt", map_location="cpu")["model"].values()

    first, second = run("tiny-1"), run("tiny-2")
    find(a, "a", what="two tiny runs, weights", equal=all(map(torch.equal, first, second)))
    run("tiny-3", stop=functools.partial(next, iter([False, False, True])))  # asked after the steps 0, 1 and 2
    resumed = run("tiny-3", "--resume")
    find(a, "a", what="stopped and resumed, weights", equal=all(map(torch.equal, first, resumed)))

def steps(a, weights, precision):
    """Two steps, of which the first warms up, and train_step's own row of each."""
    model, tokenizer = train_math.load(a.model, a.device)
    if weights == "random":  # one word in 220 ends a response
        config = Qwen3Config(**RANDOM | (TOY if a.toy else {}))
        with torch.device(a.device):
            model = Qwen3ForCausalLM(config).eval()
        model.generation_config.eos_token_id = list(range(config.vocab_size // 220))
    torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
    s = train_math.parse_settings(words(dict(device=a.device) | (SMALL if a.toy else {})))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    rows = cold_start.tiny_questions(0)  # three of them are about as long as one of GSM8K's
    questions = [{"question": " ".join(row["question"] for row in rows[i:i + 3]), "answer": "0"}
                 for i in range(0, 6 * s.prompts_per_step, 3)]

    def cast(function):
        """In autocast, a region each call: its copies of the weights must not outlive an optimizer step."""
        def inside(*args):
            with torch.autocast(a.device, DTYPES[precision], enabled=bool(DTYPES[precision])):
                return function(*args)
        return inside

    with mock.patch.multiple(train_math, rollout=cast(train_math.rollout),
                             response_log_probs=cast(train_math.response_log_probs)):
        for step in (1, 2):
            if a.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            row = train_math.train_step(model, tokenizer, optimizer, questions[step - 1::2], step, s)
            find(a, "b", weights=weights, precision=precision, **{k: v for k, v in row.items() if v is not None})

def command(a, script, **flags):
    """Run a script; at the deadline it gets a Ctrl-C, upon which train_math.py finishes its step and saves."""
    process = subprocess.Popen([sys.executable, ROOT / script, *words(flags)])
    try:
        process.wait(timeout=max(1, a.deadline - time.time()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    if process.wait() not in (0, 130):  # 130: a Ctrl-C, and all is saved
        raise RuntimeError(f"{script} ended with {process.returncode}")

def gsm8k(a):
    data, cold, output = dict(dataset=a.gsm8k / "train.jsonl", device=a.device), a.work / "cold", a.work / "gsm8k"
    command(a, "experiments/cold_start.py", model=a.model, output_dir=cold, steps=2 if a.toy else 120,
            batch_size=2, **data)  # 2 at once: more may not fit in 16 GB
    command(a, "train_math.py", model=cold, eval_dataset=a.gsm8k / "test.jsonl", output_dir=output, **data,
            **(SMALL if a.toy else dict(max_completion_length=256, max_steps=100)))
    shutil.copy(output / "metrics.jsonl", a.results / "gsm8k_metrics.jsonl")
    for row in read(output / "metrics.jsonl"):
        if "eval_strict" in row:
            find(a, "c", **{k: row[k] for k in ("step", "eval_questions", "eval_strict", "eval_strict_interval",
                                                "eval_flexible", "eval_format")})

def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=train_math.Settings.model, help="hub id or folder")
    parser.add_argument("--gsm8k", type=Path, help="the folder with train.jsonl and test.jsonl")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="small sizes and a model of no skill, made here")
    a = parser.parse_args()
    if a.device == "cpu" and not a.toy or a.device == "cuda" and not torch.cuda.is_available():
        sys.exit("on_gpu.py: it wants a CUDA GPU, and torch sees none. --device cpu --toy tries the script itself")
    began, a.work = time.time(), ROOT / "runs" / time.strftime("on_gpu-%Y%m%d-%H%M%S")
    a.tiny, a.results = a.work / "tiny", a.work if a.toy else ROOT / "experiments" / "results" / "gpu"
    for folder in (a.work, a.results):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer, questions = cold_start.tiny_tokenizer(), cold_start.tiny_questions(0)
    cold_start.save_world(a.tiny, cold_start.tiny_model(tokenizer, 0), tokenizer, questions)
    if a.toy:
        a.model, a.gsm8k = str(a.tiny / "model"), a.tiny
        for name in ("train.jsonl", "test.jsonl"):
            shutil.copy(a.tiny / "questions.jsonl", a.tiny / name)
    name, old = ("cpu", False) if a.device == "cpu" else (
        torch.cuda.get_device_name(), torch.cuda.get_device_capability() < (8, 0))  # old: no TF32, no bfloat16
    a.machine = {"device": name, "torch": torch.__version__, "model": Path(a.model).name}

    a.deadline = began + 60 * a.minutes * (0.4 if a.gsm8k else 1)  # the rest is for (c)
    with mock.patch.object(train_math, "correctness_reward", odd):
        attempt(a, "a", forwards)
        attempt(a, "a", tiny_runs)
        for precision in ["float32", "float16"] if old else DTYPES:
            attempt(a, "b", steps, "given", precision)
            attempt(a, "b", steps, "random", precision)
    a.deadline = began + 60 * a.minutes
    if a.gsm8k:
        attempt(a, "c", gsm8k)
    print(f"(d) python experiments/precision.py --device {a.device} --gsm8k FOLDER --model {a.model}\n"
          f"(d) python experiments/bench_vs_trl.py --device {a.device}\n{a.results}: findings.jsonl")


if __name__ == "__main__":
    main()
