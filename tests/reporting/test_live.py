"""The live page: it follows its runs, and gives nothing else away."""

import http.client
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest
import simulate

from steradian.reporting.live import LiveServer
from steradian.watching.sinks import RunFiles

LAYERS = {"conv1.weight": (4, 9), "conv2.weight": (4, 9)}


@pytest.fixture
def serve():
    servers = []

    def start(*runs, **options):
        server = LiveServer(runs, **options)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def write(folder, steps, name="a"):
    options = {"layers": LAYERS, "every_rows": 0, "paths": False}
    return simulate.write(folder, "SGD", name=name, steps=steps, **options)


def ask(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_only_the_page_is_served_and_only_to_this_machine(serve, tmp_path):
    (tmp_path / "secret").write_text("secret")
    run = write(tmp_path / "runs" / "a", 5)
    server = serve(tmp_path / "runs")
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/")[0] == ask(server, "/state")[0] == 200
    others = [
        "/secret",
        "/../secret",
        "//../secret",
        "/%2e%2e/secret",
        f"{tmp_path}/secret",
        "/a/run.json",
        f"{run}/run.json",
    ]
    assert {ask(server, path)[0] for path in others} == {404}
    assert ask(server, "/", host="elsewhere.example")[0] == 403
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


def test_a_folder_is_followed_from_before_its_first_run(serve, tmp_path):
    server = serve(tmp_path, title="Live")
    status, text = ask(server, "/")
    assert status == 200
    assert "at least one run" in text
    RunFiles(tmp_path / "b").describe({"run": "b"})  # has no record yet
    write(tmp_path / "deep" / "a", 5)
    states = [ask(server, "/state")[1]]
    assert "<title>Live · Steradian</title>" in ask(server, "/")[1]
    write(tmp_path / "c", 5, name="c")
    states.append(ask(server, "/state")[1])
    assert states[0] != states[1] == ask(server, "/state")[1]
    with pytest.raises(ValueError, match="runs must be folders"):
        LiveServer([tmp_path / "nothing"])


def test_the_page_loads_again_and_keeps_what_was_chosen(serve, browser, tmp_path):
    write(tmp_path / "a", 20)
    server = serve(tmp_path)
    tab = browser.new_page()
    complaints = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(server.url)
    tab.select_option("#layer", "conv2.weight")
    assert tab.inner_text(".live") == "live, step 19"
    tab.evaluate("scrollTo(0, 700)")
    write(tmp_path / "a", 40)
    tab.wait_for_function("document.querySelector('.live')?.textContent === 'live, step 39'", timeout=30_000)
    tab.wait_for_function("scrollY === 700")
    assert tab.input_value("#layer") == "conv2.weight"
    tab.close()
    assert complaints == []


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    write(tmp_path / "a", 5)
    command = [sys.executable, "-m", "steradian", "report", str(tmp_path), "--live", "--title", "Mine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[2]
        with urllib.request.urlopen(url) as answer:
            assert "<title>Mine · Steradian</title>" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
