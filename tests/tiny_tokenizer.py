"""A tokenizer of 53 words, as the `tokenizers` library writes it, for the small models of fixtures/weights."""

import tokenizers

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [f"w{index}" for index in range(53 - len(SPECIAL))]


def tokenizer_json():
    """The content of its `tokenizer.json`."""
    ids = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(SPECIAL)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return made.to_str()
