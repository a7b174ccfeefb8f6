"""The routes: a module for each family.

completions.py  /v1/completions
chat.py         /v1/chat/completions
token_level.py  /inference/v1/generate, /tokenize, /detokenize
"""
