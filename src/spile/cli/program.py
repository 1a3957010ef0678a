"""Find the command, run it, and turn errors into one line and an exit code."""

from __future__ import annotations

import difflib
import io
import os
import re
import select
import sys
import tomllib
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    Group,
    Parameter,
    UnknownOptionError,
)
from cyclopts.config import Dict, Env
from cyclopts.exceptions import UnknownCommandError, UnusedCliTokensError
from cyclopts.help.formatters import DefaultFormatter
from cyclopts.token import Token
from rich.text import Text

from spile.cli.aliases import translate
from spile.errors import ExitCode, SpecError, SpileError, UserError
from spile.run.signals import interruptible
from spile.version import __version__
from spile.view.table import PipeSafeConsole

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions


class Command(NamedTuple):
    """A row of the table of commands."""

    name: str
    """Words separated by a space: ``data convert`` is ``convert`` in the group ``data``."""
    help: str
    function: str = ""
    """Where its function is in this package, ``module:name``; empty for a group."""


_VERIFY = "Check that a dataset is complete and undamaged: every sample once, every checksum right."
_EXPORT = "Export a dataset to SAELens, NumPy, Parquet, Hugging Face, speculators, SpecForge or pickles."
_RUN = "Copy this directory to every host of a slice, run a command on all hosts and fetch the logs."

SECTIONS: dict[str, tuple[Command, ...]] = {
    "A dataset of activations": (
        Command("extract", "Run a model over a dataset and store its activations.", "extract:extract"),
        Command("infer", "Answer prompts, and store the activations of prompts and answers.", "extract:infer"),
        Command("score", "Score the answers of spile infer, as a table or an HTML page.", "inspect:score"),
        Command("verify", _VERIFY, "verify:verify"),
        Command("monitor", "Watch a dataset grow: samples, shards, state and rate of each stream.", "fleet:monitor"),
        Command("view", "Show runs, samples, layers and features in the browser.", "view:view"),
        Command("plan", "Estimate the tokens, bytes, hours, dollars and memory of a run.", "plan:plan"),
        Command("inspect", "Describe a dataset; --html writes a page with plots.", "inspect:inspect"),
        Command("models", "List the model families that spile implements, with an example of each.", "plan:models"),
        Command("export", _EXPORT, "export:export"),
        Command("push", "Upload a dataset to the Hugging Face hub, with a dataset card.", "export:push"),
        Command("import", "Import the pickles of the old guides as a dataset.", "export:import_"),
    ),
    "What it is made from": (
        Command("data", "Make datasets: convert, split into streams, upload."),
        Command("data convert", "Convert a hub dataset or local files to ARC tasks.", "data:convert"),
        Command("data streams", "Split a dataset into independent, balanced streams.", "data:streams"),
        Command("data upload", "Upload streams to a bucket; identical files are skipped.", "data:upload"),
    ),
    "Many machines": (
        Command("deploy", "Prepare the data and start workers on a fleet of TPU VMs.", "deploy:deploy"),
        Command("fleet", "Deployed fleets: list, status, stop."),
        Command("fleet list", "List the fleets that were deployed to a bucket.", "fleet:list_fleets"),
        Command("fleet status", "Show a fleet's machines, progress and cost once.", "fleet:status"),
        Command("fleet stop", "Stop a fleet and delete its machines. Stored data is kept.", "fleet:stop"),
        Command("tpu", "A fleet's machines: create, delete, status, list, recreate-preempted."),
        Command("tpu create", "Create a fleet's machines in one or more zones.", "fleet:create"),
        Command("tpu delete", "Delete a fleet's machines.", "fleet:delete"),
        Command("tpu status", "Show a fleet's machines.", "fleet:tpu_status"),
        Command("tpu list", "List every TPU VM of the project.", "fleet:list_all"),
        Command("tpu recreate-preempted", "Replace a fleet's dead machines.", "fleet:recreate_preempted"),
        Command("pod", "Many hosts as one worker."),
        Command(
            "pod check", "Test a slice in a minute: hosts, barriers, devices and one forward pass.", "extract:check"
        ),
        Command("worker", "Run one stream of a run spec; launchers start this.", "extract:worker"),
        Command("install", "Install this version of spile on every host of a slice.", "hosts:install"),
        Command("run", _RUN, "hosts:run"),
        Command("logs", "Print a worker's log, from its machine or from the bucket.", "hosts:logs"),
        Command("collect", "Fetch a folder from every host, into one folder per worker.", "hosts:collect"),
        Command("docker", "The same run in containers: build, run, pod, stop."),
        Command("docker build", "Build the container image, on this machine or on every host.", "docker:build"),
        Command("docker run", "Run a command in a container on this machine.", "docker:run"),
        Command("docker pod", "Run a command in one container on every host of a slice.", "docker:pod"),
        Command("docker stop", "Stop containers, on this machine or on every host.", "docker:stop"),
        Command("k8s", "The same run on Kubernetes."),
        Command("k8s job", "Print Kubernetes manifests for a run.", "clusters:k8s_job"),
        Command("slurm", "The same run on Slurm."),
        Command("slurm job", "Print a Slurm array job for a run.", "clusters:slurm_job"),
    ),
}
"""The sections of ``spile --help`` in order, with the most used commands first."""

