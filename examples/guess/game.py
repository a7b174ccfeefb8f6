"""The game of the example: a number is guessed."""


class Guess:
    """An environment: reset draws a number, and its one tool compares a guess with it."""

    def __init__(self, highest=3, most_guesses=2):
        self.highest, self.most_guesses = highest, most_guesses

    def reset(self, seed):
        # Members of a group have the same seed, and so the same number to find.
        self.secret, self.guesses = 1 + seed % self.highest, []
        return f"Guess a number from 1 to {self.highest}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            "right", or whether the number is "higher" or "lower".
        """
        if len(self.guesses) == self.most_guesses:
            raise ValueError("no guess is left")
        self.guesses.append(number)
        return "right" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self):
        return float(self.secret in self.guesses)
