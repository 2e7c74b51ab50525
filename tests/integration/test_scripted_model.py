"""The scripted model of tests/support, which other tests rely on, plays its texts through the engine."""

import json

import pytest
from transformers import AutoTokenizer

from tests.support.in_process import running, tiny_assembly
from tests.support.scripted_model import save_scripted, selector

SCRIPTS = {
    "call": "<think>It repeats — it repeats.</think>\n\n" + json.dumps({"city": "Zürich"}),
    "long": " ".join(f"word{index % 7}" for index in range(150)),
    "nothing": "",
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    save_scripted(directory, SCRIPTS, special=("<think>", "</think>"))
    return directory


@pytest.mark.parametrize("name", [*SCRIPTS, "none of these"])
def test_a_prompt_selects_a_text(scripted, name):
    tokenizer = AutoTokenizer.from_pretrained(scripted)
    messages = [{"role": "user", "content": f"Play {name}."}]
    conversation = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompts = [tokenizer.encode(text) for text in (conversation, f"Play: {selector(name)}")]
    with running(tiny_assembly(scripted, num_gpu_blocks_override=256)) as engine:
        outputs = engine.generate(prompts, temperature=1.0, ignore_eos=False, max_tokens=400)
    text = SCRIPTS.get(name, "") + tokenizer.eos_token
    assert [tokenizer.decode(tokens) for tokens in outputs] == [text, text]
