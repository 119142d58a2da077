"""gspo_loss in other frameworks: DDP and FSDP2 in plain torch, the trainers of TRL and verl.
The code blocks are read from the pages. A test is skipped if a package that it needs is missing.

    python -m pytest -m slow tests/test_engines.py
    pip install trl==1.16.0, and for verl see .ci/run     # then nothing is skipped
"""
import dataclasses
import inspect
import os
import random
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import train_math
from gspo import gspo_loss, token_log_probs
from tests.conftest import TOP, block, weights_of
from tools.warm_up import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

# ---- plain torch: two processes ------------------------------------------------------------------

# [rank][micro-batch] = rows: ranks hold 3 and 6 responses, micro-batches of uneven size and lengths
SHARDS = [[[0], [1, 2]], [[3, 4, 5, 6], [7, 8]]]
ROWS, WIDTH, WORDS = 9, 12, 20


def language_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, 16),
                               torch.nn.Tanh(), torch.nn.Linear(16, WORDS)).double()


def batch():
    """tokens (9, 12), old log-probs, advantages and mask of responses of 1 to 11 tokens. Some s_i
    are inside the clip range, and some are beyond it."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (ROWS, WIDTH), generator=g)
    lengths = torch.tensor([1, 11, 4, 2, 9, 10, 3, 7, 5])
    mask = torch.arange(WIDTH - 1) < lengths[:, None]
    with torch.no_grad():
        old = token_log_probs(language_model()(tokens[:, :-1]), tokens[:, 1:])
    old = old + torch.randn(old.shape, generator=g) * 3e-3
    return tokens, old, torch.randn(ROWS, generator=g, dtype=torch.float64), mask


def loss_of(model, rows, denominator):
    tokens, old, advantages, mask = (x[rows] for x in batch())
    log_probs = token_log_probs(model(tokens[:, :-1]), tokens[:, 1:])
    return gspo_loss(log_probs, old, advantages, mask, denominator=denominator)


def flat_gradient(loss, weights):
    gradients = torch.autograd.grad(loss, weights, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def worker(rank, kind, folder):
    """Saves the gradient of this process's micro-batches."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = language_model()
    if kind == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in (model[1], model[3], model):
            fully_shard(module, mesh=mesh)
    responses = torch.tensor(float(sum(map(len, SHARDS[rank]))))
    dist.all_reduce(responses)
    for rows in SHARDS[rank]:
        model.require_backward_grad_sync = rows == SHARDS[rank][-1]  # of DDP
        loss_of(model, rows, responses.item() / 2).backward()
    grads = [p.grad.full_tensor() if kind == "FSDP2" else p.grad for p in model.parameters()]
    torch.save(torch.cat([grad.flatten() for grad in grads]), f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads abort a usual exit now and then


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_processes_give_the_gradient_of_one(tmp_path, kind):
    """Gradients are averaged over the ranks, so the denominator is the number of responses in the
    step / ranks."""
    torch.multiprocessing.spawn(worker, (kind, str(tmp_path)), nprocs=2)
    model = language_model()
    whole = flat_gradient(loss_of(model, list(range(ROWS)), ROWS), list(model.parameters()))
    for rank in 0, 1:
        assert (torch.load(tmp_path / f"{rank}") - whole).norm() < 1e-7 * whole.norm()


def test_accelerate_divides_by_the_micro_batches_once_more():
    """Rule 1 of the page: with denominator / micro-batches, the gradient is that of one batch."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = accelerator.prepare(language_model())
    weights = list(model.parameters())
    for rows in torch.arange(8).chunk(4):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rows, 8 / 4))
    got = torch.cat([p.grad.flatten() for p in weights])
    torch.testing.assert_close(got, flat_gradient(loss_of(model, slice(8), 8), weights))


def run_block(containing, **names):
    """The names that a block defines when it is run as a file beside gspo.py. names: those that the
    blocks before it have defined."""
    names = {"__name__": "pasted"} | names
    exec(compile(block("guides/paste.md", containing), f"block with {containing}", "exec"), names)
    return names


# ---- TRL -----------------------------------------------------------------------------------------

VOCABULARY = ["####", *"0123456789"]


def tiny():
    """(model, tokenizer). Its weights are larger than those of the lesson's model, whose gradients
    are too small to compare."""
    tokenizer = tiny_tokenizer(VOCABULARY)
    model = tiny_model(tokenizer, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model.train(), tokenizer


def trl_config(folder, **more):
    from trl import GRPOConfig
    settings = dict(
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4,
        beta=0.0, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        steps_per_generation=4, num_iterations=2, num_generations=4, max_completion_length=8,
        temperature=1.0, top_p=1.0, top_k=0, learning_rate=1e-3, max_steps=12, bf16=False,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=0)
    return GRPOConfig(output_dir=str(folder), **settings | more)


def questions():
    from datasets import Dataset
    return Dataset.from_list([{"prompt": str(10 ** (i % 4) + i), "answer": f"#### {i % 10}"}
                              for i in range(24)])


def form_reward(completions, **columns):
    """1 for any number after '####'."""
    return [float(train_math.extract_answer(text) is not None) for text in completions]


@pytest.mark.parametrize("masked", [False, True], ids=["", "truncated completions masked"])
@pytest.mark.parametrize("more", [
    {}, {"steps_per_generation": 2, "num_iterations": 1}, {"gradient_accumulation_steps": 5}],
    ids=["several iterations", "on-policy", "an epoch that ends within an accumulation"])
def test_our_loss_in_trl_equals_trls_at_every_micro_batch(tmp_path, more, masked):
    """A real run of train() with padding, accumulation, ratios other than 1, and our reward."""
    trl = pytest.importorskip("trl")
    block = run_block("class GSPOTrainer")
    seen = []
    on_policy = "num_iterations" in more
    config = trl_config(tmp_path, **more, mask_truncated_completions=masked)
    for name in ("importance_sampling_level", "loss_type", "epsilon", "epsilon_high", "beta",
                 "top_k", "bf16"):
        ours = getattr(block["config"], name)
        assert ours == getattr(config, name), f"the page's {name} is another"

    class Both(block["GSPOTrainer"]):
        def _compute_loss(self, model, inputs):
            assert (inputs.get("old_per_token_logps") is None) == on_policy
            if len(seen) % 4:  # every second time, as in multi-turn runs: a tool wrote some tokens
                tool_mask = torch.rand(inputs["completion_mask"].shape) > 0.3
                inputs = inputs | {"tool_mask": tool_mask.int()}
            self.compare(model, inputs)
            model.eval()  # where nothing is accumulated
            self.compare(model, inputs)
            model.train()
            return super()._compute_loss(model, inputs)

        def compare(self, model, inputs):
            weights = list(model.parameters())
            ours = super()._compute_loss(model, inputs)
            theirs = trl.GRPOTrainer._compute_loss(self, model, inputs)
            gradient = flat_gradient(theirs, weights)
            assert abs(ours - theirs) < 1e-6
            assert (flat_gradient(ours, weights) - gradient).abs().max() < 5e-6
            metrics = self._metrics["train" if model.training else "eval"]
            lengths = inputs["completion_mask"].sum(1)
            seen.append({
                "norm": gradient.norm().item(),
                "clipped": metrics["clip_ratio/region_mean"][-1] * metrics["clip_fraction"][-1],
                "accumulated": self.current_gradient_accumulation_steps,
                "lengths": len(lengths.unique()),
                "empty": (lengths == 0).any().item(),
                "padded": (inputs["prompt_mask"] == 0).any().item()})

    rewards = [train_math.correctness_reward, form_reward]
    model, tokenizer = tiny()
    Both(model, rewards, config, questions(), processing_class=tokenizer).train()
    values = {name: {row[name] for row in seen} for name in seen[0]}
    assert len(seen) >= 48 and max(values["norm"]) > 0.1
    assert max(values["lengths"]) > 1 and True in values["padded"]
    assert (True in values["empty"]) == masked
    assert len(values["accumulated"]) == (2 if "gradient_accumulation_steps" in more else 1)
    assert (max(values["clipped"]) > 0) != on_policy


def test_the_file_for_trl_trains_as_it_is_pasted(tmp_path, monkeypatch):
    """Only the model (tiny, in bfloat16), the questions (made up) and the number and length of the
    steps (small) are replaced."""
    trl = pytest.importorskip("trl")
    import datasets
    import transformers
    model, tokenizer = tiny()
    for part in model.bfloat16(), tokenizer:
        part.save_pretrained(tmp_path)
    asked = []
    rows = datasets.Dataset.from_list([{"question": "How many are 7?", "answer": "#### 7"}] * 32)
    load = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained",
                        lambda name, **how: asked.append(name) or load(tmp_path, **how))
    monkeypatch.setattr(datasets, "load_dataset",
                        lambda *name, split: asked.append((*name, split)) or rows)
    small = {"use_cpu": True, "save_strategy": "no", "max_steps": 16, "max_completion_length": 8,
             "learning_rate": 1e-3, "logging_steps": 1}
    config = trl.GRPOConfig
    monkeypatch.setattr(trl, "GRPOConfig",
                        lambda name, **settings: config(str(tmp_path / name), **settings | small))
    trainer = run_block("class GSPOTrainer", __name__="__main__")["trainer"]
    assert asked == [("openai/gsm8k", "main", "train"), "Qwen/Qwen2.5-0.5B-Instruct"]
    assert type(trainer).__name__ == "GSPOTrainer" and trainer.state.global_step == 16
    rewards, clipped = (
        [row[name] for row in trainer.state.log_history if name in row]
        for name in ("rewards/correctness_reward/mean", "clip_fraction"))
    assert len(rewards) == 4 and 0 < max(rewards) <= 1, "a rollout per four steps"
    assert max(clipped[::4]) == 0 < max(clipped), "ratios are 1 in its first step alone"
    before = load(tmp_path, dtype=torch.float32).state_dict()
    for name, p in trainer.model.named_parameters():
        assert p.dtype == torch.float32 and not torch.equal(p.detach().cpu(), before[name])


REFUSED = {
    "importance_sampling_level": "token", "loss_type": "dapo", "beta": 0.1, "delta": 2.0,
    "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.2, "entropy_coef": 0.01,
    "use_adaptive_entropy": True, "scale_rewards": "none",
    "vllm_importance_sampling_correction": True}


@pytest.mark.parametrize("name", REFUSED)
def test_our_trainer_refuses_what_is_not_gspo_before_it_loads_a_model(tmp_path, name):
    pytest.importorskip("trl")
    config = trl_config(tmp_path)
    assert hasattr(config, name), "TRL has renamed it"
    config.use_vllm = "vllm" in name
    setattr(config, name, REFUSED[name])
    with pytest.raises(ValueError, match=f"GSPO needs {name}="):
        run_block("class GSPOTrainer")["GSPOTrainer"]("no-model", form_reward, config, questions())


def test_our_trainer_refuses_trls_default_settings_an_auxiliary_loss_and_images(
        tmp_path, monkeypatch):
    """A reward may come from an environment, so there need not be a reward function."""
    trl = pytest.importorskip("trl")
    ours = run_block("class GSPOTrainer")["GSPOTrainer"]
    with pytest.raises(ValueError, match="GSPO needs args"):
        ours("no-model")
    model, tokenizer = tiny()
    arguments = model, form_reward, trl_config(tmp_path), questions()
    trainer = ours(*arguments, processing_class=tokenizer)
    with pytest.raises(NotImplementedError, match="not text"):
        trainer._compute_loss(model, {"pixel_values": None})
    monkeypatch.setattr(trl.GRPOTrainer, "__init__",
                        lambda self, *names, **more: setattr(self, "aux_loss_enabled", True))
    with pytest.raises(ValueError, match="router_aux_loss_coef=0"):
        ours(*arguments, processing_class=tokenizer)


def test_our_trainer_knows_every_setting_that_trls_loss_reads():
    trl = pytest.importorskip("trl")
    checked = run_block("class GSPOTrainer")["IS_GSPO"].keys()
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    settings = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    read = settings.intersection(re.findall(r"self\.(?:args\.)?(\w+)", source))
    of_other_losses = {"max_completion_length", "use_bias_correction_kl"}
    followed = {"epsilon_high", "steps_per_generation"}
    checked_elsewhere = {"use_vllm", "vllm_importance_sampling_correction", "router_aux_loss_coef"}
    unknown = read - checked - of_other_losses - followed - checked_elsewhere
    assert all(name.startswith(("sapo_", "vespo_", "entropy_")) for name in unknown), unknown


def in_the_order_of_two_processes(batch):
    """The responses of a rollout, so that the first of four minibatches gets the first quarter of
    each half. TRL shuffles them in each process, which would give other minibatches."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    rows = torch.arange(len(batch["completion_ids"])).view(2 // ranks, 4, -1)
    order = rows.transpose(0, 1).flatten()
    return {name: value[order] if torch.is_tensor(value) and value.dim() else value
            for name, value in batch.items()}


def train_on_given_completions(output):
    """Runs GSPOTrainer for three rollouts with four optimizer steps each, on 8 responses per step
    over all processes. Saves the change of the weights, and the clip fractions that were computed
    and logged. The responses depend only on the prompts, and not on chance. This runs under
    torchrun, or alone."""
    import trl.trainer.grpo_trainer as module
    from transformers import set_seed
    module.shuffle_sequence_dict = in_the_order_of_two_processes
    rank, ranks = (int(os.environ.get(name, i)) for i, name in enumerate(("RANK", "WORLD_SIZE")))
    set_seed(0)
    lengths = set()
    names = run_block("class GSPOTrainer")
    own_fractions = []

    def recorded(*arguments, compute=names["clip_fraction"]):
        own_fractions.append(compute(*arguments))
        return own_fractions[-1]

    names["clip_fraction"] = recorded

    class Given(names["GSPOTrainer"]):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            completions = []
            count = {}
            for prompt in map(tuple, prompt_ids):
                count[prompt] = count.get(prompt, 0) + 1
                rng = random.Random(f"{prompt} {count[prompt]} {self.state.global_step}")
                text = rng.choices(range(3, 3 + len(VOCABULARY)), k=rng.randrange(1, 8))
                completions.append(text + [1])
                lengths.add(len(completions[-1]))
            return completions, None

    def reward(completions, **columns):
        return [sum(map(ord, text)) % 7 / 7 for text in completions]

    config = trl_config(
        f"{output}-runs", per_device_train_batch_size=8 // ranks, gradient_accumulation_steps=1,
        max_steps=12, steps_per_generation=4, num_iterations=1, optim="sgd", learning_rate=0.3,
        lr_scheduler_type="constant", logging_steps=1)
    model, tokenizer = tiny()
    before = weights_of(model)
    trainer = Given(model, reward, config, questions(), processing_class=tokenizer)
    trainer.train()
    assert trainer.accelerator.num_processes == ranks and len(lengths) > 3
    logged = [row["clip_fraction"] for row in trainer.state.log_history if "clip_fraction" in row]
    torch.save({"change": weights_of(model) - before, "own": torch.stack(own_fractions),
                "logged": torch.tensor(logged)}, f"{output}-{rank}")


def test_two_processes_of_trl_equal_one(tmp_path):
    """torchrun --nproc_per_node 2 is compared with one process, with the same responses in each
    optimizer step and uneven lengths. The logged clip fraction is the mean of both processes."""
    pytest.importorskip("trl")
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for name, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, *launcher, "-m", "tests.test_engines", tmp_path / name]
        done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one, two, other = (torch.load(tmp_path / name) for name in ("one-0", "two-0", "two-1"))
    assert one["change"].abs().max() > 0.01
    torch.testing.assert_close(one["change"], two["change"], atol=1e-6, rtol=0)
    assert torch.equal(two["change"], other["change"])
    own = torch.stack([two["own"], other["own"]])
    assert (own[0] != own[1]).any() and own.max() > 0
    torch.testing.assert_close(two["logged"], own.mean(0), atol=1e-6, rtol=0)


