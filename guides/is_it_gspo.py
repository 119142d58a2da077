"""Is it GSPO? Reads a configuration and says whether it computes GSPO, Eq. 5 of the paper.

    python guides/is_it_gspo.py FILE [key=value ...]    .py, .ipynb, .yaml, or a shell script
    python guides/is_it_gspo.py --importance_sampling_level sequence --loss_type grpo
    python guides/is_it_gspo.py --json FILE             prints one JSON object

It needs read_settings.py and public_configurations.json, and PyYAML for YAML files. It runs no code
of the file. What it cannot read is reported, and is "unknown". See the page is_it_gspo.md.
"""
import ast
import json
import math
import re
import sys
import tomllib
from pathlib import Path

from read_settings import HOLE, Code, Unread, commands, filled, flags, flat, number, yaml_settings

FACTS = json.loads(Path(__file__).with_name("public_configurations.json").read_text("utf-8"))
HEREDOC = re.compile(r"""(?s)([^\n]*<<-?\s*['"]?(\w+)['"]?[^\n]*)\n(.*?)\n\s*\2(?=\n|$)""")
TEXT = re.compile(r"""(?s)(?:\bread\b[^\n]*?(\w+)\s*|(\w+)="?\$\(\s*cat\s*)<<-?\s*['"]?(\w+)['"]?"""
                  r"""[^\n]*\n(.*?)\n\s*\3(?:\s*\)"?)?(?=\n|$)""")


def shell_settings(text, folder):
    """The flags of a script, and the YAML that it writes with cat <<EOF into its --config."""
    text = TEXT.sub(lambda match: '{}="{}"'.format(
        match[1] or match[2], match[4].replace('"', "'")), text)
    script = HEREDOC.sub("\n", text)
    found, values = flags(script, is_script=True), commands(script)[2]
    for line, _, body in HEREDOC.findall(text):
        if None in found and Path(found[None]).name in filled(line, values):
            del found[None]
            found = yaml_settings(filled(body, values).replace("$", HOLE), folder) | found
    return found if engine_of(found) else flags(text, is_script=True)  # in a text


def python_settings(cells):
    magic, body = r"(?m)^( *)[%!]((?:.*\\\n)*.*)", []
    is_shell = re.compile(r"\s*%%(bash|sh|shell|script)\b")
    shell = "\n".join(cell for cell in cells if is_shell.match(cell))
    cells = [cell for cell in cells if not is_shell.match(cell)]
    for cell in cells:
        try:
            body += ast.parse(re.sub(magic, r"\1pass", cell)).body
        except SyntaxError:  # for example a cell in another language
            if len(cells) == 1 or "Config(" in cell:
                raise
    code = ast.unparse(ast.Module(body, []))
    is_unsloth = re.search(r"(?m)^ *(from|import) unsloth", code)
    try:
        found = (made := Code(body)).configurations(engine_of)
    except TimeoutError:
        found = [{"is_config": True, None: "code that takes too long to follow"}]
    found = [flat(one) | ({"unsloth": True} if is_unsloth else {}) for one in found]
    found = [one for one in found if engine_of(one)]
    # A command in texts, such as subprocess.run(["--flag", "value"]), without the docstrings
    words = re.sub(r'(?ms)^ *""".*?"""|^ *[\'"][^\n]*|add_argument\(.*?\)', "", Code.unsure(body))
    words = re.sub(r"(\bf)?['\"],?", " ", re.sub(r"\{[^{}]*\}", HOLE, words))
    shell += "\n".join(command for cell in cells for _, command in re.findall(magic, cell))
    texts = {} if found else flags(words)
    texts = made.touched(texts) if engine_of(texts) else texts
    return found or [texts, flags(shell, is_script=True)]


def settings_in(path):
    """The settings of each run that a file may describe."""
    text = path.read_text("utf-8")
    if path.suffix in (".yaml", ".yml", ".json"):
        found = yaml_settings(text, path.parent)
        texts = "\n".join(map(str, found.values()))  # one may be a command
        return [found if engine_of(found) else flags(texts, is_script=True)]
    if path.suffix == ".toml":
        return [flat(tomllib.loads(text))]
    if path.suffix == ".py":
        return python_settings([text])
    if path.suffix == ".ipynb":
        cells = [one for one in json.loads(text)["cells"] if one["cell_type"] == "code"]
        return python_settings(["".join(cell["source"]) for cell in cells])
    return [shell_settings(text, path.parent)]


def engine_of(settings):
    """The facts on the engine that these settings are for, or None."""
    keys = "\n".join(map(str, settings))
    return next((one for one in FACTS["engines"] if re.search(one["keys"], keys, re.M)), None)


