"""experiments/precision/kept.py: what a rounded copy of the weights keeps of a small change."""
import pytest
import torch

import train_math
from common.logs import read
from common.tiny_model import tiny_model, tiny_tokenizer
from experiments.precision import kept

TINY = 2.3e-6  # the smallest size of kept.SIZES


@pytest.fixture(scope="module")
def tiny():
    """(model in float64 whose weights are bf16 numbers, its weights, two micro-batches)."""
    model = tiny_model(tiny_tokenizer(), seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    model.double()
    batches = []
    for first in (5, 25):
        prompts = [[first, 6, 7]] * 3
        responses = [[10 + i, 11 + 2 * i, 12, 13 + 3 * i, 1] for i in range(3)]
        advantages = torch.tensor([1.0, -0.5, -0.5])
        batches.append(train_math.MicroBatch(prompts, responses, range(3), "cpu", advantages))
    return model, [p.detach().clone() for p in model.parameters()], batches


def measured(tiny, kind, size, formats):
    """{(format, index of the micro-batch): kept}"""
    model, start, batches = tiny
    kept.set_weights(model, start)
    direction = kept.direction_of(kept.gradient(model, batches[0]), kind)
    before = kept.log_probs_before(model, start, batches, formats)
    rows = kept.measure(model, start, direction, size, batches, before, formats)
    return {(row["format"], row["batch"]): row["kept"] for row in rows}


def test_a_copy_that_is_not_rounded_keeps_exactly_all(tiny):
    found = measured(tiny, "adamw", TINY, {"float64": torch.float64})
    assert found == {("float64", 0): 1.0, ("float64", 1): 1.0}


@pytest.mark.parametrize("kind", ["adamw", "noise"])
def test_bf16_keeps_less_of_a_tiny_change_than_float16(tiny, kind):
    found = measured(tiny, kind, TINY, kept.FORMATS)
    for batch in (0, 1):
        assert 0 <= found["bf16", batch] < 0.15
        assert found["bf16", batch] < 0.5 * found["float16", batch]
        assert found["float16", batch] < 0.9


def test_both_formats_keep_a_large_change(tiny):
    found = measured(tiny, "noise", 3e-3, kept.FORMATS)
    assert set(found) == {(name, i) for name in kept.FORMATS for i in (0, 1)}
    assert all(abs(value - 1) < 0.1 for value in found.values())


def test_a_change_lowers_the_loss_and_has_the_given_size(tiny):
    model, start, batches = tiny
    kept.set_weights(model, start)
    old, = kept.log_probs(model, batches[:1])
    direction = kept.direction_of(kept.gradient(model, batches[0]), "adamw")
    assert kept.root_mean_square(direction) == pytest.approx(1)
    kept.set_weights(model, start, direction, TINY)
    moved = [p.detach() - before for p, before in zip(model.parameters(), start)]
    assert kept.root_mean_square(moved) == pytest.approx(TINY)
    new, = kept.log_probs(model, batches[:1])
    advantages = batches[0].advantages.repeat_interleave(5)
    assert ((new - old) * advantages).sum() > 0


def test_the_fraction_of_weights_that_change_is_counted_in_the_format(tiny):
    model, start, _ = tiny
    direction = [torch.ones_like(x) for x in start]
    assert kept.set_weights(model, start, direction, 1e-12, torch.bfloat16) < 0.01
    assert kept.set_weights(model, start, direction, 1.0, torch.bfloat16) > 0.99
    between = [x * (1 + 1e-5) for x in start]  # not bf16 numbers
    assert kept.set_weights(model, between, dtype=torch.bfloat16) == 0


def test_the_largest_activation_is_found(tiny):
    model, start, batches = tiny
    kept.set_weights(model, start)
    first = next(iter(kept.largest_activations(model, batches).values()))
    with torch.no_grad():
        model.get_decoder().norm.weight *= 1000
    name, value = next(iter(kept.largest_activations(model, batches).items()))
    kept.set_weights(model, start)
    assert value > 100 * first
    assert name == "output of norm"


def test_the_first_update_of_adamw_changes_each_weight_by_the_learning_rate():
    model = torch.nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    g = torch.tensor([[1e-3, -5.0, 0.2]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    model.weight.grad = g.clone()
    optimizer.step()
    change = (model.weight.detach() - before) / 1e-3
    torch.testing.assert_close(kept.direction_of([g], "adamw")[0], change, rtol=1e-3, atol=1e-3)


def test_the_sizes_are_those_of_the_runs_that_the_table_names():
    for size, run in kept.SIZES.items():
        assert kept.simulated_size(*run) == pytest.approx(size, rel=0.05)


def test_one_correct_and_two_wrong_responses_are_picked():
    texts = [r"\boxed{3}", r"\boxed{7}", r"\boxed{4}", r"\boxed{7}", r"\boxed{5}"]
    found, rewards = kept.picked([{"response": text, "gold": "7"} for text in texts])
    assert found == [r"\boxed{7}", r"\boxed{3}", r"\boxed{4}"]
    assert rewards.tolist() == [1, 0, 0]


def test_the_log_is_complete_and_the_table_follows_from_it():
    rows = read(kept.LOG)
    measured = [(row["direction"], row["size"], row["format"], row["responses"])
                for row in rows if row["kind"] == "kept"]
    assert len(measured) == len(set(measured))
    assert set(measured) == {
        (name, size, form, responses) for name in kept.DIRECTIONS for size in kept.SIZES
        for form in kept.FORMATS for responses in ("trained", "other")}
    assert kept.LOG.with_suffix(".md").read_text(encoding="utf-8") == kept.tables(rows)
    assert read(kept.ANSWERS)


def test_a_finished_log_is_not_measured_again(tmp_path, capsys):
    log = tmp_path / "kept.jsonl"
    log.write_bytes(kept.LOG.read_bytes())
    kept.main(["--model", "no such folder", "--dataset", "nor this", "--log", str(log)])
    assert log.read_bytes() == kept.LOG.read_bytes()
    assert "bf16" in capsys.readouterr().out
