"""Preferences between answers about images."""

from __future__ import annotations

from typing import Final

from kubetune.tasks.preference import Preference
from kubetune.tasks.vision_language import VisionLanguage


class VisionPreference(Preference, VisionLanguage):
    """Learn from pairs of answers as `Preference` does, with a model that is built and run as `VisionLanguage` has it.

    `Preference.learner_of` calls `super().learner_of`, which is `VisionLanguage.learner_of` here.
    """


TASK: Final = VisionPreference()