def sections(settings):
    """One run for each section that sets the level, for an engine whose settings have no sections.
    Settings of inner sections do not count, and those of other sections are not read."""
    name = (engine_of(settings) or {}).get("level_of_section", "?")
    of = {key: f".{key}".rpartition(".")[0] + "." for key in settings}  # its section
    found = []
    for own in [of[key] for key in of if str(key).endswith(name)]:
        keys = sorted([key for key in of if own.startswith(of[key])], key=lambda key: -len(of[key]))
        others = {key: Unread(f"{settings[key]} in another section") for key in of
                  if key not in keys and not of[key].startswith(own)}
        found.append({key: settings[key] for key in keys} | others)
    return found or [settings]


def look(settings, names, default, engine):
    """The value of the first of these names that is set, or the default; and where it is from."""
    for name in names.split("|"):
        for key, value in settings.items():
            if f".{key}".endswith("." + name.strip("!")):
                if str(value) in ("None", "null"):
                    default = engine.get("null", {}).get(name, default)
                    continue
                if isinstance(value, Unread) or HOLE in str(value):
                    return HOLE, f"{key} = {value}, which cannot be read"
                if "!" in name:
                    return HOLE, f"{key} = {value}, but the number of processes is not known"
                return str(value), f"{key} = {value}"
    if None in settings and names:
        return HOLE, f"{names.split('|')[0]} may be set in {settings[None]}"
    if default in engine.get("same", {}):
        return look(settings, default, engine["same"][default], engine)
    for key, value in settings.items() if names == engine["level"][0] else ():
        if re.search("(loss|algo|estimator|method|variant).*=gspo", f"{key}={value}".lower()):
            return HOLE, f"{key} = {value}, which is not a setting of {engine['name']}"
    name = names.split("|")[0] or "a setting"
    known = "" if default == "?" else f"; the default of {engine['name']} is {default}"
    return default, f"{name} is not set{known}"


def updates_of(settings, engine):
    """Optimizer steps per rollout, NaN if they are unknown; and where they are from."""
    for factors, divisors in engine["updates"]:  # the first way that is known
        above = [look(settings, *item, engine) for item in factors]
        below = [look(settings, *item, engine) for item in divisors]
        sources = [source for _, source in above + below]
        if below and below[-1] in above:  # the same setting cancels, also if it is not known
            above.remove(below.pop())
        updates = math.prod(number(value) for value, _ in above)
        updates /= math.prod(number(value) for value, _ in below)
        if updates == updates:
            break
    is_rounded = engine.get("is_whole") and updates == updates
    return math.ceil(updates) if is_rounded else updates, *sources


def read(settings, engine):
    """{what decides: (its value, where it is from, ...)}"""
    names = "level", "mean", "eps_low", "eps_high", "old"
    found = {name: look(settings, *engine[name], engine) for name in names}
    found |= {"updates": updates_of(settings, engine), "sampler": ("False",)}
    own = {key: value for key, value in settings.items() if key is not None}
    for conditions, changes in engine.get("instead", ()):  # other settings may decide
        met = [(*look(own, name, default, engine), pattern)
               for name, (default, pattern) in conditions.items()]
        if all(value == HOLE or re.fullmatch(pattern, value, re.I) for value, _, pattern in met):
            for name, item in changes.items():
                value, source = look(settings, *item, engine)
                sources = [source for _, source, _ in met] + [source] * bool(item[0])
                found[name] = HOLE if any(one[0] == HOLE for one in met) else value, *sources
    return found


def judged(settings):
    """What --json prints for the settings of one run, and the source of each value."""
    engine = engine_of(settings)
    if engine is None:
        names = "level", "mean", "updates", "eps_low", "eps_high", "verdict"
        return dict.fromkeys(names, "unknown"), {"level": ["no setting of a known engine is found"]}
    found = read(settings, engine)
    level, mean, low, high, _, updates, sampler = [one[0] for one in found.values()]
    sources = {name: one[1:] for name, one in found.items()}
    updates = number(str(updates))
    values = {
        "level": engine.get("levels", FACTS["levels"]).get(level.lower(), "unknown"),
        "mean": FACTS["means"].get(mean.lower(), "unknown"),
        "updates": int(updates) if updates % 1 == 0 else updates,
        "eps_low": number(low),
        "eps_high": number(high)}
    is_named = values["mean"] == "unknown" and mean not in (HOLE, "?")  # a loss we do not know
    if is_named and values["level"] == "sequence":
        values["level"] = "unknown"
        sources["level"] += *sources["mean"], "which is not a loss of this engine"
    values["verdict"] = verdict(**values, is_sampler=sampler != "False")
    values = {key: "unknown" if value != value else value for key, value in values.items()}
    if values["mean"] == "other":
        sources["words"] = f"{FACTS['other_means'][mean.lower()]} ({mean})"
    return values, sources