COMMANDS = tuple(row for rows in SECTIONS.values() for row in rows if row.function)
GROUPS = {row.name: row.help for rows in SECTIONS.values() for row in rows if not row.function}
_NAMES = (*GROUPS, *(command.name for command in COMMANDS))

COMMON_FLAGS = "Common flags"
"""The heading of the flags that the short help lists. They are also listed under the headings of ``--help-all``."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "extract": (
        ("The embedded model on the embedded tasks", "spile extract"),
        (
            "The last token of each text of a CSV file, at two layers",
            "spile extract --dataset data.csv --column prompt --layers 2 5 --positions last",
        ),
        (
            "The first 1,000 samples through a model on the Hugging Face hub, into a bucket",
            "spile extract --model Qwen/Qwen2.5-0.5B --max-samples 1000 --output gs://B/DIR",
        ),
    ),
    "infer": (
        ("The embedded model answers the embedded tasks", "spile infer"),
        (
            "Short answers to the prompts of a text file, one per line",
            "spile infer --model ./model --dataset prompts.txt --max-new-tokens 100",
        ),
        ("Sampled answers, and the activations of the answers only", "spile infer --temperature 0.7 --capture answer"),
    ),
}
"""Examples by command: what each does, and the command line, which fits into 80 columns with its indentation. Only
these commands have a short help."""


_FOR_ANSWERS = ("--max-new-tokens", "--temperature", "--top-p", "--stop", "--capture", "--n-tasks")
_HINTS = {
    ("extract", "--force"): "leave it out: extract always resumes. To install again: spile deploy --launch ssh --force",
    **{("extract", name): f"generate answers with: spile infer {name} …" for name in _FOR_ANSWERS},
}
"""Hints for flags that only another command has, or that were removed."""


def describe_mistake(error: CycloptsError, command: str) -> str:
    """Return the error of a command as one line: the words of cyclopts, and where to find more."""
    fix = f"See {' '.join(word for word in ('spile', command, '--help') if word)}"
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]):  # Its own text would import every command.
            kind = "option" if word.startswith("-") else "command"
            below = [name.removeprefix(command).strip() for name in _NAMES if name.startswith(command)]
            near = [f"did you mean {name}?" for name in difflib.get_close_matches(word, below, n=1)]
            return SpecError(f"unknown {kind} {f'{command} {word}'.strip()}", fix=" ".join([*near, fix])).line()
        case UnusedCliTokensError(unused_tokens=[*words]):
            if command == "extract" and words[0].isdecimal():
                fix = f"did you mean --worker-id {words[0]}?"
            return SpecError(command, expected="flags only", found=" ".join(words), fix=fix).line()
        case UnknownOptionError(token=Token(keyword=str(name))) if (command, name.partition("=")[0]) in _HINTS:
            return SpecError(f"unknown option {name}", fix=_HINTS[command, name.partition("=")[0]]).line()
        case CoercionError(token=Token(keyword=str(name))) | UnknownOptionError(token=Token(keyword=str(name))):
            if name.startswith("[") and error.token is not None:  # [batch-size] of a file is --batch-size.
                error.token = error.token.evolve(keyword=f"--{name[1:-1]}")
    return SpecError(" ".join(str(error).split()), fix=fix).line()


class CommandHelp(DefaultFormatter):
    """Prints the help of one command."""

    def __init__(self, command: str, *, short: bool) -> None:
        super().__init__()
        self._command = command
        self._short = short

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print the panel of the common flags in a short help, all others in a full one."""
        if (panel.title == COMMON_FLAGS) == self._short:
            super().__call__(console, options, panel)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print the description of the command, then its examples."""
        super().render_description(console, options, description)
        for text, line in EXAMPLES.get(self._command, ()):
            console.print(Text.assemble((f"{text}:\n", "dim"), f"  {line}\n"), soft_wrap=True)
        if self._short:
            every = f"spile {self._command} --help-all"
            console.print(Text.assemble((every, "bold"), " lists every flag.\n"), soft_wrap=True)


def build_app(config: str | None = None, command: str | None = None, *, every_flag: bool = True) -> App:
    """Return the command tree without importing commands. Flags override variables, and variables override the file.

    The help of ``command`` is its own docstring, which imports it; the others show their line of the table.
    Without ``every_flag``, the help of a command with examples lists only its common flags.
    """
    short = command in EXAMPLES and not every_flag
    file = [] if config is None else [Dict(_read_config(config), use_commands_as_keys=False, source=config)]
    app = App(
        name="spile",
        help="Tap a language model: run it over a dataset and store its layers' activations, each sample exactly once.",
        help_flags=("--help", "-h", "--help-all"),
        default_parameter=Parameter(negative_bool=(), negative_iterable=()),
        version=f"spile {__version__}",
        config=(
            Env("SPILE_", command=False, show=not short),
            *file,
            _refuse_fractions,
            _refuse_buckets,
            _refuse_stored_overwrite,
        ),
        suppress_keyboard_interrupt=False,  # run() handles it.
        help_formatter=CommandHelp(command or "", short=short),
    )
    groups: dict[str, App] = {}
    for number, (title, rows) in enumerate(SECTIONS.items(), 1):
        section = Group(title, sort_key=number)
        for place, row in enumerate(rows):
            above, _, name = row.name.rpartition(" ")
            where: dict[str, Any] = {} if above else {"group": section, "sort_key": place}
            if not row.function:
                groups[name] = App(name=name, help=row.help, **where)
                app.command(groups[name])
                continue
            help_text = None if row.name == command else row.help
            (groups[above] if above else app).command(f"spile.cli.{row.function}", name=name, help=help_text, **where)
    more = Group("More", sort_key=99)
    app.command(partial(_install_completion, app), name="--install-completion")
    for flag in ("--help", "--version", "--install-completion"):
        app[flag].group = more
    return app


def _install_completion(
    app: App,
    /,
    *,
    shell: Annotated[
        Literal["bash", "zsh", "fish"] | None, Parameter(help="The shell. [default: the one that runs this command]")
    ] = None,
) -> None:
    """Install completion of commands and flags for a shell."""
    from cyclopts.completion.detect import ShellDetectionError

    try:
        path = app.install_completion(shell=shell)
    except ShellDetectionError as error:
        raise SpecError("--install-completion", expected="--shell bash, zsh or fish", found="no known shell") from error
    except OSError as error:
        raise UserError(
            "--install-completion", expected="a home folder that can be written", found=str(error)
        ) from error
    print(f"Installed {path}. A new shell completes the commands and flags of spile.")


def _refuse_fractions(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse a value such as ``--max-samples 1.5``, which would otherwise be rounded."""
    for argument in arguments:
        if argument.hint is not int and int not in get_args(argument.hint):
            continue
        for token in argument.tokens:
            if float not in get_args(argument.hint) and re.fullmatch(r"[+-]?\d*\.\d*[1-9]\d*", token.value):
                raise CoercionError(argument=argument, token=token, target_type=int)


