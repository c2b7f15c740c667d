"""A Qwen3 checkpoint as a GGUF file. Runs in the environment of the converters: `convert_gguf.py FOLDER FILE f32|q8_0`.

Owns the names that llama.cpp gives to weights and settings. Norms stay float32, as in llama.cpp's own files.
Source: https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def name_of(name: str) -> str:
    """What llama.cpp calls a weight."""
    if name in WHOLE:
        return WHOLE[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def main(folder: str, file: str, kind: str) -> None:
    config = json.loads((Path(folder) / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_name(Path(folder).name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_Q8_0)
    add_tokenizer(writer, folder)
    for name, weight in load_file(Path(folder) / "model.safetensors").items():
        if name == "lm_head.weight":
            continue  # the embedding's
        values = weight.astype(np.float32)
        if kind == "q8_0" and values.ndim == 2:
            quantised = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name_of(name), quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name_of(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, folder: str) -> None:
    tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text())
    by_id = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    added = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    by_id |= added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([by_id[id] for id in range(len(by_id))])
    kinds = [gguf.TokenType.CONTROL if id in added else gguf.TokenType.NORMAL for id in range(len(by_id))]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])  # llama.cpp refuses a file without merges; prompts come as ids, so none is used
    writer.add_eos_token_id(max(added))


if __name__ == "__main__":
    main(*sys.argv[1:])
