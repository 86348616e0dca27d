"""Progress as a picture that stays in place: header, agents, policies, what happens now."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from troupe.client.cli.formats import duration, number, score, sparkline
from troupe.client.cli.progress import Progress
from troupe.client.events import Event, Notice, StateChanged

_STATE_STYLE = {
    "running": "bold green",
    "succeeded": "bold green",
    "failed": "bold red",
    "cancelled": "bold yellow",
    "paused": "bold yellow",
    "pausing": "yellow",
    "cancelling": "yellow",
}
_SEVERITY_STYLE = {"info": "dim", "warning": "yellow", "error": "red"}


class LiveDisplay:
    """Redraws a few times a second; notices scroll by above. A context manager."""

    def __init__(self, console: Console) -> None:
        """`console` must be a terminal."""
        self._console = console
        self._live = Live(
            console=console, refresh_per_second=4, transient=False, vertical_overflow="ellipsis"
        )
        self._ascii = not (console.encoding or "").lower().startswith("utf")

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """One line above the picture."""
        self._console.print(escape(text), style="dim", highlight=False)

    def show(self, progress: Progress, event: Event) -> None:
        """Draw `progress`, to which `event` has been applied."""
        match event:
            case Notice():
                style = _SEVERITY_STYLE[event.severity]
                self._console.print(escape(event.text), style=style, highlight=False)
            case StateChanged() if event.problem is not None:
                self._console.print(escape(str(event.problem)), style="red", highlight=False)
        self._live.update(self.picture(progress))

    def picture(self, progress: Progress) -> RenderableType:
        """The whole picture."""
        parts: list[RenderableType] = [self._header(progress), self._agents(progress)]
        if progress.policies:
            parts.append(self._policies(progress))
        parts.append(_activity(progress))
        return Group(*parts)

    def _header(self, progress: Progress) -> RenderableType:
        line = Text.assemble(
            (progress.job_id, "bold"),
            "  ",
            (str(progress.state), _STATE_STYLE.get(progress.state, "cyan")),
            f"  {progress.mode}  step {progress.step}/{progress.total_steps}",
            f"  eta {duration(progress.seconds_left)}",
            # Networks have none.
            f"  {number(progress.tokens_per_second)} tok/s" if progress.tokens_per_second else "",
        )
        grid = Table.grid(padding=(0, 0))
        grid.add_row(line)
        grid.add_row(ProgressBar(total=max(1, progress.total_steps), completed=progress.step))
        return grid

    def _agents(self, progress: Progress) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("agent")
        table.add_column("reward", justify="right")
        table.add_column("held out", justify="right")
        table.add_column("training reward per step", min_width=24)
        for agent in progress.agents:
            values = progress.rewards.get(agent, [])
            table.add_row(
                escape(agent),
                score(progress.reward(agent)),
                score(progress.evaluation.get(agent)),
                Text(sparkline(values, ascii_only=self._ascii), style="cyan"),
            )
        if "team" in progress.evaluation or "team/mean" in progress.metrics:
            team, held_out = progress.newest.get("team/mean"), progress.evaluation.get("team")
            table.add_row(Text("team", style="italic"), score(team), score(held_out), "")
        return table

    def _policies(self, progress: Progress) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("policy", "version", "loss", "grad norm", "kl", "entropy"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name in progress.policies:
            policy = progress.policy(name)
            table.add_row(
                escape(name),
                str(policy.version),
                "no update" if policy.updated is False else number(policy.loss),
                number(policy.grad_norm),
                number(policy.kl),
                number(policy.entropy),
            )
        return table


def _activity(progress: Progress) -> RenderableType:
    done, total = progress.activity_done
    grid = Table.grid(padding=(0, 2, 0, 0))
    if not progress.activity or total <= 0:
        grid.add_row(Text(progress.activity, style="dim"))
    else:
        bar = ProgressBar(total=total, completed=done, width=24)
        grid.add_row(bar, Text(progress.activity, style="dim"))
    return grid
