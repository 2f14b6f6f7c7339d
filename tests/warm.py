"""Imported once by the server that ranks are forked from: what a run would otherwise import and build each time."""

from __future__ import annotations

import gc

import peft.tuners.lora.bnb
import peft.utils.transformers_weight_conversion
import sklearn.metrics
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import kubetune.config.flags
import kubetune.data.prepared.statistics
import kubetune.planning.actuals
import kubetune.supervisor.agent
import kubetune.tasks.causal_lm
import kubetune.tasks.sequence_classification

__all__ = ["kubetune", "peft", "sklearn", "transformers"]

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once
gc.freeze()  # so that a rank's collector neither walks through all this nor copies its pages
