"""Before RL: show a model what RL can then strengthen. It never strengthens what a model never does.

    python experiments/cold_start.py --steps 30 --model FOLDER_OR_HUB_ID --dataset FILE_OR_HUB_ID --output_dir FOLDER

trains a real model on `steps` supervised batches of the dataset's own solutions, so that it answers in their
form; FOLDER is then train_math.py's --model. And it makes the world of `train_math.py --tiny`: a Qwen3 of
100,000 parameters, its tokenizer of one token a character, and word problems of one line. That model is first
taught to write its sums out, then a bad habit, to guess at once; RL's part is to find the careful way again."""
import argparse
import json
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import train_math


def supervise(model, tokenizer, draw_row, steps, batch_size, learning_rate, name, at_once=None):
    """`steps` supervised batches on answers of rows that draw_row() gives, without calculator marks <<...>>;
    at_once of a batch go through the model together (default: all), which sets the memory."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0, fused=True)
    at_once, bar = at_once or batch_size, tqdm(range(steps), desc=name, leave=False)
    for step in bar:
        optimizer.param_groups[0]["lr"] = learning_rate * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        rows = [draw_row() for _ in range(batch_size)]
        prompts = [train_math.encode_prompt(tokenizer, row["question"]) for row in rows]
        answers = [tokenizer(re.sub(r"<<[^>]*>>", "", row["answer"]), add_special_tokens=False).input_ids
                   + [tokenizer.eos_token_id] for row in rows]
        total, tokens = 0.0, sum(map(len, answers))
        for i in range(0, batch_size, at_once):
            batch = train_math.micro_batch(prompts[i:i + at_once], answers[i:i + at_once], model.device)
            loss = -train_math.response_log_probs(model, batch, 1.0).sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{total:.3f}")


# ---- the world of --tiny ------------------------------------------------------------------------------------


def tiny_questions(seed):
    """7,840 word problems of one line, with worked answers in GSM8K's manner, shuffled. They ask for 392 products
    in 20 wordings each: what is held out of them is new in its wording, not in its arithmetic."""
    rows = []
    for a in range(11, 60):
        for b in range(2, 10):
            x, y = a // 10 * 10 * b, a % 10 * b
            worked = f"{a // 10 * 10}*{b}={x}\n{a % 10}*{b}={y}\n{x}+{y}={x + y}\n#### {x + y}"
            rows += [{"question": f"{name} buys {b} boxes of {a} {thing}. How many?", "answer": worked}
                     for name in ("Ann", "Bob", "Eve", "Tom", "Sam") for thing in ("figs", "pens", "eggs", "nuts")]
    random.Random(seed).shuffle(rows)
    return rows


def tiny_tokenizer():
    """One token a character; the prompt is the question and a newline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    characters = "\n #*+-.,=?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    ids = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *characters])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
                                   chat_template=r"{{ messages[0].content.split('\n')[0] + '\n' }}")


def tiny_model(tokenizer, seed):
    """A Qwen3 of about 100,000 parameters, not trained."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.05, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)).eval()


def sloppy(row, rng):
    """The same question, answered by a teacher who mostly guesses at once and then is seldom right."""
    if rng.random() < 0.25:
        return row
    error = 0 if rng.random() < 0.1 else rng.choice((-20, -10, -1, 1, 10, 20, 100))
    return {**row, "answer": f"#### {max(0, int(train_math.extract_answer(row['answer'])) + error)}"}


def tiny_cold_start(model, tokenizer, questions, seed, skill_steps=460):
    """The skill, then the habit, until less than 30% of sampled answers are right. RuntimeError: no skill."""
    rng, s = random.Random(seed), SimpleNamespace(rollout_rows=128, max_completion_length=40)
    draw = lambda: rng.choice(questions)
    supervise(model, tokenizer, draw, skill_steps, 48, 5e-3, "cold start: skill")
    probe = rng.sample(questions, 256)
    torch.manual_seed(seed)
    skill = right = train_math.evaluate(model, tokenizer, probe, s, temperature=1.0)[0]["eval_strict"]
    if skill < 0.95:
        raise RuntimeError(f"the cold start of seed {seed} reached a skill of {skill:.2f}, not .95, and RL at this "
                           "size teaches no arithmetic: take another --seed")
    while right >= 0.3:
        supervise(model, tokenizer, lambda: sloppy(draw(), rng), 5, 48, 1e-3, "cold start: habit")
        right = train_math.evaluate(model, tokenizer, probe, s, temperature=1.0)[0]["eval_strict"]
    train_math.say(f"cold start: {skill:.0%} of samples right, then {right:.0%} after a teacher who mostly guesses")


def save_world(folder, model, tokenizer, questions):
    """model/ and questions.jsonl, written aside and then renamed: the folder is whole or not there."""
    aside = folder.with_suffix(".partial")
    model.save_pretrained(aside / "model")
    tokenizer.save_pretrained(aside / "model")
    text = "".join(json.dumps(row) + "\n" for row in questions)
    (aside / "questions.jsonl").write_text(text, encoding="utf-8")
    os.rename(aside, folder)


def tiny_world(seed, root="runs"):
    """(model folder, questions' file) of --tiny, made once a seed, 40 seconds, and kept in runs/tiny_world-SEED."""
    folder = Path(root, f"tiny_world-{seed}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # a second process waits for the first's
        if not folder.exists():
            train_math.say("the first --tiny of a seed makes its model: a cold start of half a minute")
            questions, tokenizer = tiny_questions(seed), tiny_tokenizer()
            model = tiny_model(tokenizer, seed)
            try:
                tiny_cold_start(model, tokenizer, questions[:-256], seed)  # the last 256 are held out
            except KeyboardInterrupt:
                sys.exit("\nstopped: a cold start is saved at its end alone, so the next --tiny starts it anew")
            save_world(folder, model, tokenizer, questions)
    return str(folder / "model"), str(folder / "questions.jsonl")


# ---- a real model -------------------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, required=True, help="supervised batches")
    parser.add_argument("--model", default=train_math.Settings.model, help="hub id or folder")
    parser.add_argument("--dataset", default=train_math.Settings.dataset, help="hub id or .jsonl")
    parser.add_argument("--output_dir", type=Path, required=True, help="the folder to make")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args(argv)
    if min(a.steps, a.batch_size, a.learning_rate) <= 0:
        parser.error("--steps, --batch_size and --learning_rate must be above 0")
    if a.output_dir.exists():
        parser.error(f"--output_dir {a.output_dir} is there already")
    try:
        at = f"--dataset {a.dataset}"
        questions = train_math.load_questions(a.dataset, "train")
        at = f"--model {a.model}, --device {a.device}"
        model, tokenizer = train_math.load(a.model, a.device)
    except Exception as error:
        sys.exit(f"cold_start.py: {at}: " + " ".join(str(error).split())[:300])
    rng, aside = random.Random(a.seed), a.output_dir.with_suffix(".partial")
    supervise(model, tokenizer, lambda: rng.choice(questions), a.steps, a.batch_size, a.learning_rate, "cold start",
              at_once=2)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    os.rename(aside, a.output_dir)
    print(f"{a.output_dir} is the model: python train_math.py --model {a.output_dir} --dataset {a.dataset}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped: a cold start is saved at its end alone, so it starts anew")
