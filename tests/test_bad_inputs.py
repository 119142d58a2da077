"""Wrong inputs of a user: settings, models, saved states, and functions of the user's own.

Each ends the program, or the call, with one line that says what to look at. Data sets that are
refused are in test_data.py.
"""

import copy
import json
import math
import re

import pytest
import torch

import gspo
import train_math
from gspo import gspo_loss
from test_gspo import example
from tests.conftest import (
    QUESTIONS,
    at_call,
    check,
    encoded,
    names_in,
    one_line,
    parity_reward,
    refused,
    settings,
    train,
)
from tools.warm_up import tiny_model, tiny_tokenizer

# ---- settings ------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    "rollout_rows 0", "prompts_per_step 0", "max_steps 0", "save_steps 0", "micro_batch_tokens 0",
    "epochs 0", "minibatches 0", "max_completion_length 0", "temperature 0", "eps_low 0",
    "eps_high 0", "eps_high inf", "group_size 1", "learning_rate nan", "learning_rate -1",
    "eval_size -1", "seed -1", "seed 99999999999999999",
]


@pytest.mark.parametrize("flags, words", [
    *((f"--{setting}", f"--{setting}") for setting in OUT_OF_RANGE),
    ("--group_siz 4", "there is no flag --group_siz; see --group_size"),
    ("--learningrate=1", "there is no flag --learningrate=1; see --learning_rate"),
    ("--zzz 4", "there is no flag --zzz; see --help"),
    ("--prompts_per_step 6", "--minibatches"),
    ("--eps_low 1.5", "eps_low 1.5"),
    ("--eps_low 0.9997", "0.9997"),
    ("stray", "stray"),
])
def test_a_wrong_setting_is_named(flags, words):
    line = one_line(train_math.main, *flags.split())
    assert line.startswith("train_math.py: settings: ") and words in line


@pytest.mark.parametrize("algorithm, changes, words", [
    ("own", {"eps_low": 1.5}, "eps_low 1.5"),
    ("GSPO", {}, "GSPO is none of gspo, "),
    ("own", {"ratio": "Token"}, "ratio='Token'.*'sequence' or 'token'"),
])
def test_a_wrong_algorithm_is_named(monkeypatch, algorithm, changes, words):
    row = train_math.ALGORITHMS["gspo"]._replace(**changes)
    monkeypatch.setitem(train_math.ALGORITHMS, "own", row)
    with pytest.raises(ValueError, match=words):
        settings(algorithm=algorithm)


# ---- what the flags name, and functions of the user's own ----------------------------------------


def saves_a_model(change=lambda weights: None):
    """With changed weights and without its tokenizer, which is loaded after them."""
    def prepare(folder):
        model = tiny_model(tiny_tokenizer(), 0)
        weights = model.state_dict()
        change(weights)
        path = folder.parent / "model"
        model.save_pretrained(path, state_dict=weights)
        (path / "chat_template.jinja").write_text("{{ messages[0].content }}")

    return prepare


def a_reward_that_raises(prompts, completions, **columns):
    return json.loads("no JSON")  # raises in json, but this line is named


def returns(value):
    def faulty_reward(**columns):
        return value
    words = f"faulty_reward returned {value!r}", "2 finite numbers", "a trial of "
    return case(*words, reward=faulty_reward)


def logs(name):
    def reward(log_metric, **columns):
        log_metric(name, 1)
    return case(f"the name {name} is taken", "a trial of ", reward=reward)


def raises(error):
    return at_call(1, None, error)


def case(*words, flags="", prepare=lambda folder: None, loss=gspo_loss, **parts):
    """The words of the line, the flags, what is done first in the folder of the run, and the user's
    functions."""
    return words, flags, prepare, loss, parts


