"""`commkit run` shows a script what python shows it, and starts its groups through the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest
import torch_jobs

from commkit import settings


@pytest.fixture
def run(tmp_path, repository):
    """Runs `python ARGS` in tmp_path, with commkit importable."""

    def call(*arguments, **environment):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(repository),
                "OMP_NUM_THREADS": "1",
                "COMMKIT_LOG_DIR": str(tmp_path),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=100,
        )
        done.stdout = torch_jobs.own_output(done.stdout)
        return done

    return call


RUN = ("-m", "commkit", "run")

SHOWS = """
import os, pickle, sys
class Here: pass
print(sys.argv, __name__, __file__, __package__, __spec__ and __spec__.name)
print(os.path.samefile(sys.path[0], EXPECTED), sys.modules["__main__"].__dict__ is globals())
print(type(pickle.loads(pickle.dumps(Here()))) is Here, "torch" in sys.modules)
"""


def test_a_script_sees_what_python_shows_it(tmp_path, run):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("")
    script = tmp_path / "sub" / "train.py"
    script.write_text(SHOWS.replace("EXPECTED", repr(str(script.parent))) + "import beside\n")
    arguments = ("sub/train.py", "--lr", "1", "-m", "--help", "x y")
    plain, ours = run(*arguments), run(*RUN, *arguments)
    assert plain.returncode == 0 and plain.stdout.count("True") == 3
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.parametrize("module", ["train", "package"])
def test_a_module_sees_what_python_shows_it(tmp_path, run, module):
    text = SHOWS.replace("EXPECTED", repr(str(tmp_path)))
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("from . import other\n" + text)
    (tmp_path / "package" / "other.py").write_text("")
    plain, ours = run("-m", module, "--lr", "1"), run(*RUN, "-m", module, "--lr", "1")
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.parametrize("kind", ["directory", "zip"])
def test_a_directory_or_zip_file_with_a_main_runs(tmp_path, run, kind):
    text = SHOWS.replace("EXPECTED", repr(str(tmp_path / "app")))
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "app", "w") as archive:
            archive.writestr("__main__.py", text)
    else:
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "__main__.py").write_text(text)
    plain, ours = run("app", "1"), run(*RUN, "app", "1")
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('a last word')", 1),
        ("import sys; sys.exit()", 0),
        ("def f():\n    return 1 / 0\nf()", 1),
        ("raise OSError(32, 'broken pipe')", 1),
        ("raise ModuleNotFoundError('no torch', name='torch')", 1),
        ("import click; raise click.ClickException('mine')", 1),
        ("def f(:\n", 1),
        ("import atexit; atexit.register(print, 'at exit'); print('main')", 0),
    ],
)
def test_the_end_of_a_script_is_its_own(tmp_path, run, body, code):
    (tmp_path / "train.py").write_text(body)
    plain, ours = run("train.py"), run(*RUN, "train.py")
    assert plain.returncode == code
    assert (ours.returncode, ours.stdout, ours.stderr) == (code, plain.stdout, plain.stderr)


# A run in the background of a shell has inherited an ignored SIGINT.
INTERRUPTS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.raise_signal(signal.SIGINT)
"""


def test_an_interrupt_exits_130_with_the_script_s_traceback(tmp_path, run):
    (tmp_path / "train.py").write_text(INTERRUPTS)
    done = run(*RUN, "train.py")
    assert done.returncode == 130
    assert done.stderr.startswith("Traceback") and "commkit" not in done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected SCRIPT or -m MODULE"),
        (("absent.py",), "'absent.py': cannot be read (No such file or directory)"),
        (("-m", "no_such_module"), "-m no_such_module: no such module"),
        (("empty",), "'empty': has no __main__.py"),
    ],
)
def test_what_cannot_be_run_is_one_line_with_exit_code_2(tmp_path, run, arguments, words):
    (tmp_path / "empty").mkdir()
    done = run(*RUN, *arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_wrong_setting_is_one_line_with_exit_code_3(tmp_path, run):
    (tmp_path / "train.py").write_text("print('ran')")
    done = run(*RUN, "train.py", COMMKIT_DISABLE="yes")
    assert (done.returncode, done.stdout) == (3, "")
    assert settings.VARIABLES["COMMKIT_DISABLE"][0] in done.stderr
    assert done.stderr.count("\n") == 1


TRAIN = """
import sys
import torch, torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group
init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
through = "commkit.api" in sys.modules and sys.modules["commkit.api"].world() is not None
destroy_process_group()
sys.stdout.write(f"{dist.is_initialized()} {value.item()} {through}\\n")
"""


def test_an_unchanged_script_goes_through_the_tree_under_torchrun(tmp_path, run):
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(
        *("-m", "torch.distributed.run", "--nproc-per-node=4"),
        f"--master-port={torch_jobs.free_port()}",
        *("-m", "commkit", "run", "train.py"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False 10.0 True"] * 4


@pytest.mark.parametrize("disable", ["0", "1"])
def test_commkit_disable_runs_the_script_on_stock_torch(tmp_path, run, disable):
    (tmp_path / "train.py").write_text(TRAIN)
    port = str(torch_jobs.free_port())
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = run(*RUN, "train.py", COMMKIT_DISABLE=disable, **alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"False 1.0 {disable == '0'}\n"


def test_a_launch_error_in_the_script_is_one_line_and_its_exit_code(tmp_path, run):
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(*RUN, "train.py", RANK="two", WORLD_SIZE="4")
    assert done.returncode == 3
    assert "RANK='two'" in done.stderr and done.stderr.count("\n") == 1


SPAWNS = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
def rank(index, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=index, world_size=world)
    value = torch.ones(1)
    dist.all_reduce(value)
    api = sys.modules.get("commkit.api")
    sys.stdout.write(f"{value.item()} {api is not None and api.world() is not None}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.start_processes(rank, args=(2, sys.argv[1]), nprocs=2, start_method=sys.argv[2])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_that_the_script_starts_go_through_the_tree(tmp_path, run, method):
    (tmp_path / "train.py").write_text(SPAWNS)
    done = run(*RUN, "train.py", torch_jobs.free_port(), method)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2.0 True"] * 2


FAILS = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("the loss is nan")
world = sys.modules["commkit.api"].world()
while not world.failures():
    time.sleep(0.01)
print(*world.failures())
os._exit(0)  # torch's own teardown would wait for the lost rank
"""


def test_an_exception_of_one_rank_is_what_the_others_learn(tmp_path, repository):
    (tmp_path / "train.py").write_text(FAILS)
    job = torch_jobs.Job(2, log_dir=tmp_path)
    ranks = [
        subprocess.Popen(
            [sys.executable, *RUN, "train.py"],
            cwd=tmp_path,
            env={**os.environ, **job.environment(rank), "PYTHONPATH": str(repository)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=50) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 1]
    assert "rank 1" in outputs[0][0] and "ValueError: the loss is nan" in outputs[0][0]
    # torch marks each line of a traceback with the rank; the frames are the script's alone.
    assert "ValueError: the loss is nan" in outputs[1][1] and "runpy" not in outputs[1][1]
