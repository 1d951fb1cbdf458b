"""Fuzz what reads input from outside: `make fuzz`, or python benchmarks/fuzz.py --seconds 600 expressions files.

Each family of tests/fuzz gets so many seconds of CPU time in a process of its own. Where atheris is installed
(`pip install atheris`) it looks for inputs that reach new code; otherwise inputs are drawn at random. An input fails
that raises anything but UserError, reaches the network or a function that a file names, or takes more than 2 s, or
500 MB. The command prints the inputs that failed, each kind of failure once.
"""

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLOW_S, MOST_MB = 2.0, 500


class TooSlow(BaseException):
    """Not an Exception, so that no reader takes it for damage."""


def _too_slow(*_: object) -> None:
    raise TooSlow


class Runs:
    """Counts inputs and keeps the failures, by where they were raised."""

    def __init__(self, family: str, seconds: float, inputs: int) -> None:
        from tests.fuzz.families import Reached, run

        self.read, self.family, self.seconds, self.inputs = run, family, seconds, inputs
        self.raised = (Exception, TooSlow, Reached)
        self.slowest = self.most = 0.0
        self.count, self.found = 0, dict[str, str]()
        self.cpu = resource.getrusage(resource.RUSAGE_SELF)
        self.begun = self._cpu()

    def __call__(self, value: object) -> None:
        self.count += 1
        before, peak = time.process_time(), _peak_mb()
        signal.setitimer(signal.ITIMER_VIRTUAL, SLOW_S)  # of this process's own time: the machine may be busy
        try:
            self.read(self.family, value)
        except self.raised as error:
            where = traceback.extract_tb(error.__traceback__)
            inside = [one for one in where if "/vitmods/" in one.filename] or list(where)
            self._keep(
                f"{type(error).__name__} in {Path(inside[-1].filename).name}:{inside[-1].lineno}: {error}", value
            )
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        megabytes, seconds = _peak_mb() - peak, time.process_time() - before
        self.slowest, self.most = max(self.slowest, seconds), max(self.most, megabytes)
        if megabytes > MOST_MB:
            self._keep(f"took {megabytes:.0f} MB", value)
        if seconds > SLOW_S:
            self._keep("took more than 2 s", value)
        if self._cpu() - self.begun > self.seconds or self.count == self.inputs:
            self.end()

    def end(self) -> None:
        """Say what came out, and leave: atheris has no other way to stop."""
        print(
            f"{self.family}: {self.count:,} inputs, at most {self.slowest:.1f} s and {self.most:.0f} MB more each, "
            f"{len(self.found)} kinds of failure",
            flush=True,
        )
        for kind, value in self.found.items():
            print(f"  {kind}\n    {value}", flush=True)
        os._exit(1 if self.found else 0)

    def _keep(self, kind: str, value: object) -> None:
        key = kind.partition(": ")[0]
        if key not in {one.partition(": ")[0] for one in self.found}:
            self.found[kind] = repr(value)[:3000]
            print(f"  {self.family} {self.count}: {kind[:300]}\n    {self.found[kind]}", flush=True)

    @staticmethod
    def _cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fuzz(family: str, seconds: float, inputs: int) -> None:
    """One family in this process; it does not return."""
    sys.path.insert(0, str(ROOT))
    os.environ["HYPOTHESIS_DATABASE_FILE"] = ""
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris is not None:
        with atheris.instrument_imports(include=["vitmods"]):
            from tests.fuzz import families
    else:
        from tests.fuzz import families
    from hypothesis import HealthCheck, given, settings

    signal.signal(signal.SIGVTALRM, _too_slow)
    if family == "models":  # imports of libraries are not an input's
        for value in families.PLAIN:
            families.models(value)
    runs = Runs(family, seconds, inputs)

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(families.FAMILIES[family][0])
    def read(value: object) -> None:
        runs(value)

    one_input = read.hypothesis.fuzz_one_input
    rng = random.Random(0)
    if atheris is None:
        while True:
            one_input(rng.randbytes(rng.randrange(8, 2000)))
    with tempfile.TemporaryDirectory() as seeds:  # short inputs alone would take long to become long
        for i in range(100):
            (Path(seeds) / str(i)).write_bytes(rng.randbytes(rng.randrange(50, 1000)))
        options = ["-max_len=4000", "-len_control=0", "-timeout=3600", "-rss_limit_mb=0", f"-artifact_prefix={seeds}/"]
        atheris.Setup([sys.argv[0], *options, seeds], one_input)
        atheris.Fuzz()


def main() -> int:
    """Run the families one after the other; 1 where one found something."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=["expressions", "recipes", "configs", "files", "models"])
    parser.add_argument("--seconds", type=float, default=600, help="CPU time of each")
    parser.add_argument("--inputs", type=int, default=0, help="of each, at most; 0: no limit")
    parser.add_argument("--here", action="store_true", help="one family, in this process")
    given = parser.parse_args()
    if given.here:
        fuzz(given.families[0], given.seconds, given.inputs)
    options = ["--here", "--seconds", str(given.seconds), "--inputs", str(given.inputs)]
    commands = [[sys.executable, __file__, *options, one] for one in given.families]
    return max(subprocess.run(command, check=False).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