def verdict(level, mean, updates, eps_low, eps_high, is_sampler=False):
    if level == "unknown":
        return "unknown"
    if level == "token":
        return "not_gspo"
    is_one = updates and 1 / updates % 1 == 0  # or several rollouts for one update
    if is_one and not is_sampler:
        return "never_clipped"
    if mean in ("tokens", "other"):
        return "other_mean"
    if eps_low > 0.05 or eps_high > 0.05:
        return "wide_range"
    is_known = mean == "responses" and eps_low + eps_high > 0 and not is_one
    return "gspo" if is_known else "unknown"


def remarks(runs):
    """What a user should know besides the verdict, which does not depend on it."""
    found = [f"the file has {len(runs)} configurations"] * (len(runs) > 1)
    for run in runs:
        engine, base = engine_of(run), run.get(None)
        found += [f"{base} may add more to the loss"] * bool(base)
        found += [f"{run.get('$')} may change settings, but is not read"] * ("$" in run)
        own = {key: value for key, value in run.items() if key is not None}
        for name, (default, *needed) in engine["additions"].items():
            source = look(own, name, default, engine)[1].removesuffix(", which cannot be read")
            for item, usual in [(name, default), *[one.split("=") for one in needed]]:
                value = re.sub(r"\.0+$", "", look(own, item, usual, engine)[0].lower())
                if value in FACTS["harmless"].get(item, FACTS["off"]):
                    break
            else:
                found.append(FACTS["additions"].format(source=source))
        name, default, expected = engine.get("advantages", ("", "", ""))
        value, source = look(run, name, default, engine)
        if not re.fullmatch(expected, value):
            found.append(FACTS["advantages"].format(source=source, name=name, value=expected))
        value, source = look(run, *engine.get("group", ("", "")), engine)
        found += [FACTS["group"].format(source=source)] * (value == "1")
        sampler = " and ".join(judged(run)[1]["sampler"])
        found += [FACTS["sampler"].format(source=sampler)] * bool(sampler)
    return dict.fromkeys(found)


def answer(values, mean):
    """The last lines: the verdict, and each deviation from GSPO."""
    sides = [values[side] for side in ("eps_low", "eps_high") if values[side] != "unknown"]
    holds = {"mean": values["mean"] in ("tokens", "other"),
             "range": max(sides, default=0) > 0.05,
             "updates": values["updates"] == "unknown"}
    more = [FACTS["deviations"][name].format(mean=mean) for name in holds if holds[name]]
    unknown = [name for name, value in values.items() if value == "unknown"]
    if unknown[-1:] == ["verdict"] and len(unknown) > 1:
        return [f"Cannot tell, because of what is unknown: {', '.join(unknown[:-1])}.", *more]
    condition = " if there are several updates" * (values["updates"] == "unknown")
    return [FACTS["verdicts"][values["verdict"]].format(condition=condition), *more]


def together(runs):
    """One result: of the runs that may have a ratio per sequence, or of all if there are none."""
    results = [judged(run) for run in runs]
    results = [one for one in results if one[0]["level"] != "token"] or results
    values, sources = results[0]
    for others, _ in results[1:]:
        for key in [key for key in values if values[key] != others[key]]:
            values[key] = "unknown"
            sources[key] = *sources.get(key, ()), "several configurations of the file differ"
    return values, sources


def main(arguments):
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return
    words = [word for word in arguments if word != "--json"]
    files = [word for word in words if Path(word).is_file()]
    words = [word for word in words if word not in files]
    if not files and words and not re.match(r"--|.*=", words[0]):
        sys.exit(f"{words[0]}: no such file")
    given = flags(" ".join("--" * bool(re.match(r"\w+=", word)) + word for word in words))
    try:
        found = settings_in(Path(files[0])) if files else [{}]
    except Exception as error:  # a file may hold anything
        reason = " ".join(str(error).split())
        sys.exit(f"{files[0]} cannot be read: {type(error).__name__}: {reason}")
    runs = [given | run | given for one in found for run in sections(one)]  # given first
    runs = [run for run in runs if engine_of(run)]
    values, sources = together(runs or [{}])
    if "--json" in arguments:
        print(json.dumps(values))
        return
    mean = sources["words"] if values["mean"] == "other" else values["mean"]
    engines = dict.fromkeys(engine_of(run)["name"] for run in runs)
    print("Read as a configuration of", " and ".join(engines) or "no known engine")
    for name, question in FACTS["questions"].items():
        value = mean if name == "mean" else values.get(name, "")
        print(f"{question}: {value}")
        print(*[f"      {source}" for source in dict.fromkeys(sources.get(name, []))], sep="\n")
    notes = [f"note: {remark}" for remark in remarks(runs)]
    notes += [f"note: the check does not know the setting {key}" for key in given
              if key and key.rpartition(".")[2].lstrip("-") not in str(FACTS)]
    print(*notes, FACTS["not_read"], *answer(values, mean), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
