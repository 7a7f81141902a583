#!/usr/bin/env python3
"""Write a local Hugging Face style model directory without weights.

    vllm_model_folder.py OUT --arch qwen3_vl | qwen3_omni_thinker [--vision full|small] ...

The towers are full size by default, the text model is small. vLLM fills the weights
(`load_format="dummy"`). Needs transformers and tokenizers only; nothing is downloaded.
"""

import argparse
import json
import os
from pathlib import Path

ap = argparse.ArgumentParser()
ap.add_argument("out")
ap.add_argument("--arch", choices=["qwen3_vl", "qwen3_omni_thinker"], default="qwen3_vl")
ap.add_argument("--vision", choices=["full", "small"], default="full")
ap.add_argument("--audio", choices=["full", "small"], default="full", help="omni only")
ap.add_argument(
    "--text-layers", type=int, default=4, help="at least 3: DeepStack adds to the first three"
)
ap.add_argument("--text-hidden", type=int, default=2048)
ap.add_argument(
    "--moe", type=int, default=0, help="omni only: experts per layer; 0 makes every layer dense"
)
ap.add_argument(
    "--max-pixels", type=int, default=1280 * 1280, help="largest picture after resizing"
)
ap.add_argument("--max-positions", type=int, default=32768)
ap.add_argument(
    "--audio-seconds", type=int, default=30, help="omni only: the feature extractor's chunk_length"
)
A = ap.parse_args()
if A.text_layers < 3:
    ap.error("--text-layers must be at least 3")
if A.text_hidden % 128:
    ap.error("--text-hidden must be a multiple of 128")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

OMNI = A.arch == "qwen3_omni_thinker"
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
]


def tokenizer():
    """Byte-level BPE without merges: 256 byte tokens, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == 256
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "audio_token": "<|audio_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
        clean_up_tokenization_spaces=False,
        model_max_length=A.max_positions,
    )


CHAT = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.content is string -%}{{ m.content }}"
    "{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type in ('image', 'image_url') -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif c.type in ('video', 'video_url') -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- elif c.type in ('audio', 'audio_url', 'input_audio') -%}"
    "<|audio_start|><|audio_pad|><|audio_end|>"
    "{%- else -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)

tk = tokenizer()
tid = {s: tk.convert_tokens_to_ids(s) for s in SPECIALS}
vocab = (len(tk) + 127) // 128 * 128

heads = A.text_hidden // 128
rope = {
    "rope_type": "default",
    "rope_theta": 5000000.0 if not OMNI else 1000000.0,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
text = {
    "vocab_size": vocab,
    "hidden_size": A.text_hidden,
    "intermediate_size": 2 * A.text_hidden,
    "num_hidden_layers": A.text_layers,
    "num_attention_heads": heads,
    "num_key_value_heads": max(1, heads // 4),
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": A.max_positions,
    "rms_norm_eps": 1e-6,
    "rope_parameters": rope,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "pad_token_id": tid["<|endoftext|>"],
    "bos_token_id": None,
    "eos_token_id": tid["<|im_end|>"],
}
full_v = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}
small_v = {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "deepstack_visual_indexes": [0, 1, 2],
}
vision = dict(
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    in_channels=3,
    hidden_act="gelu_pytorch_tanh",
    num_position_embeddings=2304,
    out_hidden_size=A.text_hidden,
    **(full_v if A.vision == "full" else small_v),
)
ids = {
    "image_token_id": tid["<|image_pad|>"],
    "video_token_id": tid["<|video_pad|>"],
    "vision_start_token_id": tid["<|vision_start|>"],
    "vision_end_token_id": tid["<|vision_end|>"],
}

if OMNI:
    full_a = {
        "encoder_layers": 32,
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "downsample_hidden_size": 480,
    }
    small_a = {
        "encoder_layers": 3,
        "d_model": 256,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 512,
        "downsample_hidden_size": 32,
    }
    audio = dict(
        num_mel_bins=128,
        max_source_positions=1500,
        n_window=50,
        n_window_infer=800,
        conv_chunksize=500,
        output_dim=A.text_hidden,
        activation_function="gelu",
        **(full_a if A.audio == "full" else small_a),
    )
    text.update(
        num_experts=max(A.moe, 1),
        num_experts_per_tok=min(2, max(A.moe, 1)),
        moe_intermediate_size=512,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[] if A.moe else list(range(A.text_layers)),
    )
    # vLLM's Omni tower reads both; transformers' config class has neither
    vision.update(image_size=768, apply_vit_abs_pos_embed=True)
    thinker = dict(
        model_type="qwen3_omni_moe_thinker",
        audio_config=audio,
        vision_config=vision,
        text_config=text,
        audio_start_token_id=tid["<|audio_start|>"],
        audio_end_token_id=tid["<|audio_end|>"],
        audio_token_id=tid["<|audio_pad|>"],
        user_token_id=97,
        position_id_per_seconds=13,
        seconds_per_chunk=2,
        **ids,
    )
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": False,
        "thinker_config": thinker,
    }
else:
    config = dict(
        architectures=["Qwen3VLForConditionalGeneration"],
        model_type="qwen3_vl",
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **ids,
    )
config.update(dtype="bfloat16", transformers_version="5.17.0")
(text if not OMNI else config["thinker_config"]["text_config"])["dtype"] = "bfloat16"

OUT = Path(A.out)
OUT.mkdir(parents=True, exist_ok=True)


def write(name, content):
    (OUT / name).write_text(json.dumps(content, indent=1) + "\n")


tk.chat_template = CHAT
tk.save_pretrained(A.out)
write("config.json", config)
write(
    "generation_config.json",
    {"eos_token_id": tid["<|im_end|>"], "pad_token_id": tid["<|endoftext|>"], "do_sample": False},
)
pix = {"shortest_edge": 4 * 32 * 32, "longest_edge": A.max_pixels}
base = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
pre = dict(image_processor_type="Qwen2VLImageProcessor", size=pix, **base)
vid = dict(size={"shortest_edge": 4096, "longest_edge": 8 * A.max_pixels}, **base)
if OMNI:
    vid["video_processor_type"] = "Qwen2VLVideoProcessor"
    pre.update(
        processor_class="Qwen3OmniMoeProcessor",
        feature_extractor_type="WhisperFeatureExtractor",
        feature_size=128,
        sampling_rate=16000,
        hop_length=160,
        n_fft=400,
        chunk_length=A.audio_seconds,
        dither=0.0,
        n_samples=A.audio_seconds * 16000,
        nb_max_frames=A.audio_seconds * 100,
        padding_side="right",
        padding_value=0.0,
        return_attention_mask=True,
    )
else:
    vid.update(video_processor_type="Qwen3VLVideoProcessor", fps=2, min_frames=4, max_frames=16)
    pre["processor_class"] = "Qwen3VLProcessor"
vid["processor_class"] = pre["processor_class"]
write("preprocessor_config.json", pre)
write("video_preprocessor_config.json", vid)
tokenizer_config = json.loads((OUT / "tokenizer_config.json").read_text())
write("tokenizer_config.json", tokenizer_config | {"processor_class": pre["processor_class"]})
(OUT / "chat_template.jinja").write_text(CHAT)
print(f"wrote {OUT}: {config['architectures'][0]}, vocabulary {vocab}")
