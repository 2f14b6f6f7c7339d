"""Imported before ranks are forked: what a run would otherwise import and build each time."""

from __future__ import annotations

import peft.tuners.lora.bnb
import peft.utils.transformers_weight_conversion
import sklearn.metrics
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import kubetune.data.findings.kept_data
import kubetune.data.prepared.prepare
import kubetune.plan.actuals
import kubetune.supervisor.agent
import kubetune.supervisor.command_line
import kubetune.tasks.causal_lm
import kubetune.tasks.sequence_classification
import kubetune.training.train
import kubetune.training.worker

__all__ = ["kubetune", "peft", "sklearn", "transformers"]

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once
