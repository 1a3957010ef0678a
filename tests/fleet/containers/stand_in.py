#!/usr/bin/env python3
"""A container runtime for tests: it execs the command, detached from the client, as a daemon would.

So a container outlives a killed client here too, unless it is stopped. Containers are
files in ``~/containers``: their pid.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

HOME = Path(os.environ["HOME"]) / "containers"
WITH_VALUE = {"--name", "--label", "--user", "--volume", "--env", "--gpus", "--device"}


def group_alive(pid: int) -> bool:
    for path in Path("/proc").iterdir():
        try:
            mine = path.name.isdigit() and os.getpgid(int(path.name)) == pid
            if mine and (path / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
                return True
        except OSError:
            continue
    return False


def run(words: list[str]) -> int:
    options: dict[str, list[str]] = {}
    while words[0].startswith("-"):
        name, equals, value = words.pop(0).partition("=")
        options.setdefault(name, []).append(value if equals else words.pop(0) if name in WITH_VALUE else "")
    image, *command = words
    record = HOME / options["--name"][0]
    if record.exists():
        print(f"the container name {record.name} is in use", file=sys.stderr)
        return 125
    env = {}
    for text in options.get("--env", []):
        name, equals, value = text.partition("=")
        if equals or name in os.environ:
            env[name] = value if equals else os.environ[name]
    log = HOME / f".{record.name}.json"
    log.write_text(json.dumps({"image": image, "command": command, "env": env, "options": options}))
    daemon = os.fork()
    if daemon == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            keep = {name: os.environ[name] for name in ("PATH", "HOME", "SPILE_TEST_MARK") if name in os.environ}
            os.execvpe(command[0], command, {**keep, **env})
        record.write_text(str(child))
        _, status = os.waitpid(child, 0)
        record.with_suffix(".code").write_text(str(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    code = record.with_suffix(".code")
    while not code.exists() or not code.read_text():
        time.sleep(0.05)
    value = int(code.read_text())
    for path in (record, code):
        path.unlink(missing_ok=True)
    return value if value >= 0 else 128 - value


def stop(words: list[str]) -> int:
    grace, name = float(words[1]), words[2]
    record = HOME / name
    if not record.exists():
        print(f"no such container: {name}", file=sys.stderr)
        return 1
    pid = int(record.read_text())
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + patience
        while group_alive(pid) and time.monotonic() < until:
            time.sleep(0.05)
        if not group_alive(pid):
            break
    return 0


def main(verb: str, words: list[str]) -> int:
    HOME.mkdir(exist_ok=True)
    if verb == "run":
        return run(words)
    if verb == "stop":
        return stop(words)
    if verb == "rm":
        for path in (HOME / words[-1], HOME / f"{words[-1]}.code"):
            path.unlink(missing_ok=True)
        return 0
    if verb == "ps":
        print("\n".join(sorted(p.name for p in HOME.iterdir() if not p.name.startswith(".") and not p.suffix)))
        return 0
    if verb == "image":
        return 0 if words[-1].startswith("spile") else 1
    return 1 if verb == "pull" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
