"""Random autograd programs: drawn by Hypothesis, rendered to plain torch source, and that source
is what runs, with and without checkpointing. A failing program is therefore already a script.

``model`` says what a program is, ``operators`` and ``strategy`` draw one, ``render`` writes it as
source, ``execute`` runs it, ``compare`` finds where two runs part, ``script`` writes the bug
report, ``machines`` does the same for histories instead of programs.
"""
