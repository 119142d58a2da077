"""Data sets as people have them, and chat templates and models that do not fit the script."""

import io
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers

import train_math
from support.rewards import RewardError, score
from tests.conftest import parity_reward, settings, sums
from tools.warm_up import tiny_model, tiny_tokenizer

ROWS = sums(15)
HELD_OUT = (6, 12, 13)  # of 15 rows in one file
SPLIT = [row for i, row in enumerate(ROWS) if i not in HELD_OUT], [ROWS[i] for i in HELD_OUT]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(rows):
    file = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(file)
    return file.getvalue()


def two_answers():
    """A .parquet file with two columns of one name."""
    file = io.BytesIO()
    columns = [pyarrow.array([text]) for text in ("1+1?", "2", "3")]
    table = pyarrow.Table.from_arrays(columns, names=["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def load(path):
    return train_math.load_questions(settings(dataset=str(path), eval_size=3))


TRAIN = lines(ROWS[:12])
TEST = lines(ROWS[12:])
FOLDERS = {
    "metadata files": {"train.jsonl": TRAIN, "test.jsonl": TEST, "dataset_infos.json": "{}"},
    "hidden files": {"train.jsonl": TRAIN, "test.jsonl": TEST, "._train.jsonl": b"\0\5"},
    "the name of the data": {"sums_train.jsonl": TRAIN, "sums-test.jsonl": TEST},
    "val": {"train.jsonl": TRAIN, "val.jsonl": TEST},
    "the old name of a part": {"Training.JSONL": TRAIN, "valid.jsonl": TEST},
    "shards": {
        "train-00000-of-00002.parquet": parquet(ROWS[:6]),
        "train-00001-of-00002.parquet": parquet(ROWS[6:12]),
        "test-00000-of-00001.parquet": parquet(ROWS[12:])},
    "a folder of the hub": {
        "data/train-00000-of-00001.parquet": parquet(ROWS[:12]),
        "data/test-00000-of-00001.parquet": parquet(ROWS[12:])},
}
REFUSED = {
    "several data sets": (
        {"main/train.jsonl": TRAIN, "socratic/train.jsonl": TRAIN}, r"Add one of .*main.*socratic"),
    "two files of one part": ({"dev.jsonl": TRAIN, "val.csv": TRAIN}, r"dev\.jsonl and val\.csv"),
    "a pointer": ({"train.parquet": LFS_POINTER}, r"train\.parquet.*git lfs pull"),
    "a damaged file": ({"train.parquet": "no"}, r"train\.parquet"),
    "a test row without an answer": (
        {"train.jsonl": TRAIN, "test.jsonl": TEST + lines([{"question": "?", "answer": "x"}])},
        "test: row 4 needs"),
    "a test line that is not JSON": (
        {"train.jsonl": TRAIN, "test.jsonl": TEST + "{\n"}, r"test\.jsonl: line 4.*on one line"),
}
TWICE = {
    "q.csv": "question,answer,answer\n1+1?,2,3\n",
    "q.jsonl": TRAIN + '{"question": "?", "answer": "2", "answer": "3"}\n',
    "q.json": '[{"question": "?", "answer": "2", "answer": "3"}]',
    "q.parquet": two_answers(),
}


class TestFolders:
    @pytest.mark.parametrize("name", FOLDERS)
    def test_are_read(self, tmp_path, name):
        assert load(write(tmp_path, FOLDERS[name])) == (ROWS[:12], ROWS[12:])

    def test_of_save_to_disk_are_read(self, tmp_path):
        parts = {"train": datasets.Dataset.from_list(ROWS[:12]),
                 "validation": datasets.Dataset.from_list(ROWS[12:])}
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
        assert load(tmp_path / "both") == (ROWS[:12], ROWS[12:])
        assert load(tmp_path / "one") == SPLIT

    @pytest.mark.parametrize("name", REFUSED)
    def test_are_refused_with_the_place_and_the_remedy(self, tmp_path, name):
        files, words = REFUSED[name]
        with pytest.raises(ValueError, match=words):
            load(write(tmp_path, files))

    @pytest.mark.parametrize("files", [{"test.jsonl": ""}, {"test.csv": "question,answer\n"}])
    def test_with_an_empty_test_file_give_a_note(self, tmp_path, capsys, files):
        assert load(write(tmp_path, {"train.jsonl": TRAIN, **files})) == (ROWS[:12], [])
        assert "note: the test part has no rows" in capsys.readouterr().out


class TestFiles:
    @pytest.mark.parametrize("start", ["\n", "\ufeff\r\n ", " "])
    @pytest.mark.parametrize("indent", [None, 2])
    def test_with_a_json_list_may_begin_with_white_space(self, tmp_path, start, indent):
        write(tmp_path, {"q.json": start + json.dumps(ROWS, indent=indent)})
        assert load(tmp_path / "q.json") == SPLIT

    @pytest.mark.parametrize("name", TWICE)
    def test_with_two_columns_of_one_name_are_refused(self, tmp_path, name):
        write(tmp_path, TWICE)
        with pytest.raises(ValueError, match=rf"{name}: .*two columns have one name"):
            load(tmp_path / name)

    @pytest.mark.parametrize("column", ["cut", "completions", "prompts"])
    def test_with_a_column_that_hides_an_argument_are_refused(self, column):
        with pytest.raises(RewardError, match=rf"rename the columns \['{column}'\]"):
            score(parity_reward, [sums(1)[0] | {column: "1"}], ["#### 2"], cut=[False])


class Template:
    """A tokenizer with this chat template, and a tiny model."""

    def __init__(self, text):
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = text
        self.model = tiny_model(self.tokenizer, 0)

    def try_it(self, model=None, **changes):
        parts = {name: changes.pop(name) for name in list(changes) if name == "encode_prompts"}
        train_math.check_model(
            model or self.model, self.tokenizer, sums(3), settings(**changes),
            train_math.Parts(parity_reward, **parts), train_math.ALGORITHMS)


PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


class TestTemplates:
    @pytest.mark.parametrize("text", [
        "{{ raise_exception('no system role') }}",
        "{% for m in messages %}{{ m.content[0].text.strip() }}{% endfor %}",
        "{{ no_function() }}",
        "{% for m in messages %}{{ m.content }}",
        "{{ tools | length }}",
        "{{ 1 + messages[0].content }}",
    ])
    def test_that_fail_are_named(self, text):
        with pytest.raises(ValueError, match="the chat template"):
            Template(text).try_it()

    @pytest.mark.parametrize("text", [
        "Hello", "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}1{% endfor %}",
    ])
    def test_that_drop_the_question_are_refused(self, text):
        with pytest.raises(ValueError, match="drops the text of the question"):
            Template(text).try_it()

    def test_an_error_of_your_own_function_keeps_its_traceback(self):
        def encode_prompts(tokenizer, questions, cfg):
            return questions.my_name

        with pytest.raises(AttributeError, match="my_name"):
            Template(PLAIN).try_it(encode_prompts=encode_prompts)

    def test_get_an_empty_system_prompt_only_if_it_was_asked_for(self):
        text = "{% if messages[0].role != 'system' %}default{% endif %}" + PLAIN
        tokenizer = Template(text).tokenizer
        for system, is_default in (None, True), ("", False), ("Be brief.", False):
            cfg = settings(system=system)
            prompt = train_math.encode_prompts(tokenizer, sums(1), cfg)[0]
            assert tokenizer.decode(prompt).startswith("default") == is_default

    def test_that_end_turns_with_another_token_give_a_note(self, capsys):
        case = Template("{% for m in messages %}{{ m.content }}# {% endfor %}")
        case.try_it()
        assert "note" not in capsys.readouterr().out, "# is no special token"
        case.tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})
        token = case.tokenizer.convert_tokens_to_ids("#")
        case.try_it()
        words = f"ends a turn with '#', which does not end a response. Add {token} to eos_token_id"
        assert words in capsys.readouterr().out
        case.model.generation_config.eos_token_id = [case.tokenizer.eos_token_id, token]
        case.try_it()
        assert "note" not in capsys.readouterr().out


