"""A tiny model that plays given texts, so that recorded outputs of other models come out of a real engine.

A prompt selects the script. Each token of a script has an id of its own, from which the weights lead to the next one:
the row of the next token in the output layer is the embedding of this one. Attention and the MLP add nothing.

Scripts may repeat words although a vocabulary cannot, because the tokens' texts end with a label that the decoder
removes. The token that selects a script is only a label, so that it can end any prompt without being seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN_SIZE = 128
SHARPNESS = 32.0  # of the logits: the next token has nearly all of the probability, also at temperature 1
LABEL = "⟦{}⟧"
WORD = re.compile(r"</?\w+>|\s?\w+|\s|[^\w\s]")  # marks like <think> are one token, as in most models

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def selector(name: str) -> str:
    """Return the text of the token that selects a script, at the end of a prompt."""
    return LABEL.format(name)


def save_scripted(directory: Path, scripts: Mapping[str, str], **tokenizer: Any) -> None:
    """Save a model that plays one of the scripts, and then its end-of-sequence token.

    scripts: texts by name. A conversation plays the script whose name is in its last message; of several names, the
    last one here. Any other prompt plays the one whose `selector` is its end, or nothing.
    tokenizer: arguments of `save_tokenizer`.
    """
    made, paths = save_tokenizer(directory, scripts, **tokenizer)
    _save_model(directory, len(made), paths, made.eos_token_id)


def save_tokenizer(
    directory: Path,
    scripts: Mapping[str, str],
    *,
    chat_template: str | None = CHATML,
    special: Sequence[str] = (),
    eos: str = "<|im_end|>",
    **settings: object,
) -> tuple[PreTrainedTokenizerFast, list[list[int]]]:
    """Save the tokenizer of `save_scripted`. Return it, and the token ids of each script after those of its selector.

    special: texts that are one token each, a special one, in scripts and in prompts.
    settings: further settings of the tokenizer, such as `response_template`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    added = [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys((eos, *special))]
    paths = []
    for name, text in scripts.items():
        added.append(AddedToken(selector(name), special=True, normalized=False))
        path = [selector(name)]
        for index, (piece, is_special) in enumerate(_pieces(text, special)):
            label = LABEL.format(f"{name}.{index}")
            if is_special:
                path.append(piece + label)
                added.append(AddedToken(path[-1], special=True, normalized=False))
            else:
                path.append(_byte_level(piece) + label)
                vocabulary[path[-1]] = len(vocabulary)
        paths.append(path)
    tokenizer = _tokenizer(vocabulary, added, eos)
    if chat_template is not None:
        tokenizer.chat_template = chat_template + _selection(scripts)
    for key, value in settings.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(directory)
    return tokenizer, [tokenizer.convert_tokens_to_ids(path) for path in paths]


def _pieces(text: str, special: Sequence[str]) -> Iterable[tuple[str, bool]]:
    """Yield the texts of the tokens, and whether each is a special token."""
    for part in re.split(f"({'|'.join(map(re.escape, special))})" if special else "(?!)", text):
        if part in special:
            yield part, True
        else:
            yield from ((word, False) for word in WORD.findall(part))


def _byte_level(text: str) -> str:
    """Return the text in the characters that stand for its bytes in a vocabulary."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in whole.pre_tokenize_str(text))


def _tokenizer(vocabulary: dict[str, int], added: Sequence[AddedToken], eos: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    labels = decoders.Replace(Regex("⟦[^⟧]*⟧"), "")
    tokenizer.decoder = decoders.Sequence([labels, decoders.ByteLevel()])
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def _selection(scripts: Iterable[str]) -> str:
    """Return the end of the chat template, which selects the script."""
    found = "".join(
        f"{{% if '{name}' in messages[-1].content %}}{{% set script.name = '{name}' %}}{{% endif %}}"
        for name in scripts
    )
    label = "{% if script.name %}" + LABEL.format("{{ script.name }}") + "{% endif %}"
    choice = "{% set script = namespace(name='') %}" + found + label
    return "{% if add_generation_prompt and messages[-1].content is string %}" + choice + "{% endif %}"


def _save_model(directory: Path, vocab_size: int, paths: Iterable[Sequence[int]], eos: int) -> None:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=eos,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    last = torch.nn.functional.normalize(torch.randn(HIDDEN_SIZE), dim=0)
    embeddings, output = last.repeat(vocab_size, 1), torch.zeros(vocab_size, HIDDEN_SIZE)
    output[eos] = last  # of the last token of a script, and of every token outside of scripts
    for path in paths:
        own = torch.nn.functional.normalize(torch.randn(len(path) - 1, HIDDEN_SIZE))
        embeddings[path[:-1]] = output[path[1:]] = own
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(output * SHARPNESS / HIDDEN_SIZE**0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(directory)
