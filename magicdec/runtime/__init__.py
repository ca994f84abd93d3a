from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.runtime.attention import Scoring, Workspace, decode_attention
    from magicdec.runtime.distributed import (
        SINGLE,
        TensorParallel,
        join_world,
        leave_world,
    )
    from magicdec.runtime.drafters import build_drafter
    from magicdec.runtime.drafters.base import Drafter
    from magicdec.runtime.engine import MAX_BACK, Engine
    from magicdec.runtime.generate import DecodeOptions, DecodeResult, decode
    from magicdec.runtime.graphs import capture
    from magicdec.runtime.heads.builder import load_head
    from magicdec.runtime.heads.chain import Head
    from magicdec.runtime.heads.layout import layout_of
    from magicdec.runtime.kernels import Visible
    from magicdec.runtime.launch import end_with_torchrun, launch_ranks, take_own_cores
    from magicdec.runtime.prefill import PromptPart
    from magicdec.runtime.prompts import (
        PromptRequest,
        generation_eos_token_ids,
        load_prompts,
        load_tokenizer,
    )
    from magicdec.runtime.transformer import NORMED, Transformer
    from magicdec.runtime.weights import check_divisible, load_model
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
