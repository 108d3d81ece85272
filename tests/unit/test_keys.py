"""Key files and addresses: what is made with which mode, and what is refused, by a line that says why."""

import os
import stat

import pytest
import zmq

from a3c_mp.errors import ConfigError
from a3c_mp.processes.spawn import root_for_sockets
from a3c_mp.task.endpoint import Endpoint, ipc_folder, read_key

ADDRESS = "tcp://127.0.0.1:50515"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "key"


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_made_once_for_its_owner_alone(path, no_umask):
    key = read_key(path, make=True)
    assert mode_of(path) == 0o600
    assert read_key(path, make=True) == read_key(path) == key
    assert key.public == zmq.curve_public(key.secret)
    assert path.read_bytes() == key.secret + b"\n"


def write(path, content=b"x", mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)


BAD_KEYS = [
    (lambda path: None, r"it cannot be read \(No such file or directory\); copy the file"),
    (lambda path: write(path, b" \n"), "holds no CURVE key of 40 characters; copy the file"),
    (lambda path: write(path, b"x" * 39 + b'"'), "holds no CURVE key of 40"),
    (lambda path: write(path, b"x" * 200), "holds no CURVE key of 40"),
    (lambda path: write(path, b"\xff" * 40), "holds no CURVE key of 40"),
    (lambda path: os.mkfifo(path, 0o600), "holds no CURVE key of 40"),
    (lambda path: write(path, mode=0o640), "other users may use it; chmod go= "),
    (lambda path: write(path, mode=0o604), "other users may use it"),
]


@pytest.mark.parametrize(("make", "why"), BAD_KEYS)
def test_key_files_of_no_use_are_refused(path, make, why):
    make(path)
    with pytest.raises(ConfigError, match=f"^key-file={path}: {why}") as error:
        read_key(path)
    assert "\n" not in str(error.value)


def test_a_key_that_cannot_be_made(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be made \(No such file or directory\); choose another"):
        read_key(tmp_path / "missing" / "key", make=True)


@pytest.mark.parametrize(
    "address", ["50515", "localhost:50515", "udp://a:1", "tcp://:1", "tcp://a:65536", "tcp://a:1/b"]
)
def test_addresses_that_are_no_host_and_port_are_refused(address):
    with pytest.raises(ConfigError, match=r"^listen(=.*)?: is not tcp://HOST:PORT; for instance"):
        Endpoint(binds=(address,)).load_key()


def test_tcp_needs_a_key_which_only_a_node_that_listens_makes(path):
    for end, flag in [(Endpoint(binds=(ADDRESS,)), "listen"), (Endpoint(dials=ADDRESS), "attach-to")]:
        with pytest.raises(ConfigError, match=f"^{flag}={ADDRESS}: TCP needs a key; add --key-file"):
            end.load_key()
    with pytest.raises(ConfigError, match=r"No such file or directory\); copy"):
        Endpoint(dials=ADDRESS, key_file=path).load_key()
    made = Endpoint(binds=(ADDRESS,), key_file=path).load_key()
    assert Endpoint(dials=ADDRESS, key_file=path).load_key() == made


def test_the_folder_of_unix_sockets_is_for_its_owner_alone_and_goes_at_the_end(tmp_path, no_umask, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
    with ipc_folder() as folder:
        assert mode_of(folder) == 0o700
        assert folder.parent != long, "the path of a socket in it is short enough"
    assert not folder.exists()
    monkeypatch.setattr("os.access", lambda path, mode: path == "/dev/shm")
    assert root_for_sockets(77) == "/dev/shm", "the only one that can be written"
    with pytest.raises(
        ConfigError, match=r"^TMPDIR.*: Unix sockets need a folder whose path has at most 7 bytes; none"
    ):
        root_for_sockets(7)
