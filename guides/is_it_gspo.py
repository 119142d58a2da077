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

from read_settings import HOLE, OF_ENGINES, Code, Unread, commands, flags, flat, number, with_values

FACTS = json.loads(Path(__file__).with_name("public_configurations.json").read_text("utf-8"))
HEREDOC = re.compile(r"""(?s)([^\n]*<<-?\s*['"]?(\w+)['"]?[^\n]*)\n(.*?)\n\s*\2(?=\n|$)""")


def with_defaults(text, folder):
    """The settings of a YAML file, and those of the files beside it that its `defaults` name."""
    try:
        import yaml
    except ImportError:
        raise ValueError("install PyYAML to read it, or pass its settings as flags") from None
    own = flat(yaml.safe_load(text) or {})
    bases = own.pop("defaults", [])
    bases = bases if isinstance(bases, list) else [bases]
    found = {}
    for base in bases if "_self_" in bases else [*bases, "_self_"]:  # the last one wins
        path = folder / f"{str(base).removesuffix('.yaml')}.yaml"
        if base == "_self_":
            found |= own
        elif path.is_file():
            found |= with_defaults(path.read_text("utf-8"), path.parent)
        elif not re.fullmatch(OF_ENGINES, str(base)):
            may_change = Unread(f"{HOLE}, because {base} may change it")
            found = dict.fromkeys(found, may_change) | {None: base}
    return found


def yaml_settings(text, folder):
    """The same, with the values of variables such as ${actor.path}."""
    found = with_defaults(text, folder)
    for key, value in found.items():
        name = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        found[key] = found.get(name[1], Unread(value)) if name else value
    return found


def shell_settings(text, folder):
    """The flags of a script, and the YAML that it writes with cat <<EOF into its --config."""
    found = flags(commands(HEREDOC.sub("\n", text)))
    for line, _, body in HEREDOC.findall(with_values(text)):
        if None in found and Path(found[None]).name in line:
            del found[None]
            found = yaml_settings(body, folder) | found
    return found if engine_of(found) else flags(commands(text))  # one may be in the text


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
    found = [flat(one) | ({"unsloth": True} if is_unsloth else {})
             for one in Code(body).configurations()]
    found = [one for one in found if engine_of(one)]
    # A command in texts, such as subprocess.run(["--flag", "value"]), without the docstrings
    words = re.sub(r'(?ms)^ *""".*?"""|add_argument\(.*?\)', "", code)
    words = re.sub(r"\bf?['\"]|['\"],?", " ", re.sub(r"\{[^{}]*\}", HOLE, words))
    shell += "\n".join(command for cell in cells for _, command in re.findall(magic, cell))
    return found or [flags(words), flags(commands(shell))]


def settings_in(path):
    """The settings of each run that a file may describe."""
    text = path.read_text("utf-8")
    if path.suffix in (".yaml", ".yml", ".json"):
        found = yaml_settings(text, path.parent)
        return [found if engine_of(found) else flags(text)]  # a command may be one of its values
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


def look(settings, names, default, engine):
    """The value of the first of these names that is set, or the default; and where it is from."""
    for name in names.split("|"):
        for key, value in settings.items():
            is_set = value is not None and str(value) not in ("None", "null")
            if is_set and f".{key}".endswith("." + name.strip("!")):
                if isinstance(value, Unread) or HOLE in str(value):
                    return HOLE, f"{key} = {value}, which cannot be read"
                if "!" in name:
                    return HOLE, f"{key} = {value}, but the number of processes is not known"
                return str(value), f"{key} = {value}"
    if None in settings and names:
        return HOLE, f"{names.split('|')[0]} may be set in {settings[None]}"
    if default in engine["same"]:
        return look(settings, default, engine["same"][default], engine)
    for key, value in settings.items() if names == engine["level"][0] else ():
        if re.search("(loss|algo|estimator|method|variant).*=gspo", f"{key}={value}".lower()):
            return HOLE, f"{key} = {value}, which is not a setting of {engine['name']}"
    name = names.split("|")[0] or "a setting"
    return default, f"{name} is not set; the default of {engine['name']} is {default}"


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
    return math.ceil(updates) if is_rounded else updates, sources


