"""Five tasks that test the recipe of guides/own_task.md on questions and rewards of one's own.

    python -m evidence.own_tasks NAME --model FOLDER      trains on one task, on a CPU
    python -m evidence.own_tasks NAME --rows              prints three rows of its data
    python -m evidence.own_tasks NAME --solutions 30      trains on 30 answers first, supervised

Whoever wrote the tasks did not know the settings of the recipe (plans/own_tasks.md). Each task has
a function that makes its rows, and a reward between 0 and 1. `files` is a selection from a list,
`order` an extraction of fields, `price` an addition in a format, `slogan` a text with two
constraints, and `label` a classification into four classes.
"""
import argparse
import json
import random
import re
import resource
import statistics
import time
from itertools import product
from pathlib import Path

import torch

import train_math
from tools.logs import append, markdown, paired, read, write
from tools.warm_up import given_rollout

RECIPE = ["--instruction", "", "--temperature", "0.7", "--prompts_per_step", "8", "--group_size",
          "6", "--minibatches", "4", "--max_steps", "20", "--save_steps", "20"]
TRAINED, HELD_OUT = 1000, 100  # rows


# ---- files: which of four files have a given extension? ------------------------------------------

STEMS = ["report", "cat", "notes", "beach", "main", "song", "budget", "invoice", "photo", "draft",
         "logo", "plan", "letter", "menu", "setup", "sunset", "test", "summary", "backup", "index"]
EXTENSIONS = ["pdf", "png", "txt", "py", "csv", "zip", "html", "json"]
FILE = r"[a-z]+\.[a-z]+"


def files_rows(n, rng):
    rows = {}
    while len(rows) < n:
        wanted = rng.choice(EXTENSIONS)
        others = [extension for extension in EXTENSIONS if extension != wanted]
        count = rng.choice([1, 1, 2])
        extensions = [wanted] * count + [rng.choice(others) for _ in range(4 - count)]
        rng.shuffle(extensions)
        files = [f"{stem}.{end}" for stem, end in zip(rng.sample(STEMS, 4), extensions)]
        question = (f"Which of these files are {wanted} files? Name only those, separated by "
                    f"commas.\n{', '.join(files)}")
        answer = ", ".join(file for file in files if file.endswith("." + wanted))
        rows[question] = {"question": question, "answer": answer}
    return list(rows.values())


def files_reward(text, answer):
    """The share of the wanted files that are named, minus the share of the other files, so that all
    files together earn nothing. Anything but a list on one line costs 30%."""
    text = text.strip()
    wanted = set(answer.split(", "))
    named = re.findall(FILE, text)
    hits = len(wanted & set(named))
    share = max(0.0, hits / len(wanted) - (len(named) - hits) / (4 - len(wanted)))
    return share if re.fullmatch(f"{FILE}(, {FILE})*", text) else 0.7 * share


# ---- order: name;quantity;product, with the quantity in digits -----------------------------------

NAMES = ["Maria", "Ahmed", "Lena", "Tom", "Yuki", "Carlos", "Priya", "Oscar", "Nina", "David",
         "Fatima", "Henry", "Julia", "Victor", "Grace", "Ivan"]
CITIES = ["Oslo", "Madrid", "Cairo", "Boston", "Lyon", "Delhi", "Prague", "Perth"]
PRODUCTS = ["desk lamps", "blue pens", "coffee mugs", "chairs", "notebooks", "paper rolls",
            "batteries", "phone cases", "towels", "garden hoses", "screws", "wool socks"]
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine",
          10: "ten", 12: "twelve"}
ORDERS = ["{name} from {city} wants {count} {product} by Friday.",
          "Hi, this is {name} in {city}. Please send me {count} {product}.",
          "Can I get {count} {product}? Ship to {city}. Regards, {name}",
          "We need {count} {product} in {city} soon, says {name}.",
          "Order of {count} {product}, customer {name}, city {city}."]


