"""A tokenizer of single characters, in the form in which Hugging Face libraries and vLLM load one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Tokens: ``<pad>`` (0), ``<eos>`` (1), then the characters of `alphabet` in order.

    Text begins with no special token and is not ended by one. There is no token for unknown characters:
    encoding one raises an error. ``save_pretrained(folder)`` writes a folder that ``AutoTokenizer`` loads.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
