"""gspo_loss in TRL, and the table of losses on a page. They need TRL and verl (see .ci/run)."""
import os
import re
import subprocess
import sys

import pytest
import torch

from support.task import correctness_reward
from tests.conftest import TOP, block
from tools.warm_up import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow


def flat_gradient(loss, model):
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def run_block(containing):
    names = {"__name__": "pasted"}
    exec(compile(block("guides/paste.md", containing), f"block with {containing}", "exec"), names)
    return names


def trl_config(folder, **more):
    settings = dict(
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4,
        beta=0.0, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        steps_per_generation=4, num_iterations=2, num_generations=4, max_completion_length=8,
        top_k=0, learning_rate=1e-3, max_steps=8, bf16=False, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, seed=0)
    return pytest.importorskip("trl").GRPOConfig(output_dir=str(folder), **settings | more)


def form_reward(completions, **columns):
    return [float("####" in text) for text in completions]


@pytest.mark.parametrize("more", [
    {"mask_truncated_completions": True}, {"steps_per_generation": 2, "num_iterations": 1},
    {"gradient_accumulation_steps": 5}], ids=str)
def test_our_loss_in_trl_equals_trls_at_every_micro_batch(tmp_path, more):
    """A real run of train() with padding, accumulation, ratios other than 1, and our reward."""
    config = trl_config(tmp_path, **more)
    import datasets
    import trl
    block = run_block("class GSPOTrainer")
    seen = []
    for name in "importance_sampling_level", "loss_type", "epsilon", "epsilon_high", "beta", "bf16":
        assert getattr(block["config"], name) == getattr(config, name), f"the page's {name}"

    class Both(block["GSPOTrainer"]):
        def _compute_loss(self, model, inputs):
            if len(seen) % 2:  # as in multi-turn runs: a tool wrote some tokens
                tool_mask = torch.rand(inputs["completion_mask"].shape) > 0.3
                inputs = inputs | {"tool_mask": tool_mask.int()}
            ours = super()._compute_loss(model, inputs)
            theirs = trl.GRPOTrainer._compute_loss(self, model, inputs)
            gradient = flat_gradient(theirs, model)
            assert abs(ours - theirs) < 1e-6
            assert (flat_gradient(ours, model) - gradient).abs().max() < 5e-6
            seen.append((gradient.norm().item(), self._metrics["train"]["clip_fraction"][-1],
                         (inputs["prompt_mask"] == 0).any().item()))
            return ours

    tokenizer = tiny_tokenizer(["####", *"0123456789"])
    model = tiny_model(tokenizer, seed=0)
    for parameter in model.parameters():  # larger weights, whose gradients can be compared
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    rows = [{"prompt": str(10 ** (i % 4) + i), "answer": f"#### {i % 10}"} for i in range(24)]
    Both(model.train(), [correctness_reward, form_reward], config,
         datasets.Dataset.from_list(rows), processing_class=tokenizer).train()
    norms, clipped, padded = zip(*seen)
    assert len(seen) >= 16 and max(norms) > 0.1 and any(padded)
    assert (max(clipped) > 0) == (config.num_iterations > 1), "on-policy, every ratio is 1"


@pytest.mark.parametrize("name, value", [
    ("importance_sampling_level", "token"), ("loss_type", "dapo"), ("beta", 0.1), ("delta", 2.0),
    ("scale_rewards", "none"), ("vllm_importance_sampling_correction", True)])
def test_our_trainer_refuses_what_is_not_gspo_before_it_loads_a_model(tmp_path, name, value):
    config = trl_config(tmp_path)
    config.use_vllm = "vllm" in name
    setattr(config, name, value)
    ours = run_block("class GSPOTrainer")["GSPOTrainer"]
    with pytest.raises(ValueError, match=f"GSPO needs {name}="):
        ours("no-model", form_reward, config)
    with pytest.raises(ValueError, match="GSPO needs args"):
        ours("no-model")


ROW = re.compile(r"(?m)^\|.*\| `(GSPO=.*?)` \| (\d+ of \d+) \| (\d+ of \d+) \|")
TABLE = ROW.findall((TOP / "guides/is_it_gspo.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("variables, maths, promises", TABLE)
def test_the_table_of_losses_on_the_page(variables, maths, promises, tmp_path):
    """pytest prints the figures of each row, with the variables of this row."""
    pytest.importorskip(re.search("trl|verl|torch", variables + " torch")[0], exc_type=ImportError)
    six = re.search(r"    # Eq. 7\n.*\n    return .*\n", block("README.md", "# Eq. 7"), re.DOTALL)
    (tmp_path / "six_lines.py").write_text(
        "import torch\n\n\ndef gspo_loss(log_probs, old_log_probs, advantages, mask, eps_low=3e-4, "
        f"eps_high=4e-4, denominator=None):\n{six[0]}", encoding="utf-8")
    variables = variables.replace("six_lines.py", f"{tmp_path}/six_lines.py")
    command = [sys.executable, "-m", "pytest", "test_gspo.py", "-k", "GspoLoss"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True,
                          env=os.environ | dict(one.split("=") for one in variables.split()))
    figures = re.search(r"gspo_loss\D+(\d+ of +\d+)\D+promises +(\d+ of +\d+)", done.stdout)
    assert figures and figures.groups() == (maths, promises), done.stdout[-2000:]
