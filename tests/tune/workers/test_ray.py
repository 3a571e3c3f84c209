"""Tests with real Ray: the embedded Ray, lost actors and nodes, workers with another version of svod. Each test that changes how Ray
starts runs in a process of its own."""
from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from svod.compile.cpu.host import host_target
from svod.errors import TuneError
from svod.system.monitor import Monitor
from svod.tune.workers import ray_executor
from svod.tune.workers.jobs import identity
from svod.tune.workers.local_executor import LocalExecutor
from svod.tune.workers.ray_executor import TOKEN, _remove_dead_sessions, _SessionDirectory
from svod.tune.workers.start import make_executor
from tests.patience import NEVER, wait_until
from tests.tune.ray_nodes import below, command_of, is_alive
from tests.tune.workers.test_child import CONFIG, JOBS, ROOT, is_gone

pytestmark = pytest.mark.ray
DEVICE = "CPU:interpreter"   # another name of the CPU, so that tests do not wait for the machine lock of a search
NICE = os.getpriority(os.PRIO_PROCESS, 0)       # niceness of the tests; bench workers have the same

PRELUDE = f"""import sys, os, signal, json, logging; sys.path.insert(0, sys.argv[1])
START, NICE = {NEVER}, {NICE}
from svod.tune.workers.start import make_executor, ExecutorStart
from svod.tune.workers.machine_lock import lock_directory
from tests.tune.workers.test_child import CONFIG, JOBS
def facts(e, kind="compile"): return e.run(JOBS + ":facts", [None], kind=kind, deadline=START)[0].value
"""


def run_driver(body: str, *, timeout: float = NEVER, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run PRELUDE and `body` in a new Python process. If it fails, the test fails with its output."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + body, ROOT], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **environment})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done


@pytest.mark.slow
def test_an_embedded_ray_has_manners(tmp_path: Path) -> None:
    """An embedded Ray prints nothing although an actor is killed, keeps the SIGTERM handler, ignores RAY_ADDRESS, and works with a home
    that cannot be written and a temporary path that is too long for sockets. It leaves no session, no process, and no variable but Ray's
    own."""
    long = tmp_path / ("deep" * 20)
    long.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o500)
    done = run_driver("""
handler = lambda *a: None
signal.signal(signal.SIGTERM, handler)
before = dict(os.environ)
start = ExecutorStart("ray:2", config=CONFIG, device=f"TEST {os.getpid()}", start_deadline=START)      # nobody else times on it
e = start.result()
import ray
session = ray._private.worker._global_node.get_session_dir_path()
a, b = facts(e), facts(e, "bench")
batch = e.submit(JOBS + ":sleep", [0.3], kind="compile", deadline=START)
while not e._items.active["compile"]: pass
for _, carrier in e._threads:
    if carrier.kind == "compile": ray.kill(carrier._actor)     # the infrastructure fails under an item
outcomes = [o.status for _, o in batch]
ours = sys.stdout
start.close()
for lock in lock_directory().glob(f"svod-bench-TEST-{os.getpid()}.*"): lock.unlink()
print(json.dumps({
    "description": e.description, "pids": [a["pid"], a["ppid"], b["pid"], b["ppid"]], "nice": b["nice"], "outcomes": outcomes,
    "session": session, "stdout": sys.stdout is sys.__stdout__ is not ours, "handler": signal.getsignal(signal.SIGTERM) is handler,
    "variables": sorted(k for k in os.environ.keys() ^ before.keys()), "initialized": ray.is_initialized()}))
""", TMPDIR=str(long), HOME=str(home), RAY_ADDRESS="192.0.2.1:6379")
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["description"] == "2 workers on an own Ray" and found["outcomes"] == ["ok"] and found["nice"] == NICE
    assert found["stdout"] and found["handler"] and not found["initialized"]
    assert set(found["variables"]) <= {"RAY_AUTH_MODE", "RAY_COLOR_PREFIX", "RAY_USAGE_STATS_ENABLED", "RAY_CLIENT_MODE"}
    assert not Path(found["session"]).parent.exists()
    assert all(wait_until(lambda p=p: is_gone(p)) for p in found["pids"])  # type: ignore[misc]
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_an_own_ray_that_stands_still_is_ended() -> None:
    done = run_driver("""
import signal, time
import svod.tune.workers.ray_executor as r
r.OWN_LEAVE_SECONDS = 0.5
e = make_executor("ray:1", config=CONFIG, start_deadline=START)
assert facts(e)["core"] == 0
directory = e._embedded._directory.path
names = {p: open(f"/proc/{p}/comm").read() for p in r.processes_of(directory)}
[stopped] = [p for p, name in names.items() if "raylet" in name]
os.kill(stopped, signal.SIGSTOP)
e.close()
print(json.dumps(names))
""")
    names = json.loads(done.stdout)
    assert any(name.startswith("ray::") for name in names.values()), "workers, which overwrite their arguments"
    assert all(wait_until(lambda p=p: is_gone(int(p))) for p in names)  # type: ignore[misc]


