"""Makes the tokenizer of the quickstart: one token for each of a handful of words. Run it to make it anew."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", *"0123456789", "=", "+", "-", "?"]


def main() -> None:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(WordLevel(vocabulary))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", model_max_length=64
    )
    tokenizer.save_pretrained(Path(__file__).parent)


if __name__ == "__main__":
    main()
