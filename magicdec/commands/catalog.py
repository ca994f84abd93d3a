"""`magicdec models`, `magicdec hardware`, `magicdec engines`: what there is to name, as a table or
as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from magicdec.commands import options
from magicdec.commands.options import option, table_console
from magicdec.units import GIGA, MEGA, TERA, format_bytes

if TYPE_CHECKING:
    from magicdec.perfmodel.kernels.profile import HardwareProfile
    from magicdec.specs.engine import EngineProfile
    from magicdec.specs.model import ModelSpec

Format = Annotated[Literal["table", "json"], option("table or json.", "--format")]
MODELS_EPILOG = options.examples(
    "models", "models --format json", "models --architectures"
)
HARDWARE_EPILOG = options.examples("hardware", "hardware h100")
ENGINES_EPILOG = options.examples("engines", "engines vllm")
PROSE = ("layers", "fitted on", "models", "run")
"""Headings of columns that wrap."""
WIDTH_WITH_LAYERS = 110
HEADINGS = {
    "parameters": "params", "active_parameters": "active", "kv_bytes_per_token": "KV/token",
    "state_bytes_per_sequence": "state", "longest_context": "longest", "memory_bytes": "memory",
    "memory_bytes_per_s": "bandwidth", "bf16_flops_per_s": "bf16", "runs": "run",
}  # fmt: skip


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
    _show(rows, output)
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
    _show(rows, output)
    print(
        f"planned: all {len(facts)}; run: {num_run}. parity: drawn configurations whose tokens "
        "are\n"
        "transformers'; oracle: weights, caches and FLOPs are compared with transformers;\n"
        "models: of the catalog, with their parameters with --format json"
    )


def hardware_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One device: its ceilings, kernels and sources.",
            show_default=False,
        ),
    ] = None,
    output: Format = "table",
) -> None:
    """List the devices that can be planned by name, or describe one.

    With their ceilings, and whether their kernels were measured.
    """
    from magicdec.perfmodel.kernels.profile import hardware_names, load_hardware

    if name is not None:
        _describe_device(load_hardware(name), output)
        return
    rows = []
    for profile in map(load_hardware, hardware_names()):
        kernels = "borrowed or generic"
        if profile.is_measured:
            kernels = "measured"
        row = {
            "hardware": profile.name,
            "memory_bytes": profile.memory_bytes,
            "memory_bytes_per_s": profile.memory_bytes_per_s,
            "bf16_flops_per_s": profile.compute_rate("bf16"),
            "kernels": kernels,
        }
        rows.append(row)
    _show(rows, output)


def _describe_device(device: HardwareProfile, output: str) -> None:
    """A device's ceilings, what each kernel's time was fitted on, and where its numbers are from."""
    import msgspec

    from magicdec.reports.text import text_table
    from magicdec.specs.device import Device

    kernels: list[dict[str, Any]] = []
    for kernel, curve in device.curves():
        fit = curve.fit
        kernels.append(
            {
                "kernel": kernel,
                "fitted_on": fit.fitted_on or "no measurement",
                "rows": fit.num_rows,
                "borrowed_from": fit.borrowed_from,
                "relative_error": fit.relative_error,
            }
        )
    if output == "json":
        told = msgspec.to_builtins(device)
        ceilings = {key: told[key] for key in Device.__struct_fields__ if key in told}
        print(json.dumps(ceilings | {"kernels": kernels}, indent=1))
        return
    console = table_console()
    named = f" ({', '.join(device.aliases)})" if device.aliases else ""
    console.print(f"{device.name}{named}")
    rates = ", ".join(
        f"{dtype} {_cell('flops_per_s', rate)}"
        for dtype, rate in device.flops_per_s.items()
    )
    link = device.link
    console.print(
        f"{_cell('memory_bytes', device.memory_bytes)} at "
        f"{_cell('memory_bytes_per_s', device.memory_bytes_per_s)}; {link.topology}, "
        f"{_cell('bytes_per_s', link.bytes_per_s)} a direction; {rates}\n"
    )
    cells = [
        [
            row["kernel"],
            row["fitted_on"],
            str(row["rows"] or "-"),
            row["borrowed_from"] or "-",
            f"{100 * row['relative_error']:.0f} %",
        ]
        for row in kernels
    ]
    if cells:
        heads = ["kernel", "fitted on", "rows", "borrowed from", "error"]
        console.print(text_table(heads, cells, wraps=("fitted on",)))
    else:
        print("no kernel was measured on it or on a relative: its ceilings alone")
    _print_sources(device.sources)


def engines_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One engine: its drafts, their paths by version, and sources.",
            show_default=False,
        ),
    ] = None,
    output: Format = "table",
) -> None:
    """List the engines that can be planned for, or describe one.

    With what their profiles were fitted on.
    """
    from magicdec.specs.engine import engine_names, load_engine

    if name is not None:
        _describe(load_engine(name), output)
        return
    rows = []
    for known in engine_names():
        rows.append({"engine": known, "fitted_on": load_engine(known).fitted_on or "-"})
    _show(rows, output)


def _describe(engine: EngineProfile, output: str) -> None:
    """An engine's drafts with their paths, by version, and where its constants are from."""
    from magicdec.reports.text import text_table

    drafts = []
    for kind, own in engine.drafts.items():
        if not own.runs:
            continue
        draft, _, method = kind.rpartition("/")
        said: tuple[str, str] | None = None
        for bound in ("", *engine.bounds):
            at = engine.just_before(bound) if bound else engine
            path = at.path(draft or method, method)
            told = (path.runners or "-", path.words)
            if not at.runs(draft or method, method):
                told = ("-", "not run")
            if told != said:
                runner, text = told
                drafts.append(
                    {
                        "draft": kind,
                        "version": f"before {bound}"
                        if bound
                        else own.newest_version or "newest",
                        "runner": runner,
                        "path": text,
                    }
                )
            said = told
    if output == "json":
        document = {"engine": engine.name, "drafts": drafts, "sources": engine.sources}
        print(json.dumps(document, indent=1))
        return
    console = table_console()
    console.print(f"{engine.description}; fitted on {engine.fitted_on or '-'}\n")
    heads = list(drafts[0])
    cells = [list(row.values()) for row in drafts]
    console.print(text_table(heads, cells, wraps=("runner", "path")))
    differences = [
        [f"before {bound}", address, str(value)]
        for bound in engine.bounds
        for address, value in _constants(engine.before[bound])
    ]
    if differences:
        console.print()
        console.print(text_table(["version", "differs in", "value"], differences))
    _print_sources(engine.sources)


def _constants(
    tables: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The values of tables within tables, each under its address."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _constants(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _print_sources(sources: dict[str, str]) -> None:
    """A line each, which no table cuts: most hold an address."""
    if sources:
        print()
    for key, text in sources.items():
        print(f"{key}: {text}")


def _show(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    from magicdec.reports.text import text_table

    heads = [HEADINGS.get(name, name.replace("_", " ")) for name in rows[0]]
    cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
    table_console().print(text_table(heads, cells, wraps=PROSE))


def _cell(name: str, value: Any) -> str:
    if "parameters" in name:
        if value >= TERA:
            return f"{value / GIGA:.0f} G"
        if value >= GIGA / 10:
            return f"{value / GIGA:.3g} G"
        return f"{value / MEGA:.3g} M"
    if name.endswith("flops_per_s"):
        return f"{value / TERA:.4g} TFLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{value / GIGA:.4g} GB/s"
    if "bytes" in name:
        if not value:
            return "-"
        return format_bytes(value)
    return str(value)
