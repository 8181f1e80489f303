"""A small random model of every type in transformers through find_groups: shares, pairs, reasons and time.

    python benchmarks/transformers_survey.py --seconds 1200

Makes each config two layers deep, or deep enough for one layer of each kind, and about 32 wide, by the names of its
fields, and gives the model a batch with labels. Types that such a config or batch does not suit are listed with what
they raised. Continues from the file that it writes.
"""

import argparse
import dataclasses
import inspect
import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import steradian
from coverage import reasons, share
from pool import Pool

from harness import RESULTS, environment

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
VOCABULARY = 99
HEADS, KV_HEADS = ("num_attention_heads", "n_head", "num_heads"), ("num_key_value_heads", "num_kv_heads")
SIZES = {  # of the fields of a config
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_experts_per_tok moe_topk moe_k "
    "num_selected_experts top_k_experts n_shared_experts top_k moe_top_k n_mamba_heads mask_time_length",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads index_n_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts linear_num_key_heads linear_num_value_heads rotary_dim num_conv_pos_embedding_groups",
    8: "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_size global_head_dim "
    "index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads "
    "mamba_num_heads sliding_window chunk_size mamba_chunk_size attention_chunk_size index_topk",
    16: "kv_lora_rank q_lora_rank qk_head_dim ssm_state_size state_size mamba_d_state o_lora_rank "
    "num_conv_pos_embeddings",
    32: "hidden_size d_model n_embd embed_dim dim word_embed_proj_dim embedding_size emb_dim projection_dim dim_model "
    "hidden_dim moe_intermediate_size expert_ffn_hidden_size moe_latent_size hidden_size_per_layer_input image_size "
    "classifier_proj_size d_embed decoder_hidden_size encoder_hidden_size out_hidden_size text_hidden_size",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner mamba_d_ssm mlp_dim "
    "ffn_hidden_size shared_intermediate_size shared_expert_intermediate_size max_position_embeddings n_positions "
    "max_seq_len max_target_positions max_source_positions",
    1: "n_group topk_group first_k_dense_replace num_shared_experts mamba_n_groups n_groups mamba_ngroups "
    "num_dense_layers decoder_sparse_step",
    VOCABULARY: "vocab_size text_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
FIXED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "mask_time_prob": 0.0}


def small_config(kind: type, kept: tuple[str, ...] = ()) -> Any:
    """A config with small sizes; those of the fields in `kept` stay as they are."""
    default, sizes = kind(), {}
    fields = [field.name for field in dataclasses.fields(kind) if field.name not in kept]
    heads = {getattr(default, name, None) for name in HEADS}
    for name in fields:
        try:
            value = getattr(default, name, None)
        except Exception:  # where it differs by layer
            value = default.__dict__.get(name)
        if hasattr(value, "to_diff_dict"):
            sizes[name] = small_config(type(value), kept)
        elif name in FIXED and (value is not None or name == "decoder_start_token_id"):
            sizes[name] = FIXED[name]
        elif "drop" in name and type(value) is float:
            sizes[name] = 0.0
        elif name == "hidden_sizes" and isinstance(value, list):
            sizes[name] = [16 * 2**i for i in range(len(value))]
        elif name == "depths":
            sizes[name] = [1] * len(value)
        elif name in KV_HEADS and "kv_lora_rank" not in fields:
            sizes[name] = 4 if value in heads else 2
        elif name == "head_dim" and value is None and "qk_rope_head_dim" not in fields:
            sizes[name] = 8
        elif name in SMALL and type(value) is int:
            sizes[name] = min(value, SMALL[name])
            kinds = getattr(default, "layer_types", None) or []
            if name == "num_hidden_layers" and len(set(kinds)) > 1:
                sizes[name] = min(8, max(kinds.index(each) for each in set(kinds)) + 1)
    config = kind(**sizes)
    if getattr(default, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = FIXED["decoder_start_token_id"]
    return config


def batch(model: nn.Module, task: str) -> dict[str, Tensor]:
    """Four samples and their labels, by the names that forward has."""
    names, config = inspect.signature(model.forward).parameters, model.config
    tokens = torch.randint(40, VOCABULARY, (4, 16))
    if model.main_input_name == "pixel_values" and task == "IMAGE_CLASSIFICATION":
        size = getattr(getattr(config, "vision_config", config), "image_size", None) or 64
        inputs = {"pixel_values": torch.randn(4, 3, *([size] * 2 if isinstance(size, int) else size))}
    elif task == "AUDIO_CLASSIFICATION":
        mels = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 80)
        wave = "input_values" in names and not hasattr(config, "num_mel_bins")
        inputs = {model.main_input_name: torch.randn(4, 8000) if wave else torch.randn(4, 64, mels)}
    else:
        inputs = {"input_ids": tokens}
    labels = torch.randint(2, (4,)) if task.endswith("CLASSIFICATION") else tokens
    return inputs | ({"labels": labels} if "labels" in names else {})