def judged(settings):
    """What --json prints for the settings of one run, and the source of each value."""
    engine = engine_of(settings)
    if engine is None:
        names = "level", "mean", "updates", "eps_low", "eps_high", "verdict"
        return dict.fromkeys(names, "unknown"), {"level": ["no setting of a known engine is found"]}
    level, mean, low, high, old = (look(settings, *engine[name], engine)
                                   for name in ("level", "mean", "low", "high", "old"))
    updates, steps = updates_of(settings, engine)
    values = {
        "level": engine.get("levels", FACTS["levels"]).get(level[0].lower(), "unknown"),
        "mean": FACTS["means"].get(mean[0].lower(), "unknown"),
        "updates": int(updates) if updates % 1 == 0 else updates,
        "eps_low": number(low[0]),
        "eps_high": number(high[0])}
    values["verdict"] = verdict(**values)
    values = {key: "unknown" if value != value else value for key, value in values.items()}
    sources = {"level": [level[1]], "mean": [mean[1]], "updates": steps, "eps_low": [low[1]],
               "eps_high": [high[1]], "old": [old[1]]}
    if values["mean"] == "other":
        sources["words"] = f"{FACTS['other_means'][mean[0].lower()]} ({mean[0]})"
    return values, sources


def verdict(level, mean, updates, eps_low, eps_high):
    if level == "unknown":
        return "unknown"
    if level == "token":
        return "not_gspo"
    if updates and 1 / updates % 1 == 0:  # one update, or several rollouts for one update
        return "never_clipped"
    if mean in ("tokens", "other"):
        return "other_mean"
    if eps_low > 0.05 or eps_high > 0.05:
        return "wide_range"
    return "gspo" if mean == "responses" and eps_low + eps_high > 0 else "unknown"


def remarks(runs):
    """What a user should know besides the verdict, which does not depend on it."""
    found = [f"the file has {len(runs)} configurations"] * (len(runs) > 1)
    for run in runs:
        for key, value in run.items():
            harmless = FACTS["additions"].get(str(key).split(".")[-1], [str(value)])
            if str(value) not in harmless:
                found.append(f"{key} = {value}, which the verdict does not consider")
        engine = engine_of(run)
        estimator, source = look(run, *engine.get("advantages", ("", "grpo")), engine)
        if estimator != "grpo":
            found.append(f"{source}. {FACTS['advantages']}")
    return dict.fromkeys(found)


def answer(values, mean):
    """The last lines: the verdict, and each deviation from GSPO."""
    sides = [values[side] for side in ("eps_low", "eps_high") if values[side] != "unknown"]
    holds = {"mean": values["mean"] in ("tokens", "other"),
             "range": max(sides, default=0) > 0.05,
             "updates": values["updates"] == "unknown"}
    more = [FACTS["deviations"][name].format(mean=mean) for name in holds if holds[name]]
    return [FACTS["verdicts"][values["verdict"]], *more]


def together(runs):
    """One result: of the runs with a ratio per sequence, if there are some. Otherwise, of all."""
    results = [judged(run) for run in runs]
    results = [one for one in results if one[0]["level"] == "sequence"] or results
    values, sources = results[0]
    for others, _ in results[1:]:
        for key in [key for key in values if values[key] != others[key]]:
            values[key] = "unknown"
            sources.setdefault(key, []).append("several configurations of the file differ")
    return values, sources


def main(arguments):
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
    runs = [run | given for run in found if engine_of(run | given)]
    values, sources = together(runs or [{}])
    if "--json" in arguments:
        print(json.dumps(values))
        return
    mean = sources["words"] if values["mean"] == "other" else values["mean"]
    for name, question in FACTS["questions"].items():
        value = mean if name == "mean" else values.get(name, "")
        print(f"{question}: {value}")
        print(*[f"      {source}" for source in dict.fromkeys(sources.get(name, []))], sep="\n")
    notes = [f"note: {remark}" for remark in remarks(runs)]
    print(*notes, FACTS["not_read"], *answer(values, mean), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
