"""Models: Hugging Face folders in and out, one transformer for Qwen3, Qwen2 and Llama, and the tokenizer."""
