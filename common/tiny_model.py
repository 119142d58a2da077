"""The tiny model of lesson and lab: a Qwen3 of 100,000 parameters that reads characters."""
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "\n #*+-.,=?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def tiny_tokenizer(characters=CHARACTERS):
    """One token a character; the prompt is the question's first line."""
    ids = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *characters])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        chat_template=r"{{ messages[0].content.split('\n')[0] + '\n' }}")


def tiny_model(tokenizer, seed):
    """Not trained yet."""
    torch.manual_seed(seed)
    config = Qwen3Config(intermediate_size=192, num_hidden_layers=2, **tiny_settings(tokenizer))
    return Qwen3ForCausalLM(config).eval()


def tiny_settings(tokenizer):
    """What this model and the lab's mixture of experts share."""
    return dict(
        vocab_size=len(tokenizer), hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