HALF = "with twice the denominator, it is not half"
REFUSED = {
    "a device that this machine lacks": case("--device mps", flags="--device mps"),
    "a dataset file that is not there": case(
        "nowhere.csv", "no such file", flags="--dataset nowhere.csv"),
    "an empty name of a dataset": case("--dataset", "it is empty", flags="--dataset="),
    "a state of another version": case(
        "other values of old_flag. Choose",
        prepare=lambda folder: torch.save(
            {"rows": [{"settings": {"old_flag": 1}}]}, folder / "state.pt")),
    "a damaged state": case(
        "--output_dir", "state.pt cannot be read",
        prepare=lambda folder: (folder / "state.pt").write_text("PK")),
    "a file as output_dir": case(
        "--output_dir", "bad_inputs.py: ", flags=f"--output_dir {__file__}"),
    "a full disk": case(
        "partial", "is the disk full?",
        prepare=lambda folder: (folder / "partial").symlink_to("/dev/full")),
    "a prompt that is too long": case("up to 513 tokens", flags="--max_completion_length 488"),
    "a model without its tokenizer": case(
        "tokenizer files are missing", flags="--model ./model", prepare=saves_a_model()),
    "a missing weight": case(
        "--model", "1 weights are missing", "model.norm.weight", flags="--model ./model",
        prepare=saves_a_model(lambda weights: weights.pop("model.norm.weight"))),
    "a weight that is NaN": case(
        "--model", "not finite", flags="--model ./model",
        prepare=saves_a_model(lambda weights: weights["model.norm.weight"].fill_(math.nan))),
    "a model that the hub lacks": case("--model no/where ", flags="--model no/where"),
    **{f"no model in {name}": case(f"there is no {name.removeprefix('./')}/config.json",
                                   flags=f"--model {name}")
       for name in ("/nowhere/model", "./model", "runs/mine/model", "~/model")},
    "no model in a folder of runs": case(
        "there is no runs/config.json. A run has its model in RUN/model",
        "repeat its command with --max_steps 1", flags="--model runs",
        prepare=lambda folder: (folder.parent / "runs").mkdir()),
    **{f"rewards {value!r}": returns(value) for value in (
        None, [None, None], 1.0, [1.0], [1.0] * 3, [0.0, math.nan], [-math.inf, 0.0], [1e39, 0.0],
        [[1.0], [1.0]], ["good", "good"], "01", {0: 1.0, 1: 0.0}, {0.0, 1.0})},
    **{f"a metric {name}": logs(name)
       for name in ("reward", "step", "entropy", "notes", "eval_mine")},
    "a reward that raises": case(
        f"in {__file__}, line {a_reward_that_raises.__code__.co_firstlineno + 1}", "a trial of ",
        "the reward function a_reward_that_raises raised JSONDecodeError(",
        reward=a_reward_that_raises),
    "a reward with other arguments": case(
        "unexpected keyword argument", reward=lambda prompts, answers: [0.0]),
    "a list of rewards": case("list", "callable", reward=[parity_reward]),
    "one response too few": case(
        "the sampler must return 1 responses to each of 2 questions", "'responses': 1",
        generate=lambda *arguments: [part[:-1] for part in train_math.generate(*arguments)]),
    "no network": case(
        "Couldn't reach the Hub", "Without a network, use --model FOLDER and --dataset FILE",
        load=raises(ConnectionError("Couldn't reach the Hub"))),
    "too little memory": case(
        "CUDA out of memory", "--micro_batch_tokens", "--rollout_rows",
        generate=raises(torch.OutOfMemoryError("CUDA out of memory."))),
    **{f"{name} that fails": case("in the part", **{name: raises(OSError("in the part"))})
       for name in ("encode_prompts", "generate", "response_log_probs")},
    "a loss of each response": case(
        "the loss must be one number", loss=lambda log_probs, *rest: log_probs.sum(1)),
    "a loss that is a mean": case(HALF, loss=lambda log_probs, *rest: -log_probs.mean()),
    "a loss with a term that is a mean": case(
        HALF, loss=lambda *arguments: gspo_loss(*arguments) - 0.1 * arguments[0].mean()),
    "a loss that divides twice": case(
        HALF, loss=lambda *arguments: gspo_loss(*arguments) / arguments[-1]),
}