def _refuse_buckets(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse URLs for local paths: ``--logs gs://b/x`` would otherwise create a local folder named ``gs:``."""
    for argument in arguments:
        if argument.hint is not Path and Path not in get_args(argument.hint):
            continue
        for token in argument.tokens:
            if "://" in token.value:
                raise SpecError(argument.name, expected="a path on this machine", found=token.value)


def _refuse_stored_overwrite(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse ``--overwrite`` from a file or a variable: a command that removes data is typed, once."""
    for argument in arguments:
        for token in argument.tokens:
            if argument.name == "--overwrite" and token.source != "cli":
                where = token.keyword if token.source == "env" else token.source
                raise SpecError("--overwrite", expected="on the command line", found=where)


def run(words: list[str]) -> int:
    """Run ``spile`` with these arguments and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal that can print only ASCII gets "?" instead of an error.
    end = words.index("--") if "--" in words else len(words)  # Arguments after -- belong to another program.
    ours = [word for word in words[:end] if word != "--debug"]
    debug = len(ours) < end
    errors = PipeSafeConsole(stderr=True, soft_wrap=True)
    try:
        ours, config = _take_config(ours)
        words = translate(ours + words[end:], os.environ)
        app = build_app(config, _named_command(words), every_flag="--help-all" in words)
        with interruptible():
            code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        errors.print(f"spile: {describe_mistake(error, _named_command(words))}")
        return ExitCode.REFUSED
    except SpileError as error:
        if debug:
            raise
        errors.print(f"spile: {error}")
        return error.exit_code
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # Rich raises it when the reader has closed the pipe.
            return 0
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            # The reader of ``spile … | head`` closed the pipe, which is no failure. Keep the last flush quiet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if debug:
            raise
        errors.print(f"spile: {_describe_fault(error)}")
        return 1
    return code if isinstance(code, int) else 0


def _stdout_is_closed() -> bool:
    """Return whether the broken pipe is our own output; one to a server or a child process is a failure."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(seen & (select.POLLERR | select.POLLHUP) for _, seen in output.poll(0))


def _describe_fault(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return f"an unexpected error in spile or a library: {message} ({where}); the same command with --debug shows more"


def _take_config(words: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without ``--config FILE``, and the file."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config" and equals:
            return words[:place] + words[place + 1 :], value
        if name == "--config":
            if place + 1 == len(words):
                raise SpecError("--config", expected="a TOML file after it", found="nothing")
            return words[:place] + words[place + 2 :], words[place + 1]
    return words, None


def _read_config(location: str) -> dict[str, Any]:
    """Read a TOML file, local or in a bucket: one flag per line, spelled with dashes or underscores."""
    from spile.objects import open_folder, split
    from spile.objects.folder import NotFound

    folder, key = split(location)
    try:
        values = tomllib.loads(open_folder(folder).get(key).decode())
    except NotFound as error:
        raise SpecError("--config", expected="a TOML file", found=f"no {location}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError("--config", expected="a TOML file", found=f"{location}: {error}") from error
    return {name: value for name, value in values.items() if name not in ("version", "command")}  # RunSpec.to_toml


def _named_command(words: list[str]) -> str:
    """Return the command or group that the arguments name, or an empty string."""
    names = [word for word in words if not word.startswith("-")]
    return next((name for name in (" ".join(names[:2]), " ".join(names[:1])) if name in _NAMES), "")
