"""`magicdec hardware`: the devices that can be planned by name, or one of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicdec.commands import options
from magicdec.commands.listing import Format, cell, print_rows, print_sources
from magicdec.commands.options import table_console

if TYPE_CHECKING:
    from magicdec.perfmodel.kernels.profile import HardwareProfile

EPILOG = options.examples("hardware", "hardware h100")


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
        _describe(load_hardware(name), output)
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
    print_rows(rows, output)


def _describe(device: HardwareProfile, output: str) -> None:
    """A device's ceilings, what each kernel's time was fitted on, and where its numbers are from."""
    import msgspec

    from magicdec.reports.text import text_table
    from magicdec.specs.device import Device
    from magicdec.units import GIB

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
        f"{dtype} {cell('flops_per_s', rate)}"
        for dtype, rate in device.flops_per_s.items()
    )
    link = device.link
    usable, error = device.usable_memory
    given = f"programs get {usable / GIB:.2f}"
    if error:
        given += ", 0.5 to 2 % less than the driver prints"
    console.print(
        f"{cell('memory_bytes', device.memory_bytes)} ({given}) at "
        f"{cell('memory_bytes_per_s', device.memory_bytes_per_s)}; {link.topology}, "
        f"{cell('bytes_per_s', link.bytes_per_s)} a direction; {rates}\n"
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
    print_sources(device.sources)
