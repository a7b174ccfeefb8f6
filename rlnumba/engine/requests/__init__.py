"""The parts of a request beside its prompt, and of its completions beside their tokens.

stops.py        the ids and strings that end a completion, and its text
token_rules.py  logit_bias, allowed_token_ids and bad_words
logprobs.py     the likeliest tokens beside those drawn, and log-probs of prompts
text_stream.py  the text of a completion while it grows
streams.py      outputs of requests while they grow
"""
