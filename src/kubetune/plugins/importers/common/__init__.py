"""Keys that several tools have: sources, schedules, images, modules of adapters, and TrainingArguments."""
