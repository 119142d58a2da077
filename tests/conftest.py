"""Shared by the tests: a tiny model with random weights, a few questions, and one whole run."""
import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import train_math
from tools.logs import read
from tools.warm_up import given_rollout, tiny_model, tiny_tokenizer

TOP = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)  # models this small are slower on several


def pytest_configure(config):
    """A slow test is left out, unless -m says which tests to run: -m "slow or not slow"."""
    config.addinivalue_line("markers", "slow: is left out unless -m is given")
    config.option.markexpr = config.option.markexpr or "not slow"


SMALL = dict(
    device="cpu", max_steps=6, save_steps=2, eval_size=4, prompts_per_step=4, group_size=4,
    max_completion_length=6, learning_rate=1e-3)
QUESTIONS = [
    {"question": "Eve buys 3 figs?"},
    {"question": "How many boxes of 53 figs are there? Ann has 7."},
]


def parity_reward(prompts, completions, **columns):
    """1 for an odd number of digits. A model with random weights gets this reward in about half of
    its responses, so that there is a gradient."""
    return [float(sum(c.isdigit() for c in text) % 2) for text in completions]


def rollout_of(prompts, responses):
    """A Rollout of these token ids: a prompt for each response."""
    rollout = given_rollout(prompts, responses)
    rollout.questions = sums(len(responses))
    rollout.texts = [str(response) for response in responses]
    return rollout


def at_call(number, function, instead):
    """The function, but its call with this number is one of `instead`, or raises this exception."""
    calls = itertools.count(1)

    def counted(*arguments, **more):
        if next(calls) != number:
            return function(*arguments, **more)
        if isinstance(instead, BaseException):
            raise instead
        return instead(*arguments, **more)

    return counted


def spy(function, calls):
    """The function, which adds (arguments, keywords, result) of each call to this list."""

    def noted(*arguments, **more):
        result = function(*arguments, **more)
        calls.append((arguments, more, result))
        return result

    return noted


def sums(n):
    return [
        {"question": f"{'Ann ' * (i % 4)}has {i} figs?", "answer": f"#### {i}"} for i in range(n)
    ]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def settings(**changes):
    """Settings of a few fast steps that write nothing."""
    return train_math.Settings(**{"output_dir": None} | SMALL | changes)


def block(page, containing):
    """The one ```python or ```py block of this page that contains this text."""
    text = (TOP / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```py(?:thon)?\n(.*?)```", text, re.DOTALL)
    (code,) = [code for code in blocks if containing in code]
    return code


def train(fresh, questions=8, held_out=0, reward=parity_reward, **more):
    """The rows of a run of (model, tokenizer) on these questions, or on so many.

    more: settings, and what train_math.train() has besides."""
    names = {field.name for field in dataclasses.fields(train_math.Settings)}
    changes = {name: more.pop(name) for name in names & set(more)}
    if isinstance(questions, int):
        questions = sums(questions)
    return train_math.train(
        settings(**changes), *fresh, questions, sums(held_out), reward=reward, **more)


def encoded(tokenizer, questions=QUESTIONS):
    """The prompts of these questions, without an instruction."""
    return train_math.encode_prompts(tokenizer, questions, settings(instruction=""))


def run(command, folder, *flags, reward=parity_reward, **parts):
    """Run the script on the tiny model. Returns the rows of its log."""
    train_math.main([*command, "--output_dir", str(folder), *flags], reward, **parts)
    return read(folder / "metrics.jsonl")


def one_line(main, *flags, **more):
    """The line with which the program ends, or that of its error."""
    with pytest.raises((SystemExit, ValueError, TypeError, OSError)) as stop:
        main([str(flag) for flag in flags], **more)
    return str(stop.value)


def weights_of(model):
    """All weights of the model in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def fresh():
    """(model, tokenizer): the tiny model with random weights."""
    tokenizer = tiny_tokenizer()
    return tiny_model(tokenizer, seed=0), tokenizer


@pytest.fixture
def tiny(fresh):
    """The same model with larger weights, so that its distribution is far from uniform."""
    model, tokenizer = fresh
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model, tokenizer


@pytest.fixture
def model(tiny):
    return tiny[0]


class PretendedCuda(str):
    """A name of the CPU that torch accepts, and whose type is "cuda" for all who ask."""

    type = "cuda"


@pytest.fixture
def pretend_cuda(model, monkeypatch):
    """The tiny model says that it is on a CUDA device."""
    device = property(lambda self: PretendedCuda("cpu"))
    monkeypatch.setattr(type(model), "device", device, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.fixture
def prompts(tiny):
    """Two prompts of different lengths for this model."""
    return encoded(tiny[1])


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with the tiny model and its questions."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = tiny_tokenizer()
    for part in tiny_model(tokenizer, seed=0), tokenizer:
        part.save_pretrained(folder / "model")
    write_jsonl(folder / "questions.jsonl", sums(30))
    return folder


@pytest.fixture(scope="session")
def chat_model(world, tmp_path_factory):
    """A folder with the same model, and with a chat template that shows everything."""
    folder = tmp_path_factory.mktemp("chat")
    model, tokenizer = train_math.load(str(world / "model"), "cpu")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")
    for part in model, tokenizer:
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def command(world):
    """The flags of a few fast steps with this model and these questions."""
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    return ["--model", str(world / "model"), "--dataset", str(world / "questions.jsonl"), *flags]


@pytest.fixture(scope="session")
def whole(command, tmp_path_factory):
    """The folder of a whole run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(command, folder)
    return folder
