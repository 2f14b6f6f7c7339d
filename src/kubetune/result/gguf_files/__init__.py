"""GGUF files for llama.cpp and Ollama: written from an export's safetensors, and proved by running llama.cpp.

Not for other forms of export (publishing/). Read `families` first: which models llama.cpp computes as they were trained.
"""
