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


# In place of metrics until there are some: on a GPU kernels, on a CPU the functions that compute what kernels do.
FIRST_STEP = "1st step compiles"
GAP = "  "


def _fields(metrics):
    """The metrics that the console shows, each with its label: list of str."""
    pairs = ((name, metrics.get(key)) for key, name in SHOWN.items())
    return [f"{name} {value:.3g}" for name, value in pairs if value is not None]


def fitting(fields, status, width):
    """(text of the first fields, text of the status) that together have at most `width` characters: (str, str).

    Whole fields are left out, from the right. The status is left out where the first field has no room beside it.
    """
    shown = f"{GAP}{status}" if status else ""
    if not fields or len(fields[0]) + len(shown) > width:
        shown = "" if fields or len(status) > width else status
    count = len(fields)
    while count and len(GAP.join(fields[:count])) + len(shown) > width:
        count -= 1
    return GAP.join(fields[:count]), shown


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
        shown = GAP.join(_fields(metrics))
        self.print(f"step {step}/{self.total_steps}  {shown}  {_clock(spent)} < {_clock(left)}")

    def status(self, text):
        pass

    def print(self, text):
        # In one write, so that what other threads print does not come between the line and its end.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def close(self):
        pass


class LiveConsole:
    """One line that is rewritten: bar, steps, time left, metrics, current phase.

    Bar, steps and time have the width that they need; metrics and phase share what is left (`fitting`). console: a rich
    Console, by default of stderr.
    """

    BAR_WIDTH = 20

    def __init__(self, total_steps, start_step, logging_steps, console=None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
        from rich.table import Column

        console = console or Console(stderr=True)

        def whole():
            return Column(no_wrap=True, overflow="crop")

        columns = [
            BarColumn(bar_width=self.BAR_WIDTH, table_column=whole()),
            MofNCompleteColumn(table_column=whole()),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=whole()),
        ]
        last = _metrics_column(console, columns)
        self.progress = Progress(*columns, last, console=console, speed_estimate_period=120)
        self.progress.start()
        self.task = self.progress.add_task("", total=total_steps, completed=start_step, metrics=[FIRST_STEP], status="")

    def show(self, step, metrics):
        self.progress.update(self.task, completed=step, metrics=_fields(metrics), status="")

    def status(self, text):
        self.progress.update(self.task, status=text)

    def print(self, text):
        self.progress.console.print(text, markup=False, highlight=False)

    def close(self):
        self.progress.stop()


def _metrics_column(console, others):
    """The column that has what the `others` leave of the console's width: a rich ProgressColumn."""
    from rich.progress import BarColumn, ProgressColumn
    from rich.table import Column
    from rich.text import Text

    class MetricsColumn(ProgressColumn):
        """The fields that fit, then the phase."""

        def render(self, task):
            used = sum(
                1 + (each.bar_width if isinstance(each, BarColumn) else each.render(task).cell_len) for each in others
            )
            shown, status = fitting(task.fields["metrics"], task.fields["status"], console.width - used)
            return Text.assemble(shown, (status, "dim"))

    return MetricsColumn(table_column=Column(no_wrap=True, overflow="crop"))


def turns_text(messages):
    """The messages of a completion in one line, calls and their results among them; a text as it is: str."""
    if isinstance(messages, str):
        return messages
    parts = []
    for message in messages:
        content = message.get("content") or ""
        parts += [f"-> {content}"] if message["role"] == "tool" else [content] if content else []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            named = isinstance(arguments, dict)
            shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) if named else repr(arguments)
            parts.append(f"{call['function']['name']}({shown})")
    return " ".join(parts)


def completions_text(rows):
    """Completions formatted for the console: str."""
    parts = []
    for row in rows:
        prompt = row["prompt"]
        if isinstance(prompt, list):
            prompt = "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        shown = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        parts.append(f"--- step {row['step']}, {shown}\n{prompt}\n>>> {turns_text(row['completion'])}")
    return "\n".join(parts)
