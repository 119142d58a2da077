"""The rewards of train_math.py: calling a reward function, and the default one."""
import copy
import re
import traceback

import torch

TAKEN = set(  # the other names in the rows of a log, in evaluations after "eval_"
    "step settings notes reward reward_interval last_number last_number_interval questions "
    "results best_constant response_length cut equal_reward_groups entropy sampler_gap loss "
    "grad_norm clip_fraction log_ratio_first_max log_ratio_mean log_ratio_std seconds "
    "seconds_rollout".split())

# An answer is what matches PLACE. Everything that this grammar does not name makes it no answer.
THOUGHT = r"(?i:(?:\w+:)?(?:think(?:ing)?|thought|reasoning)[>\]])"
CURRENCY = r"(?:US)?[$€£¥₹¢]|\b(?:USD|EUR|GBP|CAD|AUD|INR|CNY|RMB)\b"
HEADING = (rf"(?m)^[ \t]*#{{4,}}[ \t*_]*+(?!{CURRENCY})"
           r"(?:[^\W\d_]|\(?[0-9.]*[0-9][.):]+[*_]*+[ \t]+[*_]*+\w)")  # '#### 2. Check'
MARK = r"\\boxed\s*{|#{4,}"
BRACES = r"(?:[^{}\\]|\\.|{(?:[^{}\\]|\\.|{(?:[^{}\\]|\\.)*+})*+})*+"  # balanced, in three levels
FONT = (r"\\(?:(?:text|math)(?:bf|it|rm|sf|tt|normal)?|[mhf]box|boxed|emph|underline|boldsymbol|"
        r"displaystyle|left|right|bf|rm|q?quad)(?![A-Za-z])")
LATEX = {  # a pattern: what it means
    r"\\(?:text|mathrm)\s*\{[\s~]*[mglLsh]\}": " cm",  # in \text, m is a unit and no variable
    r"\^\s*\{?\s*(?:\\circ|°)\s*\}?|\\(?:text)?degree(?![A-Za-z])": "°",
    r"(?<=[A-Za-z]{2})\}?\^\{?[23]\}?": "²",  # or ³, which is read in the same way
    r"(?<=[0-9])(?:\{,\}|\\,|,\\!)(?=[0-9]{3}(?![0-9]))": ",",
    rf"{FONT}|\\[,;:! ()[\]]|[{{}}~]": " ",
    r"(?<![\w*])[*_]++([^\s*_][^*_]*+)[*_]++(?!\w)": r" \1 ",  # **18** eggs
    r"(?<![0-9.])\.(?=[0-9])": "0."}
NUMBER = r"(?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})++|[0-9]++)(?P<decimals>\.[0-9]++)?"
# A word has at least three letters or is one of these, and it is none of those that are barred:
# numbers, fractions, multipliers, operators, products such as xyz, and months.
SHORT = ("km/h|m/s|cm|mm|km|ft|in|yd|mi|kg|mg|lb|oz|ml|cl|dl|hr|ms|kw|mb|gb|tb|sq|qt|pt|ha|m[²³]|"
         r"is|of|so|at|it|he|by|as|on|we|my|be|do|an|up|no|us|[元円个個人]|[ai](?=\s[a-z]{2})")
BARRED = (r"or|zero|once|twice|hal(?:f|ves)|(?:quarter|third|dozen|lakh|crore)s?|grand|score|"
    r"(?:one|two|three|four|fif|five|six|seven|eight?|nine?|ten|eleven|twel(?:ve|f)|hundred|"
    r"thousand|(?:thir|for|twen)(?=t[ey])|[a-z]*ill(?:i?on|iard|ón|ione))(?:teen|t?y|"
    r"th)?(?:e?[sn])*|myriad|mil|mill[ei](?:ers?)?|mila|ml[nr]d?|тыс\w*|милли\w*|млн|млрд|tausend|"
    r"hundert|mio|mrd|tsd|plus|minus|negative|recurring|repeating|squared|cubed|"
    r"modulo|mod|factorial|base|binary|hexadecimal|octal|log|exp|sin|cos|tan|sqrt|infinity|"
    r"[abcxyz]+|january|february|march|april|may|june|july|august|october|(?:sept|nov|dec)ember")
WORD = (rf"(?!(?:{BARRED})(?![^\W_]))(?:{SHORT}|[^\W\d_十百千万萬亿億兆]{{3,}}+)"
        r"(?:['’]\w?)?[²³]?(?![\w^])")
PLACE = re.compile(rf"""
    (?:{CURRENCY}|[\s(\[+])*+ (?P<sign>-?) (?:{CURRENCY}|\s)*+ {NUMBER}
    (?:{CURRENCY}|°\s*[CFK]\b|[%°)\]\s])*+
    (?: =[\s(0-9.]*[0-9)]\s*[-+*/×÷][-+*/×÷().=\s0-9]*  # 18 = 9 * 2
      | (?:[\s.,;:(\[]*+|/(?=hour|day|week|month|year)) {WORD}  # 18 eggs, I think
        (?:[-/]{WORD}|[\s.,;:!?()\[\]"%]*+{WORD})*+!*
    )? [\s.,;:?)\]]*
    """, re.VERBOSE | re.IGNORECASE)
LAST = re.compile(rf"(?P<sign>-?) ?(?:{CURRENCY})? ?"
                  r"(?P<whole>[0-9](?:[_,]?[0-9])*)(?P<decimals>\.[0-9]+)?")


class RewardError(ValueError):
    """The reward function raised an exception, or returned something that is not a reward."""


