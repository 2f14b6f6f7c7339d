"""Imported once by the server that ranks are forked from: what a run would otherwise import each time."""

from __future__ import annotations

import peft
import transformers.models.llama.modeling_llama

import kubetune.tasks.causal_lm

__all__ = ["kubetune", "peft", "transformers"]
