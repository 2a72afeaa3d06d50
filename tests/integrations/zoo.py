"""Tiny random models of many families, with inputs that have padding where a family knows padding.

Each maker gives (model in eval mode, inputs, real): ``real`` says which positions of the outputs are tokens, (B, T), or
None where all are. Weights are wider than a fresh model's, so that attention is far from uniform.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

Made = tuple[Any, dict[str, Any], Tensor | None]
WIDE = {"initializer_range": 0.3}
TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    **WIDE,
}
GROUPED = {
    **TEXT,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokens(length: int = 11, padding: str = "left", vocabulary: int = 60) -> tuple[dict[str, Tensor], Tensor]:
    """Three samples of different lengths, padded on one side."""
    ids = torch.randint(3, vocabulary, (3, length))
    real = torch.ones(3, length, dtype=torch.long)
    for sample, missing in enumerate((0, 4, 1)):
        if missing:
            where = slice(0, missing) if padding == "left" else slice(length - missing, length)
            real[sample, where] = 0
            ids[sample, where] = 0
    return {"input_ids": ids, "attention_mask": real}, real.bool()


def encoder(model: Any) -> Made:
    inputs, real = tokens(padding="right")
    return model, inputs, real


def decoder(model: Any) -> Made:
    inputs, real = tokens()
    return model, inputs, real


def translator(model: Any) -> Made:
    """Encoder and decoder, both sides padded."""
    inputs, _ = tokens(padding="right")
    target, real = tokens(7, padding="right")
    inputs["decoder_input_ids"] = target["input_ids"]
    inputs["decoder_attention_mask"] = target["attention_mask"]
    return model, inputs, real


def bert() -> Made:
    return encoder(hf.BertModel(hf.BertConfig(**TEXT)))


def albert() -> Made:
    return encoder(hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=16)))


def gpt2() -> Made:
    config = hf.GPT2Config(
        vocab_size=60, n_positions=64, n_embd=32, n_layer=3, n_head=4, pad_token_id=0, **WIDE
    )
    return decoder(hf.GPT2LMHeadModel(config))


def llama() -> Made:
    return decoder(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)))


def mistral() -> Made:
    return decoder(hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)))


def gemma2() -> Made:
    sizes = {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5}
    return decoder(hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, **sizes)))


def gemma3() -> Made:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 5, "layer_types": kinds}
    return decoder(hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED, **sizes)))


def gpt_oss() -> Made:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**GROUPED, **experts, head_dim=8, sliding_window=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return decoder(model)


def t5() -> Made:
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "relative_attention_num_buckets": 8}
    return translator(hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **ends, initializer_factor=1.0)))


def _seq2seq(config: Any) -> Any:
    return config(
        vocab_size=60,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=64,
        pad_token_id=0,
        decoder_start_token_id=3,
        bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
        init_std=0.15,
    )


def marian() -> Made:
    return translator(hf.MarianMTModel(_seq2seq(hf.MarianConfig)))


def bart() -> Made:
    return translator(hf.BartForConditionalGeneration(_seq2seq(hf.BartConfig)))


def whisper() -> Made:
    config = hf.WhisperConfig(
        vocab_size=60,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_source_positions=10,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        init_std=0.3,
    )
    target, real = tokens(7, padding="right")
    inputs = {"input_features": torch.randn(3, 8, 20), "decoder_input_ids": target["input_ids"]}
    inputs["decoder_attention_mask"] = target["attention_mask"]
    return hf.WhisperForConditionalGeneration(config), inputs, real


IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    **WIDE,
}


def vit() -> Made:
    model = hf.ViTModel(hf.ViTConfig(**IMAGE, intermediate_size=40))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}, None


def dinov2() -> Made:
    model = hf.Dinov2Model(hf.Dinov2Config(**IMAGE, layerscale_value=0.5))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}, None


def detr() -> Made:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    config = hf.DetrConfig(
        backbone_config=hf.ResNetConfig(**sizes, out_features=["stage2"]),
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        num_queries=5,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        init_std=0.3,
    )
    seen = torch.ones(2, 32, 32, dtype=torch.long)
    seen[1, :, 20:] = 0
    return hf.DetrModel(config), {"pixel_values": torch.randn(2, 3, 32, 32), "pixel_mask": seen}, None


def clip() -> Made:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 60, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    model = hf.CLIPModel(
        hf.CLIPConfig(
            text_config=text,
            vision_config={**sizes, "image_size": 16, "patch_size": 4},
            projection_dim=16,
            initializer_factor=5.0,
        )
    )
    inputs, _ = tokens(padding="right")
    return model, {**inputs, "pixel_values": torch.randn(2, 3, 16, 16)}, None


def roberta() -> Made:
    return encoder(hf.RobertaModel(hf.RobertaConfig(**TEXT, max_position_embeddings=64)))


def distilbert() -> Made:
    sizes = {"vocab_size": 60, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4}
    return encoder(hf.DistilBertModel(hf.DistilBertConfig(**sizes, pad_token_id=0, **WIDE)))


def electra() -> Made:
    return encoder(hf.ElectraModel(hf.ElectraConfig(**TEXT, embedding_size=16)))


def modernbert() -> Made:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = hf.ModernBertConfig(**TEXT, **ends, local_attention=4, global_attn_every_n_layers=2)
    return encoder(hf.ModernBertModel(config))


def esm() -> Made:
    return encoder(hf.EsmModel(hf.EsmConfig(**TEXT, mask_token_id=3)))


def qwen3() -> Made:
    return decoder(hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)))


def phi3() -> Made:
    return decoder(hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)))


def llama4() -> Made:
    sizes = {"head_dim": 8, "intermediate_size_mlp": 40, "num_local_experts": 2, "attention_chunk_size": 4}
    return decoder(hf.Llama4ForCausalLM(hf.Llama4TextConfig(**GROUPED, **sizes, no_rope_layers=[1, 0, 1])))


def cohere2() -> Made:
    return decoder(hf.Cohere2ForCausalLM(hf.Cohere2Config(**GROUPED, sliding_window=4)))


def neox() -> Made:
    return decoder(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT, bos_token_id=1, eos_token_id=2)))


def gptj() -> Made:
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    return decoder(hf.GPTJForCausalLM(hf.GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2, **WIDE)))


def opt() -> Made:
    sizes = {"vocab_size": 60, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 2}
    more = {
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "init_std": 0.3,
    }
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return decoder(hf.OPTForCausalLM(hf.OPTConfig(**sizes, **more, **ends)))


def pegasus() -> Made:
    return translator(hf.PegasusForConditionalGeneration(_seq2seq(hf.PegasusConfig)))


def siglip() -> Made:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**sizes, image_size=16, patch_size=4))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}, None


def beit() -> Made:
    model = hf.BeitModel(hf.BeitConfig(**IMAGE, intermediate_size=40, use_relative_position_bias=True))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}, None


def swin() -> Made:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2]}
    model = hf.SwinModel(hf.SwinConfig(**sizes, window_size=4, **WIDE))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}, None


SOUND = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def wav2vec2() -> Made:
    model = hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SOUND, **WIDE))
    return model, {"input_values": torch.randn(2, 400)}, None


FAMILIES: dict[str, Callable[[], Made]] = {
    "BERT": bert,
    "ALBERT": albert,
    "GPT-2": gpt2,
    "Llama": llama,
    "Mistral": mistral,
    "Gemma 2": gemma2,
    "Gemma 3": gemma3,
    "gpt-oss": gpt_oss,
    "T5": t5,
    "Marian": marian,
    "BART": bart,
    "Whisper": whisper,
    "ViT": vit,
    "DINOv2": dinov2,
    "DETR": detr,
    "CLIP": clip,
    "RoBERTa": roberta,
    "DistilBERT": distilbert,
    "ELECTRA": electra,
    "ModernBERT": modernbert,
    "ESM": esm,
    "Qwen 3": qwen3,
    "Phi-3": phi3,
    "Llama 4": llama4,
    "Cohere 2": cohere2,
    "GPT-NeoX": neox,
    "GPT-J": gptj,
    "OPT": opt,
    "Pegasus": pegasus,
    "SigLIP": siglip,
    "BEiT": beit,
    "Swin": swin,
    "Wav2Vec2": wav2vec2,
}


def _named(name: str, **sizes: Any) -> Any:
    """A model with the classes named in transformers, of a config of sizes."""
    model = getattr(hf, name)
    return model(model.config_class(**sizes))


def _causal(name: str, **sizes: Any) -> Made:
    return decoder(_named(name, vocab_size=60, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes))


def _text(name: str, **more: Any) -> Made:
    return encoder(_named(name, **{**TEXT, **more}))


SHORT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NEVER: dict[str, Callable[[], Made]] = {
    "BigBird": lambda: _text("BigBirdModel", attention_type="original_full"),
    "BLIP (text)": lambda: _text("BlipTextModel", max_position_embeddings=64),
    "BLOOM": lambda: _causal("BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4),
    "DeBERTa": lambda: _text("DebertaModel"),
    "DeBERTa-v2": lambda: _text("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "Falcon": lambda: _causal("FalconForCausalLM", **SHORT),
    "GPT-Neo": lambda: _causal(
        "GPTNeoForCausalLM",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
    ),
    "Longformer": lambda: _text("LongformerModel", attention_window=4, max_position_embeddings=64),
    "MPNet": lambda: _text("MPNetModel", max_position_embeddings=64),
    "MPT": lambda: _causal("MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "RoFormer": lambda: _text("RoFormerModel"),
    "WavLM": lambda: (_named("WavLMModel", **SOUND), {"input_values": torch.randn(2, 400)}, None),
    "XLNet": lambda: encoder(
        _named("XLNetModel", vocab_size=60, d_model=32, n_layer=2, n_head=4, d_inner=40)
    ),
}


def make(name: str) -> Made:
    """A model of a family with always the same weights and inputs."""
    torch.manual_seed(sum(name.encode()))
    model, inputs, real = (FAMILIES | NEVER)[name]()
    return model.eval(), inputs, real
