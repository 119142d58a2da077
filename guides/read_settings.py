"""The settings in a Python file, YAML or a shell script, for is_it_gspo.py. No code is run.

Names, attributes and items are replaced by what is assigned to them anywhere in the file. What is
assigned twice with different values, only under a condition, or through another name, is unread.
If the trainer may have another loss than the engine, all settings are unread.
"""
import ast
import builtins
import collections
import functools
import math
import re

CONFIG = re.compile(r"(GRPO|GSPO)\w*Config$|RLHFArguments$")
DICTS = "dict", "SimpleNamespace", "Namespace", "EasyDict"  # calls that keep their keywords
KNOWN = re.compile(r"(^|\.)((Unsloth)?GRPOConfig|RLHFArguments)$")  # with the defaults of an engine
IMPORTS = re.compile(r"(trl(?!\.experimental)|unsloth\w*|swift|transformers)(\.|$)")
TRAINER = re.compile(r"(?i)trainer(_?cls|_?class)?$")
LOSS = re.compile(r"^_?compute_loss|logps|^args$|^\(\)$|training_step|_prepare_inputs|_and_score")
INNER = re.compile(r"Config$|Arguments$|Trainer|Callback|dataclass")  # may set what is theirs
FRESH = re.compile(r"(^|\.)([A-Z]\w*|dict|defaultdict|parse_args|deepcopy|replace)$")  # new objects
PERHAPS = ast.match_case, ast.Try, ast.For, ast.While, ast.BoolOp  # may not run what is in them
LIKE = re.compile(r"(?i)arg|cfg|conf|trainer|\(\)$")  # may be a configuration
# Calls that do not change what they are given, besides the functions of Python
HARMLESS = re.compile(
    r"(^|[._])(p?print|log|logger|logging|display|save|show|json|wandb|yaml|generate)([._]|$)"
    r"|(^|\.)(replace|deepcopy|copy|asdict|fields|signature|append)$|rlhf_main$"
    r"|\.(get\w*|to_\w+|items|keys|values)$|(Config|Arguments|Parser|Callback)$"
    r"|^(trl\.)?\w*rainer$")
DICT = ast.Name("dict")
COPIES = "dict", "float", "int", "str", "replace", "deepcopy", "asdict", "vars"  # of an argument
OF_ENGINES = r"(.*/)?(grpo_math_1B|ppo(_megatron)?_trainer)(\.yaml)?"  # with an engine's defaults
STEPS = 100_000  # of the evaluation of a file; our largest example of a training needs 17,000
HOLE = "<?>"  # stands in a script for what cannot be read
QUOTED = r"""("(?:\\[\s\S]|[^"\\])*"|'[^']*')"""
COMMENT = rf"(?m){QUOTED}|(?:^|(?<=\s))#.*$"
OUTPUT = r"\$\((?!\()[^()]*\)|`[^`\n]*`"  # of a command
LIST = rf"""\((?:{QUOTED}|\$\(\(.*?\)\)|[^()"'])*\)"""
END = rf"(?<==){LIST}|{QUOTED}|(&&|\|\||[;|])"  # of a command, if it is not in a text
VARIABLE = (r"\$\(\((.*?)\)\)|\$\{(\w+)(\[[@*]\])?(?::?([-=])([^{}\n]*))?\}|\$(\w+)"
            r"|\$\{[^{}\n]*\}")
TEXT = rf"""(?:{QUOTED}|\$\(\(.*?\)\)|\$\{{[^{{}}]*\}}|[^\s;&|()"'])*"""
ASSIGNMENT = re.compile(rf"(?<![\w.$+@/-])(\w+)(\+?)=({LIST}|{TEXT})")
REPEATED = re.compile(r"(?m)^\s*(function|for|while|until)\b|^\s*\w+\s*\(\)")
FLAG = r"--[A-Za-z][\w.-]*"
OVERRIDE = r"[+~]*[A-Za-z]\w*(\.\w+)+"  # of hydra, which has the form a.b=value
SETTING = rf"({FLAG}|{OVERRIDE}(?==))"
SET = rf"{SETTING}(=\S*|\s+[^-\s]\S*)?"
UNSURE = rf"\1={HOLE}"  # the same flag, if its value depends on a condition
LAUNCHER = r"(accelerate launch|torchrun|deepspeed)\b[^\n]*?(?=\s\S+\.py\b|\s-m\s)"
LEVEL = re.compile(r"(--|\.)\S*(importance.sampling|loss_mode|policy_loss|advantage.estimator)")
# What is not part of a command's list of words: the program, texts, and files of the output
BESIDE = (r"(?m)^.*?(\.py\b|\s-m\s+\S+|\b(rlhf|grpo)\b)"
          rf"|(=|{FLAG}\s+)(?!.\$\w+\[){QUOTED}|\d?>+\s*\S+")