def score(reward, questions, texts, **more):
    """The reward of each text, (B,). questions: the row of the question of each text. As in TRL,
    the reward function gets copies of all columns of the questions, and the keywords `more`.
    RewardError: it raised an exception, or did not return one finite number per text."""
    name = getattr(reward, "__qualname__", type(reward).__name__)
    taken = questions[0].keys() & {"prompts", "completions", *more}
    if taken:
        raise RewardError(f"rename the columns {sorted(taken)}: a reward gets these names already")
    columns = {column: [copy.deepcopy(row[column]) for row in questions] for column in questions[0]}
    try:
        returned = reward(prompts=[row["question"] for row in questions], completions=list(texts),
                          **columns, **more)
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)[1:2]  # where in the reward function
        place = "".join(f" in {line.filename}, line {line.lineno}" for line in lines)
        raise RewardError(f"the reward function {name} raised {error!r}{place}") from error
    try:
        rewards = torch.tensor([float(value) for value in returned], dtype=torch.float32)
    except (TypeError, ValueError):
        rewards = torch.empty(0)
    is_unfit = isinstance(returned, (str, dict, set))  # these have no numbers, or no order
    if is_unfit or len(rewards) != len(texts) or not rewards.isfinite().all():
        raise RewardError(f"the reward function {name} returned {returned!r:.200}, but a list of "
                          f"{len(texts)} finite numbers is needed, one for each completion")
    return rewards


def score_rollout(reward, rollout, cfg, step=None):
    """(rewards (B,), metrics): the rewards of a Rollout, and what the reward has reported. Besides
    what `score` gives it, it gets completion_ids (the token ids of each response), cut (whether a
    response reached the length limit), step (None in the trial and in evaluations), and
    log_metric(name, value), as in TRL: the values, which may be lists, go into the row of the step.
    It may be called until the step ends. ValueError: the name is taken."""
    metrics = {}

    def log_metric(name, value):
        if name in TAKEN or name.startswith("eval_"):
            raise ValueError(f"log_metric: the name {name} is taken")
        metrics[name] = value

    cut = [len(response) == cfg.max_completion_length for response in rollout.responses]
    rewards = score(reward, rollout.questions, rollout.texts, cut=cut, step=step,
                    completion_ids=copy.deepcopy(rollout.responses), log_metric=log_metric)
    return rewards, metrics


def correctness_reward(prompts, completions, answer, strict=True, **columns):
    """1.0 for a completion that gives the number of the answer, else 0.0. Works in TRL, too."""
    golds = [gold_answer(gold) for gold in answer]
    if None in golds:
        raise ValueError(f"the answer {answer[golds.index(None)]!r:.100} is not a number")
    return [float(extract_answer(text, strict) == gold) for text, gold in zip(completions, golds)]


def extract_answer(completion, strict=True):
    r"""The answer of a completion, as a canonical number such as '-1234.5', or None.

    completion: a text, or a list of chat messages, as TRL passes them. strict: the number after the
    last '####' or in the last '\boxed{}', whichever comes last; otherwise the last number. Only
    words, %, ° and brackets may follow it, or '=' with a calculation. LaTeX fonts and spaces,
    currencies, commas, **, a leading + or 0, and decimals as in 18.0 make no difference. There is
    no answer in a thought, such as '<think>...', that does not end."""
    if isinstance(completion, list):
        completion = completion[-1]["content"]
    text = re.split(rf"[<\[]/{THOUGHT}", str(completion))[-1]
    if re.search(rf"[<\[]{THOUGHT}", text):
        return None
    text = re.sub(r"[^\D0-9]", lambda digit: str(int(digit[0])), text)  # fullwidth or Arabic
    text = re.sub(r"\\([$%])", r"\1", re.sub(r"[−–‒﹣－‐‑]", "-", text))
    found = PLACE.fullmatch(answer_place(text)) if strict else last_number(text)
    if not found or "_" in found["whole"]:
        return None
    whole = found["whole"].replace(",", "").lstrip("0") or "0"
    value = whole + (found["decimals"] or "").rstrip("0").rstrip(".")
    return value if value == "0" else found["sign"] + value


def plain(text):
    """The text without its LaTeX and its Markdown emphasis."""
    for pattern, meaning in LATEX.items():
        text = re.sub(pattern, meaning, text)
    return text


def answer_place(text):
    r"""The content of the last \boxed{}, or the line after the last '####', as plain text."""
    marks = list(re.finditer(MARK, text := re.sub(HEADING, "", text)))
    if not marks:
        return ""
    content = ".*" if marks[-1][0].startswith("#") else rf"(?s){BRACES}(?=}})"
    place = re.match(content, text[marks[-1].end():])
    return plain(place[0]).strip(" \t*_`$\"") if place else ""


def last_number(text):
    """The last number of a text, as a match of LAST. A minus sign after a number is an operator."""
    text = re.sub(r"(?<=[0-9])[\u00a0\u2009\u202f'’，_](?=[0-9])", "_", text)  # 1'234 is not known
    text = re.sub(r"(?<=[0-9)\]%])[^\S\n]*-", " ", plain(text).replace("*", " "))
    text = re.sub(r"(?<=[0-9]),(?![0-9]{3}(?![0-9]))|[^\S\n]+", " ", text)  # 1,234 but not 1,2
    found = list(LAST.finditer(text))
    return found[-1] if found else None


def gold_answer(answer):
    r"""The number in a dataset's answer: '... #### 42', '... \boxed{42}' or 42. Otherwise None."""
    text = str(answer).strip()
    if isinstance(answer, float) and not answer.is_integer() and len(text) > 12:
        return None  # such as 0.1 + 0.2, which no response would equal
    if re.fullmatch(rf"(?:{CURRENCY}|[-−–+ ])*+[0-9,]*+(?:\.[0-9]*)?[%€£ ]*", text):
        text = f"#### {text}"
    return extract_answer(text)
