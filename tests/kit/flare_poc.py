"""A server and sites of NVIDIA FLARE as they are deployed: provisioned, with mutual TLS, on loopback.

FLARE's own POC mode does the same with fixed ports and notes in the user's home; here the ports are free ones, all is
in one folder, and every process that is started is ended again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ADMIN = "admin@quorumark.test"
BUILDERS = """
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {template_file: [master_template.yml]}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {config_folder: config}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """FOLDER/kits has a startup kit each for `localhost` (the server), the sites and an admin."""

    def __init__(self, folder: Path, sites: int) -> None:
        self.folder, self.sites = folder, [f"site-{n}" for n in range(1, sites + 1)]
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        port = _free_port()
        people = [f"  - {{name: localhost, type: server, org: hospitals, fed_learn_port: {port}, admin_port: {port}}}"]
        people += [f"  - {{name: {site}, type: client, org: hospitals}}" for site in self.sites]
        people += [f"  - {{name: {ADMIN}, type: admin, org: hospitals, role: project_admin}}"]
        project = ["api_version: 3", "name: poc", "description: poc", "participants:", *people, BUILDERS]
        (folder / "project.yml").write_text("\n".join(project))
        command = [sys.executable, "-m", "nvflare.lighter.provision", "-p", str(folder / "project.yml"), "-w"]
        done = subprocess.run([*command, str(folder)], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self.kits = folder / "poc" / "prod_00"
        shared = os.path.join(os.sep, "tmp", "nvflare")  # FLARE's own is one folder for all servers of a machine
        for kept in self.kits.glob("*/local/resources.json.default"):
            kept.write_text(kept.read_text().replace(shared, str(folder / "storage")))

    @property
    def environment(self) -> dict[str, str]:
        """What is installed here, and this source."""
        root = Path(__file__).resolve().parents[2]
        path = f"{root / 'src'}{os.pathsep}{root}"
        return {**os.environ, "HOME": str(self.home), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def local(self, site: str) -> Path:
        return self.kits / site / "local"

    def allow(self, site: str) -> None:
        """The site's operator lets jobs use this project's components."""
        resources = json.loads((self.local(site) / "resources.json.default").read_text())
        resources["class_allow_list"] = [*resources.get("class_allow_list", ()), "quorumark.nvflare."]
        (self.local(site) / "resources.json").write_text(json.dumps(resources))

    def protect(self, site: str, *filters: Mapping[str, Any]) -> None:
        """The site's own privacy policy: these filters run on every result of every job."""
        scope = {"name": "own", "properties": {}, "task_result_filters": list(filters), "task_data_filters": []}
        policy = {"scopes": [scope], "default_scope": "own"}
        (self.local(site) / "privacy.json").write_text(json.dumps(policy))

    def start(self, name: str) -> None:
        kit = self.kits / name
        words = [sys.executable, "-u", "-m"]
        if name == "localhost":
            words += ["nvflare.private.fed.app.server.server_train", "-m", str(kit), "-s", "fed_server.json", "--set"]
        else:
            words += ["nvflare.private.fed.app.client.client_train", "-m", str(kit), "-s", "fed_client.json", "--set"]
            words += [f"uid={name}"]
        words += ["secure_train=true", "config_folder=config", "org=hospitals"]
        with (self.folder / f"{name}.log").open("wb") as said:
            self._running[name] = subprocess.Popen(
                words, cwd=kit, env=self.environment, stdout=said, stderr=said, start_new_session=True
            )

    def start_all(self) -> None:
        for name in ("localhost", *self.sites):
            self.start(name)

    def kill(self, name: str) -> None:
        """The machine of a site fails: all of its processes."""
        running = self._running.pop(name)
        for group in {running.pid, *_groups_below(running.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        running.wait(30)

    def stop(self) -> None:
        for name in list(self._running):
            self.kill(name)

    @contextlib.contextmanager
    def session(self, timeout: float = 120.0) -> Iterator[Any]:
        """An admin's session, once all sites are connected."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        end = time.monotonic() + timeout
        while True:
            try:
                session = new_secure_session(ADMIN, startup_kit_location=str(self.kits / ADMIN), timeout=5.0)
                break
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)
        try:
            while len(session.get_system_info().client_info) < len(self._running) - 1:
                assert time.monotonic() < end, "not all sites have connected"
                time.sleep(0.3)
            yield session
        finally:
            session.close()

    def run(self, session: Any, job: Any, limit: float = 300.0) -> tuple[str, str]:
        """Submits a job, waits for its end, and gives its id and status."""
        job.export_job(str(self.folder / "jobs"))
        name = session.submit_job(str(self.folder / "jobs" / job.name))
        end = time.monotonic() + limit
        while time.monotonic() < end:
            status = str(session.get_job_meta(name).get("status", ""))
            if status.startswith("FINISHED"):
                return name, status
            time.sleep(0.3)
        raise AssertionError(f"job {name} has not ended in {limit} s")


def _groups_below(pid: int) -> set[int]:
    """The process groups of what a process has started: a site starts each job in a session of its own."""
    found, waiting = set[int](), [pid]
    table = [line.split() for line in _ps().splitlines()[1:]]
    while waiting:
        parent = waiting.pop()
        for child, of, group in table:
            if int(of) == parent:
                found.add(int(group))
                waiting.append(int(child))
    return found


def _ps() -> str:
    return subprocess.run(["ps", "-eo", "pid,ppid,pgid"], capture_output=True, text=True, check=True).stdout
