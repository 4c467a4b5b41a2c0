"""Makes the tokenizer of this example: a handful of words, and a chat template that drops the reasoning of answers that
others follow, as those of reasoning models do. Run it to make it anew."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<end>", *"0123456789", "+", "?", "calc", "<user>", "<model>", "<tool>", "<think>", "</think>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<model> {{ message.content if loop.last else message.content.split('</think>')[-1] }} <end> "
    "{% else %}<{{ message.role }}> {{ message.content }} <end> {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<model> {% endif %}"
)


def main() -> None:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(WordLevel(vocabulary))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", model_max_length=64, chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(Path(__file__).parent)


if __name__ == "__main__":
    main()
