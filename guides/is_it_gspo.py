"""Is it GSPO? Reads a configuration and says whether it computes GSPO, Eq. 5 of the paper.

    python guides/is_it_gspo.py FILE [key=value ...]    .py, .ipynb, .yaml, or a shell script
    python guides/is_it_gspo.py --importance_sampling_level sequence --loss_type grpo
    python guides/is_it_gspo.py --json FILE             prints one JSON object

It needs python_settings.py, which reads Python files, public_configurations.json, which has the
keys and defaults of each engine, and PyYAML for YAML files. No code of the file is run. What the
check cannot read is reported, and is "unknown". The page is_it_gspo.md explains the questions.
"""
import ast
import collections
import json
import math
import re
import sys
from pathlib import Path

from python_settings import Code, Unread, computed

FACTS = json.loads(Path(__file__).with_name("public_configurations.json").read_text("utf-8"))
HOLE = "<?>"  # stands in a script for what cannot be read
ASSIGNMENT = r"""(?<![\w.$-])(\w+)=("[^"]*"|'[^']*'|\$\(\(.*?\)\)|\$\([^)]*\)|[^\s;&|]*)"""
VARIABLE = re.compile(r"\$\(\((.*?)\)\)|\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$(\w+)"
                      r"|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`")
FLAG = r"--[A-Za-z][\w.-]*"
OVERRIDE = r"[+~]*[A-Za-z]\w*(\.\w+)+"  # of hydra, which has the form a.b=value


def with_values(script):
    """A shell script without comments, with the values of its variables where they are known."""
    script = re.sub(r"(?m)(^|\s)#.*$", "", script).replace("\\\n", " ")
    names = collections.defaultdict(set)
    for name, text in re.findall(ASSIGNMENT, script):
        names[name].add(text.strip("'\""))

    def known(match):
        inside, name, default, plain = match.groups()
        if inside:
            inside = re.sub(r"(?<![\w{$])[A-Za-z_]\w*", r"$\g<0>", inside)
            inside = VARIABLE.sub(known, inside)
            return f"$(({inside}))" if "$" in inside else str(computed(inside.replace("/", "//")))
        texts = names.get(name or plain, [default or HOLE])
        return min(texts) if len(texts) == 1 else HOLE

    for _ in range(5):  # a value may name other variables
        script = VARIABLE.sub(known, script)
    return VARIABLE.sub(HOLE, script)


def flags(script):
    """The settings of a command or a shell script: --flag value, --flag=value and a.b=value."""
    plain = re.sub("['\"]", "", with_values(script))
    words = re.findall(r"[^\s;&|()]+|[\n;&|()]", plain) + ["\n", "\n"]
    found = {}
    for i, word in enumerate(words[:-2]):
        key, equals, value = word.partition("=")
        if not re.fullmatch(f"{FLAG}|{OVERRIDE}" if equals else FLAG, key):
            continue
        key = key.lstrip("+~-").replace("-", "_")
        if key.endswith("eps_clip_low_high"):
            found |= {"eps_clip_low": words[i + 1], "eps_clip_high": words[i + 2]}
        if not equals:
            value = words[i + 1]
            value = "true" if re.match(r"--?[A-Za-z]|[\n;&|()]", value) else value
        key = None if key == "config" else key  # a file, which may set what is missing here
        is_same = found.setdefault(key, value) == value
        found[key] = value if is_same else Unread(f"{HOLE}, because it has several values")
    return found


def flat(items, path=""):
    """Nested settings as {"a.b": value}."""
    found = {}
    for key, value in items.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{path}{key}.")
        else:
            found[f"{path}{key}" if key else None] = value
    return found


def yaml_settings(text):
    try:
        import yaml
    except ImportError:
        raise ValueError("install PyYAML to read it, or pass its settings as flags") from None
    found = flat(yaml.safe_load(text) or {})
    for key, value in found.items():
        name = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
        found[key] = found.get(name[1], Unread(value)) if name else value
    base = found.get("defaults")
    if isinstance(base, str) and not base.endswith("grpo_math_1B.yaml"):  # it has the defaults
        found[None] = base
    return found


def python_settings(cells):
    magic, body = r"(?m)^( *)[%!]((?:.*\\\n)*.*)", []
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
    shell = "\n".join(command for cell in cells for _, command in re.findall(magic, cell))
    return found or [flags(words), flags(shell)]


def settings_in(path):
    """The settings of each run that a file may describe."""
    text = path.read_text("utf-8")
    if path.suffix in (".yaml", ".yml", ".json"):
        found = yaml_settings(text)
        return [found if engine_of(found) else flags(text)]  # a command may be one of its values
    if path.suffix == ".py":
        return python_settings([text])
    if path.suffix == ".ipynb":
        cells = [one for one in json.loads(text)["cells"] if one["cell_type"] == "code"]
        return python_settings(["".join(cell["source"]) for cell in cells])
    return [flags(text)]


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


def number(text):
    return float(text) if re.fullmatch(r"[\d.]+(e[+-]?\d+)?", text) else math.nan


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
        "eps_high": number(high[0]),
    }
    values["verdict"] = verdict(**values)
    values = {key: "unknown" if value != value else value for key, value in values.items()}
    sources = {"level": [level[1]], "mean": [mean[1]], "updates": steps, "eps_low": [low[1]],
               "eps_high": [high[1]], "old": [old[1]]}
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
    for name, question in FACTS["questions"].items():
        print(f"{question}: {values.get(name, '')}")
        print(*[f"      {source}" for source in dict.fromkeys(sources.get(name, []))], sep="\n")
    print(FACTS["verdicts"][values["verdict"]])


if __name__ == "__main__":
    main(sys.argv[1:])
