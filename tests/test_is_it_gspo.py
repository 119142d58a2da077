"""The check guides/is_it_gspo.py: its verdicts on small files, on the settings of public
configurations, and compared with a measurement of the losses of TRL and verl.

    python -m pytest -m "slow or not slow" tests/test_is_it_gspo.py    # also TRL and verl
"""
import collections
import importlib
import json
import re
import subprocess
import sys

import pytest
import torch

from gspo import grpo_loss, gspo_loss
from tests.conftest import TOP

sys.path.insert(0, str(TOP / "guides"))
is_it_gspo = importlib.import_module("is_it_gspo")

FACTS = json.loads((TOP / "guides/public_configurations.json").read_text(encoding="utf-8"))
PUBLIC = FACTS["configurations"]
NAMES = "level", "mean", "updates", "eps_low", "eps_high", "verdict"
PAPER = "sequence", "responses", 4, 3e-4, 4e-4, "gspo"
NOTHING = ("unknown",) * 6
ONLY_LEVEL = "sequence", *NOTHING[1:]
NO_LEVEL = "unknown", *PAPER[1:5], "unknown"
NO_LOW = *PAPER[:3], "unknown", 4e-4, "unknown"
NO_UPDATES = *PAPER[:2], "unknown", *PAPER[3:]
UNKNOWN_LEVEL = "unknown", "tokens", 1, 0.2, 0.2, "unknown"  # with TRL's defaults
TRL = ('importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, '
       'gradient_accumulation_steps=2, steps_per_generation=8')
AS_DICT = "{'importance_sampling_level': 'sequence', 'loss_type': 'grpo', 'epsilon': 3e-4}"
FLAGS = ("--importance_sampling_level sequence --loss_type grpo --epsilon 3e-4 --epsilon_high=4e-4 "
         "--gradient_accumulation_steps 2 --steps_per_generation 8")
VERL = ("python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean "
        "actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 "
        "data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 ")
TRL_YAML = ("importance_sampling_level: sequence\nloss_type: grpo\nepsilon: 3e-4\n"
            "epsilon_high: 0.0004\nnum_iterations: 4")
VERL_YAML = ("data: {train_batch_size: 1024}\nactor_rollout_ref:\n  actor:\n    "
             "policy_loss: {loss_mode: gspo}\n    loss_agg_mode: seq-mean-token-mean\n    "
             "clip_ratio_low: 3e-4\n    clip_ratio_high: 4e-4")
OPENRLHF = "python -m openrlhf.cli.train_ppo_ray "
SWIFT = "swift rlhf --rlhf_type grpo "


@pytest.fixture
def printed(capsys):
    """What the command prints."""
    def printed(*arguments):
        is_it_gspo.main([*map(str, arguments)])
        return capsys.readouterr().out
    return printed


@pytest.fixture
def check(tmp_path, printed):
    """The values that --json prints for a file with this text."""
    def check(name, text, *more):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        found = json.loads(printed("--json", path, *more))
        assert tuple(found) == NAMES
        return tuple(found.values())
    return check


