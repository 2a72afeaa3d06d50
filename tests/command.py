"""Running the command line within a test."""

from regard.cli import main


def run(arguments, capfd):
    """(exit code, stdout, stderr) of a command."""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code or 0
    captured = capfd.readouterr()
    return code, captured.out, captured.err