def order_rows(n, rng):
    rows = {}
    while len(rows) < n:
        name, thing = rng.choice(NAMES), rng.choice(PRODUCTS)
        number = rng.randint(2, 60)
        count = COUNTS.get(number, number) if rng.random() < 0.7 else number
        text = rng.choice(ORDERS).format(name=name, city=rng.choice(CITIES), count=count,
                                         product=thing)
        question = f"{text}\n\nWrite this order in the form name;quantity;product."
        rows[question] = {"question": question, "answer": f"{name};{number};{thing}",
                          "source": text}
    return list(rows.values())


def plain(text):
    """The words of a text, each between single blanks, in lower case."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def order_reward(text, answer, source):
    """Each right field earns a third in the exact format. In a short reply in another format it
    earns 0.15, unless four words in a row are copied from the order."""
    wanted = answer.lower().split(";")
    fields = text.strip().lower().split(";")
    if len(fields) == 3 and all(re.fullmatch(r"\w+( \w+)*", field) for field in fields):
        return sum(field == gold for field, gold in zip(fields, wanted)) / 3
    words = plain(text).split()
    copied = any(plain(" ".join(words[i:i + 4])) in plain(source) for i in range(len(words) - 3))
    if copied or len(words) > 12:
        return 0.0
    return 0.15 * sum(f" {gold} " in plain(text) for gold in wanted)


# ---- price: the sum of two prices, as $0.00 ------------------------------------------------------

THINGS = ["book", "lamp", "shirt", "cable", "mug", "chair", "bag", "clock", "pan", "ball", "mouse",
          "scarf"]
AMOUNT = r"(?<![0-9.])[0-9]{1,4}(?:\.[0-9]{2})?(?![0-9])"


def price_rows(n, rng):
    rows = {}
    while len(rows) < n:
        first, second = rng.sample(THINGS, 2)
        a, b = rng.randint(3, 20), rng.randint(3, 20)
        question = (f"A {first} costs ${a} and a {second} costs ${b}. What is the total? "
                    "Write only the total, as $0.00.")
        rows[question] = {"question": question, "answer": f"${a + b}.00", "larger": max(a, b)}
    return list(rows.values())


def price_reward(text, answer, larger):
    """The right sum earns 1, and one that is less than 20 dollars off up to 0.3, if it is above
    both prices. In a reply with other text, the last number counts half."""
    amounts = [float(amount) for amount in re.findall(AMOUNT, text)]
    if not 1 <= len(amounts) <= 3 or amounts[-1] <= larger:
        return 0.0
    gap = abs(amounts[-1] - float(answer[1:]))
    value = 1.0 if gap < 0.001 else 0.3 * max(0.0, 1 - gap / 20)
    return value if re.fullmatch(r"\$[0-9]{1,4}\.[0-9]{2}", text.strip()) else value / 2


# ---- slogan: a given number of words, one of which is given --------------------------------------

GOODS = ["bakery", "bicycle", "hotel", "tea", "garden tool", "running shoe", "pillow", "bookshop",
         "flashlight", "yogurt", "travel bag", "music app"]
STYLES = ["cheap", "modern", "friendly", "small", "quirky", "sturdy", "clever", "simple"]
MUST = ["fresh", "bright", "home", "quiet", "easy", "morning", "happy", "strong", "today", "family",
        "warm", "fast", "dream", "gentle", "city", "better", "smile", "light", "always", "heart",
        "green", "bold", "life", "world", "soft", "friends", "night", "road", "magic", "summer"]


def words_of(text):
    return re.findall(r"\w+(?:['’-]\w+)*", text.lower())


def slogan_rows(n, rng):
    rows = []
    for thing, style, must, size in rng.sample(list(product(GOODS, STYLES, MUST, range(3, 9))), n):
        question = (f"Write a slogan for a {style} {thing}. It must have exactly {size} words, "
                    f"and one of them must be \"{must}\".")
        rows.append({"question": question, "answer": must, "n_words": size, "source": question})
    return rows


def slogan_reward(text, answer, n_words, source):
    """Each constraint earns a half (0.2 for one word too many or too few). Several lines, less than
    3 or more than 12 words, repeated words, and three words in a row of the question earn 0."""
    text = text.strip()
    words = words_of(text)
    if "\n" in text or not 3 <= len(words) <= 12 or len(set(words)) < 0.8 * len(words):
        return 0.0
    known = f" {' '.join(words_of(source))} "
    if any(f" {' '.join(words[i:i + 3])} " in known for i in range(len(words) - 2)):
        return 0.0
    miss = abs(len(words) - n_words)
    return 0.5 * (answer in words) + {0: 0.5, 1: 0.2}.get(miss, 0.0)


# ---- label: what a message to a shop is about ----------------------------------------------------

ITEMS = ["lamp", "kettle", "backpack", "keyboard", "blender", "tent", "camera", "heater", "printer",
         "scooter"]
OPENERS = ["", "Hello, ", "Good morning, ", "Sorry to bother you, ", "Second try: "]
CLOSERS = ["", " Please help.", " What now?", " I am annoyed.", " Thanks, Kim"]
MESSAGES = {
    "billing": ["my card was charged twice for the {}.",
                "I sent the {} back and still wait for my money.",
                "the invoice for the {} shows the wrong tax.",
                "the discount code was not applied to my {}.",
                "can I pay for the {} in three instalments?",
                "I need a receipt for the {}."],
    "delivery": ["I paid for the {} last week and it has not arrived.",
                 "tracking says the {} is stuck in another city.",
                 "the driver left the {} with a stranger.",
                 "when will the {} reach my house?",
                 "please send the {} to my office, not my home.",
                 "the courier came with the {} while I was out."],
    "account": ["I forgot my password and cannot order the {}.",
                "the code to log in never comes, I only want a {}.",
                "please change the e-mail in my profile before I buy a {}.",
                "someone else signed in as me and looked at a {}.",
                "I bought a {} once, now delete my user data.",
                "my user name is locked since I reviewed the {}."],
    "defect": ["the {} stopped working after two days.",
               "the {} makes a strange noise and smells burnt.",
               "a part of the {} is cracked.",
               "the {} does not switch on any more.",
               "the {} came on time but it is broken.",
               "I paid a lot for this {} and it already falls apart."]}


def label_rows(n, rng):
    rows = []
    for i, (label, messages) in enumerate(MESSAGES.items()):
        choices = list(product(OPENERS, messages, ITEMS, CLOSERS))
        for opener, message, item, closer in rng.sample(choices, (n + i) // len(MESSAGES)):
            text = opener + message.format(item) + closer
            rows.append({"question": "Which word fits this message best: billing, delivery, "
                                     f"account or defect?\n{text}", "answer": label})
    rng.shuffle(rows)
    return rows


def label_reward(text, answer):
    """1 if a reply of at most twelve words names the right label and no other one."""
    words = re.findall(r"\w+", text.lower())
    return float(len(words) <= 12 and set(words) & set(MESSAGES) == {answer})


# ---- the recipe ----------------------------------------------------------------------------------

TASKS = {  # the rows, the reward of one text, and --max_completion_length
    "files": (files_rows, files_reward, 20),
    "order": (order_rows, order_reward, 20),
    "price": (price_rows, price_reward, 12),
    "slogan": (slogan_rows, slogan_reward, 20),
    "label": (label_rows, label_reward, 8),
}


def fine_tune(model, tokenizer, rows, seed):
    """Supervised fine-tuning on the answers of these rows, as in guides/recipes.md."""
    cfg = train_math.Settings(instruction="")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for epoch in range(3):
        for row in random.Random(f"{seed} {epoch}").sample(rows, len(rows)):
            prompts = train_math.encode_prompts(tokenizer, [row], cfg)
            answer = tokenizer(row["answer"], add_special_tokens=False).input_ids
            answer.append(tokenizer.eos_token_id)
            batch = train_math.MicroBatch(
                given_rollout(prompts, [answer]), torch.ones(1), [0], model.device)
            loss = -train_math.response_log_probs(model, batch, 1.0).sum() / len(answer)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def table(logs):
    """The packed log of the runs as a table."""
    titles = ["task", "solutions first", "learning rate", "seed", "before", "after",
              "difference (95% CI, paired)", "best constant", "fully correct", "criterion met",
              "minutes"]
    lines = []
    for run in sorted(name[:-len("/summary")] for name in logs if name.endswith("/summary")):
        summary = logs[f"{run}/summary"][0]
        steps = [row["step"] for row in logs[f"{run}/metrics"] if "eval_reward" in row]
        first, last = (logs[f"{run}/eval_{step}"] for step in (steps[0], steps[-1]))
        before, after = ([row["reward"] for row in results] for results in (first, last))
        difference, (low, high), _ = paired(before, after)
        mean = statistics.fmean(after)
        constant = summary["constant_reward"]
        full = [sum(reward > 0.999 for reward in rewards) for rewards in (before, after)]
        lines.append([
            summary["task"], run.split("_")[1] if "_solutions_" in run else 0,
            logs[f"{run}/metrics"][0]["settings"]["learning_rate"], summary["seed"],
            f"{statistics.fmean(before):.3f}", f"{mean:.3f}",
            f"{difference:+.3f} ({low:+.3f} to {high:+.3f})", f"{constant:.3f}",
            "{} to {} of {}".format(*full, len(after)),
            "yes" if low > 0 and mean > constant else "no", f"{summary['seconds'] / 60:.0f}"])
    return markdown(titles, lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0, help="of the training; the rows are fixed")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--folder", type=Path, default=Path("runs/own_tasks"))
    parser.add_argument("--solutions", type=int, default=0, metavar="N",
                        help="before RL, fine-tune on the answers of N rows")
    parser.add_argument("--learning_rate", default="2e-5", help="of RL; that of the recipe: 2e-5")
    parser.add_argument("--rows", action="store_true", help="print three rows, and train nothing")
    args = parser.parse_args(argv)
    make_rows, reward_of, length = TASKS[args.task]
    rows = make_rows(TRAINED + HELD_OUT, random.Random(0))
    if args.rows:
        print(*map(json.dumps, rows[:3]), sep="\n")
        return

    def score(text, row):
        return reward_of(text, **{name: row[name] for name in row if name != "question"})

    def reward(prompts, completions, completion_ids, cut, step, log_metric, **columns):
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        return [score(text, row) for text, row in zip(completions, rows)]

    data = args.folder / "data" / args.task
    data.mkdir(parents=True, exist_ok=True)
    write(data / "train.jsonl", rows[:TRAINED])
    write(data / "test.jsonl", rows[TRAINED:])
    names = [args.task]
    if args.solutions:
        names.append(f"{args.solutions}_solutions")
    if args.learning_rate != "2e-5":
        names.append(args.learning_rate)
    run = args.folder / "_".join([*names, str(args.seed)])

    def load(name, device):
        model, tokenizer = train_math.load(name, device)
        if not (run / "state.pt").exists():  # otherwise its weights replace these
            fine_tune(model, tokenizer, rows[:args.solutions], args.seed)
        return model, tokenizer

    start = time.perf_counter()
    train_math.main([*RECIPE, "--learning_rate", args.learning_rate, "--model", args.model,
                     "--dataset", str(data), "--output_dir", str(run), "--seed", str(args.seed),
                     "--max_completion_length", str(length)], reward=reward, load=load)
    seconds = time.perf_counter() - start

    # The best constant answer: the text that would earn most if it answered all held-out questions.
    texts = {row["answer"] for row in rows[:TRAINED]}
    for file in run.glob("eval_*.jsonl"):
        texts |= {result["response"] for result in read(file)}
    constants = {}
    for text in sorted(texts):
        constants[text] = statistics.fmean(score(text, row) for row in rows[TRAINED:])
    best = max(constants, key=constants.get)
    bytes_on_disk = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    append(run / "summary.jsonl", {
        "task": args.task, "seed": args.seed, "constant": best, "constant_reward": constants[best],
        "seconds": seconds, "threads": torch.get_num_threads(),
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "disk_gib": bytes_on_disk / 2**30})


if __name__ == "__main__":
    main()
