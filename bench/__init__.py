"""The bench: each case sets the expression a user would write today beside regard's own.

`python -m bench` runs it from the root of the repository; `python -m bench --help` says what can be chosen.
A case is data (`cases.py`), the expressions to beat are plain torch (`torch_expressions.py`), and no number
is shown for a case whose two sides disagree.
"""
