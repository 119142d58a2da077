"""guides/is_it_gspo.py: verdicts on files, on public configurations, and on live configurations of
TRL and verl (slow)."""
import collections
import importlib
import json
import re
import sys

import pytest

from tests.conftest import TOP

sys.path.insert(0, str(TOP / "guides"))
is_it_gspo = importlib.import_module("is_it_gspo")

FACTS = is_it_gspo.FACTS
PUBLIC = FACTS["configurations"]
PAGE = (TOP / "guides/is_it_gspo.md").read_text(encoding="utf-8")
PAPER = "sequence", "responses", 4, 3e-4, 4e-4, "gspo"
NOTHING = ("unknown",) * 6
TRL = ('importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, '
       'gradient_accumulation_steps=2, steps_per_generation=8')
FLAGS = ("--importance_sampling_level sequence --loss_type grpo --epsilon 3e-4 --epsilon_high=4e-4 "
         "--gradient_accumulation_steps 2 --steps_per_generation 8 ")
SWIFT = "swift rlhf --rlhf_type grpo " + FLAGS
X = "actor_rollout_ref.actor."
VERL = (f"python -m verl.trainer.main_ppo {X}policy_loss.loss_mode=gspo "
        f"{X}loss_agg_mode=seq-mean-token-mean {X}clip_ratio_low=3e-4 {X}clip_ratio_high=4e-4 "
        f"data.train_batch_size=256 {X}ppo_mini_batch_size=64 ")
YAML = ("importance_sampling_level: sequence\nloss_type: grpo\nepsilon: 3e-4\n"
        "epsilon_high: 0.0004\nnum_iterations: 4\n")
OPENRLHF = ("python -m openrlhf.cli.train_ppo_ray --actor.policy_loss_type gspo "
            "--actor.eps_clip_low_high 3e-4 4e-4 --rollout.batch_size 128 --train.batch_size 1024 "
            "--rollout.n_samples_per_prompt 8 ")
LINES = SWIFT.replace(" --", " {}\n  --")
CELLS = [{"cell_type": "markdown", "source": "epsilon=1"}, {"cell_type": "code", "source": [
    "!pip install trl\n", "n = 8\n", f"GRPOConfig({TRL.replace('=8', '=n')})"]}]


def trl(old="", new="", more=""):
    return f"from trl import GRPOConfig\n{more}\nargs = GRPOConfig({TRL.replace(old, new)})\n"


def verl(old, new, more=""):
    return VERL.replace(old, new) + more


