"""`magicdec models`, `magicdec hardware`, `magicdec engines`: what there is to name, as a table or as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from magicdec.commands.options import console
from magicdec.units import format_bytes

Format = Annotated[Literal["table", "json"], typer.Option("--format", help="table or json.")]
MODELS_EPILOG = "Examples:\n\n  magicdec models\n\n  magicdec models --format json"
HARDWARE_EPILOG = "Examples:\n\n  magicdec hardware"
ENGINES_EPILOG = "Examples:\n\n  magicdec engines"


def models_command(output: Format = "table") -> None:
    """Models that can be planned by name: weights, layers by kind, what a token takes in the cache, longest context."""
    from magicdec.specs.catalog import load_model_spec, model_names

    rows = [_model_row(load_model_spec(name)) for name in model_names()]
    _show(rows, output)


def _model_row(spec: Any) -> dict[str, Any]:
    published = spec.quantization
    recurrent, conv = spec.state_elements()
    return {
        "model": spec.name,
        "parameters": spec.num_parameters,
        "active_parameters": spec.active_parameters,
        "layers": spec.summary(),
        "kv_bytes_per_token": 2 * spec.kv_elements_per_token(),
        "state_bytes_per_sequence": 4 * recurrent + 2 * conv,
        "longest_context": spec.longest_context,
        "weights": "bf16" if published is None else published.weight_dtype,
    }


def hardware_command(output: Format = "table") -> None:
    """Devices that can be planned by name, with their ceilings and whether their kernels were measured."""
    from magicdec.specs.hardware import hardware_names, load_hardware

    profiles = [load_hardware(name) for name in hardware_names()]
    rows = [
        {
            "hardware": profile.name,
            "memory_bytes": profile.memory_bytes,
            "memory_bytes_per_s": profile.memory_bytes_per_s,
            "bf16_flops_per_s": profile.compute_rate("bf16"),
            "kernels": "measured" if profile.is_measured else "borrowed or generic",
        }
        for profile in profiles
    ]
    _show(rows, output)


def engines_command(output: Format = "table") -> None:
    """Engines that can be planned for, with what their profiles were fitted on."""
    from magicdec.specs.engine import engine_names, load_engine

    rows = [{"engine": name, "fitted_on": load_engine(name).fitted_on or "-"} for name in engine_names()]
    _show(rows, output)


def _show(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in rows[0]:
        table.add_column(name.split("_")[0] if name == "longest_context" else name.replace("_", " "))
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    console().print(table)


def _cell(name: str, value: Any) -> str:
    if "parameters" in name:
        return f"{value / 1e9:.3g} G"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:.4g} T"
    if "bytes" in name:
        return format_bytes(value) if value else "-"
    return str(value)
