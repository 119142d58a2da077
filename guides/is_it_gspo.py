"""Is it GSPO? Says whether a configuration computes GSPO's loss, Eq. 5 of the paper.

    explain(training_args)      reads a live configuration, which has the defaults of its library
    python guides/is_it_gspo.py FILE [--json] [--trl]

The command is for whoever has only a file. It reads literals and variables with one literal value,
and assumes the engine's defaults. Exit status: 0 for GSPO, 3 for another verdict, 4 for unknown.
"""
import argparse
import ast
import json
import math
import re
from collections import Counter
from pathlib import Path

FACTS = json.loads(Path(__file__).with_name("public_configurations.json").read_text("utf-8"))
UNREAD = "?"  # the value of a setting that cannot be read
ELSEWHERE = None  # the key for files and words that may have more settings
LITERAL = re.compile(r"(?i)-?\.?\d[\d_.]*(e[-+]?\d+)?|[a-z][\w-]*|\[\]")
QUOTED = r"""f?"[^"\n]*"|f?'[^'\n]*'"""
COMMENT = re.compile(rf"""({QUOTED})|(?:(?m:^)|(?<=\s))#[^\n]*""")
FLAG = re.compile(  # --name value, --name=value, "--name", "value", a.b=value, ${NAME:-value}
    r"""(?:(?<![^\s"'(,;])(?:--([A-Za-z][\w.-]*)(?:=|["']?,?[ \t]+|(?=["'\s]|$))|[+~]*([A-Za-z_]"""
    rf"""[\w.]*)=)|\$\{{(\w+):?[-=])(?=({QUOTED}|(?:[^\s"'();|&,}}]|,(?=\w))*))""")


def as_text(value):
    """A literal, $NAME for a variable, or UNREAD."""
    value = str(value).strip("\"'")
    if variable := re.fullmatch(r"\$\{?([A-Za-z][\w.]*)(?::?[-=].*)?\}?", value):
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


def from_commands(text):
    """The settings in a script of a shell."""
    text = COMMENT.sub(r"\1", text)
    if len(re.findall(FACTS["commands"], text)) > 1:
        return {ELSEWHERE: {"the file, which has several commands"}}
    found = {mark: {"True"} for mark in re.findall(FACTS["marks"], text)}
    flags = re.sub(r"(--\S*eps_clip)_low_high\s+(\S+)\s+(\S+)", r"\1_low \2 \1_high \3", text)
    for flag, name, other, value in FLAG.findall(flags):
        if flag and value[:2] in ("", "--", "\\", "`", "^"):  # it has no value
            value = "True"
        found.setdefault((flag or name or other).replace("-", "_"), set()).add(as_text(value))
    more = {one.strip() for one in re.findall(FACTS["more_words"], text)}
    more |= {"".join(names) for names in re.findall(FACTS["lists_of_words"], text)} - found.keys()
    return found | ({ELSEWHERE: more} if more else {})


def from_program(source):
    """The settings of the one GRPOConfig that a program makes, or else those in its texts."""
    source = re.sub(r'(f"[^"\n{]*\{[^}"\n]*)\["(\w+)"\]', r"\1['\2']", source)  # for Python 3.11
    nodes = [*ast.walk(ast.parse(source))]
    text = ast.unparse(nodes[0])
    calls = [node for node in nodes if isinstance(node, ast.Call)
             and re.fullmatch(FACTS["calls"], ast.unparse(node.func))]
    if re.search(FACTS["own_loss"], text) or len(calls) > 1 or not calls and "GRPOConfig" in text:
        return {ELSEWHERE: {"the file, with another loss or trainer, or not just one GRPOConfig"}}
    if not calls:
        return from_commands(re.sub(r'(?s)""".*?"""|\\n', " ", text))  # without docstrings
    found = {mark: {"True"} for mark in re.findall(FACTS["marks"], text)}
    bound = Counter(getattr(node, "id", getattr(node, "arg", "")) for node in nodes
                    if isinstance(getattr(node, "ctx", node), (ast.Store, ast.arg)))
    assigned = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in nodes
                if isinstance(node, ast.Assign)}
    for keyword in calls[0].keywords:
        value = ast.unparse(keyword.value)
        value = assigned.get(value, UNREAD) if bound[value] == 1 else value
        if value.isidentifier() and value not in ("True", "False", "None"):
            value = UNREAD
        found[keyword.arg or ELSEWHERE] = {as_text(value) if keyword.arg else f"**{value}"}
    names = re.findall(r"\w+", json.dumps(engine_of(found)))
    for name in re.findall(r"(?<=\.)\w+(?= [-+*/]{0,2}= |, [^(=\n]* = )|(?<=')\w+(?=')", text):
        if name in names:  # args.epsilon = 0.2, setattr(args, 'epsilon', 0.2), {'epsilon': 0.2}
            found[name] = {UNREAD}
    return found


