"""Writes the tables of layers other than plain attention, as `magicdec validate kernels` reads them, from
aiconfigurator-core's measured kernels.

    python scripts/extract_kernel_tables.py SYSTEMS DIRECTORY

SYSTEMS is the folder `aiconfigurator_core/systems/data` of the package (Apache-2.0,
https://github.com/ai-dynamo/aiconfigurator). Needs pandas and pyarrow. Writes DIRECTORY/linear_attention.csv.gz,
linear_prefill.csv.gz, indexer.csv.gz, top_k.csv.gz, sparse_attention.csv.gz and window_attention.csv.gz.
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
}
PACKAGE = "aiconfigurator-core 0.12.0 measured-kernel tables"
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
TOP_K, LATENT_ROW = 2048, 576


def read(systems: Path, system: str, table: str) -> pd.DataFrame | None:
    path = systems / system / table
    if not path.is_file():
        return None
    frame = pd.read_parquet(path)
    return frame.assign(device=SYSTEMS[system], latency_us=frame["latency"] * 1e3)


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
    frame = pd.concat([each for each in frames if each is not None])
    frame = frame.assign(latency_us=frame["latency_us"].round(3))
    path.write_bytes(gzip.compress(frame.to_csv(index=False).encode(), mtime=0))
    print(f"{path}: {len(frame)} rows")


def main(systems: Path, directory: Path) -> None:
    pairs = [linear_tables(systems, system) for system in SYSTEMS]
    write(
        directory / "linear_attention.csv.gz",
        [each for decode, _ in pairs for each in decode],
    )
    write(
        directory / "linear_prefill.csv.gz",
        [each for _, prefill in pairs for each in prefill],
    )
    for name, table in (
        ("indexer", indexer),
        ("top_k", top_k),
        ("sparse_attention", sparse),
        ("window_attention", window),
    ):
        write(
            directory / f"{name}.csv.gz", [table(systems, system) for system in SYSTEMS]
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
