"""Is it GSPO? Says whether a configuration computes GSPO's loss, Eq. 5 of the paper.

    from is_it_gspo import explain
    explain(training_args)      a GRPOConfig of TRL, Unsloth or ms-swift, or verl's configuration

    python guides/is_it_gspo.py FILE [--json] [--trl]

explain reads a live configuration, whose library has filled in its defaults. The command is for
whoever has only a file. It reads literals and variables with one literal value, and assumes the
engine's defaults. The exit status is 0 for GSPO, 3 for another verdict, and 4 for unknown.
"""
import argparse
import json
import math
import re
from pathlib import Path

FACTS = json.loads(Path(__file__).with_name("public_configurations.json").read_text("utf-8"))
UNREAD = "?"  # the value of a setting that cannot be read
ELSEWHERE = None  # the key for files and words that may have more settings
LITERAL = re.compile(r"(?i)-?\.?\d[\d_.]*(e[-+]?\d+)?|[a-z][\w-]*|\[\]")
VARIABLE = re.compile(r"\$\{?([A-Za-z][\w.]*)(?::?[-=].*)?\}?")
QUOTED = r"""f?"[^"\n]*"|f?'[^'\n]*'"""
FLAG = re.compile(  # --name value, --name=value, "--name", "value", a.b=value, ${NAME:-value}
    r"""(?:(?<![^\s"'(,;])(?:--([A-Za-z][\w.-]*)(?:=|["']?,?[ \t]+|(?=["'\s]|$))|[+~]*([A-Za-z_]"""
    rf"""[\w.]*)=)|\$\{{(\w+):?[-=])(?=({QUOTED}|[^\s"'();|&,}}]*))""")
ASSIGNMENT = re.compile(  # name=value, a.name: str = value, a["name"] = value, "name": value
    r"""(?<![\w-])([A-Za-z_]\w*)(?:["']?\]?\s*(?::\s*\w+\s*)?[-+*/]?=(?!=)|["']\s*:)"""
    rf"""\s*(?=(?:({QUOTED}|[\w.+-]+)[ \t]*(?:[,)}}\]#;\n]|$))?)""")
