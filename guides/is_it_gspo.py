"""Is it GSPO? Reads a configuration and says whether it computes GSPO, Eq. 5 of the paper.

    python guides/is_it_gspo.py FILE [key=value ...]    .py, .ipynb, .yaml, or a shell script
    python guides/is_it_gspo.py --importance_sampling_level sequence --loss_type grpo
    python guides/is_it_gspo.py --json FILE             prints one JSON object

It needs the standard library, PyYAML for YAML files, and public_configurations.json, which has the
keys and defaults of each engine. It runs no code of the file. What it cannot read is "unknown" and
is reported. The page is_it_gspo.md explains the five questions.
"""
import ast
import collections
import json
import math
import re
import sys
from pathlib import Path

FACTS = json.loads(Path(__file__).with_name("public_configurations.json").read_text("utf-8"))
CONFIG = re.compile(r"(GRPO|GSPO)\w*Config$")
HOLE = "<?>"  # stands in a script for what cannot be read
ASSIGNMENT = r"""(?<![\w.$-])(\w+)=("[^"]*"|'[^']*'|\$\(\(.*?\)\)|\$\([^)]*\)|[^\s;&|]*)"""
VARIABLE = re.compile(r"\$\(\((.*?)\)\)|\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$(\w+)"
                      r"|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`")


class Unread(str):
    """The text of an expression whose value the check cannot know."""


def computed(text):
    """The result of an arithmetic expression of numbers."""
    try:
        is_plain = re.fullmatch(r"(?!.*\*\*)[\d\s.e+*/()-]+", text)
        return eval(text) if is_plain else Unread(text)
    except (SyntaxError, ArithmeticError, TypeError):
        return Unread(text)


