"""The routes: a module for each family.

adapters.py     /v1/load_lora_adapter, /v1/unload_lora_adapter
completions.py  /v1/completions
chat.py         /v1/chat/completions
control.py      /pause, /update_weights, /sleep and others, for a trainer
token_level.py  /inference/v1/generate, /tokenize, /detokenize
"""
