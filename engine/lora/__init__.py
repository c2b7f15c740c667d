"""LoRA adapters: their files, the slots that they are loaded into, and which of them computes which token of a step."""
