"""The tiny model of the lesson and the experiments: a Qwen3 with 100,000 parameters, whose tokens
are single characters."""
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "\n #*+-.,=?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def tiny_tokenizer(characters=CHARACTERS):
    """A tokenizer with one token per character. Its chat template keeps only the first line of the
    question."""
    ids = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *characters])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        chat_template=r"{{ messages[0].content.split('\n')[0] + '\n' }}")


def tiny_model(tokenizer, seed):
    """The model with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(intermediate_size=192, num_hidden_layers=2, **tiny_settings(tokenizer))
    return Qwen3ForCausalLM(config).eval()


def tiny_settings(tokenizer):
    """The settings that this model shares with the mixture of experts in comparisons/parts.py."""
    return dict(
        vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