UNREAD_WORD = rf"(?<!\S)({FLAG}\s+)?(\$\w+(?:\[.\])?|\$[@*]|{re.escape(HOLE)})(?!\S)"
# Of hydra: what may set more than it names
GROUP = re.compile(r"-cn(=.*)?|\+\w[\w/]*=.*|\+*[\w/]+@[\w.]+=.*|"
                   r"[+\w.]*\b(actor_rollout_ref|actor|policy_loss|algorithm|data|loss_fn)=\{.*")
YAML_VARIABLE = re.compile(r"\$\{(?:([\w.]+)|(add|mul|div):([^{},]+),([^{},]+))\}")
SIGNS = {"add": "+", "mul": "*", "div": "/"}


class Unread(str):
    """The text of an expression whose value the check cannot know."""


def computed(text):
    """The result of an arithmetic expression of numbers."""
    is_plain = re.fullmatch(r"(?!.*\*\*)[\d\s.e+*/()-]+", text)
    try:
        return eval(text) if is_plain else Unread(text)
    except (SyntaxError, ArithmeticError, TypeError):
        return Unread(text)


def flat(items, path=""):
    """Nested settings as {"a.b": value}."""
    found = {}
    for key, value in items.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{path}{key}.")
        else:
            found[f"{path}{key}" if key else None] = value
    return found


def unread(items, reason):
    """The same settings, if something that is not read may change all of them."""
    may_change = Unread(f"{HOLE}, because {reason} may change it")
    return dict.fromkeys(items, may_change) | {None: reason}


def with_defaults(text, folder):
    """The settings of a YAML file, and those of the files beside it that its `defaults` name."""
    try:
        import yaml
    except ImportError:
        raise ValueError("install PyYAML to read it, or pass its settings as flags") from None
    own = yaml.safe_load(text) or {}
    if isinstance(own, list):  # the overrides of a command, as in .hydra/overrides.yaml
        return flags("\n".join(own))
    own = flat(own)
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
            found = unread(found, base)
    return found


def yaml_settings(text, folder):
    """The same, with the values of variables such as ${actor.path} and ${mul:2,${actor.size}}."""
    found = with_defaults(text, folder)

    def known(match):
        name, sign, left, right = match.groups()
        value = found.get(name, match[0]) if name else computed(f"{left}{SIGNS[sign]}{right}")
        return match[0] if isinstance(value, Unread) else str(value)

    for _ in range(5):  # a value may name other variables
        for key, value in found.items():
            found[key] = YAML_VARIABLE.sub(known, str(value)) if "${" in str(value) else value
    return {key: Unread(value) if "${" in str(value) else value for key, value in found.items()}


def number(text):
    return float(text) if re.fullmatch(r"[\d.]+([eE][+-]?\d+)?", text) else math.nan


def filled(text, values):
    """A text with the values of the variables that it names. What is not known stays $NAME."""
    def known(match):
        inside, name, is_list, sign, default, plain = match.groups()
        if inside:
            inside = re.sub(r"(?<![\w{$])[A-Za-z_]\w*", r"$\g<0>", inside)
            result = computed(filled(inside, values).replace("/", "//"))
            return HOLE if isinstance(result, Unread) else str(result)
        name = name or plain
        value = values.get(name) or default if sign else values.get(name, HOLE)
        if sign == "=":
            values[name] = value
        return f"${name}{is_list or ''}" if name and value == HOLE else value

    for _ in range(5):  # a value may name other variables
        text = re.sub(VARIABLE, known, text)
    return text


