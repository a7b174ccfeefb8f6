"""Progress of a run on stderr: a live line on a terminal, else a line every logging_steps steps."""

import sys
import time

# Metrics on the console, with their labels, in this order.
SHOWN = {
    "loss": "loss",
    "reward": "reward",
    "mean_token_accuracy": "accuracy",
    "accuracy": "accuracy",
    "margin": "margin",
    "rewards/margins": "margin",
    "eval_loss": "eval loss",
    "eval_reward": "eval reward",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "grad_norm": "grad norm",
    "learning_rate": "lr",
}


def _summary(metrics):
    pairs = ((name, metrics.get(key)) for key, name in SHOWN.items())
    return "  ".join(f"{name} {value:.3g}" for name, value in pairs if value is not None)


def _clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class LineConsole:
    """A line every logging_steps steps, for log files and pipes."""

    def __init__(self, total_steps, start_step, logging_steps):
        self.total_steps, self.start_step, self.logging_steps = total_steps, start_step, logging_steps
        self.started = time.monotonic()

    def show(self, step, metrics):
        if step % self.logging_steps and step not in (self.start_step + 1, self.total_steps):
            return
        spent = time.monotonic() - self.started
        left = spent / max(step - self.start_step, 1) * (self.total_steps - step)
        self.print(f"step {step}/{self.total_steps}  {_summary(metrics)}  {_clock(spent)} < {_clock(left)}")

    def status(self, text):
        pass

    def print(self, text):
        print(text, file=sys.stderr, flush=True)

    def close(self):
        pass


class LiveConsole:
    """One line that is rewritten: bar, steps, time left, metrics, current phase."""

    def __init__(self, total_steps, start_step, logging_steps):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True)]
        columns += [TextColumn("{task.description}"), TextColumn("[dim]{task.fields[status]}")]
        self.progress = Progress(*columns, console=Console(stderr=True), speed_estimate_period=120)
        self.progress.start()
        self.task = self.progress.add_task("", total=total_steps, completed=start_step, status="")

    def show(self, step, metrics):
        self.progress.update(self.task, completed=step, description=_summary(metrics), status="")

    def status(self, text):
        self.progress.update(self.task, status=text)

    def print(self, text):
        self.progress.console.print(text, markup=False, highlight=False)

    def close(self):
        self.progress.stop()


def completions_text(rows):
    """Completions formatted for the console: str."""
    parts = []
    for row in rows:
        prompt = row["prompt"]
        if isinstance(prompt, list):
            prompt = "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        shown = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        parts.append(f"--- step {row['step']}, {shown}\n{prompt}\n>>> {row['completion']}")
    return "\n".join(parts)