PYTHON = {
    "an alias": (f"from trl import GRPOConfig as C\nargs = C({TRL})", PAPER),
    "Unsloth's name": (f"args = UnslothGRPOConfig({TRL})", PAPER),
    "defaults of a subclass": (
        "class M(GRPOConfig):\n"
        "    importance_sampling_level: str = field(default='sequence')\n"
        "    loss_type: str = 'grpo'\n    epsilon: float = 3e-4\n    epsilon_high: float = 4e-4\n"
        "    steps_per_generation: int = 4\nparser = HfArgumentParser((Script, M))", PAPER),
    "a dict that changes": (
        f"p = {AS_DICT}\np['epsilon_high'] = 4e-4\np.update({{'num_iterations': 2}})\n"
        "p.update(steps_per_generation=2)\nargs = GRPOConfig(output_dir='x', **p)", PAPER),
    "updates with other dicts": (
        f"p = dict(epsilon=1)\nq = {AS_DICT}\np.update(q)\nargs = GRPOConfig(**p)\n"
        "args.__dict__.update({'epsilon_high': 4e-4})\nvars(args).update(num_iterations=4)", PAPER),
    "an update under a condition": (
        f"p = dict({TRL})\nq = {{'epsilon': 1}}\nif x:\n    p.update(q)\nargs = GRPOConfig(**p)",
        NOTHING),
    "an update that cannot be read": (
        f"p = dict({TRL})\np.update(json.load(f))\nargs = GRPOConfig(**p)", NOTHING),
    "setattr in a loop": (
        f"args = GRPOConfig({TRL})\nfor k, v in x.items():\n    setattr(args, k, v)", NOTHING),
    "merged dicts": (
        f"p = {AS_DICT}\nq = p | {{'epsilon_high': 4e-4}}\n"
        "args = GRPOConfig(**{**q, 'steps_per_generation': 4})", PAPER),
    "a dict that another one may change": (
        f"def f(**more):\n    return GRPOConfig(**{{**{AS_DICT}, **more}})\nf(epsilon=1)", NOTHING),
    "dataclasses.replace": (
        f"a = GRPOConfig({TRL.replace('3e-4', '1')})\nb = dataclasses.replace(a, epsilon=3e-4)\n"
        "trainer = GRPOTrainer(args=b)", PAPER),
    "later assignments": (
        "args = GRPOConfig('x')\nargs.importance_sampling_level = 'sequence'\n"
        "args.loss_type = 'grpo'\nargs.epsilon = 3e-4\nsetattr(args, 'epsilon_high', 4e-4)\n"
        "args.num_iterations = 4", PAPER),
    "an attribute with two values": (
        f"a = GRPOConfig({TRL})\na.epsilon = 1\na.epsilon = 2", NO_LOW),
    "variables": (
        "LEVEL = 'sequence'\nlow, high = 3e-4, 4e-4\nGA = 2\ndef main():\n    n = 4\n"
        "    return GRPOConfig(importance_sampling_level=LEVEL, loss_type='grpo', epsilon=low,\n"
        "        epsilon_high=float(high), gradient_accumulation_steps=GA,\n"
        "        steps_per_generation=GA * n)", PAPER),
    "classes of constants": (
        "class CFG:\n    level = 'sequence'\n    eps: float = 3e-4\ncfg = CFG()\nD = {'n': 4}\n"
        "class T:\n    def __init__(self):\n        self.e = SimpleNamespace(high=4e-4)\n"
        "    def go(self):\n        return GRPOConfig(importance_sampling_level=CFG.level, "
        "loss_type='grpo', epsilon=cfg.eps, epsilon_high=self.e.high, "
        "steps_per_generation=D['n'])", PAPER),
    "asdict": (
        "class A:\n    importance_sampling_level: str = 'sequence'\n    loss_type: str = 'grpo'\n"
        "    epsilon: float = 3e-4\n    epsilon_high: float = 4e-4\n    num_iterations: int = 4\n"
        "a = A()\nargs = GRPOConfig(**asdict(a))", PAPER),
    "a class with positions": (
        f"class A:\n    e: float = 3e-4\na = A(1)\n"
        f"args = GRPOConfig({TRL.replace('epsilon=3e-4', 'epsilon=a.e')})", NO_LOW),
    "another config": (
        f"s = SFTConfig(gradient_accumulation_steps=16, loss_type='nll')\nargs = GRPOConfig({TRL})",
        PAPER),
    "one of two": (
        f"if gspo:\n    args = GRPOConfig({TRL})\nelse:\n    args = GRPOConfig(beta=1)", PAPER),
    "two that differ": (
        f"a = GRPOConfig({TRL})\nb = GRPOConfig({TRL.replace('4e-4', '4e-3')})",
        (*PAPER[:4], "unknown", "gspo")),
    "a known condition": (
        f"GSPO = True\nNAME = 'a'\nargs = GRPOConfig('x')\nif GSPO:\n    p = dict({TRL})\nif NAME "
        "== 'b':\n    p['loss_type'] = 'dapo'\nargs = GRPOConfig(**p)", PAPER),
    "a known choice": (
        "NAME = 'gspo'\n"
        "p = {'importance_sampling_level': 'sequence' if NAME == 'gspo' else 'token'}\n"
        f"args = GRPOConfig(**dict({TRL}), **p)", PAPER),
    "an unknown choice": (
        "a = GRPOConfig(importance_sampling_level='sequence' if x else 'token')", UNKNOWN_LEVEL),
    "any of several dicts": (
        f"C = {{'gspo': dict({TRL}), 'grpo': {{}}}}\nargs = GRPOConfig(**C[name])", NOTHING),
    "swift": ("rlhf_main(RLHFArguments(rlhf_type='grpo', importance_sampling_level='sequence', "
              "epsilon=3e-4, epsilon_high=4e-4, steps_per_generation=4))", PAPER),
    "a dict of verl": (
        "cfg = {'actor_rollout_ref': {'actor': {'policy_loss': {'loss_mode': 'gspo'}, "
        "'loss_agg_mode': 'seq-mean-token-mean', 'clip_ratio_low': 3e-4, 'clip_ratio_high': 4e-4, "
        "'ppo_mini_batch_size': 64}}, 'data': {'train_batch_size': 256}}", PAPER),
    "a command in texts": (
        "cmd = ['-m', 'verl', 'actor_rollout_ref.actor.policy_loss.loss_mode=gspo', "
        "f'actor_rollout_ref.actor.clip_ratio_low={low}']",
        ("sequence", "tokens", 4, "unknown", 0.2, "other_mean")),
    "flags in a list": (f"run(['trl', 'grpo', {str(FLAGS.split())[1:-1]}])", PAPER),
    "a command with a condition": (
        f"c = {VERL.split()}\nif x:\n    if y:\n"
        f"        c += ['{VERL.split()[5]}', '--n', '1']\nrun(c)", NO_LOW),
    "a flag with a choice": (
        "run(['trl', '--loss_type', 'grpo', '--importance_sampling_level', 'sequence' if x else "
        "'token', '--epsilon', '3e-4', '--epsilon_high', '4e-4', '--num_iterations', '4'])",
        NO_LEVEL),
    "a dict of a dict": (f"p = dict({TRL})\na = GRPOConfig(**dict(p, output_dir='x'))", PAPER),
    "a function that is called": (
        f"def f(a):\n    a.epsilon = 3e-4\na = GRPOConfig({TRL.replace('3e-4', '1')})\nf(a)",
        PAPER),
    "comments, and the defaults": (
        "# importance_sampling_level='sequence'\nargs = GRPOConfig(\n"
        "    # importance_sampling_level='sequence',\n    epsilon=3e-4)",
        ("token", "tokens", 1, 3e-4, 3e-4, "not_gspo")),
    "no epsilon_high": (
        "args = GRPOConfig(importance_sampling_level='sequence', loss_type='grpo', epsilon=3e-4, "
        "epsilon_high=None, gradient_accumulation_steps=4, steps_per_generation=1)",
        ("sequence", "responses", 0.25, 3e-4, 3e-4, "never_clipped")),
    "accumulation that is not known": (
        "args = GRPOConfig(importance_sampling_level='sequence', gradient_accumulation_steps=a.n)",
        ("sequence", "tokens", 1, 0.2, 0.2, "never_clipped")),
    "Unsloth's defaults": (
        "from unsloth import F\na = GRPOConfig(importance_sampling_level='sequence', "
        "steps_per_generation=4)", ("sequence", "tokens", 2, 0.2, 0.2, "other_mean")),
    "argparse": (
        "p.add_argument('--importance_sampling_level', default='sequence')\na = p.parse_args()\n"
        "args = GRPOConfig(importance_sampling_level=a.importance_sampling_level)", UNKNOWN_LEVEL),
    "a condition": ("args = GRPOConfig()\nif a.gspo:\n    args.importance_sampling_level = "
                    "'sequence'", UNKNOWN_LEVEL),
    "two values, an import, and a loop": (
        "e = 1\ne = 2\nfrom s import H\nfor n in 4, 8:\n    a = GRPOConfig("
        "importance_sampling_level='sequence', epsilon=e, epsilon_high=H, num_iterations=n)",
        ("sequence", "tokens", "unknown", "unknown", "unknown", "other_mean")),
    "a name in terms of itself": (
        f"n = 2\nn += 1\nif n:\n    n = n\na = GRPOConfig({TRL})\nif a.x:\n    a.epsilon = 1",
        NO_LOW),
    "a batch size of all devices": (
        f"args = GRPOConfig({TRL.replace('steps_per_generation', 'generation_batch_size')})",
        NO_UPDATES),
    "more from elsewhere": (
        "a = GRPOConfig(importance_sampling_level='sequence', **json.load(f))", ONLY_LEVEL),
    "a config class of another file": (
        "from my import MyGRPOConfig\nargs = MyGRPOConfig(importance_sampling_level='sequence')",
        ONLY_LEVEL),
    "a parser and an assignment": (
        "a, = TrlParser((GRPOConfig,)).parse_args()\na.importance_sampling_level = 'sequence'",
        ONLY_LEVEL),
    "a parser": ("parser = TrlParser((GRPOConfig,))\na, = parser.parse_args_and_config()", NOTHING),
    "nothing": ("print('importance_sampling_level')", NOTHING),
    "a configuration without a name": (
        f"epsilon = 1\nloss_type = 'dapo'\nGRPOTrainer(model, f, GRPOConfig({TRL}))", PAPER),
    "a configuration that a function returns": (
        f"epsilon = 1\ndef make():\n    return GRPOConfig({TRL})\n"
        "trainer = GRPOTrainer(model, args=make())", PAPER),
    "one of two is passed": (
        f"a = GRPOConfig({TRL})\nb = GRPOConfig({TRL.replace('3e-4', '1')})\n"
        "trainer = GRPOTrainer(args=a)\nSFTTrainer(args=SFTConfig())", PAPER),
    "the configuration in a parameter": (
        f"def run(config):\n    return GRPOTrainer(args=config)\nrun(GRPOConfig({TRL}))", PAPER),
    "a trainer with another log": (
        "class T(GRPOTrainer):\n    def log(self, logs):\n        super().log(logs)\n"
        f"a = GRPOConfig({TRL})\nT(args=a)", PAPER),
    "a dict that is merged in place": (
        f"p = {AS_DICT}\np |= {{'epsilon_high': 4e-4, 'num_iterations': 4}}\n"
        "a = GRPOConfig(**p)", PAPER),
    "harmless calls": (
        f"a = GRPOConfig({TRL})\nwandb.init(config=a)\nnames = signature(GRPOConfig).parameters\n"
        "t = trl.GRPOTrainer(args=a, callbacks=[LogCallback(a)])\nn = len(vars(a))\n"
        "x = a.to_dict()\ndef f(t):\n    t.train()\ny = f(t)\nevaluate(t.model)", PAPER),
    "names in terms of names": (
        "n0 = 8\n" + "".join(f"n{i + 1} = n{i} + n{i} - n{i}\n" for i in range(40))
        + f"args = GRPOConfig({TRL.replace('=8', '=n40')})", PAPER),
    "the settings of DeepSpeed": (
        f"args = GRPOConfig({TRL.replace('gradient_accumulation_steps=2, ', '')}, "
        "deepspeed={'gradient_accumulation_steps': 8})", (*PAPER[:2], 8, *PAPER[3:])),
    "objects beside the configuration": (
        f"a = GRPOConfig({TRL})\ns = SFTConfig()\ns.epsilon = 1\nlogs = {{}}\n"
        "logs['epsilon'] = 1\nclass Agent:\n    def __init__(self):\n        self.epsilon = 1\n"
        "trainer = GRPOTrainer(args=a)", PAPER),
    "bases of a class, of which the first wins": (
        "class A:\n    epsilon: float = 3e-4\nclass B(GRPOConfig):\n    epsilon: float = 1\n"
        f"class C(A, B):\n    pass\na = C({TRL.replace('epsilon=3e-4, ', '')})", PAPER),
    "a usage below an import": (
        f"import trl\n\'\'\'\npython a.py {FLAGS}\n\'\'\'\nTrlParser((GRPOConfig,))", NOTHING),
}
NAMED = f"a = GRPOConfig({TRL})\n"
PASSED = NAMED + "trainer = GRPOTrainer(args=a)\n"
IN_DICT = f"p = dict({TRL})\nCHANGE\na = GRPOConfig(**p)"
SUBCLASS = f"class C(GRPOConfig):\n    def f(self, **k):\n        CHANGE\na = C({TRL})"
METHOD = "class B(GRPOTrainer):\n    def {}(self, *a):\n        return 0\n" + NAMED
COMPOSED = f"c = compose('ppo_trainer', overrides={VERL.split()[3:]})\n"
TOUCHED = {  # changes of a configuration or a trainer that are not followed
    "a loss of its own": METHOD.format("_compute_loss") + "B(args=a)",
    "the loss of its base": METHOD.format("compute_loss") + "class T(B):\n    pass\nT(args=a)",
    "a trainer of another file": f"from mine import GRPOTrainer\n{PASSED}",
    "one of two trainers": "from mine import MyTrainer as M\n"
                           f"{NAMED}cls = M if x else GRPOTrainer\ncls(args=a)",
    "a loss that is replaced": f"{PASSED}GRPOTrainer._compute_loss = loss",
    "a loss that setattr replaces": f"setattr(GRPOTrainer, 'compute_loss', loss)\n{PASSED}",
    "a class that changes itself": SUBCLASS.replace("CHANGE", "self.epsilon = 0.2"),
    "super().__init__": SUBCLASS.replace("CHANGE", "super().__init__(**{**k, 'epsilon': 1})"),
    "a property": SUBCLASS.replace("f(", "epsilon("),
    "a parameter": f"def f(c):\n    c.epsilon = 0.2\n{NAMED}f(a)",
    "setattr on a parameter": f"def f(cfg, d):\n    for k in d: setattr(cfg, k, 1)\n{NAMED}",
    "another name": f"{NAMED}b = a\nb.epsilon = 0.2\nGRPOTrainer(args=a)",
    "another function": f"{NAMED}GRPOTrainer(args=load('x'))",
    "a changed name": f"{NAMED}a = replace(a, epsilon=0.2)\nGRPOTrainer(args=a)",
    "an imported function": f"from mine import tweak\n{NAMED}tweak(config=a)",
    "a function that changes the trainer": f"from mine import patch\npatch(GRPOTrainer)\n{PASSED}",
    "a method of the configuration": f"{NAMED}a.reset(epsilon=1)",
    "a loss in a class": f"class T(GRPOTrainer):\n    _compute_loss = f\n{NAMED}T(args=a)",
    "a loss outside a class": f"@patch\ndef _compute_loss(self):\n    return 0\n{PASSED}",
    "a second trainer": f"{PASSED}GRPOTrainer(args=load('x'))",
    "a removed item": IN_DICT.replace("CHANGE", "p.pop('epsilon')"),
    "del": IN_DICT.replace("CHANGE", "del p['epsilon']"),
    "*=": f"{NAMED}a.epsilon *= 700",
    "an attribute of the trainer": f"{PASSED}trainer.epsilon_low = 0.2",
    "its arguments": f"{PASSED}trainer.args.epsilon = 0.2",
    "other arguments": f"{PASSED}trainer.args = b",
    "an imported function that is assigned": f"from mine import tweak\n{NAMED}x = tweak(a)",
    "a trainer that is replaced": f"from mine import f\n{PASSED}trainer = f(trainer)",
    "a trainer that is wrapped": f"def go():\n    {NAMED}    return f(GRPOTrainer(args=a))",
    "a class that is wrapped": f"from mine import f\n{NAMED}t = f(GRPOTrainer)(model=m, args=a)",
    "a configuration that is wrapped": f"from mine import f\na = f(GRPOConfig({TRL}))\nrun()",
    "a function of a module": f"import mine\n{PASSED}mine.patch([trainer])",
    "a trainer of a module": f"import mine\n{NAMED}mine.GRPOTrainer(args=a)",
    "a decorator": f"@patch\nclass T(GRPOTrainer):\n    pass\n{NAMED}T(args=a)",
    "another base": f"class T(Mixin, GRPOTrainer):\n    pass\n{NAMED}T(args=a)",
    "names that depend on each other": "".join(
        f"x{i} = {' + '.join(f'x{j}' for j in range(12))}\n" for i in range(12))
        + NAMED.replace("3e-4", "x0"),
    "match": f"{NAMED}match x:\n    case 1:\n        a.epsilon = 0.2",
    "try": f"{NAMED}try:\n    import x\n    a.epsilon = 0.2\nexcept ImportError:\n    pass",
    "a loop": f"{NAMED}for x in y:\n    a.epsilon = 0.2",
    "or": f"{NAMED}x or setattr(a, 'epsilon', 0.2)",
    "a function under a condition": f"def f(a):\n    a.epsilon = 1\n{NAMED}if x:\n    f(a)",
    "an import of all names": f"from mine import *\n{PASSED}",
    "an unknown item": IN_DICT.replace("CHANGE", "p[k] = 0.2"),
    "an unknown item of __dict__": f"{PASSED}trainer.__dict__[k] = 0.2",
    "a nested dict": "d = OmegaConf.create({'actor_rollout_ref': {'actor': {'policy_loss': "
                     "{'loss_mode': 'gspo'}}}})\nd['actor_rollout_ref']['actor']['policy_loss']"
                     "['loss_mode'] = 'vanilla'",
    "a dict with an unknown item": f"q = {{}}\nq[k] = 1\na = GRPOConfig(**(dict({TRL}) | q))",
    "defaults of a class": "class C(GRPOConfig):\n    def __init__(self, **k):\n        d = dict("
                           f"{TRL})\n        d.update(k)\n        super().__init__(**d)\na = C()",
    "a part of a dict": f"d = load('a.json') | {AS_DICT}",
    "two parts": f"run({{'loss_type': 'dapo', 'num_iterations': 4}}, {AS_DICT})",
    "a later item": f"d = {AS_DICT}\nd['num_iterations'] = 4\nd['epsilon'] = 1",
    "items of a section": (
        f"d = {{'grpo': {AS_DICT}}}\nd['grpo'].update(num_iterations=4, epsilon=1)"),
    "a dict for another trainer": f"from mine import MyTrainer\nMyTrainer(**{AS_DICT})",
    "a changed text": f"{COMPOSED}c.actor_rollout_ref.actor.loss_agg_mode = 'token-mean'",
    "OmegaConf.update": (
        f"{COMPOSED}OmegaConf.update(c, 'actor_rollout_ref.actor.loss_agg_mode', 'token-mean')"),
    "keywords for a class with defaults": "class C(GRPOConfig):\n    epsilon: float = 3e-4\n"
                                          f"a = C({TRL.replace('epsilon=3e-4', '**load()')})",
    "keywords for a dict with defaults": f"a = GRPOConfig(**dict(dict({TRL}), **load()))",
    "another name in the same assignment": f"b = {NAMED}b.epsilon = 0.2\nGRPOTrainer(args=a)",
    "a class that changes its defaults": (
        "class S:\n    low: float = 3e-4\n    def __post_init__(self):\n        self.low = 0.2\n"
        f"s = S()\n{NAMED.replace('=3e-4', '=s.low')}"),
    "a callback": "class C(TrainerCallback):\n    def on_step_begin(self, args, s):\n"
                  f"        args.epsilon = 0.2\n{PASSED}",
}
UNTIL_HIGH = f"{SWIFT}{FLAGS.replace(' --epsilon_high=4e-4', '')} "
NO_HIGH = *PAPER[:4], 3e-4, "gspo"
NO_LOSS = FLAGS.replace("--loss_type grpo ", "")
NO_MEAN = "sequence", "unknown", *PAPER[2:5], "unknown"
DAPO = "sequence", "tokens", *PAPER[2:5], "other_mean"  # the default of TRL
EXTRA = "sequence", "unknown", "unknown", *PAPER[3:5], "unknown"
ROWS = FLAGS.replace(" --", "\n  --")
SHELL = {
    "added keys and quotes": (
        VERL.replace("actor_rollout_ref.actor.policy", "+actor_rollout_ref.actor.policy").replace(
            "=gspo", "='gspo'"), PAPER),
    "variables": ("B=${BATCH:-256}\nexport M=$((B / 4)) # a quarter\nLOSS=gspo\n" + VERL.replace(
        "=256", "=$B").replace("=64", "=${M}").replace("=gspo", '="${LOSS}"'), PAPER),
    "an array and a text": (
        "ALGO=(\n  # actor_rollout_ref.actor.loss_agg_mode=token-mean\n" + VERL.split("ppo ")[1]
        + '\n)\nMORE="actor_rollout_ref.actor.ppo_epochs=2 \\\n  trainer.nnodes=1"\n'
        'python -m verl.trainer.main_ppo "${ALGO[@]}" $MORE "$@"',
        ("sequence", "responses", 8, 3e-4, 4e-4, "gspo")),
    "within another command": (f'srun bash -c "{VERL}"', PAPER),
    "the critic's mini-batch": (VERL + "critic.ppo_mini_batch_size=8", PAPER),
    "a mini-batch that is left over": (VERL.replace("=256", "=250"), PAPER),
    "clip_ratio alone, which has no effect": (
        VERL.replace("clip_ratio_low", "clip_ratio").replace("clip_ratio_high=4e-4", ""),
        ("sequence", "responses", 4, 0.2, 0.2, "wide_range")),
    "a condition": ("if [ $1 = a ]; then\n L=gspo\nelse\n L=vanilla\nfi\n" + VERL.replace(
        "=gspo", "=$L"), NO_LEVEL),
    "an argument": (VERL.replace("low=3e-4", "low=$1"), NO_LOW),
    "a loop": ("for L in gspo vanilla; do\n" + VERL.replace("=gspo", "=$L") + "\ndone", NO_LEVEL),
    "a comment": ("python -m verl \\\n # actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\\n "
                  "actor_rollout_ref.actor.ppo_mini_batch_size=64 data.train_batch_size=256",
                  NOTHING),
    "a comment ends the command": (UNTIL_HIGH + "# narrow \\\n --epsilon_high 4e-4", NO_HIGH),
    "spaces end the command": (UNTIL_HIGH + "\\ \n --epsilon_high 4e-4", NO_HIGH),
    "no comment": (UNTIL_HIGH + "--note 'a # b' \\\n --epsilon_high 4e-4", PAPER),
    "what the command does not use": (
        "OLD=(\n --epsilon 0.2  # wide (GRPO)\n)\nMORE='--beta 1 --loss_type bnpo'\n"
        f"ARGS=(\n  # --epsilon 1\n  {FLAGS}\n)\nARGS+=(--beta 0)\necho ${{OLD[@]}} $MORE\n"
        'RUN="swift rlhf --rlhf_type grpo ${ARGS[*]}"\neval $RUN', PAPER),
    "a configuration file": (
        "python a.py --config a.yaml --importance_sampling_level sequence", ONLY_LEVEL),
    "slime": ("A=(\n   --advantage-estimator gspo\n   --eps-clip 3e-4\n   --eps-clip-high 4e-4\n)\n"
              "R=(\n   --rollout-batch-size 32\n   --n-samples-per-prompt 8\n"
              "   --global-batch-size $((32 * 2))\n)\npython3 train.py ${A[@]} ${R[@]}", PAPER),
    "swift with Megatron": (
        "megatron rlhf --rlhf_type grpo --micro_batch_size 1 --importance_sampling_level sequence "
        "--epsilon 3e-4 --epsilon_high 4e-4 --steps_per_generation 4", PAPER),
    "OpenRLHF": (OPENRLHF + "--actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 "
                 "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256 "
                 "--eval.n_samples_per_prompt 2", PAPER),
    "older OpenRLHF": (OPENRLHF + "--policy_loss_type gspo --eps_clip 0.1 --train_batch_size 256 "
                       "--rollout_batch_size 128 --n_samples_per_prompt 8 "
                       "--micro_train_batch_size 2", (*PAPER[:3], 0.1, 0.1, "wide_range")),
    "slime, by tokens": (
        "A=(\n   --advantage-estimator gspo\n   --calculate-per-token-loss\n)\npython3 train.py "
        "${A[@]} --num-steps-per-rollout 4", ("sequence", "tokens", 4, 0.2, 0.2, "other_mean")),
    "another command": ("swift sft --gradient_accumulation_steps 16\n" + SWIFT + FLAGS, PAPER),
    "a launcher": (f"accelerate launch --gradient_accumulation_steps 8 a.py {FLAGS}", PAPER),
    "a function": (f"run() {{\n python a.py {FLAGS} $@\n}}\nrun --epsilon 0.1",
                   (*PAPER[:3], "unknown", 0.0004, "unknown")),
    "a text that is read": (
        "read -r -d '' A <<EOF\n" + VERL + "\nEOF\npython3 -m verl.trainer.main_ppo $A", PAPER),
    "a default of itself, and texts that are joined": (
        'E=${E:-3e-4}\n: "${H:=4e-4}"\nM="--epsilon $E --epsilon_high ${H}"\n'
        'M="$M --loss_type grpo"\n'
        f"{SWIFT} --importance_sampling_level sequence --num_iterations 4 $M", PAPER),
    "YAML in the script": (
        f"N=4\ncat > c.yaml <<EOF\n{TRL_YAML.replace(': 4', ': $N')}\nEOF\n"
        "accelerate launch a.py --config c.yaml", PAPER),
    "other YAML in the script": (
        f"cat <<'EOF' | tee conf/d.yaml\n{TRL_YAML}\nEOF\n{SWIFT} --config=conf/c.yaml "
        "--importance_sampling_level sequence", ONLY_LEVEL),
    "defaults and commands with spaces": (
        'N=${N:-$((8 * 8))}\nD="$(cd "$(dirname "$0")" && pwd)"\nM=${M:-"$(f "${N}")_x"}\n'
        'echo $D $M\n' + VERL.replace("=64", "=$N") + "a.b=$D\n", PAPER),
    "a file of Hydra": (
        "python -m verl.trainer.main_ppo --config-path=$D --config-name=my_gspo "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64", NOTHING),
    "a file of Hydra, in short": (
        "python -m verl.trainer.main_ppo -cn my_gspo "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64", NOTHING),
    "a group of Hydra": (
        VERL.replace("actor_rollout_ref.actor.clip_ratio_low=3e-4", "+exp=a"),
        (*PAPER[:2], "unknown", "unknown", 4e-4, "unknown")),
    "a dict of Hydra": (
        VERL.replace(".loss_mode=gspo", "='{loss_mode: gspo}' data.x='{a: b}'"),
        ("unknown", "responses", "unknown", 3e-4, 4e-4, "unknown")),
    "a condition before a default": (
        "[ $1 = a ] && H=0.28\n" + VERL.replace("=4e-4", "=${H:-4e-4}"),
        (*PAPER[:4], "unknown", "unknown")),
    "a file of settings, in short": (
        "python a.py --cfg a.yaml --importance_sampling_level sequence", ONLY_LEVEL),
    "the engine's own file of Hydra": (VERL + "--config-name='ppo_trainer'", PAPER),
    "another program": ("python -m verl.trainer.main worker.actor.loss_type=gspo_token "
                        "worker.actor.loss_avg_mode=seq",
                        ("unknown", "unknown", 1, 0.2, 0.2, "unknown")),
    "a shorter text": (f"A='{FLAGS}'\nA='{NO_LOSS}'\npython a.py $A", DAPO),
    "a shorter list": (f'A=({FLAGS})\nA=({NO_LOSS})\npython a.py "${{A[@]}}"', DAPO),
    "a list that grows": (
        f"A=({NO_LOSS})\nA+=(--loss_type \\\n grpo)\npython a.py ${{A[*]}}", PAPER),
    "a later text": (f'A="{FLAGS}"; python a.py $A\nA="{NO_LOSS}"\npython b.py $A', NO_MEAN),
    "a later value": (f"E=3e-4\nE=0.1\nE=3e-4\n{SWIFT}{FLAGS.replace('3e-4', '$E')}", PAPER),
    "a text under a condition": (
        f"A='{NO_LOSS}'\nif [ $1 = a ]; then\n  A='{FLAGS}'\nfi\npython a.py $A", NOTHING),
    "a text that grows under a condition": (
        f"A='{NO_LOSS}'\n[ $1 = a ] && A+=' --loss_type grpo'\npython a.py $A", NO_MEAN),
    "a text that a function uses": (
        f"f() {{\n  python a.py $A\n}}\nA='{FLAGS}'\nf\nA='{NO_LOSS}'", NOTHING),
    "a list of another file": (
        f'source common.sh\npython a.py --bf16 "${{ARGS[@]}}" {NO_LOSS}', EXTRA),
    "flags of another file": (f"python a.py {NO_LOSS} $EXTRA_FLAGS", EXTRA),
    "flags that a command prints": (f"python a.py {NO_LOSS} $(cat flags.txt)", EXTRA),
    "no flags of another file": (
        f'python $TOP/a.py --out $OUT --name "a $B c" {NO_LOSS} ${{MORE:-}} "$@" > $LOG', DAPO),
    "the model of another file": (f"source m.sh\npython a.py ${{MODEL_ARGS[@]}} {FLAGS}", PAPER),
    "a text of cat": (f"A=$(cat <<EOF\n  {ROWS}\nEOF\n)\npython a.py $A --x 'y'", PAPER),
    "a text of cat with quotes": (f'A="$(cat <<\'E\'\n{ROWS}\nE\n)"\npython a.py $A', PAPER),
    "a text that is read, in rows": (
        f"read -d '' A <<'EOF' || true\n{ROWS}\nEOF\n{SWIFT} $A", PAPER),
    "a later evaluation": (
        f"A=({FLAGS})\npython a.py ${{A[@]}} && python b.py --epsilon 0.1\nlm_eval --epsilon 1",
        PAPER),
    "another program of verl": (
        f"{VERL}\npython -m verl.trainer.eval actor_rollout_ref.actor.clip_ratio_low=1", PAPER),
    "two commands": (
        f"python a.py {NO_LOSS}\npython a.py --importance_sampling_level sequence --loss_type grpo",
        ONLY_LEVEL),
    "nothing": ("echo GSPO", NOTHING),
}
YAML = {
    "TRL": (TRL_YAML, PAPER),
    "AReaL": ("actor:\n  importance_sampling_level: sequence\n  eps_clip: 0.0003\n  "
              "eps_clip_higher: 4e-4\ncritic:\n  ppo_n_minibatches: 1\n  eps_clip: 0.2",
              ("sequence", "tokens", 4, 3e-4, 4e-4, "other_mean")),
    "NeMo-RL": ("loss_fn:\n  sequence_level_importance_ratios: true\n  token_level_loss: false\n  "
                "ratio_clip_min: 3e-4\n  ratio_clip_max: 4e-4\ngrpo:\n  num_prompts_per_step: 64\n"
                "  num_generations_per_prompt: 8\npolicy:\n  train_global_batch_size: 128", PAPER),
    "a product": ("loss_fn: {sequence_level_importance_ratios: true, token_level_loss: false, "
                  "ratio_clip_min: 3e-4, ratio_clip_max: 4e-4}\ngrpo: {num_prompts_per_step: 64, "
                  "num_generations_per_prompt: 8}\npolicy:\n  train_global_batch_size: "
                  "${div:${mul:${grpo.num_prompts_per_step}, "
                  "${grpo.num_generations_per_prompt}}, 4}", PAPER),
    "an unknown base": ("defaults: ../base.yaml\nloss_fn:\n  sequence_level_importance_ratios: on",
                        ONLY_LEVEL),
    "a base of an engine": ("defaults: [ppo_trainer, _self_]\n" + VERL_YAML, PAPER),
    "an unknown base before it": ("defaults: [my_base, _self_]\n" + VERL_YAML, NO_UPDATES),
    "an unknown base after it": ("defaults: [_self_, my_base]\n" + VERL_YAML, NOTHING),
    "a group": ("defaults:\n- _self_\n- actor@a.actor: dp_actor\n" + VERL_YAML, NOTHING),
    "an unknown value": ("importance_sampling_level: ${oc.env:LEVEL}", UNKNOWN_LEVEL),
    "a command": (f"resources:\n  cpus: 4\nrun: |\n  {VERL}\n", PAPER),
    "merged sections": ("a: &a\n  epsilon: 3.0e-4\ntrl:\n  <<: *a\n  epsilon_high: 4.0e-4\n  "
                        "importance_sampling_level: sequence\n  loss_type: grpo\n  "
                        "num_iterations: 4", PAPER),
}
AFTER = TRL_YAML.replace("num_iterations: 4", "steps_per_generation: 8").replace("\n", "\n  ")
YAML |= {
    "overrides of Hydra": ("\n".join(f"- {word}" for word in VERL.split()[3:]), PAPER),
    "the section of another stage": (
        f"sft:\n  num_iterations: 9\ngrpo:\n  {AFTER}\n  num_iterations: 1\n"
        "  gradient_accumulation_steps: 2\n  deepspeed: {gradient_accumulation_steps: 1}", PAPER),
    "an outer section": (
        f"gradient_accumulation_steps: 2\nepsilon: 1\ngrpo:\n  {AFTER}", PAPER),
    "two sections, which may be one configuration": (
        f"training:\n  gradient_accumulation_steps: 8\ngrpo:\n  {AFTER}", NO_UPDATES),
    "a section for each algorithm": (
        "a:\n  importance_sampling_level: token\nb:\n  " + TRL_YAML.replace("\n", "\n  "), PAPER),
}
MALFORMED = {"a.py": "def f(:", "a.yaml": "a: [1", "b.yaml": "- 1\n- 2", "a.ipynb": "{}",
             "b.ipynb": "no notebook", "c.ipynb": '{"cells": [{"cell_type": "code"}]}',
             "a.toml": "a = b"}


def notebook(*cells):
    kinds = [{"cell_type": "code", "source": cell} for cell in cells]
    note = {"cell_type": "markdown", "source": [f"importance_sampling_level='token' {SWIFT}"]}
    return json.dumps({"cells": [note, *kinds]})


CONFIG = f"args = GRPOConfig({TRL.replace('=8', '=n')})"
LINES = FLAGS.replace(" --", " \\\n  --")
OTHERS = {
    "magics.ipynb": notebook(["!pip install trl \\\n", "  torch\n", "%cd x\n", "n = 8\n"],
                             "%%capture\nx = !ls\n", CONFIG),
    "a_command.ipynb": notebook("a = 1", f"!{SWIFT}{FLAGS}"),
    "bash.ipynb": notebook(f"%%bash\n{SWIFT}{LINES}"),
    "languages.ipynb": notebook("%%bash\nls -la", "%%html\n<br>", "if 1:\n  !ls\nn = 8", CONFIG),
    "a.toml": "[trainer]\n" + re.sub(": ([a-z]*)(.*)", r" = '\1'\2", TRL_YAML).replace("''", ""),
}
FILES = [(name, text, PAPER) for name, text in OTHERS.items()]
FILES += [(f"empty.{kind}", "", NOTHING) for kind in ("py", "sh", "yaml")]
for kind, cases in {"py": PYTHON, "sh": SHELL, "yaml": YAML}.items():
    FILES += [(f"{name}.{kind}", *case) for name, case in cases.items()]


@pytest.mark.parametrize("name, text, expected", FILES, ids=[name for name, *_ in FILES])
def test_files(name, text, expected, check):
    pytest.importorskip("yaml")
    assert check(name, text) == expected


@pytest.mark.parametrize("text", TOUCHED.values(), ids=TOUCHED)
def test_a_change_that_is_not_followed_makes_the_verdict_unknown(text, check):
    assert check("a.py", text)[-1] == "unknown"


def test_defaults_that_are_beside_a_file_are_followed(check):
    """The variable gets its value at last, when the file has changed what it names."""
    pytest.importorskip("yaml")
    check("base.yaml", "defaults: [ppo_trainer]\n" + VERL_YAML
          + "\n    ppo_mini_batch_size: ${data.train_batch_size}\n    clip_ratio_high: 1")
    text = "actor_rollout_ref: {actor: {clip_ratio_high: 4e-4}}\ndata: {train_batch_size: 64}"
    for defaults in "base", "base.yaml", "[base, _self_]":
        assert check("a.yaml", f"defaults: {defaults}\n{text}") == (
            *PAPER[:2], 1, 3e-4, 4e-4, "never_clipped")
    assert check("a.yaml", f"defaults: [_self_, base]\n{text}")[4] == 1


def test_overrides_and_flags_without_a_file(check, printed):
    text = "accelerate launch a.py " + FLAGS.replace("--epsilon_high=4e-4", "")
    assert check("a.sh", text, "epsilon_high=0.0004") == PAPER
    for words in FLAGS.split(), VERL.split()[3:]:
        assert tuple(json.loads(printed("--json", *words)).values()) == PAPER


@pytest.mark.parametrize("name", MALFORMED)
def test_what_cannot_be_read_gets_one_line(name, check, monkeypatch):
    with pytest.raises(SystemExit, match=f"{name} cannot be read: "):
        check(name, MALFORMED[name])
    with pytest.raises(SystemExit, match="no_such.py: no such file"):
        is_it_gspo.main(["no_such.py"])
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SystemExit, match="install PyYAML"):
        check("c.yaml", "a: 1")


def test_the_command_prints_what_is_set_what_is_a_default_and_a_verdict(tmp_path, printed):
    path = tmp_path / "a.py"
    path.write_text("a = GRPOConfig(epsilon=eps, importance_sampling_level='sequence')\n"
                    "b = GRPOConfig(beta=0)")
    found = printed(path)
    for line in ("importance_sampling_level = sequence", "epsilon = eps, which cannot be read",
                 "loss_type is not set; the default of TRL 1.16 is dapo",
                 "note: the file has 2 configurations", FACTS["not_read"],
                 FACTS["verdicts"]["never_clipped"]):
        assert line in found
    assert found.count("\n") < 25


SHORT = "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"


GRPO = f"{SHORT} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
SLIME = ("--n-samples-per-prompt 8 --advantage-estimator gspo --eps-clip 3e-4 "
         "--num-steps-per-rollout {} ")
SAMPLER = "The old log-probs are then those of the sampler"


@pytest.mark.parametrize("words, notes", [
    (f"{FLAGS} --beta 0.04", ["beta = 0.04, which the verdict does not consider"]),
    (f"{FLAGS} --beta 0.0 --delta 2 --top_entropy_quantile 1.0", ["delta = 2, which"]),
    (FLAGS, []),
    (f"{FLAGS} $@ ${{MODEL_ARGS[@]}}", [r"\$@, \$MODEL_ARGS\[@\] may change settings"]),
    (f"{FLAGS} --beta $1", ["beta = .1, which the verdict does not consider"]),
    (f"{FLAGS} --use_vllm true", ["vllm_importance_sampling_correction is not set"]),
    (f"{FLAGS} --use_vllm true --vllm_importance_sampling_correction false", []),
    (f"{FLAGS} --use_vllm --unsloth 1", ["beta is not set; the default of Unsloth .* is 0.001"]),
    (f"{FLAGS} --unsloth 1 --beta 0", []),
    (f"{SWIFT}{FLAGS} --beta 0 --rollout_importance_sampling_mode token_mask", ["rollout_imp"]),
    (SHORT, ["adv_estimator is not set; the default of verl 0.9.1 is gae. GSPO needs the adv",
             "rollout.n is not set; the default of verl 0.9.1 is 1. GSPO needs several"]),
    (GRPO.replace("=grpo", "=gae"), ["algorithm.adv_estimator = gae. GSPO needs"]),
    (f"{GRPO} algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.actor.kl_loss_coef=0.1", []),
    (f"{GRPO} actor_rollout_ref.actor.use_kl_loss=True", ["kl_loss_coef is not set; the default"]),
    (f"{GRPO} algorithm.rollout_correction.bypass_mode=True", [f"algorithm.*{SAMPLER}"]),
    (f"{SLIME} --custom-advantage-function-path a.b", ["custom_advantage_function_path = a.b"]),
    (f"{SLIME} --use-kl-loss --entropy-coef 0.00", []),
    ("--actor.policy_loss_type gspo --algo.advantage.estimator group_norm "
     "--rollout.n_samples_per_prompt 1", ["kl.init_coef", "rollout.n_samples_per_prompt = 1. G"]),
    ("trainer.algorithm.policy_loss_type=gspo generator.apply_overlong_filtering=true "
     "trainer.algorithm.use_kl_loss=false trainer.policy.megatron_config.moe_aux_loss_coeff=0.01",
     ["generator.apply_overlong_filtering = true"]),
    ("--num_return_sequences_in_group 8 --adv_estimator grpo --norm_mean_type batch", []),
    ("--ratio_clip_min 3e-4 --use_leave_one_out_baseline false --reference_policy_kl_penalty 0 "
     "--overlong_filtering true", ["overlong_filtering = true"]),
])
def test_notes_name_what_the_verdict_does_not_consider(words, notes, printed, tmp_path):
    path = tmp_path / "a.sh"
    path.write_text(f"run {words}", encoding="utf-8")
    found = re.findall("note: (.*)", printed(path))
    assert len(found) == len(notes), found
    assert all(re.match(note, line) for line, note in zip(found, notes)), found


def test_a_misspelt_setting_of_the_command_line_is_named(printed, tmp_path):
    path = tmp_path / "a.sh"
    path.write_text(f"run {FLAGS}", encoding="utf-8")
    assert "the setting epsilom\n" in printed(path, "epsilom=0.2", "epsilon_high=0.2")
    assert "not know" not in printed(path, "epsilon=0.2", "data.train_batch_size=8")


X = "actor_rollout_ref.actor."
ROLL = ("--importance_sampling seq --num_return_sequences_in_group 8 --pg_clip 0.1 "
        "--pg_clip_low 3e-4 --pg_clip_high 4e-4 ")
NEMO = ("--sequence_level_importance_ratios true --token_level_loss false --ratio_clip_min 3e-4 "
        "--ratio_clip_max 4e-4 --num_prompts_per_step 128 ")
AREAL = "--actor.importance_sampling_level sequence --actor.ppo_n_minibatches {} "
BYPASS = " algorithm.rollout_correction.bypass_mode=true"
MEGATRON = f"{SWIFT} --micro_batch_size 1 --importance_sampling_level sequence --epsilon 3e-4 "
OPENRLHF_1 = "--policy_loss_type gspo --rollout_batch_size 8 --train_batch_size {} --eps_clip 3e-4 "


@pytest.mark.parametrize("words, expected", [
    (f"{ROLL} --use_pg_clip_range true", (3e-4, 4e-4, "gspo")),
    (ROLL, (0.1, 0.1, "wide_range")),
    (f"{ROLL} --actor_train.worker_cls roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
     "not_gspo"),
    (f"{ROLL} --actor_train.worker_cls mine.Worker", "unknown"),
    (f"{ROLL} --force_disable_old_logprobs_recompute true", "never_clipped"),
    (SLIME.format(4), "gspo"),
    (SLIME.format(1), "never_clipped"),
    (f"{SLIME.format(4)} --loss-type custom_loss", "unknown"),
    (f"{SLIME.format(4)} --custom-pg-loss-reducer-function-path a.b", "unknown"),
    (f"{SLIME.format(4)} --use-rollout-logprobs", "gspo"),
    (f"{SLIME.format(1)} --use-rollout-logprobs", "unknown"),
    (OPENRLHF_1.format(8), "never_clipped"),
    (f"{OPENRLHF_1.format(8)} --enable_vllm_is_correction", "unknown"),
    (VERL.replace("=256", "=64"), "never_clipped"),
    (VERL.replace("=256", "=64") + BYPASS, "unknown"),
    (VERL + BYPASS, "gspo"),
    (VERL.replace("main_ppo", "x.fully_async_main"), NO_UPDATES),
    (f"{VERL} async_training.require_batches=4", NO_UPDATES),
    (f"{VERL} trainer.v1.trainer_mode=separate_async".replace("=256", "=64"), NO_UPDATES),
    (f"{VERL} {X}clip_ratio=0.1".replace("low=3e-4", "low=null"), (0.1, 4e-4, "wide_range")),
    (AREAL.format(1), "other_mean"),
    (f"{AREAL.format(1)} --actor.recompute_logprob true", "never_clipped"),
    (f"{AREAL.format(1)} --actor.use_decoupled_loss true --actor.prox_logp_method loglinear",
     "other_mean"),
    (f"{NEMO} --train_global_batch_size 512", "gspo"),
    (f"{NEMO} --train_global_batch_size 512 --disable_ppo_ratio true", "other_mean"),
    (f"{NEMO} --train_global_batch_size 2048 --force_on_policy_ratio true", "never_clipped"),
    (f"{MEGATRON} --generation_batch_size 64", (*PAPER[:3], 3e-4, 3e-4, "gspo")),
    (f"{MEGATRON} --generation_batch_size 64 --global_batch_size 64", "never_clipped"),
    (FLAGS.replace("sequence", "sequence_token"), "unknown"),
    (SWIFT + FLAGS.replace("sequence", "sequence_token"), "gspo"),
    (FLAGS.replace("_type grpo", "_type gspo_paper").replace("=8", "=2"), "unknown"),
    (FLAGS.replace("--importance_sampling_level sequence", "--method gspo_paper"), "unknown"),
    ("--unsloth 1 --importance_sampling_level sequence --loss_type dapo --steps_per_generation 4",
     (0.2, 0.28, "other_mean")),
])
def test_what_else_decides_in_an_engine(words, expected, check):
    expected = (expected,) if isinstance(expected, str) else expected
    assert check("a.sh", f"run {words}")[-len(expected):] == expected


def test_help_is_the_usage(printed):
    assert printed("--help") == printed("-h") == is_it_gspo.__doc__ + "\n"


@pytest.mark.parametrize("changes, expected", [
    ({}, []),
    ({"eps_high": 0.2}, ["range"]),
    ({"eps_low": 0.2, "mean": "tokens"}, ["mean", "range"]),
    ({"mean": "other", "eps_low": "unknown", "updates": "unknown"}, ["mean", "updates"])])
def test_every_deviation_is_named(changes, expected):
    values = dict(zip(NAMES, PAPER)) | changes
    first, *others = is_it_gspo.answer(values, "steps")
    assert others == [FACTS["deviations"][name].format(mean="steps") for name in expected]
    assert first.startswith("GSPO (Eq. 5)")
    assert ("if there are several updates" in first) == ("updates" in expected)


@pytest.mark.parametrize("words, expected", [
    ("--importance_sampling_level $X", "Cannot tell, because of what is unknown: level."),
    ("--use-rollout-logprobs --advantage-estimator gspo --num-steps-per-rollout 1 --eps-clip 3e-4",
     FACTS["verdicts"]["unknown"])])
def test_says_why_there_is_no_verdict(words, expected, printed):
    assert expected in printed(*words.split())


def test_names_the_engine_and_no_default_that_is_unknown(printed):
    found = printed("--rlhf_type", "grpo")
    assert found.startswith("Read as a configuration of ms-swift 4.6\n") and "?" not in found


def test_another_mean_is_put_into_words(printed):
    found = printed("--importance_sampling_level=sequence", "--loss_type=dr_grpo")
    words = "over{} tokens, summed and divided by a constant (dr_grpo)"
    assert words.format(":") in found and words.format("") in found


# ---- public configurations -----------------------------------------------------------------------

MARKS = {  # settings that show the engine
    "TRL 1.16": ["is_config"], "Unsloth 2026-08": ["is_config", "unsloth"],
    "ms-swift 4.6": ["rlhf_type"], "ms-swift 4.6 with Megatron": ["rlhf_type", "micro_batch_size"]}


def judged(one):
    """The values for a public configuration."""
    settings = {key: is_it_gspo.Unread(value) if value == "unread" else value
                for key, value in one["settings"].items()}
    if "defaults" in settings:
        settings[None] = settings.pop("defaults")
    settings = settings or {None: "a parser"}
    settings |= dict.fromkeys(MARKS.get(one["engine"], ()), 1)
    assert is_it_gspo.engine_of(settings)["name"] == one["engine"]
    values, _ = is_it_gspo.judged(settings)
    return tuple(values.values())


@pytest.mark.parametrize("one", PUBLIC, ids=lambda one: f"{one['repository']}/{one['path']}")
def test_the_check_agrees_with_the_verdict_by_hand(one):
    assert judged(one)[-1] == one["verdict"]


def test_each_public_configuration_is_listed_once_with_its_commit():
    assert len({(one["repository"], one["path"]) for one in PUBLIC}) == len(PUBLIC)
    assert all(len(one["commit"]) == 40 for one in PUBLIC)
    others = {name for name, mean in FACTS["means"].items() if mean == "other"}
    assert others == set(FACTS["other_means"])


def test_the_page_has_the_counts_the_engines_and_the_first_answer():
    page = (TOP / "guides/is_it_gspo.md").read_text(encoding="utf-8")
    counts = collections.Counter(one["verdict"] for one in PUBLIC)
    section = page.split("## Public configurations")[1]
    rows = collections.Counter()
    for verdict, number in re.findall(r"(?m)^\| `(\w+)` \| (\d+) \|", section):
        rows[verdict] += int(number)
    assert rows == counts and counts.keys() == FACTS["verdicts"].keys()
    assert f"{counts['never_clipped']} of the [{len(PUBLIC)} public" in page
    assert counts["gspo"] == 7  # "seven" on the page
    repositories = {one["repository"] for one in PUBLIC}
    assert f"{len(PUBLIC)} public configurations from {len(repositories)} rep" in section
    for engine in FACTS["engines"]:
        assert f"\n| {engine['name']} |" in page and engine["read_in"]
    pattern = r'(?s)set only\s+`(\w+)="(\w+)"` in TRL,\s+they are:\n\n```text\n(.*?)```'
    name, value, answer = re.search(pattern, page).groups()
    command = [sys.executable, TOP / "guides/is_it_gspo.py", f"--{name}", value]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split(FACTS["not_read"])[1] == "\n" + answer


# ---- measured: the losses of TRL and verl --------------------------------------------------------

LENGTHS = torch.tensor([1, 11, 4, 7, 5, 2])
MASK = torch.arange(11) < LENGTHS[:, None]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -2.0, 2.0, -0.5], dtype=torch.float64)