def from_yaml(path):
    """The settings of a YAML file, and of the files beside it that its `defaults` name."""
    import yaml
    items = yaml.safe_load(path.read_text("utf-8-sig"))
    bases = items.pop("defaults", [])
    bases = [bases] if isinstance(bases, str) else [*map(str, bases)]
    found = {ELSEWHERE: {bases[-1]}} if "_self_" in bases[:-1] else {}  # it changes this file
    for base in bases:
        beside = path.parent / f"{base.removesuffix('.yaml')}.yaml"
        if beside.is_file():
            found |= from_yaml(beside)
        elif not re.fullmatch(FACTS["own_files"], base):
            found[ELSEWHERE] = {base}
    return found | flat(items)


def settings_of(path):
    """The settings in a file."""
    text = path.read_text("utf-8-sig")
    if path.suffix in (".yaml", ".yml", ".json", ".toml"):  # TOML is refused there
        return from_yaml(path)
    if path.suffix == ".ipynb":
        cells = ["".join(one["source"]) for one in json.loads(text)["cells"]
                 if one["cell_type"] == "code"]
        text = "\n".join(cell for cell in cells if not cell.startswith("%%bash"))
        text = re.sub(r"(?m)^(\s*)[!%](?:.*\\\n)*.*", r"\1pass", text)
    return from_program(text) if path.suffix in (".py", ".ipynb") else from_commands(text)


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
            known = settings.get(value[1:], {value}) - {value} if value[:1] == "$" else ()
            value = min(known) if len(known) == 1 and known != {UNREAD} else value
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
        if is_on and value != f"${name}" and not re.fullmatch(expected, value, re.IGNORECASE):
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
    found = {"level": "unknown" if unless else engine["levels"].get(level, "unknown"),
             "mean": FACTS["means"].get(mean, "unknown"), "updates": updates,
             "eps_low": number(low), "eps_high": number(high)}
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
    notes += [f"Read as {engine['name']}: {json.dumps(found)}"]
    return found, [FACTS["verdicts"][found["verdict"]], *[f"note: {note}" for note in notes]]


def explain(config):
    """Prints what a live configuration computes: the verdict, and a note on each deviation.

    config: a GRPOConfig of TRL, Unsloth or ms-swift, or verl's whole configuration. Returns level
    ("sequence" or "token"), mean ("responses", "tokens" or "other"), updates (optimizer steps per
    rollout), eps_low, eps_high and verdict, which is "unknown" for any other object."""
    settings = {}
    classes = str(type(config).__mro__)
    if hasattr(config, "items"):
        from omegaconf import OmegaConf
        settings = flat(OmegaConf.to_container(OmegaConf.create(config)))
        settings[ELSEWHERE] = {"the rest of the configuration"}
    elif "trl.experimental" not in classes and re.search(r"(trl|swift)\.\S+GRPOConfig", classes):
        settings = {name: {as_text(value)} for name, value in vars(config).items()}
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
