"""Fixtures with LoRA adapters and their reference outputs."""

from tests.support.adapters import adapter_files, adapter_list, lora_outputs, lora_prompts

__all__ = ["adapter_files", "adapter_list", "lora_outputs", "lora_prompts"]
