"""Transformers without the parts of torch that one rank does not use: smaller processes, the same results."""

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

HEAVY = ["torch._dynamo.utils", "torch._inductor", "torch.distributed.tensor"]
USE = f"""
import json, sys
from paged_backend.utils.lean_import import import_transformers
import_transformers()
import paged_backend.server.service

import torch
from transformers import AutoModelForCausalLM, masking_utils
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])  # builds it without memory first
heavy = sys.modules.keys() & set({HEAVY})
ids = torch.arange(8)[None]
logits = model(input_ids=ids).logits
# A mask with its own function is made with vmap, in a context of dynamo.
hidden = torch.zeros(1, 4, 8)
mask = masking_utils.create_causal_mask(
    model.config, hidden, None, None, None, or_mask_function=lambda batch, head, q, kv: kv == 3
)
compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
print(json.dumps([list(heavy), logits.tolist(), mask.tolist(), compiled.tolist()]))
"""


def test_processes_import_less_and_compute_the_same(tiny):
    directory, _ = tiny
    run = subprocess.run([sys.executable, "-c", USE, directory], capture_output=True, text=True, check=True)
    heavy, logits, mask, compiled = json.loads(run.stdout)
    assert heavy == []
    expected = AutoModelForCausalLM.from_pretrained(directory)(input_ids=torch.arange(8)[None]).logits
    torch.testing.assert_close(torch.tensor(logits), expected.detach())
    assert mask == [[[[kv <= q or kv == 3 for kv in range(4)] for q in range(4)]]]
    assert compiled == [2.0]


def test_a_plan_imports_less(tiny, monkeypatch):
    from paged_client.cli import main
    from paged_client.commands import plan

    started = []
    monkeypatch.setattr(plan.os, "execve", lambda *arguments: started.append(arguments))
    main(["plan", str(tiny[0])])
    program, (_, *arguments), environment = started[0]
    command = [program, "-X", "importtime", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "requests that fit" in run.stdout
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "torch" in imported
    assert not imported & set(HEAVY)