TABLE = {  # name of the file: its text, and the values or the verdict
    "defaults.py": ("from trl import GRPOConfig\nargs = GRPOConfig(beta=0.1)  # loss_type='grpo'",
                    ("token", "tokens", 1, 0.2, 0.2, "not_gspo")),
    "variable.py": (trl("3e-4", "LOW", "LOW = 3e-4"), PAPER),
    "arithmetic.py": (trl("=8", "=2 * n"), "unknown"),
    "more.py": (trl('loss_type="grpo"', "num_iterations=1, **more"), "unknown"),
    "other_epsilon.py": (trl("epsilon=3e-4, ", "", "def f(epsilon=1e-6): pass\nAdam(epsilon=1)"),
                         ("sequence", "responses", 4, 0.2, 4e-4, "wide_range")),
    "tuple.py": (trl("3e-4", "LOW", "LOW, HIGH = 3e-4, 0.2"), "unknown"),
    "function.py": (trl("3e-4", "LOW", "LOW = 3e-4\ndef f(LOW): pass"), "unknown"),
    "setattr.py": (trl() + "setattr(args, 'loss_type', 'dapo')", "unknown"),
    "names.py": (trl() + "for name in more:\n    setattr(args, name, 1)", NOTHING),
    "steps.py": (trl() + "args.steps_per_generation //= 4\nargs.epsilon, a = 0.2, 3", "unknown"),
    "text.py": (trl("3e-4", "LOW", "TEXT = '''\nLOW = 0.2\n'''\nLOW = 3e-4"), PAPER),
    "swift.py": (f"RLHFArguments(rlhf_type='grpo', {TRL})\na.loss_type = 'dapo'", "unknown"),
    "gmpo.py": (trl(more="from trl.experimental.gmpo import GMPOTrainer"), NOTHING),
    "replace.py": (trl() + "args = replace(args, loss_type='dapo')", NOTHING),
    "two_configurations.py": (trl() + "args = GRPOConfig(num_iterations=4)", NOTHING),
    "hash.py": (trl("epsilon=3e-4", "run_name='a #3', epsilon=3e-4"), PAPER),
    "parser.py": ("from trl import GRPOConfig\nTrlParser((GRPOConfig,)).parse_args()", NOTHING),
    # A trainer that may have another loss
    "own_loss.py": (trl(more="GRPOTrainer._compute_loss = f"), NOTHING),
    "own_trainer.py": (trl(more="class T(GRPOTrainer):\n    pass"), NOTHING),
    # A false engine
    "tunix.py": (f"from tunix import (\n  A, GRPOConfig)\nGRPOConfig({TRL})", NOTHING),
    "no_slime.yaml": ("advantage_estimator: gspo\neps_clip: 3e-4", NOTHING),
    "trl.yaml": (YAML, PAPER),
    "devices.py": (trl("steps_per_generation", "generation_batch_size"), "unknown"),
    "sft.py": (trl() + "a = SFTConfig(f(x), epsilon=1)\nSFTTrainer(args=dict(epsilon=2))", PAPER),
    # The same variable twice, and other variables and words
    "twice.sh": ("B=$((8 * N))\n" + verl("=256", "=${B}").replace("=64", "=${B}"), "never_clipped"),
    "variables.sh": ("B=${B:-256}\nM=64 # 8\n" + verl("=256", "=$B").replace("=64", '="${M}"'),
                     PAPER),
    "default.sh": ("[ $1 = a ] && H=0.28\n" + verl("=4e-4", "=${H:-4e-4}"), "unknown"),
    "computed.sh": (verl("=256", "=$((8 * N))"), "unknown"),
    "array.sh": (f"ARGS=({verl('=256', '=250')})\n$ARGS --config-name='ppo_trainer' $@", PAPER),
    "other_file.sh": (f"{VERL[:100]} $EXTRA_ARGS", "unknown"),
    "other_list.sh": (f'{VERL[:100]} "${{PARAMS[@]}}"', "unknown"),
    "other_words.sh": (f"{VERL[:100]} ${{COMMON}}", "unknown"),
    "two_commands.sh": (f"swift sft --gradient_accumulation_steps 8\n{SWIFT}", NOTHING),
    "switch.sh": (VERL + "algorithm.rollout_correction.bypass_mode=$BYPASS", "unknown"),
    "group.sh": (VERL + "actor@actor_rollout_ref.actor=mine", "unknown"),
    "other_name.sh": (f"{VERL[:100]} --config-name=ppo_mine", "unknown"),
    "hash.sh": (verl("data.", "trainer.experiment_name='a #4' data."), PAPER),
    "bypass.sh": (verl("=256", "=64", "algorithm.rollout_correction.bypass_mode=True"), "unknown"),
    "async.sh": (verl("main_ppo", "fully_async_main"), "unknown"),
    "swift.ps1": (LINES.replace("{}", "`"), PAPER),
    "swift.bat": (LINES.replace("{}", "^"), PAPER),
    "list.py": (f"run({SWIFT.split()})", PAPER),
    "openrlhf.sh": (OPENRLHF, ("sequence", "tokens", 1, 3e-4, 4e-4, "never_clipped")),
    "openrlhf_sampler.sh": (f"{OPENRLHF} --actor.loss_agg_mode seq-mean-token-mean "
                            "--algo.advantage.is_correction_level seq", "unknown"),
    "unsloth.py": ("from unsloth import F\na = GRPOConfig(importance_sampling_level='sequence', "
                   "steps_per_generation=4)", ("sequence", "tokens", 2, 0.2, 0.2, "other_mean")),
    "slime.sh": ("python train.py --advantage-estimator gspo --rollout-batch-size 32 "
                 "--num-steps-per-rollout 4 --custom-config-path a/b.yaml", "unknown"),
    "a.ipynb": (json.dumps({"cells": CELLS}), PAPER),
    "broken.yaml": ("a: [1", NOTHING),
}


@pytest.fixture
def check(tmp_path, capsys):
    def check(name, text, *more):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        status = is_it_gspo.main([str(path), *more])
        printed = capsys.readouterr().out
        is_it_gspo.main([str(path), "--json", *more])
        found = json.loads(capsys.readouterr().out)
        assert printed.startswith(found["verdict"] + ": ")
        assert status == {"gspo": 0, "unknown": 4}.get(found["verdict"], 3)
        return tuple(found.values()), printed
    return check


@pytest.mark.parametrize("name", TABLE)
def test_files(name, check):
    text, expected = TABLE[name]
    found, printed = check(name, text, *["--trl"] * (name == "trl.yaml"))
    assert ("add --trl" in printed) == (expected == NOTHING)
    assert (found[-1] if isinstance(expected, str) else found) == expected