# ---- verl ----------------------------------------------------------------------------------------


def verl_loss(name, rows, info):
    """Value and gradient of a loss in verl's registry, on some rows of the batch and with
    advantages (B, T)."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
                         clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    config.global_batch_info.update(info)
    tokens, old, advantages, mask = (x[rows] for x in batch())
    new = token_log_probs(language_model()(tokens[:, :-1]), tokens[:, 1:])
    new = new.detach().requires_grad_()
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=old, log_prob=new, advantages=advantages[:, None].expand(mask.shape),
        response_mask=mask, loss_agg_mode="seq-mean-token-mean", config=config,
        rollout_is_weights=None)
    return loss.item(), torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize("rows, info", [
    (list(range(ROWS)), {}),
    ([5, 6, 7, 8], {"dp_size": 2, "global_batch_size": 24}),
], ids=["one process", "a micro-batch on one of two ranks"])
def test_our_loss_in_verl_equals_verls(rows, info):
    pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    ours = run_block("gspo_paper")["gspo_paper"]
    loss, gradient = verl_loss("gspo_paper", rows, info)
    theirs, their_gradient = verl_loss("gspo", rows, info)
    assert gradient.abs().max() > 1e-3
    assert (gradient == 0).all(dim=1).any(), "some responses are clipped, some not"
    assert abs(loss - theirs) < 1e-8 and (gradient - their_gradient).abs().max() < 1e-8
    ones = torch.ones(1, 1)
    with pytest.raises(NotImplementedError, match="rollout correction"):
        ours(ones, ones, ones, ones, rollout_is_weights=ones)


def test_verl_finds_our_loss_as_an_external_module(tmp_path):
    pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    (tmp_path / "verl_gspo.py").write_text(block("guides/paste.md", "gspo_paper"))
    (tmp_path / "gspo.py").write_bytes((TOP / "gspo.py").read_bytes())
    code = ("from verl.trainer.ppo.core_algos import get_policy_loss_fn as get;"
            "print(get('gspo_paper').__module__)")
    more = {"VERL_USE_EXTERNAL_MODULES": "verl_gspo", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | more, cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["verl_gspo"], done.stderr


if __name__ == "__main__":
    train_on_given_completions(sys.argv[1])
    os._exit(0)  # gloo's threads abort a usual exit now and then