OTHER_CALLS = re.compile(r"\b(?!\w*(?:GRPO|GSPO|RLHF))\w*(?:Config|Arguments|Trainer)"
                         r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
OWN_LOSS = re.compile(
    r"\b_?compute_loss\b|\bclass \w+\([^)]*Trainer\b|\bfrom (?!(?:trl|unsloth\w*|swift|"
    r"transformers)\b)\S+ import (?:\([^)]*|[^(\n]*)(?:Trainer|GRPOConfig)\b")
MORE = re.compile(  # a file of settings, ** in a configuration, a parser
    r"""(?<!\S)--(?:config|cfg)[= ]\S+|--config[-_]name[= ](?!["']?ppo_)\S+|-cn \S+|\s\+\w+=\S+"""
    r"""|\b\w+\.\w+=["']?\{\S+|(?:GRPO|GSPO)\w*Config\([^()]*\*\*\w+|Parser\([^)]*GRPOConfig""")
LISTS = re.compile(r"\$\{?((?!\w*MODEL)\w*(?:ARGS|FLAGS|OPTS|OVERRIDES))\b")


def as_text(value, is_code=False):
    """A literal, $NAME for a variable, or UNREAD. In code, a word without quotes is a variable."""
    value = str(value)
    if is_code and value.isidentifier() and value not in ("True", "False", "None"):
        value = f"${value}"
    value = value.strip("\"'")
    if variable := VARIABLE.fullmatch(value):
        return f"${variable[1]}"
    return value if LITERAL.fullmatch(value) else UNREAD


def flat(items, path=""):
    """Nested settings, with names such as a.b.c."""
    found = {}
    for key, value in items.items():
        name = f"{path}{key}"
        is_section = isinstance(value, dict) and value
        found |= flat(value, f"{name}.") if is_section else {name: {as_text(value)}}
    return found


def from_text(text, is_code):
    """The settings in a script of a shell, in a program, or in the commands that it has."""
    text = re.sub(r"""(?s)\"{3}.*?\"{3}|'{3}.*?'{3}|(?m:^|(?<=\s))#[^\n]*""", "", text)
    if is_code and OWN_LOSS.search(text):
        return {ELSEWHERE: {"a loss or a trainer that the file defines or imports"}}
    found = {}
    for name, value in ASSIGNMENT.findall(OTHER_CALLS.sub("", text)) if is_code else ():
        found.setdefault(name, set()).add(as_text(value or UNREAD, is_code))
    found |= {mark: {"True"} for mark in re.findall(FACTS["marks"], text)}
    if not is_code or not engine_of(found):
        text = re.sub(r"(--\S*eps_clip)_low_high\s+(\S+)\s+(\S+)", r"\1_low \2 \1_high \3", text)
        for flag, name, other, value in FLAG.findall(text):
            if flag and value[:2] in ("", "--", "\\", "`", "^"):  # it has no value
                value = "True"
            found.setdefault((flag or name or other).replace("-", "_"), set()).add(as_text(value))
    more = {one.strip() for one in MORE.findall(text)}
    more |= {name for name in LISTS.findall(text) if not re.search(rf"\b{name}\+?=", text)}
    return found | ({ELSEWHERE: more} if more else {})


def from_yaml(path):
    """The settings of a YAML file, and of the files beside it that its `defaults` name."""
    import yaml
    items = yaml.safe_load(path.read_text("utf-8-sig"))
    bases = items.pop("defaults", [])
    found = {}
    for base in [bases] if isinstance(bases, str) else map(str, bases):
        beside = path.parent / f"{base.removesuffix('.yaml')}.yaml"
        if beside.is_file():
            found |= from_yaml(beside)
        elif not re.fullmatch(FACTS["own_files"], base):
            found[ELSEWHERE] = {base}
    found |= flat(items)
    commands = "\n".join(map(str, items.values()))
    return found if engine_of(found) else found | from_text(commands, is_code=False)


def settings_of(path):
    """The settings in a file, where a variable has its value if that is one literal."""
    if path.suffix in (".yaml", ".yml", ".json"):
        found = from_yaml(path)
    else:
        text = path.read_text("utf-8-sig")
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "code")
        found = from_text(text, path.suffix in (".py", ".ipynb"))
    for values in found.values():
        for value in [one for one in values if one[:1] == "$"]:
            known = found.get(value[1:], set()) - {value}
            if len(known) == 1 and known != {UNREAD}:
                values.remove(value)
                values |= known
    return found


def engine_of(settings):
    """The facts on the engine whose settings these are, or None."""
    names = "\n".join(map(str, settings))
    return next((one for one in FACTS["engines"] if re.search(one["keys"], names, re.M)), None)


def look(settings, engine, names, default):
    """The value of the first of these names that is set, or the default."""
    for name in names.split("|"):
        end = "." + name.strip("!")
        values = set().union(*(settings[key] for key in settings if f".{key}".endswith(end)))
        if values and values <= {"None", "null"}:
            default = engine["null"].get(name, default)
        elif values:  # ! needs the number of processes, too
            value = UNREAD if len(values) > 1 or "!" in name else values.pop()
            return value.replace(UNREAD, f"{UNREAD} {name}")
    if default in engine["same"]:
        return look(settings, engine, default, engine["same"][default])
    return f"${names}" if names and ELSEWHERE in settings else default


def number(text):
    return float(text) if re.fullmatch(r"[\d.]+(e[+-]?\d+)?", text.lower()) else math.nan


def updates_of(settings, engine):
    """Optimizer steps per rollout and [], or NaN and the settings that decide."""
    for factors, divisors in engine["updates"]:  # the first way that is known
        above = [look(settings, engine, *item) for item in factors]
        below = [look(settings, engine, *item) for item in divisors]
        if below and below[-1] in above:  # cancels, as in $BATCH / $BATCH
            above.remove(below.pop())
        updates = math.prod(map(number, above)) / math.prod(map(number, below))
        if updates == updates:
            return math.ceil(updates) if engine["is_whole"] else updates, []
    return updates, [names for names, _ in factors + divisors]


