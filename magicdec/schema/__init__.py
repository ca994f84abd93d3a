"""Everything that goes in and comes out: requests, rows, plans, records and how they compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.schema.comparison import (
        TERMS,
        Comparison,
        ErrorSummary,
        Pair,
        by_cpu_time,
        is_paired,
        latest_measured,
        latest_predicted,
        pair_records,
        setting_key,
        speed_scale,
        summarise,
    )
    from magicdec.schema.evidence import LaneEvidence
    from magicdec.schema.gamma_table import BatchBand, TableGamma, nearest
    from magicdec.schema.plan import (
        UNKNOWN_SITE,
        CaseAnswer,
        Ceilings,
        Choice,
        Formats,
        GammaTable,
        KernelTime,
        Limit,
        MemoryUse,
        Moment,
        NeedsAcceptance,
        OfTask,
        Operation,
        Outcome,
        Outlook,
        Percentiles,
        Plan,
        Reason,
        Site,
        Traffic,
        TrafficLoad,
        bands_of,
        load_plan,
    )
    from magicdec.schema.record import (
        BASELINE_MBU_FLOOR,
        LARGEST_NUMBER,
        SPREAD_FIELDS,
        UNFINISHED,
        Record,
        append_record,
        busy_machine,
        check_records_file,
        current_environment,
        read_many,
        read_records,
        read_rows,
        record_rows,
        summary,
        unfinished,
    )
    from magicdec.schema.request import (
        BALANCES,
        COUNT_OR_SHARE,
        COUNTS_OR_SHARES,
        DEFAULT_CONTEXT,
        DEFAULT_CONTEXTS,
        MAX_BATCH,
        NUMBERS,
        OF_ARRIVALS,
        PREFILLS,
        Option,
        Request,
        check_fields,
        fields_of,
        given,
        plan_command,
        request_options,
    )
    from magicdec.schema.row import (
        COLUMNS,
        NO_DRAFT,
        NO_GAIN,
        PLUGIN,
        ByAcceptance,
        Candidate,
        Decoding,
        Drafting,
        Gain,
        Layout,
        Memory,
        RequestTimes,
        StepTimes,
        TokenCost,
        Verdict,
        column,
        verdict_of,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
