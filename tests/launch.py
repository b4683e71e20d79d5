"""Run a script in a process of its own, without waiting seconds for its imports each time.

A fork server imports the heavy libraries once, and every run is a fork of it: a real process with
its own arguments, streams, working directory and exit status, that a real SIGKILL can end. Where
there is no fork (Windows) each run is spawned, which is the same but slow.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
context = multiprocessing.get_context(METHOD)
context.set_forkserver_preload(["torch", "transformers", "datasets", "matplotlib.pyplot",
                                "nanorlhf.model", "nanorlhf.sampler", "nanorlhf.rewards"])


@dataclass
class Result:
    status: int  # exit status; -9: killed
    out: str
    err: str

    @property
    def errors(self):
        """Lines of stderr, without progress bars."""
        lines = [line for line in self.err.replace("\r", "\n").splitlines() if line.strip()]
        return [line for line in lines if "it/s]" not in line and "s/it]" not in line
                and "?it/s" not in line]


def run(script, *flags, cwd, die=None, limit=300):
    """`python train_sft.py --flag ...`, or `python -m nanorlhf.report ...` for a dotted name.

    die: where the process shall SIGKILL itself, see `_die`. limit: seconds until it is killed as
    hung, which fails the test.
    """
    streams = [Path(cwd) / f".{name}" for name in ("stdout", "stderr")]
    process = context.Process(target=_child, args=(script, [str(f) for f in flags], str(cwd),
                                                   [str(s) for s in streams], die))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{script} did not end in {limit} s")
    result = Result(process.exitcode, *(stream.read_text() for stream in streams))
    for stream in streams:
        stream.unlink()
    return result


def _child(script, flags, cwd, streams, die):
    os.chdir(cwd)
    for number, (name, path) in enumerate(zip(("stdout", "stderr"), streams), 1):
        stream = open(path, "w", buffering=1)  # one that outlives this function
        os.dup2(stream.fileno(), number)
        setattr(sys, name, stream)
    sys.path.insert(0, str(ROOT))
    if die:
        _die(*die)
    sys.argv = [script, *flags]
    if script.endswith(".py"):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        sys.modules.pop(script, None)  # a new interpreter would not have it yet
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def _die(place, step):
    """Arrange for SIGKILL at an exact place: no clock, no race.

    log: right after that step's line is in metrics.jsonl; save: when that step's checkpoint is
    written but does not have its name yet; finish: after the last checkpoint, before the model.
    """
    from nanorlhf import utils

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    log, replace = utils.Run.log, os.replace

    def dying_log(self, number, metrics):
        log(self, number, metrics)
        if number == step:
            kill()

    def dying_replace(source, target):
        if Path(target).name == f"step_{step:08d}.pt":
            kill()
        replace(source, target)

    if place == "log":
        utils.Run.log = dying_log
    elif place == "save":
        os.replace = dying_replace
    else:
        utils.Run.finish = lambda self, save_model: kill()
