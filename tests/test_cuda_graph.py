"""The sampler for CUDA on a CPU: an emulated CUDA graph records operations, and then replays them.

As on a GPU, nothing that was recorded has run, each replay works on the same memory, and reading a
value while recording is an error. A test on a real GPU is in test_rollout.py.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_math
from support import cuda_sampling
from support.sampling import dynamic_rollout
from tests.conftest import encoded, settings, sums, train
from tests.test_rollout import FREQUENT_ENDS, THREE, model_of

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default,
         aten.masked_select.default, aten.equal.default, aten.lift_fresh.default}


def tensors(*values):
    return [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """Runs operations, and remembers them and the memory that they change."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self.before = {}  # place: (storage, a copy of it)

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        if operation in READS:
            raise RuntimeError(f"{operation} while a stream is capturing")
        if operation._schema.is_mutable:
            for tensor in tensors(inputs, options):
                storage = tensor.untyped_storage()
                self.before.setdefault(place(tensor), (storage, storage.clone()))
        result = operation(*inputs, **options or {})
        self.operations.append((operation, inputs, options or {}, result))
        return result


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    replays = 0

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
def record(graph):
    """Stands for torch.cuda.graph."""
    random_state = torch.get_rng_state()
    recorder = Recorder()
    try:
        with recorder:
            yield
    finally:
        for storage, before in recorder.before.values():
            storage.copy_(before)
        torch.set_rng_state(random_state)
    graph.operations = recorder.operations


@pytest.fixture
def graphs(monkeypatch):
    """CUDA's functions work on this CPU, and all tensors say that they are on a GPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(Graph, "replays", 0)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "a long window", "only windows", "GPT-2"])
def test_a_replayed_graph_gives_the_tokens_of_the_dynamic_sampler(graphs, kind):
    """In float32 all of them. In 16 bits, rounding may change a token of a random model."""
    model, tokenizer = model_of(kind, seed=0)
    arguments = encoded(tokenizer, [*THREE, *sums(4)]), 2, 20, 0.0, FREQUENT_ENDS
    responses, log_probs = dynamic_rollout(model, *arguments)
    found, its_log_probs = cuda_sampling.static_rollout(model, *arguments)
    assert found == responses and torch.allclose(its_log_probs, log_probs, atol=1e-5)
    assert Graph.replays >= 14
    lengths = [len(response) for response in responses]
    assert min(lengths) < 16 < max(lengths) == 20
    for dtype in torch.float16, torch.bfloat16:
        copied = cuda_sampling.copy_in(model, dtype)
        found, its_log_probs = cuda_sampling.static_rollout(copied, *arguments)
        assert len(found) == 14 and its_log_probs.isfinite().all()


def test_each_replay_draws_fresh_numbers_and_a_seed_repeats_them(graphs, model, prompts):
    runs = []
    for seed in 0, 0, 1:
        torch.manual_seed(seed)
        runs.append(cuda_sampling.static_rollout(model, prompts, 8, 12, 0.7, FREQUENT_ENDS)[0])
    assert runs[0] == runs[1] != runs[2] and Graph.replays > 0
    assert len({tuple(response) for response in runs[0]}) > 8


def test_a_run_whose_responses_come_from_graphs_has_exact_ratios(graphs, fresh, pretend_cuda):
    pretend_cuda(fresh[0])
    rows = train(fresh, held_out=2, max_steps=2)
    for row in rows[1:]:
        assert row["log_ratio_first_max"] == 0 and 1e-6 < row["sampler_gap"] < 1e-2
        assert "notes" not in row
    assert Graph.replays > 10


def test_a_precision_that_has_failed_is_not_tried_again(graphs, fresh, pretend_cuda, capsys):
    model, tokenizer = fresh
    pretend_cuda(model)
    arguments = encoded(tokenizer), 2, 3, 1.0, FREQUENT_ENDS
    tried = []

    def cannot_sample(sampler, *more):
        tried.append(next(sampler.parameters()).dtype)
        return False

    train_math.generate(model, *arguments)
    with mock.patch.object(cuda_sampling, "can_sample", cannot_sample):
        for _ in range(2):
            train_math.generate(model, *arguments)
    assert tried == [torch.float16, torch.bfloat16] and capsys.readouterr().out.count("note:") == 2


@pytest.mark.parametrize("error, raised", [
    (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), torch.OutOfMemoryError),
    (RuntimeError("CUDA error: operation not permitted when stream is capturing"), ValueError),
    (RuntimeError("a value was read while a stream is capturing"), None),
])
def test_a_recording_that_fails_ends_the_run_or_falls_back_if_cuda_is_intact(
        graphs, model, prompts, monkeypatch, capsys, error, raised):
    @contextlib.contextmanager
    def fails(graph):
        with record(graph):
            yield
        raise error

    arguments = model, prompts, 2, 20, 0.0, torch.tensor([-1])
    monkeypatch.setattr(torch.cuda, "graph", fails)
    if raised:
        with pytest.raises(raised):
            cuda_sampling.static_rollout(*arguments)
    else:
        expected, _ = dynamic_rollout(*arguments)
        for _ in range(2):
            assert cuda_sampling.static_rollout(*arguments)[0] == expected
        assert capsys.readouterr().out.count("note: sampling without a CUDA graph") == 1


@pytest.mark.parametrize("gib, tokens", [
    (10.9, 512), (13.9, 512), (14.7, 1024), (21.9, 1024), (22, 2048), (31.9, 2048), (39.4, 4096),
    (44.3, 8192), (139, 8192),
])
def test_the_micro_batch_fits_the_memory_of_the_gpu(monkeypatch, gib, tokens):
    properties = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert settings(device="cuda").micro_batch_tokens == tokens
    assert settings(device="cuda", micro_batch_tokens=7).micro_batch_tokens == 7
    assert settings(device="cpu").micro_batch_tokens == 1024