def gradient(loss, log_ratio):
    """Value, and gradient per token, of a loss(log_probs, old_log_probs) at these log-ratios."""
    old = -torch.rand(MASK.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    new = (old + log_ratio).requires_grad_()
    value = loss(new, old)
    return torch.cat([value[None].detach(), *torch.autograd.grad(value, new)[0]])


def loss_of(level, mean, low, high):
    """The loss of gspo.py with this ratio, mean and clip range."""
    weights = ADVANTAGES * LENGTHS if mean == "tokens" else ADVANTAGES
    total = LENGTHS.sum() if mean == "tokens" else len(LENGTHS)
    loss = gspo_loss if level == "sequence" else grpo_loss
    return lambda new, old: loss(new, old, weights, MASK, low, high, total)


def distance(found, expected):
    """How far value and gradient are from the expected ones, relative to their size."""
    return ((found - expected).norm() / expected.norm()).item()


def compare(one, loss, updates, is_on_policy):
    """The values and the verdict of the check must be those of the loss of the engine."""
    level, mean, steps, low, high, verdict = judged(one)
    noise = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(2)).double()
    bounds = torch.tensor([1 + high, 1 - low]).double().log()
    at_bounds = torch.where(ADVANTAGES[:, None] > 0, *bounds).expand(MASK.shape)
    for log_ratio in 2 * low * noise, 0.99 * at_bounds, 1.01 * at_bounds:
        found = gradient(lambda new, old: loss(new, old, False), log_ratio)
        for candidate in "responses", "tokens":
            expected = gradient(loss_of(level, candidate, low, high), log_ratio)
            off = distance(found, expected)
            assert off < 1e-6 if candidate == mean else off > 0.1
        if mean == "other":  # a sum over tokens
            assert distance(found / found.norm(), expected / expected.norm()) < 1e-6
    assert steps == updates and (verdict == "never_clipped") == is_on_policy
    gspo = loss_of("sequence", "responses", 3e-4, 4e-4)
    found = gradient(lambda new, old: loss(new, old, is_on_policy), 2e-3 * noise)
    off = distance(found, gradient(
        lambda new, old: gspo(new, new.detach() if is_on_policy else old), 2e-3 * noise))
    is_right = mean == "responses" and (is_on_policy or (low, high) == (3e-4, 4e-4))
    print(f"{one['path']}: {verdict}, {off:.1e} from gspo_loss")
    assert off < 1e-6 if is_right else off > 0.5, "the page says: more than half"


