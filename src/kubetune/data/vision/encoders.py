"""The encoder for each kind of record: texts and conversations, answers, labels, prompts, with images or without."""

from __future__ import annotations

from kubetune.config.schema import DataConfig, RecordKind
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.encode import Encoder, RowEncoder
from kubetune.data.text.encode_labelled import LabelledEncoder
from kubetune.data.text.encode_preferences import PreferenceEncoder
from kubetune.data.text.encode_prompts import PromptEncoder
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.encode_images import VisionEncoder
from kubetune.data.vision.image_processor import ImageProcessor


def encoder_for(
    tokenizer: Tokenizer,
    data: DataConfig,
    labels: Labels | None,
    processor: ImageProcessor | None,
    kind: RecordKind,
) -> RowEncoder:
    """Return what encodes records of a kind; encoders for images and for pairs are wrapped around that for texts."""
    if labels is not None:
        return LabelledEncoder(tokenizer, labels)
    # Answers come from the model, so only what is asked is encoded.
    if kind == "prompt":
        return PromptEncoder(tokenizer, add_special_tokens=data.add_special_tokens)

    compares_answers = kind not in ("text", "labelled")
    text_encoder = Encoder(
        tokenizer,
        train_on=data.train_on,
        add_special_tokens=data.add_special_tokens,
        keeps_prompts=compares_answers,
    )

    # Images go into conversations, and answers that are compared are conversations.
    encoder: RowEncoder = text_encoder
    if processor is not None:
        encoder = VisionEncoder(text_encoder, processor)
    if compares_answers:
        return PreferenceEncoder(encoder, margins=kind == "graded")
    return encoder