def deviating(settings, engine, kind):
    """A note on each setting of this kind whose value is not the one that GSPO needs."""
    for name, (default, expected, *switch) in engine[kind].items():
        value = look(settings, engine, name, default)
        is_on = not switch or look(settings, engine, *switch).lower() != "false"
        if is_on and value[:1] != "$" and not re.fullmatch(expected, value, re.IGNORECASE):
            yield FACTS["kinds"][kind].format(name=name.partition("|")[0], value=value)


def judge(settings):
    """The dict that --json prints, and lines: the verdict, and a note on each deviation."""
    names = "level", "mean", "eps_low", "eps_high"
    engine = engine_of(settings)
    places = " and ".join(sorted(settings.get(ELSEWHERE, ["other files"])))
    if engine is None:
        found = dict.fromkeys([*names, "updates", "verdict"], "unknown")
        return found, [FACTS["no_engine"].format(places=places)]
    level, mean, low, high = [look(settings, engine, *engine[name]).lower() for name in names]
    updates, unread = updates_of(settings, engine)
    unless, sampler, expected = [[*deviating(settings, engine, kind)] for kind in FACTS["kinds"]]
    found = {
        "level": engine["levels"].get(level, "unknown"),
        "mean": FACTS["means"].get(mean, "unknown"),
        "updates": updates,
        "eps_low": number(low),
        "eps_high": number(high),
    }
    if unless:
        found["level"] = "unknown"
    is_one = updates and 1 / updates % 1 == 0  # or several rollouts for one update
    holds = {  # the first one is the verdict
        "not_gspo": found["level"] == "token",
        "unknown": "unknown" in (found["level"], found["mean"]),
        "never_clipped": is_one and not sampler,
        "other_mean": found["mean"] in ("tokens", "other"),
        "wide_range": found["eps_low"] > 0.05 or found["eps_high"] > 0.05,
        "gspo": found["eps_low"] + found["eps_high"] + updates > 0 and not is_one,
    }
    found["verdict"] = next((name for name in holds if holds[name]), "unknown")
    found = {name: "unknown" if value != value else value for name, value in found.items()}
    words = found | {"mean": FACTS["other_means"].get(mean, found["mean"])}
    notes = [text.format(**words) for name, text in FACTS["deviations"].items() if holds[name]]
    unread += [engine[name][0] or name for name in names if found[name] == "unknown"]
    notes += [f"Look up {name.replace('|', ' or ')} in {places}." for name in unread]
    notes += unless + sampler + expected + engine["version"]
    notes.append(f"Read as {engine['name']}: {json.dumps(found)}")
    return found, [FACTS["verdicts"][found["verdict"]], *[f"note: {note}" for note in notes]]


def explain(config):
    """Prints what a live configuration computes: the verdict, and a note on each deviation.

    config: a GRPOConfig of TRL, Unsloth or ms-swift, or verl's configuration. Returns a dict: level
    ("sequence" or "token"), mean ("responses", "tokens" or "other"), updates (optimizer steps per
    rollout), eps_low, eps_high, and verdict. Any other object gives the verdict "unknown"."""
    if hasattr(config, "items"):
        from omegaconf import OmegaConf
        settings = flat(OmegaConf.to_container(OmegaConf.create(config), resolve=True))
    else:
        settings = {name: {as_text(value)} for name, value in vars(config).items()}
    if "steps_per_generation" in settings:
        settings["rlhf_type" if "swift" in type(config).__module__ else "--trl"] = {"grpo"}
    found, lines = judge(settings)
    print(*lines, sep="\n")
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trl", action="store_true", help="the settings are those of TRL")
    cfg = parser.parse_args(argv)
    try:
        settings = settings_of(cfg.file)
    except Exception as error:  # a file may hold anything
        settings = {ELSEWHERE: {f"{type(error).__name__}: {error}"}}
    settings |= {"--trl": {"True"}} if cfg.trl else {}
    found, lines = judge(settings)
    print(json.dumps(found) if cfg.json else "\n".join(lines))
    return {"gspo": 0, "unknown": 4}.get(found["verdict"], 3)


if __name__ == "__main__":
    raise SystemExit(main())
