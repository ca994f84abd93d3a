"""Writes tables of timed kernels, as `python -m evidence kernels` and evidence/fits/hardware_profiles.py read
them, from aiconfigurator-core's measured kernels.

    python -m evidence.extract_kernel_tables SYSTEMS DIRECTORY [DEVICE...]

SYSTEMS is the folder `aiconfigurator_core/systems/data` of the package (Apache-2.0,
https://github.com/ai-dynamo/aiconfigurator). Needs pandas and pyarrow. Without devices all of them.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pandas as pd

SYSTEMS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-192gb",
    "l40s": "l40s-48gb",
    "b300_sxm": "b300-sxm-288gb",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "rtx_pro_6000_server": "rtx-pro-6000-96gb",
}
PACKAGE = "aiconfigurator-core 0.12.0 measured-kernel tables"
LANES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
VERSIONS = {
    "a100_sxm": {"vllm": "0.14.0", "trtllm": "1.0.0", "sglang": "0.5.10"},
    "l40s": {"latents": "1.0.0"},
}
"""Versions whose tables a system has instead of the newest."""
NEWEST = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
ALL_REDUCE_VERSIONS = {
    "a100_sxm": "0.14.0",
    "l40s": "0.14.0",
    "rtx_pro_6000_server": "0.24.0",
}
"""Version of vLLM whose kernels were timed; 0.19.0 on other systems."""
NCCL_VERSIONS = {"a100_sxm": "2.27.3", "l40s": "2.27.3"}
FORMATS = {"bfloat16": "bf16"}
MXFP4_SERVER = "gptossmxfp4"
"""vLLM's experts of gpt-oss, which serve the format; its table has another checkpoint's kernels too."""
VLLM, VLLM_KDA, SGLANG = "vLLM 0.24.0", "vLLM 0.1.dev19262", "SGLang 0.5.14"
RECURRENCES = ("fused_recurrent", "chunk_gated_delta_rule")
HEADS = ["num_key_heads", "num_value_heads"]
V4_COMPRESSION = 4
"""DeepSeek-V4's indexer scores one key for so many tokens."""
INDEX_HEADS = {
    "deepseek-ai/DeepSeek-V3.2": 64,
    "sgl-project/DeepSeek-V4-Flash-FP8": 64,
    "zai-org/GLM-5": 32,
}
TOP_K = 2048
BF16_BYTES = 2


def read(systems: Path, system: str, table: str) -> pd.DataFrame | None:
    path = systems / system / table
    if not path.is_file():
        return None
    frame = pd.read_parquet(path)
    return frame.assign(device=SYSTEMS[system], latency_us=frame["latency"] * 1e3)


def lane(
    systems: Path, system: str, engine: str, folder: str, name: str, version: str = ""
) -> pd.DataFrame | None:
    """A table of an engine's kernels, with its source."""
    if not version:
        version = VERSIONS.get(system, {}).get(engine, NEWEST[engine])
    frame = read(systems, system, f"{folder}/{engine}/{version}/{name}.parquet")
    if frame is None:
        return None
    return frame.assign(source=f"{PACKAGE}, {LANES[engine]} {version} lane")


def products(systems: Path, system: str) -> pd.DataFrame | None:
    frame = lane(systems, system, "vllm", "gemm", "gemm_perf")
    if frame is None:
        return None
    frame = frame.assign(dtype=frame["gemm_dtype"].replace(FORMATS))
    return frame[["device", "dtype", "m", "n", "k", "latency_us", "source"]]


def attention(systems: Path, system: str, phase: str) -> pd.DataFrame | None:
    """Attention without a window: of one new token ("generation") or of whole prompts ("context")."""
    frame = lane(systems, system, "vllm", "attention", f"{phase}_attention_perf")
    if frame is None:
        return None
    if "window_size" in frame:
        frame = frame[frame["window_size"] == 0]
    length = "kv_len"
    if phase == "context":
        frame = frame[(frame["step"] == 0) & (frame["kv_cache_dtype"] == "bfloat16")]
        length = "prompt_len"
    frame = frame.rename(columns={"num_key_value_heads": "num_kv_heads"}).assign(
        kv_dtype=frame["kv_cache_dtype"].replace(FORMATS),
        **{length: frame["step"] + frame["isl"]},
    )
    shape = ["batch_size", "num_heads", "num_kv_heads", "head_dim", length]
    return frame[["device", "kv_dtype", *shape, "latency_us", "source"]]


def latents(systems: Path, system: str) -> pd.DataFrame | None:
    version = VERSIONS.get(system, {}).get("latents", "")
    frame = lane(systems, system, "trtllm", "mla", "generation_mla_perf", version)
    if frame is None:
        return None
    frame = frame.assign(
        scope="attention kernel",
        kv_dtype=frame["kv_cache_dtype"],
        kv_len=frame["step"] + frame["isl"],
    )
    shape = ["num_heads", "batch_size", "kv_len"]
    return frame[["device", "scope", "kv_dtype", *shape, "latency_us", "source"]]


