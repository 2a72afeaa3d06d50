"""transformers is imported when it is asked for, and its absence is said clearly."""

import importlib.metadata
import subprocess
import sys
import types

import pytest

from regard.integrations import transformers as door


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_regard_does_not_import_transformers():
    code = "import sys, regard, regard.integrations.transformers; assert 'transformers' not in sys.modules"
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_without_transformers_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"expected transformers 5\.24 or newer, got none\. Install it with: pip install 'transformers>=5\.24,<6'"
    with pytest.raises(ImportError, match=message):
        door.register()


@pytest.mark.parametrize("version", ["4.57.1", "5.23.9", "5.9", "0.0", "unknown"])
def test_an_old_transformers_is_refused(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=version))
    with pytest.raises(
        ImportError, match=rf"expected transformers 5\.24 or newer, got {version}\. Install it"
    ):
        door.register()


@pytest.mark.parametrize("version", ["5.24.0", "5.24.0.dev0", "5.100.2", "6.0"])
def test_a_new_one_is_let_through(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=version))
    door._require()


def test_the_installed_one_is_one_that_was_tested():
    assert importlib.metadata.version("transformers").startswith("5.24.")
