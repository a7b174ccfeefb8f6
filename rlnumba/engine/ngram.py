"""Drafts for speculative decoding by n-gram lookup: what followed the last tokens where they occurred before.

Looked up are the prompt of a request and all its completions so far. The completions of a prompt have much in common: a
sequence often continues as another one of its group did, and greedy text repeats itself. A draft is a guess: it is
accepted where it equals the token that is sampled there, and is without effect on the text elsewhere.

Source: prompt lookup decoding (Saxena 2023), vLLM's speculative method "ngram", on the request instead of a sequence.
"""


class NgramIndex:
    """The prompt and the completions of one request, and where each of their n-grams occurred last.

    prompt: token ids (list of int). shortest, longest: lengths of the n-grams, the longest one that is found counts.
    Looking up takes as many steps as there are lengths, whatever the texts' lengths are. num_entered: tokens of the
    prompt whose n-grams are known.
    """

    def __init__(self, prompt, shortest, longest):
        self.prompt, self.num_entered = prompt, 0
        # The prompt with the completion so far, by completion.
        self.texts = {}
        # {n-gram: (a text in which it occurred, the index of the token that followed)} by length, the longest first.
        self.followers = {length: {} for length in range(longest, shortest - 1, -1)}

    def enter_prompt(self, count):
        """Enter the n-grams of up to `count` more tokens of the prompt; returns how many there were."""
        first, self.num_entered = self.num_entered, min(self.num_entered + count, len(self.prompt))
        self._enter(self.prompt, first, self.num_entered)
        return self.num_entered - first

    def extend(self, completion, token_ids):
        """Append token ids (list of int) to the text of a completion, which is new where it has none yet."""
        text = self.texts.get(completion)
        if text is None:
            text = self.texts[completion] = self.prompt.copy()
        first = len(text)
        text += token_ids
        self._enter(text, first, len(text))

    def propose(self, completion, count):
        """Up to `count` drafts that continue a completion which `extend` was called for; [] where nothing matches."""
        text = self.texts[completion]
        for length, followers in self.followers.items():
            match = followers.get(tuple(text[-length:]))
            if match is not None:
                break
        else:
            return []
        source, start = match
        drafts = source[start : start + count]
        if source is text:
            # A match that overlaps the end is repeated: a text with a period goes on with that period.
            period = len(text) - start
            while len(drafts) < count:
                drafts.append(drafts[len(drafts) - period])
        return drafts

    def _enter(self, text, first, end):
        """Enter the n-grams of a text that its tokens [first, end) followed."""
        for length, followers in self.followers.items():
            for index in range(max(first, length), end):
                followers[tuple(text[index - length : index])] = text, index