@pytest.mark.parametrize("embedded", [True, False])
def test_a_place_is_waited_for_in_a_cluster_alone(embedded: bool, monkeypatch: pytest.MonkeyPatch,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    """Only in a cluster an actor waits for a place on a node. In an embedded Ray it may start slowly on a busy machine, but has a place."""
    monkeypatch.setattr(ray_executor, "PENDING_NOTICE", -1.0)
    answers = [[], [], ["ref"]]
    owner: Any = SimpleNamespace(embedded=embedded, closing=False, without_worker=lambda kind: 0.0, patience=1.0,
                                 ray=SimpleNamespace(wait=lambda refs, timeout: (answers.pop(0), refs), get=lambda ref: 7))
    assert ray_executor._RayCarrier(owner, "compile", "worker 1")._await("ref") == 7
    assert caplog.text.count("waiting for a place") == (not embedded)


@pytest.mark.slow
@pytest.mark.parametrize(("up", "why"), [({"c"}, "can bench has started: they take"), (set(), "can compile has started: no")])
def test_an_own_ray_without_a_worker_of_each_kind_by_its_deadline_is_not_ready(up: set[str], why: str) -> None:
    carriers = [SimpleNamespace(name="c", kind="compile"), SimpleNamespace(name="b", kind="bench")]
    fleet: Any = SimpleNamespace(up=up, aside={"c": "no cores"},
                                 is_any_up=lambda kind: any(c.kind == kind and c.name in up for c in carriers))
    owner: Any = SimpleNamespace(_changed=Monitor(), closing=False, embedded=True, _carriers=carriers, _fleet=fleet,
                                 _of_kind=lambda kind: [c for c in carriers if c.kind == kind])
    with pytest.raises(TuneError, match=why):
        ray_executor.RayExecutor.wait_until_ready(owner, 0.05)
    up |= {"c", "b"}
    ray_executor.RayExecutor.wait_until_ready(owner)


@pytest.mark.slow
def test_a_small_shared_memory_and_a_ray_that_is_too_slow() -> None:
    done = run_driver("""
import svod.tune.workers.ray_executor as r
ray = r._import_ray()
import ray._private.utils
ray._private.utils.get_shared_memory_bytes = lambda: 64 << 20
said = []
e = make_executor("ray:1", config=CONFIG, start_deadline=0.05, say=said.append)
assert type(e).__name__ == "LocalExecutor" and len(said) == 1 and "not up after 0.05 s" in said[0], said
assert facts(e)["core"] == 0
e.close()
import time
while ray.is_initialized() or any(t.name == "ray_start" for t in __import__("threading").enumerate()): time.sleep(0.05)
with make_executor("ray:1", config=CONFIG, start_deadline=START) as e:
    assert facts(e)["core"] == 0 and "Ray" in e.description
""")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_a_ray_of_the_users_is_used_and_left_alone() -> None:
    run_driver("""
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
         _node_ip_address="127.0.0.1")
with make_executor("ray:1", config=CONFIG, device="CPU:interpreter", start_deadline=START) as e:
    assert e.description == "1 worker on the Ray already running in this process", e.description
    assert facts(e)["core"] == 0 and facts(e, "bench")["nice"] == NICE
assert ray.is_initialized() and ray.get(ray.put(3)) == 3
ray.shutdown()
""")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a path short enough for sockets, in which no executor of another test removes sessions."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(base))
    yield base
    shutil.rmtree(base)


@pytest.mark.slow
def test_killing_the_driver_leaves_nothing_running_and_the_next_one_clears_up(temporary: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", PRELUDE + """
e = make_executor("ray:1", config=CONFIG, start_deadline=START)
import ray
f = facts(e)
print(json.dumps([f["pid"], f["ppid"], ray._private.worker._global_node.get_session_dir_path()]), flush=True)
e.run(JOBS + ":fault", ["spin native"], kind="compile", deadline=START)
""", ROOT], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    child, server, session = json.loads(driver.stdout.readline())
    driver.kill()
    driver.communicate()
    assert wait_until(lambda: is_gone(child)) and wait_until(lambda: is_gone(server))
    directory = Path(session).parent
    assert directory.parent == temporary and directory.exists()

    def is_cleared() -> bool:
        _remove_dead_sessions(temporary)
        return not directory.exists()
    assert wait_until(is_cleared)


def test_a_directory_that_could_not_be_removed_is_left_to_the_next(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process of Ray's outlives a Ctrl-C and still writes, the owner's file is kept until the directory has no other file."""
    session = _SessionDirectory()
    directory = Path(session.path)
    (directory / "session_x" / "logs").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("svod.tune.workers.ray_executor.shutil.rmtree", lambda path, ignore_errors: None)
        patch.setattr("svod.tune.workers.ray_executor.time.sleep", lambda s: None)
        _remove_dead_sessions(temporary)
        session.remove()
    assert directory.parent == temporary and sorted(p.name for p in directory.iterdir()) == ["owner", "session_x"]
    _remove_dead_sessions(temporary)
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_another_version_at_the_other_end_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("svod.tune.workers.ray_executor.identity", lambda: {**identity(), "LLVM": "1.2.3"})
    with make_executor("ray:1", config=CONFIG, start_deadline=NEVER, say=said.append) as executor:
        assert isinstance(executor, LocalExecutor)
    assert len(said) == 1 and "LLVM 1.2.3 here" in said[0] and "start this program again" in said[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster: a head without cores, and two nodes, of which the second may time. Lost nodes are noticed quickly."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "token")
    patch.setenv("RAY_AUTH_TOKEN", TOKEN)
    patch.setattr(ray_executor, "HEAD_SECONDS", NEVER)      # a busy machine keeps the head from answering
    from ray.cluster_utils import Cluster
    logging.getLogger("ray").setLevel(logging.ERROR)
    store = 80 << 20
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": store, "_system_config": {
        "health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": int(1000 * NEVER),
        "health_check_failure_threshold": 3}}
    c: Any = Cluster(initialize_head=True, head_node_args=head)
    c.first = c.add_node(num_cpus=2, object_store_memory=store)
    c.timer = c.add_node(num_cpus=1, resources={"bench": 1}, object_store_memory=store)
    c.store = store
    yield c
    c.shutdown()
    patch.undo()


@pytest.mark.slow
def test_a_cluster_loses_a_node_and_gains_one(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    with make_executor("ray", cluster.address, config=CONFIG, device=DEVICE, shared_cores=False, start_deadline=NEVER) as executor:
        assert executor.workers("compile") == 3 and executor.workers("bench") == 1 and cluster.address in executor.description
        timer = executor.run(f"{JOBS}:facts", [None], kind="bench", deadline=NEVER)[0].value
        assert timer["nice"] == NICE
        assert wait_until(lambda: len(executor._fleet.up) == 4)  # type: ignore[attr-defined]
        with caplog.at_level(logging.INFO, "svod.tune"):
            batch = executor.submit(f"{JOBS}:sleep", [0.1] * 60, kind="compile", deadline=NEVER)
            done = [next(batch) for _ in range(6)]
            cluster.remove_node(cluster.first)
            cluster.add_node(num_cpus=2, object_store_memory=cluster.store)
            done += list(batch)
            assert sorted(i for i, _ in done) == list(range(60))
            assert {o.status for _, o in done} == {"ok"} and any(o.attempts > 1 for _, o in done)
            assert wait_until(lambda: "joined" in caplog.text and "has left the cluster" in caplog.text)
            assert "times" not in caplog.text, "it only compiled"
    import ray
    assert not ray.is_initialized()
    assert wait_until(lambda: is_gone(timer["pid"]))


def test_the_last_node_that_times_a_target_is_named() -> None:
    wide = host_target()
    other, less = replace(wide, cpu="other"), replace(wide, threads=1)
    carriers = [SimpleNamespace(node=str(i), target=t) for i, t in enumerate((wide, less, other, None))]

    def lost(node: str, left: set[str]) -> str:
        stub = SimpleNamespace(_places=lambda kind: dict.fromkeys(left, 1), _of_kind=lambda kind: carriers, patience=60.0)
        return ray_executor.RayExecutor._lost_with(stub, node)      # type: ignore[arg-type]
    assert lost("0", {"1", "2", "3"}) == f", and no other one times {wide.key}: its search waits 60 s for another"
    assert lost("1", {"0", "2", "3"}) == lost("3", {"0", "1", "2"}) == lost("4", {"0"}) == ""


@pytest.mark.slow
def test_a_node_that_is_lost_for_ever_costs_its_items_a_second_try(cluster: Any) -> None:
    """The workers of the lost node wait for another place, which never comes, and have no items meanwhile."""
    node = cluster.add_node(num_cpus=2, object_store_memory=cluster.store)
    cluster.wait_for_nodes()
    with make_executor("ray", cluster.address, config=CONFIG, device=DEVICE, shared_cores=False, start_deadline=NEVER) as executor:
        assert wait_until(lambda: len(executor._fleet.up) == executor.workers("compile") + 1)  # type: ignore[attr-defined]
        batch = executor.submit(f"{JOBS}:sleep", [0.1] * 60, kind="compile", deadline=NEVER)
        done = [next(batch) for _ in range(6)]
        cluster.remove_node(node)
        done += list(batch)
        assert sorted(i for i, _ in done) == list(range(60)) and {o.status for _, o in done} == {"ok"}
        assert sum(o.attempts > 1 for _, o in done) <= 2 * ray_executor.ITEMS_PER_CALL
        # the others still work, and the next call is answered as well
        assert [o.status for o in executor.run(f"{JOBS}:sleep", [0.0] * 9, kind="compile", deadline=NEVER)] == ["ok"] * 9


@pytest.mark.slow
def test_each_target_is_timed_where_it_is(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that joins with another target is used. If a node leaves and is not replaced, its items wait for a while and then end with a
    message."""
    own = host_target()
    other = replace(own, threads=own.threads + 1)
    with make_executor("ray", cluster.address, config=CONFIG, device=DEVICE, shared_cores=False, start_deadline=NEVER) as executor:
        assert [t.key for t in executor.targets()] == [own.key]
        with pytest.raises(TuneError, match=f"can bench for .*t{other.threads}: those that are left time .*t{own.threads}"):
            executor.submit(f"{JOBS}:echo", [1], kind="bench", deadline=NEVER, target=other)
        node = cluster.add_node(num_cpus=0, resources={"bench": 1}, object_store_memory=cluster.store, env_vars={"SVOD_THREADS": "1"})
        less = replace(own, threads=1)
        assert wait_until(lambda: less.key in {t.key for t in executor.targets()})
        for target, workers in ((own, {"ray-bench-0"}), (less, {"ray-bench-0", "ray-bench-1"})):
            batch = executor.submit(f"{JOBS}:echo", [1] * 5, kind="bench", deadline=NEVER, target=target)
            assert {o.worker for _, o in batch} <= workers
        cluster.remove_node(node)
        monkeypatch.setattr(executor, "patience", 2.0)
        assert wait_until(lambda: executor.run(f"{JOBS}:echo", [1], kind="bench", deadline=NEVER)[0].ok)
        assert wait_until(lambda: [t.key for t in executor.targets()] == [own.key])


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_an_error() -> None:
    done = run_driver("""
from svod.errors import TuneError
try: make_executor("ray:1", "127.0.0.3:1", config=CONFIG)
except TuneError as e: print(e)
""")
    assert "127.0.0.3:1" in done.stdout and "cannot tune on the Ray cluster" in done.stdout


@pytest.mark.slow
def test_actors_that_die_at_once_are_not_tried_for_ever() -> None:
    with make_executor("ray:1", config=CONFIG, start_deadline=NEVER) as executor:
        import ray
        stop = threading.Event()
        carrier: Any = executor._threads[0][1]  # type: ignore[attr-defined]

        def kill() -> None:
            while not stop.is_set():
                if carrier._actor is not None:
                    ray.kill(carrier._actor)
                time.sleep(0.01)
        thread = threading.Thread(target=kill)
        thread.start()
        outcomes = executor.run(f"{JOBS}:sleep", [1.0] * 3, kind="compile", deadline=NEVER)
        stop.set()
        thread.join()
        assert {(o.status, o.kind) for o in outcomes} == {("lost", "no worker")}
        assert any("in a row could not be started" in o.message or "lost under it" in o.message for o in outcomes)


@pytest.mark.slow
def test_interrupting_the_driver_stops_ray() -> None:
    driver = subprocess.Popen([sys.executable, "-c", PRELUDE + """
with make_executor("ray:1", config=CONFIG, start_deadline=START) as e:
    f = facts(e)
    try:
        batch = e.submit(JOBS + ":fault", ["spin native"], kind="compile", deadline=START)
        print(json.dumps([f["pid"], f["ppid"]]), flush=True)
        list(batch)
    except KeyboardInterrupt: print("interrupted", flush=True)
print("closed", flush=True)
""", ROOT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    os.killpg(driver.pid, signal.SIGINT)
    out, err = driver.communicate(timeout=NEVER)
    assert out == "interrupted\nclosed\n" and driver.returncode == 0, err
    assert all(wait_until(lambda p=p: is_gone(p)) for p in pids)  # type: ignore[misc]


@pytest.mark.slow
def test_an_unusable_cluster_is_a_tune_error(monkeypatch: pytest.MonkeyPatch, cluster: Any) -> None:
    monkeypatch.setattr("svod.tune.workers.ray_executor.identity", lambda: {**identity(), "Python": "2.7"})
    with pytest.raises(TuneError, match=r"Python 2\.7 here"):
        make_executor("ray:1", cluster.address, config=CONFIG, start_deadline=NEVER)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_during_rays_start_ends_the_command_and_all_processes(tmp_path: Path, number: signal.Signals, status: int) -> None:
    script = tmp_path / "model.py"
    script.write_text("import numpy as np\nfrom svod.tensor import Tensor\nx = Tensor(np.ones((16, 24), np.float32))\n"
                      "(x @ x.permute(1, 0)).relu().numpy()\n")
    command = subprocess.Popen([sys.executable, "-m", "svod.cli.tune", str(script), "--db", str(tmp_path / "t.db"), "--workers", "ray:1"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def ray_starts() -> bool:
        return any(b"gcs_server" in command_of(pid) for pid in below(command.pid))
    assert wait_until(ray_starts)
    time.sleep(0.5)
    started = {command.pid, *below(command.pid)}
    command.send_signal(number)
    _, said = command.communicate(timeout=NEVER)
    assert command.returncode == status and "Traceback" not in said, said
    assert wait_until(lambda: not any(is_alive(pid) for pid in started))