def experts(systems: Path, system: str) -> pd.DataFrame | None:
    """One layer's experts, none of them divided over ranks as a whole."""
    frame = lane(systems, system, "vllm", "moe", "moe_perf")
    if frame is None:
        return None
    is_mxfp4 = frame["moe_dtype"] == "w4a16_mxfp4"
    is_served = frame["kernel_source"].str.contains(MXFP4_SERVER)
    is_known = frame["moe_dtype"].isin(
        ["bfloat16", "fp8", "fp8_block", "nvfp4", "w4a16_mxfp4"]
    )
    chosen = is_known & (is_served | ~is_mxfp4) & (frame["moe_ep_size"] == 1)
    frame = frame[chosen].rename(
        columns={
            "moe_dtype": "dtype",
            "inter_size": "moe_intermediate_size",
            "topk": "num_experts_per_tok",
            "moe_tp_size": "tp_size",
        }
    )
    shape = ["num_tokens", "hidden_size", "moe_intermediate_size"]
    shape += ["num_experts_per_tok", "num_experts", "tp_size", "distribution"]
    return frame[["device", "dtype", *shape, "latency_us", "source"]]


def all_reduce(systems: Path, system: str, engine: str) -> pd.DataFrame | None:
    """All-reduces in captured graphs."""
    version = ""
    if engine == "vllm":
        version = ALL_REDUCE_VERSIONS.get(system, "0.19.0")
    frame = lane(systems, system, engine, "comm", "custom_allreduce_perf", version)
    if frame is None:
        return None
    is_eager = frame["kernel_source"].str.endswith("eager")
    frame = frame[~is_eager & ~frame["kernel_source"].str.contains("MNNVL")]
    frame = frame.assign(
        engine=LANES[engine],
        kernel=frame["kernel_source"].replace({"vLLM_custom_graph": "vLLM"}),
        tp_size=frame["num_gpus"],
        message_bytes=frame["message_size"] * BF16_BYTES,
    )
    columns = ["device", "engine", "kernel", "tp_size", "message_bytes"]
    return frame[[*columns, "latency_us", "source"]]


def nccl(systems: Path, system: str) -> pd.DataFrame | None:
    """NCCL's own all-reduces, whose sizes are in elements."""
    version = NCCL_VERSIONS.get(system, "2.29.2")
    frame = read(systems, system, f"comm/nccl/{version}/nccl_perf.parquet")
    if frame is None:
        return None
    frame = frame[(frame["op_name"] == "all_reduce") & (frame["nccl_dtype"] == "half")]
    frame = frame.assign(
        engine="NCCL",
        kernel="NCCL",
        tp_size=frame["num_gpus"],
        message_bytes=frame["message_size"] * BF16_BYTES,
        source=f"{PACKAGE}, NCCL {version}",
    )
    columns = ["device", "engine", "kernel", "tp_size", "message_bytes"]
    return frame[[*columns, "latency_us", "source"]]


def linear(
    frame: pd.DataFrame, lane: str, phases: tuple[str, ...], layer: str
) -> pd.DataFrame:
    """A layer's two kernels, the short convolution and the recurrence, added up."""
    frame = frame[frame["phase"].isin(phases)]
    frame = frame.rename(
        columns={"num_k_heads": "num_key_heads", "num_v_heads": "num_value_heads"}
    )
    shape = ["device", "batch_size", "seq_len", *HEADS]
    is_recurrence = frame["kernel_source"].str.startswith(RECURRENCES)
    is_conv = frame["kernel_source"].str.contains("conv1d")
    recurrence = frame[is_recurrence].groupby(shape)["latency_us"].median()
    conv = frame[is_conv].groupby(shape)["latency_us"].median()
    both = recurrence.add(conv).dropna().reset_index()
    return both.assign(layer=layer, source=f"{PACKAGE}, {lane} lane")


def linear_tables(
    systems: Path, system: str
) -> tuple[list[pd.DataFrame], list[pd.DataFrame]]:
    """Decoding and verification, and prefill. Verification is timed of Kimi's delta attention only, which keeps the
    same state and has one more gate."""
    decode, prefill = [], []
    for table, lane, layer in (
        ("linear_attention/vllm/0.24.0/gdn_perf.parquet", VLLM, "gated delta net"),
        ("kda/vllm/0.1.dev19262/kda_perf.parquet", VLLM_KDA, "Kimi delta attention"),
    ):
        frame = read(systems, system, table)
        if frame is None:
            continue
        decode.append(
            linear(frame, lane, ("generation", "verify"), layer).rename(
                columns={"seq_len": "query_len"}
            )
        )
        if layer == "gated delta net":
            prefill.append(
                linear(frame, lane, ("context",), layer).rename(
                    columns={"seq_len": "prompt_len"}
                )
            )
    return decode, prefill


