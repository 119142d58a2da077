"""The recipes of PASTE.md for a loop of one's own."""

import re

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from gspo import grpo_loss, gspo_loss, token_log_probs
from tests.conftest import TOP, encoded


@pytest.fixture(scope="module")
def recipe():
    """The functions of the page's blocks about a loop of one's own."""
    page = (TOP / "experiments" / "PASTE.md").read_text(encoding="utf-8")
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]:
        exec(code, names)
    return names


def test_generated_texts_get_the_log_probs_of_single_texts(tiny, recipe):
    model, tokenizer = tiny
    prompts = encoded(tokenizer)
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    is_token = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    assert len(set(map(len, prompts))) == 2
    config = GenerationConfig(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        ids = model.generate(padded, attention_mask=is_token, generation_config=config)
        is_token = torch.cat([is_token, torch.ones(2, 5)], dim=1)
        right = recipe["padding_to_the_right"](ids, is_token)
        found = recipe["log_probs_of"](model, right)
        wrong = recipe["log_probs_of"](model, ids)
        for i, prompt in enumerate(prompts):
            text = torch.tensor([prompt + ids[i, width:].tolist()])
            logits = model(text).logits[:, :-1]
            alone = token_log_probs(logits, text[:, 1:])[0, -5:]
            start = len(prompt) - 1
            assert torch.allclose(found[i, start:start + 5], alone, atol=1e-5)
            if len(prompt) < width:
                assert not torch.allclose(wrong[i, -5:], alone, atol=1e-3)


def test_packed_texts_have_the_loss_of_padded_ones():
    lengths = [3, 1, 2]
    log_probs = torch.tensor([0.1, -0.2, 0.3, 0.4, 0.0, -0.3]) / 100
    advantages = torch.tensor([1.0, -1, 2])

    def unpacked(x):
        return pad_sequence(x.split(lengths), batch_first=True)

    mask = unpacked(torch.ones(6))
    loss = gspo_loss(
        unpacked(log_probs), unpacked(torch.zeros(6)), advantages, mask, eps_low=1, eps_high=1e9)
    means = torch.stack([part.mean() for part in log_probs.split(lengths)])
    assert loss.item() == pytest.approx(-(means.exp() * advantages).mean().item(), abs=1e-7)


def test_the_mean_over_all_tokens_is_that_of_the_formula():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0.0]])
    log_probs = torch.tensor([[0.1, -0.2, 0.3], [0.2, 9.0, 9.0]]) / 10
    advantages = torch.tensor([1.0, -2])
    for loss, ratio in (
        (gspo_loss, (torch.tensor([[0.2 / 30] * 3, [0.02] * 3])).exp()),
        (grpo_loss, log_probs.exp()),
    ):
        found = loss(log_probs, torch.zeros(2, 3), advantages * mask.sum(1), mask, eps_low=1,
                     eps_high=1e9, denominator=4)
        expected = -(ratio * advantages[:, None] * mask).sum() / 4
        assert found.item() == pytest.approx(expected.item(), abs=1e-6)
