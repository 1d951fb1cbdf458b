"""A worker process, `python -P -m vitmods.study.executors.worker TASK`: trials come on stdin, answers go to stdout."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any


def main(task: dict[str, Any]) -> None:
    """Do the work that the parent names, trials and evaluations, until it closes the pipe or dies."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log, never between the answers
    names: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(names,), daemon=True).start()

    from vitmods.study.executors import describe
    from vitmods.study.plan import Settings
    from vitmods.study.store import StudyFolder
    from vitmods.study.trial import TrialRunner
    from vitmods.util.registry import load_plugins

    folder = StudyFolder(task.pop("folder"))
    with folder.worker_lock(task.pop("index")):
        load_plugins(task.pop("plugins"))
        runner = TrialRunner(folder, Settings.from_dict(folder.known_facts().settings), **task)
        while True:
            name = json.loads(names.get())
            failure = None
            try:
                runner(runner.settings.work(name))
            except Exception as error:
                traceback.print_exc()
                failure = describe(error)
            answers.write(json.dumps({"failure": failure}) + "\n")


def _listen(names: queue.SimpleQueue[bytes]) -> None:
    """Pass on what the parent asks. The pipe closes when it is done or dead; nothing may be written from then on."""
    rest = b""
    while chunk := os.read(0, 4096):  # not sys.stdin: its lock, held here, would trouble the interpreter's end
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            names.put(line)
    os._exit(0)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:  # the trial has saved its checkpoint
        sys.exit(143)