def text_of(node):
    """The source of an expression. It is the same for x["a"] and x.a."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{ast.unparse(node.value)}.{node.slice.value}"
    return ast.unparse(node)


class Code:
    """The assignments of a Python file or notebook, in any order. None of it is run."""

    def __init__(self, body):
        self.nodes = list(ast.walk(ast.Module(body, [])))
        self.assigned = collections.defaultdict(list)
        self.open = []
        for node in self.nodes:
            is_if = isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test)
            for child in ast.iter_child_nodes(node):
                child.parent = node
                child.is_conditional = is_if or getattr(node, "is_conditional", False)
            if isinstance(node, ast.ClassDef):
                self.assigned[node.name].append(node)
            elif isinstance(node, ast.arg):
                self.assigned[node.arg].append(node)
            elif isinstance(node, ast.alias):
                self.assigned[node.asname or node.name].append(node)
            for target in getattr(node, "targets", []) + [getattr(node, "target", None)]:
                is_plain = isinstance(node, (ast.Assign, ast.AnnAssign))
                if target and not isinstance(node, ast.Delete):
                    self.assigned[text_of(target)].append(node.value if is_plain else node)

    def value(self, node):
        """The value of an expression, or an Unread with its source."""
        text = Unread(text_of(node) if node else "")
        if node is None or isinstance(node, ast.Constant):
            return node and node.value
        if isinstance(node, (ast.Attribute, ast.alias)) and CONFIG.search(text.split(" as ")[0]):
            return {"is_config": True}
        if isinstance(node, (ast.Dict, ast.Call, ast.ClassDef)):
            return self.contents(node)
        if text in self.assigned and text not in self.open:
            self.open.append(text)
            found = [self.value(one) for one in self.assigned[text]]
            self.open.pop()
            if any(one != found[0] for one in found):
                return Unread(f"{text}, which has several values")
            return self.changed(found[0], text)
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            owner = self.value(node.value)
            key = node.attr if isinstance(node, ast.Attribute) else self.value(node.slice)
            return owner.get(key, text) if isinstance(owner, dict) else text
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            names = r"[A-Za-z_][\w.]*"
            return computed(re.sub(names, lambda name: str(self.value(ast.Name(name[0]))), text))
        return text

    def contents(self, node):
        """What a dict, an object or a class holds. The key None has what cannot be read of it."""
        made = {}
        if isinstance(node, ast.Dict):
            pairs = [(key and self.value(key), one) for key, one in zip(node.keys, node.values)]
        elif isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
            if text_of(node.func).endswith("field"):
                return self.value(dict(pairs).get("default"))
            made = {} if text_of(node.func) == "dict" else self.value(node.func)
        else:
            inside = [one for one in node.body if hasattr(one, "target")]
            pairs = [(None, base) for base in node.bases]
            pairs += [(text_of(one.target), one.value) for one in inside]
        if not isinstance(made, dict):
            return Unread(text_of(node))
        for key, child in pairs:
            value = self.value(child)
            inside = value if isinstance(value, dict) else {None: value}
            made = made | ({key: value} if key else inside)
        return made

    def changed(self, value, name):
        """An object with what is assigned to its items or attributes elsewhere."""
        for text, nodes in self.assigned.items() if isinstance(value, dict) else ():
            owner, _, key = text.rpartition(".")
            if owner == name:
                new = self.value(nodes[0])
                if len(nodes) > 1 or nodes[0].is_conditional:
                    new = Unread(f"{text}, which depends on a condition")
                value = value | {key: new}
        return value

    def configurations(self):
        """Each GRPOConfig that is made, or else the classes of it, or else the dicts."""
        for kind in ast.Call, ast.ClassDef, ast.Dict:
            found = []
            for node in [node for node in self.nodes if isinstance(node, kind)]:
                value = self.value(node)
                if kind is ast.Dict or isinstance(value, dict) and "is_config" in value:
                    target = getattr(node.parent, "targets", [node])[0]
                    found.append(flat(self.changed(value, text_of(target))))
            if found:
                break
        return found


def flags(script):
    """The settings of a command or a shell script: --flag value, --flag=value and a.b=value."""
    script = re.sub(r"(?m)(^|\s)#.*$", "", script).replace("\\\n", " ")
    names = collections.defaultdict(set)
    for name, text in re.findall(ASSIGNMENT, script):
        names[name].add(text.strip("'\""))

    def known(match):
        inside, name, default, plain = match.groups()
        if inside:
            inside = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", r"$\1", inside)
            inside = VARIABLE.sub(known, inside)
            return f"$(({inside}))" if "$" in inside else str(computed(inside.replace("/", "//")))
        texts = names.get(name or plain, [default or HOLE])
        return min(texts) if len(texts) == 1 else HOLE

    for _ in range(5):
        script = VARIABLE.sub(known, script)
    plain = re.sub("['\"]", "", VARIABLE.sub(HOLE, script))
    words = re.findall(r"[^\s;&|()]+|[\n;&|()]", plain)
    found = {}
    for word, value, second in zip(words, words[1:] + [";"], words[2:] + [";", ";"]):
        key, equals, given = word.partition("=")
        if re.fullmatch(r"--[A-Za-z][\w.-]*" + r"|[+~]*\w+(\.\w+)+" * bool(equals), key):
            key = key.lstrip("+~-").replace("-", "_")
            if key.endswith("eps_clip_low_high"):
                found |= {"eps_clip_low": value, "eps_clip_high": second}
            if equals or re.match(r"--?[A-Za-z]|[\n;&|()]", value):
                value = given or "True"
            is_same = found.setdefault(key, value) == value
            found[key] = value if is_same else Unread(f"{HOLE}, it has several values")
    return found


def flat(items, path=""):
    """Nested settings as {"a.b": value}."""
    found = {}
    for key, value in items.items():
        inner = value if isinstance(value, dict) else {}
        found |= flat(inner, f"{path}{key}.") or {key and f"{path}{key}": value}
    return found


def settings_in(path):
    """The settings of each run that a file may describe."""
    text = path.read_text("utf-8")
    if path.suffix in (".yaml", ".yml"):
        import yaml
        return [flat(yaml.safe_load(text))]
    if path.suffix not in (".py", ".ipynb"):
        return [flags(text)]
    parts = [text]
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        parts = ["".join(cell["source"]) for cell in cells]
    magic = r"(?m)^( *)[%!]((?:.*\\\n)*.*)"
    body = []
    for part in parts:
        try:
            body += ast.parse(re.sub(magic, r"\1pass", part)).body
        except SyntaxError:
            if "Config(" in part or len(parts) == 1:
                raise
    code = re.sub(r'(?ms)^ *""".*?"""', "", ast.unparse(body))
    words = re.sub(r"\bf?['\"]|['\"],?", " ", re.sub(r"\{[^{}]*\}", HOLE, code))
    unsloth = {"unsloth": True} if re.search(r"(import|from) unsloth", text) else {}
    return [found | unsloth for found in Code(body).configurations()] or [flags(words)]


def judged(settings):
    """What --json prints for settings of one engine, and where each value comes from."""
    keys = "\n".join(map(str, settings))
    engine = next(one for one in FACTS["engines"] if re.search(one["keys"], keys, re.MULTILINE))
    defaults = dict(sum(sum(engine["updates"], []), [engine["low"]]))
    sources = []

    def look(names, default):
        """The value of the first of these names that is set, or the default."""
        for name in names.split("|"):
            for key, value in settings.items():
                if f".{key}".endswith("." + name.strip("!")) and str(value) not in ("None", "null"):
                    sources.append(f"{key} = {value}")
                    return HOLE if "!" in name or isinstance(value, Unread) else str(value)
        if None in settings:
            sources.append(f"{names} may be set in {settings[None]}")
            return HOLE
        if default in defaults:
            return look(default, defaults[default])
        sources.append(f"{names} = {default}, the default of {engine['name']}")
        return default

    def number(names, default):
        text = look(names, default)
        return float(text) if re.fullmatch(r"[\d.]+(e-?\d+)?", text) else math.nan

    level = FACTS["levels"].get(look(*engine["level"]).lower(), "unknown")
    mean = FACTS["means"].get(look(*engine["mean"]).lower(), "unknown")
    low, high = number(*engine["low"]), number(*engine["high"])
    for factors, divisors in engine["updates"]:
        updates = math.prod(number(*item) for item in factors)
        updates /= math.prod(number(*item) for item in divisors)
        if updates == updates:
            break
    look(*engine["old"])
    tests = {
        "unknown": level == "unknown",
        "not_gspo": level == "token",
        "never_clipped": 1 / updates % 1 == 0,
        "other_mean": mean in ("tokens", "other"),
        "wide_range": low > 0.05 or high > 0.05,
        "gspo": mean == "responses" and low + high > 0,
    }
    verdict = [name for name, holds in tests.items() if holds] + ["unknown"]
    values = {"level": level, "mean": mean, "updates": updates, "eps_low": low, "eps_high": high}
    values = {key: "unknown" if value != value else value for key, value in values.items()}
    return values | {"verdict": verdict[0]}, sources


def main(arguments):
    files = [Path(text) for text in arguments if Path(text).is_file()]
    words = [text for text in arguments if text != "--json" and Path(text) not in files]
    try:
        runs = settings_in(files[0]) if files else [{}]
    except (ImportError, ValueError, SyntaxError, KeyError, TypeError) as error:
        sys.exit(f"{files[0]} cannot be read: {error}")
    runs = [judged(run | flags(" ".join(words))) for run in runs]
    runs = [run for run in runs if run[0]["level"] == "sequence"] or runs
    values, sources = runs[0]
    for other, more in runs[1:]:
        sources += more
        values = {key: value if other[key] == value else "unknown" for key, value in values.items()}
    if "--json" in arguments:
        print(json.dumps(values))
        return
    for name, question in FACTS["questions"].items():
        print(f"{question}: {values.get(name)}")
    print("\n".join(sources), FACTS["verdicts"][values["verdict"]], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