def commands(script):
    """The lines of a script that start the training; their words that are not read; and the values
    of all variables. The last assignment above a line counts. A line that starts with a flag is no
    command, for example after a comment. If a command sets the level, others do not count. With a
    loop or a function, all lines count, and a variable must have one value."""
    script = re.sub(COMMENT, lambda match: match[1] or "", script).replace("\\\n", " ")
    for _ in range(5):  # a command may be inside another one
        script = re.sub(OUTPUT, HOLE, script)
    script = re.sub(r"\$\{[@*][^{}]*\}", "$@", script)
    script = re.sub(END, lambda match: f"\n{match[3]} " if match[3] else " ".join(match[0].split()),
                    script)
    values, is_repeated = {}, bool(REPEATED.search(script))
    for _ in range(1 + is_repeated):  # a function may use what is assigned below it
        lines, depth = [], 0
        for line in script.splitlines():
            is_sure = depth == 0 and not line.startswith(("&&", "||"))
            line = re.sub(r"^[\s;&|]*((then|else|do)\b\s*)?", "", line)
            depth += bool(re.match(r"(if|case)\b", line)) - bool(re.match(r"(fi|esac)\b", line))
            for name, sign, text, *_ in ASSIGNMENT.findall(line):
                text = re.sub("['\"]", "", text[1:-1] if text.startswith("(") else text)
                text = text if is_sure else re.sub(SET, UNSURE, text)
                new, old = filled(text, values), values.get(name, "")
                if sign:
                    new = f"{old} {new}"
                elif (name in values and old != new and not (is_sure and not is_repeated)
                        and not re.search(rf"\$\{{?{name}\b", text)):
                    both = f"{old} {new}"
                    new = re.sub(SET, UNSURE, both) if re.search(SETTING, both) else HOLE
                elif not is_sure and re.search(rf"\$\{{{name}:?[-=][^}}]", script):
                    new = HOLE  # and not the default
                values[name] = new
            line = re.sub(LAUNCHER, r"\1", filled(ASSIGNMENT.sub("", line), values))
            lines += [line] * (not re.match(rf"{SETTING}|(echo|printf)\b", line))
    if not is_repeated:
        lines = [line for line in lines if LEVEL.search(line)] or lines
    words = re.sub(BESIDE, "", "\n".join(line for line in lines if re.search(SETTING, line)))
    found = re.findall(UNREAD_WORD, re.sub("['\"]", "", words))
    return lines, [word for flag, word in found if not flag or "[" in word], values


def flags(script, is_script=False):
    """The settings of a command or a shell script: --flag value, --flag=value and a.b=value."""
    lines, missing, _ = commands(script) if is_script else ([script], [], {})
    plain = re.sub("['\"]", "", "\n".join(lines))
    words = re.findall(r"[^\s;&|()]+|[\n;&|()]", plain) + ["\n", "\n"]
    found, keys = {}, []
    for i, word in enumerate(words[:-2]):
        key, equals, value = word.partition("=")
        if GROUP.fullmatch(word):
            found[None] = word
        if word == "-m":  # the module of a command
            found["-m"] = words[i + 1]
        if not re.fullmatch(f"{FLAG}|{OVERRIDE}" if equals else FLAG, key):
            continue
        key = key.lstrip("+~-").replace("-", "_")
        if key.endswith("eps_clip_low_high"):
            found |= {"eps_clip_low": words[i + 1], "eps_clip_high": words[i + 2]}
        if not equals:
            value = words[i + 1]
            value = "true" if re.match(r"--?[A-Za-z]|[\n;&|()]", value) else value
        is_own = key == "config_name" and not re.fullmatch(OF_ENGINES, value)
        key = None if is_own or key in ("config", "cfg") else key  # a file may set the rest
        keys.append(key)
        is_same = found.setdefault(key, value) == value
        value = Unread(value) if "$" in value else value
        found[key] = value if is_same else Unread(f"{HOLE}, because it has several values")
    runs = max([keys.count(key) for key in found if LEVEL.search(f"--{key}")], default=1)
    only_some = Unread(f"{HOLE}, because only some commands set it")
    found |= {key: only_some for key in {*keys} - {None} if keys.count(key) < runs}
    # Arguments of the script, and slime's files about the model, seldom change the loss
    noted = [word for word in missing if re.match(r"\$([@*\d]|\w*MODEL)", word)]
    if {*missing} - {*noted}:
        found[None] = " and ".join([*found.get(None, "").split(), *missing])
    return found | ({"$": ", ".join(noted)} if noted else {})


