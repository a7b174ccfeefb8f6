"""What a request asks of its completions, and what they carry.

stops.py        the ids and strings that end a completion, and its text
token_rules.py  logit_bias, allowed_token_ids and bad_words
"""
