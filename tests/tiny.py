"""Tiny random models of the common families: 2 layers, vocabulary 128, made in milliseconds."""

import torch
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

SMALL = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
SPECIAL = {
    "gpt2": dict(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=512, bos_token_id=1,
                 eos_token_id=2, pad_token_id=0),
    "mistral": SMALL | dict(sliding_window=8),
    "gemma2": SMALL | dict(sliding_window=8, query_pre_attn_scalar=8),
    "gemma3_text": SMALL | dict(sliding_window=8, query_pre_attn_scalar=8),
}
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt2", "phi3",
            "smollm3", "olmo2", "granite", "cohere"]


def tiny_config(family, **overrides):
    values = dict(SPECIAL.get(family, SMALL))
    if family == "phi3":
        values.pop("head_dim")
    return CONFIG_MAPPING[family](**(values | overrides))


def tiny_model(family="llama", seed=0, **overrides):
    """A causal LM in fp32 and eval mode, running on nanorlhf's attention."""
    import nanorlhf.attention  # noqa: F401  registers "nanorlhf"

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).eval()
    with torch.no_grad():  # the default std of 0.02 makes all logits alike; spread them
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    model.set_attn_implementation("nanorlhf")
    return model