class TestModels:
    @pytest.mark.parametrize("place", ["get_decoder", "forward"])
    def test_that_do_not_fit_are_named(self, monkeypatch, place):
        case = Template(PLAIN)

        def wrong(*arguments, **more):
            raise TypeError("unexpected keyword 'cache'")

        monkeypatch.setattr(case.model, place, wrong)
        with pytest.raises(ValueError, match="(cache|forward pass).*unexpected keyword"):
            case.try_it()

    def test_without_hidden_states_are_named(self):
        case = Template(PLAIN)
        torch.manual_seed(0)
        config = transformers.Llama4TextConfig(
            vocab_size=len(case.tokenizer), hidden_size=32, intermediate_size=64,
            intermediate_size_mlp=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_local_experts=2, max_position_embeddings=256,
            bos_token_id=None, eos_token_id=case.tokenizer.eos_token_id,
            pad_token_id=case.tokenizer.pad_token_id)
        with pytest.raises(ValueError, match="last_hidden_state"):
            case.try_it(transformers.Llama4ForCausalLM(config).eval())

    def test_are_saved_with_the_rope_theta_that_transformers_4_reads(self, tmp_path):
        case = Template(PLAIN)
        case.model.config.rope_parameters["rope_theta"] = 5e5
        for part in case.model, case.tokenizer:
            part.save_pretrained(tmp_path / "one")
        model, _ = train_math.load(str(tmp_path / "one"), "cpu")
        model.save_pretrained(tmp_path / "two")
        config = json.loads((tmp_path / "two" / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            again = train_math.load(str(tmp_path / "two"), "cpu")[0](ids).logits
            assert torch.equal(model(ids).logits, again)


def tickets(*counts):
    """Tickets that are sorted by their answer, with so many of each."""
    labels = "billing", "login", "delivery", "refund"
    answers = [label for label, count in zip(labels, counts) for _ in range(count)]
    return [{"question": f"Ticket {i}?", "answer": answer} for i, answer in enumerate(answers)]


def split_of(folder, rows, name="q.csv", **changes):
    write(folder, {name: lines(rows)} if name.endswith("l") else {
        name: "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows)})
    cfg = settings(**{"dataset": str(folder / name), "eval_size": 512} | changes)
    return train_math.load_questions(cfg, parity_reward)


class TestHeldOut:
    @pytest.mark.parametrize("counts", [(30, 30, 30), (40, 30, 20), (200, 100), (25, 25, 25, 25)])
    def test_questions_of_a_sorted_file_have_all_answers(self, tmp_path, counts):
        rows = tickets(*counts)
        questions, held_out = split_of(tmp_path, rows)
        assert len(held_out) == len(rows) // 5
        assert sorted(questions + held_out, key=rows.index) == rows, "each row is used once"
        assert {row["answer"] for row in held_out} == {row["answer"] for row in rows}

    def test_questions_are_the_same_for_each_seed_and_a_smaller_sample_is_a_part(self, tmp_path):
        rows = tickets(30, 30, 30)
        split = split_of(tmp_path, rows)
        assert split == split_of(tmp_path, rows, seed=7, name="q.jsonl")
        few = split_of(tmp_path, rows, eval_size=5)[1]
        assert len(few) == 5 and all(row in split[1] for row in few)

    @pytest.mark.parametrize("counts, words", [
        ((30, 30, 30), "note: 18 questions are held out\n"),
        ((0, 0, 90), "'delivery' is the answer to 100% of them"),
        ((80, 10), "'billing' is the answer to"),
        ((15, 15, 15, 14), "11 questions are held out. So few show little: if half of the "
                           "responses are correct, the 95% interval is 25% to 75%"),
        ((4, 4), "1 questions are held out. So few"),
    ])
    def test_questions_are_counted_and_a_common_answer_or_a_small_number_is_noted(
            self, tmp_path, capsys, counts, words):
        split_of(tmp_path, tickets(*counts))
        assert words in capsys.readouterr().out
        split_of(tmp_path, tickets(*counts), eval_size=0)
        assert "is the answer" not in (shown := capsys.readouterr().out) and "few" not in shown
