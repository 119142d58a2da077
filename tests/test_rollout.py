"""Sampling: both samplers, which of them is chosen, and the log-probs. On a CPU, an emulated CUDA
graph records operations. As on a GPU, they have not run then, and replays work on the same memory.
"""
import contextlib
import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_math
from support import models, sampling
from support.sampling import dynamic_rollout, end_tokens, next_tokens, static_rollout
from support.task import Refused
from tests.conftest import QUESTIONS, encoded, rollout_of, settings, spy, sums, train
from tools.warm_up import tiny_tokenizer

SAMPLERS = [dynamic_rollout, static_rollout]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FREQUENT_ENDS = torch.arange(1, 8)  # several end tokens that are drawn often: lengths differ

SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256)
KINDS = {  # the class of the model in transformers, its settings
    "Qwen2": ("Qwen2ForCausalLM", SIZES),
    "Qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 8}),
    "Llama": ("LlamaForCausalLM", SIZES),
    "GPT-2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "windows": ("MistralForCausalLM", SIZES | {"sliding_window": 8}),
    "LFM2": ("Lfm2ForCausalLM", SIZES | {"layer_types": ["conv", "full_attention"]}),
}


def model_of(kind, seed=1):
    """(model, tokenizer): a small model of this kind with large random weights."""
    tokenizer = tiny_tokenizer()
    name, changes = KINDS[kind]
    model_class = getattr(transformers, name)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    config = model_class.config_class(
        vocab_size=len(tokenizer), bos_token_id=None, initializer_range=0.3, **ids, **changes)
    return model_class(config).eval(), tokenizer


def log_probs_of(model, prompts, responses, temperature):
    """(a MicroBatch of all these responses, its log-probs as in an update)."""
    n = len(responses)
    rollout = rollout_of(prompts, responses)
    batch = train_math.MicroBatch(rollout, torch.zeros(n), range(n), model.device)
    return batch, train_math.response_log_probs(model, batch, temperature)


def assert_log_probs_of_the_update(
        model, prompts, group_size, responses, sampled, temperature, atol=1e-4):
    """The sampler's log-probs are those of response_log_probs, and 0 after the end."""
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    batch, log_probs = log_probs_of(model, prompts, responses, temperature)
    for i, response in enumerate(responses):
        n = len(response)
        assert torch.allclose(log_probs[i][batch.mask[i]], sampled[i, :n], atol=atol)
        assert (sampled[i, n:] == 0).all() and (log_probs[i][~batch.mask[i]] == 0).all()


# ---- an emulated CUDA graph ----------------------------------------------------------------------

