from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.reports.cost_check import write_cost_check
    from magicdec.reports.data import ReportData, candidate_record
    from magicdec.reports.deployment import Deployment
    from magicdec.reports.exports import (
        PROMPT_LOOKUP_MAX,
        check_engine,
        export,
        write_settings,
    )
    from magicdec.reports.figures import FIGURES, draw
    from magicdec.reports.figures.chart import PAPER, png, raw_svg
    from magicdec.reports.report import (
        TEMPLATES,
        html_context,
        html_style,
        template_environment,
        write_report,
    )
    from magicdec.reports.sentences import acceptance_of
    from magicdec.reports.tables import TABLES, Table
    from magicdec.reports.terminal import (
        print_comparison,
        print_groups,
        print_run,
        print_verdict,
    )
    from magicdec.reports.terminal_plan import print_plan
    from magicdec.reports.text import GAMMA, table_lines, text_table
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