def test_defaults_that_are_beside_a_file_are_followed(check):
    check("base.yaml", "actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}}}")
    text = "defaults: {}\nactor_rollout_ref: {{actor: {{clip_ratio_low: 0.1}}}}"
    assert check("a.yaml", text.format("[base, _self_]"))[0][3::2] == (0.1, "other_mean")
    assert check("a.yaml", text.format("[_self_, base]"))[0][-1] == "unknown"
    assert check("a.yaml", text.format("elsewhere"))[0][-1] == "unknown"


@pytest.mark.parametrize("text, note", [
    (SWIFT + "--beta 0.04", "beta is 0.04"),
    (VERL, "verl 0.9.1 follows loss_agg_mode. In 0.9.0"),
    (OPENRLHF + "--algo.advantage.is_correction_enable True", "those of the sampler"),
    (VERL.replace("=256", "=$B"), "Look up data.train_batch_size"),
    (VERL.replace("4e-4", "0.2"), "The clip range is 0.0003 and 0.2.")])
def test_notes(text, note, check):
    assert note in check("a.sh", text)[1] and note not in check("b.sh", SWIFT + "--beta 0")[1]


MARKS = {"TRL": ["--trl"], "Unsloth": ["import unsloth", "GRPOConfig("], "ms-swift": ["rlhf_type"]}


@pytest.mark.parametrize("one", PUBLIC, ids=lambda one: f"{one['repository']}/{one['path']}")
def test_the_check_agrees_with_the_verdict_by_hand(one):
    settings = {name: {is_it_gspo.as_text(value)} for name, value in one["settings"].items()}
    if not settings or "unread" in str(settings) or "defaults" in settings:
        settings[is_it_gspo.ELSEWHERE] = settings.pop("defaults", {"a parser"})
    for mark in MARKS.get(one["engine"].split()[0], []):
        settings[mark] = {"True"}
    assert is_it_gspo.engine_of(settings)["name"] == one["engine"] and len(one["commit"]) == 40
    assert is_it_gspo.judge(settings)[0]["verdict"] == one["verdict"]


def test_the_page_has_the_counts_and_the_engines():
    counts = collections.Counter(one["verdict"] for one in PUBLIC)
    rows = collections.Counter()
    for verdict, number in re.findall(r"(?m)^\| `(\w+)` \| (\d+) \|", PAGE):
        rows[verdict] += int(number)
    assert rows == counts and set(counts) == set(FACTS["verdicts"])
    assert len({(one["repository"], one["path"]) for one in PUBLIC}) == len(PUBLIC) == 58
    assert all(engine["name"].split()[0] in PAGE for engine in FACTS["engines"])


OF_TRL = [  # settings of TRL, and what explain returns
    ({}, ("token", "tokens", 1, 0.2, 0.2, "not_gspo")),
    ({"importance_sampling_level": "sequence"}, ("sequence", "tokens", 1, 0.2, 0.2,
                                                 "never_clipped")),
    ({"importance_sampling_level": "sequence", "loss_type": "dr_grpo", "num_iterations": 2},
     ("sequence", "other", 2, 0.2, 0.2, "other_mean")),
    ({"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "beta": 0.04,
      "epsilon_high": 4e-4, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, PAPER)]


@pytest.mark.slow
@pytest.mark.parametrize("settings, expected", OF_TRL)
def test_explain_reads_a_configuration_of_trl(settings, expected, tmp_path, capsys):
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[], **settings)
    assert tuple(is_it_gspo.explain(config).values()) == expected
    printed = capsys.readouterr().out
    assert ("note: beta is 0.04" in printed) == ("beta" in settings) and "vllm" not in printed
    is_on_page = [*settings] == ["importance_sampling_level"]
    assert not is_on_page or PAGE.split("```text\n")[1].split("```")[0] in printed


@pytest.mark.slow
@pytest.mark.parametrize("change, expected", [
    ([], "gspo"), (["data.train_batch_size=64"], "never_clipped"),
    ([f"{X}loss_agg_mode=token-mean"], "other_mean"), ([f"{X}clip_ratio_high=0.2"], "wide_range"),
    ([f"{X}clip_ratio_low=null", f"{X}clip_ratio=3e-4"], "gspo"),
    ([f"{X}policy_loss.loss_mode=vanilla", f"{X}clip_ratio_low=0.2"], "not_gspo"),
    (["algorithm.rollout_correction.bypass_mode=True", "data.train_batch_size=64"], "unknown")])
def test_explain_reads_a_configuration_of_verl(change, expected):
    verl = pytest.importorskip("verl", exc_type=ImportError)
    import hydra
    with hydra.initialize_config_dir(f"{verl.__path__[0]}/trainer/config", version_base=None):
        config = hydra.compose("ppo_trainer", VERL.split()[3:] + change)
    found = tuple(is_it_gspo.explain(config).values())
    assert found[-1] == expected and (found == PAPER) == (expected == "gspo")