def tensors(*values):
    return [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class Graph(TorchDispatchMode):
    """Stands for torch.cuda.CUDAGraph: it records operations, and the memory that they change."""

    replays = 0

    def __init__(self):
        super().__init__()
        self.operations = []
        self.before = {}  # place: (storage, a copy of it)

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        if operation._schema.is_mutable:
            for tensor in tensors(inputs, options):
                storage = tensor.untyped_storage()
                self.before.setdefault(place(tensor), (storage, storage.clone()))
        result = operation(*inputs, **options or {})
        self.operations.append((operation, inputs, options or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        Graph.replays += 1
        for operation, inputs, options, result in self.operations:
            again = operation(*inputs, **options)
            given = {place(tensor) for tensor in tensors(inputs, options)}
            for old, new in zip(tensors(result), tensors(again), strict=True):
                if place(old) not in given:  # or else it was changed in place
                    old.copy_(new)


@contextlib.contextmanager
def record(graph, stream):
    """Stands for torch.cuda.graph."""
    assert stream is sampling.side_stream(), "cuBLAS keeps a workspace for each stream"
    random_state = torch.get_rng_state()
    with graph:
        yield
    for storage, before in graph.before.values():
        storage.copy_(before)
    torch.set_rng_state(random_state)


@pytest.fixture
def graphs(monkeypatch):
    """Without a GPU, CUDA's functions work on this CPU, and all tensors say that they are on it."""
    if DEVICE == "cuda":
        return
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(Graph, "replays", 0)


# ---- the samplers --------------------------------------------------------------------------------


class TestBothSamplers:
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_sample_from_the_distribution_of_the_model(self, model, prompts, sampler):
        """The first two tokens of 5,000 responses to each of two prompts of different lengths are
        compared with the exact probabilities."""
        n = 5000
        temperature = 0.7
        ends = torch.tensor([model.config.eos_token_id])
        torch.manual_seed(0)
        responses, _ = sampler(model, prompts, n, 2, temperature, ends)
        words = torch.arange(model.config.vocab_size)
        for k, prompt in enumerate(prompts):
            with torch.no_grad():
                first = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
                all_second = torch.tensor([prompt + [word] for word in words.tolist()])
                second = (model(all_second).logits[:, -1] / temperature).softmax(-1)
            second = (first[:, None] * second)[words != ends].sum(0)  # of unfinished responses
            for t, exact in enumerate((first, second)):
                drawn = torch.tensor([r[t] for r in responses[k * n:(k + 1) * n] if len(r) > t])
                seen = torch.bincount(drawn, minlength=len(words)) / n
                rare = exact.argsort()[:len(words) // 2]  # a top_k or top_p would drop them
                for p, share in (exact, seen), (exact[rare].sum(), seen[rare].sum()):
                    off = ((share - p).abs() / (p * (1 - p) / n).sqrt()).max().item()
                    assert off < 5, f"prompt {k}, position {t}: {off:.1f} standard errors off"

    @pytest.mark.parametrize("uniform", [0, 2**-24, 0.5, 1 - 2**-24])  # torch.rand: steps of 2^-24
    def test_never_draw_a_token_of_probability_0(self, monkeypatch, uniform):
        probs = torch.zeros(13, 1000)
        probs[0, 2] = 1
        probs[1, 1:3] = torch.tensor([0.4, 0.6])
        probs[2, :4] = torch.tensor([0.1, 0.2, 0.3, 0.4])
        torch.manual_seed(0)
        probs[3:] = torch.randn(10, 1000).softmax(-1)  # with rounding, the sum is not exactly 1
        monkeypatch.setattr(torch, "rand", lambda *size, **more: torch.full(size, uniform))
        tokens, log_probs = next_tokens(probs.log(), 1.0)
        drawn = probs.gather(1, tokens)
        assert (drawn > 0).all() and torch.allclose(log_probs, drawn.log(), atol=1e-6)
        alone = [next_tokens(row[None].log(), 1.0)[0] for row in probs]
        assert torch.equal(torch.cat(alone), tokens), "other rows change what a row draws"

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_are_greedy_at_temperature_0(self, model, prompts, sampler):
        prompts = [[0, *prompt] for prompt in prompts]  # 0 is an id like any other
        responses, sampled = sampler(model, prompts, 2, 5, 0.0, torch.tensor([-1]))
        for k, prompt in enumerate(prompts):
            ids = list(prompt)
            for _ in range(5):
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
            assert responses[2 * k:2 * k + 2] == [ids[len(prompt):]] * 2
        assert_log_probs_of_the_update(model, prompts, 2, responses, sampled, 1.0)

    def test_read_each_prompt_once_and_finished_responses_leave_the_batch_of_the_dynamic_one(
            self, model, prompts, monkeypatch):
        calls = []
        monkeypatch.setattr(model, "forward", spy(model.forward, calls))
        torch.manual_seed(0)
        responses, _ = dynamic_rollout(model, prompts, 8, 12, 1.0, torch.arange(1, 20))
        shapes = [tuple(inputs["input_ids"].shape) for _, inputs, _ in calls]
        lengths = [len(response) for response in responses]
        unfinished = [sum(n > t for n in lengths) for t in range(1, max(lengths))]
        assert shapes == [(2, max(map(len, prompts))), *((n, 1) for n in unfinished)]
        assert unfinished[-1] < 16

    @pytest.mark.parametrize("kind", ["Qwen3", "LFM2", "GPT-2", "windows"])
    def test_score_as_the_update_does_whatever_the_model(self, kind):
        """LFM2 has convolutions, whose state is in the cache beside keys and values. GPT-2 has
        learned positions, which count from the first token of the prompt and not of the padding.
        The last one has a layer that sees only the last eight tokens."""
        model, tokenizer = model_of(kind, seed=0)
        prompts = encoded(tokenizer)
        ends = torch.arange(1, 20)
        for sampler in SAMPLERS if kind == "Qwen3" else [dynamic_rollout]:
            torch.manual_seed(0)
            responses, sampled = sampler(model, prompts, 8, 12, 0.7, ends)
            assert len({len(response) for response in responses}) > 3
            assert sampled.shape == (16, 12) and not sampled.requires_grad
            for response in responses:
                assert response[-1] in ends or len(response) == 12
                assert not set(response[:-1]) & set(ends.tolist())
            assert_log_probs_of_the_update(model, prompts, 8, responses, sampled, 0.7)
        model.train()
        _, row = train((model, tokenizer), 4, max_steps=1, max_completion_length=40)
        assert row["log_ratio_first_max"] == 0 < row["grad_norm"] and not model.training, "dropout"


class TestAReplayedGraph:
    """It is one of CUDA where there is a GPU."""

    @pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
    def test_gives_the_tokens_of_the_dynamic_sampler(self, graphs, kind):
        model, tokenizer = model_of(kind, seed=0)
        model.to(DEVICE)
        arguments = encoded(tokenizer, [*QUESTIONS, *sums(5)]), 2, 20, 0.0, FREQUENT_ENDS.to(DEVICE)
        responses, log_probs = dynamic_rollout(model, *arguments)
        found, its_log_probs = static_rollout(model, *arguments)
        assert found == responses and torch.allclose(its_log_probs, log_probs, atol=1e-4)
        assert Graph.replays >= 14 or DEVICE == "cuda"
        lengths = [len(response) for response in responses]
        assert min(lengths) < 16 < max(lengths) == 20

    def test_draws_fresh_numbers_and_a_seed_repeats_them(self, graphs, model, prompts):
        model.to(DEVICE)
        runs = []
        for seed in 0, 0, 1:
            torch.manual_seed(seed)
            runs.append(static_rollout(model, prompts, 8, 12, 0.7, FREQUENT_ENDS.to(DEVICE))[0])
        assert runs[0] == runs[1] != runs[2]
        assert len({tuple(response) for response in runs[0]}) > 8

    def test_that_cannot_be_recorded_is_refused_with_the_way_out(
            self, graphs, model, prompts, monkeypatch):
        """Something in the model reads a tensor on the CPU."""
        def graph(graph, stream):
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(torch.cuda, "graph", graph)
        with pytest.raises(Refused, match=r"main\(generate=train_math.dynamic_rollout\)"):
            static_rollout(model.to(DEVICE), prompts, 2, 5, 1.0, FREQUENT_ENDS.to(DEVICE))


@pytest.fixture
def chosen(monkeypatch):
    """{sampler: its calls}, as `spy` lists them."""
    chosen = {sampler: [] for sampler in SAMPLERS}
    for sampler, calls in chosen.items():
        monkeypatch.setattr(sampling, sampler.__name__, spy(sampler, calls))
    return chosen


class TestWhichSampler:
    @pytest.mark.parametrize("temperature", [1.0, 0.0])
    def test_on_cuda_it_is_the_static_one(
            self, model, prompts, chosen, pretend_cuda, temperature):
        """Samples to train on come from a float16 copy, and greedy ones from the model itself."""
        before = copy.deepcopy(model.state_dict())
        arguments = (prompts, 2, 3, temperature, FREQUENT_ENDS)
        responses, log_probs = train_math.generate(model, *arguments)
        (((used, *rest), _, _),) = chosen[static_rollout]
        assert tuple(rest) == arguments and not chosen[dynamic_rollout]
        assert len(responses) == 4 and log_probs.dtype == torch.float32
        if temperature:
            assert {buffer.dtype for buffer in used.buffers()} == {torch.float32}
            for mine, its in zip(model.parameters(), used.parameters(), strict=True):
                assert torch.equal(its, mine.half()) and its.dtype == torch.float16
        else:
            assert used is model
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    def test_on_cuda_it_is_the_dynamic_one_for_a_model_that_was_not_tried(
            self, model, prompts, chosen, pretend_cuda, capsys):
        """One note says so, and how to try the other one."""
        model.config.model_type = "gpt2"
        models.note.cache_clear()
        for _ in range(2):
            train_math.generate(model, prompts, 2, 3, 1.0, FREQUENT_ENDS)
        assert len(chosen[dynamic_rollout]) == 2 and not chosen[static_rollout]
        assert capsys.readouterr().out.count("support.sampling.TRIED.add('gpt2')") == 1

    def test_no_responses_without_finite_log_probs_are_accepted(self, model, prompts, pretend_cuda):
        model.lm_head.weight.data[5] = math.nan
        with pytest.raises(FloatingPointError, match="generate=train_math.dynamic_rollout"):
            train_math.generate(model, prompts, 2, 3, 1.0, torch.tensor([1]))


class TestSample:
    @pytest.mark.parametrize("rows, sampled, greedy", [
        (256, [5], [5]), (16, [4, 1], [2, 2, 1]), (23, [5], [2, 2, 1]), (7, [1] * 5, [1] * 5)])
    def test_takes_whole_groups_at_once_in_the_order_of_the_questions(
            self, tiny, rows, sampled, greedy):
        """Greedy decoding, that of an evaluation, takes half as many, because there each row has a
        prompt of its own, and reading these needs the most memory."""
        model, tokenizer = tiny
        questions = [{"question": f"{'Ann ' * n}?"} for n in (3, 1, 5, 2, 4)]
        cfg = settings(rollout_rows=rows, max_completion_length=4, instruction="")
        for temperature, expected in (1.0, sampled), (0.0, greedy):
            calls = []
            parts = train_math.Parts(generate=spy(train_math.generate, calls))
            got = train_math.sample(model, tokenizer, questions, 4, temperature, cfg, parts)
            assert [len(prompts) for (_, prompts, *_), _, _ in calls] == expected
        assert got.prompts[::4] == encoded(tokenizer, questions)
        assert got.questions == [row for row in questions for _ in range(4)]
        assert got.texts == tokenizer.batch_decode(got.responses, skip_special_tokens=True)

    @pytest.mark.parametrize("ends, more", [([4, 5], [4, 5]), (7, [7]), (None, [])])
    def test_ends_at_any_end_token_of_the_model_or_the_tokenizer(self, tiny, ends, more):
        model, tokenizer = tiny
        model.generation_config.eos_token_id = ends
        assert end_tokens(model, tokenizer).tolist() == sorted({tokenizer.eos_token_id, *more})

    @pytest.mark.parametrize("system, begin", [
        (None, "default "), ("", ""), ("Be kind.", "system Be kind.")])
    def test_asks_through_the_chat_template_with_the_instruction_and_the_system_prompt(
            self, system, begin):
        """Llama's template takes the date of today if there is no date_string."""
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = (
            "{% if messages[0].role != 'system' %}default {% endif %}"
            "{% for m in messages %}{% if m.content %}{{ m.role }} {{ m.content }}{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
            "{% if enable_thinking is false %} now{% endif %} {{ date_string }}")
        cfg = settings(instruction="Say #### 1", system=system)
        (ids,) = train_math.encode_prompts(tokenizer, [{"question": "How?"}], cfg)
        assert tokenizer.decode(ids) == begin + "user How?\nSay #### 1A now 26 Jul 2024"


class TestLogProbs:
    def test_are_the_same_if_a_large_vocabulary_needs_several_chunks(self, tiny, monkeypatch):
        """A chunk of logits has at most 256 rows, or 2^22 elements if that is more."""
        model, tokenizer = tiny
        response = tokenizer("12\n#### 5" * 40).input_ids
        batch, whole = log_probs_of(model, [[5, 6], [5]], [response[:99], response], 1.0)
        calls = []

        class Large:
            weight = range(151_936)
            __call__ = staticmethod(spy(model.lm_head, calls))

        monkeypatch.setattr(model, "get_output_embeddings", Large)
        found = train_math.response_log_probs(model, batch, 1.0)
        assert [len(hidden) for (hidden,), _, _ in calls] == [256, 203]
        assert torch.allclose(found, whole, atol=1e-5)

    @pytest.mark.parametrize("lengths, tokens, shapes", [
        ([16] * 12, 63, [(3, 16)] * 4),
        ([16] * 12, 64, [(4, 16)] * 3),
        ([4, 31] * 4, 124, [(4, 4), (4, 31)]),
    ])
    def test_are_taken_in_micro_batches_of_similar_lengths_that_fill_the_memory(
            self, lengths, tokens, shapes):
        rollout = rollout_of([[5]] * len(lengths), [[6] * (n - 1) for n in lengths])
        cfg = settings(micro_batch_tokens=tokens, minibatches=1)
        (batches,) = train_math.build_minibatches(rollout, torch.ones(len(lengths)), cfg)
        assert [tuple(batch.ids.shape) for batch in batches] == shapes

    def test_are_taken_in_minibatches_of_whole_groups(self):
        """Responses with the advantage 0 are left out, and a minibatch of them, too. There may be
        an advantage for each turn of a response."""
        advantages = torch.arange(1, 17.0)
        advantages[4:8] = advantages[9] = 0
        advantages = torch.stack([0 * advantages, advantages], dim=1)
        rollout = rollout_of([[3]] * 16, [[4 + i] * 2 for i in range(16)])
        (everything,) = train_math.build_minibatches(
            rollout, advantages, settings(minibatches=1), keeps_all=True)
        assert sum(len(batch.indices) for batch in everything) == 16
        minibatches = train_math.build_minibatches(rollout, advantages, settings())
        found = [sorted(i for batch in minibatch for i in batch.indices)
                 for minibatch in minibatches]
        assert found == [[0, 1, 2, 3], [8, 10, 11], [12, 13, 14, 15]]
        for batch in itertools.chain(*minibatches):
            assert torch.equal(batch.advantages, advantages[batch.indices])
