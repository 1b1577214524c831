# SPDX-License-Identifier: Apache-2.0
"""Several processes, as on several hosts, with collectives over a network."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("distributed.py")
SECONDS = 120


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_processes_agree_bit_for_bit_with_the_oracle(processes, devices):
    address = free_address()
    flags = ["-W", "error"]
    started = [
        subprocess.Popen(
            [
                sys.executable,
                *flags,
                str(PROGRAM),
                address,
                *map(str, (processes, process, devices)),
            ],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for i, process in enumerate(started):
        assert process.returncode == 0, outputs[i][-3000:]
        agreed = f"process {i} of {processes}: {processes * devices} devices agree"
        assert agreed in outputs[i]
