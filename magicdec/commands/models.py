"""`magicdec models`: the models that can be planned by name, and the architectures that are understood."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from magicdec.commands import options
from magicdec.commands.listing import Format, print_rows
from magicdec.commands.options import option, table_console

if TYPE_CHECKING:
    from magicdec.specs.model import ModelSpec

EPILOG = options.examples("models", "models --format json", "models --architectures")

WIDTH_WITH_LAYERS = 110


def models_command(
    architectures: Annotated[
        bool,
        option("The architectures that are understood, instead.", "--architectures"),
    ] = False,
    output: Format = "table",
) -> None:
    """List the models that can be planned by name.

    With their weights, layers by kind, what a token takes in the cache, the longest context, and
    whether `magicdec run` runs them. With --architectures, the architectures that a config.json may
    have.
    """
    from magicdec.specs.catalog import load_model_spec, model_names
    from magicdec.specs.names import named_models

    if architectures:
        _show_architectures(output)
        return
    is_narrow = output == "table" and table_console().width < WIDTH_WITH_LAYERS
    named = named_models()
    rows: list[dict[str, Any]] = []
    for spec in map(load_model_spec, model_names()):
        row = _model_row(spec)
        if is_narrow:
            del row["layers"]
        if output == "json" and spec.name in named:
            entry = named[spec.name]
            row["checkpoints"] = entry.checkpoints
            row["shape"] = entry.shape
            row["source"] = entry.source
        rows.append(row)
    print_rows(rows, output)
    if is_narrow:
        print(
            f"layers by kind: in a terminal of {WIDTH_WITH_LAYERS} columns, or with --format json"
        )


def _model_row(spec: ModelSpec) -> dict[str, Any]:
    """Sizes of one model, and whether it is run."""
    from magicdec.specs.model import why_not_run

    recurrent, conv = spec.state_elements()
    weights = "bf16"
    if spec.quantization is not None:
        weights = spec.quantization.weight_dtype
    runs = "no"
    if why_not_run(spec) is None:
        runs = "yes"
    return {
        "model": spec.name,
        "parameters": spec.num_parameters,
        "active_parameters": spec.active_parameters,
        "layers": spec.summary(),
        "kv_bytes_per_token": 2 * spec.kv_elements_per_token(),
        "state_bytes_per_sequence": 4 * recurrent + 2 * conv,
        "longest_context": spec.longest_context,
        "weights": weights,
        "runs": runs,
    }


def _show_architectures(output: str) -> None:
    """By model_type: all are planned; those that are run are tested against transformers."""
    import msgspec

    from magicdec.specs.catalog import architecture_facts

    facts = architecture_facts()
    if output == "json":
        print(json.dumps(msgspec.to_builtins(facts), indent=1))
        return
    rows: list[dict[str, Any]] = []
    num_run = 0
    for fact in facts:
        runs = "yes"
        if fact.why_not_run is None:
            num_run += 1
        else:
            runs = f"no: {fact.why_not_run}"
        oracle = "no"
        if fact.oracle:
            oracle = "yes"
        row = {
            "architecture": fact.architecture,
            "layers": ", ".join(fact.layers),
            "runs": runs,
            "parity": fact.parity_configurations or "-",
            "oracle": oracle,
            "models": len(fact.models) or "-",
        }
        rows.append(row)
    print_rows(rows, output)
    print(
        f"planned: all {len(facts)}; run: {num_run}. parity: drawn configurations whose tokens "
        "are\n"
        "transformers'; oracle: weights, caches and FLOPs are compared with transformers;\n"
        "models: of the catalog, with their parameters with --format json"
    )