@functools.cache
def text_of(node):
    """The source of an expression. It is the same for x["a"] and x.a."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{text_of(node.value)}.{node.slice.value}"
    if isinstance(node, ast.Attribute):
        return f"{text_of(node.value)}.{node.attr}"
    return ast.unparse(node)


class Code:
    """The assignments of a file: {text of the target: nodes of its values}."""

    def __init__(self, body):
        self.nodes = list(ast.walk(ast.Module(body, [])))
        self.assigned = collections.defaultdict(list)
        self.open, self.other_losses, self.made_here = [], [], set()
        self.calls = collections.defaultdict(list)
        self.known, self.lowest, self.steps = {}, math.inf, 0
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                child.parent = node
        for node in self.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in getattr(node, "targets", None) or [node.target]:
                    self.keep(target, node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
                self.record(f"{text_of(node.target)}.", node.value, node)
            elif isinstance(node, (ast.AugAssign, ast.Delete)):
                for target in getattr(node, "targets", None) or [node.target]:
                    self.keep(target, ast.Name(ast.unparse(node)))
            elif isinstance(node, (ast.For, ast.comprehension)):
                self.keep(node.target, node.target)
            elif isinstance(node, ast.arg):
                self.assigned[node.arg].append(node)
            elif isinstance(node, ast.alias):
                module = getattr(node.parent, "module", "trl") or ""
                origin = node.name if IMPORTS.match(module) else f"{module}:{node.name}"
                self.assigned[node.asname or node.name].append(ast.Name(origin))
                if TRAINER.search(node.name) and origin != node.name:
                    self.other_losses.append(origin)
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                self.made_here.add(node.name)
                is_inner = isinstance(node.parent, ast.ClassDef)
                if is_inner or isinstance(node, ast.ClassDef) or "Config" in text_of(node):
                    self.record("self." * is_inner + node.name, node, node)
                beside = [text_of(one) for one in node.decorator_list + getattr(node, "bases", [])]
                if any(TRAINER.search(one) or CONFIG.search(one) for one in beside):
                    self.other_losses += [one for one in beside if not INNER.search(one)
                                          and one not in self.made_here]
                if LOSS.search(node.name):
                    self.other_losses.append(node.name)
            elif isinstance(node, ast.Call):
                self.keep_changes(node)
        if not {"GRPOTrainer", "trl"} & {*self.assigned}:  # then it is from another file
            self.other_losses += [one.id for one in self.assigned.get("*", ()) if one.id != "*"]
        self.known = {}  # values of names that were not all assigned yet

    @staticmethod
    def unsure(body):
        """The code. In its texts, settings under a condition have unknown values."""
        for node in ast.walk(ast.Module(body, [])):
            is_if = isinstance(node, (ast.If, ast.IfExp)) and "__name__" not in text_of(node.test)
            for one in ast.walk(node) if is_if else ():
                text = getattr(one, "value", 0)
                if isinstance(text, str):
                    one.value = re.sub(SET, UNSURE, text) if re.search(SETTING, text) else HOLE
        return ast.unparse(ast.Module(body, []))

    def keep(self, target, value):
        if isinstance(target, (ast.Tuple, ast.List)):
            values = getattr(value, "elts", [])
            values = values if len(values) == len(target.elts) else [target] * len(target.elts)
            for element, one in zip(target.elts, values):
                self.keep(element, one)
        else:
            statement = getattr(target, "parent", None)
            owner = getattr(statement, "parent", None)
            inside = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            if isinstance(getattr(target, "slice", None), ast.Name):
                name, count = re.subn(r"^vars\((.*)\)$|\.__dict__$", r"\1", text_of(target.value))
                self.record(f"{name}.{'*' * count}", target, target)
            self.record(inside + text_of(target), value, target)

    def record(self, text, value, node):
        """Keeps an assignment. What a configuration C changes of itself is recorded as C(), too."""
        self.assigned[text].append(value)
        while text.startswith("self.") and hasattr(node, "parent"):
            node = node.parent
            if isinstance(node, ast.ClassDef):
                is_inner = any(INNER.search(text_of(base)) for base in node.bases)
                self.assigned[node.name + "()" * is_inner + text[4:]].append(value)

    def keep_changes(self, call):
        """Of x.update(a=1), x.update({"a": 1}), x.pop("a") and setattr(x, "a", 1). The key "" is
        an update with unknown keys, "*" is the same of an object, and "()" is a call f(x)."""
        name, found = text_of(call.func), []
        self.calls[name].append(call)
        owner = re.sub(r"^vars\((.*)\)|\.__dict__$", r"\1", name.rpartition(".")[0])
        if name == "super().__init__":
            owner = "self"
            found = [(key or "*", value) for key, value in self.pairs(call)
                     if key or {*map(type, self.assigned.get(text_of(value), "?"))} != {ast.arg}]
        elif name.endswith(".update") and name != "OmegaConf.update":
            rest = [node for node in call.args if not isinstance(node, ast.Dict)]
            others = "" if name == f"{owner}.update" else "*"
            found = [(key or "", value) for key, value in self.pairs(call)]
            found += [(others, node) for node in rest]
        elif name.endswith((".pop", ".setdefault")) and call.args:
            found = [(getattr(call.args[0], "value", ""), ast.Name(ast.unparse(call)))]
        elif re.search(r"(set|del)attr(__)?$|patch\.object|\.update$", name) and len(call.args) > 1:
            owner, value = text_of(call.args[0]), [*call.args, ast.Name(ast.unparse(call))][2]
            found = [(getattr(call.args[1], "value", "*"), value)]
        elif not (HARMLESS.search(name) or name in self.made_here or name in dir(builtins)):
            given = [*call.args, *[word.value for word in call.keywords if word.arg]]
            given = [one for node in given for one in getattr(node, "elts", [node])]
            given += [node.func for node in given if isinstance(node, ast.Call)]
            for text in [f"{owner}."] * bool(owner) + [f"{text_of(node)}.()" for node in given]:
                self.assigned[text].append(call.func)
        for key, value in found:
            self.record(f"{owner}.{key if isinstance(key, str) else '*'}", value, call)

    def pairs(self, node):
        """The keys and value nodes of a dict, a call or a class. The key of **x is None."""
        if isinstance(node, ast.ClassDef):
            return [(None, base) for base in node.bases[::-1]  # the first one wins
                    if text_of(base) in self.assigned or CONFIG.search(text_of(base))]
        if isinstance(node, ast.Dict):
            keys = [key and self.value(key) for key in node.keys]
            return list(zip(keys, node.values))
        given = [(None, one) for one in node.args if isinstance(one, ast.Dict)]
        return given + [(keyword.arg, keyword.value) for keyword in node.keywords]

    def value(self, node):
        """The value of an expression, or an Unread with its source."""
        self.steps += 1
        if self.steps > STEPS:
            raise TimeoutError
        if node is None or isinstance(node, ast.Constant):
            return node and node.value
        text = Unread(text_of(node))
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            if text in self.assigned and self.is_closed(text):
                return self.assigned_value(text)
            if KNOWN.search(text):
                return {"is_config": True}
            if CONFIG.search(text):
                return {"is_config": True, None: f"{text}, which is not in this file"}
        if isinstance(node, (ast.Dict, ast.Call, ast.ClassDef)):
            return self.contents(node)
        if isinstance(node, ast.FunctionDef):
            results = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            return self.value(results[0]) if len(results) == 1 else Unread(node.name)
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            owner = self.value(node.value)
            key = node.attr if isinstance(node, ast.Attribute) else self.value(node.slice)
            return owner.get(key, text) if isinstance(owner, dict) else text
        if isinstance(node, ast.IfExp) and isinstance(self.value(node.test), bool):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            left, right = self.value(node.left), self.value(node.comparators[0])
            return text if isinstance(left, Unread) or isinstance(right, Unread) else left == right
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.contents(ast.Dict([None, None], [node.left, node.right]))
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            return computed(re.sub(r"[A-Za-z_][\w.]*", self.number, text))
        return text

    def number(self, name):
        return str(self.value(ast.Name(name[0])))

    def is_closed(self, text):
        """Whether a name is not being evaluated now."""
        if text in self.open:
            self.lowest = min(self.lowest, self.open.index(text))
        return text not in self.open

    def assigned_value(self, text):
        if text in self.known:
            return self.known[text]
        outer, self.lowest = self.lowest, math.inf
        self.open.append(text)
        found = [self.value(one) for one in self.assigned[text] if self.is_run(one) is not False]
        self.open.pop()
        is_one = found and all(one == found[0] for one in found)
        several = Unread(f"{text}, which has several values")
        result = self.changed(found[0], text) if is_one else several
        if self.lowest >= len(self.open):  # it depends on no name that is still open
            self.known[text] = result
        self.lowest = min(self.lowest, outer)
        return result

    def contents(self, node):
        """What a dict, an object or a class holds. The key None has what cannot be read of it."""
        made = {}
        if isinstance(node, ast.Call):
            name = text_of(node.func).split(".")[-1]
            if name == "field":
                return self.value(dict(self.pairs(node)).get("default", node.func))
            if isinstance([*self.assigned.get(name, ()), None][0], ast.FunctionDef):
                return self.value(node.func)
            if name in COPIES and node.args:
                made = self.value(node.args[0])
            elif name not in DICTS:
                made = self.value(node.func)
                if node.args and isinstance(made, dict) and "is_config" not in made:
                    made = unread(made, text_of(node))  # their order is not read
        if isinstance(made, Unread):
            return Unread(text_of(node))
        if not isinstance(made, dict):
            return made
        is_call = isinstance(node, ast.Call)  # f(a=1, **x), where x cannot change a
        for key, child in sorted(self.pairs(node), key=lambda pair: is_call and bool(pair[0])):
            made = made | {key: self.value(child)} if key else self.merged(made, child)
        return made

    def merged(self, made, node, is_run=True):
        """A dict with the items of another one. If this one cannot be read, it may change all."""
        other = self.value(node)
        if isinstance(other, dict) and is_run:
            return (unread(made, other[None]) if None in other else made) | other
        return unread(made, text_of(node))

    def is_run(self, node):
        """Whether the conditions around a node hold. None if this cannot be read."""
        result = True
        while hasattr(node, "parent"):
            child, node = node, node.parent
            if isinstance(node, ast.If) and "__name__" not in text_of(node.test):
                test = self.value(node.test)
                if isinstance(test, bool) and test != (child in node.body):
                    return False
                result = result if isinstance(test, bool) else None
            elif isinstance(node, PERHAPS):
                result = None
            elif isinstance(node, ast.FunctionDef):
                self.value(None)  # counts a step
                calls = self.calls.pop(node.name, [])  # inside, its calls do not count
                result = result if not calls or any(map(self.is_run, calls)) else None
                self.calls[node.name] = calls
        return result

    def changed(self, value, name):
        """An object with what is assigned to its items or attributes elsewhere."""
        if not isinstance(value, dict) or not self.is_closed(f"{name}."):
            return value
        self.open.append(f"{name}.")
        for text, nodes in list(self.assigned.items()):
            owner, _, key = text.rpartition(".")
            nodes = [node for node in nodes if self.is_run(node) is not False]
            if owner != name or not nodes:
                continue
            if key in ("", "*", "()"):
                for node in nodes:
                    value = self.merged(value, node, self.is_run(node))
                continue
            new = self.value(nodes[0])
            if len(nodes) > 1 or self.is_run(nodes[0]) is None:
                new = Unread(f"{text}, which depends on a condition")
            value = value | {key: new}
        self.open.pop()
        return value

    def hidden(self, value, name):
        """A configuration, without the settings that may be changed through other names."""
        for reason in self.other_losses:
            value = unread(value, reason)
        for text in list(self.assigned):
            owner, _, key = text.rpartition(".")
            makers = [text_of([*getattr(one, "bases", ()), getattr(one, "func", DICT)][0])
                      if isinstance(one, (ast.Call, ast.Dict, ast.ClassDef, ast.Constant))
                      and not getattr(one.parent, "targets", ())[1:] else ""  # a = b = f()
                      for one in self.assigned.get(owner, ())]
            is_trainer = any(TRAINER.search(one) for one in [owner, *makers])
            is_other = makers and all(map(FRESH.search, makers)) and not is_trainer
            is_own = owner in ("", "self", "model", name)
            if is_other or is_own or not key or key == "()" and not is_trainer:
                continue
            is_loss = LOSS.search(key) or key in ("train", "__init__")
            if key == "*" and LIKE.search(owner) or is_trainer and is_loss:
                return unread(value, text)
            may_be = Unread(f"{HOLE}, because {text} may change it")
            value = value | {key.removesuffix("_low"): may_be}
        return value

    def passed(self, found, is_made):
        """The configurations that trainers get, or those that are found if there is no trainer."""
        result = []
        for call in self.nodes:
            name = text_of(call.func) if isinstance(call, ast.Call) else ""
            bases = [text_of(base) for one in self.assigned.get(name, ())
                     for base in getattr(one, "bases", ())]
            is_ours = re.search("(?i)g[rs]po.*trainer", " ".join([name, *bases]))
            if not (is_ours or TRAINER.search(name)) or self.is_run(call) is False:
                continue
            given = {word.arg: word.value for word in call.keywords} | dict(enumerate(call.args))
            node = given.get("args", given.get(2, given.get(None)))
            text = node and text_of(node)
            made = [one for one in self.assigned.get(text, [node])
                    if not isinstance(one, ast.arg) and self.is_run(one) is not False]
            values = [self.changed(self.value(one), text) for one in made]
            values = [one.get("args", one) if isinstance(one, dict) else {} for one in values]
            if all("is_config" in one for one in values):
                result += [(one, text) for one in values]
            elif is_ours and is_made and node:
                result.append((unread({"is_config": True}, text), text))
        return [one for i, one in enumerate(result) if one not in result[:i]] or found

    def configurations(self, is_ours):
        """Each GRPOConfig that is made, or classes of it, or dicts and objects with settings."""
        for kind in ast.Call, ast.ClassDef:
            found = []
            for node in self.nodes:
                if not isinstance(node, kind) or self.is_run(node) is False:
                    continue
                value = self.value(node)
                if isinstance(value, dict) and "is_config" in value:
                    target = getattr(node.parent, "targets", [None])[0]
                    name = getattr(node, "name", None) or text_of(target or node)
                    found.append((self.changed(value, name), name))
            if found:
                return [self.hidden(*one) for one in self.passed(found, kind is ast.Call)]
        owners = {text.rpartition(".")[0] for text in self.assigned
                  if text.endswith(".importance_sampling_level")}
        found = [self.changed({None: owner}, owner) for owner in sorted(owners - {"self"})]
        dicts = [(flat(self.contents(node)), node.parent) for node in self.nodes
                 if isinstance(node, ast.Dict) and not isinstance(node.parent, ast.Dict)]
        keys = {key for one, _ in dicts for key in one if key}
        part = ast.BinOp, ast.Call  # in which a dict may get more keys
        return found + [self.touched(self.hidden(one, ""), keys | {None} if isinstance(parent, part)
                                     else keys) for one, parent in dicts if is_ours(one)]

    def touched(self, settings, others=()):
        """The settings in a dict or in texts. What other code of the file may set is unread."""
        later = {name for text in self.assigned if re.fullmatch(r"(?!self\.).*\.\w+", text)
                 for name in (text, text.partition(".")[2])}
        own = {key: value for key, value in settings.items() if key not in later}
        first, last = [dict.fromkeys(keys, Unread("other code")) for keys in (later, others)]
        return first | own | last | own  # the first key of a name counts
