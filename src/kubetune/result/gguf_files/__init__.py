"""GGUF files for llama.cpp and Ollama: written from safetensors, quantised, and run by llama.cpp.

Not for the export that they are of, nor its proof (forms). Read `families` first: which models llama.cpp computes as they
were trained.
"""