@pytest.mark.parametrize("words, flags, prepare, loss, parts", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_ends_in_one_line_before_the_long_work(
        command, tmp_path, monkeypatch, own_loss, words, flags, prepare, loss, parts):
    monkeypatch.chdir(tmp_path)
    own_loss(loss)
    folder = tmp_path / "run"
    folder.mkdir()
    prepare(folder)
    before = names_in(folder)
    line = refused(command, folder, *flags.split(), **parts)
    assert line.startswith("train_math.py: ") and all(word in line for word in words), line
    assert names_in(folder) <= before | {"lock"}, "something was written"


@pytest.mark.parametrize("number, words", [
    ("2", "'Several processes' in guides/recipes.md"), ("16", "'Several processes'"),
    ("1", "--model no/where"), ("", "--model no/where")])
def test_several_processes_are_refused_with_the_recipe(
        command, tmp_path, monkeypatch, number, words):
    monkeypatch.setenv("WORLD_SIZE", number)
    assert words in refused(command, tmp_path / "run", "--model", "no/where")


# ---- models and chat templates that the trial refuses --------------------------------------------


def sets(owner, **values):
    """Sets attributes of the model, of its config or of the tokenizer."""
    def change(model, tokenizer):
        owners = {"model": model, "config": model.config, "tokenizer": tokenizer}
        for name, value in values.items():
            setattr(owners[owner], name, value)
    return change


def unknown_keyword(*arguments, **more):
    raise TypeError("unexpected keyword 'cache'")


def ignores(**inputs):
    """The model's forward pass always has these inputs, whatever it gets."""
    def change(model, tokenizer):
        model.forward = lambda forward=model.forward, **given: forward(**given | inputs)
    return change


def another_head(model, tokenizer):
    head = copy.deepcopy(model.lm_head)
    head.weight.data *= 2
    model.get_output_embeddings = lambda: head


def no_end(model, tokenizer):
    tokenizer.eos_token = model.generation_config.eos_token_id = None


def frozen_in_float16(model, tokenizer):
    """As with a LoRA adapter in float32 over such weights."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data = parameter.data.half()
            parameter.requires_grad_(False)


DIFFER = "log-probs of eight sampled tokens differ by "
UNFIT = {
    "no system role": (
        sets("tokenizer", chat_template="{{ raise_exception('no system role') }}"),
        "its template is"),
    "roles": (
        sets("tokenizer", chat_template="{% for m in messages %}{{ m.role }}{% endfor %}"),
        "drops the text of the question"),
    "no decoder": (
        sets("model", get_decoder=unknown_keyword), "unsupported.*unexpected keyword"),
    "no cache": (sets("model", forward=unknown_keyword), "unsupported.*unexpected keyword"),
    "another head": (another_head, DIFFER),
    "no cache is kept": (ignores(cache=None), DIFFER),
    "another padding": (ignores(attention_mask=None, position_ids=None), DIFFER),
    "one token too few": (
        lambda model, tokenizer: model.resize_token_embeddings(max(map(max, encoded(tokenizer)))),
        "they are not a pair"),
    "no end": (no_end, "neither the tokenizer nor the model has an end token"),
    "NaN": (lambda model, _: model.lm_head.weight.data[5].fill_(math.nan), DIFFER + "nan"),
    # These cap or scale their logits. Small logits, as in the trial, show no effect.
    "Gemma 2": (sets("config", final_logit_softcapping=30.0), "final_logit_softcapping"),
    "Granite": (sets("config", logits_scaling=8.0), "logits_scaling"),
    "Cohere": (sets("config", logit_scale=0.5), "logit_scale"),
    "bfloat16": (lambda model, _: model.bfloat16(), "is in torch.bfloat16.*float32"),
    "frozen": (lambda model, _: model.requires_grad_(False), "frozen"),
    "frozen in float16": (frozen_in_float16, "is in torch.float16.*float32"),
}


@pytest.mark.parametrize("change, words", UNFIT.values(), ids=UNFIT)
def test_a_model_that_does_not_fit_is_refused_in_the_trial(tiny, change, words):
    change(*tiny)
    for questions in QUESTIONS, QUESTIONS[::-1]:
        torch.manual_seed(0)
        with pytest.raises(ValueError, match=words):
            check(*tiny, questions)


def test_a_sampler_of_ones_own_may_be_in_half_precision_but_not_another_model(tiny):
    sampler = copy.deepcopy(tiny[0]).bfloat16()

    def generate(model, *arguments):
        return train_math.generate(sampler, *arguments)

    check(*tiny, generate=generate)
    sampler.lm_head.weight.data.mul_(20)
    with pytest.raises(ValueError, match=DIFFER):
        check(*tiny, generate=generate)


def test_questions_with_different_columns_and_a_frozen_model_are_refused_by_train(fresh):
    with pytest.raises(ValueError, match="row 2 has other columns than row 1"):
        train(fresh, [{"question": "1+1?", "answer": "2"}, {"question": "1+2?"}])
    fresh[0].requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        train(fresh)


@pytest.mark.parametrize("questions", [QUESTIONS, QUESTIONS[::-1], QUESTIONS[:1]])
def test_models_that_fit_pass_the_trial(fresh, questions):
    for value in None, 1.0:
        fresh[0].config.logits_scaling = value
        fresh[0].frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        check(*fresh, questions, settings(instruction=""))


def test_a_template_that_ends_turns_with_another_token_gives_a_note(fresh, capsys):
    model, tokenizer = fresh
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}# {% endfor %}"
    check(model, tokenizer)
    assert "note" not in capsys.readouterr().out, "# is no special token"
    tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})
    token = tokenizer.convert_tokens_to_ids("#")
    check(model, tokenizer)
    words = f"ends a turn with '#', which does not end a response. Add {token} to eos_token_id"
    assert words in capsys.readouterr().out
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, token]
    check(model, tokenizer)
    assert "note" not in capsys.readouterr().out


def test_an_error_in_a_part_of_the_user_keeps_its_traceback(fresh, own_loss):
    with pytest.raises(AttributeError, match="my_name"):
        check(*fresh, encode_prompts=lambda tokenizer, questions, cfg: questions.my_name)
    own_loss(lambda *arguments: arguments.my_loss)
    with pytest.raises(AttributeError, match="my_loss"):
        check(*fresh)


# ---- gspo.py: test_gspo.py tests which arguments are refused, and this one the messages ----------


def zeros(*shapes):
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize("message, function, arguments", [
    ("pass mask == 0", gspo.gspo_loss, [*example()[:3], -1e9 * ~example()[3]]),
    ("eps_low 0.9997 must be above 0", gspo.gspo_loss, [*example(), 0.9997, 1.0004]),
    ("eps_high 1.1 must be above 0. They are distances from 1, not bounds: instead of 0.9997",
     gspo.gspo_loss, [*example(), 0.2, 1.1]),
    ("denominator must be above 0", gspo.gspo_loss, zeros((0, 3), (0, 3), (0,), (0, 3))),
    ("not a list", gspo.group_advantages, [[1.0, 0.0], 2]),
    ("rewards (2, 2)", gspo.group_advantages, [*zeros((2, 2)), 2]),
    ("logits (2, 5, 9), tokens (2, 7)", gspo.token_log_probs, zeros((2, 5, 9), (2, 7))),
    ("advantages (3,), mask (2, 5)", gspo.gspo_loss, zeros((2, 5), (2, 5), (3,), (2, 5))),
])
def test_a_message_of_the_maths_says_what_was_found_and_what_to_do(message, function, arguments):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*arguments)
