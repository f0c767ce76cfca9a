"""The table of Hugging Face families: what distinguishes the models of one model_type from all others.

Import (config.json, tensor names), export and the tokenizer's files read this table, and nothing else knows a
model_type. A family is one record, in the file of its maker; the record's name is the model_type in capitals.
Its rules are in the order in which config.json is written; a later rule for a field or key overrides an
earlier one. To add a family, write its record and add it here.
"""
from collections.abc import Collection

from checkpoint.hf.families import (
    ai2,
    arcee,
    baidu,
    cohere,
    deepseek,
    eleuther,
    google,
    ibm,
    lg,
    liquid,
    meta,
    mistral,
    moonshot,
    nvidia,
    openai,
    others_dense,
    others_experts,
    qwen,
    tencent,
    zai,
)

# by preference: a model that several families can express is written as the first of them
FAMILIES = {family.model_type: family for family in (
    openai.GPT2,
    meta.LLAMA,
    mistral.MISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    mistral.MIXTRAL,
    qwen.QWEN2_MOE,
    qwen.QWEN3_MOE,
    ai2.OLMOE,
    others_experts.DOTS1,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    others_dense.SEED_OSS,
    others_dense.STARCODER2,
    others_experts.SOLAR_OPEN,
    others_experts.SARVAM_MOE,
    others_dense.SMOLLM3,
    mistral.MINISTRAL,
    baidu.ERNIE4_5,
    zai.GLM4_MOE,
    others_experts.MINIMAX_M2,
    google.GEMMA,
    google.GEMMA2,
    google.GEMMA3_TEXT,
    ai2.OLMO2,
    ai2.OLMO3,
    ibm.GRANITE,
    arcee.ARCEE,
    nvidia.NEMOTRON,
    others_dense.APERTUS,
    others_dense.NANOCHAT,
    eleuther.GPT_NEOX,
    cohere.COHERE,
    cohere.COHERE2,
    zai.GLM,
    zai.GLM4,
    lg.EXAONE4,
    tencent.HUNYUAN_V1_DENSE,
    tencent.HUNYUAN_V1_MOE,
    baidu.ERNIE4_5_MOE,
    arcee.AFMOE,
    others_experts.LAGUNA,
    others_experts.MIMO_V2_FLASH,
    others_experts.STEP3P5,
    lg.EXAONE_MOE,
    ibm.GRANITEMOE,
    ibm.GRANITE_SWA,
    ibm.GRANITEMOE_SWA,
    ibm.GRANITEMOEHYBRID,
    nvidia.NEMOTRON_H,
    openai.GPT_OSS,
    meta.LLAMA4_TEXT,
    mistral.MINISTRAL3,
    liquid.LFM2,
    liquid.LFM2_MOE,
    qwen.QWEN3_NEXT,
    qwen.QWEN3_5_TEXT,
    ai2.OLMO_HYBRID,
    moonshot.KIMI_LINEAR,
    mistral.MISTRAL4,
    # the families below are only read: an earlier one can express all their models, and is written instead
    tencent.HY_V3,
    zai.GLM4_MOE_LITE,
    tencent.YOUTU,
    others_dense.INTERNLM3,
    others_dense.PHI3,
    meta.CWM,
    qwen.QWEN3_5_MOE_TEXT,
    moonshot.KIMI_K2,
)}

UNSUPPORTED = {  # model_type of unsupported models: the part that they need
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), "embeddings for each layer"),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "mistral_large4", "mistral_large4_text"),
        "sparse attention by an indexer",
    ),
    **dict.fromkeys(("glm5_next", "glm5_next_text", "hy_v4"), "hyper-connections or an indexer"),
    "deepseek_v4": "compressed attention or hyper-connections",
    "minimax": "lightning attention",
}


# ---- multimodal models -------------------------------------------------------------------------------------

WRAPPERS = {  # model_type: that of its text part, if text_config does not say it
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "step3p7": "step3p5",
}
TEXT_PARTS = (("model.language_model.", "model."), ("language_model.", ""))  # (prefix of its names, ours)
BESIDE_TEXT = (  # prefixes of the other parts
    "model.visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "model.vision_tower.",
    "model.vision_model.", "model.multi_modal_projector.",
)


def text_names(names: Collection[str]) -> dict[str, str]:
    """Return {name in a text-only model: name} for the tensors of a folder; names of text-only folders are
    unchanged."""
    if not any(name.startswith(start) for name in names for start, _ in TEXT_PARTS):
        return {name: name for name in names}
    result: dict[str, str] = {}
    for name in names:
        if name.startswith(BESIDE_TEXT):
            continue
        start, short = next((pair for pair in TEXT_PARTS if name.startswith(pair[0])), ("", ""))
        result[short + name.removeprefix(start)] = name
    return result