OF_TRL = [one for one in PUBLIC if one["engine"].startswith(("TRL", "Unsloth"))
          and one["verdict"] != "unknown"]
DIFFERENT = {json.dumps(one["settings"]): one for one in OF_TRL}.values()
OF_VERL = [one for one in PUBLIC if one["engine"].startswith("verl")]


@pytest.mark.slow
@pytest.mark.parametrize("one", DIFFERENT, ids=lambda one: one["path"])
def test_the_loss_of_trl(one, tmp_path):
    """With the settings of a public configuration. Unsloth's own trainer is not run."""
    trl = pytest.importorskip("trl")
    from tests.test_engines import form_reward, questions, tiny
    settings = {key: value if key in ("importance_sampling_level", "loss_type") else float(value)
                for key, value in one["settings"].items()}
    for key in {"gradient_accumulation_steps", "steps_per_generation"} & set(settings):
        settings[key] = int(settings[key])
    config = trl.GRPOConfig(
        str(tmp_path), bf16=False, use_cpu=True, report_to=[], num_generations=2,
        per_device_train_batch_size=2, max_completion_length=MASK.size(1), **settings)
    every = config.steps_per_generation * config.num_iterations
    is_on_policy = config.gradient_accumulation_steps % every == 0
    model, tokenizer = tiny()
    trainer = trl.GRPOTrainer(model, form_reward, config, questions(), processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1

    def loss(new, old, without_old):
        trainer._get_per_token_logps_and_entropies = lambda *a, **more: (new, 0 * new, None)
        empty = torch.zeros(len(MASK), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": empty, "prompt_mask": empty, "completion_ids": MASK.long(),
            "completion_mask": MASK.long(), "advantages": ADVANTAGES,
            "num_items_in_batch": MASK.sum() * config.steps_per_generation}
        if not without_old:  # TRL leaves them out if the rollout has one optimizer step
            inputs["old_per_token_logps"] = old
        return trainer._compute_loss(model, inputs)

    compare(one, loss, every / config.gradient_accumulation_steps, is_on_policy)


@pytest.mark.slow
@pytest.mark.parametrize("one", OF_VERL, ids=lambda one: one["path"])
def test_the_loss_of_verl(one):
    core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    from verl.workers.config import ActorConfig
    settings = {key.split(".")[-1]: value for key, value in one["settings"].items()}
    batch_size = int(settings.pop("train_batch_size"))
    mode = settings.pop("loss_mode")
    settings = {key: float(value) if "clip" in key else value for key, value in settings.items()}
    settings["ppo_mini_batch_size"] = int(settings["ppo_mini_batch_size"])
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)

    def loss(new, old, without_old):
        return core.get_policy_loss_fn(mode)(
            old_log_prob=old, log_prob=new, advantages=ADVANTAGES[:, None].expand(MASK.shape),
            response_mask=MASK, loss_agg_mode=config.loss_agg_mode, config=config,
            rollout_is_weights=None)[0]

    updates = config.ppo_epochs * batch_size / config.ppo_mini_batch_size
    compare(one, loss, updates, False)