def build(kind: str, task: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its batch; some types want their own sizes of heads."""
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    name = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[kind]
    raised: list[Exception] = []
    for kept in ((), KV_HEADS, ("head_dim",), (*KV_HEADS, "head_dim")):
        try:
            make = getattr(transformers, name if isinstance(name, str) else name[0])
            config = small_config(transformers.CONFIG_MAPPING[kind], kept)
            with torch.device("meta"):
                if sum(param.numel() for param in make(config).parameters()) > 2e7:
                    raise ValueError("a config of these sizes has more than 20 million numbers")
            torch.manual_seed(0)
            model = make(config).train()
            inputs = batch(model, task)
            model(**inputs)
        except Exception as error:
            raised.append(error)
        else:
            return model, inputs
    raise raised[0]


def survey(kind: str, task: str) -> dict[str, Any]:
    """What find_groups finds in a type."""
    record: dict[str, Any] = {"type": kind, "task": task}
    try:
        model, inputs = build(kind, task)
    except Exception as error:
        return record | {"unbuilt": f"{type(error).__name__}: {error}"[:200]}
    started = time.perf_counter()
    try:
        groups = steradian.find_groups(model, **inputs)
    except Exception as error:
        return record | {"error": f"{type(error).__name__}: {error}"[:400]}
    record["seconds"] = round(time.perf_counter() - started, 2)
    record |= {"invariant": round(share(groups, set(groups.layouts)), 1), "because of": reasons(groups)}
    record |= {"rows": sum(group.n_rows for group in groups.groups), "facts": len(groups.facts)}
    record |= {"pairs": sum(pair.n for pair in groups.pairs), "partial": len(groups.partial)}
    return record | {"notes": groups.notes}


def setup() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--out", type=Path, default=RESULTS / "transformers.json")
    options = parser.parse_args()
    import transformers
    from transformers.models.auto import modeling_auto

    records = json.loads(options.out.read_text())["types"] if options.out.exists() else []
    done = {(record["task"], record["type"]) for record in records}
    everything = [(kind, task) for task in TASKS for kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")]
    tasks = [(survey, (kind, task)) for kind, task in everything if (task, kind) not in done]
    pool = Pool(1, setup, preload=["torch", "transformers", "steradian"], limit=100)
    for (_, (kind, task)), found in pool.run(tasks, until=time.monotonic() + options.seconds):
        records.append({"type": kind, "task": task, "error": found} if isinstance(found, str) else found)
        print(*records[-1].values(), flush=True)
        lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
        facts = {"environment": environment(), "transformers": transformers.__version__}
        options.out.write_text(json.dumps(facts, indent=1)[:-2] + f',\n "types": [\n{lines}\n]}}\n')
    pool.close()
    print(Counter(next((key for key in ("unbuilt", "error") if key in record), "inspected") for record in records))


if __name__ == "__main__":
    main()