def indexer(systems: Path, system: str) -> pd.DataFrame | None:
    """Scores over a paged cache of fp8 keys; `step` tokens are cached, `isl` are new."""
    frame = read(
        systems,
        system,
        "sparse_attention/vllm/0.24.0/dsv4_paged_mqa_logits_module_perf.parquet",
    )
    if frame is None:
        return None
    frame = frame.assign(
        query_len=frame["isl"], kv_len=(frame["step"] + frame["isl"]) // V4_COMPRESSION,
        num_index_heads=frame["model"].map(INDEX_HEADS), source=f"{PACKAGE}, {VLLM} lane",
    )  # fmt: skip
    frame = frame[(frame["kv_len"] > 0) & (frame["query_len"] <= 16)]
    return frame[
        [
            "device",
            "batch_size",
            "query_len",
            "kv_len",
            "num_index_heads",
            "latency_us",
            "source",
        ]
    ]


def top_k(systems: Path, system: str) -> pd.DataFrame | None:
    frame = read(
        systems, system, "sparse_attention/sglang/0.5.14/glm5_topk_module_perf.parquet"
    )
    if frame is None:
        return None
    frame = frame[frame["latency"] > 0]
    frame = frame.assign(
        query_len=frame["isl"], kv_len=frame["step"] + frame["isl"], top_k=TOP_K, scores=frame["score_mode"],
        source=f"{PACKAGE}, {SGLANG} lane",
    )  # fmt: skip
    frame = frame[frame["query_len"] <= 16]
    return frame[
        [
            "device",
            "batch_size",
            "query_len",
            "kv_len",
            "top_k",
            "scores",
            "latency_us",
            "source",
        ]
    ]


def sparse(systems: Path, system: str) -> pd.DataFrame | None:
    """Attention to the chosen latents, of a cache in 16 bits: a block takes one query token's."""
    frame = read(
        systems,
        system,
        "sparse_attention/sglang/0.5.14/glm5_dsa_attn_module_perf.parquet",
    )
    if frame is None:
        return None
    frame = frame[frame["step"] + frame["isl"] > TOP_K]
    frame = frame.assign(
        query_len=frame["isl"], num_chosen=TOP_K, kv_dtype="bfloat16", source=f"{PACKAGE}, {SGLANG} lane",
    )  # fmt: skip
    frame = frame[frame["query_len"] <= 64]
    return frame[
        [
            "device",
            "batch_size",
            "query_len",
            "num_heads",
            "num_chosen",
            "kv_dtype",
            "latency_us",
            "source",
        ]
    ]


def window(systems: Path, system: str) -> pd.DataFrame | None:
    frame = read(
        systems, system, "attention/vllm/0.24.0/generation_attention_perf.parquet"
    )
    if frame is None or "window_size" not in frame:
        return None
    frame = frame[frame["window_size"] > 0].rename(
        columns={"num_key_value_heads": "num_kv_heads"}
    )
    frame = frame.assign(
        kv_len=frame["step"] + 1,
        kv_dtype=frame["kv_cache_dtype"],
        source=f"{PACKAGE}, {VLLM} lane",
    )
    columns = [
        "batch_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "kv_len",
        "window_size",
        "kv_dtype",
    ]
    return frame[["device", *columns, "latency_us", "source"]]


def write(path: Path, frames: list[pd.DataFrame | None]) -> None:
    held = [each for each in frames if each is not None and len(each)]
    if not held:
        return
    frame = pd.concat(held)
    frame = frame.assign(latency_us=frame["latency_us"].round(3))
    path.write_bytes(gzip.compress(frame.to_csv(index=False).encode(), mtime=0))
    print(f"{path}: {len(frame)} rows")


def main(systems: Path, directory: Path, devices: list[str]) -> None:
    chosen = [each for each in SYSTEMS if not devices or SYSTEMS[each] in devices]
    pairs = [linear_tables(systems, system) for system in chosen]
    tables: dict[str, list[pd.DataFrame | None]] = {
        "gemm": [products(systems, system) for system in chosen],
        "decode_attention": [
            attention(systems, system, "generation") for system in chosen
        ],
        "prefill_attention": [
            attention(systems, system, "context") for system in chosen
        ],
        "mla_decode": [latents(systems, system) for system in chosen],
        "moe": [experts(systems, system) for system in chosen],
        "allreduce": [
            all_reduce(systems, system, engine) for system in chosen for engine in LANES
        ],
        "allreduce_nccl": [nccl(systems, system) for system in chosen],
        "linear_attention": [each for decode, _ in pairs for each in decode],
        "linear_prefill": [each for _, prefill in pairs for each in prefill],
        "indexer": [indexer(systems, system) for system in chosen],
        "top_k": [top_k(systems, system) for system in chosen],
        "sparse_attention": [sparse(systems, system) for system in chosen],
        "window_attention": [window(systems, system) for system in chosen],
    }
    for name, frames in tables.items():
        write(directory / f"{name}.csv.gz", frames)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not set(sys.argv[3:]) <= set(SYSTEMS.values()):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
